"""Scenarios of sharded_scenarios.py for trainers that sample from their policy."""

import dataclasses
import functools

import torch

from helpers import thinkers
from helpers.letters import Letters, Walk, make_trainer
from rl_core.data.chat import ChatRenderer
from rl_core.data.tokenizer import train_tokenizer
from rl_core.evaluation import evaluate
from rl_core.inference.teacher import LocalTeacher
from rl_core.inference.transformers_backend import TransformersBackend
from rl_core.models import causal_lm
from rl_core.models.lora import add_adapter
from rl_core.rewards.orchestrator import RewardOrchestrator
from rl_core.rollouts.episode_sequence import EpisodeRequest
from rl_core.settings import (
    CriticSettings,
    CurriculumStage,
    LoraSettings,
    ModelSettings,
    ReplaySettings,
    RewardSettings,
    RollbackSettings,
    SamplingSettings,
    SelfTeacherSettings,
    TurnCreditSettings,
)
from rl_core.settings.distillation import DistilledPolicySettings
from rl_core.trainers.policy_gradient.cross_vocabulary import AlignedTeacher
from rl_core.trainers.policy_gradient.self_distillation import SelfTeacher

# 5 groups for two processes: one of them plays three. Micro-batches hold a few rows.
OPTIONS = {
    "iterations": 4,
    "prompts_per_iteration": 5,
    "group_size": 4,
    "micro_batch_tokens": 60,
    "eval_every": 2,
}
TWICE = {"epochs": 2, "minibatches": 2}


def make_tokenizer():
    return train_tokenizer(["abc xyz"], 300)


def make_model(seed=0, lora=None):
    settings = ModelSettings(preset="nano", context=32, device="cpu")
    model = causal_lm.create_model(settings, make_tokenizer(), seed)
    if lora is not None:
        model = add_adapter(model, lora)
    return model


def make_policy_trainer(process_group, **options):
    model = options.pop("model", None) or make_model()
    trainer = make_trainer(
        make_tokenizer(),
        options.pop("environment", None),
        model=model,
        process_group=process_group,
        **{**OPTIONS, **options},
    )
    requests = [EpisodeRequest(level, seed) for seed in range(3) for level in Letters.levels]

    def validate():
        result = evaluate(
            Letters(),
            trainer.backend,
            trainer.renderer,
            requests,
            samples=1,
            sampling=SamplingSettings(max_completion_tokens=3),
            seed=3,
            process_group=process_group,
        )
        return {name: value for name, value in result.metrics().items() if "second" not in name}

    trainer.evaluator = validate
    return trainer


def with_other_backend(trainer):
    """Let the processes generate different numbers of tokens with the modules themselves."""
    trainer.backend = TransformersBackend(
        trainer.policy,
        eos_ids=range(0, trainer.policy.config.vocab_size, 2),
        pad_id=0,
        max_length=32,
    )
    return trainer


def use_shared_reference(trainer):
    """Use the policy without its adapters as the reference of the KL."""
    trainer.reference = trainer.model
    return trainer


def with_adapter(model, settings):
    """Add an adapter with B away from 0, where A has no gradient and Adam makes full steps of its rounding errors."""
    model = add_adapter(model, settings)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.05)
    return model


def make_inner_rewards():
    return RewardOrchestrator({"task": 1.0, "curiosity": 0.3, "coherence": 0.2})


def score_letters(steps, trajectory):
    """Score each step by its first letter: a user's function of steps."""
    return [float(step[:1].lower() < "n") for step in steps]


def make_process_rewards():
    process = {
        "function": "helpers.sharded_policies:score_letters",
        "delimiter": "\ufffd",  # what a byte outside ASCII decodes to
        "aggregate": "sum",
    }
    return RewardOrchestrator(
        {"task": 1.0, "process": 0.5},
        options=RewardSettings(process=process),
        decode=make_tokenizer().decode,
    )


ROLLBACK = RollbackSettings(
    metric="reward/mean", margin=0.01, patience=1, window=1, max_rollbacks=1, cooldown=0
)
STAGES = (
    CurriculumStage(name="one", levels={"low": 1.0}, max_iterations=2),
    CurriculumStage(name="two", levels={"high": 1.0}),
)


def center_rewards(rewards_R, groups_R, lengths_R):
    """Rewards minus the mean of all, by length: an advantage estimator of a user's."""
    return (rewards_R - rewards_R.mean()) / lengths_R, {"length": lengths_R.double().mean()}


