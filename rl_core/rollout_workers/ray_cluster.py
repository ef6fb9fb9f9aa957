"""Rollout workers as Ray actors, over a local Ray on the loopback interface or a running cluster.

The only module that imports Ray, and only within functions.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rl_core.errors import SettingsError, WorkerFailed
from rl_core.machine_memory import measure_free_memory
from rl_core.rollout_workers.cluster import WorkerLost
from rl_core.settings import RolloutSettings
from rl_core.settings.rollouts import check_ray_installed
from rl_core.storage.session_resources import SessionFolder, remove_stale_session_folders

MIB = 2**20
MIN_OBJECT_STORE_BYTES = 80 * MIB  # Ray refuses less than 75 MiB
OBJECT_STORE_SLACK = 64 * MIB  # for tasks and returning rollouts
MAX_START_ATTEMPTS = 3  # Ray gives up a start after 30 s on a busy machine
COMPARED_PACKAGES = ("torch", "transformers")  # must have the same version on every node
NODE_REPLY_TIMEOUT_S = (
    120.0  # for nodes to report installed versions; each starts a process for that
)
CONNECT_TIMEOUT_S = 3.0
_BUSY_MESSAGES = (
    "timed out",
    "connect to GCS",
)  # parts of the error when a busy machine starts Ray too slowly
# concurrency groups of the actor: heartbeats, and methods that wait
_PING_GROUP, _BLOCKING_GROUP = "watch", "beside"
# Ray would listen on an external address of this machine; a local one must stay on the loopback interface.
_LOCAL_ENVIRONMENT = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
}


def check_cluster_address(address: str, key: str = "rollouts.address") -> None:
    """Raise SettingsError if host:port refuses connections; `auto` is resolved when Ray starts."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT_S).close()
    except (OSError, OverflowError, ValueError) as error:
        raise SettingsError(
            f"{key}: no Ray cluster answers at {address} within {CONNECT_TIMEOUT_S:g} s ({error}); start one with "
            "`ray start --head`, or remove the address"
        ) from error


