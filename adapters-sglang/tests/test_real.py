"""The real SGLang, on the CPU: what the stand-in is a copy of. One server for as many tests as can share it."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
from sie_adapters_sglang import plugin
from sie_adapters_sglang._state import TOKEN, state_folder
from sie_adapters_sglang.adapters import EmbeddingAdapter, GenerationAdapter
from sie_core import (
    BatchRequest,
    EngineStartError,
    GenerateRequest,
    InferenceError,
    InputTooLong,
    InvalidInput,
    Item,
    ModelLoading,
    RequestParams,
    Task,
    TransitionContext,
)

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]


def chat(text: str = "hello", **body: Any) -> GenerateRequest:
    messages = [{"role": "user", "content": text}]
    return GenerateRequest("chat", {"messages": messages, "max_tokens": 8, "temperature": 0, **body})


def completion(text: str = "hello", **body: Any) -> GenerateRequest:
    return GenerateRequest("completion", {"prompt": text, "max_tokens": 8, "temperature": 0, **body})


LONG = {"max_tokens": 400, "ignore_eos": True}


async def running(engine: Any) -> int:
    return await asyncio.to_thread(engine.parking.control.busy) or 0


async def until_running(engine: Any, count: int) -> None:
    async with asyncio.timeout(20):
        while await running(engine) != count:
            await asyncio.sleep(0.05)


async def test_generates(engine: Any) -> None:
    answer = await engine.generate(chat(ignore_eos=True))
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 8
    answer = await engine.generate(completion(n=2, logprobs=1))
    assert len(answer["choices"]) == 2
    assert answer["choices"][0]["logprobs"]


async def test_streams_what_it_would_answer(engine: Any) -> None:
    whole = (await engine.generate(completion(ignore_eos=True)))["choices"][0]["text"]
    request = completion(ignore_eos=True, stream_options={"include_usage": True})
    pieces = [json.loads(piece) async for run in engine.stream(request) for piece in run]
    assert "".join(piece["choices"][0]["text"] for piece in pieces if piece["choices"]) == whole
    assert pieces[-1]["choices"] == []
    assert pieces[-1]["usage"]["completion_tokens"] == 8
    pieces = [json.loads(piece) async for run in engine.stream(chat()) for piece in run]
    assert pieces[0]["object"] == "chat.completion.chunk"
    assert pieces[-1]["choices"][0]["finish_reason"]


async def test_many_at_once(engine: Any) -> None:
    answers = await asyncio.gather(*(engine.generate(completion(f"text {i}")) for i in range(12)))
    alone = await engine.generate(completion("text 7"))
    assert answers[7]["choices"][0]["text"] == alone["choices"][0]["text"]


@pytest.mark.parametrize("wrong", [{"max_tokens": 100_000}, {"temperature": "hot"}, {"messages": "none"}])
async def test_what_it_refuses_is_invalid(engine: Any, wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        await engine.generate(chat(**wrong))
    with pytest.raises(InvalidInput):
        async for _ in engine.stream(chat(**wrong)):
            pass


@pytest.mark.parametrize("whole", [True, False])
async def test_a_request_that_is_left_is_aborted(engine: Any, whole: bool) -> None:
    if whole:
        task = asyncio.create_task(engine.generate(completion(**LONG)))
        await until_running(engine, 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    else:
        stream = engine.stream(completion(**LONG))
        await anext(stream)
        await stream.aclose()
    begun = time.monotonic()
    await until_running(engine, 0)
    assert time.monotonic() - begun < 3


async def test_an_abort_is_no_answer(engine: Any) -> None:
    stream = engine.stream(completion(**LONG))
    await anext(stream)
    task = asyncio.create_task(engine.generate(chat(**LONG)))
    await until_running(engine, 2)
    await asyncio.to_thread(engine.parking.control.abort_all)
    with pytest.raises(InferenceError):
        await task
    with pytest.raises(InferenceError):
        async for _ in stream:
            pass


async def test_flushes_when_nothing_runs(engine: Any) -> None:
    """Several at a time as well: they come to it one after the other."""
    control = engine.parking.control
    assert await asyncio.gather(*(asyncio.to_thread(control.flush, 5.0) for _ in range(3))) == [True] * 3
    stream = engine.stream(completion(**LONG))
    await anext(stream)
    assert await asyncio.to_thread(control.flush, 0.1) is False
    await stream.aclose()
    assert await asyncio.to_thread(control.flush, 10.0) is True
    assert (await engine.generate(completion()))["choices"]


async def test_parks_and_wakes_with_the_same_answers(engine: Any) -> None:
    """On a CPU a release frees nothing; the order of the calls is what matters."""
    before = await engine.generate(completion())
    probe = await asyncio.to_thread(engine.probe, TransitionContext())
    for _ in range(3):
        parked = await asyncio.to_thread(plugin.offload_to_host, engine, TransitionContext())
        assert parked is not None
        with pytest.raises(ModelLoading):
            await engine.generate(completion())
        await asyncio.to_thread(plugin.restore_from_host, engine, TransitionContext())
    assert await asyncio.to_thread(engine.probe, TransitionContext()) == probe
    after = await engine.generate(completion())
    assert after["choices"] == before["choices"]


async def test_parks_while_requests_run(engine: Any) -> None:
    import attrs

    pace, engine.parking.pace = engine.parking.pace, attrs.evolve(engine.parking.pace, drain_s=0.01, flush_s=0.02)
    try:
        # More than its cache holds at a time, so that some wait while others run, however quick it is.
        tasks = [asyncio.create_task(engine.generate(completion(**LONG))) for _ in range(60)]
        async with asyncio.timeout(20):
            while not await running(engine):
                await asyncio.sleep(0.01)
        await asyncio.to_thread(plugin.offload_to_host, engine, TransitionContext())
        await asyncio.to_thread(plugin.restore_from_host, engine, TransitionContext())
        ended = await asyncio.gather(*tasks, return_exceptions=True)
    finally:
        engine.parking.pace = pace
    cut = [end for end in ended if isinstance(end, BaseException)]
    assert cut
    assert {type(error) for error in cut} <= {InferenceError, ModelLoading}  # those who came too late found it closed
    for answer in ended:
        if isinstance(answer, dict):
            assert answer["usage"]["completion_tokens"] == LONG["max_tokens"]
    assert (await engine.generate(completion()))["choices"]


async def test_says_what_it_holds(engine: Any) -> None:
    assert engine.usage.tokens == 4096
    (held,) = engine.memory().devices.values()
    assert 200 << 20 < held < 8 << 30


def spent(*processes: psutil.Process) -> float:
    """Seconds of CPU."""
    return float(sum(sum(process.cpu_times()[:2]) for process in processes))


async def test_an_idle_engine_rests(engine: Any) -> None:
    """One that always looks for work takes all it can get, as the process does that runs beside it here.

    How little it takes in the end is a benchmark's to say: what else runs makes every wake-up dearer.
    """
    leader = psutil.Process(engine.pid)
    everybody = [leader, *leader.children(recursive=True)]
    assert await running(engine) == 0
    with psutil.Popen([sys.executable, "-S", "-c", "while True: pass"]) as restless:
        try:
            before = spent(*everybody), spent(restless)
            await asyncio.sleep(5)
            rests, takes = spent(*everybody) - before[0], spent(restless) - before[1]
        finally:
            restless.kill()
    assert rests < takes / 4, (rests, takes)


async def test_keys_are_asked_for_and_not_to_be_seen(engine: Any) -> None:
    leader = psutil.Process(engine.pid)
    keys = engine._running.keys
    for process in [leader, *leader.children(recursive=True)]:
        words = " ".join(process.cmdline())
        assert keys.api not in words
        assert keys.admin not in words
    async with httpx.AsyncClient(base_url=engine.url, trust_env=False) as stranger:
        assert (await stranger.post("/v1/completions", json={"model": "sie", "prompt": "x"})).status_code == 401
        theirs = {"Authorization": f"Bearer {keys.api}"}
        assert (await stranger.post("/release_memory_occupation", json={}, headers=theirs)).status_code == 401
    log = engine._running.process.home.log
    assert log.stat().st_mode & 0o077 == 0
    assert keys.api not in engine._running.process.log_tail(10_000)


async def test_its_children_carry_the_token_or_share_its_session(engine: Any) -> None:
    """Schedulers rename themselves, which may overwrite what the system shows of their environment."""
    from sie_adapters_sglang._state import _processes_of

    leader = psutil.Process(engine.pid)
    token = engine._running.process.home.token
    assert leader.environ()[TOKEN] == token
    expected = {leader.pid, *(child.pid for child in leader.children(recursive=True))}
    assert expected <= {process.pid for process in _processes_of(token, leader.pid)}


async def test_nobody_died_so_far(engine: Any, reported: Any) -> None:
    assert reported.deaths == []
    assert engine._running.process.alive


async def test_a_start_that_fails_shows_the_engines_own_words(real: Any, helpers: Any) -> None:
    model = real.model(context_length=100_000)
    with pytest.raises(EngineStartError, match="context_length") as caught:
        await asyncio.to_thread(GenerationAdapter().load, model, helpers.context(), helpers.Events())
    assert "exit code" in caught.value.message or "signal" in caught.value.message


async def test_embeds(real: Any, helpers: Any) -> None:
    events = helpers.Events()
    adapter = EmbeddingAdapter()
    model = real.model("sglang-embedding")
    engine: Any = await asyncio.to_thread(adapter.load, model, helpers.context(), events)
    try:
        items = [Item(text="hello"), Item(token_ids=(5, 6, 7)), Item(text="a longer text")]
        outputs = await engine.encode(BatchRequest(Task.ENCODE, items))
        assert [output.tokens for output in outputs] == [5, 3, 13]
        assert {output.dense.shape for output in outputs} == {(engine.capabilities.dims["dense"],)}
        (alone,) = await engine.encode(BatchRequest(Task.ENCODE, [items[2]]))
        assert np.allclose(alone.dense, outputs[2].dense, atol=1e-3)
        before = await asyncio.to_thread(engine.probe, TransitionContext())
        await asyncio.to_thread(plugin.offload_to_host, engine, TransitionContext())
        await asyncio.to_thread(plugin.restore_from_host, engine, TransitionContext())
        after = await asyncio.to_thread(engine.probe, TransitionContext())
        assert engine.probe_matches(before, after)
        long = [Item(text="word " * 600)]
        with pytest.raises(InputTooLong):
            await engine.encode(BatchRequest(Task.ENCODE, long))
        (cut,) = await engine.encode(BatchRequest(Task.ENCODE, long, RequestParams(truncate=True)))
        assert cut.tokens == 511
    finally:
        leader = psutil.Process(engine.pid)
        everybody = [leader, *leader.children(recursive=True)]
        await asyncio.to_thread(engine.close, TransitionContext())
    assert len(everybody) > 1
    assert not any(process.is_running() and process.status() != "zombie" for process in everybody)
    assert list(state_folder().iterdir()) == []
    assert events.deaths == []
