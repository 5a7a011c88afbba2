"""The fake engine: does what its options and fault points say, and catches a core that breaks the protocol."""

from __future__ import annotations

import asyncio
import json
import threading
import timeit
from collections.abc import Callable, Iterator
from typing import Any, Literal

import numpy as np
import pytest
from sie_core import (
    AdmissionReserve,
    BatchRequest,
    Declined,
    DeviceNeed,
    DeviceOutOfMemory,
    EngineDied,
    EngineStartError,
    GatedModel,
    GenerateRequest,
    InferenceError,
    InputTooLong,
    InvalidInput,
    Item,
    LoadError,
    ModelSpec,
    RequestParams,
    Task,
    TransitionCancelled,
    TransitionContext,
    Unsupported,
)
from sie_core.plugins import Plugins
from sie_testing import (
    FakeAdapter,
    FakeEngine,
    FakeOptions,
    FakeStreamAdapter,
    FakeStreamEngine,
    FaultPoints,
    expected_vector,
    make_context,
    reserve_for,
    run,
)

MIB = 1 << 20


class Events:
    def __init__(self) -> None:
        self.deaths: list[str] = []

    def died(self, reason: str, details: str = "") -> None:
        self.deaths.append(reason)

    def request_growth(self, account: str, nbytes: int) -> bool:
        return nbytes < 100


@pytest.fixture(autouse=True)
def clean(fault_points: Callable[[str], FaultPoints]) -> Iterator[None]:
    yield


def spec(**options: Any) -> ModelSpec:
    return ModelSpec("m", "fake", options=FakeOptions(**options))


def load(events: Events | None = None, ctx: TransitionContext | None = None, **options: Any) -> FakeEngine:
    model = spec(**options)
    engine = FakeAdapter().load(model, ctx or make_context(reserve_for(model)), events or Events())
    assert isinstance(engine, FakeEngine)
    return engine


def texts(*words: str, **params: Any) -> BatchRequest:
    return BatchRequest(Task.ENCODE, [Item(text=word) for word in words], RequestParams(**params))


def encode(engine: FakeEngine, *words: str, **params: Any) -> list[Any]:
    return list(engine.run(engine.prepare(texts(*words, **params))))


# --- answers ---


def test_an_answer_tells_whose_it_is() -> None:
    one, two = encode(load(), "one", "two words")
    assert np.array_equal(one.dense, expected_vector("one"))
    assert np.array_equal(two.dense, expected_vector("two words"))
    assert (one.tokens, two.tokens) == (1, 2)
    assert np.linalg.norm(one.dense) == pytest.approx(1.0)
    assert not np.array_equal(one.dense, two.dense)


def test_models_with_different_salts_and_parameters_answer_differently() -> None:
    plain = encode(load(), "text")[0].dense
    salted = encode(load(salt="other"), "text")[0].dense
    query = encode(load(), "text", is_query=True)[0].dense
    led = encode(load(), "text", instruction="find")[0].dense
    assert len({vector.tobytes() for vector in (plain, salted, query, led)}) == 4
    assert np.array_equal(salted, expected_vector("text", salt="other"))
    assert np.array_equal(query, expected_vector("text", params=RequestParams(is_query=True)))


def test_shorter_vectors_are_cut_and_normalised_where_they_are_on_offer() -> None:
    engine = load(dims=8, matryoshka=(4,))
    short = encode(engine, "text", dimensions=4)[0].dense
    full = encode(engine, "text")[0].dense
    assert short.shape == (4,)
    assert np.linalg.norm(short) == pytest.approx(1.0)
    assert np.allclose(short / short[0], full[:4] / full[0], rtol=1e-5)
    for dimensions in (3, 9, 0):
        with pytest.raises(Unsupported):
            encode(engine, "text", dimensions=dimensions)
    assert encode(load(dims=8, matryoshka=None), "text", dimensions=3)[0].dense.shape == (3,)


def test_other_outputs_are_there_when_offered() -> None:
    engine = load(outputs=("dense", "sparse", "multivector"))
    output = encode(engine, "b a b", output_types=("sparse", "multivector"))[0]
    assert output.dense is None
    assert output.multivector.shape == (3, 8)
    assert sorted(output.sparse.values) == [1.0, 2.0]
    assert list(output.sparse.indices) == sorted(output.sparse.indices)
    with pytest.raises(Unsupported):
        encode(load(), "text", output_types=("sparse",))


def test_token_ids_count_as_words() -> None:
    (prepared,) = load().prepare(BatchRequest(Task.ENCODE, [Item(token_ids=(7, 8, 9))]))
    assert prepared.tokens == 3


