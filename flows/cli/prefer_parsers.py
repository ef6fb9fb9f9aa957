"""Parser of `posttrain prefer`. Standard library only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flows.cli.arguments import add_command, add_config, port

__all__ = ["PARSERS"]


def _add_prefer(commands: Any) -> None:
    examples = [
        "prefer demo    (two rollouts of the champion to each of 100 episodes)",
        "prefer mine.yaml --set prefer.models=[models:/mine/1,models:/mine@champion]",
        "prefer mine.yaml --answers pairs.jsonl --set prefer.ask=scores",
        "prefer mine.yaml --export    (the data file alone, without a page)",
    ]
    about = "have people compare or score answers on a page of this machine; the result is data to train on"
    parser = add_command(commands, "prefer", about, examples)
    add_config(parser)
    parser.add_argument(
        "--answers", metavar="FILE",
        help='answers to rate in place of those of models: JSON lines with "prompt" and "answers" (two, or one to '
        "score), or preference rows of any format",
    )  # fmt: skip
    parser.add_argument("--more", action="store_true", help="let the models answer again, though there are answers")
    parser.add_argument("--port", type=port, metavar="PORT", help="in place of prefer.port (default: 8331)")
    parser.add_argument("--export", action="store_true", help="write the data file and end, without a page")
    parser.add_argument(
        "--output", "-o", metavar="FOLDER", help="folder of the pipelines (default: the configuration's)"
    )


PARSERS: dict[str, Callable[[Any], None]] = {"prefer": _add_prefer}
