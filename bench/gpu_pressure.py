"""An LLM engine and several encoders take turns on a device that can't hold them all."""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Sequence

from attrs import define, field, frozen
from client import metric
from gpu_models import CHAT
from gpu_stage import Reply, Sample, Stage
from results import Row, percentile
from sie_core.units import format_bytes

__all__ = ["Drill", "over_the_account", "pressure"]

CLIENTS = 4
SLICES = 4
_CHAT_SHARE = 0.4
_PAUSE_S = 0.02
_OUT_OF_MEMORY = re.compile(r"out of memory|OutOfMemory|OUT_OF_MEMORY")
_COUNTED = {"parks": "park_duration_seconds_count", "wakes": "wake_duration_seconds_count"}


@frozen
class Asked:
    at: float
    model: str
    reply: Reply


@define
class Drill:
    """What a drill saw. ``moves``: parks and wakes."""

    began: float
    ended: float = 0.0
    asked: list[Asked] = field(factory=list)
    samples: list[Sample] = field(factory=list)
    moves: dict[str, float] = field(factory=dict)
    broken: list[str] = field(factory=list)
    """Clients that broke down, and why."""

    def errors(self) -> list[str]:
        return [*self.broken, *(each.reply.error for each in self.asked if each.reply.error and not each.reply.wait)]


def pressure(stage: Stage, seconds: float) -> list[Row]:
    """Clients ask for the LLM and for the encoders in random order, for so many seconds."""
    drill = run(stage, seconds)
    for error in drill.errors()[:3]:
        print(f"  error: {error}", flush=True)
    return rows(stage, drill)


def run(stage: Stage, seconds: float) -> Drill:
    names = [CHAT, *stage.models.encoder_names]
    stage.tighten()
    with stage.asker() as asker:
        for name in names:
            asker.answer(name)
        before = _moves(asker.metrics())
        with stage.looking() as samples:
            drill = Drill(time.monotonic(), samples=samples)
            threads = [
                threading.Thread(target=_client, args=(stage, drill, number, seconds), daemon=True)
                for number in range(CLIENTS)
            ]
            for thread in threads:
                thread.start()
            last = drill.began + seconds + stage.wait_s + 10
            for thread in threads:
                thread.join(max(0.0, last - time.monotonic()))
                if thread.is_alive():
                    drill.broken.append("a client still waits for its answer")
            drill.ended = time.monotonic()
        for name, count in _moves(asker.metrics()).items():
            drill.moves[name] = count - before[name]
    return drill


def _client(stage: Stage, drill: Drill, number: int, seconds: float) -> None:
    chance, pause = random.Random(number), threading.Event()
    try:
        with stage.asker() as asker:
            while time.monotonic() < drill.began + seconds:
                name = CHAT if chance.random() < _CHAT_SHARE else chance.choice(stage.models.encoder_names)
                drill.asked.append(Asked(time.monotonic(), name, asker.ask(name)))
                pause.wait(chance.uniform(0, _PAUSE_S))
    except Exception as error:
        drill.broken.append(f"{type(error).__name__}: {error}")


def over_the_account(samples: Sequence[Sample]) -> int:
    """The most by which the device was over what the ledger had promised; negative: it never was.

    The device and the account are not looked at in the same moment: the largest promise of the looks before, with and
    after one counts.
    """
    found = []
    for place, sample in enumerate(samples):
        near = samples[max(0, place - 1) : place + 2]
        found.append(sample.used - max(each.promised for each in near))
    return max(found)


def rows(stage: Stage, drill: Drill) -> list[Row]:
    """Raises RuntimeError if there is nothing to tell of."""
    samples, answered = drill.samples, [each for each in drill.asked if not each.reply.error]
    if not samples or not answered:
        raise RuntimeError(f"nothing was answered: {'; '.join(drill.errors()[:3])}")
    errors = drill.errors()
    starved = [error for error in errors if _OUT_OF_MEMORY.search(error)]
    wait = sum(each.reply.wait for each in drill.asked)
    most, capacity = max(each.used for each in samples), samples[0].capacity
    over = over_the_account(samples)
    what = f"pressure, {stage.models.engine} and {len(stage.models.encoders)} encoders, {CLIENTS} clients"
    took = drill.ended - drill.began
    moved = f"{drill.moves['parks']:.0f} parks, {drill.moves['wakes']:.0f} wakes"
    found = [
        Row(f"{what}, {took:.0f} s", f"{len(answered)} answers", moved, "", "both move", min(drill.moves.values()) > 0),
        Row(f"{what}: out of memory", f"{len(starved)}", "", "", "0", not starved),
        Row(f"{what}: errors", f"{len(errors)}", f"told to come back: {wait}", "", "0", not errors),
        Row(f"{what}: most of the device in use", format_bytes(most), f"the account has {format_bytes(capacity)}", "")
        if most <= capacity
        else Row(f"{what}: most of the device in use", format_bytes(most), format_bytes(capacity), "", "less", False),
        Row(
            f"{what}: most in use over what was promised",
            f"{'-' if over < 0 else ''}{format_bytes(abs(over))}",
            f"{len(samples)} looks",
            "",
            "≤ 0",
            over <= 0,
        ),
    ]
    return [*found, *_over_time(what, drill)]


def _over_time(what: str, drill: Drill) -> list[Row]:
    """The drill in slices."""
    step = (drill.ended - drill.began) / SLICES
    found = []
    for number in range(SLICES):
        begin = drill.began + number * step
        asked = [each for each in drill.asked if begin <= each.at < begin + step and not each.reply.error]
        looks = [each for each in drill.samples if begin <= each.at < begin + step]
        if not looks:
            continue
        chats = [each.reply.seconds for each in asked if each.model == CHAT]
        texts = [each.reply.seconds for each in asked if each.model != CHAT]
        times = ", ".join(
            f"{len(seconds)} {name} (p50 {percentile(seconds, 50) * 1e3:.0f} ms, p99 {percentile(seconds, 99):.1f} s)"
            for name, seconds in (("chats", chats), ("texts", texts))
            if seconds
        )
        used, promised = max(each.used for each in looks), max(each.promised for each in looks)
        here = sum(CHAT in each.resident for each in looks) / len(looks)
        found.append(
            Row(
                f"{what}: {number * step:.0f} to {(number + 1) * step:.0f} s",
                times or "no answer",
                f"in use up to {format_bytes(used)}, promised up to {format_bytes(promised)}; LLM there {here:.0%}",
            )
        )
    return found


def _moves(metrics: str) -> dict[str, float]:
    return {name: metric(metrics, f"sie_worker_model_host_cache_{each}") for name, each in _COUNTED.items()}
