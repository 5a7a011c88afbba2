"""sie-sdk against real models (small ones with random weights where no package ships any): every output and dtype."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from sie_sdk import RequestError, SIEAsyncClient, SIEClient
from sie_sdk.client.errors import InputTooLongError, ModelLoadFailedError
from sie_sdk.scoring import maxsim

QUERY = "Which animal sleeps on the rug?"
TEXTS = ["Interest rates rose again.", "A cat is asleep on the carpet.", "The train was late."]
ITEMS = [{"id": f"item {number}", "text": text} for number, text in enumerate(TEXTS)]
DTYPES = {
    "float32": (np.float32, 384),
    "float16": (np.float16, 384),
    "int8": (np.int8, 384),
    "uint8": (np.uint8, 384),
    "binary": (np.int8, 48),
    "ubinary": (np.uint8, 48),
}


@pytest.fixture(scope="module")
def client(house: Any) -> Iterator[SIEClient]:
    with SIEClient(house.url, timeout_s=30) as client:
        yield client


# --- encode ---


@pytest.mark.parametrize("dtype", DTYPES)
def test_dense_vectors_of_every_dtype(client: SIEClient, dense: Callable[..., Any], dtype: str) -> None:
    kind, dims = DTYPES[dtype]
    answers = client.encode("minilm", ITEMS, output_types=["dense"], output_dtype=dtype)
    assert [answer["id"] for answer in answers] == [item["id"] for item in ITEMS]
    for answer, expected in zip(answers, dense("minilm", TEXTS, output_dtype=dtype), strict=True):
        assert (answer["dense"].dtype, answer["dense"].shape) == (kind, (dims,))
        np.testing.assert_allclose(answer["dense"], np.array(expected, kind), atol=1e-6)


def test_packed_vectors_are_those_of_the_floats(client: SIEClient) -> None:
    vectors = {dtype: client.encode("minilm", ITEMS[1], output_dtype=dtype)["dense"] for dtype in DTYPES}
    floats = vectors["float32"]
    np.testing.assert_allclose(vectors["float16"], floats, atol=1e-3)
    assert (np.unpackbits(vectors["ubinary"]) == (floats > 0)).all()
    assert (vectors["binary"].astype(int) + 128 == vectors["ubinary"]).all()
    cosine = vectors["int8"].astype(float) @ floats / np.linalg.norm(vectors["int8"].astype(float))
    assert cosine > 0.999


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_sparse_vectors(client: SIEClient, native: Callable[..., Any], dtype: str) -> None:
    params = {"output_types": ["sparse"], "output_dtype": dtype}
    answers = client.encode("splade", ITEMS, **params)
    expected = native("encode", "splade", items=ITEMS, params=params)["items"]
    for answer, one in zip(answers, expected, strict=True):
        assert answer["sparse"]["values"].dtype == np.dtype(dtype)
        assert answer["sparse"]["indices"].tolist() == one["sparse"]["indices"]
        np.testing.assert_allclose(answer["sparse"]["values"], one["sparse"]["values"], rtol=1e-3)


def test_a_sparse_vector_of_whole_numbers_is_refused(client: SIEClient) -> None:
    with pytest.raises(RequestError, match="float32 or float16"):
        client.encode("splade", ITEMS[0], output_types=["sparse"], output_dtype="int8")


@pytest.mark.parametrize("dtype", DTYPES)
def test_token_vectors_of_every_dtype(client: SIEClient, native: Callable[..., Any], dtype: str) -> None:
    kind, dims = DTYPES[dtype]
    params = {"output_types": ["multivector"], "output_dtype": dtype}
    (answer,) = client.encode("org/colbert", ITEMS[1:2], **params)
    (expected,) = native("encode", "org/colbert", items=ITEMS[1:2], params=params)["items"]
    assert answer["multivector"].dtype == kind
    assert answer["multivector"].shape == (len(expected["multivector"]["values"]), dims)
    np.testing.assert_allclose(answer["multivector"], np.array(expected["multivector"]["values"], kind), atol=1e-6)


def test_every_output_at_once(client: SIEClient) -> None:
    answer = client.encode("everything", {"text": "a b"}, output_types=["dense", "sparse", "multivector"])
    assert answer["dense"].shape == (8,)
    assert answer["multivector"].shape == (2, 8)
    assert answer["sparse"]["indices"].shape == answer["sparse"]["values"].shape


def test_queries_instructions_and_options(client: SIEClient) -> None:
    plain = client.encode("everything", {"text": "a b"})["dense"]
    changed: list[dict[str, Any]] = [{"is_query": True}, {"instruction": "find"}, {"options": {"is_query": True}}]
    for asked in changed:
        assert not np.array_equal(client.encode("everything", {"text": "a b"}, **asked)["dense"], plain)
    assert client.encode("everything", {"text": "a b"}, options={"dimensions": 4})["dense"].shape == (4,)
    long = {"text": "word " * 1000}
    assert client.encode("minilm", long, options={"truncate": True})["dense"].shape == (384,)
    with pytest.raises(InputTooLongError, match="item 0"):
        client.encode("minilm", long)


def test_images_in_every_way_the_package_takes_them(client: SIEClient, tmp_path: Path) -> None:
    image = Image.new("RGB", (4, 3), "red")
    packed = io.BytesIO()
    image.save(packed, "PNG")
    (tmp_path / "red.png").write_bytes(packed.getvalue())
    ways: list[Any] = [image, np.asarray(image), packed.getvalue(), tmp_path / "red.png"]
    answers = client.encode("everything", [{"images": [way], "text": "red"} for way in ways])
    assert all(answer["dense"].shape == (8,) for answer in answers)
    with pytest.raises(RequestError, match="item 1"):
        client.encode("everything", [{"images": [image]}, {"images": [packed.getvalue()[:20]]}])


async def test_the_asynchronous_client(house: Any, client: SIEClient) -> None:
    async with SIEAsyncClient(house.url, timeout_s=30) as other:
        answer = await other.encode("minilm", ITEMS[0])
        np.testing.assert_array_equal(answer["dense"], client.encode("minilm", ITEMS[0])["dense"])
        scores = await other.score("splade", {"text": QUERY}, ITEMS)
        assert scores["scores"] == client.score("splade", {"text": QUERY}, ITEMS)["scores"]
        found = [answer["entities"] for answer in await other.extract("tagger", ITEMS)]
        assert found == [answer["entities"] for answer in client.extract("tagger", ITEMS)]
        assert {model["name"] for model in await other.list_models()} >= {"minilm", "splade"}


# --- score ---


@pytest.mark.parametrize("model", ["splade", "org/colbert", "cross-encoder"])
def test_scores_come_best_first_with_the_items_own_names(
    client: SIEClient, ranked: Callable[..., Any], model: str
) -> None:
    answer = client.score(model, {"id": "q", "text": QUERY}, ITEMS)
    expected = ranked(model, QUERY, TEXTS)
    assert answer["query_id"] == "q"
    assert [score["rank"] for score in answer["scores"]] == [0, 1, 2]
    assert [(score["item_id"], score["score"]) for score in answer["scores"]] == [
        (f"item {place}", score) for place, score in expected
    ]
    if model != "cross-encoder":  # whose weights are random
        assert answer["scores"][0]["item_id"] == "item 1"


def test_items_without_names_are_known_by_their_places(client: SIEClient) -> None:
    answer = client.score("splade", {"text": QUERY}, [{"text": text} for text in TEXTS])
    assert answer["scores"][0]["item_id"] == "item-1"


def test_token_vectors_are_compared_by_the_package_as_by_the_server(client: SIEClient) -> None:
    """Which is what to do with stored ones: the server takes none."""
    query = client.encode("org/colbert", {"text": QUERY}, output_types=["multivector"], is_query=True)["multivector"]
    answers = client.encode("org/colbert", ITEMS, output_types=["multivector"])
    scores = {one["item_id"]: one["score"] for one in client.score("org/colbert", {"text": QUERY}, ITEMS)["scores"]}
    found = maxsim(query, [answer["multivector"] for answer in answers])
    np.testing.assert_allclose(found, [scores[item["id"]] for item in ITEMS], rtol=1e-5)
    with pytest.raises(RequestError, match="multivector"):
        client.score("org/colbert", {"multivector": query}, ITEMS)


# --- extract ---


def test_entities_are_where_they_are_said_to_be(client: SIEClient, native: Callable[..., Any]) -> None:
    answers = client.extract("tagger", ITEMS)
    expected = native("extract", "tagger", items=ITEMS)["items"]
    assert sum(len(answer["entities"]) for answer in answers) > 0
    for answer, one, text in zip(answers, expected, TEXTS, strict=True):
        assert [entity["text"] for entity in answer["entities"]] == [entity["text"] for entity in one["entities"]]
        for entity in answer["entities"]:
            assert text[entity["start"] : entity["end"]] == entity["text"]
            assert entity["label"] in ("PER", "LOC")


def test_a_text_is_classified(client: SIEClient) -> None:
    classes = client.extract("classifier", ITEMS[0])["classifications"]
    assert {one["label"] for one in classes} == {"bad", "fair", "good"}
    assert sum(one["score"] for one in classes) == pytest.approx(1)


def test_labels_and_relations(client: SIEClient) -> None:
    answer = client.extract("finder", {"text": "the fox met an owl"}, labels=["fox", "owl"])
    assert [(entity["text"], entity["start"], entity["end"]) for entity in answer["entities"]] == [
        ("fox", 4, 7),
        ("owl", 15, 18),
    ]
    assert [(one["head"], one["tail"]) for one in answer["relations"]] == [("fox", "owl")]
    with pytest.raises(RequestError, match="labels"):
        client.extract("finder", {"text": "the fox"})


# --- what goes wrong ---


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda client: client.encode("minilm", [ITEMS[0], {"text": ""}]), "item 1"),
        (lambda client: client.encode("minilm", ITEMS[0], output_types=["sparse"]), "no sparse output; it gives dense"),
        (lambda client: client.score("minilm", {"text": QUERY}, ITEMS), "does not score; it can encode"),
        (lambda client: client.extract("minilm", ITEMS), "does not extract; it can encode"),
        (lambda client: client.score("splade", {"text": QUERY}, []), "items"),
        (lambda client: client.encode("minilm", {"audio": b"RIFF"}), "audio"),
        (lambda client: client.encode("minilm", {"images": [Image.new("RGB", (2, 2))]}), "image"),
        (lambda client: client.recommend("encode"), "unknown path: POST /v1/recommend"),
        (lambda client: client.get_capacity(), "requires a gateway"),
        (lambda client: client.responses("chat", "hello"), "unknown path: POST /v1/responses"),
    ],
)
def test_what_can_not_be_done_is_an_error_at_once(
    client: SIEClient, ask: Callable[[SIEClient], Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        ask(client)
    assert client.last_retry_count == 0


def test_a_model_that_can_not_be_loaded_is_an_error_at_once(client: SIEClient) -> None:
    with pytest.raises(ModelLoadFailedError, match="gone"):
        client.encode("gone", ITEMS[0])
    assert client.last_retry_count == 0


def test_watching_finds_out_by_itself_what_it_talks_to(client: SIEClient) -> None:
    snapshot = next(iter(client.watch()))
    assert {model["name"] for model in snapshot["models"]} >= {"minilm", "splade", "org/colbert"}
    assert all(model["residency"] for model in snapshot["models"])
