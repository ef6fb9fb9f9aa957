"""Commands that evaluate, compare and promote models, and that look at runs and keep them in order.

Each imports what it needs at its call, so that `posttrain --help` starts at once.
"""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.cli import arguments_to_settings as loading
from flows.runtime.visible import visible
from rl_core.errors import DataError, SettingsError
from tasks.own_commands import output_option

if TYPE_CHECKING:
    from tasks.config import PipelineSettings

__all__ = ["analyze", "approve", "compare", "diff", "evaluate", "gc", "promote", "replay", "runs", "sync"]


def _say(text: str) -> None:
    """Print what may hold texts of models, environments and people: in a terminal within its width, harmless to it."""
    from flows.runtime.terminal_text import fitted

    print(fitted(visible(text)))


def _store(arguments: argparse.Namespace, settings: PipelineSettings | None) -> tuple[Path, str | None]:
    """Output folder and address of the tracking store: of the configuration, or of `--output`."""
    output = loading.connect_mlflow(settings.output if settings else arguments.output)
    return output, settings.tracking.uri if settings else None


def evaluate(arguments: argparse.Namespace) -> int:
    """Evaluate one model on a configuration's held-out episodes."""
    settings = loading.load(arguments)
    loading.check_models(settings, arguments.model)
    loading.prepare(settings)
    with loading.begin(settings, quiet=arguments.quiet, fresh=True, stages=["evaluate"]):
        from flows.cli.model_names import name_of_model
        from flows.single_stage import evaluate_model

    name = name_of_model(arguments.model)
    result = evaluate_model(settings, arguments.model, name=name, quiet=arguments.quiet)
    print(visible(result.table()))
    return 0 if result.ok else 1


def analyze(arguments: argparse.Namespace) -> int:
    """Analyse trajectory files, or models after evaluating them on the same episodes."""
    settings = loading.optional(arguments, import_code=True)
    from flows.cli.model_names import given_models

    models = given_models(arguments.paths) if settings else {}
    missing = [path for path in arguments.paths if not models and not Path(path).exists()]
    if missing:
        raise DataError(f"{missing[0]}: no such file; give trajectories.jsonl files or folders that hold some")
    if not settings and (models := given_models(arguments.paths)):
        raise SettingsError(f"{arguments.paths[0]}: is a model; give its episodes with --config CONFIG")
    if settings and models:
        return _analyze_models(settings, models, Path(arguments.out), arguments.quiet)
    if settings:
        loading.connect_mlflow(settings.output)
    from flows.cli.analyze_files import analyze as analyze_paths

    report = analyze_paths([Path(path) for path in arguments.paths], settings, Path(arguments.out))
    print(f"report: {report}")
    return 0


def _analyze_models(settings: PipelineSettings, models: dict[str, str], out: Path, quiet: bool) -> int:
    loading.check_models(settings, *models.values())
    loading.prepare(settings)
    with loading.begin(settings, quiet=quiet, fresh=True, stages=["evaluate", "analyze"]):
        from flows.single_stage import analyze_models
        from rl_core.storage.single_files import copy_tree

    result = analyze_models(settings, models, quiet=quiet)
    print(visible(result.table()))
    if "analyze" in result.results:
        copy_tree(result.results["analyze"].path, out)
        print(f"report: {out / 'report.html'}")
    return 0 if result.ok else 1


def diff(arguments: argparse.Namespace) -> int:
    """Compare two models on the same held-out episodes."""
    settings = loading.optional(arguments, import_code=True)
    if settings is None:
        from flows.cli.replay import recorded_settings

        settings = recorded_settings(Path(arguments.output))
    from flows.cli.diff_models import models_to_diff, text_of_diff

    models = models_to_diff(settings, (arguments.first, arguments.second))
    loading.check_models(settings, *models.values())
    loading.prepare(settings)
    quiet = arguments.quiet or arguments.format == "json"
    with loading.begin(settings, quiet=quiet, fresh=True, stages=["evaluate"]):
        from flows.cli.diff_models import played_diff
    found, knows_success = played_diff(settings, models, examples=arguments.episodes, quiet=quiet)
    if arguments.format == "json":
        print(json.dumps({**found.to_json(), "knows_success": knows_success}, indent=1))
    else:
        _say(text_of_diff(found, knows_success=knows_success))
    return 0


