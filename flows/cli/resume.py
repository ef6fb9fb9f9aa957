"""`posttrain resume`: go on with a run that was cut short, with its own settings, from its last checkpoint."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

from rl_core.errors import DataError, FolderBusy, SettingsError, nearest
from tasks.config import PipelineSettings, from_dict
from tasks.lifecycle.dead_runs import RunRecord, recorded_runs
from tasks.pipeline.key import code_version

__all__ = ["find", "settings_of"]

logger = logging.getLogger(__name__)


def find(output: Path, run: str | None) -> RunRecord:
    """The run to go on with: by name, by id or the beginning of it, or a pipeline's newest that did not end well.

    Args:
        run: None = the newest of all that can be resumed.
    Raises: DataError for an unknown run; SettingsError for one that has finished; FolderBusy for one that is alive.
    """
    known = recorded_runs(output.resolve())
    if not known:
        raise DataError(f"no runs in {output.resolve()}; give the run's --config, or its --output folder")
    named = [record for record in known if run is None or run in (record.name, record.pipeline) or _is_id(record, run)]
    if not named:
        raise DataError(f"no run '{run}' in {output.resolve()}; {nearest(str(run), [record.name for record in known])}")
    open_ones = [record for record in named if record.status not in ("running", "finished")]
    if open_ones:
        return open_ones[0]
    first = named[0]
    if first.status == "running":
        where = f" on {first.host}" if first.host else ""
        raise FolderBusy(f"run '{first.name}' is alive{where}; nothing has to be resumed")
    raise SettingsError(f"run '{first.name}' has finished; `posttrain run` with its config runs it again")


def _is_id(record: RunRecord, text: str) -> bool:
    return len(text) >= 6 and record.run_id.startswith(text)


def settings_of(record: RunRecord, output: Path) -> PipelineSettings:
    """The settings that a run began with; warns where the code is another one by now.

    Raises: SettingsError where they were not recorded, or what they name is no longer there.
    """
    if record.settings is None:
        raise SettingsError(
            f"run '{record.name}' ended before its settings were recorded; start it with `posttrain run`"
        )
    settings = from_dict(record.settings)
    if Path(settings.output).resolve() != output.resolve():  # started from another folder, or moved since
        settings = dataclasses.replace(settings, output=str(output.resolve()))
    if record.code_version and record.code_version != code_version():
        logger.warning(
            "the code has changed since '%s' began (%s, now %s): what it decides is computed again, from the start",
            record.name, record.code_version, code_version(),
        )  # fmt: skip
    return settings
