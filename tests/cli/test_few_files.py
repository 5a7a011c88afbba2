"""A server that may open few files, and many connections that hold them."""

from __future__ import annotations

import contextlib
import resource
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

MODELS = "models: [{name: mini, adapter: fake, options: {dims: 4}}]\n"
FILES = 64


@pytest.mark.skipif(sys.platform != "linux", reason="counts on Linux's limit of open files")
def test_half_sent_requests_lock_nobody_out(
    tmp_path: Path, launch: Callable[..., Any], until: Callable[..., Any]
) -> None:
    """F3: with 64 descriptors a hundred half-sent requests locked everybody out."""
    (tmp_path / "sie.yaml").write_text(MODELS, encoding="utf-8")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    def few() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, FILES))

    with (tmp_path / "log.txt").open("wb") as log:
        process = launch("serve", "--port", port, preexec_fn=few, stdout=log, stderr=log)

    def healthy() -> bool:
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"http://127.0.0.1:{port}/healthz", timeout=5).status_code == httpx.codes.OK
        return False

    until(healthy, what="a start")
    with contextlib.ExitStack() as stack:
        for _ in range(100):
            with contextlib.suppress(OSError):  # more than there are files: some are turned away
                one = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5))
                one.sendall(b"GET /healthz HTTP/1.1\r\n")
        until(healthy, seconds=10, what="an answer beside half-sent requests")
        body = {"model": "mini", "input": "hello"}
        assert httpx.post(f"http://127.0.0.1:{port}/v1/embeddings", json=body, timeout=20).status_code == httpx.codes.OK
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0
    said = (tmp_path / "log.txt").read_text(encoding="utf-8")
    assert f"the limit of open files, {FILES}," in said
    assert "Traceback" not in said
