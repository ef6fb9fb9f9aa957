"""One run of an agent's command: in a new folder, confined, with limits of time and memory."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rl_core.environments.agent_child import START_FAILED
from rl_core.environments.subprocess_host import (
    ProcessTable,
    read_process_table,
    warn_about_missing_part,
)
from rl_core.errors import SettingsError
from rl_core.json_client import LOOPBACK_HOSTS
from rl_core.processes.children import (
    KEEPER_SCRIPT,
    kill_group,
    signal_group,
    start_child,
    wait_or_kill,
)
from rl_core.storage.atomic_files import open_log_file
from rl_core.storage.session_resources import (
    AGENT_PREFIX,
    SessionFolder,
    remove_stale_session_folders,
)

logger = logging.getLogger(__name__)

_CHILD = Path(__file__).with_name("agent_child.py")
_POLL_S = 0.2  # between checks of the limits
_MEMORY_POLL_S = 1.0  # between measurements of memory
_SOFT_S, _GRACE_S = 0.2, 1.0  # from SIGTERM to an agent to that to its processes, and to SIGKILL
_KEEPER_S = 3.0  # for a keeper to end what ignored SIGTERM
MAX_OUTPUT = 2**20  # characters of stdout and stderr that are read, from the end
_MAX_VARIABLE = 100_000  # bytes of one environment variable; Linux allows 131,072
# Environment variables passed to an agent: no tokens, keys, server addresses or folders.
_VARIABLES = ("PATH", "LANG", "LC_ALL", "TZ")


def resolve_command(command: str) -> list[str]:
    """Return a command's words, with files of the current folder by their absolute paths.

    `python` is the Python of this process unless PATH names another one first.
    Raises: SettingsError for an empty command, or a program that does not exist.
    """
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise SettingsError(f"options.command: {command!r}: {error}") from None
    if not words:
        raise SettingsError("options.command: is empty")
    words = [str(Path(word).absolute()) if os.path.isfile(word) else word for word in words]
    if shutil.which(words[0], path=build_program_path()) is None:
        raise SettingsError(
            f"options.command: there is no program '{words[0]}', neither in the current folder nor on PATH"
        )
    is_python = re.fullmatch(r"python[\d.]*", Path(words[0]).name) is not None
    scripts = words[1:2] if is_python else []
    if scripts and scripts[0].endswith(".py") and not os.path.isfile(scripts[0]):
        raise SettingsError(
            f"options.command: no such file: {Path(scripts[0]).absolute()}; paths are relative to the folder in "
            "which posttrain is run"
        )
    return words


def build_program_path() -> str:
    """Build the PATH of agents: the folder of this Python first."""
    folder = str(Path(sys.executable).parent)
    return os.pathsep.join([folder, os.environ.get("PATH", os.defpath)])


def build_task_variables(task: Mapping[str, Any]) -> dict[str, str]:
    """Build environment variables of a task: TASK as JSON, and TASK_NAME for each text or number."""
    variables = {"TASK": json.dumps(task, ensure_ascii=False, default=str)}
    for name, value in task.items():
        if isinstance(value, str | int | float):
            key = "TASK_" + re.sub(r"\W", "_", str(name), flags=re.ASCII).upper()
            if key != "TASK_FILE":  # names task.json
                variables[key] = str(value)
    return {
        name: value
        for name, value in variables.items()
        if "\0" not in value and len(value.encode("utf-8", "replace")) < _MAX_VARIABLE
    }


class AgentFolder:
    """The folders of one episode: `work` for the agent; outside it, its outputs and scratch space."""

    def __init__(self, task: Mapping[str, Any]) -> None:
        """Create the folders, and task.json in the agent's; those of killed runs are removed first."""
        with _stale_lock:
            _remove_stale_folders()
        self._session = SessionFolder(AGENT_PREFIX)
        self._root = self._session.path
        self.work, self.scratch = self._root / "work", self._root / "scratch"
        self.report = self._root / "sandbox.json"
        self.stdout, self.stderr = self._root / "stdout", self._root / "stderr"
        for folder in (self.work, self.scratch):
            folder.mkdir()
        self.report.write_text("")
        self.task = self.work / "task.json"
        self.task.write_text(json.dumps(task, ensure_ascii=False, default=str))
        if os.geteuid() == 0:  # the sandbox switches to a user that owns nothing
            self._root.chmod(0o755)
            self.work.chmod(0o777)
            self.task.chmod(0o666)
            self.report.chmod(0o666)

    def read_output(self, path: Path) -> str:
        """Return the end of an output; "" if there is none."""
        with contextlib.suppress(OSError), path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - MAX_OUTPUT))
            return file.read(MAX_OUTPUT).decode(errors="replace")
        return ""

    def remove(self) -> None:
        """Remove everything."""
        self._session.close()


_stale_lock = threading.Lock()  # episodes begin on several threads


