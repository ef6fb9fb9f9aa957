"""Commands that operate an installation: `up`, `down`, `status`, `ui`, `monitor`, `sync`, `gc`, `doctor`.

Handlers import what they need when they are called, so that `posttrain --help` starts quickly.
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

from posttrain.cli import run_setup
from posttrain.cli.arguments import (
    DEFAULT_OUTPUT,
    add_command_parser,
    add_config_and_output_options,
    add_json_option,
    add_output_option,
    parse_port,
    parse_positive_integer,
)
from rl_core.errors import PosttrainError, SettingsError

if TYPE_CHECKING:
    from posttrain.operations.services import ServiceSpec
    from posttrain.operations.supervisor import ExtraServers


def _add_up_parser(commands: Any) -> None:
    examples = [
        "up    (until Ctrl-C; a second call shows what runs and repairs the rest)",
        "up --detach    (in the background; posttrain down ends it)",
        "up --detach --output /data/outputs --prefect-port 4300 --mlflow-port 5100",
        "up --detach --database postgresql://me@localhost/team",
        "up --service my_service.yaml    (a training service, too)",
        "up --serve mine.yaml    (serve its champion, and the next one once it is promoted)",
        "up --rollouts mine.yaml    (vLLM, which samples its rollouts)",
        "up --monitor    (the live page of all runs, too)",
    ]
    summary = "start Prefect, a worker and MLflow on this machine, with all deployments and automations registered"
    parser = add_command_parser(commands, "up", summary, examples)
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
        help="also run a training service: its YAML file, or the name of a shipped one; its folder is service/ "
        "in the output folder, unless the file names one",
    )
    parser.add_argument(
        "--serve",
        metavar="CONFIG",
        help="also serve the champion of this pipeline, as its `serving:` says",
    )
    parser.add_argument(
        "--rollouts",
        metavar="CONFIG",
        help="also run the inference server that samples this pipeline's rollouts: vLLM, in a separate environment, "
        "as stages.policy.rollouts says",
    )
    parser.add_argument(
        "--monitor",
        action="store_true",
        help="also serve the live page (needs posttrain[monitor])",
    )
    parser.add_argument(
        "--monitor-port",
        type=parse_port,
        metavar="PORT",
        help="port of that page; implies --monitor (default: 7860)",
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


def run_up_command(arguments: argparse.Namespace) -> int:
    """Start servers, worker and deployments, or repair running ones."""
    from posttrain.operations.commands import start_servers

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
    options = {
        name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None
    }
    if arguments.serve is not None:
        options |= _resolve_served_pipeline(arguments)
    extra_servers: list[ExtraServers] = []
    if arguments.rollouts is not None:
        options["rollouts"] = _add_rollout_server(arguments, extra_servers)
    if arguments.service is not None:
        options["service"] = _add_training_service(arguments, extra_servers)
    if arguments.monitor or arguments.monitor_port is not None:
        options["monitor_port"] = _add_monitor_page(arguments, extra_servers)
    start_servers(
        Path(arguments.output),
        options,
        detach=arguments.detach,
        extra_servers=partial(_build_extra_services, extra_servers),
    )
    return 0


def _build_extra_services(
    extra_servers: list[ExtraServers], output: Path, mlflow: str
) -> list[ServiceSpec]:
    """Build the services that `up` runs only on request."""
    return [spec for servers in extra_servers for spec in servers(output, mlflow)]


def _add_rollout_server(arguments: argparse.Namespace, extra_servers: list[ExtraServers]) -> str:
    """Add the inference server of a pipeline; return the path of its config.

    Raises: ConfigError, SettingsError.
    """
    from posttrain.operations.inference_server import (
        build_inference_specs,
        check_inference_settings,
    )
    from tasks.config import load_settings
    from tasks.shipped import find_config

    settings = load_settings(arguments.rollouts, import_code=False, check_servers=False)
    check_inference_settings(settings)
    extra_servers.append(partial(build_inference_specs, settings))
    return str(find_config(arguments.rollouts).resolve())


def _add_training_service(arguments: argparse.Namespace, extra_servers: list[ExtraServers]) -> str:
    """Add a training service; return the path of its file. Raises: ConfigError."""
    from posttrain.settings_files import load_service_settings
    from posttrain.training_service.supervisor import prepare_pipeline_specs
    from tasks.shipped import find_config

    path = find_config(arguments.service)
    overrides = []
    if not _sets_service_folder(path):
        overrides.append(f"folder={Path(arguments.output).resolve() / 'service'}")
    settings = load_service_settings(path, overrides)
    extra_servers.append(partial(prepare_pipeline_specs, settings))
    return str(Path(path).resolve())


def _add_monitor_page(arguments: argparse.Namespace, extra_servers: list[ExtraServers]) -> int:
    """Add the live page; return its port. Raises: SettingsError without Gradio."""
    from posttrain.monitor.server import build_page_services, choose_page_port

    port = choose_page_port(arguments.monitor_port)
    extra_servers.append(partial(build_page_services, port))
    return port


def _resolve_served_pipeline(arguments: argparse.Namespace) -> dict[str, str | int]:
    """Return the options of `up` for the pipeline that is served.

    Raises: ConfigError; SettingsError without `serving:`.
    """
    from tasks.config import load_settings
    from tasks.shipped import find_config

    settings = load_settings(arguments.serve, import_code=False, check_servers=False)
    if settings.serving is None:
        raise SettingsError(
            f"--serve: {arguments.serve} has no `serving:`; add it (`serving: {{}}` = its defaults)"
        )
    port = arguments.serve_port or settings.serving.port
    config = str(find_config(arguments.serve).resolve())
    return {"serve": config, "serve_port": port, "learn": int(settings.online is not None)}


def _sets_service_folder(config: Path) -> bool:
    """Return whether a user's service file sets its folder; a shipped one uses the output folder."""
    from tasks.config.yaml_loader import read_yaml
    from tasks.shipped import SERVICE_CONFIG, shipped

    is_shipped = Path(config).resolve().parent == Path(shipped("configs")).resolve()
    return not is_shipped and "folder" in read_yaml(Path(config), (SERVICE_CONFIG,)).data


