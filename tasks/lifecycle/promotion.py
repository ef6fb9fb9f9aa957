"""Promotion of a version to champion: attempts at the gate, regression checks, and moves of the alias by hand.

Every comparison of a challenger with a champion is one attempt. Attempts are counted by the held-out episodes that they
share. An attempt is a tag of the registered model, so it is visible to every run, process and pipeline that promotes
this model, and remains when versions are removed:

    gate.attempt.<id>    JSON: the fields of `GateAttempt`; episodes as one text of digests

The id is a digest of both models and of the outcomes of all their episodes. A repeated comparison (a cached, resumed or
repeated stage) has the same id and is counted once; other weights, another champion or other outcomes on the same
episodes make a new attempt. An attempt is claimed before it is counted: of two processes that claim at the same time at
least one sees the other, so neither gets a number that is too low.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_core.analysis.statistics import Difference, Rate, compute_rate_difference
from rl_core.environments import make_environment
from rl_core.errors import ExportMismatch, SettingsError
from rl_core.evaluation import Evaluation
from rl_core.storage.append_log import AppendLog, read_records
from rl_core.storage.faults import inject_fault
from tasks.config import PipelineSettings, StagesSettings, resolve_evaluation_settings
from tasks.tracking import ModelVersion, Tracking

logger = logging.getLogger(__name__)

ATTEMPT_TAG_PREFIX = "gate.attempt."
EPISODE_DIGEST_LENGTH = 8  # characters
# Number of digests that represent a set of episodes. Overlaps of at least a twentieth of the union are detected.
SKETCH_SIZE = 128
CHECKS_FILE = "champion_checks.jsonl"
PROOF_FILE = "export.json"  # file of the stage `export`
PROVEN_TAG = "export.model_sha256"  # version tag: digest of the folder that was proven
# version tag: the folder is not the model that was trained and evaluated
EXPORT_REFUSED_TAG = "export.refused"
_UNKNOWN_SUCCESS = "champion: success is unknown, as the environment has no verifier; a check compares success rates"


@dataclass(frozen=True, kw_only=True)
class GateAttempt:
    """Comparison of a challenger with a champion."""

    id: str
    comparison: str  # id of the pair of models, whatever the episodes
    draw: int  # of the held-out episodes
    episodes: tuple[str, ...]  # sketch of the episodes
    version: int  # challenger
    champion: int
    # among attempts that share episodes, from 1; None = claimed, not counted yet
    number: int | None = None
    level: float | None = None  # significance level of the test
    p_value: float | None = None
    decision: str = ""

    def shares_episodes(self, episodes: Iterable[str]) -> bool:
        """Return whether some of these episodes (as a sketch) were part of the attempt."""
        return not set(self.episodes).isdisjoint(episodes)


def _digest_parts(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def compute_comparison_id(challenger: str, champion: str) -> str:
    """Compute the id of a comparison of two models from the digests of their weights."""
    return _digest_parts(challenger, champion)


def sketch_episodes(environment: str, keys: Iterable[tuple[str, int]]) -> tuple[str, ...]:
    """Return the SKETCH_SIZE smallest digests of the episodes (level, seed). Sketches of overlapping sets overlap.

    Source: Broder 1997, On the resemblance and containment of documents (bottom-k sketches).
    """
    digests = (
        hashlib.sha256(f"{environment}/{level}/{seed}".encode()).hexdigest()[:EPISODE_DIGEST_LENGTH]
        for level, seed in keys
    )
    return tuple(sorted(set(digests))[:SKETCH_SIZE])


def build_attempt(
    environment: str,
    comparison: str,
    draw: int,
    *,
    version: int,
    champion: int,
    challenger_evaluation: Evaluation,
    champion_evaluation: Evaluation,
) -> GateAttempt:
    """Build the attempt of two evaluations."""
    outcomes = [
        sorted(
            [episode.level, episode.seed, episode.samples, episode.successes, episode.reward]
            for episode in evaluation.episodes
        )
        for evaluation in (challenger_evaluation, champion_evaluation)
    ]
    return GateAttempt(
        id=_digest_parts(comparison, environment, outcomes),
        comparison=comparison,
        draw=draw,
        episodes=sketch_episodes(
            environment, (episode.key for episode in challenger_evaluation.episodes)
        ),
        version=version,
        champion=champion,
    )


def read_attempts(tracking: Tracking, name: str) -> list[GateAttempt]:
    """Read all attempts of a registered model, ordered by id. Invalid tags are skipped with a warning."""
    attempts = []
    for key, value in sorted(tracking.read_model_tags(name).items()):
        if not key.startswith(ATTEMPT_TAG_PREFIX):
            continue
        try:
            row = json.loads(value)
            digits = str(row["episodes"])
            starts = range(0, len(digits), EPISODE_DIGEST_LENGTH)
            sketch = tuple(digits[start : start + EPISODE_DIGEST_LENGTH] for start in starts)
            attempt_id = key.removeprefix(ATTEMPT_TAG_PREFIX)
            attempts.append(GateAttempt(**{**row, "episodes": sketch}, id=attempt_id))
        except (ValueError, TypeError, KeyError) as error:
            logger.warning(
                "registered model %s: tag %s is no attempt at its gate: %s", name, key, error
            )
    return attempts


def _list_overlapping(attempts: Iterable[GateAttempt], attempt: GateAttempt) -> list[GateAttempt]:
    """List the other attempts that share episodes with `attempt`."""
    return [
        other
        for other in attempts
        if other.id != attempt.id and other.shares_episodes(attempt.episodes)
    ]


def list_earlier_attempts(
    attempts: Iterable[GateAttempt], attempt: GateAttempt
) -> list[GateAttempt]:
    """List earlier attempts that share episodes with `attempt`, oldest first."""
    number = attempt.number or float("inf")
    overlapping = _list_overlapping(attempts, attempt)
    earlier = [other for other in overlapping if (other.number or float("inf")) <= number]
    return sorted(earlier, key=lambda other: (other.number or 0, other.id))


def claim_attempt(tracking: Tracking, name: str, attempt: GateAttempt) -> GateAttempt:
    """Return the attempt with its number. A new attempt is recorded."""
    recorded = {known.id: known for known in read_attempts(tracking, name)}
    known = recorded.get(attempt.id)
    if known is not None and known.number is not None:
        return dataclasses.replace(known, version=attempt.version, champion=attempt.champion)
    record_attempt(tracking, name, attempt)
    inject_fault("attempt.claimed")
    others = _list_overlapping(read_attempts(tracking, name), attempt)
    counted = dataclasses.replace(attempt, number=1 + len(others))
    record_attempt(tracking, name, counted)
    inject_fault("attempt.counted")
    return counted


def record_attempt(tracking: Tracking, name: str, attempt: GateAttempt) -> None:
    """Record the current state of an attempt."""
    row = {
        key: value
        for key, value in dataclasses.asdict(attempt).items()
        if key != "id" and value is not None
    }
    row["episodes"] = "".join(row.pop("episodes"))  # last, because it is not readable
    tracking.tag_model(name, ATTEMPT_TAG_PREFIX + attempt.id, json.dumps(row))


@dataclass(frozen=True, slots=True)
class ChampionCheck:
    """Champion's current success compared with the figure recorded at its promotion."""

    now: Rate
    registered: Rate
    change: Difference
    margin: float
    regressed: bool

    def __str__(self) -> str:
        change = self.change
        bound = "below" if self.regressed else "not below"
        return (
            f"success {self.now.rate:.1%} [{self.now.low:.1%}, {self.now.high:.1%}] of {self.now.n} rollouts, "
            f"registered {self.registered.rate:.1%} [{self.registered.low:.1%}, {self.registered.high:.1%}]; change "
            f"{100 * change.difference:+.1f} points [{100 * change.low:+.1f}, {100 * change.high:+.1f}], whose upper "
            f"bound is {bound} {-100 * self.margin:+.1f}"
        )


