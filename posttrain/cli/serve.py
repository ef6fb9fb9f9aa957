"""Command `posttrain serve`: serve a model over HTTP."""

from __future__ import annotations

import argparse
import dataclasses
import re
from pathlib import Path
from typing import TYPE_CHECKING

from posttrain.cli.arguments import add_set_option, parse_port
from rl_core.errors import SettingsError
from rl_core.models.named_models import is_local_model

if TYPE_CHECKING:
    from posttrain.serving.online_learning import OnlineLearningPlan
    from posttrain.serving.server_process import ServingConfig
    from rl_core.settings import ModelSettings, ServingSettings
    from tasks.config import PipelineSettings

EXAMPLES = (
    "serve demo    (the champion of this pipeline, until Ctrl-C)",
    "serve demo --learn    (and learn from its traffic)",
    "serve models:/demo/3 --port 8400",
    "serve demo --record    (and record episodes of agents elsewhere)",
    "serve outputs/demo/stages/policy/0123456789abcdef --set serving.slots=16",
    "serve Qwen/Qwen3-0.6B --name small",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "target",
        metavar="CONFIG|MODEL",
        help="a pipeline (its YAML file, or the name of a shipped one), whose champion is served; or "
        "models:/NAME@ALIAS, a model or stage folder, or a hub name",
    )
    parser.add_argument(
        "--port", type=parse_port, metavar="PORT", help="overrides serving.port (default: 8321)"
    )
    parser.add_argument("--name", metavar="NAME", help="name by which clients ask for the model")
    parser.add_argument(
        "--learn",
        action="store_true",
        help="learn from the traffic as configured by `online:` of the CONFIG, with a worker and a gate process",
    )
    parser.add_argument(
        "--record",
        action="store_true",
        help="record sessions of agents elsewhere, opened and scored over HTTP (docs/agents.md)",
    )
    parser.add_argument(
        "--wait",
        action="store_true",
        help="start even without a champion; requests are refused until there is one",
    )
    parser.add_argument(
        "--output",
        "-o",
        metavar="FOLDER",
        help="folder of the registered models, the token and the labels (default: the pipeline's, else outputs)",
    )
    add_set_option(
        parser,
        "override a setting, as in serving.slots=16; with a MODEL those of serving and model; may be repeated",
    )


