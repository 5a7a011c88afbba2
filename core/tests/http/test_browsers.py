"""Web pages: which may use a server without keys, what pages of allowed origins may read, and what a name tells."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from website import Served, Start, key_line
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

KEYS = (key_line("inference", "in-key"), key_line("admin", "root-key"))
PAGE = "https://evil.example"
OURS = "https://app.example"
JSON = {"content-type": "application/json"}


async def ask(s: Served, headers: dict[str, str], path: str = "/v1/status", method: str = "GET") -> httpx.Response:
    return await s.http.request(method, path, headers=headers)


# --- the name that a request gives the server -----------------------------------------------------


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LocalHost:8080", 200),
        ("localhost.", 200),
        ("127.0.0.1:8080", 200),
        ("127.8.8.8", 200),
        ("[::1]:8080", 200),
        ("[::1]", 200),
        ("::1", 200),
        ("evil.example", 403),
        ("evil.example:8080", 403),
        ("localhost.evil.example", 403),
        ("127.0.0.1.evil.example", 403),
        ("evil.localhost", 403),
        ("192.168.1.7", 403),
        ("0.0.0.0:8080", 403),
        ("localhost:evil.example", 403),
        ("user@localhost", 403),
        ("", 403),
        ("é", 403),
    ],
)
async def test_without_keys_only_loopback_names_are_hosts(served: Start, host: str, status: int) -> None:
    """F1: DNS that a page points at loopback: without keys the name has to be one of loopback, on every path."""
    async with served() as s:
        for path in ("/v1/status", "/healthz", "/openapi.json", "/nowhere"):
            response = await ask(s, {"host": host.encode()}, path)  # type: ignore[dict-item]
            assert response.status_code == (404 if path == "/nowhere" and status == 200 else status)
    if status == 403:
        error = response.json()["error"]
        assert (error["code"], "server.allowed_hosts" in error["message"]) == ("FORBIDDEN", True)


@pytest.mark.parametrize(
    ("settings", "host", "status"),
    [
        ({"allowed_hosts": ("sie.example",)}, "SIE.example:8080", 200),
        ({"allowed_hosts": ("sie.example",)}, "other.example", 403),
        ({"allowed_hosts": ("*",)}, "evil.example", 200),
        ({"host": "sie.example", "allow_insecure_bind": True}, "sie.example", 200),
        ({"host": "0.0.0.0", "allow_insecure_bind": True}, "192.168.1.7:8080", 200),
        ({"host": "::", "allow_insecure_bind": True}, "[2001:db8::7]:8080", 200),
        ({"host": "0.0.0.0", "allow_insecure_bind": True}, "evil.example", 403),
        ({"api_keys": KEYS}, "evil.example", 200),
    ],
)
async def test_other_hosts_are_named_or_keys_are_needed(
    served: Start, settings: dict[str, Any], host: str, status: int
) -> None:
    """F1: names of ``server.allowed_hosts``; addresses where other machines may ask; any name where keys are needed."""
    async with served(**settings) as s:
        response = await ask(s, {"host": host, "authorization": "Bearer in-key"})
    assert response.status_code == status


# --- pages ----------------------------------------------------------------------------------------


FOREIGN: list[dict[str, str]] = [
    {"origin": PAGE},
    {"origin": "null"},
    {"origin": "http://localhost:3000"},
    {"origin": "http://127.0.0.1"},
    {"origin": ""},
    {"sec-fetch-site": "cross-site"},
    {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors", "sec-fetch-dest": "image"},
    {"origin": "http://localhost", "sec-fetch-site": "cross-site"},
]


@pytest.mark.parametrize("headers", FOREIGN, ids=str)
async def test_foreign_pages_may_do_nothing_without_keys(served: Start, headers: dict[str, str]) -> None:
    """F1: a page's bodyless POST pinned and parked, its body without a type was read as JSON."""
    async with served() as s:
        await s.service.load("mini")
        for path in ("/v1/admin/models/mini/pin", "/v1/admin/models/mini/unload", "/v1/embeddings"):
            response = await ask(s, headers, path, "POST")
            assert response.status_code == 403
            assert "FORBIDDEN" in response.text
            assert "access-control-allow-origin" not in response.headers
        assert (await ask(s, headers)).status_code == 403
        model = (await s.http.get("/v1/models/mini")).json()
        assert (model["loaded"], model["residency"]) == (True, "resident")
        assert not s.registry.status("mini").pinned


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://localhost"},
        {"origin": "https://localhost"},
        {"origin": "http://LOCALHOST", "sec-fetch-site": "same-origin"},
        {"origin": "http://localhost:8080", "host": "localhost:8080"},
        {"sec-fetch-site": "none", "sec-fetch-mode": "navigate"},
        {"sec-fetch-site": "same-origin"},
        {"sec-fetch-site": "same-site"},
        {},
    ],
    ids=str,
)
async def test_what_comes_from_here_or_from_no_page_passes(served: Start, headers: dict[str, str]) -> None:
    """F1: pages of the server itself, addresses that somebody types, and clients that are no browsers."""
    async with served() as s:
        assert (await ask(s, headers)).status_code == 200


