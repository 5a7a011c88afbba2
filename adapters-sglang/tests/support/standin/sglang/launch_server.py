"""An engine without a model that keeps SGLang's rules, and dies where SGLang dies when one is broken:

release while a request runs, a second release, a resume that no release came before, a request or a health probe on
released memory, flush calls that overlap, a chat request to an embedding engine.

``STANDIN`` in the environment, a JSON object, says how to behave; ``GET /standin`` tells what has happened.
"""

import argparse
import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path

HOW = {
    "start_s": 0.0,  # until it is ready; it logs all the while
    "wait_for": "",  # not ready before this file is there
    "silent": False,  # says nothing while it starts
    "say": "",  # its first words
    "exit": None,  # ends with this code instead of becoming ready
    "flood_mb": 0,  # says so much before anything else
    "children": 1,  # further processes in its group
    "tidies": "",  # at SIGTERM it takes a while, leaves this file, and ends
    "stubborn": False,  # SIGTERM is ignored, by the children too
    "token_s": 0.001,  # a token
    "word": "w",  # of an answer, in all of them without an adapter
    "fail_once": {},  # path: status of the first call
    "half": False,  # streams break off
    "die_in_stream": False,
    "mute": False,  # inference never answers
    "deaf": False,  # takes connections and answers none
    "unhealthy": False,  # once it is ready, /health says 503
    "dies_in": "",  # path: ends without an answer to that call
    "floods": 0,  # so many processes say something all the time, as fast as they can
    "weights_gb": 1.0,
    "kv_gb": 2.0,
    "tokens": 4096,  # that the cache has room for
    "host_pool_gb": 0.0,  # of HiCache, whatever was asked for
}
HOW.update(json.loads(os.environ.get("STANDIN", "{}")))


CALL = [  # how a chat with tools is answered, a piece each
    {"role": "assistant", "content": None},
    {"tool_calls": [{"index": 0, "id": "call_1", "type": "function", "function": {"name": "lamp", "arguments": ""}}]},
    {"tool_calls": [{"index": 0, "function": {"arguments": '{"room": "K\u00fc'}}]},
    {"tool_calls": [{"index": 0, "function": {"arguments": 'che \\"1\\""}'}}]},
    {"tool_calls": [{"index": 1, "id": "call_2", "type": "function", "function": {"name": "lamp", "arguments": "{}"}}]},
]
CALLS = [
    {"index": 0, "id": "call_1", "type": "function",
     "function": {"name": "lamp", "arguments": '{"room": "K\u00fcche \\"1\\""}'}},
    {"index": 1, "id": "call_2", "type": "function", "function": {"name": "lamp", "arguments": "{}"}},
]  # fmt: skip


def arguments():
    parser = argparse.ArgumentParser()
    for name in ("--host", "--port", "--nccl-port", "--config", "--model-path", "--tp-size", "--hicache-size",
                 "--hicache-ratio"):  # fmt: skip
        parser.add_argument(name)
    parser.add_argument("--json-model-override-args", default="{}")
    parser.add_argument("--is-embedding", action="store_true")
    return parser.parse_known_args()[0]


def die(why):
    print("BROKEN RULE:", why, flush=True)
    os._exit(97)


class Refused(Exception):
    pass


