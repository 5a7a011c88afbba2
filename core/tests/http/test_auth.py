"""Keys and roles."""

from __future__ import annotations

import httpx
import pytest
from sie_core import ConfigError
from sie_core.config import ServerConfig
from sie_core.http import check_bind
from website import Start, key_line

KEYS = (key_line("inference", "in-key"), key_line("admin", "root-key"))

PATHS = [
    ("GET", "/healthz", None),
    ("GET", "/health", None),
    ("GET", "/", None),
    ("GET", "/readyz", None),
    ("GET", "/v1/models", "inference"),
    ("GET", "/v1/models/mini", "inference"),
    ("GET", "/v1/status", "inference"),
    ("GET", "/metrics", "inference"),
    ("POST", "/v1/embeddings", "inference"),
    ("POST", "/v1/encode/mini", "inference"),
    ("GET", "/nowhere", "inference"),
    ("GET", "/v1/admin/decisions", "admin"),
    ("POST", "/v1/admin/models/mini/load", "admin"),
    ("POST", "/v1/admin/models/mini/nothing", "admin"),
    ("GET", "/v1/admin", "admin"),
]


@pytest.mark.parametrize(("method", "path", "role"), PATHS)
async def test_who_may_ask_for_what(served: Start, method: str, path: str, role: str | None) -> None:
    async def status(key: str | None) -> int:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        return (await s.http.request(method, path, headers=headers)).status_code

    async with served(api_keys=KEYS) as s:
        got = {key: await status(key) for key in (None, "wrong", "in-key", "root-key")}
    refused = {401, 403}
    if role is None:
        assert not refused & set(got.values())
        return
    assert got[None] == got["wrong"] == 401
    assert got["in-key"] == 403 if role == "admin" else got["in-key"] not in refused
    assert got["root-key"] not in refused


@pytest.mark.parametrize(
    "header",
    ["in-key", "Basic in-key", "Bearer", "Bearer ", "Bearer in-key2", "Bearer in-ke", "bearer  IN-KEY", "Bearer é"],
)
async def test_headers_that_are_no_key(served: Start, header: str) -> None:
    async with served(api_keys=KEYS) as s:
        response = await s.http.get("/v1/models", headers={"authorization": header.encode()})
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    assert response.headers["x-should-retry"] == "false"
    assert response.json().keys() == {"detail", "error"}
    assert response.json()["detail"]["code"] == "UNAUTHORIZED"


async def test_the_scheme_is_read_in_any_case(served: Start) -> None:
    async with served(api_keys=KEYS) as s:
        response = await s.http.get("/v1/models", headers={"authorization": "bearer in-key"})
    assert response.status_code == 200


@pytest.mark.parametrize("name", ["api-key", "x-api-key"])
async def test_keys_in_headers_of_their_own(served: Start, name: str) -> None:
    """G7: clients of other services send their key in ``api-key`` or ``x-api-key``."""
    async with served(api_keys=KEYS) as s:

        async def status(path: str, **headers: str) -> int:
            return (await s.http.get(path, headers=headers)).status_code

        assert await status("/v1/models", **{name: "in-key"}) == 200
        assert await status("/v1/models", **{name: "wrong"}) == 401
        assert await status("/v1/models", **{name: ""}) == 401
        assert await status("/v1/admin/decisions", **{name: "in-key"}) == 403
        assert await status("/v1/admin/decisions", **{name: "root-key"}) == 200
        assert await status("/v1/models", authorization="Basic eDp5", **{name: "in-key"}) == 200
        assert await status("/v1/models", authorization="Bearer wrong", **{name: "in-key"}) == 401, "Bearer goes first"


async def test_refusals_speak_the_dialect_of_their_path(served: Start) -> None:
    async with served(api_keys=KEYS) as s:
        openai = await s.embed()
        native = await s.encode()
    assert openai.json()["error"]["type"] == "authentication_error"
    assert native.json()["detail"]["code"] == "UNAUTHORIZED"


async def test_a_refused_client_does_not_reach_the_body(served: Start) -> None:
    async with served(api_keys=KEYS, max_body_bytes=1024) as s:
        response = await s.embed(input="x" * 5000)
    assert response.status_code == 401


@pytest.mark.parametrize("root", ["/prefix", "/prefix/", "/v1"])
async def test_a_prefix_does_not_open_the_admin_routes(served: Start, root: str) -> None:
    headers = {"authorization": "Bearer in-key"}
    async with served(api_keys=KEYS) as s:
        transport = httpx.ASGITransport(s.app, root_path=root)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as behind:
            path = root.rstrip("/") + "/v1/admin/decisions"
            forbidden = await behind.get(path, headers=headers)
            allowed = await behind.get(path, headers={"authorization": "Bearer root-key"})
            models = await behind.get(root.rstrip("/") + "/v1/models", headers=headers)
    assert [forbidden.status_code, allowed.status_code, models.status_code] == [403, 200, 200]


@pytest.mark.parametrize("root", ["/sie", "/sie/", "/a/b"])
async def test_a_prefix_is_a_setting(served: Start, root: str) -> None:
    """G7: ``server.root_path``, for proxies that leave the prefix in the path and for those that take it off."""
    headers = {"authorization": "Bearer in-key"}
    prefix = root.rstrip("/")
    async with served(api_keys=KEYS, root_path=root) as s:
        found = {
            path: (await s.http.get(path, headers=headers)).status_code
            for path in (f"{prefix}/v1/models", "/v1/models", f"{prefix}x/v1/models", f"{prefix}/v1/admin/decisions")
        }
        document = (await s.http.get(f"{prefix}/openapi.json", headers=headers)).json()
    assert list(found.values()) == [200, 200, 404, 403]
    assert document["servers"][0]["url"] == prefix


async def test_without_keys_everything_is_allowed(served: Start) -> None:
    async with served() as s:
        assert (await s.http.get("/v1/admin/decisions")).status_code == 200


async def test_a_malformed_key_line_is_refused_without_repeating_it(served: Start) -> None:
    with pytest.raises(ConfigError) as caught:
        async with served(api_keys=("inference:me:my-secret-key",)):
            pass
    assert "my-secret-key" not in caught.value.message


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.7", "sie.example"])
def test_an_open_address_wants_keys(host: str) -> None:
    with pytest.raises(ConfigError, match="api_keys_file"):
        check_bind(ServerConfig(host=host))
    check_bind(ServerConfig(host=host, api_keys=KEYS))
    check_bind(ServerConfig(host=host, allow_insecure_bind=True))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "localhost", "::1"])
def test_loopback_needs_none(host: str) -> None:
    check_bind(ServerConfig(host=host))