async def test_with_keys_a_page_needs_a_key_like_everybody(served: Start) -> None:
    """F1: no page knows a key, so neither host nor origin is looked at."""
    async with served(api_keys=KEYS) as s:
        for headers in FOREIGN:
            assert (await ask(s, headers)).status_code == 401
            assert (await ask(s, {**headers, "authorization": "Bearer in-key"})).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [{"Origin": PAGE}, {"Sec-Fetch-Site": "cross-site"}, {"Host": "evil.example"}],
    ids=str,
)
async def test_foreign_pages_get_no_websocket(listening: Start, headers: dict[str, str]) -> None:
    """F1: a cross-origin ``/ws/status`` was accepted."""
    async with listening() as s:
        url = s.url.replace("http://", "ws://") + "/ws/status"
        if host := headers.pop("Host", None):
            url = url.replace("127.0.0.1", host)
            port = int(s.url.rpartition(":")[2])
            opening = connect(url, host="127.0.0.1", port=port)
        else:
            opening = connect(url, additional_headers=headers)
        with pytest.raises(InvalidStatus) as refused:
            async with opening:
                pass
        assert refused.value.response.status_code == 403
        async with connect(s.url.replace("http://", "ws://") + "/ws/status", origin=s.url) as watching:  # type: ignore[arg-type]
            assert json.loads(await watching.recv())["models"]


# --- bodies ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"model": "mini", "input": "x"}),
        ("/v1/encode/mini", {"items": [{"text": "x"}]}),
        ("/v1/rerank", {"model": "mini", "query": "q", "documents": ["d"]}),
        ("/v1/admin/models/mini/unload", {"force": True}),
        ("/v1/admin/models/adaptable/loras/x", {"source": "path:/x"}),
    ],
)
@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("keys", [(), KEYS])
async def test_a_body_has_a_media_type(
    served: Start, path: str, body: dict[str, Any], chunked: bool, keys: tuple[str, ...]
) -> None:
    """F1: without a type it was read as JSON, which spared a page the question whether it may send JSON."""
    raw = json.dumps(body).encode()

    async def pieces() -> Any:
        yield raw

    async with served(api_keys=keys) as s:
        headers = {"authorization": "Bearer root-key"}
        refused = await s.http.post(path, content=pieces() if chunked else raw, headers=headers)
        typed = await s.http.post(path, content=raw, headers={**headers, **JSON})
    error = refused.json()["error"] if "error" in refused.json() else refused.json()["detail"]
    assert (refused.status_code, error["code"], error["param"]) == (415, "UNSUPPORTED_MEDIA_TYPE", "content-type")
    assert typed.status_code != 415


