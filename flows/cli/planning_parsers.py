"""Parser of `posttrain plan`. Standard library only."""

from __future__ import annotations

import argparse
from typing import Any

from flows.cli.arguments import add_command, add_config, add_json, positive

__all__ = ["PARSERS"]


def _add_plan(commands: Any) -> None:
    examples = [
        "plan demo --simulate",
        "plan demo --simulate --workers 1,2,4 --staleness 0,1,4",
        "plan grpo.yaml --simulate --gpus 64 --rates rates.yaml",
    ]
    about = "simulate the policy stage on rollout workers or a cluster before it runs"
    parser = add_command(commands, "plan", about, examples)
    add_config(parser)
    kinds = parser.add_mutually_exclusive_group(required=True)
    kinds.add_argument(
        "--simulate", action="store_true", help="discrete-event simulation of trainers, workers and weight updates"
    )
    parser.add_argument(
        "--rates",
        metavar="FILE",
        help="YAML with the durations of one worker and one trainer (default: those of the newest finished policy "
        "stage of this configuration)",
    )
    parser.add_argument("--gpus", type=positive, metavar="N", help="compare shares of so many GPUs for the rollouts")
    parser.add_argument(
        "--workers", type=_numbers, default=(1, 2, 4), metavar="LIST", help="without --gpus (default: 1,2,4)"
    )
    parser.add_argument("--staleness", type=_bounds, default=(0, 1, 4), metavar="LIST", help="default: 0,1,4")
    parser.add_argument(
        "--cores", type=positive, metavar="N", help="cores that all processes share (default: no limit)"
    )
    parser.add_argument(
        "--iterations", type=positive, metavar="N", help="simulated (default: 12, more for a --staleness above 4)"
    )
    add_json(parser)


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
