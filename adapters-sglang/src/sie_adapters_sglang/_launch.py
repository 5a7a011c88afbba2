"""From a plan to an engine that answers: ports, keys, the process, and the wait until it is ready."""

from __future__ import annotations

import json
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress

from attrs import define, field, frozen
from sie_core import DeviceOutOfMemory, EngineStartError, ModelSpec, SieError, TransitionCancelled, TransitionContext

from sie_adapters_sglang._argv import Place, command_line
from sie_adapters_sglang._control import Control, Keys
from sie_adapters_sglang._flags import Flags, flags_for
from sie_adapters_sglang._hicache import HostPool
from sie_adapters_sglang._plan import Plan, engine_kind
from sie_adapters_sglang._ports import give_back, is_free, take_ports
from sie_adapters_sglang._process import EngineProcess
from sie_adapters_sglang._sizing import Launch
from sie_adapters_sglang._state import Home

__all__ = ["KILL_S", "Running", "start"]

_FIRST_POLL_S, _POLL_S = 0.02, 0.25
KILL_S = 3.0
"""What SIGKILL and its aftermath may take of the time that the core gives for starting or closing an engine."""
_OUT_OF_MEMORY = re.compile(r"OutOfMemoryError|CUDA out of memory|Not enough memory\. Please try")
_MANY_LINES = 1000
_ATTEMPTS = 2
"""A port may be taken between the moment it is picked and the moment it is bound."""


@define
class Running:
    """An engine that is ready. What is in ``listener`` is called at its end, from a thread of its own."""

    process: EngineProcess
    control: Control
    keys: Keys
    url: str
    saver: bool
    ports: tuple[int, ...]
    sizing: Launch | None = None
    pool: HostPool | None = None
    listener: list[Callable[[], None]] = field(factory=list)

    def abandon(self) -> None:
        """Before anybody can close it."""
        self.process.end()
        self.forget()

    def forget(self) -> None:
        """After its end: ports and files."""
        self.control.close()
        give_back(self.ports)
        self.process.home.forget()


@frozen
class _Devices:
    """The devices of an engine in SGLang's terms."""

    kind: str
    env: Mapping[str, str]

    @classmethod
    def of(cls, accounts: Sequence[str]) -> _Devices:
        kind = engine_kind(accounts[0]) if accounts else "cpu"
        if kind != "cuda":
            return cls(kind, {})
        visible = [entry.strip() for entry in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if entry.strip()]
        numbers = [int(account.partition(":")[2] or 0) for account in accounts]
        chosen = [visible[number] if number < len(visible) else str(number) for number in numbers]
        return cls(kind, {"CUDA_VISIBLE_DEVICES": ",".join(chosen)})


def start(model: ModelSpec, plan: Plan, ctx: TransitionContext) -> Running:
    """Start the engine and wait until it answers.

    Raises:
        EngineStartError: with the end of its log in its details.
        DeviceOutOfMemory: by its own word.
        BadOptions, ResourceExhausted, TransitionCancelled
    """
    flags = flags_for(plan.installed.sglang)
    devices = _Devices.of(list(ctx.grant.devices))
    sizing, pool = plan.launch(ctx.grant)
    saver = plan.saver and devices.kind == "cuda"
    extra = _beside_saver(plan, flags) if saver else []
    if pool is not None:
        extra += ["--enable-hierarchical-cache", *pool.flags]
    env = {**devices.env, **sizing.environment, **({"SGLANG_MEMORY_SAVER_CUDA_GRAPH": "1"} if saver else {})}
    env.update(plan.options.env)
    for attempt in range(1, _ATTEMPTS + 1):
        ports = take_ports(2)

        def place(config: str, ports: tuple[int, ...] = ports) -> Place:
            return Place(
                model=str(plan.folder),
                config=config,
                port=ports[0],
                nccl_port=ports[1],
                device=devices.kind,
                sizing=sizing.flags(),
                saver=saver,
                extra=extra,
            )

        try:
            running = _launch(model, plan, ctx, flags, place, ports, env, saver)
            running.sizing, running.pool = sizing, pool
            return running
        except EngineStartError:
            lost = not all(map(is_free, ports))
            give_back(ports)
            if not lost or attempt == _ATTEMPTS:
                raise
        except BaseException:
            give_back(ports)
            raise
    raise AssertionError("the loop returns or raises")


