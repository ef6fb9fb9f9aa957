"""Evidence for the reviewer of a promotion: a page of Markdown, and a report with episodes side by side.

The Markdown is shown where people look at runs (the Prefect artifact, the description and an artifact of the MLflow
run), so its curves are drawn with characters; report.html contains pictures.
"""

from __future__ import annotations

import dataclasses
import html
import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rl_core.analysis import analyze, read_trajectories
from rl_core.errors import DataError
from rl_core.evaluation import Evaluation, PairedResult, compare
from rl_core.settings import AnalysisSettings
from rl_core.storage.atomic_files import write_text_atomic
from rl_core.types import Trajectory, Turn
from tasks.config.settings import PromotionSettings
from tasks.lifecycle.promotion import GateAttempt
from tasks.pipeline.stage_result import StageResult
from tasks.stage_registry import list_training_stages
from tasks.stages.evaluate import read_evaluation, resolve_trajectories_path
from tasks.stages.promotion_gate import compute_attempt_level
from tasks.tracking import read_metrics

MAX_SHOWN_REGRESSIONS = 5  # shown in full
MAX_CELL_LENGTH = 300  # characters of an action or observation
BARS = "▁▂▃▄▅▆▇█"
MAX_CURVE_POINTS = 24  # of a curve

# Metrics that show how training went; each stage shows those that it logged.
CURVE_METRICS = (
    "train/success_rate",
    "reward/mean",
    "eval/success_rate",
    "train/loss",
    "eval/loss",
    "eval/accuracy",
    "policy/update_kl",
    "policy/entropy",
)


@dataclasses.dataclass(frozen=True)
class ComparedModel:
    """One of the two compared models: its label and the location of its episodes."""

    label: str
    evaluation_folder: Path  # of the evaluation
    name: str  # of the model in the evaluation

    @property
    def evaluation(self) -> Evaluation:
        """Its sampled episodes in numbers."""
        return read_evaluation(self.evaluation_folder, self.name)

    @property
    def trajectories(self) -> Path:
        """Its sampled episodes in full."""
        return resolve_trajectories_path(self.evaluation_folder, self.name)


def write_review(
    path: Path,
    challenger: ComparedModel,
    champion: ComparedModel | None,
    results: Mapping[str, StageResult],
    settings: PromotionSettings,
    *,
    title: str,
    verdict: str,
    seed: int,
    attempts: Sequence[GateAttempt] = (),
    start: tuple[ComparedModel, ComparedModel] | None = None,
) -> str:
    """Write the page and return its text.

    Args:
        start: the challenger and the model that its training started from, on the same episodes.
        results: the stages so far, for curves and cost.
        attempts: at the gate, on these episodes; this one is the last.
    """
    new = challenger.evaluation
    parts = [f"## {title}", verdict]
    if champion is None:
        if new.success_rate is None:
            heading, case_name = "### Lowest rewards", "episodes, the lowest reward first"
            by_reward = sorted(new.episodes, key=lambda episode: (episode.reward, episode.key))
            cases = [episode.key for episode in by_reward]
        else:
            heading, case_name = "### Failures", "episodes that failed"
            cases = [e.key for e in new.episodes if e.success is not None and e.success < 1]
        parts += [
            f"There is no champion yet. {challenger.label} on {len(new.episodes)} held-out episodes:",
            _format_success_table(new),
            heading,
            *_format_cases([challenger], cases, case_name),
        ]
    else:
        old = champion.evaluation
        regressions = find_regressions(new, old)
        parts += [
            "### Paired comparison",
            _format_paired_table(challenger, champion, new, old, settings, seed),
            _format_attempts_table(attempts, settings),
            "### Worst regressions",
            *_format_cases([champion, challenger], regressions, "episodes that got worse"),
        ]
    if start is not None:
        trained, base = start
        table = _format_paired_table(
            trained, base, trained.evaluation, base.evaluation, settings, seed
        )
        parts += ["### Compared with the start model", table]
    parts += ["### Training", _format_curves(results), "### Cost", _format_cost(results)]
    text = "\n\n".join(part for part in parts if part) + "\n"
    write_text_atomic(path, text)
    return text


def write_report(
    folder: Path,
    challenger: ComparedModel,
    champion: ComparedModel | None,
    results: Mapping[str, StageResult],
    settings: AnalysisSettings,
    title: str,
    **drawing: Any,
) -> Sequence[Path]:
    """Write the analysis of the two models on the same episodes and return its files, report.html first.

    Args:
        drawing: as `rl_core.analysis.analyze`.
    """
    sides = [champion, challenger] if champion else [challenger]
    models = {side.label.replace(" ", "_"): side.trajectories for side in sides}
    settings = dataclasses.replace(
        settings, side_by_side=max(settings.side_by_side, 2 * MAX_SHOWN_REGRESSIONS)
    )
    training = {
        name: result.path / "metrics.jsonl"
        for name, result in results.items()
        if _is_training_result(result)
    }
    return analyze(models, folder, settings, training=training, title=title, **drawing).files


