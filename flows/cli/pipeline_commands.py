"""Commands that make data and configurations, and that run pipelines and stages.

Each imports what it needs at its call, so that `posttrain --help` starts at once.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.cli import arguments_to_settings as loading
from flows.runtime.stopping import stop_after
from flows.runtime.visible import visible
from rl_core.errors import SettingsError
from tasks import stage_registry

if TYPE_CHECKING:
    from flows.sweep.ray_trials import TrialResources
    from tasks.config import PipelineSettings

__all__ = [
    "convert",
    "data",
    "init",
    "profile",
    "resume",
    "retrain",
    "run",
    "stage",
    "sweep",
    "validate",
    "verify_resume",
    "why",
]


def init(arguments: argparse.Namespace) -> int:
    """Write a starter config, environment and reward."""
    from flows.cli.init import init

    print(init(Path(arguments.folder)))
    return 0


def convert(arguments: argparse.Namespace) -> int:
    """Print or write a configuration of TRL or verl as ours."""
    from rl_core.storage.single_files import create_once
    from tasks.config.convert import convert
    from tasks.config.yaml_loader import read_yaml

    text = convert(read_yaml(arguments.file).data, arguments.file, arguments.trainer)
    if arguments.out is None:
        print(text, end="")
        return 0
    if not create_once(arguments.out, text):
        raise SettingsError(f"{arguments.out}: is there already; name a new file")
    print(f"{arguments.out}: written; check it: posttrain validate {arguments.out}")
    return 0


def data(arguments: argparse.Namespace) -> int:
    """Print a report on a data file."""
    from flows.cli.data import describe_file

    options: dict[str, Any] = {}
    if arguments.model is not None:
        from rl_core.data.chat import ChatRenderer
        from rl_core.models import causal_lm
        from rl_core.settings import ModelSettings

        settings = ModelSettings(path=arguments.model)
        renderer = ChatRenderer(causal_lm.load_tokenizer(arguments.model, settings), settings)
        options = {"renderer": renderer, "context": causal_lm.context_length(arguments.model, settings)}
    heldout = Path(arguments.heldout) if arguments.heldout else None
    told = describe_file(
        Path(arguments.file), kind=arguments.kind, heldout=heldout, max_rows=arguments.max_rows, near=arguments.near,
        **options,
    )  # fmt: skip
    print(visible(told))
    return 0


def run(arguments: argparse.Namespace) -> int:
    """Run the pipeline of a configuration."""
    stop_after(arguments.stop_after)
    if arguments.replay_schedule is not None:
        arguments.set = [*arguments.set, f"stages.policy.rollouts.replay_schedule={arguments.replay_schedule}"]
    settings = loading.load(arguments, ask_servers=True)
    loading.refuse_bad_rows(settings)
    loading.check_base_model(settings)
    loading.prepare(settings)
    with loading.begin(settings, quiet=arguments.quiet, fresh=arguments.fresh):
        from flows.cli.page_beside_run import page_beside
        from flows.post_training import run_pipeline

    with page_beside(Path(settings.output), arguments.monitor):
        result = run_pipeline(
            settings, fresh=arguments.fresh, quiet=arguments.quiet, allow_drift=arguments.allow_drift,
            changed=arguments.set,
        )  # fmt: skip
    print(visible(result.table()))
    return 0 if result.ok else 1


def sweep(arguments: argparse.Namespace) -> int:
    """Run trials of a configuration and choose the best."""
    stop_after(arguments.stop_after)
    from flows.sweep.plan import SweepPlan, metric_of
    from flows.sweep.space import parse_set

    overrides, dimensions = parse_set(arguments.set)
    if not dimensions and arguments.seeds == 1:
        raise SettingsError("nothing varies: give --set KEY=A,B,C or KEY=LOW..HIGH:POINTS, or --seeds N")
    plan = SweepPlan(
        config=arguments.config, overrides=tuple(overrides), dimensions=tuple(dimensions), method=arguments.method,
        trials=arguments.trials, seeds=arguments.seeds, seed_stage=arguments.seed_stage,
        metric=arguments.metric or "success", minimize=arguments.minimize, finalists=arguments.finalists,
        elsewhere=arguments.ray is not None,
    )  # fmt: skip
    base = plan.base()
    plan = dataclasses.replace(plan, metric=metric_of(arguments.metric, base))
    loading.refuse_bad_rows(base)
    loading.check_base_model(base)
    loading.prepare(base)
    from flows.cli.opening import sweep_opening

    with loading.begin(base, quiet=arguments.quiet, told=sweep_opening(plan, base)):
        from flows.sweep.conduct import run_sweep

    result = run_sweep(
        plan, parallel=arguments.parallel, gate=not arguments.no_gate, quiet=arguments.quiet, ray=arguments.ray,
        resources=_resources(arguments),
    )  # fmt: skip
    print(visible(result.text))
    if result.pipeline is not None:
        print(visible(result.pipeline.table()))
    return 0 if result.ok else 1


def _resources(arguments: argparse.Namespace) -> TrialResources | None:
    """Resources of a trial on Ray; None = no cluster was asked for."""
    from flows.sweep.ray_trials import TrialResources

    if arguments.ray is None:
        for name in ("trial_cpus", "trial_gpus"):
            if getattr(arguments, name) is not None:
                raise SettingsError(f"--{name.replace('_', '-')}: is of a Ray cluster; name it with --ray")
        return None
    return TrialResources(cpus=arguments.trial_cpus or 1, gpus=arguments.trial_gpus)


def retrain(arguments: argparse.Namespace) -> int:
    """Retrain on new data, from the champion, with promotion through the gate."""
    settings = loading.load(arguments, ask_servers=True)
    loading.refuse_bad_rows(settings)
    loading.prepare(settings)
    with loading.begin(settings, quiet=arguments.quiet, fresh=True):  # on other episodes than before
        from flows.retrain import run_retraining

    result = run_retraining(
        settings, start=arguments.start, force=arguments.force, reason=arguments.reason, quiet=arguments.quiet,
        allow_drift=arguments.allow_drift, fresh=arguments.fresh,
    )  # fmt: skip
    if result.pipeline is not None:
        print(visible(result.pipeline.table()))
    print(visible(result.message))
    return 0 if result.pipeline is None or result.pipeline.ok else 1


def validate(arguments: argparse.Namespace) -> int:
    """Check a configuration and print a summary of its pipeline."""
    settings = loading.load(arguments, import_code=arguments.import_code, ask_servers=True)
    from tasks.config import named_code, resolve, settings_digest
    from tasks.config.data_checks import checked_files

    if arguments.show:
        import yaml

        print(yaml.safe_dump(resolve(settings), sort_keys=False, allow_unicode=True), end="")
        return 0
    data = checked_files(settings)
    code = ", ".join(named_code(settings))
    if code and not arguments.import_code:
        from rl_core.user_code import user_code_digests

        try:
            user_code_digests(named_code(settings))  # each is found, none is run
        except SettingsError as error:
            raise SettingsError(f"{arguments.config}: {error}") from error
    left_out = ", but for code that was not imported" if code and not arguments.import_code else ""
    lines = [
        f"{arguments.config}: fine{left_out}",
        f"  pipeline  {settings.name} (settings {settings_digest(settings)})",
        f"  stages    {' -> '.join(settings.stages.active)}",
        f"  model     {_model_line(settings)}",
        *(f"  data      {line}" for line in data),
    ]
    if _acts(settings):
        lines.append(f"  acts in   {settings.environment.name}")
    if code:
        lines.append(f"  code      {code} ({'found, not imported: --import-code' if left_out else 'imported'})")
    lines.append(f"  writes to {Path(settings.output).absolute() / settings.name}")
    for line in lines:
        print(_within_terminal(visible(line)))
    return 0


def _within_terminal(line: str) -> str:
    """A line of the summary wrapped between words, where it is too long for the terminal; else whole."""
    from flows.cli.fitting_table import terminal_columns

    columns = terminal_columns()
    if columns is None or len(line) <= max(36, columns):
        return line
    indent = " " * 12
    return textwrap.fill(
        line, max(36, columns), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def _model_line(settings: PipelineSettings) -> str:
    path = settings.model.path
    if path is None:
        return f"preset {settings.model.preset}, from scratch"
    if path.startswith("models:"):
        return f"{path} (registered; looked up when it runs)"
    return path if Path(path).is_dir() else f"{path} (no folder here, so a Hugging Face name; looked up when it runs)"


def _acts(settings: PipelineSettings) -> bool:
    """True if some stage plays episodes or asks the environment's demonstrator."""
    stages = settings.stages
    data = stages.prepare_data
    own = {"prepare_data"}
    if data is not None and data.demonstrations:
        own.add("sft")
    if data is not None and data.preferences:
        own |= {"preference", "reward_model"}
    return bool(set(stages.active) - own)


