"""Names of a service's files that others read, and readers that need no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

AUDIT_FILE = "update_audit.log"
CONTRIBUTION_FILE = "update_contribution.jsonl"
GATE_FILE = "gate.json"
OPERATOR_FILE = "operator.json"  # orders of a person
METRICS_FILE = (
    "worker.json"  # numbers of the worker, for live views: written after every update, never synced
)


def read_json_object(path: Path) -> dict[str, Any]:
    """A JSON object; {} where there is none, or it cannot be read."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def read_file_identity(path: Path) -> tuple[int, int, int] | None:
    """Inode, time of the last change (ns) and size, by which a file is known to be the same; None = there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def read_gate_state(folder: Path) -> dict[str, Any]:
    """The gate's file of a service; {} where there is none yet, or it cannot be read."""
    return read_json_object(folder / GATE_FILE)
