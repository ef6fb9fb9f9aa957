"""Decision of the promotion gate: which held-out episodes are played, and whether the evidence suffices.

The evidence is an exact paired test and a bootstrap interval, at the significance level left for this attempt.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

from rl_core.analysis.significance_tests import (
    PairedTest,
    compute_remaining_alpha,
    compute_spent_alpha,
    estimate_episodes_needed,
    run_gain_test,
)
from rl_core.analysis.statistics import Difference, bootstrap_paired_difference
from rl_core.errors import DataError, SettingsError, suggest_name
from rl_core.evaluation import Evaluation, compare, compute_paired_differences
from rl_core.evaluators.results import SuiteMetrics, TaskMetric
from rl_core.settings import EvaluationSettings
from tasks.config import PromotionSettings, resolve_evaluation_settings
from tasks.lifecycle.promotion import read_attempts, sketch_episodes
from tasks.pipeline.pipeline_run import PipelineRun
from tasks.pipeline.stage_result import StageResult
from tasks.stages.evaluate import list_reported_episodes
from tasks.stages.loading import build_pipeline_environment

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SignificanceLevel:
    """Share of `alpha` that an attempt is tested at."""

    attempt: int  # on the same episodes, from 1
    level: float
    left: float  # for later attempts
    alpha: float

    def __str__(self) -> str:
        return f"attempt {self.attempt} on these episodes, {self.left:.2g} of alpha {self.alpha:g} left"


def compute_attempt_level(settings: PromotionSettings, attempt: int = 1) -> SignificanceLevel:
    """Compute the level of an attempt. With `repeated_attempts: off` each is tested as if it were the first."""
    counted = 1 if settings.repeated_attempts == "off" else attempt
    alpha = settings.alpha
    return SignificanceLevel(
        attempt, compute_spent_alpha(alpha, counted), compute_remaining_alpha(alpha, counted), alpha
    )


def explain_too_few_episodes(episodes: int, settings: PromotionSettings) -> str:
    """Return a sentence if there are too few episodes to decide; "" if there are enough."""
    if episodes >= settings.min_episodes:
        return ""
    return (
        f"{episodes} held-out episodes are too few to promote, {settings.min_episodes} are needed: raise "
        "evaluate.episodes (or lower promote.min_episodes)"
    )


def decide_promotion(
    challenger: Evaluation,
    champion: Evaluation | None,
    settings: PromotionSettings,
    champion_version: int | None,
    seed: int,
    attempt: int = 1,
) -> tuple[bool, str, dict[str, float]]:
    """Decide whether to promote: return (promoted, reason, numbers).

    Without a champion the challenger needs `min_success`. With one, two conditions must hold: the lower bound of the
    paired bootstrap interval of (challenger - champion) is above `min_gain`, and the exact test of the same hypothesis
    (`run_gain_test`, which says for which differences it is exact) has a p-value of at most the attempt's level. Both
    need `min_episodes`. With `max_environment_loss`, every environment of a mixture must meet the same two conditions
    with minus that loss instead of `min_gain` (`_check_environments`).

    Args:
        attempt: number of this model's attempts on these episodes, including this one.
    """
    if champion is None:
        few = explain_too_few_episodes(len(challenger.episodes), settings)
        rate = challenger.success_rate
        if rate is None:
            return _decide_first_by_reward(challenger, settings, few)
        enough = rate >= settings.min_success
        relation = "at least" if enough else "below"
        reason = f"no champion yet; success {rate:.1%} is {relation} {settings.min_success:.0%}"
        return enough and not few, f"{reason}, but {few}" if few else reason, {"success_rate": rate}
    paired = compare(
        challenger,
        champion,
        bootstrap_samples=settings.bootstrap_samples,
        seed=seed,
        confidence=settings.confidence,
    )
    gain = paired.success if settings.metric == "success" else paired.reward
    if gain is None:
        text = (
            "success is unknown: the environment has no verifier; metric: reward compares rewards"
        )
        return False, text, {}
    level = compute_attempt_level(settings, attempt)
    differences = compute_paired_differences(challenger, champion, settings.metric)
    test = run_gain_test(
        differences,
        margin=settings.min_gain,
        bounded=settings.metric == "success",
        level=level.level,
        seed=seed,
    )
    # a comparison on too few episodes does not count as an attempt
    uncounted = explain_too_few_episodes(test.episodes, settings)
    few = uncounted or _explain_too_few_differences(test, settings)
    above, passed = gain.low > settings.min_gain, test.p_value <= level.level
    text = f"gain over champion version {champion_version} "
    text += (
        f"{_describe_gain(gain, paired.episodes, settings)}; {test.name} p = {test.p_value:.3g}, "
    )
    text += f"{'at most' if passed else 'above'} {level.level:.2g} "
    text += f"({'not counted as an attempt' if uncounted else level})"
    environments = _check_environments(challenger, champion, settings, level.level, seed)
    promoted = above and passed and not few and environments.passed
    if environments.text:
        text += f"; {environments.text}"
    if few:
        text += f"; {few}"
    elif not (above and passed) and (
        needed := estimate_episodes_needed(differences, settings.min_gain, level.level)
    ):
        text += f"; detecting a gain of this size takes about {needed} episodes"
    numbers = {
        **_name_success_rates(challenger, champion),
        "gain": gain.difference,
        "gain_low": gain.low,
        "gain_high": gain.high,
        "p_value": test.p_value,
        "alpha": level.level,
        "alpha_left": level.left,
        "attempt": 0.0 if uncounted else float(attempt),
        "episodes": float(test.episodes),
        "discordant": float(test.discordant),
        **environments.numbers,
    }
    return promoted, text, numbers


@dataclass(frozen=True, slots=True)
class MetricCheck:
    """Result of the conditions on metrics of suites."""

    passed: bool
    text: str  # what failed, else what was checked
    numbers: dict[str, float]


@dataclass(frozen=True, slots=True)
class EnvironmentCheck:
    """Result of the check that no environment of a mixture got worse."""

    passed: bool = True
    text: str = ""
    numbers: dict[str, float] = dataclasses.field(default_factory=dict)


def refuse_unknown_metrics(settings: PromotionSettings, challenger: SuiteMetrics) -> None:
    """Refuse conditions on metrics that the challenger's suites did not give. Raises: SettingsError."""
    for name in settings.metrics:
        if challenger.find_metric(name) is None:
            raise SettingsError(
                f"stages.promote.metrics: no suite gave a metric '{name}'; "
                f"{suggest_name(name, challenger.metrics)}"
            )


