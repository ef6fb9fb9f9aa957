"""Small runs of every trainer in which as much as possible of a checkpoint matters, and their resumption.

Each scenario has a moving schedule, several micro-batches a step, ragged rows, and an evaluation whose best value lies
before the cut, so that patience ends the run and the best weights come from the checkpoint.
"""

import copy
import dataclasses
import functools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers import LlamaForSequenceClassification

from helpers.letters import FewLetters, Letters, Walk, make_trainer
from helpers.thinkers import make_trainer as make_thinker
from helpers.thinkers import renderer_of_texts, teach
from helpers.tiny import PAD, VOCABULARY, logged_bits, nano, weights_digest
from rl_core.data.pairs import PairSide, PreferencePair
from rl_core.data.tokenizer import train_tokenizer
from rl_core.environments.environment import Step
from rl_core.errors import Stopped
from rl_core.inference.teacher import LocalTeacher
from rl_core.models import causal_lm, lora
from rl_core.rewards.orchestrator import RewardOrchestrator
from rl_core.settings import (
    CriticSettings,
    CuriositySettings,
    CurriculumStage,
    DistillationSettings,
    ExitCondition,
    LengthSettings,
    LoraSettings,
    ModelSettings,
    NumericsGateSettings,
    PreferenceSettings,
    ReplaySettings,
    RewardModelSettings,
    RewardSettings,
    RollbackSettings,
    SamplingSettings,
    SFTSettings,
    TurnCreditSettings,
)
from rl_core.settings.distillation import DistilledPolicySettings
from rl_core.tracking import MemoryTracker
from rl_core.trainers.preference import PreferenceTrainer
from rl_core.trainers.reward_model import RewardModelTrainer
from rl_core.trainers.sft import SFTTrainer
from rl_core.training.loop import run_loop

ITERATIONS, CUT = 7, 3  # patience ends each run after five iterations


@dataclasses.dataclass(frozen=True)
class Scenario:
    """One trainer and its settings."""

    make: Callable[[], Any]  # the trainer
    draws: bool = False  # True = it draws from the global generators

    def trainer(self):
        torch.manual_seed(3)
        random.seed(5)
        np.random.seed(6)
        return self.make()


class MemoryStore:
    """A CheckpointStore in memory: of a run that is cut, the newest state."""

    def __init__(self, state=None):
        self.state = state

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        pass

    def measure_newest(self):
        return 0

    def save_version(self, state):
        self.state = copy.deepcopy(dict(state))
        return 1

    def load_latest(self):
        return copy.deepcopy(self.state)


def disturb(event):
    """Change state that a run may have met before the cut; afterwards only the checkpoint has it."""
    if event.kind != "iteration" or event.iteration != 2:
        return
    steps = [event.trainer.optimizer_step]
    critic = getattr(getattr(event.trainer, "actor_critic", None), "critic_optimizer_step", None)
    for optimizer_step in [*steps, *([critic] if critic is not None else [])]:
        optimizer_step.skipped_steps = 1  # a step that was not finite
        optimizer_step.learning_rate_scale = 0.7  # a rollback
        optimizer_step.max_tokens = 6  # a lack of memory


class _Cut:
    """Stop request after some iterations."""

    def __init__(self, at):
        self.at = at

    def __call__(self, event):
        if (
            event.kind == "iteration" and event.iteration == self.at + 1
        ):  # the checkpoint of `at` has been saved
            raise Stopped("cut", 15)


def run(scenario, store=None, *, cut=None, best_metric="eval/chosen"):
    """Return the result of a run as bits: (weights, outcome, history), None if it was cut; and every metric."""
    trainer, tracker = scenario.trainer(), MemoryTracker()
    callbacks = [disturb, *([_Cut(cut)] if cut else [])]
    try:
        outcome = run_loop(
            trainer,
            trainer.settings,
            iterations=ITERATIONS,
            tracker=tracker,
            checkpoints=store,
            best_metric=best_metric,
            fingerprint={"settings": "same"},
            callbacks=callbacks,
        )
    except Stopped:
        return None, logged_bits(tracker)
    facts = dataclasses.asdict(
        dataclasses.replace(outcome, seconds=0.0, resumed_iteration=0, history=None)
    )
    if hasattr(trainer, "curriculum"):
        facts["curriculum"] = trainer.curriculum.export_history()
    history = {
        name: outcome.history.list_points(name)
        for name in outcome.history.names
        if not name.startswith("perf/")
    }
    return (weights_digest(trainer.model), facts, history), logged_bits(tracker)


