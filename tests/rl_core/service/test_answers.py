"""Results of forward_backward: outputs, metrics, soft targets, heads; and the page that documents them."""

import math
import re
from pathlib import Path

import numpy as np
import pytest
from helpers.service import (
    VOCAB,
    bits,
    engine_with,
    loss_request,
    make_engine,
    new_run,
    random_data,
    step_request,
)

from rl_core.service.loss_registry import LOSSES, UNSUPPORTED_LOSSES
from rl_core.service.requests import Datum

PAGE = Path(__file__).parents[3] / "docs" / "service-reference.md"
REDUCTION = re.compile(r"[a-z0-9_]+:(mean|sum|min|max)")


@pytest.fixture(scope="module")
def engine(base_folder):
    engine = make_engine(base_folder)
    new_run(engine, "r")
    return engine


def build_data(name, seed=0, rows=4):
    rng = np.random.default_rng(seed)
    data = []
    for index, datum in enumerate(random_data(seed, rows, policy=name != "cross_entropy")):
        size = len(datum.tokens)
        mask = (rng.random(size) < 0.7).astype(np.float32)
        extra = {
            "rewards": rng.standard_normal(size).astype(np.float32) * mask,
            "mask": mask,
            "ref_logprobs": -np.ones(size, np.float32),
            "preferred": np.array([index % 2]),
            "sampler_top_tokens": rng.integers(0, VOCAB, (size, 3)),
            "sampler_top_logprobs": np.log(rng.dirichlet(np.ones(4), size)[:, :3]).astype("f4"),
        }
        inputs = {**datum.inputs, **extra}
        data.append(
            Datum(datum.tokens, {key: inputs[key] for key in LOSSES[name].inputs if key in inputs})
        )
    return tuple(data)


def compute_forward(engine, name, data, **options):
    (answer,) = engine.forward_backward(
        [loss_request("r", data, name, loss_fn_config=options, forward_only=True)]
    )
    if isinstance(answer, Exception):
        raise answer
    return answer


@pytest.mark.parametrize("name", LOSSES)
def test_outputs_and_at_least_13_metrics(engine, name):
    data = build_data(name)
    answer = compute_forward(engine, name, data)
    assert len(answer.metrics) >= 13 and "loss:sum" in answer.metrics
    assert all(REDUCTION.fullmatch(metric) for metric in answer.metrics)
    assert all(math.isfinite(value) for value in answer.metrics.values())
    for datum, output in zip(data, answer.outputs, strict=True):
        for key, array in output.items():
            assert array.dtype == np.float32 and array.shape == (
                (1,) if key == "scores" else datum.tokens.shape
            )
        assert ("scores" if name == "reward_modeling" else "logprobs") in output
    extra = {
        "enhanced_ppo": {"values", "returns", "advantages", "entropy"},
        "conservative_ppo": {"entropy"},
    }
    assert extra.get(name, set()) <= set(answer.outputs[0])


def test_metrics_of_a_clipped_loss_by_hand(engine):
    data = build_data("ppo", 3)
    answer = compute_forward(engine, "ppo", data)
    p = np.concatenate([output["logprobs"] for output in answer.outputs]).astype(float)
    q, a = (
        np.concatenate([datum.inputs[key] for datum in data]).astype(float)
        for key in ("logprobs", "advantages")
    )
    r, used = np.exp(p - q), a != 0
    low, high = (r < 0.8) & (a < 0), (r > 1.2) & (a > 0)
    expected = {
        "loss:sum": -np.minimum(r * a, np.clip(r, 0.8, 1.2) * a).sum(),
        "tokens:sum": used.sum(),
        "sequences:sum": len(data),
        "ratio:mean": r[used].mean(),
        "ratio:max": r[used].max(),
        "advantage:min": a.min(),
        "update_kl_k1:mean": (q - p)[used].mean(),
        "update_kl:mean": (r - 1 - (p - q))[used].mean(),
        "clip_fraction:mean": (low | high)[used].mean(),
        "clip_fraction_low:mean": low[used].mean(),
        "effective_sample_share:mean": r[used].sum() ** 2 / (r[used] ** 2).sum() / used.sum(),
        "sampler_difference:max": np.abs(p - q).max(),
    }
    assert {key: answer.metrics[key] for key in expected} == pytest.approx(expected, rel=1e-5)
    assert answer.metrics["loss_per_token:mean"] == pytest.approx(
        expected["loss:sum"] / used.sum(), rel=1e-5
    )


