"""Updates of several runs in one call: each run's weights and moments are the bits of the run alone, and torch's."""

import math

import numpy as np
import pytest
import torch
from helpers.service import (
    bits,
    engine_with,
    loss_request,
    make_engine,
    new_run,
    random_data,
    step_request,
)

from rl_core.cpu import adamw
from rl_core.errors import ServiceError
from rl_core.models.routed_adapters import AdapterGradients
from rl_core.service.requests import AdapterConfig, CreateModel, Datum
from rl_core.training.optimizers import compute_total_norm

ADAM = {  # by the run's name: settings of its own
    "a": dict(learning_rate=1e-2),
    "b": dict(learning_rate=3e-3, beta1=0.3, beta2=0.99, eps=1e-6, weight_decay=0.1),
    "c": dict(learning_rate=5e-2, grad_clip_norm=0.01),
}
needs_compiled_steps = pytest.mark.skipif(
    adamw.load_adamw() is None, reason="needs a C compiler and AVX2"
)


def requests_of(names, number):
    """Of two losses, at temperatures of their own, of which one run's changes every time."""
    found = []
    for name in names:
        policy, index = name != "a", "abcdm".index(name)
        data = random_data(10 * number + index, 2 + index % 2, policy=policy)
        config = {"temperature": 0.6 + 0.1 * number} if name == "b" else {}
        found.append(
            loss_request(name, data, "ppo" if policy else "cross_entropy", loss_fn_config=config)
        )
    return found


def work(engine, names, rounds=4, idle=()):
    """Rounds of passes and updates; `idle`: (run, round) that makes no update, so its gradient grows."""
    metrics = {name: [] for name in names}
    for number in range(rounds):
        engine.forward_backward(requests_of(names, number))
        stepped = [name for name in names if (name, number) not in idle]
        answers = engine.optim_steps([step_request(name, **ADAM.get(name, {})) for name in stepped])
        for name, answer in zip(stepped, answers, strict=True):
            metrics[name].append(dict(answer.metrics))
    return metrics


def assert_as_alone(base_folder, together, names, metrics=None, make=engine_with, **more):
    for name in names:
        alone = make(base_folder, [name])
        own = work(alone, [name], **more)
        assert bits(alone.state_dict(name)) == bits(together.state_dict(name)), name
        assert metrics is None or own[name] == metrics[name]


def test_runs_with_settings_of_their_own_and_one_that_leaves_an_update_out(base_folder):
    together, idle = engine_with(base_folder, "abc"), {("b", 1), ("b", 2)}
    metrics = work(together, "abc", idle=idle)
    assert metrics["c"][-1]["clipped:mean"] == 1.0 and len(metrics["b"]) == 2
    assert_as_alone(base_folder, together, "abc", metrics, idle=idle)


def test_runs_that_come_and_go_and_are_loaded_between_passes(base_folder, tmp_path):
    """Tables of the adapters side by side follow: new factors at old places, weights replaced, another set of runs."""

    def change(engine, name):
        folder = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        engine.save_weights(name, folder)
        work(engine, [name], rounds=1)
        engine.load_weights(name, folder, optimizer=True)
        work(engine, [name], rounds=1)
        state = engine.state_dict(name)
        state["model"] = {key: tensor * 1.5 for key, tensor in state["model"].items()}
        engine.restore_model(name, state)

    together = engine_with(base_folder, "abc")
    work(together, "ab", rounds=2)
    work(together, "bc", rounds=2)  # as many runs, and others
    work(together, "ca", rounds=2)
    for name in "abc":
        change(together, name)
    work(together, "ac", rounds=2)
    together.unload_model("b")
    new_run(together, "d", rank=8, seed=3)
    work(together, "acd", rounds=2)
    for name in "ac":
        alone = engine_with(base_folder, [name])
        work(alone, [name], rounds=2)
        work(alone, [name], rounds=2)
        change(alone, name)
        work(alone, [name], rounds=2)
        work(alone, [name], rounds=2)
        assert bits(alone.state_dict(name)) == bits(together.state_dict(name)), name
    alone = make_engine(base_folder)
    new_run(alone, "d", rank=8, seed=3)
    work(alone, ["d"], rounds=2)
    assert bits(alone.state_dict("d")) == bits(together.state_dict("d"))


