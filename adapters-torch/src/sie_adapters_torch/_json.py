"""JSON files of a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sie_core import ModelSourceInvalid, read_file

__all__ = ["read_json", "read_object"]

_MOST = 256 * 1024 * 1024
"""Bytes of a file; the largest tokenizers have some thirty million."""


def read_json(file: Path) -> Any:
    """The file's content; ``None`` when there is no such file. Raises ModelSourceInvalid."""
    try:
        return json.loads(read_file(file, _MOST))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ModelSourceInvalid(f"{file} can't be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ModelSourceInvalid(f"{file} is not valid JSON: {error}") from error


def read_object(file: Path) -> dict[str, Any] | None:
    """A JSON object; ``None`` when there is no such file. Raises ModelSourceInvalid."""
    content = read_json(file)
    if content is not None and not isinstance(content, dict):
        raise ModelSourceInvalid(f"{file} is not a JSON object")
    return content
