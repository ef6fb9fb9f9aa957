"""Preference training against the training service, by the public tinker SDK: DPO with a loss of your own, or a reward
model with the service's.

    python examples/service_grpo.py models/grid                 once: the base model (see there)
    posttrain service up service --set engine.bases.grid=models/grid
    TINKER_BASE_URL=http://127.0.0.1:8123 TINKER_API_KEY=... python examples/service_preferences.py [reward]

Pairs: the same question and the same look, then the right answer (chosen) or another one (rejected).
"""

import random
import sys

import numpy as np

from rl_core import environments
from rl_core.data.chat import ChatRenderer
from rl_core.environments.pixel_grid_questions import COLOURS

LEVEL, HELDOUT, BATCH, BETA, LEARNING_RATE = "easy", 192, 32, 0.5, 1e-3
PAIRS = {"dpo": 400, "reward": 2400}  # a score head begins with nothing


def make_pairs(renderer, count, seed=0):
    """(tokens, first token of the answer) of chosen and rejected, for each pair."""
    environment = environments.make_environment("pixel_grid")
    pairs, seeds = [], environment.seeds_of("train", LEVEL)
    for number in (
        seeds[place] for place in range(100_000, 200_000)
    ):  # not those of the base model
        shown = environment.demonstration(number, LEVEL)
        if not shown.success:
            continue
        *before, last = shown.messages
        right = last["content"].split()[-1]
        others = "0123456789" if right.isdigit() else COLOURS
        wrong = random.Random(f"{seed} {number}").choice([one for one in others if one != right])
        pair = []
        for answer in (right, wrong):
            said = {**last, "content": last["content"].removesuffix(right) + answer}
            tokens, is_action = renderer.conversation([*before, said])
            pair.append((tokens, len(tokens) - is_action[::-1].index(False)))
        pairs.append(tuple(pair))
        if len(pairs) == count:
            return pairs
    raise AssertionError("too few demonstrations")


def datum(tokens, **inputs):
    from tinker import types

    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={name: np.asarray(values) for name, values in inputs.items()},
    )


def dpo(training, reference, pairs, heldout):
    """Direct preference optimisation (arXiv:2305.18290); its loss runs here, forward and backward there."""
    import torch
    from tinker import types

    def rows(some):
        """Datums 2 i and 2 i + 1 are a pair; `weights` are 1 at the answer's tokens."""
        found = []
        for tokens, start in (one for pair in some for one in pair):
            weights = np.zeros(len(tokens) - 1, np.float32)
            weights[start - 1 :] = 1.0
            found.append(datum(tokens, target_tokens=np.array(tokens[1:]), weights=weights))
        return found

    def reference_sums(some):
        asked = [
            reference.compute_logprobs(types.ModelInput.from_ints(tokens))
            for pair in some
            for tokens, _ in pair
        ]
        starts = [start for pair in some for _, start in pair]
        return torch.tensor(
            [sum(one.result()[start:]) for one, start in zip(asked, starts, strict=True)]
        )

    def margins(data, logprobs, reference_N):
        sums_N = torch.stack(
            [
                (one * torch.tensor(np.asarray(row.loss_fn_inputs["weights"].data))).sum()
                for row, one in zip(data, logprobs, strict=True)
            ]
        )
        gains_N = BETA * (sums_N - reference_N)
        return gains_N[0::2] - gains_N[1::2]

    known = {id(pair): reference_sums([pair]) for pair in [*pairs, *heldout]}
    figures = []

    def accuracy():
        data = rows(heldout)
        outputs = training.forward(data, "cross_entropy").result().loss_fn_outputs
        logprobs = [torch.tensor(np.asarray(one["logprobs"].data)) for one in outputs]
        found = margins(data, logprobs, torch.cat([known[id(pair)] for pair in heldout]))
        return float((found > 0).float().mean()), float(found.mean())

    for start in range(0, len(pairs), BATCH):
        if start % (4 * BATCH) == 0:
            figures.append(accuracy())
            print(
                f"{start} pairs: held-out accuracy {figures[-1][0]:.1%}, margin {figures[-1][1]:.3f}",
                flush=True,
            )
        some = pairs[start : start + BATCH]
        reference_N = torch.cat([known[id(pair)] for pair in some])

        def loss(data, logprobs, reference_N=reference_N):
            found = margins(data, logprobs, reference_N)
            return -torch.nn.functional.logsigmoid(found).mean(), {
                "accuracy": float((found > 0).float().mean())
            }

        training.forward_backward_custom(rows(some), loss).result()
        training.optim_step(types.AdamParams(learning_rate=LEARNING_RATE, eps=1e-8)).result()
    figures.append(accuracy())
    print(
        f"{len(pairs)} pairs: held-out accuracy {figures[-1][0]:.1%}, margin {figures[-1][1]:.3f}",
        flush=True,
    )
    return figures


def reward_model(training, pairs, heldout):
    """Bradley-Terry scores at the last token, by the service's loss `reward_modeling`."""
    from tinker import types

    def rows(some):
        return [
            datum(
                [*tokens, tokens[-1]], preferred=np.array([preferred], np.float32)
            )  # the last one is cut off
            for pair in some
            for (tokens, _), preferred in zip(pair, (1.0, 0.0), strict=True)
        ]

    def accuracy():
        outputs = training.forward(rows(heldout), "reward_modeling").result().loss_fn_outputs
        scores = np.array([np.asarray(one["scores"].data)[0] for one in outputs])
        return float((scores[0::2] > scores[1::2]).mean()), float(
            (scores[0::2] - scores[1::2]).mean()
        )

    figures = [accuracy()]
    for start in range(0, len(pairs), BATCH):
        passed = training.forward_backward(
            rows(pairs[start : start + BATCH]), "reward_modeling", {"scale": 1 / BATCH}
        )
        stepped = training.optim_step(types.AdamParams(learning_rate=LEARNING_RATE, eps=1e-8))
        passed.result()
        stepped.result()
    figures.append(accuracy())
    print(f"held-out accuracy {figures[0][0]:.1%} -> {figures[-1][0]:.1%}", flush=True)
    return figures


def main(kind="dpo", base="grid", pairs=None, seed=0):
    import tinker

    pairs = PAIRS[kind] if pairs is None else pairs

    service = tinker.ServiceClient()
    training = service.create_lora_training_client(base_model=base, rank=16, seed=seed).result()
    renderer = ChatRenderer(training.get_tokenizer())
    found = make_pairs(renderer, pairs + HELDOUT, seed)
    heldout, found = found[:HELDOUT], found[HELDOUT:]
    if kind == "reward":
        return reward_model(training, found, heldout)
    return dpo(training, service.create_sampling_client(base_model=base), found, heldout)


if __name__ == "__main__":
    main(*sys.argv[1:2])
