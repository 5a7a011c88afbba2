"""Telemetry over the OpenTelemetry SDK. Imported only by ``Telemetry.create``."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from opentelemetry import context as otel_context
from opentelemetry.metrics import Meter, MeterProvider
from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer, TracerProvider
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from sie_core import __version__
from sie_core._gauges import Gauges
from sie_core.errors import ConfigError, ConfigProblem
from sie_core.telemetry import ModelMeter, RouteAttributes, Telemetry, Watched

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource

    from sie_core.config import TelemetryConfig
    from sie_core.types import Cause

__all__ = ["Measured", "set_up"]

_log = logging.getLogger("sie.telemetry")

_ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_TRANSITION = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120)
_LOAD = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
_TOKENS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
_MODEL = "sie.worker.model."
_TRACEPARENT = (b"traceparent", b"tracestate")


def set_up(settings: TelemetryConfig, environ: Mapping[str, str] | None = None) -> Telemetry:
    """Metrics for Prometheus, and metrics and traces for a collector, as far as they were asked for."""
    from opentelemetry.sdk.metrics import AlwaysOffExemplarFilter
    from opentelemetry.sdk.metrics import MeterProvider as SdkMeterProvider

    environ = os.environ if environ is None else environ
    endpoint = settings.otlp_endpoint or environ.get(_ENDPOINT) or None
    if not settings.prometheus and endpoint is None:
        return Telemetry.disabled()
    resource = _resource()
    readers: list[Any] = []
    render = None
    if settings.prometheus:
        reader, render = _prometheus()
        readers.append(reader)
    tracers: TracerProvider | None = None
    if endpoint is not None:
        exporter, tracers = _otlp(endpoint, resource)
        readers.append(exporter)
        asked = "telemetry.otlp_endpoint" if settings.otlp_endpoint else _ENDPOINT
        _log.info("metrics and traces are sent to %s (%s)", endpoint, asked)
    meters = SdkMeterProvider(
        readers, resource=resource, shutdown_on_exit=False, exemplar_filter=AlwaysOffExemplarFilter()
    )
    return Measured(meters, tracers, render)


def _resource() -> Resource:
    """Who we are, and what ``OTEL_RESOURCE_ATTRIBUTES`` adds. No other detector runs: some ask the network."""
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource

    return Resource({"service.name": "sie", "service.version": __version__}).merge(OTELResourceDetector().detect())


def _prometheus() -> tuple[Any, Callable[[], tuple[bytes, str]]]:
    from opentelemetry.exporter.prometheus import PrometheusMetricReader
    from prometheus_client import CollectorRegistry
    from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

    registry = CollectorRegistry()
    reader = PrometheusMetricReader(scope_info_enabled=False, registry=registry)
    return reader, lambda: (generate_latest(registry), CONTENT_TYPE_LATEST)


def _otlp(endpoint: str, resource: Resource) -> tuple[Any, TracerProvider]:
    try:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        problem = ConfigProblem(
            f"sending telemetry to {endpoint} needs a package that is not installed: pip install 'sie-core[otlp]'",
            path="telemetry.otlp_endpoint",
        )
        raise ConfigError([problem]) from error
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
    from opentelemetry.sdk.trace import TracerProvider as SdkTracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    base = endpoint.rstrip("/")
    reader = PeriodicExportingMetricReader(OTLPMetricExporter(endpoint=f"{base}/v1/metrics"))
    tracers = SdkTracerProvider(resource=resource, shutdown_on_exit=False)
    tracers.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=f"{base}/v1/traces")))
    return reader, tracers


class Measured(Telemetry):
    """Records what it is told with the instruments of two providers, and reads gauges from a registry."""

    def __init__(
        self,
        meters: MeterProvider,
        tracers: TracerProvider | None = None,
        render: Callable[[], tuple[bytes, str]] | None = None,
    ) -> None:
        super().__init__()
        self._meters = meters
        self._tracers = tracers
        self._tracer: Tracer | None = tracers.get_tracer("sie", __version__) if tracers is not None else None
        self.tracing = tracers is not None
        self._render = render
        self._routes = RouteAttributes()
        self._propagator = TraceContextTextMapPropagator()
        meter = meters.get_meter("sie", __version__)
        self._make_instruments(meter)
        self._gauges = Gauges(meter, self.meters)

    def _make_instruments(self, meter: Meter) -> None:
        def histogram(name: str, unit: str, bounds: Sequence[float], about: str) -> Any:
            return meter.create_histogram(name, unit, about, explicit_bucket_boundaries_advisory=[*map(float, bounds)])

        cache = _MODEL + "host_cache."
        self._queue = histogram(_MODEL + "queue.duration", "s", _SHORT, "Time that answered requests waited.")
        self._first = histogram(
            _MODEL + "time_to_first_token", "s", _SHORT, "Time until the first piece of streamed answers."
        )
        self._run = histogram(_MODEL + "batch.duration", "s", _SHORT, "Time that the engine took for a batch.")
        self._items = histogram(_MODEL + "batch.size", "{item}", _SIZES, "Items in a batch.")
        self._tokens = histogram(_MODEL + "batch.tokens", "{token}", _TOKENS, "Tokens in a batch, without padding.")
        self._load = histogram(_MODEL + "load.duration", "s", _LOAD, "Time that loading a model took.")
        self._park = histogram(cache + "park.duration", "s", _TRANSITION, "Time that parking a model took.")
        self._wake = histogram(cache + "wake.duration", "s", _TRANSITION, "Time that waking a model took.")
        self._http = histogram("http.server.request.duration", "s", _SHORT, "Time that HTTP requests took.")
        self._evictions = meter.create_counter(_MODEL + "evictions", "{eviction}", "Evictions, by reason.")
        self._lookups = meter.create_counter(cache + "lookups", "{lookup}", "Whether a copy was there to wake.")

    def _meter(self, name: str) -> ModelMeter:
        batches = (self._run.record, self._items.record, self._tokens.record)
        return ModelMeter(name, self._queue.record, *batches, first_time=self._first.record)

    def watch(self, registry: Watched) -> None:
        self._gauges.watch(registry)

    # --- what happened ---------------------------------------------------------------------------------

    def model_loaded(self, model: str, seconds: float, *, outcome: str) -> None:
        self._load.record(seconds, {"model": model, "outcome": outcome})

    def evicted(self, model: str, cause: Cause) -> None:
        self._evictions.add(1, {"model": model, "reason": cause.value})

    def parked(self, model: str, seconds: float, *, outcome: str) -> None:
        self._park.record(seconds, {"model": model, "outcome": outcome})

    def woken(self, model: str, seconds: float, *, outcome: str) -> None:
        self._wake.record(seconds, {"model": model, "outcome": outcome})

    def host_cache_lookup(self, model: str, *, hit: bool) -> None:
        self._lookups.add(1, {"model": model, "result": "hit" if hit else "miss"})

    def http_request(self, route: str, method: str, status: int, seconds: float) -> None:
        self._http.record(seconds, self._routes.of(route, method, status))

    # --- traces ----------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def server_span(self, name: str, headers: Sequence[tuple[bytes, bytes]]) -> Iterator[Callable[[int], None]]:
        if self._tracer is None:
            yield lambda status: None
            return
        carrier = {key.decode(): value.decode("latin-1") for key, value in headers if key in _TRACEPARENT}
        parent = self._propagator.extract(carrier, otel_context.Context())
        with self._tracer.start_as_current_span(name, context=parent, kind=SpanKind.SERVER) as span:

            def ended(status: int) -> None:
                span.set_attribute("http.response.status_code", status)
                if status >= 500:
                    span.set_status(Status(StatusCode.ERROR))

            yield ended

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
        from opentelemetry.trace import set_span_in_context

        tracer = self._tracer
        if tracer is None:
            return
        end = time.time_ns()
        steps = (("queue", queue_s), ("tokenise", tokenise_s), ("inference", inference_s))
        at = end - int(1e9 * (queue_s + tokenise_s + inference_s))
        attributes: dict[str, str | int] = {"sie.model": model, "sie.items": items, "sie.tokens": tokens}
        span = tracer.start_span(task, start_time=at, attributes=attributes)
        inside = set_span_in_context(span)
        for name, seconds in steps:
            step = tracer.start_span(name, context=inside, start_time=at)
            at += int(1e9 * seconds)
            step.end(end_time=at)
        span.end(end_time=end)

    # --- what others see -------------------------------------------------------------------------------

    def render(self) -> tuple[bytes, str]:
        return self._render() if self._render is not None else super().render()

    def shutdown(self, timeout_s: float = 3.0) -> None:
        self._gauges.freeze()
        providers = [provider for provider in (self._meters, self._tracers) if hasattr(provider, "shutdown")]
        # Exporters retry for half a minute when nobody answers; a daemon thread lets the process go without them.
        threads = [threading.Thread(target=_shut_down, args=(provider,), daemon=True) for provider in providers]
        end = time.monotonic() + timeout_s
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))


def _shut_down(provider: Any) -> None:
    try:
        provider.shutdown()
    except Exception:
        _log.debug("telemetry did not stop cleanly", exc_info=True)
