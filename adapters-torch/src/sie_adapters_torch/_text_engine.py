"""Engines that read texts: tokens in, the hidden states of a batch without padding, a family's outputs.

A family inherits :class:`TextEngine` and says what it makes of the hidden states (``outputs``), and where it differs
what a request may ask for (``wish``) and how its texts become tokens (``tokens``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
from attrs import evolve, frozen
from sie_core import (
    BatchRequest,
    Capabilities,
    DeviceNeed,
    EngineEvents,
    InvalidInput,
    Item,
    MemoryReport,
    ModelSourceInvalid,
    ModelSpec,
    Output,
    Prepared,
    RequestParams,
    TransitionContext,
    TransitionError,
)

from sie_adapters_torch._backbone import Backbone, Packed, PaddedBackbone
from sie_adapters_torch._engine import Parts, Step, TorchEngine, bring_up
from sie_adapters_torch._files import ModelFiles, Prompts, positions_of
from sie_adapters_torch._lora import Base, Loras
from sie_adapters_torch._options import LengthOptions
from sie_adapters_torch._packed_bert import PackedBert
from sie_adapters_torch._positions import tried_positions
from sie_adapters_torch._request import check_request, check_size
from sie_adapters_torch._reserve import FEWEST_TOKENS, Size
from sie_adapters_torch._tokenise import Tokeniser, Tokens
from sie_adapters_torch._torch import out_of_memory

__all__ = ["Known", "Reading", "Text", "TextEngine", "Weights", "bring_up_text"]

# Measured with MiniLM on two cores; all three are flat around these values.
_CPU_CHUNK = 512  # tokens: larger chunks gain nothing more, smaller ones starve the matrix products
_CPU_OVERHEAD = 32  # tokens' worth of time that one more padded batch costs
_GPU_OVERHEAD = 4096
_NO_PROMPTS = Prompts({}, "", "")


@frozen(eq=False)
class Reading:
    """How an engine reads: the model's files, its tokenizer and its prompts. ``options`` are those of ``Parts``."""

    files: ModelFiles
    tokeniser: Tokeniser
    prompts: Prompts
    options: LengthOptions


@frozen(eq=False)
class Known:
    """What is known of a text model before its weights are read."""

    model: ModelSpec
    options: LengthOptions
    files: ModelFiles
    capabilities: Capabilities
    size: Size
    prompts: Prompts = _NO_PROMPTS


@frozen(eq=False)
class Text:
    """One item, ready to run. ``wish``: what its request asked for, as the family's ``wish`` gave it."""

    tokens: Tokens
    wish: Any
    lora: str | None = None


