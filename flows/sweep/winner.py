"""Winner of a sweep: chosen on the evaluation's episodes, measured on fresh ones.

The best of many looks better than it is: its figure is the largest of many noisy ones (Cawley and Talbot 2010, JMLR
11:2079, section 5). The choice and the figure therefore use different episodes. The configuration with the best mean
over its seeds on the evaluation's episodes wins. Then it and the runners-up (and the configuration's own settings, if
they are among the trials) play held-out episodes on which no trial was evaluated or validated. The winner's figure
comes from those episodes alone and needs no correction, because they had no part in the choice (data splitting: Cox
1975, doi:10.1093/biomet/62.2.441). Its gain over each other finalist is tested on the same episodes, with p-values
adjusted for their number (Holm 1979).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from flows.post_training import report_message
from flows.sweep.plan import EVALUATION_METRICS, SweepPlan
from flows.sweep.schedule import SweepRecord, TrialOutcome, format_trial_name
from flows.sweep.search import Params
from flows.sweep.trial_process import TrialWorker
from rl_core.analysis.significance_tests import (
    adjust_p_values_holm,
    compute_seed_interval,
    run_gain_test,
)
from rl_core.analysis.statistics import Rate, bootstrap_paired_difference
from rl_core.errors import WorkerFailed
from rl_core.storage.atomic_files import write_json_atomic
from rl_core.storage.faults import inject_fault
from tasks.config import PipelineSettings
from tasks.pipeline.stage_result import GAIN, format_gain
from tasks.stage_registry import START_MODEL, list_stage_names
from tasks.stages.evaluate import read_evaluation

logger = logging.getLogger(__name__)

CHOICE_FILE = "choice.json"
NEEDED_STAGES = ("prepare_data", "evaluate")
# Numbers of the folders of the fresh episodes and of the start model, among those of the trials.
_FINALISTS_NUMBER, _START_MODEL_NUMBER = 9999, 9998
ALPHA = 0.05
CHOICE_METHOD = (
    "chosen by the mean over seeds on the evaluation's episodes; measured on fresh held-out episodes, which had no "
    "part in the choice (data splitting, Cox 1975; Cawley and Talbot 2010); gains over the other finalists tested "
    "there, p-values adjusted by Holm 1979"
)


@dataclass(frozen=True)
class RankedConfiguration:
    """Configuration with its finished trials."""

    number: int
    params: Params
    values: tuple[float, ...]  # by seed
    interval: Rate  # of their mean
    models: dict[int, str]  # folders by seed

    @property
    def best_seed(self) -> int:
        """Seed whose model is submitted: the first with the best value on the episodes of the choice."""
        return max(self.models, key=lambda seed: self.values[list(self.models).index(seed)])


@dataclass(frozen=True)
class FinalistGain:
    """Gain of the winner over another finalist on fresh episodes, both as means over their seeds."""

    number: int
    difference: float
    low: float
    high: float
    p_value: float  # null hypothesis: no gain
    adjusted: float
    episodes: int


@dataclass(frozen=True)
class StartModelResult:
    """Results of the model that every trial starts from, played once for the sweep."""

    path: str
    value: float  # on the episodes of the choice
    fresh: float | None = None  # on fresh episodes
    gain: tuple[float, float, float] | None = (
        None  # the winner's over it there, paired, with interval
    )


@dataclass(frozen=True)
class SweepChoice:
    """Winner, and its results on fresh episodes."""

    winner: int
    params: Params
    metric: str
    chosen_by: float  # its value on the episodes of the choice
    method: str
    draw: int | None = None  # of the held-out episodes; None = no fresh ones
    # Finalist: value of each seed on fresh episodes.
    fresh: dict[int, list[float]] = field(default_factory=dict)
    comparisons: list[FinalistGain] = field(default_factory=list)
    why: str = ""  # reason why there are no fresh episodes
    equal: int = 0  # other configurations with the same value
    start: StartModelResult | None = (
        None  # None = training starts from scratch, or it is not measured
    )

    def to_json(self) -> dict[str, Any]:
        """Return the choice as a dict."""
        return asdict(self)

    @property
    def interval(self) -> Rate | None:
        """Mean of the winner on fresh episodes, with its interval over seeds."""
        return compute_seed_interval(self.fresh[self.winner]) if self.fresh else None

    def describe_choice(self, label: str) -> str:
        """Describe the result in a sentence or two."""
        rank = "is best of those tried"
        if self.equal:
            rank = f"is the first of {self.equal + 1} equally good"
        summary = (
            f"{label} {rank}: {self.metric} {_format_number(self.chosen_by)} where it was chosen"
        )
        interval = self.interval
        if interval is None:
            reason = self.why or "not measured on fresh episodes"
            return f"{summary}; {reason}, so that figure is too optimistic"
        spread = ""
        if interval.n > 1:
            low, high = _format_number(interval.low), _format_number(interval.high)
            spread = f" [{low}, {high}] over {interval.n} seeds"
        text = f"{summary}, {_format_number(interval.rate)}{spread} on fresh held-out episodes"
        if self.start is not None and self.start.gain is not None:
            gains = zip((GAIN, f"{GAIN}_low", f"{GAIN}_high"), self.start.gain, strict=True)
            row = {**dict(gains), "knows_success": self.metric == "success"}
            text = f"{text} ({format_gain(row)} over {START_MODEL})"
        num_similar = sum(gain.adjusted > ALPHA for gain in self.comparisons)
        if num_similar:
            return f"{text}; not significantly better than {num_similar} of {len(self.comparisons)} other finalists"
        if self.comparisons:
            return f"{text}; better than the other finalists (adjusted p at most {ALPHA})"
        return text


def _format_number(value: float) -> str:
    return f"{value:.4g}"


def rank_configurations(
    outcomes: Mapping[tuple[int, int], TrialOutcome], plan: SweepPlan
) -> list[RankedConfiguration]:
    """Rank the configurations whose seeds have all finished, the best first; ties in the order of their numbers."""
    ranked = []
    for number in sorted({number for number, _ in outcomes}):
        trials = [outcomes.get((number, seed)) for seed in range(plan.seeds)]
        finished = [
            trial
            for trial in trials
            if trial is not None and trial.status == "finished" and trial.value is not None
        ]
        if len(finished) == plan.seeds:
            values = tuple(trial.value for trial in finished if trial.value is not None)
            models = {trial.seed: trial.model for trial in finished}
            ranked.append(
                RankedConfiguration(
                    number, finished[0].params, values, compute_seed_interval(values), models
                )
            )
    sign = 1 if plan.minimize else -1
    return sorted(ranked, key=lambda configuration: sign * configuration.interval.rate)


def select_finalists(
    ranked: Sequence[RankedConfiguration], plan: SweepPlan, base_params: Params
) -> list[RankedConfiguration]:
    """Select the best configurations, the winner first, and the configuration's own settings if they were tried."""
    others = ranked[plan.finalists :]
    base = [configuration for configuration in others if configuration.params == base_params]
    return [*ranked[: plan.finalists], *base]


