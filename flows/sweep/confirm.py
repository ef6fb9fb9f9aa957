"""The choice of a sweep's winner: fresh episodes are played by the finalists in a worker process, and compared."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flows.post_training import say
from flows.sweep.plan import EVALUATED, SweepPlan
from flows.sweep.pool import Worker
from flows.sweep.record import SweepRecord, trial_name
from flows.sweep.winner import METHOD, Ranked, SweepChoice, compare_on_fresh, finalists_of, rank
from rl_core.errors import WorkerFailed
from rl_core.storage.faults import fault
from rl_core.storage.single_files import write_json_atomic
from tasks.config import PipelineSettings, load
from tasks.stage_registry import names
from tasks.stages.evaluate import read_evaluation

__all__ = ["choose"]

logger = logging.getLogger(__name__)

CHOICE = "choice.json"
NEEDED = ("prepare_data", "evaluate")
_CONFIRM = 9999  # folder of the run that plays the fresh episodes, among those of the trials


def choose(
    plan: SweepPlan,
    base: PipelineSettings,
    record: SweepRecord,
    job: Callable[..., dict[str, Any]],
    player: Worker,
) -> tuple[SweepChoice | None, PipelineSettings | None]:
    """The winner with its figures, and the settings of its run at the gate; (None, None) without a finished trial.

    Args:
        job: makes a job of (number, seed, settings, ...). player: the process that plays them.
    """
    ranked = rank(record.outcomes, plan)
    if not ranked:
        return None, None
    winner = ranked[0]
    finalists = finalists_of(ranked, plan, _own_settings(plan))
    equal = sum(one.interval.rate == winner.interval.rate for one in ranked) - 1
    choice = SweepChoice(winner.number, winner.params, plan.metric, winner.interval.rate, METHOD, equal=equal)
    settings = plan.settings_of(winner.params, winner.best_seed)
    if plan.metric not in EVALUATED:
        choice = dataclasses.replace(choice, why=f"{plan.metric} is no outcome of episodes")
    elif (evaluation := base.stages.evaluate) is not None:
        say(f"{len(finalists)} configurations play fresh held-out episodes")
        fresh = dataclasses.replace(evaluation, episodes_draw=evaluation.episodes_draw + 1)
        models = {trial_name(one.number, seed): folder for one in finalists for seed, folder in one.models.items()}
        folder, why = _play(_with_evaluation(base, fresh), models, job, player)
        if folder is None:
            choice = dataclasses.replace(choice, why=f"no fresh episodes ({why})")
        else:
            choice = _measured(choice, winner, finalists, folder, models, plan, base.seed, fresh.episodes_draw)
            own = settings.stages.evaluate
            assert own is not None
            settings = _with_evaluation(settings, dataclasses.replace(own, episodes_draw=fresh.episodes_draw))
    write_json_atomic(record.home / CHOICE, choice.to_json())
    fault("sweep.chosen")
    return choice, settings


def _own_settings(plan: SweepPlan) -> dict[str, str]:
    """The values that the configuration itself has for what varies, as far as a trial has the same text."""
    base = load(plan.config, plan.overrides)
    found = {}
    for dimension in plan.dimensions:
        value: Any = base
        for part in dimension.key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else getattr(value, part, None)
        texts = [text for text in dimension.choices if _same(text, value)]
        found[dimension.key] = texts[0] if texts else str(value)
    return found


def _same(text: str, value: Any) -> bool:
    try:
        return float(text) == float(value)
    except (TypeError, ValueError):
        return text == str(value)


def _with_evaluation(settings: PipelineSettings, evaluation: Any) -> PipelineSettings:
    return dataclasses.replace(settings, stages=dataclasses.replace(settings.stages, evaluate=evaluation))


def _play(
    settings: PipelineSettings,
    models: Mapping[str, str],
    job: Callable[..., dict[str, Any]],
    player: Worker,
) -> tuple[Path | None, str]:
    """Folder of the evaluation of these models; None with a reason where fresh episodes cannot be played."""
    skip = [name for name in names() if name not in NEEDED]
    name = f"{settings.name} · finalists on fresh episodes"
    work = job(_CONFIRM, 0, settings, name=name, models=dict(models), skip=skip)
    try:
        fields = player.run(work, lambda value: True, lambda *_: None)
    except WorkerFailed as error:
        fields = {"why": str(error)}
    except BaseException:
        player.ask_to_stop()
        raise
    finally:
        player.close()
    if "folder" not in fields:
        logger.warning("the sweep's finalists played no fresh episodes: %s", fields["why"])
        return None, str(fields["why"])
    return Path(fields["folder"]), ""


def _measured(
    choice: SweepChoice, winner: Ranked, finalists: Sequence[Ranked], folder: Path, models: Mapping[str, str],
    plan: SweepPlan, seed: int, draw: int,
) -> SweepChoice:  # fmt: skip
    """The choice with what the evaluation in `folder` says."""
    played = {name: read_evaluation(folder, name) for name in models}
    episodes = {
        name: {episode.key: float(getattr(episode, plan.metric)) for episode in found.episodes}
        for name, found in played.items()
    }
    fresh, comparisons = compare_on_fresh(winner.number, finalists, episodes, metric=plan.metric, seed=seed)
    return dataclasses.replace(choice, draw=draw, fresh=fresh, comparisons=comparisons)
