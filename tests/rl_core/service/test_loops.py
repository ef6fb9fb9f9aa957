"""Training loops over the engine compared with this project's trainers: equal losses on equal data."""

import copy

import numpy as np
import pytest
import torch
from helpers.letters import Parity, make_trainer
from helpers.service import CONTEXT, make_base, make_engine
from peft import get_peft_model_state_dict

from rl_core.models import causal_lm
from rl_core.service.requests import (
    AdamParameters,
    AdapterConfig,
    CreateModel,
    Datum,
    ForwardBackward,
    OptimStep,
)
from rl_core.settings import LoraSettings, ModelSettings, SFTSettings
from rl_core.trainers.sft import SFTTrainer

ADAM = dict(beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.0, grad_clip_norm=1.0)
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def build_shifted_datum(ids, **per_token):
    """Build a datum from a sequence; arrays have an entry for each token after the first."""
    ids = np.asarray(ids)
    inputs = {name: np.asarray(values, dtype=np.float32) for name, values in per_token.items()}
    return Datum(ids[:-1], {"target_tokens": ids[1:], **inputs})


def run_step(engine, data, loss, learning_rate, **options):
    (answer,) = engine.forward_backward(
        [ForwardBackward(model_id="r", data=tuple(data), loss_fn=loss, loss_fn_config=options)]
    )
    engine.optim_step(
        OptimStep(model_id="r", adam=AdamParameters(learning_rate=learning_rate, **ADAM))
    )
    return answer


def test_sft_with_an_adapter(base_folder):
    engine = make_engine(base_folder)
    config = AdapterConfig(rank=4, alpha=8.0, train_unembed=False)
    engine.create_model(CreateModel(model_id="r", base="base", adapter=config))
    settings = ModelSettings(
        device="cpu", lora=LoraSettings(rank=4, alpha=8.0, target_modules=LINEARS)
    )
    model, tokenizer = causal_lm.load_model(base_folder, settings)
    ours = {name: p for name, p in model.named_parameters() if "lora_" in name}
    start = engine.state_dict("r")["model"]
    with torch.no_grad():
        for name, parameter in ours.items():
            parameter.copy_(start[name.removeprefix("base_model.model.").replace(".default.", ".")])
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(12):
        ids = rng.integers(2, 60, int(rng.integers(4, 20))).tolist()
        rows.append((ids, [False, *(rng.random(len(ids) - 2) < 0.7).tolist(), True]))
    trainer = SFTTrainer(
        model,
        tokenizer.pad_token_id,
        rows,
        [],
        seed=0,
        settings=SFTSettings(
            epochs=2,
            batch_size=4,
            learning_rate=5e-3,
            warmup_steps=0,
            schedule="constant",
            weight_decay=0.0,
            betas=(0.9, 0.95),
            eps=1e-8,
            max_grad_norm=1.0,
            packing=False,
        ),
    )
    order = copy.deepcopy(trainer.order)
    losses = []
    for _ in range(6):
        batch = [rows[index] for index in order.next_batch()]
        count = sum(sum(mask) for _, mask in batch)
        data = [build_shifted_datum(ids, weights=np.array(mask[1:]) / count) for ids, mask in batch]
        losses.append(
            (trainer.step()["train/loss"], run_step(engine, data, "cross_entropy", 5e-3).loss)
        )
    assert np.allclose(*np.array(losses).T, rtol=0, atol=1e-5)
    assert losses[0][0] - losses[-1][0] > 0.01  # it learned
    after = engine.state_dict("r")["model"]
    for name, tensor in get_peft_model_state_dict(model).items():
        assert torch.allclose(tensor, after[name.removeprefix("base_model.model.")], atol=1e-5), (
            name
        )


@pytest.mark.parametrize("algorithm", ["grpo", "cispo"])
def test_policy_gradient_on_all_weights(tmp_path, algorithm):
    """Pass our trainer's rollouts and advantages to the engine for two epochs: losses, KL and weights agree."""
    folder = make_base(tmp_path / "base")
    engine = make_engine(folder)
    engine.create_model(CreateModel(model_id="r", base="base", adapter=None))
    model, tokenizer = causal_lm.load_model(folder, ModelSettings(device="cpu"))
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    trainer = make_trainer(
        tokenizer,
        Parity(),
        model=model,
        algorithm=algorithm,
        epochs=2,
        learning_rate=2e-3,
        weight_decay=0.0,
        kl_coef=0.0,
        loss_aggregation="token_mean",
        max_grad_norm=1.0,
        betas=(0.9, 0.95),
        eps=1e-8,
        schedule="constant",
        clip_eps=0.2,
        clip_eps_high=0.2,
    )
    thresholds = {
        "clip_low_threshold": 0.8 if algorithm == "grpo" else 0.0,
        "clip_high_threshold": 1.2,
    }
    for _ in range(3):
        metrics = trainer.step()
        groups = [group for group in trainer.groups if group.rollouts]
        pairs = [
            (r, a)
            for group in groups
            for r, a in zip(group.rollouts, group.advantages, strict=True)
        ]
        count = sum(sum(rollout.loss_mask) for rollout, _ in pairs)
        losses, kls = [], []
        for _ in range(2):
            data = []
            for rollout, advantage in pairs:
                skipped = len(rollout.prompt_ids) - 1
                mask = np.array([False] * skipped + list(rollout.loss_mask))
                q = np.array([0.0] * skipped + list(rollout.sampler_logprobs))
                ids = [*rollout.prompt_ids, *rollout.completion_ids]
                assert len(ids) <= CONTEXT
                data.append(
                    build_shifted_datum(ids, logprobs=q, advantages=mask * advantage / count)
                )
            answer = run_step(
                engine, data, {"grpo": "ppo"}.get(algorithm, algorithm), 2e-3, **thresholds
            )
            losses.append(answer.loss)
            kls.append(answer.metrics["update_kl:mean"])
        assert np.mean(losses) == pytest.approx(metrics["policy/loss"], abs=1e-5)
        assert np.mean(kls) == pytest.approx(metrics["policy/update_kl"], abs=1e-5)
    after = engine.state_dict("r")["model"]
    largest_change = 0.0
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter.detach(), after[name], atol=2e-5), name
        largest_change += float(
            (parameter.detach() - engine._load_base_model("base").model.get_parameter(name))
            .abs()
            .max()
        )
    assert largest_change > 0.01
