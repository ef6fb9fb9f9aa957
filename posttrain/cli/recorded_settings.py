"""Settings of recorded runs, for `posttrain resume`, `replay` and `compare --models`."""

from __future__ import annotations

import logging
from pathlib import Path

from rl_core.errors import DataError, SettingsError
from tasks.config import PipelineSettings, build_settings
from tasks.config.displayed_settings import list_masked_keys
from tasks.lifecycle.crashed_runs import PipelineRunRecord, list_recorded_runs
from tasks.pipeline.stage_key import compute_code_version

logger = logging.getLogger(__name__)


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


def load_newest_run_settings(output: Path) -> PipelineSettings:
    """Load the settings of the newest run in a folder. Raises: DataError if there is none."""
    for record in list_recorded_runs(output.resolve()):
        if record.settings is not None:
            return load_recorded_settings(record, output, is_resumed=False)
    raise DataError(f"no runs in {output.resolve()}; name its output folder with --output")
