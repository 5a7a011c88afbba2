"""Transfers between device and host pools: names only. Calling one is an error."""


def __getattr__(name):
    if not name.startswith("transfer_"):
        raise AttributeError(name)

    def refuse(*args, **kwargs):
        raise RuntimeError(f"{name} needs CUDA")

    return refuse
