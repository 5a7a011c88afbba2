"""What a model folder says about a model that labels tokens, read without torch."""

from __future__ import annotations

from pathlib import Path

from attrs import frozen
from sie_core import ModelSourceInvalid

from sie_adapters_torch._files import ModelFiles, limited, read_model
from sie_adapters_torch._labels import check_head, read_labels
from sie_adapters_torch._options import EntityOptions

__all__ = ["OUTSIDE", "EntityFiles", "Tag", "read_entities"]

OUTSIDE = "O"
_STARTS, _ENDS = "BSU", "ESLU"


@frozen
class Tag:
    """What a label says of a token: that it is of an entity called ``name``, and where in it."""

    name: str
    starts: bool
    ends: bool


@frozen(eq=False)
class EntityFiles:
    """A token classifier. ``tags``: one a label, in their order. ``names``: the entities that it can find."""

    model: ModelFiles
    tags: tuple[Tag, ...]
    names: tuple[str, ...]


def read_entities(folder: Path, options: EntityOptions, *, weights_needed: bool = True) -> EntityFiles:
    """Read a token classifier's folder. Raises ModelSourceInvalid, UnsafeSource."""
    model = limited(read_model(folder, options, weights_needed=weights_needed), options.max_length)
    check_head(model, "ForTokenClassification", adapter="torch-entities")
    tags = _tags(read_labels(model))
    if options.stride is not None and model.max_length is not None and options.stride >= model.max_length - 2:
        raise ModelSourceInvalid(f"stride is {options.stride}, and the model takes {model.max_length} tokens")
    names = tuple(dict.fromkeys(tag.name for tag in tags if tag.name != OUTSIDE))
    return EntityFiles(model, tags, names)


def _tags(labels: tuple[str, ...]) -> tuple[Tag, ...]:
    """B- and I- as transformers reads them; E- and S- (or L- and U-) where B- or I- of the same name is there too."""
    known = set(labels)

    def tag(label: str) -> Tag:
        place, dash, name = label[:1], label[1:2], label[2:]
        inside = place in ("B", "I") or (place in _ENDS and bool(known & {f"B-{name}", f"I-{name}"}))
        if dash != "-" or not place or not name or not inside:
            return Tag(label, starts=False, ends=False)
        return Tag(name, starts=place in _STARTS, ends=place in _ENDS)

    return tuple(tag(label) for label in labels)
