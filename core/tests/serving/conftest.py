"""What the tests of serving share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from sie_testing import FaultPoints


@pytest.fixture
def play(virtual_run: Callable[..., Any], fault_points: Callable[[str], FaultPoints]) -> Callable[..., Any]:
    """Runs a scene on the virtual clock, with no fault left over from another."""
    return virtual_run
