"""Fixtures ``fault_points`` and ``virtual_run``, and the time-outs of the conformance suites."""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine, Generator, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from sie_testing.faults import FaultPoints

_SUITES = ("_books", "_lifecycle", "_one_loop", "_outputs", "_policies", "_rig", "adapting", "conformance", "talking")
pytest.register_assert_rewrite(*(f"sie_testing.{name}" for name in _SUITES))

__all__ = ["fault_points", "pytest_pyfunc_call", "virtual_run"]


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, Any, Any]:
    """Run the tests of a conformance suite on the thread of their class, within its time-out."""
    bounded = getattr(pyfuncitem.cls, "bounded", None)
    if bounded is None or not hasattr(pyfuncitem.cls, "engine_class"):
        return (yield)
    test = pyfuncitem.obj

    @functools.wraps(test)
    def inside(**arguments: Any) -> Any:
        __tracebackhide__ = True
        return bounded(pyfuncitem.name, test, **arguments)

    pyfuncitem.obj = inside
    try:
        return (yield)
    finally:
        pyfuncitem.obj = test


@pytest.fixture
def fault_points() -> Iterator[Callable[[str], FaultPoints]]:
    """``fault_points("model")``: the fault points of that model's fake engines. All are forgotten after the test."""
    from sie_testing.faults import FaultPoints

    FaultPoints.reset_all()
    yield FaultPoints.of
    FaultPoints.reset_all()


@pytest.fixture
def virtual_run() -> Callable[..., Any]:
    """``virtual_run(coroutine, seed=0)``: run it on a virtual clock, in the order that the seed picks."""
    from sie_testing.virtual import run

    def runner(main: Coroutine[Any, Any, Any], seed: int | None = 0) -> Any:
        return run(main, seed)

    return runner
