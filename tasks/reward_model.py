"""Stage: reward model on preference pairs, from a file or made of scored rollouts."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rl_core.analysis.statistics import wilson_interval
from rl_core.checkpoint import CheckpointStore
from rl_core.data.chat import ChatRenderer
from rl_core.data.pairs import pairs_from_groups
from rl_core.errors import DataError
from rl_core.models import causal_lm, heads
from rl_core.rollouts.collect import EpisodeRequest, collect
from rl_core.settings import RewardModelSettings
from rl_core.trainers.loop import run_loop
from rl_core.trainers.reward_model import RewardModelTrainer, longer_answer_baseline
from rl_core.types import Message
from tasks.policy_model import load_policy, make_environment
from tasks.session import Session
from tasks.sft import read_jsonl
from tasks.stage import StageContext, StageResult, run_stage

__all__ = ["reward_model"]

logger = logging.getLogger(__name__)

PAIRS_PER_GROUP = 4  # more of one prompt would mostly repeat each other
GROUPS_AT_MOST = 16  # a policy that nearly always fails, or succeeds, gives few pairs


@dataclass
class _Pairs:
    """Token ids of (chosen, rejected), split by prompt."""

    train: list[tuple[list[int], list[int]]]
    heldout: list[tuple[list[int], list[int]]]
    longer_baseline: float | None = None  # accuracy of "the longer answer wins" on the held-out pairs
    note: str = ""


def reward_model(session: Session, model: Path | str, data: StageResult | None) -> StageResult:
    """Run the stage. `model`: the policy whose trunk it starts from, and whose rollouts make the pairs."""
    inputs: dict[str, Any] = {"model": model} | ({"data": data} if data is not None else {})
    return run_stage(session, "reward_model", _body, settings=session.settings.stages.reward_model, inputs=inputs)


def _body(context: StageContext) -> dict[str, Any]:
    settings: RewardModelSettings = context.settings
    data = Path(context.inputs["data"]) if "data" in context.inputs else None
    if data is not None and (data / "preferences_train.jsonl").is_file():
        pairs = _pairs_from_files(data, context)
    else:
        pairs = _pairs_from_rollouts(data, context)
    for name, part in (("train", pairs.train), ("heldout", pairs.heldout)):
        if not part:
            raise DataError(
                f"there is no {name} pair for the reward model: {pairs.note}. A pair needs a success and a failure "
                "at the same episode; train the policy longer, or raise stages.reward_model.num_pairs or group_size"
            )
    model, tokenizer = heads.reward_model_from(context.inputs["model"], context.pipeline.model, seed=context.seed)
    trainer = RewardModelTrainer(
        model, ChatRenderer(tokenizer).pad_id, pairs.train, pairs.heldout, settings, context.seed
    )
    outcome = run_loop(
        trainer,
        settings,
        iterations=trainer.total_steps,
        tracker=context.tracker,
        checkpoints=CheckpointStore(context.checkpoints, keep=settings.keep_checkpoints),
        best_metric="eval/accuracy" if settings.patience is not None else None,
        fingerprint=context.fingerprint,
        stop_event=context.stop,
    )
    causal_lm.save(model, tokenizer, context.folder / "model")
    return _summary(context, pairs, outcome.metrics, outcome.steps)


def _summary(context: StageContext, pairs: _Pairs, metrics: dict[str, float], steps: int) -> dict[str, Any]:
    accuracy = metrics["eval/accuracy"]
    low, high = wilson_interval(round(accuracy * len(pairs.heldout)), len(pairs.heldout))
    longer = longer_answer_baseline(pairs.heldout) if pairs.longer_baseline is None else pairs.longer_baseline
    extra = {"eval/accuracy_low": low, "eval/accuracy_high": high, "eval/longer_answer_accuracy": longer}
    context.tracker.log_metrics(extra, steps + 1)
    return {
        "steps": steps,
        "accuracy": accuracy,
        "accuracy_low": low,
        "accuracy_high": high,
        "longer_answer_accuracy": longer,
        "train_pairs": len(pairs.train),
        "heldout_pairs": len(pairs.heldout),
        "metrics": {**metrics, **extra},
        "note": f"ranks {accuracy:.1%} of {len(pairs.heldout)} held-out pairs rightly "
        f"[{low:.1%}, {high:.1%}]; 'the longer one wins' gets {longer:.1%}; {pairs.note}",
    }


def _pairs_from_files(data: Path, context: StageContext) -> _Pairs:
    """The preference rows that the data stage checked and split by prompt."""
    policy_tokenizer = causal_lm.load_tokenizer(context.inputs["model"], context.pipeline.model)
    renderer = ChatRenderer(policy_tokenizer)

    def tokens(row: dict[str, Any]) -> tuple[list[int], list[int]]:
        prompt = renderer.prompt_ids([Message(role="user", content=row["prompt"])])
        return prompt + renderer.action_ids(row["chosen"]), prompt + renderer.action_ids(row["rejected"])

    rows = {split: read_jsonl(data / f"preferences_{split}.jsonl") for split in ("train", "heldout")}
    # The baseline of people: the answer with more characters.
    longer = longer_answer_baseline([(row["chosen"], row["rejected"]) for row in rows["heldout"]])
    prompts = {split: len({row["prompt"] for row in rows[split]}) for split in rows}
    return _Pairs(
        train=[tokens(row) for row in rows["train"]],
        heldout=[tokens(row) for row in rows["heldout"]],
        longer_baseline=longer,
        note=f"{len(rows['train'])} pairs of {prompts['train']} prompts to learn from, "
        f"{prompts['heldout']} prompts held out",
    )


def _pairs_from_rollouts(data: Path | None, context: StageContext) -> _Pairs:
    """Sample groups of the starting policy; a success is preferred to a failure at the same episode.

    Collects until `num_pairs` are there, at most GROUPS_AT_MOST times the groups that would do if each gave its share.
    """
    settings: RewardModelSettings = context.settings
    environment = make_environment(context.pipeline, data)
    policy = load_policy(context.inputs["model"], context.pipeline)
    backend = policy.backend()
    rng = np.random.default_rng(context.seed)
    seeds = {level: environment.seeds_of("train", level) for level in environment.levels}
    levels = [level for level in environment.levels if len(seeds[level])]
    by_group: list[list[tuple[list[int], list[int]]]] = []
    count = groups_played = successes = 0
    most_groups = GROUPS_AT_MOST * -(-settings.num_pairs // PAIRS_PER_GROUP)
    while count < settings.num_pairs and groups_played < most_groups:
        requests = []
        for index in range(min(64, most_groups - groups_played)):
            level = levels[(groups_played + index) % len(levels)]
            requests.append(EpisodeRequest(level, seeds[level][int(rng.integers(len(seeds[level])))]))
        groups = collect(
            environment,
            backend,
            policy.renderer,
            requests,
            group_size=settings.group_size,
            sampling=settings.sampling,
            seed=context.seed + groups_played,
        )
        groups_played += len(groups)
        successes += sum(rollout.success for group in groups for rollout in group.rollouts)
        for group in groups:
            pairs = pairs_from_groups([group], PAIRS_PER_GROUP, context.seed)
            if pairs:
                by_group.append([(pair.chosen_ids, pair.rejected_ids) for pair in pairs])
                count += len(pairs)
        context.tracker.progress(min(count, settings.num_pairs), settings.num_pairs, "pairs from rollouts")
    held = max(1, round(len(by_group) * 0.15)) if len(by_group) > 1 else 0  # by episode: no episode on both sides
    return _Pairs(
        train=[pair for pairs in by_group[held:] for pair in pairs],
        heldout=[pair for pairs in by_group[:held] for pair in pairs],
        note=f"pairs from {groups_played} episodes of {settings.group_size} rollouts each, of which "
        f"{successes / (groups_played * settings.group_size):.1%} succeeded",
    )