def profile(arguments: argparse.Namespace) -> int:
    """Print the time profile of a stage."""
    settings = loading.load(arguments, ask_servers=True)
    name = _to_profile(arguments.stage, settings)
    loading.check_base_model(settings)
    loading.prepare(settings)
    quiet = arguments.quiet or arguments.json
    active = settings.stages.active
    with loading.begin(settings, quiet=quiet, stages=active[: active.index(name) + 1], fresh=True):
        from flows.cli.time_profile import profile_record, profile_stage, profile_table

    records = profile_stage(settings, name, arguments.iterations, quiet=quiet)
    print(json.dumps(profile_record(name, records), indent=1) if arguments.json else profile_table(name, records))
    return 0


def _to_profile(name: str | None, settings: PipelineSettings) -> str:
    """A training stage of the configuration; None = its last one. Raises: SettingsError without it."""
    there = [stage for stage in stage_registry.training_stages() if stage in settings.stages.active]
    if not there:
        raise SettingsError("there is no training stage to profile")
    if name is not None and name not in there:
        raise SettingsError(f"the configuration has no stage '{name}' to profile, only {', '.join(there)}")
    return name or there[-1]


def stage(arguments: argparse.Namespace) -> int:
    """Run one stage."""
    settings = loading.load(arguments, ask_servers=True)
    if arguments.name not in settings.stages.active:
        missing = stage_registry.no_such_stage(arguments.name, settings.stages.active)
        raise SettingsError(f"{arguments.config}: {missing}")
    loading.refuse_bad_rows(settings)
    if arguments.model is None:
        loading.check_base_model(settings)
    else:
        loading.check_models(settings, arguments.model)
    loading.prepare(settings)
    from tasks.pipeline.partial_settings import settings_up_to

    part = settings_up_to(settings, arguments.name, arguments.model)
    with loading.begin(part, quiet=arguments.quiet, fresh=arguments.fresh):
        from flows.single_stage import run_stage

    result = run_stage(
        settings, arguments.name, model=arguments.model, fresh=arguments.fresh, quiet=arguments.quiet,
        allow_drift=arguments.allow_drift,
    )  # fmt: skip
    print(visible(result.table()))
    return 0 if result.ok else 1


