"""Commands around the servers: up, down, status, the pages, and the doctor.

Each imports what it needs at its call, so that `posttrain --help` starts at once.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from flows.cli import arguments_to_settings as loading
from flows.cli.arguments import DEFAULT_OUTPUT
from rl_core.errors import PosttrainError, SettingsError

if TYPE_CHECKING:
    from flows.operations.services import ServiceSpec
    from flows.operations.supervisor import MoreServers

__all__ = ["completion", "doctor", "down", "monitor", "status", "ui", "up"]


def up(arguments: argparse.Namespace) -> int:
    """Start servers, worker and deployments, or repair running ones."""
    from flows.operations.commands import up as start

    names = ("prefect_port", "mlflow_port", "database", "pool", "runs", "gpu_slots", "deployments", "service")
    given = {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}
    if arguments.serve is not None:
        given |= _to_serve(arguments)
    more: list[MoreServers] = []
    if arguments.rollouts is not None:
        given["rollouts"] = _to_sample(arguments, more)
    if arguments.service is not None:
        given["service"] = _to_train(arguments, more)
    if arguments.monitor or arguments.monitor_port is not None:
        given["monitor_port"] = _to_watch(arguments, more)
    start(Path(arguments.output), given, detach=arguments.detach, also=partial(_all_of, more))
    return 0


def _all_of(more: list[MoreServers], output: Path, mlflow: str) -> list[ServiceSpec]:
    """Servers beside those that `up` always has."""
    return [spec for servers in more for spec in servers(output, mlflow)]


def _to_sample(arguments: argparse.Namespace, more: list[MoreServers]) -> str:
    """Config of the pipeline whose inference server is kept up, which is added. Raises: ConfigError, SettingsError."""
    from flows.operations.inference_server import check_startable, inference_server
    from tasks.config import load
    from tasks.shipped import find_config

    settings = load(arguments.rollouts, import_code=False, ask_servers=False)
    check_startable(settings)
    more.append(partial(inference_server, settings))
    return str(find_config(arguments.rollouts).resolve())


def _to_train(arguments: argparse.Namespace, more: list[MoreServers]) -> str:
    """File of the training service that is kept up, which is added. Raises: ConfigError."""
    from flows.service.configuration import load_service_settings
    from flows.service.supervising import beside_pipelines
    from tasks.shipped import find_config

    place = find_config(arguments.service)
    folder = [] if _names_folder(place) else [f"folder={Path(arguments.output).resolve() / 'service'}"]
    settings = load_service_settings(place, folder)
    more.append(partial(beside_pipelines, settings))
    return str(Path(place).resolve())


def _to_watch(arguments: argparse.Namespace, more: list[MoreServers]) -> int:
    """Port of the live page that is kept up, which is added. Raises: SettingsError without Gradio."""
    from flows.monitor.supervised_page import page_port, supervised_page

    port = page_port(arguments.monitor_port)
    more.append(partial(supervised_page, port))
    return port


def _to_serve(arguments: argparse.Namespace) -> dict[str, str | int]:
    """Options of `up` for the pipeline that is served. Raises: ConfigError; SettingsError without `serving:`."""
    from tasks.config import load
    from tasks.shipped import find_config

    settings = load(arguments.serve, import_code=False, ask_servers=False)
    if settings.serving is None:
        raise SettingsError(f"--serve: {arguments.serve} has no `serving:`; add it (`serving: {{}}` = its defaults)")
    port = arguments.serve_port or settings.serving.port
    place = str(find_config(arguments.serve).resolve())
    return {"serve": place, "serve_port": port, "learn": int(settings.online is not None)}


def _names_folder(config: Path) -> bool:
    """True = a service's own file sets its folder; that of a shipped one is the output folder's."""
    from tasks.config.yaml_loader import read_yaml
    from tasks.shipped import SERVICE, shipped

    is_shipped = Path(config).resolve().parent == Path(shipped("configs")).resolve()
    return not is_shipped and "folder" in read_yaml(Path(config), (SERVICE,)).data


def down(arguments: argparse.Namespace) -> int:
    """Stop everything that `up` started."""
    from flows.operations.commands import down as stop

    print(stop(Path(arguments.output)))
    return 0


def status(arguments: argparse.Namespace) -> int:
    """Print the state of the servers of `up`."""
    from flows.operations.commands import status as look

    loading.refuse_closed(arguments.output)
    text, good = look(Path(arguments.output), as_json=arguments.json)
    print(text)
    return 0 if good else 1


def ui(arguments: argparse.Namespace) -> int:
    """Serve the MLflow and the Prefect pages until Ctrl-C."""
    settings = loading.optional(arguments)
    from flows.cli.ui import serve
    from flows.operations.connect import running

    output = Path(settings.output if settings else arguments.output)
    if (state := running(output)) is not None:
        from flows.operations.report import links

        print(f"`posttrain up` serves both:\n{links(state, output)}")
        return 0
    serve(
        output,
        settings.tracking.uri if settings else None,
        host=arguments.host,
        mlflow_port=arguments.mlflow_port,
        prefect_port=arguments.prefect_port,
    )
    return 0


def monitor(arguments: argparse.Namespace) -> int:
    """Serve the live page until Ctrl-C, or export a run as files."""
    from flows.monitor import server

    output, run = Path(arguments.output), arguments.run or ""
    if arguments.export is None:
        server.serve(output, run, arguments.port)
        return 0
    for path in server.export(output, run, Path(arguments.export)):
        print(path)
    return 0


def doctor(arguments: argparse.Namespace) -> int:
    """Check this machine for missing requirements, repair dead runs, or explain a model's fast paths."""
    if arguments.faults:
        from rl_core.storage.fault_points import listing, records

        print(json.dumps(records(), indent=1) if arguments.json else listing())
        return 0
    if arguments.calibrate:
        from flows.cli.calibration_command import DEFAULT_FILE, calibrate_machine

        place = DEFAULT_FILE if arguments.output == DEFAULT_OUTPUT else arguments.output
        print(calibrate_machine(Path(place), as_json=arguments.json))
        return 0
    settings = loading.optional(arguments)
    from flows.cli.doctor import examine, report

    output, uri = Path(settings.output if settings else arguments.output), settings.tracking.uri if settings else None
    with contextlib.suppress(PosttrainError):  # an unreachable server becomes a finding
        from flows.operations.connect import connect

        connect(output)
    if arguments.repair:
        from flows.runtime.repair import repair

        lines = repair(output, uri)
        print(json.dumps(lines, indent=1) if arguments.json else "\n".join(lines))
        return 0
    if arguments.model is not None:
        from flows.cli.model_capabilities import explain

        explanation = explain(arguments.model, settings.model if settings else None, output, uri)
        print(json.dumps(explanation.record, indent=1) if arguments.json else explanation.text)
        return 1 if explanation.is_refused else 0
    findings = examine(output, uri)
    print(json.dumps([dataclasses.asdict(one) for one in findings], indent=1) if arguments.json else report(findings))
    return 1 if any(finding.is_bad for finding in findings) else 0


def completion(arguments: argparse.Namespace) -> int:
    """Print a completion script."""
    from flows.cli.completion import script
    from flows.cli.parser import build_parser

    print(script(arguments.shell, build_parser()), end="")
    return 0
