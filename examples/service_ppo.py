"""PPO with a value function and GAE, written by a client of the training service; requests are pipelined.

    python examples/service_grpo.py models/grid                 once: the base model (see there)
    posttrain service up service --set engine.bases.grid=models/grid --set reference_models.start=models/grid
    TINKER_BASE_URL=http://127.0.0.1:8123 TINKER_API_KEY=... python examples/service_ppo.py

The task is small: the share of even tokens is the reward, paid token by token. Every iteration sends the samples of all
prompts at once (asyncio.gather), then the log-probabilities under the frozen start and the current values together,
then all passes and updates without waiting in between: the service computes a run's requests in order.
"""

import asyncio

import numpy as np

from rl_core.service.client import AsyncServiceClient

PROMPTS = [[5, 6, 7], [8, 9], [10, 11, 12, 13], [14]]
ITERATIONS, SAMPLES, MAX_TOKENS, EPOCHS = 20, 16, 12, 2
GAMMA, GAE_LAMBDA, KL_COEF, LEARNING_RATE = 1.0, 0.95, 0.01, 3e-3


def compute_gae(rewards_T, values_T, gamma=GAMMA, gae_lambda=GAE_LAMBDA):
    """Compute advantages by GAE (arXiv:1506.02438); the value after the last token is 0."""
    advantages_T = np.zeros(len(rewards_T))
    advantage = next_value = 0.0
    for t in reversed(range(len(rewards_T))):
        delta = rewards_T[t] + gamma * next_value - values_T[t]
        advantage = delta + gamma * gae_lambda * advantage
        advantages_T[t], next_value = advantage, values_T[t]
    return advantages_T


async def draw_samples(sampling):
    """Sample all prompts with requests in flight together; return (prompt, sequence) pairs."""
    from tinker import types

    parameters = types.SamplingParams(max_tokens=MAX_TOKENS, stop=[])
    answers = await asyncio.gather(
        *(
            sampling.sample(
                prompt=types.ModelInput.from_ints(prompt),
                num_samples=SAMPLES,
                sampling_params=parameters,
            )
            for prompt in PROMPTS
        )
    )
    return [
        (prompt, sequence)
        for prompt, answer in zip(PROMPTS, answers, strict=True)
        for sequence in answer.sequences
    ]


def build_datum(prompt, sequence, ref_logprobs, values=None):
    """Build a datum of `enhanced_ppo`; a token's reward is 1 / MAX_TOKENS if it is even."""
    from tinker import types

    tokens = np.array(sequence.tokens)
    skipped = len(prompt) - 1
    inputs = {
        "target_tokens": np.array([*prompt[1:], *tokens]),
        "logprobs": np.pad(np.array(sequence.logprobs, np.float32), (skipped, 0)),
        "rewards": np.pad((tokens % 2 == 0) / MAX_TOKENS, (skipped, 0)).astype(np.float32),
        "mask": np.pad(np.ones(len(tokens), np.float32), (skipped, 0)),
        "ref_logprobs": np.array(ref_logprobs, np.float32),
    }
    if values is not None:
        inputs["values"] = np.asarray(values, np.float32)
    return types.Datum(
        model_input=types.ModelInput.from_ints([*prompt, *tokens[:-1].tolist()]),
        loss_fn_inputs=inputs,
    )


async def run_iteration(training, client):
    """Run one iteration; return mean reward, KL to the start, and how far our GAE is from the service's."""
    from tinker import types

    sampling = await training.save_weights_and_get_sampling_client()
    pairs = await draw_samples(sampling)
    rows = [[*prompt, *map(int, sequence.tokens)] for prompt, sequence in pairs]
    options = {"gamma": GAMMA, "gae_lambda": GAE_LAMBDA, "kl_coef": KL_COEF, "scale": 1 / len(rows)}
    zeros = [
        build_datum(*pair, np.zeros(len(row) - 1)) for pair, row in zip(pairs, rows, strict=True)
    ]
    valued_future = training.forward(zeros, "enhanced_ppo", options | {"kl_coef": 0.0})
    # The reference model and the values of the current weights are computed while we wait for both.
    reference, valued = await asyncio.gather(client.score("start", rows), valued_future)
    values = [output["values"].to_numpy() for output in valued.loss_fn_outputs]
    data = [
        build_datum(*pair, ref, old)
        for pair, ref, old in zip(pairs, reference.logprobs, values, strict=True)
    ]
    futures = []
    for _ in range(EPOCHS):
        futures.append(training.forward_backward(data, "enhanced_ppo", options))
        futures.append(training.optim_step(types.AdamParams(learning_rate=LEARNING_RATE)))
    first, *_ = await asyncio.gather(*futures)
    difference = 0.0
    for datum, old, output in zip(data, values, first.loss_fn_outputs, strict=True):
        rewards, mask = (datum.loss_fn_inputs[name].to_numpy() for name in ("rewards", "mask"))
        ours = compute_gae(rewards[mask != 0], old[mask != 0])
        theirs = output["advantages"].to_numpy()[mask != 0]
        difference = max(difference, float(np.abs(ours - theirs).max()))
    kl = first.metrics["ref_kl:mean"]
    reward = float(np.mean([np.mean(np.array(sequence.tokens) % 2 == 0) for _, sequence in pairs]))
    return reward, kl, difference


async def main():
    """Train and print one line per iteration."""
    import tinker

    training = await tinker.ServiceClient().create_lora_training_client("grid", rank=8)
    async with AsyncServiceClient() as client:
        for iteration in range(1, ITERATIONS + 1):
            reward, kl, difference = await run_iteration(training, client)
            print(
                f"iteration {iteration}: reward {reward:.3f}, KL to the start {kl:.5f}, "
                f"advantages differ by {difference:.1e}",
                flush=True,
            )


if __name__ == "__main__":
    asyncio.run(main())
