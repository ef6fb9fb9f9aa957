"""Several runs in one pass: each run's results and gradient are bitwise those of the run alone."""

import numpy as np
import pytest
import torch
from helpers.service import (
    RANKS,
    bits,
    engine_with,
    loss_request,
    make_base,
    make_engine,
    merged_gradient,
    new_run,
    random_data,
    step_request,
)
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from rl_core.cpu import gemm
from rl_core.errors import ServiceError
from rl_core.service import batched_pass, pass_planner
from rl_core.service.requests import CreateModel, Datum

needs_compiled_code = pytest.mark.skipif(
    (gemm.load_tiles() or gemm.load_vectors()) is None, reason="needs compiled matrix products"
)


def build_request(name, index, **options):
    policy = index % 2 == 1
    data = random_data(index, 3 + index, policy=policy, shared=6 * (index % 3))
    return loss_request(name, data, "ppo" if policy else "cross_entropy", **options)


def to_comparable(result):
    return bits([list(map(dict, result.outputs)), dict(result.metrics)])


@needs_compiled_code
@pytest.mark.parametrize("threads", [1, 2])
def test_a_run_in_a_batch_is_the_run_alone(base_folder, threads):
    torch.set_num_threads(threads)
    try:
        together = engine_with(base_folder, RANKS)
        assert together.base_info("base").batches_runs
        answers = together.forward_backward(
            [build_request(name, index) for index, name in enumerate(RANKS)]
        )
    finally:
        torch.set_num_threads(1)
    for index, name in enumerate(RANKS):
        alone = engine_with(base_folder, [name])
        (answer,) = alone.forward_backward([build_request(name, index)])
        assert to_comparable(answer) == to_comparable(answers[index])
        assert len(together.state_dict(name)["gradient"]) > 20
        assert bits(together.state_dict(name)["gradient"]) == bits(
            alone.state_dict(name)["gradient"]
        )


@needs_compiled_code
def test_equal_sequences_of_two_runs_share_nothing(base_folder):
    """Compute a common prefix once within a run; another run's adapter leads to other states."""
    data = random_data(2, 4, shared=12)
    together = engine_with(base_folder, ["a", "c"])
    answers = together.forward_backward([loss_request(name, data) for name in ("a", "c")])
    assert answers[0].loss != answers[1].loss
    for name, answer in zip(("a", "c"), answers, strict=True):
        alone = engine_with(base_folder, [name])
        assert to_comparable(
            alone.forward_backward([loss_request(name, data)])[0]
        ) == to_comparable(answer)
        assert bits(together.state_dict(name)["gradient"]) == bits(
            alone.state_dict(name)["gradient"]
        )


@needs_compiled_code
@pytest.mark.parametrize(
    "family",
    [(Qwen2Config, Qwen2ForCausalLM), (Qwen3Config, Qwen3ForCausalLM)],
    ids=["qwen2", "qwen3"],
)
def test_other_families_separate_runs_too(tmp_path, family):
    folder = make_base(
        tmp_path / "base", config_class=family[0], model_class=family[1], tie_word_embeddings=True
    )
    together = engine_with(folder, RANKS)
    together.forward_backward([build_request(name, index) for index, name in enumerate(RANKS)])
    for index, name in enumerate(RANKS):
        alone = engine_with(folder, [name])
        alone.forward_backward([build_request(name, index)])
        assert bits(together.state_dict(name)["gradient"]) == bits(
            alone.state_dict(name)["gradient"]
        )


def test_runs_share_a_pass_unless_settings_forbid_it(base_folder, monkeypatch):
    sizes = []
    original = batched_pass.run_pass

    def count_parts(parts, **options):
        sizes.append(len(parts))
        return original(parts, **options)

    monkeypatch.setattr(pass_planner, "run_pass", count_parts)
    for batch_runs, expected in (("always", [3]), ("never", [1, 1, 1])):
        engine = engine_with(base_folder, RANKS, batch_runs=batch_runs)
        engine.forward_backward([build_request(name, index) for index, name in enumerate(RANKS)])
        assert sizes == expected
        sizes.clear()


