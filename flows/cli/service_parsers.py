"""Parsers of the commands in `flows.cli.service_commands`. Standard library only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flows.cli.arguments import add_command, add_config_or_output, add_json, add_output, port, positive
from flows.cli.completion import SHELLS

__all__ = ["PARSERS"]


def _add_up(commands: Any) -> None:
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
    parser = add_command(commands, "up", about, examples)
    add_output(parser)
    parser.add_argument("--detach", "-d", action="store_true", help="run in the background")
    parser.add_argument("--prefect-port", type=port, metavar="PORT", help="default: 4200")
    parser.add_argument("--mlflow-port", type=port, metavar="PORT", help="default: 5000")
    parser.add_argument(
        "--database",
        metavar="URL",
        help="postgresql://USER@HOST:5432/NAME for both servers, which create NAME_prefect and NAME_mlflow; put a "
        "password into POSTTRAIN_DATABASE, PGPASSWORD or ~/.pgpass instead (default: sqlite in the output folder)",
    )
    parser.add_argument("--pool", metavar="NAME", help="work pool of the worker (default: posttrain)")
    parser.add_argument("--runs", type=positive, metavar="N", help="concurrent flow runs (default: no limit)")
    parser.add_argument(
        "--deployments",
        metavar="FOLDER",
        help="folder of prefect.yaml and automations.yaml; entrypoints are relative to its parent "
        "(default: those that come with posttrain)",
    )
    parser.add_argument(
        "--service", metavar="CONFIG",
        help="keep up a training service as well: its YAML file, or the name of a shipped one; its folder is service/ "
        "in the output folder, unless the file names one",
    )  # fmt: skip
    parser.add_argument(
        "--serve", metavar="CONFIG", help="serve the champion of this pipeline too, as its `serving:` says"
    )
    parser.add_argument(
        "--rollouts", metavar="CONFIG",
        help="keep up the inference server that samples this pipeline's rollouts too: vLLM, in an environment of its "
        "own, as stages.policy.rollouts says",
    )  # fmt: skip
    parser.add_argument(
        "--monitor", action="store_true", help="keep up the live page as well (needs posttrain[monitor])"
    )
    parser.add_argument(
        "--monitor-port", type=port, metavar="PORT", help="of that page, which is then kept up (default: 7860)"
    )
    parser.add_argument("--serve-port", type=port, metavar="PORT", help="default: the config's serving.port")
    parser.add_argument(
        "--gpu-slots",
        type=positive,
        metavar="N",
        help="limit 'gpu': concurrent stages on GPUs (default: one per GPU; no limit without one)",
    )


def _add_down(commands: Any) -> None:
    about = "stop `posttrain up`: the worker and its runs (which save first), then the servers"
    add_output(add_command(commands, "down", about, ["down", "down --output /data/outputs"]))


def _add_status(commands: Any) -> None:
    about = "state of the servers of `posttrain up`; exits with 1 unless all are up"
    parser = add_command(commands, "status", about, ["status", "status --json"])
    add_output(parser)
    add_json(parser)


def _add_ui(commands: Any) -> None:
    examples = ["ui", "ui --output outputs --mlflow-port 5000 --prefect-port 4200"]
    parser = add_command(
        commands, "ui", "serve the MLflow and the Prefect pages on this machine until Ctrl-C", examples
    )
    add_config_or_output(parser)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1, loopback)")
    for server, number in (("mlflow", 5000), ("prefect", 4200)):
        parser.add_argument(
            f"--{server}-port",
            type=port,
            default=number,
            metavar="PORT",
            help=f"default: {number}, or the next free port",
        )


def _add_monitor(commands: Any) -> None:
    examples = ["monitor", "monitor --run demo --port 7861", "monitor --run demo --export numbers"]
    about = "serve a live page of running and finished runs on this machine until Ctrl-C (needs posttrain[monitor])"
    parser = add_command(commands, "monitor", about, examples)
    add_output(parser)
    parser.add_argument(
        "--run", metavar="NAME", help="a pipeline (its newest run) or PIPELINE/STARTED (default: follow the newest run)"
    )
    parser.add_argument("--port", type=port, metavar="PORT", help="default: 7860, or the next free port")
    parser.add_argument(
        "--export", metavar="FOLDER", help="write the run as CSV and JSON into FOLDER instead of serving the page"
    )


def _add_doctor(commands: Any) -> None:
    examples = [
        "doctor", "doctor --config gsm8k", "doctor --repair", "doctor --model Qwen/Qwen3-0.6B",
        "doctor --calibrate --output machine.yaml",
    ]  # fmt: skip
    about = "check versions, devices, stores and folders; exits with 1 if a requirement is missing"
    parser = add_command(commands, "doctor", about, examples)
    parser.add_argument("--repair", action="store_true", help="mark killed runs as dead and offer to resume them")
    add_json(parser)
    parser.add_argument(
        "--calibrate",
        action="store_true",
        help="measure the speed and memory of this machine in about a minute, and write them for `posttrain plan "
        "--machine` (--output FILE; default: machine.yaml)",
    )
    parser.add_argument("--faults", action="store_true", help="list the points at which POSTTRAIN_FAULT breaks a run")
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help="say which fast paths this model folder, hub name or models:/NAME@ALIAS may take here, and why (dtype, "
        "device and adapters as in --config)",
    )
    add_config_or_output(parser)


def _add_completion(commands: Any) -> None:
    examples = [
        "completion bash    (> ~/.local/share/bash-completion/completions/posttrain)",
        "completion zsh    (>> ~/.zshrc)",
        "completion fish    (> ~/.config/fish/completions/posttrain.fish)",
    ]
    about = "print a script that completes commands and options in your shell"
    parser = add_command(commands, "completion", about, examples)
    parser.add_argument("shell", metavar="SHELL", choices=SHELLS, help=", ".join(SHELLS))


PARSERS: dict[str, Callable[[Any], None]] = {
    "up": _add_up,
    "down": _add_down,
    "status": _add_status,
    "ui": _add_ui,
    "monitor": _add_monitor,
    "doctor": _add_doctor,
    "completion": _add_completion,
}
