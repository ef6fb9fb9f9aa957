"""Argument parser of the `posttrain` command. Standard library only, so that `--help` starts at once."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import Any

from tasks.stage_registry import names

__all__ = ["build_parser"]

TRAINERS = ("grpo", "rloo", "sft", "dpo", "kto", "reward", "distillation")  # of TRL
_STAGE_HELP = f"one of {', '.join(names())}, or of the config's own"

_ABOUT = """\
Post-train language-model policies: prepare data, SFT, preference optimisation (DPO), reward model, policy
optimisation, evaluation, analysis, promotion. A pipeline is one YAML file.
"""

_START = """\
start here:
  posttrain run demo                       the whole pipeline on an environment that needs no download
  posttrain init my_task                   a config, an environment and a reward to start from
  posttrain validate demo                  check a configuration without running anything
  posttrain up                             Prefect, a worker and MLflow, with schedules (down, status)
  posttrain ui                             browse results in MLflow and Prefect
  posttrain monitor                        watch a run live
  posttrain doctor                         check this machine for missing requirements

exit codes:
  0 done   1 failed   2 wrong settings or data   130, 143 stopped; the same command resumes from the last checkpoint
"""


def build_parser() -> argparse.ArgumentParser:
    """Parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="posttrain", description=_ABOUT, epilog=_START, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version")
    parser.set_defaults(debug=False)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for add in (_add_init, _add_convert, _add_data):
        add(commands)
    for add in (_add_run, _add_retrain, _add_validate, _add_stage, _add_why, _add_profile):
        add(commands)
    for add in (_add_evaluate, _add_analyze, _add_promote):
        add(commands)
    for add in (_add_approve, _add_resume, _add_up, _add_down, _add_status):
        add(commands)
    for add in (_add_ui, _add_monitor, _add_runs, _add_replay, _add_verify_resume, _add_sync, _add_gc, _add_doctor):
        add(commands)
    return parser


class _Version(argparse.Action):
    """Action that prints the version, looked up lazily."""

    def __call__(self, parser: argparse.ArgumentParser, *arguments: Any, **named: Any) -> None:
        from importlib.metadata import PackageNotFoundError, version

        try:
            print(f"posttrain {version('posttrain')}")
        except PackageNotFoundError:
            print("posttrain, not installed")
        parser.exit()


