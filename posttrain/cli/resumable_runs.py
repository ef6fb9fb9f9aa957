"""`posttrain resume`: continue an interrupted run with its own settings, from its last checkpoint."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

from rl_core.errors import DataError, FolderBusy, SettingsError, suggest_name
from tasks.config import PipelineSettings, build_settings
from tasks.config.displayed_settings import list_masked_keys
from tasks.lifecycle.crashed_runs import PipelineRunRecord, list_recorded_runs
from tasks.pipeline.stage_key import compute_code_version

logger = logging.getLogger(__name__)


def find_resumable_run(output: Path, run: str | None) -> PipelineRunRecord:
    """Run to resume: by name, by id or a prefix of it, or a pipeline's newest unfinished run.

    Args:
        run: None = the newest resumable run.
    Raises: DataError for an unknown run; SettingsError for a finished run; FolderBusy for a running one.
    """
    known = list_recorded_runs(output.resolve())
    if not known:
        raise DataError(
            f"no runs in {output.resolve()}; give the run's --config, or its --output folder"
        )
    named = [
        record
        for record in known
        if run is None or run in (record.name, record.pipeline) or _matches_run_id(record, run)
    ]
    if not named:
        raise DataError(
            f"no run '{run}' in {output.resolve()}; {suggest_name(str(run), [record.name for record in known])}"
        )
    open_ones = [record for record in named if record.status not in ("running", "finished")]
    if open_ones:
        return open_ones[0]
    first = named[0]
    if first.status == "running":
        where = f" on {first.host}" if first.host else ""
        raise FolderBusy(f"run '{first.name}' is still running{where}; nothing to resume")
    raise SettingsError(
        f"run '{first.name}' has finished; `posttrain run` with its config runs it again"
    )


def _matches_run_id(record: PipelineRunRecord, text: str) -> bool:
    return len(text) >= 6 and record.run_id.startswith(text)


def load_recorded_settings(
    record: PipelineRunRecord, output: Path, *, is_resumed: bool = True
) -> PipelineSettings:
    """Settings of a run. `goes_on`: it is resumed, so changed code is warned about, and the servers of rollouts answer.

    Raises: SettingsError if they were not recorded, or refer to something that no longer exists.
    """
    if record.settings is None:
        raise SettingsError(
            f"run '{record.name}' ended before its settings were recorded; start it with `posttrain run`"
        )
    if hidden := list_masked_keys(record.settings):
        raise SettingsError(
            f"run '{record.name}': {', '.join(hidden)} was not stored, as its name is that of a secret; go on with the "
            "same config: posttrain run CONFIG"
        )
    settings = build_settings(record.settings, check_servers=is_resumed)
    if (
        Path(settings.output).resolve() != output.resolve()
    ):  # started from another working directory, or moved since
        settings = dataclasses.replace(settings, output=str(output.resolve()))
    if is_resumed and record.code_version and record.code_version != compute_code_version():
        logger.warning(
            "the code has changed since '%s' began (%s, now %s): finished stages run anew, and the unfinished one "
            "resumes with --allow-drift alone",
            record.name,
            record.code_version,
            compute_code_version(),
        )
    return settings
