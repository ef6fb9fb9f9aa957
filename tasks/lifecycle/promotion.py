"""Attempts at the promotion gate, counted by the held-out episodes that they share.

Every comparison of a challenger with a champion is one attempt. It is a tag of the registered model, so it is there for
every run, process and pipeline that promotes this model, and stays when versions are removed:

    gate.attempt.<id>    JSON: the fields of `Attempt`; episodes as one text of digests

The id is a digest of both models and of the outcomes of all their episodes. A comparison that is made again (a cached,
resumed or repeated stage) has the same id, so it is counted once; other weights, another champion or other outcomes on
the same episodes make a new attempt. Claims come before counting: of two processes that claim at the same time at least
one sees the other, so no two get a lower number than they should.

Regression checks of the champion against its figures at promotion.

The alias `champion` moved by hand: to a version, or back to the champion before.
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
from rl_core.errors import ExportMismatch, SettingsError
from rl_core.evaluation import Evaluation
from rl_core.storage.atomic_files import append_bytes
from rl_core.storage.faults import inject_fault
from tasks.config import PipelineSettings, StagesSettings, resolve_evaluation_settings
from tasks.tracking import ModelVersion, Tracking

logger = logging.getLogger(__name__)

ATTEMPT_TAG_PREFIX = "gate.attempt."
EPISODE_DIGEST_LENGTH = 8  # of the digest of an episode
SKETCH_SIZE = 128  # digests kept of a set of episodes: two sets that share a twentieth of their union are noticed for sure


@dataclass(frozen=True, kw_only=True)
class GateAttempt:
    """One comparison of a challenger with a champion."""

    id: str
    comparison: str  # of these two models, whatever the episodes
    draw: int  # of the held-out episodes
    episodes: tuple[str, ...]  # sketch of them
    version: int  # challenger
    champion: int
    # among the attempts that share episodes, from 1; None = claimed, not counted yet
    number: int | None = None
    level: float | None = None  # that it was tested at
    p_value: float | None = None
    decision: str = ""

    def shares_episodes(self, episodes: Iterable[str]) -> bool:
        """True = it was made on some of these episodes (given as a sketch)."""
        return not set(self.episodes).isdisjoint(episodes)


def _digest_parts(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def compute_comparison_id(challenger: str, champion: str) -> str:
    """Name of a comparison of two models, by the digests of their weights."""
    return _digest_parts(challenger, champion)


def sketch_episodes(environment: str, keys: Iterable[tuple[str, int]]) -> tuple[str, ...]:
    """The `SKETCH` smallest digests of the episodes (level, seed): two sketches meet where the sets overlap.

    Source: Broder 1997, On the resemblance and containment of documents (bottom-k sketches).
    """
    found = (
        hashlib.sha256(f"{environment}/{level}/{seed}".encode()).hexdigest()[:EPISODE_DIGEST_LENGTH]
        for level, seed in keys
    )
    return tuple(sorted(set(found))[:SKETCH_SIZE])


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
    """The attempt that these two evaluations are. `ours`: the challenger's."""
    outcomes = [
        sorted([e.level, e.seed, e.samples, e.successes, e.reward] for e in found.episodes)
        for found in (challenger_evaluation, champion_evaluation)
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
    """All attempts of a registered model, in the order of their ids. A tag that cannot be read is passed over."""
    found = []
    for key, value in sorted(tracking.read_model_tags(name).items()):
        if not key.startswith(ATTEMPT_TAG_PREFIX):
            continue
        try:
            row = json.loads(value)
            digits = str(row["episodes"])
            sketch = tuple(
                digits[start : start + EPISODE_DIGEST_LENGTH]
                for start in range(0, len(digits), EPISODE_DIGEST_LENGTH)
            )
            found.append(
                GateAttempt(**{**row, "episodes": sketch}, id=key.removeprefix(ATTEMPT_TAG_PREFIX))
            )
        except (ValueError, TypeError, KeyError) as error:
            logger.warning(
                "registered model %s: tag %s is no attempt at its gate: %s", name, key, error
            )
    return found


def list_earlier_attempts(
    attempts: Iterable[GateAttempt], attempt: GateAttempt
) -> list[GateAttempt]:
    """Other attempts that share episodes with `attempt` and came before it, the first one first."""
    mine = attempt.number or float("inf")
    shared = [a for a in attempts if a.id != attempt.id and a.shares_episodes(attempt.episodes)]
    return sorted(
        (a for a in shared if (a.number or float("inf")) <= mine),
        key=lambda a: (a.number or 0, a.id),
    )


def claim_attempt(tracking: Tracking, name: str, attempt: GateAttempt) -> GateAttempt:
    """The attempt with its number, which is recorded now unless it was before."""
    recorded = {found.id: found for found in read_attempts(tracking, name)}
    known = recorded.get(attempt.id)
    if known is not None and known.number is not None:
        return dataclasses.replace(known, version=attempt.version, champion=attempt.champion)
    record_attempt(tracking, name, attempt)
    inject_fault("attempt.claimed")
    others = [
        a
        for a in read_attempts(tracking, name)
        if a.id != attempt.id and a.shares_episodes(attempt.episodes)
    ]
    counted = dataclasses.replace(attempt, number=1 + len(others))
    record_attempt(tracking, name, counted)
    inject_fault("attempt.counted")
    return counted


def record_attempt(tracking: Tracking, name: str, attempt: GateAttempt) -> None:
    """Record an attempt as it stands."""
    row = {
        key: value
        for key, value in dataclasses.asdict(attempt).items()
        if key != "id" and value is not None
    }
    row["episodes"] = "".join(row.pop("episodes"))  # last, as it is nothing to read
    tracking.tag_model(name, ATTEMPT_TAG_PREFIX + attempt.id, json.dumps(row))


CHECKS_FILE = "champion_checks.jsonl"


@dataclass(frozen=True, slots=True)
class ChampionCheck:
    """The champion's success now, beside the figure that it is known by."""

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
    """The success that a version's tags give, with its 95% interval; None where they give none."""
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
    """The figure that a version is known by, as tags: later evaluations are compared with it."""
    low, high = result.interval
    return {
        "figure.success_rate": f"{result.success_rate:.6g}",
        "figure.low": f"{low:.6g}",
        "figure.high": f"{high:.6g}",
        "figure.samples": str(result.samples),
    }


def check_champion_regression(result: Evaluation, registered: Rate, margin: float) -> ChampionCheck:
    """Test for a fall of the success rate: the upper 95% bound of its change lies below minus the margin.

    The two figures come from different episodes, so their intervals are joined (Newcombe 1998). An unchanged champion
    is called worse once in forty checks at most, with margin 0; more seldom the larger the margin.
    """
    now = Rate(result.success_rate, *result.interval, result.samples)
    change = compute_rate_difference(now, registered)
    return ChampionCheck(now, registered, change, margin, change.high < -margin)


def build_check_settings(
    settings: PipelineSettings, champion: ModelVersion, number: int
) -> PipelineSettings:
    """The pipeline that plays held-out episodes with the champion; each check draws others, by its number.

    The same episodes again would tell nothing that is not known: the same model gives the same answers. What the data
    stage splits it splits as ever, so nothing that was trained on is played.
    """
    text = f"{settings.seed}:check:{champion.version}:{number}"
    seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1
    evaluation = dataclasses.replace(resolve_evaluation_settings(settings), episodes_seed=seed)
    return dataclasses.replace(
        settings,
        model=dataclasses.replace(settings.model, path=champion.reference),
        stages=StagesSettings(prepare_data=settings.stages.prepare_data, evaluate=evaluation),
    )


def count_checks(home: Path, version: int) -> int:
    """Number of checks of a version so far."""
    path = home / CHECKS_FILE
    lines = path.read_text().splitlines() if path.is_file() else []
    return sum(json.loads(line)["version"] == version for line in lines if line.endswith("}"))


def record_check(home: Path, version: int, verdict: ChampionCheck | None, now: Rate) -> None:
    """Record a check; it counts from now on."""
    row = {
        "version": version,
        "success": now.rate,
        "low": now.low,
        "high": now.high,
        "samples": now.n,
    }
    if verdict is not None:
        row |= {"change": verdict.change.difference, "regressed": verdict.regressed}
    append_bytes(home / CHECKS_FILE, json.dumps(row).encode() + b"\n", synced=True)


PROOF_FILE = "export.json"  # file of the stage `export`
PROVEN_TAG = "export.model_sha256"  # tag of a version: digest of the folder that its proof is of
EXPORT_REFUSED_TAG = "export.refused"  # tag of a version whose folder is not the model that was trained and evaluated


def promote_version(settings: PipelineSettings, version: int | None, note: str = "") -> str:
    """Move the alias `champion` by hand: to `version`, or back to the champion before when `version` is None.

    Returns: what was done, as a sentence. Raises: SettingsError when there is no such version; ExportMismatch for one
        whose folder was found not to be the model that was evaluated, or was never compared with it.
    """
    output = Path(settings.output).resolve()
    tracking = Tracking(
        settings.tracking.uri, output, settings.tracking.experiment or settings.name
    )
    registry = tracking.registry
    registered = settings.tracking.registered_model or settings.name
    champion = registry.find_champion(registered)
    if version is None:
        before = champion.tags.get("gate.champion_before", "none") if champion else "none"
        if champion is None or not before.isdigit():
            raise SettingsError(
                f"model '{registered}' has no champion before the present one to go back to; name one with --version N"
            )
        version = int(before)
    if champion is not None and champion.version == version:
        # an earlier call may have been killed before it did
        registry.clear_challenger(registered, version)
        if (journal := tracking.find_journal(champion)) is not None:
            tracking.deliver_journal(journal)
        return f"version {version} of {registered} is the champion already"
    promoted = registry.fetch_version(registered, version)  # raises where there is none
    if refused := promoted.tags.get(EXPORT_REFUSED_TAG):
        raise ExportMismatch(f"version {version} of {registered} is not promoted: {refused}")
    if not _has_export_proof(promoted.tags, output / settings.name):
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
    journal = tracking.record_alias_move(promoted, "champion", tags)
    registry.tag_version(registered, version, tags)
    inject_fault("hand.tagged")
    registry.set_champion(registered, version)
    if journal is not None:
        tracking.deliver_journal(journal)
    was = f" (was version {champion.version})" if champion else ""
    return f"version {version} of {registered} is the champion now{was}"


def _has_export_proof(tags: Mapping[str, str], home: Path) -> bool:
    """True = a proof of export is of this version's folder: by its tags, or in a finished stage of the pipeline.

    A store that was away when the stage ran has no tags of it.
    """
    digest = tags.get("model_sha256")
    if not digest:  # registered without a digest: nothing can be compared with the proof but the tag's being there
        return bool(tags.get(PROVEN_TAG))
    if tags.get(PROVEN_TAG) == digest:
        return True
    for path in sorted((home / "stages" / "export").glob(f"*/{PROOF_FILE}")):
        try:
            models = json.loads(path.read_text(encoding="utf-8"))["models"].values()
            if any(facts["model_sha256"] == digest for facts in models):
                return True
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue  # of another version of posttrain, or just being removed
    return False
