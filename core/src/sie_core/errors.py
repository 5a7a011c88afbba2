"""Every error that SIE raises on purpose. One root; leaves carry data, not only text.

::

    SieError
    ├── ConfigError                  problems: file, line, column, key path
    ├── PluginError
    │   ├── PluginBroken             failed to import, or a faulty hook
    │   ├── PluginConflict           two distributions offer one name
    │   └── PluginIncompatible       built for another API version
    ├── RequestError                 the caller can mend it; never retried
    │   ├── InvalidInput             index, param
    │   │   ├── InputTooLong         tokens, limit
    │   │   └── Unsupported          what was asked for, what there is
    │   ├── BodyTooLarge             size, limit
    │   ├── ModelNotFound            suggestions
    │   ├── Unauthorized
    │   └── Forbidden
    ├── Unavailable                  retry_after_s; try again later
    │   ├── ModelLoading
    │   ├── LoraLoading
    │   ├── QueueFull
    │   ├── ResourceExhausted
    │   │   └── ReserveOutdated      a load needs other than it was admitted with: it is admitted again
    │   └── ShuttingDown
    ├── DeadlineExceeded             the request's own deadline
    ├── LoadError                    an adapter could not make an engine; permanent or not
    │   ├── ModelSourceNotFound
    │   ├── ModelSourceInvalid       truncated, of another architecture, unreadable
    │   ├── GatedModel
    │   ├── UnsafeSource             pickle weights or remote code, not allowed by the configuration
    │   ├── MissingDependency
    │   ├── MissingAdapter
    │   ├── NeverFits                larger than an empty device
    │   ├── DeviceNotFound           the machine has no such device
    │   └── EngineStartError         the engine did not start; a later try may succeed
    ├── OutOfMemory
    │   ├── DeviceOutOfMemory        account, needed, free
    │   └── HostOutOfMemory
    ├── ModelLoadFailed              what a request sees of a LoadError: error class, permanent, attempts
    ├── InferenceError
    │   ├── NonFiniteOutput          items
    │   └── EngineDied
    ├── TransitionError
    │   ├── HookTimeout              a blocking hook overran its deadline
    │   ├── HookFailed               hook, plugin: it raised what is none of these errors, or its answer can't be used
    │   ├── TransitionCancelled
    │   └── WakeCheckFailed          a woken engine answers differently
    ├── HostMemoryError              path: a limit of the host's memory that can't be read
    └── LedgerError                  a broken rule of the book of bytes: a bug in SIE
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Self

__all__ = [
    "BodyTooLarge",
    "ConfigError",
    "ConfigProblem",
    "DeadlineExceeded",
    "DeviceNotFound",
    "DeviceOutOfMemory",
    "EngineDied",
    "EngineStartError",
    "Forbidden",
    "GatedModel",
    "HookFailed",
    "HookTimeout",
    "HostMemoryError",
    "HostOutOfMemory",
    "InferenceError",
    "InputTooLong",
    "InvalidInput",
    "LedgerError",
    "LoadError",
    "LoraLoading",
    "MissingAdapter",
    "MissingDependency",
    "ModelLoadFailed",
    "ModelLoading",
    "ModelNotFound",
    "ModelSourceInvalid",
    "ModelSourceNotFound",
    "NeverFits",
    "NonFiniteOutput",
    "OutOfMemory",
    "PluginBroken",
    "PluginConflict",
    "PluginError",
    "PluginIncompatible",
    "QueueFull",
    "RequestError",
    "ReserveOutdated",
    "ResourceExhausted",
    "ShuttingDown",
    "SieError",
    "TransitionCancelled",
    "TransitionError",
    "Unauthorized",
    "Unavailable",
    "UnsafeSource",
    "Unsupported",
    "WakeCheckFailed",
]


class SieError(Exception):
    """Root of all errors. ``code`` is the stable, machine-readable name that clients see.

    ``details`` is for those who run the server, and may have many lines: the end of an engine's log.
    """

    code: ClassVar[str] = "INTERNAL_ERROR"
    details: str = ""
    _public: str = ""

    def guarded(self, public: str) -> Self:
        """The error with the message that those may read who don't run the server."""
        self._public = public
        return self

    @property
    def public(self) -> str:
        """The message without what speaks of the inside of the server, such as its paths."""
        return self._public or self.message

    def explained(self, details: str) -> Self:
        """The error with its ``details``."""
        self.details = details
        return self

    def __str__(self) -> str:
        return f"{super().__str__()}\n{self.details}" if self.details else super().__str__()

    @property
    def message(self) -> str:
        """One sentence that says what is wrong and what to do about it."""
        return str(self.args[0]) if self.args else type(self).__name__


