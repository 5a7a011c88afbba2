"""The measures of generation in tiny: that they run, that an incomplete answer is no figure, that a late end shows."""

from __future__ import annotations

import contextlib
import importlib.metadata
import re
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import generation
import killing
import launched
import pytest
import run
from results import Row
from standin import DONE, FIRST, HEAD, LAST, PIECE, framed
from streams import Wanted, drive

installed = {entry.name for entry in importlib.metadata.entry_points(group="sie")}


@pytest.mark.slow
@pytest.mark.skipif("sglang" not in installed, reason="sie-adapters-sglang is not installed")
def test_every_measure_runs_in_tiny_and_leaves_the_page_alone(capsys: pytest.CaptureFixture[str]) -> None:
    page = run.PAGE.read_text(encoding="utf-8")
    assert run.main(["generation", "--small", "--pairs", "2"]) == 0
    shown = capsys.readouterr().out
    lines = [line.strip() for line in shown.splitlines() if line.startswith("  | ")]
    found = [line.split(" | ")[0].removeprefix("| ") for line in lines]
    assert list(dict.fromkeys(found)) == ["streaming", "relay", "killed"]
    assert "skipped: there is no SGLang here" in shown
    told = next(line for line in lines if "all are told" in line)
    assert re.search(r"3 processes and 1 port: until all are told \| 0\.\d+ s \|  \|  \| ≤ 1 s \| yes \|", told)
    for measure in ("added time to the first token", "pieces a second", "CPU time of the server a piece"):
        assert any(re.search(rf"{measure}.*\| -?\d", line) for line in lines)
    assert run.PAGE.read_text(encoding="utf-8") == page


# --- the load --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def answering(*events: bytes) -> Iterator[int]:
    """The port of a server that answers each connection once, and every event in two halves."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    client, _ = listener.accept()
                    with client:
                        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                        client.recv(65536)
                        client.sendall(HEAD)
                        for event in events:
                            client.sendall(framed(event[:3]))
                            client.sendall(framed(event[3:]))
                        client.sendall(b"0\r\n\r\n")
                        client.recv(1)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(10)


def test_every_piece_counts_once_wherever_it_is_cut() -> None:
    with answering(FIRST, PIECE, PIECE, PIECE, LAST, DONE) as port:
        seen = drive(Wanted(port, streams=1, seconds=1e-6, pieces=3))
    assert (seen.pieces, len(seen.first_ms)) == (5, 1)
    assert seen.rate == 0  # none of them came within no time at all


@pytest.mark.parametrize(
    "events",
    [(FIRST, PIECE, PIECE, LAST, DONE), (FIRST, PIECE, PIECE, PIECE, LAST), (FIRST, PIECE, PIECE, PIECE, PIECE, DONE)],
    ids=["a piece is missing", "no end", "one too many"],
)
def test_an_answer_that_is_not_complete_is_no_figure(events: tuple[bytes, ...]) -> None:
    pieces = 2 if events.count(PIECE) == 4 else 3
    with answering(*events) as port, pytest.raises(RuntimeError, match="at the end"):
        drive(Wanted(port, streams=1, seconds=1e-6, pieces=pieces))


# --- rows ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("told_s", "free_s", "met"), [(1.0, 5.0, [True, True]), (1.1, 5.1, [False, False])])
def test_an_engine_that_outlives_its_server_shows(
    monkeypatch: pytest.MonkeyPatch, told_s: float, free_s: float, met: list[bool]
) -> None:
    @contextlib.contextmanager
    def serving(**_: Any) -> Iterator[SimpleNamespace]:
        yield SimpleNamespace(version="0.5.20")

    monkeypatch.setattr(launched, "serving", serving)
    monkeypatch.setattr(killing, "kill", lambda serving: killing.End(told_s, free_s, free_s, processes=3, ports=2))
    rows = generation.killed(SimpleNamespace(sglang=None))  # type: ignore[arg-type]
    assert [row.met for row in rows if row.wanted] == met


def test_what_was_skipped_leaves_the_figures_of_an_earlier_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- measured: generation, start -->\n<!-- measured: generation, end -->\n", encoding="utf-8")
    monkeypatch.setattr(run, "PAGE", page)
    rows = [Row("an idle engine", "1%", "")]
    for found in (rows, []):
        monkeypatch.setattr(run, "PARTS", {"generation": {"idle": lambda bench, found=found: found}})
        assert run.main([]) == 0
        assert "| idle | an idle engine | 1% |" in page.read_text(encoding="utf-8")
