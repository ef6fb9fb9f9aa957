"""Entry point of a service process: `python -m posttrain.training_service.process server|worker SETTINGS.json`."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

from posttrain.settings_files import parse_service_settings


def main(arguments: list[str]) -> int:
    """Run one process until a signal; return its exit code."""
    role, path = arguments
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    settings = parse_service_settings(json.loads(Path(path).read_text()))
    if role == "worker":
        from posttrain.training_service.worker.engine_process import run_worker

        return run_worker(settings)
    from posttrain.training_service.http.application import serve_http

    serve_http(settings)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
