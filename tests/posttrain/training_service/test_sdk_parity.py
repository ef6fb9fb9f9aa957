"""Loops written with the public SDK compared with this project's trainers: equal losses on the same data, to 1e-5.

`make sdk-test`, like `test_public_client.py`, whose environment of SDK 0.38 they use. Our trainers run in this process.
The SDK receives their data (rows, or rollouts with advantages) and talks to server and worker processes.
"""

import copy
import json
import os
import subprocess
import sysconfig

import numpy as np
import pytest
import torch
from helpers import ROOT
from helpers.letters import Parity, make_trainer
from helpers.public_sdk import run_service, sdk_environments
from helpers.service import make_engine

from rl_core.models import causal_lm
from rl_core.service.requests import AdapterConfig, CreateModel
from rl_core.settings import LoraSettings, ModelSettings, SFTSettings
from rl_core.trainers.sft import SFTTrainer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RANK, SEED, ALPHA = 4, 3, 32.0  # ALPHA: the service's; clients do not name it
ADAM = dict(beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.0, grad_clip_norm=1.0)
OURS = dict(
    weight_decay=0.0,
    betas=(0.9, 0.95),
    eps=1e-8,
    max_grad_norm=1.0,
    warmup_steps=0,
    schedule="constant",
)


def load_adapted_model(base_folder):
    """Load the base with an adapter initialised as the service does for this seed; return model and tokenizer."""
    engine = make_engine(base_folder)
    config = AdapterConfig(rank=RANK, seed=SEED, train_unembed=False)
    engine.create_model(CreateModel(model_id="r", base="base", adapter=config))
    start = engine.state_dict("r")["model"]
    lora = LoraSettings(rank=RANK, alpha=ALPHA, target_modules=LINEARS)
    model, tokenizer = causal_lm.load_model(base_folder, ModelSettings(device="cpu", lora=lora))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(
                    start[name.removeprefix("base_model.model.").replace(".default.", ".")]
                )
    return model, tokenizer


def describe_run(loss_fn, learning_rate, steps, **config):
    """Describe a run for parity.py."""
    adam = {"learning_rate": learning_rate, **ADAM}
    return {
        "rank": RANK,
        "seed": SEED,
        "loss_fn": loss_fn,
        "config": config,
        "adam": adam,
        "steps": steps,
    }


def train_supervised(base_folder):
    """Losses of our trainer, and the run that has to give the same."""
    model, tokenizer = load_adapted_model(base_folder)
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(12):
        ids = rng.integers(2, 60, int(rng.integers(4, 20))).tolist()
        rows.append((ids, [False, *(rng.random(len(ids) - 2) < 0.7).tolist(), True]))
    settings = SFTSettings(epochs=2, batch_size=4, learning_rate=5e-3, packing=False, **OURS)
    trainer = SFTTrainer(model, tokenizer.pad_token_id, rows, [], seed=0, settings=settings)
    order = copy.deepcopy(trainer.order)
    losses, steps = [], []
    for _ in range(6):
        batch = [rows[index] for index in order.next_batch()]
        count = sum(sum(mask) for _, mask in batch)
        data = [
            {"tokens": ids, "weights": [float(item) / count for item in mask[1:]]}
            for ids, mask in batch
        ]
        steps.append({"repeats": 1, "data": data})
        losses.append(trainer.step()["train/loss"])
    return losses, describe_run("cross_entropy", 5e-3, steps)


def train_policy(base_folder):
    """Mean losses of our GRPO trainer by iteration, of two epochs each, and the run that has to give the same."""
    model, tokenizer = load_adapted_model(base_folder)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    trainer = make_trainer(
        tokenizer,
        Parity(),
        model=model,
        algorithm="grpo",
        epochs=2,
        learning_rate=5e-3,
        kl_coef=0.0,
        loss_aggregation="token_mean",
        clip_eps=0.2,
        clip_eps_high=0.2,
        **OURS,
    )
    losses, steps = [], []
    for _ in range(4):
        losses.append(trainer.step()["policy/loss"])
        pairs = [
            (rollout, advantage)
            for group in trainer.groups
            for rollout, advantage in zip(group.rollouts, group.advantages, strict=True)
        ]
        count = sum(sum(rollout.loss_mask) for rollout, _ in pairs)
        data = []
        for rollout, advantage in pairs:
            skipped = [0.0] * (len(rollout.prompt_ids) - 1)
            advantages = [
                float(advantage) / count if counts else 0.0 for counts in rollout.loss_mask
            ]
            data.append(
                {
                    "tokens": [*rollout.prompt_ids, *rollout.completion_ids],
                    "logprobs": skipped
                    + [float(sampler_logprob) for sampler_logprob in rollout.sampler_logprobs],
                    "advantages": skipped + advantages,
                }
            )
        steps.append({"repeats": 2, "data": data})
    return losses, describe_run("ppo", 5e-3, steps, clip_low_threshold=0.8, clip_high_threshold=1.2)


def test_losses_of_the_sdk_are_those_of_our_trainers(tmp_path_factory, base_folder):
    ours, runs = zip(train_supervised(base_folder), train_policy(base_folder), strict=True)
    folder = tmp_path_factory.mktemp("parity")
    (folder / "data.json").write_text(json.dumps(runs))
    python = sdk_environments(folder / "environments")("0.38")
    with run_service(folder, {"base": str(base_folder)}) as (address, key):
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("TINKER", "PYTHON"))
        }
        environment |= {
            "TINKER_BASE_URL": address,
            "TINKER_API_KEY": key,
            "EXTRA_PACKAGES": sysconfig.get_path("purelib"),
        }
        command = [python, str(ROOT / "tests" / "sdk" / "parity.py"), str(folder / "data.json")]
        done = subprocess.run(
            command,
            cwd=base_folder.parent,
            env=environment,
            capture_output=True,
            text=True,
            timeout=600,
        )
    assert done.returncode == 0 and done.stdout, done.stderr[-3000:]
    supervised_losses, policy_losses = json.loads(done.stdout.splitlines()[-1])
    assert np.allclose(supervised_losses, ours[0], rtol=0, atol=1e-5)
    assert ours[0][0] - ours[0][-1] > 0.01  # it learned
    by_iteration = np.reshape(policy_losses, (-1, 2)).mean(1)
    assert np.allclose(by_iteration, ours[1], rtol=0, atol=1e-5)
    assert np.ptp(ours[1]) > 1e-3  # it moved
    print(
        json.dumps(
            {
                "supervised": float(np.abs(np.subtract(supervised_losses, ours[0])).max()),
                "policy": float(np.abs(np.subtract(by_iteration, ours[1])).max()),
            }
        )
    )
