"""Bodies that would blow up when they are decoded, and large ones that hold up nobody."""

from __future__ import annotations

import asyncio
import json
import struct
import threading
from typing import Any

import msgspec
import pytest
from sie_core import BodyTooLarge
from sie_core.http.bulk import check_bulk
from website import Start

JSON = {"content-type": "application/json"}
MSGPACK = {"content-type": "application/msgpack"}
BODY = 34 * 1024 * 1024


def listed(count: int, each: bytes) -> bytes:
    """A msgpack map whose ``items`` are so many of these."""
    return b"\x81\xa5items\xdd" + struct.pack(">I", count) + each * count


BOMBS: list[tuple[dict[str, str], bytes]] = [
    (MSGPACK, listed(300_000, b"\x90")),
    (MSGPACK, listed(300_000, b"\x80")),
    (MSGPACK, listed(150_000, b"\x81\x01\x90")),
    (MSGPACK, listed(120_000, b"\x91\x91\x91\x91\xa1x")),
    (MSGPACK, listed(120_000, b"\xdc\x00\x00")),
    (MSGPACK, listed(120_000, b"\xdf\x00\x00\x00\x00")),
    (MSGPACK, listed(120_000, b"\x92\xc7\x02\x05xx\x91\xd5\x01xx")),
    (JSON, b'{"items":[' + b"[]," * 300_000 + b"[]]}"),
    (JSON, b'{"items":[' + b"{}," * 300_000 + b"{}]}"),
    (JSON, b'{"items":[' + b'{"\\"[":[1]},' * 100_000 + b"{}]}"),
]


@pytest.mark.parametrize("number", range(len(BOMBS)))
async def test_a_body_of_countless_lists_is_refused_before_it_is_decoded(served: Start, number: int) -> None:
    """F7: by what it holds, in JSON and msgpack alike; for a model that is not there by its name alone."""
    headers, body = BOMBS[number]
    async with served() as s:
        known = await s.http.post("/v1/encode/mini", content=body, headers=headers | {"accept": "application/json"})
        other = await s.http.post("/v1/embeddings", content=body, headers=headers)
        unknown = await s.http.post("/v1/encode/nope", content=body, headers=headers | {"accept": "application/json"})
        assert (await s.embed()).status_code == 200
    assert (known.status_code, known.json()["detail"]["code"]) == (413, "BODY_TOO_LARGE")
    assert "100000 lists and objects" in known.json()["detail"]["message"]
    assert other.status_code == 413
    assert unknown.status_code == 404


@pytest.mark.parametrize("path", ["encode", "score", "extract", "generate"])
async def test_what_the_path_says_is_checked_before_the_body_is_read(served: Start, path: str) -> None:
    """F7: an unknown model is a 404, whatever the body is."""
    async with served() as s:
        response = await s.http.post(f"/v1/{path}/nope", content=b"{", headers=JSON)
        assert (await s.http.post(f"/v1/{path}/mini", content=b"{", headers=JSON)).status_code == 400
    assert response.status_code == 404


@pytest.mark.parametrize("msgpack", [False, True])
def test_so_many_values_and_no_more(msgpack: bool) -> None:
    """F7: of any size; a body of token ids may hold as many as fit into the largest one at eight bytes each."""
    pack: Any = msgspec.msgpack.encode if msgpack else msgspec.json.encode
    most = 200_000
    for value in (1, 200, 300, 70_000, 1 << 40, 1.5, True, None, "ab"):
        check_bulk(pack({"input": [value] * (most - 10)}), 8 * most, msgpack=msgpack)
        with pytest.raises(BodyTooLarge, match=str(most)):
            check_bulk(pack({"input": [value] * (most + 10)}), 8 * most, msgpack=msgpack)


@pytest.mark.parametrize("text", ["{[,]}" * 400_000, '\\"[,' * 500_000, "é[" * 100_000, "1,2,3," * 1_000_000])
@pytest.mark.parametrize("msgpack", [False, True])
def test_letters_of_texts_are_not_counted(text: str, msgpack: bool) -> None:
    """F7: what is within a string, escaped or not, makes nothing."""
    body = {"items": [{"text": text}, {"text": "[" * 150_000}, {"images": ["x" * 100_000]}]}
    check_bulk(msgspec.msgpack.encode(body) if msgpack else json.dumps(body).encode(), BODY, msgpack=msgpack)


@pytest.mark.parametrize("cut", range(12))
def test_what_is_cut_off_is_left_to_the_decoder(cut: int) -> None:
    body = msgspec.msgpack.encode({"a": b"x" * 70_000, "b": [1.5, 300, -1, None, msgspec.msgpack.Ext(5, b"xyz")]})
    check_bulk(body[: len(body) - cut], BODY, msgpack=True)


async def test_large_bodies_are_decoded_beside_the_event_loop(served: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """F7: on a thread, one at a time; when as much waits as may, the next one is told to come again."""
    from sie_core.http import reading

    threads: set[str] = set()
    held, go = threading.Event(), threading.Event()
    decode = reading.decode

    def watched(body: bytes, *, msgpack: bool) -> Any:
        threads.add(threading.current_thread().name)
        if len(body) > 200_000:
            held.set()
            go.wait(10)
        return decode(body, msgpack=msgpack)

    monkeypatch.setattr(reading, "decode", watched)
    large = ["word " * 15 for _ in range(1000)]
    huge = [*large, "x" * 300_000]
    async with served(max_body_bytes=500_000) as s:
        assert (await s.embed(input=large, truncate=True)).status_code == 200
        assert threads == {"sie-reader_0"}
        waiting = [asyncio.create_task(s.embed(input=huge, truncate=True)) for _ in range(5)]
        while not held.is_set():
            await asyncio.sleep(0.001)
        assert (await s.embed()).status_code == 200  # small ones go past
        refused = await s.embed(input=huge, truncate=True)
        go.set()
        assert {(await one).status_code for one in waiting} == {200}
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "RESOURCE_EXHAUSTED")
    assert 1 <= int(refused.headers["retry-after"]) <= 120


@pytest.mark.parametrize("path", ["load", "pin", "loras/x"])
async def test_settings_are_small(served: Start, path: str) -> None:
    """F7: bodies of the admin routes need no megabytes."""
    async with served() as s:
        response = await s.http.post(f"/v1/admin/models/mini/{path}", json={"wait_s": 1, "x": "x" * 70_000})
    assert response.status_code == 413