def test_loaded_moments_are_those_that_are_stepped(base_folder, tmp_path):
    engine, fresh = engine_with(base_folder, "a"), make_engine(base_folder)
    work(engine, "a", rounds=2)
    engine.save_weights("a", tmp_path / "state")
    work(engine, "a", rounds=2)
    for one in (engine, fresh):
        one.load_weights("a", tmp_path / "state", optimizer=True)
        work(one, "a", rounds=2)
    assert bits(engine.state_dict("a")) == bits(fresh.state_dict("a"))


def test_a_gradient_that_is_not_finite_stops_its_run_alone(base_folder):
    """Also after moments exist, when compiled code makes the steps; the run goes on afterwards."""
    together = engine_with(base_folder, "abc")
    work(together, "abc", rounds=2)
    together.forward_backward(requests_of("abc", 7))
    together._find_run("b").gradient["model.layers.0.mlp.down_proj.lora_B.weight"].view(-1)[-1] = (
        math.nan
    )
    before = together.state_dict("b")
    answers = together.optim_steps([step_request(name, **ADAM[name]) for name in "abc"])
    assert isinstance(
        answers[1], ServiceError
    ) and "first: model.layers.0.mlp.down_proj.lora_B" in str(answers[1])
    after = together.state_dict("b")
    assert bits(after["model"]) == bits(before["model"]) and bits(after["optimizer"]) == bits(
        before["optimizer"]
    )
    assert after["gradient"] == {} and after["run"]["steps"] == 2
    for name in "ac":
        alone = engine_with(base_folder, [name])
        work(alone, [name], rounds=2)
        alone.forward_backward(requests_of([name], 7))
        alone.optim_step(step_request(name, **ADAM[name]))
        assert bits(alone.state_dict(name)) == bits(together.state_dict(name))


def test_muon_a_limited_update_and_a_run_twice_in_one_call(base_folder):
    together = engine_with(base_folder, "ac")
    together.create_model(
        CreateModel(model_id="m", base="base", adapter=AdapterConfig(rank=4), optimizer="muon")
    )
    work(together, "acm", rounds=2)
    together.forward_backward(requests_of("ac", 5))
    first = together.optim_steps(
        [step_request("a"), step_request("c", **ADAM["c"]), step_request("a")]
    )
    assert [answer.metrics["step:max"] for answer in first] == [3.0, 3.0, 4.0]
    assert [answer.metrics["empty:mean"] for answer in first] == [0.0, 0.0, 1.0]
    alone = make_engine(base_folder)
    alone.create_model(
        CreateModel(model_id="m", base="base", adapter=AdapterConfig(rank=4), optimizer="muon")
    )
    work(alone, "m", rounds=2)
    assert bits(alone.state_dict("m")) == bits(together.state_dict("m"))


def test_gradients_of_a_layer_that_is_called_twice_add_up():
    gradients = AdapterGradients(3, torch.device("cpu"))
    for value in (1.0, 2.0):
        gradients.accumulate_layers(["layer"], lambda flat, value=value: flat[:2].fill_(value))
    gradients.accumulate_layers(["other"], lambda flat: flat[2:].fill_(5.0))
    assert gradients.flat.tolist() == [3.0, 3.0, 5.0] and gradients.written_layers == {
        "layer",
        "other",
    }


def pairs(seed):
    """Datums of a loss that has no targets, so the adapter of the output head gets no gradient."""
    return tuple(
        Datum(one.tokens, {"preferred": np.array([index % 2], np.float32)})
        for index, one in enumerate(random_data(seed, 4))
    )


def test_a_head_without_gradient_is_not_touched(base_folder):
    """Of the output head while rewards are learned, and of the scalar head afterwards; both gradients add up."""
    engine, alone = engine_with(base_folder, "ab"), engine_with(base_folder, "b")
    for one in (engine, alone):
        one.forward_backward([loss_request("b", pairs(1), "reward_modeling")])
        gradient = one.state_dict("b")["gradient"]
        assert not any("lm_head" in name for name in gradient) and "heads.score_head" in gradient
        head = {
            name: tensor
            for name, tensor in one.state_dict("b")["model"].items()
            if "lm_head" in name
        }
        one.optim_step(step_request("b", weight_decay=0.1))
        after = one.state_dict("b")["model"]
        assert len(head) == 2 and bits(head) == bits({name: after[name] for name in head})
        one.forward_backward([loss_request("b", random_data(2))])
        one.forward_backward([loss_request("b", pairs(3), "reward_modeling")])
        both = one.state_dict("b")["gradient"]
        assert any("lm_head" in name for name in both) and "heads.score_head" in both
        if one is engine:
            one.forward_backward(requests_of("a", 0))
        one.optim_steps(
            [step_request(name, weight_decay=0.1) for name in ("ab" if one is engine else "b")]
        )
    assert bits(engine.state_dict("b")) == bits(alone.state_dict("b"))


