"""Share of a run's wall time that its safety costs: journals, checksums, syncs, publishing, checkpoints, locks.

    python tests/benchmarks/bench_safety.py demo --set stages.policy.iterations=40 --markdown FILE

Every function that only safety needs is timed from within, on the run's thread and on others; a function within
another one counts for the outer one alone. All of a checkpoint counts, the copy of the state included; of other
published folders, what their writer computes (token ids, reference log-probabilities) does not count.
"""

from __future__ import annotations

import argparse
import collections
import functools
import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

Seconds = dict[tuple[str, bool], float]  # by group, and True = on the thread that waits


class Timer:
    """Seconds of the outermost timed calls, by group and thread."""

    def __init__(self) -> None:
        self.seconds: Seconds = collections.defaultdict(float)
        self.calls: collections.Counter[str] = collections.Counter()
        self._inside = threading.local()
        self._guard = threading.Lock()

    def timed(self, group: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function with its time counted."""

        @functools.wraps(function)
        def call(*arguments: Any, **named: Any) -> Any:
            if getattr(self._inside, "on", False):
                return function(*arguments, **named)
            self._inside.on, self._inside.left_out = True, 0.0
            began = time.perf_counter()
            try:
                return function(*arguments, **named)
            finally:
                took = time.perf_counter() - began - self._inside.left_out
                self._inside.on = False
                with self._guard:
                    is_main = not threading.current_thread().name.startswith("tracking-")
                    self.seconds[group, is_main] += took
                    self.calls[group] += 1

        return call

    def published(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `publish_folder` with its time counted, except that of the writer it is passed."""

        def publish(final: Any, write: Callable[..., Any], *others: Any) -> Any:
            if getattr(self._inside, "on", False):
                return function(final, write, *others)

            def left_out(*arguments: Any) -> Any:
                began = time.perf_counter()
                try:
                    return write(*arguments)
                finally:
                    self._inside.left_out += time.perf_counter() - began

            return self.timed("publishing of folders", function)(final, left_out, *others)

        return functools.wraps(function)(publish)


def time_safety_functions(timer: Timer) -> None:
    """Time the functions of every group, wherever they are imported."""
    from rl_core.storage import append_log, atomic_files, checkpoint, folders, locks, manifest
    from tasks.tracking import journal, run_tracker

    functions = {
        "publishing of folders": [folders.seal_folder, folders.remove_folder],
        "verification of folders": [
            manifest.verify_folder,
            manifest.digest_folder,
            manifest.digest_file,
        ],
        "single files": [
            atomic_files.write_text_atomic,
            atomic_files.write_text_unsynced,
            atomic_files.create_file_once,
            atomic_files.make_folder,
            append_log.copy_intact_lines,
            folders.clear_leftovers,
        ],
    }
    methods = {
        "single files": [(append_log.AppendLog, "append_lines")],
        "checkpoints": [
            (checkpoint.CheckpointStore, "save_version"),
            (checkpoint.CheckpointStore, "load_latest"),
        ],
        "journals": [
            (journal.LineLog, "append_record"),
            (journal.LineLog, "flush_pending"),
            (journal.LineLog, "close"),
            (journal.MetricsJournal, "append_metrics"),
            (journal.DeliveryCursor, "save"),
            (run_tracker.RunTracker, "_store_copy"),
        ],
        "locks": [(locks.FolderLock, "_acquire_lock"), (locks.FolderLock, "__exit__")],
    }
    replace_everywhere(folders.publish_folder, timer.published(folders.publish_folder))
    for group, known in functions.items():
        for function in known:
            replace_everywhere(function, timer.timed(group, function))
    for group, owned in methods.items():
        for kind, name in owned:
            setattr(kind, name, timer.timed(group, getattr(kind, name)))


def replace_everywhere(function: Callable[..., Any], call: Callable[..., Any]) -> None:
    """Replace a function by `call` in every module that has imported it."""
    for module in list(sys.modules.values()):
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if value is function:
                setattr(module, name, call)


def format_table(timer: Timer, wall: float) -> str:
    """Format seconds and shares by group as Markdown."""
    groups = dict.fromkeys(group for group, _ in timer.seconds)
    lines = [
        "| | calls | seconds waited | share | seconds on other threads |",
        "|---|---|---|---|---|",
    ]
    rows = [
        (group, timer.calls[group], timer.seconds[group, True], timer.seconds[group, False])
        for group in groups
    ]
    rows.sort(key=lambda row: -row[2])
    rows.append(
        (
            "all",
            sum(row[1] for row in rows),
            sum(row[2] for row in rows),
            sum(row[3] for row in rows),
        )
    )
    for group, calls, waited, background in rows:
        lines.append(
            f"| {group} | {calls:,} | {waited:.2f} | {waited / wall:.2%} | {background:.2f} |"
        )
    return "\n".join(lines) + f"\n\nOf {wall:.1f} s in all.\n"


def main() -> int:
    """Run the pipeline, timed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("config")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--markdown", type=Path)
    arguments = parser.parse_args()
    from posttrain.cli.main import main as command
    from tasks import stage_registry

    for stage in stage_registry.list_stages():
        stage_registry.import_stage_task(stage)
    import flows.post_training

    assert flows.post_training
    timer = Timer()
    time_safety_functions(timer)
    with tempfile.TemporaryDirectory(prefix="safety-") as output:
        options = [
            part for value in [f"output={output}", *arguments.set] for part in ("--set", value)
        ]
        began = time.perf_counter()
        code = command(["run", arguments.config, "--quiet", *options])
        wall = time.perf_counter() - began
    text = format_table(timer, wall)
    print(text)
    print(
        json.dumps(
            {"wall": wall, "seconds": {f"{g} {m}": s for (g, m), s in timer.seconds.items()}}
        )
    )
    if arguments.markdown:
        arguments.markdown.write_text(text)
    return code


if __name__ == "__main__":
    sys.exit(main())
