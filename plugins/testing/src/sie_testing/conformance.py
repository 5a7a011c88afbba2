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
from functools import partial
from itertools import chain
from typing import Any

import pytest
from attrs import evolve, frozen
from sie_core import (
    Adapter,
    BatchEngine,
    BatchRequest,
    HostResidue,
    InputTooLong,
    InvalidInput,
    Item,
    ModelSpec,
    Output,
    Prepared,
    RequestParams,
    Task,
    TransitionContext,
    Unsupported,
)

from sie_testing._books import BooksConformance
from sie_testing._bounds import all_at_once
from sie_testing._lifecycle import Events, call_hook, make_context, park, parkable
from sie_testing._outputs import assert_same, assert_sound, difference, main_task, only, tasks_of
from sie_testing._policies import PolicyConformance

__all__ = ["AdapterConformance", "make_context"]


@frozen
class Asking:
    """How the suite asks an engine, whatever it is for: for its first task, or for the one that is named."""

    query: Item
    labels: tuple[str, ...]

    def request(
        self, engine: BatchEngine, items: Sequence[Item], params: RequestParams | None = None, task: Task | None = None
    ) -> BatchRequest:
        """A request for ``items``; to encode, for every output that the engine has."""
        task = task or main_task(engine)
        params = params or RequestParams()
        if task is Task.ENCODE:
            return BatchRequest(task, items, evolve(params, output_types=tuple(engine.capabilities.outputs)))
        if task is Task.SCORE:
            return BatchRequest(task, items, params, query=self.query)
        return BatchRequest(task, items, params, labels=self.labels)

    def run(self, engine: BatchEngine, texts: Sequence[str], task: Task | None = None) -> Sequence[Output]:
        """Prepare and run the texts as one batch."""
        return engine.run(engine.prepare(self.request(engine, [Item(text=text) for text in texts], task=task)))


