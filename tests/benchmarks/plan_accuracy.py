"""Memory and time that `posttrain check plan` predicts against measured ones: stages of 1M to 500M parameters.

    python tests/benchmarks/plan_accuracy.py --output DIR [--machine FILE] [--cases SET|CASE,...]

Without --machine the machine is calibrated first (DIR/machine.yaml). Each case is a fresh process that loads its model
from a folder and takes some optimizer steps or iterations; memory is its peak resident memory (VmHWM), time the median
processor time of its steps after the first, with one thread; to those of preference optimisation their share of the
reference's log-probs is added, which the plan counts and a trainer computes before its first step. A finished case is
DIR/cases/*.json and is not run again.
The plan is made by the same functions as the command's, for a process without Prefect and MLflow; there is no loop, so
no checkpoint either. The table goes to DIR/plan.md, and to --table FILE.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

from compare_speed import describe_processor, read_commit, read_or_make, run_python
from speed import inputs

PROMPT = 14  # mean tokens of a prompt of sums; rows of data have as many
# parameters in millions -> hidden, layers, heads, key/value heads, inner
SHAPES = {
    1: (128, 4, 4, 2, 344),
    2: (192, 4, 6, 2, 512),
    3: (256, 4, 4, 2, 688),
    10: (384, 6, 6, 3, 1032),
    15: (448, 6, 7, 7, 1192),
    30: (640, 7, 10, 5, 1720),
    60: (768, 8, 12, 4, 2048),
    100: (1024, 9, 16, 8, 2752),
    135: (
        576,
        30,
        9,
        3,
        1536,
    ),  # SmolLM2-135M, whose vocabulary is 49,152 and whose embedding is tied
    360: (960, 32, 15, 5, 2560),  # SmolLM2-360M, the same vocabulary
    500: (896, 24, 14, 2, 4864),  # Qwen2.5-0.5B, whose vocabulary is 151,936
}
TIED = (135, 360, 500)
TRAINED = dict(learning_rate=1e-5, warmup_steps=0)
ROLLED = dict(
    TRAINED,
    prompts_per_iteration=8,
    group_size=4,
    iterations=4,
    rewards={"speed.episodes:reward": 1.0},
    sampling={"max_completion_tokens": 64, "slots": 32},
)


def make_case(
    stage, millions, *, length=128, lora=False, vocabulary=512, dtype="float32", **settings
):
    """Make one configuration: a stage's settings, its model, and the tokens of a row (of a rollout: `ROLLED`)."""
    shared = ROLLED if stage == "policy" else {**TRAINED, "batch_size": 16, "epochs": 1}
    return {
        "stage": stage,
        "millions": millions,
        "length": length,
        "lora": lora,
        "vocabulary": vocabulary,
        "dtype": dtype,
        "settings": {**shared, **settings},
    }