def check_suite_metrics(
    challenger: SuiteMetrics,
    champion: SuiteMetrics | None,
    settings: PromotionSettings,
    level: float,
    seed: int,
) -> MetricCheck:
    """Check the conditions of `settings.metrics`; all must hold.

    `min` and `max` are compared with the challenger's value. `max_loss` is checked against the champion as for
    environments (`_check_environments`): the lower bound of the paired bootstrap interval of the gain must be above
    minus the loss, and the exact test of the same hypothesis at or below `level`. A metric of a whole corpus, which has
    no number for each sample, is checked by the interval of two independent values instead, from the evaluator's
    standard errors. A gain is an increase, or for a metric of which less is better a decrease.

    Args:
        champion: None = there is none, and only `min` and `max` are checked.
        level: of the attempt (`compute_attempt_level`).
    Raises: SettingsError for a metric that the challenger's suites did not give.
    """
    refuse_unknown_metrics(settings, challenger)
    failed: list[str] = []
    held: list[str] = []
    numbers: dict[str, float] = {}
    for name, condition in settings.metrics.items():
        metric = challenger.metrics[name]
        if metric.value is None:
            failed.append(f"{name} is not a number")
            continue
        numbers[f"metrics/{name}"] = metric.value
        if condition.min is not None and metric.value < condition.min:
            failed.append(f"{name} {metric.format_value()} is below {condition.min:g}")
        elif condition.max is not None and metric.value > condition.max:
            failed.append(f"{name} {metric.format_value()} is above {condition.max:g}")
        elif condition.max_loss is not None and champion is not None:
            text, gain = _compare_metric(name, challenger, champion, settings, level, seed)
            numbers |= {f"metrics/{name}/{key}": value for key, value in gain.items()}
            (failed if text.startswith("not shown") else held).append(f"{name} {text}")
        else:
            held.append(f"{name} {metric.format_value()}")
    return MetricCheck(not failed, "; ".join(failed or held), numbers)