class TextEngine(TorchEngine):
    """One text model on one device. ``Parts.modules[0]`` is the encoder: token ids in, hidden states out."""

    first_only = False
    """Whether ``outputs`` reads the first token of each text only: it is then given (texts, width)."""

    def __init__(self, parts: Parts, account: str, reading: Reading) -> None:
        super().__init__(parts, account)
        self._reading = reading
        self._tokeniser = reading.tokeniser
        self._backbone: Backbone | None = None
        self._way_to_run = partial(_way_to_run, self._device, reading.tokeniser.pad_id)
        self.max_loras: int = getattr(parts.options, "max_loras", 0)
        base = Base(
            parts.model.name, parts.modules[0], account, parts.options, self._way_to_run, max_loras=self.max_loras
        )
        self._loras = Loras(base)

    # --- what a family fills in --------------------------------------------------------------------

    def outputs(self, hidden: torch.Tensor, texts: Sequence[Text]) -> Sequence[Output]:
        """One output a text. ``hidden``: the tokens of all texts, one after the other, (tokens, width), on the device.

        Several threads may be here at once, with different texts, in inference mode.
        """
        raise NotImplementedError

    def wish(self, request: BatchRequest) -> Any:
        """What ``outputs`` has to know of the request; raises Unsupported or InvalidInput for what it can't have.

        Task, output types, images and ``lora`` have been looked at.
        """
        check_size(self._model.name, self.capabilities, request.params.dimensions)

    def tokens(self, request: BatchRequest) -> list[Tokens]:
        """The request's items as tokens, in order. Raises InvalidInput, InputTooLong with the item's ``index``."""
        return self.tokenise(request.items, request.params, self.prompt(request.params))

    def sample_text(self) -> Text:
        """The fixed input of ``sample``: ids from all over the vocabulary."""
        length = min(self._tokeniser.limit or 16, 16)
        ids = (np.arange(1, length + 1, dtype=np.int64) * 7919) % self._tokeniser.vocabulary
        return Text(Tokens(ids), None)

    # --- for families ------------------------------------------------------------------------------

    def tokenise(
        self,
        items: Sequence[Item],
        params: RequestParams,
        prompt: str,
        *,
        limit: int | None = None,
        marker: int | None = None,
    ) -> list[Tokens]:
        """The items as tokens behind a prompt, cut or refused as the request says. See ``Tokeniser``."""
        truncate = self._reading.options.truncate if params.truncate is None else params.truncate
        return self._tokeniser(items, prompt=prompt, truncate=truncate, limit=limit, marker=marker)

    def prompt(self, params: RequestParams) -> str:
        """An instruction is the name of one of the model's prompts, or the prompt itself."""
        prompts = self._reading.prompts
        if params.instruction is not None:
            return prompts.named.get(params.instruction, params.instruction)
        return prompts.of(params.is_query)

    # --- lifecycle ---------------------------------------------------------------------------------

    def begin(self) -> None:
        self._backbone = self._way_to_run(self._placed.modules[0])

    def end(self) -> None:
        self._backbone = None
        self._loras.close()

    def sample(self) -> Output:
        text = self.sample_text()
        return self.run([Prepared(len(text.tokens.ids), text)])[0]

    def memory(self) -> MemoryReport:
        report = super().memory()
        return MemoryReport({account: (held or 0) + self._loras.nbytes() for account, held in report.devices.items()})

    # --- LoRA --------------------------------------------------------------------------------------

    def lora_reserve(self, name: str, source: str) -> DeviceNeed:
        return self._loras.reserve(source)

    def lora_load(self, name: str, source: str, ctx: TransitionContext) -> None:
        self._check_awake()
        self._loras.load(name, source, ctx)
        self.mark_stale()

    def lora_unload(self, name: str, ctx: TransitionContext) -> None:
        self._check_awake()
        self._loras.unload(name)
        self.mark_stale()

    def _check_awake(self) -> None:
        if self.parked:
            raise TransitionError(
                f"{self._model.name} is parked in host memory: wake it before its LoRA adapters change"
            )

    # --- inference ---------------------------------------------------------------------------------

    def prepare(self, request: BatchRequest) -> Sequence[Prepared]:
        self._check(request)
        wish, lora = self.wish(request), request.params.lora
        return [Prepared(len(tokens.ids), Text(tokens, wish, lora)) for tokens in self.tokens(request)]

    def _check(self, request: BatchRequest) -> None:
        check_request(self._model.name, self.capabilities, request)
        if images := [index for index, item in enumerate(request.items) if item.images]:
            raise InvalidInput(f"{self._model.name} takes text only", index=images[0], param="images")
        if request.params.lora is not None:
            self._loras.backbone(request.params.lora)

    def run(self, batch: Sequence[Prepared]) -> Sequence[Output]:
        self.check_running()
        texts: list[Text] = [item.payload for item in batch]
        by_lora: dict[str | None, list[int]] = {}
        for index, text in enumerate(texts):
            by_lora.setdefault(text.lora, []).append(index)
        assert self._backbone is not None
        # All of them are found before the first is run.
        groups = [(self._backbone if name is None else self._loras.backbone(name), by_lora[name]) for name in by_lora]
        outputs: list[Output | None] = [None] * len(texts)
        with out_of_memory(self._placed.account):
            for backbone, members in groups:
                self._run(backbone, texts, members, outputs)
        return [output for output in outputs if output is not None]

    def _run(
        self, backbone: Backbone, texts: Sequence[Text], members: Sequence[int], outputs: list[Output | None]
    ) -> None:
        """Run those of ``texts`` that are ``members``, into their places in ``outputs``."""
        order = sorted(members, key=lambda index: (-len(texts[index].tokens.ids), -texts[index].tokens.attended))
        lengths = [len(texts[index].tokens.ids) for index in order]

        def part(chosen: Sequence[int]) -> None:
            found = self._through(backbone, [texts[index] for index in chosen])
            for index, output in zip(chosen, found, strict=True):
                outputs[index] = output

        lanes, limit = self._lanes, self.max_batch_tokens or self._model.batch_tokens
        groups = backbone.groups(lengths, limit, lanes.threads if lanes is not None else 1)
        parts = [partial(part, order[group.start : group.stop]) for group in groups]
        if lanes is not None:
            lanes.run(parts, side_by_side=backbone.side_by_side)
        else:
            for each in parts:
                each()

    @torch.inference_mode()
    def _through(self, backbone: Backbone, texts: Sequence[Text]) -> Sequence[Output]:
        batch = _packed([text.tokens for text in texts], self._device, first_only=self.first_only)
        return self.outputs(backbone.hidden(batch), texts)


