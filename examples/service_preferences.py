"""Preference training with the training service and the public tinker SDK: DPO with a custom loss, or a reward model.

    python examples/service_grpo.py models/grid                 once: the base model (see there)
    posttrain service up service --set engine.bases.grid=models/grid
    TINKER_BASE_URL=http://127.0.0.1:8123 TINKER_API_KEY=... python examples/service_preferences.py [reward]

A pair has one question and one look, then the right answer (chosen) or another one (rejected). The reward model uses
the service's loss.
"""

import random
import sys

import numpy as np

from rl_core import environments
from rl_core.data.chat import ChatRenderer
from rl_core.environments.pixel_grid_questions import COLOURS

LEVEL, HELDOUT, BATCH, BETA, LEARNING_RATE = "easy", 192, 32, 0.5, 1e-3
PAIRS = {"dpo": 400, "reward": 9600}  # a score head starts from nothing


def build_pairs(renderer, count, seed=0):
    """Return (tokens, first token of the answer) of chosen and rejected, for each pair."""
    environment = environments.make_environment("pixel_grid")
    seeds = environment.seeds_of("train", LEVEL)
    pairs = []
    for index in range(100_000, 200_000):  # seeds that the base model was not trained on
        demonstration = environment.demonstration(seeds[index], LEVEL)
        if not demonstration.success:
            continue
        *history, last = demonstration.messages
        right = last["content"].split()[-1]
        answers = "0123456789" if right.isdigit() else COLOURS
        rng = random.Random(f"{seed} {seeds[index]}")
        wrong = rng.choice([answer for answer in answers if answer != right])
        pair = []
        for answer in (right, wrong):
            message = {**last, "content": last["content"].removesuffix(right) + answer}
            tokens, is_action = renderer.encode_conversation([*history, message])
            pair.append((tokens, len(tokens) - is_action[::-1].index(False)))
        pairs.append(tuple(pair))
        if len(pairs) == count:
            return pairs
    raise AssertionError("too few demonstrations")


def build_datum(tokens, **inputs):
    from tinker import types

    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={name: np.asarray(values) for name, values in inputs.items()},
    )


def train_dpo(training, reference, pairs, heldout):
    """Run direct preference optimisation (arXiv:2305.18290): the loss here, forward and backward on the service."""
    import torch
    from tinker import types

    def build_rows(some_pairs):
        """Build datums 2 i and 2 i + 1 for pair i; `weights` are 1 at the answer's tokens."""
        rows = []
        for tokens, start in (side for pair in some_pairs for side in pair):
            weights = np.zeros(len(tokens) - 1, np.float32)
            weights[start - 1 :] = 1.0
            rows.append(build_datum(tokens, target_tokens=np.array(tokens[1:]), weights=weights))
        return rows

    def sum_reference_logprobs(pair):
        inputs = [types.ModelInput.from_ints(tokens) for tokens, _ in pair]
        futures = [reference.compute_logprobs(prompt) for prompt in inputs]
        sums = [
            sum(future.result()[start:]) for future, (_, start) in zip(futures, pair, strict=True)
        ]
        return torch.tensor(sums)

    def compute_margins(rows, logprobs, reference_N):
        weights = [torch.tensor(np.asarray(row.loss_fn_inputs["weights"].data)) for row in rows]
        sums_N = torch.stack([(p * w).sum() for p, w in zip(logprobs, weights, strict=True)])
        rewards_N = BETA * (sums_N - reference_N)
        return rewards_N[0::2] - rewards_N[1::2]

    reference_sums = {id(pair): sum_reference_logprobs(pair) for pair in [*pairs, *heldout]}
    results = []

    def evaluate(num_pairs):
        rows = build_rows(heldout)
        outputs = training.forward(rows, "cross_entropy").result().loss_fn_outputs
        logprobs = [torch.tensor(np.asarray(output["logprobs"].data)) for output in outputs]
        reference_N = torch.cat([reference_sums[id(pair)] for pair in heldout])
        margins = compute_margins(rows, logprobs, reference_N)
        accuracy, margin = float((margins > 0).float().mean()), float(margins.mean())
        print(
            f"{num_pairs} pairs: held-out accuracy {accuracy:.1%}, margin {margin:.3f}", flush=True
        )
        results.append((accuracy, margin))

    for start in range(0, len(pairs), BATCH):
        if start % (4 * BATCH) == 0:
            evaluate(start)
        batch = pairs[start : start + BATCH]
        reference_N = torch.cat([reference_sums[id(pair)] for pair in batch])

        def compute_loss(rows, logprobs, reference_N=reference_N):
            margins = compute_margins(rows, logprobs, reference_N)
            accuracy = float((margins > 0).float().mean())
            return -torch.nn.functional.logsigmoid(margins).mean(), {"accuracy": accuracy}

        training.forward_backward_custom(build_rows(batch), compute_loss).result()
        training.optim_step(types.AdamParams(learning_rate=LEARNING_RATE, eps=1e-8)).result()
    evaluate(len(pairs))
    return results


def train_reward_model(training, pairs, heldout):
    """Train Bradley-Terry scores at the last token, with the service's loss `reward_modeling`."""
    from tinker import types

    def build_rows(some_pairs):
        rows = []
        for pair in some_pairs:
            for (tokens, _), preferred in zip(pair, (1.0, 0.0), strict=True):
                preference = np.array([preferred], np.float32)
                # The last token is doubled because `build_datum` cuts it off.
                rows.append(build_datum([*tokens, tokens[-1]], preferred=preference))
        return rows

    def evaluate():
        outputs = training.forward(build_rows(heldout), "reward_modeling").result().loss_fn_outputs
        scores = np.array([np.asarray(output["scores"].data)[0] for output in outputs])
        differences = scores[0::2] - scores[1::2]
        return float((differences > 0).mean()), float(differences.mean())

    results = [evaluate()]
    for start in range(0, len(pairs), BATCH):
        rows = build_rows(pairs[start : start + BATCH])
        backward = training.forward_backward(rows, "reward_modeling", {"scale": 1 / BATCH})
        update = training.optim_step(types.AdamParams(learning_rate=LEARNING_RATE, eps=1e-8))
        backward.result()
        update.result()
    results.append(evaluate())
    print(f"held-out accuracy {results[0][0]:.1%} -> {results[-1][0]:.1%}", flush=True)
    return results


def main(kind="dpo", base="grid", num_pairs=None, seed=0):
    import tinker

    service = tinker.ServiceClient()
    training = service.create_lora_training_client(base_model=base, rank=16, seed=seed).result()
    renderer = ChatRenderer(training.get_tokenizer())
    num_pairs = PAIRS[kind] if num_pairs is None else num_pairs
    pairs = build_pairs(renderer, num_pairs + HELDOUT, seed)
    heldout, pairs = pairs[:HELDOUT], pairs[HELDOUT:]
    if kind == "reward":
        return train_reward_model(training, pairs, heldout)
    reference = service.create_sampling_client(base_model=base).result()
    return train_dpo(training, reference, pairs, heldout)


if __name__ == "__main__":
    main(*sys.argv[1:2])
