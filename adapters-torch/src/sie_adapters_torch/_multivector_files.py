"""What a model folder says about a multi-vector encoder, read without torch.

Three layouts: pylate's (``modules.json`` with a Dense on the tokens, and ``config_sentence_transformers.json``), that
of sentence-transformers' own multi-vector models, and ColBERT's (the projection in the checkpoint, and
``artifact.metadata``).
"""

from __future__ import annotations

import string
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import evolve, frozen
from sie_core import ModelSourceInvalid

from sie_adapters_torch._checkpoint import read_headers
from sie_adapters_torch._dense_files import HeadStep, read_dense_step
from sie_adapters_torch._files import (
    ModelFiles,
    Prompts,
    positions_of,
    read_model,
    read_modules,
    read_prompts,
)
from sie_adapters_torch._json import read_object
from sie_adapters_torch._options import MultivectorOptions
from sie_adapters_torch._st_files import check_keys, check_place, read_transformer

__all__ = ["INLINE", "Expansion", "MultivectorFiles", "Side", "read_multivector"]

INLINE = "linear.weight"
"""The projection's name in ColBERT's checkpoints."""
_PUNCTUATION = tuple(string.punctuation)


@frozen
class Side:
    """Queries, or documents: a token that is put after the first one, and how many tokens there may be."""

    prefix: str
    length: int | None


@frozen
class Expansion:
    """Queries are filled up to ``length`` with ``token`` (default: the mask token), whose vectors count.

    ``attend``: whether the other tokens see them. ``fixed``: no query is longer.
    """

    length: int
    attend: bool
    fixed: bool = True
    token: str | None = None


@frozen(eq=False)
class MultivectorFiles:
    """A multi-vector encoder.

    ``head``: the steps after the encoder; ``inline``: the first of them is in its checkpoint.
    ``skipped``: words whose vectors are left out, of documents and, if ``skips_queries``, of queries.
    """

    model: ModelFiles
    head: tuple[HeadStep, ...]
    inline: bool
    prompts: Prompts
    query: Side
    document: Side
    expansion: Expansion | None
    skipped: tuple[str, ...]
    skips_queries: bool

    @property
    def dims(self) -> int:
        return next((step.outputs for step in reversed(self.head) if step.kind == "dense"), self.model.hidden_size)


@frozen(eq=False)
class _Said:
    """What the files say, before the options."""

    head: tuple[HeadStep, ...]
    prefixes: tuple[str, str]
    lengths: tuple[int | None, int | None]
    expansion: Expansion | None
    skipped: tuple[str, ...]
    skips_queries: bool = False


def read_multivector(folder: Path, options: MultivectorOptions, *, weights_needed: bool = True) -> MultivectorFiles:
    """Read a multi-vector encoder's folder. Raises ModelSourceInvalid, UnsafeSource."""
    steps = read_modules(folder, _STEPS, adapter="torch-multivector", libraries=("sentence_transformers", "pylate"))
    model = read_model(steps[0][1] if steps else folder, options, weights_needed=weights_needed)
    prompts, about = read_prompts(folder, options)
    inline = steps is None
    if steps is None:
        said = _colbert(model)
    elif any(name == "MultiVectorMask" for name, _ in steps):
        said = _sentence_transformers(folder, steps)
    else:
        said = _pylate(folder, steps, about)
    return _with_options(model, said, prompts, inline, options)


# --- layouts -------------------------------------------------------------------------------------------

_STEPS = ("Transformer", "Dense", "MultiVectorMask", "Normalize", "Dropout")


def _pylate(folder: Path, steps: list[tuple[str, Path]], about: Mapping[str, Any]) -> _Said:
    length = _size(about, "query_length") or 32
    expansion = None
    if about.get("do_query_expansion") is not False:
        expansion = Expansion(length, attend=about.get("attend_to_expansion_tokens") is True)
    prefixes = tuple("" if text is None else str(text) for text in (
        about.get("query_prefix", "[Q] "), about.get("document_prefix", "[D] ")
    ))  # fmt: skip
    words = about.get("skiplist_words")
    return _Said(
        head=(*_projections(folder, steps), HeadStep("normalise")),
        prefixes=(prefixes[0], prefixes[1]),
        lengths=(length, _size(about, "document_length") or 180),
        expansion=expansion,
        skipped=_PUNCTUATION if words is None else _words(words, folder),
    )