async def test_no_body_needs_no_media_type(served: Start) -> None:
    """F1: actions without a body go on as before."""
    async with served() as s:
        await s.service.load("mini")
        assert (await s.http.post("/v1/admin/models/mini/pin")).status_code == 200
        assert (await s.http.post("/v1/admin/models/mini/unpin", headers={"content-length": "0"})).status_code == 200
        assert (await s.http.post("/v1/embeddings")).status_code == 400


# --- pages that may ------------------------------------------------------------------------------


ASKING = {
    "origin": OURS,
    "sec-fetch-site": "cross-site",
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type",
}


@pytest.mark.parametrize("keys", [(), KEYS])
@pytest.mark.parametrize(("origins", "allowed"), [((OURS,), OURS), (("*",), "*"), (("http://x:1", OURS), OURS)])
async def test_pages_of_allowed_origins_may_ask_and_read(
    served: Start, keys: tuple[str, ...], origins: tuple[str, ...], allowed: str
) -> None:
    """G7: CORS for the origins of ``server.cors_origins``; the preflight needs no key."""
    async with served(api_keys=keys, cors_origins=origins) as s:
        before = await ask(s, ASKING, "/v1/embeddings", "OPTIONS")
        headers = {"origin": OURS, "sec-fetch-site": "cross-site", "authorization": "Bearer in-key"}
        answer = await s.http.post("/v1/embeddings", json={"model": "mini", "input": "x"}, headers=headers)
        wrong = await s.http.post("/v1/embeddings", json={"model": "none", "input": "x"}, headers=headers)
        async with s.http.stream(
            "POST", "/v1/completions", json={"model": "chat", "prompt": "x", "stream": True}, headers=headers
        ) as stream:
            assert stream.headers["access-control-allow-origin"] == allowed
    assert before.status_code == 204
    assert before.headers["access-control-allow-methods"] == "OPTIONS, POST"
    assert before.headers["access-control-allow-headers"] == "authorization,content-type"
    assert (answer.status_code, wrong.status_code) == (200, 404)
    for response in (before, answer, wrong):
        assert response.headers["access-control-allow-origin"] == allowed
        assert response.headers["vary"] == "origin"


async def test_pages_of_other_origins_get_no_permission(served: Start) -> None:
    """G7: the preflight of another page is refused, or, where there are keys, answered without permission."""
    asking = {**ASKING, "origin": PAGE}
    async with served(cors_origins=(OURS,)) as s:
        assert (await ask(s, asking, "/v1/embeddings", "OPTIONS")).status_code == 403
    async with served(cors_origins=(OURS,), api_keys=KEYS) as s:
        answer = await ask(s, asking, "/v1/embeddings", "OPTIONS")
        read = await ask(s, {"origin": PAGE, "authorization": "Bearer in-key"})
    assert (answer.status_code, read.status_code) == (204, 200)
    for response in (answer, read):
        assert not [name for name in response.headers if name.startswith("access-control")]


@pytest.mark.parametrize(
    ("path", "methods"),
    [
        ("/v1/embeddings", "OPTIONS, POST"),
        ("/v1/models/mini", "GET, HEAD, OPTIONS"),
        ("/v1/admin/models/mini/loras/x", "DELETE, OPTIONS, POST"),
        ("/healthz", "GET, HEAD, OPTIONS"),
    ],
)
async def test_options_tells_the_methods_and_needs_no_key(served: Start, path: str, methods: str) -> None:
    """G7: OPTIONS needs no key."""
    async with served(api_keys=KEYS) as s:
        response = await ask(s, {}, path, "OPTIONS")
        unknown = await ask(s, {}, "/nowhere", "OPTIONS")
    assert (response.status_code, response.content, response.headers["allow"]) == (204, b"", methods)
    assert not {"content-length", "content-type"}.intersection(response.headers)
    assert unknown.status_code == 401
