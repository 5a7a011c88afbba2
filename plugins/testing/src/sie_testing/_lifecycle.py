"""What every engine has to keep to, whatever it answers: admission, loading and closing, parking.

The tests run on a thread of the class's own, as an engine's calls do in a server, and each within a time-out.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, TypeVar

import attrs
import pytest
from sie_core import (
    Adapter,
    AdmissionReserve,
    Declined,
    Device,
    DeviceGrant,
    DeviceView,
    EmulatedDevice,
    Engine,
    Grant,
    HostOffload,
    LoadError,
    ModelSpec,
    TransitionCancelled,
    TransitionContext,
    is_emulated,
)

from sie_testing._bounds import EngineThread, Hung

__all__ = ["Events", "LifecycleConformance", "call_hook", "make_context", "park", "parkable"]

T = TypeVar("T")
_AMPLE = 1 << 40
_MIB = 1 << 20
_AT_ONCE = 3
"""Engines that the default device has room for."""
_AFTER_HANGING = 0.1
"""Of the time-out: once something hung, the tests after it wait so much of it."""


class Events:
    """An engine's way to the core; there is none here."""

    def died(self, reason: str, details: str = "") -> None:
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


def call_hook(plugin: Any, hook: str, **arguments: Any) -> Any:
    """What the plugin module's hook answers; ``None`` without one, as the core would see it."""
    function = getattr(plugin, hook, None)
    if function is None:
        return None
    wanted = inspect.signature(function).parameters
    return function(**{name: value for name, value in arguments.items() if name in wanted})


