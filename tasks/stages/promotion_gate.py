"""Decision of the promotion gate: an exact paired test and an interval, at the level that is left for this attempt."""

from __future__ import annotations

from dataclasses import dataclass

from rl_core.analysis.paired_tests import PairedTest, alpha_left, episodes_needed, gain_test, spent_alpha
from rl_core.analysis.statistics import Difference
from rl_core.evaluation import Evaluation, compare, paired_differences
from tasks.config import PromotionSettings

__all__ = ["Level", "decide", "level_of", "too_few"]


@dataclass(frozen=True, slots=True)
class Level:
    """Share of `alpha` that an attempt is tested at."""

    attempt: int  # on the same episodes, from 1
    level: float
    left: float  # for later attempts
    alpha: float

    def __str__(self) -> str:
        return f"attempt {self.attempt} on these episodes, {self.left:.2g} of alpha {self.alpha:g} left"


def level_of(settings: PromotionSettings, attempt: int = 1) -> Level:
    """Level of an attempt. With `repeated_attempts: off` each is tested as if it were the first."""
    counted = 1 if settings.repeated_attempts == "off" else attempt
    alpha = settings.alpha
    return Level(attempt, spent_alpha(alpha, counted), alpha_left(alpha, counted), alpha)


def too_few(episodes: int, settings: PromotionSettings) -> str:
    """Sentence on why there is nothing to decide on yet; "" if there are enough episodes."""
    if episodes >= settings.min_episodes:
        return ""
    return (
        f"{episodes} held-out episodes are too few to promote on, {settings.min_episodes} are needed: raise "
        "evaluate.episodes (or lower promote.min_episodes)"
    )


def decide(
    challenger: Evaluation,
    champion: Evaluation | None,
    settings: PromotionSettings,
    champion_version: int | None,
    seed: int,
    attempt: int = 1,
) -> tuple[bool, str, dict[str, float]]:
    """The gate itself: (promoted, reason, numbers).

    Without a champion the challenger needs `min_success`. With one, two things have to be so: the lower bound of the
    paired bootstrap interval of (challenger - champion) is above `min_gain`, and the exact test of the same hypothesis
    (`gain_test`) has a p-value of at most the attempt's level. Both need `min_episodes`.

    Args:
        attempt: how often this model's gate was asked on these episodes, this time included.
    """
    if champion is None:
        few = too_few(len(challenger.episodes), settings)
        rate = challenger.success_rate
        enough = rate >= settings.min_success
        reason = (
            f"no champion yet; success {rate:.1%} is {'at least' if enough else 'below'} {settings.min_success:.0%}"
        )
        return enough and not few, f"{reason}, but {few}" if few else reason, {"success_rate": rate}
    paired = compare(
        challenger,
        champion,
        bootstrap_samples=settings.bootstrap_samples,
        seed=seed,
        confidence=settings.confidence,
    )
    gain = paired.success if settings.metric == "success" else paired.reward
    level = level_of(settings, attempt)
    differences = paired_differences(challenger, champion, settings.metric)
    test = gain_test(
        differences, margin=settings.min_gain, bounded=settings.metric == "success", level=level.level, seed=seed
    )
    uncounted = too_few(test.episodes, settings)  # such a comparison claims no attempt
    few = uncounted or _too_alike(test, settings)
    above, passed = gain.low > settings.min_gain, test.p_value <= level.level
    text = f"gain over champion version {champion_version} {_told(gain, paired.episodes, settings)}; {test.name} p = "
    text += f"{test.p_value:.3g}, {'at most' if passed else 'above'} {level.level:.2g} "
    text += f"({'not counted as an attempt' if uncounted else level})"
    promoted = above and passed and not few
    if few:
        text += f"; {few}"
    elif not promoted and (needed := episodes_needed(differences, settings.min_gain, level.level)):
        text += f"; to find a gain of this size takes about {needed} episodes"
    numbers = {
        "success_rate": challenger.success_rate,
        "champion_success_rate": champion.success_rate,
        "gain": gain.difference,
        "gain_low": gain.low,
        "gain_high": gain.high,
        "p_value": test.p_value,
        "alpha": level.level,
        "alpha_left": level.left,
        "attempt": 0.0 if uncounted else float(attempt),
        "episodes": float(test.episodes),
        "discordant": float(test.discordant),
    }
    return promoted, text, numbers


def _told(gain: Difference, episodes: int, settings: PromotionSettings) -> str:
    """The gain with its interval, beside the least one."""
    amount, unit = (_points, " points") if settings.metric == "success" else (_plain, " in reward")
    above = "above" if gain.low > settings.min_gain else "not above"
    return (
        f"{amount(gain.difference)}{unit} [{amount(gain.low)}, {amount(gain.high)}] on {episodes} shared episodes; the "
        f"lower bound is {above} {amount(settings.min_gain)}"
    )


def _too_alike(test: PairedTest, settings: PromotionSettings) -> str:
    if settings.min_gain < 0 or test.discordant >= settings.min_discordant:
        return ""
    text = f"the outcomes differ on {test.discordant} episodes, too few: {settings.min_discordant} are needed"
    if test.discordant:
        text += f", at this rate on about {round(settings.min_discordant * test.episodes / test.discordant)} episodes"
    return text


def _points(value: float) -> str:
    return f"{100 * value:+.1f}"


def _plain(value: float) -> str:
    return f"{value:+.3f}"
