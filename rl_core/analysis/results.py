"""Results of an analysis as plain data: the source of the report, analysis.json and analysis.csv.

Includes the reward model's calibration (reliability, ranking, correlation with true success) and teacher-forced
measurements, which `rl_core.probe` makes.
Suffixes: N scored trajectories, B pairs of them.
"""

from __future__ import annotations

import csv
import json
from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from rl_core.analysis.comparison import ModelComparison
from rl_core.analysis.episode_index import EpisodeReference
from rl_core.analysis.statistics import Rate, wilson_interval
from rl_core.analysis.summary import TrajectorySummary
from rl_core.errors import DataError
from rl_core.storage.atomic_files import replace_file, write_text_atomic
from rl_core.tracking import distinguish_name, replace_invalid_characters
from rl_core.types import Trajectory

MAX_BINS = 10  # maximum; fewer if there are fewer than PAIRS_OF_BIN pairs per bin
MIN_PAIRS_PER_BIN = 15
MAX_PAIRS_PER_EPISODE = (
    64  # maximum, so that one episode with many samples does not dominate the result
)


class ReliabilityBin(NamedTuple):
    """Pairs of similar confidence."""

    confidence: float  # mean, in [0.5, 1]
    right: Rate  # share ranked correctly (a tie counts half)


@dataclass(frozen=True)
class RewardModelCalibration:
    """Calibration of a reward model on trajectories with known success.

    Bradley-Terry scores are defined up to an offset: only differences on the same episode are meaningful,
    p(a beats b) = sigmoid(s_a - s_b). Calibration is therefore measured on (success, failure) pairs of one episode.
    """

    scores: list[float]  # [N]
    successes: list[bool]  # [N]
    bins: list[ReliabilityBin]  # [] without pairs
    ece: float | None  # expected calibration error; None without pairs
    accuracy: Rate | None  # of all pairs
    correlation: float | None  # of score and success; None if either is constant
    auc: float | None  # P(random success outscores random failure), over all episodes
    pairs: int

    def collect_metrics(self) -> dict[str, float]:
        """Return scalars for tracking, without undefined ones."""
        values = {
            "ece": self.ece,
            "accuracy": self.accuracy.rate if self.accuracy else None,
            "correlation": self.correlation,
            "auc": self.auc,
            "pairs": float(self.pairs),
            "trajectories": float(len(self.scores)),
        }
        return {name: value for name, value in values.items() if value is not None}

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-serialisable dict, without the individual scores."""
        row = {
            name: value
            for name, value in asdict(self).items()
            if name not in ("scores", "successes", "bins")
        }
        row["accuracy"] = self.accuracy._asdict() if self.accuracy else None
        row["bins"] = [{"confidence": b.confidence, "right": b.right._asdict()} for b in self.bins]
        return row | {"trajectories": len(self.scores)}


def calibrate_reward_model(
    scores: Sequence[float], successes: Sequence[bool], episodes: Sequence[Hashable]
) -> RewardModelCalibration:
    """Compute the calibration of one reward model.

    Args:
        scores: [N], raw. successes: [N], true. episodes: [N], within which pairs are formed.
    Raises: DataError if lengths differ, the input is empty, or a score is not finite.
    """
    if not len(scores) == len(successes) == len(episodes) or not len(scores):
        raise DataError(
            f"calibrate: {len(scores)} scores, {len(successes)} successes, {len(episodes)} episodes"
        )
    scores_N = np.asarray(scores, dtype=np.float64)
    if not np.isfinite(scores_N).all():
        raise DataError("calibrate: scores must be finite")
    margins_B = _compute_margins(scores, successes, episodes)
    num_bins = max(1, min(MAX_BINS, len(margins_B) // MIN_PAIRS_PER_BIN))
    bins, ece = compute_reliability(margins_B, num_bins) if margins_B else ([], None)
    right = sum(1.0 if margin > 0 else 0.5 * (margin == 0) for margin in margins_B)
    accuracy = None
    if margins_B:
        accuracy = Rate(
            right / len(margins_B), *wilson_interval(right, len(margins_B)), len(margins_B)
        )
    flags_N = np.asarray(successes, dtype=bool)
    return RewardModelCalibration(
        scores=[float(score) for score in scores],
        successes=[bool(success) for success in successes],
        bins=bins,
        ece=ece,
        accuracy=accuracy,
        correlation=compute_correlation(scores_N, flags_N),
        auc=compute_auc(scores_N[flags_N], scores_N[~flags_N]),
        pairs=len(margins_B),
    )


def compute_reliability(margins_B: ArrayLike, num_bins: int) -> tuple[list[ReliabilityBin], float]:
    """Compute reliability bins and expected calibration error from margins (score of the success - of the failure).

    Confidence in the predicted order is c = sigmoid(|margin|); equal-width bins over [0.5, 1], empty ones omitted.
    ECE = sum over bins of n_b / B |mean c - accuracy|. A tie counts half.
    Returns: bins in order of confidence; ECE in [0, 1].
    Raises: DataError without margins.
    Source: Guo et al. 2017, arXiv:1706.04599, eq. 3.
    """
    margins = np.asarray(margins_B, dtype=np.float64)
    if not margins.size or num_bins < 1:
        raise DataError(
            f"reliability: {margins.size} pairs in {num_bins} bins; at least one of each is needed"
        )
    sure = 1 / (1 + np.exp(-np.abs(margins)))
    right = (margins > 0) + 0.5 * (margins == 0)
    place = np.minimum(((sure - 0.5) * 2 * num_bins).astype(int), num_bins - 1)
    bins, ece = [], 0.0
    for number in range(num_bins):
        inside = place == number
        count = int(inside.sum())
        if not count:
            continue
        confidence, share = float(sure[inside].mean()), float(right[inside].mean())
        low, high = wilson_interval(share * count, count)
        bins.append(ReliabilityBin(confidence, Rate(share, low, high, count)))
        ece += count / margins.size * abs(confidence - share)
    return bins, ece


def compute_correlation(values_N: ArrayLike, flags_N: ArrayLike) -> float | None:
    """Compute the point-biserial correlation (Pearson's with a binary variable); None if either is constant."""
    values, flags = np.asarray(values_N, dtype=np.float64), np.asarray(flags_N, dtype=np.float64)
    a, b = values - values.mean(), flags - flags.mean()
    scale = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b) / scale if scale > 1e-12 * max(1.0, float(np.abs(values).max())) else None


