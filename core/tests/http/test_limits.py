"""Bodies that are too large, too slow, too deep, cut off, or no bodies at all; and clients that leave."""

from __future__ import annotations

import asyncio
import gzip
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from sie_testing import FaultPoints
from website import Served, Start, until

JSON = {"content-type": "application/json"}
MSGPACK = {"content-type": "application/msgpack", "accept": "application/json"}


async def test_a_body_over_the_limit_is_a_413(served: Start) -> None:
    async with served(max_body_bytes=4096) as s:
        response = await s.embed(input="x" * 4096)
        native = await s.encode(items=[{"text": "x" * 4096}])
    assert (response.status_code, response.json()["error"]["code"]) == (413, "BODY_TOO_LARGE")
    assert response.json()["error"]["limit"] == 4096
    assert native.json()["detail"]["code"] == "BODY_TOO_LARGE"


@pytest.mark.parametrize("kind", [JSON, MSGPACK], ids=["json", "msgpack"])
@pytest.mark.parametrize(
    ("body", "coding"),
    [(gzip.compress(b'{"items": [{"text": "a"}]}'), "gzip"), (b"\x28\xb5\x2f\xfd\x04\x00\x11", "zstd")],
    ids=["gzip", "zstd"],
)
async def test_a_compressed_body_that_does_not_say_so(
    served: Start, body: bytes, coding: str, kind: dict[str, str]
) -> None:
    """G9: it is refused as one that does, rather than as broken text."""
    async with served() as s:
        response = await s.http.post("/v1/encode/mini", content=body, headers=kind)
    detail = response.json()["detail"]
    assert (response.status_code, detail["code"], detail["param"]) == (
        415,
        "UNSUPPORTED_MEDIA_TYPE",
        "content-encoding",
    )
    assert coding in detail["message"]


async def test_json_in_another_encoding_is_told_from_broken_json(served: Start) -> None:
    """G9: the parser's own word for bytes that are not UTF-8 is about surrogates."""
    text = '{"items": [{"text": "café"}]}'
    async with served() as s:
        answers = [
            await s.http.post("/v1/encode/mini", content=text.encode(coding), headers=JSON)
            for coding in ("latin-1", "utf-16")
        ]
        broken = await s.http.post("/v1/encode/mini", content=text.encode()[:-2], headers=JSON)
    assert [answer.status_code for answer in (*answers, broken)] == [400] * 3
    assert ["UTF-8" in answer.json()["detail"]["message"] for answer in (*answers, broken)] == [True, True, False]


async def test_a_body_without_a_length_is_counted_as_it_comes(listening: Start) -> None:
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        for _ in range(64):
            sent += 1
            yield b"x" * 65536
            await asyncio.sleep(0)

    async with listening(max_body_bytes=200_000) as s:
        response = await s.http.post("/v1/embeddings", content=endless(), headers=JSON)
        after = await s.embed()
    assert response.status_code == 413
    assert after.status_code == 200


async def test_a_content_length_over_the_limit_is_refused_before_the_body_comes(listening: Start) -> None:
    async with listening(max_body_bytes=4096) as s:
        answer = await talk(s, head("/v1/embeddings", 10**12))
    assert answer.startswith(b"HTTP/1.1 413 ")


async def test_a_text_over_the_limit_is_a_413_that_names_the_item(served: Start) -> None:
    wide = "é" * 1000  # two bytes each
    async with served(max_item_bytes=1999) as s:
        openai = await s.embed(input=["fine", wide])
        native = await s.encode(items=[{"text": "fine"}, {"text": wide}])
    assert openai.status_code == native.status_code == 413
    assert openai.json()["error"]["index"] == native.json()["detail"]["index"] == 1
    assert openai.json()["error"]["size"] == 2000


async def test_five_megabytes_of_text_under_the_default_limits(served: Start) -> None:
    async with served() as s:
        response = await s.embed(input=["fine", "word " * 1_000_000], truncate=True)
        fits = await s.embed(input=["fine", "word " * 400_000], truncate=True)
    assert (response.status_code, response.json()["error"]["index"]) == (413, 1)
    assert fits.status_code == 200
    assert fits.json()["usage"]["prompt_tokens"] == 17


