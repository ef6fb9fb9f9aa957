"""Manual approval of a promotion: requested after the gate, answered once, stored as tags of the model version.

The version's tags are authoritative, so any process that reaches the tracking store can answer: `posttrain
promote`, the form in the Prefect UI, or the expiry of the deadline. Whoever answers moves the alias immediately,
whether the requesting run is alive or not.

    approval.state      waiting, approved, rejected, timed out, superseded
    approval.request    key of the promote stage, which identifies one comparison
    approval.champion   version with which the challenger was compared; none = there was no champion
    approval.asked, .deadline, .when     UTC, to the second
    approval.by, .note  who answered, and why
    approval.given      an approval that is being applied; whoever reads it while the state is "waiting" applies it
    approval.run, .run_id, .stage_run_id, .flow_run_id, .prefect_api    origin of the request
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rl_core.errors import FolderBusy, PosttrainError, SettingsError
from rl_core.storage.atomic_files import write_json_atomic
from rl_core.storage.faults import inject_fault
from rl_core.storage.locks import FolderLock
from tasks.tracking import ModelVersion, Tracking

logger = logging.getLogger(__name__)

WAITING = "waiting"
APPROVED = "approved"
REJECTED = "rejected"
TIMED_OUT = "timed out"
SUPERSEDED = "superseded"
LOCK_SECONDS = 20.0  # longest wait for another answer or promotion of the same model
DECISION_BY_STATE = {
    APPROVED: "promoted",
    REJECTED: "rejected by hand",
    TIMED_OUT: "approval timed out",
    SUPERSEDED: "superseded",
}
_ORIGIN_FIELDS = ("run", "run_id", "stage_run_id", "flow_run_id", "prefect_api")
_ANSWER_FIELDS = ("by", "when", "note")


@dataclass(frozen=True)
class ApprovalRequest:
    """Request for approval with its answer, once there is one."""

    name: str  # registered model
    version: int
    state: str
    key: str
    champion: int | None  # version of the comparison; None = there was none
    deadline: float  # seconds since the epoch
    asked: str = ""  # time of the request
    reason: str = ""  # the gate's result
    run: str = ""  # name of the requesting pipeline run
    run_id: str = ""
    stage_run_id: str = ""
    flow_run_id: str = ""
    prefect_api: str = ""  # "" = the run's own embedded server
    by: str = ""
    when: str = ""
    note: str = ""
    given: str = ""  # "approved" once the approval is tagged on the version

    @property
    def is_waiting(self) -> bool:
        """True if nobody has answered yet, even if the deadline has passed."""
        return self.state == WAITING

    @property
    def deadline_text(self) -> str:
        """The deadline for messages."""
        return _format_timestamp(self.deadline)

    @property
    def summary(self) -> str:
        """One sentence with the request, or with its answer."""
        subject = f"version {self.version} of {self.name}"
        note = f": {self.note}" if self.note else ""
        if self.state == WAITING:
            return f"{subject} waits for approval until {self.deadline_text}: {self.reason}"
        if self.state == APPROVED:
            return f"{subject} promoted: approved by {self.by} on {self.when}{note}; {self.reason}"
        if self.state == REJECTED:
            return f"{subject} rejected by {self.by} on {self.when}{note}; {self.reason}"
        if self.state == TIMED_OUT:
            return (
                f"{subject} rejected: nobody approved it until {self.deadline_text}; {self.reason}"
            )
        return f"{subject} not promoted: {self.note}"


def _format_timestamp(when: float) -> str:
    return datetime.fromtimestamp(when, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _parse_timestamp(stamp: str) -> float:
    try:
        return datetime.strptime(stamp, "%Y-%m-%d %H:%M:%S UTC").replace(tzinfo=UTC).timestamp()
    except ValueError:
        return 0.0


def _parse_number(text: str) -> int | None:
    return int(text) if text.isdigit() else None


def read_approval_request(version: ModelVersion) -> ApprovalRequest | None:
    """Read the newest approval request of a version; None = there never was one."""
    prefix = "approval."
    tags = {
        key.removeprefix(prefix): value
        for key, value in version.tags.items()
        if key.startswith(prefix)
    }
    if "state" not in tags:
        return None
    texts = {key: tags.get(key, "") for key in (*_ORIGIN_FIELDS, *_ANSWER_FIELDS)}
    return ApprovalRequest(
        name=version.name,
        version=version.version,
        state=tags["state"],
        key=tags.get("request", ""),
        champion=_parse_number(tags.get("champion", "")),
        deadline=_parse_timestamp(tags.get("deadline", "")),
        asked=tags.get("asked", ""),
        reason=version.tags.get("gate.reason", ""),
        given=tags.get("given", ""),
        **texts,
    )


def list_approval_requests(tracking: Tracking) -> list[ApprovalRequest]:
    """List all approval requests of a store, answered ones included, latest deadline first."""
    registry = tracking.registry
    requests = [
        read_approval_request(version)
        for name in registry.list_model_names()
        for version in registry.list_versions(name)
    ]
    return sorted(
        (request for request in requests if request), key=lambda request: -request.deadline
    )


def request_approval(tracking: Tracking, request: ApprovalRequest) -> ApprovalRequest:
    """Write a request to the version's tags, replacing an earlier one."""
    request = replace(
        request,
        state=WAITING,
        asked=_format_timestamp(time.time()),
        by="",
        when="",
        note="",
        given="",
    )
    tags = {
        "approval.request": request.key,
        "approval.champion": "none" if request.champion is None else str(request.champion),
        "approval.asked": request.asked,
        "approval.deadline": request.deadline_text,
        **{f"approval.{key}": getattr(request, key) for key in _ORIGIN_FIELDS},
        **{f"approval.{key}": "" for key in (*_ANSWER_FIELDS, "given")},
        "gate.decision": "awaiting approval",
        "approval.state": WAITING,  # last, so that a process killed before has requested nothing
    }
    tracking.tag_version(request.name, request.version, tags)
    inject_fault("approval.tagged")
    tracking.set_challenger(request.name, request.version)
    inject_fault("approval.asked")
    logger.info("promotion: %s", request.summary)
    return request


