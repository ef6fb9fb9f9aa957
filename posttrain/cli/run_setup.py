"""Steps before a command starts: load settings, refuse unknown models, configure Prefect, print the banner.

The banner says what runs, what is cached, where the files are and where the run can be watched.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from flows.runtime.terminal import escape_control_characters
from posttrain.cli.arguments import list_overrides
from rl_core.errors import DataError, PosttrainError, SettingsError
from tasks.command_hints import format_output_option

if TYPE_CHECKING:
    from flows.sweep.plan import SweepPlan
    from tasks.config import PipelineSettings
    from tasks.lifecycle.crashed_runs import PipelineRunRecord
    from tasks.pipeline.stage_key import StageKeys
    from tasks.tracking.run_ids import NamedRun

_BANNER_COLUMNS = 79


def format_run_banner(
    settings: PipelineSettings,
    *,
    keys: StageKeys | None = None,
    fresh: bool = False,
    stages: Sequence[str] | None = None,
) -> str:
    """Return the lines to print before anything heavy is imported.

    Args:
        keys: of the stages, as far as they are collected.
        fresh: finished stages run again.
        stages: those that run; None = all of the settings.
    """
    names = list(settings.stages.active if stages is None else stages)
    lines = _wrap_banner_line(
        f"{settings.name}: {' -> '.join(name.replace('_', ' ') for name in names)}", "  "
    )
    home = Path(settings.output).resolve() / settings.name
    finished = [] if fresh else _list_finished_stages(settings, home, keys)
    cached = ", ".join(name.replace("_", " ") for name in finished if name in names)
    if cached:
        text = f"cached   {cached}, unless data files have changed"
        lines += _wrap_banner_line(text, " " * 9)
    return "\n".join([*lines, *_list_locations(settings, home)])


def format_sweep_banner(plan: SweepPlan, base: PipelineSettings) -> str:
    """Return the banner of a sweep: what varies, the number of trials, and the folder.

    Raises: SettingsError.
    """
    from flows.sweep.search import build_grid

    varied = [
        f"{dimension.key} ({len(dimension.choices) or 'range'})" for dimension in plan.dimensions
    ]
    configurations = len(build_grid(plan.dimensions)) if plan.method == "grid" else plan.trials
    seeds = f" x {plan.seeds} seeds" if plan.seeds > 1 else ""
    trials = f"{configurations} configuration{'s' * (configurations != 1)}{seeds}"
    lines = _wrap_banner_line(
        f"{base.name}: sweep over {', '.join(varied) or 'seeds'}: {trials}, {plan.method}", "  "
    )
    return "\n".join([*lines, *_list_locations(base, plan.locate_folder(base))])


def _wrap_banner_line(text: str, indent: str) -> list[str]:
    width = max(36, min(_BANNER_COLUMNS, shutil.get_terminal_size().columns - 1))
    return textwrap.wrap(text, width, subsequent_indent=indent, break_on_hyphens=False)


def _list_locations(settings: PipelineSettings, home: Path) -> list[str]:
    """List the folder of the files and the commands or pages that show progress."""
    output_option = format_output_option(Path(settings.output))
    urls = _read_served_pages(Path(settings.output))
    pages = [urls[name] for name in ("monitor", "mlflow", "prefect") if urls.get(name)]
    pages = pages or [f"posttrain ui{output_option}"]
    return [
        f"output   {home}",
        f"web UI   {', '.join(pages)}",
        f"results  posttrain runs{output_option}",
    ]


def _read_served_pages(output: Path) -> dict[str, str]:
    """Return name -> URL of the pages that `posttrain up` serves for a folder; {} if it does not run."""
    from posttrain.operations.connection import find_running_servers

    state = find_running_servers(output)
    return {service.name: service.url for service in state.services} if state is not None else {}


def _list_finished_stages(
    settings: PipelineSettings, home: Path, keys: StageKeys | None
) -> list[str]:
    """List the stages finished under these settings; [] if that is unknown, which the run then reports."""
    if not (home / "stages").is_dir():
        return []
    from tasks.pipeline.changed_conditions import list_finished_stages
    from tasks.pipeline.stage_key import StageKeys

    try:
        return list_finished_stages(home / "stages", keys or StageKeys(settings))
    except (PosttrainError, OSError):
        return []


def load_pipeline_settings(
    arguments: argparse.Namespace, import_code: bool = True, *, check_servers: bool = False
) -> PipelineSettings:
    """Load the settings of the named configuration, with `--set` and `--output`.

    Args:
        check_servers: for commands that train: fail at once if the server of their rollouts does not answer, or if
            quantized weights have no GPU.
    """
    from tasks.config import load_settings
    from tasks.mlflow_environment import check_environment_uri

    settings = load_settings(
        arguments.config,
        list_overrides(arguments),
        import_code=import_code,
        check_servers=check_servers,
        warn=print_warning,
    )
    if settings.tracking.uri is None:
        check_environment_uri()
    return settings


def print_warning(text: str) -> None:
    """Print a warning on standard error."""
    print(f"posttrain: warning: {escape_control_characters(text)}", file=sys.stderr)


def load_optional_settings(
    arguments: argparse.Namespace, import_code: bool = False
) -> PipelineSettings | None:
    """Load the settings of the configuration, if one is named; import the code they name only with `import_code`."""
    if arguments.config is None and getattr(arguments, "set", None):
        raise SettingsError(
            f"--set changes a configuration; name it: posttrain {arguments.command} CONFIG"
        )
    return None if arguments.config is None else load_pipeline_settings(arguments, import_code)


def configure_prefect(settings: PipelineSettings) -> None:
    """Configure Prefect before its import: files in the output folder, or the servers of `posttrain up`."""
    from flows.runtime.prefect_home import set_prefect_environment
    from posttrain.operations.connection import connect_to_servers

    set_prefect_environment(Path(settings.output))
    connect_to_servers(Path(settings.output))


@contextlib.contextmanager
def print_banner_and_start_prefect(
    settings: PipelineSettings,
    *,
    keys: StageKeys | None = None,
    quiet: bool = False,
    fresh: bool = False,
    stages: Sequence[str] | None = None,
    banner: str = "",
) -> Iterator[None]:
    """Print the banner; start Prefect's server while the block imports the flow.

    Call it after `configure_prefect`, in commands that run the pipeline's flow.
    Args:
        keys: of the stages, as far as they are collected.
        fresh: finished stages run again.
        stages: those that run, if not all of the settings.
        banner: the lines of something other than a pipeline.
    """
    from flows.runtime.embedded_server import prestart_embedded_server
    from flows.runtime.import_setup import pause_garbage_collection

    if not quiet:
        banner = banner or format_run_banner(settings, keys=keys, fresh=fresh, stages=stages)
        print(escape_control_characters(banner), flush=True)
    prestart_embedded_server()
    with pause_garbage_collection(is_command=True):
        yield


def refuse_unknown_models(settings: PipelineSettings, *names: str | None) -> None:
    """Refuse models of the command line that do not exist, before anything starts or is written."""
    from posttrain.cli.model_references import refuse_missing_model

    connect_mlflow(settings.output)  # ask the store of `posttrain up` if it runs
    for name in filter(None, names):
        refuse_missing_model(name, Path(settings.output), settings.tracking.uri)


def refuse_unknown_base_model(settings: PipelineSettings, keys: StageKeys | None = None) -> None:
    """Refuse a base model that does not exist, before anything starts or is written.

    A folder was checked with the settings. Once a stage has trained from the model, nothing is looked up: a fully
    cached run needs neither the hub nor the store.
    Args:
        keys: of the stages, as far as they are collected.
    """
    name = settings.model.path
    if name is None or os.path.isdir(os.path.expanduser(name)):
        return
    from rl_core.models.named_models import resolve_local_model
    from tasks.pipeline.changed_conditions import list_finished_stages
    from tasks.pipeline.stage_key import StageKeys
    from tasks.stage_registry import list_training_stages

    stages = Path(settings.output).resolve() / settings.name / "stages"
    if stages.is_dir() and not set(list_training_stages()).isdisjoint(
        list_finished_stages(stages, keys or StageKeys(settings))
    ):
        return
    try:
        refuse_unknown_models(settings, name)
        # downloads and converts with a line of its own, before the progress display begins
        resolve_local_model(name, report=print)
    except SettingsError as error:
        raise SettingsError(f"model.path: {error}") from None


def refuse_bad_rows(settings: PipelineSettings) -> None:
    """Refuse unusable data rows before a server starts and before the run is recorded anywhere."""
    from tasks.config.machine_checks import refuse_bad_rows

    refuse_bad_rows(settings)


def refuse_unreadable_folder(output: str | Path) -> None:
    """Refuse an output folder that this user may not read. Raises: SettingsError."""
    if os.path.isdir(output) and not os.access(output, os.R_OK | os.X_OK):
        raise SettingsError(f"{output}: cannot be read: {os.strerror(errno.EACCES)}")


def connect_mlflow(output: str | Path) -> Path:
    """Use the MLflow server of `posttrain up` if it runs; return the folder. Raises: SettingsError."""
    refuse_unreadable_folder(output)
    from posttrain.operations.connection import connect_to_servers

    connect_to_servers(Path(output), needs_prefect=False)
    return Path(output)


def resolve_tracking_store(
    arguments: argparse.Namespace, settings: PipelineSettings | None
) -> tuple[Path, str | None]:
    """Return the output folder and tracking URI of the configuration, or of `--output`."""
    output = connect_mlflow(settings.output if settings else arguments.output)
    return output, settings.tracking.uri if settings else None


@dataclass(frozen=True)
class CommandTarget:
    """Configuration or run that the argument CONFIG|RUN names, with its output folder."""

    output: Path
    settings: PipelineSettings | None = None  # of the configuration
    record: PipelineRunRecord | None = None  # of the run
    run: NamedRun | None = None

    @property
    def tracking_uri(self) -> str | None:
        """Tracking store that the configuration or the run names."""
        if self.settings is not None:
            return self.settings.tracking.uri
        recorded = (self.record.settings or {}) if self.record is not None else {}
        uri = recorded.get("tracking", {}).get("uri")
        return uri if isinstance(uri, str) else None


def is_config_name(text: str) -> bool:
    """Return whether the text names a configuration: a file, or a shipped one."""
    from tasks.shipped import find_config

    path = find_config(text)
    try:
        return path.is_file() or path.suffix in (".yaml", ".yml")
    except OSError:  # the name is too long
        return False


def resolve_target(arguments: argparse.Namespace, *, import_code: bool = False) -> CommandTarget:
    """Resolve the argument CONFIG|RUN, which may be missing, with `--set` and `--output`.

    Raises: SettingsError; DataError if it is neither a configuration nor a run of the output folder.
    """
    name = arguments.config
    if name is None or is_config_name(name):
        settings = load_optional_settings(arguments, import_code)
        return CommandTarget(Path(settings.output if settings else arguments.output), settings)
    if arguments.set:
        raise SettingsError(f"--set changes a configuration; {name} is none")
    refuse_unreadable_folder(arguments.output)
    run, record = _find_run(arguments.output, name)
    return CommandTarget(Path(arguments.output), record=record, run=run)


def load_target_settings(target: CommandTarget) -> PipelineSettings:
    """Load the settings of a target: the configuration's, those that its run recorded, or the newest run's.

    Raises: SettingsError; DataError without a run.
    """
    from posttrain.cli.recorded_settings import load_newest_run_settings, load_recorded_settings

    if target.settings is not None:
        return target.settings
    if target.record is None:
        return load_newest_run_settings(target.output)
    return load_recorded_settings(target.record, target.output, is_resumed=False)


def find_tracking_uri(output: Path, run: str) -> str | None:
    """Return the tracking store that a run of the output folder recorded; None = that of the folder."""
    try:
        return CommandTarget(output, record=find_run_record(output, run)).tracking_uri
    except DataError:
        return None  # perhaps a run of the store without files here


def find_run_record(output: str | Path, name: str) -> PipelineRunRecord:
    """Find a run by short id, name, digits of its id, or as the newest of a pipeline. Raises: DataError."""
    return _find_run(output, name)[1]


def _find_run(output: str | Path, name: str) -> tuple[NamedRun, PipelineRunRecord]:
    from tasks.lifecycle.crashed_runs import read_run_record
    from tasks.tracking.run_ids import find_named_run, list_named_runs

    folder = Path(output).resolve()
    run = find_named_run(list_named_runs(folder), name, folder)
    assert run.folder is not None
    record = read_run_record(run.folder)
    if record is None:
        raise DataError(f"{run.folder}: the record of run '{run.short_id}' cannot be read")
    return run, record


def print_wrapped(text: str) -> None:
    """Print text of models, environments or people: wrapped in a terminal, with control characters escaped."""
    from flows.runtime.progress import wrap_to_terminal

    print(wrap_to_terminal(escape_control_characters(text)))
