"""Free ports, each given out once in this process for as long as its engine lives."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterable

__all__ = ["give_back", "is_free", "take_ports"]

_lock = threading.Lock()
_taken: set[int] = set()


def take_ports(count: int) -> tuple[int, ...]:
    """Ports that nobody listens on, on loopback or elsewhere, and that no other engine of this process was given."""
    held: list[socket.socket] = []
    found: list[int] = []
    with _lock:
        try:
            while len(found) < count:
                held.append(socket.socket())
                held[-1].bind(("", 0))
                port = held[-1].getsockname()[1]
                if port not in _taken:
                    found.append(port)
        finally:
            for each in held:
                each.close()
        _taken.update(found)
    return tuple(found)


def give_back(ports: Iterable[int]) -> None:
    with _lock:
        _taken.difference_update(ports)


def is_free(port: int) -> bool:
    """Whether the port can be bound now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
