"""One optimizer step: accumulation, schedule, clipping, guards, lack of memory, masters. Expected values by hand."""

import io
import logging
import re
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from rl_core.errors import DataError, NonFiniteError, OutOfMemory
from rl_core.losses.masking import check_finite
from rl_core.out_of_memory import halve_batch
from rl_core.settings import OptimizerSettings
from rl_core.training.optimizer_step import OptimizerStep, combine_metrics
from rl_core.training.optimizers import compute_learning_rate
from rl_core.types import TrainBatch


@dataclass
class Rows:
    """Batch of x [B, 3] and y [B], with a list and a scalar, as a trainer's batch may have."""

    x: torch.Tensor
    y: torch.Tensor
    names: list
    scale: float = 1.0


def build_rows(count, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 3, generator=generator, dtype=dtype)
    return Rows(x, torch.randn(count, generator=generator, dtype=dtype), list(range(count)))


def build_model(seed=0, dtype=torch.float32):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).to(dtype)


def build_loss_fn(model, total):
    def loss_fn(batch):
        x = batch.x.to(next(model.parameters()).dtype)
        error = model(x).squeeze(-1) - batch.y.to(x.dtype)
        return error.square().sum() / total, {
            "size": len(batch.y) / total,
            "error_max": error.detach().abs().max(),
        }

    return loss_fn


def build_settings(**changes):
    return OptimizerSettings(
        **{"learning_rate": 0.1, "warmup_steps": 0, "weight_decay": 0.0, **changes}
    )


def compute_gradients_after(monkeypatch, micro_batches, loss_fn_for, **changes):
    """Return the gradients that AdamW receives."""
    model = build_model()
    optimizer_step = OptimizerStep(model, build_settings(max_grad_norm=1e9, **changes), 10)
    observed = {}
    monkeypatch.setattr(
        optimizer_step.optimizer,
        "step",
        lambda: observed.update({n: p.grad.clone() for n, p in model.named_parameters()}),
    )
    metrics = optimizer_step.run_step(micro_batches, loss_fn_for(model))
    return observed, metrics


def test_learning_rate_warms_up_and_falls_to_its_floor():
    linear = OptimizerSettings(
        learning_rate=1.0, schedule="linear", warmup_steps=4, min_lr_ratio=0.2
    )
    # steps 0..3 rise by a quarter; steps 4..13 of 14 fall from 1 towards 0.2, by 0.08 each
    expected = [0.25, 0.5, 0.75, 1.0, 1.0, 0.92, 0.84]
    assert [compute_learning_rate(step, linear, 14) for step in range(7)] == pytest.approx(expected)
    assert compute_learning_rate(14, linear, 14) == pytest.approx(0.2)
    assert compute_learning_rate(1000, linear, 14) == pytest.approx(0.2)
    cosine = OptimizerSettings(
        learning_rate=0.2, schedule="cosine", warmup_steps=0, min_lr_ratio=0.0
    )
    # half-way: 0.2 * 0.5 * (1 + cos(pi/2)) = 0.1; a quarter: 0.1 * (1 + cos(pi/4))
    assert [compute_learning_rate(step, cosine, 8) for step in (0, 2, 4, 8)] == pytest.approx(
        [0.2, 0.170710678, 0.1, 0.0]
    )
    constant = OptimizerSettings(learning_rate=0.3, warmup_steps=2)
    assert [compute_learning_rate(step, constant, 1) for step in (0, 1, 2, 99)] == pytest.approx(
        [0.15, 0.3, 0.3, 0.3]
    )


def test_the_scale_multiplies_the_schedule_and_is_saved():
    def build_step():
        settings = build_settings(learning_rate=0.8, warmup_steps=4)
        return OptimizerStep(nn.Linear(1, 1, bias=False), settings, 10)

    optimizer_step, other = build_step(), build_step()
    optimizer_step.num_steps, optimizer_step.learning_rate_scale = 1, 0.25
    assert optimizer_step.learning_rate == pytest.approx(0.1)  # 0.8 * 2/4 * 0.25
    batch = Rows(torch.tensor([[1.0]]), torch.tensor([0.0]), [0])
    metrics = optimizer_step.run_step([batch], lambda b: (optimizer_step.model(b.x).sum(), {}))
    assert metrics["train/learning_rate"] == pytest.approx(0.1)
    assert [group["lr"] for group in optimizer_step.optimizer.param_groups] == pytest.approx([0.1])
    other.load_state_dict(optimizer_step.state_dict())
    assert other.learning_rate == pytest.approx(0.15)


