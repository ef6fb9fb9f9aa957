"""Optimizer settings shared by all trainers: averaged weights, autocast, checkpointing, and their resume."""

import math

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from rl_core.data.chat import ChatRenderer
from rl_core.data.tokenizer import train_tokenizer
from rl_core.environments.arithmetic import Arithmetic
from rl_core.errors import SettingsError
from rl_core.inference.engine import create_rollout_backend
from rl_core.inference.transformers_backend import TransformersBackend
from rl_core.models import causal_lm
from rl_core.models.logprobs import completion_logprobs, compute_token_outputs
from rl_core.models.lora import add_adapter
from rl_core.rewards.orchestrator import RewardOrchestrator
from rl_core.settings import (
    LoraSettings,
    ModelSettings,
    OptimizerSettings,
    PolicySettings,
    RewardModelSettings,
    SamplingSettings,
    SFTSettings,
)
from rl_core.storage import faults
from rl_core.storage.checkpoint import CheckpointStore
from rl_core.storage.faults import InjectedFault
from rl_core.tracking import MemoryTracker
from rl_core.trainers.policy_gradient import rollout_buffer
from rl_core.trainers.policy_gradient import update as policy_update
from rl_core.trainers.policy_gradient.trainer import PolicyGradientTrainer
from rl_core.trainers.reward_model import RewardModelTrainer
from rl_core.trainers.sft import SFTTrainer
from rl_core.training.loop import run_loop
from rl_core.training.optimizer_step import OptimizerStep
from rl_core.types import TrainBatch

EVERYTHING = {"optimizer": "muon", "grokfast_lambda": 2.0, "grokfast_alpha": 0.9, "ema_decay": 0.8}


