"""Load failures: which are for good, and how long to wait before the next attempt."""

from __future__ import annotations

from attrs import frozen

from sie_core.errors import (
    EngineDied,
    HookFailed,
    HookTimeout,
    LoadError,
    ModelLoadFailed,
    ModelLoading,
    OutOfMemory,
    ResourceExhausted,
    SieError,
)

__all__ = ["COOLDOWN_FIRST_S", "COOLDOWN_MOST_S", "LIVED_S", "LoadFailure", "classify", "crashed", "unexpected"]

COOLDOWN_FIRST_S = 30.0
COOLDOWN_MOST_S = 1800.0
LIVED_S = 300.0
"""An engine that dies within this of becoming resident died in a row with the one before."""


@frozen
class LoadFailure:
    """Why a model is ``failed``, or how its engine died. ``retry_at`` is on the event loop's clock; ``None``: never.

    ``attempts``: how often loading was tried, or how many engines died in a row.
    """

    code: str
    error_class: str
    message: str
    attempts: int
    retry_at: float | None
    details: str = ""
    """For those who run the server."""
    public: str = ""
    """The message for those who don't."""

    @property
    def whole(self) -> str:
        """All that is known of it."""
        return f"{self.message}\n{self.details}" if self.details else self.message

    @property
    def permanent(self) -> bool:
        return self.retry_at is None

    def retry_in(self, now: float) -> float | None:
        """Seconds until the next attempt is allowed; ``None``: never."""
        return None if self.retry_at is None else max(0.0, self.retry_at - now)

    def as_error(self, model: str) -> SieError:
        """What the requests see that waited for this load."""
        error = ModelLoadFailed(
            model,
            error_class=self.error_class,
            reason=self.message,
            permanent=self.permanent,
            attempts=self.attempts,
        )
        public = f"model {model!r} could not be loaded ({self.error_class}): {self.public}; its operator can see why"
        return error.explained(self.details).guarded(public)

    def refusal(self, model: str, now: float) -> SieError | None:
        """What a later request sees: 502 for good, 503 while the cool-down runs, ``None`` once it is over."""
        wait = self.retry_in(now)
        if wait is None:
            return self.as_error(model)
        if wait <= 0:
            return None
        kind = ResourceExhausted if self.code == OutOfMemory.code else ModelLoading
        often = "" if self.attempts == 1 else f" {self.attempts} times, last"
        what = f"loading model {model!r} failed{often} with {self.error_class}"
        if self.error_class == EngineDied.__name__:
            what = f"the engine of model {model!r} died {self.attempts} times in a row"
        error = kind(f"{what}: {self.message}; the next attempt is allowed in {wait:.0f} s", retry_after_s=wait)
        public = f"{what}: {self.public}; the next attempt is allowed in {wait:.0f} s"
        return error.explained(self.details).guarded(public)


def classify(error: BaseException, *, attempts: int, now: float) -> LoadFailure:
    """Class a failure by its type; transient ones cool down 30 s, doubling, 30 min at most."""
    permanent = isinstance(error, LoadError) and error.permanent
    name = type(error).__name__
    if isinstance(error, LoadError | HookTimeout | OutOfMemory):
        code, message = error.code, error.message
    elif isinstance(error, HookFailed):
        code, message, name = LoadError.code, error.message, error.raised or name
    else:
        code, message = LoadError.code, f"{name}: {error}"
    return LoadFailure(
        code=code,
        error_class=name,
        message=message,
        attempts=attempts,
        retry_at=None if permanent else now + _cooldown(attempts),
        details=error.details if isinstance(error, SieError) else "",
        public=error.public if isinstance(error, SieError) else f"its plugin raised {name}",
    )


def unexpected(error: BaseException) -> BaseException | None:
    """What a plugin's code raised that is none of SIE's errors: its traceback is worth logging. ``None`` for others."""
    return error.__cause__ if isinstance(error, HookFailed) else None


def crashed(reason: str, details: str, *, deaths: int, now: float) -> LoadFailure:
    """How an engine died: after the first of ``deaths`` in a row the model may load at once."""
    wait = _cooldown(deaths - 1) if deaths > 1 else 0.0
    return LoadFailure(EngineDied.code, EngineDied.__name__, reason, deaths, now + wait, details, "its engine died")


def _cooldown(attempts: int) -> float:
    return min(COOLDOWN_MOST_S, COOLDOWN_FIRST_S * 2.0 ** min(attempts - 1, 10))
