"""Batches on several CPU threads: the same vectors, errors that reach the caller, and no thread left behind."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
from sie_core import BatchRequest, DeviceOutOfMemory, Item, RequestParams, Task


def some_texts(words: list[str], count: int) -> list[str]:
    rng = random.Random(count)
    return [" ".join(rng.choices(words, k=rng.randint(1, 28))) for _ in range(count)]


@pytest.mark.parametrize("count", [1, 2, 3, 33, 150])
def test_threads_do_not_change_the_vectors(load: Any, make: Any, tiny_bert: Path, count: int) -> None:
    texts = some_texts(make.words, count)
    expected = make.embed(load(tiny_bert, threads=1), texts)
    for threads in (2, 3):
        np.testing.assert_allclose(make.embed(load(tiny_bert, threads=threads), texts), expected, atol=1e-5)


def test_token_counts_stay_with_their_texts(load: Any, make: Any, tiny_bert: Path) -> None:
    texts = some_texts(make.words, 60)
    engine = load(tiny_bert, threads=3)
    outputs = engine.run(engine.prepare(BatchRequest(Task.ENCODE, [Item(text=text) for text in texts])))
    assert [output.tokens for output in outputs] == [len(text.split()) + 2 for text in texts]


@pytest.mark.parametrize("batch_tokens", [8, 64, 8192])
def test_any_limit_with_any_number_of_threads(load: Any, make: Any, tiny_bert: Path, batch_tokens: int) -> None:
    texts = some_texts(make.words, 40)
    engine = load(attrs.evolve(make.spec(tiny_bert, threads=4), batch_tokens=batch_tokens))
    np.testing.assert_allclose(make.embed(engine, texts), make.embed(load(tiny_bert), texts), atol=1e-5)


def test_an_error_in_one_part_fails_the_batch_and_not_the_next(
    load: Any, make: Any, tiny_bert: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    texts = some_texts(make.words, 64)
    engine = load(tiny_bert, threads=2)
    expected = make.embed(engine, texts)
    embeddings = engine._placed.modules[0].embeddings
    real, calls, lock = embeddings.forward, [0], threading.Lock()

    def fails_once(**inputs: Any) -> Any:
        with lock:
            calls[0] += 1
            first = calls[0] == 1
        if first:
            raise torch.OutOfMemoryError("out of memory")
        return real(**inputs)

    with monkeypatch.context() as patch:
        patch.setattr(embeddings, "forward", fails_once)
        with pytest.raises(DeviceOutOfMemory):
            make.embed(engine, texts)
    np.testing.assert_array_equal(make.embed(engine, texts), expected)


def test_an_engine_that_uses_fewer_threads_leaves_the_others_theirs(load: Any, make: Any, tiny_bert: Path) -> None:
    """What torch is told of threads holds for the whole process; every batch has to say it anew."""
    import torch

    default = load(tiny_bert)._lanes.threads
    small, large = load(tiny_bert, threads=1), load(tiny_bert, threads=3, attn="eager")  # no lanes: torch's own threads
    texts = some_texts(make.words, 40)
    make.embed(small, texts)
    assert torch.get_num_threads() == 1
    make.embed(large, texts)
    assert torch.get_num_threads() == 3
    make.embed(small, texts)
    assert load(tiny_bert)._lanes.threads == default


def test_closing_ends_the_threads(load: Any, make: Any, tiny_bert: Path) -> None:
    before = set(threading.enumerate())
    engine = load(tiny_bert, threads=3)
    make.embed(engine, some_texts(make.words, 64))
    assert set(threading.enumerate()) - before
    engine.close(make.context())
    assert not set(threading.enumerate()) - before
    with pytest.raises(RuntimeError, match="closed"):
        make.embed(engine, ["a fox"])


def test_prompts_can_come_with_every_request(load: Any, make: Any, tiny_bert: Path) -> None:
    """More instructions than are remembered, from several threads at once."""
    engine = load(tiny_bert)
    failures: list[BaseException] = []

    def ask(start: int) -> None:
        try:
            for number in range(start, start + 60):
                params = RequestParams(instruction=" ".join(make.words[: number % 9 + 1]) + " " * number)
                engine.prepare(BatchRequest(Task.ENCODE, [Item(text="fox"), Item(token_ids=(5,))], params))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=ask, args=(100 * index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
