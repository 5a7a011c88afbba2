"""LoRA adapters of a running engine. Their room on the device is made at its start, one slot of the largest rank each.

That room is none of the memory that a park gives back, so adapters outlast parks.
"""

from __future__ import annotations

import json
from pathlib import Path

from sie_core import (
    DeviceNeed,
    EngineStartError,
    ModelSourceInvalid,
    TransitionError,
    locate,
    parse_source,
    read_file,
)

from sie_adapters_sglang._checkpoint import MOST_JSON
from sie_adapters_sglang._control import Control
from sie_adapters_sglang._park import Parking

__all__ = ["Loras"]

_LOAD_S = 300.0


class Loras:
    """The adapters that one engine has."""

    def __init__(self, control: Control, parking: Parking, rank: int) -> None:
        self._control, self._parking = control, parking
        self._rank = rank
        self._loaded: set[str] = set()

    def reserve(self, source: str) -> DeviceNeed:
        """Nothing beyond what the engine holds. Raises LoadError for files that can't be used."""
        self._folder(source)
        return DeviceNeed(min_bytes=0)

    def load(self, name: str, source: str) -> None:
        """Raises LoadError, TransitionError."""
        folder = self._folder(source)
        self._check_awake()
        if name in self._loaded:
            self.unload(name)
        body = {"lora_name": name, "lora_path": str(folder)}
        answer = self._control.call("/load_lora_adapter", body, _LOAD_S)
        if answer.status_code == 400:
            raise ModelSourceInvalid(f"{source}: the engine refuses it: {_said(answer.content)}")
        if answer.status_code != 200:
            raise EngineStartError(f"{source}: the engine answered {answer.status_code}: {_said(answer.content)}")
        self._loaded.add(name)

    def unload(self, name: str) -> None:
        """Raises TransitionError."""
        if name not in self._loaded:
            return
        self._check_awake()
        answer = self._control.call("/unload_lora_adapter", {"lora_name": name}, _LOAD_S)
        if answer.status_code != 200:
            raise TransitionError(f"LoRA adapter {name!r} can't be unloaded: {_said(answer.content)}")
        self._loaded.discard(name)

    def _folder(self, source: str) -> Path:
        try:
            folder: Path = locate(parse_source(source))
        except ValueError as error:
            raise ModelSourceInvalid(str(error)) from error
        file = folder / "adapter_config.json"
        try:
            config = json.loads(read_file(file, MOST_JSON))
            rank = int(config["r"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ModelSourceInvalid(f"{source}: {file} says no rank: it is no LoRA adapter") from error
        if rank > self._rank:
            raise ModelSourceInvalid(
                f"{source} has rank {rank}, and the engine was started for {self._rank}: raise max_lora_rank"
            )
        return folder

    def _check_awake(self) -> None:
        if self._parking.parked is not False:
            raise TransitionError("the engine is parked: wake it before its LoRA adapters change")


def _said(body: bytes) -> str:
    try:
        told = json.loads(body)
        return str(told.get("error_message") or told.get("message") or told.get("detail") or told)[:500]
    except (ValueError, AttributeError):
        return body.decode(errors="replace")[:500]
