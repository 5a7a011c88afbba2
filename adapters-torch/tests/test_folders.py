"""Model folders that are missing, damaged, foreign, or unsafe: refused for good, each with what is wrong."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sie_adapters_torch.dense import DenseAdapter
from sie_core import LoadError, ModelSourceInvalid, ModelSourceNotFound, ModelSpec, Source, UnsafeSource

Damage = Callable[[Path], object]


def truncate(file: Path, size: int) -> None:
    with file.open("r+b") as stream:
        stream.truncate(size)


def cut_weights(folder: Path) -> None:
    file = folder / "model.safetensors"
    truncate(file, file.stat().st_size - 100)


def corrupt_header(folder: Path) -> None:
    file = folder / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[8:40] = b"\xff" * 32
    file.write_bytes(content)


def drop_a_tensor(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    del tensors["encoder.layer.1.intermediate.dense.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def fill_with_nan(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = {name: tensor * float("nan") for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def more_words(folder: Path) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary |= {f"word{number}": len(vocabulary) + number for number in range(1000)}
    (folder / "tokenizer.json").write_text(json.dumps(content))


def be_a_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def be_a_fifo(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def edit(name: str, **changes: Any) -> Damage:
    def damage(folder: Path) -> None:
        file = folder / name
        content = {**json.loads(file.read_text()), **changes}
        file.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))

    return damage


DAMAGES: dict[str, tuple[Damage, str]] = {
    "no config": (lambda folder: (folder / "config.json").unlink(), "config.json"),
    "config is no JSON": (lambda folder: (folder / "config.json").write_text("{oops"), "not valid JSON"),
    "config is a list": (lambda folder: (folder / "config.json").write_text("[]"), "not a JSON object"),
    "config nested deeply": (lambda folder: (folder / "config.json").write_text("[" * 100_000), "not valid JSON"),
    "config can't be read": (lambda folder: be_a_folder(folder / "config.json"), "can't be read"),
    "config is a FIFO (F12)": (lambda folder: be_a_fifo(folder / "config.json"), "not a regular file"),
    "tokenizer is a FIFO (F12)": (lambda folder: be_a_fifo(folder / "tokenizer.json"), "not a regular file"),
    "weights are a FIFO (F12)": (lambda folder: be_a_fifo(folder / "model.safetensors"), "not a regular file"),
    "unknown architecture": (edit("config.json", model_type="no-such-thing"), "no-such-thing"),
    "no architecture": (edit("config.json", model_type=None, architectures=None), "model_type"),
    "not an encoder": (edit("config.json", model_type="encodec"), "another architecture"),
    "another architecture's weights": (edit("config.json", model_type="distilbert", dim=32), "another architecture"),
    "more layers than the checkpoint": (edit("config.json", num_hidden_layers=3), "lacks"),
    "fewer layers than the checkpoint": (edit("config.json", num_hidden_layers=1), "leaves out layers"),
    "other sizes than the checkpoint": (edit("config.json", hidden_size=64), "don't fit"),
    "no width": (edit("config.json", hidden_size=0), "ZeroDivisionError|don't fit"),
    "no heads": (edit("config.json", num_attention_heads=0), "ZeroDivisionError"),
    "filling that is in no vocabulary": (edit("config.json", pad_token_id=1000), "Padding_idx"),
    "layers without end": (edit("config.json", num_hidden_layers=10**7), "num_hidden_layers"),
    "weights that are no numbers": (fill_with_nan, "not finite"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors"),
    "empty weights": (lambda folder: truncate(folder / "model.safetensors", 0), "truncated"),
    "weights cut inside the header": (lambda folder: truncate(folder / "model.safetensors", 60), "truncated"),
    "weights cut at the end": (cut_weights, "truncated"),
    "weights' header is garbage": (corrupt_header, "damaged header"),
    "weights can't be read": (lambda folder: be_a_folder(folder / "model.safetensors"), "can't be read"),
    "a tensor is missing": (drop_a_tensor, "encoder.layer.1.intermediate.dense.weight"),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer"),
    "tokenizer of another model": (more_words, "of another model"),
    "a LoRA adapter among the files": (  # F10: transformers would put it in where peft is installed
        lambda folder: (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}'),
        "adapter_config.json",
    ),
    "tokenizer is no JSON": (lambda folder: (folder / "tokenizer.json").write_text("{"), "tokenizer"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_folder(load: Any, tiny_bert: Path, copy_of: Callable[[Path], Path], name: str) -> None:
    damage, what = DAMAGES[name]
    folder = copy_of(tiny_bert)
    load(folder).close(None)  # it loads before the damage
    damage(folder)
    with pytest.raises(LoadError, match=what) as caught:
        load(folder)
    assert isinstance(caught.value, ModelSourceInvalid)
    assert caught.value.permanent


MODULES: dict[str, tuple[Damage, type[LoadError], str]] = {
    "a module of the model's own": (
        lambda folder: (folder / "modules.json").write_text(
            json.dumps([{"idx": 0, "name": "0", "path": "", "type": "custom_st.Transformer"}])
        ),
        UnsafeSource, "custom_st",
    ),
    "an unknown module": (
        lambda folder: (folder / "modules.json").write_text(
            json.dumps([{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.BoW"}])
        ),
        ModelSourceInvalid, "BoW",
    ),
    "no pooling": (
        lambda folder: (folder / "modules.json").write_text(
            json.dumps([{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}])
        ),
        ModelSourceInvalid, "Pooling",
    ),
    "modules are no list": (lambda folder: (folder / "modules.json").write_text("{}"), ModelSourceInvalid, "modules"),
    "a path that leaves the folder": (
        lambda folder: (folder / "modules.json").write_text(
            (folder / "modules.json").read_text().replace("1_Pooling", "../../elsewhere")
        ),
        ModelSourceInvalid, "inside",
    ),
    "no pooling file": (lambda folder: (folder / "1_Pooling/config.json").unlink(), ModelSourceInvalid, "missing"),
    "two poolings": (
        edit("1_Pooling/config.json", pooling_mode_cls_token=True), ModelSourceInvalid, "pooling",
    ),
    "max pooling": (
        edit("1_Pooling/config.json", pooling_mode_mean_tokens=False, pooling_mode_max_tokens=True),
        ModelSourceInvalid, "max",
    ),
    "an activation of the model's own": (
        edit("2_Dense/config.json", activation_function="my_code.Activation"), ModelSourceInvalid, "my_code",
    ),
    "a dense layer of another width": (edit("2_Dense/config.json", in_features=31), ModelSourceInvalid, "31"),
    "a dense layer of another shape": (edit("2_Dense/config.json", out_features=5), ModelSourceInvalid, "shape"),
    "a dense layer with a residual": (edit("2_Dense/config.json", use_residual=True), ModelSourceInvalid, "residual"),
    "a dense layer without weights": (
        lambda folder: (folder / "2_Dense/model.safetensors").unlink(), ModelSourceInvalid, "missing",
    ),
    "prompts that are no texts": (
        edit("config_sentence_transformers.json", prompts={"query": 3}), ModelSourceInvalid, "prompts",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODULES)
def test_files_of_sentence_transformers_that_cannot_be_followed(
    load: Any, make: Any, tiny_bert: Path, copy_of: Callable[[Path], Path], name: str
) -> None:
    damage, kind, what = MODULES[name]
    folder = make.modules(copy_of(tiny_bert), dense=6)
    damage(folder)
    with pytest.raises(LoadError, match=what) as caught:
        load(folder)
    assert type(caught.value) is kind
    assert caught.value.permanent


def test_pooling_option_stands_in_for_an_unknown_pooling(
    load: Any, make: Any, tiny_bert: Path, copy_of: Callable[[Path], Path]
) -> None:
    folder = make.modules(copy_of(tiny_bert), pooling="max")
    assert make.embed(load(folder, pooling="cls"), ["a red fox"]).shape == (1, 32)


def test_missing_folder_and_missing_package(load: Any, tmp_path: Path) -> None:
    with pytest.raises(ModelSourceNotFound, match="nowhere"):
        load(tmp_path / "nowhere")
    package = ModelSpec("m", "torch-dense", Source("package", "no_such_package_at_all/model"))
    with pytest.raises(ModelSourceNotFound, match="no_such_package_at_all"):
        load(package)
    with pytest.raises(ModelSourceNotFound, match="source"):
        load(ModelSpec("m", "torch-dense"))


def test_a_file_is_no_model_folder(load: Any, tiny_bert: Path) -> None:
    with pytest.raises(ModelSourceInvalid, match="file"):
        load(tiny_bert / "config.json")


# --- code that would run -----------------------------------------------------------------------------


@pytest.fixture
def pickled(tiny_bert: Path, copy_of: Callable[[Path], Path]) -> Path:
    """The same model with its weights in a pickle."""
    import torch
    from safetensors.torch import load_file

    folder = copy_of(tiny_bert)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    return folder


def test_pickled_weights_are_read_only_when_allowed(load: Any, make: Any, pickled: Path, tiny_bert: Path) -> None:
    with pytest.raises(UnsafeSource, match="allow_pickle"):
        load(pickled)
    texts = ["a red fox", "the house"]
    expected = make.embed(load(tiny_bert), texts)
    assert (make.embed(load(pickled, allow_pickle=True), texts) == expected).all()


def test_a_damaged_pickle_is_refused(load: Any, pickled: Path) -> None:
    truncate(pickled / "pytorch_model.bin", 1000)
    with pytest.raises(ModelSourceInvalid):
        load(pickled, allow_pickle=True)


def test_safetensors_win_over_a_pickle_beside_them(load: Any, tiny_bert: Path, copy_of: Callable[[Path], Path]) -> None:
    folder = copy_of(tiny_bert)
    (folder / "pytorch_model.bin").write_bytes(b"never read")
    load(folder)


OWN_CODE = """
from pathlib import Path
Path(__file__).with_name("ran").touch()
from transformers import BertConfig, BertModel
class OwnConfig(BertConfig):
    model_type = "own-bert"
