"""States of runs: saved, loaded and replayed bit for bit; exports that other libraries load."""

import numpy as np
import pytest
import torch
from helpers.service import (
    bits,
    loss_request,
    make_base,
    make_engine,
    new_run,
    random_data,
    step_request,
)
from transformers import AutoModelForCausalLM

from rl_core.errors import ServiceError
from rl_core.service.requests import AdapterConfig, CreateModel, OptimStep


def build_requests(name, number):
    policy = number % 2 == 1
    return [
        loss_request(
            name,
            random_data(number, policy=policy),
            "conservative_ppo" if policy else "cross_entropy",
        )
    ]


def train(engine, name, numbers):
    losses = []
    for number in numbers:
        losses += [answer.loss for answer in engine.forward_backward(build_requests(name, number))]
        engine.optim_step(step_request(name, weight_decay=0.1, grad_clip_norm=1.0))
    return losses


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("adapter", [AdapterConfig(rank=3, seed=5), None], ids=["adapter", "whole"])
def test_save_load_replay(base_folder, tmp_path, adapter, optimizer):
    """Save after three steps, then make two more; another engine loads and replays the two: equal bits."""
    first = make_engine(base_folder)
    first.create_model(CreateModel(model_id="r", base="base", adapter=adapter, optimizer=optimizer))
    train(first, "r", [0, 1, 2])
    first.save_weights("r", tmp_path / "state", metadata={"applied": 4})
    steps = first.model_info("r").steps  # fewer if the KL limit refused some
    losses = train(first, "r", [4, 5])
    second = make_engine(base_folder)
    info = second.load_weights("r", tmp_path / "state", optimizer=True)
    assert (
        info.steps == steps > 0
        and info.adapter == adapter
        and second.read_saved_metadata(tmp_path / "state") == {"applied": 4}
    )
    assert train(second, "r", [4, 5]) == losses
    assert bits(first.state_dict("r")) == bits(second.state_dict("r"))


def test_a_state_in_the_middle_of_a_step_holds_the_gradient_and_the_limit(base_folder):
    first = make_engine(base_folder)
    new_run(first, "r")
    first.forward_backward(build_requests("r", 1))
    second = make_engine(base_folder)
    second.restore_model("r", first.state_dict("r"))
    assert bits(second.state_dict("r")) == bits(first.state_dict("r"))
    for engine in (first, second):
        engine.forward_backward(build_requests("r", 3))
    metrics = [dict(engine.optim_step(step_request("r")).metrics) for engine in (first, second)]
    assert metrics[0] == metrics[1] and "kl_after:max" in metrics[0]
    assert bits(second.state_dict("r")) == bits(first.state_dict("r"))


def test_loading_without_the_optimizer_resets_it(base_folder, tmp_path):
    engine = make_engine(base_folder)
    new_run(engine, "r")
    train(engine, "r", [0])
    engine.save_weights("r", tmp_path / "state")
    weights = bits(engine.state_dict("r")["model"])
    info = engine.load_weights("s", tmp_path / "state", optimizer=False)
    state = engine.state_dict("s")
    assert (
        info.steps == 0 and state["optimizer"] == {"state": {}} and bits(state["model"]) == weights
    )


def test_an_update_beyond_the_kl_limit_is_refused(base_folder):
    engine = make_engine(base_folder)
    new_run(engine, "r")
    data = random_data(1, policy=True)
    before = engine.state_dict("r")
    for limit, refused in ((1e-6, 1.0), (1e3, 0.0)):
        options = {"kl_max": limit, "clip_low_threshold": 0.0, "clip_high_threshold": 1e6}
        engine.forward_backward(
            [loss_request("r", data, "conservative_ppo", loss_fn_config=options)]
        )
        metrics = engine.optim_step(step_request("r", 0.05)).metrics
        assert metrics["refused:mean"] == refused and metrics["kl_after:max"] > 1e-6
        assert (bits(engine.state_dict("r")) == bits(before)) == bool(refused)


def test_loading_discards_a_saved_gradient(base_folder, tmp_path):
    engine = make_engine(base_folder)
    new_run(engine, "r")
    train(engine, "r", [0])
    engine.forward_backward(build_requests("r", 2))
    engine.save_weights("r", tmp_path / "state")
    assert engine.state_dict("r")["gradient"]
    engine.load_weights("r", tmp_path / "state", optimizer=True)
    assert engine.state_dict("r")["gradient"] == {} and engine.model_info("r").steps == 1


