"""Rotary frequencies that depend on the length (longrope, dynamic NTK): a row depends on nothing but itself."""

from __future__ import annotations

import copy
import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from helpers.model_tokenizer import make_tokenizer
from helpers.scripted_sequences import SHAPE, VOCAB, ScriptedSequence, make_model
from transformers import (
    Gemma3TextConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PhimoeConfig,
    PhimoeForCausalLM,
)

from rl_core.capabilities import (
    check_rollout_decoder,
    check_rotary_positions,
    check_training_forward,
)
from rl_core.capabilities.rotary_positions import (
    RopeLengthBound,
    find_fixing_obstacles,
    read_rope_length_bound,
)
from rl_core.errors import DataError, SettingsError
from rl_core.inference.engine import Engine, create_rollout_backend
from rl_core.inference.transformers_backend import TransformersBackend
from rl_core.models import causal_lm
from rl_core.models.heads import SeparateCritic
from rl_core.models.hidden_states import compute_hidden_states
from rl_core.models.logprobs import completion_logprobs
from rl_core.models.lora import add_adapter
from rl_core.models.rotary import fix_frequencies, read_model_max_length
from rl_core.rollouts.batching import TrainRow, build_batches
from rl_core.settings import LoraSettings, ModelSettings, SamplingSettings
from rl_core.types import TrainBatch

BOUND, LONGEST = 16, 64
SHORT, LONG = [1.0, 1.1, 1.2, 1.3], [2.0, 3.0, 5.0, 9.0]  # for the head's four frequencies
LONGROPE = dict(rope_type="longrope", rope_theta=10000.0, short_factor=SHORT, long_factor=LONG)
DYNAMIC = dict(rope_type="dynamic", rope_theta=10000.0, factor=4.0)


