"""`posttrain online`: the update worker, and replays of a recorded buffer.

Everything is imported at its call, so that `posttrain --help` starts at once.
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

__all__ = ["online"]


def online(arguments: argparse.Namespace) -> int:
    """Run one of its commands."""
    from flows.online.online_settings import load_online_settings

    settings = load_online_settings(arguments.config, arguments.set)
    from transformers.utils.logging import disable_progress_bar

    from flows.online.worker_process import REPLAY, follow_buffer, replay_buffer

    disable_progress_bar()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    if arguments.part == "worker":
        return 128 + follow_buffer(settings, lambda text: print(text, flush=True))
    output = Path(arguments.output)
    found = replay_buffer(settings, Path(arguments.buffer), output, lambda text: print(text, flush=True))
    taken, updates = found["online/updates_taken"], found["online/updates"]
    print(f"{updates:g} updates over {found['online/records']:g} records, {taken:g} taken; {output / REPLAY}")
    print(f"weights {found['weights']}\naverage {found['average']}")
    return 0
