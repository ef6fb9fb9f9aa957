"""Rows that an earlier stage wrote as lines of JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["rows_of"]


def rows_of(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of a file, one at a time."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)