CASES = {
    "sft-1M": make_case("sft", 1, batch_size=32),
    "sft-10M": make_case("sft", 10),
    "sft-10M-checkpointing": make_case("sft", 10, activation_checkpointing=True),
    "sft-10M-vocabulary": make_case("sft", 10, vocabulary=16384, optimizer="muon", ema_decay=0.99),
    "sft-30M-micro": make_case("sft", 30, micro_batch_tokens=1024),
    "sft-100M": make_case("sft", 100, batch_size=8),
    "sft-100M-lora": make_case("sft", 100, lora=True, batch_size=8),
    "reward-10M": make_case("reward_model", 10, batch_size=8),
    "dpo-30M": make_case("preference", 30, batch_size=4),
    "dpo-30M-lora": make_case("preference", 30, lora=True, batch_size=4, micro_batch_tokens=512),
    "grpo-3M": make_case("policy", 3),
    "grpo-10M-kl": make_case("policy", 10, kl_coef=0.05),
    "grpo-30M-lora": make_case("policy", 30, lora=True),
    "ppo-10M": make_case("policy", 10, algorithm="ppo", kl_coef=0.05, epochs=2),
}
# Chosen before anything of them was measured, and measured before any constant of the plan was changed.
BLIND = {
    "sft-2M-long": make_case("sft", 2, length=512, batch_size=8),
    "sft-2M-vocabulary": make_case("sft", 2, vocabulary=32000, batch_size=8),
    "sft-15M": make_case("sft", 15, batch_size=12),
    "sft-15M-lora": make_case("sft", 15, lora=True),
    "sft-60M": make_case("sft", 60, batch_size=8),
    "sft-60M-micro": make_case("sft", 60, batch_size=8, micro_batch_tokens=512),
    "sft-100M-checkpointing": make_case("sft", 100, batch_size=8, activation_checkpointing=True),
    "reward-60M": make_case("reward_model", 60, batch_size=4),
    "dpo-15M": make_case("preference", 15, batch_size=8),
    "dpo-60M-lora": make_case("preference", 60, lora=True, batch_size=4),
    "grpo-2M": make_case("policy", 2),
    "grpo-15M-int8": make_case("policy", 15, kl_coef=0.05, reference_precision="int8"),
    "grpo-60M-lora": make_case("policy", 60, lora=True),
    "ppo-2M": make_case("policy", 2, algorithm="ppo", epochs=2),
}
REAL = {"vocabulary": 49152, "length": 256, "batch_size": 4}
ROLLED_REAL = {
    "vocabulary": 49152,
    "length": 96,
    "prompts_per_iteration": 2,
    "sampling": {"max_completion_tokens": 64, "slots": 8},
}
# The parts at the size of a real model; the plan's constants were chosen knowing these.
KNOWN_REAL = {
    "sft-135M": make_case("sft", 135, **REAL),
    "sft-135M-micro": make_case("sft", 135, **REAL, micro_batch_tokens=512),
    "sft-135M-lora": make_case("sft", 135, **REAL, lora=True),
    "sft-135M-bfloat16": make_case("sft", 135, **REAL, dtype="bfloat16"),
    "dpo-135M": make_case("preference", 135, **{**REAL, "batch_size": 2}),
    "grpo-135M": make_case("policy", 135, **ROLLED_REAL),
}
# Chosen before anything of them was measured.
BLIND_REAL = {
    "sft-135M-long": make_case("sft", 135, **{**REAL, "length": 512, "batch_size": 2}),
    "sft-135M-lora-long": make_case("sft", 135, **{**REAL, "length": 512}, lora=True),
    "sft-360M": make_case("sft", 360, **{**REAL, "length": 128}),
    "sft-360M-lora": make_case("sft", 360, **{**REAL, "length": 128}, lora=True),
    "sft-500M-lora": make_case("sft", 500, vocabulary=151936, length=128, batch_size=2, lora=True),
    "reward-135M": make_case("reward_model", 135, **{**REAL, "batch_size": 2}),
    "dpo-135M-lora": make_case("preference", 135, **{**REAL, "batch_size": 2}, lora=True),
    "grpo-135M-kl": make_case("policy", 135, **ROLLED_REAL, kl_coef=0.05),
    "grpo-135M-lora": make_case("policy", 135, **ROLLED_REAL, lora=True),
    "ppo-135M": make_case("policy", 135, **ROLLED_REAL, algorithm="ppo"),
}
STEPS = 3  # of a case, the first of which is not timed
SETS = {"known": CASES, "blind": BLIND, "known-real": KNOWN_REAL, "blind-real": BLIND_REAL}
EVERY = {name: case for cases in SETS.values() for name, case in cases.items()}
CLOCK = "process_time"  # with one thread what the wall clock shows on a machine without other work


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--machine", type=Path)
    parser.add_argument("--cases", default="known", help=f"{', '.join(SETS)}, or names")
    parser.add_argument("--table", type=Path)
    parser.add_argument("--measure", metavar="CASE", help="take one case's steps in this process")
    options = parser.parse_args()
    if options.measure:
        measure(EVERY[options.measure], options.output)
        return 0
    output = options.output.resolve()
    (output / "cases").mkdir(parents=True, exist_ok=True)
    machine = options.machine or output / "machine.yaml"
    if not machine.exists():
        run_python(build_calibration_command(machine), 1)
    rows, failures = [], 0
    for name in SETS.get(options.cases) or options.cases.split(","):
        print(f"{time.strftime('%H:%M:%S')} {name}", flush=True)
        try:
            build_model(EVERY[name], output)
            result = read_or_make(
                output / f"cases/{name}.json", partial(run_case, name, output, options)
            )
        except subprocess.CalledProcessError as error:
            print(f"{name}: failed with exit code {error.returncode}", file=sys.stderr)
            failures += 1
            continue
        rows.append({"case": name, **result, **plan_case(EVERY[name], output, machine)})
    text = format_table(rows, options)
    (output / "plan.md").write_text(text)
    if options.table:
        options.table.write_text(text)
    print(text)
    return int(failures > 0)


