"""Models named on the command line: detection and short display names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from rl_core.errors import DataError
from tasks.pipeline.result import EPOCH_MODELS

__all__ = ["given_models", "name_of_model"]

_KEY = re.compile(r"[0-9a-f]{16}")  # a finished stage's folder
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def given_models(paths: Sequence[str]) -> dict[str, str]:
    """Name -> model folder, registered model or hub name; {} if all paths are trajectory files or folders of them.

    A finished stage's folder stands for its model, named after the stage.
    Raises: DataError if only some are models, or where nobody may look.
    """
    sources = [_model_at(path) for path in paths]
    if not any(sources):
        return {}
    if None in sources:
        raise DataError(
            f"{paths[sources.index(None)]}: holds no model (config.json), but {next(filter(None, sources))} does; give "
            "models alone, which then play the same episodes, or trajectory files alone"
        )
    models: dict[str, str] = {}
    for source in filter(None, sources):
        name = name_of_model(source)
        while name in models:
            name += "'"
        models[name] = source
    return models


def _model_at(path: str) -> str | None:
    """Model that a path refers to, if any. Raises: DataError where nobody may look."""
    folder = Path(path)
    try:
        for place in (folder, folder / "model"):
            if (place / "config.json").is_file():
                return str(place.resolve())
        is_there = folder.exists()
    except OSError as error:
        raise DataError(f"{path[:200]}: cannot be read: {error.strerror}") from None
    hub = not is_there and _HUB_NAME.fullmatch(path) and not path.endswith((".jsonl", ".json"))
    return path if path.startswith("models:/") or hub else None


def name_of_model(source: str) -> str:
    """Short name of a model, valid in file names; a version gets its model's name: models:/demo/3 is demo-v3.

    The model of an epoch is sft-epoch-2.
    """
    if source.startswith("models:/") and (parts := source.removeprefix("models:/").rsplit("/", 1))[-1].isdecimal():
        return re.sub(r"[^\w.@-]+", "_", "-v".join(parts))
    parts = source.removeprefix("models:/").rstrip("/").split("/")
    if len(parts) > 1 and parts[-1] == "model":
        parts.pop()
    if len(parts) > 3 and parts[-2] == EPOCH_MODELS and parts[-1].isdecimal() and _KEY.fullmatch(parts[-3]):
        return re.sub(r"[^\w.@-]+", "_", f"{parts[-4]}-epoch-{parts[-1]}")
    if len(parts) > 1 and _KEY.fullmatch(parts[-1]):
        parts.pop()
    return re.sub(r"[^\w.@-]+", "_", parts[-1])
