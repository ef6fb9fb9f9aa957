"""Names of a service's files that other processes read, and readers that do not import torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

AUDIT_FILE = "update_audit.log"
CONTRIBUTION_FILE = "update_contribution.jsonl"
GATE_FILE = "gate.json"
OPERATOR_FILE = "operator.json"  # orders of an operator
METRICS_FILE = "worker.json"  # the worker's metrics; written after every update, never synced


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; {} if it is missing or unreadable."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def read_file_identity(path: Path) -> tuple[int, int, int] | None:
    """Return inode, modification time (ns) and size, which identify a file's version; None if it is missing."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


def read_gate_state(folder: Path) -> dict[str, Any]:
    """Return the state of a service's gate; {} if it is missing or unreadable."""
    return read_json_object(folder / GATE_FILE)
