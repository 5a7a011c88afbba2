"""The batcher on real threads and the real clock: what the virtual one can't show."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator

import pytest
from engines import Client, engine, words
from sie_core.residency.worker import Worker
from sie_core.serving import Batcher
from sie_testing import FaultPoints


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker("engine")
    yield made
    made.close()


@pytest.fixture
def side() -> Iterator[Worker]:
    made = Worker("tokeniser")
    yield made
    made.close()


async def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.001)


async def test_newcomers_are_prepared_while_the_engine_runs(
    worker: Worker, side: Worker, fault_points: Callable[[str], FaultPoints]
) -> None:
    faults, threads = fault_points("m"), []
    client = Client(Batcher(engine(run_s=0.02), worker, tokeniser=side))
    await client.ask("so slow that a second thread pays")
    faults.do("prepare", lambda: threads.append(threading.current_thread().name))
    latch = faults.hold("run", times=1)
    first = asyncio.create_task(client.ask("first"))
    await latch.arrival()
    rest = [asyncio.create_task(client.ask(f"text {number}")) for number in range(3)]
    await until(lambda: faults.hits("prepare") == 5)  # all of them, while the run stands still
    latch.release()
    await asyncio.gather(first, *rest)
    assert threads == ["sie-engine"] + ["sie-tokeniser"] * 3


async def test_a_quick_engine_prepares_on_its_own_thread(
    worker: Worker, side: Worker, fault_points: Callable[[str], FaultPoints]
) -> None:
    threads: set[str] = set()
    fault_points("m").do("prepare", lambda: threads.add(threading.current_thread().name))
    client = Client(Batcher(engine(), worker, tokeniser=side))
    for round_ in range(20):
        await asyncio.gather(*(client.ask(f"{round_} {number}") for number in range(8)))
    assert threads == {"sie-engine"}


async def test_many_clients_with_texts_of_all_lengths_are_all_answered(worker: Worker, side: Worker) -> None:
    client = Client(Batcher(engine(run_s=0.003, token_s=1e-6), worker, tokeniser=side))

    async def keep_asking(who: int) -> None:
        for number in range(15):
            texts = [words(1 + (who * number + item) % 40, f"{who}-{number}-{item}") for item in range(1 + who % 5)]
            outputs = await client.ask(*texts, name=f"{who} {number}")
            assert [output.tokens for output in outputs] == [len(text.split()) for text in texts]

    await asyncio.gather(*(keep_asking(who) for who in range(20)))
    assert len(client.done) == 300
    assert client.batcher.pending == 0
