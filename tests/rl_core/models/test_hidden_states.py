"""The packed forward pass against transformers: hidden states, gradients, models left to transformers."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers.tile_code import dots_code, tile_code
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from rl_core.capabilities import check_training_forward
from rl_core.cpu import gemm, packed_forward
from rl_core.errors import DataError
from rl_core.models.hidden_states import compute_hidden_states
from rl_core.models.lora import add_adapter, unwrap_model
from rl_core.settings import LoraSettings
from rl_core.types import TrainBatch

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 61,
    "max_position_embeddings": 64,
}
FAMILIES = {
    "llama": lambda **options: LlamaForCausalLM(LlamaConfig(**SIZES, **options)),
    "qwen2": lambda **options: Qwen2ForCausalLM(Qwen2Config(**SIZES, **options)),
    "qwen3": lambda **options: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16, **options)),
}
LENGTHS = [3, 17, 9, 30, 30, 1, 12, 28, 5, 22, 16, 2]


@pytest.fixture(autouse=True)
def use_small_rectangles(way, monkeypatch):
    """Make a dozen rows form several of the rectangles that torch attends in."""
    monkeypatch.setattr(packed_forward, "_MIN_RECTANGLE_ROWS", 2)


def create_model(family: str = "llama", **options) -> nn.Module:
    torch.manual_seed(0)
    model = FAMILIES[family](**options).train()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:  # initially all ones, which would hide a missing weight
                weight.uniform_(0.5, 1.5)
    return model


def build_batch(lengths=LENGTHS) -> TrainBatch:
    generator = torch.Generator().manual_seed(1)
    ids_BS = torch.randint(1, 61, (len(lengths), max(lengths)), generator=generator)
    real_BS = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    loss_BS = real_BS & (torch.rand(ids_BS.shape, generator=generator) < 0.5)
    loss_BS[:, 0] = False
    return TrainBatch(ids_BS, real_BS, loss_BS)


def compute_gradients(model, read_BS, states_BSH):
    """Return hidden states, and the gradient of a random weighting of them."""
    weights = torch.randn(states_BSH.shape, generator=torch.Generator().manual_seed(2))
    model.zero_grad()
    (states_BSH * weights)[read_BS].sum().backward()
    return states_BSH[read_BS].detach(), {
        name: p.grad for name, p in model.named_parameters() if p.grad is not None
    }


def compute_expected_states(model, batch):
    """Compute transformers' states, each row alone and without padding."""
    lengths = batch.attention_mask_BS.sum(1).tolist()
    states = [
        model.base_model(input_ids=ids_S[None, :length], use_cache=False).last_hidden_state[0]
        for ids_S, length in zip(batch.input_ids_BS, lengths, strict=True)
    ]
    return nn.utils.rnn.pad_sequence(states, batch_first=True)


def compare(model, batch, needed_BS, read_BS):
    packed = compute_gradients(model, read_BS, compute_hidden_states(model, batch, needed_BS))
    expected = compute_gradients(model, read_BS, compute_expected_states(model, batch))
    assert compute_distance(packed[0], expected[0]) < 1e-5
    assert packed[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        assert compute_distance(packed[1][name], gradient) < 3e-5, name


def compute_distance(first, second) -> float:
    """Return the distance of two tensors relative to the second's size, because single entries near 0 are sums that
    cancel.
    """
    return float((first - second).norm() / second.norm().clamp_min(0.1))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("is_partial", [False, True])
def test_states_and_gradients_are_those_of_transformers(family, is_partial):
    model, batch = create_model(family), build_batch()
    assert check_training_forward(model).allowed
    needed_BS = batch.loss_mask_BS if is_partial else None
    compare(model, batch, needed_BS, batch.loss_mask_BS if is_partial else batch.attention_mask_BS)


@pytest.mark.parametrize("lengths", [[7, 7, 7], [1], [5, 1, 1, 1, 9]])
def test_odd_shapes(lengths):
    model, batch = create_model(), build_batch(lengths)
    assert check_training_forward(model).allowed
    compare(model, batch, None, batch.attention_mask_BS)


def test_biases_rope_scaling_and_equal_heads():
    options = {
        "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
        "num_key_value_heads": 4,
    }
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(**{**SIZES, **options}, attention_bias=True, mlp_bias=True)
    )
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "bias" in name:
                weight.normal_(std=0.1)
    assert check_training_forward(model).allowed
    batch = build_batch()
    compare(model, batch, None, batch.attention_mask_BS)


