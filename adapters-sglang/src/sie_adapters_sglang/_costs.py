"""What an engine takes beside weights and KV cache: defaults first, then what was measured, kept on disk.

- ``c``, the context: what a process holds on the device before the first weight. 1 GiB until it is measured.
- ``g``: CUDA graphs, workspaces and the activations of a prefill. Until it is measured it is what the engine itself
  would set aside. In MiB, on one device: 512, and 1.5 for every token of a prefill chunk (2,048 at least), 2 for every
  sequence of the largest decode graph, 8 for every prefill graph, 128 for every rank; on cards over 60 GiB no less than
  10 GiB. Chunk and largest batch follow the card's size unless they are set.

Measured are the context, the graphs, the weights and the bytes of a token, by model, version, flags and device. The
activations of a prefill are not seen at start: their share of the default stays until a peak was measured under load.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import tempfile
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs
from attrs import field, frozen

__all__ = ["GIB", "CostCache", "Costs", "Graphs", "Measured", "default_costs"]

MIB = 1024**2
GIB = 1024**3
_FORMAT = 1
_MOST = 512
_log = logging.getLogger("sie.sglang")

# (card below so many GiB, prefill chunk, largest decode batch, the same with 4 ranks and more)
_CARDS_OLD = ((20, 2048, 8, 8), (35, 2048, 24, 80), (60, 4096, 32, 160), (160, 8192, 256, 512))
_CARDS = ((20, 2048, 8, 8), (35, 4096, 48, 160), (60, 4096, 32, 160), (160, 8192, 256, 512))
_LARGEST = (16384, 512, 512)
_SPECULATIVE = {"STANDALONE": 6 * GIB, "NGRAM": 0}


@frozen
class Graphs:
    """The settings that ``g`` depends on; ``None`` for what follows the card's size."""

    chunked_prefill: int | None = None
    max_batch: int | None = None
    decode_graphs: bool = True
    prefill_graphs: bool = True
    latent_attention: bool = False
    speculative: str | None = None