def compare_finalists(
    winner: int,
    finalists: Sequence[RankedConfiguration],
    episodes: Mapping[str, Mapping[Any, float]],
    *,
    metric: str,
    seed: int,
) -> tuple[dict[int, list[float]], list[FinalistGain]]:
    """Return the values of the finalists on fresh episodes, and the winner's gains.

    Args:
        episodes: outcome by episode, by model name (`format_trial_name`).
    """
    fresh: dict[int, list[float]] = {}
    means: dict[int, dict[Any, float]] = {}
    for finalist in finalists:
        outcomes = [
            episodes[format_trial_name(finalist.number, model_seed)]
            for model_seed in finalist.models
        ]
        fresh[finalist.number] = [_compute_mean(outcome.values()) for outcome in outcomes]
        means[finalist.number] = _average_by_episode(outcomes)
    rows: list[tuple[int, Any, float, int]] = []
    for finalist in finalists:
        if finalist.number == winner:
            continue
        shared = sorted(means[winner].keys() & means[finalist.number].keys())
        winner_values = [means[winner][key] for key in shared]
        other_values = [means[finalist.number][key] for key in shared]
        interval = bootstrap_paired_difference(
            winner_values, other_values, samples=2000, seed=seed, confidence=1 - ALPHA
        )
        test = run_gain_test(
            [a - b for a, b in zip(winner_values, other_values, strict=True)],
            bounded=metric == "success",
            seed=seed,
        )
        rows.append((finalist.number, interval, test.p_value, len(shared)))
    adjusted = adjust_p_values_holm([p_value for _, _, p_value, _ in rows])
    gains = [
        FinalistGain(
            number, interval.difference, interval.low, interval.high, p_value, corrected, count
        )
        for (number, interval, p_value, count), corrected in zip(rows, adjusted, strict=True)
    ]
    return fresh, gains