def test_attention_is_scaled_as_the_model_says():
    model, batch = create_model(), build_batch()
    for layer in model.base_model.layers:
        layer.self_attn.scaling = 0.2  # 16 ** -0.5 by default
    assert check_training_forward(model).allowed
    usual = compute_expected_states(create_model(), batch)
    assert compute_distance(compute_expected_states(model, batch), usual) > 1e-3
    compare(model, batch, None, batch.attention_mask_BS)


@pytest.mark.parametrize("with_adapters", [False, True])
@pytest.mark.parametrize("is_partial", [False, True])
def test_activations_are_computed_again_in_backward(with_adapters, is_partial):
    model = create_model()
    if with_adapters:
        model = add_adapter(model, LoraSettings(rank=4))
    base, batch = unwrap_model(model), build_shared_batch()
    base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert check_training_forward(base).allowed
    needed_BS = batch.loss_mask_BS if is_partial else None
    read_BS = batch.loss_mask_BS if is_partial else batch.attention_mask_BS
    saved = []
    for recomputes in (True, False):
        base.train(recomputes)  # checkpointing happens in training mode alone
        sizes = []

        def record(tensor, sizes=sizes):
            sizes.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
            states_BSH = compute_hidden_states(base, batch, needed_BS)
        saved.append((sum(sizes), compute_gradients(base, read_BS, states_BSH)))
    (few, recomputed), (many, kept) = saved
    assert few < 0.5 * many
    assert compute_distance(recomputed[0], kept[0]) < 1e-6
    assert recomputed[1].keys() == kept[1].keys()
    for name, gradient in kept[1].items():
        assert compute_distance(recomputed[1][name], gradient) < 1e-5, name


def test_adapters_get_the_same_gradient():
    model = add_adapter(create_model(), LoraSettings(rank=4))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:  # initially zero, which would hide a missing adapter
                weight.normal_(std=0.05, generator=torch.Generator().manual_seed(3))
    base, batch = unwrap_model(model), build_batch()
    assert check_training_forward(base).allowed
    compare(base, batch, batch.loss_mask_BS, batch.loss_mask_BS)


def test_padding_costs_nothing_but_attention(monkeypatch):
    """Linear layers see only real tokens, and the last MLP only the needed ones."""
    model, batch = create_model(), build_batch()
    seen: dict[str, list[int]] = {"q_proj": [], "down_proj": []}
    for name, module in model.named_modules():
        key = name.rsplit(".", 1)[-1]
        if key in seen:
            module.register_forward_pre_hook(
                lambda module, args, key=key: seen[key].append(len(args[0]))
            )
    compute_hidden_states(model, batch, batch.loss_mask_BS)
    real, needed = sum(LENGTHS), int(batch.loss_mask_BS.sum())
    assert seen == {"q_proj": [real] * 3, "down_proj": [real, real, needed]}


def build_shared_batch(lengths=(20, 23, 18, 9, 9, 30, 4, 1, 12, 20)) -> TrainBatch:
    """Build rows: some have common prefixes, some contain all of another, two are equal; row 6 shares nothing."""
    batch = build_batch(list(lengths))
    ids_BS = batch.input_ids_BS
    ids_BS[1, :15] = ids_BS[0, :15]
    ids_BS[2, :11] = ids_BS[0, :11]
    ids_BS[3, :9] = ids_BS[0, :9]
    ids_BS[4] = ids_BS[3]
    ids_BS[5, :19] = ids_BS[1, :19]
    ids_BS[7, :1] = ids_BS[0, :1]
    ids_BS[8, :3], ids_BS[9, :5] = ids_BS[0, :3], ids_BS[8, :5]
    return batch


