"""Engines and servers that are killed: what is left of them, on the device and of their processes."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable

import psutil
from attrs import frozen
from gpu_models import CHAT, CHATS
from gpu_stage import Stage, is_running, until
from launched import is_free
from results import Row
from sie_core.units import format_bytes

__all__ = ["After", "parked_engine", "resident_engine", "rows", "server"]

SLACK = 64 * 1024**2
"""Of a GPU: what the driver itself keeps and gives back at its own time."""
_GONE_S = 5.0


@frozen
class After:
    """Seconds until it was so (``None``: it never was), and bytes beyond those before the engine was there."""

    gone_s: float | None
    freed_s: float | None
    left: int
    promised: int = 0


def parked_engine(stage: Stage) -> list[Row]:
    """kill -9 of a parked engine: noticed, its claims released; the next request loads it anew."""
    return _engine(stage, CHATS[0], "parked")


def resident_engine(stage: Stage) -> list[Row]:
    """kill -9 of a resident engine: the same."""
    return _engine(stage, CHATS[1], "resident")


def _engine(stage: Stage, name: str, how: str) -> list[Row]:
    with stage.asker() as asker:
        asker.unload_all()
        before, promised = stage.used(), stage.promised()
        asker.answer(name)
        if how == "parked":
            asker.act(name, "park")
        if (seen := asker.row(name)["residency"]) != how:
            raise RuntimeError(f"the engine is {seen} and should be {how}")
        engine = stage.engine()
        family = [engine, *engine.children(recursive=True)]
        engine.kill()
        gone = until(lambda: not any(map(is_running, family)), stage.wait_s)
        until(lambda: asker.row(name)["residency"] not in ("parked", "resident"), stage.wait_s)
        after = _freed(stage, before, gone, lambda: stage.promised() <= promised)
        after = After(after.gone_s, after.freed_s, after.left, stage.promised() - promised)
        again = asker.answer(name)
    what = f"kill -9 of a {how} engine, {stage.models.engine}"
    return [
        *rows(stage, what, after, len(family)),
        Row(f"{what}: claims left in the ledger", format_bytes(after.promised), "", "", "0", after.promised <= 0),
        Row(f"{what}: the next request", f"answered after {again.seconds:.2f} s", "a load", "", "answered", True),
    ]


def server(stage: Stage) -> list[Row]:
    """kill -9 of the server with its engine and an encoder: the tree is gone, the next start finds nothing."""
    encoder = stage.models.encoder_names[0]
    with stage.asker() as asker:
        asker.answer(CHAT)
        asker.answer(encoder)
    before = stage.baseline
    process = stage.server().process
    family = psutil.Process(process.pid).children(recursive=True)
    ports = _ports(family)
    process.send_signal(signal.SIGKILL)
    process.wait()
    gone = until(lambda: not any(map(is_running, family)), stage.wait_s)
    free = until(lambda: all(map(is_free, ports)), stage.wait_s)
    after = _freed(stage, before, gone, lambda: True)
    stage.drop()
    told = len(stage.log.read_text(encoding="utf-8", errors="replace"))
    with stage.asker() as asker:
        again = asker.answer(CHAT)
    orphans = stage.log.read_text(encoding="utf-8", errors="replace")[told:].count("left the engine of")
    what = f"kill -9 of the server, {stage.models.engine}"
    shown = "never" if free is None else f"{free:.2f} s"
    return [
        *rows(stage, what, after, len(family)),
        Row(f"{what}: until {len(ports)} ports are free", shown, "", "", "≤ 5 s", free is not None and free <= _GONE_S),
        Row(f"{what}: engines that the next start finds", f"{orphans}", "", "", "0", not orphans),
        Row(f"{what}: the next server's first answer", f"after {again.seconds:.2f} s", "a load", "", "answered", True),
    ]


def _freed(stage: Stage, before: int, gone: float | None, also: Callable[[], bool]) -> After:
    """Wait until the device is as it was before."""
    slack = 0 if stage.emulated else SLACK
    freed = until(lambda: stage.used() <= before + slack and also(), stage.wait_s)
    return After(gone, freed, stage.used() - before)


def rows(stage: Stage, what: str, after: After, processes: int) -> list[Row]:
    gone = "never" if after.gone_s is None else f"{after.gone_s:.2f} s"
    in_time = after.gone_s is not None and after.gone_s <= _GONE_S
    slack = 0 if stage.emulated else SLACK
    then = "not within the time" if after.freed_s is None else f"{after.freed_s:.2f} s later"
    return [
        Row(f"{what}: until its {processes} processes are gone", gone, "", "", "≤ 5 s", in_time),
        Row(
            f"{what}: bytes of the device left, by the driver's count",
            f"{'-' if after.left < 0 else ''}{format_bytes(abs(after.left))}",
            then,
            "",
            f"≤ {format_bytes(slack)}" if slack else "0",
            after.left <= slack,
        ),
    ]


def _ports(family: list[psutil.Process]) -> list[int]:
    """What they listen on."""
    found: set[int] = set()
    for one in family:
        with contextlib.suppress(psutil.Error):
            found |= {each.laddr.port for each in one.net_connections("tcp") if each.status == "LISTEN"}
    return sorted(found)
