"""Images through a real server: in every way clients send them, bad ones among good ones, parked and woken."""

from __future__ import annotations

import base64
import importlib.util
import json
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("torch", "PIL", "sie_adapters_torch")),
        reason="torch and Pillow are not installed",
    ),
]

CONFIG = """
models:
  - {name: clip, adapter: torch-image-text, source: "path:clip"}
  - {name: other, adapter: torch-image-text, source: "path:clip"}
"""


def make_model(folder: Path) -> None:
    """A CLIP model with random weights, as transformers saves it."""
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = {word: n for n, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"a red fox blue house".split()])}
    backend = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    maker: Any = transformers.PreTrainedTokenizerFast
    maker(tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(folder)
    half = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
    torch.manual_seed(0)
    config = transformers.CLIPConfig(
        text_config=half | {"vocab_size": len(words), "max_position_embeddings": 16, "eos_token_id": 3},
        vision_config=half | {"image_size": 32, "patch_size": 8},
        projection_dim=16,
    )
    transformers.CLIPModel(config).save_pretrained(folder)
    about = {
        "image_processor_type": "CLIPImageProcessor", "do_resize": True, "do_center_crop": True, "do_rescale": True,
        "do_normalize": True, "size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32},
        "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5], "resample": 3, "rescale_factor": 1 / 255,
    }  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(about))


def picture(colour: str = "red", form: str = "PNG") -> bytes:
    from PIL import Image

    stream = BytesIO()
    slope = Image.linear_gradient("L").resize((60, 40)).convert("RGB")
    (slope if colour == "grey" else Image.new("RGB", (60, 40), colour)).save(stream, form)
    return stream.getvalue()


@pytest.fixture(scope="module")
def server(start_server: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A device that holds one of the two models."""
    folder = tmp_path_factory.mktemp("images")
    make_model(folder / "clip")
    running = start_server(CONFIG, "--emulate-device", "10MiB", cwd=folder)
    running.load("clip")
    return running


def ask(server: Any, items: list[Any], model: str = "clip") -> httpx.Response:
    return httpx.post(f"{server.url}/v1/encode/{model}", json={"items": items}, timeout=120)


def vectors(reply: httpx.Response) -> list[list[float]]:
    assert reply.status_code == 200, reply.text
    return [list(item["dense"]["values"]) for item in reply.json()["items"]]


def as_base64(image: bytes) -> dict[str, Any]:
    return {"images": [{"data": base64.b64encode(image).decode(), "format": "png"}]}


def test_every_way_to_send_an_image_gives_the_same_vector(server: Any) -> None:
    image = picture("grey")
    text = base64.b64encode(image).decode()
    sent = [as_base64(image), {"images": [f"data:image/png;base64,{text}"]}, {"text": "a red fox"}]
    first, second, words = vectors(ask(server, sent))
    assert first == second != words
    assert sum(number**2 for number in first) == pytest.approx(1, abs=1e-5)
    packed = {"Content-Type": "application/msgpack", "Accept": "application/msgpack"}
    body = msgspec.msgpack.encode({"items": [{"images": [{"data": image, "format": "png"}]}]})
    reply = httpx.post(f"{server.url}/v1/encode/clip", content=body, headers=packed, timeout=120)
    assert reply.status_code == 200, reply.text
    (item,) = msgspec.msgpack.decode(reply.content)["items"]
    values = _plain(item["dense"]["values"])
    assert memoryview(values["data"]).cast("f").tolist() == pytest.approx(first, abs=1e-7)


def _plain(array: dict[Any, Any]) -> dict[str, Any]:
    return {key.decode() if isinstance(key, bytes) else key: value for key, value in array.items()}


def test_images_are_scored_against_words_and_words_against_an_image(server: Any) -> None:
    images = [as_base64(picture(colour)) for colour in ("red", "blue", "grey")]
    (words, *pictures) = vectors(ask(server, [{"text": "a red fox"}, *images]))
    body = {"query": {"text": "a red fox"}, "items": images}
    reply = httpx.post(f"{server.url}/v1/score/clip", json=body, timeout=120)
    assert reply.status_code == 200, reply.text
    found = {int(score["item_id"].rpartition("-")[2]): score["score"] for score in reply.json()["scores"]}
    expected = [sum(a * b for a, b in zip(words, each, strict=True)) for each in pictures]
    assert [found[n] for n in sorted(found)] == pytest.approx(expected, abs=1e-5)
    back = {"query": images[0], "items": [{"text": "a red fox"}]}
    reply = httpx.post(f"{server.url}/v1/score/clip", json=back, timeout=120)
    assert reply.status_code == 200, reply.text
    assert reply.json()["scores"][0]["score"] == pytest.approx(expected[0], abs=1e-5)


def test_one_bad_image_fails_its_request_and_no_other(server: Any) -> None:
    good, whole = as_base64(picture()), picture("grey")
    for bad, says in (
        (as_base64(whole[: len(whole) // 2]), "truncated"),
        (as_base64(b"no image at all"), "unknown image format"),
        ({**good, "text": "a red fox"}, "two items"),
        ({"images": good["images"] * 2}, "one image"),
    ):
        reply = ask(server, [good, {"text": "a red fox"}, bad, good])
        assert (reply.status_code, reply.json()["detail"]["code"]) == (400, "INVALID_INPUT"), reply.text
        assert reply.json()["detail"]["index"] == 2
        assert says in reply.json()["detail"]["message"]
        assert ask(server, [good]).status_code == 200


def test_models_say_that_they_take_images(server: Any) -> None:
    models = httpx.get(f"{server.url}/v1/models", timeout=60).json()["models"]
    (inputs,) = [model["inputs"] for model in models if model["name"] == "clip"]
    assert inputs == ["text", "image"]


def test_a_model_that_was_parked_answers_as_before(server: Any) -> None:
    items = [as_base64(picture("grey")), {"text": "a blue house"}]
    before = vectors(ask(server, items))
    for model in ("other", "clip") * 2:  # there is room for one: the other one parks
        assert vectors(ask(server, items, model)) == before
    status = httpx.get(f"{server.url}/v1/status", timeout=60).json()["models"]
    assert {model["name"]: model["residency"] for model in status} == {"clip": "resident", "other": "parked"}
