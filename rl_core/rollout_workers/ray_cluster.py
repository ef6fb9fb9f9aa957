"""Workers as Ray actors. The only module that imports Ray, and only within functions."""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rl_core.errors import SettingsError, WorkerFailed
from rl_core.machine_memory import free_memory
from rl_core.rollout_workers.cluster import WorkerLost
from rl_core.settings import RolloutSettings
from rl_core.settings.rollouts import check_ray
from rl_core.storage.session_folders import SessionFolder, reap_session_folders

__all__ = ["RayCluster", "check_address", "check_store"]

MIB = 2**20
LEAST_STORE = 80 * MIB  # Ray refuses less than 75 MiB
SLACK = 64 * MIB  # tasks, rollouts on their way back
STARTS = 3  # attempts to start Ray, which gives up after 30 s where the machine is busy
CONNECT_S = 3.0  # for a cluster's address to take a connection
# Ray listens on the address that it finds for this machine; a Ray of our own stays on the loopback interface.
_LOCAL = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}


def check_address(address: str) -> None:
    """Raises: SettingsError for host:port that takes no connection; `auto` is looked up when Ray starts."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
    except (OSError, OverflowError, ValueError) as error:
        raise SettingsError(
            f"rollouts.address: no Ray cluster answers at {address} within {CONNECT_S:g} s ({error}); start one with "
            "`ray start --head`, or leave the address out"
        ) from error


def check_store(num_bytes: int, shared_memory: str = "/dev/shm") -> int:
    """Bytes of the object store for values of this size.

    Raises: SettingsError where this machine's shared memory or free memory is less.
    """
    needed = max(LEAST_STORE, num_bytes + SLACK)
    room = shutil.disk_usage(shared_memory).free if os.path.isdir(shared_memory) else 0
    free = min(room, free_memory())
    if needed > free:
        raise SettingsError(
            f"rollouts.workers: Ray's object store needs {needed / MIB:,.0f} MiB for the weights, and this machine has "
            f"{free / MIB:,.0f} MiB free ({shared_memory} {room / MIB:,.0f} MiB); enlarge {shared_memory} (docker run "
            "--shm-size), use lora, or set workers: in_process"
        )
    return needed


class RayCluster:
    """A `WorkerCluster` on Ray: one of its own, or a running one at `settings.address`."""

    def __init__(self, settings: RolloutSettings) -> None:
        check_ray()
        self._settings = settings
        self._ray: Any = None
        self._session: SessionFolder | None = None
        self._handles: list[Any] = []

    def open(self, num_bytes: int) -> None:
        """Start Ray on the loopback interface, or join the cluster. Raises: SettingsError."""
        if self._ray is not None:
            return
        with _signals_kept():
            if self._settings.address is None:
                self._start(check_store(num_bytes))
            else:
                self._join(self._settings.address)

    def _start(self, store: int) -> None:
        reap_session_folders()
        self._session = SessionFolder()
        threads = self._settings.count + 1
        with _environment({**_LOCAL, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}):
            ray = importlib.import_module("ray")
            _refuse_running(ray)
            for left in reversed(range(STARTS)):
                try:
                    ray.init(
                        include_dashboard=False, num_cpus=threads, object_store_memory=store,
                        _temp_dir=str(self._session.path), log_to_driver=False, configure_logging=False,
                        address="local",
                    )  # fmt: skip
                    break
                except Exception as error:  # Ray's own class for it: its node was not there within 30 s
                    if "timed out" not in str(error):
                        raise
                    ray.shutdown()
                    if not left:
                        raise WorkerFailed(
                            f"Ray did not start in {STARTS} attempts ({_first_line(error)}): this machine is too busy, "
                            "or out of memory; the same command tries again"
                        ) from error
        self._ray = ray

    def _join(self, address: str) -> None:
        check_address(address)
        with _environment({"RAY_USAGE_STATS_ENABLED": "0"}):
            ray = importlib.import_module("ray")
            _refuse_running(ray)
            try:
                ray.init(address=address, log_to_driver=False, configure_logging=False)
            except (ConnectionError, RuntimeError, ValueError) as error:
                line = " ".join(str(error).split())[:400]
                if "ersion" in line:
                    raise SettingsError(
                        f"rollouts.address: the cluster at {address} has other versions than this process: {line}; "
                        "install the same constraints.txt on every node"
                    ) from error
                raise SettingsError(f"rollouts.address: the cluster at {address} cannot be joined: {line}") from error
        self._ray = ray

    def share(self, value: Any) -> Any:
        """An object of the store, of which each machine has one copy."""
        return self._ray.put(value)

    def start(self, spec: Any, base: Any, *, is_live: bool) -> Any:
        """A new actor."""
        is_remote = self._settings.address is not None
        actor = self._ray.remote(
            num_cpus=1, num_gpus=_gpu_share(self._settings.count), max_restarts=0, max_task_retries=0,
            scheduling_strategy="SPREAD" if is_remote else "DEFAULT",
        )(_Actor)  # fmt: skip
        handle = actor.remote(is_live, spec, base)
        self._handles.append(handle)
        return handle

    def call(self, worker: Any, method: str, *arguments: Any) -> Any:
        """A method of the actor's worker."""
        return worker.answer.remote(method, *arguments)

    def wait(self, calls: Sequence[Any], timeout_s: float) -> list[Any]:
        """See `WorkerCluster`."""
        if not calls:
            return []
        return list(self._ray.wait(list(calls), num_returns=1, timeout=timeout_s)[0])

    def result(self, call: Any) -> Any:
        """See `WorkerCluster`."""
        errors = self._ray.exceptions
        try:
            return self._ray.get(call)
        except errors.RayActorError as error:
            raise WorkerLost(_first_line(error)) from error
        except (errors.ObjectLostError, errors.OutOfMemoryError, errors.WorkerCrashedError) as error:
            raise WorkerLost(_first_line(error)) from error
        except errors.RayError as error:
            raise WorkerFailed(f"a rollout worker failed: {_first_line(error)}") from error

    def stop(self, worker: Any) -> None:
        """See `WorkerCluster`."""
        with contextlib.suppress(Exception):
            self._ray.kill(worker)
        if worker in self._handles:
            self._handles.remove(worker)

    def close(self) -> None:
        """See `WorkerCluster`."""
        if self._ray is not None:
            for handle in list(self._handles):
                self.stop(handle)
            with _signals_kept():
                self._ray.shutdown()
        self._ray = None
        if self._session is not None:
            self._session.close()
        self._session = None