class Engine:
    def __init__(self, args):
        self.args = args
        keys = json.loads(Path(args.config).read_text())
        self.api, self.admin = keys["api-key"], keys["admin-api-key"]
        self.began = time.monotonic()
        self.running = {}
        self.released = False
        self.flushing = False
        self.seen = {
            "aborted": 0,
            "finished": 0,
            "most": 0,
            "parks": 0,
            "requests": 0,
            "tokens": 0,
            "health": 0,
            "calls": [],
        }
        self.loras = {}
        self.failed = dict(HOW["fail_once"])

    def touch(self, what):
        if self.released:
            die(f"{what} on released memory")

    # --- inference ---

    async def tokens(self, body, gone=lambda: False):
        """Yield the texts of the tokens; the last pair says how it ended."""
        self.touch("a request")
        rid = str(body.get("rid") or id(body))
        count = int(body.get("max_tokens") or body.get("sampling_params", {}).get("max_new_tokens") or 4)
        if count > 100000:
            raise Refused("max_tokens is too large")
        if body.get("lora_path") not in {None, *self.loras}:
            raise Refused(f"LoRA adapter {body['lora_path']} is not loaded")
        self.running[rid] = False
        self.seen["requests"] += 1
        self.seen["most"] = max(self.seen["most"], len(self.running))
        finished = False
        try:
            if HOW["mute"]:
                await asyncio.sleep(3600)
            for index in range(count):
                self.touch("a running request")
                if self.running[rid] or gone():
                    yield None, "abort"
                    return
                self.seen["tokens"] += 1
                yield f"{body.get('lora_path') or HOW['word']}{index} ", None
                if HOW["token_s"]:
                    await asyncio.sleep(HOW["token_s"])
            finished = True
            yield None, "length"
        finally:
            self.seen["finished" if finished else "aborted"] += 1
            del self.running[rid]

    async def whole(self, body, chat):
        text, end = "", None
        async for piece, ended in self.tokens(body):
            text, end = text + (piece or ""), ended or end
        choice = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        if body.get("tools"):
            choice, end = {"message": {"role": "assistant", "content": None, "tool_calls": CALLS}}, "tool_calls"
        usage = {"prompt_tokens": 3, "completion_tokens": text.count(" ")}
        usage["total_tokens"] = sum(usage.values())
        return {"id": "x", "choices": [{"index": 0, **choice, "finish_reason": end}], "usage": usage}

    async def parts(self, body, chat, gone):
        """Of a choice, as it comes; the last one says how it ended."""
        if body.get("tools"):
            for delta in CALL:
                yield {"delta": delta}, None
            yield {"delta": {}}, "tool_calls"
            return
        async for piece, ended in self.tokens(body, gone):
            yield {"delta": {"content": piece or ""}} if chat else {"text": piece or ""}, ended

    async def pieces(self, body, chat, gone):
        async for inner, ended in self.parts(body, chat, gone):
            if ended == "abort":
                yield {"error": {"message": "Generation aborted.", "type": "INTERNAL", "code": 500}}
                return
            yield {"id": "x", "choices": [{"index": 0, **inner, "finish_reason": ended}]}
        if (body.get("stream_options") or {}).get("include_usage"):
            yield {"id": "x", "choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}}

    def vectors(self, body):
        self.touch("a request")
        self.seen["requests"] += 1
        items = body.get("text") or body.get("input_ids")
        sizes = json.loads(self.args.json_model_override_args).get("matryoshka_dimensions", ())
        if body.get("dimensions") is not None and body["dimensions"] not in sizes:
            raise Refused(f"the model only supports {sizes} matryoshka dimensions")
        config = Path(self.args.model_path, "config.json")
        own = json.loads(config.read_text()).get("hidden_size") if config.is_file() else None
        dims = int(body.get("dimensions") or own or 4)
        answers = []
        for item in items:
            length = len(item)
            if length >= 512:
                raise Refused("longer than the context")
            vector = [1.0 / (length + d + 1) for d in range(dims)]
            if item == "nan":
                vector = [float("nan")] * dims
            answers.append({"embedding": vector, "meta_info": {"prompt_tokens": length}})
        return answers

    # --- control ---

    async def flush(self, timeout):
        if self.flushing:
            die("flush calls overlap")
        self.touch("a flush")
        self.flushing = True
        try:
            until = time.monotonic() + timeout
            while self.running and time.monotonic() < until:
                await asyncio.sleep(0.002)
            return not self.running
        finally:
            self.flushing = False

    def abort(self, body):
        for rid in list(self.running):
            if body.get("abort_all") or rid == body.get("rid"):
                self.running[rid] = True

    def release(self):
        if self.running:
            die("release while a request runs")
        if self.released:
            die("a second release")
        self.released = True
        self.seen["parks"] += 1

    def resume(self):
        if not self.released:
            die("resume without a release")
        self.released = False

    def info(self):
        self.touch("/server_info")
        memory = {"weight": HOW["weights_gb"], "kvcache": HOW["kv_gb"], "graph": 0.0, "token_capacity": HOW["tokens"]}
        return {"api_key": self.api, "max_req_input_len": 500, "internal_states": [{"memory_usage": memory}]}

    @property
    def ready(self):
        return time.monotonic() - self.began >= HOW["start_s"] and not (
            HOW["wait_for"] and not Path(HOW["wait_for"]).exists()
        )


ADMIN = ("/flush_cache", "/abort_request", "/release_memory_occupation", "/resume_memory_occupation",
         "/load_lora_adapter", "/unload_lora_adapter")  # fmt: skip
CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"


class Connection:
    def __init__(self, engine, reader, writer):
        self.engine, self.reader, self.writer = engine, reader, writer
        self.left = False

    async def serve(self):
        try:
            while True:
                head = await self.reader.readuntil(b"\r\n\r\n")
                first, *lines = head.decode().split("\r\n")
                method, target, _ = first.split(" ")
                headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines if line)}
                body = await self.reader.readexactly(int(headers.get("content-length", 0)))
                await self.answer(method, target, headers, json.loads(body) if body else {})
                if headers.get("connection") == "close":
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.writer.close()

    def send(self, status, content, kind="application/json"):
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        head = f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\ncontent-length: {len(data)}\r\n\r\n"
        self.writer.write(head.encode() + data)

    async def answer(self, method, target, headers, body):
        path, _, query = target.partition("?")
        engine = self.engine
        if path == "/standin":
            return self.send(
                200, {**engine.seen, "running": len(engine.running), "loras": engine.loras, "released": engine.released}
            )
        if HOW["deaf"]:
            await asyncio.sleep(3600)
        if path == "/health":
            if not engine.ready:
                return self.send(503, b"")
            engine.touch("a health probe")
            engine.seen["health"] += 1
            return self.send(503 if HOW["unhealthy"] and engine.seen["health"] > 1 else 200, b"")
        engine.seen["calls"].append(path)
        if path == HOW["dies_in"]:
            os._exit(9)
        key = engine.admin if path in ADMIN else engine.api
        if headers.get("authorization") != f"Bearer {key}":
            return self.send(401, {"error": "Unauthorized"})
        if path in engine.failed:
            return self.send(engine.failed.pop(path), {"detail": "as told"})
        try:
            return await self.route(path, query, body)
        except Refused as error:
            return self.send(400, {"object": "error", "message": str(error), "code": 400})

    async def route(self, path, query, body):
        engine = self.engine
        if path in (CHAT, PLAIN):
            if engine.args.is_embedding:
                die("a chat request to an embedding engine")
            engine.seen["body"] = body
            if body.get("stream"):
                return await self.stream(body, path == CHAT)
            return self.send(200, await engine.whole(body, path == CHAT))
        if path == "/generate":
            answer = await engine.whole(body, False)
            return self.send(200, {"text": answer["choices"][0]["text"], "output_ids": [1, 2, 3]})
        if path == "/encode":
            return self.send(200, engine.vectors(body))
        if path == "/tokenize":
            ids = [ord(letter) for letter in body["prompt"]]
            ids = [1, *ids, 2] if body["add_special_tokens"] else ids
            return self.send(200, {"tokens": ids, "count": len(ids), "max_model_len": 512})
        if path == "/server_info":
            return self.send(200, engine.info())
        if path == "/v1/loads":
            engine.touch("/v1/loads")
            load = {"num_running_reqs": len(engine.running), "num_waiting_reqs": 0}
            return self.send(200, {"loads": [load]})
        if path == "/flush_cache":
            done = await engine.flush(float(query.partition("=")[2] or 0))
            return self.send(200 if done else 400, b"flush", "text/plain")
        if path == "/load_lora_adapter":
            engine.touch("a LoRA load")
            name = body["lora_name"]
            good = name not in engine.loras and Path(body["lora_path"], "weights").exists()
            if good:
                engine.loras[name] = body["lora_path"]
            return self.send(200 if good else 400, {"success": good, "error_message": "no good weights"})
        if path == "/unload_lora_adapter":
            engine.touch("a LoRA unload")
            known = engine.loras.pop(body["lora_name"], None) is not None
            return self.send(200 if known else 400, {"success": known})
        simple = {
            "/abort_request": lambda: engine.abort(body),
            "/release_memory_occupation": engine.release,
            "/resume_memory_occupation": engine.resume,
        }
        if path in simple:
            simple[path]()
            return self.send(200, b"null")
        return self.send(404, {"detail": "Not Found"})

    async def stream(self, body, chat):
        pieces = self.engine.pieces(body, chat, lambda: self.left)
        piece = await anext(pieces)  # what is refused is refused with a status of its own
        head = b"HTTP/1.1 200 X\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        self.writer.write(head)
        watch = asyncio.ensure_future(self.watch())
        count = 0
        try:
            while piece is not None:
                self.chunk(b"data: " + json.dumps(piece, ensure_ascii=False).encode() + b"\n\n")
                await self.writer.drain()
                count += 1
                if HOW["die_in_stream"] and count == 2:
                    os._exit(7)
                if HOW["half"] and count == 2:
                    self.writer.close()
                    return
                piece = await anext(pieces, None)
            self.chunk(b"data: [DONE]\n\n")
            self.writer.write(b"0\r\n\r\n")
            await self.writer.drain()
        finally:
            watch.cancel()
            await pieces.aclose()

    async def watch(self):
        """The client says nothing while it reads: an end of its input means that it has left."""
        # Peeking only: the next request on this connection comes after the answer.
        while not self.reader.at_eof():
            await asyncio.sleep(0.005)
        self.left = True

    def chunk(self, data):
        self.writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


