"""One option, one typed field: its default, check, flag, environment variable and help stand together."""

from __future__ import annotations

import enum
import re
import types
from collections.abc import Callable, Sequence
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import attrs

from sie_core.config._readers import reader
from sie_core.config._value import shorten

_META = "sie_option"


@attrs.frozen
class OptionInfo:
    """An option, for whoever builds flags or renders a table.

    ``key`` is its path in the file (``server.port``), ``type`` its Python type and ``expects`` the same in words.
    ``flag`` and ``env`` are ``None`` where the option can only stand in a file.
    """

    key: str
    flag: str | None
    env: str | None
    type: Any
    expects: str
    default: Any
    help: str
    required: bool = False

    @property
    def choices(self) -> tuple[str, ...]:
        """The words that a Literal or an enum allows, empty for other types."""
        members = get_args(self.type) if get_origin(self.type) in (Union, types.UnionType) else (self.type,)
        words: list[str] = []
        for member in members:
            if get_origin(member) is Literal:
                words += [str(word) for word in get_args(member)]
            elif isinstance(member, type) and issubclass(member, enum.Enum):
                words += [str(choice.value) for choice in member]
        return tuple(words)


def option(
    default: Any = attrs.NOTHING,
    *,
    help: str,
    check: Callable[[Any], str | None] | None = None,
    flag: str | None = None,
    env: str | None = None,
    file_only: bool = False,
    secret: bool = False,
    factory: Callable[[], Any] | None = None,
) -> Any:
    """A field of a section. ``check`` returns what is wrong with a value, or ``None``; it never sees ``None``.

    Without ``flag`` and ``env`` the names follow from the key: ``max_items`` gives ``--max-items``, ``SIE_MAX_ITEMS``.
    """

    def validate(instance: Any, field: attrs.Attribute[Any], value: Any) -> None:
        wrong = None if check is None or value is None else check(value)
        if wrong is not None:
            raise ValueError(wrong)

    meta = {_META: {"help": help, "flag": flag, "env": env, "file_only": file_only}}
    kwargs: dict[str, Any] = {"factory": factory} if factory is not None else {"default": default}
    return attrs.field(
        **kwargs, validator=validate if check else None, metadata=meta, repr=(lambda _: "***") if secret else True
    )


def describe_options(cls: type, prefix: str = "", *, file_only: bool = False) -> Sequence[OptionInfo]:
    """The options of a section, or of an adapter's options class (which has no flags and no variables)."""
    hints = get_type_hints(cls, include_extras=True)
    found = []
    for field in attrs.fields(cls):
        if not field.init:
            continue
        key = str(field.alias)
        meta = field.metadata.get(_META, {})
        in_file = file_only or meta.get("file_only", True)
        default: Any = field.default
        factory = getattr(default, "factory", None)
        if factory is not None:
            default = None if default.takes_self else factory()
        tp = hints.get(field.name, Any)
        found.append(
            OptionInfo(
                key=f"{prefix}{key}",
                flag=None if in_file else meta["flag"] or "--" + key.replace("_", "-"),
                env=None if in_file else meta["env"] or f"SIE_{key.upper()}",
                type=tp,
                expects=reader(tp).expected,
                default=None if default is attrs.NOTHING else default,
                help=meta.get("help") or field.metadata.get("help", ""),
                required=default is attrs.NOTHING,
            )
        )
    return tuple(found)


_KIB = 1024
_FEWEST_BYTES = _KIB**2
_DEVICE = re.compile(r"cpu|(cuda|emulated):(0|[1-9][0-9]{0,3})")


# --- checks ----------------------------------------------------------------------------------------


def _show(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def at_least(least: float, unit: str = "") -> Callable[[Any], str | None]:
    def check(value: Any) -> str | None:
        return None if value >= least else f"must be at least {least}{unit}, and is {_show(value)}"

    return check


def of_memory(value: int) -> str | None:
    """Whether an amount of memory can be meant: few bytes are a unit that was forgotten. 0 is one, too."""
    if value == 0 or value >= _FEWEST_BYTES or not isinstance(value, int):
        return None
    meant = f"{value}GiB" if value < _KIB else f"{value // _KIB}GiB"
    return f"must be 0 or at least 1MiB, and is {value} bytes: did you mean {meant}?"


def of_device(device: str) -> str | None:
    if _DEVICE.fullmatch(device):
        return None
    hint = f" (did you mean {device}:0?)" if device in ("cuda", "emulated") else ""
    return f"{shorten(device)!r} is not a device{hint}: write cpu, cuda:N or emulated:N"


def above(limit: float, unit: str = "", hint: str = "") -> Callable[[Any], str | None]:
    def check(value: Any) -> str | None:
        return None if value > limit else f"must be more than {limit}{unit}, and is {_show(value)}{hint}"

    return check


def between(least: int, most: int) -> Callable[[Any], str | None]:
    def check(value: Any) -> str | None:
        return None if least <= value <= most else f"must be from {least} to {most}, and is {_show(value)}"

    return check