def read_success_figure(tags: Mapping[str, str]) -> Rate | None:
    """Read the success rate and its 95% interval from a version's tags; None if there are none."""
    try:
        return Rate(
            float(tags["figure.success_rate"]),
            float(tags["figure.low"]),
            float(tags["figure.high"]),
            int(tags["figure.samples"]),
        )
    except (KeyError, ValueError):
        return None


def build_figure_tags(result: Evaluation) -> dict[str, str]:
    """Build the tags of a version's success figure, with which later evaluations are compared."""
    if result.total is None:
        return {}
    low, high = result.total.low, result.total.high
    return {
        "figure.success_rate": f"{result.total.rate:.6g}",
        "figure.low": f"{low:.6g}",
        "figure.high": f"{high:.6g}",
        "figure.samples": str(result.samples),
    }


def read_success_rate(result: Evaluation) -> Rate:
    """Return the success rate with its interval. Raises: SettingsError if the environment tells no success."""
    if result.total is None:
        raise SettingsError(_UNKNOWN_SUCCESS)
    return result.total


def check_champion_regression(result: Evaluation, registered: Rate, margin: float) -> ChampionCheck:
    """Test for a drop of the success rate: the upper 95% bound of its change is below minus the margin.

    The two figures come from different episodes, so their intervals are combined (Newcombe 1998). An unchanged champion
    is reported as worse in at most one of forty checks with margin 0, and less often the larger the margin.
    """
    now = read_success_rate(result)
    change = compute_rate_difference(now, registered)
    return ChampionCheck(now, registered, change, margin, change.high < -margin)