async def test_a_list_of_too_many_token_ids_is_a_413(served: Start) -> None:
    async with served(max_item_bytes=400) as s:
        refused = await s.embed(input=[[1], [1] * 101])
        fits = await s.embed(input=[[1], [1] * 100], truncate=True)
    assert (refused.status_code, refused.json()["error"]["index"]) == (413, 1)
    assert fits.status_code == 200


async def test_absurd_names_and_values_are_refused_quickly_and_shown_in_short(served: Start) -> None:
    absurd = "mini" * 500_000
    began = time.monotonic()
    async with served() as s:
        answers = [
            await s.embed(model=absurd),
            await s.encode(absurd[:5000]),
            await s.embed(encoding_format=absurd),
            await s.encode(params={absurd: 1}),
            await s.encode(params={"output_dtype": absurd}),
            await s.encode(params={"output_types": [absurd]}),
            await s.http.get("/v1/admin/decisions?limit=" + "9" * 5000),
        ]
    assert [answer.status_code for answer in answers] == [404, 404, 400, 400, 400, 400, 400]
    assert max(len(answer.content) for answer in answers) < 2000
    assert time.monotonic() - began < 5


DEEP: list[tuple[str, str]] = [
    *(
        ("/v1/encode/mini", '{"items":[{"text":"a"}],"params":{"NAME":DEEP}}'.replace("NAME", name))
        for name in ("output_dtype", "output_types", "lora", "is_query", "ranges", "instruction")
    ),
    ("/v1/encode/mini", '{"items":[{"text":"a"}],"params":{"is_query":DEEP,"options":{"is_query":DEEP}}}'),
    ("/v1/embeddings", '{"model":"mini","input":"a","encoding_format":DEEP}'),
    *(
        ("/v2/embed", '{"model":"mini","texts":["a"],"NAME":DEEP}'.replace("NAME", name))
        for name in ("input_type", "truncate", "embedding_types")
    ),
    ("/v2/embed", '{"model":"mini","inputs":[{"content":[{"type":DEEP}]}]}'),
]


@pytest.mark.parametrize(("path", "body"), DEEP)
async def test_values_almost_too_deep_to_be_read_are_a_400(served: Start, path: str, body: str) -> None:
    async with served() as s:
        response = await s.http.post(path, content=body.replace("DEEP", "[" * 1015 + "]" * 1015), headers=JSON)
    assert response.status_code == 400, response.text
    assert len(response.content) < 2000


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/encode/mini", {"items": [{"text": "a"}] * 10, "params": {"instruction": "é" * 100}}),
        ("/v1/score/ranker", {"query": "a", "items": [{"text": "a"}] * 10, "instruction": "é" * 100}),
        ("/v1/extract/tagger", {"items": [{"text": "a"}] * 10, "params": {"instruction": "é" * 100}}),
        ("/v1/rerank", {"model": "ranker", "query": "a", "documents": ["a"] * 10, "instruction": "é" * 100}),
    ],
)
async def test_an_instruction_counts_for_each_text_that_it_goes_before(
    served: Start, path: str, body: dict[str, Any]
) -> None:
    async def asked(**limits: int) -> Any:
        async with served(**limits) as s:
            response = await s.http.post(path, json=body)
        error = response.json().get("error") or response.json().get("detail") or {}
        return response.status_code, error.get("size")

    assert await asked(max_item_bytes=199) == (413, 200)
    assert await asked(max_item_bytes=200, max_body_bytes=1999) == (413, 2000)
    assert (await asked(max_item_bytes=200, max_body_bytes=2000))[0] != 413


async def test_ten_thousand_texts_are_a_400_that_says_how_many_may_come(served: Start) -> None:
    async with served() as s:
        openai = await s.embed(input=["x"] * 10_000)
        native = await s.encode(items=[{"text": "x"}] * 10_000)
    for response in (openai.json()["error"], native.json()["detail"]):
        assert response["code"] == "INVALID_INPUT"
        assert response["index"] == 2048
        assert "2048" in response["message"]