def _sentence_transformers(folder: Path, steps: list[tuple[str, Path]]) -> _Said:
    transformer = read_transformer(steps[0][1])
    transformer.check(
        "feature-extraction", "token_embeddings", "last_hidden_state", lengths=True, adapter="torch-multivector"
    )
    about = transformer.content
    file = next(place for name, place in steps if name == "MultiVectorMask") / "config.json"
    mask = read_object(file) or {}
    check_keys(file, mask, ("skiplist_words", "skiplist_tasks", "keep_only_token_ids"), empty=True)
    if mask.get("keep_only_token_ids"):
        raise ModelSourceInvalid(f"{folder} keeps certain tokens only, which torch-multivector does not know")
    tasks = mask.get("skiplist_tasks") or ["document"]
    given, expansion = about.get("query_expansion"), None
    if isinstance(given, dict):
        if given.get("strategy") not in ("fixed", "min") or not isinstance(given.get("length"), int):
            raise ModelSourceInvalid(f"{folder} expands queries in a way that is not known: {given}")
        token = given.get("token")
        expansion = Expansion(given["length"], given.get("attend") is True, given["strategy"] == "fixed", token)
    head = _projections(folder, steps)
    for place in (place for name, place in steps if name == "Normalize"):
        normalise = read_object(place / "config.json") or {}
        check_keys(place / "config.json", normalise, ("module_input_name", "module_output_name"))
        check_place(place / "config.json", normalise, "token_embeddings", "torch-multivector")
        head = (*head, HeadStep("normalise"))
    return _Said(
        head=head,
        prefixes=("", ""),  # its prompts are texts
        lengths=(_size(about, "query_length"), _size(about, "document_length")),
        expansion=expansion,
        skipped=_words(mask.get("skiplist_words") or [], folder),
        skips_queries="query" in tasks,
    )


def _colbert(model: ModelFiles) -> _Said:
    about = read_object(model.folder / "artifact.metadata") or {}
    dims = about.get("dim")
    if model.weights:
        found = [entry.shape for entry in read_headers(model.weights) if entry.name == INLINE]
        if not found or len(found[0]) != 2 or found[0][1] != model.hidden_size:
            raise ModelSourceInvalid(
                f"{model.folder} has no projection to the vectors of its tokens: no modules.json with a Dense, and no "
                f"{INLINE} in its checkpoint"
            )
        dims = found[0][0]
    elif "HF_ColBERT" not in (model.config.get("architectures") or ()):
        raise ModelSourceInvalid(f"{model.folder} has no modules.json, and is no ColBERT by its config.json")
    length = _size(about, "query_maxlen") or 32
    step = HeadStep("dense", None, model.hidden_size, dims if isinstance(dims, int) else 128, bias=False)
    return _Said(
        head=(step, HeadStep("normalise")),
        prefixes=(str(about.get("query_token_id") or "[unused0]"), str(about.get("doc_token_id") or "[unused1]")),
        lengths=(length, _size(about, "doc_maxlen") or 180),
        expansion=Expansion(length, attend=about.get("attend_to_mask_tokens") is True),
        skipped=_PUNCTUATION if about.get("mask_punctuation", True) else (),
    )


def _projections(folder: Path, steps: list[tuple[str, Path]]) -> tuple[HeadStep, ...]:
    file, order = folder / "modules.json", [name for name, _ in steps]
    if order[0] != "Transformer" or order.count("Transformer") != 1:
        raise ModelSourceInvalid(f"{file} must start with one Transformer; it has {order}")
    if "Dense" not in order and "MultiVectorMask" not in order:
        raise ModelSourceInvalid(f"{file} has no Dense: the model has no projection to the vectors of its tokens")
    return tuple(
        read_dense_step(place, adapter="torch-multivector", works_on="token_embeddings", residual=True)
        for name, place in steps
        if name == "Dense"
    )


def _size(about: Mapping[str, Any], key: str) -> int | None:
    value = about.get(key)
    return value if isinstance(value, int) and value > 0 else None


def _words(words: Any, folder: Path) -> tuple[str, ...]:
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise ModelSourceInvalid(f"{folder}: skiplist_words must be a list of words")
    return tuple(words)


# --- the options over them -----------------------------------------------------------------------------


def _with_options(
    model: ModelFiles, said: _Said, prompts: Prompts, inline: bool, options: MultivectorOptions
) -> MultivectorFiles:
    prefixes = (options.query_prefix, options.document_prefix)
    query_prefix, document_prefix = (
        given if given is not None else read for given, read in zip(prefixes, said.prefixes, strict=True)
    )
    positions = positions_of(model.text_config)
    asked = [n for n in (options.query_length, options.document_length, options.max_length) if n is not None]
    if positions is not None and max(asked, default=0) > positions:
        raise ModelSourceInvalid(f"max_length is {max(asked)}, and the model has {positions} positions")

    def within(length: int | None) -> int | None:
        known = [n for n in (length, positions) if n is not None]
        return min(known) if known else model.max_length

    query_length = within(options.query_length or said.lengths[0])
    document_length = within(options.document_length or options.max_length or said.lengths[1])
    expansion = said.expansion
    if options.query_expansion is True and expansion is None:
        expansion = Expansion(query_length or 32, attend=False)
    if options.query_expansion is False:
        expansion = None
    if expansion is not None:
        expansion = evolve(expansion, length=within(options.query_length or expansion.length) or 32)
        if options.attend_to_expansion_tokens is not None:
            expansion = evolve(expansion, attend=options.attend_to_expansion_tokens)
        if expansion.fixed:
            query_length = expansion.length
    skipped = {None: said.skipped, True: said.skipped or _PUNCTUATION, False: ()}[options.skip_punctuation]
    return MultivectorFiles(
        model=evolve(model, max_length=document_length),
        head=said.head,
        inline=inline,
        prompts=prompts,
        query=Side(query_prefix, query_length),
        document=Side(document_prefix, document_length),
        expansion=expansion,
        skipped=skipped,
        skips_queries=said.skips_queries,
    )
