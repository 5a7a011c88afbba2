"""``torch-gliner``: tiny models with random weights that the gliner package makes, against its own answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
from sie_adapters_torch import plugin
from sie_adapters_torch.gliner import GlinerAdapter, GlinerOptions, work_bytes
from sie_core import (
    Adapter,
    BatchRequest,
    Device,
    DeviceView,
    ExtractOutput,
    InputTooLong,
    InvalidInput,
    Item,
    MissingDependency,
    ModelSourceInvalid,
    ModelSourceNotFound,
    ModelSpec,
    RequestParams,
    Task,
    UnsafeSource,
    Unsupported,
)
from sie_core.memory.emulated import EmulatedDevice
from sie_testing import AdapterConformance

gliner = pytest.importorskip("gliner", reason="the gliner package is not installed: nox -s gliner has it")

LABELS = ("animal", "colour", "place")
TEXTS = [
    "the quick red fox jumps over the lazy dog", "dog", "é ü 漢字 🙂 a fox runs under a blue house 🙂 .",
    "a red fox", "the river runs over the house , and the cat sleeps", "   ", "fox - dog : a cat",
]  # fmt: skip
KINDS = {
    "span": {"span_mode": "markerV0"},
    "token": {"span_mode": "token_level"},
    "span, labels apart": {"span_mode": "markerV0", "labels_encoder": True},
    "token, labels apart": {"span_mode": "token_level", "labels_encoder": True},
}


def save_gliner(make: Any, folder: Path, kind: str, backbone: str = "bert") -> Path:
    """As the package saves it, with weights large enough for scores to differ."""
    import torch

    words = ("animal", "colour", "place", "date", ",", "-", "and", "é", "🙂")
    base = make.transformer(folder / "base", backbone, more=words, limit=512, max_position_embeddings=96)
    settings = {"model_name": str(base), "hidden_size": 32, "max_width": 4, "max_len": 24, **KINDS[kind]}
    apart = "labels_encoder" in settings
    settings |= {"labels_encoder": str(base)} if apart else {}
    torch.manual_seed(11)
    model: Any = gliner.GLiNER.from_config(settings, backbone_from_pretrained=True, resize_token_embeddings=not apart)
    with torch.no_grad():
        for name, parameter in model.model.named_parameters():
            if "token_rep_layer" not in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder / "model", safe_serialization=True)
    return folder / "model"


@pytest.fixture(scope="session")
def models(make: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One of each kind. Read only."""
    return {kind: save_gliner(make, tmp_path_factory.mktemp("gliner"), kind) for kind in KINDS}


@pytest.fixture(params=sorted(KINDS))
def folder(request: pytest.FixtureRequest, models: dict[str, Path]) -> Path:
    return models[request.param]


@pytest.fixture
def opened(load: Any) -> Callable[..., Any]:
    return lambda folder, **options: load(folder, adapter="torch-gliner", **options)


def asking(texts: Sequence[str], labels: Sequence[str] = LABELS, **options: Any) -> BatchRequest:
    items = [Item(text=text) for text in texts]
    return BatchRequest(Task.EXTRACT, items, RequestParams(output_types=(), options=options), labels=tuple(labels))


Found = list[list[tuple[int, int, str, str, float]]]


def found_in(engine: Any, texts: Sequence[str], labels: Sequence[str] = LABELS, **options: Any) -> Found:
    outputs = engine.run(engine.prepare(asking(texts, labels, **options)))
    assert len(outputs) == len(texts)
    return [[(e.start, e.end, e.text, e.label, e.score) for e in output.entities] for output in outputs]


def theirs(folder: Path, texts: Sequence[str], labels: Sequence[str] = LABELS, **options: Any) -> Found:
    """The package alone, text by text."""
    apart = json.loads((folder / "gliner_config.json").read_text()).get("labels_encoder") is not None
    maker: Any = gliner.GLiNER
    model = maker.from_pretrained(str(folder), local_files_only=True, resize_token_embeddings=not apart)
    found = [model.predict_entities(text, list(labels), **options) for text in texts]
    return [[(e["start"], e["end"], e["text"], e["label"], e["score"]) for e in each] for each in found]