def build_calibration_command(machine):
    """Return the arguments of a process that calibrates."""
    code = (
        "import sys, time; from pathlib import Path; "
        "from posttrain.cli.check_machine import write_machine_calibration; "
        f"print(write_machine_calibration(Path(sys.argv[1]), clock=time.{CLOCK})[1])"
    )
    return ["-c", code, str(machine)]


# -- the plan ----------------------------------------------------------------------------------------------------------


def plan_case(case, output, machine_file):
    """Plan peak bytes and seconds of a step, as the command would for a process without the pipeline."""
    import dataclasses

    from posttrain.planning.pipeline_plan import plan_stage
    from posttrain.planning.target import PlanLengths, build_machine_target
    from posttrain.settings_files import read_settings_file
    from rl_core.resources.stage_memory import StageMemory
    from rl_core.settings.planning import MachineSettings
    from tasks.config import build_settings

    machine, _ = read_settings_file(MachineSettings, machine_file, shipped_name=str(machine_file))
    target = build_machine_target(dataclasses.replace(machine, pipeline_bytes=0))
    model = {"path": str(name_folder(case, output)), "dtype": case["dtype"]}
    model |= {"lora": {}} if case["lora"] else {}
    data = {
        "heldout_fraction": 1e-6,
        "preferences": "pairs.jsonl",
    }  # all rows are trained on, none made of rollouts
    values = {
        "name": "planned",
        "model": model,
        "stages": {"prepare_data": data, case["stage"]: case["settings"]},
    }
    settings = build_settings(values, check_files=False, import_code=False)
    is_policy = case["stage"] == "policy"
    steps = case["settings"]["iterations"] if is_policy else STEPS
    rows = None if is_policy else steps * case["settings"]["batch_size"]
    plan = plan_stage(
        case["stage"], settings, target, PlanLengths(case["length"], PROMPT, None, rows)
    )
    phases = [  # no loop saves here
        dataclasses.replace(
            phase, parts={k: v for k, v in phase.parts.items() if k != "checkpoint buffer"}
        )
        for phase in plan.memory.phases
        if "checkpoint" not in phase.name
    ]
    memory = StageMemory(tuple(phases))
    peak = memory.peak
    return {
        "parameters": plan.parameters,
        "plan_bytes": peak.total,
        "phase": peak.name,
        "binding": memory.largest_part,
        "parts": dict(peak.parts),
        "plan_seconds": plan.time.likely / steps,
        "plan_interval": [plan.time.low / steps, plan.time.high / steps],
    }


