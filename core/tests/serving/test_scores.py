"""Scores and extractions through the service: capability checks, comparing of vectors, deadlines, LoRA, bad items."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from sie_core import (
    DeadlineExceeded,
    EncodeOutput,
    EngineDied,
    InferenceError,
    InputTooLong,
    InvalidInput,
    Item,
    ModelSpec,
    NonFiniteOutput,
    RequestParams,
    ShuttingDown,
    SparseVector,
    Task,
    Unsupported,
)
from sie_core.serving import Service
from sie_core.serving._compare import compare
from sie_testing import expected_score, expected_vector
from sie_testing.house import MIB, House, close, fake, house

Play = Callable[..., Any]
KINDS = ("fake", "fake-stream")
TASKS = ("encode", "score", "extract")


@asynccontextmanager
async def serving(*specs: ModelSpec, **more: Any) -> AsyncIterator[tuple[Service, House]]:
    built = house(*specs, **more)
    service = Service(built.registry, side_thread=False)
    await built.registry.start()
    try:
        yield service, built
    finally:
        service.begin_shutdown()
        await close(built)
        service.close()


def items(*texts: str) -> list[Item]:
    return [Item(text=text) for text in texts]


def able(name: str, adapter: str = "fake", **options: Any) -> ModelSpec:
    return fake(name, MIB, adapter=adapter, **{"tasks": TASKS, **options})


def comparing(kind: str, adapter: str = "fake", **options: Any) -> ModelSpec:
    return able(
        "m", adapter, tasks=("encode", "score"), outputs=("dense", "sparse", "multivector"), **options, compares=kind
    )


@pytest.mark.parametrize("adapter", KINDS)
def test_scores_are_the_engines_own(virtual_run: Play, adapter: str) -> None:
    async def scene() -> None:
        async with serving(able("m", adapter)) as (service, _):
            result = await service.score("m", Item(text="red fox"), items("a red fox", "a blue whale", "red"))
            assert [one.score for one in result.outputs] == [
                expected_score("red fox", text) for text in ("a red fox", "a blue whale", "red")
            ]
            assert (result.model, result.tokens) == ("m", 7)

    virtual_run(scene())


@pytest.mark.parametrize("adapter", KINDS)
def test_extractions_follow_labels(virtual_run: Play, adapter: str) -> None:
    async def scene() -> None:
        async with serving(able("m", adapter)) as (service, _):
            result = await service.extract("m", items("the Fox met a fox", "nobody"), labels=("fox", "owl"))
            found, nothing = result.outputs
            assert [(one.text, one.start, one.end) for one in found.entities] == [("Fox", 4, 7), ("fox", 14, 17)]
            assert nothing.entities == ()
            assert [one.label for one in found.classifications] == ["fox", "owl"]
            assert found.relations[0].head == "Fox"

    virtual_run(scene())


def reference(kind: str, query: str, text: str) -> float:
    """As the papers have it, a pair at a time."""
    asked = RequestParams(is_query=True)
    if kind == "dense":
        return float(expected_vector(query, params=asked) @ expected_vector(text))
    if kind == "sparse":
        return float(sum(query.split().count(word) for word in text.split()))
    words = [expected_vector_of_word(place, word) for place, word in enumerate(query.split())]
    tokens = [expected_vector_of_word(place, word) for place, word in enumerate(text.split())]
    return sum(max(float(one @ other) for other in tokens) for one in words)


def expected_vector_of_word(place: int, word: str) -> np.ndarray[Any, np.dtype[np.float32]]:
    from sie_testing._vectors import dense

    return dense(f"{place}:{word}", 8)


@pytest.mark.parametrize("adapter", KINDS)
@pytest.mark.parametrize("kind", ["multivector", "dense", "sparse"])
def test_models_that_only_encode_are_scored_by_their_vectors(virtual_run: Play, kind: str, adapter: str) -> None:
    texts = ["a red fox", "one two three four five", "red", "fox fox a"]

    async def scene() -> None:
        async with serving(comparing(kind, adapter)) as (service, _):
            result = await service.score("m", Item(text="a red fox"), items(*texts))
            expected = [reference(kind, "a red fox", text) for text in texts]
            assert [one.score for one in result.outputs] == pytest.approx(expected, abs=1e-5)
            assert result.tokens == 3 + 3 + 5 + 1 + 3
            assert service.model("m").leases == 0

    virtual_run(scene())


def test_query_and_documents_go_in_one_run(virtual_run: Play) -> None:
    async def scene() -> None:
        async with serving(comparing("dense", run_s=1.0)) as (service, _):
            await service.score("m", Item(text="warm"), items("up"))
            began = asyncio.get_running_loop().time()
            await service.score("m", Item(text="query"), items("one", "two"))
            assert asyncio.get_running_loop().time() - began == pytest.approx(1.0)

    virtual_run(scene(), None)


def test_a_large_comparison_leaves_the_event_loop_free() -> None:
    """On a thread of its own, and the same to the last bit as at once."""

    async def scene() -> None:
        built = house(comparing("multivector", dims=64, max_length=4096))
        service = Service(built.registry)
        await built.registry.start()
        texts = [" ".join(f"w{number}" for number in range(first, first + 200)) for first in range(40)]
        turns = 0

        async def count() -> None:
            nonlocal turns
            while True:
                await asyncio.sleep(0)
                turns += 1

        query = Item(text=" ".join(f"w{number}" for number in range(32)))
        counting = asyncio.create_task(count())
        result = await service.score("m", query, items(*texts))
        before = turns
        again = await service.score("m", query, items(*texts))
        assert turns > before
        counting.cancel()
        assert [one.score for one in result.outputs] == [one.score for one in again.outputs]
        assert result.outputs[0].score == pytest.approx(reference_large(query.text or "", texts[0]), rel=1e-4)
        service.begin_shutdown()
        await close(built)
        service.close()

    asyncio.run(scene())


def reference_large(query: str, text: str) -> float:
    from sie_testing._vectors import multivector

    return float((multivector(query.split(), 64) @ multivector(text.split(), 64).T).max(axis=1).sum())


@pytest.mark.parametrize("kind", ["multivector", "dense", "sparse"])
def test_documents_without_anything_to_compare_score_nothing(kind: str) -> None:
    nothing = SparseVector(np.zeros(0, np.int32), np.zeros(0, np.float32))
    empty = EncodeOutput(0, np.zeros(4, np.float32), nothing, np.zeros((0, 4), np.float32))
    full = EncodeOutput(
        1,
        np.ones(4, np.float32),
        SparseVector(np.array([7], np.int32), np.ones(1, np.float32)),
        np.ones((2, 4), np.float32),
    )
    scores = [one.score for one in compare(kind, full, [empty, full, empty])]
    assert scores[0] == scores[2] == 0.0
    assert scores[1] > 0.0
    assert [one.score for one in compare(kind, empty, [full])] == [0.0]


def test_many_documents_are_compared_in_batches_with_the_same_result() -> None:
    random = np.random.default_rng(7)
    documents = [
        EncodeOutput(1, multivector=random.normal(size=(rows, 16)).astype(np.float32))
        for rows in random.integers(1, 3000, size=60)
    ]
    query = EncodeOutput(1, multivector=random.normal(size=(5, 16)).astype(np.float32))
    assert query.multivector is not None
    expected = [
        float((query.multivector @ one.multivector.T).max(axis=1).sum())
        for one in documents
        if one.multivector is not None
    ]
    assert [one.score for one in compare("multivector", query, documents)] == pytest.approx(expected, rel=1e-5)


def test_a_long_query_is_compared_in_parts_with_the_same_result_and_bounded_memory() -> None:
    random = np.random.default_rng(8)
    query = EncodeOutput(1, multivector=random.normal(size=(2000, 8)).astype(np.float32))
    documents = [EncodeOutput(1, multivector=random.normal(size=(3000, 8)).astype(np.float32)) for _ in range(10)]
    assert query.multivector is not None
    expected = [
        float((query.multivector @ one.multivector.T).max(axis=1).sum())
        for one in documents
        if one.multivector is not None
    ]
    tracemalloc.start()
    scores = [one.score for one in compare("multivector", query, documents)]
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert scores == pytest.approx(expected, rel=1e-5)
    assert most < 64 * MIB  # the whole table would be 240 MB


def test_an_engine_whose_vectors_cannot_be_compared_is_an_error_of_the_engine() -> None:
    short, long = EncodeOutput(1, np.ones(3, np.float32)), EncodeOutput(1, np.ones(4, np.float32))
    with pytest.raises(InferenceError, match="can't be compared"):
        compare("dense", short, [long])
    with pytest.raises(InferenceError, match="no sparse output"):
        compare("sparse", short, [long])
    with pytest.raises(InferenceError, match="'smell'"):
        compare("smell", short, [long])


# --- what goes wrong -----------------------------------------------------------------------------------


@pytest.mark.parametrize("adapter", KINDS)
@pytest.mark.parametrize("task", ["score", "extract"])
def test_what_a_model_cannot_do_is_refused_with_what_it_can(virtual_run: Play, task: str, adapter: str) -> None:
    async def scene() -> None:
        async with serving(able("m", adapter, tasks=("encode",))) as (service, built):
            with pytest.raises(Unsupported) as caught:
                if task == "score":
                    await service.score("m", Item(text="query"), items("one"))
                else:
                    await service.extract("m", items("one"), labels=("x",))
            assert caught.value.supported == ("encode",)
            assert built.states() == {"m": "unloaded"}  # nothing was loaded in vain

    virtual_run(scene())


def test_a_model_that_scores_may_not_encode(virtual_run: Play) -> None:
    async def scene() -> None:
        async with serving(able("m", tasks=("score",))) as (service, _):
            await service.score("m", Item(text="query"), items("one"))
            with pytest.raises(Unsupported) as caught:
                await service.encode("m", items("one"))
            assert caught.value.supported == ("score",)

    virtual_run(scene())


@pytest.mark.parametrize("adapter", KINDS)
@pytest.mark.parametrize("compares", [None, "multivector"])
def test_a_bad_item_is_named_and_nobody_else_is_affected(virtual_run: Play, adapter: str, compares: str | None) -> None:
    model = comparing(compares, adapter, max_length=4) if compares else able("m", adapter, max_length=4)

    async def scene() -> None:
        async with serving(model) as (service, _):
            query, long = Item(text="query"), "one two three four five"
            bad, good = await asyncio.gather(
                service.score("m", query, items("fine", long, "fine")),
                service.score("m", query, items("fine", "good")),
                return_exceptions=True,
            )
            assert isinstance(bad, InputTooLong)
            assert bad.index == 1
            assert not isinstance(good, BaseException)
            assert len(good.outputs) == 2
            with pytest.raises(InvalidInput):
                await service.score("m", Item(text=" "), items("fine"))

    virtual_run(scene())


def test_an_error_of_the_query_is_not_one_of_the_first_item(virtual_run: Play) -> None:
    async def scene() -> None:
        async with serving(comparing("multivector", max_length=4, non_finite=("bad",))) as (service, _):
            with pytest.raises(InputTooLong) as caught:
                await service.score("m", Item(text="one two three four five"), items("fine"))
            assert (caught.value.index, caught.value.param) == (None, "query")
            with pytest.raises(InferenceError, match="for the query"):
                await service.score("m", Item(text="bad"), items("fine"))

    virtual_run(scene())


@pytest.mark.parametrize("adapter", KINDS)
@pytest.mark.parametrize("compares", [None, "multivector", "dense"])
def test_scores_that_are_no_numbers_are_errors_that_name_the_items(
    virtual_run: Play, adapter: str, compares: str | None
) -> None:
    options: dict[str, Any] = {"non_finite": ("bad",)}
    model = comparing(compares, adapter, **options) if compares else able("m", adapter, **options)

    async def scene() -> None:
        async with serving(model) as (service, _):
            with pytest.raises(NonFiniteOutput) as caught:
                await service.score("m", Item(text="query"), items("fine", "bad", "fine", "bad"))
            assert caught.value.items == (1, 3)
            if compares is None:
                with pytest.raises(NonFiniteOutput):
                    await service.extract("m", items("bad"), labels=("bad",))

    virtual_run(scene())


@pytest.mark.parametrize("adapter", KINDS)
@pytest.mark.parametrize("compares", [None, "sparse"])
def test_deadlines_hold_and_the_place_is_free_afterwards(virtual_run: Play, adapter: str, compares: str | None) -> None:
    model = comparing(compares, adapter, run_s=5.0) if compares else able("m", adapter, run_s=5.0)

    async def scene() -> None:
        async with serving(model) as (service, _):
            await service.load("m")
            with pytest.raises(DeadlineExceeded):
                await service.score("m", Item(text="query"), items("one"), deadline_s=1.0)
            await asyncio.sleep(10.0)
            assert (service.model("m").leases, service.model("m").queued) == (0, 0)
            assert await service.score("m", Item(text="query"), items("one"))

    virtual_run(scene())


@pytest.mark.parametrize("compares", [None, "multivector"])
def test_a_client_that_leaves_frees_everything(virtual_run: Play, compares: str | None) -> None:
    model = comparing(compares, "fake-stream", run_s=5.0) if compares else able("m", "fake-stream", run_s=5.0)

    async def scene() -> None:
        async with serving(model) as (service, _):
            await service.load("m")
            asking = asyncio.create_task(service.score("m", Item(text="query"), items("one")))
            await asyncio.sleep(1.0)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
            assert service.model("m").leases == 0

    virtual_run(scene())


@pytest.mark.parametrize("adapter", KINDS)
@pytest.mark.parametrize("compares", [None, "dense"])
def test_an_engine_that_dies_ends_what_runs(virtual_run: Play, adapter: str, compares: str | None) -> None:
    model = comparing(compares, adapter, die_after=0) if compares else able("m", adapter, die_after=0)

    async def scene() -> None:
        async with serving(model) as (service, _):
            with pytest.raises(EngineDied):
                await service.score("m", Item(text="query"), items("one"))

    virtual_run(scene())


def test_lora_adapters_apply_to_scores(virtual_run: Play) -> None:
    async def scene() -> None:
        async with serving(able("m", max_loras=1)) as (service, _):
            await service.load_lora("m", "tuned", "hf:org/tuned")
            result = await service.score("m", Item(text="query"), items("one"), RequestParams(lora="tuned"))
            assert result.outputs[0].score == expected_score("query", "one", salt="tuned")

    virtual_run(scene())


def test_nothing_to_do_is_said_and_a_stopping_server_says_so(virtual_run: Play) -> None:
    async def scene() -> None:
        async with serving(able("m")) as (service, _):
            with pytest.raises(InvalidInput, match="nothing to score"):
                await service.score("m", Item(text="query"), [])
            with pytest.raises(InvalidInput, match="nothing to extract"):
                await service.extract("m", [], labels=("x",))
            service.begin_shutdown()
            with pytest.raises(ShuttingDown):
                await service.score("m", Item(text="query"), items("one"))

    virtual_run(scene())


def test_tasks_of_several_requests_share_a_run(virtual_run: Play) -> None:
    async def scene() -> None:
        async with serving(able("m", run_s=1.0)) as (service, _):
            await service.encode("m", items("warm"))
            began = asyncio.get_running_loop().time()
            answers: Sequence[Any] = await asyncio.gather(
                service.encode("m", items("one")),
                service.score("m", Item(text="query"), items("two")),
                service.extract("m", items("three"), labels=("three",)),
            )
            assert asyncio.get_running_loop().time() - began == pytest.approx(1.0)
            assert [type(answer.outputs[0]).__name__ for answer in answers] == [
                "EncodeOutput",
                "ScoreOutput",
                "ExtractOutput",
            ]

    virtual_run(scene(), None)


def test_every_task_is_one_that_somebody_asks_for() -> None:
    assert {task.value for task in Task} == {*TASKS, "generate"}
