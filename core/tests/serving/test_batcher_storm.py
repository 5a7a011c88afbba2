"""Everything at once, in the order that a seed picks: arrivals, cancels, deadlines, faults, the death of the engine."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from engines import Client, engine, words
from sie_core import DeadlineExceeded, DeviceOutOfMemory, EngineDied, InferenceError
from sie_core.serving import Batcher, BatchLimits
from sie_testing import FaultPoints, VirtualWorker, expected_vector

ALLOWED = (asyncio.CancelledError, DeadlineExceeded, DeviceOutOfMemory, InferenceError)


@pytest.mark.parametrize("seed", range(40))
def test_every_request_ends_and_every_answer_is_right(
    seed: int, virtual_run: Callable[..., Any], fault_points: Callable[[str], FaultPoints]
) -> None:
    draw = random.Random(seed)
    dies = draw.random() < 0.3

    async def scene() -> None:
        faults = fault_points("m")
        made = engine(
            run_s=0.2, token_s=0.001, dims=4, pads=draw.random() < 0.5, oom_over_tokens=draw.choice([None, 90])
        )
        batcher = Batcher(made, VirtualWorker("m"), BatchLimits(draw.choice([40, 200, 2000])))
        client, outcomes = Client(batcher), []

        async def ask(number: int) -> None:
            texts = [words(draw.randint(1, 40), f"{number}.{item}") for item in range(draw.choice([1, 1, 1, 5, 100]))]
            await asyncio.sleep(draw.uniform(0, 20))
            try:
                outputs = await client.ask(*texts, within=draw.choice([1.0, 30.0, 1000.0]), name=str(number))
            except ALLOWED as error:
                outcomes.append(type(error))
                return
            outcomes.append(None)
            for text, output in zip(texts, outputs, strict=True):
                assert output.dense is not None
                np.testing.assert_array_equal(output.dense, expected_vector(text, 4))

        tasks = [asyncio.create_task(ask(number)) for number in range(60)]
        for _ in range(8):
            await asyncio.sleep(draw.uniform(0, 3))
            draw.choice(tasks).cancel()
            if draw.random() < 0.5:
                faults.fail(
                    "run", draw.choice([ValueError("odd"), DeviceOutOfMemory("full")]), times=draw.randint(1, 3)
                )
        if dies:
            batcher.fail(EngineDied("killed"))
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        for one in ended:
            if one is not None and not isinstance(one, asyncio.CancelledError):
                raise one
        assert dies or outcomes.count(None) >= 20
        assert batcher.pending == 0
        if not dies:
            await client.ask("afterwards")

    virtual_run(scene(), seed)