def test_metrics_of_micro_batches_add_up_and_extremes_stay_extremes():
    parts = [
        {"a": 0.25, "r_max": 3.0, "r_min": torch.tensor(-1.0)},
        {"a": torch.tensor(0.5), "r_max": 2.0, "r_min": 4.0},
    ]
    assert combine_metrics(parts) == {"a": 0.75, "r_max": 3.0, "r_min": -1.0}


def test_first_adam_step_by_hand():
    """Check the first step from m = v = 0: lr * g / (|g| + eps), the learning rate with the gradient's sign."""
    model = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, -1.0]]))
    optimizer_step = OptimizerStep(model, build_settings(), 10)
    batch = Rows(torch.tensor([[2.0, -3.0]]), torch.tensor([0.0]), [0])
    metrics = optimizer_step.run_step([batch], lambda b: (model(b.x).sum(), {}))
    # loss = 2*1 + (-3)(-1) = 5; gradient (2, -3), norm sqrt(13)
    assert metrics["train/loss"] == pytest.approx(5.0)
    assert metrics["train/grad_norm"] == pytest.approx(13**0.5)
    assert metrics["train/learning_rate"] == pytest.approx(0.1)
    torch.testing.assert_close(model.weight.detach(), torch.tensor([[0.9, -0.9]]))
    assert optimizer_step.num_steps == 1


def test_the_schedule_reaches_the_weights():
    """Check that Adam under a constant gradient moves by the learning rate: 0.025, 0.05, 0.075, 0.1 in the warm-up."""
    model = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    optimizer_step = OptimizerStep(model, build_settings(warmup_steps=4), 10)
    batch = Rows(torch.ones(1, 1), torch.zeros(1), [0])
    weights = []
    for _ in range(4):
        optimizer_step.run_step([batch], lambda b: (model(b.x).sum(), {}))
        weights.append(float(model.weight.detach()))
    assert weights == pytest.approx([0.975, 0.925, 0.85, 0.75], abs=1e-5)


def test_gradients_are_clipped_by_their_global_norm(monkeypatch):
    model = nn.Linear(2, 1, bias=False)
    optimizer_step = OptimizerStep(model, build_settings(max_grad_norm=1.0), 10)
    observed = []
    monkeypatch.setattr(
        optimizer_step.optimizer, "step", lambda: observed.append(model.weight.grad.clone())
    )
    batch = Rows(torch.tensor([[3.0, -4.0]]), torch.tensor([0.0]), [0])
    metrics = optimizer_step.run_step([batch], lambda b: (model(b.x).sum(), {}))
    assert metrics["train/grad_norm"] == pytest.approx(5.0)  # before clipping
    torch.testing.assert_close(observed[0], torch.tensor([[0.6, -0.8]]))
    for size, expected in (
        (1.001, 1.0),
        (0.995, 0.995),
        (0.5, 0.5),
    ):  # the gradient's norm, and the norm after clipping
        small = Rows(torch.tensor([[0.6, -0.8]]) * size, torch.tensor([0.0]), [0])
        optimizer_step.run_step([small], lambda b: (model(b.x).sum(), {}))
        assert float(observed[-1].norm()) == pytest.approx(expected, rel=1e-5)


def test_decay_on_matrices_only():
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.fill_(1.0)
        model.bias.fill_(1.0)
    optimizer_step = OptimizerStep(model, build_settings(learning_rate=0.1, weight_decay=0.5), 10)
    batch = Rows(torch.zeros(1, 2), torch.zeros(1), [0])
    optimizer_step.run_step([batch], lambda b: (0.0 * (model.weight.sum() + model.bias.sum()), {}))
    torch.testing.assert_close(model.weight.detach(), torch.full((2, 2), 0.95))  # 1 - lr * decay
    torch.testing.assert_close(model.bias.detach(), torch.ones(2))


