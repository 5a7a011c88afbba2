"""For authors of adapters and plugins: a fake engine, fault points, a virtual clock, and a conformance suite."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sie_testing.adapting import *  # noqa: F403
    from sie_testing.conformance import *  # noqa: F403
    from sie_testing.fake import *  # noqa: F403
    from sie_testing.faults import *  # noqa: F403
    from sie_testing.talking import *  # noqa: F403
    from sie_testing.virtual import *  # noqa: F403

# pytest imports this package in every run of everybody who has it installed: nothing is loaded before it is used.
_ROOMS = {
    "sie_testing.adapting": "LoraConformance",
    "sie_testing.conformance": "AdapterConformance make_context",
    "sie_testing.fake": (
        "FakeAdapter FakeEngine FakeLifecycle FakeOptions FakeStreamAdapter FakeStreamEngine expected_score "
        "expected_vector reserve_for"
    ),
    "sie_testing.faults": "POINTS FaultPoints Latch",
    "sie_testing.talking": "GenerationConformance",
    "sie_testing.virtual": "Deadlock VirtualClockLoop VirtualWorker pause run",
}
_HOME = {name: room for room, names in _ROOMS.items() for name in names.split()}

__version__ = "0.1.0"
__all__ = sorted([*_HOME, "__version__"])  # noqa: PLE0605 - a test compares it with the rooms' own lists


def __getattr__(name: str) -> Any:
    room = _HOME.get(name)
    if room is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(room), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