def _beside_saver(plan: Plan, flags: Flags) -> list[str]:
    """From 0.5.20 on, prefill graphs are recorded by a backend that refuses to run with pausable graph memory."""
    flag = "--cuda-graph-backend-prefill"
    chosen = any(word.partition("=")[0] == flag for word in plan.options.extra_args)
    return [flag, "disabled"] if flags.has(flag) and not chosen else []


def _launch(
    model: ModelSpec,
    plan: Plan,
    ctx: TransitionContext,
    flags: Flags,
    place: Callable[[str], Place],
    ports: tuple[int, ...],
    env: Mapping[str, str],
    saver: bool,
) -> Running:
    keys = Keys(api=secrets.token_hex(24), admin=secrets.token_hex(24))
    url = f"http://127.0.0.1:{ports[0]}"
    listener: list[Callable[[], None]] = []

    def on_end() -> None:
        for tell in listener:
            tell()

    with ExitStack() as undo:
        home = Home(model.name, plan.options.stop_timeout_s)
        undo.callback(home.forget)
        # Not on the command line, which everybody on the machine can read.
        config = home.secret("keys.yaml", json.dumps({"api-key": keys.api, "admin-api-key": keys.admin}))
        argv = command_line(plan.options, place(str(config)), flags)
        ctx.progress(0.0, f"starting SGLang {plan.installed.sglang}")
        process = EngineProcess(
            [plan.installed.python, "-m", "sglang.launch_server", *argv],
            env,
            home,
            secrets=(keys.api, keys.admin),
            on_end=on_end,
        )
        undo.callback(process.end)
        control = Control(url, keys)
        undo.callback(control.close)
        _wait_ready(plan, ctx, process, control)
        config.unlink(missing_ok=True)
        undo.pop_all()
    ctx.progress(1.0, "ready")
    return Running(process, control, keys, url, saver, ports, listener=listener)


def _wait_ready(plan: Plan, ctx: TransitionContext, process: EngineProcess, control: Control) -> None:
    options = plan.options
    begun = heard = time.monotonic()
    left = ctx.deadline - begun
    # It is ended in time as well, with its grace.
    until = begun + min(options.start_timeout_s, left - min(options.stop_timeout_s + KILL_S, left / 2))
    mark = process.log_mark()
    health, pause = _Health(control), _FIRST_POLL_S
    while True:
        if process.ended.wait(0.0 if health.asking else pause):
            raise _failed(process, f"ended with {_ending(process.exit_code)} while it started")
        if ctx.cancelled.is_set():
            raise TransitionCancelled("the start was called off")
        pause = min(2 * pause, _POLL_S)
        if health.good():
            return
        now = time.monotonic()
        if (seen := process.log_mark()) != mark:
            mark, heard = seen, now
        if now > until:
            raise _failed(process, f"was not ready within {now - begun:.0f} s")
        if now - heard > options.stall_timeout_s:
            raise _failed(process, f"has said nothing for {now - heard:.0f} s and is not ready")
        ctx.progress(min(0.9, (now - begun) / options.start_timeout_s), "loading")


class _Health:
    """One question at a time, on a thread of its own: an engine may take long to answer, or never do."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._answers: list[bool] = []
        self._thread: threading.Thread | None = None

    @property
    def asking(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def good(self) -> bool:
        """Whether the engine has said so. Waits a moment for the answer."""
        if not self.asking:
            self._thread = threading.Thread(target=self._ask, name="sie-sglang-health", daemon=True)
            self._thread.start()
        assert self._thread is not None
        self._thread.join(_POLL_S)
        return any(self._answers)

    def _ask(self) -> None:
        # It has much to do: only a refused connection, or a refusal, is tried again at once.
        with suppress(Exception):  # the start was given up, and the connection closed under it
            self._answers.append(self._control.healthy(timeout_s=30.0))


def _failed(process: EngineProcess, what: str) -> SieError:
    tail = process.log_tail()
    if not tail:
        return EngineStartError(f"the engine {what}, and its log is empty")
    text, details = f"the engine {what}; the end of its log is in the server's", f"the end of its log:\n{tail}"
    if _OUT_OF_MEMORY.search(process.log_tail(_MANY_LINES)):  # every rank may have a long last word
        return DeviceOutOfMemory(text).explained(details)
    return EngineStartError(text).explained(details)


def _ending(code: int | None) -> str:
    return f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
