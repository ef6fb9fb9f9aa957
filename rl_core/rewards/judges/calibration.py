"""Calibration of a judge against human labels, before anything is trained on it."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from rl_core.analysis.statistics import Rate, compute_clustered_rate
from rl_core.data.files import BadRow
from rl_core.data.formats import validate_preference
from rl_core.data.records import RowSource, read_prompts
from rl_core.errors import DataError, RewardError
from rl_core.rewards.judges.judge_reward import JudgeReward
from rl_core.rewards.judges.questions import JudgedSample
from rl_core.rewards.judges.verdicts import compute_pair_agreement
from rl_core.settings import JudgeSettings, build_settings

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LabelledPair:
    """Two answers to one prompt and what people chose: 1 = the first, 0 = the second, 0.5 = a tie."""

    first: JudgedSample
    second: JudgedSample
    label: float


@dataclass(frozen=True, slots=True)
class JudgeCalibration:
    """Agreement of a judge with human labels on pairs of answers."""

    agreement: (
        Rate  # on the pairs that people decided; a tie of the judge is half of one. 0.5 = chance
    )
    kappa: float | None  # Cohen's, over first, second and tie; None = undefined
    pairs: int  # judged
    decided: int  # of them, those of which people found one better
    failed: int  # without a verdict, in no other number
    bias: Mapping[str, float]  # first_rate, tie_rate, contradiction_rate, where they are measured

    def collect_metrics(self) -> dict[str, float]:
        """Return the numbers that are logged as `reward/judge/...`."""
        rate = self.agreement
        metrics = {
            "agreement": rate.rate,
            "agreement_low": rate.low,
            "agreement_high": rate.high,
            "labelled_pairs": float(self.pairs),
        }
        return metrics if self.kappa is None else {**metrics, "kappa": self.kappa}

    def describe(self) -> str:
        """Return one sentence for people."""
        rate = self.agreement
        parts = [
            f"agrees with {rate.rate:.1%} of {self.decided} human choices (95% interval {rate.low:.1%} to "
            f"{rate.high:.1%}; chance 50%)"
        ]
        if self.kappa is not None:
            parts.append(f"Cohen's kappa {self.kappa:.2f}")
        if "first_rate" in self.bias:
            parts.append(f"the answer shown first wins {self.bias['first_rate']:.1%}")
        if "contradiction_rate" in self.bias:
            parts.append(
                f"{self.bias['contradiction_rate']:.1%} of verdicts change with the order shown"
            )
        if self.failed:
            parts.append(f"{self.failed} pairs without a verdict are left out")
        return "; ".join(parts)


def read_labelled_pairs(source: RowSource) -> list[LabelledPair]:
    """Read human labels: preference pairs, ties among them, or scored answers, all pairs of one prompt.

    Which side is shown first follows from the texts, so that it says nothing about the label.
    Raises: DataError naming the row that is neither; RecordsError.
    """
    pairs: list[LabelledPair] = []
    scored: dict[str, list[tuple[JudgedSample, float]]] = {}
    records = read_prompts(source)
    name = str(source) if isinstance(source, str | Path) else "labels"
    for number, raw in enumerate(records.rows):
        try:
            row = validate_preference(raw)
        except BadRow as error:
            raise DataError(
                f"{name}, row {records.numbers[number]}: {error}; a label is a row with prompt, chosen and "
                "rejected, or prompt, completion and score"
            ) from error
        prompt = _extract_texts(row["prompt"], "user")[-1]
        columns = {key: value for key, value in raw.items() if key not in ("prompt", "target")}
        target = str(raw.get("target", raw.get("answer", "")))

        def build_sample(
            side: Any, prompt: str = prompt, target: str = target, columns: Any = columns
        ) -> JudgedSample:
            return JudgedSample(
                prompt, "\n".join(_extract_texts(side, "assistant")), target, columns
            )

        if "chosen" in row:
            first, second = build_sample(row["chosen"]), build_sample(row["rejected"])
            pairs.append(_order_pair(first, second, 0.5 if row.get("tie") else 1.0))
        else:
            score = row["score"] if "score" in row else float(row["label"])
            # Conversations may end with the same question and differ before it.
            has_history = not isinstance(row["prompt"], str) and len(row["prompt"]) > 1
            key = str(row["prompt"]) if has_history else prompt
            scored.setdefault(key, []).append((build_sample(row["completion"]), score))
    for rows in scored.values():
        for (first, a), (second, b) in combinations(rows, 2):
            if first.completion != second.completion:
                label = 1.0 if a > b else 0.0 if a < b else 0.5
                pairs.append(_order_pair(first, second, label))
    if not any(pair.label != 0.5 for pair in pairs):
        raise DataError(
            f"{name}: no pair of answers to one prompt of which people found one better; the judge cannot be calibrated"
        )
    return pairs


def calibrate_judge(
    settings: JudgeSettings | Mapping[str, Any], labels: RowSource | None = None
) -> JudgeCalibration:
    """Measure how well a judge agrees with human labels; see `JudgeSettings`.

    Args:
        labels: preference pairs or scored answers, rows or a file; None = `settings.labels`.
    Raises: DataError, SettingsError; RewardError if no label could be judged.
    """
    settings = build_settings(settings, JudgeSettings, "settings")
    source = settings.labels if labels is None else labels
    if source is None:
        raise DataError("labels: name a file of human labels, or pass rows")
    judge = JudgeReward(settings, lambda failed, judged: failed == judged)
    return measure_judge_agreement(judge, read_labelled_pairs(source))


def measure_judge_agreement(judge: JudgeReward, pairs: Sequence[LabelledPair]) -> JudgeCalibration:
    """Judge labelled pairs and measure the agreement; the interval is over prompts, whose pairs are correlated.

    Raises: RewardError if no decided pair has a verdict.
    """
    samples = [sample for pair in pairs for sample in (pair.first, pair.second)]
    scores = judge.judge_samples(samples, [2] * len(pairs))
    bias: dict[str, float] = {
        name: judge.metrics[name]
        for name in ("first_rate", "tie_rate", "contradiction_rate")
        if name in judge.metrics
    }
    judged: list[float] = []
    known: list[LabelledPair] = []
    for pair, first, second in zip(pairs, scores[0::2], scores[1::2], strict=True):
        if first is None or second is None:
            continue
        judged.append(1.0 if first > second else 0.0 if first < second else 0.5)
        known.append(pair)
    if not any(pair.label != 0.5 for pair in known):
        reason = next(iter(judge.failed.values())).error if judge.failed else "no verdict"
        raise RewardError(f"the judge cannot be calibrated: none of {len(pairs)} labels: {reason}")
    halves, counts = compute_pair_agreement(judged, [pair.label for pair in known])
    by_prompt: dict[str, list[int]] = {}
    decided = [pair for pair in known if pair.label != 0.5]
    for pair, half in zip(decided, halves, strict=True):
        by_prompt.setdefault(pair.first.prompt, []).append(half)
    rate = compute_clustered_rate(
        [sum(parts) for parts in by_prompt.values()],
        [2 * len(parts) for parts in by_prompt.values()],
    )
    return JudgeCalibration(
        rate._replace(n=counts.decided),
        counts.kappa,
        len(known),
        counts.decided,
        len(pairs) - len(known),
        bias,
    )


def calibrate_before_training(judge: JudgeReward) -> JudgeCalibration | None:
    """Measure, print and log the agreement with `labels`; refuse a judge below `min_agreement`.

    Returns: None without labels. Raises: RewardError, DataError.
    """
    settings = judge.settings
    if settings.labels is None:
        return None
    calibration = measure_judge_agreement(judge, read_labelled_pairs(settings.labels))
    judge.calibration_metrics = calibration.collect_metrics()
    text = f"the judge {calibration.describe()}"
    if calibration.agreement.rate < settings.min_agreement:
        raise RewardError(
            f"rewards.judge: {text}; reward_options.judge.min_agreement is {settings.min_agreement:.1%}: improve its "
            "instructions, take a stronger model, or lower it"
        )
    is_chance = calibration.agreement.low <= 0.5
    level = logging.WARNING if is_chance else logging.INFO
    logger.log(level, "%s", text, extra={"for_people": True})
    if is_chance:
        logger.warning(
            "the interval includes chance: a policy may learn nothing from this judge, or the wrong thing"
        )
    return calibration


def _order_pair(first: JudgedSample, second: JudgedSample, label: float) -> LabelledPair:
    """Build a pair in an order that follows from its texts."""
    text = "\0".join((first.prompt, *sorted((first.completion, second.completion))))
    swaps = hashlib.sha256(text.encode("utf-8", "replace")).digest()[0] % 2 == 1
    if swaps == (first.completion < second.completion):
        return LabelledPair(second, first, 1 - label)
    return LabelledPair(first, second, label)


def _extract_texts(side: Any, role: str) -> list[str]:
    """Return a text, or the texts of one role's messages."""
    if isinstance(side, str):
        return [side]
    return [str(part["content"]) for part in side if part.get("role") == role]
