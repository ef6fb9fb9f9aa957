"""Trials of a sweep on the nodes of a Ray cluster: an actor a lane holds the resources, and runs the trials' process.

All nodes see the output folder under the same path: trials share finished stages there by the stages' own locks, and
one whose node is lost goes on elsewhere from its checkpoints.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import queue
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows.sweep.trial_process import (
    STOP_SECONDS,
    LocalTrialProcess,
    NodeLost,
    estimate_trial_bytes,
)
from rl_core.errors import PosttrainError, SettingsError
from rl_core.rollout_workers.cluster import WorkerLost
from rl_core.rollout_workers.ray_cluster import RaySession
from rl_core.settings.rollouts import check_ray_installed
from rl_core.user_code import build_child_import_path
from tasks.config import PipelineSettings

logger = logging.getLogger(__name__)

RAY_OPTION = "--ray"
LOCAL_CLUSTER = "local"  # a Ray of the sweep's own, on this machine
_READ_SECONDS = 1.0  # that a call waits for lines
_WARN_AFTER_SECONDS = 30.0  # without a free node, until it is said
# Variables that a trial on another machine needs as they are here; everything else there is the node's own.
_FORWARDED_PREFIXES = ("POSTTRAIN_", "MLFLOW_", "HF_", "TRANSFORMERS_", "WANDB_")
_MAX_CONCURRENT_CALLS = 4  # of an actor at a time: reading waits while others are made


@dataclass(frozen=True, kw_only=True)
class TrialResources:
    """Resources that a trial holds on its node."""

    cpus: int = 1  # threads of its trainer, too
    gpus: float | None = None  # None = one, where the cluster has any
    memory_bytes: int = 0

    def count_fitting_trials(self, node: Mapping[str, float]) -> int:
        """Trials that a node of these resources can hold at a time."""
        wanted = {"CPU": self.cpus, "GPU": self.gpus or 0.0, "memory": self.memory_bytes}
        return min(int(node.get(name, 0.0) / need) for name, need in wanted.items() if need)


class TrialHost:
    """The actor: starts the process on its node, and hands lines on."""

    def __init__(self, home: str, log: str, environment: Mapping[str, str]) -> None:
        """Errors are told by the first call, as a value: Ray would wrap them into a page of text."""
        self._error: Exception | None = None
        try:
            _refuse_missing_folder(home)
            self._process = LocalTrialProcess(Path(log), {**os.environ, **environment})
            self._lines: queue.Queue[str | None] = queue.Queue()
            threading.Thread(target=self._forward_lines, name="trial-lines", daemon=True).start()
        except Exception as error:
            self._error = error

    def _forward_lines(self) -> None:
        for line in self._process.iter_lines():
            self._lines.put(line)
        self._lines.put(None)

    def read(self) -> tuple[list[str], bool] | Exception:
        """Lines since the last call, and True where none follows; waits a little for the first one."""
        if self._error is not None:
            return self._error
        found: list[str] = []
        try:
            while (
                line := self._lines.get_nowait()
                if found
                else self._lines.get(timeout=_READ_SECONDS)
            ) is not None:
                found.append(line)
        except queue.Empty:
            return found, False
        self._lines.put(None)
        return found, True

    def do(self, method: str, *arguments: Any) -> Any:
        """A method of the process, or its property `is_alive`."""
        if self._error is not None:
            return self._error
        found = getattr(self._process, method)
        return found(*arguments) if callable(found) else found


def _refuse_missing_folder(home: str) -> None:
    """Raises: SettingsError for a node that does not see the sweep's folder."""
    if not Path(home).is_dir():
        raise SettingsError(
            f"{RAY_OPTION}: a node of the cluster ({os.uname().nodename}) does not see {home}; set output to storage that "
            "all nodes share"
        )


