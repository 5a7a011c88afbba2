"""What a model's ``options`` may hold: one typed field an option."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeVar, get_args

from attrs import Attribute, field, fields, frozen, validators
from sie_core import ModelSpec

__all__ = [
    "ACTIVATIONS",
    "AGGREGATIONS",
    "Activation",
    "Aggregation",
    "BgeM3Options",
    "ClassifierOptions",
    "CrossEncoderOptions",
    "DenseOptions",
    "EntityOptions",
    "GlinerOptions",
    "ImageTextOptions",
    "LengthOptions",
    "LoadOptions",
    "MultivectorOptions",
    "SparseOptions",
    "TextOptions",
    "options_of",
]

Dtype = Literal["float32", "float16", "bfloat16"]
Pooling = Literal["mean", "cls", "last_token"]
Activation = Literal["sigmoid", "softmax", "identity"]
Aggregation = Literal["simple", "first", "average", "max"]
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)
AGGREGATIONS: tuple[Aggregation, ...] = get_args(Aggregation)


def _not_negative(_: Any, attribute: Attribute[Any], value: float) -> None:
    if not value >= 0:
        raise ValueError(f"{attribute.name} must not be negative, and is {value}")


def _positive(_: Any, attribute: Attribute[Any], value: int | None) -> None:
    if value is not None and value <= 0:
        raise ValueError(f"{attribute.name} must be larger than 0, not {value}")


def _not_negative_or_none(_: Any, attribute: Attribute[Any], value: int | None) -> None:
    if value is not None:
        _not_negative(_, attribute, value)


def _share(_: Any, attribute: Attribute[Any], value: float) -> None:
    if not 0 <= value <= 1:
        raise ValueError(f"{attribute.name} must be from 0 to 1, not {value}")


def _holds(name: str, given: str | None, place: str) -> None:
    if given is not None and given.count(place) != 1:
        raise ValueError(f"{name} must have {place} in it, once")


def _option(default: Any, help: str, check: Any = None) -> Any:
    """A field with the words that the configuration's reference has for it."""
    return field(default=default, validator=check, metadata={"help": help})


_MAX_LORAS = "LoRA adapters that are loaded at a time; 0: none."


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
class LengthOptions(LoadOptions):
    """How long a text may be. Common to every text family of this package."""

    max_length: int | None = _option(
        None, "Tokens an input may have, special ones included. Not set: what the model's files say.", _positive
    )
    truncate: bool = _option(False, "Cut longer inputs instead of refusing them; a request can say so for itself.")


@frozen(kw_only=True)
class TextOptions(LengthOptions):
    """What is put before a text. Common to the families that take prompts."""

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
    instruction_template: str | None = _option(
        None,
        "What is put before a query with an instruction: a text with {instruction} in it. Not set: the instruction "
        "itself, before queries and documents.",
    )
    document_instruction_template: str | None = _option(
        None, "The same for everything that is no query. Not set, with instruction_template: documents take none."
    )
    max_loras: int = _option(8, _MAX_LORAS, _not_negative)

    @instruction_template.validator
    @document_instruction_template.validator
    def _instruction(self, attribute: Attribute[str | None], given: str | None) -> None:
        _holds(attribute.name, given, "{instruction}")

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


@frozen(kw_only=True)
class MultivectorOptions(TextOptions):
    """Options of ``torch-multivector``. What is not set is as the model's files say, else as pylate has it."""

    query_prefix: str | None = _option(None, "The token put after a query's first one; empty: none.")
    document_prefix: str | None = _option(None, "The token put after a document's first one; empty: none.")
    query_length: int | None = _option(None, "Tokens a query may have, and is filled up to.", _positive)
    document_length: int | None = _option(None, "Tokens a document may have.", _positive)
    query_expansion: bool | None = _option(None, "Fill queries up with mask tokens, whose vectors count.")
    attend_to_expansion_tokens: bool | None = _option(None, "Let the other tokens see those mask tokens.")
    skip_punctuation: bool | None = _option(None, "Leave out the vectors of punctuation in documents.")
    max_loras: int = _option(8, _MAX_LORAS, _not_negative)