def build_check_settings(
    settings: PipelineSettings, champion: ModelVersion, number: int
) -> PipelineSettings:
    """Build the pipeline that plays held-out episodes with the champion.

    Each check draws other episodes, by its number.

    Repeating the same episodes would tell nothing new, because the same model gives the same answers. The data stage
    splits its data as always, so no training data is played.
    Raises: SettingsError before anything is played if the environment tells no success.
    """
    environment = settings.environment
    if not make_environment(environment.name, environment.options).knows_success:
        raise SettingsError(_UNKNOWN_SUCCESS)
    text = f"{settings.seed}:check:{champion.version}:{number}"
    seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1
    evaluation = dataclasses.replace(resolve_evaluation_settings(settings), episodes_seed=seed)
    return dataclasses.replace(
        settings,
        model=dataclasses.replace(settings.model, path=champion.reference),
        stages=StagesSettings(
            prepare_data=settings.stages.prepare_data,
            evaluate=evaluation,
            suites=settings.stages.suites,
        ),
    )


def count_checks(home: Path, version: int) -> int:
    """Count the checks of a version so far."""
    return sum(row["version"] == version for row in read_records(home / CHECKS_FILE))


def record_check(home: Path, version: int, verdict: ChampionCheck | None, now: Rate) -> None:
    """Record a check, which counts from now on."""
    row = {
        "version": version,
        "success": now.rate,
        "low": now.low,
        "high": now.high,
        "samples": now.n,
    }
    if verdict is not None:
        row |= {"change": verdict.change.difference, "regressed": verdict.regressed}
    log = AppendLog(home / CHECKS_FILE, synced=True, checksums=False, allow_nan=True)
    log.append_record(row)


def promote_version(settings: PipelineSettings, version: int | None, note: str = "") -> str:
    """Move the alias `champion` by hand: to `version`, or back to the previous champion if `version` is None.

    Returns: one sentence about what was done.
    Raises: SettingsError if there is no such version; ExportMismatch for a version whose folder was found not to be the
        model that was evaluated, or was never compared with it.
    """
    output = Path(settings.output).resolve()
    tracking = Tracking(
        settings.tracking.uri, output, settings.tracking.experiment or settings.name
    )
    registry = tracking.registry
    registered = settings.tracking.registered_model or settings.name
    champion = registry.find_champion(registered)
    if version is None:
        previous = champion.tags.get("gate.champion_before", "none") if champion else "none"
        if champion is None or not previous.isdigit():
            raise SettingsError(
                f"model '{registered}' has no champion before the present one to go back to; name one with --version N"
            )
        version = int(previous)
    if champion is not None and champion.version == version:
        # Finish an earlier call that was killed.
        registry.clear_challenger(registered, version)
        journal = tracking.find_journal(champion)
        if journal is not None:
            tracking.deliver_journal(journal)
        return f"version {version} of {registered} is the champion already"
    candidate = registry.fetch_version(registered, version)
    refusal = candidate.tags.get(EXPORT_REFUSED_TAG)
    if refusal:
        raise ExportMismatch(f"version {version} of {registered} is not promoted: {refusal}")
    if not _has_export_proof(candidate.tags, output / settings.name):
        raise ExportMismatch(
            f"version {version} of {registered} is not promoted: there is no proof that it is the model that was "
            "trained and evaluated; run the configuration that made it again with `stages.evaluate` and "
            "`stages.export: {}`: what is finished is not run twice, and the proof is written"
        )
    tags = {
        "gate.decision": "promoted by hand",
        "gate.reason": note or "promoted by hand",
        "gate.champion_before": str(champion.version) if champion else "none",
    }
    journal = tracking.record_alias_move(candidate, "champion", tags)
    registry.tag_version(registered, version, tags)
    inject_fault("hand.tagged")
    registry.set_champion(registered, version)
    if journal is not None:
        tracking.deliver_journal(journal)
    suffix = f" (was version {champion.version})" if champion else ""
    return f"version {version} of {registered} is the champion now{suffix}"


def _has_export_proof(tags: Mapping[str, str], home: Path) -> bool:
    """Return whether an export proof matches this version's folder, in its tags or in a finished stage of the pipeline.

    A store that was unreachable when the stage ran has no tags of it.
    """
    digest = tags.get("model_sha256")
    if not digest:  # registered without a digest, so only the tag's presence can be checked
        return bool(tags.get(PROVEN_TAG))
    if tags.get(PROVEN_TAG) == digest:
        return True
    for path in sorted((home / "stages" / "export").glob(f"*/{PROOF_FILE}")):
        try:
            models = json.loads(path.read_text(encoding="utf-8"))["models"].values()
            if any(facts["model_sha256"] == digest for facts in models):
                return True
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue  # written by another version of posttrain, or just being removed
    return False