class RemoteTrialProcess:
    """A `TrialProcess` on a node of the cluster."""

    def __init__(self, session: RaySession, host: Any, stop: threading.Event) -> None:
        """`stop`: once set, a node that does not answer is not waited for."""
        self._session, self._host, self._stop, self._is_over = session, host, stop, False
        self._unread_lines: deque[str] = deque()  # lines that nobody has taken yet

    @property
    def is_alive(self) -> bool:
        """See `TrialProcess`."""
        return not self._is_over and bool(self._call_host("do", "is_alive"))

    def send(self, line: str) -> None:
        """See `TrialProcess`."""
        self._call_host("do", "send", line)

    def iter_lines(self) -> Iterator[str]:
        """See `TrialProcess`. Raises: SettingsError, too, for a node that cannot run trials."""
        while self._unread_lines or not self._is_over:
            while self._unread_lines:
                yield self._unread_lines.popleft()
            if not self._is_over:
                found, self._is_over = self._call_host("read")
                self._unread_lines.extend(found)

    def terminate(self) -> None:
        """See `TrialProcess`."""
        if not self._is_over:
            self._host.do.remote("terminate")  # not waited for: there may be no node for it yet

    def close_input(self) -> None:
        """See `TrialProcess`."""
        self._call_host("do", "close_input")

    def end(self) -> int:
        """See `TrialProcess`; gives the node's resources back."""
        try:
            return int(self._call_host("do", "end"))
        except (NodeLost, PosttrainError):
            return -1
        finally:
            self._is_over = True
            self._session.stop_worker(self._host)

    def _call_host(self, method: str, *arguments: Any) -> Any:
        """Result of the host's method. Raises: NodeLost; SettingsError of a host that could not begin."""
        call = getattr(self._host, method).remote(*arguments)
        waited, said, since_stop = 0.0, False, 0.0
        while not self._session.wait_for_calls([call], _READ_SECONDS):
            waited += _READ_SECONDS
            since_stop += _READ_SECONDS * self._stop.is_set()
            if since_stop > STOP_SECONDS:
                raise NodeLost("it did not answer when it was to stop")
            if not said and waited > _WARN_AFTER_SECONDS:
                logger.warning(
                    "a trial waits for free resources of the Ray cluster, or for a node that is silent"
                )
                said = True
        try:
            value = self._session.fetch_result(call)
        except WorkerLost as lost:
            self._is_over = True
            raise NodeLost(str(lost)) from lost
        if isinstance(value, Exception):
            raise value
        return value


class RayTrialPool:
    """A Ray cluster as the place of trials."""

    shares_memory = False  # Ray hands out that of its nodes

    def __init__(self, address: str, parallel: int, resources: TrialResources) -> None:
        """Nothing is started yet.

        Args:
            address: host:port of a running cluster, `auto`, or LOCAL. parallel: trials at a time.
        Raises: SettingsError where Ray is not installed.
        """
        check_ray_installed(RAY_OPTION, "leave --ray out")
        self.parallel, self.resources = parallel, resources
        joined = None if address == LOCAL_CLUSTER else address
        self._session = RaySession(joined, parallel * resources.cpus, RAY_OPTION)

    @property
    def threads(self) -> int | None:
        """Threads of a trial whose settings name none."""
        return self.resources.cpus

    def open_pool(self, settings: PipelineSettings) -> None:
        """Join the cluster, or start it. Raises: SettingsError also where the trials do not fit into it."""
        try:
            self._session.connect_ray()
            self._refuse_insufficient_resources(settings)
            if self._session.address is not None:
                self._session.check_node_versions()
        except BaseException:
            self.close_pool()
            raise

    def _refuse_insufficient_resources(self, settings: PipelineSettings) -> None:
        nodes = self._session.list_node_resources()
        gpus = self.resources.gpus
        if gpus is None:
            gpus = 1.0 if any(node.get("GPU", 0.0) for node in nodes) else 0.0
        self.resources = dataclasses.replace(
            self.resources, gpus=gpus, memory_bytes=estimate_trial_bytes(settings)
        )
        room = sum(self.resources.count_fitting_trials(node) for node in nodes)
        if room < self.parallel:
            needs = [
                f"{self.resources.cpus} CPUs",
                f"{self.resources.memory_bytes / 2**30:.1f} GiB",
            ]
            needs += [f"{self.resources.gpus:g} GPUs"] if self.resources.gpus else []
            raise SettingsError(
                f"--parallel {self.parallel}: a trial holds {', '.join(needs)}, and the {len(nodes)} nodes of the "
                f"cluster have room for {room} at a time; use --parallel {max(1, room)}, --trial-cpus or --trial-gpus"
            )

    def start_process(
        self, index: int, home: Path, log: Path, stop: threading.Event
    ) -> RemoteTrialProcess:
        """A process for trials on some node. Its first line comes when there is one with free resources."""
        handed = {
            name: value
            for name, value in os.environ.items()
            if name.startswith(_FORWARDED_PREFIXES)
        }
        environment = {
            **handed,
            "PYTHONPATH": build_child_import_path(),
            "OMP_NUM_THREADS": str(self.resources.cpus),
        }
        host = self._session.create_actor(
            TrialHost,
            str(home),
            str(log),
            environment,
            num_cpus=self.resources.cpus,
            num_gpus=self.resources.gpus or 0.0,
            memory=self.resources.memory_bytes,
            max_concurrency=_MAX_CONCURRENT_CALLS,
        )
        return RemoteTrialProcess(self._session, host, stop)

    def close_pool(self) -> None:
        """End what is left, and leave the cluster."""
        self._session.close()