def format_table(rows, options):
    """Tabulate planned and measured values, with the share of cases within 10% and 30%."""
    lines = [
        "# Plans and measurements",
        "",
        f"`posttrain check plan` on {describe_processor()}, one thread, seconds of processor time; "
        f"commit {read_commit()}. Written by "
        "`tests/benchmarks/plan_accuracy.py`, whose first lines say what is measured.",
        "",
        "| case | parameters | memory: planned | measured (VmHWM) | ratio | peak in | step: planned [interval] "
        "| measured | ratio |",
        "|---|---:|---:|---:|---:|---|---:|---:|---:|",
    ]
    for row in rows:
        low, high = row["plan_interval"]
        lines.append(
            f"| {row['case']} | {row['parameters'] / 1e6:.1f}M | {row['plan_bytes'] / 2**20:,.0f} MiB | "
            f"{row['peak_bytes'] / 2**20:,.0f} MiB | {row['plan_bytes'] / row['peak_bytes']:.2f} | {row['phase']} | "
            f"{row['plan_seconds']:.3g} s [{low:.3g}, {high:.3g}] | {row['seconds']:.3g} s | "
            f"{row['plan_seconds'] / row['seconds']:.2f} |"
        )
    near = sum(abs(row["plan_bytes"] / row["peak_bytes"] - 1) <= 0.1 for row in rows)
    timely = sum(abs(row["plan_seconds"] / row["seconds"] - 1) <= 0.3 for row in rows)
    lines += [
        "",
        f"Memory within 10%: {near} of {len(rows)}. Time within 30%: {timely} of {len(rows)}.",
        "",
    ]
    return "\n".join(lines)


# -- the measurement ---------------------------------------------------------------------------------------------------


def name_folder(case, output):
    return output / "models" / f"{case['millions']}M-{case['vocabulary']}"


def build_model(case, output):
    """Write the case's model, random weights and the tokenizer of `inputs`, in a separate process."""
    folder = name_folder(case, output)
    if (folder / "model.safetensors").exists():
        return
    code = (
        "import sys; from pathlib import Path; import plan_accuracy; "
        "plan_accuracy.build(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])); from speed import inputs; "
        "inputs.build(sys.argv[4], 'small')"
    )
    run_python(
        [
            "-c",
            code,
            str(folder),
            str(case["millions"]),
            str(case["vocabulary"]),
            str(output / "inputs"),
        ]
    )


def build(folder, millions, vocabulary):
    import torch
    from transformers import LlamaForCausalLM

    names = (
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "intermediate_size",
    )
    shape = dict(zip(names, SHAPES[millions], strict=True), vocab_size=vocabulary)
    torch.manual_seed(inputs.SEED)
    config = inputs.make_config(shape)
    config.tie_word_embeddings = millions in TIED
    LlamaForCausalLM(config).float().save_pretrained(folder)
    inputs.make_tokenizer(vocabulary).save_pretrained(folder)


def run_case(name, output, options):
    command = ["-m", "plan_accuracy", "--output", str(output), "--measure", name]
    return {**json.loads(run_python(command, 1)), "commit": read_commit()}