def list_prefixes(batch) -> list[tuple[int, ...]]:
    """List each real token with its whole prefix."""
    rows = zip(batch.input_ids_BS.tolist(), batch.attention_mask_BS.sum(1).tolist(), strict=True)
    return [tuple(ids[: end + 1]) for ids, length in rows for end in range(length)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("is_partial", [False, True])
def test_common_beginnings_are_computed_once(family, is_partial):
    model, batch = create_model(family), build_shared_batch()
    seen = {"q_proj": [], "down_proj": []}
    hooks = []
    for name, module in model.named_modules():
        key = name.rsplit(".", 1)[-1]
        if key in seen:
            add = lambda module, args, key=key: seen[key].append(len(args[0]))  # noqa: E731
            hooks.append(module.register_forward_pre_hook(add))
    needed_BS = batch.loss_mask_BS if is_partial else None
    read_BS = batch.loss_mask_BS if is_partial else batch.attention_mask_BS
    compute_hidden_states(model, batch, needed_BS)
    prefixes = list_prefixes(batch)
    is_read = read_BS[batch.attention_mask_BS].tolist()
    unique = len(set(prefixes))
    needed = len({prefix for prefix, read in zip(prefixes, is_read, strict=True) if read})
    assert needed < int(read_BS.sum())  # some read tokens are shared by several rows
    assert seen == {"q_proj": [unique] * 3, "down_proj": [unique, unique, needed]}
    for hook in hooks:  # a layer with hooks is called as a module
        hook.remove()
    compare(model, batch, needed_BS, read_BS)


def test_rows_get_separate_noise_from_adapters_with_dropout():
    torch.manual_seed(0)
    model = unwrap_model(add_adapter(create_model(), LoraSettings(rank=4, dropout=0.5)))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.5)
    batch = build_shared_batch()
    assert not torch.allclose(*compute_hidden_states(model.train(), batch)[3:5, :9])
    assert torch.equal(*compute_hidden_states(model.eval(), batch)[3:5, :9])


def test_rectangles_hold_rows_of_similar_length():
    rows = packed_forward._build_rectangles(LENGTHS)
    assert sum(count for count, _ in rows.shapes) == len(LENGTHS)
    assert len(rows.shapes) > 2
    tokens = sum(count * width for count, width in rows.shapes)
    assert tokens < 0.75 * len(LENGTHS) * max(LENGTHS)
    assert rows.tokens_P[rows.indices_N].tolist() == list(range(sum(LENGTHS)))


def create_model_without_sdpa():
    model = create_model()
    model.set_attn_implementation("eager")
    return model


OTHERS = {
    "float64": lambda: create_model().double(),
    "float16": lambda: create_model().half(),
    "another activation": lambda: create_model(hidden_act="gelu"),
    "a window": lambda: create_model(
        "qwen2", use_sliding_window=True, sliding_window=4, max_window_layers=0
    ),
    "dropout": lambda: create_model(attention_dropout=0.1),
    "frequencies that follow the length": lambda: create_model(
        rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    ),
    "another family": lambda: MistralForCausalLM(MistralConfig(**SIZES)),
    "other kernels": create_model_without_sdpa,
}


@pytest.mark.parametrize("kind", OTHERS)
def test_whatever_differs_is_left_to_transformers(kind):
    model, batch = OTHERS[kind](), build_batch()
    assert not check_training_forward(model).allowed
    torch.manual_seed(5)
    ours = compute_hidden_states(model, batch)
    torch.manual_seed(5)
    theirs = model.base_model(input_ids=batch.input_ids_BS, use_cache=False).last_hidden_state
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.fixture
def bf16_products(way, monkeypatch):
    """Round products to bfloat16 by the instructions of this processor, or by code in their place."""
    if way == "torch":
        pytest.skip("needs compiled code")
    code, names = {
        "tiles": (tile_code, ("bf16_tiles_linear", "amx_gemm_room")),
    }.get(way, (dots_code, ("bf16_dots_linear", "bf16_linear_room")))
    products = gemm.Gemm(code(), *names)
    monkeypatch.setattr(gemm, "load_bf16_gemm", lambda: products)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("adapts", [False, True])
def test_autocast_rounds_no_more_than_transformers(family, adapts, bf16_products):
    """States and gradients are nearer to those of float32 than transformers' under autocast."""
    model, batch = create_model(family), build_batch()
    if adapts:
        model = add_adapter(model, LoraSettings(rank=4, alpha=8.0))
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "lora_B" in name:
                    weight.normal_(std=0.05)
    base, read_BS = unwrap_model(model), batch.attention_mask_BS
    exact = compute_gradients(model, read_BS, compute_expected_states(base, batch))
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        assert check_training_forward(base).reason.endswith("products round to bfloat16")
        states_BSH = compute_hidden_states(base, batch)
        expected_BSH = compute_expected_states(base, batch)
    assert states_BSH.dtype == torch.float32
    check_rounding(model, read_BS, exact, states_BSH, expected_BSH)


def check_rounding(model, read_BS, exact, states_BSH, expected_BSH):
    """Check that states and gradients are nearer to exact ones than transformers'."""
    packed = compute_gradients(model, read_BS, states_BSH)
    peer = compute_gradients(model, read_BS, expected_BSH)
    assert packed[1].keys() == exact[1].keys()
    assert 0 < compute_distance(packed[0], exact[0]) < compute_distance(peer[0], exact[0])
    ours, theirs = (
        {name: compute_distance(side[1][name], true) for name, true in exact[1].items()}
        for side in (packed, peer)
    )
    assert 0 < sum(ours.values()) < sum(theirs.values())
    assert all(0 < ours[name] < max(1.5 * theirs[name], 5e-3) for name in exact[1])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("adapts", [False, True])
