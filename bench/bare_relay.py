"""The floor under every relay of this kind: an ASGI app that passes an engine's bytes on as they come.

``raw``: over an asyncio stream, in HTTP/1.0, so that there are no frames to be taken off: it reads what is there and
sends it. ``httpx``: what a few lines of user code would do.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import httpx
import uvicorn

HEAD = b"POST /v1/chat/completions HTTP/1.0\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
START = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}


async def ready(send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


async def _body(receive: Any) -> bytes:
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    return body


class Raw:
    def __init__(self, port: int) -> None:
        self._port = port

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["method"] == "GET":
            await ready(send)
            return
        body = await _body(receive)
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        writer.write(HEAD % len(body) + body)
        await reader.readuntil(b"\r\n\r\n")
        await send(START)
        while data := await reader.read(65536):
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
        writer.close()


class Httpx:
    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/v1/chat/completions"
        self._client = httpx.AsyncClient(timeout=None, trust_env=False)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["method"] == "GET":
            await ready(send)
            return
        body = await _body(receive)
        async with self._client.stream("POST", self._url, content=body) as answer:
            await send(START)
            async for data in answer.aiter_raw():
                await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


if __name__ == "__main__":
    kind, port, engine = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    app: Any = {"raw": Raw, "httpx": Httpx}[kind](engine)
    uvicorn.run(app, port=port, loop="uvloop", http="httptools", access_log=False, log_level="warning", lifespan="off")