def build_nano(kind=LlamaForCausalLM, dropout=0.0):
    shape = dict(
        vocab_size=11,
        hidden_size=16,
        intermediate_size=24,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return kind(
            LlamaConfig(
                **shape,
                num_hidden_layers=2,
                max_position_embeddings=32,
                tie_word_embeddings=True,
                attention_dropout=dropout,
                pad_token_id=0,
                num_labels=1,
            )
        )


def build_rows(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    prompts = [
        torch.randint(1, 11, (2 + i % 4,), generator=generator).tolist() for i in range(count)
    ]
    return [(prompt * 2, [False] * len(prompt) + [True] * len(prompt)) for prompt in prompts]


def build_sft_trainer(model=None, **changes):
    options = {"learning_rate": 5e-3, "warmup_steps": 2, "batch_size": 4, "max_steps": 8, **changes}
    return SFTTrainer(
        model or build_nano(), 0, build_rows(14), build_rows(5, seed=1), SFTSettings(**options), 7
    )


def batch_of(rows=3, length=8):
    ids = torch.randint(1, 11, (rows, length), generator=torch.Generator().manual_seed(4))
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[:, :2] = False
    return TrainBatch(ids, torch.ones_like(mask), mask)


def copy_weights(model):
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def are_equal(left, right):
    return left.keys() == right.keys() and all(
        torch.equal(left[name], right[name]) for name in left
    )


def compute_averages(trainer):
    averages = trainer.optimizer_step.state_dict()["ema"]["averages"]
    return {name: average.clone() for name, average in averages.items()}


# Averaged weights


def test_the_loop_evaluates_and_leaves_the_averaged_weights():
    trainer = build_sft_trainer(ema_decay=0.8, eval_every=3)
    tracker, observed = MemoryTracker(), []
    evaluate = trainer.evaluate
    trainer.evaluate = lambda: (
        observed.append((copy_weights(trainer.model), compute_averages(trainer))),
        evaluate(),
    )[1]
    step, raw = trainer.step, []
    trainer.step = lambda: (step(), raw.append(copy_weights(trainer.model)))[0]
    outcome = run_loop(trainer, trainer.settings, iterations=8, tracker=tracker)
    assert len(observed) == 3  # after 3, 6 and 8 iterations
    for weights, averages in observed:
        assert all(torch.equal(weights[name], average) for name, average in averages.items())
    assert all(
        torch.equal(copy_weights(trainer.model)[name], average)
        for name, average in compute_averages(trainer).items()
    )
    assert trainer.evaluate()["eval/loss"] == outcome.metrics["eval/loss"]
    # training itself never used them
    baseline = build_sft_trainer()
    for weights in raw:
        baseline.step()
        assert are_equal(copy_weights(baseline.model), weights)
    assert not are_equal(copy_weights(trainer.model), raw[-1])


def test_the_best_averaged_weights_are_restored():
    trainer = build_sft_trainer(ema_decay=0.8, eval_every=1)
    observed, scores = [], iter([0.1, 0.5, 0.9, 0.4, 0.3, 0.2, 0.1, 0.0])
    trainer.evaluate = lambda: (
        observed.append(copy_weights(trainer.model)),
        {"eval/score": next(scores)},
    )[1]
    outcome = run_loop(trainer, trainer.settings, iterations=8, best_metric="eval/score")
    assert outcome.best_iteration == 3
    assert are_equal(copy_weights(trainer.model), observed[2])


def build_policy_trainer(evaluator=None, **changes):
    tokenizer = train_tokenizer(["1 2 3"], 300)
    model = causal_lm.create_model(
        ModelSettings(preset="nano", context=96, device="cpu"), tokenizer, 0
    )
    renderer = ChatRenderer(tokenizer)
    eos = range(0, len(tokenizer), 2)
    backend = create_rollout_backend(model, eos_ids=eos, pad_id=renderer.pad_id, max_length=96)
    options = {
        "iterations": 3,
        "prompts_per_iteration": 3,
        "group_size": 4,
        "warmup_steps": 0,
        "learning_rate": 1e-2,
    }
    sampling = SamplingSettings(max_completion_tokens=3)
    settings = PolicySettings(
        **{**options, "epochs": 2, "entropy_coef": 0.01, "sampling": sampling, **changes}
    )
    rewards = RewardOrchestrator({"task": 1.0})
    reference = causal_lm.create_model(
        ModelSettings(preset="nano", context=96, device="cpu"), tokenizer, 1
    )
    return PolicyGradientTrainer(
        model, reference, renderer, Arithmetic(), settings, 7, rewards, backend, evaluator=evaluator
    )


def test_rollouts_use_the_raw_weights_and_evaluation_the_average():
    """Check that the engine's log-probs are those of the weights currently in the model."""
    trainer = build_policy_trainer(ema_decay=0.8, eval_every=1)
    observed = []
    trainer.evaluator = lambda: (observed.append(copy_weights(trainer.model)), {})[1]
    metrics = []
    step = trainer.step
    trainer.step = lambda: (metrics.append(step()), metrics[-1])[1]
    run_loop(trainer, trainer.settings, iterations=3)
    assert all(row["policy/sampler_difference_max"] < 1e-4 for row in metrics)
    baseline = build_policy_trainer()
    assert all(
        torch.equal(observed[-1][name], average)
        for name, average in compute_averages(trainer).items()
    )
    for row in metrics:  # the same rollouts and updates as without the average
        names = [name for name in row if not name.startswith("perf/")]
        other = baseline.step()
        assert [row[name] for name in names] == [other[name] for name in names]


# Resume


def run_training(folder, tracker, store=CheckpointStore):
    torch.manual_seed(3)
    trainer = build_sft_trainer(
        build_nano(dropout=0.2), eval_every=3, checkpoint_every=2, schedule="cosine", **EVERYTHING
    )
    checkpoints = store(folder) if folder else None
    run_loop(trainer, trainer.settings, iterations=8, tracker=tracker, checkpoints=checkpoints)
    series = {
        (step, name): value.hex()
        for step, row in tracker.metrics
        for name, value in row.items()
        if not name.startswith("perf/")
    }
    return copy_weights(trainer.model), compute_averages(trainer), series


@pytest.fixture(scope="module")
def unbroken_run():
    return run_training(None, MemoryTracker())


def are_same(left, right):
    return are_equal(left[0], right[0]) and are_equal(left[1], right[1]) and left[2] == right[2]


@pytest.mark.parametrize(
    "fault_point",
    ["loop.step:2", "loop.step:6", "loop.evaluated:2", "loop.saved:3", "loop.finished:1"],
)
def test_a_killed_run_with_muon_grokfast_and_average_gives_the_same_numbers(
    tmp_path, unbroken_run, fault_point
):
    tracker = MemoryTracker()
    faults.configure_faults(f"{fault_point}:raise")
    with pytest.raises(InjectedFault):
        run_training(tmp_path, tracker)
    faults.configure_faults(None)
    assert are_same(run_training(tmp_path, tracker), unbroken_run)
    assert are_same(
        run_training(tmp_path, tracker), unbroken_run
    )  # a finished run is not run again


@pytest.mark.parametrize("item", ["grokfast", "ema", "muon"])
def test_each_of_them_is_needed_in_the_checkpoint(tmp_path, unbroken_run, item):
    class Dropping(CheckpointStore):
        def load_latest(self):
            state = super().load_latest()
            if item == "muon":
                state["optimizer_step"]["optimizer"]["muon"] = build_sft_trainer(
                    **EVERYTHING
                ).optimizer_step.state_dict()["optimizer"]["muon"]
            elif item == "grokfast":  # as at the start; without it a resume is refused
                state["optimizer_step"][item] = build_sft_trainer(
                    **EVERYTHING
                ).optimizer_step.state_dict()[item]
            else:
                state["optimizer_step"][item] = None
            return state

    tracker = MemoryTracker()
    faults.configure_faults("loop.step:6:raise")
    with pytest.raises(InjectedFault):
        run_training(tmp_path, tracker)
    faults.configure_faults(None)
    weights, _, series = run_training(tmp_path, tracker, Dropping)
    assert not are_equal(weights, unbroken_run[0])
    assert series != unbroken_run[2]


# Autocast


def test_autocast_trains_float32_weights_with_bfloat16_passes():
    baseline, cast = build_sft_trainer(), build_sft_trainer(autocast="bfloat16")
    first, second = baseline.step(), cast.step()
    assert second["train/loss"] != first["train/loss"]
    assert second["train/loss"] == pytest.approx(first["train/loss"], rel=5e-3)
    assert second["train/grad_norm"] == pytest.approx(first["train/grad_norm"], rel=5e-2)
    for _ in range(7):
        baseline.step(), cast.step()
    actual, expected = cast.evaluate()["eval/loss"], baseline.evaluate()["eval/loss"]
    assert actual != expected and actual == pytest.approx(expected, rel=2e-2)
    assert {parameter.dtype for parameter in cast.model.parameters()} == {torch.float32}
    assert not torch.is_autocast_enabled("cpu")


def test_every_weight_gets_a_gradient_though_a_pass_without_one_came_first(monkeypatch):
    """Check that casts of a probe of the head under no_grad in the same context are not taken for the real ones."""
    model = build_nano()
    optimizer_step = OptimizerStep(model, OptimizerSettings(autocast="bfloat16"), 10)
    observed = {}
    monkeypatch.setattr(
        optimizer_step.optimizer,
        "step",
        lambda: observed.update({n: p.grad is not None for n, p in model.named_parameters()}),
    )

    def compute_loss(batch):
        with torch.no_grad():
            completion_logprobs(model, batch)
        logprobs, _ = completion_logprobs(model, batch)
        assert logprobs.dtype == torch.float32
        return -logprobs.sum(), {}

    optimizer_step.run_step([batch_of()], compute_loss)
    assert len(observed) == 2 + 2 * 9 and all(observed.values())


def test_old_reference_and_new_logprobs_are_all_taken_under_autocast(monkeypatch):
    enabled = []

    def record_autocast(function):
        def call_recorded(*args, **kwargs):
            enabled.append(torch.is_autocast_enabled("cpu"))
            return function(*args, **kwargs)

        return call_recorded

    monkeypatch.setattr(rollout_buffer, "completion_logprobs", record_autocast(completion_logprobs))
    monkeypatch.setattr(
        policy_update, "compute_token_outputs", record_autocast(compute_token_outputs)
    )
    trainer = build_policy_trainer(
        autocast="bfloat16", kl_coef=0.1, learning_rate=1e-30
    )  # no change
    metrics = trainer.step()
    assert len(enabled) == 3 and all(
        enabled
    )  # reference; new in each of two epochs, of which the first is also the old
    assert metrics["policy/ratio_max"] == pytest.approx(
        1.0, abs=1e-5
    )  # the same precision on both sides
    assert 0 < metrics["policy/sampler_difference_max"] < 0.1  # the sampler stays in float32


def test_a_reward_model_trains_and_is_evaluated_under_autocast():
    def build_trainer(autocast):
        pairs = [(chosen, chosen[:1]) for chosen, _ in build_rows(6)]
        settings = RewardModelSettings(batch_size=6, autocast=autocast)
        return RewardModelTrainer(
            build_nano(LlamaForSequenceClassification), 0, pairs, pairs, settings, 0
        )

    baseline, cast = build_trainer("none"), build_trainer("bfloat16")
    actual, expected = cast.evaluate()["eval/loss"], baseline.evaluate()["eval/loss"]
    assert actual != expected and actual == pytest.approx(expected, rel=1e-2)
    assert cast.step()["train/loss"] == pytest.approx(actual, rel=1e-2)


# Activation checkpointing


def compute_gradients(model, is_on, monkeypatch):
    optimizer_step = OptimizerStep(
        model, OptimizerSettings(activation_checkpointing=is_on, dropout=True), 10
    )
    observed, calls = {}, []
    named = list(model.named_parameters())
    monkeypatch.setattr(
        optimizer_step.optimizer,
        "step",
        lambda: observed.update({n: p.grad.clone() for n, p in named if p.grad is not None}),
    )
    layer = next(module for name, module in model.named_modules() if name.endswith("layers.0.mlp"))
    layer.register_forward_pre_hook(lambda *args: calls.append(torch.is_grad_enabled()))

    def compute_loss(batch):
        if isinstance(model, LlamaForSequenceClassification):
            return model.score(
                model.base_model(batch.input_ids_BS).last_hidden_state[:, -1]
            ).square().sum(), {}
        return -completion_logprobs(model, batch)[0].sum(), {}

    torch.manual_seed(0)
    optimizer_step.run_step([batch_of()], compute_loss)
    return observed, sum(calls)


@pytest.mark.parametrize("kind", ["whole", "adapters", "classifier", "wrapped"])
def test_checkpointing_computes_layers_twice_and_gives_the_same_gradients(monkeypatch, kind):
    def make_model():
        model = build_nano(
            LlamaForSequenceClassification if kind == "classifier" else LlamaForCausalLM,
            dropout=0.3,
        )
        if kind == "adapters":
            torch.manual_seed(1)
            model = add_adapter(model, LoraSettings(rank=2))
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if "lora_B" in name:
                        parameter.normal_()
        return model

    if kind == "wrapped":
        model = nn.ModuleDict({"policy": build_nano()})
        OptimizerStep(model, OptimizerSettings(activation_checkpointing=True), 10)
        assert all(layer.gradient_checkpointing for layer in model["policy"].model.layers)
        return
    expected, once = compute_gradients(make_model(), False, monkeypatch)
    actual, twice = compute_gradients(make_model(), True, monkeypatch)
    assert twice == once + 1
    assert actual.keys() == expected.keys() and len(actual) >= 19
    for name in expected:
        torch.testing.assert_close(actual[name], expected[name], rtol=0, atol=1e-6)
        assert float(expected[name].abs().max()) > 1e-5


def test_a_checkpointed_model_still_plays():
    model = build_nano()
    baseline = model(torch.tensor([[1, 2, 3]])).logits.detach()
    OptimizerStep(model, OptimizerSettings(activation_checkpointing=True), 10)
    backend = TransformersBackend(model, eos_ids=[2], pad_id=0, max_length=16)

    class OneTurn:
        prompt_ids, seed = [1, 2, 3], 0

        def take_action(self, action_ids, logprobs, hit_limit):
            self.first = action_ids[0], logprobs[0]

    sequence = OneTurn()
    backend.run_sequences([sequence], SamplingSettings(max_completion_tokens=4))
    token, logprob = sequence.first
    assert logprob == pytest.approx(float(baseline[0, -1].log_softmax(-1)[token]), abs=1e-5)


def test_a_model_that_cannot_checkpoint_says_so():
    with pytest.raises(
        SettingsError, match="activation_checkpointing: Linear contains no transformers model"
    ):
        OptimizerStep(nn.Linear(1, 1), OptimizerSettings(activation_checkpointing=True), 10)


# Metrics


@pytest.mark.parametrize("changes", [{}, EVERYTHING])
def test_every_step_reports_loss_norm_rate_and_skipped_steps(changes):
    tracker = MemoryTracker()
    trainer = build_sft_trainer(max_steps=3, **changes)
    run_loop(trainer, trainer.settings, iterations=3, tracker=tracker)
    steps = [row for _, row in tracker.metrics if "train/loss" in row]
    assert len(steps) == 3
    for row in steps:
        names = (
            "train/loss",
            "train/grad_norm",
            "train/learning_rate",
            "train/skipped_steps",
            "perf/memory_gb",
        )
        assert all(math.isfinite(row[name]) for name in names)
