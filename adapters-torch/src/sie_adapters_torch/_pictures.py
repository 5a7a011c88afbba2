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

__all__ = ["FORMATS", "Sizes", "largest", "pixels", "require_pillow"]

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")


@frozen
class Sizes:
    """How large an image may be, and how large it becomes.

    ``pixels``: as it comes and once resized. ``shortest_edge``: what its shorter side is resized to; ``fixed``: height
    and width that it is resized to; neither: it stays as it is. ``resample``: Pillow's number for how.
    """

    pixels: int
    shortest_edge: int | None = None
    fixed: tuple[int, int] | None = None
    resample: int | None = None

    @classmethod
    def of(cls, processor: Any, most: int) -> Sizes:
        """As one of transformers' image processors has it."""
        if not getattr(processor, "do_resize", True):
            return cls(most)
        edge, height, width, others = (_said(processor.size, *names) for names in _KEYS)
        if others or not (edge or (height and width)):
            return cls(most, edge)
        fixed = None if edge or height is None or width is None else (height, width)
        return cls(most, edge, fixed, int(processor.resample))

    @property
    def resizes(self) -> bool:
        """Whether ``resized`` does; else whoever takes the image has to."""
        return self.resample is not None

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

    def resized(self, image: Image.Image) -> Image.Image:
        """What transformers makes of it, without its copies in numpy: those of a large image take a second."""
        if self.resample is None:
            return image
        if self.fixed is not None:
            return image.resize(self.fixed[::-1], self.resample)
        assert self.shortest_edge is not None
        edge, (width, height) = self.shortest_edge, image.size
        longest = int(edge * max(width, height) / min(width, height))
        return image.resize((edge, longest) if width <= height else (longest, edge), self.resample)


_KEYS = (("shortest_edge",), ("height",), ("width",), ("longest_edge", "max_height", "max_width"))


def _said(size: Any, *names: str) -> int | None:
    """The first of these that a ``size`` has: a mapping, or an object with attributes in newer releases."""
    for name in names:
        value = size.get(name) if isinstance(size, Mapping) else getattr(size, name, None)
        if value:
            return int(value)
    return None


def largest(processor: Any) -> int:
    """Pixels that the processor of a model makes of a square image, on the way or in the end."""
    found = 0
    for does, name in (("do_resize", "size"), ("do_center_crop", "crop_size")):
        size = getattr(processor, name, None) if getattr(processor, does, False) else None
        edge, height, width = (_said(size, *names) or 0 for names in _KEYS[:3])
        found = max(found, edge * edge, height * width)
    return found


def require_pillow() -> None:
    """Raises MissingDependency."""
    try:
        import PIL.Image  # noqa: F401
    except ImportError as error:
        raise MissingDependency(f"images need Pillow: pip install 'sie-adapters-torch[images]' ({error})") from error


def pixels(data: bytes, index: int, sizes: Sizes) -> NDArray[np.uint8]:
    """The image in the file, resized, (height, width, 3).

    It is the first one in it, turned as its EXIF data say, transparency on white.

    Raises InvalidInput with ``index``.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        with Image.open(BytesIO(data), formats=FORMATS) as image:
            sizes.check(*image.size, index)
            image.load()
            sizes.check(*image.size, index)  # some decoders find out only then
            return np.asarray(sizes.resized(_rgb(ImageOps.exif_transpose(image), index)))
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
        # 16 bits of grey: the reference, which is Pillow's own conversion, makes white of all that is over 255.
        grey = np.asarray(image)
        if grey.max() > 255:
            raise _refused(
                "the image has 16 bits of grey, of which models would see the darkest alone: save it with 8", index
            )
        return Image.fromarray(grey.astype(np.uint8)).convert("RGB")
    if image.mode in ("I", "F"):
        raise _refused(f"the image's pixels are of 32 bits (mode {image.mode}): what is white is not known", index)
    if ("A" in image.mode.upper() and image.mode != "LAB") or "transparency" in image.info:
        colours = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", colours.size, "white"), colours).convert("RGB")
    return image.convert("RGB")


def _refused(message: str, index: int) -> InvalidInput:
    return InvalidInput(message, index=index, param="images")
