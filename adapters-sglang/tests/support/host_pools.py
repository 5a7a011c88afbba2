"""Build HiCache host pools with an SGLang's own code, rank after rank, on a host of made-up size.

Its argument is a JSON list of cases. Prints ``POOLS`` and a JSON list: by case the bytes that each rank took, or what
it raised. Only the allocation is left out, and what a rank takes is missing for the next.
"""

import contextlib
import inspect
import json
import sys
from types import SimpleNamespace

import psutil
import torch

try:
    from sglang.srt.mem_cache.pool_host import base
except ImportError:  # before 0.5.20
    from sglang.srt.mem_cache import memory_pool_host as base

auto = None
with contextlib.suppress(ImportError):  # from 0.5.21 on
    from sglang.srt.mem_cache import hicache_auto_size as auto

host = SimpleNamespace(free=0, ranks=1, ratio=None)
psutil.virtual_memory = lambda: SimpleNamespace(available=host.free, total=host.free)
base.ranks_per_host = lambda: host.ranks
if hasattr(base, "available_host_memory_bytes"):
    base.available_host_memory_bytes = lambda **_: host.free


class Pool(base.HostKVCache):
    layer_num = target_layer_num = 1
    token_bytes = 0

    def get_size_per_token(self):
        return self.token_bytes

    def init_kv_buffer(self):
        host.free -= self.size * self.size_per_token

    def clear(self):
        pass


Pool.__abstractmethods__ = frozenset()


def build(case, ratio, size):
    Pool.token_bytes = case["token_bytes"]
    if "device_pool" in inspect.signature(base.HostKVCache.__init__).parameters:
        device = SimpleNamespace(store_dtype=torch.float16, size=case["tokens"], start_layer=0, end_layer=1)
        pool = Pool(device, ratio, size, case["page"], "layer_first", False, "cpu")
    else:
        pool = Pool(
            dtype=torch.float16,
            device_capacity_tokens=case["tokens"],
            size_per_token=case["token_bytes"],
            start_layer=0,
            end_layer=1,
            host_to_device_ratio=ratio,
            host_size=size,
            page_size=case["page"],
            layout="layer_first",
            pin_memory=False,
            device="cpu",
        )
    return pool.size * pool.size_per_token


@contextlib.contextmanager
def shared(case, fraction):
    """Its automatic sizing: every rank looks before any of them takes."""
    free, host.free = host.free, case["sees"]
    auto.ranks_per_host = base.ranks_per_host
    auto._estimate_hicache_bytes = lambda *_: case["tokens"] * case["token_bytes"]
    auto.get_memory = lambda: SimpleNamespace(hicache_host_memory_fraction=fraction, hicache_ratio=2.0)
    auto.get_context = lambda: SimpleNamespace(override=lambda _, hicache_ratio: setattr(host, "ratio", hicache_ratio))
    with auto.auto_size_hicache(None, None, enabled=True):
        host.free = free
        yield


def play(case):
    host.free, host.ranks, took = case["sees"], case["ranks"], []
    flag, value = case["flags"]
    for _ in range(case["ranks"]):
        try:
            if flag == "--hicache-host-memory-fraction":
                with shared(case, float(value)):
                    took.append(build(case, host.ratio, 0))
            elif flag == "--hicache-size":
                took.append(build(case, 2.0, int(value)))
            else:
                took.append(build(case, float(value), 0))
        except (ValueError, AssertionError) as error:
            return f"{type(error).__name__}: {error}"
    return took


print("POOLS" + json.dumps([play(case) for case in json.loads(sys.argv[1])]))
