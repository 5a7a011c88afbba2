"""Whether outputs are what the capabilities and the request say; one that is not is a bug in its adapter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from sie_core.adapter import Prepared
from sie_core.errors import InferenceError
from sie_core.types import EncodeOutput, ExtractOutput, ScoreOutput, SparseVector, Task

if TYPE_CHECKING:
    from sie_core.residency.worker import EngineWorker
    from sie_core.types import BatchRequest, Capabilities, Output

__all__ = ["listed", "oddity", "unready", "whose"]

_FLOAT32 = np.dtype(np.float32)
_INT32 = np.dtype(np.int32)
_WHOLE = (int, np.integer)
_ENCODE = Task.ENCODE
_OTHERS: Mapping[Task, type[ScoreOutput | ExtractOutput]] = {Task.SCORE: ScoreOutput, Task.EXTRACT: ExtractOutput}


def whose(worker: EngineWorker) -> str:
    """The engine of a worker, as errors name it."""
    plugin = f" (plugin {worker.plugin!r})" if worker.plugin else ""
    return f"the engine of model {worker.name!r}{plugin}"


def listed(answer: Any, what: str, kind: str) -> int:
    """How many there are. Raises InferenceError unless it is a list or tuple; ``what``: the method and its owner."""
    if not isinstance(answer, list | tuple):
        raise InferenceError(f"{what} returned {type(answer).__name__}: return a list of {kind}, one for each item")
    return len(answer)


def unready(items: Iterable[Any]) -> str | None:
    """What is wrong with the first item that is not prepared; ``None``: nothing."""
    for item in items:
        if not isinstance(item, Prepared):
            return "items that are not Prepared"
        if not isinstance(item.tokens, _WHOLE) or item.tokens < 0:
            return f"an item with tokens={item.tokens!r}: it must be a whole number, 0 or more"
    return None


def oddity(outputs: Iterable[tuple[Output, BatchRequest]], known: Capabilities) -> str | None:
    """What is wrong with the first output that is odd; ``None``: nothing. Each comes with its request."""
    dims = known.dims
    for place, (output, request) in enumerate(outputs):
        wrong = None
        due = EncodeOutput if request.task is _ENCODE else _OTHERS[request.task]  # hashing it takes long
        if type(output) is not due and not isinstance(output, due):
            wrong = f"{type(output).__name__}: it must be an {due.__name__}"
        elif (type(output.tokens) is not int and not isinstance(output.tokens, np.integer)) or output.tokens < 0:
            wrong = f"tokens={output.tokens!r}: it must be a whole number, 0 or more"
        elif isinstance(output, EncodeOutput):
            asked = request.params.dimensions
            wrong = _vectors(output, dims.get("dense") if asked is None else asked, dims)
        if wrong is not None:
            return f"answered item {place} of its batch with {wrong}"
    return None


def _vectors(output: EncodeOutput, wanted: int | None, dims: Any) -> str | None:
    dense = output.dense
    if dense is not None:
        if not isinstance(dense, np.ndarray):
            return f"dense of type {type(dense).__name__}: it must be a float32 array"
        if dense.dtype is not _FLOAT32 and dense.dtype != _FLOAT32:
            return f"dense of dtype {dense.dtype}: it must be float32"
        shape = dense.shape
        if len(shape) != 1 or (wanted is not None and shape[0] != wanted):
            return f"dense of shape {dense.shape}: it must be ({wanted if wanted is not None else 'dims'},)"
    if output.multivector is not None:
        matrix, width = output.multivector, dims.get("multivector")
        if not isinstance(matrix, np.ndarray):
            return f"multivector of type {type(matrix).__name__}: it must be a float32 array"
        if matrix.dtype != _FLOAT32:
            return f"multivector of dtype {matrix.dtype}: it must be float32"
        if matrix.ndim != 2 or (width is not None and matrix.shape[1] != width):
            due = f"(tokens, {width if width is not None else 'dims'})"
            return f"multivector of shape {matrix.shape}: it must be {due}"
    if output.sparse is not None:
        limit = dims.get("sparse")
        if not isinstance(output.sparse, SparseVector):
            return f"sparse of type {type(output.sparse).__name__}: it must be a SparseVector"
        indices, values = output.sparse.indices, output.sparse.values
        if not (isinstance(indices, np.ndarray) and isinstance(values, np.ndarray)):
            return f"sparse of {type(indices).__name__} and {type(values).__name__}: they must be arrays"
        if indices.dtype != _INT32 or values.dtype != _FLOAT32:
            return f"sparse of dtypes {indices.dtype} and {values.dtype}: they must be int32 and float32"
        if indices.shape != values.shape or indices.ndim != 1:
            return f"sparse of shapes {indices.shape} and {values.shape}: they must be (nnz,)"
        if indices.size and (indices.min() < 0 or (limit is not None and indices.max() >= limit)):
            return f"sparse indices from {indices.min()} to {indices.max()}: they must be from 0 to {limit} (exclusive)"
    return None
