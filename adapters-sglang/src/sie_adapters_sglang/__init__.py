"""SGLang engines for SIE, as child processes. The plugin module is :mod:`sie_adapters_sglang.plugin`."""

from __future__ import annotations

__all__ = ["__version__"]
__version__ = "0.1.0"
