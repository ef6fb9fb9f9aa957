"""Rollout workers as Ray actors (`ray_session.py`)."""

from __future__ import annotations

import os
import shutil
from typing import Any

from rl_core.errors import SettingsError, WorkerFailed
from rl_core.machine_memory import free_memory
from rl_core.rollout_workers.ray_session import LEAST_STORE, RaySession
from rl_core.settings import RolloutSettings
from rl_core.settings.rollouts import check_ray

__all__ = ["RayCluster", "check_store"]

MIB = 2**20
_WATCH = "watch"  # group of the actor's methods that are answered beside a call that takes long
_BESIDE = "beside"  # group of those that wait
SLACK = 64 * MIB  # tasks, rollouts on their way back


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


class RayCluster(RaySession):
    """A `WorkerCluster` on Ray: one of its own, or a running one at `settings.address`."""

    def __init__(self, settings: RolloutSettings) -> None:
        check_ray()
        super().__init__(settings.address, settings.count + 1)
        self._settings = settings

    def open(self, num_bytes: int) -> None:
        """Start Ray on the loopback interface, or join the cluster. Raises: SettingsError."""
        if self._ray is None:
            self.begin(check_store(num_bytes) if self.address is None else 0)

    def share(self, value: Any) -> Any:
        """An object of the store, of which each machine has one copy."""
        return self._ray.put(value)

    def start(self, spec: Any, base: Any, *, is_live: bool) -> Any:
        """A new actor."""
        return self.actor(
            _Actor, is_live, spec, base, num_cpus=1, num_gpus=_gpu_share(self._settings.count),
            concurrency_groups={_WATCH: 1, _BESIDE: 1},
        )  # fmt: skip

    def call(self, worker: Any, method: str, *arguments: Any) -> Any:
        """A method of the actor's worker."""
        return worker.answer.remote(method, *arguments)

    def call_beside(self, worker: Any, method: str, *arguments: Any) -> Any:
        """See `WorkerCluster`: on a thread of the actor's own for it."""
        return worker.answer.options(concurrency_group=_BESIDE).remote(method, *arguments)

    def ping(self, worker: Any) -> Any:
        """See `WorkerCluster`: on a thread of the actor's own for it."""
        return worker.alive.options(concurrency_group=_WATCH).remote()


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

    def alive(self) -> bool:
        """Sign of life."""
        return True

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
