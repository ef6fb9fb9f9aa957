"""Regression checks of the champion against its figures at promotion."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rl_core.analysis.statistics import Difference, Rate, rate_difference
from rl_core.evaluation import Evaluation
from rl_core.storage.single_files import append_bytes
from tasks.config import PipelineSettings, StagesSettings, evaluation_settings
from tasks.tracking import ModelVersion

__all__ = ["ChampionVerdict", "count_checks", "figure_of", "figure_tags", "judge", "note_check", "settings_of_check"]

CHECKS = "champion_checks.jsonl"


@dataclass(frozen=True, slots=True)
class ChampionVerdict:
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


def figure_of(tags: Mapping[str, str]) -> Rate | None:
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


def figure_tags(result: Evaluation) -> dict[str, str]:
    """The figure that a version is known by, as tags: later evaluations are compared with it."""
    low, high = result.interval
    return {
        "figure.success_rate": f"{result.success_rate:.6g}",
        "figure.low": f"{low:.6g}",
        "figure.high": f"{high:.6g}",
        "figure.samples": str(result.samples),
    }


def judge(result: Evaluation, registered: Rate, margin: float) -> ChampionVerdict:
    """Test for a fall of the success rate: the upper 95% bound of its change lies below minus the margin.

    The two figures come from different episodes, so their intervals are joined (Newcombe 1998). An unchanged champion
    is called worse once in forty checks at most, with margin 0; more seldom the larger the margin.
    """
    now = Rate(result.success_rate, *result.interval, result.samples)
    change = rate_difference(now, registered)
    return ChampionVerdict(now, registered, change, margin, change.high < -margin)


def settings_of_check(settings: PipelineSettings, champion: ModelVersion, number: int) -> PipelineSettings:
    """The pipeline that plays held-out episodes with the champion; each check draws others, by its number.

    The same episodes again would tell nothing that is not known: the same model gives the same answers. What the data
    stage splits it splits as ever, so nothing that was trained on is played.
    """
    text = f"{settings.seed}:check:{champion.version}:{number}"
    seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1
    evaluation = dataclasses.replace(evaluation_settings(settings), episodes_seed=seed)
    return dataclasses.replace(
        settings,
        model=dataclasses.replace(settings.model, path=champion.reference),
        stages=StagesSettings(prepare_data=settings.stages.prepare_data, evaluate=evaluation),
    )


def count_checks(home: Path, version: int) -> int:
    """Number of checks of a version so far."""
    path = home / CHECKS
    lines = path.read_text().splitlines() if path.is_file() else []
    return sum(json.loads(line)["version"] == version for line in lines if line.endswith("}"))


def note_check(home: Path, version: int, verdict: ChampionVerdict | None, now: Rate) -> None:
    """Record a check; it counts from now on."""
    row = {"version": version, "success": now.rate, "low": now.low, "high": now.high, "samples": now.n}
    if verdict is not None:
        row |= {"change": verdict.change.difference, "regressed": verdict.regressed}
    append_bytes(home / CHECKS, json.dumps(row).encode() + b"\n", synced=True)
