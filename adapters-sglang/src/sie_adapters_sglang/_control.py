"""What the server asks of an engine besides inference: blocking calls, from the engine's own worker thread.

Two rules come from SGLang itself. Flush calls queue up behind each other, so one is let go only when its answer is
there. And ``/server_info`` tells the keys: what it answers is never logged, not even in an error.
"""

from __future__ import annotations

import ssl
import threading
from collections.abc import Mapping
from typing import Any

import httpx
from attrs import frozen
from sie_core import TransitionError

__all__ = ["Control", "Keys", "Usage"]

_CONNECT_S = 5.0
_FLUSH_SLACK_S = 20.0
_NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""Engines speak plain HTTP. What is the default reads the certificates of the world, longer than a start may poll."""


@frozen
class Keys:
    """The engine's two keys: for requests, and for control."""

    api: str
    admin: str


@frozen
class Usage:
    """What the engine says that each of its ranks holds, in bytes, and the tokens that its KV cache has room for."""

    weights: int
    kv_cache: int
    graphs: int
    tokens: int

    @classmethod
    def of(cls, memory: Mapping[str, Any], weights: int = 0) -> Usage | None:
        """Newer releases tell graphs by phase.

        It tells by how much less was free afterwards: less than nothing where somebody else gave back more meanwhile.
        Then the files' ``weights`` count.
        """
        graphs = memory.get("graph") or 0.0
        try:
            held = _bytes(memory["weight"])
            return cls(
                weights=held if held >= 0 else weights,
                kv_cache=max(0, _bytes(memory["kvcache"])),
                graphs=max(0, _bytes(sum(graphs.values()) if isinstance(graphs, dict) else graphs)),
                tokens=int(memory["token_capacity"]),
            )
        except (ArithmeticError, LookupError, TypeError, ValueError):
            return None

    @property
    def total(self) -> int:
        return self.weights + self.kv_cache + self.graphs


class Control:
    """One engine's control endpoints. Every failure is a TransitionError that says which call failed."""

    def __init__(self, url: str, keys: Keys) -> None:
        self._api = httpx.Client(base_url=url, headers=_bearer(keys.api), timeout=30.0, trust_env=False, verify=_NO_TLS)
        self._admin = httpx.Client(
            base_url=url, headers=_bearer(keys.admin), timeout=30.0, trust_env=False, verify=_NO_TLS
        )
        self._flushing = threading.Lock()

    def close(self) -> None:
        self._api.close()
        self._admin.close()

    def healthy(self, timeout_s: float = 30.0) -> bool:
        """Whether it generates a token. Takes a second or more; ``False`` also means starting, or much to do."""
        try:
            return self._api.get("/health", timeout=httpx.Timeout(timeout_s, connect=_CONNECT_S)).status_code == 200
        except httpx.TransportError:
            return False

    def memory_usage(self) -> Mapping[str, Any] | None:
        """What it says that each of its ranks holds; ``None``: it does not say."""
        try:
            told = self._api.get("/server_info", timeout=30.0)
            told.raise_for_status()
            memory = told.json()["internal_states"][0]["memory_usage"]
        except (httpx.HTTPError, LookupError, TypeError, ValueError):
            return None
        return memory if isinstance(memory, dict) else None

    def busy(self) -> int | None:
        """Requests that run or wait; ``None``: it does not say."""
        try:
            loads = self._api.get("/v1/loads", params={"include": "core"}, timeout=30.0).json()["loads"]
            return sum(int(load["num_running_reqs"]) + int(load["num_waiting_reqs"]) for load in loads)
        except (httpx.HTTPError, LookupError, TypeError, ValueError):
            return None

    def flush(self, wait_s: float) -> bool:
        """Wait until nothing runs, and empty the cache. False: it was busy all that time. Safe to repeat."""
        with self._flushing:
            for attempt in (1, 2):
                answer = self._post("/flush_cache", params={"timeout": wait_s}, timeout=wait_s + _FLUSH_SLACK_S)
                if answer.status_code in (200, 400):
                    return answer.status_code == 200
                if attempt == 2:
                    raise TransitionError(f"/flush_cache of the engine answered {answer.status_code}")
        raise AssertionError("the loop returns or raises")

    def abort_all(self) -> None:
        """Ask it to end every request; they end some time later."""
        self._expect("/abort_request", {"abort_all": True}, timeout=30.0)

    def release(self, timeout_s: float) -> None:
        """Give the device memory back. Never repeated: a second release ends the engine."""
        self._expect("/release_memory_occupation", {}, timeout=timeout_s)

    def resume(self, timeout_s: float) -> None:
        """Take the device memory again. Never repeated, and only after a release."""
        self._expect("/resume_memory_occupation", {}, timeout=timeout_s)

    def ask(self, path: str, body: dict[str, Any], timeout_s: float = 60.0) -> Any:
        """One small inference, for a probe; ``None``: no answer. Never while the engine is parked."""
        try:
            answer = self._api.post(path, json=body, timeout=timeout_s)
            return answer.json() if answer.status_code == 200 else None
        except (httpx.HTTPError, ValueError):
            return None

    def call(self, path: str, body: dict[str, Any], timeout_s: float) -> httpx.Response:
        """Another control call. Raises TransitionError when no answer comes."""
        return self._post(path, json=body, timeout=timeout_s)

    def _expect(self, path: str, body: dict[str, Any], timeout: float) -> None:
        answer = self._post(path, json=body, timeout=timeout)
        if answer.status_code != 200:
            raise TransitionError(f"{path} of the engine answered {answer.status_code}")

    def _post(self, path: str, *, timeout: float, **settings: Any) -> httpx.Response:
        limits = httpx.Timeout(max(0.1, timeout), connect=_CONNECT_S)
        try:
            return self._admin.post(path, timeout=limits, **settings)
        except httpx.TransportError as error:
            raise TransitionError(f"{path} of the engine failed: {type(error).__name__} {error}") from error


def _bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}", "Connection": "close"}


def _bytes(gigabytes: float) -> int:
    """SGLang states sizes in units of 2**30 bytes."""
    return int(float(gigabytes) * (1 << 30))
