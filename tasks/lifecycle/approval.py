"""Manual approval of a promotion: requested after the gate, answered once, kept as tags of the model version.

The tags of the version are the truth, so any process that reaches the tracking store can answer: `posttrain approve`,
the form in the Prefect UI, or the clock. Whoever answers moves the alias at once, whether the run that asked lives or
not.

    approval.state      waiting, approved, rejected, timed out, superseded
    approval.request    what is asked: the key of the promote stage, which is one comparison
    approval.champion   version that the challenger was compared with; none = there was no champion
    approval.asked, .deadline, .when     UTC, to the second
    approval.by, .note  who answered, and why
    approval.given      an approval that is being applied; whoever finds it while the state is "waiting" applies it
    approval.run, .run_id, .stage_run_id, .flow_run_id, .prefect_api    where the question comes from
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
LOCK_SECONDS = 20.0  # to wait for another answer or promotion of the same model


@dataclass(frozen=True)
class ApprovalRequest:
    """A request for approval and, once there is one, its answer."""

    name: str  # registered model
    version: int
    state: str
    key: str
    champion: int | None  # compared with; None = there was none
    deadline: float  # seconds since the epoch
    asked: str = ""  # when
    reason: str = ""  # what the gate found
    run: str = ""  # name of the pipeline run that asks
    run_id: str = ""
    stage_run_id: str = ""
    flow_run_id: str = ""
    prefect_api: str = ""  # "" = the run's own embedded server
    by: str = ""
    when: str = ""
    note: str = ""
    given: str = ""  # "approved" from the moment at which the approval is on the version

    @property
    def is_waiting(self) -> bool:
        """True = nobody has answered yet, even if the deadline has passed."""
        return self.state == WAITING

    @property
    def deadline_text(self) -> str:
        """The deadline, for people."""
        return _format_timestamp(self.deadline)

    @property
    def summary(self) -> str:
        """One sentence: what is asked, or what was answered."""
        what = f"version {self.version} of {self.name}"
        why = f": {self.note}" if self.note else ""
        if self.state == WAITING:
            return f"{what} waits for approval until {self.deadline_text}: {self.reason}"
        if self.state == APPROVED:
            return f"{what} promoted: approved by {self.by} on {self.when}{why}; {self.reason}"
        if self.state == REJECTED:
            return f"{what} rejected by {self.by} on {self.when}{why}; {self.reason}"
        if self.state == TIMED_OUT:
            return f"{what} rejected: nobody approved it until {self.deadline_text}; {self.reason}"
        return f"{what} not promoted: {self.note}"


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
    """The newest approval request of a version; None = there never was one."""
    tags = {
        key.removeprefix("approval."): value
        for key, value in version.tags.items()
        if key.startswith("approval.")
    }
    if "state" not in tags:
        return None
    plain = {key: tags.get(key, "") for key in _TEXT_FIELDS}
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
        **plain,
    )


_TEXT_FIELDS = ("run", "run_id", "stage_run_id", "flow_run_id", "prefect_api", "by", "when", "note")


def list_approval_requests(tracking: Tracking) -> list[ApprovalRequest]:
    """All questions that were ever asked in a store, the newest deadline first."""
    registry = tracking.registry
    found = [
        read_approval_request(version)
        for name in registry.list_model_names()
        for version in registry.list_versions(name)
    ]
    return sorted((request for request in found if request), key=lambda request: -request.deadline)


def request_approval(tracking: Tracking, request: ApprovalRequest) -> ApprovalRequest:
    """Write a request into the version's tags, in place of an earlier one."""
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
        **{f"approval.{key}": getattr(request, key) for key in _TEXT_FIELDS[:5]},
        **{f"approval.{key}": "" for key in (*_TEXT_FIELDS[5:], "given")},
        "gate.decision": "awaiting approval",
        "approval.state": WAITING,  # last: one that was killed before has not asked
    }
    tracking.tag_version(request.name, request.version, tags)
    inject_fault("approval.tagged")
    tracking.set_challenger(request.name, request.version)
    inject_fault("approval.asked")
    logger.info("promotion: %s", request.summary)
    return request


def reload_request(tracking: Tracking, request: ApprovalRequest) -> ApprovalRequest:
    """The same question as the store has it now. Raises: SettingsError where the version is gone."""
    found = read_approval_request(tracking.registry.fetch_version(request.name, request.version))
    return (
        found
        if found is not None and found.key == request.key
        else replace(request, state=SUPERSEDED)
    )


def answer_request(
    tracking: Tracking,
    request: ApprovalRequest,
    *,
    approve: bool,
    answered_by: str,
    note: str = "",
    in_time: bool = False,
) -> ApprovalRequest:
    """Answer a question and apply the answer: the alias moves only if the champion is still the one compared with.

    Args:
        by: who answers. note: why.
        in_time: the answer was given before the deadline, although it arrives only now.
    Returns: the question with its answer; superseded where another version has become champion meanwhile.
    Raises: SettingsError when it was answered before or its time is over.
    """
    with _lock_decision(tracking.output, request.name):
        now = reload_request(tracking, request)
        if not now.is_waiting:
            raise SettingsError(f"nothing to decide any more: {now.summary}")
        if now.given:  # by a process that was killed before it was applied
            done = _apply_approval(tracking, now)
            if approve:
                return done
            raise SettingsError(f"nothing to decide any more: {done.summary}")
        if time.time() > now.deadline and not in_time:
            late = _write_answer(tracking, now, TIMED_OUT, "the clock", "")
            raise SettingsError(
                f"{late.summary}. `posttrain stage promote CONFIG --fresh` asks again, `posttrain promote --version "
                f"{late.version} --config CONFIG` promotes by hand"
            )
        if not approve:
            return _write_answer(tracking, now, REJECTED, answered_by, note)
        given = {"approval.by": answered_by, "approval.note": note, "approval.given": APPROVED}
        tracking.tag_version(now.name, now.version, given)
        inject_fault("approval.given")
        return _apply_approval(tracking, replace(now, by=answered_by, note=note, given=APPROVED))