def make_children():
    for _ in range(HOW["children"]):
        if os.fork() == 0:
            if HOW["stubborn"]:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            while True:
                time.sleep(3600)


def say_pool(args):
    """As each rank does once it has sized its pool on the host."""
    nbytes = HOW["host_pool_gb"] * 1e9
    nbytes = nbytes or float(args.hicache_size or 0) * 1e9 or float(args.hicache_ratio or 0) * HOW["kv_gb"] * 2**30
    for rank in range(int(args.tp_size or 1) if nbytes else 0):
        said = f"TP{rank}] Allocating KV hierarchical KV host pool: 4096 tokens, {nbytes / 1e9:.2f} GB host memory."
        print(said, flush=True)


def tidy(*_):
    time.sleep(0.4)
    Path(HOW["tidies"]).touch()
    os._exit(0)


async def chat(engine):
    while not engine.ready and not HOW["silent"]:
        print("standin: loading", flush=True)
        await asyncio.sleep(0.05)


async def main():
    args = arguments()
    engine = Engine(args)
    if HOW["say"]:
        print(HOW["say"], flush=True)
    for _ in range(int(HOW["flood_mb"] * 16)):
        sys.stdout.write(("x" * 1023 + "\n") * 64)
    print("standin: keys", engine.api, engine.admin, flush=True)
    if HOW["stubborn"]:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    say_pool(args)
    make_children()
    if HOW["tidies"]:
        signal.signal(signal.SIGTERM, tidy)
        print("standin: tidies", flush=True)
    for _ in range(HOW["floods"]):
        if os.fork() == 0:
            while True:
                os.write(1, (b"x" * 1023 + b"\n") * 64)
    chatter = asyncio.ensure_future(chat(engine))
    if HOW["exit"] is not None:
        sys.exit(HOW["exit"])

    async def connected(reader, writer):
        await Connection(engine, reader, writer).serve()

    try:
        ranks = await asyncio.start_server(lambda *_: None, args.host, int(args.nccl_port))
        server = await asyncio.start_server(connected, args.host, int(args.port))
    except OSError as error:
        print("standin:", error, flush=True)
        sys.exit(3)
    async with ranks, server:
        await asyncio.gather(server.serve_forever(), chatter)


if __name__ == "__main__":
    asyncio.run(main())
