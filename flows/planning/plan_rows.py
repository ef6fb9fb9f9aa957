"""Number of rows that a stage trains on, from its settings or its data file."""

from __future__ import annotations

from pathlib import Path

from flows.planning.plan_target import Lengths
from rl_core.data.files import data_files
from tasks.config import PipelineSettings

__all__ = ["data_file", "known_rows", "training_rows"]


def training_rows(name: str, settings: PipelineSettings, lengths: Lengths) -> int | None:
    """Rows that a stage on data trains on, held-out ones left out; None = not known."""
    data, block = settings.stages.prepare_data, getattr(settings.stages, name)
    path = data_file(settings, "demonstrations" if name == "sft" else "preferences")
    if lengths.rows is not None:
        found: int | None = lengths.rows
    elif path is not None:
        found = known_rows(path)
    elif name == "sft":
        found = data.num_demonstrations if data is not None else None
    else:
        found = block.num_pairs
    if found is None:
        return None
    if data is not None and data.max_rows is not None:
        found = min(found, data.max_rows)
    share = 1.0 if data is None else 1.0 - data.heldout_fraction
    return max(1, round(found * share))


def data_file(settings: PipelineSettings, name: str) -> str | None:
    """The file or folder that `prepare_data` reads these rows from, if it does."""
    data = settings.stages.prepare_data
    found: str | None = getattr(data, name) if data is not None else None
    return found


def known_rows(path: str | None) -> int | None:
    """Rows of JSON Lines files; None for other kinds of files, or none at all."""
    if path is None:
        return None
    files = data_files(Path(path))
    if not files or any(file.suffix != ".jsonl" for file in files):
        return None
    count = 0
    for file in files:
        with file.open("rb") as lines:
            count += sum(1 for line in lines if line.strip())
    return count
