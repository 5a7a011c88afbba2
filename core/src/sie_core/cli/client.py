"""The commands' side of the HTTP API: one small client whose every failure is a CommandError with advice."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, Any
from urllib.parse import quote, urlsplit

from attrs import frozen
from cyclopts import Parameter

from sie_core.cli.errors import CommandError, Exit
from sie_core.cli.quick_httpx import httpx

__all__ = ["Client", "Remote"]

_LOOPBACK = ("127.", "localhost", "[::1]", "::1")


@Parameter(name="*")
@frozen
class Remote:
    """Options of every command that talks to a server."""

    url: Annotated[str, Parameter(metavar="URL", env_var="SIE_BASE_URL", help="Where the server is.")] = (
        "http://127.0.0.1:8080"
    )
    json: Annotated[bool, Parameter(negative="", show_default=False, help="Print JSON instead of a table.")] = False


class Client:
    """Talks to one server. Close it, or use it as a context manager."""

    def __init__(self, remote: Remote, *, timeout_s: float = 10.0) -> None:
        self.url = _checked(remote.url)
        key = os.environ.get("SIE_API_KEY", "").strip()
        headers = {"Accept": "application/json"}
        if key:
            headers["Authorization"] = f"Bearer {key}"
        host = urlsplit(self.url).hostname or ""
        try:
            # A proxy from the environment is for the world outside; it would only lose what is said to this machine.
            self._http = httpx.Client(
                base_url=self.url,
                headers=headers,
                timeout=timeout_s,
                trust_env=not host.startswith(_LOOPBACK),
                verify=self.url.startswith("https:"),  # reading the certificates takes time, too
            )
        except (UnicodeEncodeError, ValueError) as error:
            raise CommandError(
                "SIE_API_KEY holds characters that no HTTP header may have", exit_code=Exit.USAGE, code="USAGE"
            ) from error

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc: object) -> None:
        self._http.close()

    def get(self, path: str) -> dict[str, Any]:
        """GET a JSON object. Raises CommandError."""
        return self.call("GET", path)

    def post(
        self, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float | None = None
    ) -> dict[str, Any]:
        """POST a JSON object and read one. Raises CommandError; ``details['status']`` is the HTTP status."""
        return self.call("POST", path, body if body is not None else {}, timeout_s=timeout_s)

    def call(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float | None = None
    ) -> dict[str, Any]:
        """One request. Raises CommandError."""
        limit = self._http.timeout if timeout_s is None else httpx.Timeout(timeout_s, connect=10.0)
        try:
            response = self._http.request(method, path, json=body, timeout=limit)
        except httpx.TimeoutException as error:
            raise self._unreachable(f"the server at {self.url} did not answer in time") from error
        except httpx.ConnectError as error:
            raise self._unreachable(f"no server answers at {self.url} ({_reason(error)})") from error
        except httpx.TransportError as error:
            raise self._unreachable(f"the connection to {self.url} broke off ({_reason(error)})") from error
        except UnicodeEncodeError as error:
            raise CommandError("the text is no valid Unicode", exit_code=Exit.USAGE, code="INVALID_INPUT") from error
        return self._read(response)

    def _read(self, response: httpx.Response) -> dict[str, Any]:
        try:
            body = response.json()
        except ValueError:
            body = None
        if response.is_success and isinstance(body, dict):
            return body
        if not isinstance(body, dict) or not ({"detail", "error"} & body.keys()):
            raise CommandError(
                f"what answers at {self.url} is not an SIE server (HTTP {response.status_code})",
                exit_code=Exit.UNREACHABLE,
                code="UNREACHABLE",
                hint="name the server with --url or SIE_BASE_URL",
            )
        raise _refused(response, body)

    @staticmethod
    def _unreachable(message: str) -> CommandError:
        return CommandError(
            message,
            exit_code=Exit.UNREACHABLE,
            code="UNREACHABLE",
            hint="start one with `sie serve`, or name another with --url or SIE_BASE_URL",
        )


def model_path(prefix: str, model: str, action: str = "") -> str:
    """The path of a model's resource; the slashes of its name stay, all else is quoted."""
    if not model.strip("/"):
        raise CommandError("a model needs a name", exit_code=Exit.USAGE, code="USAGE", hint="`sie models` lists them")
    return f"{prefix}/{quote(model, safe='/')}" + (f"/{action}" if action else "")


def _checked(url: str) -> str:
    text = url.strip()
    text = (text if "://" in text else f"http://{text}").rstrip("/")
    try:
        parts = urlsplit(text)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
        httpx.URL(text)
    except (ValueError, httpx.InvalidURL):
        good = False
    if not good:
        raise CommandError(
            f"{url!r} is no server's address",
            exit_code=Exit.USAGE,
            code="USAGE",
            hint="for example: --url http://127.0.0.1:8080 (or SIE_BASE_URL)",
        )
    return text.removesuffix("/v1")


def _refused(response: httpx.Response, body: Mapping[str, Any]) -> CommandError:
    detail = body.get("detail") or body.get("error")
    if not isinstance(detail, dict):
        detail = {"message": str(detail)}
    code = str(detail.get("code") or "FAILED")
    details: dict[str, Any] = {"status": response.status_code}
    hint = ""
    if response.status_code == 401:
        hint = "put the key into SIE_API_KEY"
    elif response.status_code == 403:
        hint = "this needs a key with the admin role in SIE_API_KEY"
    elif code == "MODEL_NOT_FOUND":
        hint = "`sie models` lists those that are"
    retry = response.headers.get("retry-after", "")
    if retry.isdigit():
        details["retry_after_s"] = int(retry)
        hint = hint or f"worth another try in {retry} s"
    message = str(detail.get("message") or response.reason_phrase)
    if detail.get("details"):
        message += f"\n{detail['details']}"
    return CommandError(message, code=code, hint=hint, details=details)


def _reason(error: Exception) -> str:
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__cause__ or cause.__context__
    return str(error) or type(error).__name__