class OwnModel(BertModel):
    config_class = OwnConfig
"""


def test_remote_code_runs_only_when_allowed(
    load: Any, make: Any, tiny_bert: Path, copy_of: Callable[[Path], Path],
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
) -> None:  # fmt: skip
    folder = copy_of(tiny_bert)
    (folder / "own.py").write_text(OWN_CODE.replace("__file__", repr(str(folder / "own.py"))))
    auto = {"AutoConfig": "own.OwnConfig", "AutoModel": "own.OwnModel"}
    make.edit_json(folder / "config.json", model_type="own-bert", auto_map=auto)
    with pytest.raises(UnsafeSource, match="trust_remote_code"):
        load(folder)
    assert not (folder / "ran").exists()
    texts = ["a red fox", "the house"]
    engine = load(folder, trust_remote_code=True)
    assert (folder / "ran").exists()
    assert abs(make.embed(engine, texts) - make.embed(load(tiny_bert), texts)).max() < 1e-5


def test_a_known_architecture_that_also_ships_code_runs_ours(
    load: Any, make: Any, tiny_bert: Path, copy_of: Callable[[Path], Path]
) -> None:
    folder = copy_of(tiny_bert)
    (folder / "own.py").write_text("raise SystemExit('this must not run')")
    make.edit_json(folder / "config.json", auto_map={"AutoConfig": "own.C", "AutoModel": "own.M"})
    load(folder)


# --- what else a folder may look like ------------------------------------------------------------------


def test_sharded_weights(load: Any, make: Any, tmp_path: Path, tiny_bert: Path) -> None:
    folder = make.transformer(tmp_path / "sharded", shard="20KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    texts = ["a red fox", "the house"]
    assert (make.embed(load(folder), texts) == make.embed(load(tiny_bert), texts)).all()
    sorted(folder.glob("model-*.safetensors"))[0].unlink()
    with pytest.raises(ModelSourceInvalid, match="lacks 1 of"):
        load(folder)


def test_a_checkpoint_with_a_head_that_is_not_needed(load: Any, make: Any, tmp_path: Path) -> None:
    """Fine-tuned for classification, with the encoder under a prefix: the encoder is what gets loaded."""
    import torch
    import transformers

    folder = make.transformer(tmp_path / "head")
    config = transformers.AutoConfig.from_pretrained(str(folder))
    torch.manual_seed(0)
    transformers.BertForMaskedLM(config).save_pretrained(str(folder))
    engine = load(folder)
    reserved = DenseAdapter().reserve(make.spec(folder), [])
    held = sum(nbytes or 0 for nbytes in engine.memory().devices.values())
    assert held <= reserved.ranks[0].min_bytes < held + 128 * 1024


def test_describe_needs_no_weights_to_be_read(make: Any, tiny_bert: Path, tmp_path: Path) -> None:
    adapter = DenseAdapter()
    known = adapter.describe(make.spec(tiny_bert))
    assert known is not None
    assert (known.dims, known.max_sequence_length, known.matryoshka) == ({"dense": 32}, 32, ())
    with pytest.raises(ModelSourceNotFound, match="there is no folder"):  # `sie check` shows it
        adapter.describe(make.spec(tmp_path / "nowhere"))
    shutil.copytree(tiny_bert, tmp_path / "broken")
    (tmp_path / "broken" / "config.json").write_text("{")
    with pytest.raises(ModelSourceInvalid, match=r"config\.json"):
        adapter.describe(make.spec(tmp_path / "broken"))
