"""vLLM as a child of the trainer: its start command, start, restart and end (`rollouts.server.start`)."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from rl_core.errors import BackendError, SettingsError, Stopped
from rl_core.json_client import RequestError, fetch_json
from rl_core.processes.children import spawn_server, stop_child
from rl_core.rollout_workers.vllm.start import RANKS, has_gpu
from rl_core.settings import RolloutServerSettings

MAX_ADAPTER_RANK = RANKS[-1]
START_PROGRAM = Path(__file__).with_name("vllm") / "start.py"
HOST = "127.0.0.1"
STOP_SECONDS = 30.0  # from SIGTERM; the keeper kills the process tree earlier
LOG_TAIL_BYTES, MAX_LINE_CHARACTERS = 2**16, 500
_CHECK_INTERVAL_S = 0.25  # between two health checks of a server that starts
_COLOR = re.compile(r"\x1b\[[\d;]*m")
_LINE_PREFIX = re.compile(r"^(\(\w+ pid=\d+\)\s*)?([A-Z]+ [\d-]+ [\d:]+ \[[^]]*\]\s*)?")  # of vLLM
_ERROR_LINE = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit)\b")


def check_start_settings(server: RolloutServerSettings, lora_rank: int) -> None:
    """Check that vLLM can be started with these settings on this machine.

    Args:
        lora_rank: of the adapter that will be sent; 0 = none.
    Raises: SettingsError.
    """
    program = Path(str(server.python)).expanduser()
    if not (program.is_file() and os.access(program, os.X_OK)):
        raise SettingsError(
            f"rollouts.server.python: {server.python} is not an executable program; name the Python of vLLM's "
            "environment (docs/scaling.md)"
        )
    if lora_rank > MAX_ADAPTER_RANK:
        raise SettingsError(
            f"rollouts.server: model.lora.rank is {lora_rank}, but vLLM supports adapters up to {MAX_ADAPTER_RANK}; "
            "set a lower rank, or set modules_to_save, with which complete weights are sent"
        )
    if not server.start:
        return
    if not sys.platform.startswith("linux"):
        raise SettingsError(
            "rollouts.server.start: the trainer can end its server on Linux alone; start it by hand and set "
            "rollouts.address"
        )
    if server.sleeps and not has_gpu():
        raise SettingsError(
            "rollouts.server.sleeps: vLLM releases the memory of a GPU alone, and this machine has none; remove sleeps"
        )


def build_start_command(
    model: str,
    server: RolloutServerSettings,
    port: int,
    *,
    host: str = HOST,
    dtype: str,
    lora_rank: int,
    trust_remote_code: bool,
) -> list[str]:
    """Build the command that starts vLLM.

    Args:
        model: folder or hub name.
        lora_rank: highest rank of adapters; 0 = none.
    """
    command = [
        *(sys.executable, str(START_PROGRAM)),
        *("--python", str(Path(str(server.python)).expanduser())),
        *("--model", model),
        *("--host", host),
        *("--port", str(port)),
        *("--dtype", dtype),
    ]
    if lora_rank:
        command += ["--lora-rank", str(lora_rank)]
    if server.sleeps:
        command += ["--sleeps"]
    further = ["--trust-remote-code"] if trust_remote_code else []
    further += server.arguments
    return [*command, "--", *further] if further else command


def choose_free_port() -> int:
    """Choose a port of loopback that no program uses."""
    with socket.create_server((HOST, 0)) as probe:
        return int(probe.getsockname()[1])


class ManagedServer:
    """A server that belongs to this process: its process tree ends with it, even by SIGKILL.

    It also ends with the thread that started it.
    """

    def __init__(
        self,
        command: Sequence[str],
        port: int,
        log: Path,
        *,
        timeout_s: float,
        stop_event: threading.Event | None = None,
        timeout_setting: str = "rollouts.server.start_timeout_s",
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """Store the settings; start nothing.

        Args:
            log: of the server's output; appended to.
            timeout_s: of a start; `timeout_setting` names it in the message.
            stop_event: ends the wait for a start.
            variables: environment variables in addition to this process's.
        """
        self._timeout_setting, self._variables = timeout_setting, variables
        self.address, self.log = f"{HOST}:{port}", log
        self._command, self._timeout_s, self._stop_event = list(command), timeout_s, stop_event
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start = 0  # bytes of the log that earlier starts wrote

    def start(self) -> None:
        """Start the server and wait until it answers.

        Raises: BackendError if it ends or does not answer in time; Stopped at a stop request.
        """
        began = time.monotonic()
        self._log_start = self.log.stat().st_size if self.log.is_file() else 0
        try:
            environment = {**os.environ, **self._variables} if self._variables else None
            self._process = spawn_server(self._command, environment, None, self.log)
        except OSError as error:
            raise BackendError(f"the inference server cannot be started: {error}") from error
        try:
            while not self._is_healthy():
                self._check_start(time.monotonic() - began)
                time.sleep(_CHECK_INTERVAL_S)
        except BaseException:
            self.close()
            raise

    def restart_if_ended(self) -> bool:
        """Start the server again if its process has ended; return whether it had. Raises: as `start`."""
        if self._process is None or self._process.poll() is None:
            return False
        self.start()
        return True

    def close(self) -> None:
        """End the server and its processes."""
        if self._process is not None:
            stop_child(self._process, STOP_SECONDS)
        self._process = None

    def _is_healthy(self) -> bool:
        try:
            fetch_json(f"http://{self.address}/health", timeout_s=5.0)
        except RequestError:
            return False
        return True

    def _check_start(self, seconds: float) -> None:
        """Raise an error if the start has failed, takes too long, or is no longer wanted."""
        assert self._process is not None
        if self._stop_event is not None and self._stop_event.is_set():
            raise Stopped(
                "stopped while the inference server started; the same command continues",
                signal.SIGTERM,
            )
        code = self._process.poll()
        if code is not None:
            raise BackendError(
                f"the inference server ended with exit code {code} after {seconds:.0f} s: {self.read_error()} "
                f"(log: {self.log})"
            )
        if seconds > self._timeout_s:
            raise BackendError(
                f"the inference server did not answer within {self._timeout_s:g} s ({self._timeout_setting}); "
                f"last line of {self.log}: {self.read_error()}"
            )

    def read_error(self) -> str:
        """Read the line of the newest start's log that says best what went wrong, at most 500 characters.

        It is the first error after a traceback's begin, because vLLM's later ones only repeat that its engine failed;
        else the last line.
        """
        try:
            with self.log.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(min(self._log_start, size), size - LOG_TAIL_BYTES))
                text = file.read().decode(errors="replace")
        except OSError as error:
            return f"its log cannot be read ({error})"
        lines = [_LINE_PREFIX.sub("", line).rstrip() for line in _COLOR.sub("", text).splitlines()]
        lines = [line for line in lines if line.strip() and not line.startswith("--- started")]
        begin = next((i for i, line in enumerate(lines) if line.startswith("Traceback")), None)
        errors = (
            [line for line in lines[begin:] if _ERROR_LINE.match(line)] if begin is not None else []
        )
        best = (errors[:1] or lines[-1:] or ["it wrote nothing"])[0]
        return best.strip()[:MAX_LINE_CHARACTERS]