def list_scenarios(process_group, folder, numbers):
    """Yield (name, function that returns numbers); `numbers` runs a trainer."""
    ours = folder / ("alone" if process_group.size == 1 else "together")
    of = functools.partial(make_policy_trainer, process_group)

    def run(trainer, **options):
        return numbers(trainer, process_group, iterations=trainer.settings.iterations, **options)

    held = {"kl_coef": 0.1, "entropy_coef": 0.01}
    yield "grpo", lambda: run(of(reference=make_model(1), **held, **TWICE))
    soft = {"algorithm": "sapo", "importance": "geometric", "importance_mask": "token"}
    yield "sapo", lambda: run(of(reference=make_model(1), **soft, **held, **TWICE))
    custom = {
        "loss": "rl_core.losses.policy:sapo_loss",
        "advantages": "helpers.sharded_policies:center_rewards",
    }
    yield (
        "custom functions",
        lambda: run(of(loss_aggregation="sequence_mean", importance="token", **custom, **TWICE)),
    )
    taught = {
        "kind": DistilledPolicySettings,
        "teacher": LocalTeacher(make_model(1)),
        "gamma": 0.5,
        "learning_rate": 3e-3,
    }
    yield "distill", lambda: run(of(**taught, **TWICE))
    student = make_model()
    hint = SelfTeacherSettings(prompt="{prompt} {solution}", weights="current")
    alone = {
        "kind": DistilledPolicySettings,
        "model": student,
        "teacher": SelfTeacher(student, ChatRenderer(make_tokenizer()), hint),
        "gamma": 0.0,
    }
    yield "self distill", lambda: run(of(**alone, **TWICE))
    for divergence in ("sampled", "gold"):
        renderer = ChatRenderer(make_tokenizer())
        aligned = AlignedTeacher(LocalTeacher(make_model(1)), renderer, renderer, "theirs")
        other = {**taught, "teacher": aligned, "gamma": 0.0, "divergence": divergence}
        yield f"distill aligned {divergence}", lambda other=other: run(of(**other, **TWICE))
    walk = {
        "environment": Walk(),
        "turn_credit": TurnCreditSettings(),
        "sampling": SamplingSettings(max_completion_tokens=12, max_turns=3),
        "reference": make_model(1),
        "kl_coef": 0.1,
        "kl_in": "reward",
        "importance": "token",
        "replay": ReplaySettings(),
    }
    yield "turn credit", lambda: run(of(**walk, **TWICE))
    yield "dppo", lambda: run(of(algorithm="dppo", replay=ReplaySettings(), **TWICE))
    yield "gdpo", lambda: run(of(algorithm="gdpo", rewards=make_inner_rewards(), **TWICE))
    yield "dynamic", lambda: run(of(algorithm="dapo", dynamic_sampling_tries=2))
    for kind in ("separate", "shared"):
        critic = CriticSettings(kind=kind)
        yield (
            f"ppo {kind}",
            lambda critic=critic: run(
                of(
                    algorithm="ppo",
                    critic=critic,
                    reference=make_model(1),
                    kl_coef=0.1,
                    kl_in="reward",
                    **TWICE,
                )
            ),
        )
    yield "limited", lambda: run(of(kl_max=0.15, **TWICE))
    yield "inner rewards", lambda: run(of(rewards=make_inner_rewards()))
    lora = LoraSettings(rank=2, target_modules=("q_proj", "down_proj"))
    yield "policy adapters", lambda: run(of(model=make_model(lora=lora), learning_rate=5e-2))
    stepped = {
        "sampling": SamplingSettings(max_completion_tokens=12, max_turns=3),
        "replay": ReplaySettings(),
    }

    def train_on_steps(iterations=4, folder_of_run=None, **options):
        torch.manual_seed(5)  # of the adapter's A
        trainer = of(
            model=with_adapter(make_model(), lora),
            environment=Walk(),
            rewards=make_process_rewards(),
            learning_rate=5e-2,
            **{"importance": "token", **stepped, **options},
        )
        return numbers(trainer, process_group, folder=folder_of_run, iterations=iterations)

    yield "process rewards", train_on_steps
    critic = {"algorithm": "ppo", "critic": CriticSettings(kind="separate"), "importance": "vtrace"}
    yield "process rewards, ppo", lambda: train_on_steps(**critic)
    steps_folder = ours / "process rewards"
    saved = {"checkpoint_every": 2}
    yield "cut process rewards", lambda: train_on_steps(2, steps_folder, **saved)
    yield "rest process rewards", lambda: train_on_steps(5, steps_folder, **saved)
    yield "whole process rewards", lambda: train_on_steps(5, **saved)
    noisy = dataclasses.replace(lora, dropout=0.3)
    yield (
        "dropout",
        lambda: run(of(model=make_model(lora=noisy), learning_rate=5e-2, dropout=True, **TWICE)),
    )
    renderer = thinkers.renderer_of_texts()
    yield (
        "thoughts",
        lambda: run(
            thinkers.make_trainer(
                renderer,
                thinkers.teach(renderer),
                process_group=process_group,
                episodes_per_iteration=5,
                eval_every=2,
            )
        ),
    )
    yield (
        "thoughts adapters",
        lambda: run(
            use_shared_reference(
                thinkers.make_trainer(
                    renderer,
                    with_adapter(thinkers.teach(renderer), lora),
                    process_group=process_group,
                    episodes_per_iteration=5,
                    kl_coef=0.5,
                    check_every_episodes=8,
                    baseline_layers=2,
                    baseline_width=8,
                    bootstrap_samples=100,
                    advantages="returns",
                    reference=make_model(0),
                    learning_rate=1e-3,
                )
            )
        ),
    )
    stateful = {
        "algorithm": "ppo",
        "critic": CriticSettings(kind="separate"),
        "replay": ReplaySettings(),
        "kl_coef": 0.1,
        "importance": "vtrace",
        "curriculum": STAGES,
        "rollback": ROLLBACK,
        "checkpoint_every": 3,
        "iterations": 7,
    }

    def long(iterations, folder_of_run=None):
        trainer = of(reference=make_model(2), rewards=make_inner_rewards(), **stateful)
        return numbers(trainer, process_group, folder=folder_of_run, iterations=iterations)

    yield "cut policy", lambda: long(3, ours / "policy")
    yield "rest policy", lambda: long(7, ours / "policy")
    yield "whole policy", lambda: long(7)


def list_layer_scenarios(process_group, numbers):
    """Yield the scenarios in which the weights of one block at a time are collected."""
    of = functools.partial(
        make_policy_trainer,
        process_group,
        reference=make_model(1),
        kl_coef=0.1,
        entropy_coef=0.01,
        **TWICE,
    )
    yield "by layer grpo", lambda: numbers(of(), process_group, iterations=4)
    yield (
        "by layer other backend",
        lambda: numbers(with_other_backend(of()), process_group, iterations=4),
    )
