"""Tasks: the JSON files of a folder."""

from pathlib import Path


class TaskManager:
    def __init__(self, include_path=None, include_defaults=True):
        self.folder = include_path
        files = Path(include_path).glob("*.json") if include_path else ()
        self.all_tasks = sorted(path.stem for path in files)
        if include_defaults:
            self.all_tasks += ["gsm8k", "arc_easy"]