def run_command(arguments: argparse.Namespace) -> int:
    """Serve until Ctrl-C."""
    import logging

    serving = resolve_serving(arguments)
    from posttrain.serving.server_process import serve_model

    logging.basicConfig(
        level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    for name in ("posttrain.serving", "posttrain.online"):
        logging.getLogger(name).setLevel(logging.INFO)
    serve_model(serving, wait_for_champion=arguments.wait, say=lambda text: print(text, flush=True))
    return 0


def resolve_serving(arguments: argparse.Namespace) -> ServingConfig:
    """Resolve everything that is to be served.

    Raises: ConfigError or SettingsError for a model or config that does not exist.
    """
    from tasks.shipped import find_config

    target = arguments.target
    suffixes = (".yaml", ".yml")
    is_config = target.endswith(suffixes) or find_config(target).suffix in suffixes
    return _resolve_config_serving(arguments) if is_config else _resolve_model_serving(arguments)


def _resolve_config_serving(arguments: argparse.Namespace) -> ServingConfig:
    from posttrain.cli.run_setup import connect_mlflow, print_warning
    from posttrain.serving.served_model import ModelSource
    from posttrain.serving.server_process import ServingConfig
    from rl_core.settings import ServingSettings
    from tasks.config import load_settings

    settings = load_settings(
        arguments.target, arguments.set, import_code=False, check_servers=False, warn=print_warning
    )
    serving = _apply_serving_options(settings.serving or ServingSettings(), arguments)
    output = Path(arguments.output or settings.output).resolve()
    connect_mlflow(output)
    source = ModelSource(
        serving.model or f"models:/{settings.registered_model}@champion",
        output,
        settings.tracking.uri,
    )
    learning = _build_learning_plan(settings, output) if arguments.learn else None
    return ServingConfig(
        serving,
        serving.name or settings.name,
        source,
        settings.model,
        settings.environment,
        learning,
    )


def _build_learning_plan(settings: PipelineSettings, output: Path) -> OnlineLearningPlan:
    from posttrain.serving.online_learning import OnlineLearningPlan
    from rl_core.settings import OnlineSettings, resolve_defaults
    from tasks.config.machine_checks import read_context_length

    model = settings.model
    return OnlineLearningPlan(
        online=settings.online
        or resolve_defaults(OnlineSettings(), model, read_context_length(model)),
        root=output / settings.name / "online",
        environment=settings.environment,
        experiment=settings.experiment,
        alerts=dict(settings.tracking.alerts),
        policy=settings.stages.policy,
    )


def _resolve_model_serving(arguments: argparse.Namespace) -> ServingConfig:
    from posttrain.cli.run_setup import connect_mlflow
    from posttrain.serving.served_model import ModelSource
    from posttrain.serving.server_process import ServingConfig

    if arguments.learn:
        raise SettingsError(
            "--learn: serve a CONFIG (a pipeline's file, or the name of a shipped one) to learn from it"
        )
    serving, model = _read_set_options(arguments.set)
    serving = _apply_serving_options(serving, arguments)
    target = arguments.target
    _refuse_unknown_target(target)
    output = Path(arguments.output or "outputs").resolve()
    connect_mlflow(output)
    return ServingConfig(
        serving, serving.name or _derive_served_name(target), ModelSource(target, output), model
    )


def _apply_serving_options(
    serving: ServingSettings, arguments: argparse.Namespace
) -> ServingSettings:
    """Apply the options of the command line."""
    options = {
        name: getattr(arguments, name)
        for name in ("port", "name")
        if getattr(arguments, name) is not None
    }
    if arguments.record:
        options["record"] = True
    return dataclasses.replace(serving, **options)


def _read_set_options(overrides: list[str]) -> tuple[ServingSettings, ModelSettings]:
    """Parse the settings of the groups serving and model in --set. Raises: ConfigError."""
    from rl_core.settings import ModelSettings, ServingSettings
    from tasks.config.problems import ConfigError, KeyLocations
    from tasks.config.schema import parse_settings
    from tasks.config.yaml_loader import apply_overrides

    values: dict[str, dict[str, object]] = {"serving": {}, "model": {}}
    locations = KeyLocations("--set")
    problems = apply_overrides(values, overrides, locations)
    unknown = sorted(set(values) - {"serving", "model"})
    if unknown:
        raise SettingsError(
            f"--set {unknown[0]}: a model has the groups serving and model alone; serve a CONFIG"
        )
    serving, serving_problems = parse_settings(ServingSettings, values["serving"])
    model, model_problems = parse_settings(ModelSettings, values["model"])
    problems = problems + serving_problems + model_problems
    if problems or serving is None or model is None:
        raise ConfigError(problems, locations)
    return serving, model


def _refuse_unknown_target(target: str) -> None:
    """Refuse a target that is neither a folder nor the name of a model. Raises: SettingsError."""
    path = Path(target).expanduser()
    if target.startswith("models:/") or path.is_dir() or is_local_model(target):
        return
    is_path = target.startswith((".", "/", "~")) or target.count("/") != 1
    if is_path or not re.fullmatch(r"[\w.-]+/[\w.-]+", target):
        raise SettingsError(
            f"'{target}' is neither a config (a YAML file, or the name of a shipped one) nor a model "
            "(models:/NAME@ALIAS, a folder, a GGUF file, or a hub name such as Qwen/Qwen3-0.6B)"
        )


def _derive_served_name(target: str) -> str:
    """Derive the name for clients: demo for models:/demo@champion, else the last part of a path or name."""
    if target.startswith("models:/"):
        return re.split(r"[@/]", target.removeprefix("models:/"))[0]
    parts = [part for part in Path(target).expanduser().resolve().parts if part != "model"]
    return parts[-1] if Path(target).expanduser().is_dir() else target