def test_eight_micro_batches_of_one_equal_one_of_eight(monkeypatch):
    full = build_rows(8)
    singles = [Rows(full.x[i : i + 1], full.y[i : i + 1], [i]) for i in range(8)]
    gradients, metrics_full = compute_gradients_after(
        monkeypatch, [full], lambda model: build_loss_fn(model, 8)
    )
    many, metrics_many = compute_gradients_after(
        monkeypatch, singles, lambda model: build_loss_fn(model, 8)
    )
    assert metrics_full.keys() == metrics_many.keys()
    for name in gradients:
        torch.testing.assert_close(gradients[name], many[name], rtol=0, atol=1e-6)
    for name in metrics_full:
        assert metrics_full[name] == pytest.approx(metrics_many[name], abs=1e-6), name
    assert metrics_many["size"] == 1.0


def test_ragged_micro_batches_share_one_denominator(monkeypatch):
    full = build_rows(6)
    ragged = [Rows(full.x[:5], full.y[:5], list(range(5))), Rows(full.x[5:], full.y[5:], [5])]
    full_gradients, _ = compute_gradients_after(
        monkeypatch, [full], lambda model: build_loss_fn(model, 6)
    )
    two, _ = compute_gradients_after(monkeypatch, ragged, lambda model: build_loss_fn(model, 6))
    for name in full_gradients:
        torch.testing.assert_close(full_gradients[name], two[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_lack_of_memory_halves_and_gives_the_same_gradient(monkeypatch, caplog, where):
    class Exhausted(torch.autograd.Function):
        """Function that runs out of memory during a backward pass, after some gradients have been added."""

        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise torch.OutOfMemoryError("fake, in backward")

    sizes = []

    def build_limited_loss(model):
        baseline = build_loss_fn(model, 11)

        def loss_fn(batch):
            sizes.append(len(batch.y))
            if len(batch.y) > 2 and where == "forward":
                raise torch.OutOfMemoryError("fake, in forward")
            if len(batch.y) > 2:
                hidden = model[1](Exhausted.apply(model[0](batch.x.float())))
                return model[2](hidden).sum(), {}
            return baseline(batch)

        return loss_fn

    batches = [build_rows(2, 1), build_rows(8, 2), build_rows(1, 3)]
    expected, metrics = compute_gradients_after(
        monkeypatch, batches, lambda model: build_loss_fn(model, 11)
    )
    with caplog.at_level(logging.WARNING):
        actual, actual_metrics = compute_gradients_after(monkeypatch, batches, build_limited_loss)
    for name in expected:
        torch.testing.assert_close(actual[name], expected[name], rtol=0, atol=1e-6)
    for name in metrics:
        assert actual_metrics[name] == pytest.approx(metrics[name], abs=1e-6)
    # 8 fails; restart with 4 + 4: 4 fails; restart with four times 2
    assert sizes == [2, 8, 2, 4, 2, 2, 2, 2, 2, 1]
    assert "out of memory" in caplog.text


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("fake"),
        MemoryError(),
        RuntimeError(
            "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."
        ),
    ],
    ids=lambda error: type(error).__name__,
)
def test_the_measured_limit_is_reused_and_saved(error):
    model = build_model()
    optimizer_step = OptimizerStep(model, build_settings(), 10)
    sizes = []

    def loss_fn(batch):
        sizes.append(len(batch.y))
        if len(batch.y) > 4:
            raise error
        return build_loss_fn(model, 8)(batch)

    optimizer_step.run_step([build_rows(8)], loss_fn)
    optimizer_step.run_step([build_rows(8)], loss_fn)
    assert sizes == [8, 4, 4, 4, 4]
    loaded = OptimizerStep(build_model(), build_settings(), 10)
    loaded.load_state_dict(optimizer_step.state_dict())
    assert loaded.max_tokens == optimizer_step.max_tokens == 23  # 8 rows of 3, less one


def test_a_single_row_that_does_not_fit_is_a_typed_error():
    def loss_fn(batch):
        raise torch.OutOfMemoryError("fake")

    optimizer_step = OptimizerStep(build_model(), build_settings(), 10)
    with pytest.raises(OutOfMemory, match="one row of 3 tokens does not fit"):
        optimizer_step.run_step([build_rows(4)], loss_fn)


def test_an_optimizer_state_that_does_not_fit_is_a_typed_error(monkeypatch):
    def fail_to_allocate():
        raise MemoryError

    model = build_model()
    optimizer_step = OptimizerStep(model, build_settings(), 10)
    monkeypatch.setattr(optimizer_step.optimizer, "step", fail_to_allocate)
    with pytest.raises(OutOfMemory, match="the optimizer's state does not fit"):
        optimizer_step.run_step([build_rows(4)], build_loss_fn(model, 4))


