"""Early check of a model that a command names: before any server starts, in place of a minute later."""

from __future__ import annotations

import os
from pathlib import Path

from rl_core.errors import SettingsError, nearest
from tasks.tracking import Tracking
from tasks.tracking.registered_names import refuse_unregistered
from tasks.tracking.registry import HUB_NAME, REFERENCE, is_registered_reference

__all__ = ["check_given_model"]

HUB_SECONDS = 5.0  # that the hub has to answer


def check_given_model(name: str, output: Path, uri: str | None) -> None:
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
            refuse_unregistered(match["name"], match["alias"], match["version"], Path(database), tracking.store.label)
        tracking.registry.find(name)
        return
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            inside = f"; did you mean {path / 'model'}?" if (path / "model" / "config.json").is_file() else ""
            raise SettingsError(f"{name}: is a folder without a config.json, so it is no model{inside}")
        return
    if path.exists():
        raise SettingsError(f"{name}: is a file; name the folder that holds config.json")
    if name.startswith((".", "/", "~")) or name.count("/") > 1 or not HUB_NAME.fullmatch(name):
        raise SettingsError(f"{name}: there is no such folder{_neighbour(path)}")
    if problem := _hub_problem(name):
        raise SettingsError(f"{name}: there is no such folder, and {problem}{_neighbour(path)}")


def _neighbour(path: Path) -> str:
    """Folder of a model beside, whose name is near."""
    try:
        known = [item.name for item in path.parent.iterdir() if (item / "config.json").is_file()]
    except OSError:
        return ""
    return f"; {nearest(path.name, known)}" if known else ""


def _hub_problem(name: str) -> str:
    """Reason for which the hub has no such model, or cannot be asked; "" = it has, or a copy of it is here."""
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError

    if isinstance(try_to_load_from_cache(name, "config.json"), str):
        return ""
    if constants.HF_HUB_OFFLINE or os.environ.get("TRANSFORMERS_OFFLINE", "") not in ("", "0"):
        return "no copy of a model of that name from the hub, which is not to be asked (HF_HUB_OFFLINE)"
    try:
        get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=HUB_SECONDS)
    except EntryNotFoundError:
        return f"'{name}' on the hub has no config.json"
    except HfHubHTTPError as error:
        code = getattr(error.response, "status_code", None)
        return f"the hub has no model of that name that you may read (answer {code})" if code in (401, 403, 404) else ""
    except Exception as error:  # of the HTTP library: no network, a name that does not resolve, a proxy, time
        return f"the hub, where models of that name are looked up, does not answer ({type(error).__name__})"
    return ""
