"""Times that a training step stops the host, counted on a pretended GPU, and its numbers, equal to those of a CPU."""

import math

import pytest
import torch
from helpers.letters import LOW, FewLetters, make_trainer
from helpers.pretended_device import use_pretended_device
from helpers.tiny import PAD, VOCABULARY, nano
from transformers import LlamaForSequenceClassification

from rl_core.capabilities import Decision, decoding
from rl_core.data.pairs import PairSide, PreferencePair
from rl_core.data.tokenizer import train_tokenizer
from rl_core.errors import DataError
from rl_core.losses import host_reads, masking
from rl_core.losses.host_reads import (
    check_condition,
    defer_checks,
    read_nested_scalars,
    read_scalars,
)
from rl_core.losses.masking import check_finite, check_inputs
from rl_core.models import hidden_states, logprobs
from rl_core.rollouts.batching import TrainRow, build_batches
from rl_core.settings import (
    CriticSettings,
    PreferenceSettings,
    RewardModelSettings,
    SFTSettings,
)
from rl_core.trainers.policy_gradient.update import PolicyUpdate
from rl_core.trainers.preference import PreferenceTrainer
from rl_core.trainers.reward_model import RewardModelTrainer
from rl_core.trainers.sft import SFTTrainer
from rl_core.training import optimizer_step
from rl_core.training.optimizer_step import OptimizerStep

OPTIONS = {"learning_rate": 5e-3, "warmup_steps": 2, "batch_size": 8, "epochs": 2.0}


def draw_ids(index, count):
    generator = torch.Generator().manual_seed(index)
    return torch.randint(1, VOCABULARY, (count,), generator=generator).tolist()


def build_sft(model, **changes):
    rows = [
        (draw_ids(index, 5 + index % 4), [False] * 2 + [True] * (3 + index % 4))
        for index in range(8)
    ]
    return SFTTrainer(model, PAD, rows, rows[:3], SFTSettings(**{**OPTIONS, **changes}), 7)


def build_preference(model, **changes):
    def build_side(index):
        return PairSide(
            draw_ids(index, 3), draw_ids(index + 50, 2 + index % 3), [True] * (2 + index % 3)
        )

    pairs = [
        PreferencePair(
            build_side(index),
            build_side(index + 100),
            desirable=index % 2 == 0 if changes.get("loss") == "kto" else None,
        )
        for index in range(8)
    ]
    settings = PreferenceSettings(**{**OPTIONS, **changes})
    return PreferenceTrainer(model, PAD, pairs, pairs[:3], settings, 7)


def build_reward_model(model, **changes):
    pairs = [(draw_ids(index, 4 + index % 3), draw_ids(index + 50, 5)) for index in range(8)]
    settings = RewardModelSettings(**{**OPTIONS, **changes})
    return RewardModelTrainer(model, PAD, pairs, pairs[:3], settings, 7)


def build_scorer():
    return nano(0, 0.0, LlamaForSequenceClassification, num_labels=1)


SUPERVISED = {
    "sft": (nano, build_sft, {}),
    "sft, packed": (nano, build_sft, {"packing": True}),
    "sft, clipped": (nano, build_sft, {"max_grad_norm": 1e-3}),
    "dpo": (nano, build_preference, {}),
    "ipo": (nano, build_preference, {"loss": "ipo", "sft_coef": 0.1}),
    "simpo": (nano, build_preference, {"loss": "simpo"}),
    "orpo": (nano, build_preference, {"loss": "orpo"}),
    "reward model": (build_scorer, build_reward_model, {}),
}


def list_numbers(metrics):
    return {name: value for name, value in metrics.items() if not name.startswith("perf/")}


@pytest.fixture
def no_cpu_path(monkeypatch):
    """Compute on the CPU as the pretended device does, by transformers' own forward pass."""
    refuse = lambda *_: Decision("training forward", False, "as on a GPU", "")  # noqa: E731
    monkeypatch.setattr(hidden_states, "check_training_forward", refuse)
    monkeypatch.setattr(logprobs, "check_training_forward", refuse)


