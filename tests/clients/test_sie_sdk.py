"""sie-sdk, as its users call it, against a server with a fake engine: what is tested is the wire."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from sie_sdk import RequestError, SIEClient
from sie_testing import expected_vector

CONFIG = """
models:
  - {name: fake, adapter: fake, options: {dims: 16}}
  - {name: org/fake-large, adapter: fake, options: {dims: 32}}
"""


@pytest.fixture(scope="module")
def client(start_server: Callable[..., Any]) -> Iterator[SIEClient]:
    server = start_server(CONFIG)
    for model in ("fake", "org/fake-large"):
        server.load(model)
    with SIEClient(server.url, timeout_s=30) as client:
        yield client


def test_one_item_gives_one_vector_as_an_array(client: SIEClient) -> None:
    answer = client.encode("fake", {"text": "Hello"})
    dense = answer["dense"]
    assert isinstance(dense, np.ndarray)
    assert dense.dtype == np.float32
    np.testing.assert_allclose(dense, expected_vector("Hello", 16), atol=1e-6)


def test_many_items_keep_their_order_and_their_ids(client: SIEClient) -> None:
    texts = [f"text number {number}" for number in range(70)]
    answers = client.encode("fake", [{"id": str(place), "text": text} for place, text in enumerate(texts)])
    assert [answer["id"] for answer in answers] == [str(place) for place in range(len(texts))]
    for text, answer in zip(texts, answers, strict=True):
        np.testing.assert_allclose(answer["dense"], expected_vector(text, 16), atol=1e-6)


def test_a_model_with_a_slash_in_its_name(client: SIEClient) -> None:
    assert client.encode("org/fake-large", {"text": "Hello"})["dense"].shape == (32,)


def test_models_are_listed_with_what_they_can_do(client: SIEClient) -> None:
    listed = {model["name"]: model for model in client.list_models()}
    assert set(listed) == {"fake", "org/fake-large"}
    assert listed["fake"]["loaded"]
    assert listed["fake"]["dims"]["dense"] == 16
    assert client.get_model("org/fake-large")["name"] == "org/fake-large"


def test_a_model_that_is_not_there_is_an_error_not_a_wait(client: SIEClient) -> None:
    with pytest.raises(RequestError) as caught:
        client.encode("nobody", {"text": "Hello"})
    assert caught.value.status_code == 404


def test_watching_starts_with_a_whole_snapshot(client: SIEClient) -> None:
    snapshot = next(iter(client.watch(mode="worker")))
    assert {model["name"] for model in snapshot["models"]} == {"fake", "org/fake-large"}
