"""Loss tokens of TRL for rows of common formats, as JSON: run with an interpreter that has TRL.

    python tests/benchmarks/trl_masks.py TOKENIZER_FOLDER ROWS.json > MASKS.json

`tests/rl_core/data/test_trl_masks.py` holds what it printed for TRL 1.16.0, and compares.
"""

import json
import sys
import tempfile

import torch
import transformers
import trl
from datasets import Dataset
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM


def main(folder: str, rows_file: str) -> None:
    """Print {"trl": version, "sft": [{"ids", "mask"}, ...], "dpo": [...]}."""
    with open(rows_file) as file:
        rows = json.load(file)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(0)
    shape = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)

    place = tempfile.mkdtemp()
    made = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, **shape))
    made.save_pretrained(place)
    tokenizer.save_pretrained(place)
    common = dict(output_dir=place, report_to="none", use_cpu=True, bf16=False, max_length=None)
    found = {"trl": trl.__version__, "transformers": transformers.__version__, "sft": [], "dpo": []}
    for row in rows["sft"]:
        args = trl.SFTConfig(**common, assistant_only_loss="messages" in row, eos_token=tokenizer.eos_token)
        trainer = trl.SFTTrainer(place, args, train_dataset=Dataset.from_list([row]), processing_class=tokenizer)
        batch = trainer.data_collator([trainer.train_dataset[0]])
        ids, labels = batch["input_ids"][0].tolist(), batch["labels"][0].tolist()
        found["sft"].append({"ids": ids, "mask": [label != -100 for label in labels]})
    for row in rows["dpo"]:
        args = trl.DPOConfig(**common)
        trainer = trl.DPOTrainer(place, args=args, train_dataset=Dataset.from_list([row]), processing_class=tokenizer)
        batch = trainer.data_collator([trainer.train_dataset[0]])
        sides = []
        for side in (0, 1):
            real = batch["attention_mask"][side].bool()
            mask = batch["completion_mask"][side].bool()[real].tolist()
            sides.append({"ids": batch["input_ids"][side][real].tolist(), "mask": mask})
        found["dpo"].append(sides)
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
