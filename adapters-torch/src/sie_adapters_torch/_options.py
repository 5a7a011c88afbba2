"""What a model's ``options`` may hold: one typed field an option."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from attrs import Attribute, field, fields, frozen, validators
from sie_core import ModelSpec

__all__ = ["DenseOptions", "LoadOptions", "TextOptions", "options_of"]

Dtype = Literal["float32", "float16", "bfloat16"]
Pooling = Literal["mean", "cls", "last_token"]


def _not_negative(_: Any, attribute: Attribute[Any], value: int) -> None:
    if value < 0:
        raise ValueError(f"{attribute.name} must not be negative, and is {value}")


def _positive(_: Any, attribute: Attribute[Any], value: int | None) -> None:
    if value is not None and value <= 0:
        raise ValueError(f"{attribute.name} must be larger than 0, not {value}")


@frozen(kw_only=True)
class LoadOptions:
    """How weights are read. Common to every family of this package.

    ``dtype``: precision of weights and activations. ``attn``: attention kernels; a model without SDPA runs eager.
    ``threads``: CPU threads of one inference (default: torch's own choice). ``allow_pickle``: read ``*.bin`` weights,
    which can run code. ``trust_remote_code``: run Python files that come with the model.
    """

    dtype: Dtype = field(default="float32", validator=validators.in_(("float32", "float16", "bfloat16")))
    attn: Literal["sdpa", "eager"] = field(default="sdpa", validator=validators.in_(("sdpa", "eager")))
    threads: int | None = field(default=None, validator=_positive)
    allow_pickle: bool = False
    trust_remote_code: bool = False


@frozen(kw_only=True)
class TextOptions(LoadOptions):
    """How text becomes tokens. Common to every text family of this package.

    ``max_length``: tokens an input may have, special ones included (default: what the model's files say).
    ``truncate``: cut longer inputs instead of refusing them; a request can override it. ``prompts``: texts put before
    an input, by name, over those in the model's files; ``query_prompt`` and ``document_prompt`` are the ones used for
    queries and for everything else.
    """

    max_length: int | None = field(default=None, validator=_positive)
    truncate: bool = False
    prompts: Mapping[str, str] = field(factory=dict)
    query_prompt: str | None = None
    document_prompt: str | None = None


@frozen(kw_only=True)
class DenseOptions(TextOptions):
    """Options of ``torch-dense``.

    ``pooling`` and ``normalise``: how token vectors become one vector (default: what the sentence-transformers files
    beside the model say; without such files mean, not normalised, as sentence-transformers does). ``matryoshka``: sizes
    that a request may ask for with ``dimensions`` (default: what the model's ``config.json`` declares). ``max_loras``:
    LoRA adapters that are loaded at a time; 0: none.
    """

    pooling: Pooling | None = field(default=None, validator=validators.in_((None, "mean", "cls", "last_token")))
    normalise: bool | None = None
    matryoshka: tuple[int, ...] | None = field(default=None)
    max_loras: int = field(default=8, validator=_not_negative)

    @matryoshka.validator
    def _sizes(self, _: Any, sizes: tuple[int, ...] | None) -> None:
        if any(size <= 0 for size in sizes or ()):
            raise ValueError("matryoshka sizes must be larger than 0")


T = TypeVar("T")


def options_of(model: ModelSpec, kind: type[T]) -> T:
    """The model's options as ``kind``, also when the core has not bound them."""
    given: Any = model.options
    if isinstance(given, kind):
        return given
    known = {entry.name for entry in fields(kind)}  # type: ignore[arg-type]
    if unknown := sorted(set(given) - known):
        raise TypeError(f"unknown option(s) for {model.adapter}: {', '.join(unknown)}")
    return kind(**given)
