"""From the bytes of an image file to upright RGB pixels. Needs Pillow; imports no torch.

Files come from anybody: what a file claims to be is read from its header before anything is decoded, and only formats
that Pillow reads by itself are tried (others, such as EPS, start programs).
"""

from __future__ import annotations

from collections.abc import Mapping
from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import frozen
from numpy.typing import NDArray
from sie_core import InvalidInput, MissingDependency

if TYPE_CHECKING:
    from PIL import Image

__all__ = ["FORMATS", "Limits", "pixels", "require_pillow"]

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")


@frozen
class Limits:
    """``pixels``: of an image, as it comes and once resized. ``shortest_edge``: what its shorter side is resized to.

    ``None``: it is resized to a fixed size.
    """

    pixels: int
    shortest_edge: int | None = None

    def check(self, width: int, height: int, index: int) -> None:
        """Raises InvalidInput."""
        if not width or not height:
            raise _refused("the image has no pixels", index)
        if width * height > self.pixels:
            raise _refused(
                f"the image has {width} x {height} pixels, and {self.pixels} is the most (max_pixels)", index
            )
        if self.shortest_edge is not None:
            # Resizing keeps the proportions, and cuts off what is too long only afterwards.
            longest = self.shortest_edge * max(width, height) / min(width, height)
            if longest * self.shortest_edge > self.pixels:
                raise _refused(f"the image is too long and thin: {width} x {height} pixels", index)


def require_pillow() -> None:
    """Raises MissingDependency."""
    try:
        import PIL.Image  # noqa: F401
    except ImportError as error:
        raise MissingDependency(f"images need Pillow: pip install 'sie-adapters-torch[images]' ({error})") from error


def pixels(data: bytes, index: int, limits: Limits) -> NDArray[np.uint8]:
    """The image in the file, (height, width, 3): the first one, turned as its EXIF data say, transparency on white.

    Raises InvalidInput with ``index``.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        with Image.open(BytesIO(data), formats=FORMATS) as image:
            limits.check(*image.size, index)
            image.load()
            limits.check(*image.size, index)  # some decoders find out only then
            return np.asarray(_rgb(ImageOps.exif_transpose(image), index))
    except (InvalidInput, MemoryError):
        raise
    except UnidentifiedImageError:
        known = ", ".join(FORMATS)
        raise _refused(f"this is no image of a known format ({known}), or it ends in its header", index) from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise _refused(f"the image has more pixels than are decoded here: {error}", index) from error
    except Exception as error:  # whatever a decoder stumbles over in a damaged file
        text = str(error) or type(error).__name__
        raise _refused(f"the image is damaged or truncated: {text.splitlines()[0]}", index) from error


def _rgb(image: Image.Image, index: int) -> Image.Image:
    from PIL import Image

    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PNG"):
        # 16 bits of grey: Pillow's own conversion would make everything but the darkest 256th white.
        grey = (np.asarray(image).astype(np.uint32) + 128) // 257
        return Image.fromarray(grey.astype(np.uint8)).convert("RGB")
    if image.mode in ("I", "F"):
        raise _refused(f"the image's pixels are of 32 bits (mode {image.mode}): what is white is not known", index)
    if ("A" in image.mode.upper() and image.mode != "LAB") or "transparency" in image.info:
        colours = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", colours.size, "white"), colours).convert("RGB")
    return image.convert("RGB")


def _refused(message: str, index: int) -> InvalidInput:
    return InvalidInput(message, index=index, param="images")


def shortest_edge(size: Any) -> int | None:
    """The part of an image processor's ``size`` that keeps proportions, if it does."""
    edge = size.get("shortest_edge") if isinstance(size, Mapping) else getattr(size, "shortest_edge", None)
    return int(edge) if edge else None