def why(arguments: argparse.Namespace) -> int:
    """Say why stages were run or not."""
    given = arguments.config
    if arguments.name is None and given in stage_registry.names() and not Path(given).exists():
        raise SettingsError(f"{given} is a stage; name the configuration, too, as in `posttrain why {given} demo`")
    settings = loading.load(arguments, import_code=False)
    if settings.stages.own:
        settings = loading.load(arguments)  # what their settings are, and where they stand, says their code
    from flows.cli.why import explain, explain_all
    from flows.runtime.terminal_text import fitted

    found = explain(settings, arguments.name) if arguments.name else explain_all(settings)
    print(json.dumps(found.record(), indent=1) if arguments.json else fitted(found.text()))
    return 0


def resume(arguments: argparse.Namespace) -> int:
    """Resume an interrupted run."""
    stop_after(arguments.stop_after)
    chosen = loading.optional(arguments)
    output = Path(chosen.output if chosen else arguments.output)
    loading.refuse_closed(output)
    from flows.cli.resume import find, settings_of

    record = find(output, arguments.run)
    settings = settings_of(record, output)
    loading.prepare(settings)
    print(visible(f"going on with '{record.name}', which is {record.status}"), flush=True)
    with loading.begin(settings, quiet=arguments.quiet):
        from flows.post_training import run_pipeline

    result = run_pipeline(
        settings, only=record.only, models=record.given, quiet=arguments.quiet, started=record.started,
        allow_drift=arguments.allow_drift, restart=arguments.fresh,
    )  # fmt: skip
    print(visible(result.table()))
    return 0 if result.ok else 1


def verify_resume(arguments: argparse.Namespace) -> int:
    """Compare a run in one piece with an interrupted one."""
    settings = loading.load(arguments, ask_servers=True)
    loading.check_base_model(settings)
    from flows.verification.verify import Plan, verify

    plan = Plan(arguments.kills, arguments.slices, arguments.seed, arguments.minutes, arguments.keep)
    return verify(arguments.config, arguments.set, settings, plan)
