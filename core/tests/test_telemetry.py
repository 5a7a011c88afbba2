"""Metrics and traces: what is shown, what is sent, and that nothing is sent unasked."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import attrs
import pytest
from sie_core import Cause, ConfigError, Residency
from sie_core.config import TelemetryConfig
from sie_core.telemetry import Telemetry


@attrs.frozen
class Status:
    name: str = "minilm"
    residency: Residency = Residency.RESIDENT
    device_bytes: int = 1000
    host_bytes: int = 50
    host_copy_bytes: int = 20
    leases: int = 2
    queued: int = 0
    overrun_bytes: int = 30
    figures: Mapping[str, float] = attrs.field(factory=lambda: {"host_pool_bytes": 4000, "share": 0.5})


@attrs.frozen
class Account:
    account: str = "cuda:0"
    capacity: int = 5000
    used: int | None = None
    promised: int = 3000
    realised: int = 1000
    unrealised: int = 2000
    liens: int = 600
    available: int = 2000


class Registry:
    def statuses(self) -> list[Status]:
        return [Status()]

    def accounts(self) -> list[Account]:
        return [Account()]


class Collector:
    """An OpenTelemetry collector that keeps what it is sent: path and body."""

    def __init__(self) -> None:
        got = self.got = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                got.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                return None

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    got: list[tuple[str, bytes]]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.close()


@pytest.fixture
def measured() -> Iterator[Telemetry]:
    made = Telemetry.create(TelemetryConfig(), environ={})
    yield made
    made.shutdown()


def shown(telemetry: Telemetry) -> dict[str, float]:
    """Series and values of the exposition."""
    lines = telemetry.render()[0].decode().splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}


def use(telemetry: Telemetry) -> None:
    """A model loads, answers two requests in one run, and refuses two."""
    telemetry.model_loaded("minilm", 1.5, outcome="ok")
    meter = telemetry.model("minilm")
    meter.ran(3, 70, 0.02)
    meter.answered(1, 20, 0.004)
    meter.answered(2, 50, 0.004)
    meter.failed("QUEUE_FULL")
    meter.failed("cancelled")


def test_requests_are_counted_by_model_and_outcome(measured: Telemetry) -> None:
    use(measured)
    series = shown(measured)
    requests = 'sie_worker_model_requests_total{model="minilm",outcome="%s"}'
    assert series[requests % "ok"] == 2
    assert series[requests % "QUEUE_FULL"] == 1
    assert series[requests % "cancelled"] == 1
    assert series['sie_worker_model_items_total{model="minilm"}'] == 3
    assert series['sie_worker_model_tokens_total{model="minilm"}'] == 70


def test_distributions_have_buckets_that_tell_something(measured: Telemetry) -> None:
    use(measured)
    series = shown(measured)
    queue = 'sie_worker_model_queue_duration_seconds_bucket{le="%s",model="minilm"}'
    assert series[queue % "0.0025"] == 0
    assert series[queue % "0.005"] == 2
    assert series['sie_worker_model_batch_size_bucket{le="4.0",model="minilm"}'] == 1
    assert series['sie_worker_model_batch_tokens_sum{model="minilm"}'] == 70
    assert series['sie_worker_model_batch_duration_seconds_count{model="minilm"}'] == 1
    assert series['sie_worker_model_load_duration_seconds_bucket{le="2.5",model="minilm",outcome="ok"}'] == 1


def test_generation_is_counted_in_tokens_and_timed_to_the_first(measured: Telemetry) -> None:
    meter = measured.model("chat")
    meter.generated(10, 5, 0.004, 0.3)
    meter.generated(20, 7, 0.004, None)  # a whole answer has no first piece
    series = shown(measured)
    assert series['sie_worker_model_requests_total{model="chat",outcome="ok"}'] == 2
    assert series['sie_worker_model_tokens_total{model="chat"}'] == 42
    assert series['sie_worker_model_generated_tokens_total{model="chat"}'] == 12
    first = 'sie_worker_model_time_to_first_token_seconds_%s{model="chat"}'
    assert series[first % "count"] == 1
    assert series[first % "sum"] == pytest.approx(0.3)
    assert series['sie_worker_model_queue_duration_seconds_count{model="chat"}'] == 2


def test_the_host_tier_is_measured_under_its_names(measured: Telemetry) -> None:
    measured.host_cache_lookup("minilm", hit=False)
    measured.model_loaded("minilm", 1.5, outcome="ok")
    measured.host_cache_lookup("minilm", hit=True)
    measured.parked("minilm", 0.004, outcome="ok")
    measured.woken("minilm", 0.3, outcome="ok")
    measured.evicted("minilm", Cause.IDLE)
    measured.watch(Registry())
    series = shown(measured)
    cache = "sie_worker_model_host_cache_"
    assert series[cache + 'lookups_total{model="minilm",result="miss"}'] == 1
    assert series[cache + 'lookups_total{model="minilm",result="hit"}'] == 1
    assert series[cache + 'park_duration_seconds_bucket{le="0.01",model="minilm",outcome="ok"}'] == 1
    assert series[cache + 'wake_duration_seconds_bucket{le="120.0",model="minilm",outcome="ok"}'] == 1
    assert series[cache + 'memory_bytes{model="minilm"}'] == 20
    assert series['sie_worker_model_evictions_total{model="minilm",reason="idle"}'] == 1


def test_models_and_accounts_are_read_when_somebody_looks(measured: Telemetry) -> None:
    measured.watch(Registry())
    series = shown(measured)
    assert series['sie_worker_model_residency{model="minilm",residency="resident"}'] == 1
    assert series['sie_worker_model_device_memory_bytes{model="minilm"}'] == 1000
    assert series['sie_worker_model_leases{model="minilm"}'] == 2
    assert series['sie_worker_model_overrun_memory_bytes{model="minilm"}'] == 30
    assert series['sie_worker_model_figure{figure="host_pool_bytes",model="minilm"}'] == 4000
    assert series['sie_worker_model_figure{figure="share",model="minilm"}'] == 0.5
    for name in ("capacity", "realised", "unrealised", "available"):
        assert series[f'sie_worker_account_{name}_bytes{{account="cuda:0"}}'] == getattr(Account(), name)
    # What victims still owe to a plan is promised twice while they leave, and shown once.
    assert series['sie_worker_account_promised_bytes{account="cuda:0"}'] == 3000 - 600
    assert 'sie_worker_account_used_bytes{account="cuda:0"}' not in series


async def test_another_thread_reads_the_registry_on_its_event_loop(measured: Telemetry) -> None:
    readers: list[str] = []

    class Watched(Registry):
        def statuses(self) -> list[Status]:
            readers.append(threading.current_thread().name)
            return super().statuses()

    measured.watch(Watched())
    import asyncio

    series = await asyncio.to_thread(shown, measured)
    assert series['sie_worker_model_leases{model="minilm"}'] == 2
    assert set(readers) == {threading.main_thread().name}


def test_http_requests_are_measured_by_route(measured: Telemetry) -> None:
    measured.http_request("/v1/encode/{model}", "POST", 200, 0.02)
    measured.http_request("/v1/encode/{model}", "BREW", 405, 0.02)
    series = shown(measured)
    name = "http_server_request_duration_seconds_count"
    labels = '{http_request_method="%s",http_response_status_code="%d",http_route="/v1/encode/{model}"}'
    assert series[name + labels % ("POST", 200)] == 1
    assert series[name + labels % ("_OTHER", 405)] == 1


def test_two_servers_in_one_process_count_for_themselves(measured: Telemetry) -> None:
    use(measured)
    other = Telemetry.create(TelemetryConfig(), environ={})
    assert not any("minilm" in series for series in shown(other))
    other.shutdown()


def test_disabled_shows_nothing_and_takes_everything() -> None:
    telemetry = Telemetry.disabled()
    telemetry.watch(Registry())
    use(telemetry)
    telemetry.http_request("/healthz", "GET", 200, 0.001)
    with telemetry.server_span("GET /healthz", []) as ended:
        ended(200)
    assert telemetry.render()[0] == b""
    assert not telemetry.tracing
    telemetry.shutdown()
    off = Telemetry.create(TelemetryConfig(prometheus=False), environ={})
    assert type(off) is Telemetry


def test_a_collector_gets_metrics_and_traces(collector: Collector) -> None:
    telemetry = Telemetry.create(TelemetryConfig(otlp_endpoint=collector.url), environ={})
    assert telemetry.tracing
    use(telemetry)
    parent = [(b"traceparent", b"00-" + b"ab" * 16 + b"-" + b"cd" * 8 + b"-01")]
    with telemetry.server_span("POST /v1/embeddings", parent) as ended:
        telemetry.trace("minilm", 2, 50, queue_s=0.004, tokenise_s=0.001, inference_s=0.02)
        telemetry.trace("chat", 1, 9, queue_s=0.004, tokenise_s=0.0, inference_s=0.02, task="generate")
        ended(200)
    telemetry.shutdown()
    bodies = dict(collector.got)
    assert set(bodies) == {"/v1/metrics", "/v1/traces"}
    assert b"sie.worker.model.requests" in bodies["/v1/metrics"]
    for name in (b"POST /v1/embeddings", b"encode", b"generate", b"queue", b"tokenise", b"inference", b"\xab" * 16):
        assert name in bodies["/v1/traces"]


def test_the_standard_variable_for_the_collector_counts_as_asked(collector: Collector) -> None:
    telemetry = Telemetry.create(
        TelemetryConfig(prometheus=False), environ={"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url}
    )
    use(telemetry)
    telemetry.shutdown()
    assert {path for path, _ in collector.got} == {"/v1/metrics"}


def test_nothing_is_sent_unasked(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", collector.url + "/v1/traces")
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp")
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "otlp")
    monkeypatch.setenv("OTEL_EXPERIMENTAL_RESOURCE_DETECTORS", "all")
    telemetry = Telemetry.create(TelemetryConfig())
    assert not telemetry.tracing
    use(telemetry)
    with telemetry.server_span("POST /v1/embeddings", []) as ended:
        ended(200)
    telemetry.shutdown()
    assert collector.got == []


AWAY = """
import time
from sie_core.config import TelemetryConfig
from sie_core.telemetry import Telemetry

