"""Our SFT, reward, DPO and GRPO losses against TRL's: the same weights, token ids and rewards, float32, on the CPU.

python -m venv trl_venv
trl_venv/bin/pip install -c constraints.txt torch transformers accelerate trl==1.16.0 datasets
PYTHONPATH=. trl_venv/bin/python tests/benchmarks/compare_trl.py    # seconds

Nothing is downloaded: the model is a random Llama with a tokenizer trained here. TRL's trainers collate the ids and
compute their losses themselves; ours come from rl_core's trainers and pure losses. A line is PASS when both are within
1e-4. Where TRL means something else by choice, the line is CHOICE: TRL's value stands there with the reason, and ours
has to equal the formula computed token by token from the model's logits. The exit code is 1 if any line fails.
"""

from __future__ import annotations

import platform
import sys
import tempfile
import warnings

import torch
import transformers
import trl
from datasets import disable_progress_bars
from trl_losses.bench import TOLERANCE, Bench, G, Line, P
from trl_losses.group_relative import GroupRelativeStep, compare_grpo, compare_grpo_choices
from trl_losses.pairs_and_rows import compare_dpo, compare_reward, compare_sft

from rl_core.losses import policy


def print_report(lines: list[Line], bench: Bench) -> int:
    """Print the table and the reasons; return 1 if a line failed."""
    it = GroupRelativeStep(bench)
    _, shares = policy.clipped_policy_loss(
        it.new_BS, it.old_BS, it.compute_advantages(), it.mask_BS, num_loss_tokens=it.tokens
    )
    print(
        f"trl {trl.__version__}, torch {torch.__version__}, transformers {transformers.__version__}, Python "
        f"{platform.python_version()}; float32, CPU; tolerance {TOLERANCE:g}"
    )
    print(
        f"GRPO batch: {P} x {G} rollouts, {it.tokens} loss tokens; clipped below "
        f"{float(shares['clip_fraction_low']):.0%} (A < 0), above {float(shares['clip_fraction_high']):.0%} (A > 0); "
        f"largest ratio {float(shares['ratio_max']):.2f}\n"
    )
    widths = [
        max(len(str(getattr(line, name))) for line in lines) for name in ("loss", "theirs", "ours")
    ]
    print(
        "{:{}}  {:{}}  {:{}}".format("loss", widths[0], "TRL", widths[1], "here", widths[2])
        + f"  {'TRL value':>11}  {'ours':>11}  {'|difference|':>12}"
    )
    for line in lines:
        print(
            f"{line.loss:{widths[0]}}  {line.theirs:{widths[1]}}  {line.ours:{widths[2]}}  {line.trl_value:11.6f}  "
            f"{line.our_value:11.6f}  {line.difference:12.1e}  {line.verdict}"
        )
        if line.reason:
            print(
                f"{'':{widths[0]}}    our formula, token by token, gives {line.formula:.6f}; TRL: {line.reason}"
            )
    failed = sum(line.verdict == "FAIL" for line in lines)
    choices = sum(line.verdict == "CHOICE" for line in lines)
    print(f"\n{len(lines) - failed - choices} agree, {choices} differ by choice, {failed} fail")
    return int(failed > 0)


def main() -> int:
    warnings.simplefilter(
        "ignore"
    )  # TRL's and transformers' notices of experiments and renamed options
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    disable_progress_bars()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(folder)
        compared = (compare_sft, compare_reward, compare_dpo, compare_grpo, compare_grpo_choices)
        return print_report([line for compare in compared for line in compare(bench)], bench)


if __name__ == "__main__":
    sys.exit(main())