def test_metrics_of_values_and_pairs_by_hand(engine):
    data = build_data("enhanced_ppo", 5)
    answer = compute_forward(engine, "enhanced_ppo", data, entropy_coef=0.1)
    used = np.concatenate([datum.inputs["mask"] for datum in data]) != 0
    v, returns, h = (
        np.concatenate([output[key] for output in answer.outputs])[used]
        for key in ("values", "returns", "entropy")
    )
    assert (v == 0).all()  # the head starts at 0
    assert answer.metrics["value_loss:mean"] == pytest.approx(0.5 * (returns**2).mean(), rel=1e-5)
    assert answer.metrics["explained_variance:mean"] == pytest.approx(0, abs=1e-6)
    assert answer.metrics["entropy:mean"] == pytest.approx(
        h.mean(), rel=1e-5
    ) and 0 < h.mean() < math.log(VOCAB)
    pairs = compute_forward(engine, "reward_modeling", build_data("reward_modeling"))
    scores = np.array([float(output["scores"][0]) for output in pairs.outputs])
    margin = scores[1::2] - scores[::2]
    assert pairs.metrics["margin:mean"] == pytest.approx(margin.mean(), rel=1e-5)
    assert pairs.metrics["accuracy:mean"] == (margin > 0).mean()
    assert pairs.metrics["ranking_loss:mean"] == pytest.approx(
        np.log1p(np.exp(-margin)).mean(), rel=1e-5
    )


def test_pairs_stay_together_however_small_the_parts_are(engine, base_folder):
    data = build_data("reward_modeling", rows=6)
    parts_engine = make_engine(base_folder, micro_batch_tokens=1)
    new_run(parts_engine, "r")
    complete = compute_forward(engine, "reward_modeling", data)
    split = compute_forward(parts_engine, "reward_modeling", data)
    assert split.metrics == pytest.approx(complete.metrics, rel=1e-5)


def test_soft_targets_are_sums_over_targets(engine):
    rng = np.random.default_rng(0)
    tokens = rng.integers(2, VOCAB, 7)
    targets, weights = (
        rng.integers(0, VOCAB, (7, 3)),
        rng.standard_normal((7, 3)).astype(np.float32),
    )
    soft = compute_forward(
        engine, "cross_entropy", (Datum(tokens, {"target_tokens": targets, "weights": weights}),)
    )
    single = [
        compute_forward(
            engine,
            "cross_entropy",
            (Datum(tokens, {"target_tokens": targets[:, k], "weights": weights[:, k]}),),
        )
        for k in range(3)
    ]
    assert soft.loss == pytest.approx(sum(answer.loss for answer in single), rel=1e-5)
    assert soft.outputs[0]["logprobs"].shape == (7, 3)
    for k, answer in enumerate(single):
        assert np.allclose(
            soft.outputs[0]["logprobs"][:, k], answer.outputs[0]["logprobs"], atol=1e-6
        )
    mixed = compute_forward(
        engine,
        "cross_entropy",
        (
            Datum(tokens, {"target_tokens": targets, "weights": weights}),
            Datum(tokens, {"target_tokens": targets[:, 0], "weights": weights[:, 0]}),
        ),
    )
    assert mixed.loss == pytest.approx(soft.loss + single[0].loss, rel=1e-5)
    assert [output["logprobs"].shape for output in mixed.outputs] == [(7, 3), (7,)]