class RaySession:
    """A local Ray of this process, or a connection to a running cluster."""

    def __init__(self, address: str | None, cpus: int, key: str = "rollouts.address") -> None:
        """Store the settings; start nothing.

        Args:
            address: of a running cluster, or `auto`; None = a local Ray.
            cpus: number of CPUs of a local Ray.
            key: name of the setting, for messages.
        """
        self.address, self._cpus, self._key = address, cpus, key
        self._ray: Any = None
        self._session: SessionFolder | None = None
        self._handles: list[Any] = []

    def connect_ray(self, store: int = MIN_OBJECT_STORE_BYTES) -> None:
        """Start a local Ray with an object store of `store` bytes, or join the cluster.

        Raises: SettingsError; WorkerFailed if Ray does not start.
        """
        if self._ray is not None:
            return
        with _preserve_signal_handlers():
            if self.address is None:
                self._start_local_ray(store)
            else:
                self._join_cluster(self.address)

    def _start_local_ray(self, store: int) -> None:
        remove_stale_session_folders()
        self._session = SessionFolder()
        with _set_environment(
            {**_LOCAL_ENVIRONMENT, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        ):
            ray = importlib.import_module("ray")
            self._refuse_initialized_ray(ray)
            for num_left in reversed(range(MAX_START_ATTEMPTS)):
                try:
                    ray.init(
                        include_dashboard=False,
                        num_cpus=self._cpus,
                        object_store_memory=store,
                        _temp_dir=str(self._session.path),
                        log_to_driver=False,
                        configure_logging=False,
                        address="local",
                    )
                    break
                except Exception as error:  # Ray has no public class for a node missing after 30 s
                    if not any(text in str(error) for text in _BUSY_MESSAGES):
                        raise
                    ray.shutdown()
                    if not num_left:
                        raise WorkerFailed(
                            f"Ray did not start in {MAX_START_ATTEMPTS} attempts ({_format_first_line(error)}): this "
                            "machine is too busy, or out of memory; run the same command again"
                        ) from error
        self._ray = ray

    def _join_cluster(self, address: str) -> None:
        check_cluster_address(address, self._key)
        with _set_environment({"RAY_USAGE_STATS_ENABLED": "0"}):
            ray = importlib.import_module("ray")
            self._refuse_initialized_ray(ray)
            try:
                ray.init(address=address, log_to_driver=False, configure_logging=False)
            except (ConnectionError, RuntimeError, ValueError) as error:
                line = " ".join(str(error).split())[:400]
                if "ersion" in line:
                    raise SettingsError(
                        f"{self._key}: the cluster at {address} has other versions than this process: {line}; "
                        "install the same constraints.txt on every node"
                    ) from error
                raise SettingsError(
                    f"{self._key}: the cluster at {address} cannot be joined: {line}"
                ) from error
        self._ray = ray

    def _refuse_initialized_ray(self, ray: Any) -> None:
        if ray.is_initialized():
            raise SettingsError(
                f"{self._key.partition('.')[0]}: this process already uses Ray; call ray.shutdown() first, or set "
                f"{self._key} to its address in another process"
            )

    def list_node_resources(self) -> list[Mapping[str, float]]:
        """List the resources of each living node: CPU, GPU, memory in bytes."""
        return [dict(node["Resources"]) for node in self._ray.nodes() if node["Alive"]]

    def check_node_versions(self) -> None:
        """Compare the versions on every living node with those here.

        Raises: SettingsError for other versions, or a node without an answer.
        """

        # nested, with its own imports, so that a node without posttrain can run it
        def read_versions(names: Sequence[str]) -> dict[str, str]:
            import importlib.metadata
            import os
            import sys

            versions = {"": os.uname().nodename, "Python": ".".join(map(str, sys.version_info[:2]))}
            for name in names:
                try:
                    versions[name] = importlib.metadata.version(name)
                except importlib.metadata.PackageNotFoundError:
                    versions[name] = "not installed"
            return versions

        local_versions = read_versions(COMPARED_PACKAGES)
        strategies = importlib.import_module("ray.util.scheduling_strategies")
        affinity = strategies.NodeAffinitySchedulingStrategy
        task = self._ray.remote(num_cpus=0, max_retries=0)(read_versions)
        nodes = [node["NodeID"] for node in self._ray.nodes() if node["Alive"]]
        calls = [
            task.options(scheduling_strategy=affinity(node, soft=False)).remote(COMPARED_PACKAGES)
            for node in nodes
        ]
        pending = list(calls)
        end = time.monotonic() + NODE_REPLY_TIMEOUT_S
        while pending and (remaining := end - time.monotonic()) > 0:
            for call in self.wait_for_calls(pending, remaining):
                pending.remove(call)
                versions = self.fetch_result(call)
                for name in ("Python", *COMPARED_PACKAGES):
                    if versions[name] != local_versions[name]:
                        raise SettingsError(
                            f"{self._key}: a node of the cluster ({versions['']}) has {name} {versions[name]}, this "
                            f"process {local_versions[name]}; install the same constraints.txt on every node"
                        )
        if pending:
            raise SettingsError(
                f"{self._key}: {len(pending)} of {len(calls)} nodes of the cluster did not report their versions "
                f"within {NODE_REPLY_TIMEOUT_S:g} s; look at `ray status`"
            )

    def create_actor(self, kind: type, *arguments: Any, **options: Any) -> Any:
        """Create an actor of this class that Ray never restarts.

        Args:
            options: its resources, see `ray.remote`.
        """
        actor_class = self._ray.remote(
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy="SPREAD" if self.address is not None else "DEFAULT",
            **options,
        )(kind)
        handle = actor_class.remote(*arguments)
        self._handles.append(handle)
        return handle

    def wait_for_calls(self, calls: Sequence[Any], timeout_s: float) -> list[Any]:
        """See `WorkerCluster`."""
        if not calls:
            return []
        return list(self._ray.wait(list(calls), num_returns=1, timeout=timeout_s)[0])

    def fetch_result(self, call: Any) -> Any:
        """See `WorkerCluster`."""
        errors = self._ray.exceptions
        try:
            return self._ray.get(call)
        except (
            errors.RayActorError,
            errors.ObjectLostError,
            errors.OutOfMemoryError,
            errors.WorkerCrashedError,
        ) as error:
            raise WorkerLost(_format_first_line(error)) from error
        except errors.RayError as error:
            raise WorkerFailed(f"a worker on Ray failed: {_format_first_line(error)}") from error

    def stop_worker(self, worker: Any) -> None:
        """See `WorkerCluster`."""
        with contextlib.suppress(Exception):
            self._ray.kill(worker)
        if worker in self._handles:
            self._handles.remove(worker)

    def close(self) -> None:
        """See `WorkerCluster`."""
        if self._ray is not None:
            for handle in list(self._handles):
                self.stop_worker(handle)
            with _preserve_signal_handlers():
                self._ray.shutdown()
        self._ray = None
        if self._session is not None:
            self._session.close()
        self._session = None


def _format_first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]


