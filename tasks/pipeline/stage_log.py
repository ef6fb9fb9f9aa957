"""Log file of a stage: what it said, with times, for people.

<key>.tracking/stage.log      while it runs; appended to by a resumed run, and kept where the stage failed
<key>.tracking/stage.log.1    the part before it, once there is more than a MiB; older parts are removed
<key>/stage.log               both, when the stage has finished; no part of the digest of its content
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import traceback
from pathlib import Path
from types import TracebackType

from rl_core.errors import CheckpointError
from rl_core.storage.rotated_lines import RotatedLines
from rl_core.storage.single_files import replacing
from tasks.pipeline.result import STAGE_LOG

__all__ = ["StageLog", "copy_log"]

PACKAGES = ("rl_core", "tasks", "flows")  # whose messages count from INFO on; those of others as they are set up
PART_BYTES = 1 << 20
PROGRESS_SECONDS = 10.0  # between two lines about progress
TAIL_BYTES = 1 << 18  # of what the tracking store gets


class StageLog(logging.Handler):
    """Handler that writes every log record of this process, and progress, into a stage's log; a context manager.

    A disk that refuses a line is no reason to stop: the line is lost.
    """

    def __init__(self, folder: Path) -> None:
        """folder: of the stage's journal."""
        super().__init__(logging.INFO)
        self.path = folder / STAGE_LOG
        self._lines = RotatedLines(self.path, max_bytes=PART_BYTES, keep=1)
        self._levels: dict[str, int] = {}
        self._told = -PROGRESS_SECONDS
        self._of_thread = threading.local()

    def __enter__(self) -> StageLog:
        for name in PACKAGES:
            logger = logging.getLogger(name)
            if not logger.isEnabledFor(logging.INFO):
                self._levels[name] = logger.level
                logger.setLevel(logging.INFO)
        logging.getLogger().addHandler(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        logging.getLogger().removeHandler(self)
        for name, level in self._levels.items():
            logging.getLogger(name).setLevel(level)
        self.close()

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record, with the traceback that it carries."""
        if getattr(self._of_thread, "is_writing", False):  # a message about the writing itself
            return
        try:
            text = record.getMessage()
        except Exception as error:  # as logging itself does: a wrong message ends nothing
            text = f"{record.msg!r} ({type(error).__name__}: {error})"
        if record.exc_info and record.exc_info[1] is not None:
            text += "\n" + "".join(traceback.format_exception(record.exc_info[1])).rstrip()
        self.say(text, level=record.levelname, name=record.name, at=record.created)

    def say(self, text: str, *, level: str = "INFO", name: str = "stage", at: float | None = None) -> None:
        """Write one message; further lines of it are indented."""
        at = time.time() if at is None else at
        begin = f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(at))}.{int(at % 1 * 1000):03d} {level} {name}: "
        line = begin + _printable(text).replace("\n", "\n    ") + "\n"
        self._of_thread.is_writing = True
        try:
            with self.lock or contextlib.nullcontext(), contextlib.suppress(CheckpointError, OSError):
                self._lines.append(line.encode("utf-8", "backslashreplace"))
        finally:
            self._of_thread.is_writing = False

    def progress(self, done: int, total: int, message: str = "") -> None:
        """Write how far the work is, at most every ten seconds, and its end."""
        now = time.monotonic()
        if done >= total or now - self._told >= PROGRESS_SECONDS:
            self._told = now
            self.say(f"{done}/{total}{f': {message}' if message else ''}", name="progress")

    @property
    def tail(self) -> str:
        """The newest lines, a quarter of a MiB at most."""
        try:
            with self.path.open("rb") as file:
                size = file.seek(0, 2)
                file.seek(max(0, size - TAIL_BYTES))
                if size > TAIL_BYTES:
                    file.readline()  # the rest of a line
                return file.read().decode("utf-8", "replace")
        except OSError:
            return ""


def _printable(text: str) -> str:
    """The text with control characters as escapes: what a model wrote must not move the cursor of who reads it."""
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)


def copy_log(journal: Path, folder: Path) -> None:
    """Put the log of a stage's journal into the stage's own folder, the older part first."""
    parts = [journal / name for name in (f"{STAGE_LOG}.1", STAGE_LOG) if (journal / name).is_file()]
    if parts:
        with replacing(folder / STAGE_LOG, binary=True, synced=False) as whole:
            for part in parts:
                whole.write(part.read_bytes())
