"""``torch-image-text``: tiny CLIP and SigLIP models with random weights, against transformers on the same weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from sie_adapters_torch import plugin
from sie_adapters_torch.image_text import ImageTextAdapter, ImageTextOptions
from sie_core import (
    BatchRequest,
    DeviceView,
    EncodeOutput,
    InputTooLong,
    InvalidInput,
    Item,
    MissingDependency,
    ModelSourceInvalid,
    ModelSpec,
    RequestParams,
    Task,
    UnsafeSource,
    Unsupported,
)

pytest.importorskip("PIL", reason="images need Pillow: pip install 'sie-adapters-torch[images]'")

from PIL import Image

TEXTS = ["a red fox", "the quick fox jumps over the lazy dog", "dog", "a blue house under the river : quick"]
TOLERANCE = 2e-6


@pytest.fixture(params=["clip", "siglip"])
def folder(request: pytest.FixtureRequest, dual_encoders: dict[str, Path]) -> Path:
    return dual_encoders[request.param]


# --- making images -------------------------------------------------------------------------------------


def picture(width: int = 40, height: int = 30, seed: int = 0, mode: str = "RGB") -> Image.Image:
    """Smooth colours with some noise: what resizing does to it shows."""
    draws = np.random.default_rng(seed)
    coarse = Image.fromarray(draws.integers(0, 256, (4, 5, 3), dtype=np.uint8)).resize((width, height))
    noise = draws.integers(-20, 20, (height, width, 3))
    made = Image.fromarray((np.asarray(coarse).astype(int) + noise).clip(0, 255).astype(np.uint8))
    return made.convert(mode)


def saved(image: Image.Image, form: str = "PNG", **settings: Any) -> bytes:
    stream = BytesIO()
    image.save(stream, form, **settings)
    return stream.getvalue()


SIZES = [(40, 30), (30, 40), (24, 24), (7, 9), (1, 1), (3, 50), (50, 3), (200, 120)]


# --- the reference -------------------------------------------------------------------------------------


def their_texts(folder: Path, texts: Sequence[str]) -> NDArray[np.float32]:
    """transformers alone, text by text, with the padding that the models' cards ask for."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    model: Any = AutoModel.from_pretrained(str(folder))
    tokenizer: Any = AutoTokenizer.from_pretrained(str(folder))
    padding: dict[str, Any] = {}
    if model.config.model_type == "siglip":
        padding = {"padding": "max_length", "max_length": model.config.text_config.max_position_embeddings}
    with torch.no_grad():
        found = [model.get_text_features(**tokenizer(text, return_tensors="pt", **padding)) for text in texts]
    return _normalised(found)


def their_images(folder: Path, images: Sequence[Image.Image]) -> NDArray[np.float32]:
    """transformers alone: its processor on Pillow, image by image."""
    import torch
    import transformers
    from transformers import AutoModel
    from transformers.models.auto.image_processing_auto import AutoImageProcessor

    model: Any = AutoModel.from_pretrained(str(folder))
    maker: Any = AutoImageProcessor
    new = int(transformers.__version__.split(".")[0]) >= 5
    processor = maker.from_pretrained(str(folder), **({"backend": "pil"} if new else {"use_fast": False}))
    with torch.no_grad():
        found = [model.get_image_features(**processor(images=image, return_tensors="pt")) for image in images]
    return _normalised(found)


def _normalised(features: Sequence[Any]) -> NDArray[np.float32]:
    import torch

    rows = torch.cat([each if isinstance(each, torch.Tensor) else each.pooler_output for each in features])
    found: NDArray[np.float32] = torch.nn.functional.normalize(rows).numpy()
    return found


def run(engine: Any, items: Sequence[Item], **params: Any) -> NDArray[np.float32]:
    outputs = engine.run(engine.prepare(BatchRequest(Task.ENCODE, items, RequestParams(**params))))
    rows = [output.dense for output in outputs if isinstance(output, EncodeOutput)]
    assert len(rows) == len(items)
    return np.stack([row for row in rows if row is not None])