def create_phi3():
    shape = {**SHAPE, "max_position_embeddings": LONGEST}
    config = Phi3Config(
        **shape, original_max_position_embeddings=BOUND, rope_parameters=dict(LONGROPE)
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Phi3ForCausalLM(config).eval()


def create_llama():
    return make_model("llama", max_position_embeddings=BOUND, rope_parameters=dict(DYNAMIC)).eval()


FAMILIES = [create_phi3, create_llama]


def build_batch(*rows):
    """Build a right-padded batch; every token but the first carries loss."""
    width = max(map(len, rows))
    ids_BS = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    mask_BS = torch.tensor([[True] * len(row) + [False] * (width - len(row)) for row in rows])
    loss_mask_BS = mask_BS.clone()
    loss_mask_BS[:, 0] = False
    return TrainBatch(ids_BS, mask_BS, loss_mask_BS)


def draw_tokens(count, seed=0):
    return np.random.default_rng(seed).integers(3, VOCAB, count).tolist()


def compute_logprobs(model, *rows):
    with torch.no_grad():
        logprobs_BS, _ = completion_logprobs(model, build_batch(*rows))
    return logprobs_BS[0, : len(rows[0])]


def compute_expected_frequencies(kind, length):
    """Compute each model's inverse frequencies by hand: theta^(-i/4), divided by the factors or with a larger theta."""
    theta = 10000.0
    if kind is create_phi3:
        factors = LONG if length > BOUND else SHORT
        return [theta ** (-i / 4) / factor for i, factor in enumerate(factors)]
    theta *= (4.0 * max(length, BOUND) / BOUND - 3.0) ** (8 / 6)
    return [theta ** (-i / 4) for i in range(4)]


@pytest.mark.parametrize("make", FAMILIES)
def test_a_row_is_the_same_alone_and_next_to_a_longer_one(make):
    """10 tokens next to 40: they would differ by 0.4 nats if the longest row determined the frequencies."""
    short, long = draw_tokens(10), draw_tokens(40, 1)
    model = make()
    with pytest.raises(
        DataError, match=f"a row has 40 tokens, .* up to {BOUND}.*set model.rope_context"
    ):
        compute_logprobs(model, short, long)
    alone = compute_logprobs(make(), short)
    fix_frequencies(model, LONGEST)
    next_to_longer = compute_logprobs(model, short, long)
    assert torch.allclose(next_to_longer, compute_logprobs(model, short), atol=1e-5)
    # one set for every row changes the model for short ones
    assert (next_to_longer - alone).abs().max() > 0.05
    frequencies = next(module for module in model.modules() if hasattr(module, "inv_freq")).inv_freq
    assert frequencies.tolist() == pytest.approx(
        compute_expected_frequencies(make, LONGEST), rel=1e-5
    )


@pytest.mark.parametrize("make", FAMILIES)
@pytest.mark.parametrize("rope_context", [None, BOUND, LONGEST])
def test_sampler_and_trainer_agree(make, rope_context):
    """Episodes that would cross the bound during sampling end there, or use one set of frequencies from their first
    token.
    """
    model = make()
    fix_frequencies(model, rope_context)
    longest = LONGEST if rope_context == LONGEST else BOUND
    assert read_model_max_length(model) == longest
    kinds = (
        [TransformersBackend]
        if not check_rollout_decoder(model).allowed
        else [TransformersBackend, Engine]
    )
    for kind in kinds:
        backend = kind(model, eos_ids=[], pad_id=0, max_length=LONGEST)
        sequences = [
            ScriptedSequence(draw_tokens(3 + 2 * i, i), i, [draw_tokens(4, 9)], room=20)
            for i in range(5)
        ]
        backend.run_sequences(
            sequences, SamplingSettings(max_completion_tokens=20, slots=3, temperature=0.7)
        )
        lengths = [len(s.prompt_ids) + len(s.completion_ids) for s in sequences]
        assert lengths == [min(longest, 23 + 2 * i) for i in range(5)]
        assert all(s.turns[-1][1] for s in sequences)  # hit_limit
        rows = [
            TrainRow(s.prompt_ids, s.completion_ids, s.loss_mask, s.logprobs, 0.7)
            for s in sequences
        ]
        for batch in [*build_batches(rows, 30, 0), *build_batches(rows, 1000, 0)]:
            with torch.no_grad():
                logprobs_BS, _ = completion_logprobs(model, batch)
            assert (logprobs_BS - batch.sampler_logprobs_BS).abs().max() < 1e-4


def test_the_fast_paths_take_fixed_frequencies():
    model = create_llama()
    assert not check_rollout_decoder(model).allowed and not check_training_forward(model).allowed
    fix_frequencies(model, LONGEST)
    assert check_rollout_decoder(model).allowed and check_training_forward(model).allowed
    assert isinstance(create_rollout_backend(model, eos_ids=[], pad_id=0, max_length=99), Engine)
    assert create_rollout_backend(model, eos_ids=[], pad_id=0, max_length=99).max_length == LONGEST


@pytest.mark.parametrize("make", FAMILIES)
def test_copies_and_adapters_keep_the_frequencies(make):
    model = make()
    fix_frequencies(model, LONGEST)
    row = draw_tokens(40)
    expected = compute_logprobs(model, row)
    assert torch.equal(compute_logprobs(copy.deepcopy(model), row), expected)
    trunk = SeparateCritic(model).trunk
    assert torch.equal(
        compute_hidden_states(trunk, build_batch(row)),
        compute_hidden_states(model, build_batch(row)),
    )
    with pytest.raises(DataError, match="a row has 65 tokens"):
        compute_hidden_states(trunk, build_batch(draw_tokens(65)))
    targets = ("qkv_proj",) if make is create_phi3 else ("q_proj",)
    wrapped = add_adapter(model, LoraSettings(target_modules=targets))
    assert (
        read_model_max_length(wrapped) == LONGEST
        and "(rope_context)" in check_rotary_positions(wrapped).reason
    )
    assert torch.allclose(compute_logprobs(wrapped, row), expected, atol=1e-6)


def test_packed_rows_count_by_their_positions():
    """Two sequences of 12 tokens end to end take 24 positions but are no longer than 12."""
    batch = build_batch(draw_tokens(24))
    batch.position_ids_BS = torch.cat([torch.arange(12), torch.arange(12)])[None]
    batch.loss_mask_BS[0, 12] = False
    states = compute_hidden_states(create_phi3(), batch)
    assert torch.allclose(
        states[0, 12:],
        compute_hidden_states(create_phi3(), build_batch(draw_tokens(24)[12:]))[0],
        atol=1e-5,
    )
    batch.position_ids_BS = torch.arange(24)[None]
    with pytest.raises(DataError, match="a row has 24 tokens"):
        compute_hidden_states(create_phi3(), batch)


def test_padding_to_a_wide_rectangle_is_no_long_row():
    row = draw_tokens(10)
    wide = build_batch(row + [0] * 20)
    wide.attention_mask_BS[:, 10:] = False
    wide.loss_mask_BS[:, 10:] = False
    model = create_phi3()
    # transformers would use the padded width's factors
    with pytest.raises(DataError, match="a row has 30 tokens"):
        completion_logprobs(model, wide)
    with torch.no_grad():
        fix_frequencies(model, BOUND)
        assert torch.allclose(
            completion_logprobs(model, wide)[0][0, :10],
            compute_logprobs(create_phi3(), row),
            atol=1e-5,
        )


@pytest.mark.parametrize("make", FAMILIES)
def test_loading_fixes_them(make, tmp_path):
    make().save_pretrained(tmp_path)
    make_tokenizer(VOCAB).save_pretrained(tmp_path)
    settings = ModelSettings(path=str(tmp_path), device="cpu")
    assert causal_lm.read_context_length(tmp_path, settings) == BOUND
    fixed = dataclasses.replace(settings, rope_context=40)
    assert causal_lm.read_context_length(tmp_path, fixed) == 40
    model = causal_lm.load_model(tmp_path, fixed)[0].eval()
    assert read_model_max_length(model) == 40
    fixed_copy = make()
    fix_frequencies(fixed_copy, 40)
    assert torch.equal(
        compute_logprobs(model, draw_tokens(30)), compute_logprobs(fixed_copy, draw_tokens(30))
    )
    assert read_model_max_length(causal_lm.load_without_weights(tmp_path, fixed)) == 40
    with pytest.raises(
        SettingsError, match=r"rope_context: 65, but .* sequences of up to 64 tokens"
    ):
        causal_lm.load_model(tmp_path, dataclasses.replace(settings, rope_context=65))
    causal_lm.save(model, make_tokenizer(VOCAB), tmp_path / "again")
    saved = json.loads((tmp_path / "again" / "config.json").read_text())["rope_parameters"]
    # the saved config is the original one
    assert saved["rope_type"] == ("longrope" if make is create_phi3 else "dynamic")


def test_low_precision_keeps_float32_frequencies():
    model = create_phi3()
    fix_frequencies(model.to(torch.bfloat16), LONGEST)
    module = next(module for module in model.modules() if hasattr(module, "inv_freq"))
    assert compute_logprobs(
        model, draw_tokens(40)
    ).isfinite().all() and module.attention_scaling == pytest.approx(
        math.sqrt(1 + math.log(LONGEST / BOUND) / math.log(BOUND))
    )


def test_bounds_of_configurations():
    assert read_rope_length_bound(create_phi3().config) == RopeLengthBound(
        "longrope", BOUND, LONGEST
    )
    assert read_rope_length_bound(create_llama().config) == RopeLengthBound(
        "dynamic", BOUND, LONGEST
    )
    assert read_rope_length_bound(make_model("llama").config) is None
    by_layer = Gemma3TextConfig(
        max_position_embeddings=100,
        rope_parameters={
            "full_attention": dict(rope_type="dynamic", rope_theta=1e4, factor=2.0),
            "sliding_attention": dict(rope_type="default", rope_theta=1e4),
        },
    )
    assert read_rope_length_bound(by_layer) == RopeLengthBound("dynamic", 100, 200)


def test_what_cannot_be_fixed():
    shape = {**SHAPE, "max_position_embeddings": LONGEST, "num_local_experts": 2}
    rope = {
        **LONGROPE,
        "short_mscale": 1.1,
        "long_mscale": 1.3,
        "original_max_position_embeddings": BOUND,
    }
    moe = PhimoeForCausalLM(PhimoeConfig(**shape, rope_parameters=rope))
    assert "PhimoeRotaryEmbedding does not read the frequencies that it keeps" in next(
        find_fixing_obstacles(moe)
    )
    with pytest.raises(SettingsError, match="rope_context: not supported by PhimoeForCausalLM"):
        fix_frequencies(moe, LONGEST)
    assert read_model_max_length(moe) == BOUND  # short rows are exact anyway
    with pytest.raises(SettingsError, match="do not depend on the length; remove it"):
        fix_frequencies(make_model("llama"), LONGEST)
    without_rotary = create_phi3()
    del without_rotary.model.rotary_emb
    assert "no rotary embedding of a known kind" in next(find_fixing_obstacles(without_rotary))
    by_layer = create_phi3()
    by_layer.model.rotary_emb.rope_type = {"full_attention": "longrope"}
    assert "differ from layer to layer" in next(find_fixing_obstacles(by_layer))


def test_reasons_for_users():
    assert (
        "change beyond 16 tokens (longrope), so its context ends there"
        in check_rotary_positions(create_phi3()).reason
    )
    assert "do not depend on the length" in check_rotary_positions(make_model("llama")).reason
    model = create_llama()
    fix_frequencies(model, LONGEST)
    assert (
        "(dynamic) are those of 64 tokens in every row (rope_context)"
        in check_rotary_positions(model).reason
    )


def test_an_unfixed_model_is_unchanged():
    assert (
        type(make_model("llama")) is LlamaForCausalLM
        and read_model_max_length(make_model("llama")) == 128
    )
