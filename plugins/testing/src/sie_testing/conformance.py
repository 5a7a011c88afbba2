"""The tests that every adapter has to pass. Inherit, say which adapter and which model, and run pytest::

from sie_testing import AdapterConformance

class TestMyAdapter(AdapterConformance):
    @pytest.fixture
    def adapter(self): return MyAdapter()

    @pytest.fixture
    def model(self): return ModelSpec("m", "my-encoder", options=MyOptions(...), source=...)

    @pytest.fixture
    def plugin(self): return my_package.plugin
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import attrs
import numpy as np
import pytest
from numpy.typing import NDArray
from sie_core import (
    Adapter,
    AdmissionReserve,
    BatchEngine,
    BatchRequest,
    Declined,
    Device,
    DeviceGrant,
    DeviceView,
    EncodeOutput,
    EncodeParams,
    Engine,
    Grant,
    HostOffload,
    HostResidue,
    InputTooLong,
    InvalidInput,
    Item,
    LoadError,
    ModelSpec,
    Output,
    Task,
    TransitionCancelled,
    TransitionContext,
    Unsupported,
)

__all__ = ["AdapterConformance", "make_context"]

_AMPLE = 1 << 40


class _Events:
    """An engine's way to the core; there is none here."""

    def died(self, reason: str) -> None:
        raise AssertionError(f"the engine says that it died: {reason}")

    def request_growth(self, account: str, nbytes: int) -> bool:
        return False


def make_context(
    reserve: AdmissionReserve | None = None,
    device: Device | None = None,
    *,
    account: str = "cpu",
    progress: Callable[[float, str], None] = lambda fraction, note: None,
) -> TransitionContext:
    """A context as the core would make it: the reserve granted in full, on ``device`` or on the account of that name.

    Host buffers are plain memory; device buffers come from ``device``, if it is an emulated one.
    """
    name = device.name if device is not None else account
    grants: dict[str, DeviceGrant] = {}
    for rank, need in enumerate(reserve.ranks if reserve is not None else ()):
        static = max(need.min_bytes, need.want_bytes) + need.context_bytes
        total = device.total() if device is not None else _AMPLE
        grants[need.device or (name if rank == 0 else f"{name}+{rank}")] = DeviceGrant(
            static_bytes=static, headroom_bytes=need.headroom_bytes, free_bytes=total
        )
    ctx = TransitionContext(
        grant=Grant(grants or {name: DeviceGrant(static_bytes=0)}, host_bytes=_AMPLE),
        host_buffer=lambda nbytes: memoryview(bytearray(nbytes)),
        progress=progress,
    )
    if device is not None and device.kind == "emulated":
        emulated = device
        ctx.device_buffer = lambda _, nbytes: emulated.allocate(nbytes)
    return ctx


def _call_hook(plugin: Any, hook: str, **arguments: Any) -> Any:
    """What the plugin module's hook answers; ``None`` without one, as the core would see it."""
    function = getattr(plugin, hook, None)
    if function is None:
        return None
    wanted = inspect.signature(function).parameters
    return function(**{name: value for name, value in arguments.items() if name in wanted})


