"""Retraining: the decision, its starting point and settings, and the record of each retraining.

    <output>/<pipeline>/retrainings/0001.json   data, start, seed, reason, and outcome

A retraining is decided and recorded under the folder's lock. An interrupted retraining is resumed with the same number,
start and seed, so its finished stages are reused.
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
    """Record of one retraining."""

    number: int  # from 1
    start: int | None  # version of the registered model; None = the pipeline's base model
    champion: int | None  # champion at the time of the decision
    data: dict[str, str]  # record of the data, as tags of a version
    seed: int
    reason: str
    dropped: tuple[str, ...] = ()  # stages without new data to learn from
    flow_run_id: str = ""
    status: str = "open"  # open, failed, waiting (for approval); or the gate's decision: promoted, rejected, ...
    version: int | None = None  # the resulting version
    note: str = ""

    @property
    def is_decided(self) -> bool:
        """True if it ended with a decision."""
        return self.status not in ("open", "failed", "waiting")


@dataclass(frozen=True, kw_only=True)
class RetrainingPlan:
    """Decision about a retraining. `record` None = none is due; `reason` explains the decision either way."""

    reason: str
    new_data: NewData
    record: Retraining | None = None
    settings: PipelineSettings | None = None
    is_continuation: bool = False  # True = resumes an interrupted retraining


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
        now: current record of the pipeline's data.
        champion: the current champion.
        earlier: retrainings so far.
        start: overrides the setting.
        force: retrain even without new data.
        reason: who or what requested it.
        flow_run_id: an interrupted or suspended run resumes its retraining, whatever happened meanwhile.
    Raises: SettingsError if the pipeline has no gate or trains nothing.
    """
    check_retraining_stages(settings)
    start = start or settings.retrain.start
    before = parse_record_tags(champion.tags) if champion is not None else None
    new = find_new_data(before, now)
    interrupted = _find_interrupted_retraining(earlier, champion, flow_run_id)
    if interrupted is not None:
        record = dataclasses.replace(
            interrupted, flow_run_id=flow_run_id or interrupted.flow_run_id
        )
        return _build_plan(
            settings, new, record, f"resumes retraining {record.number}", continues=True
        )
    why = explain_retraining(settings, now, champion, earlier, new, start)
    if why.startswith("skipped"):
        if not force:
            return RetrainingPlan(reason=why, new_data=new)
        why = f"requested nevertheless: {why.removeprefix('skipped: ')}"
    if reason:
        why = f"{reason}: {why}"
    record = _build_next_retraining(settings, now, new, champion, earlier, start, why, flow_run_id)
    continues = record.number in {known.number for known in earlier}
    return _build_plan(settings, new, record, why, continues=continues)


def _find_interrupted_retraining(
    earlier: Sequence[Retraining], champion: ModelVersion | None, flow_run_id: str
) -> Retraining | None:
    """Find the newest undecided retraining of this flow run, or the one that made the champion."""
    for record in reversed(earlier):
        if record.is_decided:
            continue
        is_same_run = bool(flow_run_id) and record.flow_run_id == flow_run_id
        if is_same_run or _is_source_of_champion(record, champion):
            return record
    return None