def test_the_kl_limit_is_the_limit(base_folder):
    """Refuse a step just below its KL, and accept it just above."""
    engine = make_engine(base_folder)
    new_run(engine, "r")
    data = random_data(1, policy=True)

    def step(limit):
        options = {"kl_max": limit, "clip_low_threshold": 0.0, "clip_high_threshold": 1e6}
        engine.forward_backward(
            [loss_request("r", data, "conservative_ppo", loss_fn_config=options)]
        )
        return engine.optim_step(step_request("r", 0.01)).metrics

    kl = step(1e-9)["kl_after:max"]
    assert step(0.99 * kl)["refused:mean"] == 1 and step(1.01 * kl)["refused:mean"] == 0


def test_adapters_start_as_the_base_and_differ_by_seed(base_folder):
    engine = make_engine(base_folder)
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        engine.create_model(
            CreateModel(model_id=name, base="base", adapter=AdapterConfig(rank=2, seed=seed))
        )
    states = {name: engine.state_dict(name)["model"] for name in "abc"}
    assert bits(states["a"]) == bits(states["b"]) != bits(states["c"])
    assert all(not tensor.any() for name, tensor in states["c"].items() if "lora_B" in name)
    a = states["a"]["model.layers.0.mlp.down_proj.lora_A.weight"]
    assert float(a.abs().max()) <= 48**-0.5 and float(a.std()) == pytest.approx(
        (48 * 3) ** -0.5, rel=0.25
    )
    names = {name.rsplit(".lora")[0] for name in states["a"] if "lora" in name}
    assert len(names) == 2 * 7 + 1 and "lm_head" in names


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        ({"train_mlp": False, "train_unembed": False}, {"q_proj", "k_proj", "v_proj", "o_proj"}),
        ({"train_attn": False, "train_unembed": False}, {"gate_proj", "up_proj", "down_proj"}),
        ({"train_attn": False, "train_mlp": False}, {"lm_head"}),
    ],
)
def test_only_the_requested_parts_are_trained(base_folder, targets, expected):
    engine = make_engine(base_folder)
    new_run(engine, "r", **targets)
    engine.forward_backward([loss_request("r", random_data(0))])
    names = {name.split(".lora")[0].rsplit(".")[-1] for name in engine.state_dict("r")["gradient"]}
    assert names == expected


@pytest.mark.parametrize("tied", [False, True])
def test_exports_compute_what_the_run_computes(tmp_path, tied):
    from peft import PeftModel

    folder = make_base(tmp_path / "base", tie_word_embeddings=tied)
    engine = make_engine(folder)
    new_run(engine, "r", rank=3)
    data = random_data(2)
    (answer,) = engine.forward_backward([loss_request("r", data, forward_only=True)])
    engine.save_sampler_weights("r", tmp_path / "saved")
    engine.export(tmp_path / "saved", tmp_path / "hf")
    engine.export(tmp_path / "saved", tmp_path / "peft", peft=True)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    adapted = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(folder), tmp_path / "peft"
    )
    for model in (merged, adapted):
        for datum, output in zip(data, answer.outputs, strict=True):
            with torch.no_grad():
                logits = model(torch.from_numpy(datum.tokens)[None]).logits[0]
            targets = torch.from_numpy(datum.inputs["target_tokens"])[:, None]
            logprobs = torch.log_softmax(logits, -1).gather(1, targets)[:, 0]
            assert np.allclose(logprobs.numpy(), output["logprobs"], atol=2e-5)


