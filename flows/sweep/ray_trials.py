"""Trials of a sweep on the nodes of a Ray cluster: one actor per lane holds the resources and runs the trial process.

All nodes see the output folder under the same path. Trials share finished stages there through the stages' locks, and
a trial whose node is lost resumes on another node from its checkpoints.
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
from rl_core.user_code.load import build_child_import_path
from tasks.config import PipelineSettings

logger = logging.getLogger(__name__)

RAY_OPTION = "--ray"
LOCAL_CLUSTER = "local"  # start a Ray cluster on this machine
_READ_SECONDS = 1.0  # timeout of a call that reads lines
_WARN_AFTER_SECONDS = 30.0  # without a free node
# Variables forwarded to trials on other machines; all others are those of the node.
_FORWARDED_PREFIXES = ("POSTTRAIN_", "MLFLOW_", "HF_", "TRANSFORMERS_", "WANDB_")
_MAX_CONCURRENT_CALLS = 4  # of an actor: reading blocks while others are made


@dataclass(frozen=True, kw_only=True)
class TrialResources:
    """Resources that a trial holds on its node."""

    cpus: int = 1  # also the threads of its trainer
    gpus: float | None = None  # None = one, if the cluster has any
    memory_bytes: int = 0

    def count_fitting_trials(self, node: Mapping[str, float]) -> int:
        """Return how many trials a node with these resources can hold at a time."""
        needs = {"CPU": self.cpus, "GPU": self.gpus or 0.0, "memory": self.memory_bytes}
        return min(int(node.get(name, 0.0) / need) for name, need in needs.items() if need)


class TrialHost:
    """Ray actor that starts the process on its node and forwards lines."""

    def __init__(self, home: str, log: str, environment: Mapping[str, str]) -> None:
        """Start the process. The first call returns errors as values: Ray would wrap them into a page of text."""
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
        """Return the lines since the last call, and True if none follows; wait briefly for the first one."""
        if self._error is not None:
            return self._error
        lines: list[str] = []
        try:
            line = self._lines.get(timeout=_READ_SECONDS)
            while line is not None:
                lines.append(line)
                line = self._lines.get_nowait()
        except queue.Empty:
            return lines, False
        self._lines.put(None)
        return lines, True

    def do(self, method: str, *arguments: Any) -> Any:
        """Call a method of the process, or read its property `is_alive`."""
        if self._error is not None:
            return self._error
        attribute = getattr(self._process, method)
        return attribute(*arguments) if callable(attribute) else attribute


def _refuse_missing_folder(home: str) -> None:
    """Refuse a node that does not see the sweep's folder. Raises: SettingsError."""
    if not Path(home).is_dir():
        raise SettingsError(
            f"{RAY_OPTION}: a node of the cluster ({os.uname().nodename}) does not see {home}; "
            "set output to storage that all nodes share"
        )


class RemoteTrialProcess:
    """`TrialProcess` on a node of the cluster."""

    def __init__(self, session: RaySession, host: Any, stop: threading.Event) -> None:
        """Attach to a host. Once `stop` is set, a silent node is not waited for."""
        self._session, self._host, self._stop = session, host, stop
        self._is_over = False
        self._unread_lines: deque[str] = deque()

    @property
    def is_alive(self) -> bool:
        """See `TrialProcess`."""
        return not self._is_over and bool(self._call_host("do", "is_alive"))

    def send(self, line: str) -> None:
        """See `TrialProcess`."""
        self._call_host("do", "send", line)

    def iter_lines(self) -> Iterator[str]:
        """See `TrialProcess`. Raises: also SettingsError for a node that cannot run trials."""
        while self._unread_lines or not self._is_over:
            while self._unread_lines:
                yield self._unread_lines.popleft()
            if not self._is_over:
                lines, self._is_over = self._call_host("read")
                self._unread_lines.extend(lines)

    def terminate(self) -> None:
        """See `TrialProcess`."""
        if not self._is_over:
            self._host.do.remote("terminate")  # without waiting: it may have no node yet

    def close_input(self) -> None:
        """See `TrialProcess`."""
        self._call_host("do", "close_input")

    def end(self) -> int:
        """See `TrialProcess`; release the node's resources."""
        try:
            return int(self._call_host("do", "end"))
        except (NodeLost, PosttrainError):
            return -1
        finally:
            self._is_over = True
            self._session.stop_worker(self._host)

    def _call_host(self, method: str, *arguments: Any) -> Any:
        """Return the result of the host's method. Raises: NodeLost; SettingsError of a host that could not start."""
        call = getattr(self._host, method).remote(*arguments)
        waited_seconds = seconds_since_stop = 0.0
        has_warned = False
        while not self._session.wait_for_calls([call], _READ_SECONDS):
            waited_seconds += _READ_SECONDS
            if self._stop.is_set():
                seconds_since_stop += _READ_SECONDS
            if seconds_since_stop > STOP_SECONDS:
                raise NodeLost("it did not answer the request to stop")
            if not has_warned and waited_seconds > _WARN_AFTER_SECONDS:
                logger.warning(
                    "a trial waits for free resources of the Ray cluster, or for a silent node"
                )
                has_warned = True
        try:
            value = self._session.fetch_result(call)
        except WorkerLost as lost:
            self._is_over = True
            raise NodeLost(str(lost)) from lost
        if isinstance(value, Exception):
            raise value
        return value


class RayTrialPool:
    """Ray cluster that runs trials."""

    shares_memory = False  # Ray manages the memory of its nodes

    def __init__(self, address: str, parallel: int, resources: TrialResources) -> None:
        """Configure the pool; nothing starts yet.

        Args:
            address: host:port of a running cluster, `auto`, or LOCAL_CLUSTER.
            parallel: trials at a time.
        Raises: SettingsError if Ray is not installed.
        """
        check_ray_installed(RAY_OPTION, "leave --ray out")
        self.parallel, self.resources = parallel, resources
        cluster_address = None if address == LOCAL_CLUSTER else address
        self._session = RaySession(cluster_address, parallel * resources.cpus, RAY_OPTION)

    @property
    def threads(self) -> int | None:
        """Threads of a trial whose settings name none."""
        return self.resources.cpus

    def open_pool(self, settings: PipelineSettings) -> None:
        """Join the cluster, or start it. Raises: SettingsError, also if the trials do not fit into it."""
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
        capacity = sum(self.resources.count_fitting_trials(node) for node in nodes)
        if capacity < self.parallel:
            needs = [
                f"{self.resources.cpus} CPUs",
                f"{self.resources.memory_bytes / 2**30:.1f} GiB",
            ]
            if self.resources.gpus:
                needs.append(f"{self.resources.gpus:g} GPUs")
            raise SettingsError(
                f"--parallel {self.parallel}: a trial holds {', '.join(needs)}, and the {len(nodes)} nodes of the "
                f"cluster have room for {capacity} at a time; "
                f"use --parallel {max(1, capacity)}, --trial-cpus or --trial-gpus"
            )

    def start_process(
        self, index: int, home: Path, log: Path, stop: threading.Event
    ) -> RemoteTrialProcess:
        """Start a process for trials on some node. Its first line comes once a node has free resources."""
        forwarded = {
            name: value
            for name, value in os.environ.items()
            if name.startswith(_FORWARDED_PREFIXES)
        }
        environment = {
            **forwarded,
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
        """End all processes and leave the cluster."""
        self._session.close()
