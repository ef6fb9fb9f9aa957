"""GRPO in one file: sample groups, reward, compare within groups, step. Read this first, then change it.

    python examples/grpo_minimal.py                    a minute on a CPU, no download
    python examples/grpo_minimal.py MODEL_FOLDER       starts from your model

The task: name the next letter. A model created from scratch first imitates a teacher who is right half of the time
(step 1), then learns from rewards to be right nearly always (step 2).

Suffixes: P prompts, G rollouts per prompt, B = P*G rows, S whole sequence.
"""

import random
import sys

import torch

from rl_core import ModelSettings, SamplingSettings, create_policy, load_policy
from rl_core.data.batches import attention_mask, pad_rows
from rl_core.losses.advantages import group_advantages
from rl_core.losses.policy import clipped_policy_loss
from rl_core.losses.supervised import supervised_loss
from rl_core.models.logprobs import completion_logprobs
from rl_core.types import TrainBatch

LETTERS = "abcdefghij"
GROUP_SIZE, PROMPTS, ITERATIONS = 8, 8, 40
IMITATION_STEPS, LEARNING_RATE, CLIP_EPS = 250, 5e-3, 0.2
SAMPLING = SamplingSettings(temperature=1.0, max_completion_tokens=4)


def build_prompt(letter):
    return [{"role": "user", "content": f"after {letter}"}]


def next_letter(letter):
    return LETTERS[(LETTERS.index(letter) + 1) % len(LETTERS)]


def compute_reward(letter, text):
    return 1.0 if text.strip() == next_letter(letter) else 0.0


class Rollout:
    """One answer to one prompt; the engine calls `take_action`, and None ends the episode."""

    def __init__(self, letter, prompt_ids, seed):
        self.letter, self.prompt_ids, self.seed = letter, prompt_ids, seed
        self.ids, self.logprobs = [], []

    def take_action(self, action_ids, logprobs, hit_limit):
        self.ids, self.logprobs = list(action_ids), list(logprobs)


def build_batch(rows, pad_id, device):
    """Pad rows of (prompt_ids, completion_ids) on the right; only completions carry loss."""
    sequences = [prompt + completion for prompt, completion in rows]
    masks = [[0] * len(prompt) + [1] * len(completion) for prompt, completion in rows]
    return TrainBatch(
        pad_rows(sequences, pad_id),
        attention_mask([len(sequence) for sequence in sequences]),
        pad_rows(masks, 0).bool(),
    ).to(device)


def run_optimizer_step(model, optimizer, loss):
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def train_by_imitation(policy, optimizer, rng):
    """Step 1: fine-tune on a teacher who is right half of the time."""
    renderer, model = policy.renderer, policy.model
    for step in range(IMITATION_STEPS):
        rows = []
        for letter in rng.choices(LETTERS, k=32):
            answer = next_letter(letter) if rng.random() < 0.5 else rng.choice(LETTERS)
            rows.append((renderer.prompt_ids(build_prompt(letter)), renderer.action_ids(answer)))
        batch = build_batch(rows, renderer.pad_id, model.device)
        logprobs_BS, _ = completion_logprobs(model, batch)
        num_tokens = batch.num_loss_tokens
        loss, _ = supervised_loss(logprobs_BS, batch.loss_mask_BS, num_loss_tokens=num_tokens)
        run_optimizer_step(model, optimizer, loss)
        if step % 50 == 49:
            print(f"imitation step {step + 1}: loss {loss.item():.3f} nats per token")


def train_by_grpo(policy, optimizer, rng):
    """Step 2: GRPO. Return the success rate of every iteration."""
    renderer, model, engine = policy.renderer, policy.model, policy.backend()
    success_rates = []
    for iteration in range(ITERATIONS):
        # 1. Sample a group of answers to each prompt with the current weights.
        rollouts = []
        for letter in rng.sample(LETTERS, PROMPTS):
            prompt_ids = renderer.prompt_ids(build_prompt(letter))
            for _ in range(GROUP_SIZE):
                rollouts.append(Rollout(letter, prompt_ids, seed=rng.getrandbits(64)))
        engine.refresh_weights()
        engine.run_sequences(rollouts, SAMPLING)

        # 2. Reward them, and compare each with the others of its group.
        rewards = [compute_reward(r.letter, renderer.action_text(r.ids)) for r in rollouts]
        rewards_PG = torch.tensor(rewards).reshape(PROMPTS, GROUP_SIZE)
        advantages_B = group_advantages(rewards_PG, method="grpo").flatten()

        # 3. Take one step on the clipped policy-gradient loss. The old log-probabilities are the sampler's.
        rows = [(rollout.prompt_ids, rollout.ids) for rollout in rollouts]
        batch = build_batch(rows, renderer.pad_id, model.device)
        logprobs_BS, _ = completion_logprobs(model, batch)
        old_logprobs_BS = torch.zeros(batch.loss_mask_BS.shape)
        for row, rollout in enumerate(rollouts):
            start = len(rollout.prompt_ids)
            old_logprobs_BS[row, start : start + len(rollout.ids)] = torch.tensor(rollout.logprobs)
        loss, metrics = clipped_policy_loss(
            logprobs_BS,
            old_logprobs_BS.to(model.device),
            advantages_B[:, None].expand_as(old_logprobs_BS).to(model.device),
            batch.loss_mask_BS,
            num_loss_tokens=batch.num_loss_tokens,
            clip_eps=CLIP_EPS,
        )
        run_optimizer_step(model, optimizer, loss)
        success_rates.append(rewards_PG.mean().item())
        ratio = metrics["ratio_mean"].item()
        print(f"iteration {iteration + 1}: success {success_rates[-1]:.0%}, ratio {ratio:.4f}")
    return success_rates


def main(model_folder=None, seed=0):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    if model_folder is not None:
        policy = load_policy(model_folder)
    else:
        texts = [f"after {letter} {next_letter(letter)}" for letter in LETTERS]
        settings = ModelSettings(preset="nano", vocab_size=300, context=32)
        policy = create_policy(texts, settings, seed=seed)
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    if model_folder is None:
        train_by_imitation(policy, optimizer, rng)
    return train_by_grpo(policy, optimizer, rng)


if __name__ == "__main__":
    main(*sys.argv[1:2])