# --- configuration ---------------------------------------------------------------------------------


class ConfigProblem:
    """One mistake in a configuration: where it stands and what is wrong.

    ``line`` and ``column`` count from 1; both are ``None`` for a value that came from a flag or the
    environment, which ``file`` then names (``"--port"``, ``"SIE_PORT"``).
    """

    __slots__ = ("column", "file", "line", "message", "path")

    def __init__(
        self, message: str, *, path: str = "", file: str = "", line: int | None = None, column: int | None = None
    ) -> None:
        self.message = message
        self.path = path
        self.file = file
        self.line = line
        self.column = column

    def __str__(self) -> str:
        place = ":".join(str(part) for part in (self.file, self.line, self.column) if part)
        return ": ".join(part for part in (place, self.path, self.message) if part)


class ConfigError(SieError):
    """The configuration can't be used. Holds every problem found, not only the first."""

    code = "CONFIG_ERROR"

    def __init__(self, problems: Sequence[ConfigProblem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


# --- plugins ---------------------------------------------------------------------------------------


class PluginError(SieError):
    """A plugin can't be used. ``plugin`` is the entry point's name."""

    code = "PLUGIN_ERROR"

    def __init__(self, message: str, *, plugin: str = "") -> None:
        self.plugin = plugin
        super().__init__(message)


class PluginBroken(PluginError):
    """It failed to import, or one of its hooks does not match its specification."""


class PluginConflict(PluginError):
    """Two distributions offer the same name."""


class PluginIncompatible(PluginError):
    """It was built for another major version of the plugin API."""


# --- requests --------------------------------------------------------------------------------------


class RequestError(SieError):
    """The request can't be served as it stands; sending it again won't help."""

    code = "INVALID_INPUT"


class InvalidInput(RequestError):
    """``index`` names the offending item of the request, ``param`` the offending field."""

    def __init__(self, message: str, *, index: int | None = None, param: str | None = None) -> None:
        self.index = index
        self.param = param
        super().__init__(message)


class InputTooLong(InvalidInput):
    """An item has more tokens than the model takes, and truncation was not asked for.

    ``tokens`` and ``limit`` (in tokens), where they are given, are what the message says if it is left out.
    """

    code = "INPUT_TOO_LONG"

    def __init__(
        self,
        message: str = "",
        *,
        tokens: int | None = None,
        limit: int | None = None,
        index: int | None = None,
        param: str | None = None,
    ) -> None:
        self.tokens = tokens
        self.limit = limit
        super().__init__(message or _too_long(tokens, limit), index=index, param=param)


def _too_long(tokens: int | None, limit: int | None) -> str:
    has = "is too long for the model" if tokens is None else f"has {tokens} tokens"
    takes = "" if limit is None else f" and the model takes {limit}"
    return f"the text {has}{takes}: shorten it, or pass truncate: true"


class Unsupported(InvalidInput):
    """The model can't do what was asked; ``supported`` lists what it can."""

    def __init__(
        self, message: str, *, supported: Sequence[str] = (), index: int | None = None, param: str | None = None
    ) -> None:
        self.supported = tuple(supported)
        super().__init__(message, index=index, param=param)


class BodyTooLarge(RequestError):
    """The body, or the text of one item, is over its limit. Sizes in bytes."""

    code = "BODY_TOO_LARGE"

    def __init__(self, message: str, *, size: int | None = None, limit: int, index: int | None = None) -> None:
        self.size = size
        self.limit = limit
        self.index = index
        super().__init__(message)


class ModelNotFound(RequestError):
    """No model of that name is configured."""

    code = "MODEL_NOT_FOUND"

    def __init__(self, name: str, *, suggestions: Sequence[str] = ()) -> None:
        self.name = name
        self.suggestions = tuple(suggestions)
        hint = f", did you mean {' or '.join(self.suggestions)}?" if suggestions else "; GET /v1/models lists what is"
        super().__init__(f"model {name!r} is not configured{hint}")


class Unauthorized(RequestError):
    """No key, or one that is not known."""

    code = "UNAUTHORIZED"


class Forbidden(RequestError):
    """The role of the key does not allow this; or a browser asks for a web page or under a name that may not ask."""

    code = "FORBIDDEN"


class Unavailable(SieError):
    """Not now; ``retry_after_s`` (seconds, 1 to 120 on the wire) says when to try again."""

    code = "RESOURCE_EXHAUSTED"

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(message)


class ModelLoading(Unavailable):
    """The model is on its way; the request waited as long as it may."""

    code = "MODEL_LOADING"


class LoraLoading(Unavailable):
    """The LoRA adapter is on its way."""

    code = "LORA_LOADING"


class QueueFull(Unavailable):
    """The model's queue holds as many requests as it may."""

    code = "QUEUE_FULL"


class ResourceExhausted(Unavailable):
    """No memory for the model while pinned models, other processes or running requests hold it."""

    code = "RESOURCE_EXHAUSTED"


class ReserveOutdated(ResourceExhausted):
    """What a load was granted does not do for what is known by now of its needs. Raise it from ``load``.

    The core asks for the needs anew and admits the load again; requests see it only when that happens too often.
    """


class ShuttingDown(Unavailable):
    """The server is on its way out."""

    code = "SHUTTING_DOWN"


class DeadlineExceeded(SieError):
    """The request's own deadline passed before its answer was there."""

    code = "DEADLINE_EXCEEDED"


# --- loading ---------------------------------------------------------------------------------------


class LoadError(SieError):
    """An adapter could not make an engine. ``permanent`` errors are not tried again until the configuration changes.

    ``summary`` is what clients read that don't run the server; empty where the message is the core's own and may be
    read by all.
    """

    code = "LOAD_ERROR"
    permanent: ClassVar[bool] = False
    summary: ClassVar[str] = "loading it failed"

    @property
    def public(self) -> str:
        return self._public or self.summary or self.message


class ModelSourceNotFound(LoadError):
    """The model's files are not where the source says."""

    permanent = True
    summary = "its files are not where the configuration says"


class ModelSourceInvalid(LoadError):
    """The model's files are there, and can't be used: truncated, unreadable, of another architecture."""

    permanent = True
    summary = "its files can't be used"


class GatedModel(LoadError):
    """The hub wants credentials for this model."""

    permanent = True
    summary = "the hub requires credentials for it"


class UnsafeSource(LoadError):
    """The source would run code (pickle weights, remote code) and the configuration does not allow it."""

    permanent = True
    summary = "its files would run code, which the configuration does not allow"


class MissingDependency(LoadError):
    """The adapter needs a package that is not installed."""

    permanent = True
    summary = "a package that it needs is not installed"


_ADAPTER_PACKAGES = {"sglang": "sie-adapters-sglang", "torch": "sie-adapters-torch"}
"""By how the names of their adapters begin."""


class MissingAdapter(LoadError):
    """No plugin offers the adapter; ``found`` lists those that are there."""

    permanent = True
    summary = ""

    def __init__(self, adapter: str, *, found: Sequence[str] = ()) -> None:
        self.adapter = adapter
        self.found = tuple(found)
        from difflib import get_close_matches

        close = get_close_matches(adapter, found, n=1)
        hint = f": did you mean {close[0]}?" if close else ""
        there = f"installed: {', '.join(found)}" if found else "no adapter is installed"
        kind = adapter.partition("-")[0]
        package = None if any(name.startswith(f"{kind}-") for name in found) else _ADAPTER_PACKAGES.get(kind)
        todo = f"pip install {package}" if package else "`sie plugins` lists what is installed"
        super().__init__(f"unknown adapter {adapter!r}{hint} ({there}); {todo}")


class NeverFits(LoadError):
    """The model is larger than an empty device. Sizes in bytes."""

    permanent = True
    summary = ""

    def __init__(self, message: str, *, account: str, needed: int, capacity: int) -> None:
        self.account = account
        self.needed = needed
        self.capacity = capacity
        super().__init__(message)


class DeviceNotFound(LoadError):
    """The model names a device, or wants more devices, than the machine has."""

    permanent = True
    summary = ""


class EngineStartError(LoadError):
    """The engine did not start; a later try may succeed."""

    summary = "its engine did not start"


class OutOfMemory(SieError):
    """A memory ran out. ``needed`` and ``free`` in bytes, where known."""

    code = "OUT_OF_MEMORY"

    def __init__(self, message: str, *, account: str = "", needed: int | None = None, free: int | None = None) -> None:
        self.account = account
        self.needed = needed
        self.free = free
        super().__init__(message)


class DeviceOutOfMemory(OutOfMemory):
    """A device ran out of memory, while loading or while inferring."""


class HostOutOfMemory(OutOfMemory):
    """The host ran out of memory, or a host buffer could not be had."""


class ModelLoadFailed(SieError):
    """The model can't be loaded; clients must not retry.

    ``error_class`` is the name of the exception type behind it, ``attempts`` how often loading was tried.
    """

    code = "MODEL_LOAD_FAILED"

    def __init__(self, model: str, *, error_class: str, reason: str, permanent: bool, attempts: int) -> None:
        self.model = model
        self.error_class = error_class
        self.reason = reason
        self.permanent = permanent
        self.attempts = attempts
        super().__init__(f"model {model!r} could not be loaded ({error_class}): {reason}")


# --- inference -------------------------------------------------------------------------------------


class InferenceError(SieError):
    """The engine failed on this request."""

    code = "INFERENCE_ERROR"


class NonFiniteOutput(InferenceError):
    """The model answered NaN or infinity for these items (positions in the request)."""

    def __init__(self, items: Sequence[int]) -> None:
        self.items = tuple(items)
        super().__init__(f"the model's output is not finite for item(s) {', '.join(map(str, items))}")


class EngineDied(InferenceError):
    """The engine went away while the request was running."""


# --- inside ----------------------------------------------------------------------------------------


class TransitionError(SieError):
    """A transition of a model between residencies did not end as it should."""

    code = "TRANSITION_ERROR"


class HookTimeout(TransitionError):
    """A blocking hook overran its deadline; its engine is quarantined until the call returns."""

    def __init__(self, hook: str, *, model: str, seconds: float) -> None:
        self.hook = hook
        self.model = model
        self.seconds = seconds
        super().__init__(f"{hook} of model {model!r} did not return within {seconds:.1f} s")


class HookFailed(TransitionError):
    """A plugin's code did not keep to its contract: ``problem`` says what it raised, or what is wrong with its answer.

    ``hook`` is the hook, or the method of an adapter or engine; ``raised`` the name of the exception's class, if it
    raised one, which is then the cause.
    """

    def __init__(self, hook: str, *, plugin: str, problem: str, raised: str = "") -> None:
        self.hook = hook
        self.plugin = plugin
        self.problem = problem
        self.raised = raised
        super().__init__(f"{hook} of plugin {plugin!r} {problem}")
        if raised:
            self.guarded(f"{hook} of plugin {plugin!r} raised {raised}")

    @classmethod
    def by(cls, error: BaseException, hook: str, plugin: str) -> Self:
        """For what the plugin's code raised; raise it ``from`` that."""
        text = str(error).strip()
        name = type(error).__name__
        return cls(hook, plugin=plugin, problem=f"raised {name}{': ' if text else ''}{text}", raised=name)


class TransitionCancelled(TransitionError):
    """The transition was called off: a configuration change, an unload, or a shutdown."""


class HostMemoryError(SieError):
    """The host's memory can't be told: ``path`` is the file that is missing, unreadable or no number."""

    code = "HOST_MEMORY_ERROR"

    def __init__(self, message: str, *, path: str | Path) -> None:
        self.path = str(path)
        super().__init__(message)


class WakeCheckFailed(TransitionError):
    """A woken engine does not answer its fixed input as it did before: its copy was corrupted. It is loaded cold."""


class LedgerError(SieError):
    """A rule of the ledger was broken. This is a bug in SIE: please report it."""

    code = "LEDGER_ERROR"
