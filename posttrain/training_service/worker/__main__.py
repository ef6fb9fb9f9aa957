"""Entry point `python -m posttrain.training_service.worker CONFIG`: run a service's worker until SIGTERM."""

from __future__ import annotations

import logging
import sys

from posttrain.settings_files import load_service_settings
from posttrain.training_service.worker.engine_process import run_worker
from rl_core.errors import PosttrainError
from rl_core.storage import faults


def main(arguments: list[str]) -> int:
    """Run the worker; return 143 after SIGTERM, 130 after Ctrl-C, 2 for unusable settings or folders."""
    if len(arguments) != 1:
        print("usage: python -m posttrain.training_service.worker CONFIG", file=sys.stderr)
        return 2
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    try:
        faults.check_fault_plan()
        return run_worker(load_service_settings(arguments[0]))
    except PosttrainError as error:
        print(f"posttrain: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