def _compare_metric(
    name: str,
    challenger: SuiteMetrics,
    champion: SuiteMetrics,
    settings: PromotionSettings,
    level: float,
    seed: int,
) -> tuple[str, dict[str, float]]:
    """Compare a metric with the champion's: a text that begins with "not shown" if the loss may be too large, and the
    gain with its interval.
    """
    margin = settings.metrics[name].max_loss or 0.0
    new, old = challenger.metrics[name], champion.find_metric(name)
    not_shown = f"not shown to have lost less than {margin:g}"
    if old is None or old.value is None or new.value is None:
        return f"{not_shown}: the champion has no such number", {}
    sign = 1.0 if new.higher_is_better else -1.0
    ours, theirs = challenger.read_samples(name), champion.read_samples(name)
    shared = [key for key in ours if key in theirs]
    if shared:
        differences = [sign * (ours[key] - theirs[key]) for key in shared]
        gain = bootstrap_paired_difference(
            differences,
            [0.0] * len(differences),
            samples=settings.bootstrap_samples,
            seed=seed,
            confidence=settings.confidence,
        )
        values = [*ours.values(), *theirs.values()]
        is_bounded = min(values) >= 0 and max(values) <= 1
        test = run_gain_test(
            differences, margin=-margin, bounded=is_bounded, level=level, seed=seed
        )
        passed = gain.low > -margin and test.p_value <= level
        evidence = f"on {len(shared)} samples, {test.name} p = {test.p_value:.3g}"
    elif new.stderr is None or old.stderr is None:
        return f"{not_shown}: it has neither numbers of samples nor a standard error", {}
    else:
        gain = _estimate_independent_gain(sign, new, old, settings.confidence)
        passed, evidence = gain.low > -margin, "by the standard errors of both"
    interval = f"{gain.difference:+.4g} [{gain.low:+.4g}, {gain.high:+.4g}] {evidence}"
    numbers = {"gain": gain.difference, "gain_low": gain.low, "gain_high": gain.high}
    return (interval if passed else f"{not_shown}: {interval}"), numbers


def _estimate_independent_gain(
    sign: float, new: TaskMetric, old: TaskMetric, confidence: float
) -> Difference:
    """Estimate the gain of a metric with the normal interval of two independent values."""
    assert new.value is not None and old.value is not None
    assert new.stderr is not None and old.stderr is not None
    difference = sign * (new.value - old.value)
    half = NormalDist().inv_cdf((1 + confidence) / 2) * math.hypot(new.stderr, old.stderr)
    return Difference(difference, difference - half, difference + half)


def _check_environments(
    challenger: Evaluation,
    champion: Evaluation,
    settings: PromotionSettings,
    level: float,
    seed: int,
) -> EnvironmentCheck:
    """Check by paired interval and test that every environment lost less than `max_environment_loss`.

    All environments must pass, so each is tested at the attempt's full level: a model that lost more in any of them is
    promoted with at most that probability (intersection-union test; Berger 1982). More environments make a promotion
    rarer, never a wrong one likelier, so their number needs no correction.
    """
    margin, names = settings.max_environment_loss, challenger.environments
    if not names or champion.environments == ():
        needed = margin is not None and bool(names or champion.environments)
        text = "the champion was evaluated on other environments" if needed else ""
        return EnvironmentCheck(not needed, text)
    worse: list[str] = []
    numbers: dict[str, float] = {}
    for name in names:
        new, old = (
            dataclasses.replace(evaluation, episodes=evaluation.select_environment(name))
            for evaluation in (challenger, champion)
        )
        try:
            differences = compute_paired_differences(new, old, settings.metric)
        except DataError:
            worse.append(f"{name} has no episode that both played")
            continue
        gain = bootstrap_paired_difference(
            differences,
            [0.0] * len(differences),
            samples=settings.bootstrap_samples,
            seed=seed,
            confidence=settings.confidence,
        )
        numbers |= {
            f"gain_by_environment/{name}": gain.difference,
            f"gain_low_by_environment/{name}": gain.low,
        }
        if margin is None:
            continue
        bounded = settings.metric == "success"
        test = run_gain_test(differences, margin=-margin, bounded=bounded, level=level, seed=seed)
        numbers[f"p_value_by_environment/{name}"] = test.p_value
        if gain.low <= -margin or test.p_value > level:
            amount = _format_points if bounded else _format_reward
            worse.append(
                f"{name} {amount(gain.difference)} [{amount(gain.low)}, {amount(gain.high)}] on {len(differences)} "
                f"episodes, {test.name} p = {test.p_value:.3g}"
            )
    for name in champion.environments:
        if name not in names:
            worse.append(f"{name} was not evaluated")
    if margin is None:
        return EnvironmentCheck(numbers=numbers)
    if not worse:
        text = f"each of {len(names)} environments lost less than {margin:g}, tested at {level:.2g} each"
        return EnvironmentCheck(True, text, numbers)
    text = f"not shown to have lost less than {margin:g}, at {level:.2g} each: {'; '.join(worse)}"
    return EnvironmentCheck(False, text, numbers)