def assert_same(ours: Found, expected: Found) -> None:
    assert sum(map(len, expected)) > 5
    for mine, other in zip(ours, expected, strict=True):
        assert [each[:4] for each in mine] == [each[:4] for each in other]
        np.testing.assert_allclose([each[4] for each in mine], [each[4] for each in other], atol=1e-5)


def middle(folder: Path) -> float:
    """A threshold that about half of the package's own scores are over."""
    scores = [e[4] for each in theirs(folder, TEXTS, threshold=0.0, flat_ner=False, multi_label=True) for e in each]
    return round(float(np.median(scores)), 3)


# --- the reference -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "how", [{}, {"flat_ner": False}, {"multi_label": True}, {"flat_ner": False, "multi_label": True}]
)
def test_entities_are_those_of_the_package(opened: Any, folder: Path, how: dict[str, bool]) -> None:
    options = {"threshold": middle(folder), **how}
    expected = theirs(folder, TEXTS, **options)
    assert_same(found_in(opened(folder), TEXTS, **options), expected)
    assert_same(found_in(opened(folder, **options), TEXTS), expected)  # as the model's own configuration


def test_offsets_are_in_code_points(opened: Any, folder: Path) -> None:
    for text, entities in zip(TEXTS, found_in(opened(folder), TEXTS, threshold=middle(folder)), strict=True):
        assert all(text[start:end] == shown for start, end, shown, _, _ in entities)


def test_batches_do_not_change_the_entities(opened: Any, make: Any, folder: Path) -> None:
    """Whatever else is looked for beside it, and however little fits at a time."""
    threshold = middle(folder)
    texts = [TEXTS[n % 7] for n in range(20)]
    one = opened(folder)
    alone = [found_in(one, [text], threshold=threshold)[0] for text in texts]
    assert_same(found_in(one, texts, threshold=threshold), alone)
    small = opened(attrs.evolve(make.spec(folder, "torch-gliner"), batch_tokens=1))
    assert_same(found_in(small, texts, threshold=threshold), alone)
    other = one.prepare(asking(["a cat sleeps"], ["animal"], threshold=0.0))
    mixed = one.run([*other, *one.prepare(asking(texts, threshold=threshold)), *other])
    entities = [[(e.start, e.end, e.text, e.label, e.score) for e in output.entities] for output in mixed]
    assert_same(entities[1:-1], alone)
    assert {each[3] for each in entities[0]} == {"animal"}
    assert entities[0] == entities[-1]


def test_deberta(opened: Any, make: Any, tmp_path: Path) -> None:
    """What most published models are made from: their attention is another."""
    import transformers

    base = make.transformer(tmp_path / "base", more=("animal", "colour", "place", "date"), limit=512)
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    config = transformers.DebertaV2Config(
        **small, vocab_size=len(json.loads((base / "tokenizer.json").read_text())["model"]["vocab"]),
        relative_attention=True, position_biased_input=False, pos_att_type=["p2c", "c2p"], max_relative_positions=-1,
    )  # fmt: skip
    config.save_pretrained(base)
    settings = {"model_name": str(base), "hidden_size": 32, "max_width": 4, "max_len": 100}
    gliner.GLiNER.from_config(settings, backbone_from_pretrained=False).save_pretrained(
        tmp_path / "model", safe_serialization=True
    )
    options = {"threshold": middle(tmp_path / "model")}
    assert_same(found_in(opened(tmp_path / "model"), TEXTS, **options), theirs(tmp_path / "model", TEXTS, **options))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision(opened: Any, models: dict[str, Path], dtype: str) -> None:
    exact = found_in(opened(models["span"]), TEXTS, threshold=0.0, flat_ner=False, multi_label=True)
    half = found_in(opened(models["span"], dtype=dtype), TEXTS, threshold=0.0, flat_ner=False, multi_label=True)
    for mine, other in zip(half, exact, strict=True):
        scores = {each[:4]: each[4] for each in mine}
        assert all(abs(scores[each[:4]] - each[4]) < 0.1 for each in other)


