"""The classes that a checkpoint's head tells apart, read from its ``config.json`` without torch."""

from __future__ import annotations

from sie_core import ModelSourceInvalid, TensorEntry

from sie_adapters_torch._files import ModelFiles

__all__ = ["check_head", "counted_head", "read_labels"]

_DEFAULT = 2  # what transformers takes where a configuration says nothing
_MOST = 1_000_000  # a slip in a file shall not fill the memory


def read_labels(files: ModelFiles) -> tuple[str, ...]:
    """The labels in the order of the logits. Raises ModelSourceInvalid."""
    named, counted = files.config.get("id2label"), files.config.get("num_labels")
    if named is None:
        count = counted if isinstance(counted, int) and not isinstance(counted, bool) else _DEFAULT
        if not 0 < count <= _MOST:
            raise ModelSourceInvalid(f"{files.folder / 'config.json'}: num_labels is {count}")
        return tuple(f"LABEL_{index}" for index in range(count))
    try:
        labels = {int(index): label for index, label in named.items()}
    except (AttributeError, TypeError, ValueError):
        labels = {}
    if not labels or sorted(labels) != list(range(len(labels))) or not all(isinstance(x, str) for x in labels.values()):
        raise ModelSourceInvalid(f"{files.folder / 'config.json'}: id2label must name the labels 0, 1, …")
    return tuple(labels[index] for index in range(len(labels)))


def check_head(files: ModelFiles, ending: str, *, adapter: str, hint: str = "") -> None:
    """Refuse a checkpoint that says it is of another kind: its head would be missing. Raises ModelSourceInvalid."""
    kinds = files.config.get("architectures")
    if not isinstance(kinds, list) or not kinds or any(str(kind).endswith(ending) for kind in kinds):
        return
    raise ModelSourceInvalid(f"{files.folder} holds a {kinds[0]}; {adapter} needs a …{ending}{hint}")


def counted_head(entry: TensorEntry) -> bool | None:
    """Whether a tensor of a classifier's checkpoint is loaded; ``None``: as for an encoder, which has no such head."""
    return True if entry.name.startswith(("classifier.", "score.")) else None
