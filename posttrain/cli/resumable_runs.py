"""Interrupted runs and their recorded settings, for `posttrain resume`."""

from __future__ import annotations

import logging
from pathlib import Path

from rl_core.errors import DataError, FolderBusy, SettingsError, suggest_name
from tasks.config import PipelineSettings, build_settings
from tasks.config.displayed_settings import list_masked_keys
from tasks.lifecycle.crashed_runs import PipelineRunRecord, list_recorded_runs
from tasks.pipeline.stage_key import compute_code_version

logger = logging.getLogger(__name__)


def find_resumable_run(output: Path, run: str | None) -> PipelineRunRecord:
    """Return the run to resume: by name, by id or a prefix of it, or a pipeline's newest unfinished run.

    Args:
        run: None = the newest resumable run.
    Raises: DataError for an unknown run; SettingsError for a finished run; FolderBusy for a running one.
    """
    records = list_recorded_runs(output.resolve())
    if not records:
        raise DataError(
            f"no runs in {output.resolve()}; give the run's --config, or its --output folder"
        )
    matching = [
        record
        for record in records
        if run is None or run in (record.name, record.pipeline) or _matches_run_id(record, run)
    ]
    if not matching:
        hint = suggest_name(str(run), [record.name for record in records])
        raise DataError(f"no run '{run}' in {output.resolve()}; {hint}")
    for record in matching:
        if record.status not in ("running", "finished"):
            return record
    newest = matching[0]
    if newest.status == "running":
        where = f" on {newest.host}" if newest.host else ""
        raise FolderBusy(f"run '{newest.name}' is still running{where}; nothing to resume")
    raise SettingsError(
        f"run '{newest.name}' has finished; `posttrain run` with its config runs it again"
    )


def _matches_run_id(record: PipelineRunRecord, text: str) -> bool:
    return len(text) >= 6 and record.run_id.startswith(text)


def load_recorded_settings(
    record: PipelineRunRecord, output: Path, *, is_resumed: bool = True
) -> PipelineSettings:
    """Load the settings of a run.

    Args:
        is_resumed: the run is resumed: warn about changed code, and check the servers of its rollouts.
    Raises: SettingsError if they were not recorded, or refer to something that no longer exists.
    """
    if record.settings is None:
        raise SettingsError(
            f"run '{record.name}' ended before its settings were recorded; start it with `posttrain run`"
        )
    masked = list_masked_keys(record.settings)
    if masked:
        raise SettingsError(
            f"run '{record.name}': {', '.join(masked)} was not stored because its name is that of a secret; resume it "
            "with the same config: posttrain run CONFIG"
        )
    values = record.settings
    # The run may have been started from another working directory, or moved since.
    if Path(values.get("output", "outputs")).resolve() != output.resolve():
        values = {**values, "output": str(output.resolve())}
    settings = build_settings(values, check_servers=is_resumed)
    if is_resumed and record.code_version and record.code_version != compute_code_version():
        logger.warning(
            "the code has changed since '%s' began (%s, now %s): finished stages run again, and the unfinished one "
            "resumes only with --allow-drift",
            record.name,
            record.code_version,
            compute_code_version(),
        )
    return settings
