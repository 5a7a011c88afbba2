# ruff: noqa: RUF009 - option() makes an attrs field
"""The list of models: one entry each, typed and checked; the adapters' own options stay for binding."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import attrs
from attrs import frozen

from sie_core.config._fields import above, at_least, of_device, of_memory, option
from sie_core.config._readers import AttrsReader
from sie_core.config._value import INVALID, Report, Value, Where, shorten
from sie_core.sources import parse_source
from sie_core.types import ModelSpec, WakeCheck
from sie_core.units import ByteSize

_NAME = re.compile(r"[A-Za-z0-9._:/-]+")


def check_name(name: str) -> str | None:
    """What is wrong with a model's name, or ``None``."""
    if not name:
        return "a model needs a name, and this is empty"
    if len(name) > 255:
        return f"a name has 255 characters at most, and this has {len(name)}"
    if _NAME.fullmatch(name) is None:
        odd = next(character for character in name if _NAME.fullmatch(character) is None)
        return f"the name {shorten(name)!r} holds {odd!r}: names hold letters (a-z), digits and . _ - / :"
    segments = name.split("/")
    if "" in segments:
        return f"the name {shorten(name)!r} starts or ends with a slash, or has two in a row"
    if "." in segments or ".." in segments:
        return f"the name {shorten(name)!r} has a part that is . or .., which web addresses can't keep"
    if "loras" in segments[1:]:
        return f"the name {shorten(name)!r} has a part 'loras', which addresses of LoRA adapters have"
    return None


def _adapter(name: str) -> str | None:
    return None if name.strip() else "is empty: name an adapter, such as torch-dense (`sie plugins` lists them)"


def _default(name: str) -> Any:
    return getattr(attrs.fields(ModelSpec), name).default


@frozen
class ModelEntry:
    """A model as the file states it. The defaults are those of :class:`~sie_core.types.ModelSpec`."""

    name: str = option(
        help="What requests call the model. Letters, digits and . _ - / :", check=check_name, file_only=True
    )
    adapter: str = option(help="Name of the adapter that makes the engine.", check=_adapter, file_only=True)
    source: str | None = option(
        None,
        help="Where its files are: package:IMPORT_NAME/SUBPATH, path:DIR (from this file) or hf:ORG/NAME@REVISION.",
        file_only=True,
    )
    device: str | None = option(
        None,
        help="Device to run on: cpu, cuda:N or emulated:N. Not set: as for the server; null: whichever has room.",
        check=of_device,
        file_only=True,
    )
    pinned: bool = option(_default("pinned"), help="Never evicted.", file_only=True)
    idle_evict_s: float | None = option(
        None,
        help="Seconds without a request after which it gives its memory back. Not set: as for the server; null: never.",
        check=above(0, " s", ": write null to switch it off"),
        file_only=True,
    )
    min_resident_s: float = option(
        _default("min_resident_s"),
        help="Seconds that it stays once loaded or woken: no idle time-out and no other model takes it away before.",
        check=at_least(0, " s"),
        file_only=True,
    )
    host_offload: bool = option(
        _default("host_offload"), help="Whether it may be parked in host memory instead of unloaded.", file_only=True
    )
    wake_check: WakeCheck = option(
        _default("wake_check"),
        help="Which wakes are checked against its first answer. auto: all if under 10% of a wake, else the first.",
        file_only=True,
    )
    runtime_headroom: ByteSize | None = option(
        None,
        help="Device memory that it may take while it runs. Not set: the adapter's estimate.",
        check=of_memory,
        file_only=True,
    )
    queue: int = option(_default("queue"), help="Most requests that wait for it.", check=at_least(1), file_only=True)
    deadline_s: float = option(
        _default("deadline_s"),
        help="Seconds that a request may take in all. Not set: as for the server.",
        check=above(0, " s"),
        file_only=True,
    )
    batch_tokens: int = option(
        _default("batch_tokens"), help="Most tokens in a batch, padding included.", check=at_least(1), file_only=True
    )
    lora: dict[str, str] = option(factory=dict, help="LoRA adapters: name and source of each.", file_only=True)
    options: dict[str, Any] = option(factory=dict, help="The adapter's own settings.", file_only=True)


_READER = AttrsReader(ModelEntry)


def read_models(
    value: Value, where: Where, report: Report, defaults: Mapping[str, Any]
) -> tuple[tuple[ModelSpec, ...], dict[str, tuple[Value, Where]]]:
    """The models, and what the file says of each by name. ``defaults``: the server-wide settings."""
    if value.kind != "list":
        report.mismatch(where, "a list of models", value, "write [] for none" if value.kind == "null" else "")
        return (), {}
    specs: list[ModelSpec] = []
    values: dict[str, tuple[Value, Where]] = {}
    names = _Names()
    for index, item in enumerate(value.data):
        place = where.item(index, item)
        if item.kind != "mapping":
            report.mismatch(place, "a model (name, adapter, source, ...)", item)
            continue
        names.add(item, place, report)
        spec = _read_model(item, place, report, defaults)
        if spec is not None:
            specs.append(spec)
            values[spec.name] = (item, place)
    return tuple(specs), values


def _read_model(item: Value, place: Where, report: Report, defaults: Mapping[str, Any]) -> ModelSpec | None:
    before = len(report.problems)
    fields = _READER.read_fields(item, place, report, hint="; settings of the adapter stand under options")
    entry = INVALID if fields is INVALID else _READER.build({**defaults, **fields}, item, place, report)
    source = _source(item, place, report)
    lora = _lora(item, place, report)
    if entry is INVALID or len(report.problems) > before:
        return None
    plain_fields = {field.name: getattr(entry, field.name) for field in attrs.fields(ModelEntry)}
    return ModelSpec(**{**plain_fields, "source": source, "lora": lora})


def _source(item: Value, place: Where, report: Report) -> Any:
    text = item.data.get("source")
    if text is None or text.kind != "text":  # of another type: reported with the other fields
        return None
    try:
        return parse_source(text.data, report.base)
    except ValueError as exc:
        return report.add(place.key("source", item), str(exc))


def _lora(item: Value, place: Where, report: Report) -> dict[str, str]:
    loras: dict[str, str] = {}
    value = item.data.get("lora")
    if value is None or value.kind != "mapping":
        return loras
    below = place.key("lora", item)
    for name, text in value.data.items():
        wrong = check_name(name)
        if wrong:
            report.add(below.key(name, value), wrong)
        if text.kind != "text":
            continue
        try:
            source = parse_source(text.data, report.base)
        except ValueError as exc:
            report.add(below.key(name, value), str(exc))
            continue
        # A LoRA's source is handed on as text, so a relative folder has to be made absolute here.
        loras[name] = f"path:{(report.base / source.location).absolute()}" if source.kind == "path" else str(source)
    return loras


class _Names:
    """Sees that no two models answer to one name."""

    def __init__(self) -> None:
        self.seen: dict[str, Where] = {}
        self.flat: dict[str, str] = {}

    def add(self, item: Value, place: Where, report: Report) -> None:
        value = item.data.get("name")
        if value is None or value.kind != "text" or check_name(value.data) is not None:
            return
        name = value.data
        where = place.key("name", item)
        first = self.seen.setdefault(name, where)
        if first is not where:
            report.add(where, f"the model {name!r} stands here twice (first in line {first.line})")
            return
        # sie-sdk writes / as __ in some addresses, and the server takes both: the two must not be different models.
        other = self.flat.setdefault(name.replace("/", "__"), name)
        if other != name:
            report.add(where, f"the names {other!r} and {name!r} are one in addresses, where / is also written __")
