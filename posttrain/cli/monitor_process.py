"""Live page of `posttrain run --monitor`, in a separate process for the duration of the run."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from flows.runtime.prefect_access import build_python_path
from rl_core.errors import SettingsError
from rl_core.processes.children import start_child, stop_child
from rl_core.storage.atomic_files import make_folder

STOP_SECONDS = 5.0


@contextlib.contextmanager
def serve_monitor_page(output: Path, is_enabled: bool) -> Iterator[None]:
    """Serve the live page within the block; print its link once it answers.

    Raises: SettingsError if Gradio is not installed.
    """
    if not is_enabled:
        yield
        return
    if importlib.util.find_spec("gradio") is None:
        raise SettingsError(
            "--monitor: the live page needs Gradio: python -m posttrain.install --extras monitor"
        )
    make_folder(output)
    process = start_child(
        [sys.executable, "-P", "-m", "posttrain.cli.main", "ui", "--live", "--output", str(output)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        environment={**os.environ, "PYTHONPATH": build_python_path(os.environ)},
        death_signal=signal.SIGKILL,
    )
    assert process.stdout is not None
    threading.Thread(
        target=_print_page_link, args=(process.stdout,), name="monitor-link", daemon=True
    ).start()
    try:
        yield
    finally:
        stop_child(process, STOP_SECONDS)


def _print_page_link(lines: IO[bytes]) -> None:
    for line in lines:
        if line.startswith(b"live "):
            print(line.decode(errors="replace").rstrip(), file=sys.stderr, flush=True)
