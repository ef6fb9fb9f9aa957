"""What 8-bit weights in the sampler alone do to learning: GRPO on the pretrained SmolLM2-135M (configs/real.yaml).

    python tests/benchmarks/int8_sampler.py OUTPUT.json [--seeds 0 1] [--iterations 40] [--threads 2]

The sampler's copies of the weights are rounded to 8 bits with one scale per row (LLM.int8's symmetric rounding,
arXiv:2208.07339), the trainer's are not; products stay float32, so that only the rounding is measured, not a kernel's
speed. Arms: float32 weights; 8-bit weights; 8-bit weights with truncated importance weights by token (`importance:
token`). Success: 200 held-out episodes of the trained levels, sampled with float32 weights. Also the mismatch KL of
sampler and trainer.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

import torch  # noqa: E402
from claimed.intervals import format_share  # noqa: E402

import rl_core  # noqa: E402
from rl_core.api.policy import load_policy  # noqa: E402
from rl_core.environments.instructions import Instructions  # noqa: E402
from rl_core.evaluation import evaluate as play_episodes  # noqa: E402
from rl_core.inference import decoder_layers  # noqa: E402
from rl_core.rollouts.episode_sequence import EpisodeRequest  # noqa: E402

SAMPLING = {"temperature": 1.0, "max_completion_tokens": 32}
LEVELS = ("easy", "medium", "hard")
SETTINGS = {
    "prompts_per_iteration": 8,
    "group_size": 8,
    "learning_rate": 2e-5,
    "kl_coef": 0.02,
    "eval_every": 0,
    "patience": None,
    "sampling": SAMPLING,
    "curriculum": [{"name": "all", "levels": {"easy": 4, "medium": 3, "hard": 3}}],
}
ARMS = {
    "float32": {},
    "int8": {"sampler_kl_max": 1.0},
    "int8, importance weights": {"importance": "token"},
}


def round_to_int8(weight_OI: torch.Tensor) -> torch.Tensor:
    """Round a weight to 255 levels of its row, and widen it again."""
    scale_O1 = weight_OI.abs().amax(1, keepdim=True).clamp_(min=1e-12) / 127
    return (weight_OI / scale_O1).round_() * scale_O1


def use_int8_sampler(is_on: bool) -> None:
    """Round the weights that samplers pack from now on, or leave them."""
    pack = decoder_layers._pack_weight
    plain = getattr(pack, "plain", pack)

    def pack_rounded(weight_OI, arena):
        return plain(round_to_int8(weight_OI).contiguous(), arena)

    pack_rounded.plain = plain
    decoder_layers._pack_weight = pack_rounded if is_on else plain


def measure_success(policy, environment, episodes, seed):
    backend = policy.backend()
    backend.refresh_weights()
    requests = [
        EpisodeRequest(LEVELS[number % len(LEVELS)], 10_000_000 + number)
        for number in range(episodes)
    ]
    sampling = rl_core.SamplingSettings(temperature=0.7, max_completion_tokens=32, slots=64)
    result = play_episodes(
        environment, backend, policy.renderer, requests, sampling=sampling, seed=seed
    )
    return 100 * statistics.fmean(episode.successes for episode in result.episodes)


def run_arm(name, seed, options):
    use_int8_sampler(name.startswith("int8"))
    environment = Instructions()
    policy = load_policy("smollm2-135m", seed=seed)
    settings = {**SETTINGS, **ARMS[name], "iterations": options.iterations}
    training = rl_core.grpo(policy, environment=environment, settings=settings, seed=seed)
    begun, rows = time.perf_counter(), []
    for _ in range(options.iterations):
        rows.append(training.trainer.step())
    seconds = time.perf_counter() - begun
    use_int8_sampler(False)
    return {
        "arm": name,
        "seed": seed,
        "success": measure_success(policy, environment, options.episodes, seed),
        "curve": [row["train/success_rate"] for row in rows],
        "sampler_kl": statistics.fmean(row["policy/sampler_kl"] for row in rows),
        "seconds": seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("output", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    for name, default in (("iterations", 40), ("episodes", 200), ("threads", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    logging.disable(logging.WARNING)
    rows = json.loads(options.output.read_text()) if options.output.is_file() else []
    for seed in options.seeds:
        for name in ARMS:
            if not any((row["arm"], row["seed"]) == (name, seed) for row in rows):
                rows.append(run_arm(name, seed, options))
                print({k: v for k, v in rows[-1].items() if k != "curve"}, flush=True)
                options.output.write_text(json.dumps(rows))
    print(
        "| sampler's weights | success [95%] | each seed | mean success of the rollouts | mismatch KL, nats a token |"
    )
    print("|---|---|---|---|---|")
    for name in ARMS:
        ours = [row for row in rows if row["arm"] == name]
        success = format_share([row["success"] for row in ours])
        each = ", ".join(f"{row['success']:.1f}" for row in ours)
        curve = 100 * statistics.fmean(statistics.fmean(row["curve"]) for row in ours)
        kl = statistics.fmean(row["sampler_kl"] for row in ours)
        print(f"| {name} | {success} | {each} | {curve:.1f}% | {kl:.1e} |")


if __name__ == "__main__":
    main()