def compute_auc(successes_N: ArrayLike, failures_N: ArrayLike) -> float | None:
    """Compute P(score of a random success > that of a random failure), ties half: the area under the ROC curve.

    Returns: None without a success or without a failure.
    Source: Mann and Whitney 1947, doi:10.1214/aoms/1177730491.
    """
    high, low = (
        np.asarray(successes_N, dtype=np.float64),
        np.sort(np.asarray(failures_N, dtype=np.float64)),
    )
    if not high.size or not low.size:
        return None
    below, upto = np.searchsorted(low, high, side="left"), np.searchsorted(low, high, side="right")
    return float((below + upto).sum() / 2 / (high.size * low.size))


def _compute_margins(
    scores: Sequence[float], successes: Sequence[bool], episodes: Sequence[Hashable]
) -> list[float]:
    """Score of the success minus score of the failure, for pairs on the same episode."""
    groups: dict[Hashable, tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
    for score, success, episode in zip(scores, successes, episodes, strict=True):
        groups[episode][bool(success)].append(float(score))
    margins: list[float] = []
    for failures, wins in groups.values():
        margins += [win - failure for win in wins for failure in failures][:MAX_PAIRS_PER_EPISODE]
    return margins


@dataclass(frozen=True)
class ModelProbeResult:
    """Teacher-forced measurements of one model; None = not measured."""

    perplexity: float | None = None  # exp of the mean nats per token of held-out demonstrations
    demonstrations: int = 0  # number of these
    entropy: float | None = None  # nats per sampled token, over the model's trajectories
    kl_to_first: float | None = (
        None  # KL(model || first model), nats per sampled token, over the same trajectories
    )
    perplexity_under_first: float | None = (
        None  # exp of the mean nats per sampled token under the first model, over the same trajectories
    )
    coherence: float | None = (
        None  # mean score of the reward component `coherence`, on the first model's hidden states
    )
    trajectories: int = 0  # number of the model's trajectories read
    entropy_by_turn: list[float] = field(default_factory=list)
    kl_by_turn: list[float] = field(default_factory=list)

    def collect_metrics(self) -> dict[str, float]:
        """Return scalars for tracking and tables."""
        names = ("perplexity", "entropy", "kl_to_first", "perplexity_under_first", "coherence")
        return {name: float(value) for name in names if (value := getattr(self, name)) is not None}

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-serialisable dict."""
        return asdict(self)


@dataclass(frozen=True)
class ProbeResults:
    """All measurements made with the models themselves."""

    models: dict[str, ModelProbeResult] = field(default_factory=dict)
    reward_model: RewardModelCalibration | None = None
    notes: list[str] = field(default_factory=list)


@dataclass
class ModelResult:
    """One model: summary of its trajectories, and its success rates."""

    name: str
    summary: TrajectorySummary
    total: Rate | None  # None = success is unknown; the rates and pass@k are then {}
    by_level: dict[str, Rate]
    by_kind: dict[str, Rate]
    pass_at_k: dict[int, float]
    episodes: int
    probe: ModelProbeResult | None = None  # None = model not available
    by_environment: dict[str, Rate] = field(default_factory=dict)  # of a mixture

    def collect_metrics(self) -> dict[str, float]:
        """Return scalars over all trajectories, and those of the probe."""
        return self.summary.compute_metrics() | (self.probe.collect_metrics() if self.probe else {})


@dataclass
class EpisodeCase:
    """One episode under every model."""

    episode: EpisodeReference
    trajectories: list[Trajectory]  # in the order of the models
    turning_points: list[
        int | None
    ]  # turning point of each against the first model; None = none (always for the first itself)
    image: bytes | None = None  # PNG

    @property
    def first_turning_point(self) -> int | None:
        """Earliest turning point of any other model."""
        turns = [turn for turn in self.turning_points if turn is not None]
        return min(turns) if turns else None


@dataclass
class AnalysisData:
    """All results of an analysis."""

    models: list[ModelResult]
    comparisons: list[ModelComparison]
    cases: list[EpisodeCase] = field(default_factory=list)
    probes: ProbeResults = field(default_factory=ProbeResults)
    notes: list[str] = field(default_factory=list)
    # metrics of other evaluators as text: a head, then a row for each metric
    suites: list[list[str]] = field(default_factory=list)


def collect_analysis_metrics(analysis: AnalysisData, prefix: str = "analysis") -> dict[str, float]:
    """Return scalars for tracking, named `analysis/MODEL/...` and `analysis/SECOND_minus_FIRST/...`."""
    metrics: dict[str, float] = {}
    parts = _assign_metric_names(
        *(model.name for model in analysis.models),
        *(pair.first for pair in analysis.comparisons),
        *(pair.second for pair in analysis.comparisons),
    )
    environments = _assign_metric_names(
        *(name for m in analysis.models for name in m.by_environment)
    )
    levels = _assign_metric_names(*(level for m in analysis.models for level in m.by_level))
    kinds = _assign_metric_names(*(kind for m in analysis.models for kind in m.by_kind))
    for model in analysis.models:
        prefix_of_model = f"{prefix}/{parts[model.name]}"
        metrics[f"{prefix_of_model}/episodes"] = float(model.episodes)
        if model.total is not None:
            metrics |= {
                f"{prefix_of_model}/success_rate": model.total.rate,
                f"{prefix_of_model}/success_rate_low": model.total.low,
                f"{prefix_of_model}/success_rate_high": model.total.high,
            }
        metrics |= {
            f"{prefix_of_model}/{name}": value for name, value in model.collect_metrics().items()
        }
        metrics |= {f"{prefix_of_model}/pass_at_{k}": value for k, value in model.pass_at_k.items()}
        metrics |= {
            f"{prefix_of_model}/success_rate_by_environment/{environments[name]}": rate.rate
            for name, rate in model.by_environment.items()
        }
        metrics |= {
            f"{prefix_of_model}/success_rate_by_level/{levels[name]}": rate.rate
            for name, rate in model.by_level.items()
        }
        metrics |= {
            f"{prefix_of_model}/success_rate_by_kind/{kinds[name]}": rate.rate
            for name, rate in model.by_kind.items()
        }
    for pair in analysis.comparisons:
        prefix_of_model = f"{prefix}/{parts[pair.second]}_minus_{parts[pair.first]}"
        if (gain := pair.total.success) is not None:
            metrics |= {
                f"{prefix_of_model}/success": gain.difference,
                f"{prefix_of_model}/success_low": gain.low,
                f"{prefix_of_model}/success_high": gain.high,
            }
        metrics |= {
            f"{prefix_of_model}/reward": pair.reward.difference,
            f"{prefix_of_model}/p_value": pair.p_value,
            f"{prefix_of_model}/episodes": float(pair.total.episodes),
            f"{prefix_of_model}/wins": float(pair.total.wins),
            f"{prefix_of_model}/losses": float(pair.total.losses),
        }
    if analysis.probes.reward_model is not None:
        calibration = analysis.probes.reward_model.collect_metrics()
        metrics |= {f"{prefix}/reward_model/{name}": value for name, value in calibration.items()}
    return metrics


def build_summary_rows(analysis: AnalysisData) -> list[dict[str, Any]]:
    """Return one row per model, for tables."""
    return [
        {
            "model": model.name,
            "episodes": model.episodes,
            "samples": model.summary.trajectories,
            "success_rate": None if model.total is None else model.total.rate,
            "low": None if model.total is None else model.total.low,
            "high": None if model.total is None else model.total.high,
            **model.collect_metrics(),
            **{f"pass_at_{k}": value for k, value in model.pass_at_k.items()},
        }
        for model in analysis.models
    ]


def write_analysis_json(path: Path, analysis: AnalysisData) -> Path:
    """Write analysis.json: everything but the trajectories of the cases, which are in the report."""
    row = {
        "models": [
            {
                "name": model.name,
                "episodes": model.episodes,
                "success": None if model.total is None else model.total._asdict(),
                "by_environment": {
                    name: rate._asdict() for name, rate in model.by_environment.items()
                },
                "by_level": {name: rate._asdict() for name, rate in model.by_level.items()},
                "by_kind": {name: rate._asdict() for name, rate in model.by_kind.items()},
                "pass_at_k": {str(k): value for k, value in model.pass_at_k.items()},
                **model.summary.to_json(),
                "probe": model.probe.to_json() if model.probe else None,
            }
            for model in analysis.models
        ],
        "comparisons": [comparison.to_json() for comparison in analysis.comparisons],
        "reward_model": analysis.probes.reward_model.to_json()
        if analysis.probes.reward_model
        else None,
        "cases": [
            {
                "environment": case.episode.environment,
                "level": case.episode.level,
                "kind": case.episode.kind,
                "seed": case.episode.seed,
                "success": list(case.episode.success),
                "turning_points": case.turning_points,
            }
            for case in analysis.cases
        ],
        "notes": analysis.notes,
    }
    write_text_atomic(path, json.dumps(row, indent=1, allow_nan=False) + "\n")
    return path


def write_analysis_csv(path: Path, analysis: AnalysisData) -> Path:
    """Write analysis.csv, one value per row.

    group: all, environment, level, kind, tool, or `minus MODEL` for paired differences.
    """
    with replace_file(path, errors="replace") as file:
        writer = csv.writer(file)
        writer.writerow(["model", "group", "name", "metric", "value", "low", "high", "n"])
        for model in analysis.models:
            groups = (
                ("all", {} if model.total is None else {"all": model.total}),
                ("environment", model.by_environment),
                ("level", model.by_level),
                ("kind", model.by_kind),
            )
            for group, rates in groups:
                for name, rate in rates.items():
                    writer.writerow(
                        [
                            _escape_formula(model.name),
                            group,
                            _escape_formula(name),
                            "success_rate",
                            *rate,
                        ]
                    )
            for metric, value in model.collect_metrics().items():
                writer.writerow(
                    [
                        _escape_formula(model.name),
                        "all",
                        "all",
                        metric,
                        value,
                        "",
                        "",
                        model.summary.trajectories,
                    ]
                )
            for k, value in model.pass_at_k.items():
                writer.writerow(
                    [
                        _escape_formula(model.name),
                        "all",
                        "all",
                        f"pass_at_{k}",
                        value,
                        "",
                        "",
                        model.episodes,
                    ]
                )
            for (_, level), tools in model.summary.tools.items():
                for metric, counts in (("calls", tools.calls), ("misuse", tools.errors)):
                    for tool, count in counts.items():
                        place = [
                            _escape_formula(model.name),
                            "tool",
                            _escape_formula(f"{level}: {tool}"),
                        ]
                        writer.writerow([*place, metric, count, "", "", tools.trajectories])
        for pair in analysis.comparisons:
            place = [_escape_formula(pair.second), f"minus {pair.first}"]
            for row in (pair.total, *pair.by_environment, *pair.by_level, *pair.by_kind):
                if row.success is None:
                    continue
                writer.writerow(
                    [
                        *place,
                        _escape_formula(row.name),
                        "success_difference",
                        *row.success,
                        row.episodes,
                    ]
                )
            writer.writerow([*place, "all", "reward_difference", *pair.reward, pair.total.episodes])
        calibration = analysis.probes.reward_model
        if calibration is not None:
            for metric, value in calibration.collect_metrics().items():
                writer.writerow(
                    ["reward_model", "all", "all", metric, value, "", "", len(calibration.scores)]
                )
    return path


def _escape_formula(text: str) -> str:
    """Protect text against formula injection in spreadsheets, as tool names are model output."""
    return "'" + text if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text


def _assign_metric_names(*names: str) -> dict[str, str]:
    """Assign each name a valid part of a metric name of its own; letters of every script stay."""
    plain = {
        name: replace_invalid_characters(name, r"\w.-").strip("_") or "unnamed" for name in names
    }
    counts = Counter(plain.values())
    return {
        name: clean if counts[clean] == 1 else distinguish_name(clean, name)
        for name, clean in plain.items()
    }
