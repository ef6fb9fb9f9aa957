"""`posttrain resume`: continue an interrupted run with its own settings, from its last checkpoint."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

from rl_core.errors import DataError, FolderBusy, SettingsError, nearest
from tasks.config import PipelineSettings, from_dict
from tasks.config.masking import masked_keys
from tasks.lifecycle.dead_runs import RunRecord, recorded_runs
from tasks.pipeline.stage_code import code_version

__all__ = ["find", "settings_of"]

logger = logging.getLogger(__name__)


def find(output: Path, run: str | None) -> RunRecord:
    """Run to resume: by name, by id or a prefix of it, or a pipeline's newest unfinished run.

    Args:
        run: None = the newest resumable run.
    Raises: DataError for an unknown run; SettingsError for a finished run; FolderBusy for a running one.
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
        raise FolderBusy(f"run '{first.name}' is still running{where}; nothing to resume")
    raise SettingsError(f"run '{first.name}' has finished; `posttrain run` with its config runs it again")


def _is_id(record: RunRecord, text: str) -> bool:
    return len(text) >= 6 and record.run_id.startswith(text)


def settings_of(record: RunRecord, output: Path, *, goes_on: bool = True) -> PipelineSettings:
    """Settings of a run. `goes_on`: it is resumed, so changed code is warned about, and the servers of rollouts answer.

    Raises: SettingsError if they were not recorded, or refer to something that no longer exists.
    """
    if record.settings is None:
        raise SettingsError(
            f"run '{record.name}' ended before its settings were recorded; start it with `posttrain run`"
        )
    if hidden := masked_keys(record.settings):
        raise SettingsError(
            f"run '{record.name}': {', '.join(hidden)} was not stored, as its name is that of a secret; go on with the "
            "same config: posttrain run CONFIG"
        )
    settings = from_dict(record.settings, ask_servers=goes_on)
    if Path(settings.output).resolve() != output.resolve():  # started from another working directory, or moved since
        settings = dataclasses.replace(settings, output=str(output.resolve()))
    if goes_on and record.code_version and record.code_version != code_version():
        logger.warning(
            "the code has changed since '%s' began (%s, now %s): finished stages run anew, and the unfinished one "
            "resumes with --allow-drift alone",
            record.name, record.code_version, code_version(),
        )  # fmt: skip
    return settings
