"""The running GLiNER model: the package splits, runs and decodes; what is shared with other families is around it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from attrs import frozen
from sie_core import (
    BatchRequest,
    EncodeOutput,
    EngineEvents,
    Entity,
    ExtractOutput,
    InputTooLong,
    InvalidInput,
    ModelSpec,
    Output,
    Prepared,
    TransitionContext,
    Unsupported,
)

from sie_adapters_torch._asked import asked, boolean, no_instruction, number
from sie_adapters_torch._engine import Parts, Step, TorchEngine, bring_up
from sie_adapters_torch._gliner_files import GlinerFiles
from sie_adapters_torch._gliner_weights import load_package_model
from sie_adapters_torch._options import GlinerOptions, options_of
from sie_adapters_torch._positions import tried_positions
from sie_adapters_torch._request import check_request, check_size, no_lora
from sie_adapters_torch._several import not_finite
from sie_adapters_torch._torch import out_of_memory
from sie_adapters_torch.gliner import LABEL_TOKENS, WORK_BYTES, capabilities_of, size_of, work_bytes

__all__ = ["GlinerEngine", "load_gliner"]

_SAMPLE = ("The quick brown fox jumps over the lazy dog near London in 1984.", ("animal", "place", "date"))


@frozen
class _Wish:
    """What a request looks for, and how. Requests with the same share a batch."""

    labels: tuple[str, ...]
    threshold: float
    flat_ner: bool
    multi_label: bool


@frozen(eq=False)
class _Words:
    """A text's words, where each starts and ends in it, and how many tokens they are with what is put before them."""

    text: str
    words: Sequence[str]
    starts: Sequence[int]
    ends: Sequence[int]
    tokens: int
    wish: _Wish


def load_gliner(model: ModelSpec, files: GlinerFiles, ctx: TransitionContext, events: EngineEvents) -> GlinerEngine:
    """Make an engine on the device that ``ctx`` grants. Blocking. Raises as ``Adapter.load``."""
    options = options_of(model, GlinerOptions)

    def make(account: str, step: Step) -> GlinerEngine:
        whole = load_package_model(files, options)
        step(0.7, "reading the tokenizer")
        modules = torch.nn.ModuleList([whole.model])
        parts = Parts(model, options, capabilities_of(files), files.model.folder, modules, size_of(files, options))
        return GlinerEngine(parts, account, files, whole)

    return bring_up(model, ctx, events, make)