telemetry = Telemetry.create(TelemetryConfig(otlp_endpoint="http://127.0.0.1:9"), environ={})
meter = telemetry.model("minilm")
meter.ran(3, 70, 0.02)
meter.answered(2, 70, 0.004)
telemetry.trace("minilm", 2, 50, queue_s=0.004, tokenise_s=0.001, inference_s=0.02)
assert 'sie_worker_model_items_total{model="minilm"} 2.0' in telemetry.render()[0].decode()
began = time.monotonic()
telemetry.shutdown(timeout_s=0.5)
print(time.monotonic() - began, flush=True)
"""


def test_a_collector_that_is_away_delays_nobody() -> None:
    """Not the shutdown, and not the end of the process, though the exporters still try to reach it."""
    began = time.monotonic()
    process = subprocess.Popen([sys.executable, "-c", AWAY], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    took = float(process.stdout.readline())
    told = time.monotonic()
    _, errors = process.communicate(timeout=30)
    assert took < 2.0
    assert time.monotonic() - told < 2.0, f"after {told - began:.1f} s the process would not end"
    assert (process.returncode, "Traceback" in errors) == (0, False)


def test_sending_without_the_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.metric_exporter", None)
    with pytest.raises(ConfigError, match=r"pip install 'sie-core\[otlp\]'") as caught:
        Telemetry.create(TelemetryConfig(otlp_endpoint="http://127.0.0.1:4318"), environ={})
    assert caught.value.problems[0].path == "telemetry.otlp_endpoint"


def test_importing_telemetry_loads_no_sdk() -> None:
    code = (
        "import sys, sie_core.telemetry, sie_core.serving;"
        "sie_core.telemetry.Telemetry.disabled().model('m').answered(1, 1, 0.1);"
        "print([name for name in sys.modules if name.split('.')[0] in ('opentelemetry', 'prometheus_client')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