def _add_down_parser(commands: Any) -> None:
    summary = "stop `posttrain up`: the worker and its runs (which save first), then the servers"
    add_output_option(
        add_command_parser(commands, "down", summary, ["down", "down --output /data/outputs"])
    )


def run_down_command(arguments: argparse.Namespace) -> int:
    """Stop everything that `up` started."""
    from posttrain.operations.commands import stop_servers

    print(stop_servers(Path(arguments.output)))
    return 0


def _add_status_parser(commands: Any) -> None:
    summary = "state of the servers of `posttrain up`; exits with 1 unless all are up"
    parser = add_command_parser(commands, "status", summary, ["status", "status --json"])
    add_output_option(parser)
    add_json_option(parser)


def run_status_command(arguments: argparse.Namespace) -> int:
    """Print the state of the servers of `up`."""
    from posttrain.operations.commands import describe_status

    run_setup.refuse_unreadable_folder(arguments.output)
    text, is_up = describe_status(Path(arguments.output), as_json=arguments.json)
    print(text)
    return 0 if is_up else 1


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


def run_ui_command(arguments: argparse.Namespace) -> int:
    """Serve the MLflow and the Prefect pages until Ctrl-C."""
    settings = run_setup.load_optional_settings(arguments)
    from posttrain.cli.ui import serve_tracking_pages
    from posttrain.operations.connection import find_running_servers, format_links

    output = Path(settings.output if settings else arguments.output)
    state = find_running_servers(output)
    if state is not None:
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


def _add_monitor_parser(commands: Any) -> None:
    examples = ["monitor", "monitor --run demo --port 7861", "monitor --run demo --export numbers"]
    summary = "serve a live page of running and finished runs on this machine until Ctrl-C (needs posttrain[monitor])"
    parser = add_command_parser(commands, "monitor", summary, examples)
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


def _add_sync_parser(commands: Any) -> None:
    examples = ["sync", "sync --config gsm8k", "sync --output /data/outputs"]
    summary = "deliver what runs recorded while the tracking store was unreachable, or before it lost its database"
    parser = add_command_parser(commands, "sync", summary, examples)
    add_config_and_output_options(parser)


