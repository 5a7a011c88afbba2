"""Requests that schemathesis makes from ``/openapi.json``, right and wrong ones, against a server with fake engines.

No answer is a 500, none has a status, a media type, a header or a field that is not described, and none takes long.
What the schemas allow is accepted (but for what a schema can't say), and what they forbid is refused. More of it:
``SIE_SCHEMATHESIS_EXAMPLES=500 SIE_SCHEMATHESIS_SEED=7 pytest tests/openapi``.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

HERE = Path(__file__).parent
EXAMPLES = os.environ.get("SIE_SCHEMATHESIS_EXAMPLES", "15")
SEED = os.environ.get("SIE_SCHEMATHESIS_SEED", "1")
KEY = "a-key-of-the-operator"
LONGEST_S = "15"


@pytest.fixture(scope="module")
def server(start_server: Callable[..., Any]) -> Any:
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    config = (HERE / "sie.yaml").read_text(encoding="utf-8")
    return start_server(f'server: {{api_keys: ["admin:operator:{digest}"]}}\n{config}')


@pytest.mark.parametrize("phases", ["examples,coverage", "fuzzing", "stateful"])
def test_the_server_is_what_it_says(server: Any, phases: str, tmp_path: Path) -> None:
    command = [
        *(sys.executable, "-m", "schemathesis.cli", "--config-file", str(HERE / "schemathesis.toml")),
        *("run", f"{server.url}/openapi.json", "--phases", phases, "--max-examples", EXAMPLES, "--seed", SEED),
        *("--header", f"Authorization: Bearer {KEY}", "--max-response-time", LONGEST_S, "--no-color"),
    ]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "No issues found" in done.stdout
    assert httpx.get(f"{server.url}/readyz", timeout=10).json() == {"status": "ready", "problems": []}
    assert "Traceback" not in server.output()
