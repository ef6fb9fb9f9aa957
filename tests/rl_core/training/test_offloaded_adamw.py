"""AdamW with its moments in host memory: the bits of AdamW, state that both can load, refusals."""

import copy

import pytest
import torch
from helpers.pretended_device import use_pretended_device
from torch import nn

from rl_core.settings import OptimizerSettings
from rl_core.training.offloaded_adamw import OffloadedAdamW
from rl_core.training.optimizer_step import OptimizerStep

OPTIONS = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8}


def build_parameters(device="cpu"):
    generator = torch.Generator().manual_seed(0)
    shapes = [(11, 7), (3,), (2, 3, 9)]
    return [nn.Parameter(torch.randn(shape, generator=generator).to(device)) for shape in shapes]


def build_groups(parameters):
    return [
        {"params": parameters[::2], "weight_decay": 0.1},
        {"params": parameters[1:2], "weight_decay": 0.0},
    ]


def run_steps(optimizer, parameters, first, count):
    for step in range(first, first + count):
        generator = torch.Generator().manual_seed(100 + step)
        for index, parameter in enumerate(parameters):
            grad = torch.randn(parameter.shape, generator=generator).to(parameter.device)
            parameter.grad = None if index == 1 and step == 1 else grad
        optimizer.step()


@pytest.mark.parametrize("piece_size", [16, 32, 2**20])  # a CPU's kernel treats 16 weights alike
def test_weights_have_the_bits_of_adamw(piece_size):
    """Parameters in pieces, one of them without a gradient in a step."""
    expected, ours = build_parameters(), build_parameters()
    reference = torch.optim.AdamW(build_groups(expected), fused=True, **OPTIONS)
    offloaded = OffloadedAdamW(build_groups(ours), piece_size=piece_size, **OPTIONS)
    run_steps(reference, expected, 0, 4)
    run_steps(offloaded, ours, 0, 4)
    for left, right in zip(ours, expected, strict=True):
        assert torch.equal(left, right)
        for name, value in reference.state[right].items():
            assert torch.equal(offloaded.state[left][name], value)


@pytest.mark.parametrize("reverse", [False, True])
def test_a_state_moves_between_device_and_host(reverse):
    kinds = [
        lambda groups: torch.optim.AdamW(groups, fused=True, **OPTIONS),
        lambda groups: OffloadedAdamW(groups, piece_size=16, **OPTIONS),
    ]
    first, second = reversed(kinds) if reverse else kinds
    expected, parameters = build_parameters(), build_parameters()
    reference = first(build_groups(expected))
    run_steps(reference, expected, 0, 4)
    before = first(build_groups(parameters))
    run_steps(before, parameters, 0, 2)
    after = second(build_groups(parameters))
    after.load_state_dict(copy.deepcopy(before.state_dict()))
    run_steps(after, parameters, 2, 2)
    for left, right in zip(parameters, expected, strict=True):
        assert torch.equal(left, right)


def test_the_setting_trains_and_resumes_with_equal_bits():
    def build_step(state):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = nn.Linear(6, 4)
        settings = OptimizerSettings(warmup_steps=0, optimizer_state=state)
        return OptimizerStep(model, settings, 8)

    @torch.enable_grad()
    def run(step, count):
        def loss_fn(x):
            return step.model(x).square().mean(), {}

        batches = [torch.arange(12.0).reshape(2, 6)]
        return [step.run_step(batches, loss_fn)["train/loss"] for _ in range(count)]

    device, host, resumed = build_step("device"), build_step("host"), build_step("host")
    losses = run(device, 4)
    assert run(host, 2) == losses[:2]
    resumed.model.load_state_dict(host.model.state_dict())
    resumed.load_state_dict(copy.deepcopy(host.state_dict()))
    assert run(resumed, 2) == losses[2:]


def test_moments_stay_off_the_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Stream", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "Event", lambda *_: None)
    with use_pretended_device():
        parameters = build_parameters("cuda")
        optimizer = OffloadedAdamW(build_groups(parameters), piece_size=16, **OPTIONS)
        run_steps(optimizer, parameters, 0, 2)
        for parameter in parameters:
            state = optimizer.state[parameter]
            assert state["exp_avg"].device.type == state["exp_avg_sq"].device.type == "cpu"
            assert state["step"].device.type == "cuda" and state["exp_avg"].abs().sum() > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_pieces_overlap_on_a_gpu_without_changing_a_bit():
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(5_000_000, generator=generator)
    expected, ours = nn.Parameter(values.cuda()), nn.Parameter(values.cuda())
    reference = torch.optim.AdamW([expected], fused=True, **OPTIONS)
    offloaded = OffloadedAdamW([ours], piece_size=300_000, **OPTIONS)
    run_steps(reference, [expected], 2, 5)
    run_steps(offloaded, [ours], 2, 5)
    assert torch.equal(ours, expected)
    (state,) = offloaded.state_dict()["state"].values()
    assert state["exp_avg"].is_pinned()
    assert torch.equal(state["exp_avg"], reference.state[expected]["exp_avg"].cpu())