def _decide_first_by_reward(
    challenger: Evaluation, settings: PromotionSettings, few: str
) -> tuple[bool, str, dict[str, float]]:
    """Decide on a first champion whose success is unknown; as `decide_promotion`."""
    text = "no champion yet; success is unknown: the environment has no verifier"
    if settings.metric == "success":
        return False, f"{text} (metric: reward compares rewards)", {}
    if settings.min_success > 0:
        return False, f"{text}, so min_success cannot be met; set it to 0", {}
    reason = f"{text}, and reward {challenger.reward_mean:.4g} is the first"
    numbers = {"reward_mean": challenger.reward_mean}
    return not few, f"{reason}, but {few}" if few else reason, numbers


def _name_success_rates(challenger: Evaluation, champion: Evaluation) -> dict[str, float]:
    """Return the known success rates by the names of the gate's numbers."""
    rates = {
        "success_rate": challenger.success_rate,
        "champion_success_rate": champion.success_rate,
    }
    return {name: rate for name, rate in rates.items() if rate is not None}


def _describe_gain(gain: Difference, episodes: int, settings: PromotionSettings) -> str:
    """Describe the gain with its interval and the required minimum."""
    if settings.metric == "success":
        format_amount, unit = _format_points, " points"
    else:
        format_amount, unit = _format_reward, " in reward"
    interval = f"[{format_amount(gain.low)}, {format_amount(gain.high)}]"
    above = "above" if gain.low > settings.min_gain else "not above"
    return (
        f"{format_amount(gain.difference)}{unit} {interval} on {episodes} shared episodes; the "
        f"lower bound is {above} {format_amount(settings.min_gain)}"
    )


def _explain_too_few_differences(test: PairedTest, settings: PromotionSettings) -> str:
    if settings.min_gain < 0 or test.discordant >= settings.min_discordant:
        return ""
    text = f"the outcomes differ on {test.discordant} episodes, too few: {settings.min_discordant} are needed"
    if test.discordant:
        text += f", at this rate on about {round(settings.min_discordant * test.episodes / test.discordant)} episodes"
    return text


def _format_points(value: float) -> str:
    return f"{100 * value:+.1f}"


def _format_reward(value: float) -> str:
    return f"{value:+.3f}"


@dataclass(frozen=True)
class EpisodeDraw:
    """The draw of held-out episodes that challenger and champion play."""

    settings: EvaluationSettings
    # counted from the draw of the pipeline's evaluation (0), which the challenger has played already
    number: int = 0

    @property
    def label(self) -> str:
        """Suffix of the name of the evaluation's run."""
        return f" and challenger, draw {self.settings.episodes_draw}" if self.number else ""


def choose_episode_draw(
    pipeline_run: PipelineRun,
    settings: PromotionSettings,
    comparison: str,
    evaluation: Evaluation,
    data: StageResult | None,
) -> EpisodeDraw:
    """Choose the draw of a comparison: with `repeated_attempts: fresh` the first one that no attempt has seen.

    A comparison of the same two models keeps its draw. If the environment has no fresh episodes left, the pipeline's
    draw is used, and the attempt is tested at what is left of `alpha` for it.

    Args:
        comparison: as `tasks.lifecycle.promotion.compute_comparison_id`.
        evaluation: the challenger's, on the pipeline's draw.
    """
    first = resolve_evaluation_settings(pipeline_run.settings)
    if settings.repeated_attempts != "fresh":
        return EpisodeDraw(first)
    attempts = read_attempts(pipeline_run.tracking, pipeline_run.registered_model)
    name = pipeline_run.settings.environment.name
    for earlier in attempts:
        if earlier.comparison == comparison:
            return _build_draw(first, earlier.draw)
    sketch = sketch_episodes(name, (episode.key for episode in evaluation.episodes))
    if not any(attempt.shares_episodes(sketch) for attempt in attempts):
        return EpisodeDraw(first)
    environment = build_pipeline_environment(
        pipeline_run.settings, Path(data.path) if data is not None else None
    )
    for number in itertools.count(1):
        draw = _build_draw(first, number)
        try:
            requests = list_reported_episodes(environment, draw.settings, pipeline_run.settings)
        except (DataError, SettingsError) as error:
            logger.warning(
                "promotion: no fresh episodes (%s); the same ones are used, at a lower level", error
            )
            return EpisodeDraw(first)
        sketch = sketch_episodes(name, ((request.level, request.seed) for request in requests))
        if not any(attempt.shares_episodes(sketch) for attempt in attempts):
            return draw
    raise AssertionError("unreachable")


def _build_draw(first: EvaluationSettings, number: int) -> EpisodeDraw:
    return EpisodeDraw(
        dataclasses.replace(first, episodes_draw=first.episodes_draw + number), number
    )
