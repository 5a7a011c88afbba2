"""The tests that every adapter has to pass. Inherit, say which adapter and which model, and run pytest::

from sie_testing import AdapterConformance

class TestMyAdapter(AdapterConformance):
    @pytest.fixture
    def adapter(self): return MyAdapter()

    @pytest.fixture
    def model(self): return ModelSpec("m", "my-encoder", options=MyOptions(...), source=...)

    @pytest.fixture
    def plugin(self): return my_package.plugin
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from sie_core import (
    Adapter,
    BatchEngine,
    BatchRequest,
    EncodeOutput,
    EncodeParams,
    HostResidue,
    InputTooLong,
    InvalidInput,
    Item,
    ModelSpec,
    Output,
    Task,
    TransitionContext,
    Unsupported,
)

from sie_testing._lifecycle import Events, LifecycleConformance, call_hook, make_context, park, parkable

__all__ = ["AdapterConformance", "make_context"]


class AdapterConformance(LifecycleConformance):
    """Inherit it, override ``adapter``, ``model`` and ``plugin``, and whatever else differs."""

    engine_class = BatchEngine

    # --- what an author overrides ---

    @pytest.fixture
    def texts(self) -> Sequence[str]:
        """Texts of different lengths that the model tells apart."""
        return (
            "a short text",
            "another",
            "a text that is rather longer than the two that came before it",
            "the last one",
        )

    @pytest.fixture
    def tolerance(self) -> float:
        """How far a text's vector may move with the batch that it is in (largest absolute difference)."""
        return 1e-5

    # --- loading and closing ---

    def test_a_model_loads_again_after_it_was_closed(
        self,
        adapter: Adapter,
        model: ModelSpec,
        context: Callable[..., TransitionContext],
        engine: BatchEngine,
        texts: Sequence[str],
    ) -> None:
        again = adapter.load(model, context(), Events())
        assert isinstance(again, BatchEngine)
        assert again is not engine
        assert_same(encode(again, texts), encode(engine, texts))
        again.close(context())
        assert any(nbytes is None or nbytes > 0 for nbytes in engine.memory().devices.values())

    # --- inference ---

    def test_one_finite_output_an_item(self, engine: BatchEngine, texts: Sequence[str]) -> None:
        outputs = encode(engine, texts)
        assert len(outputs) == len(texts)
        for output in outputs:
            assert output.tokens > 0
            vector = dense_of(output)
            assert vector.dtype == np.float32
            assert vector.shape == (engine.capabilities.dims["dense"],)
            assert np.isfinite(vector).all()

    def test_outputs_keep_the_order_of_the_items(
        self, engine: BatchEngine, texts: Sequence[str], tolerance: float
    ) -> None:
        forward = [dense_of(each) for each in encode(engine, texts)]
        # Turned by one, not reversed: an engine that reverses every batch would pass that.
        turned = [dense_of(each) for each in encode(engine, [*texts[1:], texts[0]])]
        for there, back in zip(forward, [turned[-1], *turned[:-1]], strict=True):
            assert np.abs(there - back).max() <= tolerance
        apart = min(np.abs(a - b).max() for i, a in enumerate(forward) for b in forward[:i])
        assert apart > tolerance, "the texts must be told apart for this test to mean anything"

    def test_an_answer_does_not_depend_on_the_batch(
        self, engine: BatchEngine, texts: Sequence[str], tolerance: float
    ) -> None:
        together = encode(engine, texts)
        for text, output in zip(texts, together, strict=True):
            alone = encode(engine, [text])[0]
            assert alone.tokens == output.tokens
            assert np.abs(dense_of(alone) - dense_of(output)).max() <= tolerance

    def test_items_of_different_requests_share_a_batch(
        self, engine: BatchEngine, texts: Sequence[str], tolerance: float
    ) -> None:
        requests = [BatchRequest(Task.ENCODE, [Item(text=text)]) for text in texts]
        mixed = engine.run([one for request in requests for one in engine.prepare(request)])
        for output, expected in zip(mixed, encode(engine, texts), strict=True):
            assert np.abs(dense_of(output) - dense_of(expected)).max() <= tolerance

    def test_prepare_is_safe_on_many_threads_while_a_batch_runs(
        self, engine: BatchEngine, texts: Sequence[str]
    ) -> None:
        request = BatchRequest(Task.ENCODE, [Item(text=text) for text in texts])
        expected = [one.tokens for one in engine.prepare(request)]
        with ThreadPoolExecutor(8) as pool:
            runs = pool.submit(lambda: [engine.run(engine.prepare(request)) for _ in range(3)])
            counted = [pool.submit(lambda: [one.tokens for one in engine.prepare(request)]) for _ in range(32)]
            assert all(future.result() == expected for future in counted)
            assert all(len(outputs) == len(texts) for outputs in runs.result())

    # --- errors ---

    def test_an_item_without_content_is_invalid_and_named(self, engine: BatchEngine) -> None:
        with pytest.raises(InvalidInput) as caught:
            engine.prepare(BatchRequest(Task.ENCODE, [Item(text="fine"), Item()]))
        assert caught.value.index == 1

    def test_a_text_that_is_too_long_is_refused_or_truncated_as_asked(self, engine: BatchEngine) -> None:
        limit = engine.capabilities.max_sequence_length
        if limit is None:
            pytest.skip("the model has no longest text")
        items = [Item(text="fine"), Item(text="word " * (limit + 8))]
        with pytest.raises(InputTooLong) as caught:
            engine.prepare(BatchRequest(Task.ENCODE, items, EncodeParams(truncate=False)))
        assert caught.value.index == 1
        assert caught.value.limit <= limit < caught.value.tokens
        prepared = engine.prepare(BatchRequest(Task.ENCODE, items, EncodeParams(truncate=True)))
        assert 0 < prepared[1].tokens <= limit

    def test_what_the_model_cannot_do_is_unsupported(self, engine: BatchEngine) -> None:
        with pytest.raises(Unsupported):
            engine.prepare(BatchRequest(Task.ENCODE, [Item(text="fine")], EncodeParams(output_types=("smell",))))

    # --- the wake check, park and wake ---

    def test_a_woken_engine_answers_bit_for_bit_as_before(
        self, fresh: BatchEngine, plugin: Any, texts: Sequence[str], context: Callable[..., TransitionContext]
    ) -> None:
        promised = parkable(plugin, fresh)
        before, held = encode(fresh, texts), fresh.memory().devices
        for _ in range(2):
            assert park(plugin, fresh, context()).host_bytes <= promised
            assert isinstance(call_hook(plugin, "restore_from_host", engine=fresh, ctx=context()), HostResidue)
            assert_same(encode(fresh, texts), before)
            assert fresh.memory().devices == held

    def test_parking_twice_and_waking_twice_change_nothing(
        self, fresh: BatchEngine, plugin: Any, texts: Sequence[str], context: Callable[..., TransitionContext]
    ) -> None:
        parkable(plugin, fresh)
        before = encode(fresh, texts)
        assert park(plugin, fresh, context()) == park(plugin, fresh, context())
        for _ in range(2):
            assert isinstance(call_hook(plugin, "restore_from_host", engine=fresh, ctx=context()), HostResidue)
        assert_same(encode(fresh, texts), before)

    def test_a_backup_can_be_dropped_once(
        self, fresh: BatchEngine, plugin: Any, texts: Sequence[str], context: Callable[..., TransitionContext]
    ) -> None:
        parkable(plugin, fresh)
        before = encode(fresh, texts)
        park(plugin, fresh, context())
        residue = call_hook(plugin, "restore_from_host", engine=fresh, ctx=context())
        if residue.droppable:
            assert fresh.drop_backup() == residue.host_bytes > 0
        assert fresh.drop_backup() == 0
        park(plugin, fresh, context())
        call_hook(plugin, "restore_from_host", engine=fresh, ctx=context())
        assert_same(encode(fresh, texts), before)


def encode(engine: BatchEngine, texts: Sequence[str]) -> Sequence[Output]:
    """Prepare and run the texts as one batch."""
    return engine.run(engine.prepare(BatchRequest(Task.ENCODE, [Item(text=text) for text in texts])))


def dense_of(output: Output) -> NDArray[np.float32]:
    """The output's dense vector, which must be there."""
    assert isinstance(output, EncodeOutput)
    assert output.dense is not None
    return output.dense


def assert_same(outputs: Sequence[Output], expected: Sequence[Output]) -> None:
    """Bit for bit."""
    assert [dense_of(each).tobytes() for each in outputs] == [dense_of(each).tobytes() for each in expected]
