"""Tokens and loss tokens of TRL for the rows of files, as JSON: run with an interpreter that has TRL.

    python tests/benchmarks/trl_masks.py JOB.json > MASKS.json

`tests/benchmarks/format_table.py` writes the job: {"tokenizer": folder, "files": {name: {"trainer": "sft", "dpo" or
"kto", "rows": [...], "together": true = as one data set}}}. Printed is {"trl": version, "transformers": version,
"files": {name: [...]}} with {"sides": [{"ids", "loss"}, ...]} for each row, or {"error": ...}.
"""

import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

Row = dict[str, Any]


def main(job_file: str) -> None:
    """Print what the trainers of TRL make of the job's rows."""
    with open(job_file) as file:
        job = json.load(file)
    tokenizer = AutoTokenizer.from_pretrained(job["tokenizer"])
    torch.manual_seed(0)
    shape = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    folder = tempfile.mkdtemp()
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, **shape)
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    results: dict[str, Any] = {
        "trl": trl.__version__,
        "transformers": transformers.__version__,
        "files": {},
    }
    for name, file in job["files"].items():
        read = _READERS[file["trainer"]]
        parts = [file["rows"]] if file.get("together") else [[row] for row in file["rows"]]
        results["files"][name] = [
            row for part in parts for row in _try(read, folder, tokenizer, part)
        ]
    print(json.dumps(results))


def _try(read: Callable[..., list[Row]], folder: str, tokenizer: Any, rows: list[Row]) -> list[Row]:
    try:
        return read(folder, tokenizer, rows)
    except Exception as error:  # that TRL refuses the format is a finding
        line = (str(error).strip().splitlines() or [""])[0]
        return [{"error": f"{type(error).__name__}: {line}"}] * len(rows)


def _build_common_options(folder: str) -> dict[str, Any]:
    return dict(output_dir=folder, report_to="none", use_cpu=True, bf16=False, max_length=None)


def _collate_sft(folder: str, tokenizer: Any, rows: list[Row]) -> list[Row]:
    args = trl.SFTConfig(
        **_build_common_options(folder),
        assistant_only_loss="messages" in rows[0],
        eos_token=tokenizer.eos_token,
    )
    trainer = trl.SFTTrainer(
        folder, args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer
    )
    return [_collate(trainer, row) for row in trainer.train_dataset]


def _collate(trainer: Any, row: Mapping[str, Any]) -> Row:
    batch = trainer.data_collator([row])
    loss = [position for position, label in enumerate(batch["labels"][0].tolist()) if label != -100]
    return {"sides": [{"ids": batch["input_ids"][0].tolist(), "loss": loss}]}


def _collate_dpo(folder: str, tokenizer: Any, rows: list[Row]) -> list[Row]:
    args = trl.DPOConfig(**_build_common_options(folder))
    trainer = trl.DPOTrainer(
        folder, args=args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer
    )
    batches = [trainer.data_collator([row]) for row in trainer.train_dataset]
    return [
        {"sides": [_read_completion(batch, 0), _read_completion(batch, 1)]} for batch in batches
    ]


def _collate_kto(folder: str, tokenizer: Any, rows: list[Row]) -> list[Row]:
    args = trl.KTOConfig(
        **_build_common_options(folder), loss_type="apo_zero_unpaired"
    )  # no second data set of mismatched pairs
    trainer = trl.KTOTrainer(
        folder, args=args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer
    )
    return [
        {"sides": [_read_completion(trainer.data_collator([row]), 0)]}
        for row in trainer.train_dataset
    ]


def _read_completion(batch: Mapping[str, Any], side: int) -> Row:
    """Return the tokens of one row of a batch, and those that its completion mask names."""
    real = batch["attention_mask"][side].bool()
    mask = batch["completion_mask"][side].bool()[real].tolist()
    loss = [position for position, learns in enumerate(mask) if learns]
    return {"ids": batch["input_ids"][side][real].tolist(), "loss": loss}


_READERS: dict[str, Callable[..., list[Row]]] = {
    "sft": _collate_sft,
    "dpo": _collate_dpo,
    "kto": _collate_kto,
}

if __name__ == "__main__":
    main(*sys.argv[1:])
