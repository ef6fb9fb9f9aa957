"""Parsers of the commands in `posttrain.cli.operate_commands`. Standard library only.

Commands around the servers: up, down, status, the pages, and the doctor.

Each imports what it needs at its call, so that `posttrain --help` starts at once.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.cli import run_setup as loading
from posttrain.cli.arguments import (
    DEFAULT_OUTPUT,
    add_command_parser,
    add_config_and_output_options,
    add_json_option,
    add_output_option,
    parse_port,
    parse_positive_integer,
)
from posttrain.cli.completion import SHELLS
from rl_core.errors import PosttrainError, SettingsError

if TYPE_CHECKING:
    from posttrain.operations.services import ServiceSpec
    from posttrain.operations.supervisor import ExtraServers


def _add_up_parser(commands: Any) -> None:
    examples = [
        "up    (until Ctrl-C; again: says what runs and repairs what does not)",
        "up --detach    (in the background; posttrain down ends it)",
        "up --detach --output /data/outputs --prefect-port 4300 --mlflow-port 5100",
        "up --detach --database postgresql://me@localhost/team",
        "up --service my_service.yaml    (a training service, too)",
        "up --serve mine.yaml    (its champion is served, and the next one as soon as it is promoted)",
        "up --rollouts mine.yaml    (vLLM, which samples its rollouts)",
        "up --monitor    (the live page of all runs, too)",
    ]
    about = "start Prefect, a worker and MLflow on this machine, with all deployments and automations registered"
    parser = add_command_parser(commands, "up", about, examples)
    add_output_option(parser)
    parser.add_argument("--detach", "-d", action="store_true", help="run in the background")
    parser.add_argument("--prefect-port", type=parse_port, metavar="PORT", help="default: 4200")
    parser.add_argument("--mlflow-port", type=parse_port, metavar="PORT", help="default: 5000")
    parser.add_argument(
        "--database",
        metavar="URL",
        help="postgresql://USER@HOST:5432/NAME for both servers, which create NAME_prefect and NAME_mlflow; put a "
        "password into POSTTRAIN_DATABASE, PGPASSWORD or ~/.pgpass instead (default: sqlite in the output folder)",
    )
    parser.add_argument(
        "--pool", metavar="NAME", help="work pool of the worker (default: posttrain)"
    )
    parser.add_argument(
        "--runs",
        type=parse_positive_integer,
        metavar="N",
        help="concurrent flow runs (default: no limit)",
    )
    parser.add_argument(
        "--deployments",
        metavar="FOLDER",
        help="folder of prefect.yaml and automations.yaml; entrypoints are relative to its parent "
        "(default: those that come with posttrain)",
    )
    parser.add_argument(
        "--service",
        metavar="CONFIG",
        help="keep up a training service as well: its YAML file, or the name of a shipped one; its folder is service/ "
        "in the output folder, unless the file names one",
    )
    parser.add_argument(
        "--serve",
        metavar="CONFIG",
        help="serve the champion of this pipeline too, as its `serving:` says",
    )
    parser.add_argument(
        "--rollouts",
        metavar="CONFIG",
        help="keep up the inference server that samples this pipeline's rollouts too: vLLM, in an environment of its "
        "own, as stages.policy.rollouts says",
    )
    parser.add_argument(
        "--monitor",
        action="store_true",
        help="keep up the live page as well (needs posttrain[monitor])",
    )
    parser.add_argument(
        "--monitor-port",
        type=parse_port,
        metavar="PORT",
        help="of that page, which is then kept up (default: 7860)",
    )
    parser.add_argument(
        "--serve-port", type=parse_port, metavar="PORT", help="default: the config's serving.port"
    )
    parser.add_argument(
        "--gpu-slots",
        type=parse_positive_integer,
        metavar="N",
        help="limit 'gpu': concurrent stages on GPUs (default: one per GPU; no limit without one)",
    )


def _add_down_parser(commands: Any) -> None:
    about = "stop `posttrain up`: the worker and its runs (which save first), then the servers"
    add_output_option(
        add_command_parser(commands, "down", about, ["down", "down --output /data/outputs"])
    )


def _add_status_parser(commands: Any) -> None:
    about = "state of the servers of `posttrain up`; exits with 1 unless all are up"
    parser = add_command_parser(commands, "status", about, ["status", "status --json"])
    add_output_option(parser)
    add_json_option(parser)


def _add_ui_parser(commands: Any) -> None:
    examples = ["ui", "ui --output outputs --mlflow-port 5000 --prefect-port 4200"]
    parser = add_command_parser(
        commands,
        "ui",
        "serve the MLflow and the Prefect pages on this machine until Ctrl-C",
        examples,
    )
    add_config_and_output_options(parser)
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1, loopback)"
    )
    for server, number in (("mlflow", 5000), ("prefect", 4200)):
        parser.add_argument(
            f"--{server}-port",
            type=parse_port,
            default=number,
            metavar="PORT",
            help=f"default: {number}, or the next free port",
        )


def _add_monitor_parser(commands: Any) -> None:
    examples = ["monitor", "monitor --run demo --port 7861", "monitor --run demo --export numbers"]
    about = "serve a live page of running and finished runs on this machine until Ctrl-C (needs posttrain[monitor])"
    parser = add_command_parser(commands, "monitor", about, examples)
    add_output_option(parser)
    parser.add_argument(
        "--run",
        metavar="NAME",
        help="a pipeline (its newest run) or PIPELINE/STARTED (default: follow the newest run)",
    )
    parser.add_argument(
        "--port", type=parse_port, metavar="PORT", help="default: 7860, or the next free port"
    )
    parser.add_argument(
        "--export",
        metavar="FOLDER",
        help="write the run as CSV and JSON into FOLDER instead of serving the page",
    )


def _add_doctor_parser(commands: Any) -> None:
    examples = [
        "doctor",
        "doctor --config gsm8k",
        "doctor --repair",
        "doctor --model Qwen/Qwen3-0.6B",
        "doctor --calibrate --output machine.yaml",
    ]
    about = "check versions, devices, stores and folders; exits with 1 if a requirement is missing"
    parser = add_command_parser(commands, "doctor", about, examples)
    parser.add_argument(
        "--repair", action="store_true", help="mark killed runs as dead and offer to resume them"
    )
    add_json_option(parser)
    parser.add_argument(
        "--calibrate",
        action="store_true",
        help="measure the speed and memory of this machine in about a minute, and write them for `posttrain plan "
        "--machine` (--output FILE; default: machine.yaml)",
    )
    parser.add_argument(
        "--faults",
        action="store_true",
        help="list the points at which POSTTRAIN_FAULT breaks a run",
    )
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help="say which fast paths this model folder, hub name or models:/NAME@ALIAS may take here, and why (dtype, "
        "device and adapters as in --config)",
    )
    add_config_and_output_options(parser)


def _add_completion_parser(commands: Any) -> None:
    examples = [
        "completion bash    (> ~/.local/share/bash-completion/completions/posttrain)",
        "completion zsh    (>> ~/.zshrc)",
        "completion fish    (> ~/.config/fish/completions/posttrain.fish)",
    ]
    about = "print a script that completes commands and options in your shell"
    parser = add_command_parser(commands, "completion", about, examples)
    parser.add_argument("shell", metavar="SHELL", choices=SHELLS, help=", ".join(SHELLS))


PARSERS: dict[str, Callable[[Any], None]] = {
    "up": _add_up_parser,
    "down": _add_down_parser,
    "status": _add_status_parser,
    "ui": _add_ui_parser,
    "monitor": _add_monitor_parser,
    "doctor": _add_doctor_parser,
    "completion": _add_completion_parser,
}


def run_up_command(arguments: argparse.Namespace) -> int:
    """Start servers, worker and deployments, or repair running ones."""
    from posttrain.operations.commands import start_servers as start

    names = (
        "prefect_port",
        "mlflow_port",
        "database",
        "pool",
        "runs",
        "gpu_slots",
        "deployments",
        "service",
    )
    given = {
        name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None
    }
    if arguments.serve is not None:
        given |= _resolve_served_pipeline(arguments)
    more: list[ExtraServers] = []
    if arguments.rollouts is not None:
        given["rollouts"] = _add_rollout_server(arguments, more)
    if arguments.service is not None:
        given["service"] = _add_training_service(arguments, more)
    if arguments.monitor or arguments.monitor_port is not None:
        given["monitor_port"] = _add_monitor_page(arguments, more)
    start(
        Path(arguments.output),
        given,
        detach=arguments.detach,
        extra_servers=partial(_build_extra_services, more),
    )
    return 0


def _build_extra_services(more: list[ExtraServers], output: Path, mlflow: str) -> list[ServiceSpec]:
    """Servers beside those that `up` always has."""
    return [spec for servers in more for spec in servers(output, mlflow)]


def _add_rollout_server(arguments: argparse.Namespace, more: list[ExtraServers]) -> str:
    """Config of the pipeline whose inference server is kept up, which is added. Raises: ConfigError, SettingsError."""
    from posttrain.operations.inference_server import (
        build_inference_specs,
        check_inference_settings,
    )
    from tasks.config import load_settings
    from tasks.shipped import find_config

    settings = load_settings(arguments.rollouts, import_code=False, check_servers=False)
    check_inference_settings(settings)
    more.append(partial(build_inference_specs, settings))
    return str(find_config(arguments.rollouts).resolve())


def _add_training_service(arguments: argparse.Namespace, more: list[ExtraServers]) -> str:
    """File of the training service that is kept up, which is added. Raises: ConfigError."""
    from posttrain.settings_files import load_service_settings
    from posttrain.training_service.supervisor import prepare_pipeline_specs
    from tasks.shipped import find_config

    place = find_config(arguments.service)
    folder = (
        []
        if _sets_service_folder(place)
        else [f"folder={Path(arguments.output).resolve() / 'service'}"]
    )
    settings = load_service_settings(place, folder)
    more.append(partial(prepare_pipeline_specs, settings))
    return str(Path(place).resolve())


def _add_monitor_page(arguments: argparse.Namespace, more: list[ExtraServers]) -> int:
    """Port of the live page that is kept up, which is added. Raises: SettingsError without Gradio."""
    from posttrain.monitor.server import build_page_services, choose_page_port

    port = choose_page_port(arguments.monitor_port)
    more.append(partial(build_page_services, port))
    return port


def _resolve_served_pipeline(arguments: argparse.Namespace) -> dict[str, str | int]:
    """Options of `up` for the pipeline that is served. Raises: ConfigError; SettingsError without `serving:`."""
    from tasks.config import load_settings
    from tasks.shipped import find_config

    settings = load_settings(arguments.serve, import_code=False, check_servers=False)
    if settings.serving is None:
        raise SettingsError(
            f"--serve: {arguments.serve} has no `serving:`; add it (`serving: {{}}` = its defaults)"
        )
    port = arguments.serve_port or settings.serving.port
    place = str(find_config(arguments.serve).resolve())
    return {"serve": place, "serve_port": port, "learn": int(settings.online is not None)}


def _sets_service_folder(config: Path) -> bool:
    """True = a service's own file sets its folder; that of a shipped one is the output folder's."""
    from tasks.config.yaml_loader import read_yaml
    from tasks.shipped import SERVICE_CONFIG, shipped

    is_shipped = Path(config).resolve().parent == Path(shipped("configs")).resolve()
    return not is_shipped and "folder" in read_yaml(Path(config), (SERVICE_CONFIG,)).data


def run_down_command(arguments: argparse.Namespace) -> int:
    """Stop everything that `up` started."""
    from posttrain.operations.commands import stop_servers as stop

    print(stop(Path(arguments.output)))
    return 0


def run_status_command(arguments: argparse.Namespace) -> int:
    """Print the state of the servers of `up`."""
    from posttrain.operations.commands import describe_status as look

    loading.refuse_unreadable_folder(arguments.output)
    text, good = look(Path(arguments.output), as_json=arguments.json)
    print(text)
    return 0 if good else 1


def run_ui_command(arguments: argparse.Namespace) -> int:
    """Serve the MLflow and the Prefect pages until Ctrl-C."""
    settings = loading.load_optional_settings(arguments)
    from posttrain.cli.tracking_pages import serve_tracking_pages
    from posttrain.operations.connection import find_running_servers

    output = Path(settings.output if settings else arguments.output)
    if (state := find_running_servers(output)) is not None:
        from posttrain.operations.connection import format_links

        print(f"`posttrain up` serves both:\n{format_links(state, output)}")
        return 0
    serve_tracking_pages(
        output,
        settings.tracking.uri if settings else None,
        host=arguments.host,
        mlflow_port=arguments.mlflow_port,
        prefect_port=arguments.prefect_port,
    )
    return 0


def run_monitor_command(arguments: argparse.Namespace) -> int:
    """Serve the live page until Ctrl-C, or export a run as files."""
    from posttrain.monitor import server

    output, run = Path(arguments.output), arguments.run or ""
    if arguments.export is None:
        server.serve_page(output, run, arguments.port)
        return 0
    for path in server.export_run_files(output, run, Path(arguments.export)):
        print(path)
    return 0


def run_doctor_command(arguments: argparse.Namespace) -> int:
    """Check this machine for missing requirements, repair dead runs, or explain a model's fast paths."""
    if arguments.faults:
        from rl_core.storage.faults import format_fault_points, list_fault_points

        print(
            json.dumps(list_fault_points(), indent=1) if arguments.json else format_fault_points()
        )
        return 0
    if arguments.calibrate:
        from posttrain.cli.doctor import DEFAULT_CALIBRATION_FILE, write_machine_calibration

        place = DEFAULT_CALIBRATION_FILE if arguments.output == DEFAULT_OUTPUT else arguments.output
        print(write_machine_calibration(Path(place), as_json=arguments.json))
        return 0
    settings = loading.load_optional_settings(arguments)
    from posttrain.cli.doctor import examine_machine, format_findings

    output, uri = (
        Path(settings.output if settings else arguments.output),
        settings.tracking.uri if settings else None,
    )
    with contextlib.suppress(PosttrainError):  # an unreachable server becomes a finding
        from posttrain.operations.connection import connect_to_servers

        connect_to_servers(output)
    if arguments.repair:
        from flows.runtime.flow_run_states import repair_crashed_runs

        lines = repair_crashed_runs(output, uri)
        print(json.dumps(lines, indent=1) if arguments.json else "\n".join(lines))
        return 0
    if arguments.model is not None:
        from posttrain.cli.model_capabilities import explain_model

        explanation = explain_model(
            arguments.model, settings.model if settings else None, output, uri
        )
        print(json.dumps(explanation.record, indent=1) if arguments.json else explanation.text)
        return 1 if explanation.is_refused else 0
    findings = examine_machine(output, uri)
    print(
        json.dumps([dataclasses.asdict(one) for one in findings], indent=1)
        if arguments.json
        else format_findings(findings)
    )
    return 1 if any(finding.is_bad for finding in findings) else 0
