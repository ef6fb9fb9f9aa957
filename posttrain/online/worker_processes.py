"""Processes of online learning: update worker, gate, standby, and the replay of a recorded buffer."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

from rl_core.api.policy import load_policy
from rl_core.errors import DataError, SettingsError
from rl_core.models.trainable_weights import collect_trainable_weights
from rl_core.online.build_worker import (
    BUFFER_FOLDER,
    SNAPSHOTS_FOLDER,
    build_update_worker,
    create_online_environment,
)
from rl_core.online.canary_gate import CanaryGate
from rl_core.online.experience_log import list_segments
from rl_core.online.service_files import METRICS_FILE
from rl_core.online.update_audit import UpdateAudit
from rl_core.online.update_worker import UpdateWorker
from rl_core.online.weight_snapshots import WeightSnapshots, digest_weights
from rl_core.processes.heartbeats import Heartbeat
from rl_core.settings import OnlineSettings
from rl_core.storage.atomic_files import (
    make_folder,
    open_log_file,
    write_json_atomic,
    write_text_unsynced,
)
from rl_core.storage.locks import FolderLock
from rl_core.training.signals import StopRequests

REPLAY_FILE = "replay.json"
WORKER_POLL_SECONDS = 0.1
GATE_POLL_SECONDS = 0.5
MAX_LOG_BYTES = 4 * 2**20


def learn_from_buffer(
    settings: OnlineSettings, say: Callable[[str], None] = print, heartbeat: Heartbeat | None = None
) -> int:
    """Learn from what a server writes into the buffer, until SIGTERM or Ctrl-C. Return the signal.

    The state is saved at the end. After a crash the worker resumes from its last checkpoint, with the same numbers.
    """
    folder = make_folder(Path(settings.folder))
    heartbeat = heartbeat or Heartbeat(None, settings.service.update_seconds)
    heartbeat.report_working()
    with (
        StopRequests() as stops,
        UpdateAudit(folder, settings.audit) as audit,
        build_update_worker(settings, folder, audit=audit) as worker,
    ):
        say(
            f"learning from {folder / BUFFER_FOLDER}: update {worker.updates}, {len(worker.buffer)} experiences; "
            "Ctrl-C stops it"
        )
        _write_worker_metrics(worker, folder)
        while stops.signum is None:
            heartbeat.report_working()
            if not worker.step():
                heartbeat.report_waiting()
                time.sleep(WORKER_POLL_SECONDS)
            else:
                _write_worker_metrics(worker, folder)
        worker.save_checkpoint()
        say(f"stopped after update {worker.updates}; everything is saved")
        return stops.signum


def replay_buffer(
    settings: OnlineSettings, buffer: Path, output: Path, say: Callable[[str], None] = print
) -> dict[str, float | str]:
    """Learn from a recorded buffer into another folder, with the same numbers as the live worker.

    A replay that was stopped resumes when it is called again.
    Returns: what is written to replay.json: updates, records, SHA-256 of the weights and of their average, metrics.
    Raises: DataError if there are no records or the first ones were removed; SettingsError for the live folder.
    """
    if not list_segments(buffer):
        subfolder = buffer / BUFFER_FOLDER
        if not list_segments(subfolder):
            raise DataError(
                f"{buffer}: contains no segments of a buffer; name the folder that the server writes into"
            )
        buffer = subfolder
    if output.resolve() in (buffer.resolve(), buffer.resolve().parent):
        raise SettingsError(
            f"--output: {output} is the folder of the live worker; name another one"
        )
    make_folder(output)
    with (
        StopRequests() as stops,
        UpdateAudit(output, settings.audit) as audit,
        build_update_worker(settings, output, log=buffer, audit=audit) as worker,
    ):
        while stops.signum is None and worker.step():
            _write_worker_metrics(worker, output)
        worker.save_checkpoint()
        if stops.signum is not None:
            say(f"stopped after update {worker.updates}; the same command resumes it")
            raise KeyboardInterrupt
        result: dict[str, float | str] = {
            "weights": digest_weights(collect_trainable_weights(worker.learner.model)),
            "average": digest_weights(worker.learner.copy_served_weights()),
            **worker.collect_metrics(),
        }
    write_json_atomic(output / REPLAY_FILE, result)
    return result


def _write_worker_metrics(worker: UpdateWorker, folder: Path) -> None:
    metrics = {"paused": worker.paused, **worker.collect_metrics()}
    write_text_unsynced(folder / METRICS_FILE, json.dumps(metrics) + "\n")


def run_gate(
    settings: OnlineSettings, say: Callable[[str], None] = print, heartbeat: Heartbeat | None = None
) -> int:
    """Test every new snapshot in canary episodes, until SIGTERM or Ctrl-C. Return the signal.

    Raises: SettingsError without an environment, whose episodes a gate needs; FolderBusy if another gate runs.
    """
    folder = make_folder(Path(settings.folder))
    environment = create_online_environment(settings.environment)
    if environment is None:
        raise SettingsError(
            "environment: a gate needs canary episodes, so name an environment, or set service.run_gate=false"
        )
    heartbeat = heartbeat or Heartbeat(None, settings.service.update_seconds)
    heartbeat.report_working()
    with StopRequests() as stops, FolderLock(make_folder(folder / "gate")):
        policy = load_policy(settings.model, seed=settings.seed)
        snapshots = WeightSnapshots(folder / SNAPSHOTS_FOLDER, cached=3)
        gate = CanaryGate(folder, settings, policy, environment, snapshots)
        say(f"gate of {folder}: {gate.gate.candidates} snapshots were tested; Ctrl-C stops it")
        while stops.signum is None:
            heartbeat.report_working()
            if not gate.step():
                heartbeat.report_waiting()
                time.sleep(GATE_POLL_SECONDS)
        return stops.signum


def wait_for_role(descriptor: int, settings: OnlineSettings) -> str:
    """Load what a start needs, report readiness, and wait for a role. Return the role; "" if the server has ended.

    The model is loaded here only for the code that this imports; the role loads it again, and its checkpoint.
    """
    load_policy(settings.model, seed=settings.seed)
    with socket.socket(fileno=os.dup(descriptor)) as server:
        server.setblocking(True)
        try:
            server.sendall(b"r")
            role = server.recv(64).decode().strip()
        except OSError:
            return ""
    if role:
        log_path = Path(settings.folder) / f"{role}.log"
        with open_log_file(log_path, append_up_to=MAX_LOG_BYTES) as log:
            for output in (1, 2):
                os.dup2(log.fileno(), output)
    return role
