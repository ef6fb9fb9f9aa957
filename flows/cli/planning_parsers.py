"""Parser of `posttrain plan`. Standard library only."""

from __future__ import annotations

import argparse
from typing import Any

from flows.cli.arguments import add_command, add_config, add_json, positive

__all__ = ["PARSERS"]


def _add_plan(commands: Any) -> None:
    examples = [
        "plan demo --machine machine.yaml",
        "plan grpo.yaml --gpus 8xH200 --row-tokens 600 --completion-tokens 900",
        "plan grpo.yaml --gpus H100 --format json",
        "plan demo --simulate",
        "plan demo --simulate --workers 1,2,4 --staleness 0,1,4",
        "plan grpo.yaml --simulate --gpus 64 --rates rates.yaml",
    ]
    about = "memory, work and hours of each stage before it runs; with --simulate rollout workers or a cluster"
    parser = add_command(commands, "plan", about, examples)
    add_config(parser)
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--gpus", type=_gpus, metavar="GPUS",
        help="number and kind, as 8xH200 or A100; with --simulate a number, whose shares for rollouts are compared",
    )  # fmt: skip
    where.add_argument(
        "--machine", metavar="FILE",
        help="speeds that `posttrain doctor --calibrate` measured (default: this machine's memory, no times)",
    )  # fmt: skip
    parser.add_argument("--format", choices=("text", "json"), default="text", help="default: text")
    _add_lengths(parser)
    parser.add_argument(
        "--simulate", action="store_true", help="discrete-event simulation of trainers, workers and weight updates"
    )
    parser.add_argument(
        "--rates",
        metavar="FILE",
        help="with --simulate: YAML with the durations of one worker and one trainer (default: those of the newest "
        "finished policy stage of this configuration)",
    )
    parser.add_argument(
        "--workers", type=_numbers, metavar="LIST",
        help="with --simulate, without --gpus (default: 1,2,4)",
    )  # fmt: skip
    parser.add_argument("--staleness", type=_bounds, metavar="LIST", help="with --simulate: bounds (default: 0,1,4)")
    parser.add_argument(
        "--cores", type=positive, metavar="N",
        help="with --simulate, without --gpus: cores that all processes share (default: no limit)",
    )  # fmt: skip
    parser.add_argument(
        "--iterations", type=positive, metavar="N",
        help="with --simulate: simulated (default: 12, more for a larger --staleness)",
    )  # fmt: skip
    add_json(parser, "as --format json")


def _add_lengths(parser: argparse.ArgumentParser) -> None:
    """Mean lengths, which a configuration does not tell."""
    longest = "(default: the longest that the settings allow)"
    parser.add_argument("--row-tokens", type=positive, metavar="N", help=f"mean tokens of a row of data {longest}")
    parser.add_argument("--prompt-tokens", type=positive, metavar="N", help=f"mean tokens of a prompt {longest}")
    parser.add_argument(
        "--completion-tokens", type=positive, metavar="N", help=f"mean tokens of a rollout after its prompt {longest}"
    )
    parser.add_argument("--rows", type=positive, metavar="N", help="rows of the data, where its files do not tell them")


def _gpus(text: str) -> int | str:
    """A number of GPUs, or their number and kind, which is looked up later."""
    return positive(text) if text.isdecimal() else text


def _numbers(text: str) -> tuple[int, ...]:
    """Positive integers, separated by commas."""
    return tuple(positive(part.strip()) for part in text.split(","))


def _bounds(text: str) -> tuple[int, ...]:
    """Integers from 0 to 64, separated by commas."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) <= 64 for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} must be integers from 0 to 64, separated by commas")
    return tuple(int(part) for part in parts)


PARSERS = {"plan": _add_plan}
