"""Results of single runs as files, so that an interrupted measurement continues where it was."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Row = dict[str, Any]


class Results:
    """One JSON file a run, under a folder: PART/ARM-SEED.json."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, part: str, arm: str, seed: int) -> Path:
        """Return the file of a run."""
        return self.folder / part / f"{re.sub(r'[^A-Za-z0-9.]+', '_', arm)}-{seed}.json"

    def find(self, part: str, arm: str, seed: int) -> Row | None:
        """Return the run's result; None if there is none."""
        path = self.path(part, arm, seed)
        return json.loads(path.read_text()) if path.is_file() else None

    def of(self, part: str, arm: str, seeds: int) -> list[Row]:
        """Return the existing results, in the order of the seeds."""
        return [row for seed in range(seeds) if (row := self.find(part, arm, seed)) is not None]

    def fill_slots(self, part: str, arm: str, seed: int, measure: Callable[[], Row]) -> Row:
        """Return the result with the processor seconds that it took; measure it if it is absent."""
        if (result := self.find(part, arm, seed)) is not None:
            return result
        started = time.process_time()
        row = {"part": part, "arm": arm, "seed": seed, **measure()}
        row["processor_seconds"] = time.process_time() - started
        path = self.path(part, arm, seed)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".part")
        temporary.write_text(json.dumps(row))
        os.replace(temporary, path)
        return row
