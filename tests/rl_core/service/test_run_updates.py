"""Updates of several runs in one call.

Each run's weights and moments are bitwise those of the run alone, and those of torch.
"""

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

ADAM = {  # settings by run
    "a": dict(learning_rate=1e-2),
    "b": dict(learning_rate=3e-3, beta1=0.3, beta2=0.99, eps=1e-6, weight_decay=0.1),
    "c": dict(learning_rate=5e-2, grad_clip_norm=0.01),
}
needs_compiled_steps = pytest.mark.skipif(
    adamw.load_adamw() is None, reason="needs a C compiler and AVX2"
)


def build_requests(names, number):
    """Build requests with two losses at different temperatures; one run's temperature changes every time."""
    requests = []
    for name in names:
        policy, index = name != "a", "abcdm".index(name)
        data = random_data(10 * number + index, 2 + index % 2, policy=policy)
        config = {"temperature": 0.6 + 0.1 * number} if name == "b" else {}
        requests.append(
            loss_request(name, data, "ppo" if policy else "cross_entropy", loss_fn_config=config)
        )
    return requests


def run_rounds(engine, names, rounds=4, idle=()):
    """Run rounds of passes and updates.

    `idle`: (run, round) without an update, so that its gradient accumulates.
    """
    metrics = {name: [] for name in names}
    for number in range(rounds):
        engine.forward_backward(build_requests(names, number))
        stepped = [name for name in names if (name, number) not in idle]
        answers = engine.optim_steps([step_request(name, **ADAM.get(name, {})) for name in stepped])
        for name, answer in zip(stepped, answers, strict=True):
            metrics[name].append(dict(answer.metrics))
    return metrics


def assert_as_alone(
    base_folder, together, names, metrics=None, build_engine=engine_with, **options
):
    for name in names:
        alone = build_engine(base_folder, [name])
        alone_metrics = run_rounds(alone, [name], **options)
        assert bits(alone.state_dict(name)) == bits(together.state_dict(name)), name
        assert metrics is None or alone_metrics[name] == metrics[name]


def test_runs_with_different_settings_and_one_that_skips_an_update(base_folder):
    together, idle = engine_with(base_folder, "abc"), {("b", 1), ("b", 2)}
    metrics = run_rounds(together, "abc", idle=idle)
    assert metrics["c"][-1]["clipped:mean"] == 1.0 and len(metrics["b"]) == 2
    assert_as_alone(base_folder, together, "abc", metrics, idle=idle)


def test_runs_that_come_and_go_and_are_loaded_between_passes(base_folder, tmp_path):
    """Check that the tables of adapters follow: new factors at old addresses, replaced weights, another set of runs."""

    def change(engine, name):
        folder = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        engine.save_weights(name, folder)
        run_rounds(engine, [name], rounds=1)
        engine.load_weights(name, folder, optimizer=True)
        run_rounds(engine, [name], rounds=1)
        state = engine.state_dict(name)
        state["model"] = {key: tensor * 1.5 for key, tensor in state["model"].items()}
        engine.restore_model(name, state)

    together = engine_with(base_folder, "abc")
    run_rounds(together, "ab", rounds=2)
    run_rounds(together, "bc", rounds=2)  # the same number of runs, but other ones
    run_rounds(together, "ca", rounds=2)
    for name in "abc":
        change(together, name)
    run_rounds(together, "ac", rounds=2)
    together.unload_model("b")
    new_run(together, "d", rank=8, seed=3)
    run_rounds(together, "acd", rounds=2)
    for name in "ac":
        alone = engine_with(base_folder, [name])
        run_rounds(alone, [name], rounds=2)
        run_rounds(alone, [name], rounds=2)
        change(alone, name)
        run_rounds(alone, [name], rounds=2)
        run_rounds(alone, [name], rounds=2)
        assert bits(alone.state_dict(name)) == bits(together.state_dict(name)), name
    alone = make_engine(base_folder)
    new_run(alone, "d", rank=8, seed=3)
    run_rounds(alone, ["d"], rounds=2)
    assert bits(alone.state_dict("d")) == bits(together.state_dict("d"))


def test_loaded_moments_are_those_that_are_stepped(base_folder, tmp_path):
    engine, fresh = engine_with(base_folder, "a"), make_engine(base_folder)
    run_rounds(engine, "a", rounds=2)
    engine.save_weights("a", tmp_path / "state")
    run_rounds(engine, "a", rounds=2)
    for loaded in (engine, fresh):
        loaded.load_weights("a", tmp_path / "state", optimizer=True)
        run_rounds(loaded, "a", rounds=2)
    assert bits(engine.state_dict("a")) == bits(fresh.state_dict("a"))


