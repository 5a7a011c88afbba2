"""How a start ends: ready, or an error that says why."""

from __future__ import annotations

import socket
import sys
import threading
import time
from typing import Any

import pytest
from sie_adapters_sglang import _launch, plugin
from sie_adapters_sglang._ports import give_back, take_ports
from sie_adapters_sglang._state import state_folder
from sie_adapters_sglang.adapters import GenerationAdapter
from sie_core import (
    DeviceOutOfMemory,
    EngineStartError,
    LoadError,
    MissingDependency,
    ModelSourceInvalid,
    ModelSourceNotFound,
    ModelSpec,
    NeverFits,
    Source,
    TransitionCancelled,
)


def test_the_end_of_the_log_stands_in_the_error(home: Any, start: Any) -> None:
    with pytest.raises(EngineStartError, match=r"exit code 5(.|\n)*the last words") as caught:
        start(home.model(how={"say": "the last words", "exit": 5}))
    assert "keys *** ***" in caught.value.details
    assert not caught.value.permanent
    assert list(state_folder().iterdir()) == []


def test_an_engine_that_runs_out_of_memory_says_so(home: Any, start: Any) -> None:
    with pytest.raises(DeviceOutOfMemory):
        start(home.model(how={"say": "torch.OutOfMemoryError: CUDA out of memory. Tried", "exit": 1}))


def test_an_engine_that_never_answers(home: Any, start: Any) -> None:
    with pytest.raises(EngineStartError, match="not ready within"):
        start(home.model(how={"start_s": 3600}, start_timeout_s=1.0))


def test_an_engine_that_stands_still(home: Any, start: Any) -> None:
    with pytest.raises(EngineStartError, match=r"said nothing for(.|\n)*weights 100%"):
        start(home.model(how={"start_s": 3600, "silent": True, "say": "weights 100%"}, stall_timeout_s=0.7))


def test_a_slow_start_that_makes_progress_is_waited_for(home: Any, start: Any) -> None:
    engine = start(home.model(how={"start_s": 1.5}, stall_timeout_s=0.7))
    assert engine.pid


def test_nothing_probes_an_engine_once_it_is_ready(home: Any, start: Any, helpers: Any) -> None:
    """A probe is a request: under load it comes late, and on released memory it kills. The process is what counts."""
    engine = start(home.model(how={"start_s": 0.5}))
    engine.memory()
    for _ in range(2):
        plugin.offload_to_host(engine, helpers.context())
        engine.memory()
        plugin.restore_from_host(engine, helpers.context())
    assert helpers.told(engine)["health"] == 1


def test_a_start_that_is_called_off(home: Any, start: Any, helpers: Any) -> None:
    ctx = helpers.context()
    threading.Timer(0.3, ctx.cancelled.set).start()
    begun = time.monotonic()
    with pytest.raises(TransitionCancelled):
        start(home.model(how={"start_s": 3600}), ctx=ctx)
    assert time.monotonic() - begun < 5
    assert list(state_folder().iterdir()) == []


def test_the_cores_deadline_counts_too(home: Any, start: Any, helpers: Any) -> None:
    ctx = helpers.context(deadline=time.monotonic() + 3.0)
    with pytest.raises(EngineStartError, match="not ready"):
        start(home.model(how={"start_s": 3600}), ctx=ctx)
    assert time.monotonic() < ctx.deadline


def test_a_port_that_is_taken_after_it_was_picked(home: Any, start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as thief:
        thief.bind(("127.0.0.1", 0))
        thief.listen()
        stolen = thief.getsockname()[1]
        answers = iter([(stolen, 1)])
        monkeypatch.setattr(_launch, "take_ports", lambda count: next(answers, None) or take_ports(count))
        engine = start(home.model())
    assert not engine.url.endswith(f":{stolen}")


def test_ports_are_given_out_once() -> None:
    ports = [port for _ in range(50) for port in take_ports(2)]
    assert len(set(ports)) == 100
    give_back(ports)


def test_progress_goes_forward(home: Any, start: Any, helpers: Any) -> None:
    seen: list[float] = []
    start(home.model(how={"start_s": 0.6}), ctx=helpers.context(progress=lambda fraction, note: seen.append(fraction)))
    assert seen == sorted(seen)
    assert seen[-1] == 1.0


@pytest.mark.parametrize("version", ["0.5.9", "0.4.1", "0.5.24", "0.6.0", "1.0.0rc1"])
def test_a_version_that_is_not_supported_is_named(home: Any, start: Any, helpers: Any, version: str) -> None:
    model = home.model(version=version)
    with pytest.raises(LoadError, match=version.replace(".", r"\.")) as caught:
        plugin.admission_reserve(model, [helpers.view()])
    assert caught.value.permanent
    assert "0.5.10.post1" in caught.value.message
    with pytest.raises(LoadError, match="not supported"):
        start(model)


def test_no_sglang_is_said(home: Any, helpers: Any) -> None:
    model = home.model(env={"PYTHONPATH": ""})
    with pytest.raises(MissingDependency, match="python"):
        plugin.admission_reserve(model, [helpers.view()])
    model = home.model(python="no-such-python")
    with pytest.raises(MissingDependency, match="no-such-python"):
        plugin.admission_reserve(model, [helpers.view()])


def test_an_interpreter_that_does_not_answer(home: Any, helpers: Any) -> None:
    with pytest.raises(EngineStartError, match="false could not be asked"):
        plugin.admission_reserve(home.model(python="false"), [helpers.view()])


def test_a_folder_that_is_no_model(home: Any, helpers: Any, tmp_path: Any) -> None:
    import attrs

    (tmp_path / "empty").mkdir()
    model = home.model()
    for source, error in (("empty", ModelSourceInvalid), ("gone", ModelSourceNotFound)):
        bad = attrs.evolve(model, source=Source("path", str(tmp_path / source)))
        with pytest.raises(error):
            plugin.admission_reserve(bad, [helpers.view()])
        with pytest.raises(error):
            GenerationAdapter().describe(bad)


def test_more_than_the_device_has(home: Any, helpers: Any) -> None:
    with pytest.raises(NeverFits):
        plugin.admission_reserve(home.model(), [helpers.view("cuda:0", total=1 << 28)])
    assert plugin.admission_reserve(ModelSpec("m", "another"), [helpers.view()]) is None


def test_one_rank_a_device(home: Any, helpers: Any) -> None:
    reserve = plugin.admission_reserve(home.model(tp_size=2), [helpers.view("cuda:0"), helpers.view("cuda:1")])
    assert reserve is not None
    assert len(reserve.ranks) == 2


def test_the_server_needs_no_sglang_of_its_own() -> None:
    import importlib.util

    assert importlib.util.find_spec("sglang") is None
    assert sys.modules.get("torch") is None or "sglang" not in sys.modules
