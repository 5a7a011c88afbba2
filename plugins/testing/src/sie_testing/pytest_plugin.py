"""Fixtures: ``fault_points`` and ``virtual_run``."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from sie_testing.faults import FaultPoints

pytest.register_assert_rewrite("sie_testing.conformance")

__all__ = ["fault_points", "virtual_run"]


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
