"""LoRA adapters through the server: loaded again, their vectors are those of the files as they are now."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from served import serving

# Raised where these tests make adapters by PeftModel, which the engine does not use.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

ADMIN = "/v1/admin/models"


async def post(http: httpx.AsyncClient, path: str, **body: Any) -> Any:
    reply = await http.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


async def vector(http: httpx.AsyncClient, lora: str | None = None) -> Any:
    found = await post(http, "/v1/embeddings", model="tiny-bert", input="a red fox", lora=lora)
    return np.array(found["data"][0]["embedding"])


@pytest.mark.parametrize("named", [True, False], ids=["with its source", "by its name"])
@pytest.mark.parametrize("parked", [False, True], ids=["resident", "parked"])
async def test_a_rewritten_folder(
    make: Any, tiny_bert: Path, save_lora: Any, tmp_path: Path, named: bool, parked: bool
) -> None:
    """G4: an adapter loaded again from the same folder, written anew, gives the new vectors, after a park too."""
    first, second = (Path(save_lora(tiny_bert, seed=seed).removeprefix("path:")) for seed in (1, 2))
    folder = tmp_path / "mine"
    shutil.copytree(first, folder)
    body = {"source": f"path:{folder}"}
    async with serving([make.spec(tiny_bert)]) as (http, registry):
        await post(http, f"{ADMIN}/tiny-bert/loras/one", **body)
        await post(http, f"{ADMIN}/tiny-bert/loras/new", source=f"path:{second}")
        old, new = await vector(http, "one"), await vector(http, "new")
        assert np.abs(old - new).max() > 0.01
        await post(http, f"{ADMIN}/tiny-bert/loras/one", **body)
        assert (await vector(http, "one") == old).all()
        shutil.copytree(second, folder, dirs_exist_ok=True)
        if parked:
            await post(http, f"{ADMIN}/tiny-bert/park")
        await post(http, f"{ADMIN}/tiny-bert/loras/one", **(body if named else {}))
        np.testing.assert_array_equal(await vector(http, "one"), new)
        (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "IA3"}))
        failed = await http.post(f"{ADMIN}/tiny-bert/loras/one", json=body)
        assert failed.status_code == 502, failed.text
        assert [each.name for each in registry.status("tiny-bert").loras if each.loaded] == ["new"]
