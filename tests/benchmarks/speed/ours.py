"""Our side of every case: the trainers and the engine as the stages use them, one step at a time."""

from __future__ import annotations

import functools
import time

import torch
import transformers

from rl_core.data.pairs import PairSide, PreferencePair
from rl_core.inference.engine import create_rollout_backend
from rl_core.models import causal_lm, heads
from rl_core.rewards.orchestrator import RewardOrchestrator
from rl_core.settings import (
    CriticSettings,
    ModelSettings,
    PolicySettings,
    PreferenceSettings,
    RewardModelSettings,
    SamplingSettings,
    SFTSettings,
)
from rl_core.trainers.policy_gradient.trainer import PolicyGradientTrainer
from rl_core.trainers.preference import PreferenceTrainer, compute_reference_logprobs
from rl_core.trainers.reward_model import RewardModelTrainer
from rl_core.trainers.sft import SFTTrainer
from speed import inputs
from speed.episodes import (
    Characters,
    Scripted,
    Sums,
    list_end_ids,
    make_ragged_sequences,
    order_as_drawn,
)

CPU = ModelSettings(device="cpu")
TRAINING = dict(
    learning_rate=inputs.LEARNING_RATE,
    betas=inputs.BETAS,
    schedule="constant",
    warmup_steps=0,
    weight_decay=0.0,
)


def run(stage, folder, steps, gate):
    """Load what the stage needs, then take steps on request."""
    step = make_step(stage, folder, steps)
    gate.ready(versions={"torch": torch.__version__, "transformers": transformers.__version__})
    while True:
        gate.wait()
        tokens, loss, *paid = step()
        gate.done(tokens, loss, **(paid[0] if paid else {}))


def make_step(stage, folder, steps):
    """Return a function that takes one step and returns its tokens and its loss (None if both sides sample for
    themselves).

    Third, for dpo: what was paid for the step before it, as keyword arguments of `Gate.done`.
    """
    kind, _, shape = stage.partition("_")
    if kind == "generate":
        return make_generate_step(folder, *map(int, shape.split("x")))
    makers = {
        "sft": make_sft_step,
        "reward": make_reward_step,
        "dpo": make_dpo_step,
        "episodes": make_episodes_step,
        "ppo": make_ppo_step,
        "grpo": functools.partial(make_grpo_step, epochs=1),
        "grpo4": functools.partial(make_grpo_step, epochs=4),
    }
    return makers[kind](folder, steps)


def load(folder):
    """Load policy and tokenizer."""
    return causal_lm.load_model(folder / "model", CPU)


def encode_text(tokenizer, text):
    """Return the token ids of a prompt."""
    return tokenizer(text)["input_ids"]


def encode_sft_rows(folder, tokenizer):
    """Return (ids, loss mask) of every row, loss on the completion and its end."""
    rows = []
    for row in inputs.read(folder, "sft"):
        prompt, completion = (
            encode_text(tokenizer, row["prompt"]),
            [*encode_text(tokenizer, row["completion"]), inputs.EOS],
        )
        rows.append((prompt + completion, [False] * len(prompt) + [True] * len(completion)))
    return rows


def make_pairs(folder, tokenizer, count=None):
    """Make pairs in the order of the file."""
    pairs = []
    for row in inputs.read(folder, "pairs")[:count]:
        prompt = encode_text(tokenizer, row["prompt"])
        sides = [
            [*encode_text(tokenizer, row[name]), inputs.EOS] for name in ("chosen", "rejected")
        ]
        pairs.append(PreferencePair(*(PairSide(prompt, ids, [True] * len(ids)) for ids in sides)))
    return pairs


def make_sft_trainer(folder):
    """On all rows."""
    model, tokenizer = load(folder)
    rows = order_as_drawn(encode_sft_rows(folder, tokenizer), inputs.SEED)
    settings = SFTSettings(batch_size=inputs.BATCH["sft"], **TRAINING)
    return SFTTrainer(model, inputs.PAD, rows, [], settings, inputs.SEED)


def make_sft_step(folder, _steps):
    return _read_tokens_and_loss(make_sft_trainer(folder))


def make_reward_trainer(folder):
    """On all pairs."""
    model, tokenizer = heads.load_reward_model(folder / "reward_model", CPU)
    pairs = order_as_drawn(
        [(p.chosen_ids, p.rejected_ids) for p in make_pairs(folder, tokenizer)], inputs.SEED
    )
    settings = RewardModelSettings(batch_size=inputs.BATCH["reward"], center_coef=0.0, **TRAINING)
    return RewardModelTrainer(model, inputs.PAD, pairs, [], settings, inputs.SEED)


def make_reward_step(folder, _steps):
    return _read_tokens_and_loss(make_reward_trainer(folder))


