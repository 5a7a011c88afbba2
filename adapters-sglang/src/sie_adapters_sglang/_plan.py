"""What a model will take and where it may run: its files, its needs, and the figures of its launch."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
from attrs import frozen
from sie_core import (
    AdmissionReserve,
    DeviceNeed,
    DeviceView,
    Grant,
    ModelSourceInvalid,
    ModelSourceNotFound,
    ModelSpec,
    TransitionContext,
    locate,
    read_file,
)

from sie_adapters_sglang._argv import check_options
from sie_adapters_sglang._checkpoint import MOST_JSON, Checkpoint, read_checkpoint
from sie_adapters_sglang._costs import GIB, CostCache, Costs, Graphs, Measured, default_costs
from sie_adapters_sglang._flags import flags_for, version_key
from sie_adapters_sglang._hicache import HostPool, PoolTerms, PoolWish, size_pool
from sie_adapters_sglang._hub import HubFiles, Want, fetch
from sie_adapters_sglang._installed import Installed, find_installed
from sie_adapters_sglang._options import EngineOptions, GenerationOptions, HiCacheOptions
from sie_adapters_sglang._sizing import Demand, Launch, reserve, size_launch

if TYPE_CHECKING:
    from sie_core import HostMemory

_PAGE_TOKENS = 64
_NO_DRAFTS = ("NGRAM", "NONE")
"""Speculative decoding without a draft model, which would have a KV cache of its own."""
_HUGE = {"2MB": 2 * 1024**2, "1GB": 1024**3}

__all__ = ["Plan", "cost_cache", "engine_kind", "model_files", "plan_for", "read_config"]


@cache
def cost_cache() -> CostCache:
    """Measured figures of this user's engines. ``$SIE_CACHE_DIR``, else the user's cache folder."""
    root = os.environ.get("SIE_CACHE_DIR") or os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return CostCache(Path(root).expanduser() / "sie" / "sglang-costs.json")


def model_files(
    model: ModelSpec, installed: Installed, env: Mapping[str, str], want: Want, ctx: TransitionContext | None = None
) -> HubFiles:
    """The folder with the model's files; those on the hub are fetched as far as they are wanted.

    Raises:
        LoadError, TransitionCancelled
    """
    if model.source is None:
        raise ModelSourceNotFound(f"model {model.name!r} has no source: give it path:, package: or hf:")
    if model.source.kind == "hf":
        files = fetch(installed.python, env, model.source, want, ctx)
    else:
        files = HubFiles(locate(model.source))
    if not (files.folder / "config.json").is_file():
        raise ModelSourceInvalid(f"{model.source}: {files.folder} has no config.json: it is no model")
    return files


def read_config(folder: Path) -> dict[str, Any]:
    """The model's ``config.json``. Raises ModelSourceInvalid."""
    file = folder / "config.json"
    try:
        config = json.loads(read_file(file, MOST_JSON))
    except (OSError, ValueError) as error:
        raise ModelSourceInvalid(f"{file} can't be read: {error}") from error
    if not isinstance(config, dict):
        raise ModelSourceInvalid(f"{file} holds no object")
    return config


