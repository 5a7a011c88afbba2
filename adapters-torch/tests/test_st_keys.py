"""Every key that the installed sentence-transformers reads from a model's files is honoured, or refused by its name."""

from __future__ import annotations

import inspect
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sie_core import LoadError

TEXTS = ["a red FOX", "Dog", "the QUICK fox jumps over the lazy dog under a blue house", "the river runs"]
TRANSFORMER, CONFIG = "sentence_bert_config.json", "config_sentence_transformers.json"
POOLING, DENSE, NORM, DROPOUT, UNIT = (
    f"{place}/config.json" for place in ("1_Pooling", "2_Dense", "3_LayerNorm", "4_Dropout", "5_Normalize")
)
TEXT = {"method": "forward", "method_output_name": "last_hidden_state"}
EXPANSION = {"strategy": "fixed", "length": 8, "attend": False, "token": None}
EXAMPLES: dict[str, dict[str, list[Any]]] = {
    TRANSFORMER: {
        "transformer_task": ["feature-extraction", "fill-mask"],
        "modality_config": [
            {"text": TEXT},
            {"text": {**TEXT, "method_output_name": "pooler_output"}},
            {"message": TEXT},
        ],
        "module_output_name": ["sentence_embedding"],
        "processing_kwargs": [{"text": {"max_length": 4}}, {"common": {"padding": False}}, {"image": {"size": 3}}],
        "model_kwargs": [{"attn_implementation": "eager"}, {"hidden_act": "relu"}],
        "model_args": [{"attn_implementation": "eager"}, {"hidden_act": "relu"}],
        "processor_kwargs": [{"model_max_length": 5}, {"add_eos_token": True}],
        "tokenizer_args": [{"model_max_length": 5}, {"truncation_side": "left"}],
        "config_kwargs": [{"use_cache": False}, {"hidden_act": "relu"}],
        "config_args": [{"use_cache": False}, {"hidden_act": "relu"}],
        "backend": ["torch"],
        "unpad_inputs": [False],
        "query_length": [3],
        "document_length": [3],
        "query_expansion": [EXPANSION],
        "max_seq_length": [5],
        "do_lower_case": [True, False],
        "tokenizer_name_or_path": ["elsewhere"],
    },
    POOLING: {
        "embedding_dimension": [32],
        "word_embedding_dimension": [32],
        "pooling_mode": ["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken", ["mean", "cls"]],
        "include_prompt": [True, False],
        "pooling_mode_cls_token": [False],
        "pooling_mode_max_tokens": [False],
        "pooling_mode_mean_tokens": [True],
        "pooling_mode_mean_sqrt_len_tokens": [False],
        "pooling_mode_weightedmean_tokens": [False],
        "pooling_mode_lasttoken": [False],
    },
    DENSE: {
        "in_features": [32],
        "out_features": [12],
        "bias": [True],
        "activation_function": ["torch.nn.modules.activation.ReLU", "torch.nn.modules.linear.Identity"],
        "init_weight": [None],
        "init_bias": [None],
        "module_input_name": ["sentence_embedding", "token_embeddings"],
        "module_output_name": ["sentence_embedding", "elsewhere"],
        "use_residual": [False, True],
    },
    NORM: {"dimension": [12]},
    DROPOUT: {"dropout": [0.9]},
    UNIT: {
        "module_input_name": ["sentence_embedding", "token_embeddings"],
        "module_output_name": ["sentence_embedding", "elsewhere"],
    },
    CONFIG: {
        "__version__": [{"sentence_transformers": "1.0.0"}],
        "requirements": [[]],
        "model_type": ["SentenceTransformer"],
        "prompts": [{"short": "the lazy "}, {"short": None}],
        "default_prompt_name": [None, "elsewhere"],
        "similarity_fn_name": ["dot"],
        "truncate_dim": [5],
    },
}
CASES = [(file, key, value) for file, keys in EXAMPLES.items() for key, values in keys.items() for value in values]