class AdapterConformance:
    """Inherit it, override ``adapter``, ``model`` and ``plugin``, and whatever else differs."""

    _shared: ClassVar[tuple[BatchEngine, TransitionContext]]

    # --- what an author overrides ---

    @pytest.fixture
    def adapter(self) -> Adapter:
        """The adapter under test."""
        raise NotImplementedError("override the fixture `adapter`")

    @pytest.fixture
    def model(self) -> ModelSpec:
        """A small model, with bound options."""
        raise NotImplementedError("override the fixture `model`")

    @pytest.fixture
    def plugin(self) -> Any:
        """The plugin module (or object) that implements the hooks."""
        raise NotImplementedError("override the fixture `plugin`")

    @pytest.fixture
    def device(self) -> Device | None:
        """The device to load on; ``None``: an account named as the model's ``device`` says, or ``cpu``."""
        return None

    @pytest.fixture
    def missing_model(self) -> ModelSpec | None:
        """A model whose files are not there; ``None``: the adapter reads no files."""
        return None

    @pytest.fixture
    def texts(self) -> Sequence[str]:
        """Texts of different lengths that the model tells apart."""
        return (
            "a short text",
            "another",
            "a text that is rather longer than the two that came before it",
            "the last one",
        )

    @pytest.fixture
    def tolerance(self) -> float:
        """How far a text's vector may move with the batch that it is in (largest absolute difference)."""
        return 1e-5

    # --- what the tests use ---

    @pytest.fixture
    def reserve(self, plugin: Any, model: ModelSpec, device: Device | None) -> AdmissionReserve:
        total = device.total() if device is not None else _AMPLE
        name = device.name if device is not None else model.device or "cpu"
        kind = device.kind if device is not None else "cpu"
        view = DeviceView(name, kind, total=total, free=total, available=total)
        reserve = _call_hook(plugin, "admission_reserve", model=model, devices=[view])
        assert isinstance(reserve, AdmissionReserve), "admission_reserve must answer for the adapter's own model"
        return reserve

    @pytest.fixture
    def context(
        self, reserve: AdmissionReserve, device: Device | None, model: ModelSpec
    ) -> Callable[..., TransitionContext]:
        def make(**more: Any) -> TransitionContext:
            return make_context(reserve, device, account=model.device or "cpu", **more)

        return make

    @pytest.fixture
    def fresh(
        self, adapter: Adapter, model: ModelSpec, context: Callable[..., TransitionContext]
    ) -> Iterator[BatchEngine]:
        """An engine of the test's own."""
        engine = adapter.load(model, context(), _Events())
        assert isinstance(engine, BatchEngine)
        yield engine
        engine.close(context())

    @pytest.fixture
    def engine(self, adapter: Adapter, model: ModelSpec, context: Callable[..., TransitionContext]) -> BatchEngine:
        """An engine that the tests of a class share, for what leaves no trace: loading may take seconds."""
        cls = type(self)
        if "_shared" not in vars(cls):
            engine = adapter.load(model, context(), _Events())
            assert isinstance(engine, BatchEngine)
            cls._shared = (engine, context())
        return cls._shared[0]

    @classmethod
    def teardown_class(cls) -> None:
        """Close the shared engine."""
        if "_shared" in vars(cls):
            engine, ctx = cls._shared
            engine.close(ctx)
            del cls._shared

    # --- options and admission ---

    def test_options_are_a_typed_attrs_class(self, adapter: Adapter, model: ModelSpec) -> None:
        assert attrs.has(adapter.options), "options must be an attrs class"
        untyped = [each.name for each in attrs.fields(adapter.options) if each.type is None]
        assert not untyped, "every option needs a type"
        assert isinstance(model.options, adapter.options)

    def test_admission_is_answered_for_its_own_models_only(self, reserve: AdmissionReserve, plugin: Any) -> None:
        assert reserve.ranks, "an engine spans one device at least"
        for need in reserve.ranks:
            assert need.min_bytes > 0
            assert need.context_bytes >= 0
            assert need.headroom_bytes >= 0
        stranger = ModelSpec("stranger", "an-adapter-of-somebody-else")
        assert _call_hook(plugin, "admission_reserve", model=stranger, devices=[]) is None

    def test_what_it_holds_was_reserved(self, engine: BatchEngine, reserve: AdmissionReserve) -> None:
        promised = sum(max(need.min_bytes, need.want_bytes) + need.context_bytes for need in reserve.ranks)
        realised = sum(nbytes or 0 for nbytes in engine.memory().devices.values())
        assert realised <= promised

    def test_description_agrees_with_the_engine(self, adapter: Adapter, model: ModelSpec, engine: BatchEngine) -> None:
        described = adapter.describe(model)
        assert described is None or described == engine.capabilities

    # --- loading and closing ---

    def test_memory_is_reported_on_the_granted_devices(
        self, engine: BatchEngine, context: Callable[..., TransitionContext]
    ) -> None:
        granted = context().grant.devices
        report = engine.memory()
        assert set(engine.devices) == set(report.devices) == set(granted)
        assert all(nbytes is None or nbytes > 0 for nbytes in report.devices.values())
        assert report.host >= 0

    def test_close_gives_everything_back_and_may_be_repeated(
        self, fresh: BatchEngine, context: Callable[..., TransitionContext]
    ) -> None:
        fresh.close(context())
        fresh.close(context())
        report = fresh.memory()
        assert not any(report.devices.values())
        assert report.host == 0

    def test_a_model_loads_again_after_it_was_closed(
        self,
        adapter: Adapter,
        model: ModelSpec,
        context: Callable[..., TransitionContext],
        engine: BatchEngine,
        texts: Sequence[str],
    ) -> None:
        again = adapter.load(model, context(), _Events())
        assert isinstance(again, BatchEngine)
        assert again is not engine
        assert_same(encode(again, texts), encode(engine, texts))
        again.close(context())
        assert any(nbytes is None or nbytes > 0 for nbytes in engine.memory().devices.values())

    def test_progress_goes_forward(
        self, adapter: Adapter, model: ModelSpec, context: Callable[..., TransitionContext]
    ) -> None:
        seen: list[float] = []
        engine = adapter.load(model, context(progress=lambda fraction, note: seen.append(fraction)), _Events())
        engine.close(context())
        assert seen == sorted(seen)
        assert all(0.0 <= fraction <= 1.0 for fraction in seen)

    def test_a_load_that_was_called_off_ends_as_cancelled_or_not_at_all(
        self, adapter: Adapter, model: ModelSpec, context: Callable[..., TransitionContext]
    ) -> None:
        ctx = context()
        ctx.cancelled.set()
        try:
            engine = adapter.load(model, ctx, _Events())
        except TransitionCancelled:
            return
        engine.close(context())

    def test_missing_files_are_a_permanent_load_error(
        self, adapter: Adapter, missing_model: ModelSpec | None, context: Callable[..., TransitionContext]
    ) -> None:
        if missing_model is None:
            pytest.skip("the adapter reads no files")
        with pytest.raises(LoadError) as caught:
            adapter.load(missing_model, context(), _Events())
        assert caught.value.permanent

    # --- inference ---

    def test_one_finite_output_an_item(self, engine: BatchEngine, texts: Sequence[str]) -> None:
        outputs = encode(engine, texts)
        assert len(outputs) == len(texts)
        for output in outputs:
            assert output.tokens > 0
            vector = dense_of(output)
            assert vector.dtype == np.float32
            assert vector.shape == (engine.capabilities.dims["dense"],)
            assert np.isfinite(vector).all()

    def test_outputs_keep_the_order_of_the_items(
        self, engine: BatchEngine, texts: Sequence[str], tolerance: float
    ) -> None:
        forward = [dense_of(each) for each in encode(engine, texts)]
        # Turned by one, not reversed: an engine that reverses every batch would pass that.
        turned = [dense_of(each) for each in encode(engine, [*texts[1:], texts[0]])]
        for there, back in zip(forward, [turned[-1], *turned[:-1]], strict=True):
            assert np.abs(there - back).max() <= tolerance
        apart = min(np.abs(a - b).max() for i, a in enumerate(forward) for b in forward[:i])
        assert apart > tolerance, "the texts must be told apart for this test to mean anything"

    def test_an_answer_does_not_depend_on_the_batch(
        self, engine: BatchEngine, texts: Sequence[str], tolerance: float
    ) -> None:
        together = encode(engine, texts)
        for text, output in zip(texts, together, strict=True):
            alone = encode(engine, [text])[0]
            assert alone.tokens == output.tokens
            assert np.abs(dense_of(alone) - dense_of(output)).max() <= tolerance

    def test_items_of_different_requests_share_a_batch(
        self, engine: BatchEngine, texts: Sequence[str], tolerance: float
    ) -> None:
        requests = [BatchRequest(Task.ENCODE, [Item(text=text)]) for text in texts]
        mixed = engine.run([one for request in requests for one in engine.prepare(request)])
        for output, expected in zip(mixed, encode(engine, texts), strict=True):
            assert np.abs(dense_of(output) - dense_of(expected)).max() <= tolerance

    def test_prepare_is_safe_on_many_threads_while_a_batch_runs(
        self, engine: BatchEngine, texts: Sequence[str]
    ) -> None:
        request = BatchRequest(Task.ENCODE, [Item(text=text) for text in texts])
        expected = [one.tokens for one in engine.prepare(request)]
        with ThreadPoolExecutor(8) as pool:
            runs = pool.submit(lambda: [engine.run(engine.prepare(request)) for _ in range(3)])
            counted = [pool.submit(lambda: [one.tokens for one in engine.prepare(request)]) for _ in range(32)]
            assert all(future.result() == expected for future in counted)
            assert all(len(outputs) == len(texts) for outputs in runs.result())

    # --- errors ---

    def test_an_item_without_content_is_invalid_and_named(self, engine: BatchEngine) -> None:
        with pytest.raises(InvalidInput) as caught:
            engine.prepare(BatchRequest(Task.ENCODE, [Item(text="fine"), Item()]))
        assert caught.value.index == 1

    def test_a_text_that_is_too_long_is_refused_or_truncated_as_asked(self, engine: BatchEngine) -> None:
        limit = engine.capabilities.max_sequence_length
        if limit is None:
            pytest.skip("the model has no longest text")
        items = [Item(text="fine"), Item(text="word " * (limit + 8))]
        with pytest.raises(InputTooLong) as caught:
            engine.prepare(BatchRequest(Task.ENCODE, items, EncodeParams(truncate=False)))
        assert caught.value.index == 1
        assert caught.value.limit <= limit < caught.value.tokens
        prepared = engine.prepare(BatchRequest(Task.ENCODE, items, EncodeParams(truncate=True)))
        assert 0 < prepared[1].tokens <= limit

    def test_what_the_model_cannot_do_is_unsupported(self, engine: BatchEngine) -> None:
        with pytest.raises(Unsupported):
            engine.prepare(BatchRequest(Task.ENCODE, [Item(text="fine")], EncodeParams(output_types=("smell",))))

    # --- the wake check, park and wake ---

    def test_the_probe_answers_the_same_every_time(
        self, engine: BatchEngine, context: Callable[..., TransitionContext]
    ) -> None:
        first, second = engine.probe(context()), engine.probe(context())
        if first is None:
            assert second is None
            return
        assert second is not None
        assert engine.probe_matches(first, second)

    def test_the_hooks_leave_other_engines_alone(self, plugin: Any) -> None:
        answer = _call_hook(plugin, "host_offload_bytes", engine=Engine())
        assert answer is None or isinstance(answer, Declined)

    def test_a_woken_engine_answers_bit_for_bit_as_before(
        self, fresh: BatchEngine, plugin: Any, texts: Sequence[str], context: Callable[..., TransitionContext]
    ) -> None:
        promised = _parkable(plugin, fresh)
        before, held = encode(fresh, texts), fresh.memory().devices
        for _ in range(2):
            assert _park(plugin, fresh, context()).host_bytes <= promised
            assert isinstance(_call_hook(plugin, "restore_from_host", engine=fresh, ctx=context()), HostResidue)
            assert_same(encode(fresh, texts), before)
            assert fresh.memory().devices == held

    def test_a_parked_engine_holds_what_it_says_it_retained(
        self, fresh: BatchEngine, plugin: Any, context: Callable[..., TransitionContext]
    ) -> None:
        _parkable(plugin, fresh)
        retained = _park(plugin, fresh, context()).retained
        for account, nbytes in fresh.memory().devices.items():
            assert nbytes is None or nbytes <= retained.get(account, 0)

    def test_parking_twice_and_waking_twice_change_nothing(
        self, fresh: BatchEngine, plugin: Any, texts: Sequence[str], context: Callable[..., TransitionContext]
    ) -> None:
        _parkable(plugin, fresh)
        before = encode(fresh, texts)
        assert _park(plugin, fresh, context()) == _park(plugin, fresh, context())
        for _ in range(2):
            assert isinstance(_call_hook(plugin, "restore_from_host", engine=fresh, ctx=context()), HostResidue)
        assert_same(encode(fresh, texts), before)

    def test_a_backup_can_be_dropped_once(
        self, fresh: BatchEngine, plugin: Any, texts: Sequence[str], context: Callable[..., TransitionContext]
    ) -> None:
        _parkable(plugin, fresh)
        before = encode(fresh, texts)
        _park(plugin, fresh, context())
        residue = _call_hook(plugin, "restore_from_host", engine=fresh, ctx=context())
        if residue.droppable:
            assert fresh.drop_backup() == residue.host_bytes > 0
        assert fresh.drop_backup() == 0
        _park(plugin, fresh, context())
        _call_hook(plugin, "restore_from_host", engine=fresh, ctx=context())
        assert_same(encode(fresh, texts), before)

    def test_a_parked_engine_can_be_closed(
        self, fresh: BatchEngine, plugin: Any, context: Callable[..., TransitionContext]
    ) -> None:
        _parkable(plugin, fresh)
        _park(plugin, fresh, context())
        fresh.close(context())
        assert not any(fresh.memory().devices.values())


def encode(engine: BatchEngine, texts: Sequence[str]) -> Sequence[Output]:
    """Prepare and run the texts as one batch."""
    return engine.run(engine.prepare(BatchRequest(Task.ENCODE, [Item(text=text) for text in texts])))


def dense_of(output: Output) -> NDArray[np.float32]:
    """The output's dense vector, which must be there."""
    assert isinstance(output, EncodeOutput)
    assert output.dense is not None
    return output.dense


def assert_same(outputs: Sequence[Output], expected: Sequence[Output]) -> None:
    """Bit for bit."""
    assert [dense_of(each).tobytes() for each in outputs] == [dense_of(each).tobytes() for each in expected]


def _parkable(plugin: Any, engine: Engine) -> int:
    answer = _call_hook(plugin, "host_offload_bytes", engine=engine)
    if not isinstance(answer, int):
        pytest.skip(answer.reason if isinstance(answer, Declined) else "the plugin parks no engines")
    assert answer >= 0
    return answer


def _park(plugin: Any, engine: Engine, ctx: TransitionContext) -> HostOffload:
    offload = _call_hook(plugin, "offload_to_host", engine=engine, ctx=ctx)
    assert isinstance(offload, HostOffload)
    return offload
