"""Parser of `posttrain serve`. Standard library only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flows.cli.arguments import add_command, port

__all__ = ["PARSERS"]


def _add_serve(commands: Any) -> None:
    examples = [
        "serve demo    (the champion of this pipeline, until Ctrl-C)",
        "serve demo --learn    (and it learns from what it is asked)",
        "serve models:/demo/3 --port 8400",
        "serve outputs/demo/stages/policy/0123456789abcdef --set serving.slots=16",
        "serve Qwen/Qwen3-0.6B --name small",
    ]
    about = "serve a model over HTTP on this machine, in the dialect of OpenAI's clients (chat completions)"
    parser = add_command(commands, "serve", about, examples)
    parser.add_argument(
        "target",
        metavar="CONFIG|MODEL",
        help="a pipeline (its YAML file, or the name of a shipped one), whose champion is served; or "
        "models:/NAME@ALIAS, a model or stage folder, or a hub name",
    )
    parser.add_argument("--port", type=port, metavar="PORT", help="in place of serving.port (default: 8321)")
    parser.add_argument("--name", metavar="NAME", help="name by which clients ask for the model")
    parser.add_argument(
        "--learn", action="store_true",
        help="learn from what is answered, as `online:` of the CONFIG says: a worker and a gate run beside it",
    )  # fmt: skip
    parser.add_argument(
        "--wait", action="store_true", help="start without a champion too: requests are refused until there is one"
    )
    parser.add_argument(
        "--output", "-o", metavar="FOLDER",
        help="folder of the registered models, the token and the labels (default: the pipeline's, else outputs)",
    )  # fmt: skip
    parser.add_argument(
        "--set", "-s", metavar="KEY=VALUE", action="append", default=[],
        help="override a setting, as in serving.slots=16; with a MODEL those of serving and model; may be repeated",
    )  # fmt: skip


PARSERS: dict[str, Callable[[Any], None]] = {"serve": _add_serve}
