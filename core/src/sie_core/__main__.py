"""``python -m sie_core``: the same as ``sie``."""

from __future__ import annotations

from sie_core.cli import main

if __name__ == "__main__":
    main()
