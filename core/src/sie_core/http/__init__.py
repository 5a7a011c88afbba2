"""The HTTP server's application: routes, dialects, keys and limits over one service."""

from __future__ import annotations

from sie_core.http.app import create_app, taken_paths
from sie_core.http.auth import check_bind

__all__ = ["check_bind", "create_app", "taken_paths"]