def test_texts_without_words(opened: Any, folder: Path) -> None:
    assert found_in(opened(folder), ["", " \n"], threshold=0.0) == [[], []]


# --- long texts and labels -------------------------------------------------------------------------------


def test_long_texts(opened: Any, folder: Path) -> None:
    long = "fox " * 25
    engine = opened(folder)
    with pytest.raises(InputTooLong) as caught:
        engine.prepare(asking(["dog", long]))
    assert (caught.value.index, caught.value.limit, caught.value.tokens) == (1, 24, 25)
    request = asking([long], threshold=0.0)
    (cut,) = engine.run(engine.prepare(attrs.evolve(request, params=attrs.evolve(request.params, truncate=True))))
    (whole,) = engine.run(engine.prepare(asking(["fox " * 24], threshold=0.0)))
    assert isinstance(cut, ExtractOutput)
    assert cut.entities == whole.entities
    assert cut.entities


def test_labels_and_texts_share_the_positions(opened: Any, models: dict[str, Path]) -> None:
    """The package would cut the end of the text off, or of the labels, without a word."""
    engine = opened(models["span"], max_length=20)
    text = "a red fox jumps over the dog"  # 7 tokens; 3 labels and marks are 7, and 2 are around all
    (output,) = engine.run(engine.prepare(asking([text], threshold=0.0)))
    assert output.tokens == 16
    with pytest.raises(InputTooLong) as caught:
        engine.prepare(asking([text], ["animal", "colour", "place", "red", "blue", "house"]))
    assert (caught.value.tokens, caught.value.limit, caught.value.index) == (22, 20, 0)
    with pytest.raises(InvalidInput, match="labels have 21 tokens") as labels:
        engine.prepare(
            asking([text], ["animal"] + [f"{word} red" for word in ("fox", "dog", "cat", "a", "the", "river")])
        )
    assert labels.value.param == "labels"
    cut = opened(models["span"], max_length=20, truncate=True)
    (output,) = cut.run(cut.prepare(asking([text], ["animal", "colour", "place", "red", "blue", "house"])))
    assert output.tokens == 20


@pytest.mark.parametrize(
    ("labels", "says"),
    [
        ((), "give some"), (("animal", " "), "no tokens"), (("<<ENT>>",), "mark"), (("a<<SEP>>b",), "mark"),
        (("\ud800",), "Unicode"), (tuple(f"label {n}" for n in range(257)), "256 labels"),
    ],
)  # fmt: skip
def test_labels_that_are_refused(opened: Any, folder: Path, labels: tuple[str, ...], says: str) -> None:
    with pytest.raises(InvalidInput, match=says) as caught:
        opened(folder).prepare(asking(["fox"], labels))
    assert caught.value.param == "labels"


def test_labels_that_are_encoded_apart_have_a_limit(opened: Any, models: dict[str, Path]) -> None:
    engine = opened(models["span, labels apart"], max_labels=1000)
    with pytest.raises(InvalidInput, match="too long"):
        engine.prepare(asking(["fox"], [f"{'red ' * 40}{n}" for n in range(200)]))


def test_a_label_that_comes_twice_counts_once(opened: Any, folder: Path) -> None:
    engine = opened(folder)
    twice = found_in(engine, TEXTS, ["animal", "place", "animal"], threshold=0.3)
    assert twice == found_in(engine, TEXTS, ["animal", "place"], threshold=0.3)


# --- requests that are refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error"),
    [({"threshold": 2}, InvalidInput), ({"flat_ner": 1}, InvalidInput), ({"threshhold": 0.5}, Unsupported)],
)
def test_options_of_a_request_are_checked(opened: Any, models: dict[str, Path], options: Any, error: Any) -> None:
    with pytest.raises(error, match="option") as caught:
        opened(models["span"]).prepare(asking(["fox"], **options))
    assert caught.value.param == f"options.{next(iter(options))}"


