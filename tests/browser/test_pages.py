"""A real browser with two origins: what a page of another site can do to a server on loopback, and what an allowed one.

The page comes from ``http://localhost``, the server is ``http://127.0.0.1``: other origins, and other sites.
"""

from __future__ import annotations

import hashlib
import json
import os
import queue
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium on PATH: install it to see what pages can do")

CONFIG = """\
models:
  - {name: mini, adapter: fake, options: {dims: 4}}
"""
EVIL = "evil.example"
"""A name that its owner lets point at loopback."""

PAGE = """<!doctype html><title>a page</title><script>
const at = %s, key = %s;
const authorised = key ? {authorization: "Bearer " + key} : {};
async function tried(act) { try { return await act(); } catch (error) { return String(error.name); } }
function socket() {
  return new Promise(done => {
    const watching = new WebSocket(at.replace("http", "ws") + "/ws/status");
    watching.onmessage = () => done("message");
    watching.onerror = () => done("refused");
  });
}
async function all() {
  const admin = at + "/v1/admin/models/mini/";
  const embed = {method: "POST", body: JSON.stringify({model: "mini", input: "x"})};
  const found = {
    pin: await tried(async () => (await fetch(admin + "pin", {method: "POST", mode: "no-cors"})).type),
    unload: await tried(async () => (await fetch(admin + "unload", {
      method: "POST", mode: "no-cors", body: new Blob([JSON.stringify({force: true})])})).type),
    read: await tried(async () => (await fetch(at + "/v1/status", {headers: authorised})).status),
    embed: await tried(async () => (await (await fetch(at + "/v1/embeddings", {
      ...embed, headers: {"content-type": "application/json", ...authorised}})).json()).data.length),
    refused: await tried(async () => (await (await fetch(at + "/v1/embeddings", {
      ...embed, body: "{", headers: {"content-type": "application/json", ...authorised}})).json()).error.code),
    socket: await socket(),
  };
  await fetch("/found", {method: "POST", body: JSON.stringify(found)});
}
all();
</script>"""


class _Site:
    """The other origin: one page, which tells what it could do."""

    def __init__(self) -> None:
        site = self
        self.target = ""
        """The server that the page asks, with ``key``."""
        self.key = ""
        self.told: queue.Queue[dict[str, Any]] = queue.Queue()

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                page = PAGE % (json.dumps(site.target), json.dumps(site.key))
                self._answer(page.encode() if self.path == "/" else b"")

            def do_POST(self) -> None:
                site.told.put(json.loads(self.rfile.read(int(self.headers["content-length"]))))
                self._answer(b"")

            def _answer(self, body: bytes) -> None:
                self.send_response(200)
                self.send_header("content-type", "text/html; charset=utf-8")
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://localhost:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def site() -> Iterator[_Site]:
    page = _Site()
    yield page
    page.close()


def _command(profile: Path, *arguments: str) -> list[str]:
    assert BROWSER is not None
    quiet = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    reach = [f"--host-resolver-rules=MAP {EVIL} 127.0.0.1", "--no-proxy-server"]
    return [BROWSER, *quiet, *reach, f"--user-data-dir={profile}", *arguments]


@pytest.fixture
def opened(tmp_path: Path, site: _Site) -> Callable[[], dict[str, Any]]:
    """Open the page of ``site`` in a browser; what it could do."""

    def open_page() -> dict[str, Any]:
        browser = subprocess.Popen(
            _command(tmp_path / "profile", site.url),
            env={**os.environ, "HOME": str(tmp_path)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            return site.told.get(timeout=60)
        finally:
            browser.terminate()
            browser.wait(30)

    return open_page


def test_a_page_of_another_site_can_do_nothing(start_server: Any, site: _Site, opened: Any) -> None:
    """F1: any web page could pin, unload, read and watch a keyless server on loopback."""
    server = start_server(CONFIG)
    server.load("mini")
    site.target = server.url
    found = opened()
    # What "no-cors" sends is sent; "opaque" says that the page saw nothing of the answer.
    assert found.pop("pin") in ("opaque", "TypeError")
    assert found.pop("unload") in ("opaque", "TypeError")
    assert found == {"read": "TypeError", "embed": "TypeError", "refused": "TypeError", "socket": "refused"}
    models = httpx.get(f"{server.url}/v1/status").json()["models"]
    assert [(model["residency"], model["pinned"]) for model in models] == [("resident", False)]


def test_a_name_that_points_at_loopback_reads_nothing(start_server: Any, tmp_path: Path) -> None:
    """F1: under a name of its own (DNS rebinding) a page is of the server's origin, and could read everything."""
    server = start_server(CONFIG)

    def shown(name: str) -> str:
        command = _command(tmp_path / "profile", "--dump-dom", f"http://{name}:{server.port}/v1/status")
        env = {**os.environ, "HOME": str(tmp_path)}
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, env=env).stdout

    foreign = shown(EVIL)
    assert "FORBIDDEN" in foreign
    assert "uptime_s" not in foreign
    assert "uptime_s" in shown("localhost")


@pytest.mark.parametrize("key", ["", "app-key"])
def test_a_page_of_an_allowed_origin_works(start_server: Any, site: _Site, opened: Any, key: str) -> None:
    """G7: ``server.cors_origins``: answers and errors can be read, with and without keys."""
    line = f"  api_keys: ['inference:app:{hashlib.sha256(key.encode()).hexdigest()}']\n" if key else ""
    with_key = {"env": {"SIE_CORS_ORIGINS": site.url}} if not key else {}
    settings = f"server:\n  cors_origins: ['{site.url}']\n{line}" if key else ""
    site.target, site.key = start_server(settings + CONFIG, **with_key).url, key
    found = opened()
    assert (found["read"], found["embed"], found["refused"]) == (200, 1, "INVALID_INPUT")