@frozen(kw_only=True)
class BgeM3Options(TextOptions):
    """Options of ``torch-bge-m3``."""

    compares: Literal["dense", "sparse", "multivector"] = _option(
        "dense", "The output by which documents are scored.", validators.in_(("dense", "sparse", "multivector"))
    )
    max_loras: int = _option(8, _MAX_LORAS, _not_negative)


@frozen(kw_only=True)
class CrossEncoderOptions(TextOptions):
    """Options of ``torch-cross-encoder``."""

    activation: Activation | None = _option(  # noqa: RUF009 - it makes a field
        None,
        "What makes scores of the logits: sigmoid, identity, or softmax over the model's labels. Not set: what the "
        "model's files say, else sigmoid for a model with one label and identity for one with several.",
        validators.in_((None, *ACTIVATIONS)),
    )
    label: str | None = _option(
        None, "The label whose score is given, for models with several, which don't rank without it."
    )
    query_template: str | None = _option(
        None, "What becomes of a query: a text with {query} in it, and {instruction} if the model takes one."
    )
    document_template: str | None = _option(
        None, "What becomes of a document: a text with {document} in it. What follows on that is never cut off."
    )
    instruction: str = _option("", "What stands for {instruction} where a request has none.")

    @query_template.validator
    def _query(self, _: Any, given: str | None) -> None:
        _holds("query_template", given, "{query}")

    @document_template.validator
    def _document(self, _: Any, given: str | None) -> None:
        _holds("document_template", given, "{document}")


@frozen(kw_only=True)
class EntityOptions(LengthOptions):
    """Options of ``torch-entities``."""

    aggregation: Aggregation = _option(  # noqa: RUF009 - it makes a field
        "simple",
        "How tokens become entities, as in transformers: simple; or first, average, max, which keep words whole.",
        validators.in_(AGGREGATIONS),
    )
    threshold: float = _option(0.0, "Only entities with at least this score are given.", _share)
    stride: int | None = _option(
        None, "Read longer texts in windows that share so many tokens, instead of refusing them.", _not_negative_or_none
    )


@frozen(kw_only=True)
class ClassifierOptions(LengthOptions):
    """Options of ``torch-classifier``."""

    activation: Activation | None = _option(  # noqa: RUF009 - it makes a field
        None,
        "What makes scores of the logits: softmax, sigmoid or identity. Not set: by the problem_type of config.json, "
        "as in transformers.",
        validators.in_((None, *ACTIVATIONS)),
    )
    top_k: int | None = _option(None, "Labels that an answer has at most, the best. Not set: all.", _positive)
    hypothesis_template: str = _option(
        "This example is {}.", "For models of natural language inference: what is said of a text, with {} for a label."
    )
    multi_label: bool = _option(False, "For those models: score each label by itself, not one against the others.")

    @hypothesis_template.validator
    def _hypothesis(self, _: Any, given: str) -> None:
        _holds("hypothesis_template", given, "{}")


MOST_PIXELS = 178_956_970
"""What Pillow itself refuses, as a decompression bomb."""


@frozen(kw_only=True)
class ImageTextOptions(TextOptions):
    """Options of ``torch-image-text``."""

    normalise: bool = _option(True, "Scale vectors to length 1.")
    max_pixels: int = _option(
        MOST_PIXELS // 2,
        "Pixels that an image may have, looked at before it is decoded.",
        validators.in_(range(1, MOST_PIXELS + 1)),
    )


@frozen(kw_only=True)
class GlinerOptions(LoadOptions):
    """Options of ``torch-gliner``."""

    threshold: float = _option(0.5, "Only entities with a higher score are given.", _share)
    flat_ner: bool = _option(True, "Give no entity that overlaps a better one; else they may lie inside each other.")
    multi_label: bool = _option(False, "Let an entity have several labels.")
    max_labels: int = _option(
        256, "Labels that a request may look for at a time; memory is set aside for as many.", _positive
    )
    max_length: int | None = _option(
        None,
        "Tokens that a text may have, with the labels where the model reads them together. Not set: the model's "
        "positions, and no more than two and a half for each word that it reads.",
        _positive,
    )
    truncate: bool = _option(False, "Cut longer texts instead of refusing them; a request can say so for itself.")


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