def reload_request(tracking: Tracking, request: ApprovalRequest) -> ApprovalRequest:
    """Reload a request from the store. Raises: SettingsError if the version no longer exists."""
    version = tracking.registry.fetch_version(request.name, request.version)
    stored = read_approval_request(version)
    if stored is None or stored.key != request.key:
        return replace(request, state=SUPERSEDED)
    return stored


def answer_request(
    tracking: Tracking,
    request: ApprovalRequest,
    *,
    approve: bool,
    answered_by: str,
    note: str = "",
    in_time: bool = False,
) -> ApprovalRequest:
    """Answer a request and apply the answer. The alias moves only if the champion is still that of the comparison.

    Args:
        answered_by: who answers.
        note: why.
        in_time: the answer was given before the deadline, although it arrives only now.
    Returns: the request with its answer; superseded if another version has become champion meanwhile.
    Raises: SettingsError if it was answered before or its deadline has passed.
    """
    with _lock_decision(tracking.output, request.name):
        current = reload_request(tracking, request)
        if not current.is_waiting:
            raise SettingsError(f"nothing to decide any more: {current.summary}")
        if current.given:  # by a process that was killed before it applied the approval
            answered = _apply_approval(tracking, current)
            if approve:
                return answered
            raise SettingsError(f"nothing to decide any more: {answered.summary}")
        if time.time() > current.deadline and not in_time:
            expired = _write_answer(tracking, current, TIMED_OUT, "the clock", "")
            raise SettingsError(
                f"{expired.summary}. `posttrain run CONFIG --only promote --fresh` asks again, `posttrain promote "
                f"CONFIG --version {expired.version}` promotes by hand"
            )
        if not approve:
            return _write_answer(tracking, current, REJECTED, answered_by, note)
        tags = {"approval.by": answered_by, "approval.note": note, "approval.given": APPROVED}
        tracking.tag_version(current.name, current.version, tags)
        inject_fault("approval.given")
        approved = replace(current, by=answered_by, note=note, given=APPROVED)
        return _apply_approval(tracking, approved)


def _apply_approval(tracking: Tracking, request: ApprovalRequest) -> ApprovalRequest:
    """Apply an approval that is tagged on the version: move the alias, then write the answer."""
    if not tracking.replace_champion(request.name, request.version, request.champion):
        champion = tracking.find_champion(request.name)
        current = f"version {champion.version} is" if champion else "no version is"
        compared = f"version {request.champion}" if request.champion else "none"
        note = f"{current} champion now, and the comparison was with {compared}; it has to be compared again"
        return _write_answer(tracking, request, SUPERSEDED, request.by, note)
    answered = _write_answer(tracking, request, APPROVED, request.by, request.note)
    _record_alias_move(tracking, request)
    return answered


def _record_alias_move(tracking: Tracking, request: ApprovalRequest) -> None:
    version = tracking.registry.fetch_version(request.name, request.version)
    tags = {
        key: value for key, value in version.tags.items() if key.startswith(("approval.", "gate."))
    }
    journal = tracking.record_alias_move(version, "champion", tags)
    if journal is not None:
        tracking.deliver_journal(journal)


