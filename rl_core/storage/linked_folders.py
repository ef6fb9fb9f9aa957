"""Files and folders under another name: hard links where the file system has them, else copies."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from rl_core.storage.folders import sync_tree
from rl_core.storage.single_files import make_folder, refused, sync

__all__ = ["keep_folder", "link", "link_tree"]


def link_tree(source: Path, target: Path) -> None:
    """The file or folder `source` under another name."""
    if source.is_dir():
        shutil.copytree(source, target, copy_function=link)
    else:
        link(source, target)


def link(source: str | Path, target: str | Path) -> None:
    """The file `source` under another name."""
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without hard links
        shutil.copy2(source, target)


def keep_folder(source: Path, target: Path) -> None:
    """A folder's present files under another name, too, which is free; on the disk when the call returns.

    Files that are replaced in `source` afterwards, as published ones are, stay in `target` as they were.
    Raises: CheckpointError where the disk refuses.
    """
    make_folder(target.parent)
    try:
        link_tree(source, target)
        sync_tree(target)
        sync(target.parent)
    except OSError as error:
        raise refused(target, error, "made") from error
