"""What a request may ask of an engine, held against what its model can do."""

from __future__ import annotations

from sie_core import BatchRequest, Capabilities, Task, Unsupported

from sie_adapters_torch._asked import asked

__all__ = ["check_request", "check_size", "no_lora"]


def check_request(model: str, able: Capabilities, request: BatchRequest) -> None:
    """Look at the task, the output types, and the options of a request to encode. Raises Unsupported."""
    # Models whose vectors are compared are scored by the core, which asks for vectors.
    tasks = able.tasks - {Task.SCORE} if able.compares else able.tasks
    if request.task not in tasks:
        names = sorted(str(task) for task in tasks)
        raise Unsupported(f"{model} can {' and '.join(names)} only", supported=names)
    if request.task is not Task.ENCODE:
        return
    unknown = [name for name in request.params.output_types if name not in able.outputs]
    if unknown:
        raise Unsupported(
            f"{model} gives {' and '.join(able.outputs)} vectors, not {', '.join(unknown)}",
            supported=able.outputs, param="output_types",
        )  # fmt: skip
    asked(request.params, {})  # an option that is passed over would give other vectors than were asked for


def check_size(model: str, able: Capabilities, dimensions: int | None) -> None:
    """For models whose vectors are of one size, if they give any. Raises Unsupported."""
    if dimensions is not None and dimensions not in able.dims.values():
        sizes = [str(size) for size in able.dims.values()]
        gives = "vectors of one size only" if sizes else "no vectors"
        raise Unsupported(f"{model} gives {gives}", supported=sizes, param="dimensions")


def no_lora(model: str, name: str | None) -> None:
    """For models that take none. Raises Unsupported."""
    if name is not None:
        raise Unsupported(f"{model} takes no LoRA adapters", param="lora")