@contextlib.contextmanager
def _set_environment(changes: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables temporarily."""
    previous = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in previous.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _preserve_signal_handlers() -> Iterator[None]:
    """Restore signal handlers afterwards: Ray installs one that ends the process on SIGTERM."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            if handler is not None:
                signal.signal(number, handler)


def check_object_store(num_bytes: int, shared_memory: str = "/dev/shm") -> int:
    """Return the size of the object store for values of this size, in bytes.

    Raises: SettingsError if the machine's shared memory or free memory is smaller.
    """
    needed = max(MIN_OBJECT_STORE_BYTES, num_bytes + OBJECT_STORE_SLACK)
    room = shutil.disk_usage(shared_memory).free if os.path.isdir(shared_memory) else 0
    free = min(room, measure_free_memory())
    if needed > free:
        raise SettingsError(
            f"rollouts.workers: Ray's object store needs {needed / MIB:,.0f} MiB for the weights, but this machine has "
            f"{free / MIB:,.0f} MiB free ({shared_memory} {room / MIB:,.0f} MiB); enlarge {shared_memory} (docker run "
            "--shm-size), use lora, or set workers: in_process"
        )
    return needed


class RayCluster(RaySession):
    """A `WorkerCluster` on a local Ray, or on a running cluster at `settings.address`."""

    def __init__(self, settings: RolloutSettings) -> None:
        check_ray_installed()
        super().__init__(settings.address, settings.count + 1)
        self._settings = settings

    def open_cluster(self, num_bytes: int) -> None:
        """Start Ray on the loopback interface, or join the cluster.

        Raises: SettingsError.
        """
        if self._ray is None:
            self.connect_ray(check_object_store(num_bytes) if self.address is None else 0)

    def share_value(self, value: Any) -> Any:
        """Put a value into the object store; each machine has one copy."""
        return self._ray.put(value)

    def start_worker(self, spec: Any, base: Any, *, is_live: bool) -> Any:
        """Create a worker actor."""
        return self.create_actor(
            _RolloutActor,
            is_live,
            spec,
            base,
            num_cpus=1,
            num_gpus=_compute_gpu_share(self._settings.count),
            concurrency_groups={_PING_GROUP: 1, _BLOCKING_GROUP: 1},
        )

    def call_worker(self, worker: Any, method: str, *arguments: Any) -> Any:
        """Call a method of the actor's worker."""
        return worker.answer.remote(method, *arguments)

    def call_concurrently(self, worker: Any, method: str, *arguments: Any) -> Any:
        """See `WorkerCluster`; runs on a dedicated thread of the actor."""
        return worker.answer.options(concurrency_group=_BLOCKING_GROUP).remote(method, *arguments)

    def ping_worker(self, worker: Any) -> Any:
        """See `WorkerCluster`; runs on a dedicated thread of the actor."""
        return worker.alive.options(concurrency_group=_PING_GROUP).remote()


class _RolloutActor:
    """The actor process: it creates the worker and forwards calls."""

    def __init__(self, is_live: bool, spec: Any, base: Any) -> None:
        self._error: Exception | None = None
        try:
            from rl_core.rollout_workers.async_worker import AsyncRolloutWorker
            from rl_core.rollout_workers.worker import RolloutWorker

            self._worker = (AsyncRolloutWorker if is_live else RolloutWorker)(spec, base)
        except Exception as error:
            # returned by the first call as a value, because Ray would wrap it into a page of text
            self._error = error

    def alive(self) -> bool:
        """Return a heartbeat."""
        return True

    def answer(self, method: str, *arguments: Any) -> Any:
        """See `RolloutWorker.call_method`."""
        if self._error is not None:
            from rl_core.errors import PosttrainError

            is_posttrain_error = isinstance(self._error, PosttrainError)
            text = f"a rollout worker did not start: {type(self._error).__name__}: {self._error}"
            return self._error if is_posttrain_error else WorkerFailed(text)
        return self._worker.call_method(method, *arguments)


def _compute_gpu_share(count: int) -> float:
    """Return a worker's GPUs: one, or a fraction if this machine has fewer than workers; 0 = no GPU."""
    import torch

    gpus = torch.cuda.device_count()
    return min(1.0, gpus / count) if gpus else 0.0
