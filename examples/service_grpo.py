"""GRPO on pixel_grid with the training service and the public tinker SDK: the loop runs here, the training there.

    pip install tinker                                          in the environment of posttrain, or in another one
    python examples/service_grpo.py models/grid                 once: a small model that copies a demonstrator
    posttrain service up service --set engine.bases.grid=models/grid
    posttrain service key create me                             the key is TINKER_API_KEY
    TINKER_BASE_URL=http://127.0.0.1:8123 python examples/service_grpo.py

The policy answers questions about an image that it cannot see; it looks with tools, turn by turn. The demonstrator is
right in less than half of the episodes; GRPO improves on it with rewards.
"""

import random
import sys
from dataclasses import dataclass, field

import numpy as np

from rl_core import environments
from rl_core.data.chat import ChatRenderer

LEVEL, CONTEXT = "easy", 192
PROMPTS, GROUP_SIZE, ITERATIONS, MAX_TURNS, MAX_TOKENS = 20, 8, 30, 4, 12
LEARNING_RATE = 1e-3


def train_base_model(folder, demonstrations=6000, epochs=4, seed=0):
    """Train a model from scratch to imitate the demonstrator; it is the base model of the service."""
    import rl_core

    environment = environments.make_environment("pixel_grid")
    seeds = environment.seeds_of("train", LEVEL)
    rows = [
        {"messages": environment.demonstration(seeds[n], LEVEL).messages}
        for n in range(demonstrations)
    ]
    texts = [message["content"] for row in rows for message in row["messages"]]
    model_settings = rl_core.ModelSettings(preset="tiny", vocab_size=512, context=CONTEXT)
    model = rl_core.create_policy(texts, model_settings, seed=seed)
    settings = rl_core.SFTSettings(
        epochs=epochs, batch_size=32, learning_rate=4e-3, warmup_steps=20
    )
    training = rl_core.sft(
        model, rows, heldout=0.02, settings=settings, tracker="terminal", seed=seed
    )
    training.run()
    return training.save(folder)


@dataclass
class Rollout:
    """One episode as tokens."""

    episode: object
    tokens: list = field(default_factory=list)
    logprobs: list = field(default_factory=list)
    action_mask: list = field(default_factory=list)  # 1 = the policy chose the token
    reward: float = 0.0
    success: bool = False
    is_over: bool = False

    def append_context(self, ids):
        self.tokens += ids
        self.logprobs += [0.0] * len(ids)
        self.action_mask += [0] * len(ids)

    def take_action(self, sequence, renderer):
        """Take the policy's next action and append the observation, keeping the sampled tokens as they are."""
        self.tokens += list(sequence.tokens)
        self.logprobs += list(sequence.logprobs)
        self.action_mask += [1] * len(sequence.tokens)
        step = self.episode.step(renderer.action_text(list(sequence.tokens)))
        self.reward += step.reward
        self.success = bool(step.success)
        self.is_over = step.terminated or step.truncated
        observation = [] if self.is_over else renderer.observation_ids(step.messages)
        if len(self.tokens) + len(observation) + MAX_TOKENS > CONTEXT:
            self.is_over = True
        if not self.is_over:
            self.append_context(observation)


def play_episodes(sampler, renderer, environment, seeds):
    """Play one rollout per seed, in order; all that need an action are sampled together."""
    from tinker import types

    rollouts = [Rollout(environment.episode(seed, LEVEL)) for seed in seeds]
    for rollout in rollouts:
        rollout.append_context(renderer.prompt_ids(rollout.episode.reset()))
    parameters = types.SamplingParams(
        max_tokens=MAX_TOKENS, temperature=1.0, stop=list(renderer.eos_ids)
    )
    for _ in range(MAX_TURNS):
        active = [rollout for rollout in rollouts if not rollout.is_over]
        inputs = [types.ModelInput.from_ints(rollout.tokens) for rollout in active]
        futures = [
            sampler.sample(prompt, num_samples=1, sampling_params=parameters) for prompt in inputs
        ]
        for rollout, future in zip(active, futures, strict=True):
            rollout.take_action(future.result().sequences[0], renderer)
    return rollouts


def build_datum(rollout, advantage):
    """Build the input of a loss that sums over tokens: position i predicts token i + 1."""
    from tinker import types

    action_mask = np.array(rollout.action_mask[1:], np.float32)
    return types.Datum(
        model_input=types.ModelInput.from_ints(rollout.tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": np.array(rollout.tokens[1:]),
            "logprobs": np.array(rollout.logprobs[1:], np.float32),
            "advantages": action_mask * np.float32(advantage),
        },
    )


def main(iterations=ITERATIONS, base="grid", seed=0):
    import tinker
    from tinker import types

    rng = random.Random(seed)
    environment = environments.make_environment("pixel_grid")
    pool = environment.seeds_of("train", LEVEL)
    service = tinker.ServiceClient()
    training = service.create_lora_training_client(base_model=base, rank=16, seed=seed).result()
    renderer = ChatRenderer(training.get_tokenizer())
    adam = types.AdamParams(learning_rate=LEARNING_RATE, eps=1e-8, grad_clip_norm=1.0)
    success = []
    for iteration in range(iterations):
        sampler = training.save_weights_and_get_sampling_client().result()
        seeds = [pool[n] for n in rng.sample(range(100_000), PROMPTS) for _ in range(GROUP_SIZE)]
        rollouts = play_episodes(sampler, renderer, environment, seeds)
        rewards_PG = np.array([rollout.reward for rollout in rollouts]).reshape(PROMPTS, GROUP_SIZE)
        advantages_PG = rewards_PG - rewards_PG.mean(1, keepdims=True)  # Dr. GRPO: not divided
        # Losses of the service are sums over tokens.
        scale = 1 / sum(sum(rollout.action_mask) for rollout in rollouts)
        data = [
            build_datum(rollout, advantage * scale)
            for rollout, advantage in zip(rollouts, advantages_PG.flatten(), strict=True)
            if advantage
        ]
        if data:
            backward = training.forward_backward(data, "ppo")
            update = training.optim_step(adam)  # queued without waiting for the pass
            backward.result()
            update.result()
        success.append(float(np.mean([rollout.success for rollout in rollouts])))
        print(
            f"iteration {iteration + 1}: success {success[-1]:.0%}, reward {rewards_PG.mean():.3f}",
            flush=True,
        )
    path = training.save_state("learned").result().path
    print(f"saved {path}")
    return success, path


if __name__ == "__main__":
    if sys.argv[1:]:
        print(train_base_model(sys.argv[1]))
    else:
        main()
