"""An engine's command line: from typed options to flags that the installed version takes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from attrs import asdict, field, fields, frozen

from sie_adapters_sglang._errors import BadOptions
from sie_adapters_sglang._flags import Flags
from sie_adapters_sglang._options import EmbeddingOptions, EngineOptions, GenerationOptions

__all__ = ["SERVED_NAME", "Place", "check_options", "command_line"]

SERVED_NAME = "sie"
"""What the engine calls its model; what the model is called outside is the core's business."""

# Option → flag, where they are called alike but for the dashes.
_SAME_NAMES = (
    "dtype",
    "tp_size",
    "context_length",
    "max_running_requests",
    "attention_backend",
    "load_format",
    "quantization",
    "chat_template",
    "tool_call_parser",
    "reasoning_parser",
    "grammar_backend",
    "kv_cache_dtype",
    "chunked_prefill_size",
    "hicache_write_policy",
    "hicache_io_backend",
    "hicache_mem_layout",
    "hicache_storage_backend",
)

# Flags that are not for extra_args, and what to use instead.
_OWNED = {
    "--model-path": "the model's `source`",
    "--model": "the model's `source`",
    "--served-model-name": "the model's `name`",
    "--host": "nothing: an engine listens on loopback only",
    "--port": "nothing: a free port is picked",
    "--nccl-port": "nothing: a free port is picked",
    "--api-key": "nothing: keys are made for each start",
    "--admin-api-key": "nothing: keys are made for each start",
    "--config": "`extra_args` themselves",
    "--device": "the model's `device`",
    "--base-gpu-id": "the model's `device`",
    "--is-embedding": "the adapter sglang-embedding",
    "--mem-fraction-static": "the option `mem_fraction_static`",
    "--max-total-tokens": "the option `max_total_tokens`",
    "--enable-memory-saver": "the option `park`",
    "--enable-weights-cpu-backup": "the option `park`",
    "--skip-server-warmup": "the option `warmup`",
    "--trust-remote-code": "the option `trust_remote_code`",
    "--enable-lora": "the option `max_loras`",
    "--lora-paths": "the model's `lora`",
    "--max-loras-per-batch": "the option `max_loras`",
    "--max-loaded-loras": "the option `max_loras`",
    "--max-lora-rank": "the option `max_lora_rank`",
    "--lora-target-modules": "the option `lora_target_modules`",
    "--enable-hierarchical-cache": "the adapter sglang-hicache",
    "--hicache-size": "the option `hicache_size` of sglang-hicache",
    "--hicache-ratio": "the option `hicache_ratio` of sglang-hicache",
    "--hicache-host-memory-fraction": "the option `hicache_fraction` of sglang-hicache",
    "--sleep-on-idle": "nothing: it is always on",
    "--dp-size": "nothing: one engine, one replica",
    "--data-parallel-size": "nothing: one engine, one replica",
    "--nnodes": "nothing: engines run on this machine",
    "--tensor-parallel-size": "the option `tp_size`",
    "--tp": "the option `tp_size`",
    "--pp-size": "the option `tp_size`: a rank is a device, and one rank a device is booked",
    "--gpu-id-step": "the model's `device`",
    "--node-rank": "nothing: engines run on this machine",
    "--dist-init-addr": "nothing: engines run on this machine",
    "--cpu-offload-gb": "nothing: weights on the host would not be booked",
    "--gated-launch-port": "nothing: nobody would open the gate",
    "--ssl-keyfile": "nothing: an engine listens on loopback only",
    "--ssl-certfile": "nothing: an engine listens on loopback only",
}

# Variables that are not for a profile's env.
_OWNED_ENV = {
    "CUDA_VISIBLE_DEVICES": "the model's `device`: the engine would run where nothing is booked for it",
    "SIE_ENGINE_TOKEN": "nothing: it proves whose an engine is",
}


@frozen(kw_only=True)
class Place:
    """Where and how one start happens. ``config`` is the file with the keys; ``sizing`` the flags that bound memory."""

    model: str
    config: str
    port: int
    nccl_port: int
    device: str
    revision: str | None = None
    sizing: Sequence[str] = ()
    saver: bool = False
    extra: Sequence[str] = field(default=())


def command_line(options: EngineOptions, place: Place, flags: Flags) -> list[str]:
    """All arguments, without the interpreter.

    Raises:
        BadOptions: the installed version does not take one of them.
    """
    _check_extra(options, flags)
    argv = [
        *("--model-path", place.model, "--served-model-name", SERVED_NAME, "--host", "127.0.0.1"),
        *("--port", str(place.port), "--nccl-port", str(place.nccl_port), "--device", place.device),
        *("--config", place.config, "--sleep-on-idle"),
        *(("--revision", place.revision) if place.revision else ()),
        *_from_options(options),
        *place.sizing,
        *(("--enable-memory-saver", "--enable-weights-cpu-backup") if place.saver else ()),
        *place.extra,
        *options.extra_args,
    ]
    flags.check(argv)
    return argv


def check_options(options: EngineOptions, flags: Flags) -> None:
    """What a start would refuse, said before anybody has to make room for it. Raises BadOptions."""
    for name, instead in _OWNED_ENV.items():
        if name in options.env:
            raise BadOptions(f"env: {name} is not for you to set; use {instead}")
    _check_extra(options, flags)
    flags.check(list(_from_options(options)))


def _check_extra(options: EngineOptions, flags: Flags) -> None:
    named = {each.name for each in fields(type(options))} & set(_SAME_NAMES)
    # A flag may have several names: what they all set counts.
    owned = {flags.known[flag]["dest"]: instead for flag, instead in _OWNED.items() if flag in flags.known}
    for word in options.extra_args:
        flag = word.partition("=")[0]
        instead = _OWNED.get(flag) or owned.get(flags.known.get(flag, {}).get("dest"))
        if instead is None and flag[2:].replace("-", "_") in named:
            instead = "the option of that name"
        if instead is not None:
            raise BadOptions(f"extra_args: {flag} is not for you to set; use {instead}")
    flags.check(options.extra_args, what="option for extra_args")


def _from_options(options: EngineOptions) -> Iterator[str]:
    values: dict[str, Any] = asdict(options, recurse=False)
    for name in _SAME_NAMES:
        value = values.get(name)
        if value is not None and (name, value) != ("tp_size", 1):
            yield from (f"--{name.replace('_', '-')}", str(value))
    if options.trust_remote_code:
        yield "--trust-remote-code"
    if not options.warmup:
        yield "--skip-server-warmup"
    if isinstance(options, EmbeddingOptions):
        yield "--is-embedding"
        if options.matryoshka:
            yield from ("--json-model-override-args", json.dumps({"matryoshka_dimensions": list(options.matryoshka)}))
    if isinstance(options, GenerationOptions) and options.max_loras:
        yield from ("--enable-lora", "--max-loras-per-batch", str(options.max_loras))
        yield from ("--max-loaded-loras", str(options.max_loras), "--max-lora-rank", str(options.max_lora_rank))
        yield from ("--lora-target-modules", *options.lora_target_modules)
