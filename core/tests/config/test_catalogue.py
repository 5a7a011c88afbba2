"""The catalogue: what a file must hold, and what is said of one that does not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from sie_core.config.catalogue import CatalogueEntry, read_catalogue, read_catalogues

GOOD = """\
name: tiny
family: dense
adapter: fake
source: hf:org/tiny@main
gives: [dense]
facts: [https://example.org/tiny]
"""

Put = Callable[..., Path]


@pytest.fixture
def put(tmp_path: Path) -> Put:
    """Write a file of a catalogue, and give its folder."""

    def put(text: str, name: str = "tiny.yaml", folder: str = "catalogue") -> Path:
        place = tmp_path / folder
        place.mkdir(exist_ok=True)
        (place / name).write_text(text, encoding="utf-8")
        return place

    return put


def only(folder: Path) -> CatalogueEntry:
    (entry,), problems = read_catalogue(folder)
    assert problems == []
    return entry


def test_what_is_not_known_may_be_left_out(put: Put) -> None:
    entry = only(put(GOOD))
    assert entry.model() == {"name": "tiny", "adapter": "fake", "source": "hf:org/tiny@main"}
    assert (entry.parameters, entry.max_length, entry.licence, entry.dims) == (None, None, None, {})
    assert entry.file.endswith("catalogue/tiny.yaml")


def test_everything_is_read(put: Put) -> None:
    more = """\
options: {pooling: cls, sizes: [32, 64], query_prompt: "query: "}
dims: {dense: 64}
max_length: 512
parameters: 22_713_216
languages: English
licence: mit
notes: Small.
"""
    entry = only(put(GOOD + more))
    assert entry.model()["options"] == {"pooling": "cls", "sizes": [32, 64], "query_prompt": "query: "}
    assert entry.as_json() == {
        "name": "tiny",
        "family": "dense",
        "adapter": "fake",
        "source": "hf:org/tiny@main",
        "gives": ["dense"],
        "facts": ("https://example.org/tiny",),
        "options": {"pooling": "cls", "sizes": [32, 64], "query_prompt": "query: "},
        "dims": {"dense": 64},
        "max_length": 512,
        "parameters": 22713216,
        "languages": "English",
        "licence": "mit",
        "notes": "Small.",
    }


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (GOOD.replace("adapter: fake", "adpter: fake"), ":3:1: adpter: unknown key 'adpter', did you mean adapter?"),
        (GOOD.replace("adapter: fake\n", ""), ": adapter: is missing; expected text"),
        (GOOD.replace("adapter: fake", "adapter: ''"), ":3:1: adapter: is empty"),
        (GOOD.replace("name: tiny", "name: other"), ":1:1: name: the file of 'other' must be called other.yaml"),
        (GOOD.replace("name: tiny", "name: a b"), ":1:1: name: the name 'a b' holds ' '"),
        (GOOD.replace("dense\n", "Cross encoder\n", 1), ":2:1: family: 'Cross encoder' is no family"),
        (GOOD.replace("hf:org/tiny@main", "org/tiny"), ":4:1: source: 'org/tiny' is not a model source: did you mean"),
        (GOOD.replace("[dense]", "[vectors]"), ":5:9: gives[0]: "),
        (GOOD.replace("[dense]", "[]"), ":5:1: gives: is empty"),
        (GOOD.replace("[https://example.org/tiny]", "[]"), ":6:1: facts: is empty: name the page"),
        (GOOD.replace("https://example.org", "http://example.org"), ":6:1: facts: 'http://example.org/tiny' is no"),
        (GOOD + "dims: {sparse: 8}\n", ":7:8: dims.sparse: the model gives no sparse vectors: it gives dense"),
        (GOOD + "dims: {dense: 0}\n", ":7:1: dims: dense: 0 is no size of a vector"),
        (GOOD + "dims: 8\n", ":7:1: dims: expected a mapping"),
        (GOOD + "max_length: 0\n", ":7:1: max_length: must be more than 0"),
        (GOOD + "parameters: 22.7M\n", ":7:1: parameters: expected a whole number"),
        (GOOD + "licence: ' '\n", ":7:1: licence: is empty: leave it out"),
        (GOOD + "file: tiny.yaml\n", ":7:1: file: unknown key 'file'"),
        (GOOD + "name: tiny\n", ":7:1: name: the key 'name' stands here twice"),
        ("- name: tiny\n", ":1:1: expected a model (name, family, adapter, source, ...), found a list"),
        ("name: [", "not valid YAML"),
        ("", "the file is empty: it needs at least name, family"),
    ],
)
def test_a_faulty_file_is_named_with_its_place_and_the_others_count(put: Put, text: str, told: str) -> None:
    put(GOOD.replace("tiny", "fine"), "fine.yaml")
    folder = put(text)
    entries, problems = read_catalogue(folder)
    assert [entry.name for entry in entries] == ["fine"]
    place = str(folder / "tiny.yaml")
    assert all(str(problem).startswith(place) for problem in problems)
    assert any(told in str(problem).removeprefix(place) for problem in problems), [*map(str, problems)]


def test_every_mistake_of_a_file_is_told_at_once(put: Put) -> None:
    _, problems = read_catalogue(put("name: tiny\nfamily: DENSE\nadapter: 3\n"))
    assert {problem.path for problem in problems} == {"family", "adapter", "source", "gives", "facts"}


def test_what_is_no_yaml_file_is_not_read(put: Put) -> None:
    put("# Models\n", "README.md")
    assert only(put(GOOD)).name == "tiny"


def test_a_folder_that_is_not_there_is_a_problem(tmp_path: Path) -> None:
    entries, (problem,) = read_catalogue(tmp_path / "nowhere")
    assert entries == []
    assert str(problem) == f"{tmp_path / 'nowhere'}: the catalogue can't be read: No such file or directory"


def test_catalogues_are_joined_by_family_and_name(put: Put) -> None:
    first = put(GOOD)
    put(GOOD.replace("tiny", "a").replace("family: dense", "family: sparse"), "a.yaml")
    put(GOOD.replace("tiny", "b").replace("family: dense", "family: audio"), "b.yaml")
    second = put(GOOD.replace("tiny", "z"), "z.yaml", "other")
    entries, problems = read_catalogues([first, second, first])
    assert [(entry.family, entry.name) for entry in entries] == [
        ("dense", "tiny"),
        ("dense", "z"),
        ("sparse", "a"),
        ("audio", "b"),
    ]
    assert problems == []


def test_a_name_in_two_catalogues_belongs_to_the_first(put: Put) -> None:
    first = put(GOOD)
    second = put(GOOD.replace("family: dense", "family: sparse"), folder="other")
    (entry,), (problem,) = read_catalogues([first, second])
    assert entry.family == "dense"
    assert str(problem) == f"{second / 'tiny.yaml'}: {first / 'tiny.yaml'} has the model 'tiny' already"