def test_bfloat16_weights_round_no_more_than_transformers(family, adapts, bf16_products):
    """States and gradients are nearer to those of float32 computed with the same weights."""
    model, batch = create_model(family).bfloat16(), build_batch()
    if adapts:
        model = add_adapter(model, LoraSettings(rank=4, alpha=8.0))
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "lora_B" in name:
                    weight.normal_(std=0.05)
    wide, read_BS = copy.deepcopy(model).float(), batch.attention_mask_BS
    exact = compute_gradients(wide, read_BS, compute_expected_states(unwrap_model(wide), batch))
    base = unwrap_model(model)
    assert check_training_forward(base).reason.endswith("products round to bfloat16")
    states_BSH = compute_hidden_states(base, batch)
    assert states_BSH.dtype == torch.float32
    check_rounding(model, read_BS, exact, states_BSH, compute_expected_states(base, batch))


@pytest.mark.parametrize("adapts", [False, True])
def test_bfloat16_weights_are_widened_where_products_in_bfloat16_are_slow(way, adapts, monkeypatch):
    """States and gradients have the bits of float32 computed with the same weights.

    torch adds the rows of an embedding's gradient in the weight's type.
    """
    if way == "torch":
        pytest.skip("needs compiled code")
    monkeypatch.setattr(gemm, "load_bf16_gemm", lambda: None)
    model, batch = create_model().bfloat16(), build_batch()
    if adapts:
        model = add_adapter(model, LoraSettings(rank=4, alpha=8.0))
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "lora_B" in name:
                    weight.normal_(std=0.05)
    wide, read_BS = copy.deepcopy(model).float(), batch.attention_mask_BS
    assert check_training_forward(unwrap_model(model)).allowed
    halves, floats = (
        compute_gradients(each, read_BS, compute_hidden_states(unwrap_model(each), batch))
        for each in (model, wide)
    )
    assert halves[0].dtype == torch.float32 and torch.equal(halves[0], floats[0])
    assert halves[1].keys() == floats[1].keys() and len(halves[1]) > 0
    for name, grad in floats[1].items():
        ours = halves[1][name]
        if "embed_tokens" in name:
            assert (ours.float() - grad).norm() < 2**-7 * grad.norm()
        else:
            assert torch.equal(ours, grad.to(ours.dtype)), name


def test_rows_round_alike_in_any_company(bf16_products):
    model, batch = create_model(), build_batch()
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False), torch.no_grad():
        states_BSH = compute_hidden_states(model, batch)
        for row, length in enumerate(LENGTHS):
            alone = TrainBatch(
                batch.input_ids_BS[row : row + 1, :length],
                batch.attention_mask_BS[row : row + 1, :length],
                batch.loss_mask_BS[row : row + 1, :length],
            )
            assert torch.equal(compute_hidden_states(model, alone)[0], states_BSH[row, :length])


def test_autocast_without_compiled_products_is_left_to_transformers(monkeypatch):
    monkeypatch.setattr(gemm, "load_bf16_gemm", lambda: None)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert "no compiled products in bfloat16" in check_training_forward(create_model()).reason


def test_autocast_to_another_type_is_left_to_transformers(bf16_products):
    with torch.autocast("cpu", dtype=torch.float16):
        assert not check_training_forward(create_model()).allowed


def test_dropout_does_not_matter_in_eval():
    model = create_model(attention_dropout=0.1).eval()
    assert check_training_forward(model).allowed
    batch = build_batch()
    compare(model, batch, None, batch.attention_mask_BS)


def test_masks_of_other_rows_are_refused():
    batch = build_batch([9, 4, 6])
    batch.attention_mask_BS = batch.attention_mask_BS.flip(0)
    with pytest.raises(DataError, match="attention_mask is False where a hidden state is needed"):
        compute_hidden_states(create_model(), batch, batch.loss_mask_BS)


def test_repeated_passes_are_bit_identical():
    model, batch = create_model(), build_batch()
    first = compute_gradients(model, batch.attention_mask_BS, compute_hidden_states(model, batch))
    second = compute_gradients(model, batch.attention_mask_BS, compute_hidden_states(model, batch))
    assert torch.equal(first[0], second[0])
    assert all(torch.equal(first[1][name], second[1][name]) for name in first[1])