class _Actor:
    """The actor: imports the worker, and passes calls on."""

    def __init__(self, is_live: bool, spec: Any, base: Any) -> None:
        self._error: Exception | None = None
        try:
            from rl_core.rollout_workers.live_worker import LiveWorker
            from rl_core.rollout_workers.worker import RolloutWorker

            self._worker = (LiveWorker if is_live else RolloutWorker)(spec, base)
        except Exception as error:  # told by the first call, as a value: Ray would wrap it into a page of text
            self._error = error

    def answer(self, method: str, *arguments: Any) -> Any:
        """See `RolloutWorker.answer`."""
        if self._error is not None:
            from rl_core.errors import PosttrainError

            is_ours = isinstance(self._error, PosttrainError)
            text = f"a rollout worker did not start: {type(self._error).__name__}: {self._error}"
            return self._error if is_ours else WorkerFailed(text)
        return self._worker.answer(method, *arguments)


def _gpu_share(count: int) -> float:
    """GPUs of a worker: one, or a part of those that this machine has; 0 = it has none."""
    import torch

    gpus = torch.cuda.device_count()
    return min(1.0, gpus / count) if gpus else 0.0


def _refuse_running(ray: Any) -> None:
    if ray.is_initialized():
        raise SettingsError(
            "rollouts.workers: this process uses Ray already; end that by ray.shutdown() before training, or give its "
            "address as rollouts.address in a process of its own"
        )


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]


@contextlib.contextmanager
def _environment(changes: Mapping[str, str]) -> Iterator[None]:
    """Environment variables inside, put back afterwards."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _signals_kept() -> Iterator[None]:
    """Signal handlers put back afterwards: Ray installs one that ends the process at SIGTERM."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:
                signal.signal(number, handler)
