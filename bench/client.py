"""One HTTP client with one connection, for measures in which the server does more for a request than to answer it."""

from __future__ import annotations

import http
import http.client
import json
import re
import time
from typing import Any

from attrs import field, frozen
from contestants import Server

__all__ = ["Answer", "Client", "metric"]

TIMEOUT_S = 120.0


@frozen
class Answer:
    """Milliseconds as the client saw them, and the parts that the server told; ``status`` 0: no answer at all."""

    ms: float
    status: int
    timing: dict[str, float] = field(factory=dict)


class Client:
    """Sends one request after the other."""

    def __init__(self, server: Server) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=TIMEOUT_S)

    def encode(self, model: str, text: str) -> Answer:
        """Encode one text over the native route."""
        body = json.dumps({"items": [{"text": text}]}).encode()
        began = time.perf_counter()
        try:
            status, answer = self._ask("POST", f"/v1/encode/{model}", body)
        except (OSError, http.client.HTTPException):
            self.close()  # the next request opens another connection
            return Answer((time.perf_counter() - began) * 1e3, 0)
        took = (time.perf_counter() - began) * 1e3
        return Answer(took, status, json.loads(answer)["timing"] if status == http.HTTPStatus.OK else {})

    def act(self, model: str, action: str) -> None:
        """Load, unload, park or wake a model, and wait for it. Raises RuntimeError if that is refused."""
        status, answer = self._ask("POST", f"/v1/admin/models/{model}/{action}", b"{}")
        if status != http.HTTPStatus.OK:
            raise RuntimeError(f"{action} {model}: {answer.decode(errors='replace')}")

    def leave(self, model: str) -> None:
        """Unload a model, if it is configured. Raises RuntimeError if that is refused."""
        status, answer = self._ask("POST", f"/v1/admin/models/{model}/unload", b"{}")
        if status not in (http.HTTPStatus.OK, http.HTTPStatus.NOT_FOUND):
            raise RuntimeError(f"unload {model}: {answer.decode(errors='replace')}")

    def status(self) -> dict[str, Any]:
        """The server's status: accounts, host tier, models."""
        return dict(json.loads(self._ask("GET", "/v1/status")[1]))

    def metrics(self) -> str:
        """The server's metrics, as Prometheus reads them."""
        return self._ask("GET", "/metrics")[1].decode()

    def close(self) -> None:
        self._connection.close()

    def _ask(self, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        self._connection.request(method, path, body, {"Content-Type": "application/json"} if body else {})
        answer = self._connection.getresponse()
        return answer.status, answer.read()


def metric(text: str, name: str) -> float:
    """The sum of a metric over all its labels."""
    return sum(float(value) for value in re.findall(rf"^{name}(?:\{{[^}}]*\}})? (\S+)$", text, re.MULTILINE))