def test_bad_items_are_named() -> None:
    engine = load(max_length=3)
    with pytest.raises(InvalidInput) as empty:
        engine.prepare(texts("fine", "  "))
    assert empty.value.index == 1
    with pytest.raises(InputTooLong) as long:
        engine.prepare(texts("fine", "a b c d"))
    assert (long.value.index, long.value.tokens, long.value.limit) == (1, 4, 3)
    (cut,) = engine.prepare(texts("a b c d", truncate=True))
    assert cut.tokens == 3
    assert np.array_equal(engine.run([cut])[0].dense, encode(engine, "a b c")[0].dense)
    with pytest.raises(Unsupported):
        engine.prepare(BatchRequest(Task.SCORE, [Item(text="fine")]))


def test_texts_that_answer_nan() -> None:
    bad, good = encode(load(non_finite=("bad",)), "bad", "good")
    assert np.isnan(bad.dense).all()
    assert np.isfinite(good.dense).all()


def test_it_is_fast_enough_to_measure_a_server_with() -> None:
    engine = load(vector="constant", dims=384)
    request = texts("a text of some six words")
    best = min(timeit.repeat(lambda: engine.run(engine.prepare(request)), number=300, repeat=5)) / 300
    assert best < 50e-6


# --- admission and memory ---


def test_the_reserve_is_what_the_options_say() -> None:
    model = spec(
        weights_bytes=5, want_bytes=9, context_bytes=3, headroom_bytes=2, ranks=2, host_bytes=7, host_load_bytes=8
    )
    need = DeviceNeed(min_bytes=5, want_bytes=9, context_bytes=3, headroom_bytes=2)
    assert reserve_for(model) == AdmissionReserve(ranks=(need, need), host_bytes=7, host_load_bytes=8)
    reserve = reserve_for(ModelSpec("m", "fake", options=FakeOptions(headroom_bytes=2), runtime_headroom=50))
    assert reserve is not None
    assert reserve.ranks[0].headroom_bytes == 50
    assert reserve_for(ModelSpec("m", "theirs")) is None
    assert reserve_for(ModelSpec("m", "fake", options={"weights_bytes": 6})) is not None


def test_it_takes_what_it_wants_where_it_is_granted() -> None:
    assert load(weights_bytes=5, want_bytes=9, context_bytes=3).memory().devices == {"cpu": 12}
    tight = make_context(AdmissionReserve(ranks=(DeviceNeed(min_bytes=6, context_bytes=3),)))
    assert load(ctx=tight, weights_bytes=5, want_bytes=9, context_bytes=3).memory().devices == {"cpu": 9}


def test_it_lies_about_memory_when_told_to() -> None:
    assert load(weights_bytes=100, realised=1.5).memory().devices == {"cpu": 150}
    assert load(weights_bytes=100, realised=None).memory().devices == {"cpu": None}


def test_a_park_that_frees_a_third_shows() -> None:
    engine = load(weights_bytes=300, context_bytes=10, freed=1 / 3)
    assert engine.offload(TransitionContext()).retained == {"cpu": 10}
    assert engine.memory().devices == {"cpu": 210}


def test_growth_is_the_core_s_to_grant() -> None:
    engine = load()
    assert engine.grow("cpu", 99)
    assert not engine.grow("cpu", 100)


# --- faults ---


def test_loading_fails_as_often_as_told() -> None:
    model = spec(fail_load="EngineStartError", fail_load_times=2)
    adapter, ctx = FakeAdapter(), TransitionContext()
    for _ in range(2):
        with pytest.raises(EngineStartError):
            adapter.load(model, ctx, Events())
    assert adapter.load(model, ctx, Events())
    with pytest.raises(GatedModel):
        load(fail_load="GatedModel")
    with pytest.raises(OSError, match="as configured"):
        load(fail_load="OSError")
    with pytest.raises(LoadError):
        load(fail_load="Unauthorized")
    with pytest.raises(ValueError, match="no exception 'Nonsense'"):
        load(fail_load="Nonsense")


@pytest.mark.parametrize(
    "name", ["NeverFits", "MissingAdapter", "DeviceOutOfMemory", "HostOutOfMemory", "MissingDependency"]
)
def test_every_load_failure_can_be_had_by_name(name: str) -> None:
    import sie_core

    with pytest.raises(getattr(sie_core, name)):
        load(fail_load=name)


