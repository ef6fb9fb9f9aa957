"""Labels of answers in a journal: one checksummed line each, on the disk before the caller is told."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from rl_core.inference.served_answers import FeedbackLabel
from rl_core.storage.checked_lines import read_checked, sealed
from rl_core.storage.faults import fault
from rl_core.storage.single_files import append_bytes, make_folder, truncate_file

__all__ = ["FeedbackJournal"]


class FeedbackJournal:
    """A `FeedbackSink` over a file of JSON lines: answer_id, choice, the label, and seconds since 1970."""

    def __init__(self, path: Path) -> None:
        """A last line that a kill tore off, which nobody was told of, is cut off."""
        self.path = path
        self._lock = threading.Lock()
        make_folder(path.parent)
        if path.is_file():
            end = 0
            for line in read_checked(path):
                end = line.end
            if end < path.stat().st_size:
                truncate_file(path, end)

    def accept(self, answer_id: str, choice: int, label: FeedbackLabel) -> None:
        """See `FeedbackSink`."""
        record = {"answer_id": answer_id, "choice": choice, **label.to_json(), "time": time.time()}
        with self._lock:
            append_bytes(self.path, sealed(record), synced=True)
        fault("feedback.kept")
