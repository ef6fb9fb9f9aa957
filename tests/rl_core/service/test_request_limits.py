"""Hostile requests: each is one user error before anything is computed, and leaves the run unchanged."""

import numpy as np
import pytest
from helpers.service import CONTEXT, VOCAB, bits, loss_request, make_engine, new_run, random_data

from rl_core.errors import ServiceError
from rl_core.service.request_checks import check_adam
from rl_core.service.requests import (
    AdamParameters,
    CreateSampler,
    Datum,
    SampleParameters,
    SampleRequest,
    densify_rows,
)


@pytest.fixture(scope="module")
def engine(base_folder):
    engine = make_engine(base_folder, max_data=8, max_samples=4)
    new_run(engine, "r")
    engine.create_sampler(CreateSampler(sampler_id="s", base="base"))
    return engine


def build_datum(**changes):
    tokens = changes.pop("tokens", np.arange(2, 6))
    inputs = {"target_tokens": np.arange(3, 7), "weights": np.ones(4, np.float32)} | changes
    return Datum(tokens, {name: value for name, value in inputs.items() if value is not None})


def build_thresholds(low):
    zeros = np.zeros(4, np.float32)
    thresholds = {} if low is None else {"clip_low_threshold": np.full(4, low)}
    return build_datum(weights=None, logprobs=zeros, advantages=zeros, **thresholds)


def build_policy_datum(**changes):
    defaults = {
        "weights": None,
        "logprobs": -np.ones(4, np.float32),
        "advantages": np.ones(4, np.float32),
    }
    return build_datum(**defaults | changes)