@needs_compiled_steps
@pytest.mark.parametrize("threads", [1, 2])
def test_compiled_steps_and_norms_are_torchs(threads):
    """Sizes with and without a rest beyond whole vectors; runs of their own settings, side by side."""
    code, runs = adamw.load_adamw(), []
    for seed, (beta1, decay, scale) in enumerate(
        [(0.9, 0.0, 1.0), (0.3, 0.1, 0.37), (0.9, 0.1, 1.0)]
    ):
        generator = torch.Generator().manual_seed(seed)
        tensors = [
            [
                torch.randn(n, generator=generator),
                torch.randn(n, generator=generator) * 3,
                torch.randn(n, generator=generator),
                torch.rand(n, generator=generator),
                torch.tensor(float(seed)),
            ]
            for n in (1, 7, 8, 23, 4096 + 12)
        ]
        runs.append((adamw.AdamwSettings(1e-2, beta1, 0.95, 1e-8, decay, scale), tensors))
    expected = [[[tensor.clone() for tensor in row] for row in tensors] for _, tensors in runs]
    rows = []
    for _, tensors in runs:
        named = {str(number): row[0] for number, row in enumerate(tensors)}
        states = {row[0]: dict(exp_avg=row[2], exp_avg_sq=row[3], step=row[4]) for row in tensors}
        rows.append(
            adamw.AdamwRows(named, states).select_rows(
                list(named), [row[1].data_ptr() for row in tensors]
            )
        )
    torch.set_num_threads(threads)
    try:
        norms = code.compute_norms(rows)
        code.step(rows, [settings for settings, _ in runs])
    finally:
        torch.set_num_threads(1)
    for (settings, found), wanted, norm in zip(runs, expected, norms.tolist(), strict=True):
        assert norm == pytest.approx(
            float(compute_total_norm([row[1] for row in wanted])), rel=1e-6
        )
        columns = [list(column) for column in zip(*wanted, strict=True)]
        torch._foreach_mul_(columns[1], settings.scale)
        torch._foreach_add_(columns[4], 1)
        torch._fused_adamw_(
            *columns[:4],
            [],
            columns[4],
            lr=settings.learning_rate,
            beta1=settings.beta1,
            beta2=settings.beta2,
            weight_decay=settings.weight_decay,
            eps=settings.eps,
            amsgrad=False,
            maximize=False,
        )
        for mine, torchs in zip(found, wanted, strict=True):
            for index in (0, 2, 3, 4):
                assert torch.allclose(mine[index], torchs[index], rtol=1e-6, atol=1e-7)
            # where torch's own order is known
            if torch.backends.cpu.get_cpu_capability() == "AVX512":
                assert bits([mine[i] for i in (0, 2, 3, 4)]) == bits(
                    [torchs[i] for i in (0, 2, 3, 4)]
                )


@needs_compiled_steps
def test_compiled_norms_are_torchs_for_every_rest_beyond_whole_vectors():
    """Of one tensor in each run, and of so many in one run; also where the square of a number is 0 or infinite."""
    generator = torch.Generator().manual_seed(0)
    tensors = [
        torch.randn(n, generator=generator) for n in (*range(1, 40), 4096 + 12) for _ in range(9)
    ]
    tensors += [torch.tensor([1e-30]), torch.tensor([-1e30])]
    runs = [[tensor] for tensor in tensors] + [
        tensors[9 * count : 10 * count] for count in range(2, 24)
    ]
    rows = []
    for gradients in runs:
        named = {str(number): torch.zeros_like(part) for number, part in enumerate(gradients)}
        states = {
            one: dict(exp_avg=one, exp_avg_sq=one, step=torch.tensor(1.0)) for one in named.values()
        }
        rows.append(
            adamw.AdamwRows(named, states).select_rows(
                list(named), [part.data_ptr() for part in gradients]
            )
        )
    found, expected = (
        adamw.load_adamw().compute_norms(rows).tolist(),
        [float(compute_total_norm(gradients)) for gradients in runs],
    )
    assert found == pytest.approx(expected, rel=1e-6, abs=0)
    if torch.backends.cpu.get_cpu_capability() == "AVX512":  # where torch's own order is known
        assert found == expected