def images_of(engine: Any, *files: bytes) -> NDArray[np.float32]:
    return run(engine, [Item(images=(file,)) for file in files])


@pytest.fixture
def opened(load: Any) -> Callable[..., Any]:
    return lambda folder, **options: load(folder, adapter="torch-image-text", **options)


def test_texts_are_those_of_transformers(opened: Any, make: Any, folder: Path) -> None:
    expected = their_texts(folder, TEXTS)
    assert np.abs(expected - expected[0]).max() > 1e-2
    np.testing.assert_allclose(make.embed(opened(folder), TEXTS), expected, atol=TOLERANCE)


def test_images_are_those_of_transformers(opened: Any, folder: Path) -> None:
    # Some releases of transformers take an image of one or three rows for one of so many colours.
    images = [picture(*size, seed=n) for n, size in enumerate(SIZES) if not {1, 3} & set(size)]
    expected = their_images(folder, images)
    assert np.abs(expected - expected[0]).max() > 1e-2
    np.testing.assert_allclose(images_of(opened(folder), *map(saved, images)), expected, atol=TOLERANCE)


@pytest.mark.parametrize(
    "changes",
    [
        {"size": {"height": 24, "width": 24}}, {"size": {"shortest_edge": 30}}, {"resample": 2}, {"do_resize": False},
        {"size": 24}, {"do_center_crop": False, "size": {"height": 24, "width": 24}}, {"do_normalize": False},
    ],
)  # fmt: skip
def test_what_becomes_of_an_image_is_what_its_processor_says(
    opened: Any, dual_encoders: dict[str, Path], copy_of: Any, make: Any, changes: dict[str, Any]
) -> None:
    folder = copy_of(dual_encoders["clip"])
    make.edit_json(folder / "preprocessor_config.json", **changes)
    images = [picture(*size, seed=n) for n, size in enumerate(SIZES) if not {1, 3} & set(size)]
    expected = their_images(folder, images)
    np.testing.assert_allclose(images_of(opened(folder), *map(saved, images)), expected, atol=TOLERANCE)


def test_every_size_is_taken(opened: Any, folder: Path) -> None:
    vectors = images_of(opened(folder), *(saved(picture(*size, seed=n)) for n, size in enumerate(SIZES)))
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)


def test_capabilities(opened: Any, folder: Path, make: Any) -> None:
    able = opened(folder).capabilities
    assert able == ImageTextAdapter().describe(make.spec(folder, "torch-image-text"))
    assert able.inputs == ("text", "image")
    assert able.dims == {"dense": 20 if folder.name == "clip" else 32}
    assert (able.max_sequence_length, able.compares) == (16, "dense")
    assert able.tasks == {Task.ENCODE, Task.SCORE}


