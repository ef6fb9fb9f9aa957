"""update_audit.log, a line for people per update, and update_contribution.jsonl, a record; written by a thread.

The worker hands a record over and goes on: it never waits for the disk. What the disk does not take in time is dropped
and counted. A worker that was killed computes some updates again and writes their records again, with equal numbers: of
several records of an update the last one counts.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from rl_core.errors import CheckpointError
from rl_core.online.service_files import AUDIT_FILE, CONTRIBUTION_FILE
from rl_core.online.update_step import UpdateReport, UpdateTask
from rl_core.settings import OnlineAuditSettings
from rl_core.storage.line_logs import RotatingLineLog

logger = logging.getLogger(__name__)


def format_audit_line(report: UpdateReport, seconds: float) -> str:
    """One update for a person; `seconds` since 1970."""
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    verdict = f"REFUSED ({report.refused})" if report.refused else "taken"
    if not report.losses:
        return f"{when} update {report.number}: {verdict}"
    kl = report.kl_control
    mean = kl.get("mean_kl")
    bound = " (lower bound)" if report.is_lower_bound else ""
    return (
        f"{when} update {report.number}: {verdict}; loss {report.losses['total']:.4g} (rl {report.losses['rl']:.4g}, "
        f"kl {report.losses['kl']:.4g}); KL {'-' if mean is None else f'{mean:.4g}'}{bound} of {kl['target_kl']:g}, "
        f"coefficient {kl['coefficient']:.4g}; gradient {report.gradients['norm']:.4g}, clipped to "
        f"{report.gradients['clipped']:.4g}; learning rate {report.learning_rate:.4g}; {report.num_rollouts} rollouts, "
        f"{report.num_tokens} tokens"
    )


def build_contribution_record(
    report: UpdateReport, task: UpdateTask | None, seconds: float
) -> dict[str, Any]:
    """One update for programs: every number of the report, and per experience label, rewards and advantages."""
    record: dict[str, Any] = {"time": seconds, **report.to_json(), "experiences": []}
    for item in task.items if task is not None else ():
        record["experiences"].append(
            {
                "request_id": item.buffered.experience.request_id,
                "number": item.buffered.number,
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
    """The two logs of a folder; a context manager. At its end it waits for the disk, a few seconds at most."""

    def __init__(self, folder: Path | str, settings: OnlineAuditSettings) -> None:
        folder = Path(folder)
        options = {"max_bytes": settings.max_bytes, "keep": settings.keep}
        self._audit = RotatingLineLog(folder / AUDIT_FILE, **options)
        self._contribution = RotatingLineLog(folder / CONTRIBUTION_FILE, **options)
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
                logger.warning(
                    "update audit: the disk takes nothing; %d records are lost", self._queue.qsize()
                )
            self._thread = None

    def enqueue_update(self, report: UpdateReport, task: UpdateTask | None) -> None:
        """Hand an update over; dropped and counted where the queue is full."""
        try:
            self._queue.put_nowait((report, task, time.time()))
        except queue.Full:
            self.num_dropped += 1

    def _write_queued_updates(self) -> None:
        while (taken := self._queue.get()) is not None:
            try:
                self._append_update(*taken)
            except CheckpointError as error:  # learning goes on without its log
                self.num_dropped += 1
                logger.warning("update audit: %s", error)

    def _append_update(self, report: UpdateReport, task: UpdateTask | None, seconds: float) -> None:
        record: Mapping[str, Any] = build_contribution_record(report, task, seconds)
        self._audit.append_lines((format_audit_line(report, seconds) + "\n").encode())
        self._contribution.append_lines((json.dumps(record, allow_nan=False) + "\n").encode())