def promote(arguments: argparse.Namespace) -> int:
    """Move the alias `champion`."""
    settings = loading.load(arguments, import_code=False)
    loading.connect_mlflow(settings.output)
    from tasks.lifecycle.promotion_by_hand import promote_version

    _say(promote_version(settings, arguments.version, arguments.note))
    return 0


def approve(arguments: argparse.Namespace) -> int:
    """Decide on a pending promotion, or list the pending ones."""
    settings = loading.optional(arguments)
    from flows.cli.approve import decide

    output, uri = _store(arguments, settings)
    if arguments.json:
        if arguments.run is not None:
            raise SettingsError("--json lists pending approvals; leave RUN out")
        from flows.cli.approve import pending

        print(json.dumps(pending(output, uri), indent=1))
        return 0
    where = f" --config {shlex.quote(arguments.config)}" if settings else output_option(output)
    answer = {"approve": arguments.approve, "by": arguments.by, "note": arguments.note}
    _say(decide(output, uri, arguments.run, **answer, where=where))
    return 0


def replay(arguments: argparse.Namespace) -> int:
    """Play a recorded episode again, or list the failed ones."""
    settings = loading.optional(arguments, import_code=True)
    from flows.cli.replay import kept_episodes, kept_table, recorded_settings
    from flows.cli.replay import replay as play_again

    settings = settings or recorded_settings(Path(arguments.output))
    if arguments.json:
        if arguments.episode is not None:
            raise SettingsError("--json lists the episodes that are kept; leave EPISODE out")
        print(json.dumps(kept_episodes(settings), indent=1))
        return 0
    if arguments.episode is None:
        _say(kept_table(settings))
        return 0
    text, is_same = play_again(settings, arguments.episode, trace=arguments.debug)
    _say(text)
    return 0 if is_same else 1


def runs(arguments: argparse.Namespace) -> int:
    """List runs with status and result."""
    settings = loading.optional(arguments)
    from flows.cli.fitting_table import fitting_table
    from tasks.lifecycle.dead_runs import dead_runs
    from tasks.tracking import list_runs, run_records

    output, uri = _store(arguments, settings)

    def gone() -> dict[str, str]:
        return {one.run_id: one.why for one in dead_runs(output.resolve()) if one.run_id and not one.elsewhere}

    if arguments.format != "table":
        records = run_records(output, uri=uri, limit=arguments.limit, where=arguments.where, gone=gone)
        print(_exported(records, arguments.format), end="")
        return 0
    rows = list_runs(
        output, uri=uri, limit=arguments.limit, where=arguments.where, settings=not arguments.no_settings, gone=gone
    )  # fmt: skip
    none = "no run fits" if arguments.where else f"no runs in {output.absolute()}; start one: posttrain run demo"
    print(fitting_table(rows) if rows else none)
    return 0


def compare(arguments: argparse.Namespace) -> int:
    """Compare runs."""
    settings = loading.optional(arguments)
    from flows.cli.compare_runs import compare as compare_runs
    from flows.cli.compare_runs import text_of

    output = loading.connect_mlflow(settings.output if settings else arguments.output)
    uri = settings.tracking.uri if settings else None
    out = Path(arguments.out) if arguments.out else None
    told = compare_runs(output, uri, arguments.runs, out)
    if arguments.format == "json":
        print(json.dumps(told, indent=1))
    else:
        _say(text_of(told))
    return 0


def _exported(records: Sequence[dict[str, Any]], form: str) -> str:
    """Records as JSON, or as CSV with a column for each metric and tag (metrics.NAME, tags.NAME)."""
    if form == "json":
        return json.dumps(records, indent=1) + "\n"
    import pandas as pd

    text: str = pd.json_normalize(list(records)).to_csv(index=False)
    return text if records else ""


def sync(arguments: argparse.Namespace) -> int:
    """Deliver what still waits for the tracking store."""
    settings = loading.optional(arguments)
    from flows.cli.sync import sync as deliver

    text, good = deliver(*_store(arguments, settings))
    _say(text)
    return 0 if good else 1


def gc(arguments: argparse.Namespace) -> int:
    """List or remove unreferenced data."""
    settings = loading.optional(arguments)
    from flows.cli.gc import collect

    output, uri = _store(arguments, settings)
    found = collect(output, uri, keep=arguments.keep, pipelines=arguments.pipeline, delete=arguments.yes)
    if arguments.json:
        print(json.dumps(found.record(), indent=1))
    else:
        _say(found.text())
    return 0