@pytest.mark.parametrize("micro_batch_tokens", [10_000, 20])
@pytest.mark.parametrize("name", SUPERVISED)
def test_a_supervised_step_reads_once(name, micro_batch_tokens, no_cpu_path):
    build_model, build_trainer, changes = SUPERVISED[name]
    changes = {**changes, "micro_batch_tokens": micro_batch_tokens}
    host_trainer = build_trainer(build_model(), **changes)
    expected = [host_trainer.step() for _ in range(3)]
    evaluated = host_trainer.evaluate()
    with use_pretended_device() as counts:
        trainer = build_trainer(build_model().to("cuda"), **changes)
        trainer.step()  # the first one creates the optimizer's moments
        counts.clear()
        step = trainer.step()
        assert counts.stops.total() == 1, counts.stops
        assert not counts.mixed
        measured = [step, trainer.step(), trainer.evaluate()]
    for ours, theirs in zip(measured, [*expected[1:], evaluated], strict=True):
        assert list_numbers(ours) == pytest.approx(list_numbers(theirs), rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("name", SUPERVISED)
def test_numbers_read_together_equal_numbers_read_one_by_one(name, monkeypatch, no_cpu_path):
    """Bit for bit, with the checks deferred or made immediately."""
    build_model, build_trainer, changes = SUPERVISED[name]
    changes = {**changes, "micro_batch_tokens": 20}

    def train():
        with use_pretended_device() as counts:
            trainer = build_trainer(build_model().to("cuda"), **changes)
            metrics = [list_numbers(trainer.step()) for _ in range(2)]
            return [*metrics, trainer.evaluate()], counts.stops.total()

    together, few = train()
    read_each = lambda values: [float(value) for value in values]  # noqa: E731
    monkeypatch.setattr(optimizer_step, "read_scalars", read_each)
    monkeypatch.setattr(host_reads, "read_scalars", read_each)
    monkeypatch.setattr(host_reads, "find_deferred_checks", lambda _: None)
    monkeypatch.setattr(masking, "find_deferred_checks", lambda _: None)
    one_by_one, many = train()
    assert together == one_by_one and many > few + 10


def test_kto_reads_its_reference_point_and_its_step(no_cpu_path):
    with use_pretended_device() as counts:
        trainer = build_preference(nano().to("cuda"), loss="kto", micro_batch_tokens=20)
        trainer.step()
        counts.clear()
        trainer.step()
        assert counts.stops.total() == 2, counts.stops


def test_grokfast_reads_the_norm_after_it_too():
    with use_pretended_device() as counts:
        trainer = build_sft(nano().to("cuda"), grokfast_lambda=0.5)
        trainer.step()
        counts.clear()
        assert trainer.step()["train/grokfast_grad_norm"] > 0
        assert counts.stops.total() == 2, counts.stops


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["abc xyz"], 300)


POLICIES = {
    "grpo": ({}, 0),
    "grpo, two epochs": ({"epochs": 2, "minibatches": 2}, 0),
    "grpo, kl and entropy": ({"kl_coef": 0.1, "entropy_coef": 0.01}, 0),
    "gspo": ({"algorithm": "gspo", "epochs": 2}, 0),
    "cispo, token weights": ({"algorithm": "cispo", "importance": "token"}, 0),
    "dapo": ({"algorithm": "dapo", "overlong_buffer": 0}, 0),
    "ppo": ({"algorithm": "ppo", "epochs": 2}, 24),
    "ppo, shared": ({"algorithm": "ppo", "critic": CriticSettings(kind="shared")}, 24),
}


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_step_reads_once(name, tokenizer, monkeypatch, no_cpu_path):
    """Each optimizer step reads once; what an iteration reads besides does not grow with its micro-batches."""
    options, most_besides = POLICIES[name]
    stops = count_stops(monkeypatch)
    besides = set()
    for micro_batch_tokens in (40, 100_000):
        with use_pretended_device() as counts:
            stops.counts = counts
            trainer = build_policy(tokenizer, micro_batch_tokens=micro_batch_tokens, **options)
            trainer.step()
            stops.clear()
            trainer.step()
            assert not counts.mixed
        assert stops.steps and all(step.total() == 1 for step in stops.steps), stops.steps
        in_steps = sum(step.total() for step in stops.steps)
        besides.add(stops.update.total() - in_steps)
    assert len(besides) == 1 and besides.pop() <= most_besides, stops.update


