"""Embedding engines: vectors, and what is refused before it reaches the engine."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from sie_adapters_sglang.adapters import EmbeddingAdapter
from sie_core import (
    BatchRequest,
    EngineDied,
    GenerateRequest,
    InputTooLong,
    InvalidInput,
    Item,
    NonFiniteOutput,
    RequestParams,
    Task,
    Unsupported,
)


def encode(*items: Item, **params: Any) -> BatchRequest:
    return BatchRequest(Task.ENCODE, items, RequestParams(**params))


async def test_one_vector_an_item_in_order(home: Any, start: Any) -> None:
    engine = start(home.model("sglang-embedding"))
    outputs = await engine.encode(encode(Item(text="abc"), Item(token_ids=(1, 2)), Item(text="abcde")))
    assert [output.tokens for output in outputs] == [3, 2, 5]
    for output, length in zip(outputs, (3, 2, 5), strict=True):
        assert output.dense.dtype == np.float32
        assert output.dense.tolist() == pytest.approx([1 / (length + d + 1) for d in range(8)])


async def test_dimensions_are_the_engines_business(home: Any, start: Any) -> None:
    engine = start(home.model("sglang-embedding", matryoshka=(2,)))
    (output,) = await engine.encode(encode(Item(text="abc"), dimensions=2))
    assert output.dense.shape == (2,)
    assert engine.capabilities.matryoshka == (2,)


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        (encode(Item(text="fine"), Item(text="  ")), InvalidInput),
        (encode(Item(text="fine"), Item()), InvalidInput),
        (encode(Item(text="fine", images=(b"x",))), Unsupported),
        (encode(Item(text="fine"), output_types=("sparse",)), Unsupported),
        (BatchRequest(Task.SCORE, [Item(text="fine")]), Unsupported),
        (encode(Item(text="nan"), Item(text="abc")), NonFiniteOutput),
    ],
)
async def test_what_is_refused(home: Any, start: Any, request_: BatchRequest, error: type[Exception]) -> None:
    engine = start(home.model("sglang-embedding"))
    with pytest.raises(error):
        await engine.encode(request_)
    assert await engine.encode(encode(Item(text="abc")))


async def test_what_is_too_long_is_refused_or_cut_as_asked(home: Any, start: Any) -> None:
    engine = start(home.model("sglang-embedding"))
    long = "x" * 600
    for items, tokens in (
        ((Item(text="fine"), Item(text=long)), 602),
        ((Item(text="a"), Item(token_ids=(5,) * 600)), 600),
    ):
        with pytest.raises(InputTooLong) as caught:
            await engine.encode(encode(*items))
        assert (caught.value.index, caught.value.tokens, caught.value.limit) == (1, tokens, 511)
        _, cut = await engine.encode(encode(*items, truncate=True))
        assert cut.tokens == 511
    (fits,) = await engine.encode(encode(Item(text="x" * 505)))
    assert fits.tokens == 505


async def test_an_instruction_goes_before_the_text(home: Any, start: Any) -> None:
    engine = start(home.model("sglang-embedding"))
    (output,) = await engine.encode(encode(Item(text="abc"), instruction="query: "))
    assert output.tokens == 10


async def test_chat_does_not_reach_an_embedding_engine(home: Any, start: Any) -> None:
    """It would be its end."""
    events_engine = start(home.model("sglang-embedding"))
    assert events_engine.capabilities.tasks == {Task.ENCODE}
    with pytest.raises((NotImplementedError, Unsupported)):
        await events_engine.generate(GenerateRequest("chat", {"messages": []}))
    assert await events_engine.encode(encode(Item(text="abc")))


async def test_a_dead_engine_says_so(home: Any, start: Any, helpers: Any) -> None:
    engine = start(home.model("sglang-embedding"))
    engine.close(helpers.context())
    with pytest.raises(EngineDied):
        await engine.encode(encode(Item(text="abc")))


def test_what_it_can_do_is_read_from_its_files(home: Any) -> None:
    model = home.model("sglang-embedding")
    config = home.model_folder / "config.json"
    described = EmbeddingAdapter().describe(model)
    assert described is not None
    assert (described.dims, described.matryoshka, described.max_sequence_length) == ({"dense": 8}, (), 512)
    config.write_text(json.dumps(json.loads(config.read_text()) | {"matryoshka_dimensions": [2, 4]}))
    described = EmbeddingAdapter().describe(model)
    assert described is not None
    assert described.matryoshka == (2, 4)


async def test_the_probe_forgives_rounding_and_nothing_else(home: Any, start: Any, helpers: Any) -> None:
    import asyncio

    engine = start(home.model("sglang-embedding"))
    answer = await asyncio.to_thread(engine.probe, helpers.context())
    vector = np.frombuffer(answer, dtype=np.float32)
    assert engine.probe_matches(answer, (vector + 1e-3).astype(np.float32).tobytes())
    assert not engine.probe_matches(answer, (vector + 1e-1).astype(np.float32).tobytes())
    assert not engine.probe_matches(answer, answer[:-4])
