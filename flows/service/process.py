"""A process of the training service: `python -m flows.service.process server|worker SETTINGS.json`."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

from flows.service.configuration import service_settings

__all__ = ["main"]


def main(arguments: list[str]) -> int:
    """Run one process until a signal; its exit code."""
    role, path = arguments
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    settings = service_settings(json.loads(Path(path).read_text()))
    if role == "worker":
        from flows.service.worker.engine_process import run_worker

        return run_worker(settings)
    from flows.service.http.serving import serve_http

    serve_http(settings)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
