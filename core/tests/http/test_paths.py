"""Paths that do not exist: what may have been meant."""

from __future__ import annotations

import pytest
from website import Start


@pytest.mark.parametrize(
    ("method", "path", "meant"),
    [
        ("POST", "/v1/embeddings/", "/v1/embeddings"),
        ("POST", "/v1//embeddings", "/v1/embeddings"),
        ("POST", "//v1/embeddings", "/v1/embeddings"),
        ("POST", "/embeddings", "/v1/embeddings"),
        ("POST", "/chat/completions", "/v1/chat/completions"),
        ("POST", "/v1/v1/embeddings", "/v1/embeddings"),
        ("POST", "/api/v1/embeddings", "/v1/embeddings"),
        ("POST", "/openai/deployments/mini/embeddings", "/v1/embeddings"),
        ("POST", "/encode/org/mini", "/v1/encode/org/mini"),
        ("GET", "/models", "/v1/models"),
        ("GET", "/status", "/v1/status"),
        ("GET", "/metrics/", "/metrics"),
        ("POST", "/v1/embedings", "/v1/embeddings"),
        ("POST", "/v1/chat/completion", "/v1/chat/completions"),
        ("GET", "/nowhere", None),
        ("GET", "/" + "x/" * 5000, None),
    ],
)
async def test_an_unknown_path_says_what_was_meant(served: Start, method: str, path: str, meant: str | None) -> None:
    """G7: paths that are nearly right were a bare "Not Found"."""
    async with served() as s:
        response = await s.http.request(method, f"{s.url}{path}")
    assert response.status_code == 404
    body = response.json()
    message = (body.get("error") or body["detail"])["message"]
    assert message.startswith(f"unknown path: {method} /")
    assert len(message) < 1200
    assert (f"did you mean {meant}?" in message) if meant else ("did you mean" not in message)


async def test_a_prefix_that_is_not_configured_is_told(served: Start) -> None:
    """G7: behind a proxy that leaves its prefix in the path, the setting is named."""
    async with served() as s:
        prefixed = (await s.http.post("/sie/v1/embeddings")).json()
        plain = (await s.http.post("/v1/v1/embeddings")).json()
    assert "with /sie in front, set server.root_path" in prefixed["error"]["message"]
    assert "root_path" not in plain["error"]["message"]