def build_policy(tokenizer, **options):
    device = options.pop("device", "cuda")
    reference = make_trainer(tokenizer).policy if options.get("kl_coef") else None
    if reference is not None:
        reference.to(device)
    model = make_trainer(tokenizer).policy.to(device)
    return make_trainer(
        tokenizer, FewLetters(), reference=reference, model=model, curriculum=LOW, **options
    )


class count_stops:  # noqa: N801 a function with a memory
    """Count the stops of each optimizer step, and of the whole update."""

    def __init__(self, monkeypatch):
        self.counts = None
        self.clear()
        for owner, name, record in (
            (OptimizerStep, "run_step", self.steps_append),
            (PolicyUpdate, "run_optimizer_steps", self.set_update),
        ):
            monkeypatch.setattr(owner, name, self.wrap(getattr(owner, name), record))

    def clear(self):
        self.steps, self.update = [], None

    def steps_append(self, stops):
        self.steps.append(stops)

    def set_update(self, stops):
        self.update = stops

    def wrap(self, function, record):
        def run(*args, **options):
            before = self.counts.stops
            result = function(*args, **options)
            record(self.counts.stops - before)
            return result

        return run


def test_a_policy_iteration_has_the_numbers_of_a_cpu(tokenizer, no_cpu_path, monkeypatch):
    monkeypatch.setattr(
        decoding, "check_packed_weights", lambda *_, **__: Decision("packed weights", False, "", "")
    )
    options = {"epochs": 2, "kl_coef": 0.1, "micro_batch_tokens": 40, "algorithm": "ppo"}
    host_trainer = build_policy(tokenizer, device="cpu", **options)
    expected = [list_numbers(host_trainer.step()) for _ in range(2)]
    with use_pretended_device():
        trainer = build_policy(tokenizer, **options)
        measured = [list_numbers(trainer.step()) for _ in range(2)]
    for ours, theirs in zip(measured, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_loss_input_that_is_not_finite_skips_the_step(device, no_cpu_path):
    with use_pretended_device():
        trainer = build_sft(nano().to(device), micro_batch_tokens=20, max_nonfinite=2)
        before = [weight.detach().clone() for weight in trainer.model.parameters()]
        calls = []

        original = SFTTrainer._compute_loss

        def compute_loss(self, batch, *counts):
            calls.append(len(calls))
            with torch.no_grad():
                self.model.lm_head.weight.mul_(math.nan if calls[-1] == 1 else 1.0)
            return original(self, batch, *counts)

        trainer._compute_loss = compute_loss.__get__(trainer)
        metrics = trainer.step()
        assert math.isnan(metrics["train/loss"]) and metrics["train/skipped_steps"] == 1
        del trainer._compute_loss
        with torch.no_grad():
            for weight, value in zip(trainer.model.parameters(), before, strict=True):
                weight.copy_(value)
        assert math.isfinite(trainer.step()["train/loss"])


def test_deferred_checks_name_the_first_tensor_and_its_micro_batch():
    with use_pretended_device() as counts, defer_checks() as checks:
        values = torch.tensor([1.0, math.nan]).to("cuda")
        counts.clear()
        check_finite(good=torch.ones(2).to("cuda"), also_good=torch.full((2,), 3e38).to("cuda"))
        checks.part = 1
        check_inputs(torch.tensor([True, False]).to("cuda"), hidden=values)
        check_inputs(
            torch.tensor([True, True]).to("cuda"), first=torch.ones(2).to("cuda"), second=values
        )
        check_condition(torch.tensor(False).to("cuda"), lambda: DataError("later"))
        assert not counts.reads
        part, error = checks.find_failure(read_scalars(checks.stack_outcomes()))
        assert part == 1 and str(error) == "second: some values are not finite"
        assert counts.reads.total() == 1
        with pytest.raises(DataError, match="second"):
            checks.raise_failure()


def test_checks_on_a_cpu_are_not_deferred():
    with defer_checks() as checks:
        with pytest.raises(DataError, match=r"values: nan at \(1,\)"):
            check_finite(values=torch.tensor([1.0, math.nan]))
        with pytest.raises(DataError, match="now"):
            check_condition(torch.tensor(False), lambda: DataError("now"))
        assert not checks.stack_outcomes()


def test_an_error_of_a_deferred_check_is_raised_before_the_weights_change(no_cpu_path):
    """A mean log-probability above 0, which no softmax gives."""
    with use_pretended_device():
        trainer = build_preference(nano().to("cuda"), loss="orpo")
        before = [weight.detach().clone() for weight in trainer.model.parameters()]
        compute = trainer._compute_pair_logprobs
        trainer._compute_pair_logprobs = lambda *args: (
            compute(*args)[0] + 1e3,
            *compute(*args)[1:],
        )
        with pytest.raises(DataError, match=r"chosen_logprobs: .* a log-probability is at most 0"):
            trainer.step()
        for weight, value in zip(trainer.model.parameters(), before, strict=True):
            assert torch.equal(weight, value)


def test_read_numbers_equal_those_read_alone():
    numbers = [
        torch.tensor(1 / 3),
        torch.tensor(1 / 3, dtype=torch.float64),
        torch.tensor(1 / 3, dtype=torch.bfloat16),
        torch.tensor(7),
        torch.tensor(True),
        torch.tensor([2.5]),
        0.1,
        3,
    ]
    expected = [float(number) for number in numbers]
    with use_pretended_device() as counts:
        placed = [
            number.to("cuda") if isinstance(number, torch.Tensor) else number for number in numbers
        ]
        assert read_scalars(placed) == read_scalars(numbers) == expected
        nested = {"a": placed[0], "b": [placed[3], (2, {"c": placed[4]})]}
        counts.clear()
        assert read_nested_scalars(nested) == {"a": expected[0], "b": [7.0, (2, {"c": 1.0})]}
        assert counts.reads.total() == 1


def test_a_moved_batch_knows_its_loss_tokens():
    rows = [TrainRow([1, 2], [3, 4, 5], [True, False, True]), TrainRow([1], [2], [True])]
    (batch,) = build_batches(rows, 100, PAD)
    expected = batch.find_loss_positions()
    with use_pretended_device() as counts:
        moved = batch.to("cuda")
        assert moved.num_loss_tokens == 3 and not counts.stops
        assert torch.equal(moved.find_loss_positions(), expected)
    assert batch.loss_positions_N is None


@pytest.mark.parametrize("problem", ["loss_mask", "temperatures"])
def test_a_batch_with_a_problem_is_refused_on_every_device(problem):
    (batch,) = build_batches([TrainRow([1, 2], [3], [True])], 100, PAD)
    if problem == "loss_mask":
        batch.loss_mask_BS[0, 0] = True
    else:
        batch.temperatures_BS = torch.zeros(batch.input_ids_BS.shape)
    with use_pretended_device():
        for device in ("cpu", "cuda"):
            model = nano().to(device)
            with pytest.raises(DataError, match=problem):
                logprobs.completion_logprobs(model, batch.to(device))
