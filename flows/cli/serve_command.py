"""`posttrain serve`. Everything is imported at its call, so that `posttrain --help` starts at once."""

from __future__ import annotations

import argparse
import dataclasses
import re
from pathlib import Path
from typing import TYPE_CHECKING

from rl_core.errors import SettingsError

if TYPE_CHECKING:
    from flows.serving.learning_start import LearningPlan
    from flows.serving.serving_process import Serving
    from rl_core.settings import ModelSettings, ServingSettings
    from tasks.config import PipelineSettings

__all__ = ["serve", "serving_of"]


def serve(arguments: argparse.Namespace) -> int:
    """Serve until Ctrl-C."""
    import logging

    serving = serving_of(arguments)
    from flows.serving.serving_process import serve as run

    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for room in ("flows.serving", "flows.online"):
        logging.getLogger(room).setLevel(logging.INFO)
    run(serving, waits=arguments.wait, say=lambda text: print(text, flush=True))
    return 0


def serving_of(arguments: argparse.Namespace) -> Serving:
    """All that is to be served. Raises: ConfigError, SettingsError naming a model or config that is not there."""
    from tasks.shipped import find_config

    target = arguments.target
    is_config = target.endswith((".yaml", ".yml")) or find_config(target).suffix in (".yaml", ".yml")
    return _of_config(arguments) if is_config else _of_model(arguments)


def _of_config(arguments: argparse.Namespace) -> Serving:
    from flows.cli.arguments_to_settings import connect_mlflow, warn
    from flows.serving.served_model import ModelPlace
    from flows.serving.serving_process import Serving
    from rl_core.settings import ServingSettings
    from tasks.config import load

    settings = load(arguments.target, arguments.set, import_code=False, ask_servers=False, warn=warn)
    serving = _changed(settings.serving or ServingSettings(), arguments)
    output = Path(arguments.output or settings.output).resolve()
    connect_mlflow(output)
    place = ModelPlace(serving.model or f"models:/{settings.registered_model}@champion", output, settings.tracking.uri)
    learning = _learning(settings, output) if arguments.learn else None
    return Serving(serving, serving.name or settings.name, place, settings.model, settings.environment, learning)


def _learning(settings: PipelineSettings, output: Path) -> LearningPlan:
    from flows.serving.learning_start import LearningPlan
    from rl_core.settings import OnlineSettings

    return LearningPlan(
        online=settings.online or OnlineSettings(), root=output / settings.name / "online",
        environment=settings.environment, experiment=settings.experiment, alerts=dict(settings.tracking.alerts),
    )  # fmt: skip


def _of_model(arguments: argparse.Namespace) -> Serving:
    from flows.cli.arguments_to_settings import connect_mlflow
    from flows.serving.served_model import ModelPlace
    from flows.serving.serving_process import Serving

    if arguments.learn:
        raise SettingsError(
            "--learn: serve a CONFIG (a pipeline's file, or the name of a shipped one) to learn from it"
        )
    serving, model = _given(arguments.set)
    serving = _changed(serving, arguments)
    target = arguments.target
    _check_place(target)
    output = Path(arguments.output or "outputs").resolve()
    connect_mlflow(output)
    return Serving(serving, serving.name or _short(target), ModelPlace(target, output), model)


def _changed(serving: ServingSettings, arguments: argparse.Namespace) -> ServingSettings:
    """With the options of the command line."""
    given = {name: getattr(arguments, name) for name in ("port", "name") if getattr(arguments, name) is not None}
    return dataclasses.replace(serving, **given)


def _given(overrides: list[str]) -> tuple[ServingSettings, ModelSettings]:
    """Settings of the groups serving and model that --set names. Raises: ConfigError."""
    from rl_core.settings import ModelSettings, ServingSettings
    from tasks.config.overrides import apply_overrides
    from tasks.config.problems import ConfigError, KeyLocations
    from tasks.config.schema import read

    values: dict[str, dict[str, object]] = {"serving": {}, "model": {}}
    places = KeyLocations("--set")
    problems = apply_overrides(values, overrides, places)
    others = sorted(set(values) - {"serving", "model"})
    if others:
        raise SettingsError(f"--set {others[0]}: a model has the groups serving and model alone; serve a CONFIG")
    serving, found = read(ServingSettings, values["serving"])
    model, more = read(ModelSettings, values["model"])
    if problems + found + more or serving is None or model is None:
        raise ConfigError(problems + found + more, places)
    return serving, model


def _check_place(target: str) -> None:
    """Raises: SettingsError for what is neither a folder nor a name of a model."""
    place = Path(target).expanduser()
    if target.startswith("models:/") or place.is_dir():
        return
    is_path = target.startswith((".", "/", "~")) or target.count("/") != 1
    if is_path or not re.fullmatch(r"[\w.-]+/[\w.-]+", target):
        raise SettingsError(
            f"'{target}' is neither a config (a YAML file, or the name of a shipped one) nor a model "
            "(models:/NAME@ALIAS, a folder, or a hub name such as Qwen/Qwen3-0.6B)"
        )


def _short(target: str) -> str:
    """Name of a model for its clients: demo for models:/demo@champion, else the last part of a path or name."""
    if target.startswith("models:/"):
        return re.split(r"[@/]", target.removeprefix("models:/"))[0]
    parts = [part for part in Path(target).expanduser().resolve().parts if part != "model"]
    return parts[-1] if Path(target).expanduser().is_dir() else target