def test_memory_runs_out_at_load_and_in_a_batch() -> None:
    model = spec(oom_at_load=1, oom_over_tokens=2)
    adapter = FakeAdapter()
    with pytest.raises(DeviceOutOfMemory) as caught:
        adapter.load(model, make_context(account="cuda:0"), Events())
    assert caught.value.account == "cuda:0"
    engine = adapter.load(model, TransitionContext(), Events())
    assert isinstance(engine, FakeEngine)
    with pytest.raises(DeviceOutOfMemory):
        encode(engine, "a b", "c")
    assert len(encode(engine, "a b")) == 1


def test_it_dies_when_told_and_says_so() -> None:
    events = Events()
    engine = load(events, die_after=1)
    encode(engine, "a")
    with pytest.raises(EngineDied):
        encode(engine, "a")
    assert events.deaths == ["died after 1 batches, as configured"]
    for call in (engine.offload, engine.restore):
        with pytest.raises(EngineDied):
            call(TransitionContext())
    assert not any(engine.memory().devices.values())


def test_loading_is_called_off_between_its_steps() -> None:
    async def scene() -> float:
        from sie_testing import VirtualWorker

        ctx = TransitionContext(cancelled=threading.Event())
        loop = asyncio.get_running_loop()
        loop.call_later(4.0, ctx.cancelled.set)
        with pytest.raises(TransitionCancelled):
            await VirtualWorker("m").call(FakeAdapter().load, spec(load_s=40.0), ctx, Events())
        return loop.time()

    assert run(scene()) == 5.0


def test_a_hang_lasts_until_the_faults_are_reset() -> None:
    thread = threading.Thread(target=load, kwargs={"hang": "load"})
    thread.start()
    FaultPoints.of("m")
    thread.join(0.05)
    assert thread.is_alive()
    FaultPoints.reset_all()
    thread.join(5.0)
    assert not thread.is_alive()


@pytest.mark.parametrize("point", ["prepare", "run", "probe", "memory", "offload", "restore", "close", "reserve"])
def test_every_point_can_fail(point: str) -> None:
    engine, ctx = load(), TransitionContext()
    prepared = engine.prepare(texts("a"))
    calls: dict[str, Callable[[], Any]] = {
        "prepare": lambda: engine.prepare(texts("a")),
        "run": lambda: engine.run(prepared),
        "probe": lambda: engine.probe(ctx),
        "memory": engine.memory,
        "offload": lambda: engine.offload(ctx),
        "restore": lambda: engine.restore(ctx),
        "close": lambda: engine.close(ctx),
        "reserve": lambda: reserve_for(engine.model),
    }
    FaultPoints.of("m").fail(point, ZeroDivisionError, times=1)
    with pytest.raises(ZeroDivisionError):
        calls[point]()
    calls[point]()


# --- a core that breaks the protocol ---


def test_two_calls_at_once_are_caught() -> None:
    engine = load()
    latch = FaultPoints.of("m").hold("run")
    prepared = engine.prepare(texts("a"))
    thread = threading.Thread(target=engine.run, args=(prepared,))
    thread.start()
    asyncio.run(latch.arrival())
    for call in (lambda: engine.run(prepared), lambda: engine.close(TransitionContext())):
        with pytest.raises(RuntimeError, match="while another call runs"):
            call()
    latch.release()
    thread.join(5.0)
    assert engine.run(prepared)


def test_running_a_parked_or_closed_engine_is_caught() -> None:
    engine, ctx = load(), TransitionContext()
    engine.offload(ctx)
    assert engine.parked
    with pytest.raises(InferenceError, match="parked"):
        encode(engine, "a")
    engine.restore(ctx)
    encode(engine, "a")
    engine.close(ctx)
    with pytest.raises(EngineDied, match="closed"):
        encode(engine, "a")


# --- park and wake ---


def test_it_declines_with_its_reason() -> None:
    assert load(decline="it has graphs").host_offload_bytes() == Declined("it has graphs")
    assert load(weights_bytes=77).host_offload_bytes() == 77
    assert load(weights_bytes=77, offload_bytes=50).host_offload_bytes() == 50


def test_weights_that_come_back_damaged_change_probe_and_answers() -> None:
    engine, ctx = load(corrupt_restore=True), TransitionContext()
    before, answer = engine.probe(ctx), encode(engine, "a")[0].dense
    engine.offload(ctx)
    engine.restore(ctx)
    after = engine.probe(ctx)
    assert before is not None
    assert after is not None
    assert not engine.probe_matches(before, after)
    assert not np.array_equal(encode(engine, "a")[0].dense, answer)


# --- the stream engine ---


def stream(**options: Any) -> FakeStreamEngine:
    engine = FakeStreamAdapter().load(spec(**options), TransitionContext(), Events())
    assert isinstance(engine, FakeStreamEngine)
    return engine


