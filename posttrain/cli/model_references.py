"""Models named on the command line: stage references, display names, an early check that the model exists.

A stage reference is policy, sft/KEY, sft/epochs/2 or sft/KEY/epochs/2. The check runs before any server starts.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from rl_core.errors import DataError, SettingsError, suggest_name
from rl_core.models.adapter_folder import is_adapter_folder
from rl_core.models.named_models import find_hub_problem, is_local_model
from rl_core.tracking import replace_invalid_characters
from tasks.pipeline.stage_result import EPOCH_MODELS
from tasks.stage_registry import list_policy_stages
from tasks.tracking import Tracking
from tasks.tracking.registry import (
    HUB_NAME,
    REFERENCE,
    is_registered_reference,
    refuse_unregistered_model,
)
from tasks.tracking.run_ids import (
    AmbiguousRun,
    find_named_run,
    is_short_id,
    list_named_runs,
    refuse_sweep,
)

_STAGE_REFERENCE = re.compile(
    rf"([a-z][a-z0-9_]*)(?:/([0-9a-f]{{4,16}}))?(?:/{EPOCH_MODELS}/(\d+))?"
)
_STAGE_KEY = re.compile(r"[0-9a-f]{16}")  # name of a finished stage's folder
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def resolve_run_model(reference: str, output: Path) -> str:
    """Return the folder of the last model that a run trained; return other references unchanged.

    Args:
        reference: short id of a run of the output folder.
    Raises: DataError for an ambiguous id and for a sweep; SettingsError for a run without a finished model.
    """
    if not is_short_id(reference) or os.path.lexists(reference) or not output.is_dir():
        return reference
    try:
        run = find_named_run(list_named_runs(output.resolve()), reference, output)
    except AmbiguousRun:
        raise
    except DataError:
        return reference
    assert run.folder is not None
    from posttrain.monitor.reader import RunReader
    from posttrain.monitor.runs import build_run_id

    refuse_sweep(run)
    view = RunReader(output.resolve()).load_run(build_run_id(run.folder))
    folders = {stage.label: stage.folder for stage in view.stages} if view is not None else {}
    for stage in reversed(list_policy_stages()):
        folder = folders.get(stage)
        if folder is not None and _STAGE_KEY.fullmatch(folder.name) and (folder / "model").is_dir():
            return str(folder / "model")
    raise SettingsError(
        f"{reference}: this run has no finished model (`posttrain logs {reference}`)"
    )


def resolve_stage_model(reference: str, home: Path) -> str:
    """Return the model folder of a finished stage, the newest one without a key; return other references unchanged.

    Args:
        reference: STAGE, STAGE/KEY (its first digits suffice), each with /epochs/N for the model of an epoch; or a
            run's short id, for its last model.
        home: the pipeline's folder.
    Raises: SettingsError for a stage of the pipeline that has no such model.
    """
    reference = resolve_run_model(reference, home.parent)
    match = _STAGE_REFERENCE.fullmatch(reference)
    if match is None or Path(reference).exists() or match[1] not in list_policy_stages():
        return reference
    stage, key, epoch = match[1], match[2] or "", match[3]
    inner = Path(EPOCH_MODELS, epoch) if epoch else Path("model")
    folders = [
        path for path in (home / "stages" / stage).glob("*") if _STAGE_KEY.fullmatch(path.name)
    ]
    matching = [
        path
        for path in folders
        if path.name.startswith(key) and (path / inner / "config.json").is_file()
    ]
    if not matching:
        names = sorted(path.name for path in folders)
        kind = f"model of epoch {epoch} (keep_epochs)" if epoch else "finished model"
        hint = f"finished ones: {', '.join(names) or 'none'}"
        if key and names:
            hint = suggest_name(key, names)
        prefix = f"{reference}: {key}: " if key else f"{reference}: "
        raise SettingsError(f"{prefix}no {kind} of this stage in {home}; {hint}")
    if key and len(matching) > 1:
        names = sorted(path.name for path in matching)
        raise SettingsError(f"{reference}: several keys begin so: {', '.join(names)}")
    return str(max(matching, key=lambda path: path.stat().st_mtime) / inner)


def resolve_model_references(paths: Sequence[str]) -> dict[str, str]:
    """Return name -> model folder, registered model or hub name.

    A finished stage's folder stands for its model, named after the stage.
    Returns: {} if all paths are trajectory files or folders of them.
    Raises: DataError if only some are models, or if a path cannot be read.
    """
    sources = [_find_model(path) for path in paths]
    if not any(sources):
        return {}
    if None in sources:
        raise DataError(
            f"{paths[sources.index(None)]}: holds no model (config.json), but {next(filter(None, sources))} does; give "
            "models alone, which then play the same episodes, or trajectory files alone"
        )
    models: dict[str, str] = {}
    for source in filter(None, sources):
        name = format_model_name(source)
        while name in models:
            name += "'"
        models[name] = source
    return models


def _find_model(path: str) -> str | None:
    """Return the model that a path refers to, if any. Raises: DataError if the path cannot be read."""
    folder = Path(path)
    try:
        for candidate in (folder, folder / "model"):
            if (candidate / "config.json").is_file() or is_adapter_folder(candidate):
                return str(candidate.resolve())
        exists = folder.exists()
        if is_local_model(path):
            return str(folder.resolve()) if exists else path
    except OSError as error:
        raise DataError(f"{path[:200]}: cannot be read: {error.strerror}") from None
    is_data_file = path.endswith((".jsonl", ".json"))
    is_hub_name = not exists and not is_data_file and _HUB_NAME.fullmatch(path) is not None
    return path if path.startswith("models:/") or is_hub_name else None


def format_model_name(source: str) -> str:
    """Return a short name of a model, valid in file names.

    Examples: models:/demo/3 is demo-v3; the model of an epoch is sft-epoch-2.
    """
    path = source.removeprefix("models:/")
    parts = path.rstrip("/").split("/")
    if source.startswith("models:/") and path.rpartition("/")[2].isdecimal():
        name = "-v".join(path.rsplit("/", 1))
    else:
        if len(parts) > 1 and parts[-1] == "model":
            parts.pop()
        is_epoch = len(parts) > 3 and parts[-2] == EPOCH_MODELS and parts[-1].isdecimal()
        if is_epoch and _STAGE_KEY.fullmatch(parts[-3]):
            name = f"{parts[-4]}-epoch-{parts[-1]}"
        else:
            name = parts[-2 if len(parts) > 1 and _STAGE_KEY.fullmatch(parts[-1]) else -1]
    return replace_invalid_characters(name, r"\w.@-")


def refuse_missing_model(name: str, output: Path, uri: str | None) -> None:
    """Look a model up: a folder, a registered version, or a name of the hub. Download nothing.

    Args:
        output: the output folder.
        uri: tracking store, as in a config.
    Raises: SettingsError with suggestions; BackendError if the tracking store does not answer.
    """
    if is_registered_reference(name):
        tracking = Tracking(uri, output)
        database = tracking.store.uri.removeprefix("sqlite:///")
        match = REFERENCE.fullmatch(name)
        if database != tracking.store.uri and match is not None:
            if not Path(database).exists():  # opening it would create it
                raise SettingsError(f"{name}: no model is registered yet; {database} is not there")
            refuse_unregistered_model(
                match["name"],
                match["alias"],
                match["version"],
                Path(database),
                tracking.store.label,
            )
        tracking.registry.find_version(name)
        return
    path = Path(name).expanduser()
    if is_local_model(name):
        return
    if path.is_dir():
        if not (path / "config.json").is_file() and not is_adapter_folder(path):
            has_model = (path / "model" / "config.json").is_file()
            hint = f"; did you mean {path / 'model'}?" if has_model else ""
            raise SettingsError(
                f"{name}: is a folder without a config.json, so it is no model{hint}"
            )
        return
    if path.exists():
        raise SettingsError(
            f"{name}: is a file, but no GGUF file; name one, or the folder that holds config.json"
        )
    if name.startswith((".", "/", "~")) or name.count("/") > 1 or not HUB_NAME.fullmatch(name):
        raise SettingsError(f"{name}: there is no such folder{_suggest_nearby_folder(path)}")
    problem = find_hub_problem(name)
    if problem:
        raise SettingsError(
            f"{name}: there is no such folder, and {problem}{_suggest_nearby_folder(path)}"
        )


def _suggest_nearby_folder(path: Path) -> str:
    """Suggest a sibling model folder with a similar name; "" if there is none."""
    try:
        names = [item.name for item in path.parent.iterdir() if (item / "config.json").is_file()]
    except OSError:
        return ""
    return f"; {suggest_name(path.name, names)}" if names else ""