def make_dpo_trainer(folder, steps):
    """On the pairs of these steps; and seconds (wall, processor) that their reference log-probabilities took."""
    batch = inputs.BATCH["dpo"]
    model, tokenizer = load(folder)
    pairs = order_as_drawn(make_pairs(folder, tokenizer, steps * batch), inputs.SEED)
    settings = PreferenceSettings(batch_size=batch, **TRAINING)
    budget = settings.micro_batch_tokens
    compute_reference_logprobs(
        model, pairs[:batch], pad_id=inputs.PAD, max_tokens=budget
    )  # the first pass warms up
    wall, cpu = time.perf_counter(), time.process_time()
    references = compute_reference_logprobs(model, pairs, pad_id=inputs.PAD, max_tokens=budget)
    paid = time.perf_counter() - wall, time.process_time() - cpu
    return PreferenceTrainer(
        model, inputs.PAD, pairs, [], settings, inputs.SEED, (references, [])
    ), paid


def make_dpo_step(folder, steps):
    """Compute the reference once per pair, before training, and charge every step its share."""
    trainer, (wall, cpu) = make_dpo_trainer(folder, steps)
    step = _read_tokens_and_loss(trainer)
    return lambda: (*step(), {"wall_s": wall / steps, "cpu_s": cpu / steps})


def _read_tokens_and_loss(trainer):
    def step():
        metrics = trainer.step()
        return int(metrics["train/tokens"]), metrics["train/loss"]

    return step


def make_policy_step(folder, steps, settings, *, eos_ids, reference=None, scorer=None):
    """Make a step of one iteration of the policy trainer."""
    model, tokenizer = load(folder)
    trainer = PolicyGradientTrainer(
        model,
        reference,
        Characters(tokenizer),
        Sums(folder, inputs.SEED),
        settings,
        inputs.SEED,
        RewardOrchestrator(settings.rewards, scorer=scorer, options=settings.reward_options),
        create_rollout_backend(
            model, eos_ids=eos_ids, pad_id=inputs.PAD, max_length=inputs.MAX_LENGTH
        ),
    )

    def step():
        metrics = trainer.step()
        if (
            metrics["train/zero_advantage_rate"] > 0
        ):  # such rows are left out, and the peer's are not
            raise RuntimeError(
                f"{metrics['train/zero_advantage_rate']:.0%} of the rollouts had no advantage"
            )
        rollouts = [rollout for group in trainer.groups for rollout in group.rollouts]
        return sum(
            len(rollout.prompt_ids) + len(rollout.completion_ids) for rollout in rollouts
        ), None

    return step


def make_grpo_step(folder, steps, *, epochs):
    settings = PolicySettings(
        algorithm="grpo",
        iterations=steps,
        prompts_per_iteration=inputs.BATCH["grpo"] // inputs.GROUP,
        group_size=inputs.GROUP,
        epochs=epochs,
        rewards={"speed.episodes:reward": 1.0},
        sampling=SamplingSettings(max_completion_tokens=inputs.MAX_NEW),
        **TRAINING,
    )
    return make_policy_step(folder, steps, settings, eos_ids=(inputs.EOS,))


def make_ppo_step(folder, steps):
    """Make a PPO step; every completion runs to the limit, as the peer's does: it stops at no token."""
    settings = PolicySettings(
        algorithm="ppo",
        iterations=steps,
        prompts_per_iteration=inputs.BATCH["ppo"],
        group_size=1,
        kl_coef=0.05,
        kl_in="reward",
        critic=CriticSettings(kind="separate"),
        rewards={"learned": 1.0},
        sampling=SamplingSettings(max_completion_tokens=inputs.MAX_NEW),
        **TRAINING,
    )
    scorer, _ = heads.load_reward_model(folder / "reward_model", CPU)
    return make_policy_step(
        folder,
        steps,
        settings,
        eos_ids=(),
        reference=load(folder)[0],
        scorer=functools.partial(heads.score_rows, scorer, pad_id=inputs.PAD),
    )


def make_generate_step(folder, rows, new):
    """Generate `rows` completions of exactly `new` tokens."""
    model, tokenizer = load(folder)
    engine = create_rollout_backend(
        model.eval(), eos_ids=(), pad_id=inputs.PAD, max_length=inputs.MAX_PROMPT + new
    )
    prompts = [
        encode_text(tokenizer, row["prompt"]) for row in inputs.read(folder, "prompts")[:rows]
    ]
    sampling = SamplingSettings(max_completion_tokens=new, slots=rows)

    def step():
        sequences = [Scripted(prompt, seed, limit=new) for seed, prompt in enumerate(prompts)]
        engine.run_sequences(sequences, sampling)
        return sum(sequence.sampled for sequence in sequences), None

    return step


def make_episodes_step(folder, _steps):
    """Play ragged episodes of several turns; tokens are those that the policy sampled."""
    model, tokenizer = load(folder)
    engine = create_rollout_backend(
        model.eval(), eos_ids=list_end_ids(len(tokenizer)), pad_id=inputs.PAD, max_length=512
    )
    taken = 0

    def step():
        nonlocal taken
        sequences = make_ragged_sequences(folder, tokenizer, taken)
        engine.run_sequences(
            sequences,
            SamplingSettings(max_completion_tokens=sequences[0].limit, slots=len(sequences)),
        )
        taken += 1
        return sum(sequence.sampled for sequence in sequences), None

    return step