class AdapterConformance(BooksConformance, PolicyConformance):
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
        """How far a text's numbers may move with the batch that it is in (largest absolute difference)."""
        return 1e-5

    @pytest.fixture
    def query(self) -> Item:
        """What an engine that scores compares the texts with."""
        return Item(text="which text is the last one?")

    @pytest.fixture
    def labels(self) -> tuple[str, ...]:
        """What an engine that extracts looks for in the texts; none for one that has labels of its own."""
        return ()

    # --- what the tests use ---

    @pytest.fixture
    def asking(self, query: Item, labels: tuple[str, ...]) -> Asking:
        return Asking(query, labels)

    # --- loading and closing ---

    def test_a_model_loads_again_after_it_was_closed(
        self,
        adapter: Adapter,
        model: ModelSpec,
        context: Callable[..., TransitionContext],
        engine: BatchEngine,
        asking: Asking,
        texts: Sequence[str],
    ) -> None:
        again = adapter.load(model, context(), Events())
        assert isinstance(again, BatchEngine)
        assert again is not engine
        assert_same(asking.run(again, texts), asking.run(engine, texts))
        again.close(context())
        assert any(nbytes is None or nbytes > 0 for nbytes in engine.memory().devices.values())

    # --- inference ---

    def test_one_finite_output_an_item(self, engine: BatchEngine, asking: Asking, texts: Sequence[str]) -> None:
        known = engine.capabilities
        for task in tasks_of(engine):
            outputs = asking.run(engine, texts, task)
            assert len(outputs) == len(texts)
            for text, output in zip(texts, outputs, strict=True):
                assert_sound(output, task, known, text, known.outputs if task is Task.ENCODE else ())

    def test_each_output_comes_alone_as_it_does_with_the_others(
        self, engine: BatchEngine, asking: Asking, texts: Sequence[str], tolerance: float
    ) -> None:
        known = engine.capabilities
        if Task.ENCODE not in tasks_of(engine) or len(known.outputs) < 2:
            pytest.skip("the engine has one output")
        together = asking.run(engine, texts, Task.ENCODE)
        for name in known.outputs:
            request = BatchRequest(
                Task.ENCODE, [Item(text=text) for text in texts], RequestParams(output_types=(name,))
            )
            for text, whole, output in zip(texts, together, engine.run(engine.prepare(request)), strict=True):
                assert_sound(output, Task.ENCODE, known, text, (name,))
                assert difference(only(whole, name), only(output, name)) <= tolerance

    def test_outputs_keep_the_order_of_the_items(
        self, engine: BatchEngine, asking: Asking, texts: Sequence[str], tolerance: float
    ) -> None:
        forward = asking.run(engine, texts)
        # Turned by one, not reversed: an engine that reverses every batch would pass that.
        turned = asking.run(engine, [*texts[1:], texts[0]])
        for there, back in zip(forward, [turned[-1], *turned[:-1]], strict=True):
            assert difference(there, back) <= tolerance
        apart = min(difference(a, b) for i, a in enumerate(forward) for b in forward[:i])
        assert apart > tolerance, "the texts must be told apart for this test to mean anything"

    def test_an_answer_does_not_depend_on_the_batch(
        self, engine: BatchEngine, asking: Asking, texts: Sequence[str], tolerance: float
    ) -> None:
        together = asking.run(engine, texts)
        for text, output in zip(texts, together, strict=True):
            alone = asking.run(engine, [text])[0]
            assert alone.tokens == output.tokens
            assert difference(alone, output) <= tolerance

    def test_items_of_different_requests_share_a_batch(
        self, engine: BatchEngine, asking: Asking, texts: Sequence[str], tolerance: float
    ) -> None:
        """Requests for each of the engine's tasks, at that."""
        tasks = tasks_of(engine)
        requests = [asking.request(engine, [Item(text=text)], task=task) for text in texts for task in tasks]
        mixed = engine.run(list(chain.from_iterable(engine.prepare(request) for request in requests)))
        alone = [asking.run(engine, texts, task) for task in tasks]
        for output, expected in zip(mixed, chain.from_iterable(zip(*alone, strict=True)), strict=True):
            assert difference(output, expected) <= tolerance

    def test_prepare_is_safe_on_many_threads_while_a_batch_runs(
        self, engine: BatchEngine, asking: Asking, texts: Sequence[str], tolerance: float
    ) -> None:
        """Each thread with texts of its own, and what they prepared is run to see that it is theirs."""
        requests = [asking.request(engine, [Item(text=text)]) for text in texts]
        alone = [asking.run(engine, [text])[0] for text in texts]
        whole = asking.request(engine, [Item(text=text) for text in texts])
        runs: list[int] = []

        def run() -> Sequence[Prepared]:
            runs.extend(len(engine.run(engine.prepare(whole))) for _ in range(3))
            return ()

        prepare: list[Callable[[], Sequence[Prepared]]] = [
            partial(engine.prepare, requests[number % len(texts)]) for number in range(32)
        ]
        found = [one for prepared in all_at_once([run, *prepare], threads=8) for one in prepared]
        assert runs == [len(texts)] * 3
        for number, output in enumerate(engine.run(found)):
            expected = alone[number % len(texts)]
            assert output.tokens == expected.tokens
            assert difference(output, expected) <= tolerance

    # --- errors ---

    def test_an_item_without_content_is_invalid_and_named(self, engine: BatchEngine, asking: Asking) -> None:
        for task in tasks_of(engine):
            with pytest.raises(InvalidInput) as caught:
                engine.prepare(asking.request(engine, [Item(text="fine"), Item()], task=task))
            assert caught.value.index == 1

    def test_a_text_that_is_too_long_is_refused_or_truncated_as_asked(
        self, engine: BatchEngine, asking: Asking
    ) -> None:
        limit = engine.capabilities.max_sequence_length
        if limit is None:
            pytest.skip("the model has no longest text")
        items = [Item(text="fine"), Item(text="word " * (limit + 8))]
        for task in tasks_of(engine):
            with pytest.raises(InputTooLong) as caught:
                engine.prepare(asking.request(engine, items, RequestParams(truncate=False), task))
            assert caught.value.index == 1
            said, allowed = caught.value.tokens, caught.value.limit
            assert said is not None, "InputTooLong must say how many tokens the text has"
            assert allowed is not None, "InputTooLong must say how many tokens the model takes"
            assert allowed <= limit < said
            prepared = engine.prepare(asking.request(engine, items, RequestParams(truncate=True), task))
            assert 0 < prepared[1].tokens <= limit

    def test_what_the_model_cannot_do_is_unsupported(self, engine: BatchEngine) -> None:
        if Task.ENCODE not in tasks_of(engine):
            pytest.skip("the core asks for tasks that the engine has only")
        with pytest.raises(Unsupported):
            engine.prepare(BatchRequest(Task.ENCODE, [Item(text="fine")], RequestParams(output_types=("smell",))))

    # --- the wake check, park and wake ---

    def test_a_woken_engine_answers_bit_for_bit_as_before(
        self,
        fresh: BatchEngine,
        plugin: Any,
        asking: Asking,
        texts: Sequence[str],
        context: Callable[..., TransitionContext],
    ) -> None:
        promised = parkable(plugin, fresh)
        before, held = asking.run(fresh, texts), fresh.memory().devices
        for _ in range(2):
            assert park(plugin, fresh, context()).host_bytes <= promised
            assert isinstance(call_hook(plugin, "restore_from_host", engine=fresh, ctx=context()), HostResidue)
            assert_same(asking.run(fresh, texts), before)
            assert fresh.memory().devices == held

    def test_parking_twice_and_waking_twice_change_nothing(
        self,
        fresh: BatchEngine,
        plugin: Any,
        asking: Asking,
        texts: Sequence[str],
        context: Callable[..., TransitionContext],
    ) -> None:
        parkable(plugin, fresh)
        before = asking.run(fresh, texts)
        assert park(plugin, fresh, context()) == park(plugin, fresh, context())
        for _ in range(2):
            assert isinstance(call_hook(plugin, "restore_from_host", engine=fresh, ctx=context()), HostResidue)
        assert_same(asking.run(fresh, texts), before)

    def test_a_backup_can_be_dropped_once(
        self,
        fresh: BatchEngine,
        plugin: Any,
        asking: Asking,
        texts: Sequence[str],
        context: Callable[..., TransitionContext],
    ) -> None:
        parkable(plugin, fresh)
        before = asking.run(fresh, texts)
        park(plugin, fresh, context())
        residue = call_hook(plugin, "restore_from_host", engine=fresh, ctx=context())
        if residue.droppable:
            assert fresh.drop_backup() == residue.host_bytes > 0
        assert fresh.drop_backup() == 0
        park(plugin, fresh, context())
        call_hook(plugin, "restore_from_host", engine=fresh, ctx=context())
        assert_same(asking.run(fresh, texts), before)
