"""What a visitor finds at the door."""

from __future__ import annotations

import re

import pytest
from website import Start, key_line

BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"


@pytest.mark.parametrize("keys", [(), (key_line("inference", "reader"),)], ids=["open", "keys"])
@pytest.mark.parametrize(
    "accept", ["*/*", "application/json", "application/msgpack", "", "text/html, application/json"]
)
async def test_the_root_says_what_this_is_and_where_to_go(served: Start, keys: tuple[str, ...], accept: str) -> None:
    """C7: with no key, too; where it leads then wants one as ever."""
    async with served(api_keys=keys) as s:
        answer = await s.http.get("/", headers={"accept": accept})
        body = answer.json()
        s.http.headers["authorization"] = "Bearer reader"
        followed = [(await s.http.get(path)).status_code for name, path in body["links"].items() if name != "metrics"]
    assert (answer.status_code, answer.headers["content-type"], body["name"]) == (200, "application/json", "sie")
    assert set(followed) == {200}
    assert body["openai_base_url"] == "/v1"


async def test_browsers_get_a_page(served: Start) -> None:
    """C7: a plain one, whose links lead somewhere, also behind a prefix."""
    async with served(root_path="/ai") as s:
        page = await s.http.get("/", headers={"accept": BROWSER})
        links = re.findall(r'href="([^"]+)"', page.text)
        followed = [(await s.http.get(link)).status_code for link in links if not link.endswith("/metrics")]
        prefixed = await s.http.get("/ai/", headers={"accept": BROWSER})
        head = await s.http.head("/", headers={"accept": BROWSER})
    assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert "script" not in page.text
    assert len(links) > 3
    assert all(link.startswith("/ai/") for link in links)
    assert set(followed) == {200}
    assert prefixed.text == page.text
    assert head.status_code == 200


async def test_health_is_healthz(served: Start) -> None:
    """C7: both names are in use elsewhere."""
    async with served(api_keys=(key_line("inference", "reader"),)) as s:
        health, healthz = await s.http.get("/health"), await s.http.get("/healthz")
        wrong = await s.http.post("/health")
    assert (health.status_code, health.content) == (healthz.status_code, healthz.content) == (200, b'{"status":"ok"}')
    assert wrong.status_code == 405