class GlinerEngine(TorchEngine):
    """Entities of each text, in its order, for the labels of its request."""

    def __init__(self, parts: Parts, account: str, files: GlinerFiles, whole: Any) -> None:
        super().__init__(parts, account)
        assert isinstance(parts.options, GlinerOptions)
        self._files = files
        self._given = parts.options
        self._whole = whole
        processor = whole.data_processor
        self._tokenizer = processor.transformer_tokenizer
        self._labels_tokenizer = processor.labels_tokenizer if files.own_labels else processor.transformer_tokenizer
        self._tokenizing = threading.Lock()  # the package sets padding and cutting on its tokenizers for each call
        encoder = whole.model.token_rep_layer.bert_layer.model
        limit = min(files.limit, self._tokenizer.model_max_length)
        self._limit = tried_positions(encoder, limit, pad_id=self._tokenizer.pad_token_id or 0) or limit
        self._around = self._tokenizer.num_special_tokens_to_add()

    def sample(self) -> Output:
        """The scores of a fixed text: entities come and go with the last bit of one."""
        text, labels = _SAMPLE
        wish = _Wish(labels, 0.5, flat_ner=True, multi_label=False)
        words = self._words(text, wish, self._prompt(labels), 0, truncate=True)
        self.check_running()
        with out_of_memory(self._placed.account):
            scores: list[Any] = []
            parts = [partial(lambda: scores.append(self._forward([words])[1][0].float().cpu().numpy()))]
            self._in_turn(parts)
        return EncodeOutput(tokens=words.tokens, dense=np.ravel(scores[0]))

    # --- from items to words -----------------------------------------------------------------------

    def prepare(self, request: BatchRequest) -> Sequence[Prepared]:
        name, params = self._model.name, request.params
        check_request(name, self.capabilities, request)
        check_size(name, self.capabilities, request.params.dimensions)
        no_lora(name, request.params.lora)
        no_instruction(name, params)
        if request.output_schema is not None:
            raise Unsupported(f"{name} looks for labels, and takes no output_schema", param="output_schema")
        wish, texts = self._wish(request), []
        for index, item in enumerate(request.items):
            if item.images:
                raise InvalidInput(f"{name} takes text only", index=index, param="images")
            if item.text is None:
                what = "token ids have no places in a text: send" if item.token_ids is not None else "the item has no"
                raise InvalidInput(f"{what} text", index=index, param="input")
            texts.append(item.text)
        truncate = self._given.truncate if params.truncate is None else params.truncate
        prompt = self._prompt(wish.labels)
        words = [self._words(text, wish, prompt, index, truncate=truncate) for index, text in enumerate(texts)]
        return [Prepared(max(1, each.tokens), each) for each in words]

    def _wish(self, request: BatchRequest) -> _Wish:
        given = {"threshold": self._given.threshold, "flat_ner": self._given.flat_ner}
        given["multi_label"] = self._given.multi_label
        given |= asked(request.params, {"threshold": number, "flat_ner": boolean, "multi_label": boolean})
        labels, most = tuple(dict.fromkeys(request.labels)), self._given.max_labels
        if not labels:
            raise InvalidInput(f"{self._model.name} finds what 'labels' name: give some", param="labels")
        if len(labels) > most:
            raise InvalidInput(
                f"{self._model.name} looks for {most} labels at a time (max_labels), not {len(labels)}", param="labels"
            )
        return _Wish(labels, given["threshold"], bool(given["flat_ner"]), bool(given["multi_label"]))

    def _prompt(self, labels: tuple[str, ...]) -> int:
        """Tokens that the labels put before each text. Raises InvalidInput."""
        for label in labels:
            if mark := next((mark for mark in self._files.marks if mark in label), None):
                raise InvalidInput(f"the label {label!r} holds {mark}, which the model reads as a mark", param="labels")
        lengths = self._counted(self._labels_tokenizer, labels, "labels", None)
        for label, length in zip(labels, lengths, strict=True):
            if not length:
                raise InvalidInput(f"the label {label!r} has no tokens", param="labels")
        if not self._files.own_labels:
            prompt = sum(lengths) + len(labels) + 1  # a mark before each, and one after all
            if prompt + self._around >= self._limit:
                raise InvalidInput(
                    f"the labels have {prompt} tokens, and with a text no more than {self._limit} are read: name fewer",
                    param="labels",
                )
            return prompt
        padded = len(labels) * (max(lengths) + self._labels_tokenizer.num_special_tokens_to_add())
        if padded > LABEL_TOKENS or max(lengths) > self._labels_tokenizer.model_max_length:
            raise InvalidInput("the labels are too long: name fewer, or shorter ones", param="labels")
        return 0

    def _counted(self, tokenizer: Any, words: Sequence[str], param: str, index: int | None) -> list[int]:
        """How many tokens each word is."""
        if not words:
            return []
        try:
            with self._tokenizing:
                found = tokenizer(list(words), is_split_into_words=True, add_special_tokens=False, truncation=False)
        except (TypeError, UnicodeError) as error:
            for word in words:
                try:
                    word.encode()
                except UnicodeError as wrong:
                    raise InvalidInput(f"this is not valid Unicode: {wrong}", index=index, param=param) from error
            raise
        lengths = [0] * len(words)
        for word in found.word_ids(0):
            if word is not None:
                lengths[word] += 1
        return lengths

    def _words(self, text: str, wish: _Wish, prompt: int, index: int, *, truncate: bool) -> _Words:
        """Raises InvalidInput and InputTooLong with ``index``."""
        found = list(self._whole.data_processor.words_splitter(text))
        if len(found) > self._files.words:
            if not truncate:
                raise InputTooLong(tokens=len(found), limit=self._files.words, index=index)
            found = found[: self._files.words]
        words = [word for word, _, _ in found]
        if mark := next((mark for mark in self._files.marks if mark in words), None):  # other splitters keep it whole
            raise InvalidInput(f"the text holds {mark}, which the model reads as a mark", index=index, param="input")
        lengths = self._counted(self._tokenizer, words, "input", index)
        tokens = prompt + self._around + sum(lengths)
        if tokens > self._limit and not truncate:
            raise InputTooLong(tokens=tokens, limit=self._limit, index=index)
        while tokens > self._limit and found:
            found.pop()
            tokens -= lengths.pop()
        return _Words(
            text=text,
            words=words[: len(found)],
            starts=[start for _, start, _ in found],
            ends=[end for _, _, end in found],
            tokens=tokens if found else 0,
            wish=wish,
        )

    # --- inference ---------------------------------------------------------------------------------

    def run(self, batch: Sequence[Prepared]) -> Sequence[Output]:
        self.check_running()
        texts: list[_Words] = [item.payload for item in batch]
        outputs: list[Output] = [ExtractOutput(text.tokens) for text in texts]
        same: dict[_Wish, list[int]] = {}
        for index, text in enumerate(texts):
            if text.words:
                same.setdefault(text.wish, []).append(index)

        def part(chosen: Sequence[int]) -> None:
            found = self._answers([texts[index] for index in chosen])
            for index, answer in zip(chosen, found, strict=True):
                outputs[index] = answer

        parts = [partial(part, chosen) for members in same.values() for chosen in self._groups(texts, members)]
        with out_of_memory(self._placed.account):
            self._in_turn(parts)
        return outputs

    def _in_turn(self, parts: Sequence[Any]) -> None:
        if self._lanes is not None:
            self._lanes.run(parts, side_by_side=False)
        else:
            for each in parts:
                each()

    def _groups(self, texts: Sequence[_Words], members: Sequence[int]) -> list[list[int]]:
        """Texts of similar length, as many as may run at a time."""
        limit = self.max_batch_tokens or self._model.batch_tokens
        groups: list[list[int]] = []
        room = 0
        for index in sorted(members, key=lambda index: -texts[index].tokens):
            if room < 1:
                longest = texts[index]
                taken = work_bytes(
                    self._files, self._given, longest.tokens, max(len(texts[n].words) for n in members),
                    len(longest.wish.labels),
                )  # fmt: skip
                room = max(1, min(WORK_BYTES // taken, limit // longest.tokens))
                groups.append([])
            groups[-1].append(index)
            room -= 1
        return groups

    def _forward(self, texts: Sequence[_Words]) -> tuple[Any, Any]:
        """The package's batch, and what its model makes of it."""
        wish = texts[0].wish
        inputs = [{"tokenized_text": list(text.words), "ner": None} for text in texts]
        with self._tokenizing:
            batch = self._whole.collate_batch(inputs, list(wish.labels))
        return batch, self._whole.run_batch(batch, threshold=wish.threshold)

    @torch.inference_mode()
    def _answers(self, texts: Sequence[_Words]) -> list[ExtractOutput]:
        wish = texts[0].wish
        batch, output = self._forward(texts)
        # (texts, words, …): of scores that are not numbers the package would make no entities.
        broken = [bool(output[0][row, : len(text.words)].isnan().any()) for row, text in enumerate(texts)]
        spans = self._whole.decode_batch(
            output, batch, threshold=wish.threshold, flat_ner=wish.flat_ner, multi_label=wish.multi_label
        )
        return [
            not_finite(text.tokens) if bad else ExtractOutput(text.tokens, tuple(_entity(text, span) for span in found))
            for text, found, bad in zip(texts, spans, broken, strict=True)
        ]


def _entity(text: _Words, span: Any) -> Entity:
    start, end = text.starts[span.start], text.ends[span.end]
    return Entity(text.text[start:end], span.entity_type, float(span.score), start, end)