def _packed(texts: Sequence[Tokens], device: torch.device, *, first_only: bool) -> Packed:
    lengths = tuple(len(text.ids) for text in texts)
    ids = torch.from_numpy(np.concatenate([text.ids for text in texts])).to(device)
    types = attended = None
    if any(text.types is not None for text in texts):
        given = [np.zeros_like(text.ids) if text.types is None else text.types for text in texts]
        types = torch.from_numpy(np.concatenate(given)).to(device)
    if any(text.attended < len(text.ids) for text in texts):
        attended = tuple(text.attended for text in texts)
    return Packed(ids, lengths, types, attended, first_only)


def _way_to_run(device: torch.device, pad_id: int, module: torch.nn.Module) -> Backbone:
    on_cpu = device.type == "cpu"
    if on_cpu and PackedBert.supports(module):
        return PackedBert(module, chunk=_CPU_CHUNK)
    fewest = FEWEST_TOKENS.get(getattr(module.config, "model_type", ""), 1)
    return PaddedBackbone(module, pad_id=pad_id, overhead=_CPU_OVERHEAD if on_cpu else _GPU_OVERHEAD, fewest=fewest)


Weights: TypeAlias = tuple[list[torch.nn.Module], Any]
"""An engine's modules, the encoder first, and the model's transformers configuration."""
E = TypeVar("E", bound=TextEngine)


def bring_up_text(
    known: Known,
    ctx: TransitionContext,
    events: EngineEvents,
    read: Callable[[], Weights],
    make: Callable[[Parts, str, Reading], E],
) -> E:
    """Make an engine and bring it up on the device that ``ctx`` grants. Blocking. Raises as ``Adapter.load``.

    ``read`` gets the weights into RAM, ``make`` gets the engine's parts, its account and how it reads.
    """
    files, options = known.files, known.options

    def whole(account: str, step: Step) -> E:
        modules, config = read()
        step(0.7, "reading the tokenizer")
        tokeniser, capabilities = Tokeniser.load(files, options, config), known.capabilities
        longest = capabilities.max_sequence_length
        stated = max(longest or 0, positions_of(files.text_config) or 0) or None
        tried = tried_positions(modules[0], stated, pad_id=tokeniser.pad_id)
        if tried is not None and tried != stated:
            if options.max_length is not None and options.max_length > tried:
                raise ModelSourceInvalid(f"max_length is {options.max_length}, and the model has {tried} positions")
            tokeniser.restrict(tried)
            capabilities = evolve(capabilities, max_sequence_length=min(longest or tried, tried))
        reading = Reading(files, tokeniser, known.prompts, options)
        parts = Parts(known.model, options, capabilities, files.folder, torch.nn.ModuleList(modules), known.size)
        return make(parts, account, reading)

    return bring_up(known.model, ctx, events, whole)