def reapply_answer(tracking: Tracking, request: ApprovalRequest) -> None:
    """Repeat the records of an answer on the runs and in the journal.

    The process that answered may have been killed before it wrote them.
    """
    with _lock_decision(tracking.output, request.name):
        record_answer(tracking, request)
        champion = tracking.find_champion(request.name)
        if (
            request.state == APPROVED
            and champion is not None
            and champion.version == request.version
        ):
            _record_alias_move(tracking, request)


def expire_requests(tracking: Tracking, name: str) -> list[ApprovalRequest]:
    """Reject requests whose deadline has passed, and apply approvals that a kill interrupted; return both."""
    answered = []
    for version in tracking.list_versions(name):
        request = read_approval_request(version)
        if request is None or not request.is_waiting:
            continue
        if not request.given and time.time() <= request.deadline:
            continue
        with _lock_decision(tracking.output, name):
            current = reload_request(tracking, request)
            if not current.is_waiting:
                continue
            if current.given:
                answered.append(_apply_approval(tracking, current))
            else:
                answered.append(_write_answer(tracking, current, TIMED_OUT, "the clock", ""))
    return answered


def _write_answer(
    tracking: Tracking, request: ApprovalRequest, state: str, answered_by: str, note: str
) -> ApprovalRequest:
    """Write the answer to the version's tags, and to the runs that requested it."""
    when = _format_timestamp(time.time())
    answered = replace(request, state=state, by=answered_by, when=when, note=note)
    tags = {
        "approval.by": answered_by,
        "approval.when": when,
        "approval.note": note,
        "gate.decision": DECISION_BY_STATE[state],
        "approval.state": state,  # last, so that a process killed before has not answered
    }
    tracking.tag_version(request.name, request.version, tags)
    inject_fault("approval.settled")
    logger.info("promotion: %s", answered.summary)
    record_answer(tracking, answered)
    return answered


def record_answer(tracking: Tracking, request: ApprovalRequest) -> None:
    """Record an answer on the requesting runs. May be repeated if the process that answered was killed."""
    waiting = replace(request, state=WAITING).summary
    tags = {"approval": request.state, "gate.decision": DECISION_BY_STATE[request.state]}
    for run_id in filter(None, (request.run_id, request.stage_run_id)):
        try:
            tracking.replace_run_sentence(run_id, waiting, request.summary, tags)
        except PosttrainError as error:  # the run may have been removed; the decision stands
            logger.warning("the decision could not be recorded on run %s: %s", run_id, error)
    if request.state != SUPERSEDED:
        _record_answer_locally(tracking.output, request.run_id, waiting, request.summary)
    inject_fault("approval.noted")


def _record_answer_locally(output: Path, run_id: str, waiting: str, outcome: str) -> None:
    """Record the end of the wait in the run's run.json, which the live page reads, if its folder is on this machine."""
    changes = {"status": "finished", "answer": {"before": waiting, "now": outcome}}
    for path in [*output.glob("*/run.json"), *output.glob("*/runs/*/run.json")]:
        try:
            record = json.loads(path.read_text())
            if run_id and record.get("run_id") == run_id and record.get("status") == "waiting":
                write_json_atomic(path, {**record, **changes})
        except (OSError, ValueError, AttributeError, PosttrainError) as error:
            logger.debug("%s: %s", path, error)


@contextmanager
def _lock_decision(output: Path, name: str) -> Iterator[None]:
    """Hold the lock under which only this process answers for, or promotes, this model. Raises: FolderBusy."""
    lock = FolderLock(output / f".champion-{name.replace(' ', '_')}.lock")
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            lock.__enter__()
            break
        except FolderBusy:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
    try:
        yield
    finally:
        lock.__exit__(None, None, None)


def build_approval_request(
    summary: dict[str, Any], champion: int | None, **origin: str
) -> ApprovalRequest:
    """Build the request of a waiting promote stage from its summary.

    Args:
        champion: current champion. The comparison may have used another version of the very same model.
        origin: run, run_id, flow_run_id, ...
    """
    reason = str(summary["reason"])
    if champion is not None:
        reason = reason.replace(
            f"champion version {summary['champion_before']} ", f"champion version {champion} "
        )
    return ApprovalRequest(
        name=summary["registered_model"],
        version=int(summary["model_version"]),
        state=WAITING,
        key=summary["key"],
        champion=champion,
        deadline=time.time() + float(summary["approval_timeout_seconds"]),
        reason=reason,
        **origin,
    )
