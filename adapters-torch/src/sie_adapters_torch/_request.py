"""What a request may ask of an engine, held against what its model can do: for engines that are no text encoders."""

from __future__ import annotations

from sie_core import BatchRequest, Capabilities, Task, Unsupported

from sie_adapters_torch._asked import asked

__all__ = ["check_request"]


def check_request(model: str, able: Capabilities, request: BatchRequest) -> None:
    """Look at the task, the output types, options, ``dimensions`` and ``lora``. Raises Unsupported."""
    params = request.params
    # Models whose vectors are compared are scored by the core, which asks for vectors.
    tasks = able.tasks - {Task.SCORE} if able.compares else able.tasks
    if request.task not in tasks:
        names = sorted(str(task) for task in tasks)
        raise Unsupported(f"{model} can {' and '.join(names)} only", supported=names)
    unknown = [name for name in params.output_types if name not in able.outputs]
    if request.task is Task.ENCODE and unknown:
        raise Unsupported(
            f"{model} gives {' and '.join(able.outputs)} vectors, not {', '.join(unknown)}",
            supported=able.outputs, param="output_types",
        )  # fmt: skip
    if request.task is Task.ENCODE:
        asked(params, {})  # an option that is passed over would give other vectors than were asked for
    if params.dimensions is not None and params.dimensions not in able.dims.values():
        raise Unsupported(
            f"{model} gives vectors of one size only",
            supported=[str(n) for n in able.dims.values()],
            param="dimensions",
        )
    if params.lora is not None:
        raise Unsupported(f"{model} takes no LoRA adapters", param="lora")