@frozen
class Plan:
    """One model on the SGLang that is installed."""

    options: EngineOptions
    installed: Installed
    folder: Path
    config: Mapping[str, Any]
    checkpoint: Checkpoint
    demand: Demand
    graphs: Graphs
    parks: bool = True
    """Whether the core may ever park it."""

    @property
    def saver(self) -> bool:
        """Whether it is started with the memory saver on a device that has one: what never parks has no use for it."""
        return self.parks and self.options.park and self.installed.memory_saver is not None

    def reserve(self, views: Sequence[DeviceView]) -> AdmissionReserve:
        """What to ask the ledger for. Raises NeverFits."""
        _totals.update({view.name: view.total for view in views})
        seen = [attrs.evolve(view, kind=engine_kind(view.name)) for view in views]
        largest = max(seen, key=lambda view: view.total, default=None)
        costs = self.costs(largest.name, largest.total) if largest is not None else self.costs("cpu", 0)
        answer = reserve(self.demand, costs, seen)
        pool = self.pool(self._likely(answer.ranks[0], seen), costs)
        return answer if pool is None else attrs.evolve(answer, host_bytes=pool.booked_bytes)

    def _likely(self, need: DeviceNeed, views: Sequence[DeviceView]) -> int:
        """What a rank will be granted for weights and KV cache as far as that can be told: its pool goes by that.

        Where others have to go first, it may be all that it wants.
        """
        most = max((view.available for view in views), default=0) - need.context_bytes - need.headroom_bytes
        return min(need.want_bytes, most) if most >= need.min_bytes else need.want_bytes

    def pool(self, static: int, costs: Costs, share: int | None = None) -> HostPool | None:
        """The HiCache pool beside ``static`` bytes of weights and KV cache a rank; ``None``: it has none.

        ``share``: what the ledger gives on the host, for all ranks. Raises LoadError, ResourceExhausted.
        """
        options = self.options
        if not isinstance(options, HiCacheOptions):
            return None
        from sie_core import HostMemory

        cache = max(0, static - self.demand.weights(costs))
        host = HostMemory()
        version = version_key(self.installed.sglang)[:3]
        given = dict(_flags_in(options.extra_args))
        # The page cache counts as used to this release, in a container: its own weights too, once it has read them.
        strict = version == (0, 5, 21)
        terms = PoolTerms(
            name=self.demand.name,
            version=version,
            ranks=options.tp_size,
            available=host.available(reclaim=not strict),
            total=host.total(),
            # Layers with a window or a state have a pool of their own, and nobody says yet how large.
            device_pools=(cache - cache // 2, cache // 2) if self.checkpoint.is_hybrid else (cache,),
            page_bytes=_PAGE_TOKENS * self.demand.per_token(costs),
            share=share,
            reads=self.checkpoint.file_bytes if strict and host.limit() is not None else 0,
            drafts=given.get("--speculative-algorithm", "NGRAM").upper() not in _NO_DRAFTS,
            huge=_huge_pages(host, options.env) if version >= (0, 5, 20) else 0,
        )
        wish = PoolWish(
            size_gb=options.hicache_size,
            ratio=options.hicache_ratio,
            fraction=options.hicache_fraction,
            mode=given.get("--hicache-host-memory-mode", "cache"),
        )
        return size_pool(wish, terms)

    def launch(self, grant: Grant) -> tuple[Launch, HostPool | None]:
        """The figures for what was granted. Raises ResourceExhausted."""
        grants = grant.devices
        costs = self.costs_on(grants)
        launch = size_launch(self.demand, costs, grants, kinds={engine_kind(name) for name in grants})
        return launch, self.pool(launch.static_bytes, costs, grant.host_bytes)

    def costs_on(self, accounts: Iterable[str]) -> Costs:
        """What a launch on these devices is sized with."""
        first = max(accounts, key=_total_of, default="cpu")
        return self.costs(first, _total_of(first))

    def costs(self, account: str, total: int) -> Costs:
        """On a device of ``total`` bytes: measured where an earlier launch was."""
        kind = account.partition(":")[0]
        version = version_key(self.installed.sglang)[:3]
        if kind == "emulated":  # the process is on the CPU; of the device it takes weights and cache
            assumed = Costs(context=0, graphs=0, activations=0)
        else:
            assumed = default_costs(version, total, kind, self.options.tp_size, self.graphs)
        return assumed.with_measured(cost_cache().get(self._cost_key(kind, total)))

    def measured(self, accounts: Iterable[str], usage: Mapping[str, Any], process_bytes: int | None) -> None:
        """Keep what a launch on these devices showed, for the next one."""
        first = max(accounts, key=_total_of)
        key = self._cost_key(first.partition(":")[0], _total_of(first))
        cost_cache().record(key, Measured.from_usage(usage, process_bytes))

    def _cost_key(self, kind: str, total: int) -> str:
        # Graphs go by the card's size: what a small one has shown is too little for a large one.
        device = f"cuda {round(total / GIB)}" if kind == "cuda" else kind
        told = attrs.asdict(self.options, recurse=False)
        skipped = ("python", "env", "start_timeout_s", "stall_timeout_s", "stop_timeout_s", "mem_fraction_static")
        flags = [f"{name}={value}" for name, value in told.items() if name not in (*skipped, "max_total_tokens")]
        written = (self.folder / "config.json").stat()
        flags.append(f"saver={self.saver}")  # with it, other graphs are recorded
        flags.append(f"written={written.st_mtime_ns}")  # another model may come to stand in the same folder
        return CostCache.key(str(self.folder), self.installed.sglang, flags, device)


_totals: dict[str, int] = {}
"""Bytes of the devices that were offered: a grant does not say, and what is assumed goes by a card's size."""


def _total_of(account: str) -> int:
    return _totals.get(account, 0)


def engine_kind(account: str) -> str:
    """What an engine takes the device for: on an emulated one it runs on the CPU."""
    return "cuda" if account.startswith("cuda") else "cpu"


def plan_for(
    model: ModelSpec, options: EngineOptions, want: Want = "about", ctx: TransitionContext | None = None
) -> Plan:
    """Raises LoadError: no such files, no SGLang, or one that is not supported; TransitionCancelled."""
    installed = find_installed(options.python, options.env)
    check_options(options, flags_for(installed.sglang))
    files = model_files(model, installed, options.env, want, ctx)
    folder, config = files.folder, read_config(files.folder)
    checkpoint = read_checkpoint(folder, options.dtype or "auto", files.absent)
    ranks = options.tp_size
    cache_dtype = (options.kv_cache_dtype if isinstance(options, GenerationOptions) else None) or "auto"
    demand = Demand(
        name=model.name,
        weights_bytes=checkpoint.weight_bytes(ranks),
        kv_bytes_per_token=checkpoint.kv_bytes_per_token(ranks, cache_dtype),
        headroom_bytes=model.runtime_headroom or 0,
        ranks=ranks,
        max_total_tokens=options.max_total_tokens,
        mem_fraction_static=options.mem_fraction_static,
        capped=not checkpoint.has_state,
    )
    graphs = _graphs(options, checkpoint)
    return Plan(options, installed, folder, config, checkpoint, demand, graphs, parks=model.host_offload)


def _huge_pages(host: HostMemory, env: Mapping[str, str]) -> int:
    """Bytes of the huge pages that the engine was told to make its pool of; 0: none, or none are free."""
    told = {**os.environ, **env}.get("SGLANG_HUGEPAGE_SIZE", "").strip().upper()
    return host.free_huge_pages(_HUGE[told]) if told in _HUGE else 0


def _graphs(options: EngineOptions, checkpoint: Checkpoint) -> Graphs:
    given = dict(_flags_in(options.extra_args))
    batch = given.get("--cuda-graph-max-bs-decode") or given.get("--cuda-graph-max-bs") or options.max_running_requests
    return Graphs(
        chunked_prefill=options.chunked_prefill_size if isinstance(options, GenerationOptions) else None,
        max_batch=None if batch is None else int(batch),
        decode_graphs=not given.keys() & {"--disable-cuda-graph", "--disable-decode-cuda-graph"},
        latent_attention=checkpoint.latent,
        speculative=given.get("--speculative-algorithm"),
    )


def _flags_in(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Flags with their first value; an empty one where there is none."""
    for word, following in itertools.zip_longest(words, words[1:], fillvalue=""):
        if word.startswith("--"):
            flag, stuck, value = word.partition("=")
            yield flag, value if stuck or following.startswith("--") else following
