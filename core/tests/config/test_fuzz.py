"""Whatever stands in a file, a variable or a flag: a configuration, or a ConfigError that says where."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from attrs import frozen
from hypothesis import given, settings
from hypothesis import strategies as st
from sie_core.config import bind_models, load_config, model_options, options
from sie_core.errors import ConfigError
from sie_core.units import ByteSize


@frozen
class Options:
    dtype: Literal["float32", "float16"] = "float32"
    sizes: tuple[ByteSize, ...] = ()
    prompts: dict[str, str | int | None] | None = None


class Encoder:
    options = Options


KEYS = sorted(
    {part for info in options() for part in info.key.split(".")}
    | {info.key for info in model_options()}
    | {"models", "dtype", "sizes", "prompts", "<<", "x", ""}
)
WORDS = [
    "a",
    "x",
    "auto",
    "8GiB",
    "cuda:0",
    "path:x",
    "always",
    "off",
    "null",
    "~",
    "1e3",
    "0o7",
    "12:30",
    "*a",
    "&a",
    "!t",
]
scalars = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(WORDS) | st.text("ab:/ \n\t{}[]#&*!|>'\"")
)
trees = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=5)
)
models = st.lists(
    st.builds(
        lambda name, fields: {**fields, "name": name, "adapter": "x"},
        st.sampled_from(WORDS),
        st.dictionaries(st.sampled_from(KEYS), trees, max_size=6),
    )
)
files = st.one_of(
    st.text(),
    st.binary(),
    trees.map(json.dumps),
    st.dictionaries(st.sampled_from(KEYS), trees).map(json.dumps),
    st.fixed_dictionaries({"models": models}).map(json.dumps),
    st.lists(st.sampled_from([*KEYS, *WORDS, ": ", "- ", "\n", "\n  ", "\n- ", "{", "}", "[", "]", ", "])).map("".join),
)


@settings(deadline=None)  # the machine may be busy
@given(files)
def test_any_file(content: str | bytes) -> None:
    raw = content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass")
    with TemporaryDirectory() as folder:
        path = Path(folder, "sie.yaml")
        path.write_bytes(raw)
        try:
            config = bind_models(load_config(path, environ={}), {"x": Encoder})
        except ConfigError as exc:
            assert exc.problems
            lines = raw.count(b"\n") + raw.count(b"\r") + raw.decode("utf-8", "replace").count("\x85") + 2
            for problem in exc.problems:
                assert problem.message
                assert problem.file == str(path)
                assert problem.line is None or 1 <= problem.line <= lines + raw.count(b"\xe2\x80")
        else:
            assert not config.unbound or all(m.adapter != "x" for m in config.models)


@settings(deadline=None)  # the machine may be busy
@given(st.sampled_from([info for info in options() if info.env]), st.text() | st.sampled_from(WORDS), trees)
def test_any_variable_and_any_flag(info: Any, text: str, tree: Any) -> None:
    for arguments in ({"environ": {info.env: text}}, {"environ": {}, "flags": {info.flag: tree}}):
        with TemporaryDirectory() as folder:
            path = Path(folder, "sie.yaml")
            path.write_text("models: []\n")
            try:
                config = load_config(path, **arguments)
            except ConfigError as exc:
                assert all(problem.message for problem in exc.problems)
                if info.key != "server.api_keys_file":  # there the file that it names is at fault
                    assert {problem.file for problem in exc.problems} <= {info.env, info.flag}
            else:
                assert config.models == ()
