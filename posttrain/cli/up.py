"""Command `posttrain up`: start servers, worker and deployments, or repair running ones."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from posttrain.cli.arguments import add_output_option, parse_port, parse_positive_integer
from rl_core.errors import SettingsError

if TYPE_CHECKING:
    from posttrain.operations.services import ServiceSpec
    from posttrain.operations.supervisor import ExtraServers

EXAMPLES = (
    "up    (until Ctrl-C; a second call shows what runs and repairs the rest)",
    "up --detach    (in the background; posttrain down ends it)",
    "up --detach --output /data/outputs --prefect-port 4300 --mlflow-port 5100",
    "up --detach --database postgresql://me@localhost/team",
    "up --service my_service.yaml    (a training service, too)",
    "up --serve mine.yaml    (serve its champion, and the next one once it is promoted)",
    "up --rollouts mine.yaml    (vLLM, which samples its rollouts)",
    "up --monitor    (the live page of all runs, too)",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
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


def run_command(arguments: argparse.Namespace) -> int:
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
