"""torch-dense with instructions, as models made of decoders and e5's take them: sentence-transformers' vectors."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from sie_adapters_torch.dense import DenseOptions
from sie_core import InputTooLong, ModelSourceInvalid, UnsafeSource

TEMPLATE = "Title: {instruction}\nQuery:"  # words that the tiny vocabulary has
TASK = "the quick river"
TOLERANCE = 1e-5


def theirs(folder: Path, texts: Any, **how: Any) -> NDArray[np.float32]:
    from sentence_transformers import SentenceTransformer

    found: NDArray[np.float32] = SentenceTransformer(str(folder), device="cpu").encode(list(texts), **how)
    return found


def some_texts(words: list[str], count: int = 20) -> list[str]:
    rng = random.Random(4)
    return [" ".join(rng.choices(words, k=rng.randint(1, 14))) for _ in range(count)]


@pytest.fixture(scope="module")
def models(make: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Read only."""
    layouts = {"qwen3": "last_token", "mistral": "last_token", "xlm-roberta": "mean"}
    folder = tmp_path_factory.mktemp("models")
    return {kind: make.modules(make.transformer(folder / kind, kind), pooling=how) for kind, how in layouts.items()}


@pytest.mark.parametrize("kind", ["qwen3", "mistral", "xlm-roberta"])
def test_queries_are_told_the_task(load: Any, make: Any, models: dict[str, Path], kind: str) -> None:
    folder, texts = models[kind], some_texts(make.words)
    engine = load(folder, instruction_template=TEMPLATE)
    asked = make.embed(engine, texts, is_query=True, instruction=TASK)
    np.testing.assert_allclose(asked, theirs(folder, texts, prompt=f"Title: {TASK}\nQuery:"), atol=TOLERANCE)
    plain = theirs(folder, texts)
    assert np.abs(asked - plain).max() > 1e-2
    # Documents are not: those of one index serve queries of every task.
    np.testing.assert_allclose(make.embed(engine, texts, instruction=TASK), plain, atol=TOLERANCE)
    np.testing.assert_allclose(make.embed(engine, texts, is_query=True), plain, atol=TOLERANCE)


def test_documents_are_told_where_the_options_say_so(load: Any, make: Any, models: dict[str, Path]) -> None:
    folder, texts = models["qwen3"], some_texts(make.words)
    engine = load(folder, document_instruction_template="passage {instruction} : ", query_prompt="query : ")
    told = make.embed(engine, texts, instruction=TASK)
    np.testing.assert_allclose(told, theirs(folder, texts, prompt=f"passage {TASK} : "), atol=TOLERANCE)
    asked = make.embed(engine, texts, instruction=TASK, is_query=True)
    np.testing.assert_allclose(asked, theirs(folder, texts, prompt="query : "), atol=TOLERANCE)


def test_names_of_prompts_and_prompts_of_the_options(load: Any, make: Any, models: dict[str, Path]) -> None:
    """As e5's models have them: a fixed text before queries and another one before passages."""
    folder, texts = models["xlm-roberta"], some_texts(make.words)
    engine = load(
        folder, query_prompt="query: ", document_prompt="passage: ", prompts={"titles": "title: "},
        instruction_template=TEMPLATE,
    )  # fmt: skip
    for how, prompt in (
        ({"is_query": True}, "query: "), ({}, "passage: "), ({"instruction": TASK}, "passage: "),
        ({"instruction": "titles"}, "title: "), ({"instruction": "titles", "is_query": True}, "title: "),
        ({"instruction": TASK, "is_query": True}, f"Title: {TASK}\nQuery:"),
    ):  # fmt: skip
        ours = make.embed(engine, texts, **how)
        np.testing.assert_allclose(ours, theirs(folder, texts, prompt=prompt), atol=TOLERANCE)


def test_without_a_template_the_instruction_is_the_prompt(load: Any, make: Any, models: dict[str, Path]) -> None:
    folder, texts = models["qwen3"], some_texts(make.words)
    for is_query in (True, False):
        ours = make.embed(load(folder), texts, instruction="title : ", is_query=is_query)
        np.testing.assert_allclose(ours, theirs(folder, texts, prompt="title : "), atol=TOLERANCE)


def test_an_instruction_counts(load: Any, make: Any, models: dict[str, Path]) -> None:
    engine = load(models["qwen3"], instruction_template=TEMPLATE)
    make.embed(engine, ["fox " * 26], is_query=True)
    with pytest.raises(InputTooLong) as caught:
        make.embed(engine, ["fox", "fox " * 26], is_query=True, instruction=TASK)
    assert caught.value.index == 1


def test_a_text_of_braces_is_left_alone(load: Any, make: Any, models: dict[str, Path]) -> None:
    engine = load(models["qwen3"], instruction_template=TEMPLATE)
    odd = make.embed(engine, ["fox"], is_query=True, instruction="{0.__class__} {instruction}")
    assert np.isfinite(odd).all()


@pytest.mark.parametrize("name", ["instruction_template", "document_instruction_template"])
def test_a_template_without_its_place_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        DenseOptions(**{name: "Instruct: "})


# --- decoders that look ahead -----------------------------------------------------------------------------

OWN_CODE = """
from transformers import Qwen3Model
class OwnModel(Qwen3Model):
    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.last_hidden_state = output.last_hidden_state.flip(-1)
        return output
"""


@pytest.mark.parametrize("said", [{"is_causal": False}, {"use_bidirectional_attention": True}])
def test_one_that_transformers_would_run_as_any_other_is_refused(
    load: Any, make: Any, models: dict[str, Path], copy_of: Any, said: dict[str, Any]
) -> None:
    folder = copy_of(models["qwen3"])
    make.edit_json(folder / "config.json", **said)
    with pytest.raises(ModelSourceInvalid, match="tokens see those that follow"):
        load(folder)


def test_one_with_code_of_its_own_runs_that_or_nothing(
    load: Any, make: Any, models: dict[str, Path], copy_of: Any
) -> None:
    folder = copy_of(models["qwen3"])
    (folder / "own_decoder.py").write_text(OWN_CODE)
    make.edit_json(folder / "config.json", auto_map={"AutoModel": "own_decoder.OwnModel"})
    with pytest.raises(UnsafeSource, match="trust_remote_code"):
        load(folder)
    ours = make.embed(load(folder, trust_remote_code=True), ["a red fox"])
    np.testing.assert_allclose(ours, make.embed(load(models["qwen3"]), ["a red fox"])[:, ::-1], atol=TOLERANCE)
