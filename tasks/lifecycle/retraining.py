"""Retraining: the decision, its starting point and settings, and a record of each one.

    <output>/<pipeline>/retrainings/0001.json   data, start, seed, reason, and what came of it

A retraining is decided on and recorded under the folder's lock. One that was interrupted is gone on with: the same
number, start and seed, so that finished stages are found again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rl_core.errors import SettingsError
from rl_core.storage.atomic_files import make_folder, write_json_atomic
from rl_core.storage.folders import clear_leftovers
from tasks import stage_registry
from tasks.config import PipelineSettings
from tasks.lifecycle.approval import expire_requests, read_approval_request
from tasks.lifecycle.data_lineage import (
    NewData,
    SourceRecords,
    find_new_data,
    format_record_tags,
    parse_record_tags,
)
from tasks.tracking import ModelVersion, Tracking

Start = Literal["champion", "base"]


@dataclass(frozen=True, kw_only=True)
class Retraining:
    """The record of one retraining."""

    number: int  # from 1
    # version of the registered model that it starts from; None = the pipeline's base model
    start: int | None
    champion: int | None  # champion when it was decided on
    data: dict[str, str]  # record of the data, as tags of a version
    seed: int
    reason: str
    dropped: tuple[str, ...] = ()  # stages that have nothing new to learn from
    flow_run_id: str = ""
    # open, failed, waiting (for approval); promoted, rejected, ...: what the gate said
    status: str = "open"
    version: int | None = None  # that came of it
    note: str = ""

    @property
    def is_decided(self) -> bool:
        """True = it came to a decision."""
        return self.status not in ("open", "failed", "waiting")


@dataclass(frozen=True, kw_only=True)
class RetrainingPlan:
    """Decision about a retraining. `record` None = none is due; `why` gives the reason either way."""

    reason: str
    new_data: NewData
    record: Retraining | None = None
    settings: PipelineSettings | None = None
    is_continuation: bool = False  # True = an interrupted retraining goes on


def plan_retraining(
    settings: PipelineSettings,
    now: SourceRecords,
    champion: ModelVersion | None,
    earlier: Sequence[Retraining],
    *,
    start: Start | None = None,
    force: bool = False,
    reason: str = "",
    flow_run_id: str = "",
) -> RetrainingPlan:
    """Decide on a retraining; nothing is written.

    Args:
        now: the record of the pipeline's data as it is. champion: the present one. earlier: retrainings so far.
        start: in place of the setting. force: also without new data. reason: who or what asked for it.
        flow_run_id: a run that was interrupted or suspended goes on with its own retraining, whatever came meanwhile.
    Raises: SettingsError where the pipeline has no gate or trains nothing.
    """
    check_retraining_stages(settings)
    start = start or settings.retrain.start
    before = parse_record_tags(champion.tags) if champion is not None else None
    new = find_new_data(before, now)
    left = [r for r in earlier if not r.is_decided]
    own = next(
        (
            r
            for r in reversed(left)
            if (flow_run_id and r.flow_run_id == flow_run_id) or _is_source_of_champion(r, champion)
        ),
        None,
    )
    if own is not None:
        own = dataclasses.replace(own, flow_run_id=flow_run_id or own.flow_run_id)
        return _build_plan(
            settings, new, own, f"goes on with retraining {own.number}", continues=True
        )
    why = explain_retraining(settings, now, champion, earlier, new, start)
    if why.startswith("skipped"):
        if not force:
            return RetrainingPlan(reason=why, new_data=new)
        why = f"asked for, though: {why.removeprefix('skipped: ')}"
    if reason:
        why = f"{reason}: {why}"
    record = _build_next_retraining(settings, now, new, champion, earlier, start, why, flow_run_id)
    return _build_plan(
        settings, new, record, why, continues=record.number in {known.number for known in earlier}
    )


def check_retraining_stages(settings: PipelineSettings) -> None:
    """Check that a retraining trains a policy and ends at the gate. Raises: SettingsError."""
    missing = [name for name in ("evaluate", "promote") if getattr(settings.stages, name) is None]
    if missing:
        raise SettingsError(
            f"stages.{missing[0]}: is missing; retraining promotes what passes the gate, so add `{missing[0]}: {{}}`"
        )
    if not any(getattr(settings.stages, name) for name in stage_registry.list_policy_stages()):
        raise SettingsError(
            f"stages: nothing trains a policy; add one of {', '.join(stage_registry.list_policy_stages())}"
        )


def explain_retraining(
    settings: PipelineSettings,
    now: SourceRecords,
    champion: ModelVersion | None,
    earlier: Sequence[Retraining],
    new: NewData,
    start: Start,
) -> str:
    """Reason to train; begins with "skipped: " if there is none."""
    if champion is None:
        why = "there is no champion yet"
    elif not now:
        return (
            "skipped: the environment generates its episodes and no data file is named, so there is never new data; "
            "--force trains on other episodes"
        )
    elif parse_record_tags(champion.tags) is None:
        why = f"version {champion.version} does not say what it was trained on"
    elif not new.changes:
        gone = f" ({new})" if new.missing_files else ""
        return f"skipped: nothing is new since champion version {champion.version}{gone}"
    elif new.rows < settings.retrain.min_new_rows:
        return f"skipped: {new.rows} new rows, fewer than retrain.min_new_rows = {settings.retrain.min_new_rows} ({new})"
    else:
        why = f"new since champion version {champion.version}: {new}"
    tried = _find_equal_retrainings(
        earlier,
        format_record_tags(now),
        champion.version if champion else None,
        _resolve_start_version(start, champion),
    )
    if tried and tried[-1].status == "waiting":
        return (
            f"skipped: nothing is new since retraining {tried[-1].number}, which waits for approval"
        )
    if tried and tried[-1].is_decided:
        last = tried[-1]
        version = f", which made version {last.version}" if last.version else ""
        return f"skipped: nothing is new since retraining {last.number}{version} ({last.status}: {last.note})"
    return why


def _is_source_of_champion(record: Retraining, champion: ModelVersion | None) -> bool:
    """True = the champion came of this retraining, which was killed before it could say so."""
    made = champion is not None and champion.tags.get("retrain.number") == str(record.number)
    return made and record.status != "waiting"


def _resolve_start_version(start: Start, champion: ModelVersion | None) -> int | None:
    return champion.version if champion is not None and start == "champion" else None


def _summarize_content(data: Mapping[str, str]) -> str:
    """Content of a data record, without the places of its files, for comparison."""
    records = parse_record_tags(data) or {}
    return json.dumps(
        {
            name: sorted(file.sha256 for file in record.files.values())
            for name, record in records.items()
        },
        sort_keys=True,
    )


def _find_equal_retrainings(
    earlier: Sequence[Retraining], data: Mapping[str, str], champion: int | None, start: int | None
) -> list[Retraining]:
    """Earlier retrainings under the same champion, from the same start, on the same data."""
    content = _summarize_content(data)
    return [
        record
        for record in earlier
        if (record.champion, record.start) == (champion, start)
        and _summarize_content(record.data) == content
    ]


def _build_next_retraining(
    settings: PipelineSettings,
    now: SourceRecords,
    new: NewData,
    champion: ModelVersion | None,
    earlier: Sequence[Retraining],
    start: Start,
    why: str,
    flow_run_id: str,
) -> Retraining:
    """The record of the next retraining: the interrupted one of the same kind, or a new one."""
    data = format_record_tags(now)
    first, at = _resolve_start_version(start, champion), champion.version if champion else None
    same = _find_equal_retrainings(earlier, data, at, first)
    if same and not same[-1].is_decided:
        return dataclasses.replace(
            same[-1], flow_run_id=flow_run_id, reason=why, status="open", note=""
        )
    return Retraining(
        number=max((record.number for record in earlier), default=0) + 1,
        start=first,
        champion=at,
        data=data,
        seed=_derive_seed(settings, now, at, len(same)),
        dropped=_list_skippable_stages(settings, new) if first is not None else (),
        reason=why,
        flow_run_id=flow_run_id,
    )


def _derive_seed(
    settings: PipelineSettings, now: SourceRecords, champion: int | None, attempt: int
) -> int:
    """The pipeline's seed of a retraining.

    Where episodes are generated each retraining gets its own, so that it learns from other episodes and its gate judges
    on others: a champion chosen again and again on the same ones would be chosen for its luck with them. Where a file
    is split into what is trained on and what is held out the seed stays, since another one would hold out what the
    champion has learned.
    """
    if now or not settings.retrain.new_episodes or (champion is None and attempt == 0):
        return settings.seed
    text = f"{settings.seed}:retrain:{champion or 0}:{attempt}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1


def _build_plan(
    settings: PipelineSettings, new: NewData, record: Retraining, why: str, *, continues: bool
) -> RetrainingPlan:
    """The pipeline that a retraining runs."""
    changed = dataclasses.replace(settings, seed=record.seed)
    if record.start is not None:
        model = dataclasses.replace(
            settings.model, path=f"models:/{settings.registered_model}/{record.start}"
        )
        stages = settings.stages.replace_stages(dict.fromkeys(record.dropped))
        changed = dataclasses.replace(changed, model=model, stages=stages)
    return RetrainingPlan(
        reason=why, new_data=new, record=record, settings=changed, is_continuation=continues
    )


def _list_skippable_stages(settings: PipelineSettings, new: NewData) -> tuple[str, ...]:
    """Stages that a champion can skip: they imitate data that it has learned from already.

    Copying a demonstrator once more would undo what reward has taught since. Stages that make their own data go on.
    """
    if settings.retrain.repeat == "all":
        return ()
    stages, data = settings.stages, settings.stages.prepare_data
    dropped = []
    for stage, source in (
        (known.name, known.learns_from)
        for known in stage_registry.list_stages()
        if known.learns_from
    ):
        from_file = data is not None and getattr(data, source) is not None
        # a demonstrator writes the same demonstrations again
        fixed = from_file or source == "demonstrations"
        changed = source in new.sources or (
            source == "demonstrations" and "environment" in new.sources and not from_file
        )
        if getattr(stages, stage) is not None and fixed and not changed:
            dropped.append(stage)
    left = [
        name
        for name in stage_registry.list_policy_stages()
        if getattr(stages, name) is not None and name not in dropped
    ]
    return tuple(dropped) if left else ()


# ---------------------------------------------------------------------------------------------------------- records


def read_retrainings(home: Path) -> list[Retraining]:
    """The retrainings of a pipeline's folder, the oldest first. A file that cannot be read is passed over."""
    found = []
    for path in sorted((home / "retrainings").glob("*.json")):
        try:
            row = json.loads(path.read_text())
            found.append(Retraining(**{**row, "dropped": tuple(row["dropped"])}))
        except (OSError, ValueError, TypeError, KeyError):
            continue
    return sorted(found, key=lambda record: record.number)