def test_texts_and_images_share_a_batch(opened: Any, folder: Path) -> None:
    """In any order, whatever fits at a time; the costs are those of the model's own tokens."""
    items = [
        Item(text=TEXTS[n // 2 % 4]) if n % 2 else Item(images=(saved(picture(seed=n)),)) for n in range(25)
    ]  # fmt: skip
    engine = opened(folder)
    alone = np.concatenate([run(engine, [item]) for item in items])
    np.testing.assert_allclose(run(engine, items), alone, atol=TOLERANCE)
    engine.max_batch_tokens = 5  # less than one image has
    np.testing.assert_allclose(run(engine, items), alone, atol=TOLERANCE)
    patches = 10 if folder.name == "clip" else 9
    prepared = engine.prepare(BatchRequest(Task.ENCODE, items[:2]))
    assert [each.tokens for each in prepared] == [patches, 5 if folder.name == "clip" else 16]
    outputs = engine.run(prepared)
    assert [output.tokens for output in outputs] == [patches, 5 if folder.name == "clip" else 4]


def test_vectors_as_they_come(opened: Any, make: Any, folder: Path) -> None:
    plain, scaled = (make.embed(opened(folder, normalise=wanted), TEXTS) for wanted in (False, True))
    lengths = np.linalg.norm(plain, axis=1, keepdims=True)
    assert np.abs(lengths - 1).min() > 1e-2
    np.testing.assert_allclose(plain / lengths, scaled, atol=TOLERANCE)


def test_prompts_and_token_lists(opened: Any, make: Any, folder: Path) -> None:
    engine = opened(folder, query_prompt="query : ")
    asked = make.embed(engine, TEXTS[:2], is_query=True)
    np.testing.assert_array_equal(asked, make.embed(engine, [f"query : {text}" for text in TEXTS[:2]]))
    np.testing.assert_array_equal(make.embed(engine, [[4, 5]]), make.embed(engine, ["a red"]))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision(opened: Any, make: Any, folder: Path, dtype: str) -> None:
    engine = opened(folder, dtype=dtype)
    files = [saved(picture(seed=n)) for n in range(3)]
    np.testing.assert_allclose(images_of(engine, *files), images_of(opened(folder), *files), atol=5e-2)
    np.testing.assert_allclose(make.embed(engine, TEXTS), their_texts(folder, TEXTS), atol=5e-2)


# --- texts ---------------------------------------------------------------------------------------------


def test_long_texts(opened: Any, make: Any, folder: Path) -> None:
    long = "red " * 40
    engine = opened(folder)
    with pytest.raises(InputTooLong) as caught:
        engine.prepare(BatchRequest(Task.ENCODE, [Item(images=(saved(picture()),)), Item(text="red"), Item(text=long)]))
    assert (caught.value.index, caught.value.limit) == (2, 16)
    fits = "red " * (16 - (2 if folder.name == "clip" else 1))
    np.testing.assert_array_equal(make.embed(engine, [long], truncate=True), make.embed(engine, [fits]))


def test_padding_that_is_left_out_of_attention(
    opened: Any, make: Any, dual_encoders: dict[str, Path], copy_of: Any
) -> None:
    """Whether it is says the tokenizer; and it may go before the text."""
    folder = copy_of(dual_encoders["siglip"])
    plain = make.embed(opened(folder), TEXTS)
    for changes in ({"model_input_names": ["input_ids"]}, {"padding_side": "left"}):
        make.edit_json(folder / "tokenizer_config.json", **changes)
        expected = their_texts(folder, TEXTS)
        assert np.abs(expected - plain).max() > 1e-2
        np.testing.assert_allclose(make.embed(opened(folder), TEXTS), expected, atol=TOLERANCE)
        plain = expected


@pytest.fixture(scope="session")
def slow_siglip(make: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With SigLIP's own tokenizer, which is in Python, over a vocabulary made here."""
    sentencepiece = pytest.importorskip("sentencepiece", reason="SigLIP's tokenizer needs sentencepiece")
    pytest.importorskip("google.protobuf", reason="SigLIP's tokenizer needs protobuf")
    from transformers import SiglipTokenizer

    folder = tmp_path_factory.mktemp("models") / "slow"
    folder.mkdir()
    (folder / "words.txt").write_text("\n".join(TEXTS * 4))
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "words.txt"), model_prefix=str(folder / "spiece"), vocab_size=50, hard_vocab_limit=False,
        bos_id=-1, eos_id=1, unk_id=2, pad_id=0, minloglevel=2,
    )  # fmt: skip
    tokenizer: Any = SiglipTokenizer(str(folder / "spiece.model"), model_max_length=16)
    tokenizer.save_pretrained(str(folder))
    return make.dual_encoder(folder, "siglip")


def test_the_tokenizer_of_siglip(opened: Any, make: Any, slow_siglip: Path) -> None:
    """It drops case and punctuation, and transformers has it in Python only."""
    texts = ["a red fox", "dog", "A red, FOX!!", "  dog  "]
    engine = opened(slow_siglip)
    expected = their_texts(slow_siglip, texts)
    np.testing.assert_allclose(make.embed(engine, texts), expected, atol=TOLERANCE)
    np.testing.assert_array_equal(make.embed(engine, ["A, red: FOX."]), make.embed(engine, ["a red fox"]))
    with pytest.raises(InvalidInput, match="Unicode") as caught:
        engine.prepare(BatchRequest(Task.ENCODE, [Item(text="fox"), Item(text="\ud800")]))
    assert caught.value.index == 1


def test_a_tokenizer_that_lacks_its_package(opened: Any, slow_siglip: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sie_adapters_torch import _image_text_tokens

    monkeypatch.setattr(_image_text_tokens, "find_spec", lambda name: None)
    with pytest.raises(MissingDependency, match=r"sentencepiece.*\[images\]"):
        opened(slow_siglip)


# --- images of all kinds ---------------------------------------------------------------------------------


def odd(name: str) -> tuple[bytes, Image.Image]:
    """A file, and the RGB image that it shows."""
    colours = picture()
    if name in ("L", "1", "CMYK"):
        image = picture(mode=name)
        return saved(image, "TIFF" if name == "CMYK" else "PNG"), image.convert("RGB")
    if name == "P":
        image = colours.quantize(16)
        return saved(image), image.convert("RGB")
    if name == "gif":
        first, second = colours.quantize(16), picture(seed=9).quantize(16)
        return saved(first, "GIF", save_all=True, append_images=[second]), first.convert("RGB")
    if name == "jpeg":
        file = saved(colours, "JPEG", progressive=True)
        return file, Image.open(BytesIO(file)).convert("RGB")
    if name in ("WEBP", "BMP"):
        return saved(colours, name, **({"lossless": True} if name == "WEBP" else {})), colours
    if name == "16 bits":
        grey = np.asarray(picture(mode="L"))
        file = saved(Image.fromarray(grey.astype(np.uint16)))
        return file, Image.open(BytesIO(file)).convert("RGB")  # G9: as the reference has them
    left, top = Image.new("L", colours.size, 0), Image.new("L", colours.size, 255)
    mask = Image.composite(left, top, Image.linear_gradient("L").resize(colours.size).point(lambda v: 255 * (v < 90)))
    white = Image.composite(colours, Image.new("RGB", colours.size, "white"), mask)
    if name == "RGBA":
        clear = colours.copy()
        clear.putalpha(mask)
        return saved(clear), white
    if name == "LA":
        grey_clear = picture(mode="L")
        white = Image.composite(grey_clear, top, mask).convert("RGB")
        grey_clear.putalpha(mask)
        return saved(grey_clear), white
    assert name == "P, one colour clear"
    table = colours.quantize(16)
    shown = np.array(table.convert("RGB"))
    shown[np.asarray(table) == 3] = 255
    return saved(table, transparency=3), Image.fromarray(shown)


@pytest.mark.parametrize(
    "name",
    ["L", "1", "P", "P, one colour clear", "LA", "RGBA", "CMYK", "16 bits", "gif", "jpeg", "WEBP", "BMP"],
)  # fmt: skip
def test_odd_images(opened: Any, dual_encoders: dict[str, Path], name: str) -> None:
    file, shown = odd(name)
    assert shown.getextrema() != ((255, 255), (255, 255), (255, 255))
    found, expected = images_of(opened(dual_encoders["clip"]), file), their_images(dual_encoders["clip"], [shown])
    np.testing.assert_allclose(found, expected, atol=TOLERANCE)


@pytest.mark.parametrize("turn", range(1, 9))
def test_images_are_turned_as_their_camera_says(
    opened: Any, dual_encoders: dict[str, Path], tmp_path: Path, turn: int
) -> None:
    from transformers.image_utils import load_image

    exif = Image.Exif()
    exif[0x0112] = turn
    file = tmp_path / "photo.jpg"
    file.write_bytes(saved(picture(60, 30), "JPEG", exif=exif))
    expected = their_images(dual_encoders["clip"], [load_image(str(file))])
    np.testing.assert_allclose(images_of(opened(dual_encoders["clip"]), file.read_bytes()), expected, atol=TOLERANCE)


def bad(name: str) -> bytes:
    whole = saved(picture(200, 120))
    photo = saved(picture(200, 120), "JPEG")
    floats = saved(Image.fromarray(np.ones((9, 9), np.float32)), "TIFF")
    grey = saved(Image.fromarray(np.full((9, 9), 999, np.uint16)))  # G9: white to the reference
    deep = saved(Image.fromarray(np.ones((9, 9), np.int32)), "TIFF")
    cases = {
        "empty": b"", "text": b"no image at all", "svg": b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        "postscript": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n",
        "half a png": whole[: len(whole) // 2], "half a jpeg": photo[: len(photo) // 2], "a header": whole[:40],
        "broken": whole[:60] + bytes(200) + whole[260:], "floats": floats, "32 bits": deep,
        "16 bits of grey": grey,
        "no pixels": b"GIF89a" + bytes(4) + b"\0\0\0;", "thin": saved(Image.new("1", (1, 60_000))),
    }  # fmt: skip
    return cases[name]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("empty", "no image"), ("text", "no image"), ("svg", "no image"), ("postscript", "no image"),
        ("half a png", "truncated"), ("half a jpeg", "truncated"), ("a header", "no image"), ("broken", "damaged"),
        ("floats", "32 bits"), ("32 bits", "32 bits"), ("16 bits of grey", "save it with 8"),
        ("no pixels", "image"), ("thin", "long and thin"),
    ],
)  # fmt: skip
def test_bad_images_are_named(opened: Any, dual_encoders: dict[str, Path], name: str, says: str) -> None:
    """One of many: nothing is run, and the next request is answered."""
    engine = opened(dual_encoders["clip"], max_pixels=20_000_000)
    good = Item(images=(saved(picture()),))
    with pytest.raises(InvalidInput, match=says) as caught:
        engine.prepare(BatchRequest(Task.ENCODE, [good, Item(text="fox"), Item(images=(bad(name),)), good]))
    assert (caught.value.index, caught.value.param) == (2, "images")
    assert len(run(engine, [good])) == 1


def test_large_images_are_refused_before_they_are_decoded(
    opened: Any, dual_encoders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = opened(dual_encoders["clip"], max_pixels=1000)
    assert len(images_of(engine, saved(picture(25, 40)))) == 1
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", lambda *_: pytest.fail("decoded"))
    with pytest.raises(InvalidInput, match=r"25 x 41 pixels.*1000"):
        images_of(engine, saved(picture(25, 41)))
    with pytest.raises(InvalidInput, match="pixels"):  # a few kilobytes that would be gigabytes
        images_of(opened(dual_encoders["clip"]), saved(Image.new("1", (30_000, 30_000))))


def test_no_filter_of_warnings_lets_a_bomb_in(opened: Any, dual_encoders: dict[str, Path]) -> None:
    """Between what Pillow warns of and what it refuses."""
    engine = opened(dual_encoders["clip"], max_pixels=100_000_000)
    with pytest.raises(InvalidInput, match="pixels"):
        images_of(engine, saved(Image.new("1", (10_000, 10_001))))


@pytest.mark.parametrize("wrong", [{"max_pixels": 0}, {"max_pixels": 10**9}, {"max_length": 0}])
def test_options_refuse_values_that_cannot_be(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        ImageTextOptions(**wrong)


# --- what is refused -------------------------------------------------------------------------------------


def test_requests_that_are_refused(opened: Any, folder: Path) -> None:
    engine, image = opened(folder), saved(picture())

    def refused(error: type[InvalidInput], item: Item, task: Task = Task.ENCODE, **params: Any) -> InvalidInput:
        with pytest.raises(error) as caught:
            engine.prepare(BatchRequest(task, [Item(text="fox"), item], RequestParams(**params)))
        return caught.value

    both = refused(InvalidInput, Item(text="fox", images=(image,)))
    assert (both.index, both.param) == (1, "images")
    assert "two items" in both.message
    assert refused(InvalidInput, Item(images=(image, image))).index == 1
    assert refused(InvalidInput, Item()).index == 1
    other = refused(Unsupported, Item(text="fox"), output_types=("sparse",))
    assert isinstance(other, Unsupported)
    assert other.supported == ("dense",)
    assert "encode" in refused(Unsupported, Item(text="fox"), Task.EXTRACT).message
    assert "one size" in refused(Unsupported, Item(text="fox"), dimensions=4).message
    assert "no LoRA" in refused(Unsupported, Item(text="fox"), lora="x").message


def refused_model(opened: Any, folder: Path, error: type[Exception] = ModelSourceInvalid, **options: Any) -> str:
    with pytest.raises(error) as caught:
        opened(folder, **options)
    return str(caught.value)


def test_other_models_are_refused(
    opened: Any, tiny_bert: Path, dual_encoders: dict[str, Path], copy_of: Any, make: Any
) -> None:
    assert "clip and siglip" in refused_model(opened, tiny_bert)
    folder = copy_of(dual_encoders["siglip"])
    make.edit_json(folder / "config.json", model_type="siglip2")
    assert "'siglip2'" in refused_model(opened, folder)


def test_models_that_lack_something_are_refused(opened: Any, folder: Path, copy_of: Any) -> None:
    from safetensors.torch import load_file, save_file

    broken = copy_of(folder)
    (broken / "preprocessor_config.json").unlink()
    assert "image processor" in refused_model(opened, broken)
    (broken / "preprocessor_config.json").write_bytes((folder / "preprocessor_config.json").read_bytes())
    tensors = load_file(broken / "model.safetensors")
    lost = next(name for name in tensors if name.startswith("vision_model") and name.endswith("weight"))
    save_file({name: t for name, t in tensors.items() if name != lost}, broken / "model.safetensors")
    assert lost.rpartition(".")[0].rpartition(".")[2] in refused_model(opened, broken)


def test_images_of_another_size_are_found_when_the_model_is_loaded(
    opened: Any, folder: Path, copy_of: Any, make: Any
) -> None:
    wrong = copy_of(folder)
    size = {"height": 16, "width": 16}
    make.edit_json(wrong / "preprocessor_config.json", size=size, crop_size=size)
    assert "image" in refused_model(opened, wrong)


@pytest.mark.parametrize("edge", [10_000, 10**6])
@pytest.mark.parametrize("what", ["square", "edge", "crop"])
def test_images_without_end_are_found_before_one_is_made(
    opened: Any, folder: Path, copy_of: Any, make: Any, what: str, edge: int
) -> None:
    square = {"height": edge, "width": edge}
    wrong = {"square": {"size": square}, "edge": {"size": {"shortest_edge": edge}}, "crop": {"crop_size": square}}
    broken = copy_of(folder)
    make.edit_json(broken / "preprocessor_config.json", do_center_crop=True, **wrong[what])
    assert "max_pixels" in refused_model(opened, broken)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("wrong", [{"image_std": [0, 0, 0]}, {"rescale_factor": 1e300}])
def test_pixels_that_are_no_numbers(opened: Any, folder: Path, copy_of: Any, make: Any, wrong: dict[str, Any]) -> None:
    broken = copy_of(folder)
    make.edit_json(broken / "preprocessor_config.json", **wrong)
    assert "not finite" in refused_model(opened, broken)


def test_a_tokenizer_without_the_end_that_clip_reads(opened: Any, dual_encoders: dict[str, Path], copy_of: Any) -> None:
    folder = copy_of(dual_encoders["clip"])
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["eos_token_id"] = 5
    (folder / "config.json").write_text(json.dumps(config))
    assert "token 5" in refused_model(opened, folder)


def test_without_pillow(opened: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "PIL", None)
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    assert "[images]" in refused_model(opened, folder, MissingDependency)


# --- files -----------------------------------------------------------------------------------------------


def test_the_layout_of_sentence_transformers(
    opened: Any, dual_encoders: dict[str, Path], tmp_path: Path, make: Any
) -> None:
    import shutil

    shutil.copytree(dual_encoders["clip"], tmp_path / "0_CLIPModel")
    step = {"idx": 0, "name": "0", "path": "0_CLIPModel", "type": "sentence_transformers.models.CLIPModel"}
    (tmp_path / "modules.json").write_text(json.dumps([step]))
    np.testing.assert_array_equal(make.embed(opened(tmp_path), TEXTS), make.embed(opened(dual_encoders["clip"]), TEXTS))
    (tmp_path / "modules.json").write_text(json.dumps([step | {"type": "somebody.Else"}]))
    assert "somebody.Else" in refused_model(opened, tmp_path, UnsafeSource)
    (tmp_path / "modules.json").write_text(json.dumps([step | {"type": "sentence_transformers.models.Normalize"}]))
    assert "CLIPModel" in refused_model(opened, tmp_path)


def test_what_files_leave_out(opened: Any, make: Any, folder: Path, copy_of: Any) -> None:
    """Configurations leave out what is as usual, and say twice what is not: dimensions are right all the same."""
    import transformers

    kind, brief = folder.name, copy_of(folder)
    usual: Any = {"clip": transformers.CLIPConfig, "siglip": transformers.SiglipConfig}[kind]()
    (brief / "config.json").write_text(json.dumps({"model_type": kind}))
    described = ImageTextAdapter().describe(make.spec(brief, "torch-image-text"))
    assert described is not None
    assert described.dims == {"dense": usual.projection_dim if kind == "clip" else usual.vision_config.hidden_size}
    assert described.max_sequence_length == min(16, usual.text_config.max_position_embeddings) if kind == "clip" else 64
    files = ImageTextAdapter().read(brief, ImageTextOptions(), weights_needed=False)
    side = usual.vision_config.image_size // usual.vision_config.patch_size
    assert files.patches == side**2 + (kind == "clip")
    assert (files.text.hidden, files.text.wide) == (
        usual.text_config.hidden_size, usual.text_config.intermediate_size,
    )  # fmt: skip
    assert (files.vision.hidden, files.vision.wide) == (
        usual.vision_config.hidden_size, usual.vision_config.intermediate_size,
    )  # fmt: skip
    whole = json.loads((folder / "config.json").read_text())
    whole["text_config_dict"] = {**whole["text_config"]}
    whole["text_config"] = {"hidden_size": 7}
    (brief / "config.json").write_text(json.dumps(whole))
    if kind == "clip":
        np.testing.assert_array_equal(make.embed(opened(brief), TEXTS), make.embed(opened(folder), TEXTS))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_held_was_reserved(opened: Any, make: Any, folder: Path, dtype: str) -> None:
    model: ModelSpec = make.spec(folder, "torch-image-text", dtype=dtype)
    answer = plugin.admission_reserve(model, [DeviceView("cpu", "cpu", 1 << 40, 1 << 40, 1 << 40)])
    assert answer is not None
    held = opened(folder, dtype=dtype).memory().devices["cpu"]
    assert held <= answer.ranks[0].min_bytes < held + 128 * 1024


# --- parked ------------------------------------------------------------------------------------------------


def test_a_parked_model_comes_back_as_it_was(make: Any, folder: Path, tier: Any) -> None:
    ctx = make.context("emulated:0", device_buffer=lambda _, nbytes: tier.device.allocate(nbytes))
    engine: Any = make.adapter("torch-image-text").load(make.spec(folder, "torch-image-text"), ctx, make.events())
    items = [Item(text=TEXTS[0]), Item(images=(saved(picture()),)), *(Item(text=text) for text in TEXTS)]
    before = run(engine, items)
    for _ in range(2):
        tier.park(engine)
        with pytest.raises(RuntimeError, match="parked"):
            run(engine, items)
        assert tier.device.used() == 0
        tier.wake(engine)
        np.testing.assert_array_equal(run(engine, items), before)
    engine.close(ctx)
