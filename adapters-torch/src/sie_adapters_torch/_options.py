"""What a model's ``options`` may hold: one typed field an option."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from attrs import Attribute, field, fields, frozen, validators
from sie_core import ModelSpec

__all__ = [
    "DenseOptions",
    "LoadOptions",
    "SparseOptions",
    "TextOptions",
    "options_of",
]

Dtype = Literal["float32", "float16", "bfloat16"]
Pooling = Literal["mean", "cls", "last_token"]


def _not_negative(_: Any, attribute: Attribute[Any], value: float) -> None:
    if not value >= 0:
        raise ValueError(f"{attribute.name} must not be negative, and is {value}")


def _positive(_: Any, attribute: Attribute[Any], value: int | None) -> None:
    if value is not None and value <= 0:
        raise ValueError(f"{attribute.name} must be larger than 0, not {value}")


def _option(default: Any, help: str, check: Any = None) -> Any:
    """A field with the words that the configuration's reference has for it."""
    return field(default=default, validator=check, metadata={"help": help})


@frozen(kw_only=True)
class LoadOptions:
    """How weights are read. Common to every family of this package; each field's ``help`` says what it does."""

    dtype: Dtype = _option(  # noqa: RUF009 - it makes a field
        "float32", "Precision of weights and activations.", validators.in_(("float32", "float16", "bfloat16"))
    )
    attn: Literal["sdpa", "eager"] = _option(
        "sdpa", "Attention kernels; a model without SDPA runs eager.", validators.in_(("sdpa", "eager"))
    )
    threads: int | None = _option(
        None, "CPU threads of one inference. Not set: compute.threads, or torch's own choice.", _positive
    )
    allow_pickle: bool = _option(False, "Read *.bin weights, which can run any code.")
    trust_remote_code: bool = _option(False, "Run Python files that come with the model.")


@frozen(kw_only=True)
class TextOptions(LoadOptions):
    """How text becomes tokens. Common to every text family of this package."""

    max_length: int | None = _option(
        None, "Tokens an input may have, special ones included. Not set: what the model's files say.", _positive
    )
    truncate: bool = _option(False, "Cut longer inputs instead of refusing them; a request can say so for itself.")
    prompts: Mapping[str, str] = field(
        factory=dict, metadata={"help": "Texts put before an input, by name, over those in the model's files."}
    )
    query_prompt: str | None = _option(None, "The one for queries.")
    document_prompt: str | None = _option(None, "The one for everything else.")


@frozen(kw_only=True)
class DenseOptions(TextOptions):
    """Options of ``torch-dense``."""

    pooling: Pooling | None = _option(  # noqa: RUF009 - it makes a field
        None,
        "How token vectors become one vector. Not set: what the sentence-transformers files beside the model say; "
        "without such files the mean.",
        validators.in_((None, "mean", "cls", "last_token")),
    )
    normalise: bool | None = _option(None, "Scale vectors to length 1. Not set: as for pooling; without such files no.")
    matryoshka: tuple[int, ...] | None = _option(
        None, "Sizes that a request may ask for with dimensions. Not set: what the model's config.json declares."
    )
    max_loras: int = _option(8, "LoRA adapters that are loaded at a time; 0: none.", _not_negative)

    @matryoshka.validator
    def _sizes(self, _: Any, sizes: tuple[int, ...] | None) -> None:
        if any(size <= 0 for size in sizes or ()):
            raise ValueError("matryoshka sizes must be larger than 0")


@frozen(kw_only=True)
class SparseOptions(TextOptions):
    """Options of ``torch-sparse``."""

    top_k: int | None = _option(None, "Weights that a vector has at most, the largest. Not set: all.", _positive)
    threshold: float = _option(0.0, "Only weights above it are kept.", _not_negative)
    pooling: Literal["max", "sum"] | None = _option(
        None,
        "How a text's tokens become one vector. Not set: what the sentence-transformers files beside the model say; "
        "without such files the maximum.",
        validators.in_((None, "max", "sum")),
    )
    activation: Literal["relu", "log1p_relu"] | None = _option(
        None,
        "relu: log(1 + relu(x)), as SPLADE has it; log1p_relu: that once more, as OpenSearch's models have it. "
        "Not set: as for pooling; without such files relu.",
        validators.in_((None, "relu", "log1p_relu")),
    )


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