def measure(case, output):
    """Take a case's steps and print its peak memory and the median of its seconds, with the share of the reference."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print where they like
    import torch

    from rl_core.machine_memory import measure_peak_resident_bytes

    torch.set_num_threads(1)
    makers = {
        "sft": make_sft_step,
        "reward_model": reward_model,
        "preference": make_preference_step,
        "policy": make_policy_step,
    }
    trainer = makers[case["stage"]](case, output)
    clock, seconds = getattr(time, CLOCK), []
    for number in range(STEPS):
        began = clock()
        trainer.step()
        if number:
            seconds.append(clock() - began)
    result = {"peak_bytes": measure_peak_resident_bytes(), "seconds": statistics.median(seconds)}
    if case["stage"] == "preference":
        began = clock()
        compute_references(trainer.model, case)
        result["seconds"] += (clock() - began) / STEPS
    print(json.dumps(result), file=answers, flush=True)


def load_model(case, output):
    """Return (model with adapters if the case has them, the model's settings)."""
    from rl_core.models import causal_lm
    from rl_core.settings import LoraSettings, ModelSettings

    folder = name_folder(case, output)
    lora = LoraSettings() if case["lora"] else None
    settings = ModelSettings(path=str(folder), dtype=case["dtype"], lora=lora)
    return causal_lm.load_model(folder, settings)[0], settings


def draw_rows(case, count):
    import numpy as np

    return (
        np.random.default_rng(0).integers(3, case["vocabulary"], (count, case["length"])).tolist()
    )


def make_sft_step(case, output):
    from rl_core.settings import SFTSettings
    from rl_core.trainers.sft import SFTTrainer

    model, _ = load_model(case, output)
    settings = SFTSettings(**case["settings"])
    rows = draw_rows(case, settings.batch_size * STEPS)
    mask = [False] * PROMPT + [True] * (case["length"] - PROMPT)
    return SFTTrainer(model, inputs.PAD, [(row, mask) for row in rows], [], settings, 0)


def draw_sides(case, count):
    """Draw pairs of rows with a common beginning of PROMPT tokens."""
    rows = draw_rows(case, 2 * count)
    return [
        (first, first[:PROMPT] + other[PROMPT:])
        for first, other in zip(rows[::2], rows[1::2], strict=True)
    ]


def reward_model(case, output):
    from rl_core.models import heads
    from rl_core.settings import ModelSettings, RewardModelSettings
    from rl_core.trainers.reward_model import RewardModelTrainer

    folder = name_folder(case, output)
    model, _ = heads.create_reward_model(
        folder, ModelSettings(path=str(folder), dtype=case["dtype"])
    )
    settings = RewardModelSettings(**case["settings"])
    return RewardModelTrainer(
        model, inputs.PAD, draw_sides(case, settings.batch_size * STEPS), [], settings, 0
    )


def make_pairs(case):
    from rl_core.data.pairs import PairSide, PreferencePair

    def side(row):
        return PairSide(row[:PROMPT], row[PROMPT:], [True] * (len(row) - PROMPT))

    return [
        PreferencePair(side(chosen), side(other))
        for chosen, other in draw_sides(case, case["settings"]["batch_size"] * STEPS)
    ]


def make_preference_step(case, output):
    from rl_core.settings import PreferenceSettings
    from rl_core.trainers.preference import PreferenceTrainer

    model, _ = load_model(case, output)
    return PreferenceTrainer(
        model, inputs.PAD, make_pairs(case), [], PreferenceSettings(**case["settings"]), 0
    )


def compute_references(model, case):
    """Compute log-probs of all pairs, as the trainer does."""
    from rl_core.settings import PreferenceSettings
    from rl_core.trainers.preference import compute_reference_logprobs

    settings = PreferenceSettings(**case["settings"])
    return compute_reference_logprobs(
        model, make_pairs(case), pad_id=inputs.PAD, max_tokens=settings.micro_batch_tokens
    )


def make_policy_step(case, output):
    from speed.episodes import Characters, Sums

    from rl_core.inference.engine import create_rollout_backend
    from rl_core.rewards.orchestrator import RewardOrchestrator
    from rl_core.settings import PolicySettings, SamplingSettings
    from rl_core.trainers.policy_gradient.trainer import PolicyGradientTrainer

    model, _ = load_model(case, output)
    settings = PolicySettings(
        **{**case["settings"], "sampling": SamplingSettings(**case["settings"]["sampling"])}
    )
    reference = None
    if settings.kl_coef > 0:
        reference = model if case["lora"] else load_model(case, output)[0]
    return PolicyGradientTrainer(
        model,
        reference,
        Characters(inputs.make_tokenizer(512)),
        Sums(output / "inputs" / "small", 0),
        settings,
        0,
        RewardOrchestrator(settings.rewards, options=settings.reward_options),
        create_rollout_backend(
            model, eos_ids=(inputs.EOS,), pad_id=inputs.PAD, max_length=inputs.MAX_LENGTH
        ),
    )


if __name__ == "__main__":
    sys.exit(main())
