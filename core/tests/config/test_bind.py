"""Options of models become objects of their adapter's options class, as strictly as everything else in the file."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, NewType

import attrs
import pytest
from attrs import define, field, frozen, validators
from sie_core.adapter import Adapter
from sie_core.config import Config, NoOptions, adapter_options, bind_models, load_config
from sie_core.errors import ConfigError
from sie_core.types import ModelSpec
from sie_core.units import ByteSize

Write = Callable[[str], Path]
Seconds = NewType("Seconds", float)


class Pooling(enum.Enum):
    MEAN = "mean"
    CLS = "cls"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


@frozen
class Inner:
    size: int = field(validator=validators.ge(1))
    children: tuple[Inner, ...] = ()


@frozen
class Options:
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    pooling: Pooling | None = None
    level: Level = Level.LOW
    max_length: int | None = field(default=None, validator=validators.optional(validators.ge(1)))
    temperature: float = 1.0
    switch: Literal["on", "off"] | None = None
    normalize: bool = True
    cache: ByteSize = 0
    wait: Seconds = Seconds(1.0)
    folder: Path | None = None
    prompts: dict[str, str] = field(factory=dict)
    dims: tuple[int, ...] = ()
    span: tuple[int, str] | None = None
    names: list[str] = field(factory=list)
    stops: frozenset[str] = frozenset()
    layers: Sequence[int] | Literal["all"] = "all"
    budget: Literal["auto"] | ByteSize | None = "auto"
    inner: Inner | None = None
    by_name: Mapping[str, Inner] = field(factory=dict)
    raw: Any = None


class Encoder(Adapter):
    options = Options


def bind(options: str, write: Write, adapter: type = Encoder) -> Any:
    path = write(f"models:\n- name: m\n  adapter: x\n  options: {options}\n")
    return bind_models(load_config(path, environ={}), {"x": adapter}).models[0].options


def problems(options: str, write: Write, adapter: type = Encoder) -> list[tuple[int | None, int | None, str, str]]:
    with pytest.raises(ConfigError) as caught:
        bind(options, write, adapter)
    assert all(p.message.endswith(" (model m, adapter x)") and p.file == "sie.yaml" for p in caught.value.problems)
    return [
        (p.line, p.column, p.path.removeprefix("models[0].options"), p.message.removesuffix(" (model m, adapter x)"))
        for p in caught.value.problems
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", Options()),
        ("{}", Options()),
        ("{dtype: float16}", Options(dtype="float16")),
        ("{pooling: cls}", Options(pooling=Pooling.CLS)),
        ("{pooling: null}", Options(pooling=None)),
        ("{level: 2}", Options(level=Level.HIGH)),
        ("{max_length: 256}", Options(max_length=256)),
        ("{temperature: 2}", Options(temperature=2.0)),
        ("{temperature: 1e-3}", Options(temperature=0.001)),
        ("{normalize: off}", Options(normalize=False)),
        ("{switch: 'off'}", Options(switch="off")),
        ("{cache: 8MiB}", Options(cache=8 * 1024**2)),
        ("{wait: 2}", Options(wait=Seconds(2.0))),
        ("{prompts: {query: 'search: ', doc: ''}}", Options(prompts={"query": "search: ", "doc": ""})),
        ("{dims: [1, 2]}", Options(dims=(1, 2))),
        ("{dims: []}", Options(dims=())),
        ("{span: [1, a]}", Options(span=(1, "a"))),
        ("{names: [a, b]}", Options(names=["a", "b"])),
        ("{stops: [a, b, a]}", Options(stops=frozenset({"a", "b"}))),
        ("{layers: [1]}", Options(layers=(1,))),
        ("{layers: all}", Options(layers="all")),
        ("{budget: null}", Options(budget=None)),
        ("{budget: 1KiB}", Options(budget=1024)),
        ("{budget: auto}", Options(budget="auto")),
        ("{inner: {size: 3, children: [{size: 1}]}}", Options(inner=Inner(3, (Inner(1),)))),
        ("{by_name: {a: {size: 1}}}", Options(by_name={"a": Inner(1)})),
        ("{raw: [1, {a: null}]}", Options(raw=[1, {"a": None}])),
    ],
)
def test_types(text: str, expected: Options, write: Write) -> None:
    options = bind(text, write)
    assert options == expected
    for name in attrs.fields_dict(Options):
        assert type(getattr(options, name)) is type(getattr(expected, name))


def test_paths_start_at_the_files_folder(write: Write, tmp_path: Path) -> None:
    assert bind("{folder: a/b}", write).folder == tmp_path / "a" / "b"
    assert bind("{folder: /a/b}", write).folder == Path("/a/b")


# The options stand in line 4; "  options: {" puts the first key at column 13.
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{dtype: float99}", (4, 13, ".dtype", "expected one of float32, float16, bfloat16, found the text 'float99'")),
        ("{dtype: flaot16}", (4, 13, ".dtype", "did you mean float16")),
        ("{dtype: 16}", (4, 13, ".dtype", "found the number 16")),
        ("{dtpye: float16}", (4, 13, ".dtpye", "unknown key 'dtpye', did you mean dtype?")),
        ("{pooling: max}", (4, 13, ".pooling", "expected 'mean' or 'cls' or null, found the text 'max'")),
        ("{level: true}", (4, 13, ".level", "expected 1 or 2, found the boolean true")),
        (
            "{max_length: '256'}",
            (4, 13, ".max_length", "expected a whole number or null, found the text '256'; remove"),
        ),
        ("{switch: off}", (4, 13, ".switch", "found a boolean (off is one in YAML); put it in quotes")),
        ("{max_length: 0}", (4, 13, ".max_length", "'max_length' must be >= 1: 0")),
        ("{max_length: true}", (4, 13, ".max_length", "expected a whole number or null, found the boolean true")),
        ("{temperature: .nan}", (4, 13, ".temperature", "must be a finite number, and is nan")),
        ("{temperature: '1e3'}", (4, 13, ".temperature", "expected a number, found the text '1e3'; remove the quotes")),
        ("{normalize: 'false'}", (4, 13, ".normalize", "expected true or false, found the text 'false'")),
        ("{normalize: 0}", (4, 13, ".normalize", "expected true or false, found the number 0")),
        ("{cache: big}", (4, 13, ".cache", "'big' is not a size")),
        ("{cache: -1}", (4, 13, ".cache", "negative")),
        ("{wait: soon}", (4, 13, ".wait", "expected a number, found the text 'soon'")),
        ("{folder: 7}", (4, 13, ".folder", "expected a path or null, found the number 7")),
        ("{folder: ''}", (4, 13, ".folder", "expected a path")),
        ("{prompts: [a]}", (4, 13, ".prompts", "expected a mapping (keys with values), found a list")),
        ("{prompts: {query: 7}}", (4, 23, ".prompts.query", "expected text, found the number 7; put it in quotes")),
        ("{dims: 3}", (4, 13, ".dims", "expected a list, found the number 3; write [3] for a list of one")),
        ("{dims: [1, x]}", (4, 23, ".dims[1]", "expected a whole number, found the text 'x'")),
        ("{span: [1]}", (4, 13, ".span", "must have 2 entries, and has 1")),
        ("{span: [1, 2]}", (4, 23, ".span[1]", "expected text, found the number 2")),
        ("{layers: some}", (4, 13, ".layers", "expected a list of a whole number or 'all', found the text 'some'")),
        ("{layers: [a]}", (4, 22, ".layers[0]", "expected a whole number, found the text 'a'")),
        ("{budget: 8G}", (4, 13, ".budget", "'8G' is read both ways")),
        ("{inner: {size: 0}}", (4, 21, ".inner.size", "'size' must be >= 1: 0")),
        ("{inner: {}}", (4, 13, ".inner.size", "is missing; expected a whole number")),
        ("{inner: {size: 1, sise: 2}}", (4, 30, ".inner.sise", "unknown key 'sise', did you mean size?")),
        ("{inner: {size: 1, children: [{size: 0}]}}", (4, 42, ".inner.children[0].size", "'size' must be >= 1: 0")),
        ("{by_name: {a: {size: x}}}", (4, 27, ".by_name.a.size", "expected a whole number, found the text 'x'")),
        ("[dtype]", (4, 3, "", "expected a mapping")),
    ],
)
def test_bad_options(text: str, expected: tuple[int, int, str, str], write: Write) -> None:
    if text == "[dtype]":  # refused before any adapter is asked
        with pytest.raises(ConfigError, match=r"sie.yaml:4:3: models\[0\].options: expected a mapping"):
            bind(text, write)
        return
    ((line, column, path, message),) = problems(text, write)
    assert (line, column, path) == expected[:3]
    assert expected[3] in message


def test_all_problems_of_all_models_come_at_once(write: Write) -> None:
    path = write(
        """\
        models:
        - name: a
          adapter: x
          options:
            dtype: no-such
            max_length: 0
            inner: {size: 0}
        - {name: b, adapter: gone, options: {anything: 1}}
        - name: c
          adapter: x
          options:
            nonsense: 1
        """
    )
    config = load_config(path, environ={})
    with pytest.raises(ConfigError) as caught:
        bind_models(config, {"x": Encoder})
    assert [(p.line, p.column, p.path) for p in caught.value.problems] == [
        (5, 5, "models[0].options.dtype"),
        (7, 13, "models[0].options.inner.size"),
        (6, 5, "models[0].options.max_length"),
        (12, 5, "models[2].options.nonsense"),
    ]
    assert config.models[0].options["max_length"] == 0  # a failed binding leaves the configuration as it was


def test_a_model_without_its_adapter_stays_unbound_and_is_no_error(write: Write) -> None:
    path = write("models:\n- {name: a, adapter: x}\n- {name: b, adapter: gone, options: {when: later}}\n")
    bound = bind_models(load_config(path, environ={}), {"x": Encoder})
    assert bound.unbound == ("b",)
    assert bound.models[0].options == Options()
    assert bound.models[1].options == {"when": "later"}
    later = bind_models(bound, {"x": Encoder, "gone": RawAdapter})
    assert later.unbound == ()
    assert later.models[1].options == Raw("later")


@frozen
class Raw:
    when: Any = None


class RawAdapter:
    options = Raw


def test_models_made_in_code_are_bound_too() -> None:
    typed = ModelSpec("a", "x", options=Options(dtype="float16"))
    plain = ModelSpec("b", "x", options={"dtype": "bfloat16", "cache": "8KiB", "pooling": None})
    bound = bind_models(Config(models=(typed, plain)), {"x": Encoder})
    assert bound.models[0] is typed
    assert bound.models[1].options == Options(dtype="bfloat16", cache=8192)
    with pytest.raises(ConfigError) as caught:
        bind_models(Config(models=(typed, ModelSpec("b", "x", options={"cache": 1.5}))), {"x": Encoder})
    assert str(caught.value).startswith("models[1].options.cache: expected a size such as 8GiB, found the number 1.5")


@define
class Unusual:
    """What else a plugin author may write."""

    _hidden: int = 1
    """Its key is ``hidden``."""
    mode: str = field(default="fast", converter=str.lower, validator=validators.in_(["fast", "slow"]))
    unit: str = field(default="s", converter=attrs.Converter(lambda text, obj: text + obj.mode[0], takes_self=True))
    ratio: float = field(default=0.5)
    twin: float = field(default=0.5)
    low: int = 0
    high: int = 10
    note: ClassVar[str] = "none of the fields"
    made: int = field(init=False, default=3)

    @ratio.validator
    def _check_ratio(self, attribute: attrs.Attribute[float], value: float) -> None:
        if not 0 < value < 1:
            raise ValueError("must be between 0 and 1")

    @twin.validator
    def _check_twin(self, attribute: attrs.Attribute[float], value: float) -> None:
        if value != self.ratio:
            raise ValueError("must be as ratio")

    def __attrs_post_init__(self) -> None:
        if self.low > self.high:
            raise ValueError("low must not be above high")
        if self.low == 7:
            raise RuntimeError("out of luck")


class UnusualAdapter:
    options = Unusual


def test_converters_aliases_and_checks_over_several_fields(write: Write) -> None:
    assert bind("{hidden: 2, mode: SLOW}", write, UnusualAdapter) == Unusual(hidden=2, mode="slow")
    assert problems("{mode: warp}", write, UnusualAdapter)[0][:3] == (4, 13, ".mode")
    assert bind("{unit: m, mode: slow}", write, UnusualAdapter).unit == "ms"
    assert problems("{ratio: 2, unit: m}", write, UnusualAdapter)[0] == (4, 13, ".ratio", "must be between 0 and 1")
    assert problems("{twin: 0.1, ratio: 0.2, unit: m, mode: X}", write, UnusualAdapter) == [
        (4, 45, ".mode", "'mode' must be in ['fast', 'slow'] (got 'x')"),
        (4, 13, ".twin", "must be as ratio"),
    ]
    assert problems("{twin: 0.1, ratio: x}", write, UnusualAdapter) == [  # the twin can't be checked without the ratio
        (4, 24, ".ratio", "expected a number, found the text 'x'")
    ]
    assert problems("{low: 3, high: 2}", write, UnusualAdapter) == [(4, 3, "", "low must not be above high")]
    assert problems("{low: 7, mode: FAST}", write, UnusualAdapter) == [(4, 3, "", "RuntimeError: out of luck")]
    assert [p[2] for p in problems("{made: 1, ratio: 2, mode: x}", write, UnusualAdapter)] == [
        ".made",
        ".mode",
        ".ratio",
    ]


class WithoutOptions:
    pass


def test_an_adapter_without_options_takes_none(write: Write) -> None:
    assert bind("{}", write, WithoutOptions) == NoOptions()
    ((_, _, path, message),) = problems("{a: 1}", write, WithoutOptions)
    assert (path, message) == (".a", "unknown key 'a'; there is nothing to set here")


class NoAttrs:
    options = dict


@frozen
class Strange:
    callback: Callable[[], None] | None = None


class StrangeAdapter:
    options = Strange


@frozen
class Numbered:
    by_number: dict[int, str] = field(factory=dict)


class NumberedAdapter:
    options = Numbered


@frozen
class Dangling:
    thing: NowhereDefined = None  # type: ignore[name-defined] # noqa: F821


class DanglingAdapter:
    options = Dangling


@pytest.mark.parametrize(
    ("adapter", "says"),
    [
        (NoAttrs, "is faulty: its options are no attrs class"),
        (StrangeAdapter, "is faulty: its options can't be read from a file: a configuration can't hold values of type"),
        (
            NumberedAdapter,
            "is faulty: its options can't be read from a file: keys of a mapping in a configuration are te",
        ),
        (DanglingAdapter, "is faulty: its options can't be read from a file: name 'NowhereDefined' is not defined"),
    ],
)
def test_a_faulty_adapter_is_named(adapter: type, says: str, write: Write) -> None:
    with pytest.raises(ConfigError) as caught:
        bind("{}", write, adapter)
    assert says in str(caught.value)
    assert "the adapter 'x'" in str(caught.value)


def test_an_adapters_options_can_be_listed() -> None:
    infos = {info.key: info for info in adapter_options(Options)}
    assert infos["dtype"].choices == ("float32", "float16", "bfloat16")
    assert infos["pooling"].choices == ("mean", "cls")
    assert infos["cache"].expects == "a size such as 8GiB"
    assert infos["dtype"].flag is None and infos["dtype"].env is None
    assert [info.key for info in adapter_options(Inner) if info.required] == ["size"]
    assert "made" not in [info.key for info in adapter_options(Unusual)]
