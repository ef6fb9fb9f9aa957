"""Command `posttrain label`: collect human preferences on a local page."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from posttrain.cli.arguments import add_config_argument, list_overrides, parse_port
from rl_core.errors import SettingsError

EXAMPLES = (
    "label demo    (two rollouts of the champion to each of 100 episodes)",
    "label mine.yaml --set prefer.models=[models:/mine/1,models:/mine@champion]",
    "label mine.yaml --answers pairs.jsonl --set prefer.ask=scores",
    "label mine.yaml --export    (the data file alone, without a page)",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_config_argument(parser)
    parser.add_argument(
        "--answers",
        metavar="FILE",
        help='answers to rate instead of those of models: JSON lines with "prompt" and "answers" (two, or one to '
        "score), or preference rows of any format",
    )
    parser.add_argument(
        "--more", action="store_true", help="sample answers again even if there are answers already"
    )
    parser.add_argument(
        "--port", type=parse_port, metavar="PORT", help="overrides prefer.port (default: 8331)"
    )
    parser.add_argument(
        "--export", action="store_true", help="write the data file and end, without a page"
    )


def run_command(arguments: argparse.Namespace) -> int:
    """Serve the page until Ctrl-C, or write the data file."""
    from posttrain.cli.run_setup import connect_mlflow, print_warning
    from posttrain.preferences.rating_server import RatingTask, export_ratings, serve_ratings
    from rl_core.settings import RatingSettings
    from tasks.config import load_settings

    settings = load_settings(
        arguments.config,
        list_overrides(arguments),
        import_code=False,
        check_servers=False,
        warn=print_warning,
    )
    rating = settings.prefer or RatingSettings()
    if arguments.port is not None:
        rating = dataclasses.replace(rating, port=arguments.port)
    answers = Path(arguments.answers).expanduser() if arguments.answers else None
    if answers is not None and not answers.is_file():
        raise SettingsError(f"--answers: {answers} is not a file")
    output = Path(settings.output).resolve()
    task = RatingTask(settings, rating, output, answers, arguments.more)
    if arguments.export:
        export_ratings(task)
        return 0
    connect_mlflow(output)
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    serve_ratings(task, say=lambda text: print(text, flush=True))
    return 0
