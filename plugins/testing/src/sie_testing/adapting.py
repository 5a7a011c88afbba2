"""The tests that every engine has to pass that takes LoRA adapters at run time, whatever it answers::

from sie_testing import LoraConformance

class TestMyLoras(LoraConformance):
    @pytest.fixture
    def adapter(self): return MyAdapter()

    @pytest.fixture
    def model(self): return ModelSpec("m", "my-adapter", options=MyOptions(max_loras=2), source=...)

    @pytest.fixture
    def plugin(self): return my_package.plugin

    @pytest.fixture
    def sources(self): return ["path:loras/pirate", "path:loras/poet"]
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from sie_core import (
    BatchEngine,
    BatchRequest,
    Engine,
    GenerateRequest,
    Item,
    LoadError,
    LoraEngine,
    RequestParams,
    SieError,
    Task,
    TransitionContext,
)

from sie_testing._lifecycle import park, parkable
from sie_testing._one_loop import OnOneLoop, said, text_of, wake

__all__ = ["LoraConformance"]


class LoraConformance(OnOneLoop):
    """For engines that take LoRA adapters at run time, whatever they answer. Override ``sources`` as well."""

    @pytest.fixture
    def sources(self) -> Sequence[str]:
        """Two adapters that fit the model and change what it answers: ``path:DIR``."""
        raise NotImplementedError("override the fixture `sources`")

    @pytest.fixture
    def bad_sources(self) -> Sequence[str]:
        """Adapters that can't be loaded, or don't fit."""
        return ("path:/there/is/no/such/folder",)

    @pytest.fixture
    def answer(self, engine: Engine) -> Callable[[Engine, str | None], Any]:
        """What an engine says to a fixed input with the adapter of that name, in a form that can be compared."""

        def talks(engine: Any, lora: str | None) -> str:
            body = {**said("chat", "tell me"), "max_tokens": 8, "temperature": 0}
            return text_of(self.play(engine.generate(GenerateRequest("chat", body, lora=lora)))["choices"][0])

        def encodes(engine: Any, lora: str | None) -> bytes:
            request = BatchRequest(Task.ENCODE, [Item(text="tell me")], RequestParams(lora=lora))
            if isinstance(engine, BatchEngine):
                outputs: Sequence[Any] = engine.run(engine.prepare(request))
            else:
                outputs = self.play(engine.encode(request))
            return bytes(outputs[0].dense.tobytes())

        return talks if Task.GENERATE in engine.capabilities.tasks else encodes

    def test_an_adapter_changes_the_answers_that_name_it_and_no_others(
        self, engine: Any, sources: Sequence[str], answer: Callable[..., Any], context: Callable[..., TransitionContext]
    ) -> None:
        assert isinstance(engine, LoraEngine)
        assert engine.max_loras > 0
        plain = answer(engine, None)
        with self._loaded(engine, context, first=sources[0]):
            styled = answer(engine, "first")
            assert styled != plain
            assert answer(engine, None) == plain
            if engine.max_loras > 1:
                with self._loaded(engine, context, second=sources[1]):
                    assert answer(engine, "second") not in (plain, styled)
                    assert answer(engine, "first") == styled
            assert answer(engine, "first") == styled
        assert answer(engine, None) == plain

    def test_one_that_is_not_there_is_an_error(
        self, engine: Any, sources: Sequence[str], answer: Callable[..., Any], context: Callable[..., TransitionContext]
    ) -> None:
        with pytest.raises(SieError):
            answer(engine, "first")
        with self._loaded(engine, context, first=sources[0]):
            answer(engine, "first")
        with pytest.raises(SieError):
            answer(engine, "first")
        engine.lora_unload("first", context())

    def test_as_many_as_it_says_are_there_at_once(
        self, engine: Any, sources: Sequence[str], answer: Callable[..., Any], context: Callable[..., TransitionContext]
    ) -> None:
        wanted = dict(zip(map(str, range(min(engine.max_loras, 8))), itertools.cycle(sources)))
        with self._loaded(engine, context, **wanted):
            answers = {name: answer(engine, name) for name in wanted}
            assert answer(engine, None) not in answers.values()

    def test_what_it_takes_was_reserved_and_is_gone_afterwards(
        self, engine: Any, sources: Sequence[str], context: Callable[..., TransitionContext]
    ) -> None:
        need = engine.lora_reserve("first", sources[0])
        before = dict(engine.memory().devices)
        with self._loaded(engine, context, first=sources[0]):
            for account, held in engine.memory().devices.items():
                known = held is not None and before[account] is not None and not account.startswith("cpu")
                assert not known or held - before[account] <= need.min_bytes
        after = engine.memory().devices
        assert all(account.startswith("cpu") or after[account] == held for account, held in before.items())

    def test_one_that_cant_be_loaded_leaves_nothing_behind(
        self,
        engine: Any,
        sources: Sequence[str],
        bad_sources: Sequence[str],
        answer: Callable[..., Any],
        context: Callable[..., TransitionContext],
    ) -> None:
        plain = answer(engine, None)
        for bad in bad_sources:
            with pytest.raises(LoadError):
                engine.lora_reserve("bad", bad)
                engine.lora_load("bad", bad, context())
            with pytest.raises(SieError):
                answer(engine, "bad")
            assert answer(engine, None) == plain
        with self._loaded(engine, context, bad=sources[0]):
            assert answer(engine, "bad") != plain

    def test_adapters_outlast_a_park(
        self,
        fresh: Any,
        plugin: Any,
        sources: Sequence[str],
        answer: Callable[..., Any],
        context: Callable[..., TransitionContext],
    ) -> None:
        parkable(plugin, fresh)
        with self._loaded(fresh, context, first=sources[0]):
            before = [answer(fresh, name) for name in (None, "first")]
            self.blocking(park, plugin, fresh, context())
            self.blocking(wake, plugin, fresh, context())
            assert [answer(fresh, name) for name in (None, "first")] == before

    @contextlib.contextmanager
    def _loaded(self, engine: Any, context: Callable[..., TransitionContext], **sources: str) -> Iterator[None]:
        with contextlib.ExitStack() as undo:
            for name, source in sources.items():
                engine.lora_load(name, source, context())
                undo.callback(engine.lora_unload, name, context())
            yield