def compare_with_start_model(
    start: StartModelResult,
    winner: Sequence[Mapping[Any, float]],
    episodes: Mapping[Any, float],
    *,
    seed: int,
) -> StartModelResult:
    """Add the start model's value on fresh episodes, and the winner's paired gain over it.

    Args:
        winner: outcome by episode of each of the winner's models.
        episodes: outcome by episode of the start model.
    """
    mean = _average_by_episode(winner)
    shared = sorted(mean.keys() & episodes.keys())
    gain = bootstrap_paired_difference(
        [mean[key] for key in shared],
        [episodes[key] for key in shared],
        samples=2000,
        seed=seed,
        confidence=1 - ALPHA,
    )
    return replace(
        start,
        fresh=_compute_mean(episodes.values()),
        gain=(gain.difference, gain.low, gain.high),
    )


def _average_by_episode(seeds: Sequence[Mapping[Any, float]]) -> dict[Any, float]:
    """Average each episode over seeds, for episodes that all seeds played."""
    shared = set.intersection(*(set(outcomes) for outcomes in seeds))
    return {key: _compute_mean(outcomes[key] for outcomes in seeds) for key in shared}


def _compute_mean(values: Any) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers)


def choose_winner(
    plan: SweepPlan,
    base: PipelineSettings,
    record: SweepRecord,
    build_job: Callable[..., dict[str, Any]],
    worker: TrialWorker,
) -> tuple[SweepChoice | None, PipelineSettings | None]:
    """Choose the winner; return it with its figures, and the settings of its run at the gate.

    Args:
        build_job: builds a job from (number, seed, settings, ...).
        worker: the process that plays fresh episodes.
    Returns: (None, None) without a finished trial.
    """
    ranked = rank_configurations(record.outcomes, plan)
    if not ranked:
        return None, None
    winner = ranked[0]
    finalists = select_finalists(ranked, plan, _read_base_params(plan, base))
    num_equal = sum(other.interval.rate == winner.interval.rate for other in ranked) - 1
    choice = SweepChoice(
        winner.number,
        winner.params,
        plan.metric,
        winner.interval.rate,
        CHOICE_METHOD,
        equal=num_equal,
    )
    settings = plan.load_trial_settings(winner.params, winner.best_seed)
    if plan.metric not in EVALUATION_METRICS:
        choice = replace(choice, why=f"{plan.metric} is not measured on episodes")
    elif base.stages.evaluate is not None:
        report_message(f"{len(finalists)} configurations play fresh held-out episodes")
        evaluation = base.stages.evaluate
        fresh = replace(evaluation, episodes_draw=evaluation.episodes_draw + 1)
        choice = replace(choice, start=_measure_start_model(plan, base, build_job, worker))
        models = {START_MODEL: choice.start.path} if choice.start is not None else {}
        models |= {
            format_trial_name(finalist.number, seed): folder
            for finalist in finalists
            for seed, folder in finalist.models.items()
        }
        folder, problem = _play_episodes(
            _replace_evaluation(base, fresh),
            models,
            build_job,
            worker,
            _FINALISTS_NUMBER,
            "finalists on fresh episodes",
        )
        if folder is None:
            choice = replace(choice, why=f"no fresh episodes ({problem})")
        else:
            choice = _add_fresh_results(
                choice, winner, finalists, folder, models, plan, base.seed, fresh.episodes_draw
            )
            winner_evaluation = settings.stages.evaluate
            assert winner_evaluation is not None
            settings = _replace_evaluation(
                settings,
                replace(winner_evaluation, episodes_draw=fresh.episodes_draw),
            )
    write_json_atomic(record.home / CHOICE_FILE, choice.to_json())
    inject_fault("sweep.chosen")
    return choice, settings


