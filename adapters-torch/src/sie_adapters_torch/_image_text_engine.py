"""The running dual encoder: texts and images, each through its own half, to vectors of one space."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from attrs import frozen
from numpy.typing import NDArray
from sie_core import (
    BatchRequest,
    EncodeOutput,
    EngineEvents,
    InvalidInput,
    Item,
    MissingDependency,
    ModelSourceInvalid,
    ModelSpec,
    Output,
    Prepared,
    TransitionContext,
)

from sie_adapters_torch._backbone import split_by_length
from sie_adapters_torch._engine import Parts, Step, TorchEngine, bring_up
from sie_adapters_torch._files import ModelFiles
from sie_adapters_torch._image_text_files import ImageTextFiles
from sie_adapters_torch._image_text_tokens import TextSide, load_text_side
from sie_adapters_torch._options import ImageTextOptions, options_of
from sie_adapters_torch._pictures import Sizes, largest, pixels, require_pillow
from sie_adapters_torch._request import check_request, check_size, no_lora
from sie_adapters_torch._torch import DTYPES, out_of_memory
from sie_adapters_torch._weights import load_model
from sie_adapters_torch.image_text import capabilities_of, size_of

__all__ = ["ImageTextEngine", "load_image_text"]

_OVERHEAD = 64  # tokens' worth of time that one more batch of texts costs
_CPU_IMAGES = 8  # more at a time gain nothing on a CPU
_SAMPLE = "a photo of a red fox"


@frozen(eq=False)
class _Text:
    """Token ids, int64 (n,), as they are run, and how many of them were read."""

    ids: NDArray[np.int64]
    read: int


@frozen(eq=False)
class _Picture:
    """An image as its half takes it, float32 (3, height, width)."""

    values: NDArray[np.float32]


def load_image_text(
    model: ModelSpec, files: ImageTextFiles, ctx: TransitionContext, events: EngineEvents
) -> ImageTextEngine:
    """Make an engine on the device that ``ctx`` grants. Blocking. Raises as ``Adapter.load``."""
    options = options_of(model, ImageTextOptions)
    require_pillow()

    def make(account: str, step: Step) -> ImageTextEngine:
        both, config = load_model(files.model, options)
        step(0.7, "reading the tokenizer and the image processor")
        side = load_text_side(files, options, config)
        modules = torch.nn.ModuleList([both])
        parts = Parts(model, options, capabilities_of(files), files.model.folder, modules, size_of(files, options))
        return ImageTextEngine(parts, account, files, side, _load_processor(files.model, options))

    return bring_up(model, ctx, events, make)


def _load_processor(files: ModelFiles, options: ImageTextOptions) -> Any:
    """transformers' image processor on Pillow: the other one gives other pixels, and needs torchvision."""
    import transformers

    # By its own module: some releases (5.16) give it from the top only where torchvision is.
    from transformers.models.auto.image_processing_auto import AutoImageProcessor

    new = int(transformers.__version__.partition(".")[0]) >= 5
    maker: Any = AutoImageProcessor
    try:
        processor: Any = maker.from_pretrained(
            str(files.folder),
            local_files_only=True,
            trust_remote_code=options.trust_remote_code,
            **({"backend": "pil"} if new else {"use_fast": False}),
        )
    except ImportError as error:
        raise MissingDependency(f"{files.folder}: the image processor can't be loaded: {error}") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        text = str(error).strip().splitlines()
        raise ModelSourceInvalid(
            f"{files.folder}: the image processor (preprocessor_config.json) can't be loaded: {text[0] if text else ''}"
        ) from error
    if largest(processor) > options.max_pixels:
        raise ModelSourceInvalid(
            f"{files.folder / 'preprocessor_config.json'} makes {largest(processor)} pixels of an image, and "
            f"{options.max_pixels} is the most (max_pixels)"
        )
    return processor