def test_a_custom_loss_of_a_client_by_two_calls(engine):
    """Run forward_backward_custom: forward with weights 0, then cross_entropy with -dC/dp, for C = sum p^2."""
    (datum,) = random_data(9, 1)
    zero = Datum(datum.tokens, {**datum.inputs, "weights": np.zeros(len(datum.tokens), np.float32)})
    p = compute_forward(engine, "cross_entropy", (zero,)).outputs[0]["logprobs"]
    assert np.isfinite(p).all() and (p < 0).all()
    request = loss_request("r", (Datum(datum.tokens, {**datum.inputs, "weights": -2 * p}),))
    (answer,) = engine.forward_backward([request])
    assert answer.loss == pytest.approx(float((2 * p**2).sum()), rel=1e-5)
    engine.restore_model("r", engine.state_dict("r") | {"gradient": {}})


@pytest.mark.parametrize("name", ["enhanced_ppo", "reward_modeling"])
def test_heads_learn(base_folder, name):
    engine = make_engine(base_folder)
    new_run(engine, "r")
    metric = {"enhanced_ppo": "value_loss:mean", "reward_modeling": "ranking_loss:mean"}[name]
    losses = []
    for _ in range(12):
        (answer,) = engine.forward_backward([loss_request("r", build_data(name), name)])
        losses.append(answer.metrics[metric])
        engine.optim_step(step_request("r", 5e-3))
    assert losses[-1] < 0.8 * losses[0]


def test_temperature_applies_to_the_distribution(engine):
    data = build_data("ppo", 1)
    at_two = compute_forward(engine, "ppo", data, temperature=2.0).outputs[0]["logprobs"]
    logits = compute_forward(
        engine,
        "cross_entropy",
        tuple(
            Datum(
                datum.tokens,
                {
                    "target_tokens": np.tile(np.arange(VOCAB), (len(datum.tokens), 1)),
                    "weights": np.zeros((len(datum.tokens), VOCAB), np.float32),
                },
            )
            for datum in data[:1]
        ),
    ).outputs[0]["logprobs"]
    expected = logits / 2 - np.log(np.exp(logits / 2).sum(-1, keepdims=True))
    chosen = data[0].inputs["target_tokens"]
    assert np.allclose(at_two, expected[np.arange(len(chosen)), chosen], atol=1e-5)


def test_the_page_names_every_loss_input_option_and_default():
    rows = {}
    for line in PAGE.read_text().splitlines():
        match = re.match(r"\| `(\w+)` \| (.*) \|$", line)
        if match and match[1] in LOSSES:
            rows[match[1]] = match[2]
    assert set(rows) == set(LOSSES)
    page = PAGE.read_text()
    for name, loss in LOSSES.items():
        for option, declared in loss.options.items():
            if option == "temperature" or (
                option.startswith("clip") and "the clips of ppo" in rows[name]
            ):
                continue
            assert re.search(rf"`{option}` \({declared.default:g}[;)]", rows[name]), (name, option)
        assert all(f"`{input_name}`" in page for input_name in loss.inputs)
    assert all(f"`{name}`" in page for name in UNSUPPORTED_LOSSES)


@pytest.mark.parametrize("first", [0, 1])
def test_weights_of_some_datums_are_1_for_the_others(base_folder, first):
    """As in SkyRL's tests of the protocol: a datum without weights counts every token."""
    engine = engine_with(base_folder, ["a"])
    data = list(random_data(4, rows=3))
    without = {"target_tokens": data[first].inputs["target_tokens"]}
    data[first] = Datum(data[first].tokens, without)
    (filled,) = engine.forward_backward([loss_request("a", tuple(data))])
    assert not isinstance(filled, Exception), filled
    gradient = bits(engine.state_dict("a")["gradient"])
    ones = np.ones(len(data[first].tokens), np.float32)
    data[first] = Datum(data[first].tokens, {**without, "weights": ones})
    other = engine_with(base_folder, ["a"])
    (explicit,) = other.forward_backward([loss_request("a", tuple(data))])
    assert filled.metrics == explicit.metrics
    assert gradient == bits(other.state_dict("a")["gradient"])