def _read_base_params(plan: SweepPlan, base: PipelineSettings) -> dict[str, str]:
    """Return the configuration's own values of the varied settings, in the text of a trial if there is one."""
    params = {}
    for dimension in plan.dimensions:
        value: Any = base
        for part in dimension.key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else getattr(value, part, None)
        texts = [text for text in dimension.choices if _is_same_value(text, value)]
        params[dimension.key] = texts[0] if texts else str(value)
    return params


def _is_same_value(text: str, value: Any) -> bool:
    try:
        return float(text) == float(value)
    except (TypeError, ValueError):
        return text == str(value)


def _replace_evaluation(settings: PipelineSettings, evaluation: Any) -> PipelineSettings:
    return replace(settings, stages=replace(settings.stages, evaluate=evaluation))


def _measure_start_model(
    plan: SweepPlan,
    base: PipelineSettings,
    build_job: Callable[..., dict[str, Any]],
    worker: TrialWorker,
) -> StartModelResult | None:
    """Play the episodes of the choice with the model that all trials start from; None if there is none."""
    path = base.model.path
    if path is None or any(dimension.key.startswith("model.") for dimension in plan.dimensions):
        return None
    folder, _ = _play_episodes(
        base, {START_MODEL: path}, build_job, worker, _START_MODEL_NUMBER, "start model"
    )
    if folder is None:
        return None
    episodes = _read_outcomes(folder, START_MODEL, plan.metric)
    return StartModelResult(path, sum(episodes.values()) / len(episodes)) if episodes else None


def _read_outcomes(folder: Path, name: str, metric: str) -> dict[Any, float]:
    """Read the outcome of each episode that a model played and whose outcome is known."""
    outcomes = ((e.key, getattr(e, metric)) for e in read_evaluation(folder, name).episodes)
    return {key: float(value) for key, value in outcomes if value is not None}


def _play_episodes(
    settings: PipelineSettings,
    models: Mapping[str, str],
    build_job: Callable[..., dict[str, Any]],
    worker: TrialWorker,
    number: int,
    label: str,
) -> tuple[Path | None, str]:
    """Return the folder of the evaluation of these models, or None with a reason if it failed."""
    skip = [name for name in list_stage_names() if name not in NEEDED_STAGES]
    name = f"{settings.name} · {label}"
    job = build_job(number, 0, settings, name=name, models=dict(models), skip=skip)
    try:
        fields = worker.run_job(job, lambda value: True, lambda *_: None)
    except WorkerFailed as error:
        fields = {"why": str(error)}
    except BaseException:
        worker.request_stop()
        raise
    if "folder" not in fields:
        logger.warning("%s: no episodes were played: %s", label, fields["why"])
        return None, str(fields["why"])
    return Path(fields["folder"]), ""


def _add_fresh_results(
    choice: SweepChoice,
    winner: RankedConfiguration,
    finalists: Sequence[RankedConfiguration],
    folder: Path,
    models: Mapping[str, str],
    plan: SweepPlan,
    seed: int,
    draw: int,
) -> SweepChoice:
    """Add the results of the evaluation in `folder` to the choice."""
    episodes = {name: _read_outcomes(folder, name, plan.metric) for name in models}
    fresh, comparisons = compare_finalists(
        winner.number, finalists, episodes, metric=plan.metric, seed=seed
    )
    start = choice.start
    if start is not None and episodes[START_MODEL]:
        winner_episodes = [
            episodes[format_trial_name(winner.number, model_seed)] for model_seed in winner.models
        ]
        start = compare_with_start_model(start, winner_episodes, episodes[START_MODEL], seed=seed)
    return replace(choice, draw=draw, fresh=fresh, comparisons=comparisons, start=start)
