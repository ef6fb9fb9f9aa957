"""Command `posttrain logs`: the log of a run or of one of its stages, also while it is written."""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from posttrain.cli import run_setup
from posttrain.cli.arguments import (
    RUN_HELP,
    STAGE_HELP,
    add_output_option,
    parse_positive_integer,
    parse_stage_name,
)
from rl_core.errors import DataError
from tasks.stage_registry import list_stage_names

if TYPE_CHECKING:
    from posttrain.monitor.reader import RunReader
    from posttrain.monitor.runs import RunView, StageView

FOLLOW_SECONDS = 0.5  # between two looks at a log that is written

EXAMPLES = (
    "logs    (the newest run)",
    "logs demo-7f3a policy",
    "logs policy --lines 50    (of the newest run)",
    "logs demo-7f3a --follow    (until the run ends)",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "run", metavar="RUN", nargs="?", help=f"{RUN_HELP} (default: the newest run)"
    )
    parser.add_argument(
        "stage",
        metavar="STAGE",
        nargs="?",
        type=parse_stage_name,
        help=f"one stage (default: all that ran); {STAGE_HELP}",
    )
    parser.add_argument(
        "--follow", "-f", action="store_true", help="continue while the run writes, until it ends"
    )
    parser.add_argument(
        "--lines",
        "-n",
        type=parse_positive_integer,
        metavar="N",
        help="only the last lines of each",
    )
    add_output_option(parser)


def run_command(arguments: argparse.Namespace) -> int:
    """Print logs."""
    output = Path(arguments.output)
    run_setup.refuse_unreadable_folder(output)
    is_stage = arguments.stage is None and arguments.run in list_stage_names()
    if is_stage and not (output / arguments.run / "runs").is_dir():  # no pipeline of that name
        arguments.run, arguments.stage = None, arguments.run
    reader, identity = open_run(output, arguments.run)
    with contextlib.suppress(KeyboardInterrupt):  # how people end --follow
        for text in _read_log_parts(reader, identity, arguments):
            print(text, end="", flush=True)
    return 0


def open_run(output: Path, name: str | None) -> tuple[RunReader, str]:
    """Return a reader of the output folder and its id of a run; None = the newest run.

    Raises: DataError for an unknown run, and for a sweep.
    """
    from posttrain.monitor.reader import RunReader
    from posttrain.monitor.runs import build_run_id
    from tasks.tracking.run_ids import find_named_run, list_named_runs, refuse_sweep

    folder = output.resolve()
    named = list_named_runs(folder)
    if name is None:
        pipelines = [run for run in named if run.is_pipeline]
        if not pipelines:
            raise DataError(
                f"no runs in {folder}; start one (posttrain run demo), or name --output"
            )
        run = pipelines[-1]
    else:
        run = find_named_run(named, name, folder)
    assert run.folder is not None
    refuse_sweep(run)
    return RunReader(folder), build_run_id(run.folder)


def _load_view(reader: RunReader, identity: str) -> RunView:
    view = reader.load_run(identity)
    if view is None:
        raise DataError(f"run '{identity}' no longer exists in {reader.output}")
    return view


def _read_log_parts(
    reader: RunReader, identity: str, arguments: argparse.Namespace
) -> Iterator[str]:
    """Yield the text of the logs, stage after stage; with `--follow` what is written until the run ends."""
    positions: dict[str, LogPosition] = {}
    while True:
        view = _load_view(reader, identity)
        is_over = view.has_process_ended  # before reading, so that the last lines are read
        for stage in _select_stages(view, arguments.stage):
            if stage.label not in positions:
                if arguments.stage is None:
                    yield f"== {stage.label.replace('_', ' ')} · {stage.status}\n"
                positions[stage.label] = LogPosition(stage, arguments.lines)
                if arguments.stage is None and stage.status == "cached":
                    positions[stage.label].skip_to_end()
            yield positions[stage.label].read_new_text(is_complete=is_over)
        if not arguments.follow or is_over:
            break
        time.sleep(FOLLOW_SECONDS)
    if not positions:
        raise DataError(f"{view.short_id}: {_explain_missing_log(view, arguments.stage)}")


def _explain_missing_log(view: RunView, name: str | None) -> str:
    """Explain why a run, or one of its stages, has no log."""
    stage = None if name is None else view.find_stage(name)
    if stage is not None and stage.status == "cached":
        return f"stage '{name}' was reused from an earlier run, whose log no longer exists"
    subject = "no stage has begun" if name is None else f"stage '{name}' has not begun"
    return f"{subject} ({view.status})"


def _select_stages(view: RunView, name: str | None) -> list[StageView]:
    """Return the stages with a log; with a name only that one. Raises: DataError if the run has no such stage."""
    if name is not None and view.find_stage(name) is None:
        labels = ", ".join(stage.label for stage in view.stages)
        raise DataError(f"{view.short_id}: has no stage '{name}', only {labels}")
    return [
        stage
        for stage in view.stages
        if stage.journal is not None and (name is None or stage.label == name)
    ]


class LogPosition:
    """Position in a stage's log, which may be written, rotated, and moved when the stage ends."""

    def __init__(self, stage: StageView, num_lines: int | None = None) -> None:
        """Begin at the start, or at the last `num_lines` lines."""
        from rl_core.storage.append_log import list_log_files
        from tasks.pipeline.stage_result import STAGE_LOG

        assert stage.journal is not None
        self._path = stage.journal.folder / STAGE_LOG
        parts = list_log_files(self._path)
        if not parts and stage.folder is not None:  # the journal was removed
            self._path = stage.folder / STAGE_LOG
            parts = [self._path]
        self._num_lines = num_lines
        self._old_parts = [part for part in parts if part != self._path]
        self._offset, self._inode = 0, _read_inode(self._path)

    def skip_to_end(self) -> None:
        """Leave out what is written already."""
        self._old_parts = []
        with contextlib.suppress(OSError):
            self._offset = self._path.stat().st_size

    def read_new_text(self, *, is_complete: bool = False) -> str:
        """Return the complete lines written since the last call, with control characters escaped.

        Args:
            is_complete: nothing more will be written, so the last line counts even without its end.
        """
        from flows.runtime.terminal import escape_control_characters

        data = b""
        for part in self._old_parts:
            with contextlib.suppress(OSError):
                data += part.read_bytes()
        self._old_parts = []
        inode = _read_inode(self._path)
        if inode != self._inode and self._inode:
            # Rotated: the rest of the older part, then the new file from its start.
            data += self._read_rotated_rest()
            self._offset = 0
        self._inode = inode
        new = _read_from(self._path, self._offset)
        if not is_complete:
            new = new[: new.rfind(b"\n") + 1]  # a line may be half-written
        self._offset += len(new)
        data += new
        if is_complete and data and not data.endswith(b"\n"):
            data += b"\n"
        text = data.decode("utf-8", "replace")
        if self._num_lines is not None:
            text = "".join(text.splitlines(keepends=True)[-self._num_lines :])
            self._num_lines = None
        return escape_control_characters(text)

    def _read_rotated_rest(self) -> bytes:
        from rl_core.storage.append_log import list_log_files

        for part in list_log_files(self._path):
            if _read_inode(part) == self._inode:
                return _read_from(part, self._offset)
        return b""


def _read_inode(path: Path) -> int:
    try:
        return path.stat().st_ino
    except OSError:
        return 0


def _read_from(path: Path, offset: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(offset, os.SEEK_SET)
            return file.read()
    except OSError:
        return b""