NO_JSON: list[tuple[str, bytes]] = [
    ("empty", b""),
    ("cut off", b'{"model":"mini","inp'),
    ("no UTF-8", b'{"model":"mini","input":"\xff\xfe"}'),
    ("UTF-16", '{"model":"mini","input":"hello"}'.encode("utf-16")),
    ("NaN", b'{"model":"mini","input":[NaN]}'),
    ("infinity", b'{"model":"mini","input":[1e999]}'),
    ("lone surrogate", b'{"model":"mini","input":"\\ud800"}'),
    ("nested five thousand deep", b'{"model":"mini","input":' + b"[" * 5000 + b"]" * 5000 + b"}"),
    ("nested a thousand deep", b'{"model":"mini","input":' + b"[" * 1000 + b"]" * 1000 + b"}"),
    ("a list", b"[]"),
    ("a string", b'"hello"'),
    ("null", b"null"),
    ("two objects", b'{"model":"mini"}{"input":"x"}'),
    ("form", b"model=mini&input=hello"),
]


@pytest.mark.parametrize("body", [body for _, body in NO_JSON], ids=[name for name, _ in NO_JSON])
async def test_what_is_no_json_object_is_a_400(served: Start, body: bytes) -> None:
    async with served() as s:
        openai = await s.http.post("/v1/embeddings", content=body, headers=JSON)
        native = await s.http.post("/v1/encode/mini", content=body, headers=JSON)
        after = await s.embed()
    assert (openai.status_code, openai.json()["error"]["code"]) == (400, "INVALID_INPUT")
    assert (native.status_code, native.json()["detail"]["code"]) == (400, "INVALID_INPUT")
    assert after.status_code == 200


NO_MSGPACK: list[tuple[str, bytes]] = [
    ("empty", b""),
    ("cut off", b"\x81\xa5item"),
    ("a list of four thousand million", b"\xdd\xff\xff\xff\xff"),
    ("a map of four thousand million", b"\xdf\xff\xff\xff\xff"),
    ("nested two thousand deep", b"\x81\xa5items" + b"\x91" * 2000),
    ("nested sixty thousand deep", b"\x81\xa5items" + b"\x91" * 60_000),
    ("nested ninety thousand deep", b"\x81\xa5items" + b"\x91" * 90_000),
    ("no UTF-8", b"\x81\xa5items\x91\x81\xa4text\xa2\xff\xfe"),
    ("a map as a key", b"\x81\x81\x01\x01\x01"),
    ("trailing bytes", b"\x80\x01"),
    ("a number", b"\x07"),
    ("JSON", b'{"items":[{"text":"x"}]}'),
    ("an extension as text", b"\x81\xa5items\x91\x81\xa4text\xc7\x01\x05\x00"),
    ("a date as text", b"\x81\xa5items\x91\x81\xa4text\xd6\xff\x00\x00\x00\x00"),
    ("bytes as text", b"\x81\xa5items\x91\x81\xa4text\xc4\x01x"),
]


@pytest.mark.parametrize("body", [body for _, body in NO_MSGPACK], ids=[name for name, _ in NO_MSGPACK])
async def test_what_is_no_msgpack_map_is_a_400(served: Start, body: bytes) -> None:
    async with served() as s:
        response = await s.http.post("/v1/encode/mini", content=body, headers=MSGPACK)
        after = await s.encode()
    assert (response.status_code, response.json()["detail"]["code"]) == (400, "INVALID_INPUT")
    assert after.status_code == 200


async def test_of_two_fields_with_one_name_the_last_counts(served: Start) -> None:
    async with served() as s:
        response = await s.http.post(
            "/v1/embeddings", content=b'{"model":"none","input":"x","model":"mini"}', headers=JSON
        )
    assert response.json()["model"] == "mini"


@pytest.mark.parametrize(
    ("headers", "param"),
    [
        ({"content-type": "text/plain"}, "content-type"),
        ({"content-type": "application/x-www-form-urlencoded"}, "content-type"),
        ({"content-type": "multipart/form-data; boundary=x"}, "content-type"),
        ({"content-type": "application/json", "content-encoding": "gzip"}, "content-encoding"),
    ],
)
async def test_other_media_types_are_a_415(served: Start, headers: dict[str, str], param: str) -> None:
    async with served() as s:
        response = await s.http.post("/v1/embeddings", content=b'{"model":"mini","input":"x"}', headers=headers)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (415, "UNSUPPORTED_MEDIA_TYPE", param)


