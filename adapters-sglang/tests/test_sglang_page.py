"""What ``docs/sglang.md`` says, followed with the real SGLang: its files, its configuration, its program."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from sie_adapters_sglang._ports import take_ports

PAGE = Path(__file__).resolve().parents[2] / "docs" / "sglang.md"
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
PYTHON = "engines/sglang/bin/python"
ADDRESS = "http://127.0.0.1:8080"


def follow(folder: Path, python: str) -> None:
    """Save the files of the page, and make its model. The environment is only read: what goes into it lies beside."""
    for language, text in BLOCKS:
        if language == "python":
            name = re.match(r"# (\w+\.py)\n", text)
            assert name, text
            (folder / name[1]).write_text(text, encoding="utf-8")
    started = next(re.findall(r"^echo '(.*)' >", text, re.MULTILINE) for _, text in BLOCKS if "echo" in text)
    (folder / "sitecustomize.py").write_text("\n".join(started), encoding="utf-8")
    made = next(line for _, text in BLOCKS for line in text.splitlines() if line.startswith(f"{PYTHON} "))
    env = {**os.environ, "PYTHONPATH": str(folder)}
    subprocess.run([python, *made.split()[1:]], cwd=folder, env=env, check=True, capture_output=True, timeout=120)


def configuration(folder: Path, real: Any) -> dict[str, Any]:
    """The page's, with the interpreter of the tests; an older release than the page's wants more said."""
    config = dict(yaml.safe_load(next(text for language, text in BLOCKS if language == "yaml")))
    options = config["models"][0]["options"]
    assert options["python"] == PYTHON
    path = [str(folder)]
    if real.old:
        path.append(str(Path(__file__).parent / "support" / "shims" / "v0510"))
        options |= {"dtype": "float32", "grammar_backend": "none"}
    options["env"] = {"PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}
    options["python"] = real.python
    return config


def wait_ready(process: subprocess.Popen[bytes], url: str) -> None:
    until = time.monotonic() + 60
    while time.monotonic() < until:
        assert process.poll() is None
        try:
            if httpx.get(f"{url}/readyz", trust_env=False, timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            os.sched_yield()
    raise AssertionError("the server is not ready")


@pytest.mark.slow
def test_the_page_leads_to_an_answer(real: Any, tmp_path: Path) -> None:
    pytest.importorskip("openai")
    follow(tmp_path, real.python)
    (tmp_path / "sie.yaml").write_text(json.dumps(configuration(tmp_path, real)), encoding="utf-8")
    (port,) = take_ports(1)
    url = f"http://127.0.0.1:{port}"
    shutil.rmtree(tmp_path / "__pycache__", ignore_errors=True)
    # `-P`: the page's files for the engine's environment lie here too, and are none of the server's.
    command = [sys.executable, "-P", "-m", "sie_core", "serve", "--config", "sie.yaml", "--port", str(port)]
    with (tmp_path / "server.txt").open("wb") as log:
        process = subprocess.Popen(command, cwd=tmp_path, stdout=log, stderr=subprocess.STDOUT)
    try:
        wait_ready(process, url)
        program = (tmp_path / "chat.py").read_text(encoding="utf-8")
        (tmp_path / "chat.py").write_text(program.replace(ADDRESS, url), encoding="utf-8")
        done = subprocess.run(
            [sys.executable, "chat.py"], cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False
        )
    finally:
        process.terminate()
        process.wait(60)
    log_text = (tmp_path / "server.txt").read_text(encoding="utf-8", errors="replace")
    assert done.returncode == 0, done.stderr + log_text
    assert re.search(r"^whole: '.*' (length|stop)$", done.stdout, re.MULTILINE), done.stdout
    assert re.search(r"^piece: .* (length|stop)$", done.stdout, re.MULTILINE), done.stdout
