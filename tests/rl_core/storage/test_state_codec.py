"""Round trip of states through a checkpoint's JSON, including types."""

import json
import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_core.errors import CheckpointError
from rl_core.storage.checkpoint import StateDecoder, StateEncoder


def round_trip(value, shard_bytes=1 << 20):
    encoder = StateEncoder(shard_bytes)
    text = json.dumps(encoder.encode_value(value, "x", "x"), allow_nan=False)
    return StateDecoder(dict(encoder.iter_shards())).decode_value(json.loads(text))


def assert_same(left, right):
    """Check equal values and types, recursively; nan equals nan, -0.0 differs from 0.0."""
    assert type(left) is type(right), (left, right)
    if isinstance(left, dict):
        assert list(left) == list(right)
        for key in left:
            assert_same(left[key], right[key])
    elif isinstance(left, list | tuple):
        assert len(left) == len(right)
        for left_item, right_item in zip(left, right, strict=True):
            assert_same(left_item, right_item)
    elif isinstance(left, torch.Tensor):
        assert left.dtype == right.dtype and left.shape == right.shape
        assert torch.equal(left, right)
    elif isinstance(left, np.ndarray | np.generic):
        assert left.dtype == right.dtype
        np.testing.assert_array_equal(left, right)
    elif isinstance(left, float):
        assert (math.isnan(left) and math.isnan(right)) or left.hex() == right.hex()
    else:
        assert left == right


leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.binary()
    | st.sampled_from(["$", "\ud800", "\u2028"])
)
keys = st.text() | st.integers() | st.sampled_from(["$", (1, "a")])
trees = st.recursive(
    leaves,
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(keys, inner),
    max_leaves=20,
)


@settings(max_examples=150, deadline=None)
@given(trees)
def test_any_nested_value_is_restored(tree):
    assert_same(round_trip(tree), tree)


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor([[1.5, -0.0], [float("inf"), 3.0]]),
        torch.tensor(7),
        torch.empty(0, 3),
        torch.tensor([1.0, 2.0], dtype=torch.bfloat16),
        torch.tensor([True, False]),
        torch.arange(6).reshape(2, 3).t(),  # not contiguous
        np.arange(5, dtype=np.uint32),
        np.float32(0.1),
        np.array([[1.0], [np.nan]]),
        {
            "state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.ones(2)}},
            "groups": [{"betas": (0.9, 0.95)}],
        },
        {"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}},
        random.Random(3).getstate(),
        np.random.RandomState(3).get_state(),
        np.random.default_rng(3).bit_generator.state,
        torch.Generator().manual_seed(3).get_state(),
    ],
    ids=lambda value: type(value).__name__,
)
def test_values_of_a_training_state_are_restored(value):
    assert_same(round_trip(value), value)


def test_generators_continue_where_they_were():
    python, numpy = random.Random(5), np.random.default_rng(5)
    python.random(), numpy.normal()
    states = round_trip((python.getstate(), numpy.bit_generator.state))
    expected = [python.random(), python.gauss(0, 1), numpy.normal()]
    python2, numpy2 = random.Random(), np.random.default_rng()
    python2.setstate(states[0])
    numpy2.bit_generator.state = states[1]
    assert [python2.random(), python2.gauss(0, 1), numpy2.normal()] == expected


def test_tied_tensors_are_stored_once_and_stay_tied():
    weight = torch.ones(4, 4)
    encoder = StateEncoder(1 << 20)
    encoded = encoder.encode_value(
        {"a": weight, "b": weight, "c": weight.t(), "d": weight.clone()}, "x", "x"
    )
    stored = [name for _, tensors in encoder.iter_shards() for name in tensors]
    assert stored == ["x.a", "x.c", "x.d"]
    decoded = StateDecoder(dict(encoder.iter_shards())).decode_value(encoded)
    assert decoded["a"] is decoded["b"]


def test_shards_hold_at_most_their_size_or_one_tensor():
    encoder = StateEncoder(40)
    value = {"a": torch.ones(8), "b": torch.ones(2), "c": torch.ones(1), "d": torch.ones(100)}
    encoder.encode_value(value, "x", "x")
    # float32: 32 + 8 = 40 bytes fit together, 4 more do not, 400 stand alone
    assert [(name, list(tensors)) for name, tensors in encoder.iter_shards()] == [
        ("x-0.safetensors", ["x.a", "x.b"]),
        ("x-1.safetensors", ["x.c"]),
        ("x-2.safetensors", ["x.d"]),
    ]


@pytest.mark.parametrize(
    "value",
    [{1, 2}, object(), lambda: 0, 1j, np.array([object()])],
    ids=["set", "object", "function", "complex", "array"],
)
def test_values_that_cannot_be_restored_are_refused_with_their_path(value):
    with pytest.raises(CheckpointError, match=r"x\.trainer\.history"):
        round_trip({"trainer": {"history": value}})


@pytest.mark.parametrize(
    "forged", [{"$": "call"}, {"$": "tensor", "file": "../x", "name": "y"}, {"$": ["tuple"]}]
)
def test_an_unknown_kind_is_an_error(forged):
    with pytest.raises((ValueError, KeyError, TypeError)):
        StateDecoder({}).decode_value(forged)
