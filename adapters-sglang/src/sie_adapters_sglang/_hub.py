"""Models on the hub, fetched by the client that comes with SGLang, in SGLang's own environment."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from attrs import frozen
from sie_core import (
    EngineStartError,
    GatedModel,
    LoadError,
    ModelSourceNotFound,
    Source,
    TransitionCancelled,
    TransitionContext,
)

__all__ = ["HubFiles", "fetch"]

Want = Literal["cached", "about", "all"]
"""``cached``: only what is on this machine; ``about``: all but the weights, and how large those are; ``all``."""

_FETCH = r"""
import json, os, sys, threading
threading.Thread(target=lambda: (os.read(0, 1), os._exit(1)), daemon=True).start()  # ends with the server
repo, revision, want = sys.argv[1:]
small = ["*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "*.py"]
weights = ["*.safetensors"]
try:
    from huggingface_hub import HfApi, snapshot_download
    folder = snapshot_download(
        repo, revision=revision or None, local_files_only=want == "cached",
        allow_patterns=small if want == "about" else small + weights, ignore_patterns=["original/*", "onnx/*"],
    )
    size = 0
    if want == "about":
        listed = HfApi().model_info(repo, revision=revision or None, files_metadata=True).siblings
        size = sum(each.size or 0 for each in listed
                   if each.rfilename.endswith(".safetensors") and "/" not in each.rfilename)
    print(json.dumps({"folder": folder, "weights": size}))
except Exception as error:
    print(json.dumps({"kinds": [kind.__name__ for kind in type(error).__mro__], "text": str(error)}))
"""
_QUICK_S = 25.0
_POLL_S = 0.2
_NOT_THERE = {"RevisionNotFoundError", "RepositoryNotFoundError", "HFValidationError"}
_NOT_HERE = {"LocalEntryNotFoundError", "OfflineModeIsEnabled"}


@frozen
class HubFiles:
    """A model's folder on this machine. ``absent``: bytes of its weights, where they are not fetched yet."""

    folder: Path
    absent: int = 0


def fetch(
    python: str, env: Mapping[str, str], source: Source, want: Want, ctx: TransitionContext | None = None
) -> HubFiles:
    """Fetch what is wanted. ``ctx``: may call it off.

    Raises:
        GatedModel, ModelSourceNotFound: for good.
        EngineStartError: the hub could not be reached; a later try may succeed.
        TransitionCancelled
    """
    whole = {**os.environ, **env}
    command = [python, "-c", _FETCH, source.location, source.revision or "", want]
    quiet = subprocess.DEVNULL
    with (
        _ours() as alive,
        subprocess.Popen(command, env=whole, stdin=alive, stdout=subprocess.PIPE, stderr=quiet, text=True) as child,
    ):
        until = ctx.deadline if ctx is not None else time.monotonic() + _QUICK_S
        while True:
            try:
                said, _ = child.communicate(timeout=_POLL_S)
                break
            except subprocess.TimeoutExpired:
                if ctx is not None and ctx.cancelled.is_set():
                    child.kill()
                    raise TransitionCancelled("the download was called off") from None
                if time.monotonic() > until:
                    child.kill()
                    raise EngineStartError(f"{source}: the hub does not answer in time") from None
    return _read(source, said, whole)


@contextlib.contextmanager
def _ours() -> Iterator[int]:
    """The end of a pipe to read from: it ends when this process does, however that comes about."""
    reading, writing = os.pipe()
    try:
        yield reading
    finally:
        os.close(reading)
        os.close(writing)


def _read(source: Source, said: str, env: Mapping[str, str]) -> HubFiles:
    try:
        told: dict[str, Any] = json.loads(said.strip().splitlines()[-1])
    except (ValueError, IndexError) as error:
        raise EngineStartError(f"{source}: its download ended without a word") from error
    if "folder" in told:
        return HubFiles(Path(told["folder"]), int(told["weights"]))
    raise _error(source, set(told["kinds"]), str(told["text"]), env)


def _error(source: Source, kinds: set[str], text: str, env: Mapping[str, str]) -> LoadError:
    if "GatedRepoError" in kinds:
        return GatedModel(
            f"{source} is gated: accept its terms on the hub and set HF_TOKEN to a token that may read it"
        )
    if kinds & _NOT_THERE:
        return ModelSourceNotFound(f"{source}: the hub has no such model or revision, or HF_TOKEN may not read it")
    offline = any(env.get(name, "").upper() in {"1", "ON", "YES", "TRUE"} for name in _OFFLINE)
    if kinds & _NOT_HERE and offline:
        return ModelSourceNotFound(f"{source} is not in the local cache, and downloads are off (HF_HUB_OFFLINE)")
    return EngineStartError(f"{source}: the download failed: {text}")


_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