def test_a_stream_engine_runs_requests_side_by_side_and_aborts_what_is_cancelled() -> None:
    async def scene() -> None:
        engine = stream(run_s=1.0)
        loop = asyncio.get_running_loop()
        one, two = (asyncio.ensure_future(engine.encode(texts(text))) for text in ("one", "two"))
        await asyncio.sleep(0.5)
        assert engine.running == 2
        two.cancel()
        (output,) = await one
        assert loop.time() == 1.0
        assert np.array_equal(output.dense, expected_vector("one"))
        assert (engine.running, engine.aborted) == (0, 1)

    run(scene())


def asked(kind: Literal["chat", "completion"] = "completion", prompt: Any = "a b c", **body: Any) -> GenerateRequest:
    said = {"prompt": prompt} if kind == "completion" else {"messages": [{"role": "user", "content": prompt}]}
    return GenerateRequest(kind, {**said, **body})


async def pieces(engine: FakeStreamEngine, request: GenerateRequest) -> list[dict[str, Any]]:
    return [json.loads(piece) async for piece in engine.stream(request)]


def test_a_stream_engine_generates_the_words_of_its_prompt_from_the_last_to_the_first() -> None:
    async def scene() -> None:
        engine = stream(token_s=1.0)
        whole = await engine.generate(asked())
        assert asyncio.get_running_loop().time() == 3.0
        assert whole["choices"][0]["text"] == "c b a"
        assert whole["usage"] == {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}
        got = await pieces(engine, asked(stream_options={"include_usage": True}))
        assert [piece["choices"][0]["text"] for piece in got[:-1]] == ["c", " b", " a", ""]
        assert [piece["choices"][0]["finish_reason"] for piece in got[:-1]] == [None, None, None, "stop"]
        assert got[-1]["choices"] == []
        assert got[-1]["usage"] == whole["usage"]
        assert (await pieces(engine, asked()))[-1]["choices"] != []

    run(scene())


def test_a_stream_engine_knows_n_and_stop_and_a_limit_and_tools() -> None:
    async def scene() -> None:
        engine = stream()
        both = (await engine.generate(asked("chat", n=2, max_tokens=2)))["choices"]
        assert [choice["message"]["content"] for choice in both] == ["c b", "c b"]
        assert [choice["finish_reason"] for choice in both] == ["length", "length"]
        assert (await engine.generate(asked(stop=["b"])))["choices"][0]["text"] == "c"
        tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
        called = (await engine.generate(asked("chat", tools=[tool], tool_choice="required")))["choices"][0]
        assert called["message"]["tool_calls"][0]["function"]["name"] == "look"
        assert called["finish_reason"] == "tool_calls"

    run(scene())


def test_a_stream_that_is_closed_half_way_counts_as_aborted() -> None:
    async def scene() -> None:
        engine = stream()
        answer = engine.stream(asked())
        await anext(answer)
        assert (engine.running, engine.aborted, engine.emitted) == (1, 0, 1)
        await answer.aclose()
        assert (engine.running, engine.aborted, engine.emitted) == (0, 1, 1)
        assert engine.faults.hits("abort") == 1

    run(scene())


def test_a_stream_breaks_off_where_a_fault_says_so(fault_points: Callable[[str], FaultPoints]) -> None:
    async def scene() -> None:
        engine = stream()
        engine.faults.fail("piece", InferenceError("enough"), after=2)
        got = []
        with pytest.raises(InferenceError, match="enough"):
            async for piece in engine.stream(asked()):
                got.append(piece)
        assert len(got) == 2

    run(scene())


# --- as an installed plugin ---


def test_the_package_is_a_plugin_that_implements_all_its_hooks() -> None:
    plugins = Plugins.load()
    (info,) = [each for each in plugins.info() if each.name == "testing"]
    assert (info.state, info.distribution) == ("loaded", "sie-testing")
    assert info.adapters == ("fake", "fake-stream")
    assert set(info.hooks) == {
        "register_adapters", "admission_reserve", "host_offload_bytes", "offload_to_host", "restore_from_host",
    }  # fmt: skip
    engine, ctx = load(weights_bytes=77), TransitionContext()
    reserve = plugins.ask("admission_reserve", owner="testing", model=engine.model, devices=[])
    assert reserve.ranks == (DeviceNeed(77, 77),)
    assert plugins.ask("host_offload_bytes", owner="testing", engine=engine) == 77
    assert plugins.ask("offload_to_host", owner="testing", engine=engine, ctx=ctx).host_bytes == 77
    assert plugins.ask("restore_from_host", owner="testing", engine=engine, ctx=ctx).host_bytes == 0
