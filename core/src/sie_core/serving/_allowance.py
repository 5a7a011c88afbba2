"""What one answer may take: estimated before it is computed, refused above a limit, and booked on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from sie_core.errors import BodyTooLarge, ResourceExhausted
from sie_core.types import EncodeOutput, ExtractOutput

if TYPE_CHECKING:
    from sie_core.adapter import Prepared
    from sie_core.residency.answers import AnswerBook
    from sie_core.types import BatchRequest, Capabilities, Output

__all__ = ["Allowance"]

_STEP: Final = 4 * 1024 * 1024
"""Bytes that are booked at a time; answers below a quarter of it are not."""
_TWICE: Final = 2
"""An answer and what it is made of are there at the same time."""
_FINDING: Final = 16
"""What one entity or class costs, in numbers of a vector."""
_LONG: Final = 8192
"""Tokens that a text may have where the model does not say."""
_RETRY_S: Final = 5.0


class Allowance:
    """Counts the bytes of one answer, ``number_bytes`` for each number in it. Give it back with :meth:`release`."""

    __slots__ = ("_book", "_booked", "_limit", "_number_bytes", "nbytes")

    def __init__(self, book: AnswerBook, *, limit: int, number_bytes: float) -> None:
        self._book = book
        self._booked = 0
        self._limit = limit
        self._number_bytes = number_bytes
        self.nbytes = 0

    def expect(self, numbers: int) -> None:
        """So many numbers more will be in the answer.

        Raises:
            BodyTooLarge: it would be larger than an answer may be.
            ResourceExhausted: the host has no memory for it now.
        """
        self.nbytes += self._bytes(numbers)
        self._check(self.nbytes)
        wanted = _TWICE * self.nbytes
        if wanted > max(self._booked, _STEP // 2):
            more = max(_STEP, wanted - self._booked)
            if not self._book.hold(more):
                message = f"the host has no memory for an answer of {self.nbytes} bytes or more"
                raise ResourceExhausted(message, retry_after_s=_RETRY_S)
            self._booked += more

    def _bytes(self, numbers: int) -> int:
        return int(numbers * self._number_bytes)

    def _check(self, nbytes: int) -> None:
        if nbytes > self._limit:
            message = (
                f"the answer would have more than {self._limit} bytes (server.max_answer_bytes): send fewer items a "
                "request, or ask for a smaller output_dtype or msgpack"
            )
            raise BodyTooLarge(message, size=nbytes, limit=self._limit)

    def release(self) -> None:
        """It was sent, or never will be. Idempotent."""
        booked, self._booked = self._booked, 0
        if booked:
            self._book.free(booked)

    def at_once(self, request: BatchRequest, known: Capabilities) -> None:
        """What is certain before anything is prepared. Raises as ``expect``."""
        if "dense" in request.params.output_types:
            dims = request.params.dimensions or known.dims.get("dense", 0)
            self.expect(len(request.items) * dims)
        if "multivector" in request.params.output_types:
            dims = known.dims.get("multivector", 0)
            most = known.max_sequence_length or _LONG
            if self._bytes(dims * sum(min(most, len(item.text or "")) for item in request.items)) > self._limit:
                # Each word has a token or more, whatever the vocabulary.
                words = sum(min(most, len((item.text or "").split(maxsplit=most))) for item in request.items)
                self._check(self.nbytes + self._bytes(dims * words))

    def of_prepared(self, request: BatchRequest, known: Capabilities) -> Callable[[Sequence[Prepared]], None] | None:
        """What takes note of items when they are prepared: the tokens of a multivector are known then."""
        if "multivector" not in request.params.output_types:
            return None
        dims = known.dims.get("multivector", 0)
        return lambda items: self.expect(dims * sum(item.tokens for item in items))

    def of_output(self, output: Output) -> None:
        """What is known of an output only when it is there. Raises as ``expect``."""
        if isinstance(output, EncodeOutput):
            if output.sparse is not None:
                self.expect(2 * output.sparse.values.size)
        elif isinstance(output, ExtractOutput):
            found = (output.entities, output.relations, output.classifications, output.objects)
            self.expect(_FINDING * sum(map(len, found)))