def test_requests_that_are_refused(opened: Any, models: dict[str, Path]) -> None:
    engine, plain = opened(models["span"]), asking(["fox"])
    with pytest.raises(Unsupported, match="extract only"):
        engine.prepare(attrs.evolve(plain, task=Task.ENCODE))
    with pytest.raises(Unsupported, match="output_schema"):
        engine.prepare(attrs.evolve(plain, output_schema={"type": "object"}))
    with pytest.raises(Unsupported, match="instruction"):
        engine.prepare(attrs.evolve(plain, params=RequestParams(output_types=(), instruction="find")))
    for wrong, says in ((Item(images=(b"x",)), "text only"), (Item(token_ids=(1,)), "token ids"), (Item(), "no text")):
        with pytest.raises(InvalidInput, match=says) as caught:
            engine.prepare(attrs.evolve(plain, items=[Item(text="fox"), wrong]))
        assert caught.value.index == 1
    with pytest.raises(InvalidInput, match="Unicode") as unicode:
        engine.prepare(asking(["fox", "a \ud800"]))
    assert unicode.value.index == 1


# --- models that are refused -----------------------------------------------------------------------------


def refused(opened: Any, folder: Path, error: type[Exception] = ModelSourceInvalid, **options: Any) -> str:
    with pytest.raises(error) as caught:
        opened(folder, **options)
    return str(caught.value)


def test_pickled_weights_are_read_only_where_that_is_allowed(
    opened: Any, models: dict[str, Path], copy_of: Any
) -> None:
    import torch
    from safetensors.torch import load_file

    folder = copy_of(models["span"])
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    assert "allow_pickle" in refused(opened, folder, UnsafeSource)
    ours = found_in(opened(folder, allow_pickle=True), TEXTS, threshold=0.3)
    assert ours == found_in(opened(models["span"]), TEXTS, threshold=0.3)
    torch.save(
        {name: tensor for name, tensor in tensors.items() if "span_rep" not in name}, folder / "pytorch_model.bin"
    )
    assert "lacks" in refused(opened, folder, allow_pickle=True)


def test_weights_that_are_missing_or_too_many(opened: Any, folder: Path, copy_of: Any) -> None:
    """The package would go on with random ones."""
    from safetensors.torch import load_file, save_file

    broken = copy_of(folder)
    tensors = load_file(broken / "model.safetensors")
    lost = next(name for name in tensors if "prompt_rep" in name or "scorer" in name or "rnn" in name)
    save_file({name: t for name, t in tensors.items() if name != lost}, broken / "model.safetensors")
    assert lost in refused(opened, broken)
    layer = next(name for name in tensors if ".layer.1." in name)
    save_file(tensors | {layer.replace(".layer.1.", ".layer.7."): tensors[layer].clone()}, broken / "model.safetensors")
    assert ".layer.7." in refused(opened, broken)
    (broken / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-10])
    assert "truncated" in refused(opened, broken)


def test_models_that_do_something_else(
    opened: Any, models: dict[str, Path], copy_of: Any, make: Any, tiny_bert: Path
) -> None:
    assert "no GLiNER model" in refused(opened, tiny_bert)
    folder = copy_of(models["span"])
    make.edit_json(folder / "gliner_config.json", relations_layer="dot")
    assert "finds relations" in refused(opened, folder)
    make.edit_json(folder / "gliner_config.json", relations_layer=None, labels_decoder="gpt2")
    assert "makes labels up" in refused(opened, folder)


def test_code_that_comes_with_a_model_is_not_run(opened: Any, models: dict[str, Path], copy_of: Any, make: Any) -> None:
    """The package lets transformers run it."""
    folder = copy_of(models["span"])
    config = json.loads((folder / "gliner_config.json").read_text())
    code = {"AutoModel": "somebody/code--modeling.Model"}
    make.edit_json(folder / "gliner_config.json", encoder_config={**config["encoder_config"], "auto_map": code})
    assert "trust_remote_code" in refused(opened, folder, UnsafeSource)


