"""GRPO on pixel_grid against the training service, by the public tinker SDK: the loop is here, the training there.

    pip install tinker                                          beside posttrain, or in an environment of its own
    python examples/service_grpo.py models/grid                 once: a small model that copies a demonstrator
    posttrain service up service --set engine.bases.grid=models/grid
    posttrain service key create me                             the key is TINKER_API_KEY
    TINKER_BASE_URL=http://127.0.0.1:8123 python examples/service_grpo.py

The policy answers questions about an image that it cannot see; it looks with tools, turn by turn. The demonstrator is
right in less than half of the episodes; GRPO goes on from there, by rewards.
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


def make_base(folder, demonstrations=6000, epochs=4, seed=0):
    """A model from scratch that imitates the demonstrator: the base model of the service."""
    import rl_core
    from rl_core.settings import ModelSettings

    environment = environments.make_environment("pixel_grid")
    seeds = environment.seeds_of("train", LEVEL)
    rows = [
        {"messages": environment.demonstration(seeds[n], LEVEL).messages}
        for n in range(demonstrations)
    ]
    texts = [message["content"] for row in rows for message in row["messages"]]
    model = rl_core.create_policy(
        texts, ModelSettings(preset="tiny", vocab_size=512, context=CONTEXT), seed=seed
    )
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
    """One episode as tokens; `mine` are 1 where the policy chose."""

    episode: object
    tokens: list = field(default_factory=list)
    logprobs: list = field(default_factory=list)
    mine: list = field(default_factory=list)
    reward: float = 0.0
    success: bool = False
    is_over: bool = False

    def read(self, ids):
        self.tokens += ids
        self.logprobs += [0.0] * len(ids)
        self.mine += [0] * len(ids)

    def act(self, sequence, renderer):
        """Take the policy's next action; what the environment answers is read, never tokenised again."""
        self.tokens += list(sequence.tokens)
        self.logprobs += list(sequence.logprobs)
        self.mine += [1] * len(sequence.tokens)
        step = self.episode.step(renderer.action_text(list(sequence.tokens)))
        self.reward += step.reward
        self.success = bool(step.success)
        self.is_over = step.terminated or step.truncated
        seen = [] if self.is_over else renderer.observation_ids(step.messages)
        if len(self.tokens) + len(seen) + MAX_TOKENS > CONTEXT:
            self.is_over = True
        if not self.is_over:
            self.read(seen)


def play(sampler, renderer, environment, seeds):
    """Rollouts in order; all that wait for an action are asked at once."""
    from tinker import types

    rollouts = [Rollout(environment.episode(seed, LEVEL)) for seed in seeds]
    for rollout in rollouts:
        rollout.read(renderer.prompt_ids(rollout.episode.reset()))
    parameters = types.SamplingParams(
        max_tokens=MAX_TOKENS, temperature=1.0, stop=list(renderer.eos_ids)
    )
    for _ in range(MAX_TURNS):
        live = [rollout for rollout in rollouts if not rollout.is_over]
        futures = [
            sampler.sample(
                types.ModelInput.from_ints(rollout.tokens),
                num_samples=1,
                sampling_params=parameters,
            )
            for rollout in live
        ]
        for rollout, future in zip(live, futures, strict=True):
            rollout.act(future.result().sequences[0], renderer)
    return rollouts


def datum(rollout, advantage):
    """The rollout for a loss that sums over tokens: position i predicts token i + 1."""
    from tinker import types

    mine = np.array(rollout.mine[1:], np.float32)
    return types.Datum(
        model_input=types.ModelInput.from_ints(rollout.tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": np.array(rollout.tokens[1:]),
            "logprobs": np.array(rollout.logprobs[1:], np.float32),
            "advantages": mine * np.float32(advantage),
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
        rollouts = play(sampler, renderer, environment, seeds)
        rewards_PG = np.array([rollout.reward for rollout in rollouts]).reshape(PROMPTS, GROUP_SIZE)
        advantages_PG = rewards_PG - rewards_PG.mean(
            1, keepdims=True
        )  # Dr. GRPO: centred, not divided
        scale = 1 / sum(sum(rollout.mine) for rollout in rollouts)  # losses of the service are sums
        data = [
            datum(rollout, advantage * scale)
            for rollout, advantage in zip(rollouts, advantages_PG.flatten(), strict=True)
            if advantage
        ]
        if data:
            passed = training.forward_backward(data, "ppo")
            stepped = training.optim_step(adam)  # in flight with the pass
            passed.result()
            stepped.result()
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
        print(make_base(sys.argv[1]))
    else:
        main()