def test_halves_of_a_train_batch_keep_every_field():
    batch = TrainBatch(
        input_ids_BS=torch.arange(15).reshape(5, 3),
        attention_mask_BS=torch.ones(5, 3, dtype=torch.bool),
        loss_mask_BS=torch.ones(5, 3, dtype=torch.bool),
        sampler_logprobs_BS=torch.arange(15.0).reshape(5, 3),
        position_ids_BS=torch.tensor([[0, 1, 2], [0, 1, 0], [0, 0, 0], [0, 1, 2], [0, 0, 1]]),
        rows=[4, 3, 2, 1, 0],
    )
    first, second = halve_batch(batch)
    assert second.position_ids_BS.tolist() == [[0, 0, 0], [0, 1, 2], [0, 0, 1]]
    assert second.to("cpu").position_ids_BS.tolist() == second.position_ids_BS.tolist()
    assert first.rows == [4, 3] and second.rows == [2, 1, 0]
    assert first.input_ids_BS.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert second.sampler_logprobs_BS.tolist()[0] == [6.0, 7.0, 8.0]
    assert second.temperatures_BS is None
    assert halve_batch(halve_batch(first)[0]) is None
    with pytest.raises(DataError, match="dataclass"):
        halve_batch((1, 2))


def poison_model(model, what):
    def loss_fn(batch):
        loss, metrics = build_loss_fn(model, 4)(batch)
        if what == "loss":
            return loss * float("nan"), metrics
        if what == "input":
            check_finite(logprobs=torch.tensor([0.0, float("-inf")]))
        # sqrt at 0: the loss is finite, the gradient of the second layer's weight is not
        return loss + torch.sqrt(model[2].weight * 0.0).sum(), metrics

    return loss_fn


@pytest.mark.parametrize(
    ("what", "name"),
    [
        ("loss", "loss of micro-batch 0"),
        ("gradient", "gradient of 2.weight"),
        ("input", r"logprobs: -inf at \(1,\); 1 of 2 are not finite \(micro-batch 0\)"),
    ],
)
def test_non_finite_steps_are_skipped_counted_named_and_stop_after_n(caplog, what, name):
    model = build_model()
    optimizer_step = OptimizerStep(model, build_settings(), 100, max_nonfinite=3)
    optimizer_step.run_step([build_rows(4)], build_loss_fn(model, 4))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    moments = optimizer_step.state_dict()["optimizer"]["state"][0]["exp_avg"].clone()
    with caplog.at_level(logging.WARNING):
        metrics = optimizer_step.run_step([build_rows(4)], poison_model(model, what))
    assert metrics["train/skipped_steps"] == 1.0
    assert re.search(name, caplog.text)
    optimizer_step.run_step([build_rows(4)], poison_model(model, what))
    assert (
        optimizer_step.num_steps,
        optimizer_step.skipped_steps,
        optimizer_step.skipped_in_row,
    ) == (3, 2, 2)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert torch.equal(optimizer_step.state_dict()["optimizer"]["state"][0]["exp_avg"], moments)
    good = optimizer_step.run_step(
        [build_rows(4)], build_loss_fn(model, 4)
    )  # one good step resets the count
    assert (good["train/skipped_steps"], optimizer_step.skipped_in_row) == (2.0, 0)
    after = {key: value.clone() for key, value in model.state_dict().items()}
    assert not torch.equal(after["0.weight"], before["0.weight"])
    for _ in range(2):
        optimizer_step.run_step([build_rows(4)], poison_model(model, what))
    with pytest.raises(NonFiniteError, match=f"3 non-finite optimizer steps in a row.*{name}"):
        optimizer_step.run_step([build_rows(4)], poison_model(model, what))
    assert all(torch.equal(value, after[key]) for key, value in model.state_dict().items())


