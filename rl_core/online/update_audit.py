"""Audit of updates: update_audit.log has a readable line per update, update_contribution.jsonl a record.

A thread writes both, so the worker never waits for the disk. Updates that the disk does not accept in time are dropped
and counted. A killed worker recomputes some updates and writes their records again with equal values: of several
records of an update the last one counts.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from rl_core.errors import CheckpointError
from rl_core.online.service_files import AUDIT_FILE, CONTRIBUTION_FILE
from rl_core.online.update_step import ScoredExperience, UpdateReport, UpdateTask
from rl_core.settings import OnlineAuditSettings
from rl_core.storage.append_log import AppendLog
from rl_core.storage.atomic_files import make_folder

logger = logging.getLogger(__name__)


MAX_LISTED_EXPERIENCES = 16  # in an audit line; the record lists all


def format_task_id(item: ScoredExperience) -> str:
    """Return the id of the task that an experience answered: environment/level/seed of its episode."""
    trajectory = item.buffered.experience.rollouts[0].trajectory
    place = f"{trajectory.environment}/{trajectory.level}"
    if trajectory.level.startswith(f"{trajectory.environment}/"):
        place = trajectory.level  # a mixture's levels name the environment
    return f"{place}/{trajectory.seed}"


def _format_experiences(task: UpdateTask | None) -> str:
    """Format number, request and task of the experiences of an update."""
    items = task.items if task is not None else ()
    listed = [
        f"{item.buffered.number} ({item.buffered.experience.request_id}, task {format_task_id(item)})"
        for item in items[:MAX_LISTED_EXPERIENCES]
    ]
    if len(items) > MAX_LISTED_EXPERIENCES:
        listed.append(f"and {len(items) - MAX_LISTED_EXPERIENCES} more")
    return f"; experiences {', '.join(listed)}" if listed else ""


def format_audit_line(report: UpdateReport, seconds: float, task: UpdateTask | None = None) -> str:
    """Format one update as a readable line.

    Args:
        seconds: time since 1970.
        task: lists the experiences with their tasks; None = leave them out.
    """
    return _format_outcome(report, seconds) + _format_experiences(task)


def _format_outcome(report: UpdateReport, seconds: float) -> str:
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    verdict = f"REFUSED ({report.refused})" if report.refused else "taken"
    if report.refused == "null":
        verdict = f"null: no answer of {report.num_rollouts} was better or worse than the others"
    if not report.losses:
        return f"{when} update {report.number}: {verdict}"
    kl = report.kl_control
    mean_kl = f"{kl['mean_kl']:.4g}" if kl.get("mean_kl") is not None else "-"
    bound = " (lower bound)" if report.is_lower_bound else ""
    target = f" of {kl['target_kl']:g}" if "target_kl" in kl else ""
    return (
        f"{when} update {report.number}: {verdict}; loss {report.losses['total']:.4g} (rl {report.losses['rl']:.4g}, "
        f"kl {report.losses['kl']:.4g}); KL {mean_kl}{bound}{target}, "
        f"coefficient {kl['coefficient']:.4g}; gradient {report.gradients['norm']:.4g}, clipped to "
        f"{report.gradients['clipped']:.4g}; learning rate {report.learning_rate:.4g}; {report.num_rollouts} rollouts, "
        f"{report.num_tokens} tokens"
    )


def build_contribution_record(
    report: UpdateReport, task: UpdateTask | None, seconds: float
) -> dict[str, Any]:
    """Build the record of one update: the report, and label, rewards and advantages of each experience."""
    record: dict[str, Any] = {"time": seconds, **report.to_json(), "experiences": []}
    for item in task.items if task is not None else ():
        record["experiences"].append(
            {
                "request_id": item.buffered.experience.request_id,
                "number": item.buffered.number,
                "task": format_task_id(item),
                "policy_version": item.buffered.experience.policy_version,
                "importance_weight": item.weight,
                "is_fresh": item.experience is not item.buffered.experience,
                "label": {
                    "source": item.label.source,
                    "kind": item.label.kind,
                    "confidence": item.label.confidence,
                },
                "rewards": item.rewards.to_json(),
                "advantages": item.advantages_R.tolist(),
                "error": item.error,
            }
        )
    return record


class UpdateAudit:
    """Both logs of a folder; a context manager. On exit it waits a few seconds at most for the disk."""

    def __init__(self, folder: Path | str, settings: OnlineAuditSettings) -> None:
        self._folder = Path(folder)
        self._audit, self._contribution = (
            AppendLog(
                self._folder / name,
                checksums=False,
                max_bytes=settings.max_bytes,
                keep=settings.keep,
            )
            for name in (AUDIT_FILE, CONTRIBUTION_FILE)
        )
        self._queue: queue.Queue[tuple[UpdateReport, UpdateTask | None, float] | None] = (
            queue.Queue(settings.queue)
        )
        self._thread: threading.Thread | None = None
        self.num_dropped = 0

    def __enter__(self) -> UpdateAudit:
        self._thread = threading.Thread(
            target=self._write_queued_updates, name="update-audit", daemon=True
        )
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._thread is not None:
            try:
                self._queue.put(None, timeout=5.0)
                self._thread.join(5.0)
            except queue.Full:
                num_lost = self._queue.qsize()
                logger.warning("update audit: the disk does not respond; %d records lost", num_lost)
            self._thread = None

    def enqueue_update(self, report: UpdateReport, task: UpdateTask | None) -> None:
        """Queue an update for writing; if the queue is full, drop and count it."""
        try:
            self._queue.put_nowait((report, task, time.time()))
        except queue.Full:
            self.num_dropped += 1

    def _write_queued_updates(self) -> None:
        while (update := self._queue.get()) is not None:
            try:
                self._append_update(*update)
            except CheckpointError as error:  # learning continues without its log
                self.num_dropped += 1
                logger.warning("update audit: %s", error)

    def _append_update(self, report: UpdateReport, task: UpdateTask | None, seconds: float) -> None:
        record = build_contribution_record(report, task, seconds)
        make_folder(self._folder)
        self._audit.append_lines((format_audit_line(report, seconds, task) + "\n").encode())
        self._contribution.append_record(record)