class ImageTextEngine(TorchEngine):
    """One vector an item, of its text or of its image. ``Parts.modules[0]`` is the model with both halves."""

    def __init__(self, parts: Parts, account: str, files: ImageTextFiles, side: TextSide, processor: Any) -> None:
        super().__init__(parts, account)
        assert isinstance(parts.options, ImageTextOptions)
        self._files = files
        self._side = side
        self._processor = processor
        self._normalise = parts.options.normalise
        self._truncate = parts.options.truncate
        self._dtype = DTYPES[parts.options.dtype]
        self._sizes = Sizes.of(processor, parts.options.max_pixels)

    # --- the fixed input ---------------------------------------------------------------------------

    def sample(self) -> Output:
        """A text's vector, and as a matrix that of the text and of an image."""
        from PIL import Image

        rows = np.arange(48 * 64 * 3, dtype=np.uint32).reshape(48, 64, 3) * 7919 >> 8 & 255
        image = np.asarray(self._sizes.resized(Image.fromarray(rows.astype(np.uint8))))
        prepared = [*self._texts([(0, Item(text=_SAMPLE))], "", truncate=True), self._picture(image)]
        vectors = [output.dense for output in self.run(prepared) if isinstance(output, EncodeOutput)]
        both = np.stack([vector for vector in vectors if vector is not None])
        return EncodeOutput(tokens=0, dense=both[0], multivector=both)

    # --- from items to tensors ---------------------------------------------------------------------

    def prepare(self, request: BatchRequest) -> Sequence[Prepared]:
        check_request(self._model.name, self.capabilities, request)
        check_size(self._model.name, self.capabilities, request.params.dimensions)
        no_lora(self._model.name, request.params.lora)
        items, params = request.items, request.params
        for index, item in enumerate(items):
            self._check_item(item, index)
        texts = [(index, item) for index, item in enumerate(items) if not item.images]
        truncate = self._truncate if params.truncate is None else params.truncate
        prompts = self._files.prompts
        prompt = prompts.of(params.is_query)
        if params.instruction is not None:
            prompt = prompts.named.get(params.instruction, params.instruction)
        found = dict(zip([index for index, _ in texts], self._texts(texts, prompt, truncate=truncate), strict=True))
        for index, item in enumerate(items):
            if item.images:
                found[index] = self._picture(pixels(item.images[0], index, self._sizes))
        return [found[index] for index in range(len(items))]

    def _check_item(self, item: Item, index: int) -> None:
        if not item.images:
            return
        if item.text is not None or item.token_ids is not None:
            raise InvalidInput(
                f"{self._model.name} takes a text or an image: make two items of them", index=index, param="images"
            )
        if len(item.images) > 1:
            raise InvalidInput(
                f"{self._model.name} takes one image an item, not {len(item.images)}: make an item of each",
                index=index, param="images",
            )  # fmt: skip

    def _texts(self, texts: Sequence[tuple[int, Item]], prompt: str, *, truncate: bool) -> list[Prepared]:
        if not texts:
            return []
        try:
            tokens = self._side.tokeniser([item for _, item in texts], prompt=prompt, truncate=truncate)
        except InvalidInput as error:
            if error.index is not None:  # among the texts alone
                error.index = texts[error.index][0]
            raise
        filled = [self._side.filled(each.ids) for each in tokens]
        return [Prepared(len(ids), _Text(ids, len(each.ids))) for ids, each in zip(filled, tokens, strict=True)]

    def _picture(self, image: NDArray[np.uint8]) -> Prepared:
        done = {"do_resize": False} if self._sizes.resizes else {}
        values = self._processor(images=image, input_data_format="channels_last", return_tensors="np", **done)
        return Prepared(self._files.patches, _Picture(np.asarray(values["pixel_values"][0], dtype=np.float32)))

    # --- inference ---------------------------------------------------------------------------------

    def run(self, batch: Sequence[Prepared]) -> Sequence[Output]:
        self.check_running()
        outputs: list[Output | None] = [None] * len(batch)
        payloads = [item.payload for item in batch]
        texts = sorted(
            (index for index, each in enumerate(payloads) if isinstance(each, _Text)),
            key=lambda index: -len(payloads[index].ids),
        )
        pictures = [index for index, each in enumerate(payloads) if isinstance(each, _Picture)]
        limit = self.max_batch_tokens or self._model.batch_tokens

        def part(encode: Callable[[Sequence[Any]], torch.Tensor], chosen: Sequence[int]) -> None:
            vectors = self._vectors(encode([payloads[index] for index in chosen]))
            for index, vector in zip(chosen, vectors, strict=True):
                read = getattr(payloads[index], "read", self._files.patches)
                outputs[index] = EncodeOutput(tokens=read, dense=vector)

        lengths = [len(payloads[index].ids) for index in texts]
        groups = split_by_length(lengths, limit=limit, overhead=_OVERHEAD)
        parts = [partial(part, self._encode_texts, texts[group.start : group.stop]) for group in groups]
        size = max(1, limit // self._files.patches)
        size = min(size, _CPU_IMAGES) if self._lanes is not None else size
        parts += [
            partial(part, self._encode_images, pictures[start : start + size])
            for start in range(0, len(pictures), size)
        ]
        with out_of_memory(self._placed.account):
            if self._lanes is not None:
                self._lanes.run(parts, side_by_side=False)
            else:
                for each in parts:
                    each()
        return [output for output in outputs if output is not None]

    @torch.inference_mode()
    def _vectors(self, features: torch.Tensor) -> NDArray[np.float32]:
        features = features.float()
        if self._normalise:
            features = torch.nn.functional.normalize(features, dim=-1)
        vectors: NDArray[np.float32] = features.cpu().numpy()
        return vectors

    @torch.inference_mode()
    def _encode_texts(self, texts: Sequence[_Text]) -> torch.Tensor:
        ids, mask = self._side.batch([text.ids for text in texts], [text.read for text in texts])
        model: Any = self._placed.modules[0]
        there = None if mask is None else torch.from_numpy(mask).to(self._device)
        return _features(
            model.get_text_features(input_ids=torch.from_numpy(ids).to(self._device), attention_mask=there)
        )

    @torch.inference_mode()
    def _encode_images(self, pictures: Sequence[_Picture]) -> torch.Tensor:
        values = torch.from_numpy(np.stack([picture.values for picture in pictures]))
        model: Any = self._placed.modules[0]
        return _features(model.get_image_features(pixel_values=values.to(self._device, self._dtype)))


def _features(output: Any) -> torch.Tensor:
    """Newer releases of transformers give the features among other things."""
    found: torch.Tensor = output if isinstance(output, torch.Tensor) else output.pooler_output
    return found