def test_the_gradient_is_autograds_of_the_merged_model(base_folder):
    """Compare with torch in float64: W + scale B A instead of W, one datum after the other, up to float32 rounding."""
    engine = engine_with(base_folder, ["a"])
    data = random_data(5, 4)
    engine.forward_backward([loss_request("a", data)])
    run = engine._find_run("a")
    gradients = engine.state_dict("a")["gradient"]
    _, expected = merged_gradient(run, data)
    assert set(gradients) == set(expected)
    for name, gradient in gradients.items():
        error = (gradient.double() - expected[name]).abs().max() / expected[name].abs().max()
        assert float(error) < 5e-6, name


@needs_compiled_code
def test_interleaved_tenants_get_the_bits_of_a_run_alone(base_folder):
    """Compare two interleaved loops with each loop alone: data, losses, optimizers and weights."""

    def train(engine, names, rounds=3):
        for number in range(rounds):
            engine.forward_backward(
                [build_request(name, 10 * number + sorted(RANKS).index(name)) for name in names]
            )
            for name in names:
                engine.optim_step(step_request(name))
        return {name: bits(engine.state_dict(name)) for name in names}

    both = train(engine_with(base_folder, ["a", "c"]), ["a", "c"])
    for name in ("a", "c"):
        assert train(engine_with(base_folder, [name]), [name])[name] == both[name]


@needs_compiled_code
def test_the_size_of_passes_changes_nothing(base_folder):
    """Vary `pass_tokens`, which only splits passes between runs.

    `micro_batch_tokens` is constant, because it determines the order of a run's sums.
    """
    states = []
    for max_tokens in (32768, 40, 1):
        engine = engine_with(base_folder, RANKS, pass_tokens=max_tokens, micro_batch_tokens=30)
        engine.forward_backward([build_request(name, index) for index, name in enumerate(RANKS)])
        states.append({name: bits(engine.state_dict(name)) for name in RANKS})
    assert states[0] == states[1] == states[2]


def build_data_with_several_targets(seed):
    """Build datums with two targets per token."""
    data = random_data(seed, 3)
    return tuple(
        Datum(
            datum.tokens,
            {
                name: np.stack([values, values[::-1]], axis=1)
                for name, values in datum.inputs.items()
            },
        )
        for datum in data
    )


def build_data_with_rewards(seed):
    """Build datums of a loss that uses the entropy and values of the run's head."""
    data = []
    for datum in random_data(seed, 3, policy=True):
        rewards = np.zeros(len(datum.tokens), np.float32)
        rewards[-1] = 1.0
        inputs = {
            "target_tokens": datum.inputs["target_tokens"],
            "logprobs": datum.inputs["logprobs"],
            "rewards": rewards,
        }
        data.append(Datum(datum.tokens, inputs))
    return tuple(data)


def build_mixed_requests():
    """Build requests that the output head has to separate.

    They differ in temperature, number of targets, entropy and whether the head has an adapter.
    """
    return {
        "plain": loss_request("plain", random_data(0, 3)),
        "no head": loss_request("no head", random_data(1, 3)),
        "warm": loss_request(
            "warm", random_data(2, 3, policy=True), "ppo", loss_fn_config={"temperature": 0.7}
        ),
        "several": loss_request("several", build_data_with_several_targets(3)),
        "entropy": loss_request(
            "entropy",
            build_data_with_rewards(4),
            "enhanced_ppo",
            loss_fn_config={"entropy_coef": 0.1},
        ),
        "long": loss_request("long", random_data(5, 6)),
    }


@needs_compiled_code
@pytest.mark.parametrize("chunk", [10_000, 60, 20], ids=["one product", "some together", "chunks"])
def test_runs_that_share_the_head_get_the_bits_of_a_run_alone(base_folder, monkeypatch, chunk):
    """Vary the chunk of the head: it holds the tokens of all runs, of some, or only part of one run."""
    sizes = []
    original = batched_pass.compute_selected_logprobs

    def count_tokens(hidden_NH, *arguments, **options):
        sizes.append(len(hidden_NH))
        return original(hidden_NH, *arguments, **options, chunk_tokens=chunk)

    monkeypatch.setattr(batched_pass, "compute_selected_logprobs", count_tokens)
    monkeypatch.setattr(batched_pass, "compute_chunk_tokens", lambda device, vocab_size: chunk)

    def build_engine(names):
        engine = make_engine(base_folder)
        for name in names:
            new_run(
                engine, name, rank=2 + len(name), seed=len(name), train_unembed=name != "no head"
            )
        return engine

    requests = build_mixed_requests()
    together = build_engine(requests)
    answers = together.forward_backward(list(requests.values()))
    shared = list(sizes)
    for answer, (name, request) in zip(answers, requests.items(), strict=True):
        alone = build_engine([name])
        assert to_comparable(alone.forward_backward([request])[0]) == to_comparable(answer)
        gradient = together.state_dict(name)["gradient"]
        assert any(".lora_A" in key and "lm_head" in key for key in gradient) == (name != "no head")
        assert bits(gradient) == bits(alone.state_dict(name)["gradient"])
    counts = sizes[len(shared) :]
    assert sum(shared) == sum(counts) and max(counts) > 20
    assert len(shared) == {10_000: 3, 60: 5, 20: 6}[chunk]  # by targets and entropy


