"""Logs that grow line by line and are rotated: NAME, NAME.1 (the one before it), ... NAME.<keep>.

Lines are not synced one by one: a crash of the machine may lose the last ones; a killed process loses none that
`append` took, and leaves no torn line but the last.
"""

from __future__ import annotations

import os
from pathlib import Path

from rl_core.storage.faults import fault
from rl_core.storage.own_files import own_file
from rl_core.storage.single_files import append_bytes, make_folder, refused

__all__ = ["RotatedLines"]


class RotatedLines:
    """One log of one writer."""

    def __init__(self, path: Path | str, *, max_bytes: int, keep: int) -> None:
        """max_bytes: size beyond which the log gets the next name. keep: rotated files, the oldest is removed."""
        self.path = Path(path)
        self.max_bytes, self.keep = max_bytes, keep

    def append(self, lines: bytes) -> None:
        """Append whole lines. Raises: CheckpointError where the disk refuses; what it took is cut off again."""
        make_folder(self.path.parent)
        size = self._size()
        if size and size + len(lines) > self.max_bytes:
            self._rotate()
        elif size and not self._ends_well(size):
            lines = b"\n" + lines  # behind a line that a killed writer left unfinished
        append_bytes(self.path, lines)

    def _size(self) -> int:
        try:
            return os.lstat(self.path).st_size
        except FileNotFoundError:
            return 0

    def _ends_well(self, size: int) -> bool:
        descriptor = own_file(self.path, os.O_RDONLY)
        try:
            return os.pread(descriptor, 1, size - 1) == b"\n"
        finally:
            os.close(descriptor)

    def _rotate(self) -> None:
        try:
            for number in range(self.keep, 0, -1):
                older = self.path.with_name(f"{self.path.name}.{number}")
                newer = self.path.with_name(f"{self.path.name}.{number - 1}") if number > 1 else self.path
                if newer.exists():
                    os.replace(newer, older)
            fault("online.rotated")
        except OSError as error:
            raise refused(self.path, error, "rotated") from error
