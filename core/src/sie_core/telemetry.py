"""Metrics and traces, over the OpenTelemetry API. Off by default, and then free; the SDK is loaded when it is set up.

What is counted often (requests, items, tokens) is counted in plain integers that the SDK reads when somebody looks;
only distributions are recorded as they happen. Metrics are served at ``/metrics``; nothing leaves the machine unless
``telemetry.otlp_endpoint`` (or the standard variable ``OTEL_EXPORTER_OTLP_ENDPOINT``) names a collector.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from sie_core.config import TelemetryConfig
    from sie_core.types import Cause

__all__ = ["ModelMeter", "Telemetry", "Watched"]

Record = Callable[[float, Mapping[str, str]], None]
_METHODS = frozenset({"GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH"})
_MAX_ROUTES = 500  # attribute sets kept; more can only come from a caller that passes raw paths


def _ignore(value: float, attributes: Mapping[str, str]) -> None:
    return None


class Watched(Protocol):
    """What the gauges read: a registry."""

    def statuses(self) -> Sequence[Any]: ...

    def accounts(self) -> Sequence[Any]: ...


class ModelMeter:
    """Counts one model's requests. Cheap enough for every request, measured or not."""

    __slots__ = (
        "_first_time",
        "_queue_time",
        "_run_items",
        "_run_time",
        "_run_tokens",
        "attributes",
        "generated_tokens",
        "items",
        "outcomes",
        "tokens",
    )

    def __init__(
        self,
        model: str,
        queue_time: Record = _ignore,
        run_time: Record = _ignore,
        run_items: Record = _ignore,
        run_tokens: Record = _ignore,
        first_time: Record = _ignore,
    ) -> None:
        self.attributes: Mapping[str, str] = {"model": model}
        self.outcomes: dict[str, int] = {"ok": 0}
        """Requests so far, by outcome: ``ok``, ``cancelled``, or an error's code."""
        self.items = 0
        self.tokens = 0
        """Tokens of answered requests: what came in, and what was generated."""
        self.generated_tokens = 0
        self._first_time = first_time
        self._queue_time = queue_time
        self._run_time = run_time
        self._run_items = run_items
        self._run_tokens = run_tokens

    def answered(self, items: int, tokens: int, queue_s: float) -> None:
        """A request was answered after ``queue_s`` seconds of waiting."""
        self.outcomes["ok"] += 1
        self.items += items
        self.tokens += tokens
        self._queue_time(queue_s, self.attributes)

    def generated(self, prompt_tokens: int, tokens: int, queue_s: float, first_s: float | None) -> None:
        """The same for a request that generated ``tokens``; ``first_s``: until its first one, if it was streamed."""
        self.answered(1, prompt_tokens + tokens, queue_s)
        self.generated_tokens += tokens
        if first_s is not None:
            self._first_time(first_s, self.attributes)

    def failed(self, outcome: str) -> None:
        """A request ended otherwise: an error's code, or ``cancelled``."""
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1

    def ran(self, items: int, tokens: int, seconds: float) -> None:
        """The engine ran a batch."""
        self._run_time(seconds, self.attributes)
        self._run_items(items, self.attributes)
        self._run_tokens(tokens, self.attributes)


class Telemetry:
    """The one place that the other rooms report to. This class measures nothing; :meth:`create` makes one that does."""

    tracing = False
    """Whether anybody wants traces: what they cost is only paid then."""

    def __init__(self) -> None:
        self.meters: dict[str, ModelMeter] = {}

    @classmethod
    def disabled(cls) -> Telemetry:
        """Measures nothing and costs nothing."""
        return Telemetry()

    @classmethod
    def create(cls, settings: TelemetryConfig, *, environ: Mapping[str, str] | None = None) -> Telemetry:
        """Set up what the configuration asks for. Loads the SDK, which takes a third of a second.

        Raises:
            ConfigError: traces or metrics are to be sent and the package that sends them is not installed.
        """
        from sie_core._otel import set_up

        return set_up(settings, environ)

    def model(self, name: str) -> ModelMeter:
        """The meter of a model; the same one every time."""
        meter = self.meters.get(name)
        if meter is None:
            meter = self.meters[name] = self._meter(name)
        return meter

    def _meter(self, name: str) -> ModelMeter:
        return ModelMeter(name)

    def watch(self, registry: Watched) -> None:
        """Read the gauges from this registry from now on."""

    # --- what happened: the calls of residency, serving and http ---------------------------------------

    def model_loaded(self, model: str, seconds: float, *, outcome: str) -> None:
        """A load ended. ``outcome``: ``ok``, or the class of its error."""

    def evicted(self, model: str, cause: Cause) -> None:
        """A model lost its engine, or went to host memory, though no operator asked for it."""

    def parked(self, model: str, seconds: float, *, outcome: str) -> None:
        """A park ended."""

    def woken(self, model: str, seconds: float, *, outcome: str) -> None:
        """A wake ended."""

    def host_cache_lookup(self, model: str, *, hit: bool) -> None:
        """A model was wanted that is not resident: was there a copy in host memory?"""

    def http_request(self, route: str, method: str, status: int, seconds: float) -> None:
        """A request was answered over HTTP. ``route`` is a pattern (``/v1/encode/{model}``), never a raw path."""

    def server_span(
        self, name: str, headers: Sequence[tuple[bytes, bytes]]
    ) -> contextlib.AbstractContextManager[Callable[[int], None]]:
        """A span around an HTTP request, child of the caller's. The function it gives is told the status."""
        return contextlib.nullcontext(_no_status)

    def trace(
        self,
        model: str,
        items: int,
        tokens: int,
        *,
        queue_s: float,
        tokenise_s: float,
        inference_s: float,
        task: str = "encode",
    ) -> None:
        """Spans of a request that was just answered; only called while ``tracing``."""

    # --- what others see -------------------------------------------------------------------------------

    def render(self) -> tuple[bytes, str]:
        """The metrics as Prometheus reads them: body and content type."""
        return b"", "text/plain; version=0.0.4; charset=utf-8"

    def shutdown(self, timeout_s: float = 3.0) -> None:
        """Send what is left to send and stop. A collector that does not answer delays it by ``timeout_s`` at most."""


def _no_status(status: int) -> None:
    return None


class RouteAttributes:
    """Attribute sets of HTTP requests, made once each."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str, int], dict[str, Any]] = {}

    def of(self, route: str, method: str, status: int) -> dict[str, Any]:
        key = (route, method, status)
        found = self._known.get(key)
        if found is None:
            found = {
                "http.route": route,
                "http.request.method": method if method in _METHODS else "_OTHER",
                "http.response.status_code": status,
            }
            if len(self._known) < _MAX_ROUTES:
                self._known[key] = found
        return found