@pytest.fixture(scope="module")
def whole(make: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with every module of a dense encoder, and a tokenizer that tells cases apart. Read only."""
    import torch
    from safetensors.torch import save_file

    folder: Path = tmp_path_factory.mktemp("models") / "whole"
    prompts = {"short": "a red "}
    make.modules(
        make.transformer(folder, more=("FOX", "Dog", "QUICK")), prompts=prompts, default_prompt="short", dense=12
    )
    make.edit_json(folder / "tokenizer.json", normalizer=None)
    modules = json.loads((folder / "modules.json").read_text())[:3]
    for place, kind in ((NORM, "LayerNorm"), (DROPOUT, "Dropout"), (UNIT, "Normalize")):
        path = place.partition("/")[0]
        (folder / path).mkdir()
        name = str(len(modules))
        modules.append({"idx": int(name), "name": name, "path": path, "type": f"sentence_transformers.models.{kind}"})
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / NORM).write_text(json.dumps({"dimension": 12}))
    (folder / DROPOUT).write_text(json.dumps({"dropout": 0.5}))
    torch.manual_seed(4)
    weights = {"norm.weight": torch.rand(12) + 0.5, "norm.bias": torch.randn(12)}
    save_file(weights, folder / "3_LayerNorm" / "model.safetensors")
    return folder


def theirs(folder: Path) -> Any:
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(folder), device="cpu")


@pytest.mark.parametrize(("file", "key", "value"), CASES, ids=[f"{case[1]}={case[2]}" for case in CASES])
def test_a_key(load: Any, make: Any, whole: Path, tmp_path: Path, file: str, key: str, value: Any) -> None:
    """G1: with every key the vectors are the reference's, or the load is refused and the key named."""
    folder = Path(shutil.copytree(whole, tmp_path / "model"))
    said = json.loads((folder / file).read_text()) if (folder / file).exists() else {}
    if key == "pooling_mode":
        said = {name: flag for name, flag in said.items() if not name.startswith("pooling_mode")}
    if key == "modality_config":
        said["module_output_name"] = "token_embeddings"  # the reference wants both
    (folder / file).write_text(json.dumps({**said, key: value}))
    try:
        engine = load(folder, truncate=True)
    except LoadError as refused:
        named = key in refused.message or (key.startswith("pooling_mode") and "pooling" in refused.message)
        assert named, refused.message
        return
    try:
        reference = theirs(folder)
    except TypeError:
        return  # an older release, which does not know the key
    np.testing.assert_allclose(make.embed(engine, TEXTS), reference.encode(TEXTS, batch_size=1), atol=1e-5)


def test_what_is_honoured_changes_the_vectors(load: Any, make: Any, whole: Path, tmp_path: Path) -> None:
    """G1: lower case and limits are no empty gestures."""
    plain = make.embed(load(whole, truncate=True), TEXTS)
    for key, value in (("do_lower_case", True), ("max_seq_length", 5), ("tokenizer_args", {"model_max_length": 5})):
        folder = Path(shutil.copytree(whole, tmp_path / key))
        (folder / TRANSFORMER).write_text(json.dumps({key: value}))
        assert np.abs(make.embed(load(folder, truncate=True), TEXTS) - plain).max() > 0.01


TOKENIZER: list[dict[str, Any]] = [
    {"truncation_side": "left"}, {"padding_side": "left"}, {"model_max_length": 6}, {"do_lower_case": True},
    {"model_input_names": ["input_ids", "token_type_ids", "attention_mask"]},
]  # fmt: skip


@pytest.mark.parametrize("settings", TOKENIZER, ids=lambda settings: next(iter(settings)))
def test_settings_of_the_tokenizer(load: Any, make: Any, whole: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    """G1: what tokenizer_config.json says counts as it does for the reference."""
    folder = Path(shutil.copytree(whole, tmp_path / "model"))
    make.edit_json(folder / "tokenizer_config.json", **{"model_max_length": 8, **settings})
    engine = load(folder, truncate=True)
    np.testing.assert_allclose(make.embed(engine, TEXTS), theirs(folder).encode(TEXTS, batch_size=1), atol=1e-5)


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_side_on_which_pairs_are_cut(load: Any, make: Any, tmp_path: Path, side: str) -> None:
    """G1: a tokenizer that cuts on the left leaves out the start of query and document."""
    from sentence_transformers import CrossEncoder
    from sie_core import BatchRequest, Item, RequestParams, Task

    folder = make.transformer(tmp_path / "m", limit=12, head="AutoModelForSequenceClassification", num_labels=1)
    make.edit_json(folder / "tokenizer_config.json", truncation_side=side)
    query, texts = "the quick fox runs over a river", [TEXTS[2].lower(), "dog", "the river runs under a blue house"]
    engine = load(folder, adapter="torch-cross-encoder", truncate=True)
    asked = BatchRequest(Task.SCORE, [Item(text=text) for text in texts], RequestParams(), query=Item(text=query))
    ours = [output.score for output in engine.run(engine.prepare(asked))]
    np.testing.assert_allclose(
        ours, CrossEncoder(str(folder), device="cpu").predict([(query, t) for t in texts]), atol=1e-5
    )


def parameters(kind: Any) -> set[str]:
    """What a module is made with, what it saves, and what older releases called that."""
    found = set(inspect.signature(kind.__init__).parameters) | set(kind.config_keys)
    return (found | set(getattr(kind, "config_key_renames", {}))) - {"self", "model_name_or_path"}


def test_the_reference_reads_no_other_keys(whole: Path) -> None:
    """G1: a key that a new release reads is not overlooked: it needs an example above."""
    model = theirs(whole)
    transformer, pooling, dense, norm, dropout, unit = (type(module) for module in model)
    read = {
        POOLING: parameters(pooling), DENSE: parameters(dense), NORM: parameters(norm), DROPOUT: parameters(dropout),
        UNIT: parameters(unit),
    }  # fmt: skip
    read[TRANSFORMER] = parameters(transformer) | set(
        re.findall(r'"(\w+_(?:args|kwargs))"', inspect.getsource(transformer.load_config))
    )
    legacy = getattr(sys.modules[pooling.__module__], "_LEGACY_POOLING_MODE_KWARGS", {})
    read[POOLING] |= set(legacy)
    sources = [
        inspect.getsource(sys.modules[kind.__module__])
        for kind in type(model).__mro__
        if kind.__module__.startswith("sentence_transformers.")
    ]
    text = "\n".join(sources)
    read[CONFIG] = set(re.findall(r'model_config(?:\.get\(|\[)\s*"(\w+)"', text))
    assert {"prompts", "default_prompt_name"} <= read[CONFIG]
    modules = set(re.findall(r'module_config(?:\.get\(|\[)\s*"(\w+)"', text))
    assert {"type", "path"} <= modules <= {"idx", "name", "type", "path", "kwargs"}
    missing = {file: sorted(keys - EXAMPLES[file].keys()) for file, keys in read.items()}
    assert not any(missing.values()), missing
