"""Models named by the stage that made them: policy, sft/KEY, sft/epochs/2, sft/KEY/epochs/2.

Models named on the command line: detection and short display names.

Early check of a model that a command names: before any server starts, in place of a minute later.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from rl_core.errors import DataError, SettingsError, suggest_name
from tasks.pipeline.stage_result import EPOCH_MODELS
from tasks.stage_registry import list_policy_stages
from tasks.tracking import Tracking
from tasks.tracking.registry import (
    HUB_NAME,
    REFERENCE,
    is_registered_reference,
    refuse_unregistered_model,
)

_STAGE_REFERENCE = re.compile(
    rf"([a-z][a-z0-9_]*)(?:/([0-9a-f]{{4,16}}))?(?:/{EPOCH_MODELS}/(\d+))?"
)
_STAGE_KEY = re.compile(r"[0-9a-f]{16}")


def resolve_stage_model(reference: str, home: Path) -> str:
    """Folder of the model that a finished stage left, the newest one's without a key; another reference as it is.

    Args:
        reference: STAGE, STAGE/KEY (its first digits will do), each with /epochs/N for the model of an epoch.
        home: the pipeline's folder.
    Raises: SettingsError for a stage of the pipeline that has no such model.
    """
    match = _STAGE_REFERENCE.fullmatch(reference)
    if match is None or Path(reference).exists() or match[1] not in list_policy_stages():
        return reference
    stage, key, epoch = match[1], match[2] or "", match[3]
    inner = Path(EPOCH_MODELS, epoch) if epoch else Path("model")
    folders = [
        path for path in (home / "stages" / stage).glob("*") if _STAGE_KEY.fullmatch(path.name)
    ]
    found = [
        path
        for path in folders
        if path.name.startswith(key) and (path / inner / "config.json").is_file()
    ]
    if not found:
        wanted = f"{key}: " if key else ""
        keys = ", ".join(sorted(path.name for path in folders)) or "none"
        what = f"model of epoch {epoch} (keep_epochs)" if epoch else "finished model"
        hint = (
            suggest_name(key, [path.name for path in folders])
            if key and folders
            else f"finished ones: {keys}"
        )
        raise SettingsError(f"{reference}: {wanted}no {what} of this stage in {home}; {hint}")
    if key and len(found) > 1:
        raise SettingsError(
            f"{reference}: several keys begin so: {', '.join(sorted(path.name for path in found))}"
        )
    return str(max(found, key=lambda path: path.stat().st_mtime) / inner)


_STAGE_KEY_FOLDER = re.compile(r"[0-9a-f]{16}")  # a finished stage's folder
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def resolve_model_references(paths: Sequence[str]) -> dict[str, str]:
    """Name -> model folder, registered model or hub name; {} if all paths are trajectory files or folders of them.

    A finished stage's folder stands for its model, named after the stage.
    Raises: DataError if only some are models, or where nobody may look.
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


def format_model_name(source: str) -> str:
    """Short name of a model, valid in file names; a version gets its model's name: models:/demo/3 is demo-v3.

    The model of an epoch is sft-epoch-2.
    """
    if (
        source.startswith("models:/")
        and (parts := source.removeprefix("models:/").rsplit("/", 1))[-1].isdecimal()
    ):
        return re.sub(r"[^\w.@-]+", "_", "-v".join(parts))
    parts = source.removeprefix("models:/").rstrip("/").split("/")
    if len(parts) > 1 and parts[-1] == "model":
        parts.pop()
    if (
        len(parts) > 3
        and parts[-2] == EPOCH_MODELS
        and parts[-1].isdecimal()
        and _STAGE_KEY_FOLDER.fullmatch(parts[-3])
    ):
        return re.sub(r"[^\w.@-]+", "_", f"{parts[-4]}-epoch-{parts[-1]}")
    if len(parts) > 1 and _STAGE_KEY_FOLDER.fullmatch(parts[-1]):
        parts.pop()
    return re.sub(r"[^\w.@-]+", "_", parts[-1])


HUB_TIMEOUT_SECONDS = 5.0  # that the hub has to answer


def refuse_missing_model(name: str, output: Path, uri: str | None) -> None:
    """Look a model up: a folder, a registered version, or a name of the hub; nothing is downloaded.

    Args:
        output: the output folder. uri: tracking store, as in a config.
    Raises: SettingsError with what is known; BackendError where the tracking store does not answer.
    """
    if is_registered_reference(name):
        tracking = Tracking(uri, output)
        database = tracking.store.uri.removeprefix("sqlite:///")
        is_file = database != tracking.store.uri
        if is_file and (match := REFERENCE.fullmatch(name)):
            if not Path(database).exists():  # looking makes none
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
    if path.is_dir():
        if not (path / "config.json").is_file():
            inside = (
                f"; did you mean {path / 'model'}?"
                if (path / "model" / "config.json").is_file()
                else ""
            )
            raise SettingsError(
                f"{name}: is a folder without a config.json, so it is no model{inside}"
            )
        return
    if path.exists():
        raise SettingsError(f"{name}: is a file; name the folder that holds config.json")
    if name.startswith((".", "/", "~")) or name.count("/") > 1 or not HUB_NAME.fullmatch(name):
        raise SettingsError(f"{name}: there is no such folder{_suggest_nearby_folder(path)}")
    if problem := _find_hub_problem(name):
        raise SettingsError(
            f"{name}: there is no such folder, and {problem}{_suggest_nearby_folder(path)}"
        )


def _suggest_nearby_folder(path: Path) -> str:
    """Folder of a model beside, whose name is near."""
    try:
        known = [item.name for item in path.parent.iterdir() if (item / "config.json").is_file()]
    except OSError:
        return ""
    return f"; {suggest_name(path.name, known)}" if known else ""


def _find_hub_problem(name: str) -> str:
    """Reason for which the hub has no such model, or cannot be asked; "" = it has, or a copy of it is here."""
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError

    if isinstance(try_to_load_from_cache(name, "config.json"), str):
        return ""
    if constants.HF_HUB_OFFLINE or os.environ.get("TRANSFORMERS_OFFLINE", "") not in ("", "0"):
        return "no copy of a model of that name from the hub, which is not to be asked (HF_HUB_OFFLINE)"
    try:
        get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=HUB_TIMEOUT_SECONDS)
    except EntryNotFoundError:
        return f"'{name}' on the hub has no config.json"
    except HfHubHTTPError as error:
        code = getattr(error.response, "status_code", None)
        return (
            f"the hub has no model of that name that you may read (answer {code})"
            if code in (401, 403, 404)
            else ""
        )
    except (
        Exception
    ) as error:  # of the HTTP library: no network, a name that does not resolve, a proxy, time
        return f"the hub, where models of that name are looked up, does not answer ({type(error).__name__})"
    return ""