def check_retraining_stages(settings: PipelineSettings) -> None:
    """Check that a retraining trains a policy and ends at the gate. Raises: SettingsError."""
    missing = [name for name in ("evaluate", "promote") if getattr(settings.stages, name) is None]
    if missing:
        raise SettingsError(
            f"stages.{missing[0]}: is missing; retraining promotes a model that passes the gate, so add "
            f"`{missing[0]}: {{}}`"
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
    """Return the reason to train; begins with "skipped: " if there is none."""
    if champion is None:
        why = "there is no champion yet"
    elif not now:
        return (
            "skipped: the environment generates its episodes and no data file is named, so there is never new data; "
            "--force trains on other episodes"
        )
    elif parse_record_tags(champion.tags) is None:
        why = f"version {champion.version} has no record of its training data"
    elif not new.changes:
        missing = f" ({new})" if new.missing_files else ""
        return f"skipped: nothing is new since champion version {champion.version}{missing}"
    elif new.rows < settings.retrain.min_new_rows:
        minimum = settings.retrain.min_new_rows
        return f"skipped: {new.rows} new rows, fewer than retrain.min_new_rows = {minimum} ({new})"
    else:
        why = f"new since champion version {champion.version}: {new}"
    equal = _find_equal_retrainings(
        earlier,
        format_record_tags(now),
        champion.version if champion else None,
        _resolve_start_version(start, champion),
    )
    if not equal:
        return why
    last = equal[-1]
    if last.status == "waiting":
        return f"skipped: nothing is new since retraining {last.number}, which waits for approval"
    if last.is_decided:
        version = f", which made version {last.version}" if last.version else ""
        return f"skipped: nothing is new since retraining {last.number}{version} ({last.status}: {last.note})"
    return why


def _is_source_of_champion(record: Retraining, champion: ModelVersion | None) -> bool:
    """Return whether the champion was trained by this retraining, which was killed before it could record that."""
    is_source = champion is not None and champion.tags.get("retrain.number") == str(record.number)
    return is_source and record.status != "waiting"


def _resolve_start_version(start: Start, champion: ModelVersion | None) -> int | None:
    return champion.version if champion is not None and start == "champion" else None


def _summarize_content(data: Mapping[str, str]) -> str:
    """Summarize the contents of a data record for comparison, without the locations of its files."""
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
    """Find earlier retrainings under the same champion, from the same start, on the same data."""
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
    """Build the record of the next retraining: an interrupted one of the same kind, or a new one."""
    data = format_record_tags(now)
    start_version, champion_version = (
        _resolve_start_version(start, champion),
        champion.version if champion else None,
    )
    equal = _find_equal_retrainings(earlier, data, champion_version, start_version)
    if equal and not equal[-1].is_decided:
        return dataclasses.replace(
            equal[-1], flow_run_id=flow_run_id, reason=why, status="open", note=""
        )
    return Retraining(
        number=max((record.number for record in earlier), default=0) + 1,
        start=start_version,
        champion=champion_version,
        data=data,
        seed=_derive_seed(settings, now, champion_version, len(equal)),
        dropped=_list_skippable_stages(settings, new) if start_version is not None else (),
        reason=why,
        flow_run_id=flow_run_id,
    )


def _derive_seed(
    settings: PipelineSettings, now: SourceRecords, champion: int | None, attempt: int
) -> int:
    """Derive the pipeline's seed of a retraining.

    If episodes are generated, each retraining gets a different seed, so that it learns from other episodes and its gate
    tests on others: a champion chosen repeatedly on the same episodes would be chosen for its luck with them. If a file
    is split into training and held-out data, the seed stays the same, because another seed would hold out data that the
    champion has learned.
    """
    if now or not settings.retrain.new_episodes or (champion is None and attempt == 0):
        return settings.seed
    text = f"{settings.seed}:retrain:{champion or 0}:{attempt}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1


def _build_plan(
    settings: PipelineSettings, new: NewData, record: Retraining, why: str, *, continues: bool
) -> RetrainingPlan:
    """Build the plan with the pipeline settings of a retraining."""
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
    """List the stages that a champion can skip because they imitate data from which it has already learned.

    Imitating a demonstrator again would undo what the reward has taught since. Stages that create their data still
    run.
    """
    if settings.retrain.repeat == "all":
        return ()
    stages, data = settings.stages, settings.stages.prepare_data
    dropped = []
    for stage in stage_registry.list_stages():
        source = stage.learns_from
        if not source or getattr(stages, stage.name) is None:
            continue
        is_from_file = data is not None and getattr(data, source) is not None
        is_from_demonstrator = source == "demonstrations" and not is_from_file
        # A demonstrator writes the same demonstrations again unless the environment changes.
        has_changed = source in new.sources or (
            is_from_demonstrator and any(source.startswith("environment") for source in new.sources)
        )
        if (is_from_file or is_from_demonstrator) and not has_changed:
            dropped.append(stage.name)
    trains_policy = any(
        getattr(stages, name) is not None and name not in dropped
        for name in stage_registry.list_policy_stages()
    )
    return tuple(dropped) if trains_policy else ()


def read_retrainings(home: Path) -> list[Retraining]:
    """Read the retrainings of a pipeline's folder, oldest first. Unreadable files are skipped."""
    records = []
    for path in sorted((home / "retrainings").glob("*.json")):
        try:
            row = json.loads(path.read_text())
            records.append(Retraining(**{**row, "dropped": tuple(row["dropped"])}))
        except (OSError, ValueError, TypeError, KeyError):
            continue
    return sorted(records, key=lambda record: record.number)


def record_start(home: Path, record: Retraining) -> None:
    """Record that a retraining starts or resumes. The caller holds the pipeline's lock."""
    clear_leftovers(make_folder(home / "retrainings"), locked=True)
    _write_retraining(home, record)


def settle_waiting_retrainings(tracking: Tracking, name: str, home: Path) -> list[Retraining]:
    """Read all records, and close those whose awaited approval has been answered.

    A retraining whose champion changed meanwhile counts as failed: it has to be compared again, so it is repeated.
    """
    expire_requests(tracking, name)
    versions = {version.version: version for version in tracking.list_versions(name)}
    records = []
    for record in read_retrainings(home):
        version = None
        if record.status == "waiting" and record.version:
            version = versions.get(record.version)
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
