"""Inputs of both sides of a comparison: tiny Llamas, a tokenizer of characters, rows of sums; all from one seed.

    <folder>/<size>/model/, reward_model/    transformers folders: float32 safetensors, with the tokenizer
    <folder>/<size>/{sft,pairs,prompts}.jsonl    in the order in which both sides take the rows
    <folder>/<size>/inputs.json              sizes, parameters, digests; written last

Runs in the project's Python and in the peer's, so it imports no module of this project.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import zlib
from pathlib import Path

SIZES = {
    "small": dict(  # 3.2M
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=688,
        vocab_size=512,
    ),
    "medium": dict(  # 27M
        hidden_size=512,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        intermediate_size=1376,
        vocab_size=4096,
    ),
}
SEED = 0
ROWS = 2048
PAD, BOS, EOS = 0, 1, 2
# A batch of each stage; pairs for reward and dpo, rollouts for the others.
BATCH = {"sft": 32, "reward": 16, "dpo": 16, "grpo": 32, "grpo4": 32, "ppo": 32}
GROUP = 4
MAX_PROMPT, MAX_NEW, MAX_LENGTH = 32, 64, 256
# What both sides train with; TRL's scheduler and ours are constant then.
LEARNING_RATE, BETAS = 1e-5, (0.9, 0.999)


def draw_sum(rng, terms):
    """Draw a sum to do, its working, and the result: '7+5+4=', '7+5=12; 12+4=16 # 16', 16."""
    numbers = [rng.randint(1, 999) for _ in range(terms)]
    lines, total = [], numbers[0]
    for number in numbers[1:]:
        lines.append(f"{total}+{number}={total + number}")
        total += number
    return "+".join(map(str, numbers)) + "=", f"{'; '.join(lines)} # {total}", total


def make_rows(seed=SEED, count=ROWS):
    """Make rows of the three files.

    Lengths differ about tenfold; prompts of rollouts have at most MAX_PROMPT characters.
    """
    rng = random.Random(seed)
    rows = {"sft": [], "pairs": [], "prompts": []}
    for _ in range(count):
        prompt, completion, _ = draw_sum(rng, rng.choice([2, 2, 2, 3, 3, 4, 5, 6, 8, 10]))
        rows["sft"].append({"prompt": prompt, "completion": completion})
        prompt, chosen, total = draw_sum(rng, rng.choice([2, 2, 3, 3, 4, 5, 6]))
        rejected = f"{chosen.rpartition('#')[0]}# {total + rng.choice([-10, -1, 1, 10])}"
        rows["pairs"].append({"prompt": prompt, "chosen": chosen, "rejected": rejected})
        prompt, _, total = draw_sum(rng, rng.choice([2, 3, 4, 5]))
        rows["prompts"].append({"prompt": prompt, "answer": str(total)})
    return rows


def score(completion, answer):
    """Return 1 for the right last number, and a number in [0, 1) that the text decides.

    So that every rollout differs from its group and has an advantage: a trainer may leave out those that have none, and
    a random model, which is never right, would leave it nothing to do.
    """
    numbers = re.findall(r"\d+", completion)
    return float(bool(numbers) and numbers[-1] == answer) + zlib.crc32(completion.encode()) / 2**32


def make_tokenizer(vocab_size):
    """Make a tokenizer with a token per printable character; fillers above, so that every sampled id has a text."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<pad>", "<bos>", "<eos>", "<unk>", "\n", *map(chr, range(32, 127))]
    names += [f"<{index}>" for index in range(len(names), vocab_size)]
    tokenizer = Tokenizer(
        models.WordLevel({name: index for index, name in enumerate(names)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        model_max_length=1024,
    )


def make_config(shape, context=1024):
    """Make the config of a Llama of this shape, untied as the larger ones are."""
    from transformers import LlamaConfig

    return LlamaConfig(
        **shape,
        max_position_embeddings=context,
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )


def build(folder, size):
    """Write everything of one size into <folder>/<size>, unless it is there. Returns that folder."""
    import torch
    from transformers import LlamaForCausalLM, LlamaForSequenceClassification

    folder_of_size = Path(folder) / size
    if (folder_of_size / "inputs.json").exists():
        return folder_of_size
    folder_of_size.mkdir(parents=True, exist_ok=True)
    tokenizer, config = make_tokenizer(SIZES[size]["vocab_size"]), make_config(SIZES[size])
    torch.manual_seed(SEED)
    model = LlamaForCausalLM(config).float()
    config.num_labels = 1
    scorer = LlamaForSequenceClassification(config).float()
    scorer.model.load_state_dict(model.model.state_dict())
    for name, part in (("model", model), ("reward_model", scorer)):
        part.save_pretrained(folder_of_size / name)
        tokenizer.save_pretrained(folder_of_size / name)
    digests = {}
    for name, rows in make_rows().items():
        data = "".join(json.dumps(row) + "\n" for row in rows).encode()
        (folder_of_size / f"{name}.jsonl").write_bytes(data)
        digests[name] = hashlib.sha256(data).hexdigest()[:16]
    digests["model"] = hashlib.sha256(
        (folder_of_size / "model" / "model.safetensors").read_bytes()
    ).hexdigest()[:16]
    summary = {
        "size": size,
        "seed": SEED,
        "parameters": sum(p.numel() for p in model.parameters()),
        "sha256": digests,
    }
    (folder_of_size / "inputs.json").write_text(json.dumps(summary, indent=1))
    return folder_of_size


def read(folder, name):
    """Read the rows of one file."""
    with (Path(folder) / f"{name}.jsonl").open() as file:
        return [json.loads(line) for line in file]
