"""Reference models: log-probabilities and scores, quantized weights, shared passes, separate processes."""

import json
import math
import os
import shutil
import signal
import threading

import numpy as np
import pytest
import torch
from helpers.waiting import wait_for

import rl_core
from rl_core.errors import CorruptError, DataError, ModelError, SettingsError
from rl_core.models import heads
from rl_core.references import pool, quantized
from rl_core.references.pool import FrozenModelCache, ReferencePool
from rl_core.references.quantized import QuantizedLinear, count_weight_bytes, estimate_model_bytes
from rl_core.references.scorer import ReferenceSource, SharedScorer, load_reference_model
from rl_core.settings import ModelSettings, ReferenceSettings

ROWS = [[5, 6, 7, 8, 9], [3], [11, 12], [9, 8, 7, 6, 5, 4, 3, 2]]
FULL = ReferenceSettings(precision="full")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return the folder of a small model whose distribution is far from uniform."""
    policy = rl_core.create_policy(["abc xyz " * 9], ModelSettings(preset="nano"), seed=1)
    with torch.no_grad():
        for name, weight in policy.model.named_parameters():
            if "norm" not in name:
                weight.mul_(4)
    return policy.save(tmp_path_factory.mktemp("models") / "policy")


@pytest.fixture(scope="module")
def reward_folder(folder, tmp_path_factory):
    model, tokenizer = heads.create_reward_model(folder, ModelSettings(), seed=3)
    target = tmp_path_factory.mktemp("models") / "reward"
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    return target


def compute_logprobs_by_hand(folder, row, temperature=1.0):
    """Compute log p of each token but the first in float64, from the logits of the model."""
    model = load_policy_model(folder)
    with torch.no_grad():
        logits = model(torch.tensor([row])).logits[0].double() / temperature
    return [float(logits[position].log_softmax(0)[token]) for position, token in enumerate(row[1:])]


def load_policy_model(folder, precision="full"):
    source = ReferenceSource(
        path=str(folder), kind="policy", precision=precision, model=ModelSettings()
    )
    model, _ = load_reference_model(source)
    return model


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_of_ragged_rows(folder, temperature):
    logprobs = ReferencePool(FULL).logprobs(folder, ROWS, temperature)
    assert [len(row) for row in logprobs] == [4, 0, 1, 7]
    for row, values in zip(ROWS, logprobs, strict=True):
        assert values == pytest.approx(compute_logprobs_by_hand(folder, row, temperature), abs=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dropout_is_off_in_any_precision(folder, tmp_path, dtype):
    """Use a model whose configuration has dropout, in a folder with spaces and letters of other alphabets."""
    copied = shutil.copytree(folder, tmp_path / "mein Modell \u00e4\u4e2d")
    (copied / "manifest.json").unlink()  # the configuration is changed below
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.5}))
    references = ReferencePool(FULL, ModelSettings(dtype=dtype))
    for _ in range(2):
        logprobs = references.logprobs(copied, ROWS, 0.8)
        for row, values in zip(ROWS, logprobs, strict=True):
            assert values == pytest.approx(
                compute_logprobs_by_hand(folder, row, 0.8), abs=1e-5 if dtype == "float32" else 0.2
            )


def test_a_row_is_the_same_in_small_passes(folder):
    one_pass = ReferencePool(FULL).logprobs(folder, ROWS)
    parts = ReferencePool(ReferenceSettings(precision="full", pass_tokens=3)).logprobs(folder, ROWS)
    assert all(np.allclose(a, b, atol=1e-6) for a, b in zip(one_pass, parts, strict=True))


def test_scores_of_a_reward_model(reward_folder):
    model, _ = heads.load_reward_model(reward_folder, ModelSettings())
    assert ReferencePool(FULL).scores(reward_folder, ROWS) == pytest.approx(
        heads.score_rows(model, ROWS), abs=1e-6
    )


def test_errors_name_what_is_wrong(folder, tmp_path):
    references = ReferencePool(FULL)
    with pytest.raises(DataError, match="row 1 has no tokens"):
        references.logprobs(folder, [[1], []])
    with pytest.raises(DataError, match="row 0 holds token 99999; valid ones are below"):
        references.logprobs(folder, [[1, 99999]])
    with pytest.raises(ModelError, match="no model folder"):
        references.logprobs(tmp_path / "nothing", ROWS)
    assert references.state.loads == 1


def test_a_folder_that_is_replaced_is_read_again(folder, tmp_path):
    replaced, references = tmp_path / "model", ReferencePool(FULL)
    rl_core.load_policy(folder).save(replaced)
    before = references.logprobs(replaced, ROWS)[0]
    other = rl_core.load_policy(folder)
    with torch.no_grad():
        other.model.model.layers[0].mlp.down_proj.weight.mul_(3)
    other.save(replaced)
    assert not np.allclose(references.logprobs(replaced, ROWS)[0], before, atol=1e-3)


def test_waiting_requests_share_a_pass():
    may_finish, calls = threading.Event(), []

    def score(rows, temperature):
        calls.append((len(rows), temperature))
        if len(calls) == 1:
            assert may_finish.wait(20)
        return [np.array([10.0 * row[0], temperature]) for row in rows]

    shared, scores = SharedScorer(score), {}

    def ask(number, temperature):
        scores[number] = shared.score_rows([[number], [number + 100]], temperature)

    threads = [
        threading.Thread(target=ask, args=(number, 0.5 if number == 5 else 1.0))
        for number in range(6)
    ]
    threads[0].start()
    wait_for(lambda: calls)
    for thread in threads[1:]:
        thread.start()
    wait_for(lambda: len(shared._pending) == 5)
    may_finish.set()
    for thread in threads:
        thread.join(20)
    for number, rows in scores.items():
        temperature = 0.5 if number == 5 else 1.0
        assert [row.tolist() for row in rows] == [
            [10.0 * number, temperature],
            [10.0 * (number + 100), temperature],
        ]
    assert sorted(calls) == [(2, 0.5), (2, 1.0), (8, 1.0)] and shared.num_passes == 3


def test_an_error_reaches_only_its_request():
    started, may_finish = threading.Event(), threading.Event()

    def score(rows, temperature):
        started.set()
        assert may_finish.wait(20)
        if any(row == [13] for row in rows):
            raise DataError("no 13 here")
        return [np.array(row) for row in rows]

    shared, results = SharedScorer(score), {}

    def ask(number):
        try:
            results[number] = shared.score_rows([[number]])[0].tolist()
        except DataError as error:
            results[number] = str(error)

    threads = [threading.Thread(target=ask, args=(number,)) for number in (1, 12, 13, 14)]
    threads[0].start()
    assert started.wait(20)
    for thread in threads[1:]:
        thread.start()
    wait_for(lambda: len(shared._pending) == 3)
    may_finish.set()
    for thread in threads:
        thread.join(20)
    assert results == {1: [1], 12: [12], 13: "no 13 here", 14: [14]}


def test_a_quantized_layer_multiplies_by_its_rounded_weights():
    """Check 2 x 8 weights in 4 bits with two scales per row, by hand."""
    rounded = torch.tensor(
        [[-8, 7, 0, 1, 2, 3, -4, 5], [1, 1, 1, 1, -1, -1, -1, -1]], dtype=torch.int8
    )
    scale = torch.tensor([[0.5, 2.0], [1.0, 3.0]])
    layer = QuantizedLinear(rounded, scale, 4, torch.tensor([100.0, 200.0]))
    assert layer.numbers.shape == (2, 4) and layer.numbers.dtype == torch.uint8
    weights = [
        [-4.0, 3.5, 0.0, 0.5, 4.0, 6.0, -8.0, 10.0],
        [1.0, 1.0, 1.0, 1.0, -3.0, -3.0, -3.0, -3.0],
    ]
    assert layer.dequantize().tolist() == weights
    assert layer(torch.ones(3, 1, 8)).tolist() == [[[112.0, 192.0]]] * 3
    int8_layer = QuantizedLinear(rounded, torch.tensor([[0.5], [2.0]]), 8, None)
    assert int8_layer.dequantize().tolist() == [
        [value / 2 for value in row] for row in rounded[:1].tolist()
    ] + [[2.0] * 4 + [-2.0] * 4]


@pytest.mark.parametrize(("precision", "bits", "levels"), [("int8", 8, 127), ("int4", 4, 7)])
def test_weights_are_rounded_to_the_nearest_step(folder, precision, bits, levels):
    pytest.importorskip("torchao")
    full, quantized_model = (load_policy_model(folder, each) for each in ("full", precision))
    layer, weight = (
        quantized_model.model.layers[1].mlp.up_proj,
        full.model.layers[1].mlp.up_proj.weight,
    )
    assert type(layer) is QuantizedLinear and layer.bits == bits
    groups = weight.unflatten(1, (-1, 32)) if bits == 4 else weight[:, None]
    # symmetric; the library may use half a level more
    step = groups.abs().amax(-1, keepdim=True) / levels
    assert ((layer.dequantize() - weight).view_as(groups).abs() <= 0.5 * step * 1.01).all()
    assert (layer.dequantize() != weight).any()
    # not quantized, and tied
    assert quantized_model.lm_head.weight is quantized_model.model.embed_tokens.weight
    assert torch.equal(quantized_model.lm_head.weight, full.lm_head.weight)
    expected = estimate_model_bytes(folder, torch.float32, precision)
    # the model also has buffers of rotary frequencies
    assert count_weight_bytes(quantized_model) == pytest.approx(expected, rel=0.02)
    assert count_weight_bytes(full) == pytest.approx(
        estimate_model_bytes(folder, torch.float32, "full"), rel=0.01
    )


@pytest.mark.parametrize(("precision", "limit"), [("int8", 0.2), ("int4", 3.0)])
def test_quantization_changes_logprobs_slightly(folder, precision, limit):
    pytest.importorskip("torchao")
    full = ReferencePool(FULL).logprobs(folder, ROWS)
    rounded = ReferencePool(ReferenceSettings(precision=precision)).logprobs(folder, ROWS)
    difference = max(
        float(np.abs(a - b).max(initial=0)) for a, b in zip(full, rounded, strict=True)
    )
    assert 1e-6 < difference < limit


def test_quantization_of_a_reward_model(reward_folder):
    pytest.importorskip("torchao")
    full = ReferencePool(FULL).scores(reward_folder, ROWS)
    rounded = ReferencePool(ReferenceSettings(precision="int8")).scores(reward_folder, ROWS)
    assert rounded == pytest.approx(full, abs=0.2) and rounded != full


def test_auto_is_full_with_a_warning_without_the_package(folder, monkeypatch, caplog):
    monkeypatch.setattr(pool, "is_torchao_installed", lambda: False)
    monkeypatch.setattr(quantized, "is_torchao_installed", lambda: False)
    pool._warn_full_precision.cache_clear()
    references = ReferencePool()
    assert references.logprobs(folder, ROWS)[0] == pytest.approx(
        compute_logprobs_by_hand(folder, ROWS[0]), abs=1e-5
    )
    assert caplog.text.count("keep full precision: the package torchao") == 1
    with pytest.raises(
        SettingsError, match=r"int4 needs the package torchao; install it, or posttrain\[quantize\]"
    ):
        ReferencePool(ReferenceSettings(precision="int4")).logprobs(folder, ROWS)


def test_odd_numbers_of_inputs_are_refused(monkeypatch, tmp_path):
    pytest.importorskip("torchao")
    monkeypatch.setattr(
        quantized, "_read_tensor_shapes", lambda folder: iter([("a.weight", [8, 36])])
    )
    with pytest.raises(SettingsError, match="one has 36; set int8"):
        quantized.build_quantized_loading_options("int4", torch.device("cpu"), tmp_path)
    monkeypatch.setattr(
        quantized,
        "_read_tensor_shapes",
        lambda folder: iter([("a.weight", [8, 48]), ("b.weight", [8, 32])]),
    )
    assert quantized._choose_group_size(tmp_path) == 16


@pytest.mark.slow
def test_a_large_model_has_a_separate_process(folder):
    settings = ReferenceSettings(precision="full", separate_process_gib=0.0, max_models=1)
    references = ReferencePool(settings)
    remote = references.logprobs(folder, ROWS, 0.7)
    local = ReferencePool(FULL).logprobs(folder, ROWS, 0.7)
    assert all(np.array_equal(a, b) for a, b in zip(remote, local, strict=True))
    with pytest.raises(DataError, match="row 0 holds token 99999"):
        references.logprobs(folder, [[99999]])
    (cached,) = references._cache._cached.values()
    (child,) = cached.scorer._live_children
    weight_bytes = count_weight_bytes(load_policy_model(folder))
    assert math.isclose(references.state.bytes, weight_bytes, rel_tol=0.01)
    os.kill(child.process.pid, signal.SIGKILL)
    restarted = references.logprobs(folder, ROWS, 0.7)
    assert all(np.array_equal(a, b) for a, b in zip(restarted, local, strict=True))
    assert cached.scorer._live_children != [child]
    (child,) = cached.scorer._live_children
    del cached
    references.release_models()
    assert child.process.poll() == 0 and references.state.alive == 0


def test_loading_errors_of_the_process_are_raised(tmp_path, folder):
    damaged = tmp_path / "model"
    rl_core.load_policy(folder).save(damaged)
    (damaged / "config.json").write_text("{}")
    references = ReferencePool(ReferenceSettings(precision="full", separate_process_gib=0.0))
    with pytest.raises(CorruptError, match="differs from the manifest of its folder"):
        references.logprobs(damaged, ROWS)


def test_trainers_share_one_frozen_copy(folder):
    models = FrozenModelCache(ReferenceSettings())
    first = models.load_model(folder, ModelSettings(path="a"))
    assert models.load_model(folder, ModelSettings(path="b")) is first
    assert models.load_model(folder, ModelSettings(dtype="bfloat16")) is not first
    assert not first.training and not any(weight.requires_grad for weight in first.parameters())
