"""Memory and time of an optimizer step: all weights, LoRA, activation checkpointing.

    python -m claimed.memory FOLDER ARM SEED     one measurement in a separate process, as JSON

A Llama of 26M parameters, rows of about 240 tokens, 8 of them a step, float32, one thread. Memory is the peak of
resident memory over three steps, less what the process held with the model loaded. Time is the processor's, of the last
two.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

ARMS = {
    "all weights": (False, False),
    "all weights, checkpointing": (False, True),
    "LoRA, rank 8": (True, False),
    "LoRA, rank 8, checkpointing": (True, True),
}
ROWS, TOKENS, WORDS = (
    8,
    256,
    60,
)  # of a row: its longest is that many tokens, numbers of up to three digits
STATUS = Path("/proc/self/status")


def list_runs(output):
    """Return arms and their measurement."""

    def measured(arm, seed):
        folder = find_model(output)
        here = Path(__file__).resolve().parents[1]
        done = subprocess.run(
            [sys.executable, "-m", "claimed.memory", str(folder), arm, str(seed)],
            text=True,
            capture_output=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{here}:{here.parents[1]}"},
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{arm}: {done.stderr[-2000:]}")
        return json.loads(done.stdout.splitlines()[-1])

    return {arm: lambda seed, arm=arm: measured(arm, seed) for arm in ARMS}


def find_model(output):
    """Return the model's folder; make it if it is absent."""
    import rl_core
    from rl_core.settings import ModelSettings

    folder = output / "starts" / "26M"
    if not folder.is_dir():
        from transformers import LlamaConfig, LlamaForCausalLM

        texts = [f"count {number} and {number + 1}" for number in range(200)]
        small = ModelSettings(preset="nano", vocab_size=400, context=TOKENS, device="cpu")
        policy = rl_core.create_policy(texts, small)
        model_config = policy.model.config
        config = LlamaConfig(
            hidden_size=512,
            num_hidden_layers=8,
            num_attention_heads=8,
            num_key_value_heads=8,
            intermediate_size=1408,
            vocab_size=model_config.vocab_size,
            max_position_embeddings=TOKENS,
            pad_token_id=model_config.pad_token_id,
            eos_token_id=model_config.eos_token_id,
            bos_token_id=model_config.bos_token_id,
            tie_word_embeddings=True,
        )
        temporary = folder.with_name("26M.part")
        rl_core.load_policy((LlamaForCausalLM(config), policy.tokenizer)).save(temporary)
        os.rename(temporary, folder)
    return folder


def read_resident_bytes(name):
    """Return VmRSS or VmHWM of this process, bytes."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(name))
    return 1024 * int(line.split()[1])


def measure(folder, arm, seed):
    """Measure three steps of SFT."""
    import random

    import torch

    import rl_core
    from rl_core.settings import LoraSettings, ModelSettings, SFTSettings

    torch.set_num_threads(1)
    has_lora, checkpointing = ARMS[arm]
    rng = random.Random(seed)
    rows = []
    for _ in range(ROWS * 3):
        words = " ".join(str(rng.randrange(1000)) for _ in range(WORDS))
        rows.append(
            {
                "messages": [
                    {"role": "user", "content": "count"},
                    {"role": "assistant", "content": words},
                ]
            }
        )
    lora = LoraSettings(rank=8, alpha=16, target_modules="all-linear") if has_lora else None
    policy = rl_core.load_policy(ModelSettings(path=folder, lora=lora, device="cpu"))
    settings = SFTSettings(
        epochs=1,
        batch_size=ROWS,
        activation_checkpointing=checkpointing,
        checkpoint_every=0,
        learning_rate=1e-4,
    )
    before = read_resident_bytes("VmRSS")
    trainer = rl_core.sft(policy, rows, heldout=0, settings=settings, seed=seed).trainer
    Path("/proc/self/clear_refs").write_text("5")  # reset the high-water mark
    seconds, losses = [], []
    for _ in range(3):
        started = time.process_time()
        losses.append(trainer.step()["train/loss"])
        seconds.append(time.process_time() - started)
    return {
        "peak": read_resident_bytes("VmHWM") - before,
        "seconds": sum(seconds[1:]) / 2,
        "loss": losses[0],
        "trainable": sum(p.numel() for p in policy.model.parameters() if p.requires_grad),
        "tokens": sum(len(row["messages"][1]["content"].split()) for row in rows) / 3,
    }


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], sys.argv[2], int(sys.argv[3]))))