nan = np.array([0, np.nan, 0, 0], np.float32)
CASES = {
    "no data": (lambda: loss_request("r", ()), "at least one datum"),
    "too many": (lambda: loss_request("r", (build_datum(),) * 9), "9 datums; at most 8"),
    "a token beyond the vocabulary": (
        lambda: loss_request("r", (build_datum(tokens=np.array([2, VOCAB, 1, 1])),)),
        f"model_input: token {VOCAB} at 1 is outside the vocabulary, 0..{VOCAB - 1}",
    ),
    "a negative token": (
        lambda: loss_request("r", (build_datum(), build_datum(tokens=np.array([2, -7, 1, 1])))),
        r"data\[1\].model_input: token -7 at 1",
    ),
    "a target beyond the vocabulary": (
        lambda: loss_request("r", (build_datum(target_tokens=np.array([1, 2, 3, 999])),)),
        r"\['target_tokens'\]: token 999 at 3",
    ),
    "tokens as floats": (
        lambda: loss_request("r", (build_datum(tokens=np.ones(4)),)),
        "float64, expected an array of int",
    ),
    "tokens as a list": (
        lambda: loss_request("r", (build_datum(tokens=[1, 2, 3, 4]),)),
        "list, expected an array",
    ),
    "tokens in a square": (
        lambda: loss_request("r", (build_datum(tokens=np.ones((2, 2), int)),)),
        r"shape \(2, 2\)",
    ),
    "no token": (
        lambda: loss_request("r", (build_datum(tokens=np.array([], int)),)),
        "at least one token",
    ),
    "beyond the context": (
        lambda: loss_request("r", (build_datum(tokens=np.ones(CONTEXT + 1, int)),)),
        f"{CONTEXT + 1} tokens, and the model's context is {CONTEXT}",
    ),
    "targets of another length": (
        lambda: loss_request("r", (build_datum(target_tokens=np.arange(3)),)),
        r"shape \(3,\), expected \(4,\) or \(4, K\)",
    ),
    "targets as floats": (
        lambda: loss_request("r", (build_datum(target_tokens=np.ones(4)),)),
        "float64, expected integers",
    ),
    "weights of another shape": (
        lambda: loss_request("r", (build_datum(weights=np.ones((4, 2), np.float32)),)),
        r"shape \(4, 2\), expected \(4,\)",
    ),
    "weights as text": (
        lambda: loss_request("r", (build_datum(weights=np.array(["a"] * 4)),)),
        "expected numbers",
    ),
    "several targets without weights": (
        lambda: loss_request("r", (build_datum(target_tokens=np.ones((4, 2), int), weights=None),)),
        "need 'weights'",
    ),
    "NaN weights": (
        lambda: loss_request("r", (build_datum(weights=nan),)),
        r"nan at \[1\], expected finite",
    ),
    "NaN logprobs": (
        lambda: loss_request("r", (build_policy_datum(logprobs=nan),), "ppo"),
        r"\['logprobs'\]: nan at \[1\]",
    ),
    "infinite advantages": (
        lambda: loss_request("r", (build_policy_datum(advantages=nan + np.inf),), "ppo"),
        "advantages",
    ),
    "beyond float32": (
        lambda: loss_request("r", (build_policy_datum(advantages=np.full(4, 1e300)),), "ppo"),
        "expected finite",
    ),
    "an input too many": (
        lambda: loss_request("r", (build_datum(wights=np.ones(4)),)),
        "no input 'wights'; did you mean",
    ),
    "an input too few": (
        lambda: loss_request("r", (build_datum(weights=None),), "ppo"),
        "ppo needs 'logprobs'",
    ),
    "an optional input for some": (
        lambda: loss_request("r", (build_thresholds(0.9), build_thresholds(None)), "ppo"),
        "in all datums or in none",
    ),
    "an unknown loss": (
        lambda: loss_request("r", (build_datum(),), "cross_entropie"),
        "did you mean 'cross_entropy'",
    ),
    "a refused loss": (
        lambda: loss_request("r", (build_datum(),), "custom"),
        "is not supported",
    ),
    "an unknown option": (
        lambda: loss_request("r", (build_datum(),), loss_fn_config={"x": 1.0}),
        "has no option 'x'",
    ),
    "an option as text": (
        lambda: loss_request("r", (build_policy_datum(),), "dro", loss_fn_config={"beta": "1"}),
        "finite number",
    ),
    "an infinite option": (
        lambda: loss_request("r", (build_policy_datum(),), "dro", loss_fn_config={"beta": np.inf}),
        "finite",
    ),
    "an option out of range": (
        lambda: loss_request("r", (build_policy_datum(),), "dro", loss_fn_config={"beta": -1}),
        "0 to 1e",
    ),
    "thresholds in disorder": (
        lambda: loss_request(
            "r", (build_policy_datum(),), "ppo", loss_fn_config={"clip_high_threshold": 0.1}
        ),
        "must not be above",
    ),
    "half a pair": (
        lambda: loss_request(
            "r", (Datum(np.ones(2, int), {"preferred": np.ones(1)}),), "reward_modeling"
        ),
        "1 datums, expected pairs",
    ),
    "a pair of two chosen": (
        lambda: loss_request(
            "r", (Datum(np.ones(2, int), {"preferred": np.ones(1)}),) * 2, "reward_modeling"
        ),
        "one of a pair has preferred 1",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_bad_training_requests(engine, case):
    build_bad_request, text = CASES[case]
    before = bits(engine.state_dict("r"))
    bad, good = engine.forward_backward(
        [build_bad_request(), loss_request("r", random_data(0), forward_only=True)]
    )
    assert isinstance(bad, ServiceError) and bad.category == "user"
    with pytest.raises(ServiceError, match=text):
        raise bad
    assert len(good.outputs) == 3 and bits(engine.state_dict("r")) == before


def build_sample_request(**changes):
    parameters = SampleParameters(**changes.pop("parameters", {"max_tokens": 2}))
    return SampleRequest(
        **{"sampler_id": "s", "prompt": np.array([2, 3]), "seed": 0, "parameters": parameters}
        | changes
    )


SAMPLE_CASES = {
    "no sampler": (dict(sampler_id="x"), "no sampler 'x'"),
    "an empty prompt": (dict(prompt=np.array([], int)), "at least one token"),
    "a foreign token": (dict(prompt=np.array([1, VOCAB])), "outside the vocabulary"),
    "a prompt as floats": (dict(prompt=np.ones(3)), "expected an array of integers"),
    "a prompt beyond the context": (dict(prompt=np.ones(CONTEXT + 1, int)), "the model's context"),
    "no samples": (dict(num_samples=0), "num_samples: 0"),
    "too many samples": (dict(num_samples=5), "1 to 4"),
    "a seed of text": (dict(seed="1"), "expected an integer"),
    "top_p 0": (dict(parameters={"top_p": 0.0}), "top_p"),
    "top_k -2": (dict(parameters={"top_k": -2}), "top_k"),
    "a temperature below 0": (dict(parameters={"temperature": -1.0}), "temperature"),
    "a temperature that is none": (dict(parameters={"temperature": float("nan")}), "temperature"),
    "a tiny temperature": (
        dict(parameters={"temperature": 1e-300}),
        "temperature: 1e-300, expected 0 or 1e-06 to 5",
    ),
    "a temperature of true": (dict(parameters={"temperature": True}), "temperature: True"),
    "a top_p of true": (dict(parameters={"top_p": True}), "top_p: True"),
    "no tokens": (dict(parameters={"max_tokens": 0}), "max_tokens: 0"),
    "an empty stop": (dict(parameters={"stop": ("",)}), "non-empty texts"),
    "stops of two kinds": (dict(parameters={"stop": ("a", 1)}), "or as many token ids"),
    "a foreign stop": (dict(parameters={"stop": (VOCAB,)}), "outside the vocabulary"),
    "too many tops": (dict(topk_prompt_logprobs=65), "topk_prompt_logprobs: 65"),
    "targets of another length": (
        dict(target_prompt_logprobs=np.zeros((2, 1), int)),
        r"expected \(1, 1 to",
    ),
    "foreign targets": (dict(target_prompt_logprobs=np.array([[VOCAB]])), "outside the vocabulary"),
}


@pytest.mark.parametrize("case", SAMPLE_CASES)
def test_bad_sampling_requests(engine, case):
    changes, text = SAMPLE_CASES[case]
    bad, good = engine.sample([build_sample_request(**changes), build_sample_request()])
    assert isinstance(bad, ServiceError) and bad.category == "user" and len(good.sequences) == 1
    with pytest.raises(ServiceError, match=text):
        raise bad


def test_sparse_tensors_become_dense_or_are_refused():
    dense = densify_rows(np.array([5, 6, 7]), np.array([0, 2, 2, 3]), np.array([0, 2, 1]), (3, 3))
    assert dense.tolist() == [[5, 0, 6], [0, 0, 0], [0, 7, 0]]
    one = np.array([1.0])
    for arguments, text in (
        ((one, np.array([0, 1]), np.array([3]), (1, 3)), "col_indices must lie in 0..2"),
        ((one, np.array([0, 1]), np.array([-1]), (1, 3)), "col_indices must lie"),
        ((one, np.array([0, 2]), np.array([0]), (1, 3)), "rise from 0 to 1"),
        ((one, np.array([1, 0, 1]), np.array([0]), (2, 3)), "rise from 0 to 1"),
        ((one, np.array([0, 1]), np.array([0]), (2, 3)), "do not fit"),
        ((one, np.array([0.0, 1.0]), np.array([0]), (1, 3)), "expected integers"),
        ((one, np.array([0, 1]), np.array([0]), (1, 2**40)), "at most"),
        ((one, np.array([0, 1]), np.array([0]), (-1, 3)), "none negative"),
    ):
        with pytest.raises(ServiceError, match=text):
            densify_rows(*arguments)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"eps": 0}, "adam_params.eps: 0, expected 1e-30 to 1"),
        ({"eps": 1e-300}, "adam_params.eps: 1e-300, expected 1e-30 to 1"),  # 0 in float32
        ({"eps": True}, "adam_params.eps: True"),
        ({"learning_rate": True}, "adam_params.learning_rate: True, expected 0 to 1000"),
        ({"learning_rate": "1e-4"}, "adam_params.learning_rate: '1e-4'"),
        ({"learning_rate": float("nan")}, "adam_params.learning_rate: nan"),
        ({"weight_decay": False}, "adam_params.weight_decay: False"),
        ({"grad_clip_norm": True}, "adam_params.grad_clip_norm: True"),
        ({"beta1": False}, "adam_params.beta1: False"),
        ({"beta2": 1.0}, "adam_params.beta2: 1.0"),
    ],
)
def test_bad_optimizer_parameters(changes, text):
    with pytest.raises(ServiceError) as error:
        check_adam(AdamParameters(**changes), 0.95)
    assert error.value.category == "user" and text in str(error.value)
    check_adam(AdamParameters(), 0.95)
    check_adam(AdamParameters(learning_rate=1, eps=1e-30), 0.0)