@frozen
class Measured:
    """What one launch showed, in bytes a rank; ``None`` for what could not be told."""

    context: int | None = None
    graphs: int | None = None
    """CUDA graphs and workspaces."""
    activations: int | None = None
    """A peak beyond all else, seen after prefills of a whole chunk have run."""
    weights: int | None = None
    bytes_per_token: int | None = None

    def merged(self, newer: Measured) -> Measured:
        """Costs keep the largest that was ever seen; weights and tokens are what they are now."""
        costs = {
            name: max(
                (value for value in (getattr(self, name), getattr(newer, name)) if value is not None), default=None
            )
            for name in ("context", "graphs", "activations")
        }
        sizes = {
            name: getattr(self, name) if getattr(newer, name) is None else getattr(newer, name)
            for name in ("weights", "bytes_per_token")
        }
        return Measured(**costs, **sizes)

    @classmethod
    def from_usage(cls, usage: Mapping[str, Any], process_bytes: int | None = None) -> Measured:
        """From ``memory_usage`` of ``/server_info`` and what the driver says that the rank's process holds.

        The engine gives GiB in two decimals: what rounding may have hidden counts as taken.
        """
        weights, cache = _gib(usage.get("weight")), _gib(usage.get("kvcache"))
        graph = usage.get("graph")
        # Newer releases tell the phases apart.
        graphs = sum(filter(None, map(_gib, graph.values()))) if isinstance(graph, Mapping) else _gib(graph)
        tokens = usage.get("token_capacity")
        per_token = None
        if cache is not None and isinstance(tokens, int) and tokens > 0:
            per_token = -(-cache // tokens)
        context = None
        if process_bytes is not None and weights is not None and cache is not None:
            context = max(0, process_bytes - weights - cache - (graphs or 0))
        return cls(context=context, graphs=graphs, weights=weights, bytes_per_token=per_token)


def _gib(value: Any) -> int | None:
    """``None`` also for less than nothing, which it tells when others gave memory back while it measured."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < math.inf:
        return None
    return int((value + 0.005) * GIB)


@frozen
class Costs:
    """Bytes a rank. ``weights`` and ``bytes_per_token``: measured ones, ``None`` before the first launch."""

    context: int
    graphs: int
    activations: int
    weights: int | None = None
    bytes_per_token: int | None = None

    @property
    def beside(self) -> int:
        """``g``: all that comes out of what ``--mem-fraction-static`` leaves, without the declared headroom."""
        return self.graphs + self.activations

    def with_measured(self, measured: Measured | None) -> Costs:
        """What was measured in place of what was assumed."""
        known = {} if measured is None else attrs.asdict(measured, filter=lambda _, value: value is not None)
        return attrs.evolve(self, **known)


def default_costs(
    version: tuple[int, ...], total: int, kind: str, ranks: int = 1, graphs: Graphs | None = None
) -> Costs:
    """What to assume on a device of ``total`` bytes. ``version``: (0, 5, 20)."""
    settings = graphs or Graphs()
    if kind == "cpu":
        # No graphs are recorded there; the rest of the process stands beside the weights in the same RAM.
        return Costs(context=2 * GIB, graphs=0, activations=GIB // 2)
    cards = _CARDS if version >= (0, 5, 20) else _CARDS_OLD
    small, many = next(((chunk, few if ranks < 4 else lot) for size, chunk, few, lot in cards if total < size * GIB),
                       _LARGEST[:2])  # fmt: skip
    chunk = small if settings.chunked_prefill is None else settings.chunked_prefill
    batch = many if settings.max_batch is None else settings.max_batch
    activations = 512 * MIB + int(1.5 * MIB * max(chunk, 2048)) + ranks * 128 * MIB
    # Older releases count them even where they are off.
    recorded = 2 * MIB * batch if settings.decode_graphs or version < (0, 5, 20) else 0
    if settings.prefill_graphs:
        recorded += 3 * GIB // 2 if settings.latent_attention else 8 * MIB * _prefill_graphs(chunk)
    if total > 60 * GIB:
        recorded = max(recorded, 10 * GIB - activations)
    if settings.speculative is not None:
        recorded += _SPECULATIVE.get(settings.speculative.upper(), 4 * GIB)
    return Costs(context=GIB, graphs=recorded, activations=activations)


def _prefill_graphs(most: int) -> int:
    """How many sizes are recorded: ever wider steps up to the chunk."""
    steps = ((4, 32, 4), (48, 256, 16), (288, 512, 32), (576, 1024, 64), (1280, 4096, 256), (4608, most, 512))
    return sum(size <= most for first, last, step in steps for size in range(first, last + 1, step))


@frozen(eq=False)
class CostCache:
    """Measured figures on disk. A file that can't be read or written costs nothing but the figures."""

    path: Path
    _lock: threading.Lock = field(factory=threading.Lock, init=False)
    _mine: dict[str, Measured] = field(factory=dict, init=False)

    @staticmethod
    def key(model: str, version: str, flags: Iterable[str], device: str) -> str:
        """``flags``: the launch's, without ports, keys and what this module computes; ``device``: kind and size."""
        text = "\0".join([model, version, device, *flags])
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def get(self, key: str) -> Measured | None:
        """What was measured under the key, by this process or an earlier one."""
        with self._lock:
            return self._mine.get(key) or self._read().get(key)

    def record(self, key: str, measured: Measured) -> None:
        """Merge what a launch showed into what is kept. Never raises for the disk."""
        with self._lock:
            entries = {**self._read(), **self._mine}
            before = entries.pop(key, None)
            entries[key] = self._mine[key] = measured if before is None else before.merged(measured)
            self._write(dict(list(entries.items())[-_MOST:]))

    def _read(self) -> dict[str, Measured]:
        try:
            data = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        if not isinstance(data, dict) or data.get("format") != _FORMAT or not isinstance(data.get("entries"), dict):
            return {}
        return {key: entry for key, raw in data["entries"].items() if (entry := _entry(raw)) is not None}

    def _write(self, entries: Mapping[str, Measured]) -> None:
        shown = {key: attrs.asdict(entry, filter=lambda _, value: value is not None) for key, entry in entries.items()}
        text = json.dumps({"format": _FORMAT, "entries": shown}, indent=1)
        temporary: str | None = None
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=self.path.parent, prefix=self.path.name, suffix=".new")
            with os.fdopen(handle, "w", encoding="utf-8") as stream:
                stream.write(text)
            os.replace(temporary, self.path)  # noqa: PTH105 - mkstemp gives a name
        except OSError as error:
            _log.warning("measured memory figures are not kept: %s", error)
            if temporary is not None:
                Path(temporary).unlink(missing_ok=True)


def _entry(raw: object) -> Measured | None:
    """One entry of the file; ``None`` for what is none: a wrong figure would be worse than none."""
    names = {one.name for one in attrs.fields(Measured)}
    if not isinstance(raw, dict) or not set(raw) <= names:
        return None
    if any(not isinstance(value, int) or isinstance(value, bool) or value < 0 for value in raw.values()):
        return None
    return Measured(**raw)
