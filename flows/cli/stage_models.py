"""Models named by the stage that made them: policy, sft/KEY, sft/epochs/2, sft/KEY/epochs/2."""

from __future__ import annotations

import re
from pathlib import Path

from rl_core.errors import SettingsError, nearest
from tasks.pipeline.result import EPOCH_MODELS
from tasks.stage_registry import policy_stages

__all__ = ["stage_model"]

_REFERENCE = re.compile(rf"([a-z][a-z0-9_]*)(?:/([0-9a-f]{{4,16}}))?(?:/{EPOCH_MODELS}/(\d+))?")
_KEY = re.compile(r"[0-9a-f]{16}")


def stage_model(reference: str, home: Path) -> str:
    """Folder of the model that a finished stage left, the newest one's without a key; another reference as it is.

    Args:
        reference: STAGE, STAGE/KEY (its first digits will do), each with /epochs/N for the model of an epoch.
        home: the pipeline's folder.
    Raises: SettingsError for a stage of the pipeline that has no such model.
    """
    match = _REFERENCE.fullmatch(reference)
    if match is None or Path(reference).exists() or match[1] not in policy_stages():
        return reference
    stage, key, epoch = match[1], match[2] or "", match[3]
    inner = Path(EPOCH_MODELS, epoch) if epoch else Path("model")
    folders = [path for path in (home / "stages" / stage).glob("*") if _KEY.fullmatch(path.name)]
    found = [path for path in folders if path.name.startswith(key) and (path / inner / "config.json").is_file()]
    if not found:
        wanted = f"{key}: " if key else ""
        keys = ", ".join(sorted(path.name for path in folders)) or "none"
        what = f"model of epoch {epoch} (keep_epochs)" if epoch else "finished model"
        hint = nearest(key, [path.name for path in folders]) if key and folders else f"finished ones: {keys}"
        raise SettingsError(f"{reference}: {wanted}no {what} of this stage in {home}; {hint}")
    if key and len(found) > 1:
        raise SettingsError(f"{reference}: several keys begin so: {', '.join(sorted(path.name for path in found))}")
    return str(max(found, key=lambda path: path.stat().st_mtime) / inner)
