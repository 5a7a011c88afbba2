"""A stand-in for SGLang's server: its HTTP surface, and pieces as SGLang writes them, at a given pace or at full speed.

Run as SGLang is, with the arguments that SIE gives it. It works as an engine that batches: in each step every request
that runs gets one piece, each in a write and an HTTP chunk of its own. Pieces are made beforehand: what is measured is
who passes them on. ``BENCH_ENGINE``, a JSON object, says how: ``step_s``, seconds from step to step (0: as fast as the
readers take them), and ``signalled``, a folder in which each of its processes notes when it is asked to end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
from typing import Any, cast

import uvloop
from witness import note_the_end, wait

HOW = json.loads(os.environ.get("BENCH_ENGINE", "{}"))
STEP_S = float(HOW.get("step_s", 0.02))
CHILDREN = 2
"""Further processes, as an engine has them for its scheduler and its tokens."""
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
BARE_HEAD = b"HTTP/1.0 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
_ABOUT = '{"id":"8f0c2f0e0f8e4f3f9b1e6c6d2f1a7b3c","object":"chat.completion.chunk","created":1719000000,"model":"sie",'
_CHOICE = (
    '"choices":[{"index":0,"delta":{"role":%s,"content":%s,"reasoning_content":null,"tool_calls":null},'
    '"logprobs":null,"finish_reason":%s,"matched_stop":null}],"usage":null}'
)


def _event(piece: str) -> bytes:
    return f"data: {piece}\n\n".encode()


FIRST = _event(_ABOUT + _CHOICE % ('"assistant"', '""', "null"))
PIECE = _event(_ABOUT + _CHOICE % ("null", '" hello"', "null"))
LAST = _event(_ABOUT + _CHOICE % ("null", '""', '"length"'))
DONE = b"data: [DONE]\n\n"


def usage_of(pieces: int) -> bytes:
    usage = {"prompt_tokens": 1, "completion_tokens": pieces, "total_tokens": pieces + 1}
    return _event(_ABOUT + f'"choices":[],"usage":{json.dumps(usage)}}}')


def framed(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


FRAMED_PIECE = framed(PIECE)


class Steps:
    """The engine's loop."""

    def __init__(self) -> None:
        self.running: dict[Connection, int] = {}
        self._ticking = False

    def add(self, connection: Connection, pieces: int) -> None:
        self.running[connection] = pieces
        self.wake()

    def wake(self) -> None:
        if not self._ticking:
            self._ticking = True
            asyncio.get_running_loop().call_later(STEP_S, self._step)

    def _step(self) -> None:
        loop = asyncio.get_running_loop()
        began, wrote = loop.time(), False
        for connection, left in list(self.running.items()):
            if connection.full:
                continue
            wrote = True
            if left:
                self.running[connection] = left - 1
                connection.piece()
            else:
                del self.running[connection]
                connection.finish()
        self._ticking = bool(self.running) and (wrote or STEP_S > 0)
        if self._ticking and STEP_S:
            loop.call_at(began + STEP_S, self._step)
        elif self._ticking:
            loop.call_soon(self._step)


class Connection(asyncio.Protocol):
    """One client. HTTP/1.0 gets the bare bytes, up to the end of the connection."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._buffer = b""
        self._bare = False
        self._asked = 0
        self._usage = False
        self.full = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are none by inheritance

    def connection_lost(self, exc: Exception | None) -> None:
        self._steps.running.pop(self, None)

    def pause_writing(self) -> None:
        self.full = True

    def resume_writing(self) -> None:
        self.full = False
        if self._steps.running:
            self._steps.wake()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, found, rest = self._buffer.partition(b"\r\n\r\n")
        if not found:
            return
        first, *lines = head.decode().split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        length = int(headers.get("content-length", 0))
        if len(rest) < length:
            return
        self._buffer = rest[length:]
        _, target, version = first.split(" ")
        self._bare = version == "HTTP/1.0"
        self._answer(target.partition("?")[0], json.loads(rest[:length]) if length else {})
        if headers.get("connection") == "close" and self not in self._steps.running:
            self._transport.close()

    def _answer(self, path: str, body: dict[str, Any]) -> None:
        if path in ("/v1/chat/completions", "/v1/completions") and body.get("stream"):
            self._asked = int(body.get("max_tokens") or 16)
            self._usage = bool((body.get("stream_options") or {}).get("include_usage"))
            self._transport.write((BARE_HEAD if self._bare else HEAD) + self._frame(FIRST))
            self._steps.add(self, self._asked)
        else:
            answers = {"/server_info": _INFO, "/generate": {"text": "", "output_ids": [1]}, "/v1/loads": _LOADS}
            data = json.dumps(answers.get(path)).encode()
            self._transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(data), data))

    def piece(self) -> None:
        self._transport.write(PIECE if self._bare else FRAMED_PIECE)

    def finish(self) -> None:
        end = self._frame(LAST) + (self._frame(usage_of(self._asked)) if self._usage else b"") + self._frame(DONE)
        self._transport.write(end if self._bare else end + b"0\r\n\r\n")
        if self._bare:
            self._transport.close()

    def _frame(self, data: bytes) -> bytes:
        return data if self._bare else framed(data)


_MEMORY = {"weight": 0.01, "kvcache": 0.01, "graph": 0.0, "token_capacity": 4096}
_INFO = {"max_req_input_len": 500, "internal_states": [{"memory_usage": _MEMORY}]}
_LOADS = {"loads": [{"num_running_reqs": 0, "num_waiting_reqs": 0}]}


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    arguments = parser.parse_known_args()[0]
    steps = Steps()
    server = await asyncio.get_running_loop().create_server(lambda: Connection(steps), arguments.host, arguments.port)
    await server.serve_forever()


def start() -> None:
    """As SGLang's module does, run as a script."""
    signal.signal(signal.SIGTERM, note_the_end)
    for _ in range(CHILDREN):
        if os.fork() == 0:
            wait()
    uvloop.run(main())
