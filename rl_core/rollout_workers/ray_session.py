"""One Ray of this process: started on the loopback interface, or joined by its address; its actors and their results.

The only module that imports Ray, and only within functions.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rl_core.errors import SettingsError, WorkerFailed
from rl_core.rollout_workers.cluster import WorkerLost
from rl_core.storage.session_folders import SessionFolder, reap_session_folders

__all__ = ["LEAST_STORE", "RaySession", "check_address"]

LEAST_STORE = 80 * 2**20  # Ray refuses less than 75 MiB
STARTS = 3  # attempts to start Ray, which gives up after 30 s where the machine is busy
PACKAGES = ("torch", "transformers")  # whose versions have to be the same on every node
NODES_S = 120.0  # for nodes to say what they have installed: each starts a process for it
CONNECT_S = 3.0  # for a cluster's address to take a connection
_BUSY = ("timed out", "connect to GCS")  # in the text of a start that a busy machine was too slow for
# Ray listens on the address that it finds for this machine; a Ray of our own stays on the loopback interface.
_LOCAL = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}


def check_address(address: str, key: str = "rollouts.address") -> None:
    """Raises: SettingsError for host:port that takes no connection; `auto` is looked up when Ray starts."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
    except (OSError, OverflowError, ValueError) as error:
        raise SettingsError(
            f"{key}: no Ray cluster answers at {address} within {CONNECT_S:g} s ({error}); start one with "
            "`ray start --head`, or leave the address out"
        ) from error


class RaySession:
    """A Ray of the process's own, or a running one."""

    def __init__(self, address: str | None, cpus: int, key: str = "rollouts.address") -> None:
        """Nothing is started yet.

        Args:
            address: of a running cluster, or `auto`; None = one of its own. cpus: that one of its own hands out.
            key: name of the setting, for messages.
        """
        self.address, self._cpus, self._key = address, cpus, key
        self._ray: Any = None
        self._session: SessionFolder | None = None
        self._handles: list[Any] = []

    def begin(self, store: int = LEAST_STORE) -> None:
        """Start Ray on the loopback interface with an object store of so many bytes, or join the cluster.

        Raises: SettingsError; WorkerFailed where it does not start.
        """
        if self._ray is not None:
            return
        with _signals_kept():
            if self.address is None:
                self._start(store)
            else:
                self._join(self.address)

    def _start(self, store: int) -> None:
        reap_session_folders()
        self._session = SessionFolder()
        with _environment({**_LOCAL, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}):
            ray = importlib.import_module("ray")
            self._refuse_running(ray)
            for left in reversed(range(STARTS)):
                try:
                    ray.init(
                        include_dashboard=False, num_cpus=self._cpus, object_store_memory=store,
                        _temp_dir=str(self._session.path), log_to_driver=False, configure_logging=False,
                        address="local",
                    )  # fmt: skip
                    break
                except Exception as error:  # Ray's own class for it: its node was not there within 30 s
                    if not any(sign in str(error) for sign in _BUSY):
                        raise
                    ray.shutdown()
                    if not left:
                        raise WorkerFailed(
                            f"Ray did not start in {STARTS} attempts ({_first_line(error)}): this machine is too busy, "
                            "or out of memory; the same command tries again"
                        ) from error
        self._ray = ray

    def _join(self, address: str) -> None:
        check_address(address, self._key)
        with _environment({"RAY_USAGE_STATS_ENABLED": "0"}):
            ray = importlib.import_module("ray")
            self._refuse_running(ray)
            try:
                ray.init(address=address, log_to_driver=False, configure_logging=False)
            except (ConnectionError, RuntimeError, ValueError) as error:
                line = " ".join(str(error).split())[:400]
                if "ersion" in line:
                    raise SettingsError(
                        f"{self._key}: the cluster at {address} has other versions than this process: {line}; "
                        "install the same constraints.txt on every node"
                    ) from error
                raise SettingsError(f"{self._key}: the cluster at {address} cannot be joined: {line}") from error
        self._ray = ray

    def _refuse_running(self, ray: Any) -> None:
        if ray.is_initialized():
            raise SettingsError(
                f"{self._key.partition('.')[0]}: this process uses Ray already; end that by ray.shutdown() before, or "
                f"give its address as {self._key} in a process of its own"
            )

    def nodes(self) -> list[Mapping[str, float]]:
        """Resources of each living node: CPU, GPU, memory in bytes."""
        return [dict(node["Resources"]) for node in self._ray.nodes() if node["Alive"]]

    def check_versions(self) -> None:
        """Ask every living node what it has installed. Raises: SettingsError for one with other versions, or none."""

        def installed(names: Sequence[str]) -> dict[str, str]:  # within: a node without posttrain can run it
            import importlib.metadata
            import os
            import sys

            found = {"": os.uname().nodename, "Python": ".".join(map(str, sys.version_info[:2]))}
            for name in names:
                try:
                    found[name] = importlib.metadata.version(name)
                except importlib.metadata.PackageNotFoundError:
                    found[name] = "not installed"
            return found

        here = installed(PACKAGES)
        affinity = importlib.import_module("ray.util.scheduling_strategies").NodeAffinitySchedulingStrategy
        task = self._ray.remote(num_cpus=0, max_retries=0)(installed)
        nodes = [node["NodeID"] for node in self._ray.nodes() if node["Alive"]]
        calls = [task.options(scheduling_strategy=affinity(node, soft=False)).remote(PACKAGES) for node in nodes]
        silent = list(calls)
        end = time.monotonic() + NODES_S
        while silent and (left := end - time.monotonic()) > 0:
            for call in self.wait(silent, left):
                silent.remove(call)
                there = self.result(call)
                for name in ("Python", *PACKAGES):
                    if there[name] != here[name]:
                        raise SettingsError(
                            f"{self._key}: a node of the cluster ({there['']}) has {name} {there[name]}, this process "
                            f"{here[name]}; install the same constraints.txt on every node"
                        )
        if silent:
            raise SettingsError(
                f"{self._key}: {len(silent)} of {len(calls)} nodes of the cluster did not say within {NODES_S:g} s "
                "what they have installed; look at `ray status`"
            )

    def actor(self, kind: type, *arguments: Any, **options: Any) -> Any:
        """A new actor of this class, never restarted by Ray. `options`: its resources, see `ray.remote`."""
        made = self._ray.remote(
            max_restarts=0, max_task_retries=0,
            scheduling_strategy="SPREAD" if self.address is not None else "DEFAULT", **options,
        )(kind)  # fmt: skip
        handle = made.remote(*arguments)
        self._handles.append(handle)
        return handle

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
            raise WorkerFailed(f"a worker on Ray failed: {_first_line(error)}") from error

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
