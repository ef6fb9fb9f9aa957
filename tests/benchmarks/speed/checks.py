"""Equality of results: `python -m speed.checks FOLDER`, one JSON line of checks with value and limit.

The reference is transformers' model, one row at a time, padded to the longest row of the batch.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from torch.nn import functional

from rl_core.inference.engine import Engine, create_rollout_backend
from rl_core.models.logprobs import completion_logprobs
from rl_core.rollouts.batching import TrainRow, build_batches
from rl_core.settings import SamplingSettings
from speed import inputs, ours
from speed.episodes import Scripted, list_end_ids, make_ragged_sequences

LOGPROB_LIMIT, LOSS_LIMIT = 1e-4, 1e-5


def count_greedy_differences(folder, rows):
    """Count greedy tokens of the engine that differ from those of `generate`, each prompt alone there."""
    model, tokenizer = ours.load(folder)
    engine = create_rollout_backend(
        model.eval(), eos_ids=(), pad_id=inputs.PAD, max_length=inputs.MAX_LENGTH
    )
    assert isinstance(engine, Engine), (
        "the engine does not know this model, so there would be nothing to compare"
    )
    prompts = [
        ours.encode_text(tokenizer, row["prompt"]) for row in inputs.read(folder, "prompts")[:rows]
    ]
    sequences = [Scripted(prompt, 0, limit=inputs.MAX_NEW) for prompt in prompts]
    engine.run_sequences(
        sequences, SamplingSettings(temperature=0, max_completion_tokens=inputs.MAX_NEW, slots=rows)
    )
    model.generation_config.eos_token_id = None
    differences = 0
    for prompt, sequence in zip(prompts, sequences, strict=True):
        ids = torch.tensor([prompt])
        with torch.no_grad():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=inputs.MAX_NEW,
                pad_token_id=inputs.PAD,
            )
        expected = out[0, len(prompt) :].tolist()
        differences += sum(a != b for a, b in zip(expected, sequence.completion_ids, strict=True))
    return differences


def measure_logprob_gap(folder):
    """Return the largest difference between the engine's and the trainer's log-probabilities, over ragged episodes."""
    model, tokenizer = ours.load(folder)
    engine = create_rollout_backend(
        model.eval(), eos_ids=list_end_ids(len(tokenizer)), pad_id=inputs.PAD, max_length=512
    )
    sequences = make_ragged_sequences(folder, tokenizer, 0, count=16)
    engine.run_sequences(
        sequences, SamplingSettings(max_completion_tokens=sequences[0].limit, slots=8)
    )
    rows = [TrainRow(s.prompt_ids, s.completion_ids, s.loss_mask, s.logprobs) for s in sequences]
    gap = 0.0
    for batch in build_batches(rows, 4096, inputs.PAD):
        with torch.no_grad():
            logprobs_BS, _ = completion_logprobs(model, batch)
        gap = max(gap, float((logprobs_BS - batch.sampler_logprobs_BS).abs().max()))
    return gap


def measure_loss_gaps(folder):
    """Return by stage our loss of the first step minus the reference's, absolute."""
    model, tokenizer = ours.load(folder)
    model.eval()
    sft = ours.encode_sft_rows(folder, tokenizer)[: inputs.BATCH["sft"]]
    tokens = sum(sum(mask) for _, mask in sft)
    width = max(len(ids) for ids, _ in sft)
    reference = {
        "sft": -sum(float(compute_logprobs(model, ids, mask, width)) for ids, mask in sft) / tokens
    }
    pairs = ours.make_pairs(folder, tokenizer, inputs.BATCH["reward"])
    scorer, _ = ours.heads.load_reward_model(folder / "reward_model", ours.CPU)
    scorer.eval()
    width = max(len(ids) for pair in pairs for ids in (pair.chosen_ids, pair.rejected_ids))
    margins = [
        compute_score(scorer, p.chosen_ids, width) - compute_score(scorer, p.rejected_ids, width)
        for p in pairs
    ]
    reference["reward"] = float(-functional.logsigmoid(torch.stack(margins)).mean())
    ours_by_stage = {
        "sft": ours.make_sft_trainer(folder).step(),
        "reward": ours.make_reward_trainer(folder).step(),
    }
    return {
        stage: abs(metrics["train/loss"] - reference[stage])
        for stage, metrics in ours_by_stage.items()
    }


def build_inputs(ids, width):
    room = width - len(ids)
    return {
        "input_ids": torch.tensor([list(ids) + [inputs.PAD] * room]),
        "attention_mask": torch.tensor([[1] * len(ids) + [0] * room]),
    }


@torch.no_grad()
def compute_logprobs(model, ids, mask, width):
    """Sum the log-probabilities of the tokens that carry loss, from the full row of logits."""
    log_p_SV = model(**build_inputs(ids, width)).logits[0].double().log_softmax(-1)
    places = [position for position, carries in enumerate(mask) if carries]
    return log_p_SV[
        [position - 1 for position in places], [ids[position] for position in places]
    ].sum()


@torch.no_grad()
def compute_score(model, ids, width):
    """From the last real token."""
    states_SH = model.model(**build_inputs(ids, width)).last_hidden_state[0]
    return model.score(states_SH[len(ids) - 1])[0].double()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, default=16, help="prompts that are decoded greedily")
    options = parser.parse_args()
    torch.manual_seed(0)
    gaps = measure_loss_gaps(options.folder)
    count = options.rows * inputs.MAX_NEW
    results = [
        (
            f"greedy tokens of the engine that differ from `generate` ({count})",
            count_greedy_differences(options.folder, options.rows),
            0,
        ),
        (
            "log-probabilities, engine against trainer, nats",
            measure_logprob_gap(options.folder),
            LOGPROB_LIMIT,
        ),
        *(
            (f"loss of {stage} against padded, unbatched rows", gap, LOSS_LIMIT)
            for stage, gap in gaps.items()
        ),
    ]
    print(
        json.dumps(
            [{"what": what, "value": value, "limit": limit} for what, value, limit in results]
        )
    )


if __name__ == "__main__":
    main()
