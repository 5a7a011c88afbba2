"""Parking and waking engines made of torch tensors: device memory to one host buffer and back.

Parameters keep their identity, because only what they look into is exchanged: while parked every tensor is empty, after
the wake each looks at its bytes as before. The host buffer is kept after a wake where the engine can drop it on
request: weights do not change while serving, so the next park needs no copy. In-place writes are seen by the versions
that tensors count. Writes through ``.data`` and writes to inference tensors are counted by nobody: whoever makes them
says so with :func:`mark_stale`.
"""

from __future__ import annotations

import logging

from sie_core import (
    Declined,
    Engine,
    HostOffload,
    HostResidue,
    TransitionContext,
    TransitionError,
    format_bytes,
)

from sie_adapters_torch._image import HostImage, bring_back, check_wanted, copy_out, free_device_memory, synchronise
from sie_adapters_torch._layout import Layout, lay_out
from sie_adapters_torch._torch import computes
from sie_adapters_torch._walk import IMAGE, Found, walk

log = logging.getLogger("sie.torch")

__all__ = ["OffloadsTensors", "announce", "drop_backup", "forget", "is_parked", "mark_stale", "offload", "restore"]

_COVERED = 0.9
"""An engine that holds more than this leaves out is not parked: most of what it would free is not to be had."""


class OffloadsTensors(Engine):
    """An engine whose tensors are parked here and that keeps its host copy after a wake, until told to drop it.

    Call :func:`forget` in ``close``.
    """

    fixed_tensors = False
    """Whether it has the same tensors from one park to the next, unless it calls :meth:`mark_stale`. An engine that
    promises this is not walked again as long as its copy is good, which is most of what such a park costs."""

    @property
    def parked(self) -> bool:
        """Whether its tensors are on the host only."""
        return is_parked(self)

    def alive(self) -> bool:
        """Whether each of its devices computes, and a few bytes on each are those of the host copy, as long as there is
        one: so a wake that restored nothing is noticed. Takes microseconds, and a round trip to each device.

        Raises what torch raises on a device that is broken.
        """
        image = _image(self)
        if image is not None and image.parked:
            return False
        return computes(self.devices) and (image is None or image.is_back())

    def drop_backup(self) -> int:
        return drop_backup(self)

    def mark_stale(self) -> None:
        """Weights were written in a way that torch does not count: the next park copies again."""
        mark_stale(self)


# --- what an engine may ask for ------------------------------------------------------------------------


def is_parked(engine: Engine) -> bool:
    """Whether the engine's tensors are on the host only."""
    image = _image(engine)
    return image is not None and image.parked


def drop_backup(engine: Engine) -> int:
    """Drop the copy that survived a wake. Returns the bytes freed; 0: there is none, or it is all there is."""
    image = _image(engine)
    return 0 if image is None or image.parked else forget(engine)


def forget(engine: Engine) -> int:
    """Let go of the host copy, whatever it is worth. Returns its bytes. Idempotent."""
    image: HostImage | None = vars(engine).pop(IMAGE, None)
    return image.release() if image is not None else 0


def mark_stale(engine: Engine) -> None:
    """The engine's weights were written in a way that torch does not count: the next park copies again."""
    image = _image(engine)
    if image is not None:
        image.stale = True


def _image(engine: Engine) -> HostImage | None:
    image: HostImage | None = vars(engine).get(IMAGE)
    return image


# --- the hooks -----------------------------------------------------------------------------------------


def announce(engine: Engine) -> int | Declined | None:
    """The answer to ``host_offload_bytes``."""
    image = _image(engine)
    if image is not None and image.parked:
        return image.layout.nbytes
    if getattr(engine, "host_offload", True) is False:
        return Declined("it says host_offload = False")
    try:
        planned = _plan(engine, walk(engine))
    except Exception as error:  # it may be anybody's engine, and must not fail to load because it is odd
        log.exception("an engine of class %s can't be looked at", type(engine).__name__)
        return Declined(f"its tensors can't be looked at: {type(error).__name__}: {error}")
    if planned is None or isinstance(planned, Declined):
        return planned
    return _uncovered(engine, planned) or planned.nbytes


def offload(engine: Engine, ctx: TransitionContext) -> HostOffload | None:
    """The answer to ``offload_to_host``.

    Raises:
        TransitionError, HostOutOfMemory, TransitionCancelled: nothing was changed.
    """
    image = _image(engine)
    if image is not None and image.parked:
        return HostOffload(image.layout.nbytes)
    layout, cleared = _known_layout(engine, image), False
    if layout is None:
        layout, cleared = _new_layout(engine)
    if layout is None:
        return None
    check_wanted(ctx)
    synchronise(layout)  # whatever stream the engine ran on
    if image is None or not (layout is image.layout or image.holds(layout)):
        declined = _uncovered(engine, layout)
        if declined is not None:
            raise TransitionError(f"the engine can't be parked: {declined.reason}")
        vars(engine)[IMAGE] = image = copy_out(image, layout, ctx)
    image.layout = layout
    layout.point_nowhere()
    image.parked = True
    free_device_memory(layout, collect=cleared)
    return HostOffload(layout.nbytes)


def _known_layout(engine: Engine, image: HostImage | None) -> Layout | None:
    """The one of the last park, where it can be told without a walk that it holds."""
    if image is None or image.stale or not getattr(engine, "fixed_tensors", False):
        return None
    return image.layout if image.layout.is_untouched() else None


def _new_layout(engine: Engine) -> tuple[Layout | None, bool]:
    """Where everything is, and whether CUDA graphs were cleared for it. Raises TransitionError."""
    found = walk(engine)
    cleared = bool(found.graphs)
    if cleared:
        for graph in found.graphs:
            graph.clear()
        found = walk(engine)
    layout = _plan(engine, found)
    if isinstance(layout, Declined):
        raise TransitionError(f"the engine can't be parked: {layout.reason}")
    return layout, cleared


def restore(engine: Engine, ctx: TransitionContext) -> HostResidue | None:
    """The answer to ``restore_from_host``.

    Raises:
        DeviceOutOfMemory, TransitionCancelled: the engine is parked as before.
    """
    image = _image(engine)
    if image is None:
        return None
    if image.parked:
        check_wanted(ctx)
        bring_back(image, ctx)
        image.parked = False
        if not isinstance(engine, OffloadsTensors):
            forget(engine)  # nobody could ask it to drop the copy
            return HostResidue()
    return HostResidue(image.layout.nbytes, droppable=True)


def _plan(engine: Engine, found: Found) -> Layout | Declined | None:
    if not found.tensors:
        return None
    devices = [account for account in engine.devices if account.partition(":")[0] != "cpu"]
    if not devices:
        return Declined("its device is the CPU: parking it would free nothing")
    layout = lay_out(found, devices)
    if isinstance(layout, Layout) and not layout.regions:
        return Declined(f"none of its tensors is on {', '.join(devices)}")
    return layout


def _uncovered(engine: Engine, layout: Layout) -> Declined | None:
    """Whether the engine says that it holds much more than what was found."""
    try:
        report = engine.memory().devices
    except NotImplementedError:
        return None
    for account, held in report.items():
        if held is None or account.partition(":")[0] == "cpu":
            continue
        reached = layout.bytes_on(account)
        if reached < _COVERED * held:
            return Declined(
                f"only {format_bytes(reached)} of the {format_bytes(held)} that it holds on {account} can be reached "
                "from its attributes; declare the rest as offload_roots"
            )
    return None