def test_a_nonfinite_gradient_affects_only_its_run(base_folder):
    """Test it also after moments exist, when compiled code makes the steps; the run continues afterwards."""
    together = engine_with(base_folder, "abc")
    run_rounds(together, "abc", rounds=2)
    together.forward_backward(build_requests("abc", 7))
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
        run_rounds(alone, [name], rounds=2)
        alone.forward_backward(build_requests([name], 7))
        alone.optim_step(step_request(name, **ADAM[name]))
        assert bits(alone.state_dict(name)) == bits(together.state_dict(name))


def test_muon_a_limited_update_and_a_run_twice_in_one_call(base_folder):
    together = engine_with(base_folder, "ac")
    together.create_model(
        CreateModel(model_id="m", base="base", adapter=AdapterConfig(rank=4), optimizer="muon")
    )
    run_rounds(together, "acm", rounds=2)
    together.forward_backward(build_requests("ac", 5))
    first = together.optim_steps(
        [step_request("a"), step_request("c", **ADAM["c"]), step_request("a")]
    )
    assert [answer.metrics["step:max"] for answer in first] == [3.0, 3.0, 4.0]
    assert [answer.metrics["empty:mean"] for answer in first] == [0.0, 0.0, 1.0]
    alone = make_engine(base_folder)
    alone.create_model(
        CreateModel(model_id="m", base="base", adapter=AdapterConfig(rank=4), optimizer="muon")
    )
    run_rounds(alone, "m", rounds=2)
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


def build_pairs(seed):
    """Build datums of a loss without targets, so that the adapter of the output head gets no gradient."""
    return tuple(
        Datum(datum.tokens, {"preferred": np.array([index % 2], np.float32)})
        for index, datum in enumerate(random_data(seed, 4))
    )


def test_a_head_without_gradient_does_not_change(base_folder):
    """Train rewards without the output head, then without the scalar head; both gradients are accumulated."""
    engine, alone = engine_with(base_folder, "ab"), engine_with(base_folder, "b")
    for current in (engine, alone):
        current.forward_backward([loss_request("b", build_pairs(1), "reward_modeling")])
        gradient = current.state_dict("b")["gradient"]
        assert not any("lm_head" in name for name in gradient) and "heads.score_head" in gradient
        head = {
            name: tensor
            for name, tensor in current.state_dict("b")["model"].items()
            if "lm_head" in name
        }
        current.optim_step(step_request("b", weight_decay=0.1))
        after = current.state_dict("b")["model"]
        assert len(head) == 2 and bits(head) == bits({name: after[name] for name in head})
        current.forward_backward([loss_request("b", random_data(2))])
        current.forward_backward([loss_request("b", build_pairs(3), "reward_modeling")])
        both = current.state_dict("b")["gradient"]
        assert any("lm_head" in name for name in both) and "heads.score_head" in both
        if current is engine:
            current.forward_backward(build_requests("a", 0))
        current.optim_steps(
            [step_request(name, weight_decay=0.1) for name in ("ab" if current is engine else "b")]
        )
    assert bits(engine.state_dict("b")) == bits(alone.state_dict("b"))


@needs_compiled_steps
@pytest.mark.parametrize("threads", [1, 2])
def test_compiled_steps_and_norms_are_torchs(threads):
    """Use sizes with and without a remainder beyond full vectors, and runs with different settings."""
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
    for (settings, stepped), reference, norm in zip(runs, expected, norms.tolist(), strict=True):
        assert norm == pytest.approx(
            float(compute_total_norm([row[1] for row in reference])), rel=1e-6
        )
        columns = [list(column) for column in zip(*reference, strict=True)]
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
        for ours, torchs in zip(stepped, reference, strict=True):
            for index in (0, 2, 3, 4):
                assert torch.allclose(ours[index], torchs[index], rtol=1e-6, atol=1e-7)
            # With AVX512, torch's order of operations is known.
            if torch.backends.cpu.get_cpu_capability() == "AVX512":
                assert bits([ours[i] for i in (0, 2, 3, 4)]) == bits(
                    [torchs[i] for i in (0, 2, 3, 4)]
                )


@needs_compiled_steps
def test_compiled_norms_are_torchs_for_every_remainder():
    """Use one tensor per run, and many in one run; also values whose square is 0 or infinite."""
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
            parameter: dict(exp_avg=parameter, exp_avg_sq=parameter, step=torch.tensor(1.0))
            for parameter in named.values()
        }
        rows.append(
            adamw.AdamwRows(named, states).select_rows(
                list(named), [part.data_ptr() for part in gradients]
            )
        )
    norms = adamw.load_adamw().compute_norms(rows).tolist()
    expected = [float(compute_total_norm(gradients)) for gradients in runs]
    assert norms == pytest.approx(expected, rel=1e-6, abs=0)
    # With AVX512, torch's order of operations is known.
    if torch.backends.cpu.get_cpu_capability() == "AVX512":
        assert norms == expected
