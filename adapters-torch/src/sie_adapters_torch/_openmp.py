"""How torch's CPU threads wait for each other. Has to be said before torch is imported."""

from __future__ import annotations

import os

__all__ = ["calm_openmp"]

_SPINS = "1000"


def calm_openmp() -> None:
    """Let OpenMP's threads sleep after some 20 microseconds of waiting, instead of some milliseconds.

    A server shares its cores with its own event loop, at the least. A thread that spins for one that has lost its core
    keeps the core from it: with a few other processes about, a single text then takes ten times as long. Whoever has
    set one of the variables is left alone.
    """
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = _SPINS
