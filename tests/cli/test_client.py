"""The commands that talk to a server, against a real one with made-up models."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import pty
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

Sie = Callable[..., Any]
SCRIPT = Path(sys.executable).with_name("sie")


@pytest.fixture
def ask(sie: Sie, fake_server: Any) -> Sie:
    """A client command against the server with made-up models."""

    def run(*arguments: object, **options: Any) -> Any:
        return sie(*arguments, **{**options, "env": {"SIE_BASE_URL": fake_server.url, **options.get("env", {})}})

    return run


def test_models_and_their_failures(ask: Sie) -> None:
    done = ask("models")
    assert done.returncode == 0
    assert re.search(r"^NAME +STATE +INPUTS", done.stdout)
    assert re.search(r"^team/slow +\w+", done.stdout, re.MULTILINE)
    assert re.search(r"^nobody: .*no-such-adapter.*fake.*not tried again", done.stdout, re.MULTILINE)
    listed = json.loads(ask("models", "--json").stdout)
    assert [row["name"] for row in listed] == ["fast", "team/slow", "gone", "nobody", "free-size"]


def test_models_tell_how_an_engine_died(sie: Sie, start_server: Callable[..., Any]) -> None:
    server = start_server("models: [{name: frail, adapter: fake, options: {die_after: 0}}]\n")
    url = {"SIE_BASE_URL": server.url}
    for died in ("(its engine died)", "(its engine died 2 times in a row)"):
        asked = httpx.post(f"{server.url}/v1/embeddings", json={"model": "frail", "input": "hello"}, trust_env=False)
        assert asked.status_code == 500
        told = sie("models", env=url)
        assert "frail: INFERENCE_ERROR: " in told.stdout
        assert died in told.stdout
        assert told.returncode == 0


def test_load_shows_how_far_it_is_and_ends_when_resident(ask: Sie) -> None:
    ask("unload", "team/slow")
    done = ask("load", "team/slow")
    assert done.returncode == 0
    assert re.search(r"^team/slow: loading( 0% reading made-up weights)?$", done.stderr, re.MULTILINE)
    assert re.fullmatch(r"team/slow: resident on cpu, .* MiB, after \d+\.\d s\n", done.stdout)
    assert re.search(r"^team/slow +resident +fake +cpu", ask("ps").stdout, re.MULTILINE)
    assert ask("unload", "team/slow").stdout == "team/slow: unloaded\n"
    assert "team/slow" not in ask("ps").stdout


def test_parking_without_a_host_tier_says_what_switches_it_on(ask: Sie) -> None:
    ask("load", "fast")
    for command in ("park", "wake"):
        done = ask(command, "fast")
        assert done.returncode == 1
        assert "memory.host_cache_bytes" in done.stderr
    assert "Host tier: off" in ask("status").stdout


def test_explain_says_how_it_is_and_why(ask: Sie) -> None:
    ask("load", "fast")
    assert ask("explain", "fast").stdout.startswith("fast is resident on cpu and charged ")
    ask("unload", "fast")
    shown = ask("explain", "fast").stdout
    assert shown.startswith("fast is unloaded.\nIt was unloaded: unload requested.\n")
    assert re.search(r"^That was at \d{4}-\d\d-\d\d ", shown, re.MULTILINE)
    assert json.loads(ask("explain", "gone", "--json").stdout)["residency"] in ("failed", "unloaded")


def test_several_models_at_once_with_json(ask: Sie) -> None:
    rows = json.loads(ask("load", "fast", "free-size", "--json").stdout)
    assert [(row["name"], row["residency"]) for row in rows] == [("fast", "resident"), ("free-size", "resident")]


def test_a_load_that_fails_says_why(ask: Sie) -> None:
    done = ask("load", "gone")
    assert done.returncode == 1
    assert "ModelSourceNotFound" in done.stderr
    error = json.loads(ask("load", "gone", "--json").stdout)["error"]
    assert error["code"] == "MODEL_LOAD_FAILED"
    assert error["status"] == 502


def test_a_load_that_takes_too_long_is_given_up_and_goes_on(ask: Sie, until: Callable[..., Any]) -> None:
    ask("unload", "team/slow")
    done = ask("load", "team/slow", "--timeout", "0.3")
    assert done.returncode == 1
    assert "loading" in done.stderr
    until(lambda: "resident" in ask("ps").stdout, what="the load")


def test_an_unknown_model_is_named_with_what_was_meant(ask: Sie) -> None:
    for command in ("load", "unload", "park", "wake", "pin", "unpin", "explain"):
        done = ask(command, "fats")
        assert done.returncode == 1
        assert "did you mean fast?" in done.stderr


def test_pins_are_set_and_lifted(ask: Sie) -> None:
    assert "pinned" in ask("pin", "fast").stdout
    models = {row["name"]: row for row in json.loads(ask("status", "--json").stdout)["models"]}
    assert models["fast"]["pinned"] is True
    assert "pinned" not in ask("unpin", "fast").stdout


def test_status_shows_accounts_and_models(ask: Sie, fake_server: Any) -> None:
    shown = ask("status").stdout
    assert re.match(rf"SIE \S+ at {fake_server.url}, up \d", shown)
    assert re.search(r"^host +\d", shown, re.MULTILINE)
    assert re.search(r"^fast +\w+", shown, re.MULTILINE)
    body = json.loads(ask("status", "--json").stdout)
    assert {account["account"] for account in body["accounts"]} >= {"host", "cpu"}


def test_decisions_can_be_narrowed(ask: Sie) -> None:
    ask("load", "fast", "free-size")
    ask("unload", "fast", "free-size")
    every = json.loads(ask("decisions", "--json").stdout)
    assert {"fast", "free-size"} <= {one["model"] for one in every}
    some = json.loads(ask("decisions", "--json", "--model", "fast", "--limit", "1").stdout)
    assert [one["model"] for one in some] == ["fast"]
    assert re.search(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d +fast +unload", ask("decisions").stdout, re.MULTILINE)
    assert json.loads(ask("decisions", "--json", "--limit", "0").stdout) == []


# --- encode ----------------------------------------------------------------------------------------


def test_encode_previews_and_prints_whole_vectors(ask: Sie) -> None:
    preview = ask("encode", "fast", "Hello, world", "again")
    assert re.fullmatch(r"(.+  \[([+-]\d\.\d{4}(, )?){4}\]  4 dims, norm 1\.000\n){2}", preview.stdout)
    lines = [json.loads(line) for line in ask("encode", "fast", "Hello, world", "again", "--json").stdout.splitlines()]
    assert [line["text"] for line in lines] == ["Hello, world", "again"]
    assert [len(line["dense"]) for line in lines] == [4, 4]
    assert f"{lines[0]['dense'][0]:+.4f}" in preview.stdout


def test_encode_reads_lines_in_parts_and_keeps_their_order(ask: Sie) -> None:
    texts = [f"line {number} äöü" for number in range(600)]
    done = ask("encode", "fast", "--json", stdin="\n".join(texts))
    assert done.returncode == 0
    assert [json.loads(line)["text"] for line in done.stdout.splitlines()] == texts


def test_queries_are_encoded_as_queries(ask: Sie) -> None:
    plain, query = ask("encode", "fast", "x").stdout, ask("encode", "fast", "x", "--query").stdout
    assert plain != query


def test_dimensions_and_truncation(ask: Sie) -> None:
    assert "3 dims" in ask("encode", "free-size", "a b", "--dimensions", "3").stdout
    refused = ask("encode", "fast", "a b", "--dimensions", "3")
    assert (refused.returncode, refused.stdout) == (1, "")
    long = ask("encode", "free-size", "a b c d e f g")
    assert long.returncode == 1
    assert "7 tokens" in long.stderr
    assert "8 dims" in ask("encode", "free-size", "a b c d e f g", "--truncate").stdout


def test_encode_waits_for_a_model_that_loads(ask: Sie) -> None:
    ask("unload", "team/slow")
    assert "4 dims" in ask("encode", "team/slow", "x").stdout


def test_a_bad_item_fails_and_says_so(ask: Sie) -> None:
    done = ask("encode", "fast", "fine", "")
    assert done.returncode == 1
    assert "empty" in done.stderr


def test_texts_that_are_no_utf8_are_refused(ask: Sie, fake_server: Any) -> None:
    done = subprocess.run(
        [SCRIPT, "encode", "fast", "--url", fake_server.url], input=b"caf\xe9\n", capture_output=True, check=False
    )
    assert done.returncode == 2
    assert b"not valid UTF-8" in done.stderr


# --- endings ---------------------------------------------------------------------------------------


def test_no_server_is_exit_3_with_advice(sie: Sie) -> None:
    done = sie("status", "--url", "127.0.0.1:9")
    assert done.returncode == 3
    assert "no server answers at http://127.0.0.1:9" in done.stderr
    assert "sie serve" in done.stderr
    assert json.loads(sie("ps", "--json", "--url", "127.0.0.1:9").stdout)["error"]["code"] == "UNREACHABLE"


@pytest.fixture
def stranger() -> Iterator[str]:
    """Something else that answers HTTP."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<html>a router's login page</html>")

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_another_server_is_told_apart(sie: Sie, stranger: str) -> None:
    done = sie("models", "--url", stranger)
    assert done.returncode == 3
    assert "is not an SIE server" in done.stderr


