"""`posttrain prefer`. Everything is imported at its call, so that `posttrain --help` starts at once."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from rl_core.errors import SettingsError

__all__ = ["prefer"]


def prefer(arguments: argparse.Namespace) -> int:
    """Serve the page until Ctrl-C, or write the data file."""
    from flows.cli.arguments_to_settings import connect_mlflow, warn
    from flows.preferences.rating_server import PeopleTask, export
    from flows.preferences.rating_server import prefer as run
    from rl_core.settings import RatingSettings
    from tasks.config import load

    settings = load(arguments.config, arguments.set, import_code=False, ask_servers=False, warn=warn)
    rating = settings.prefer or RatingSettings()
    if arguments.port is not None:
        rating = dataclasses.replace(rating, port=arguments.port)
    answers = Path(arguments.answers).expanduser() if arguments.answers else None
    if answers is not None and not answers.is_file():
        raise SettingsError(f"--answers: {answers} is no file")
    output = Path(arguments.output or settings.output).resolve()
    task = PeopleTask(settings, rating, output, answers, arguments.more)
    if arguments.export:
        export(task)
        return 0
    connect_mlflow(output)
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    run(task, say=lambda text: print(text, flush=True))
    return 0
