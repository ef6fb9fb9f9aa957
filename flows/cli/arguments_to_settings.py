"""Settings and servers that a command's arguments name."""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from flows.runtime.visible import visible
from rl_core.errors import SettingsError

if TYPE_CHECKING:
    from tasks.config import PipelineSettings

__all__ = [
    "begin",
    "check_base_model",
    "check_models",
    "connect_mlflow",
    "load",
    "optional",
    "prepare",
    "refuse_bad_rows",
    "refuse_closed",
    "warn",
]


def load(arguments: argparse.Namespace, import_code: bool = True, *, ask_servers: bool = False) -> PipelineSettings:
    """Settings of the configuration that is named, with `--set`.

    ask_servers: for commands that train, which end at once where the server of their rollouts does not answer, or
    where there is no GPU for weights in few bits.
    """
    from tasks.config import load

    return load(arguments.config, arguments.set, import_code=import_code, ask_servers=ask_servers, warn=warn)


def warn(text: str) -> None:
    """Print a warning on standard error."""
    print(f"posttrain: warning: {visible(text)}", file=sys.stderr)


def optional(arguments: argparse.Namespace, import_code: bool = False) -> PipelineSettings | None:
    """Settings of --config, if given; without `import_code` the code that they name is not imported."""
    if arguments.config is None and arguments.set:
        raise SettingsError("--set changes a configuration; give one with --config")
    return None if arguments.config is None else load(arguments, import_code)


def prepare(settings: PipelineSettings) -> None:
    """Configure Prefect before its import: files in the output folder, or the servers of `posttrain up`."""
    from flows.operations.connect import connect
    from flows.runtime.prefect_home import prepare_prefect

    prepare_prefect(Path(settings.output))
    connect(Path(settings.output))


@contextlib.contextmanager
def begin(
    settings: PipelineSettings,
    *,
    quiet: bool = False,
    fresh: bool = False,
    stages: Sequence[str] | None = None,
    told: str = "",
) -> Iterator[None]:
    """Say at once what runs and where it can be watched; Prefect's server starts while the block imports the flow.

    After `prepare`, in commands that run the pipeline's flow. fresh: stages are run again, finished or not.
    stages: those that are run, where that is not all of the settings. told: the lines, where they are not a pipeline's.
    """
    from flows.cli.opening import opening
    from flows.runtime.embedded_server import begin_embedded_server
    from flows.runtime.quick_imports import without_collection

    if not quiet:
        print(visible(told or opening(settings, fresh=fresh, stages=stages)), flush=True)
    begin_embedded_server()
    with without_collection(of_command=True):
        yield


def check_models(settings: PipelineSettings, *names: str | None) -> None:
    """Refuse models of the command line that are not there, before anything starts or is written."""
    from flows.cli.given_model import check_given_model

    connect_mlflow(settings.output)  # where `up` runs, its store is asked
    for name in filter(None, names):
        check_given_model(name, Path(settings.output), settings.tracking.uri)


def check_base_model(settings: PipelineSettings) -> None:
    """Refuse a base model that is not there, before anything starts or is written.

    Nothing is asked of a folder, which was looked at with the settings, nor once a stage has trained from the model:
    a run of which everything is cached needs neither the hub nor the store.
    """
    name = settings.model.path
    if name is None or os.path.isdir(os.path.expanduser(name)):
        return
    from tasks.pipeline.drift import finished_now
    from tasks.stage_registry import training_stages

    stages = Path(settings.output).resolve() / settings.name / "stages"
    if stages.is_dir() and not set(training_stages()).isdisjoint(finished_now(stages, settings)):
        return
    try:
        check_models(settings, name)
    except SettingsError as error:
        raise SettingsError(f"model.path: {error}") from None


def refuse_bad_rows(settings: PipelineSettings) -> None:
    """Before any server starts, and before a run of the refused data is recorded anywhere."""
    from tasks.config.data_checks import refuse_bad_rows

    refuse_bad_rows(settings)


def refuse_closed(output: str | Path) -> None:
    """Refuse an output folder that this user may not look into. Raises: SettingsError."""
    if os.path.isdir(output) and not os.access(output, os.R_OK | os.X_OK):
        raise SettingsError(f"{output}: cannot be read: {os.strerror(errno.EACCES)}")


def connect_mlflow(output: str | Path) -> Path:
    """Use the MLflow server of `posttrain up` if it runs; returns the folder. Raises: as `refuse_closed`."""
    refuse_closed(output)
    from flows.operations.connect import connect

    connect(Path(output), prefect=False)
    return Path(output)
