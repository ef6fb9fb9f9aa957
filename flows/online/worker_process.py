"""The update worker as a process, and the replay of a recorded buffer: the same steps over the same records."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

from flows.online.heartbeat import LifeSign
from rl_core.errors import DataError, SettingsError
from rl_core.models.trainable_weights import trainable_weights
from rl_core.online.assembly import BUFFER, assemble_worker
from rl_core.online.experience_log import segments
from rl_core.online.service_files import METRICS
from rl_core.online.update_audit import UpdateAudit
from rl_core.online.update_worker import UpdateWorker
from rl_core.online.weight_snapshots import weights_digest
from rl_core.settings import OnlineSettings
from rl_core.storage.single_files import make_folder, write_json_atomic, write_text_unsynced
from rl_core.training.signals import StopRequests

__all__ = ["REPLAY", "follow_buffer", "replay_buffer"]

REPLAY = "replay.json"
POLL_SECONDS = 0.1


def follow_buffer(settings: OnlineSettings, say: Callable[[str], None] = print, heart: LifeSign | None = None) -> int:
    """Learn from what a server writes into the buffer, until SIGTERM or Ctrl-C; returns the signal.

    The state is saved at the end; after a kill the worker goes on from its last checkpoint, with equal numbers.
    """
    folder = make_folder(Path(settings.folder))
    heart = heart or LifeSign(None, settings.service.update_seconds)
    heart.working()
    with (
        StopRequests() as stops,
        UpdateAudit(folder, settings.audit) as audit,
        assemble_worker(settings, folder, audit=audit) as worker,
    ):
        held = len(worker.buffer)
        say(f"learning from {folder / BUFFER}: update {worker.updates}, {held} experiences; Ctrl-C stops it")
        _show(worker, folder)
        while stops.signum is None:
            heart.working()
            if not worker.step():
                heart.waiting()
                time.sleep(POLL_SECONDS)
            else:
                _show(worker, folder)
        worker.save()
        say(f"stopped after update {worker.updates}; everything is saved")
        return stops.signum


def replay_buffer(
    settings: OnlineSettings, buffer: Path, output: Path, say: Callable[[str], None] = print
) -> dict[str, float | str]:
    """Learn from a recorded buffer alone, into another folder: the numbers are those of the live worker.

    A replay that was stopped goes on when it is called again.
    Returns: what is written to replay.json: updates, records, SHA-256 of the weights and of their average, metrics.
    Raises: DataError where there is no record, or the first ones were removed; SettingsError for the live folder.
    """
    if not segments(buffer):
        inner = buffer / BUFFER
        if not segments(inner):
            raise DataError(f"{buffer}: holds no segments of a buffer; name the folder that the server writes into")
        buffer = inner
    if output.resolve() in (buffer.resolve(), buffer.resolve().parent):
        raise SettingsError(f"--output: {output} is the live worker's own folder; name another one")
    make_folder(output)
    with (
        StopRequests() as stops,
        UpdateAudit(output, settings.audit) as audit,
        assemble_worker(settings, output, log=buffer, audit=audit) as worker,
    ):
        while stops.signum is None and worker.step():
            _show(worker, output)
        worker.save()
        if stops.signum is not None:
            say(f"stopped after update {worker.updates}; the same command goes on")
            raise KeyboardInterrupt
        found: dict[str, float | str] = {
            "weights": weights_digest(trainable_weights(worker.learner.model)),
            "average": weights_digest(worker.learner.served_weights()),
            **worker.metrics(),
        }
    write_json_atomic(output / REPLAY, found)
    return found


def _show(worker: UpdateWorker, folder: Path) -> None:
    write_text_unsynced(folder / METRICS, json.dumps({"paused": worker.paused, **worker.metrics()}) + "\n")