def run_sync_command(arguments: argparse.Namespace) -> int:
    """Deliver records that the tracking store has not received yet."""
    settings = run_setup.load_optional_settings(arguments)
    from posttrain.cli.gc import deliver_journals

    text, is_complete = deliver_journals(*run_setup.resolve_tracking_store(arguments, settings))
    run_setup.print_wrapped(text)
    return 0 if is_complete else 1


def _add_gc_parser(commands: Any) -> None:
    examples = ["gc --keep 5", "gc --keep 5 --pipeline demo --yes"]
    summary = "remove data needed by no alias, champion lineage or open run; a dry run unless --yes is given"
    parser = add_command_parser(commands, "gc", summary, examples)
    parser.add_argument(
        "--keep",
        type=parse_positive_integer,
        default=5,
        metavar="N",
        help="newest runs to keep per pipeline (default: 5)",
    )
    parser.add_argument(
        "--pipeline",
        metavar="NAME",
        action="append",
        default=[],
        help="only this pipeline; may be repeated",
    )
    parser.add_argument("--yes", action="store_true", help="actually remove")
    add_json_option(parser)
    add_config_and_output_options(parser)


def run_gc_command(arguments: argparse.Namespace) -> int:
    """List or remove unreferenced data."""
    settings = run_setup.load_optional_settings(arguments)
    from posttrain.cli.gc import collect_garbage

    output, uri = run_setup.resolve_tracking_store(arguments, settings)
    report = collect_garbage(
        output,
        uri,
        num_kept_runs=arguments.keep,
        pipelines=arguments.pipeline,
        delete=arguments.yes,
    )
    if arguments.json:
        print(json.dumps(report.to_record(), indent=1))
    else:
        run_setup.print_wrapped(report.format_text())
    return 0


def _add_doctor_parser(commands: Any) -> None:
    examples = [
        "doctor",
        "doctor --config gsm8k",
        "doctor --repair",
        "doctor --model Qwen/Qwen3-0.6B",
        "doctor --calibrate --output machine.yaml",
    ]
    summary = (
        "check versions, devices, stores and folders; exits with 1 if a requirement is missing"
    )
    parser = add_command_parser(commands, "doctor", summary, examples)
    parser.add_argument(
        "--repair", action="store_true", help="mark killed runs and show how to resume them"
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


def run_doctor_command(arguments: argparse.Namespace) -> int:
    """Check this machine, repair crashed runs, calibrate, or explain a model's fast paths."""
    if arguments.faults:
        from rl_core.storage.faults import format_fault_points, list_fault_points

        print(
            json.dumps(list_fault_points(), indent=1) if arguments.json else format_fault_points()
        )
        return 0
    if arguments.calibrate:
        from posttrain.cli.doctor import DEFAULT_CALIBRATION_FILE, write_machine_calibration

        is_default = arguments.output == DEFAULT_OUTPUT
        path = DEFAULT_CALIBRATION_FILE if is_default else arguments.output
        print(write_machine_calibration(Path(path), as_json=arguments.json))
        return 0
    settings = run_setup.load_optional_settings(arguments)
    from posttrain.cli.doctor import examine_machine, format_findings

    output = Path(settings.output if settings else arguments.output)
    uri = settings.tracking.uri if settings else None
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

        model_settings = settings.model if settings else None
        explanation = explain_model(arguments.model, model_settings, output, uri)
        print(json.dumps(explanation.record, indent=1) if arguments.json else explanation.text)
        return 1 if explanation.is_refused else 0
    findings = examine_machine(output, uri)
    if arguments.json:
        print(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=1))
    else:
        print(format_findings(findings))
    return 1 if any(finding.is_bad for finding in findings) else 0


PARSERS: dict[str, Callable[[Any], None]] = {
    "up": _add_up_parser,
    "down": _add_down_parser,
    "status": _add_status_parser,
    "ui": _add_ui_parser,
    "monitor": _add_monitor_parser,
    "sync": _add_sync_parser,
    "gc": _add_gc_parser,
    "doctor": _add_doctor_parser,
}
