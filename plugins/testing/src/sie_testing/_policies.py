"""What a plugin has to keep to beside its engines: pure hooks return at once, routes keep off those of the core."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import pytest
from sie_core import Residency, ResidencyChanged, VictimCandidate

from sie_testing._lifecycle import LifecycleConformance, call_hook

__all__ = ["PolicyConformance"]

_TRIES = 3
_CROWDS = (0, 1, 2, 5)


class PolicyConformance(LifecycleConformance):
    """The tests of hooks that any plugin may have, skipped where it has none. Inherited with every suite."""

    patience_of_the_core_s: ClassVar[float] = 0.5
    """How long the core waits for a pure hook."""

    def test_choose_victims_names_candidates_in_a_list(self, plugin: Any) -> None:
        _skip_without(plugin, "choose_victims")
        for count in _CROWDS:
            crowd = _crowd(count)
            known = [candidate.model for candidate in crowd]
            answer = _quickly(partial(_choose, plugin, crowd), "choose_victims", 20 * self.patience_of_the_core_s)
            if answer is None:
                continue
            assert isinstance(answer, Sequence), f"choose_victims answered {answer!r}: a list of names, or None"
            assert not isinstance(answer, str | bytes), (
                f"choose_victims answered the text {answer!r}: put it into a list"
            )
            unknown = [name for name in answer if name not in known]
            assert not unknown, f"choose_victims names {unknown}, which were no candidates: {known}"
            assert len(set(answer)) == len(answer), f"choose_victims names a candidate twice: {answer}"

    def test_pure_hooks_return_at_once(self, plugin: Any) -> None:
        """The event loop waits for them. ``on_shutdown`` is not called here: it may end what other tests need."""
        calls: dict[str, Callable[[], Any]] = {
            "choose_victims": lambda: _choose(plugin, _crowd(5)),
            "on_residency_changed": lambda: call_hook(plugin, "on_residency_changed", event=_event()),
        }
        there = [hook for hook in calls if getattr(plugin, hook, None) is not None]
        if not there:
            pytest.skip("the plugin implements no pure hook")
        for hook in there:
            times = [_seconds(calls[hook], self.patience_of_the_core_s) for _ in range(_TRIES)]
            assert min(times) < self.patience_of_the_core_s, (
                f"{hook} did not return within {self.patience_of_the_core_s:g} s, {_TRIES} times of {_TRIES}: "
                "the core would disable it"
            )

    def test_routes_do_not_shadow_those_of_the_core(self, plugin: Any) -> None:
        _skip_without(plugin, "register_routes")
        from sie_core.http import taken_paths

        routes = list(call_hook(plugin, "register_routes") or ())
        taken = taken_paths(routes)
        assert not taken, (
            f"register_routes offers {', '.join(taken)}, which the core answers itself: choose another path"
        )


def _skip_without(plugin: Any, hook: str) -> None:
    if getattr(plugin, hook, None) is None:
        pytest.skip(f"the plugin implements no {hook}")


def _crowd(count: int) -> list[VictimCandidate]:
    return [
        VictimCandidate(
            model=f"model-{number}",
            frees={"emulated:0": (number + 1) << 20},
            leases=number % 2,
            idle_s=0.0 if number % 2 else 10.0 * number,
            load_s=None if number == 0 else float(number),
            can_park=number % 3 == 0,
        )
        for number in range(count)
    ]


def _choose(plugin: Any, crowd: Sequence[VictimCandidate]) -> Any:
    return call_hook(plugin, "choose_victims", candidates=crowd, needed={"emulated:0": 1 << 20})


def _event() -> ResidencyChanged:
    return ResidencyChanged("model-0", Residency.LOADING, Residency.RESIDENT, "loaded", epoch=1, at=0.0)


def _quickly(call: Callable[[], Any], what: str, limit_s: float) -> Any:
    """The answer of a call that may hang."""
    answers: list[Any] = []
    errors: list[BaseException] = []
    done = _start(call, answers, errors)
    if not done.wait(limit_s):
        pytest.skip(f"{what} does not return: another test says so")
    if errors:
        raise errors[0]
    return answers[0]


def _seconds(call: Callable[[], Any], limit_s: float) -> float:
    """How long a call takes; it is left behind when that is more than ``limit_s``."""
    began, errors = time.perf_counter(), list[BaseException]()
    _start(call, [], errors).wait(limit_s)
    if errors:
        raise errors[0]
    return time.perf_counter() - began


def _start(call: Callable[[], Any], answers: list[Any], errors: list[BaseException]) -> threading.Event:
    done = threading.Event()

    def work() -> None:
        try:
            answers.append(call())
        except BaseException as error:
            errors.append(error)
        done.set()

    threading.Thread(target=work, daemon=True).start()
    return done