def find_regressions(new: Evaluation, old: Evaluation) -> list[tuple[str, int]]:
    """List (level, seed) of the episodes on which the new model does worse, worst first by success, then reward."""
    before = {episode.key: episode for episode in old.episodes}
    changed = [
        (
            _subtract_successes(episode.success, before[episode.key].success),
            episode.reward - before[episode.key].reward,
            episode.key,
        )
        for episode in new.episodes
        if episode.key in before
    ]
    return [
        key
        for success, reward, key in sorted(changed)
        if success < 0 or (success == 0 and reward < 0)
    ]


def _subtract_successes(new: float | None, old: float | None) -> float:
    """Return the difference; 0 where success is unknown, so that rewards decide."""
    return 0.0 if new is None or old is None else new - old


def _format_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def _format_percent(values: Sequence[float]) -> str:
    rate, low, high = values[:3]
    return f"{rate:.1%} [{low:.1%}, {high:.1%}]"


def _format_success_table(new: Evaluation) -> str:
    if new.total is None:
        return f"Success is unknown: the environment has no verifier. Mean reward: {new.reward_mean:.4g}."
    rows = [("all", _format_percent(new.total), str(len(new.episodes)))]
    rows += [
        (_escape_cell(name), _format_percent(rate), str(rate.n))
        for name, rate in [*new.by_environment.items(), *new.by_level.items()]
    ]
    return _format_table(["level", "success (95% interval)", "episodes"], rows)


def _format_paired_table(
    challenger: ComparedModel,
    champion: ComparedModel,
    new: Evaluation,
    old: Evaluation,
    settings: PromotionSettings,
    seed: int,
) -> str:
    """Format a row for all episodes, and one per environment of a mixture and per level: rates, paired difference."""

    def build_row(name: str, level: str | None, by: str = "level") -> list[str] | None:
        new_level, old_level = _select_level(new, level, by), _select_level(old, level, by)
        try:
            paired = compare(
                new_level,
                old_level,
                bootstrap_samples=settings.bootstrap_samples,
                seed=seed,
                confidence=settings.confidence,
            )
        except DataError:  # only one of them has this level
            return None
        return [
            name,
            _format_success_rate(new_level),
            _format_success_rate(old_level),
            _format_success_gain(paired),
            _format_reward_gain(paired),
            str(paired.episodes),
            f"{paired.wins} / {paired.losses}",
        ]

    rows = [build_row("**all**", None)]
    rows += [build_row(_escape_cell(name), name, "environment") for name in new.environments]
    levels = dict.fromkeys(episode.level for episode in new.episodes)
    rows += [build_row(_escape_cell(level), level) for level in levels]
    head = [
        "level",
        challenger.label,
        champion.label,
        f"difference ({settings.confidence:.0%} paired interval)",
        "reward",
        "episodes",
        "better / worse",
    ]
    return _format_table(head, [row for row in rows if row])


def _format_attempts_table(attempts: Sequence[GateAttempt], settings: PromotionSettings) -> str:
    """Format the attempts on these episodes with their p-values and levels, and the remaining alpha."""
    if not attempts:
        return ""
    rows = [
        [
            str(a.number or ""),
            f"{a.version}",
            f"{a.champion}",
            _format_number(a.p_value),
            _format_number(a.level),
            a.decision,
        ]
        for a in attempts
    ]
    level = compute_attempt_level(settings, attempts[-1].number or 1)
    mode = f"`repeated_attempts: {settings.repeated_attempts}`"
    return "\n\n".join(
        [
            "### Attempts on these episodes",
            _format_table(["attempt", "version", "champion", "p", "tested at", "decision"], rows),
            f"{mode}: of alpha {settings.alpha:g}, {level.level:.2g} was used for this attempt and {level.left:.2g} is "
            "left for later ones on these episodes.",
        ]
    )


def _format_number(value: float | None) -> str:
    return "" if value is None else f"{value:.2g}"


def _select_level(evaluation: Evaluation, name: str | None, by: str = "level") -> Evaluation:
    """Return the episodes of a level or an environment; None = all."""
    episodes = [
        episode for episode in evaluation.episodes if name is None or getattr(episode, by) == name
    ]
    return dataclasses.replace(evaluation, episodes=episodes)


def _format_success_rate(evaluation: Evaluation) -> str:
    successes = [e.success for e in evaluation.episodes if e.success is not None]
    return f"{sum(successes) / len(successes):.1%}" if successes else ""


def _format_success_gain(paired: PairedResult) -> str:
    gain = paired.success
    if gain is None:
        return "unknown"
    return f"{100 * gain.difference:+.1f} points [{100 * gain.low:+.1f}, {100 * gain.high:+.1f}]"


def _format_reward_gain(paired: PairedResult) -> str:
    return f"{paired.reward.difference:+.3f} [{paired.reward.low:+.3f}, {paired.reward.high:+.3f}]"