def test_what_cannot_be_loaded_or_created_is_refused(base_folder, tmp_path):
    engine = make_engine(base_folder)
    new_run(engine, "r")
    engine.save_weights("r", tmp_path / "state")
    other = make_engine(base_folder, bases={"other": str(base_folder)})
    for call, text in (
        (
            lambda: engine.load_weights("x", tmp_path / "none", optimizer=True),
            "holds no saved weights",
        ),
        (
            lambda: other.load_weights("x", tmp_path / "state", optimizer=True),
            "there is no 'base' here",
        ),
        (lambda: engine.create_model(CreateModel(model_id="r", base="base")), "'r' exists already"),
        (
            lambda: engine.create_model(CreateModel(model_id="x", base="bose")),
            "did you mean 'base'",
        ),
        (
            lambda: engine.create_model(
                CreateModel(model_id="x", base="base", adapter=AdapterConfig(rank=0))
            ),
            "rank: 0",
        ),
        (lambda: engine.unload_model("x"), "no training run 'x'"),
        (lambda: engine.optim_step(step_request("x")), "no training run 'x'"),
        (lambda: engine.optim_step(step_request("r", float("nan"))), "learning_rate: nan"),
    ):
        with pytest.raises(ServiceError, match=text) as refused:
            call()
        assert refused.value.category == "user"
    engine.unload_model("r")
    with pytest.raises(ServiceError, match="no training run"):
        engine.model_info("r")


def test_a_step_of_a_gradient_that_is_not_finite_changes_nothing(base_folder):
    engine = make_engine(base_folder)
    new_run(engine, "r")
    engine.forward_backward([loss_request("r", random_data(0))])
    before = engine.state_dict("r")
    broken = engine._find_run("r").gradient
    broken[sorted(broken)[0]].view(-1)[0] = torch.inf
    with pytest.raises(ServiceError, match="gradient is not finite"):
        engine.optim_step(step_request("r"))
    after = engine.state_dict("r")
    assert bits(after["model"]) == bits(before["model"]) and after["gradient"] == {}
    assert engine.optim_step(step_request("r")).metrics["empty:mean"] == 1.0


def test_weights_can_be_loaded_into_a_run_with_another_optimizer(base_folder, tmp_path):
    engine = make_engine(base_folder)
    engine.create_model(CreateModel(model_id="r", base="base", adapter=AdapterConfig(rank=2)))
    train(engine, "r", [0])
    engine.save_weights("r", tmp_path / "state")
    muon = engine.load_weights("m", tmp_path / "state", optimizer=False, kind="muon")
    assert muon.optimizer == "muon" and bits(engine.state_dict("m")["model"]) == bits(
        engine.state_dict("r")["model"]
    )
    assert (
        engine.load_weights("k", tmp_path / "state", optimizer=True, kind="muon").optimizer
        == "adamw"
    )
    train(engine, "m", [2])
    with pytest.raises(ServiceError, match="for muon, but the run was created with adamw"):
        engine.optim_step(OptimStep(model_id="r", optimizer="muon"))
    engine.optim_step(OptimStep(model_id="m", optimizer="muon"))


def test_the_digest_of_a_runs_data(base_folder, tmp_path):
    """Check that equal data in equal order have equal digests, which cover only data that updates have used."""
    engine = make_engine(base_folder)

    def digest(name):
        return engine.model_info(name).data_digest

    for name in ("a", "b", "c"):
        engine.create_model(CreateModel(model_id=name, base="base", adapter=AdapterConfig(rank=2)))
    assert digest("a") == ""
    engine.forward_backward([loss_request("a", random_data(0), forward_only=True)])
    engine.forward_backward(build_requests("a", 0))
    assert digest("a") == ""  # no update has used it yet
    engine.restore_model("a", engine.state_dict("a"))
    engine.optim_step(step_request("a"))
    train(engine, "a", [2])
    train(engine, "b", [0, 2])
    train(engine, "c", [2, 0])
    assert digest("a") == digest("b") != digest("c") and len(digest("a")) == 64
    engine.forward_backward([loss_request("a", random_data(5))])
    engine.save_weights("a", tmp_path / "state")
    info = engine.load_weights("d", tmp_path / "state", optimizer=False)
    assert info.data_digest == digest("b")
    engine.optim_step(step_request("d"))  # the saved gradient was discarded
    assert digest("d") == digest("b")
    tight = {"kl_max": 1e-9, "clip_low_threshold": 0.0, "clip_high_threshold": 1e6}
    engine.forward_backward(
        [loss_request("b", random_data(1, policy=True), "conservative_ppo", loss_fn_config=tight)]
    )
    assert engine.optim_step(step_request("b", 0.05)).metrics["refused:mean"] == 1
    assert digest("b") == info.data_digest
