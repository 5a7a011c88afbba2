"""Stands where SGLang from 0.5.20 on looks for its CPU kernels: the one that a tiny model needs, in plain torch."""


def assign_req_to_token_pool_cpu(rows, pool, starts, ends, slots, width):
    """Write the slots of each request's new tokens into its row."""
    taken = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        pool[row, start:end] = slots[taken : taken + end - start].to(pool.dtype)
        taken += end - start


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def refuse(*args, **kwargs):
        raise RuntimeError(f"{name} is not available here")

    return refuse