@functools.cache
def _remove_stale_folders() -> None:
    """Remove the folders of killed runs, once in a process."""
    remove_stale_session_folders(AGENT_PREFIX)


class AgentLimitExceeded(Exception):
    """An agent was killed at a limit; the message names it."""


class AgentCommand:
    """A command that is started once for each episode."""

    def __init__(
        self,
        command: str,
        *,
        memory_gib: float,
        sandbox: bool,
        readable: Sequence[str],
        variables: Sequence[str],
        hidden: Sequence[str] = (),
    ) -> None:
        """Check the command.

        Args:
            memory_gib: memory of the agent and its descendants together.
            sandbox: False = it runs with the rights of this process.
            readable: files and folders that a confined agent may read besides the system's, Python's and the current
                folder's.
            variables: names of further environment variables that are passed on.
            hidden: files and folders of these folders that a confined agent may not read, unless `readable` names them.
        Raises: SettingsError.
        """
        self.words = resolve_command(command)
        self._memory_bytes, self._has_sandbox = memory_gib * 2**30, sandbox
        self._readable = [os.path.abspath(path) for path in readable]
        self._variables = (*_VARIABLES, *variables)
        self._hidden = [os.path.realpath(path) for path in hidden]
        self._needs_keeper = (
            True  # False = the sandbox ends all processes, as an earlier episode reported
        )
        for path in self._readable:
            if not Path(path).exists():
                raise SettingsError(f"options.readable: {path} does not exist")

    def run_once(
        self,
        folder: AgentFolder,
        variables: Mapping[str, str],
        find_exceeded_limit: Callable[[], str],
    ) -> int:
        """Run the command to its end and return its exit code; all its processes end with it.

        Args:
            variables: of this episode.
            find_exceeded_limit: returns why the agent is to be killed; "" = it may continue.
        Raises: AgentLimitExceeded.
        """
        options = {
            "folder": str(folder.work),
            "report": str(folder.report),
            "sandbox": self._build_sandbox_options(folder) if self._has_sandbox else None,
        }
        python = [sys.executable, "-I", "-S"]
        child = [*python, str(_CHILD), json.dumps(options), *self.words]
        has_keeper = self._needs_keeper
        if has_keeper:
            times = ["0", str(_SOFT_S), str(_GRACE_S)]
            child = [*python, str(KEEPER_SCRIPT), str(os.getpid()), *times, *child]
        with open_log_file(folder.stdout) as stdout, open_log_file(folder.stderr) as stderr:
            process = start_child(
                child,
                stdout=stdout.fileno(),
                stderr=stderr.fileno(),
                folder=folder.work,
                environment=self._build_environment(folder, variables),
                death_signal=signal.SIGTERM if has_keeper else signal.SIGKILL,
            )
        try:
            self._wait_for_end(process, find_exceeded_limit)
        finally:
            if process.poll() is None:
                signal_group(process, signal.SIGTERM)
                wait_or_kill(process, _GRACE_S + has_keeper * _KEEPER_S, whole_group=True)
            kill_group(process)
        self._read_sandbox_report(folder)
        return process.returncode

    def _wait_for_end(
        self, process: subprocess.Popen[bytes], find_exceeded_limit: Callable[[], str]
    ) -> None:
        with contextlib.ExitStack() as stack:
            wait = _open_waiter(process, stack)
            next_measurement = time.monotonic() + _MEMORY_POLL_S
            while not wait(_POLL_S):
                if reason := find_exceeded_limit():
                    raise AgentLimitExceeded(reason)
                if time.monotonic() < next_measurement:
                    continue
                next_measurement = time.monotonic() + _MEMORY_POLL_S
                memory = _read_recent_process_table().sum_tree_memory(process.pid)
                if memory > self._memory_bytes:
                    raise AgentLimitExceeded(
                        f"its processes use {memory / 2**30:.1f} GiB together, above options.memory_gib"
                    )

    def _build_environment(
        self, folder: AgentFolder, variables: Mapping[str, str]
    ) -> dict[str, str]:
        environment = {name: os.environ[name] for name in self._variables if name in os.environ}
        environment |= {
            "PATH": build_program_path(),
            "PYTHONPATH": _build_import_path(),
            "PYTHONHASHSEED": "0",
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
            "HOME": str(folder.scratch),
            "TMPDIR": str(folder.scratch),
            "TASK_FILE": str(folder.task),
        }
        return environment | exempt_loopback(environment) | dict(variables)

    def _build_sandbox_options(self, folder: AgentFolder) -> dict[str, Any]:
        scripts = [Path(word) for word in self.words if Path(word).is_absolute()]
        script_folders = tuple(str(path.parent) for path in scripts)
        readable = exclude_hidden_paths(_list_project_paths(script_folders), self._hidden)
        # What `readable` names may be read, although it lies in a hidden folder.
        for path in map(os.path.realpath, self._readable):
            hidden = [other for other in self._hidden if _is_below(other, path)]
            readable += exclude_hidden_paths([path], hidden)
        return {
            "folder": str(folder.scratch),
            "memory_gib": None,  # of address space, of which some programs reserve far more than they use
            "network": True,  # the policy answers on the loopback address
            "readable": [*readable, str(_CHILD.parent)],
            "listed": [os.getcwd(), *script_folders],
            "writable": [str(folder.work), str(folder.report)],
        }

    def _read_sandbox_report(self, folder: AgentFolder) -> None:
        """Warn about missing parts of the sandbox, and note whether it ends all processes of an agent."""
        with contextlib.suppress(OSError, ValueError):
            missing = json.loads(folder.report.read_text())
            for part, reason in missing.items():
                warn_about_missing_part(part, reason)
            self._needs_keeper = "processes" in missing


