"""Every hook that a plugin may implement, in one file.

Project name, markers and entry-point group are all ``sie``::

    from sie_core import hookimpl
    sie_api = 1

    @hookimpl
    def register_adapters(registrar):
        registrar.add("my-encoder", MyAdapter)

Three kinds. *Start-up* hooks run once, on the main thread, in order of registration. *Pure* hooks run on a thread of
their own while the event loop waits: they must return at once, and one that was too slow three times is
disabled. *Blocking* hooks run on the engine's own worker thread under a deadline; the plugin that registered the
model's adapter is asked first, then the others, and the first answer that is not ``None`` counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import pluggy
from attrs import frozen

from sie_core.adapter import (
    Adapter,
    AdmissionReserve,
    Declined,
    Device,
    DeviceView,
    Engine,
    HostOffload,
    HostResidue,
    TransitionContext,
)
from sie_core.types import ModelSpec, ResidencyChanged

__all__ = ["API_VERSION", "AdapterRegistrar", "Command", "VictimCandidate", "hookimpl", "hookspec"]

API_VERSION = 1
"""Major version of the plugin API; a plugin module states the one it was built for as ``sie_api``."""

hookspec = pluggy.HookspecMarker("sie")
hookimpl = pluggy.HookimplMarker("sie")


class AdapterRegistrar(Protocol):
    """Collects adapters at start-up, and what is known of models that suit them."""

    def add(self, name: str, adapter: type[Adapter]) -> None:
        """Offer ``adapter`` under ``name``. Raises PluginConflict if the name is taken."""

    def add_catalogue(self, folder: Path) -> None:
        """Announce a folder with one YAML file for each well-known model. It is read when somebody asks for it."""


@frozen
class Command:
    """A sub-command of ``sie``. ``target`` (``"package.module:function"``) is imported only when it is called."""

    name: str
    help: str
    target: str


@frozen
class VictimCandidate:
    """A model that may be evicted, in the order in which the core would take them (least recently used first).

    ``frees`` is bytes by account; ``idle_s`` seconds since its last request ended (0 while ``leases`` > 0).
    """

    model: str
    frees: dict[str, int]
    leases: int
    idle_s: float
    load_s: float | None
    can_park: bool


# --- start-up --------------------------------------------------------------------------------------


@hookspec
def register_adapters(registrar: AdapterRegistrar) -> None:
    """Fires once at start-up. Call ``registrar.add(name, cls)`` for each adapter.

    ``registrar.add_catalogue(folder)`` adds well-known models to `sie models --available`.
    """


@hookspec
def probe_devices(emulate: int | None) -> Sequence[Device]:
    """Fires once at start-up. Return the devices found; all plugins' lists are joined. Never raises for absence.

    ``emulate``: bytes of the emulated device that was asked for, ``None`` if none was. Of two devices with one name the
    first counts.
    """


@hookspec
def register_routes() -> Sequence[Any]:
    """Fires once at start-up. Return Starlette routes; they are mounted after the built-in ones."""


@hookspec
def register_commands() -> Sequence[Command]:
    """Fires on every run of ``sie``, ``--help`` too: return names and help only and import nothing."""


# --- pure ------------------------------------------------------------------------------------------


@hookspec(firstresult=True)
def choose_victims(candidates: Sequence[VictimCandidate], needed: dict[str, int]) -> Sequence[str] | None:
    """Fires when a plan needs bytes (``needed``, by account). Return model names in the order to evict them.

    The first answer that is not ``None`` counts. Names that are no candidates are ignored; the core takes from the
    front until the bytes suffice and adds candidates of its own if they do not.
    """


@hookspec
def on_residency_changed(event: ResidencyChanged) -> None:
    """Fires after a model changed its residency. Exceptions are logged and go no further."""


@hookspec
def on_shutdown() -> None:
    """Fires once, after the last engine is closed."""


# --- blocking --------------------------------------------------------------------------------------


@hookspec(firstresult=True)
def admission_reserve(model: ModelSpec, devices: Sequence[DeviceView]) -> AdmissionReserve | None:
    """Fires before a load is planned: what will the engine need, on the host and on each device it spans?

    ``devices`` are the devices the model may go to, best first. ``None``: not my engine.
    """


@hookspec(firstresult=True)
def host_offload_bytes(engine: Engine) -> int | Declined | None:
    """Fires before a park is planned: host bytes the copy will take. ``Declined``: mine, and it can't park."""


@hookspec(firstresult=True)
def offload_to_host(engine: Engine, ctx: TransitionContext) -> HostOffload | None:
    """Fires to park a drained engine: move its state to host RAM and give its device memory back."""


@hookspec(firstresult=True)
def restore_from_host(engine: Engine, ctx: TransitionContext) -> HostResidue | None:
    """Fires to wake a parked engine: move its state back to its device. Bit-identical."""
