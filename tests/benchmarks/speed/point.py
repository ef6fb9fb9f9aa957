"""One point of a curve, in a separate process so that peak memory is that point's: `python -m speed.point ...`.

update     an SFT step on `batch` rows of `length` tokens
rollout    `batch` prompts decoded up to `length` tokens, all together
collect    `count` rollouts of the environment, stored, with 64 slots
policy     `count` GRPO iterations of 4 x 4 rollouts
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path

from speed import inputs
from speed.protocol import Others, read_peak_mb

PROMPT = 32
SHAPES = {  # parameters in millions -> hidden, layers, heads, key/value heads, inner
    0: (32, 2, 2, 1, 88),
    1: (128, 4, 2, 1, 344),
    3: (256, 4, 4, 2, 688),
    10: (384, 6, 6, 3, 1032),
    32: (640, 7, 10, 5, 1720),
    100: (1024, 9, 16, 8, 2752),
}


def make_model(millions):
    """Make a random Llama; its context holds what any point needs."""
    import torch
    from transformers import LlamaForCausalLM

    names = (
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "intermediate_size",
    )
    shape = dict(zip(names, SHAPES[millions], strict=True), vocab_size=512)
    torch.manual_seed(inputs.SEED)
    return LlamaForCausalLM(inputs.make_config(shape, context=4096)).float()


def prepare_update(options):
    """Return a function that takes one step."""
    import numpy as np

    from rl_core.settings import SFTSettings
    from rl_core.trainers.sft import SFTTrainer

    ids = np.random.default_rng(0).integers(3, 512, (options.batch, options.length)).tolist()
    rows = [(row, [False] + [True] * (len(row) - 1)) for row in ids]
    settings = SFTSettings(batch_size=options.batch, epochs=1000)
    return SFTTrainer(make_model(options.parameters), inputs.PAD, rows, [], settings, 0).step


def prepare_rollout(options):
    """Return a function that decodes all rows."""
    import numpy as np

    from rl_core.inference.engine import create_rollout_backend
    from rl_core.settings import SamplingSettings
    from speed.episodes import Scripted

    new = options.length - PROMPT
    prompts = np.random.default_rng(0).integers(3, 512, (options.batch, PROMPT)).tolist()
    model = make_model(options.parameters).eval()
    engine = create_rollout_backend(model, eos_ids=(), pad_id=inputs.PAD, max_length=options.length)
    sampling = SamplingSettings(max_completion_tokens=new, slots=options.batch)
    return lambda: engine.run_sequences(
        [Scripted(row, seed, limit=new) for seed, row in enumerate(prompts)], sampling
    )


def prepare_collection(options):
    """Return a function that collects `count` rollouts and stores them."""
    from rl_core.inference.engine import create_rollout_backend
    from rl_core.rollouts.collect import collect_rollouts
    from rl_core.rollouts.episode_sequence import EpisodeRequest
    from rl_core.settings import SamplingSettings
    from speed.episodes import LEVEL, Characters, Sums

    model = make_model(options.parameters).eval()
    engine = create_rollout_backend(
        model, eos_ids=(inputs.EOS,), pad_id=inputs.PAD, max_length=inputs.MAX_LENGTH
    )
    environment, renderer = Sums(options.folder, 0), Characters(inputs.make_tokenizer(512))
    sampling = SamplingSettings(max_completion_tokens=inputs.MAX_NEW, slots=64)
    requests = [EpisodeRequest(LEVEL, seed) for seed in range(options.count // inputs.GROUP)]
    return lambda: collect_rollouts(
        environment, engine, renderer, requests, group_size=inputs.GROUP, sampling=sampling, seed=0
    )


def prepare_policy(options):
    """Return a function that trains for `count` iterations."""
    from rl_core.inference.engine import create_rollout_backend
    from rl_core.rewards.orchestrator import RewardOrchestrator
    from rl_core.settings import PolicySettings, SamplingSettings
    from rl_core.trainers.policy_gradient.trainer import PolicyGradientTrainer
    from speed.episodes import Characters, Sums

    model = make_model(options.parameters)
    settings = PolicySettings(
        prompts_per_iteration=4,
        group_size=inputs.GROUP,
        iterations=options.count,
        rewards={"speed.episodes:reward": 1.0},
        sampling=SamplingSettings(max_completion_tokens=16),
    )
    trainer = PolicyGradientTrainer(
        model,
        None,
        Characters(inputs.make_tokenizer(512)),
        Sums(options.folder, 0),
        settings,
        0,
        RewardOrchestrator(settings.rewards, options=settings.reward_options),
        create_rollout_backend(
            model, eos_ids=(inputs.EOS,), pad_id=inputs.PAD, max_length=inputs.MAX_LENGTH
        ),
    )

    def train():
        for _ in range(options.count):
            trainer.step()

    return train


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    makers = {
        "update": prepare_update,
        "rollout": prepare_rollout,
        "collect": prepare_collection,
        "policy": prepare_policy,
    }
    parser.add_argument("work", choices=makers)
    parser.add_argument("--folder", type=Path, required=True, help="inputs of the small size")
    parser.add_argument("--parameters", type=int, choices=SHAPES, default=3, help="millions")
    for name, default in (
        ("length", 128),
        ("batch", 8),
        ("count", 0),
        ("threads", 1),
        ("repeats", 3),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print where they like

    import torch
    import transformers  # noqa: F401

    import rl_core.inference.engine
    import rl_core.trainers.policy_gradient.trainer
    import rl_core.trainers.sft  # noqa: F401

    torch.set_num_threads(options.threads)
    base, work = read_peak_mb(), makers[options.work](options)
    others, seconds, once = (
        Others([]),
        [],
        options.count > 0,
    )  # a full collection or training is measured once
    for repeat in range(1 if once else options.repeats + 1):
        began = time.perf_counter()
        result = work()
        if once or repeat:  # the first warms up
            seconds.append(time.perf_counter() - began)
        del result
    peak = read_peak_mb()
    record = {"seconds": statistics.median(seconds), "peak_mb": peak, "memory_mb": peak - base}
    print(json.dumps({**record, "others_cpu": others.cores()}), file=answers, flush=True)


if __name__ == "__main__":
    main()