def describe_exit(code: int) -> str:
    """Describe an exit code, or the signal that ended a process."""
    if code == START_FAILED:
        return "it could not be started"
    number = (
        -code if code < 0 else code - 128
    )  # beyond 128 as shells and the sandbox report signals
    with contextlib.suppress(ValueError):
        return f"signal {signal.Signals(number).name}"
    return f"exit code {code}"


def exempt_loopback(environment: Mapping[str, str]) -> dict[str, str]:
    """Return variables with which HTTP clients reach loopback addresses without the proxies of an environment."""
    text = environment.get("no_proxy") or environment.get("NO_PROXY") or ""
    hosts = [host.strip() for host in text.split(",") if host.strip()]
    hosts += [host for host in LOOPBACK_HOSTS if host not in hosts]
    return dict.fromkeys(("no_proxy", "NO_PROXY"), ",".join(hosts))


def _open_waiter(
    process: subprocess.Popen[bytes], stack: contextlib.ExitStack
) -> Callable[[float], bool]:
    """Return a function that waits some seconds for the end of a process and returns whether it has ended."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except (AttributeError, OSError):  # other systems than Linux

        def wait_by_polling(seconds: float) -> bool:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(seconds)
            return process.poll() is not None

        return wait_by_polling
    stack.callback(os.close, descriptor)
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)

    def wait(seconds: float) -> bool:
        return bool(poller.poll(seconds * 1000)) and process.wait() is not None

    return wait


def _build_import_path() -> str:
    """Build the PYTHONPATH of agents; their Python may be another one, so installed packages are not on it."""
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join([*(path for path in paths if path), os.getcwd()])


@functools.cache
def _list_project_paths(script_folders: tuple[str, ...]) -> list[str]:
    """List what a confined agent needs: Python's folders, and visible entries of the current and of script folders.

    Hidden entries are left out, because they may hold secrets.
    """
    current = os.getcwd()
    prefixes = [sys.prefix, sys.base_prefix, str(Path(sys.executable).resolve().parent)]
    installed = [path for path in sys.path if path and os.path.abspath(path) != current]
    paths = [*prefixes, *installed]
    for folder in {current, *script_folders} - set(map(os.path.abspath, paths)):
        paths += _list_visible_entries(folder)
    return [os.path.abspath(path) for path in paths]


def _list_visible_entries(folder: str) -> list[str]:
    """List a folder's entries without hidden ones and without links to the folder or one above it."""
    try:
        paths = [entry.path for entry in os.scandir(folder) if not entry.name.startswith(".")]
    except OSError:
        return []
    inside = os.path.join(os.path.realpath(folder), "")
    return [path for path in paths if not _is_below(inside, os.path.realpath(path))]


def exclude_hidden_paths(paths: Iterable[str], hidden: Collection[str]) -> list[str]:
    """Return the paths without hidden ones; a folder that holds one is replaced by its other visible entries.

    Args:
        hidden: real paths.
    """
    visible: list[str] = []
    for path in paths:
        real = os.path.realpath(path)
        if any(real == other or _is_below(real, other) for other in hidden):
            continue
        if any(_is_below(other, real) for other in hidden):
            if os.path.islink(path):  # its entries have another path, and it may lead in a circle
                continue
            visible += exclude_hidden_paths(_list_visible_entries(path), hidden)
        else:
            visible.append(path)
    return visible


def _is_below(path: str, folder: str) -> bool:
    return path.startswith(folder.rstrip(os.sep) + os.sep)


_table_lock = threading.Lock()
_recent_table: tuple[float, ProcessTable] | None = None


def _read_recent_process_table() -> ProcessTable:
    """Return a table of all processes that is at most one interval old: one scan serves all agents."""
    global _recent_table
    with _table_lock:
        now = time.monotonic()
        if _recent_table is None or now - _recent_table[0] > _MEMORY_POLL_S / 2:
            _recent_table = now, read_process_table()
        return _recent_table[1]
