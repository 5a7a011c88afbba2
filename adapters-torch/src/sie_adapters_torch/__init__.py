"""In-process PyTorch encoders for SIE. Importing this package, or its plugin module, imports no torch."""

from __future__ import annotations

__version__ = "0.1.0"
__all__ = ["__version__"]
