"""The texts of a dual encoder: which tokens its half reads, and how they are filled up."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
from attrs import frozen
from numpy.typing import NDArray
from sie_core import InvalidInput, Item, MissingDependency, ModelSourceInvalid

from sie_adapters_torch._image_text_files import ImageTextFiles
from sie_adapters_torch._json import read_object
from sie_adapters_torch._options import ImageTextOptions
from sie_adapters_torch._tokenise import Tokeniser

__all__ = ["TextSide", "load_text_side"]


@frozen(eq=False)
class TextSide:
    """``fill``: tokens that every text is filled up to, ``None``: those of the longest beside it.

    ``left``: filling goes before the text. ``masked``: filling is left out of attention.
    """

    tokeniser: Tokeniser
    pad_id: int
    fill: int | None
    left: bool
    masked: bool

    def filled(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """The ids as they are run, whatever is beside them."""
        missing = 0 if self.fill is None else self.fill - len(ids)
        if missing <= 0:
            return ids
        return np.pad(ids, (missing, 0) if self.left else (0, missing), constant_values=self.pad_id)

    def batch(
        self, texts: Sequence[NDArray[np.int64]], read: Sequence[int]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
        """Ids as ``filled`` gave them, (texts, tokens), and which of them are attended to; ``None``: all.

        ``read``: how many of each text's were there before.
        """
        longest = max(len(ids) for ids in texts)
        ids = np.stack([np.pad(each, (0, longest - len(each)), constant_values=self.pad_id) for each in texts])
        if not self.masked or all(count == longest for count in read):
            return ids, None
        places = np.arange(longest)
        places = places[::-1] if self.left else places
        return ids, (places[None] < np.asarray(read)[:, None]).astype(np.int64)


def load_text_side(files: ImageTextFiles, options: ImageTextOptions, config: Any) -> TextSide:
    """Read the tokenizer. Raises ModelSourceInvalid, MissingDependency."""
    _require_sentencepiece(files)
    tokeniser = Tokeniser.load(files.model, options, config, slow=True)
    if files.padded:
        masked = "attention_mask" in tokeniser.inputs
        return TextSide(tokeniser, tokeniser.pad_id, files.limit, left=tokeniser.pads_left, masked=masked)
    eos_id = config.text_config.eos_token_id
    try:
        (sample,) = tokeniser([Item(text="a photo")], prompt="", truncate=True)
    except InvalidInput as error:
        raise ModelSourceInvalid(
            f"{files.model.folder}: the model can't read its tokenizer's words: {error}"
        ) from error
    # A 2 is a slip of early files, for which transformers reads the highest id.
    if eos_id not in sample.ids and eos_id != 2:
        raise ModelSourceInvalid(
            f"{files.model.folder}: the model reads a text at its token {eos_id}, and the tokenizer puts none there"
        )
    return TextSide(tokeniser, tokeniser.pad_id, fill=None, left=False, masked=True)


def _require_sentencepiece(files: ImageTextFiles) -> None:
    """Without it some releases of transformers make a tokenizer of another kind. Raises MissingDependency."""
    about = read_object(files.model.folder / "tokenizer_config.json") or {}
    if about.get("tokenizer_class") != "SiglipTokenizer":
        return
    if missing := [name for name in ("sentencepiece", "google.protobuf") if not _there(name)]:
        raise MissingDependency(
            f"{files.model.folder}: its tokenizer needs {' and '.join(missing)}: "
            "pip install 'sie-adapters-torch[images]'"
        )


def _there(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # the package that it would be in
        return False