def test_an_encoder_that_is_elsewhere(
    opened: Any, models: dict[str, Path], copy_of: Any, make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Older models name one on the hub, for its configuration and its tokenizer. Here the cache stands for the hub."""
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    folder = copy_of(models["span"])
    encoder = json.loads((folder / "gliner_config.json").read_text())["encoder_config"]
    for file in folder.glob("*token*"):
        file.unlink()
    make.edit_json(folder / "gliner_config.json", encoder_config=None, model_name=str(tmp_path))
    assert "names no model on the hub" in refused(opened, folder)  # a folder, of the machine that it was made on
    make.edit_json(folder / "gliner_config.json", model_name="somebody/tiny")
    assert "somebody/tiny" in refused(opened, folder, ModelSourceNotFound)
    assert GlinerAdapter().describe(make.spec(folder, "torch-gliner")) is None
    snapshot = tmp_path / "cache" / "models--somebody--tiny" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("0" * 40)
    for file in models["span"].glob("*token*"):
        (snapshot / file.name).write_bytes(file.read_bytes())
    (snapshot / "config.json").write_text(json.dumps(encoder))
    engine = opened(folder)
    assert found_in(engine, TEXTS, threshold=0.3) == found_in(opened(models["span"]), TEXTS, threshold=0.3)
    assert GlinerAdapter().describe(make.spec(folder, "torch-gliner")) == engine.capabilities
    (snapshot / "config.json").write_text(json.dumps(encoder | {"auto_map": {"AutoModel": "modeling.Model"}}))
    assert "trust_remote_code" in refused(opened, folder, UnsafeSource)


def test_without_the_package(opened: Any, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "gliner", None)
    assert "[gliner]" in refused(opened, models["span"], MissingDependency)


@pytest.mark.parametrize("wrong", [{"threshold": 1.5}, {"max_labels": 0}, {"max_length": 0}])
def test_options_refuse_values_that_cannot_be(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        GlinerOptions(**wrong)


def test_a_limit_above_the_positions_is_refused(opened: Any, models: dict[str, Path]) -> None:
    assert "96 positions" in refused(opened, models["span"], max_length=97)


# --- memory ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_held_was_reserved(opened: Any, make: Any, folder: Path, dtype: str) -> None:
    model: ModelSpec = make.spec(folder, "torch-gliner", dtype=dtype)
    answer = plugin.admission_reserve(model, [DeviceView("cpu", "cpu", 1 << 40, 1 << 40, 1 << 40)])
    assert answer is not None
    held = opened(folder, dtype=dtype).memory().devices["cpu"]
    assert held <= answer.ranks[0].min_bytes < held + 128 * 1024


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_texts_take_was_reserved(opened: Any, make: Any, folder: Path, dtype: str) -> None:
    engine, options = opened(folder, dtype=dtype), GlinerOptions(dtype=dtype)  # type: ignore[arg-type]
    files = GlinerAdapter().read(folder, options, weights_needed=True)
    for labels, text in ((1, "fox"), (10, "the red fox runs over a blue house " * 3)):
        prepared = engine.prepare(asking([text] * 16, [f"place {n}" for n in range(labels)], threshold=0.0))
        each = work_bytes(files, options, prepared[0].tokens, len(text.split()), labels)
        assert 0 < make.peak(lambda prepared=prepared: engine.run(prepared)) <= 16 * each + 65536


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_texts_take_with_relative_positions(opened: Any, make: Any, tmp_path: Path, dtype: str) -> None:
    folder = save_gliner(make, tmp_path, "span", "deberta-v2")
    engine, options = opened(folder, dtype=dtype), GlinerOptions(dtype=dtype)  # type: ignore[arg-type]
    files = GlinerAdapter().files(make.spec(folder, "torch-gliner"))
    prepared = engine.prepare(asking(["fox"] * 64, ["dog"]))
    each = work_bytes(files, options, prepared[0].tokens, 1, 1)
    assert 0 < make.peak(lambda: engine.run(prepared)) <= 64 * each + 65536


def test_describes_itself_without_loading(make: Any, folder: Path, opened: Any) -> None:
    described = GlinerAdapter().describe(make.spec(folder, "torch-gliner"))
    assert described == opened(folder).capabilities
    assert described is not None
    assert (described.tasks, described.max_sequence_length) == ({Task.EXTRACT}, 96)


def test_a_parked_model_comes_back_as_it_was(make: Any, folder: Path, tier: Any) -> None:
    ctx = make.context("emulated:0", device_buffer=lambda _, nbytes: tier.device.allocate(nbytes))
    engine: Any = make.adapter("torch-gliner").load(make.spec(folder, "torch-gliner"), ctx, make.events())
    before = found_in(engine, TEXTS, threshold=0.0, flat_ner=False)
    for _ in range(2):
        tier.park(engine)
        with pytest.raises(RuntimeError, match="parked"):
            found_in(engine, TEXTS)
        assert tier.device.used() == 0
        tier.wake(engine)
        assert found_in(engine, TEXTS, threshold=0.0, flat_ner=False) == before
    engine.close(ctx)


# --- the core's contract -----------------------------------------------------------------------------------


class Gliner(AdapterConformance):
    @pytest.fixture
    def device(self) -> Device | None:
        return None  # the CPU

    @pytest.fixture
    def plugin(self) -> Any:
        return plugin

    @pytest.fixture
    def adapter(self) -> Adapter:
        return GlinerAdapter()

    @pytest.fixture
    def missing_model(self, make: Any, tmp_path: Path) -> ModelSpec:
        return make.spec(tmp_path / "nowhere", "torch-gliner")  # type: ignore[no-any-return]

    @pytest.fixture
    def texts(self) -> tuple[str, ...]:
        return ("a red fox", "dog", "the quick fox jumps over the lazy dog under a blue house", "the river runs")

    @pytest.fixture
    def labels(self) -> tuple[str, ...]:
        return LABELS


class TestSpansOnTheCpu(Gliner):
    @pytest.fixture
    def model(self, make: Any, models: dict[str, Path]) -> ModelSpec:
        return make.spec(models["span"], "torch-gliner", threshold=0.3)  # type: ignore[no-any-return]


class TestTokensOnAnEmulatedDevice(Gliner):
    @pytest.fixture
    def model(self, make: Any, models: dict[str, Path]) -> ModelSpec:
        return make.spec(models["token, labels apart"], "torch-gliner", threshold=0.3)  # type: ignore[no-any-return]

    @pytest.fixture
    def device(self) -> Device:
        return EmulatedDevice("emulated:0", 8 * 1024 * 1024)


def test_scores_that_are_not_numbers(opened: Any, folder: Path, copy_of: Any) -> None:
    """C3: a text that the model makes no numbers of gets an answer that the core refuses; its neighbours theirs."""
    import torch

    engine = opened(copy_of(folder))
    words = engine._whole.data_processor.transformer_tokenizer.get_vocab()
    before = found_in(engine, ["a red fox", "dog"], threshold=0.0)
    backbone = engine._whole.model.token_rep_layer.bert_layer.model
    with torch.no_grad():
        backbone.get_input_embeddings().weight[words["cat"]] = torch.nan
    outputs = engine.run(engine.prepare(asking(["a red fox", "cat", "dog"], threshold=0.0)))
    assert [[e.score for e in output.entities] for output in (outputs[0], outputs[2])] == [
        pytest.approx([e[4] for e in each]) for each in before
    ]
    assert [np.isnan(each.score) for each in outputs[1].classifications] == [True]


def test_positions_that_start_after_the_padding(opened: Any, make: Any, tmp_path: Path) -> None:
    """G3: found by trying here too."""
    folder = save_gliner(make, tmp_path, "span", "data2vec-text")
    engine = opened(folder, max_length=96)
    labels = [f"{word} {other}" for word in make.words for other in make.words]
    with pytest.raises(InputTooLong, match="96 tokens and the model takes 95"):
        engine.prepare(asking(["fox " * 3], labels[:30]))
    assert len(engine.run(engine.prepare(asking(["fox " * 2], labels[:30])))) == 1
