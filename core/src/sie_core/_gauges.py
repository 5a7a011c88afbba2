"""The metrics that are read rather than recorded: counts of the meters, and the state of models and accounts."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from opentelemetry.metrics import CallbackOptions, Meter, Observation

if TYPE_CHECKING:
    from sie_core.telemetry import ModelMeter, Watched

__all__ = ["Gauges"]

_FRESH_S = 0.05  # one look at the registry serves all the gauges of one collection
_WAIT_S = 1.0
_MODEL = "sie.worker.model."
_ACCOUNT = "sie.worker.account."
_ACCOUNT_FIELDS = {
    "capacity": "Bytes that may be promised in all.",
    "used": "Bytes in use, as the driver counts them.",
    "promised": "Bytes promised to engines; what is promised twice while one leaves for another counts once.",
    "realised": "Bytes that engines really hold.",
    "unrealised": "Bytes promised to engines and not taken yet.",
    "available": "Bytes that may still be promised.",
}


class Gauges:
    """Observable instruments. The registry belongs to the event loop: other threads ask the loop to look."""

    def __init__(self, meter: Meter, meters: Mapping[str, ModelMeter]) -> None:
        self._meters = meters
        self._registry: Watched | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._frozen = False
        self._looked_at = float("-inf")
        self._models: Sequence[Any] = ()
        self._accounts: Sequence[Any] = ()
        self._count(meter)
        self._watch_models(meter)
        self._watch_accounts(meter)

    def watch(self, registry: Watched) -> None:
        """Look at this registry from now on. Call it on the event loop that the registry lives on."""
        self._registry = registry
        try:
            self._loop = asyncio.get_running_loop()
        except RuntimeError:
            self._loop = None

    def freeze(self) -> None:
        """Keep to what was seen last: the loop may be gone."""
        self._look()
        self._frozen = True

    def _count(self, meter: Meter) -> None:
        def outcomes() -> Iterator[Observation]:
            for one in list(self._meters.values()):
                for outcome, count in list(one.outcomes.items()):
                    yield Observation(count, {**one.attributes, "outcome": outcome})

        def field(name: str) -> Callable[[], Iterator[Observation]]:
            return lambda: (Observation(getattr(one, name), one.attributes) for one in list(self._meters.values()))

        for name, unit, about, read in (
            ("requests", "{request}", "Requests that ended, by outcome.", outcomes),
            ("items", "{item}", "Items of answered requests.", field("items")),
            ("tokens", "{token}", "Tokens of answered requests, read and generated.", field("tokens")),
            ("generated_tokens", "{token}", "Tokens generated for answered requests.", field("generated_tokens")),
        ):
            meter.create_observable_counter(_MODEL + name, [_callback(read)], unit, about)

    def _watch_models(self, meter: Meter) -> None:
        def gauge(name: str, unit: str, about: str, value: Callable[[Any], Any], extra: str = "") -> None:
            def read() -> Iterator[Observation]:
                self._refresh()
                for status in self._models:
                    attributes = {"model": status.name}
                    if extra:
                        attributes[extra] = str(getattr(status, extra))
                    yield Observation(value(status), attributes)

            meter.create_observable_gauge(_MODEL + name, [_callback(read)], unit, about)

        gauge("residency", "{model}", "1 for the state a model is in.", lambda status: 1, "residency")
        gauge("device.memory", "By", "Device bytes charged.", lambda status: status.device_bytes)
        gauge("host.memory", "By", "Host bytes charged, of whatever kind.", lambda status: status.host_bytes)
        about = "Host bytes charged for the model's copy in the host tier."
        gauge("host_cache.memory", "By", about, lambda status: status.host_copy_bytes)
        gauge("overrun.memory", "By", "Bytes held beyond what was promised.", lambda status: status.overrun_bytes)
        gauge("leases", "{request}", "Requests that use the engine.", lambda status: status.leases)
        gauge("queued", "{request}", "Requests that wait for the model.", lambda status: status.queued)

        def figures() -> Iterator[Observation]:
            self._refresh()
            for status in self._models:
                for name, value in status.figures.items():
                    yield Observation(value, {"model": status.name, "figure": name})

        about = "What an engine says of itself; the figure's name tells its unit."
        meter.create_observable_gauge(_MODEL + "figure", [_callback(figures)], "", about)

    def _watch_accounts(self, meter: Meter) -> None:
        def gauge(name: str, about: str) -> None:
            def read() -> Iterator[Observation]:
                self._refresh()
                for account in self._accounts:
                    value = getattr(account, name)
                    if name == "promised":
                        # What a plan is still owed by its victims is their promise until they are gone.
                        value -= account.liens
                    if value is not None:
                        yield Observation(value, {"account": account.account})

            meter.create_observable_gauge(_ACCOUNT + name, [_callback(read)], "By", about)

        for name, about in _ACCOUNT_FIELDS.items():
            gauge(name, about)

    # --- looking ---------------------------------------------------------------------------------------

    def _refresh(self) -> None:
        if self._registry is None or self._frozen or time.monotonic() - self._looked_at < _FRESH_S:
            return
        loop = self._loop
        if loop is None or _running_loop() is loop:
            self._look()
            return
        seen = threading.Event()

        def look() -> None:
            self._look()
            seen.set()

        try:
            loop.call_soon_threadsafe(look)
        except RuntimeError:  # the loop is closed
            return
        seen.wait(_WAIT_S)

    def _look(self) -> None:
        if self._registry is not None:
            self._models, self._accounts = self._registry.statuses(), self._registry.accounts()
            self._looked_at = time.monotonic()


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _callback(read: Callable[[], Iterable[Observation]]) -> Callable[[CallbackOptions], Iterable[Observation]]:
    return lambda options: read()