def _add(commands: Any, name: str, about: str, examples: Sequence[str]) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=about,
        description=f"{about[0].upper()}{about[1:]}.",
        epilog="\n".join(["examples:", *(f"  posttrain {example}" for example in examples)]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of every error")
    parser.set_defaults(command=name)
    return parser


def _add_config(parser: argparse.ArgumentParser, *, option: bool = False, required: bool = False) -> None:
    about = "the pipeline's YAML file, or the name of a shipped one, such as demo"
    if option:
        parser.add_argument("--config", "-c", metavar="CONFIG", required=required, help=about)
    else:
        parser.add_argument("config", metavar="CONFIG", help=about)
    parser.add_argument(
        "--set",
        "-s",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="override a setting, as in stages.policy.learning_rate=3e-4; may be repeated; VALUE is YAML, "
        "and null removes a stage",
    )


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", "-o", default="outputs", help="output folder, without --config (default: outputs)")


def _add_allow_drift(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--allow-drift",
        action="store_true",
        help="resume from a checkpoint although settings, data or code changed since",
    )


def _add_quiet(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quiet", "-q", action="store_true", help="no live progress, only the final table")


def _add_init(commands: Any) -> None:
    about = "write a commented starter config, environment and reward"
    parser = _add(commands, "init", about, ["init my_task"])
    parser.add_argument("folder", metavar="FOLDER", help="a new folder; its name becomes that of the pipeline")


def _add_convert(commands: Any) -> None:
    examples = ["convert grpo.yaml --out mine.yaml", "convert sft.yaml --trainer sft", "convert ppo_trainer.yaml"]
    about = "write a configuration of TRL or verl as ours, with comments on what has no equal"
    parser = _add(commands, "convert", about, examples)
    parser.add_argument("file", metavar="FILE", help="YAML or JSON: names of a TRL config class, or verl's blocks")
    parser.add_argument("--trainer", choices=TRAINERS, default="", help="of TRL (default: by the names in the file)")
    parser.add_argument("--out", metavar="FILE", help="write it into a new file (default: print it)")


def _add_data(commands: Any) -> None:
    examples = [
        "data rows.jsonl",
        "data pairs.csv --model Qwen/Qwen2.5-0.5B-Instruct",
        "data rows.jsonl --heldout h.jsonl",
    ]
    about = "show a data file: format, counts, lengths, duplicates, contradictions, examples with loss tokens marked"
    parser = _add(commands, "data", about, examples)
    parser.add_argument("file", metavar="FILE", help="JSONL, CSV or Parquet, or a folder of them")
    parser.add_argument(
        "--model", metavar="MODEL", help="folder or hub name whose tokenizer and chat template are used"
    )
    parser.add_argument("--heldout", metavar="FILE", help="report rows that this file has as well")
    parser.add_argument(
        "--as", dest="kind", choices=("demonstrations", "preferences"), default="", help="default: by columns"
    )
    parser.add_argument("--max-rows", type=_positive, default=20_000, metavar="N", help="of each file (default: 20000)")
    parser.add_argument(
        "--near",
        type=float,
        default=0.8,
        metavar="S",
        help="similarity of near copies, from 0 (off) to 1 (default: 0.8)",
    )


def _add_run(commands: Any) -> None:
    parser = _add(
        commands,
        "run",
        "run a pipeline; stages finished with the same settings and data are skipped",
        [
            "run demo",
            "run demo --set stages.policy.learning_rate=1e-3 --set seed=1",
            "run demo --set stages.analyze=null --set 'stages.evaluate.levels=[easy, hard]'",
            "run gsm8k --set environment.options.path=train.jsonl",
        ],
    )
    _add_config(parser)
    parser.add_argument("--fresh", action="store_true", help="rerun all stages, finished ones included")
    _add_stop_after(parser)
    _add_allow_drift(parser)
    _add_quiet(parser)


def _add_retrain(commands: Any) -> None:
    examples = [
        "retrain demo",
        "retrain demo --force --reason 'tools have changed'",
        "retrain gsm8k --start base --set environment.options.path=train.jsonl",
    ]
    about = "retrain if there is data new to the champion, and promote the result if it passes the gate"
    parser = _add(commands, "retrain", about, examples)
    _add_config(parser)
    parser.add_argument(
        "--start",
        choices=("champion", "base"),
        help="initial model: the champion, or the configuration's model (default: its retrain.start)",
    )
    parser.add_argument("--force", action="store_true", help="also without new data")
    parser.add_argument("--fresh", action="store_true", help="begin an interrupted retraining's unfinished stage anew")
    _add_allow_drift(parser)
    parser.add_argument("--reason", default="", help="origin of the request; stored with the versions")
    _add_quiet(parser)


def _add_validate(commands: Any) -> None:
    examples = ["validate demo", "validate demo --set stages.policy.group_size=16 --show"]
    parser = _add(commands, "validate", "check a configuration without running anything", examples)
    _add_config(parser)
    parser.add_argument("--show", action="store_true", help="print all settings, defaults included, as YAML")
    parser.add_argument(
        "--import-code",
        action="store_true",
        help="import the code that it names by import path (environment, rewards, loss), which runs those modules, "
        "and check options, signatures and levels with it",
    )


def _add_stage(commands: Any) -> None:
    examples = [
        "stage prepare_data demo",
        "stage policy demo --model outputs/my-sft-model",
        "stage sft demo --set stages.sft.epochs=1 --fresh",
    ]
    about = "run one stage; its inputs come from finished stages, or those run first"
    parser = _add(commands, "stage", about, examples)
    parser.add_argument("name", metavar="NAME", type=_stage_name, help=_STAGE_HELP)
    _add_config(parser)
    parser.add_argument("--model", metavar="MODEL", help="start from this model folder, hub name or models:/NAME@ALIAS")
    parser.add_argument("--fresh", action="store_true", help="rerun the stage even if finished")
    _add_allow_drift(parser)
    _add_quiet(parser)


def _add_why(commands: Any) -> None:
    examples = ["why policy demo", "why sft demo --set stages.sft.epochs=2"]
    about = "say why a stage was run or not, and what changed since"
    parser = _add(commands, "why", about, examples)
    parser.add_argument("name", metavar="STAGE", type=_stage_name, help=_STAGE_HELP)
    _add_config(parser)


def _add_profile(commands: Any) -> None:
    examples = ["profile demo", "profile demo --stage sft --iterations 20"]
    about = "profile a few iterations of a training stage by phase"
    parser = _add(commands, "profile", about, examples)
    _add_config(parser)
    parser.add_argument("--stage", metavar="NAME", type=_stage_name, help="default: the last training stage")
    parser.add_argument("--iterations", "-n", metavar="N", type=_at_least_two, default=8, help="how many (default: 8)")
    _add_quiet(parser)


def _stage_name(text: str) -> str:
    """Name of a stage: a shipped one, or one of the config's own, which is not read yet."""
    if text not in names() and not re.fullmatch("[a-z][a-z0-9_]*", text):
        raise argparse.ArgumentTypeError(f"invalid choice: {text!r} (choose from {', '.join(names())})")
    return text


def _at_least_two(text: str) -> int:
    """Number of iterations to profile; the first is warm-up."""
    if not text.isdecimal() or int(text) < 2:
        raise argparse.ArgumentTypeError(f"{text!r} must be an integer of at least 2: the first iteration is warm-up")
    return int(text)


def _add_evaluate(commands: Any) -> None:
    examples = [
        "evaluate models:/demo@champion --config demo",
        "evaluate path/to/model -c demo --set stages.evaluate.episodes=100",
    ]
    about = "evaluate a model on the held-out episodes of a configuration"
    parser = _add(commands, "evaluate", about, examples)
    parser.add_argument("model", metavar="MODEL", help="model folder, hub name or models:/NAME@ALIAS")
    _add_config(parser, option=True, required=True)
    _add_quiet(parser)


def _add_analyze(commands: Any) -> None:
    examples = [
        "analyze outputs/demo/stages/evaluate/KEY --out report",
        "analyze sft.jsonl policy.jsonl --config demo",
        "analyze path/to/sft path/to/policy models:/demo@champion --config demo",
    ]
    about = "analyse trajectory files, or models on the same episodes: tables, figures, an HTML report"
    parser = _add(commands, "analyze", about, examples)
    parser.add_argument(
        "paths", metavar="PATH", nargs="+", help="trajectories.jsonl files, folders with some, or models"
    )
    _add_config(parser, option=True)
    _add_quiet(parser)
    parser.add_argument("--out", default="analysis", help="output folder of the report (default: analysis)")


def _add_promote(commands: Any) -> None:
    examples = [
        "promote --config demo --note 'loops on hard questions'    (back to the champion before)",
        "promote --version 3 --config demo",
    ]
    about = "move the alias champion manually: back to the previous champion, or to any version"
    parser = _add(commands, "promote", about, examples)
    parser.add_argument("--version", type=_positive, metavar="N", help="version of the registered model")
    parser.add_argument("--note", default="", help="why; kept as a tag of the version")
    _add_config(parser, option=True, required=True)


def _add_approve(commands: Any) -> None:
    examples = [
        "approve",
        "approve 'demo · 2026-11-21 14:00:00' --yes --note 'looked at the regressions'",
        "approve demo --no --note 'worse on hard questions'",
    ]
    about = "approve or reject a pending promotion; without RUN, list pending ones"
    parser = _add(commands, "approve", about, examples)
    parser.add_argument("run", metavar="RUN", nargs="?", help="name or id of the run, or its pipeline (posttrain runs)")
    decision = parser.add_mutually_exclusive_group()
    decision.add_argument("--yes", dest="approve", action="store_true", help="promote", default=None)
    decision.add_argument("--no", dest="approve", action="store_false", help="reject", default=None)
    parser.add_argument("--note", default="", help="why; kept as a tag of the version")
    parser.add_argument("--by", default="", help="reviewer (default: this user and machine)")
    _add_config(parser, option=True)
    _add_output(parser)


def _add_resume(commands: Any) -> None:
    examples = ["resume", "resume demo", "resume 'demo · 2026-11-21 14:00:00'"]
    about = "resume a killed, stopped or failed run with its own settings, from its last checkpoint"
    parser = _add(commands, "resume", about, examples)
    parser.add_argument(
        "run",
        metavar="RUN",
        nargs="?",
        help="name or id of the run, or its pipeline (default: the newest unfinished run)",
    )
    parser.add_argument("--fresh", action="store_true", help="begin the unfinished stage anew, without its checkpoint")
    _add_allow_drift(parser)
    _add_config(parser, option=True)
    _add_output(parser)
    _add_stop_after(parser)
    _add_quiet(parser)


def _add_verify_resume(commands: Any) -> None:
    examples = [
        "verify-resume demo --set stages.policy.iterations=8 --set stages.sft.max_steps=60",
        "verify-resume my_task/config.yaml --kills 10 --seed 1",
        "verify-resume my_task/config.yaml --slices 60    (SIGTERM every 60 s, as a scheduler sends it)",
    ]
    about = (
        "run a pipeline in one piece, and again while killing it; compare the bytes and name what depends on chance; "
        "exits with 0 if they are equal, 1 if they differ, 2 if that was not found out"
    )
    parser = _add(commands, "verify-resume", about, examples)
    _add_config(parser)
    parser.add_argument("--kills", type=_positive, default=5, metavar="N", help="interruptions by SIGKILL (default: 5)")
    parser.add_argument(
        "--slices", type=_seconds, metavar="SECONDS", help="stop by SIGTERM after every SECONDS instead"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the moments and fault points of the kills (default: 0)")
    parser.add_argument(
        "--minutes",
        type=_seconds,
        default=60.0,
        metavar="M",
        help="limit for everything; half for the first run (default: 60). Settings are shortened by --set alone",
    )
    parser.add_argument("--keep", action="store_true", help="keep both runs also if they are equal")


def _add_replay(commands: Any) -> None:
    examples = [
        "replay    (lists the failed episodes that are kept)",
        "replay policy/12/easy/345/0",
        "replay evaluate/policy/hard/17/0 --config demo",
    ]
    about = "play a recorded episode again, failed or not, and say where the result differs from the recording"
    parser = _add(commands, "replay", about, examples)
    parser.add_argument(
        "episode",
        metavar="EPISODE",
        nargs="?",
        help="STAGE/ITERATION/LEVEL/SEED/SAMPLE, or evaluate/MODEL/LEVEL/SEED/SAMPLE",
    )
    _add_config(parser, option=True)
    _add_output(parser)


def _add_sync(commands: Any) -> None:
    examples = ["sync", "sync --config gsm8k", "sync --output /data/outputs"]
    about = "deliver to the tracking store what runs recorded while it was away, or before it lost its database"
    parser = _add(commands, "sync", about, examples)
    _add_config(parser, option=True)
    _add_output(parser)


def _add_gc(commands: Any) -> None:
    examples = ["gc --keep 5", "gc --keep 5 --pipeline demo --yes"]
    about = "remove data needed by no alias, champion lineage or open run; a dry run unless --yes is given"
    parser = _add(commands, "gc", about, examples)
    parser.add_argument(
        "--keep", type=_positive, default=5, metavar="N", help="newest runs to keep per pipeline (default: 5)"
    )
    parser.add_argument(
        "--pipeline", metavar="NAME", action="append", default=[], help="only this pipeline; may be repeated"
    )
    parser.add_argument("--yes", action="store_true", help="actually remove")
    _add_config(parser, option=True)
    _add_output(parser)


def _add_up(commands: Any) -> None:
    examples = [
        "up    (until Ctrl-C; again: says what runs and repairs what does not)",
        "up --detach    (in the background; posttrain down ends it)",
        "up --detach --output /data/outputs --prefect-port 4300 --mlflow-port 5100",
        "up --detach --database postgresql://me@localhost/team",
    ]
    about = "start Prefect, a worker and MLflow on this machine, with all deployments and automations registered"
    parser = _add(commands, "up", about, examples)
    _add_output(parser)
    parser.add_argument("--detach", "-d", action="store_true", help="run in the background")
    parser.add_argument("--prefect-port", type=_port, metavar="PORT", help="default: 4200")
    parser.add_argument("--mlflow-port", type=_port, metavar="PORT", help="default: 5000")
    parser.add_argument(
        "--database",
        metavar="URL",
        help="postgresql://USER@HOST:5432/NAME for both servers, which create NAME_prefect and NAME_mlflow; put a "
        "password into POSTTRAIN_DATABASE, PGPASSWORD or ~/.pgpass instead (default: sqlite in the output folder)",
    )
    parser.add_argument("--pool", metavar="NAME", help="work pool of the worker (default: posttrain)")
    parser.add_argument("--runs", type=_positive, metavar="N", help="concurrent flow runs (default: no limit)")
    parser.add_argument(
        "--deployments",
        metavar="FOLDER",
        help="folder of prefect.yaml and automations.yaml; entrypoints are relative to its parent "
        "(default: those that come with posttrain)",
    )
    parser.add_argument(
        "--gpu-slots", type=_positive, metavar="N", help="limit 'gpu': concurrent stages on GPUs (default: one per GPU)"
    )


def _add_down(commands: Any) -> None:
    about = "stop `posttrain up`: the worker and its runs (which save first), then the servers"
    _add_output(_add(commands, "down", about, ["down", "down --output /data/outputs"]))


def _add_status(commands: Any) -> None:
    about = "state of the servers of `posttrain up`; exits with 1 unless all are up"
    parser = _add(commands, "status", about, ["status", "status --json"])
    _add_output(parser)
    parser.add_argument("--json", action="store_true", help="for programs")


def _add_ui(commands: Any) -> None:
    examples = ["ui", "ui --output outputs --mlflow-port 5000 --prefect-port 4200"]
    parser = _add(commands, "ui", "serve the MLflow and the Prefect pages on this machine until Ctrl-C", examples)
    _add_config(parser, option=True)
    _add_output(parser)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1, loopback)")
    parser.add_argument(
        "--mlflow-port",
        type=_port,
        default=5000,
        metavar="PORT",
        help="default: 5000, or the next free port",
    )
    parser.add_argument(
        "--prefect-port",
        type=_port,
        default=4200,
        metavar="PORT",
        help="default: 4200, or the next free port",
    )


def _add_monitor(commands: Any) -> None:
    examples = ["monitor", "monitor --run demo --port 7861", "monitor --run demo --export numbers"]
    about = "serve a live page of running and finished runs on this machine until Ctrl-C (needs posttrain[monitor])"
    parser = _add(commands, "monitor", about, examples)
    _add_output(parser)
    parser.add_argument(
        "--run", metavar="NAME", help="a pipeline (its newest run) or PIPELINE/STARTED (default: follow the newest run)"
    )
    parser.add_argument("--port", type=_port, metavar="PORT", help="default: 7860, or the next free port")
    parser.add_argument(
        "--export", metavar="FOLDER", help="write the run as CSV and JSON into FOLDER instead of serving the page"
    )


def _add_runs(commands: Any) -> None:
    examples = ["runs", "runs --limit 5", "runs --format csv"]
    parser = _add(commands, "runs", "list runs, newest first, with status and result", examples)
    _add_config(parser, option=True)
    _add_output(parser)
    parser.add_argument("--limit", type=_positive, default=20, metavar="N", help="how many (default: 20)")
    parser.add_argument(
        "--format", choices=("table", "csv", "json"), default="table", help="csv and json hold metrics and tags too"
    )


def _add_doctor(commands: Any) -> None:
    examples = ["doctor", "doctor --config gsm8k", "doctor --repair", "doctor --model Qwen/Qwen3-0.6B"]
    about = "check versions, devices, stores and folders; exits with 1 if a requirement is missing"
    parser = _add(commands, "doctor", about, examples)
    parser.add_argument("--repair", action="store_true", help="mark killed runs as dead and offer to resume them")
    parser.add_argument("--faults", action="store_true", help="list the points at which POSTTRAIN_FAULT breaks a run")
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help="say which fast paths this model folder, hub name or models:/NAME@ALIAS may take here, and why (dtype, "
        "device and adapters as in --config)",
    )
    _add_config(parser, option=True)
    _add_output(parser)


def _add_stop_after(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--stop-after",
        type=_seconds,
        metavar="SECONDS",
        help="stop after so many seconds as SIGTERM does: state saved, exit code 143 within 10 s; the same command "
        "resumes",
    )


def _seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 < number < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return number


def _positive(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least 1")
    return int(text)


def _port(text: str) -> int:
    number = _positive(text)
    if number > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port number (1 to 65535)")
    return number
