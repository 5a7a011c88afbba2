"""httpx without its own command line: click, pygments and rich are most of what importing it costs.

httpx does without that part where click is not installed, so it is told that it can't be imported. Each command saves a
quarter of a second.
"""

from __future__ import annotations

import sys

_PART = "httpx._main"

if _PART in sys.modules:
    import httpx
else:
    sys.modules[_PART] = None  # type: ignore[assignment]
    try:
        import httpx
    finally:
        del sys.modules[_PART]

__all__ = ["httpx"]