def count_evaluations(evaluate, trainer):
    """Return the trainer's metrics, and one that is best at the first evaluation."""
    calls = trainer.optimizer_step.num_steps
    return {**evaluate(), "eval/chosen": 1.0 / (1 + calls)}


def evaluate_weights(model):
    """Evaluate by the weights in the model, averaged ones too."""
    return {
        "eval/weights": sum(
            float(parameter.double().abs().sum()) for parameter in model.parameters()
        )
    }


def with_choice(trainer):
    trainer.evaluate = functools.partial(count_evaluations, trainer.evaluate, trainer)
    return trainer


# ---------------------------------------------------------------------------------------------------------- supervised

LOOP = {"eval_every": 1, "checkpoint_every": 1, "patience": 4, "keep_checkpoints": 2}
OPTIMIZER = {
    "learning_rate": 5e-3,
    "warmup_steps": 3,
    "schedule": "cosine",
    "batch_size": 4,
    "micro_batch_tokens": 28,
}
EVERYTHING = {"ema_decay": 0.6, "grokfast_lambda": 0.5, "grokfast_alpha": 0.9}


def make_rows(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for index in range(count):
        ids = torch.randint(1, VOCABULARY, (3 + index % 4,), generator=generator).tolist()
        rows.append((ids, [False, *[True] * (len(ids) - 1)]))
    return rows


def make_pairs(count, seed=0, labelled=False):
    generator = torch.Generator().manual_seed(seed)
    pairs = []
    for index in range(count):
        prompt = torch.randint(1, VOCABULARY, (2 + index % 2,), generator=generator).tolist()
        sides = [
            torch.randint(1, VOCABULARY, (1 + index % 3,), generator=generator).tolist()
            for _ in range(2)
        ]
        pair = PreferencePair(*(PairSide(prompt, ids, [True] * len(ids)) for ids in sides))
        pairs.append(dataclasses.replace(pair, desirable=index % 3 != 0) if labelled else pair)
    return pairs


def make_adapted_model(dropout=0.3, **options):
    with torch.random.fork_rng():
        torch.manual_seed(1)
        settings = LoraSettings(rank=2, dropout=dropout, target_modules=("q_proj", "down_proj"))
        return lora.add_adapter(nano(**options), settings)


def make_sft(model=None, **changes):
    settings = SFTSettings(**{**OPTIMIZER, **LOOP, "epochs": 9.0, **changes})
    model = nano(dropout=0.2) if model is None else model()
    return with_choice(SFTTrainer(model, PAD, make_rows(14), make_rows(5, 1), settings, 7))


def make_reward_model(**changes):
    settings = RewardModelSettings(
        **{**OPTIMIZER, **LOOP, "epochs": 9.0, "dropout": True, **changes}
    )
    pairs = [(pair.chosen_ids, pair.rejected_ids) for pair in make_pairs(14)]
    model = nano(0, 0.2, LlamaForSequenceClassification, num_labels=1)
    return with_choice(RewardModelTrainer(model, PAD, pairs, pairs[:5], settings, 7))


def make_preference(loss, model=None, **changes):
    settings = PreferenceSettings(**{**OPTIMIZER, **LOOP, "epochs": 9.0, "loss": loss, **changes})
    pairs = [make_pairs(count, seed, loss == "kto") for count, seed in ((14, 0), (5, 1))]
    model = nano(dropout=0.2) if model is None else model()
    return with_choice(PreferenceTrainer(model, PAD, *pairs, settings, 7))


# ------------------------------------------------------------------------------------------------------------- policies


@functools.cache
def make_tokenizer():
    return train_tokenizer(["abc xyz"], 300)


@functools.cache
def make_started_model(seed=0):
    return causal_lm.create_model(
        ModelSettings(preset="nano", context=32, device="cpu"), make_tokenizer(), seed
    )


def make_adapted_policy():
    with torch.random.fork_rng():
        torch.manual_seed(1)
        settings = LoraSettings(rank=2, dropout=0.3, target_modules=("q_proj", "down_proj"))
        return lora.add_adapter(copy.deepcopy(make_started_model()), settings)


def reward_with_luck(trajectories):
    """Return a user-defined reward that draws from the global generators."""
    return [random.random() + float(np.random.rand()) + float(torch.rand(())) for _ in trajectories]


def make_two_stages(**options):
    return (
        CurriculumStage(name="one", levels={"low": 1.0}, max_iterations=2),
        CurriculumStage(name="two", levels={"low": 1.0, "high": 2.0}, **options),
    )


def make_policy(environment=None, rewards=None, reference=False, evaluator=None, **changes):
    options = {
        **LOOP,
        "iterations": ITERATIONS,
        "prompts_per_iteration": 3,
        "group_size": 4,
        "learning_rate": 5e-3,
        "warmup_steps": 3,
        "schedule": "cosine",
        "micro_batch_tokens": 60,
        "entropy_coef": 0.02,
        "entropy_decay": 0.9,
        "sampling": SamplingSettings(max_completion_tokens=3, temperature=0.8),
        "curriculum": make_two_stages(),
        **changes,
    }
    reference_model = copy.deepcopy(make_started_model(1)) if reference else None
    model = options.pop("model", None)
    trainer = make_trainer(
        make_tokenizer(),
        environment or FewLetters(),
        rewards=rewards,
        reference=reference_model,
        model=model() if model else None,
        **options,
    )
    trainer.evaluator = functools.partial(evaluate_weights, trainer.model)
    return with_choice(trainer)


def make_all_rewards():
    options = RewardSettings(
        normalise=("length", "task"),
        clip=4.0,
        window=3,
        length=LengthSettings(free=1, limit=6),
        curiosity=CuriositySettings(hidden=4),
    )
    parts = {
        "task": 1.0,
        "curiosity": 0.5,
        "coherence": 0.2,
        "length": 0.1,
        "learned": 0.2,
        "luck": 0.1,
    }
    scorer = lambda rows: [sum(row) % 7 for row in rows]  # noqa: E731
    return RewardOrchestrator(
        parts, options=options, seed=3, scorer=scorer, functions={"luck": reward_with_luck}
    )


class _TwoTurns(Letters):
    """An observation after the first action."""

    def episode(self, seed, level):
        episode = super().episode(seed, level)
        act, turns = episode.act, []

        def first(text):
            turns.append(text)
            step = act(text)
            if len(turns) == 1:
                return Step(
                    [{"role": "user", "content": "b"}], reward=step.reward, success=step.success
                )
            return step

        episode.act = first
        return episode


def make_credited():
    sampling = SamplingSettings(max_completion_tokens=12, max_turns=3, temperature=0.8)
    return make_policy(Walk(), turn_credit=TurnCreditSettings(), sampling=sampling, **REPLAY)


def make_rewarded():
    sampling = SamplingSettings(max_completion_tokens=14, max_turns=2, temperature=0.8)
    return make_policy(
        _TwoTurns(), make_all_rewards(), sampling=sampling, curriculum=make_two_stages()
    )


ADAPTIVE = {
    "reference": True,
    "kl_coef": 0.1,
    "kl_controller": "adaptive",
    "kl_target": 1e-3,
    "kl_horizon": 12,
}
REPLAY = {"replay": ReplaySettings(iterations=2, share=0.7), "importance": "token"}


def make_rolled_back():
    """Make a trainer that rolls back to the entry of its stage right after the cut."""
    rollback = RollbackSettings(window=2, margin=0.9, cooldown=0, max_rollbacks=2)
    exit_condition = ExitCondition(metric="completion_tokens", window=4, threshold=0.0)
    stages = (
        CurriculumStage(name="one", levels={"low": 1.0}, max_iterations=1),
        CurriculumStage(
            name="two", levels={"low": 1.0, "high": 1.0}, exit_conditions=(exit_condition,)
        ),
    )
    trainer = make_policy(curriculum=stages, rollback=rollback, **ADAPTIVE, **REPLAY)
    watch = trainer.curriculum.rollback_monitor
    check_iteration = watch.check_iteration

    def check(index, history, known=()):
        if trainer.curriculum.iteration == CUT + 1:
            return watch._decide_rollback(index, rollback, "asked for", {})
        return check_iteration(index, history, known)

    watch.check_iteration = check
    return trainer


def make_doubted():
    """Make a trainer that returns to the weights of the first comparison with the sampler, as the second one fails
    after the cut.
    """
    trainer = make_policy(
        numerics=NumericsGateSettings(every=CUT, action="rollback", bound=1e-3),
        **ADAPTIVE,
        **REPLAY,
    )
    measure, failed = trainer._numerics.measure_difference, []

    def measured(sampling):
        if trainer.iteration == CUT and not failed:
            failed.append(CUT)
            return 1.0
        return measure(sampling)

    trainer._numerics.measure_difference = measured
    return trainer


def make_distilled():
    settings = DistillationSettings(
        iterations=ITERATIONS,
        prompts_per_iteration=10,
        learning_rate=5e-3,
        warmup_steps=3,
        schedule="cosine",
        sampling=SamplingSettings(max_completion_tokens=3, temperature=0.8),
        micro_batch_tokens=30,
        **LOOP,
    ).policy()
    values = {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}
    del values["rewards"]
    teacher = LocalTeacher(copy.deepcopy(make_started_model(1)))
    trainer = make_trainer(
        make_tokenizer(),
        teacher=teacher,
        kind=DistilledPolicySettings,
        **values,
    )
    trainer.evaluator = functools.partial(evaluate_weights, trainer.model)
    return with_choice(trainer)


@functools.cache
def make_thinking():
    renderer = renderer_of_texts()
    return renderer, teach(renderer)


def make_thoughts(**changes):
    options = {
        **LOOP,
        "iterations": ITERATIONS,
        "episodes_per_iteration": 5,
        "learning_rate": 3e-3,
        "warmup_steps": 3,
        "schedule": "cosine",
        "entropy_coef": 0.05,
        "micro_batch_tokens": 200,
        "sampling": SamplingSettings(max_completion_tokens=30, temperature=0.8),
        **changes,
    }
    return with_choice(make_thinker(*make_thinking(), **options))


def make_adapted_thoughts():
    renderer, taught = make_thinking()
    with torch.random.fork_rng():
        torch.manual_seed(1)
        settings = LoraSettings(rank=2, target_modules=("q_proj", "down_proj"))
        model = lora.add_adapter(copy.deepcopy(taught), settings)
    return with_choice(
        make_thinker(
            renderer,
            model,
            **LOOP,
            iterations=ITERATIONS,
            episodes_per_iteration=5,
            sampling=SamplingSettings(max_completion_tokens=30, temperature=1.3),
        )
    )


SCENARIOS = {
    "sft": Scenario(lambda: make_sft(**EVERYTHING), draws=True),
    "sft packed": Scenario(lambda: make_sft(packing=True), draws=True),
    "sft lora": Scenario(lambda: make_sft(make_adapted_model), draws=True),
    "sft muon bfloat16": Scenario(lambda: make_sft(lambda: nano().bfloat16(), optimizer="muon")),
    "reward model": Scenario(lambda: make_reward_model(**EVERYTHING), draws=True),
    "dpo": Scenario(lambda: make_preference("dpo", dropout=True)),
    "dpo lora": Scenario(lambda: make_preference("dpo", make_adapted_model, dropout=True)),
    "ipo": Scenario(lambda: make_preference("ipo")),
    "kto": Scenario(lambda: make_preference("kto")),
    "simpo": Scenario(lambda: make_preference("simpo")),
    "orpo": Scenario(lambda: make_preference("orpo")),
    "grpo": Scenario(
        lambda: make_policy(**ADAPTIVE, **REPLAY, epochs=2, minibatches=2, ema_decay=0.6)
    ),
    "grpo lora": Scenario(lambda: make_policy(model=make_adapted_policy, dropout=True, epochs=2)),
    "grpo rewards": Scenario(make_rewarded, draws=True),
    "grpo turns": Scenario(make_credited),
    "grpo rollback": Scenario(make_rolled_back),
    "grpo numerics": Scenario(make_doubted),
    "ppo": Scenario(lambda: make_policy(algorithm="ppo", epochs=2, minibatches=2, **REPLAY)),
    "ppo shared": Scenario(
        lambda: make_policy(algorithm="ppo", critic=CriticSettings(kind="shared"), epochs=2)
    ),
    "dr_grpo": Scenario(lambda: make_policy(algorithm="dr_grpo")),
    "dapo": Scenario(lambda: make_policy(algorithm="dapo", overlong_buffer=0)),
    "gspo": Scenario(lambda: make_policy(algorithm="gspo", epochs=2)),
    "cispo": Scenario(lambda: make_policy(algorithm="cispo", epochs=2)),
    "sapo": Scenario(lambda: make_policy(algorithm="sapo", epochs=2)),
    "rloo": Scenario(lambda: make_policy(algorithm="rloo", **ADAPTIVE, kl_in="reward")),
    "reinforce": Scenario(lambda: make_policy(algorithm="reinforce", critic=CriticSettings())),
    "dppo": Scenario(
        lambda: make_policy(algorithm="dppo", epochs=2, minibatches=2, replay=REPLAY["replay"])
    ),
    "maxrl": Scenario(lambda: make_policy(algorithm="maxrl", maxrl_order=2)),
    "gdpo": Scenario(lambda: make_policy(algorithm="gdpo", epochs=2)),
    "distill": Scenario(make_distilled),
    "thoughts": Scenario(make_thoughts),
    "thoughts lora": Scenario(make_adapted_thoughts),
}