def _format_cases(
    models: Sequence[ComparedModel], all_keys: Sequence[tuple[str, int]], case_name: str
) -> Iterable[str]:
    """Yield the first cases turn by turn: each model's sampled trajectory of the episode in a column."""
    keys = all_keys[:MAX_SHOWN_REGRESSIONS]
    if not keys:
        yield f"No {case_name}."
        return
    yield f"{len(keys)} of {len(all_keys)} {case_name}."
    played = [
        _select_trajectories(side.trajectories, set(keys), prefer_failure=side is models[-1])
        for side in models
    ]
    for key in keys:
        columns = [trajectories.get(key) for trajectories in played]
        example = next((trajectory for trajectory in columns if trajectory), None)
        if example is None:
            continue
        answer = f" (right answer: {_escape_cell(example.target)})" if example.target else ""
        heading = _escape_cell(f"{key[0]} {example.kind}")
        yield f"**{heading} \\#{key[1]}**: {_escape_cell(example.prompt)}{answer}"
        head = [
            "turn",
            *(
                _format_heading(side, trajectory)
                for side, trajectory in zip(models, columns, strict=True)
            ),
        ]
        num_turns = max(len(trajectory.turns) if trajectory else 0 for trajectory in columns)
        rows = [
            [
                str(n + 1),
                *(_format_turn(t.turns[n]) if t and n < len(t.turns) else "" for t in columns),
            ]
            for n in range(num_turns)
        ]
        yield _format_table(head, rows)


def _select_trajectories(
    path: Path, keys: set[tuple[str, int]], *, prefer_failure: bool
) -> dict[tuple[str, int], Trajectory]:
    """Select one trajectory per episode: the challenger's preferably failed, the champion's successful."""
    selected: dict[tuple[str, int], Trajectory] = {}
    for trajectory in read_trajectories(path):
        key = (trajectory.level, trajectory.seed)
        if key in keys and (
            key not in selected or selected[key].success is prefer_failure is not trajectory.success
        ):
            selected[key] = trajectory
    return selected


def _format_heading(side: ComparedModel, trajectory: Trajectory | None) -> str:
    if trajectory is None:
        return side.label
    outcomes = {True: "right, ", False: "wrong, ", None: ""}
    return f"{side.label}: {outcomes[trajectory.success]}reward {trajectory.reward:.3g}"


def _format_turn(turn: Turn) -> str:
    text = _escape_cell(turn.action)
    if turn.observation is not None:
        text += f" → {_escape_cell(turn.observation)}"
    return f"⚠ {text}" if turn.is_error else text


def _escape_cell(text: str) -> str:
    """Escape text of a model or a file to one harmless cell without line breaks or markup."""
    line = " ⏎ ".join(part.strip() for part in text.strip().splitlines() if part.strip())
    line = line if len(line) <= MAX_CELL_LENGTH else line[: MAX_CELL_LENGTH - 1] + "…"
    line = html.escape(line, quote=False)
    return "".join(f"\\{char}" if char in r"\`*_{}[]()#|!~$" else char for char in line)


def _is_training_result(result: StageResult) -> bool:
    return result.stage in list_training_stages()


def _format_curves(results: Mapping[str, StageResult]) -> str:
    rows = []
    for name, result in results.items():
        if not _is_training_result(result):
            continue
        logged = read_metrics(result.path)
        for metric in CURVE_METRICS:
            values = [values[metric] for _, values in logged if metric in values]
            if len(values) > 1:
                rows.append(
                    [
                        name.replace("_", " "),
                        f"`{metric}`",
                        draw_sparkline(values),
                        f"{values[0]:.4g} → {values[-1]:.4g}",
                        str(len(values)),
                    ]
                )
    return (
        _format_table(["stage", "metric", "curve", "first → last", "points"], rows) if rows else ""
    )


def draw_sparkline(values: Sequence[float], points: int = MAX_CURVE_POINTS) -> str:
    """Draw a curve as a line of bars, from the lowest to the highest value; skip values that are not finite."""
    numbers = [value for value in values if abs(value) < float("inf")]
    if not numbers:
        return ""
    count = min(points, len(numbers))
    edges = [len(numbers) * n // count for n in range(count + 1)]
    means = [sum(numbers[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((mean - low) * scale)] for mean in means)


def _format_cost(results: Mapping[str, StageResult]) -> str:
    rows = []
    total = 0.0
    for name, result in results.items():
        seconds = float(result.summary.get("seconds", result.seconds))
        total += seconds
        rate = result.summary.get("tokens_per_second")
        origin = "taken from an earlier run" if result.cached else ""
        rows.append(
            [name.replace("_", " "), f"{seconds:,.1f}", f"{rate:,.0f}" if rate else "", origin]
        )
    rows.append(["**all**", f"{total:,.1f}", "", f"{total / 3600:.2f} hours of this machine"])
    return _format_table(["stage", "seconds", "tokens/s", ""], rows)
