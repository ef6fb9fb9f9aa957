"""Short ids of runs: the pipeline's name and the first digits of the run's key, as in demo-7f3a.

The key is random, is made when the run begins and never changes, whether or not a tracking store answers. An id has
four digits, or as many more as distinguish the run from those that began earlier in the output folder: a later run
never changes the id of an earlier one. Removing an earlier run may shorten an id; the longer form stays valid.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rl_core.errors import DataError
from tasks.tracking.replay import read_start_record

MIN_DIGITS = 4
_MIN_KEY_DIGITS = 6  # of a key or of MLflow's id without the pipeline's name
_SHORT_ID = re.compile(r"(?P<pipeline>.+)-(?P<digits>[0-9a-f]{4,32})")
_JOURNALS = ("*/runs/*", "*/sweeps/*", "*/sweeps/*/trials/*/runs/*")  # in an output folder


class AmbiguousRun(DataError):
    """The beginning of several short ids."""


@dataclass(frozen=True, slots=True)
class NamedRun:
    """Run with its short id."""

    short_id: str
    pipeline: str
    name: str  # as in MLflow: demo · 2026-11-21 14:00:00
    key: str  # hexadecimal digits
    folder: Path | None = None  # of its journal; None = not in the output folder
    run_id: str = ""  # of MLflow, if known
    is_pipeline: bool = True  # False = a sweep or one of its trials

    @property
    def is_sweep(self) -> bool:
        """True = a sweep, whose trials are the runs."""
        return self.folder is not None and self.folder.parent.name == "sweeps"


def list_named_runs(output: Path) -> list[NamedRun]:
    """List the runs, sweeps and trials of an output folder with their short ids, oldest first."""
    begun = []
    for pattern in _JOURNALS:
        for path in output.glob(f"{pattern}/.tracking/events.jsonl"):
            folder = path.parent.parent
            record = read_start_record(folder)
            if record.get("key") and record.get("name"):
                run = NamedRun(
                    short_id="",
                    pipeline=folder.relative_to(output).parts[0],
                    name=str(record["name"]),
                    key=str(record["key"]),
                    folder=folder,
                    is_pipeline=pattern == _JOURNALS[0],
                )
                begun.append((float(record.get("time", 0)), run))
    begun.sort(key=lambda row: row[0])
    return assign_short_ids([run for _, run in begun])


def assign_short_ids(runs: Sequence[NamedRun], known: Sequence[NamedRun] = ()) -> list[NamedRun]:
    """Assign short ids to runs, of which the earlier ones come first.

    Args:
        known: runs that have their ids already.
    """
    taken = {run.short_id for run in known}
    named = []
    for run in runs:
        num_digits = MIN_DIGITS
        while f"{run.pipeline}-{run.key[:num_digits]}" in taken and num_digits < len(run.key):
            num_digits += 1
        short_id = f"{run.pipeline}-{run.key[:num_digits]}"
        taken.add(short_id)
        named.append(dataclasses.replace(run, short_id=short_id))
    return named


def find_named_run(runs: Sequence[NamedRun], text: str, place: object) -> NamedRun:
    """Find the run that a user names: by short id, name, or more or fewer digits of its key; else a pipeline's newest.

    Args:
        runs: oldest first.
        place: the output folder, for the message.
    Raises: DataError for an empty, unknown or ambiguous name, with near matches.
    """
    if not text.strip():
        raise DataError("the name of the run is empty; `posttrain runs` lists the runs")
    exact = [run for run in runs if text in (run.short_id, run.name, run.key, run.run_id)]
    if exact:
        return exact[-1]
    match = _SHORT_ID.fullmatch(text)
    matches = []
    if match is not None:
        matches = [
            run
            for run in runs
            if run.pipeline == match["pipeline"] and run.key.startswith(match["digits"])
        ]
    elif len(text) >= _MIN_KEY_DIGITS:
        matches = [run for run in runs if run.key.startswith(text) or run.run_id.startswith(text)]
    if len(matches) > 1:
        names = ", ".join(run.short_id for run in matches[-5:])
        raise AmbiguousRun(
            f"'{text}' is the beginning of several runs in {place}: {names}; name one of them"
        )
    if not matches:
        matches = [run for run in runs if run.pipeline == text and run.is_pipeline]
    if matches:
        return matches[-1]
    raise DataError(describe_unknown_run(runs, text, place))


def refuse_sweep(run: NamedRun) -> None:
    """Refuse a sweep where one run is needed. Raises: DataError."""
    if run.is_sweep:
        raise DataError(
            f"'{run.short_id}' is a sweep, which has no stages; name one of its trials (posttrain runs)"
        )


def describe_unknown_run(runs: Sequence[NamedRun], text: str, place: object) -> str:
    """Describe in one line that there is no such run, with near matches and what to do."""
    if not runs:
        return (
            f"no run '{text}': there are no runs in {place}; name the output folder with --output"
        )
    pipelines = (text, text.rpartition("-")[0])
    pipeline = next((run.pipeline for run in reversed(runs) if run.pipeline in pipelines), "")
    newest = [run.short_id for run in reversed(runs) if run.pipeline == pipeline][:3]
    hint = f"newest runs of {pipeline}: {', '.join(newest)}"
    if not newest:
        names = [name for run in runs for name in (run.short_id, run.name, run.pipeline)]
        near = difflib.get_close_matches(text, names, n=1, cutoff=0.6)
        hint = f"did you mean '{near[0]}'?" if near else f"the newest is {runs[-1].short_id}"
    return f"no run '{text}' in {place}; {hint} (`posttrain runs` lists all; --output names another folder)"


def is_short_id(text: str) -> bool:
    """Return whether the text has the form of a short id."""
    return _SHORT_ID.fullmatch(text) is not None


def shorten_run_name(output: Path, name: str) -> str:
    """Return the short id of the run of this name; the name if it is not in the output folder."""
    runs = list_named_runs(output.resolve())
    return next((run.short_id for run in runs if run.name == name), name)


def resolve_run_name(output: Path, text: str) -> str:
    """Return the name under which the tracking store knows a run of an output folder; other texts unchanged.

    Raises: DataError for a short id that is ambiguous.
    """
    if _SHORT_ID.fullmatch(text) is None:
        return text
    runs = list_named_runs(output.resolve())
    try:
        return find_named_run(runs, text, output).name
    except AmbiguousRun:
        raise
    except DataError:
        return text  # perhaps a run of the store without files here