def _apply_approval(tracking: Tracking, now: ApprovalRequest) -> ApprovalRequest:
    """Apply an approval that is on the version: move the alias, then say so."""
    if not tracking.replace_champion(now.name, now.version, now.champion):
        champion = tracking.find_champion(now.name)
        what = f"version {champion.version} is" if champion else "no version is"
        before = f"version {now.champion}" if now.champion else "none"
        why = (
            f"{what} champion now, and the comparison was with {before}; it has to be compared anew"
        )
        return _write_answer(tracking, now, SUPERSEDED, now.by, why)
    done = _write_answer(tracking, now, APPROVED, now.by, now.note)
    _record_alias_move(tracking, now)
    return done


def _record_alias_move(tracking: Tracking, request: ApprovalRequest) -> None:
    version = tracking.registry.fetch_version(request.name, request.version)
    tags = {
        key: value for key, value in version.tags.items() if key.startswith(("approval.", "gate."))
    }
    if (journal := tracking.record_alias_move(version, "champion", tags)) is not None:
        tracking.deliver_journal(journal)


def reapply_answer(tracking: Tracking, request: ApprovalRequest) -> None:
    """Write down once more, on the runs and in the journal, what an answer changed: its giver may have been killed."""
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
    """Reject requests whose deadline has passed, and apply approvals that a kill cut off; returns both."""
    found = []
    for version in tracking.list_versions(name):
        request = read_approval_request(version)
        if (
            request is None
            or not request.is_waiting
            or not (request.given or time.time() > request.deadline)
        ):
            continue
        with _lock_decision(tracking.output, name):
            if (now := reload_request(tracking, request)).is_waiting:
                found.append(
                    _apply_approval(tracking, now)
                    if now.given
                    else _write_answer(tracking, now, TIMED_OUT, "the clock", "")
                )
    return found


DECISION_BY_STATE = {
    APPROVED: "promoted",
    REJECTED: "rejected by hand",
    TIMED_OUT: "approval timed out",
    SUPERSEDED: "superseded",
}


def _write_answer(
    tracking: Tracking, request: ApprovalRequest, state: str, answered_by: str, note: str
) -> ApprovalRequest:
    """Write the answer on the version, and on the runs that asked."""
    when = _format_timestamp(time.time())
    done = replace(request, state=state, by=answered_by, when=when, note=note)
    tags = {
        "approval.by": answered_by,
        "approval.when": when,
        "approval.note": note,
        "gate.decision": DECISION_BY_STATE[state],
        "approval.state": state,  # last: one that was killed before has not answered
    }
    tracking.tag_version(request.name, request.version, tags)
    inject_fault("approval.settled")
    logger.info("promotion: %s", done.summary)
    record_answer(tracking, done)
    return done


def record_answer(tracking: Tracking, request: ApprovalRequest) -> None:
    """Note an answer on the runs that asked; once more where whoever gave it was killed before it could."""
    waiting = replace(request, state=WAITING).summary
    tags = {"approval": request.state, "gate.decision": DECISION_BY_STATE[request.state]}
    for run_id in filter(None, (request.run_id, request.stage_run_id)):
        try:
            tracking.replace_run_sentence(run_id, waiting, request.summary, tags)
        except PosttrainError as error:  # the run may be gone; the decision stands
            logger.warning("the decision could not be noted on run %s: %s", run_id, error)
    if request.state != SUPERSEDED:
        _record_answer_locally(tracking.output, request.run_id, waiting, request.summary)
    inject_fault("approval.noted")


def _record_answer_locally(output: Path, run_id: str, waiting: str, outcome: str) -> None:
    """Note the end of the wait in the run's record, if its folder is on this machine; the live page reads it."""
    changed = {"status": "finished", "answer": {"before": waiting, "now": outcome}}
    for path in [*output.glob("*/run.json"), *output.glob("*/runs/*/run.json")]:
        try:
            record = json.loads(path.read_text())
            if run_id and record.get("run_id") == run_id and record.get("status") == "waiting":
                write_json_atomic(path, {**record, **changed})
        except (OSError, ValueError, AttributeError, PosttrainError) as error:
            logger.debug("%s: %s", path, error)


@contextmanager
def _lock_decision(output: Path, name: str) -> Iterator[None]:
    """Lock under which this process alone answers for, or promotes, this model. Raises: FolderBusy."""
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
    summary: dict[str, Any], champion: int | None, **place: str
) -> ApprovalRequest:
    """The question of a promote stage that waits, from its summary.

    Args:
        champion: the present one. The comparison may have been made with another version of the very same model.
        place: run, run_id, flow_run_id, ...
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
        **place,
    )
