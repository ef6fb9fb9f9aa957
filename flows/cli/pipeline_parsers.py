"""Parsers of the commands in `flows.cli.pipeline_commands`. Standard library only."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from flows.cli.arguments import (
    add_allow_drift,
    add_command,
    add_config,
    add_config_or_output,
    add_json,
    add_quiet,
    add_stop_after,
    positive,
    seconds,
    stage_name,
)
from tasks.stage_registry import names

__all__ = ["PARSERS", "TRAINERS"]

TRAINERS = ("grpo", "rloo", "sft", "dpo", "kto", "reward", "distillation")  # of TRL
_STAGE_HELP = f"one of {', '.join(names())}, or of the config's own"


def _add_init(commands: Any) -> None:
    about = "write a commented starter config, environment and reward"
    parser = add_command(commands, "init", about, ["init my_task"])
    parser.add_argument("folder", metavar="FOLDER", help="a new folder; its name becomes that of the pipeline")


def _add_convert(commands: Any) -> None:
    examples = ["convert grpo.yaml --out mine.yaml", "convert sft.yaml --trainer sft", "convert ppo_trainer.yaml"]
    about = "write a configuration of TRL or verl as ours, with comments on what has no equal"
    parser = add_command(commands, "convert", about, examples)
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
    parser = add_command(commands, "data", about, examples)
    parser.add_argument("file", metavar="FILE", help="JSONL, CSV or Parquet, or a folder of them")
    parser.add_argument(
        "--model", metavar="MODEL", help="folder or hub name whose tokenizer and chat template are used"
    )
    parser.add_argument("--heldout", metavar="FILE", help="report rows that this file has as well")
    parser.add_argument(
        "--as", dest="kind", choices=("demonstrations", "preferences"), default="", help="default: by columns"
    )
    parser.add_argument("--max-rows", type=positive, default=20_000, metavar="N", help="of each file (default: 20000)")
    parser.add_argument(
        "--near",
        type=float,
        default=0.8,
        metavar="S",
        help="similarity of near copies, from 0 (off) to 1 (default: 0.8)",
    )


def _add_run(commands: Any) -> None:
    parser = add_command(
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
    add_config(parser)
    parser.add_argument("--fresh", action="store_true", help="rerun all stages, finished ones included")
    parser.add_argument("--monitor", action="store_true", help="serve the live page for as long as the run takes")
    parser.add_argument(
        "--replay-schedule",
        metavar="FILE",
        help="schedule.jsonl of a run with asynchronous rollouts: learn from the same tokens again, bit for bit",
    )
    add_stop_after(parser)
    add_allow_drift(parser)
    add_quiet(parser)


def _add_retrain(commands: Any) -> None:
    examples = [
        "retrain demo",
        "retrain demo --force --reason 'tools have changed'",
        "retrain gsm8k --start base --set environment.options.path=train.jsonl",
    ]
    about = "retrain if there is data new to the champion, and promote the result if it passes the gate"
    parser = add_command(commands, "retrain", about, examples)
    add_config(parser)
    parser.add_argument(
        "--start",
        choices=("champion", "base"),
        help="initial model: the champion, or the configuration's model (default: its retrain.start)",
    )
    parser.add_argument("--force", action="store_true", help="also without new data")
    parser.add_argument("--fresh", action="store_true", help="begin an interrupted retraining's unfinished stage anew")
    add_allow_drift(parser)
    parser.add_argument("--reason", default="", help="origin of the request; stored with the versions")
    add_quiet(parser)


def _add_validate(commands: Any) -> None:
    examples = ["validate demo", "validate demo --set stages.policy.group_size=16 --show"]
    parser = add_command(commands, "validate", "check a configuration without running anything", examples)
    add_config(parser)
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
    parser = add_command(commands, "stage", about, examples)
    parser.add_argument("name", metavar="NAME", type=stage_name, help=_STAGE_HELP)
    add_config(parser)
    parser.add_argument("--model", metavar="MODEL", help="start from this model folder, hub name or models:/NAME@ALIAS")
    parser.add_argument("--fresh", action="store_true", help="rerun the stage even if finished")
    add_allow_drift(parser)
    add_quiet(parser)


def _add_why(commands: Any) -> None:
    examples = ["why demo", "why policy demo", "why sft demo --set stages.sft.epochs=2"]
    about = "say why stages were run or not, and what changed since"
    parser = add_command(commands, "why", about, examples)
    parser.add_argument(
        "name", metavar="STAGE", type=stage_name, nargs="?", help=f"one stage, with earlier runs of it; {_STAGE_HELP}"
    )
    add_config(parser)
    add_json(parser)


def _add_profile(commands: Any) -> None:
    examples = ["profile demo", "profile demo --stage sft --iterations 20", "profile demo --json"]
    about = "profile a few iterations of a training stage by phase"
    parser = add_command(commands, "profile", about, examples)
    add_config(parser)
    parser.add_argument("--stage", metavar="NAME", type=stage_name, help="default: the last training stage")
    parser.add_argument("--iterations", "-n", metavar="N", type=_at_least_two, default=8, help="how many (default: 8)")
    add_json(parser)
    add_quiet(parser)


def _at_least_two(text: str) -> int:
    """Number of iterations to profile; the first is warm-up."""
    if not text.isdecimal() or int(text) < 2:
        raise argparse.ArgumentTypeError(f"{text!r} must be an integer of at least 2: the first iteration is warm-up")
    return int(text)


def _add_resume(commands: Any) -> None:
    examples = ["resume", "resume demo", "resume 'demo · 2026-11-21 14:00:00'"]
    about = "resume a killed, stopped or failed run with its own settings, from its last checkpoint"
    parser = add_command(commands, "resume", about, examples)
    parser.add_argument(
        "run",
        metavar="RUN",
        nargs="?",
        help="name or id of the run, or its pipeline (default: the newest unfinished run)",
    )
    parser.add_argument("--fresh", action="store_true", help="begin the unfinished stage anew, without its checkpoint")
    add_allow_drift(parser)
    add_config_or_output(parser)
    add_stop_after(parser)
    add_quiet(parser)


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
    parser = add_command(commands, "verify-resume", about, examples)
    add_config(parser)
    parser.add_argument("--kills", type=positive, default=5, metavar="N", help="interruptions by SIGKILL (default: 5)")
    parser.add_argument("--slices", type=seconds, metavar="SECONDS", help="stop by SIGTERM after every SECONDS instead")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and fault points of the kills (default: 0)")
    parser.add_argument(
        "--minutes",
        type=seconds,
        default=60.0,
        metavar="M",
        help="limit for everything; half for the first run (default: 60). Settings are shortened by --set alone",
    )
    parser.add_argument("--keep", action="store_true", help="keep both runs also if they are equal")


PARSERS: dict[str, Callable[[Any], None]] = {
    "init": _add_init,
    "convert": _add_convert,
    "data": _add_data,
    "run": _add_run,
    "retrain": _add_retrain,
    "validate": _add_validate,
    "stage": _add_stage,
    "why": _add_why,
    "profile": _add_profile,
    "resume": _add_resume,
    "verify-resume": _add_verify_resume,
}