def test_gradients_add_up_over_requests_and_parts(base_folder):
    data = random_data(3, 6)
    complete, parts = (
        engine_with(base_folder, ["a"]),
        engine_with(base_folder, ["a"], micro_batch_tokens=12),
    )
    complete.forward_backward([loss_request("a", data)])
    answers = parts.forward_backward([loss_request("a", data[:2]), loss_request("a", data[2:])])
    for name, gradient in complete.state_dict("a")["gradient"].items():
        error = (
            gradient - parts.state_dict("a")["gradient"][name]
        ).abs().max() / gradient.abs().max()
        # Relative to the largest value: sums in another order round differently.
        assert float(error) < 2e-6, name
    assert [len(answer.outputs) for answer in answers] == [2, 4]


def test_forward_only_leaves_no_gradient(base_folder):
    engine = engine_with(base_folder, ["a"])
    (evaluated,) = engine.forward_backward([build_request("a", 0, forward_only=True)])
    assert engine.state_dict("a")["gradient"] == {}
    (trained,) = engine.forward_backward([build_request("a", 0)])
    assert to_comparable(evaluated) == to_comparable(trained) and engine.state_dict("a")["gradient"]


def test_an_error_in_one_request_affects_only_it(base_folder):
    """Mix a bad request with good ones, and one whose loss is refused in the middle of a pass."""
    engine = engine_with(base_folder, RANKS)
    rewards = [
        Datum(
            datum.tokens,
            {
                "target_tokens": datum.inputs["target_tokens"],
                "logprobs": datum.inputs["weights"],
                "rewards": np.ones(len(datum.tokens), np.float32),
                "mask": np.zeros(len(datum.tokens), np.float32),
            },
        )
        for datum in random_data(1)
    ]
    answers = engine.forward_backward(
        [
            build_request("a", 0),
            loss_request("b", tuple(rewards), "enhanced_ppo"),
            loss_request("none", random_data(0)),
        ]
    )
    assert answers[0].loss != 0 and len(answers[0].outputs) == 3
    assert (
        isinstance(answers[1], ServiceError)
        and answers[1].category == "user"
        and "reward" in str(answers[1])
    )
    assert isinstance(answers[2], ServiceError) and "no training run 'none'" in str(answers[2])
    assert engine.state_dict("b")["gradient"] == {} and engine.state_dict("a")["gradient"]


def test_all_weights_are_trained_next_to_adapters(base_folder):
    engine = engine_with(base_folder, ["a"])
    engine.create_model(CreateModel(model_id="full", base="base", adapter=None))
    before = bits(engine.state_dict("a")["model"])
    base = bits(dict(engine._load_base_model("base").model.state_dict()))
    first, _ = engine.forward_backward([build_request("full", 0), build_request("a", 0)])
    engine.optim_step(step_request("full"))
    (second,) = engine.forward_backward([build_request("full", 0, forward_only=True)])
    assert second.loss < first.loss
    assert bits(engine.state_dict("a")["model"]) == before
    assert bits(dict(engine._load_base_model("base").model.state_dict())) == base


@needs_compiled_code
def test_a_gradient_keeps_no_memory_of_other_runs(base_folder):
    """Check a former leak: the gradient was a view of the pass's tensor, which an idle run kept alive."""
    together = engine_with(base_folder, RANKS)
    together.forward_backward([build_request(name, index) for index, name in enumerate(RANKS)])
    for run in together._runs.values():
        parts = {
            part.untyped_storage()._cdata: part.untyped_storage().nbytes()
            for part in run.gradient.values()
        }
        assert 0 < sum(parts.values()) <= 4 * run.num_trained
