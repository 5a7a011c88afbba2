"""Huge pages that were set aside (hugetlb): the kernel counts them as used, and gives them only on request."""

from __future__ import annotations

import contextlib
from pathlib import Path

__all__ = ["free_huge_pages", "set_aside"]

_PAGES = "sys/kernel/mm/hugepages"


def set_aside(root: Path) -> int:
    """Bytes of all sizes, in use or not; 0 where the kernel does not say."""
    total = 0
    with contextlib.suppress(OSError):
        for folder in (root / _PAGES).iterdir():
            size = folder.name.removeprefix("hugepages-").removesuffix("kB")
            if size.isdecimal():
                total += int(size) * 1024 * _number(folder / "nr_hugepages")
    return total


def free_huge_pages(root: Path, page_bytes: int) -> int:
    """Bytes of one size that are neither in use nor reserved."""
    folder = root / _PAGES / f"hugepages-{page_bytes // 1024}kB"
    return max(0, _number(folder / "free_hugepages") - _number(folder / "resv_hugepages")) * page_bytes


def _number(file: Path) -> int:
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return 0