def test_a_proxy_of_the_environment_is_not_asked_about_this_machine(ask: Sie) -> None:
    assert ask("models", env={"HTTP_PROXY": "http://127.0.0.1:9", "http_proxy": "http://127.0.0.1:9"}).returncode == 0


def test_the_address_may_end_as_openai_clients_want_it(sie: Sie, fake_server: Any) -> None:
    assert sie("models", "--url", f"{fake_server.url}/v1/").returncode == 0


def test_keys_and_roles(sie: Sie, start_server: Callable[..., Any]) -> None:
    lines = [f"{role}:{role}:{hashlib.sha256(role.encode()).hexdigest()}" for role in ("inference", "admin")]
    config = f"server: {{api_keys: {json.dumps(lines)}}}\nmodels: [{{name: fast, adapter: fake}}]\n"
    server = start_server(config)
    url = {"SIE_BASE_URL": server.url}
    nobody = sie("models", env=url)
    assert nobody.returncode == 1
    assert "SIE_API_KEY" in nobody.stderr
    assert "invalid API key" in sie("models", env={**url, "SIE_API_KEY": "wrong"}).stderr
    assert sie("models", env={**url, "SIE_API_KEY": "inference"}).returncode == 0
    refused = sie("load", "fast", env={**url, "SIE_API_KEY": "inference"})
    assert refused.returncode == 1
    assert "admin role" in refused.stderr
    assert sie("load", "fast", env={**url, "SIE_API_KEY": "admin\n"}).returncode == 0
    assert sie("models", env={**url, "SIE_API_KEY": "schlüssel"}).returncode == 2