class LifecycleConformance:
    """Inherit it, override ``adapter``, ``model`` and ``plugin``, and whatever else differs."""

    engine_class: ClassVar[type[Engine]] = Engine
    limit_s: ClassVar[float] = 120.0
    """Seconds that a test, a load or a close may take; what takes longer hangs, and fails."""
    _shared: ClassVar[tuple[Engine, TransitionContext]]
    _emulated: ClassVar[EmulatedDevice]
    _thread: ClassVar[EngineThread]
    _hung: ClassVar[dict[str, str]]

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
    def device(self, model: ModelSpec, plugin: Any) -> Device | None:
        """The device to load on: an emulated one, whose bytes can be counted, unless the model names another.

        ``None``: an account that nobody measures, named as the model's ``device`` says, or ``cpu``.
        """
        if model.device is not None and not is_emulated(model.device):
            return None
        cls = type(self)
        if "_emulated" not in vars(cls):
            name = model.device or "emulated:0"
            needs = self.asked(plugin, model, DeviceView(name, "emulated", _AMPLE, _AMPLE, _AMPLE)).ranks
            each = sum(need.min_bytes + need.context_bytes + need.headroom_bytes for need in needs)
            cls._emulated = EmulatedDevice(name, _AT_ONCE * each + 16 * _MIB)
        device: Device = cls._emulated
        return device

    @pytest.fixture
    def missing_model(self) -> ModelSpec | None:
        """A model whose files are not there; ``None``: the adapter reads no files."""
        return None

    # --- what the tests use ---

    @pytest.fixture
    def reserve(self, plugin: Any, model: ModelSpec, device: Device | None) -> AdmissionReserve:
        total = device.total() if device is not None else _AMPLE
        name = device.name if device is not None else model.device or "cpu"
        kind = device.kind if device is not None else "cpu"
        return self.asked(plugin, model, DeviceView(name, kind, total=total, free=total, available=total))

    @classmethod
    def asked(cls, plugin: Any, model: ModelSpec, view: DeviceView) -> AdmissionReserve:
        """What the plugin says that a model needs on a device."""
        reserve = cls.bounded(
            "admission_reserve", lambda: call_hook(plugin, "admission_reserve", model=model, devices=[view])
        )
        assert isinstance(reserve, AdmissionReserve), (
            f"admission_reserve answered {reserve!r} for the adapter's own model: an AdmissionReserve"
        )
        return reserve

    @pytest.fixture
    def context(
        self, reserve: AdmissionReserve, device: Device | None, model: ModelSpec
    ) -> Callable[..., TransitionContext]:
        def make(**more: Any) -> TransitionContext:
            return make_context(reserve, device, account=model.device or "cpu", **more)

        return make

    @pytest.fixture
    def fresh(self, adapter: Adapter, model: ModelSpec, context: Callable[..., TransitionContext]) -> Iterator[Engine]:
        """An engine of the test's own."""
        engine = self._load(adapter, model, context())
        yield engine
        self.bounded("close", self.shut, engine, context())

    @pytest.fixture
    def engine(self, adapter: Adapter, model: ModelSpec, context: Callable[..., TransitionContext]) -> Engine:
        """An engine that the tests of a class share, for what leaves no trace: loading may take seconds."""
        cls = type(self)
        if "_shared" not in vars(cls):
            cls._shared = (self._load(adapter, model, context()), context())
        return cls._shared[0]

    def _load(self, adapter: Adapter, model: ModelSpec, ctx: TransitionContext) -> Engine:
        engine = self.bounded("load", self.blocking, adapter.load, model, ctx, Events())
        assert isinstance(engine, self.engine_class), f"load returned {engine!r}: a {self.engine_class.__name__}"
        return engine

    @classmethod
    def teardown_class(cls) -> None:
        """Close the shared engine, and what the class had of its own."""
        try:
            if "_shared" in vars(cls):
                engine, ctx = cls._shared
                del cls._shared
                cls.bounded("close", cls.shut, engine, ctx)
            cls.bounded("the end of the class", cls.end)
        finally:
            if "_emulated" in vars(cls):
                cls._emulated.close()
                del cls._emulated
            if "_thread" in vars(cls):
                cls._thread.close()
                del cls._thread

    @classmethod
    def end(cls) -> None:
        """Let go of what a suite has beside its engines."""

    @classmethod
    def shut(cls, engine: Engine, ctx: TransitionContext) -> None:
        """Close an engine, from a thread that is not the event loop's."""
        cls.blocking(engine.close, ctx)

    @classmethod
    def blocking(cls, call: Callable[..., T], *arguments: Any) -> T:
        """Make a blocking call as the core does: on the engine's own thread."""
        return call(*arguments)

    @classmethod
    def bounded(cls, what: str, call: Callable[..., T], *arguments: Any, **named: Any) -> T:
        """Make a call on the class's thread, within the time-out. Raises Hung."""
        __tracebackhide__ = True
        hung = vars(cls).get("_hung", {})
        if what in hung:
            raise Hung(hung[what])
        if "_thread" not in vars(cls):
            cls._thread = EngineThread()
        try:
            limit_s = cls.limit_s * (_AFTER_HANGING if hung else 1.0)
            return cls._thread.run(what, limit_s, lambda: call(*arguments, **named))
        except Hung as error:
            if "_thread" in vars(cls):
                cls._hung = {**hung, what: str(error)}
                cls.leave_behind()
            raise

    @classmethod
    def leave_behind(cls) -> None:
        """Something hung on the class's thread: forget the thread, and the engine that others would hang on as well."""
        del cls._thread
        if "_shared" in vars(cls):
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
        assert call_hook(plugin, "admission_reserve", model=stranger, devices=[]) is None

    def test_what_it_holds_was_reserved(self, engine: Engine, reserve: AdmissionReserve) -> None:
        promised = sum(max(need.min_bytes, need.want_bytes) + need.context_bytes for need in reserve.ranks)
        realised = sum(nbytes or 0 for nbytes in engine.memory().devices.values())
        assert realised <= promised

    def test_description_agrees_with_the_engine(self, adapter: Adapter, model: ModelSpec, engine: Engine) -> None:
        described = adapter.describe(model)
        assert described is None or described == engine.capabilities

    # --- loading and closing ---

    def test_memory_is_reported_on_the_granted_devices(
        self, engine: Engine, context: Callable[..., TransitionContext]
    ) -> None:
        granted = context().grant.devices
        report = engine.memory()
        assert set(engine.devices) == set(report.devices) == set(granted)
        assert all(nbytes is None or nbytes > 0 for nbytes in report.devices.values())
        assert report.host >= 0

    def test_close_gives_everything_back_and_may_be_repeated(
        self, fresh: Engine, context: Callable[..., TransitionContext]
    ) -> None:
        self.shut(fresh, context())
        self.shut(fresh, context())
        report = fresh.memory()
        assert not any(report.devices.values())
        assert report.host == 0

    def test_progress_goes_forward(
        self, adapter: Adapter, model: ModelSpec, context: Callable[..., TransitionContext]
    ) -> None:
        seen: list[float] = []
        engine = adapter.load(model, context(progress=lambda fraction, note: seen.append(fraction)), Events())
        self.shut(engine, context())
        assert seen == sorted(seen)
        assert all(0.0 <= fraction <= 1.0 for fraction in seen)

    def test_a_load_that_was_called_off_ends_as_cancelled_or_not_at_all(
        self, adapter: Adapter, model: ModelSpec, context: Callable[..., TransitionContext]
    ) -> None:
        ctx = context()
        ctx.cancelled.set()
        try:
            engine = adapter.load(model, ctx, Events())
        except TransitionCancelled:
            return
        self.shut(engine, context())

    def test_missing_files_are_a_permanent_load_error(
        self, adapter: Adapter, missing_model: ModelSpec | None, context: Callable[..., TransitionContext]
    ) -> None:
        if missing_model is None:
            pytest.skip("the adapter reads no files")
        with pytest.raises(LoadError) as caught:
            adapter.load(missing_model, context(), Events())
        assert caught.value.permanent

    # --- the wake check and parking ---

    def test_the_probe_answers_the_same_every_time(
        self, engine: Engine, plugin: Any, context: Callable[..., TransitionContext]
    ) -> None:
        first, second = engine.probe(context()), engine.probe(context())
        if first is None:
            assert second is None
            parkable(plugin, engine)
            pytest.skip(
                f"{type(engine).__name__} parks and has no probe(): its wakes go unchecked, and `sie status` says so. "
                "Let it answer a fixed input, as bytes"
            )
        assert second is not None
        assert engine.probe_matches(first, second)

    def test_the_hooks_leave_other_engines_alone(self, plugin: Any) -> None:
        answer = call_hook(plugin, "host_offload_bytes", engine=Engine())
        assert answer is None or isinstance(answer, Declined)

    def test_a_parked_engine_holds_what_it_says_it_retained(
        self, fresh: Engine, plugin: Any, context: Callable[..., TransitionContext]
    ) -> None:
        parkable(plugin, fresh)
        retained = park(plugin, fresh, context()).retained
        for account, nbytes in fresh.memory().devices.items():
            assert nbytes is None or nbytes <= retained.get(account, 0)

    def test_a_parked_engine_can_be_closed(
        self, fresh: Engine, plugin: Any, context: Callable[..., TransitionContext]
    ) -> None:
        parkable(plugin, fresh)
        park(plugin, fresh, context())
        self.shut(fresh, context())
        assert not any(fresh.memory().devices.values())


def parkable(plugin: Any, engine: Engine) -> int:
    answer = call_hook(plugin, "host_offload_bytes", engine=engine)
    if not isinstance(answer, int):
        pytest.skip(answer.reason if isinstance(answer, Declined) else "the plugin parks no engines")
    assert answer >= 0
    return answer


def park(plugin: Any, engine: Engine, ctx: TransitionContext) -> HostOffload:
    offload = call_hook(plugin, "offload_to_host", engine=engine, ctx=ctx)
    assert isinstance(offload, HostOffload)
    return offload
