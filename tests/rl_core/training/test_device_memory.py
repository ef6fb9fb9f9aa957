"""Memory of a pretended GPU: the cache of rollouts makes room for an update, guarded steps copy to the host."""

import copy

import pytest
import torch
from helpers.pretended_device import use_pretended_device
from helpers.scripted_sequences import ScriptedSequence, make_model
from torch import nn

from rl_core.inference.engine import create_rollout_backend
from rl_core.out_of_memory import MemoryFit
from rl_core.settings import OptimizerSettings, SamplingSettings
from rl_core.training.optimizer_step import OptimizerStep


def play(engine):
    sequences = [ScriptedSequence([5, 6, 7 + index], index, room=12) for index in range(3)]
    engine.run_sequences(sequences, SamplingSettings(max_completion_tokens=12, slots=3))
    return [sequence.completion_ids for sequence in sequences]


def build_engine(model):
    return create_rollout_backend(model, eos_ids=(), pad_id=0, max_length=64)


def build_step(model):
    return OptimizerStep(model, OptimizerSettings(warmup_steps=0), 10)


@pytest.mark.parametrize("scores", [False, True])
def test_an_update_gets_the_memory_of_the_cache_before_it_is_halved(scores):
    with use_pretended_device():
        model = make_model("llama").to("cuda")
        engine, step, refusals = build_engine(model), build_step(model), [1]
        tokens = play(engine)
        assert engine._decoder.holds_device_cache

        def compute(ids):
            if refusals[0] and engine._decoder.holds_device_cache:
                refusals[0] -= 1
                raise torch.OutOfMemoryError("CUDA out of memory")
            return model(ids).logits.float().mean()

        batch = torch.ones(4, 3, dtype=torch.int64).to("cuda")
        if scores:
            fit = MemoryFit("scoring")
            assert (
                len(fit.compute_batches([list(range(4))], lambda rows: compute(batch[rows]))) == 1
            )
            assert fit.limit is None
        else:
            step.run_step([batch], lambda ids: (compute(ids), {}))
            assert step.max_tokens is None and step.skipped_steps == 0
        assert refusals == [0] and not engine._decoder.holds_device_cache
        if scores:
            assert play(engine) == tokens
        else:
            play(engine)
        assert not engine._decoder.holds_device_cache  # from then on after every run


def test_a_cache_in_use_is_not_released():
    with use_pretended_device():
        engine = build_engine(make_model("llama").to("cuda"))
        with engine.bind_decoder() as decoder:
            decoder.reserve_cache(2, 16)
            assert not engine.release_models() and decoder.holds_device_cache
        assert engine.release_models() and not engine.release_models()


def test_a_cpu_keeps_its_cache():
    engine = build_engine(make_model("llama"))
    play(engine)
    assert not engine.release_models() and engine._decoder._cache is not None


@pytest.mark.parametrize("free", [0, 70 << 30])
def test_a_guarded_step_is_undone_from_a_copy_where_there_is_room(free, monkeypatch):
    with use_pretended_device():
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (free, 80 << 30))
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)).to("cuda")
        step = build_step(model)

        def run():
            batch = torch.ones(2, 3).to("cuda")
            return step.run_step([batch], lambda x: (model(x).square().mean(), {}))["train/loss"]

        run()
        state = step.copy_state()
        before = [weight.detach().clone() for weight in model.parameters()]
        expected = copy.deepcopy(step.state_dict()["optimizer"])
        device = state[0]["0.weight"].device.type
        assert device == state[1]["optimizer"]["state"][0]["exp_avg"].device.type
        assert device == ("cuda" if free else "cpu")
        losses = [run() for _ in range(2)]
        step.restore_state(state)
        for weight, value in zip(model.parameters(), before, strict=True):
            assert torch.equal(weight, value)
        for number, entry in step.state_dict()["optimizer"]["state"].items():
            assert torch.equal(entry["exp_avg"], expected["state"][number]["exp_avg"])
        assert [run() for _ in range(2)] == losses
