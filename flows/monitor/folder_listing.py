"""Subfolders of folders, listed again only where an entry was added or removed."""

from __future__ import annotations

import os
import time
from pathlib import Path

__all__ = ["FolderListing"]

SETTLED_NS = 2_000_000_000  # age of a folder's last change after which its listing is kept


class FolderListing:
    """Listings of any number of folders; not thread-safe."""

    def __init__(self) -> None:
        self._kept: dict[Path, tuple[int, list[Path]]] = {}  # folder -> time of its last change, its subfolders

    def subfolders(self, path: Path) -> list[Path]:
        """By name, without hidden ones; [] if the folder is gone."""
        try:
            changed = path.stat().st_mtime_ns
            kept = self._kept.get(path)
            if kept is not None and kept[0] == changed:
                return kept[1]
            with os.scandir(path) as entries:  # it says what is a folder, without a look at each
                names = sorted(one.name for one in entries if one.name[0] != "." and _is_folder(one))
        except OSError:
            self._kept.pop(path, None)
            return []
        found = [path / name for name in names]
        if time.time_ns() - changed > SETTLED_NS:  # else an entry of the same tick of the clock might be missed
            self._kept[path] = (changed, found)
        return found


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself, or to where this user may not look
        return False
