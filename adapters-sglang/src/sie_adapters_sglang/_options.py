"""What a model's ``options`` may hold: one typed field an option."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from attrs import Attribute, field, fields, frozen, validators
from sie_core import ModelSpec

__all__ = ["EmbeddingOptions", "EngineOptions", "GenerationOptions", "HiCacheOptions", "options_of"]

Dtype = Literal["auto", "half", "float16", "bfloat16", "float", "float32"]
_DTYPES = ("auto", "half", "float16", "bfloat16", "float", "float32")


def _positive(_: Any, attribute: Attribute[Any], value: float | None) -> None:
    if value is not None and value <= 0:
        raise ValueError(f"{attribute.name} must be larger than 0, not {value}")


def _not_negative(_: Any, attribute: Attribute[Any], value: int) -> None:
    if value < 0:
        raise ValueError(f"{attribute.name} must not be negative, and is {value}")


def _fraction(_: Any, attribute: Attribute[Any], value: float | None) -> None:
    if value is not None and not 0 < value < 1:
        raise ValueError(f"{attribute.name} must lie between 0 and 1, not {value}")


def _share(_: Any, attribute: Attribute[Any], value: float | None) -> None:
    if value is not None and not 0 < value <= 1:
        raise ValueError(f"{attribute.name} must be more than 0 and at most 1, not {value}")


@frozen(kw_only=True)
class EngineOptions:
    """How an engine is started. Common to every adapter of this package. Times in seconds.

    ``python``: interpreter of the environment that has SGLang (default: the server's own). ``env``: variables that the
    engine gets on top of the server's. ``extra_args``: more of SGLang's own flags, checked against the installed
    version. ``mem_fraction_static``: an upper bound for what the ledger grants. ``max_total_tokens``: tokens that the
    KV cache holds at most. ``park``: whether the engine may be parked in host memory; it then runs with SGLang's memory
    saver. ``start_timeout_s``: how long a start may take, within the server's ``requests.load_timeout_s``;
    ``stall_timeout_s``: how long its log may stand still.
    ``stop_timeout_s``: how long it may take to end by itself.
    """

    python: str | None = None
    env: Mapping[str, str] = field(factory=dict)
    extra_args: tuple[str, ...] = ()
    dtype: Dtype | None = field(default=None, validator=validators.in_((None, *_DTYPES)))
    tp_size: int = field(default=1, validator=_positive)
    context_length: int | None = field(default=None, validator=_positive)
    mem_fraction_static: float | None = field(default=None, validator=_fraction)
    max_total_tokens: int | None = field(default=None, validator=_positive)
    max_running_requests: int | None = field(default=None, validator=_positive)
    attention_backend: str | None = None
    load_format: str | None = None
    quantization: str | None = None
    trust_remote_code: bool = False
    warmup: bool = True
    park: bool = True
    max_loras: int = field(default=0, validator=_not_negative)
    max_lora_rank: int = field(default=64, validator=_positive)
    lora_target_modules: tuple[str, ...] = ("all",)
    start_timeout_s: float = field(default=600.0, validator=_positive)
    stall_timeout_s: float = field(default=300.0, validator=_positive)
    stop_timeout_s: float = field(default=20.0, validator=_positive)


@frozen(kw_only=True)
class GenerationOptions(EngineOptions):
    """Options of ``sglang-generation``. The names are those of SGLang's flags."""

    chat_template: str | None = None
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    grammar_backend: str | None = None
    kv_cache_dtype: str | None = None
    chunked_prefill_size: int | None = None


@frozen(kw_only=True)
class EmbeddingOptions(EngineOptions):
    """Options of ``sglang-embedding``.

    ``matryoshka``: sizes that a request may ask for with ``dimensions`` (default: what ``config.json`` declares).
    """

    matryoshka: tuple[int, ...] | None = field(default=None)

    @matryoshka.validator
    def _sizes(self, _: Any, sizes: tuple[int, ...] | None) -> None:
        if any(size <= 0 for size in sizes or ()):
            raise ValueError("matryoshka sizes must be larger than 0")


@frozen(kw_only=True)
class HiCacheOptions(GenerationOptions):
    """Options of ``sglang-hicache``: those of generation, and what the pool on the host is like.

    At most one of ``hicache_size`` (GB, 1e9 bytes, a rank), ``hicache_ratio`` (times the device's KV cache) and
    ``hicache_fraction`` (of the host; from SGLang 0.5.21): each is honoured or refused. With none of them the pool is
    as large as the host allows, up to twice the device's.
    """

    hicache_size: int | None = field(default=None, validator=_positive)
    hicache_ratio: float | None = field(default=None, validator=_positive)
    hicache_fraction: float | None = field(default=None, validator=_share)
    hicache_write_policy: str | None = None
    hicache_io_backend: str | None = None
    hicache_mem_layout: str | None = None
    hicache_storage_backend: str | None = None


T = TypeVar("T", bound=EngineOptions)


def options_of(model: ModelSpec, kind: type[T]) -> T:
    """The model's options as ``kind``, also when the core has not bound them."""
    given: Any = model.options
    if isinstance(given, kind):
        return given
    known = {entry.name for entry in fields(kind)}
    if unknown := sorted(set(given) - known):
        raise TypeError(f"unknown option(s) for {model.adapter}: {', '.join(unknown)}")
    return kind(**given)
