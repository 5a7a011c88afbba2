"""F16: freed memory does not stay in the allocator's arenas, one for each thread."""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Mapping

import pytest

if platform.libc_ver()[0] != "glibc":
    pytest.skip("other allocators have ways of their own", allow_module_level=True)

_THREADS = 8
_SCRIPT = f"""
import ctypes, sys, threading
from sie_core.memory._malloc import cap_arenas, trim

libc = ctypes.CDLL(None)
libc.malloc.restype = libc.memset.restype = ctypes.c_void_p
libc.malloc.argtypes, libc.free.argtypes = [ctypes.c_size_t], [ctypes.c_void_p]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
if "cap" in sys.argv:
    cap_arenas()
held, together = [], threading.Barrier({_THREADS})

def work():
    together.wait()
    held.extend(libc.memset(libc.malloc(4096), 1, 4096) for _ in range(2000))
    together.wait()

threads = [threading.Thread(target=work) for _ in range({_THREADS})]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
if "trim" in sys.argv:
    for place in held[:-1]:  # the last one pins its arena's end
        libc.free(place)
    trim() if "really" in sys.argv else None
    print(next(line for line in open("/proc/self/status") if line.startswith("VmRSS")).split()[1])
else:
    libc.fopen.restype, libc.malloc_info.argtypes = ctypes.c_void_p, [ctypes.c_int, ctypes.c_void_p]
    libc.fclose.argtypes = [ctypes.c_void_p]
    file = libc.fopen(b"/dev/stdout", b"w")
    libc.malloc_info(0, file)
    libc.fclose(file)
"""


def run(*arguments: str, env: Mapping[str, str] | None = None) -> str:
    command = [sys.executable, "-c", _SCRIPT, *arguments]
    return subprocess.run(command, env=dict(env or {}), capture_output=True, text=True, check=True, timeout=60).stdout


def arenas(*arguments: str, env: Mapping[str, str] | None = None) -> int:
    return run(*arguments, env=env).count("<heap nr=")


def test_threads_share_two_arenas() -> None:
    """F16: eight threads that allocate at the same time make eight arenas more, and with the cap one more."""
    assert arenas() > 2
    assert arenas("cap") <= 2


def test_what_the_operator_sets_wins() -> None:
    """F16: MALLOC_ARENA_MAX is glibc's own variable; the cap leaves it alone."""
    assert arenas("cap", env={"MALLOC_ARENA_MAX": "5"}) == 5


def test_freed_memory_goes_back_to_the_system() -> None:
    """F16: of what is freed in small blocks, a part stays with the process until it is trimmed."""
    kept, given_back = int(run("trim")), int(run("trim", "really"))
    assert kept - given_back > 2 * 1024  # KiB; how much depends on how the threads met