def test_bad_steps_in_a_row_are_counted_over_a_restart():
    """Check two before and one after: the third in a row stops, as it would have without the restart."""
    model, other = build_model(), build_model()
    first = OptimizerStep(model, build_settings(), 100, max_nonfinite=3)
    for _ in range(2):
        first.run_step([build_rows(4)], poison_model(model, "loss"))
    restarted = OptimizerStep(other, build_settings(), 100, max_nonfinite=3)
    restarted.load_state_dict(first.state_dict())
    assert (restarted.num_steps, restarted.skipped_steps, restarted.skipped_in_row) == (2, 2, 2)
    with pytest.raises(NonFiniteError, match="3 non-finite optimizer steps in a row"):
        restarted.run_step([build_rows(4)], poison_model(other, "loss"))


def test_a_broken_weight_is_named_before_what_follows_from_it(caplog):
    model = build_model()
    with torch.no_grad():
        model[0].bias[1] = float("inf")
        model[2].weight[0, 1] = float("nan")
    optimizer_step = OptimizerStep(model, build_settings(), 10)
    with caplog.at_level(logging.WARNING):
        optimizer_step.run_step([build_rows(4)], build_loss_fn(model, 4))
    assert "not finite: weight 0.bias" in caplog.text


def test_small_updates_of_bfloat16_weights_are_not_rounded_away():
    """Check lr 1e-4 on a weight of 1.0, below half a bfloat16 step (2^-9): only a float32 master adds up 100."""
    model = nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    with torch.no_grad():
        model.weight.fill_(1.0)
    optimizer_step = OptimizerStep(model, build_settings(learning_rate=1e-4), 100)
    batch = Rows(torch.ones(1, 1, dtype=torch.bfloat16), torch.zeros(1), [0])
    for _ in range(100):
        optimizer_step.run_step([batch], lambda b: (model(b.x).sum(), {}))
    assert model.weight.dtype == torch.bfloat16
    assert float(optimizer_step.state_dict()["masters"]["weight"]) == pytest.approx(0.99, abs=1e-4)
    assert float(model.weight.detach()) == pytest.approx(0.99, abs=2**-8)


def test_low_precision_gradients_accumulate_in_float32():
    """Check that 256 + 1, which is 256 in bfloat16, is not lost in accumulation."""
    model = nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    optimizer_step = OptimizerStep(model, build_settings(max_grad_norm=1e9), 10)
    batches = [
        Rows(torch.full((1, 1), v, dtype=torch.bfloat16), torch.zeros(1), [0])
        for v in (256.0, 1.0, 1.0)
    ]
    metrics = optimizer_step.run_step(batches, lambda b: (model(b.x).sum(), {}))
    assert metrics["train/grad_norm"] == pytest.approx(258.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_dict_continues_bit_for_bit(dtype):
    def train_steps(model, optimizer_step, steps):
        return [
            optimizer_step.run_step([build_rows(4, seed)], build_loss_fn(model, 4))[
                "train/loss"
            ].hex()
            for seed in steps
        ]

    settings = build_settings(schedule="cosine", warmup_steps=2)
    model = build_model(dtype=dtype)
    optimizer_step = OptimizerStep(model, settings, 8)
    train_steps(model, optimizer_step, range(4))
    state, weights = (
        optimizer_step.state_dict(),
        {key: value.clone() for key, value in model.state_dict().items()},
    )
    state = torch.load(save_and_load(state), weights_only=True)
    expected = train_steps(model, optimizer_step, range(4, 8))
    other = build_model(seed=9, dtype=dtype)
    resumed = OptimizerStep(other, settings, 8)
    other.load_state_dict(weights)
    resumed.load_state_dict(state)
    assert train_steps(other, resumed, range(4, 8)) == expected
    assert all(
        torch.equal(value, other.state_dict()[key]) for key, value in model.state_dict().items()
    )


def save_and_load(state):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return buffer


def test_frozen_parameters_are_left_alone():
    model = build_model()
    model[0].requires_grad_(False)
    before = model[0].weight.clone()
    optimizer_step = OptimizerStep(model, build_settings(), 10)
    optimizer_step.run_step([build_rows(4)], build_loss_fn(model, 4))
    assert torch.equal(model[0].weight, before)
    model.requires_grad_(False)
    with pytest.raises(DataError, match="no trainable parameter"):
        OptimizerStep(model, build_settings(), 10)


def test_a_step_of_nothing_is_an_error():
    with pytest.raises(DataError, match="at least one micro-batch"):
        OptimizerStep(build_model(), build_settings(), 10).run_step(
            [], lambda batch: (torch.zeros(()), {})
        )
