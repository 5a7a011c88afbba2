"""The host tier of a server process: faults, changes and signals in the middle of a park and of a wake."""

from __future__ import annotations

import mmap
import re
import resource
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from sie_testing import expected_vector

MIB = 1024**2
ODD = 64 * MIB + 5
"""Just over a power of two: an allocator that rounds up to the next one would take twice as much."""
CHARGED = -(-ODD // mmap.PAGESIZE) * mmap.PAGESIZE

REAL = f"models: [{{name: a, adapter: fake, options: {{weights_bytes: {ODD}, allocate: true, dims: 4}}}}]\n"
SLOW = "models: [{name: a, adapter: fake, options: {offload_s: 1.0, restore_s: 1.0, dims: 4, salt: %s}}]\n"
TIER = ("--emulate-device", "96MiB", "--host-cache-bytes", "256MiB")


def status(server: Any) -> dict[str, Any]:
    return dict(httpx.get(f"{server.url}/v1/status", timeout=60).json())


def act(server: Any, action: str) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/admin/models/a/{action}", timeout=60)


def values(reply: httpx.Response) -> list[float]:
    assert reply.status_code == 200, reply.text
    return list(reply.json()["items"][0]["dense"]["values"])


def memory(server: Any) -> int:
    return int(psutil.Process(server.process.pid).memory_info().rss)


def host_account(server: Any) -> dict[str, Any]:
    return next(dict(account) for account in status(server)["accounts"] if account["account"] == "host")


def test_status_says_which_wakes_are_checked(server: Callable[..., Any], sie: Callable[..., Any]) -> None:
    """A12: what is checked, and that a model without a probe is not."""
    entry = "{name: %s, adapter: fake, wake_check: %s, options: {probes: %s}}"
    models = ", ".join(entry % of for of in (("bare", "auto", "false"), ("each", "always", "true")))
    one = server(f"models: [{models}]\n", *TIER)
    env = {"SIE_BASE_URL": one.url, "COLUMNS": "200"}
    sie("load", "bare", "each", env=env)
    shown = sie("status", env=env).stdout
    assert re.search(r"^bare +resident .* unchecked$", shown, re.MULTILINE)
    assert re.search(r"^each +resident .* always$", shown, re.MULTILINE)
    assert "bare: wakes unchecked: its engine has no probe." in shown.splitlines()
    assert "each: wakes" not in shown


def test_a_copy_is_charged_for_its_bytes_and_takes_no_more(server: Callable[..., Any]) -> None:
    # Scenario 19.
    one = server(REAL, *TIER)
    values(one.encode())
    before = memory(one)
    assert act(one, "park").status_code == 200
    assert one.model("a")["host_bytes"] == status(one)["host_cache"]["used"] == CHARGED
    assert CHARGED * 0.9 < memory(one) - before < CHARGED * 1.1
    values(one.encode())
    assert status(one)["host_cache"] == {"budget": 256 * MIB, "used": 0, "idle": CHARGED}
    assert act(one, "park").status_code == 200  # into the memory that it had before
    assert status(one)["host_cache"] == {"budget": 256 * MIB, "used": CHARGED, "idle": 0}
    assert memory(one) - before < CHARGED * 1.1


def test_a_copy_that_the_system_has_no_memory_for(server: Callable[..., Any]) -> None:
    """The model unloads, the next request loads it cold, nothing is left behind, and it can be asked why."""
    one = server(REAL, *TIER)
    answer = values(one.encode())
    booked = {name: host_account(one)[name] for name in ("promised", "unrealised")}
    _, hard = resource.prlimit(one.process.pid, resource.RLIMIT_AS)
    size = psutil.Process(one.process.pid).memory_info().vms
    resource.prlimit(one.process.pid, resource.RLIMIT_AS, (size + 24 * MIB, hard))
    refused = act(one, "park")
    resource.prlimit(one.process.pid, resource.RLIMIT_AS, (hard, hard))
    assert refused.status_code == 503
    assert "could not be parked and was unloaded" in refused.text
    assert one.model("a")["residency"] == "unloaded"
    assert {name: host_account(one)[name] for name in booked} == booked
    assert status(one)["host_cache"] == {"budget": 256 * MIB, "used": 0, "idle": 0}
    decisions = httpx.get(f"{one.url}/v1/admin/decisions?model=a").json()["decisions"]
    why = next(decision["reason"] for decision in decisions if decision["action"] == "park failed")
    assert why == "the host arena: 64.0 MiB of RAM can't be had: [Errno 12] Cannot allocate memory"
    assert values(one.encode()) == answer  # loaded cold
    assert act(one, "park").status_code == 200
    assert values(one.encode()) == answer  # woken
    one.terminate()
    assert one.process.wait(30) == 0


@pytest.mark.parametrize(
    ("size", "why"), [("100TiB", "in all, and 100.0 TiB are asked for"), ("8EiB", "is more bytes than any machine has")]
)
def test_a_budget_above_physical_memory_is_refused_at_start(sie: Callable[..., Any], size: str, why: str) -> None:
    refused = sie("serve", "--port", 0, "--emulate-device", "16MiB", "--host-cache-bytes", size)
    assert refused.returncode == 2
    assert "--host-cache-bytes: memory.host_cache_bytes: " in refused.stderr
    assert why in refused.stderr


def test_a_changed_configuration_in_the_middle_of_a_park_and_of_a_wake(
    server: Callable[..., Any], tmp_path: Path, until: Callable[..., Any]
) -> None:
    one = server(SLOW % "first", *TIER)

    def change(salt: str) -> None:
        fresh = tmp_path / "fresh.yaml"
        fresh.write_text(SLOW % salt, encoding="utf-8")
        fresh.rename(tmp_path / "sie.yaml")
        one.process.send_signal(signal.SIGHUP)

    def answers(salt: str) -> None:
        found = values(one.encode())
        assert found == pytest.approx(expected_vector("x", 4, salt=salt).tolist())

    answers("first")
    with ThreadPoolExecutor(2) as pool:
        parking = pool.submit(act, one, "park")
        until(lambda: one.model("a")["residency"] == "parking")
        epoch = one.model("a")["epoch"]
        change("second")
        until(lambda: one.model("a")["epoch"] > epoch)
        answers("second")
        assert parking.result().status_code in (200, 503)

        assert act(one, "park").status_code == 200
        asking = pool.submit(answers, "third")
        until(lambda: one.model("a")["residency"] == "waking")
        change("third")
        asking.result()
    assert status(one)["host_cache"]["used"] == 0
    assert "Traceback" not in one.text
    one.terminate()
    assert one.process.wait(30) == 0


@pytest.mark.parametrize("moment", ["parking", "waking"])
def test_a_signal_to_end_in_the_middle_of_a_park_and_of_a_wake(
    server: Callable[..., Any], until: Callable[..., Any], moment: str
) -> None:
    one = server(SLOW % "first", *TIER)
    values(one.encode())
    with ThreadPoolExecutor(1) as pool:
        if moment == "parking":
            caller = pool.submit(act, one, "park")
        else:
            assert act(one, "park").status_code == 200
            caller = pool.submit(one.encode)
        until(lambda: one.model("a")["residency"] == moment)
        one.terminate()
        reply = caller.result()
    assert reply.status_code == 503 or (moment == "parking" and reply.status_code == 200)
    assert one.process.wait(30) == 0
    assert "Traceback" not in one.text
    assert "a: unloading -> unloaded" in one.text
