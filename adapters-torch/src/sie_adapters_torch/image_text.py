"""``torch-image-text``: texts and images in one space. Importing this module imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from sie_core import Capabilities, Engine, EngineEvents, ModelSpec, Task, TensorEntry, TransitionContext

from sie_adapters_torch._adapter import TorchAdapter
from sie_adapters_torch._checkpoint import DTYPE_BYTES
from sie_adapters_torch._image_text_files import ImageTextFiles, Tower, read_image_text
from sie_adapters_torch._options import ImageTextOptions
from sie_adapters_torch._reserve import Size

__all__ = ["ImageTextAdapter", "ImageTextOptions"]


class ImageTextAdapter(TorchAdapter[ImageTextFiles]):
    """CLIP and SigLIP: an encoder for texts and one for images, whose vectors can be compared."""

    options: ClassVar[type] = ImageTextOptions
    declares = Capabilities(tasks=frozenset({Task.ENCODE, Task.SCORE}), inputs=("text", "image"))

    def read(self, folder: Path, options: Any, *, weights_needed: bool) -> ImageTextFiles:
        return read_image_text(folder, options, weights_needed=weights_needed)

    def capabilities(self, files: ImageTextFiles) -> Capabilities:
        return capabilities_of(files)

    def size(self, files: ImageTextFiles, options: Any) -> Size:
        return size_of(files, options)

    def loaded(self, files: ImageTextFiles, entry: TensorEntry) -> bool | None:
        return True

    def build(self, model: ModelSpec, files: ImageTextFiles, ctx: TransitionContext, events: EngineEvents) -> Engine:
        from sie_adapters_torch._image_text_engine import load_image_text

        return load_image_text(model, files, ctx, events)


def capabilities_of(files: ImageTextFiles) -> Capabilities:
    """What a dual encoder takes and gives. Texts and images are scored against each other by their vectors."""
    return Capabilities(
        tasks=frozenset({Task.ENCODE, Task.SCORE}),
        inputs=("text", "image"),
        dims={"dense": files.dims},
        max_sequence_length=files.limit,
        compares="dense",
    )


def size_of(files: ImageTextFiles, options: ImageTextOptions) -> Size:
    """What it takes beside its weights. A token of a batch may be a word's or an image's."""
    item = DTYPE_BYTES[options.dtype]
    # The pixels of a patch: as they come, in the model's precision, and laid out for the first matrix product.
    patch = 3 * files.patch**2 * (4 + 2 * item)
    longest = max(files.patches, files.limit)
    token = max(_activations(files.text, item), _activations(files.vision, item) + patch)
    # One item is run however small the budget is.
    return Size(token_bytes=token, fixed_bytes=longest * token)


def _activations(tower: Tower, item: int) -> int:
    """As for any transformer; see ``_reserve``."""
    return (8 * tower.hidden + 3 * tower.wide) * item + 3 * 8 + 4 * tower.hidden
