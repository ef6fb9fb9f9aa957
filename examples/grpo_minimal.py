"""GRPO in one file, with nothing hidden: sample groups, reward, compare within groups, step. For those who change it.

    python examples/grpo_minimal.py                    a minute on a CPU, no download
    python examples/grpo_minimal.py MODEL_FOLDER       starts from a model of yours instead

The task: name the letter that follows. A model made from scratch first imitates a teacher who is right half of the time
(step 1), then learns from rewards to be right nearly always (step 2).

Suffixes: P prompts, G rollouts per prompt, B = P*G rows, S whole sequence.
"""

import random
import sys

import torch

from rl_core import SamplingSettings, create_policy, load_policy
from rl_core.data.batches import attention_mask, pad_rows
from rl_core.losses.advantages import group_advantages
from rl_core.losses.policy import clipped_policy_loss
from rl_core.losses.supervised import supervised_loss
from rl_core.models.logprobs import completion_logprobs
from rl_core.settings import ModelSettings
from rl_core.types import TrainBatch

LETTERS = "abcdefghij"
GROUP_SIZE, PROMPTS, ITERATIONS = 8, 8, 40
IMITATION_STEPS, LEARNING_RATE, CLIP_EPS = 250, 5e-3, 0.2
SAMPLING = SamplingSettings(temperature=1.0, max_completion_tokens=4)


def question(letter):
    return [{"role": "user", "content": f"after {letter}"}]


def right_answer(letter):
    return LETTERS[(LETTERS.index(letter) + 1) % len(LETTERS)]


def reward_of(letter, answer):
    return 1.0 if answer.strip() == right_answer(letter) else 0.0


class Answer:
    """One rollout of one prompt, as the engine sees it: tokens come in through `advance`; None ends the episode."""

    def __init__(self, prompt_ids, seed):
        self.prompt_ids, self.seed = prompt_ids, seed
        self.ids, self.logprobs = [], []

    def take_action(self, action_ids, logprobs, hit_limit):
        self.ids, self.logprobs = list(action_ids), list(logprobs)


def make_batch(rows, pad_id, device):
    """Rows of (prompt_ids, completion_ids), padded on the right; the loss is on the completions alone."""
    sequences = [prompt + completion for prompt, completion in rows]
    mask_BS = pad_rows(
        [[0] * len(prompt) + [1] * len(completion) for prompt, completion in rows], 0
    ).bool()
    return TrainBatch(
        pad_rows(sequences, pad_id), attention_mask([len(row) for row in sequences]), mask_BS
    ).to(device)


def imitate(policy, optimizer, rng):
    """Step 1: supervised fine-tuning on a teacher who is right half of the time."""
    renderer, model = policy.renderer, policy.model
    for step in range(IMITATION_STEPS):
        rows = []
        for letter in rng.choices(LETTERS, k=32):
            said = right_answer(letter) if rng.random() < 0.5 else rng.choice(LETTERS)
            rows.append((renderer.prompt_ids(question(letter)), renderer.action_ids(said)))
        batch = make_batch(rows, renderer.pad_id, model.device)
        logprobs_BS, _ = completion_logprobs(model, batch)
        loss, _ = supervised_loss(
            logprobs_BS, batch.loss_mask_BS, num_loss_tokens=batch.num_loss_tokens
        )
        optimizer_step(model, optimizer, loss)
        if step % 50 == 49:
            print(f"imitation step {step + 1}: loss {loss.item():.3f} nats per token")


def grpo(policy, optimizer, rng):
    """Step 2: GRPO. Returns the success rate of every iteration."""
    renderer, model = policy.renderer, policy.model
    engine = policy.backend()
    success = []
    for iteration in range(ITERATIONS):
        # 1. Sample a group of answers to each prompt, from the present weights.
        letters = rng.sample(LETTERS, PROMPTS)
        answers = [
            Answer(renderer.prompt_ids(question(letter)), seed=rng.getrandbits(64))
            for letter in letters
            for _ in range(GROUP_SIZE)
        ]
        engine.refresh()
        engine.run(answers, SAMPLING)

        # 2. Reward them, and compare each one with the others of its group.
        texts = [renderer.action_text(answer.ids) for answer in answers]
        asked = [letter for letter in letters for _ in range(GROUP_SIZE)]
        rewards_PG = torch.tensor(list(map(reward_of, asked, texts))).reshape(PROMPTS, GROUP_SIZE)
        advantages_B = group_advantages(rewards_PG, method="grpo").flatten()

        # 3. One step on the clipped policy-gradient loss. The old log-probabilities are those of the sampler.
        batch = make_batch([(a.prompt_ids, a.ids) for a in answers], renderer.pad_id, model.device)
        logprobs_BS, _ = completion_logprobs(model, batch)
        old_logprobs_BS = torch.zeros(batch.loss_mask_BS.shape)
        for row, answer in enumerate(answers):
            start = len(answer.prompt_ids)
            old_logprobs_BS[row, start : start + len(answer.ids)] = torch.tensor(answer.logprobs)
        loss, metrics = clipped_policy_loss(
            logprobs_BS,
            old_logprobs_BS.to(model.device),
            advantages_B[:, None].expand_as(old_logprobs_BS).to(model.device),
            batch.loss_mask_BS,
            num_loss_tokens=batch.num_loss_tokens,
            clip_eps=CLIP_EPS,
        )
        optimizer_step(model, optimizer, loss)
        success.append(rewards_PG.mean().item())
        print(
            f"iteration {iteration + 1}: success {success[-1]:.0%}, ratio {metrics['ratio_mean'].item():.4f}"
        )
    return success


def optimizer_step(model, optimizer, loss):
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def main(model_folder=None, seed=0):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    if model_folder is not None:
        policy = load_policy(model_folder)
    else:
        texts = [f"after {letter} {right_answer(letter)}" for letter in LETTERS]
        policy = create_policy(
            texts, ModelSettings(preset="nano", vocab_size=300, context=32), seed=seed
        )
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    if model_folder is None:
        imitate(policy, optimizer, rng)
    return grpo(policy, optimizer, rng)


if __name__ == "__main__":
    main(*sys.argv[1:2])
