"""Runs the pure hooks. The event loop waits for them, so what a plugin does in one must not be able to hold it up.

Each hook of a plugin runs on a thread of its own, its calls in order, and the loop waits a limited time for each. What
takes longer goes on without being waited for; a hook that did so three times is not called again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from attrs import define, evolve, field, frozen

__all__ = ["PureHooks", "SlowHook"]

_OVERRUNS = 3
_log = logging.getLogger("sie_core.plugins")


@frozen
class SlowHook:
    """A hook of a plugin that did not return in time, ``overruns`` times. ``disabled``: it is not called any more."""

    plugin: str
    hook: str
    overruns: int = 0
    disabled: bool = False


@define(eq=False)
class _Call:
    plugin: str
    hook: str
    function: Callable[..., Any]
    arguments: Sequence[Any]
    began: float = 0.0
    done: threading.Event = field(factory=threading.Event)
    late: bool = False
    answer: Any = None
    error: BaseException | None = None

    def run(self) -> None:
        self.began = time.monotonic()
        try:
            self.answer = self.function(*self.arguments)
        except BaseException as error:  # SystemExit, too: a plugin must not end the server
            self.error = error
        self.done.set()

    def report(self) -> None:
        """Say what became of it, where that is worth saying."""
        if self.late:
            seconds = time.monotonic() - self.began
            _log.warning("%s of plugin %r returned after %.1f s", self.hook, self.plugin, seconds)
        if self.error is not None:
            _log.error("%s of plugin %r failed", self.hook, self.plugin, exc_info=self.error)


class _Lane:
    """The calls of one hook of one plugin, in order. Its thread lives as long as there are any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: deque[_Call] = deque()
        self._running = False

    def submit(self, call: _Call) -> None:
        with self._lock:
            self._calls.append(call)
            if self._running:
                return
            self._running = True
        try:
            # A daemon, because a hook that never returns must not keep the process alive.
            threading.Thread(target=self._run, name=f"sie-hooks-{call.plugin}", daemon=True).start()
        except RuntimeError as error:  # no thread can start: the server must not fail because of a plugin
            with self._lock:
                stranded, self._running = [*self._calls], False
                self._calls.clear()
            for each in stranded:
                each.error = error
                each.done.set()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._calls:
                    self._running = False
                    return
                call = self._calls.popleft()
            call.run()
            if call.late:
                call.report()


class PureHooks:
    """``patience_s``: how long a call is waited for. ``disabled`` is told of each hook that is disabled."""

    def __init__(self, disabled: Callable[[SlowHook], None], *, patience_s: float = 0.5) -> None:
        self.patience_s = patience_s
        self._disabled = disabled
        self._lanes: dict[tuple[str, str], _Lane] = {}
        self._slow: dict[tuple[str, str], SlowHook] = {}

    @property
    def slow(self) -> list[SlowHook]:
        """The hooks that overran so far."""
        return list(self._slow.values())

    def is_disabled(self, plugin: str, hook: str) -> bool:
        slow = self._slow.get((plugin, hook))
        return slow is not None and slow.disabled

    def call(
        self,
        plugin: str,
        hook: str,
        function: Callable[..., Any],
        arguments: Sequence[Any],
        *,
        patience_s: float | None = None,
    ) -> Any:
        """The hook's answer; ``None`` as well if it raised, which is logged, or did not return in time."""
        call = _Call(plugin, hook, function, arguments)
        patience = self.patience_s if patience_s is None else patience_s
        self._lanes.setdefault((plugin, hook), _Lane()).submit(call)
        if not call.done.wait(patience):
            call.late = True
            self._overran(plugin, hook, patience)
            return None
        call.report()
        return call.answer

    def _overran(self, plugin: str, hook: str, patience: float) -> None:
        slow = self._slow.get((plugin, hook)) or SlowHook(plugin, hook)
        slow = evolve(slow, overruns=slow.overruns + 1, disabled=slow.overruns + 1 >= _OVERRUNS)
        self._slow[plugin, hook] = slow
        _log.warning(
            "%s of plugin %r did not return within %g s (%d of %d times): the server goes on without it",
            *(hook, plugin, patience, slow.overruns, _OVERRUNS),
        )
        if slow.disabled:
            _log.error("%s of plugin %r is disabled until the server is restarted", hook, plugin)
            self._disabled(slow)
