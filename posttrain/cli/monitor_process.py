"""Live page of `posttrain run --monitor`, in a separate process for the duration of the run."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from flows.runtime.prefect_access import build_python_path
from rl_core.errors import SettingsError
from rl_core.storage.atomic_files import make_folder
from tasks.processes.child_processes import bind_to_parent

# The child asks the kernel to end it with its parent, then becomes `posttrain monitor`.
_PROGRAM = (
    "from posttrain.cli.monitor_process import tie_to_run; tie_to_run(); "
    "from posttrain.cli.main import command; command()"
)
_PARENT = "POSTTRAIN_RUN_PROCESS"
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
            "--monitor: the live page needs Gradio: pip install 'posttrain[monitor]'"
        )
    make_folder(output)
    environment = {
        **os.environ,
        _PARENT: str(os.getpid()),
        "PYTHONPATH": build_python_path(os.environ),
    }
    process = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, "monitor", "--output", str(output)],
        env=environment,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert process.stdout is not None
    threading.Thread(
        target=_print_page_link, args=(process.stdout,), name="monitor-link", daemon=True
    ).start()
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _print_page_link(lines: IO[str]) -> None:
    for line in lines:
        if line.startswith("monitor"):
            print(line.rstrip(), file=sys.stderr, flush=True)


def tie_to_run() -> None:
    """End this process, which serves the page, with the run that started it."""
    bind_to_parent(int(os.environ.pop(_PARENT)))
