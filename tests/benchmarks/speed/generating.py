"""The peer's side of rollouts: transformers' `generate`, on the same prompts and episodes."""

from __future__ import annotations

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from speed import inputs
from speed.episodes import list_end_ids, make_ragged_sequences


def run(stage, folder, steps, gate):
    """Load the model, then take steps on request."""
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    gate.ready(versions={"torch": torch.__version__, "transformers": transformers.__version__})
    kind, _, shape = stage.partition("_")
    for taken in range(steps):
        gate.wait()
        if kind == "generate":
            tokens = generate(model, tokenizer, folder, *map(int, shape.split("x")))
        else:
            sequences = make_ragged_sequences(folder, tokenizer, taken)
            play(model, sequences, list_end_ids(len(tokenizer)))
            tokens = sum(sequence.sampled for sequence in sequences)
        gate.done(tokens)


def pad_left(rows):
    """Return ids and mask of token rows, padding on the left."""
    width = max(map(len, rows))
    ids = torch.tensor([[inputs.PAD] * (width - len(row)) + list(row) for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return {"input_ids": ids, "attention_mask": mask}


def generate(model, tokenizer, folder, rows, new):
    """Generate `rows` completions of exactly `new` tokens; return how many tokens that were."""
    prompts = [
        tokenizer(row["prompt"])["input_ids"] for row in inputs.read(folder, "prompts")[:rows]
    ]
    batch = pad_left(prompts)
    with torch.no_grad():
        out = model.generate(
            **batch,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=new,
            pad_token_id=inputs.PAD,
        )
    return (out.shape[1] - batch["input_ids"].shape[1]) * rows


def play(model, sequences, end_ids):
    """Play every turn of all unfinished sequences in one call, which reads all of their tokens again."""
    active, is_end = list(sequences), set(end_ids)
    while active:
        batch = pad_left([sequence.prompt_ids + sequence.completion_ids for sequence in active])
        rooms = [sequence.limit - len(sequence.completion_ids) for sequence in active]
        with torch.no_grad():
            out = model.generate(
                **batch,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=max(rooms),
                eos_token_id=end_ids,
                pad_token_id=inputs.PAD,
            )
        width, going = batch["input_ids"].shape[1], []
        for sequence, room, row in zip(active, rooms, out[:, width:].tolist(), strict=True):
            end = next(
                (position for position, token in enumerate(row) if token in is_end), len(row)
            )
            action = row[: min(end + 1, room)]
            hit_limit = len(sequence.completion_ids) + len(action) >= sequence.limit
            if sequence.take_action(action, [0.0] * len(action), hit_limit) is not None:
                going.append(sequence)
        active = going
