"""Folders of artifacts on this machine."""

from __future__ import annotations

import contextlib
from pathlib import Path

__all__ = ["clear_broken_uploads", "local_artifacts"]

UPLOADING = ".artifact.uploading."  # begins the name of a file that MLflow writes, until it has its own name


def local_artifacts(uri: str | None, identity: str) -> Path | None:
    """The folder of one run or model on this machine; only one that bears its id, which nothing else lies in."""
    from mlflow.utils.file_utils import local_file_uri_to_path

    if not uri or ("://" in uri and not uri.startswith("file://")):
        return None
    path = Path(local_file_uri_to_path(uri))
    path = path.parent if path.name == "artifacts" else path
    return path if path.is_absolute() and path.name == identity and path.is_dir() and not path.is_symlink() else None


def clear_broken_uploads(folder: Path, before: float) -> int:
    """Delete what processes that were killed within an upload have left in a run's folder; returns the number.

    Args:
        before: seconds since the epoch; what was written since may be an upload of a living process.
    """
    found = 0
    for path in folder.rglob(f"{UPLOADING}*"):
        with contextlib.suppress(OSError):
            if path.lstat().st_mtime < before:
                path.unlink()
                found += 1
    return found