def record_start(home: Path, record: Retraining) -> None:
    """Record the start, or the resumption, of a retraining; the caller holds the pipeline's lock."""
    clear_leftovers(make_folder(home / "retrainings"), locked=True)
    _write_retraining(home, record)


def settle_waiting_retrainings(tracking: Tracking, name: str, home: Path) -> list[Retraining]:
    """All records; those that waited for an approval which has come since are closed with it.

    One whose champion changed meanwhile counts as failed: it is to be compared anew, so it is tried again.
    """
    expire_requests(tracking, name)
    versions = {version.version: version for version in tracking.list_versions(name)}
    records = []
    for record in read_retrainings(home):
        version = (
            versions.get(record.version) if record.status == "waiting" and record.version else None
        )
        request = read_approval_request(version) if version is not None else None
        if request is not None and not request.is_waiting:
            status = {"approved": "promoted", "superseded": "failed"}.get(request.state, "rejected")
            record = record_outcome(home, record, status=status, note=request.summary)
        records.append(record)
    return records


def record_outcome(home: Path, record: Retraining, **outcome: Any) -> Retraining:
    """Record the outcome of a retraining: `status`, `version`, `note`."""
    closed = dataclasses.replace(record, **outcome)
    _write_retraining(home, closed)
    return closed


def _write_retraining(home: Path, record: Retraining) -> None:
    folder = home / "retrainings"
    make_folder(folder)
    write_json_atomic(folder / f"{record.number:04d}.json", dataclasses.asdict(record))
