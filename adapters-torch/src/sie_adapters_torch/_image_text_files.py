"""What a model folder says about an image and text encoder, read without torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import evolve, frozen
from sie_core import ModelSourceInvalid

from sie_adapters_torch._files import ModelFiles, Prompts, limited, read_model, read_modules, read_prompts
from sie_adapters_torch._options import ImageTextOptions

__all__ = ["ImageTextFiles", "Tower", "read_image_text"]

# What transformers takes where a configuration says nothing: configurations leave out what is as usual.
_TEXT: dict[str, dict[str, int]] = {
    "clip": {
        "hidden_size": 512, "intermediate_size": 2048, "max_position_embeddings": 77, "vocab_size": 49408,
    },
    "siglip": {
        "hidden_size": 768, "intermediate_size": 3072, "max_position_embeddings": 64, "vocab_size": 32000,
    },
}  # fmt: skip
_VISION: dict[str, dict[str, int]] = {
    "clip": {"hidden_size": 768, "intermediate_size": 3072, "image_size": 224, "patch_size": 32},
    "siglip": {"hidden_size": 768, "intermediate_size": 3072, "image_size": 224, "patch_size": 16},
}
_PROJECTION = 512


@frozen
class Tower:
    """One half of the model: vectors of ``hidden`` numbers a token, widened to ``wide``."""

    hidden: int
    wide: int


@frozen(eq=False)
class ImageTextFiles:
    """A dual encoder. ``patches``: tokens that an image becomes; ``patch``: pixels along the side of each.

    ``padded``: texts are filled up to the limit, and the last token is read, whatever it is.
    """

    model: ModelFiles
    prompts: Prompts
    dims: int
    limit: int
    padded: bool
    text: Tower
    vision: Tower
    patches: int
    patch: int


def read_image_text(folder: Path, options: ImageTextOptions, *, weights_needed: bool = True) -> ImageTextFiles:
    """Read a CLIP or SigLIP model's folder. Raises ModelSourceInvalid, UnsafeSource."""
    place = folder
    steps = read_modules(folder, ("CLIPModel", "Normalize"), adapter="torch-image-text")
    if steps is not None:
        order = [name for name, _ in steps]
        if order[0] != "CLIPModel" or order.count("CLIPModel") != 1:
            raise ModelSourceInvalid(f"{folder / 'modules.json'} must start with its one CLIPModel; it has {order}")
        place = steps[0][1]
    model = read_model(place, options, weights_needed=weights_needed)
    kind = str(model.config["model_type"])
    if kind not in _TEXT:
        raise ModelSourceInvalid(
            f"{place / 'config.json'} is of model_type {kind!r}; torch-image-text knows {' and '.join(_TEXT)}"
        )
    text, vision = (_half(model, name, table[kind]) for name, table in (("text", _TEXT), ("vision", _VISION)))
    positions = _number(model, text, "max_position_embeddings")
    model = evolve(model, config=dict(model.config) | {"text_config": text, "vision_config": vision})
    model = limited(model, options.max_length)
    limit = min(positions, model.max_length or positions)
    if kind == "siglip" and not options.max_length:
        limit = positions  # what it was trained on; tokenizers of some releases say less or nothing
    patch = _number(model, vision, "patch_size")
    if kind == "clip":
        dims = _number(model, {"projection_dim": _PROJECTION, **model.config}, "projection_dim")
    else:
        dims = _number(model, {"projection_size": text["hidden_size"], **text}, "projection_size")
        if dims != vision["hidden_size"]:
            raise ModelSourceInvalid(
                f"{place}: its texts have {dims} dimensions and its images {vision['hidden_size']}"
            )
    return ImageTextFiles(
        model=evolve(model, max_length=limit),
        prompts=read_prompts(folder, options)[0],
        dims=dims,
        limit=limit,
        padded=kind == "siglip",
        text=_tower(model, text),
        vision=_tower(model, vision),
        patches=(_number(model, vision, "image_size") // patch) ** 2 + (kind == "clip"),
        patch=patch,
    )


def _half(model: ModelFiles, name: str, usual: Mapping[str, int]) -> dict[str, Any]:
    """The configuration of one half. Older files have a second one, which counts more, as in transformers."""
    found: dict[str, Any] = dict(usual)
    for key in (f"{name}_config", f"{name}_config_dict"):
        said = model.config.get(key) or {}
        if not isinstance(said, dict):
            raise ModelSourceInvalid(f"{model.folder / 'config.json'}: {key} holds no JSON object")
        found |= said
    return found


def _number(model: ModelFiles, config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ModelSourceInvalid(f"{model.folder / 'config.json'}: {key} is {value!r}, not a whole number above 0")
    return value


def _tower(model: ModelFiles, config: Mapping[str, Any]) -> Tower:
    return Tower(_number(model, config, "hidden_size"), _number(model, config, "intermediate_size"))