def test_a_reader_that_leaves_is_no_error_to_talk_about(fake_server: Any) -> None:
    process = subprocess.Popen(
        [SCRIPT, "encode", "fast", "--json", "--url", fake_server.url],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdin and process.stdout and process.stderr
    process.stdout.close()
    with process.stdin:
        process.stdin.write(b"a text\n" * 300)
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(60) == 1


def test_an_output_that_can_not_be_written_is_said(fake_server: Any) -> None:
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [SCRIPT, "models", "--url", fake_server.url], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 1
    assert "the output can't be written: No space left on device" in done.stderr
    assert "Traceback" not in done.stderr


def test_closed_streams_and_a_poor_locale(fake_server: Any) -> None:
    closed = subprocess.run(
        ["sh", "-c", f'"{SCRIPT}" models --url {fake_server.url} >&- 2>&-'], capture_output=True, check=False
    )
    assert closed.returncode == 0
    env = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    text = "ein Text, so lang, dass er gekürzt wird, und mit ł darin"
    poor = subprocess.run(
        [SCRIPT, "encode", "fast", text, "--url", fake_server.url], capture_output=True, env=env, check=False
    )
    assert poor.returncode == 0
    assert b"\\u2026" in poor.stdout


def test_an_argument_that_is_no_text_is_refused(fake_server: Any) -> None:
    done = subprocess.run(
        [SCRIPT, "encode", "fast", b"caf\xe9", "--url", fake_server.url], capture_output=True, check=False
    )
    assert done.returncode == 2
    assert b"no valid Unicode" in done.stderr


@pytest.mark.parametrize(("extra", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False)])
def test_colours_on_a_terminal_unless_unwanted(fake_server: Any, extra: dict[str, str], coloured: bool) -> None:
    main, terminal = pty.openpty()
    env = {**{k: v for k, v in os.environ.items() if k != "NO_COLOR"}, "TERM": "xterm-256color", **extra}
    process = subprocess.Popen([SCRIPT, "models", "--url", fake_server.url], stdout=terminal, env=env)
    os.close(terminal)
    shown = b""
    try:
        while part := os.read(main, 4096):
            shown += part
    except OSError:  # how Linux says that the other side closed
        pass
    os.close(main)
    assert process.wait(60) == 0
    assert b"fast" in shown
    assert (b"\x1b[3" in shown) is coloured