# --- over sockets ----------------------------------------------------------------------------------


def head(path: str, length: int) -> bytes:
    lines = (
        f"POST {path} HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        f"Content-Length: {length}",
        "",
        "",
    )
    return "\r\n".join(lines).encode()


def embed_request(text: str = "hello") -> bytes:
    body = json.dumps({"model": "mini", "input": text}).encode()
    return head("/v1/embeddings", len(body)) + body


async def connect(s: Served) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = s.url.removeprefix("http://").partition(":")
    return await asyncio.open_connection(host, int(port))


async def talk(s: Served, raw: bytes, *, timeout_s: float = 5.0) -> bytes:
    """Send bytes and read what comes within a while."""
    reader, writer = await connect(s)
    writer.write(raw)
    answer = b""
    try:
        async with asyncio.timeout(timeout_s):
            while b"}}" not in answer:
                chunk = await reader.read(65536)
                if not chunk:
                    break
                answer += chunk
    finally:
        writer.close()
    return answer


async def test_a_client_that_stops_half_way_is_let_go(listening: Start) -> None:
    async with listening() as s:
        for _ in range(20):
            _, writer = await connect(s)
            writer.write(head("/v1/embeddings", 1000) + b'{"model":')
            await writer.drain()
            writer.close()
        assert (await s.embed()).status_code == 200


async def test_a_slow_client_is_told_and_its_connection_closed(listening: Start) -> None:
    async with listening(body_timeout_s=0.1) as s:
        reader, writer = await connect(s)
        writer.write(head("/v1/embeddings", 1000) + b'{"model":')
        async with asyncio.timeout(5):
            answer = await reader.read()
        writer.close()
        after = await s.embed()
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"connection: close" in answer.lower()
    assert b"REQUEST_TIMEOUT" in answer
    assert after.status_code == 200


async def test_a_client_that_leaves_frees_its_place_in_the_queue(listening: Start) -> None:
    async with listening(queue=1) as s:
        assert (await s.embed()).status_code == 200
        latch = FaultPoints.of("mini").hold("run", times=1)
        running = asyncio.create_task(s.embed())
        await latch.arrival()
        _, leaver = await connect(s)
        leaver.write(embed_request())
        await until(lambda: s.registry.status("mini").leases == 2)
        assert (await s.embed()).status_code == 429
        leaver.close()
        await until(lambda: s.registry.status("mini").leases == 1)
        stays = asyncio.create_task(s.embed())
        await until(lambda: s.registry.status("mini").leases == 2)
        latch.release()
        assert (await running).status_code == (await stays).status_code == 200


async def test_a_client_that_leaves_during_a_load_gives_up_its_ticket_only(listening: Start) -> None:
    async with listening() as s:
        latch = FaultPoints.of("mini").hold("load")
        _, leaver = await connect(s)
        leaver.write(embed_request())
        await latch.arrival()
        stays = asyncio.create_task(s.embed())
        await until(lambda: s.registry.status("mini").queued == 2)
        leaver.close()
        await until(lambda: s.registry.status("mini").queued == 1)
        latch.release()
        assert (await stays).status_code == 200
        assert FaultPoints.of("mini").hits("load") == 1


async def test_two_requests_in_one_packet_are_both_answered(listening: Start) -> None:
    async with listening() as s:
        reader, writer = await connect(s)
        writer.write(embed_request("one") + embed_request("two"))
        answer = b""
        async with asyncio.timeout(5):
            while answer.count(b"total_tokens") < 2:
                answer += await reader.read(65536)
        writer.close()
    assert answer.count(b"HTTP/1.1 200 ") == 2


async def test_waiting_for_the_go_ahead_of_a_body_that_is_too_large(listening: Start) -> None:
    request = head("/v1/embeddings", 10**9)[:-2] + b"Expect: 100-continue\r\n\r\n"
    async with listening() as s:
        answer = await talk(s, request)
    assert answer.startswith(b"HTTP/1.1 413 ")
