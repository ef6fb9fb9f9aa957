"""Fast paths of models: every possible reason occurs for some model."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers.scripted_sequences import make_model
from helpers.vision import tiny_policy
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPT2Model,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from rl_core import capabilities as room
from rl_core.capabilities import (
    Decision,
    check_chunked_head,
    check_compiled_decoding,
    check_fused_step,
    check_independent_rows,
    check_packed_weights,
    check_prefix_sharing,
    check_rollout_decoder,
    check_sequence_packing,
    check_training_forward,
    decoding,
    inspect_capabilities,
    training,
)
from rl_core.cpu import attention_kernel, fused_decode, gemm, packed_gemm

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 61,
    "max_position_embeddings": 64,
}


def create_llama(**options):
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, **options})).train()


def create_qwen2(**options):
    return Qwen2ForCausalLM(Qwen2Config(**SIZES, **options)).train()


def create_qwen3(**options):
    return Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16, **options)).train()


def create_gpt2():
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=61, n_embd=32, n_layer=1, n_head=2, n_positions=64)
    ).train()


def add_lora(model, **options):
    return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], **options))


def create_sliding_model():
    return create_qwen2(use_sliding_window=True, sliding_window=4, max_window_layers=0)


def change_model(model, change):
    change(model)
    return model


class CustomLlama(LlamaForCausalLM):
    """A user's subclass, whose forward pass may be anything."""


CustomLlama.__name__ = "LlamaForCausalLM"


class ScaledLlama(LlamaForCausalLM):
    """A model whose logits differ from what its config says."""

    def forward(self, *args, **named):
        output = super().forward(*args, **named)
        return dataclasses.replace(output, logits=output.logits * 2)


def refuse_positions(module, args, kwargs):
    if "position_ids" in kwargs:
        raise TypeError("no positions, please")


DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}
CHECKS = {
    "training": check_training_forward,
    "sharing": check_prefix_sharing,
    "head": check_chunked_head,
    "packing": check_sequence_packing,
    "decoder": check_rollout_decoder,
    "packed": check_packed_weights,
    "compiled": check_compiled_decoding,
    "fused": check_fused_step,
}


@pytest.fixture
def compiled(monkeypatch):
    """Simulate a machine with compiled code and tiles, as far as decisions go."""
    monkeypatch.setattr(fused_decode, "load_decode_kernels", lambda: object())
    monkeypatch.setattr(packed_gemm, "load_int8_gemm", lambda: object())
    return monkeypatch


@pytest.mark.parametrize(
    "make", [create_llama, create_qwen2, create_qwen3, lambda: add_lora(create_llama())]
)
def test_a_standard_model_of_each_family_takes_every_path(make, compiled):
    model = make()
    decisions = list(inspect_capabilities(model))
    assert [decision.name for decision in decisions] == [
        "positions",
        "training forward",
        "prefix trees",
        "chunked head",
        "sequence packing",
        "rollout decoder",
        "packed weights",
        "compiled decoding",
        "fused step",
        "independent rows",
        "adapters by slot",
    ]
    assert all(decision.allowed and not decision.is_undecided for decision in decisions), decisions
    assert all(decision.reason and decision.fallback for decision in decisions)
    assert all(module.training for module in model.modules())  # trials restore the mode


def test_static_ropes_are_fine():
    options = {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}
    assert (
        check_training_forward(create_llama(**options)).allowed
        and check_rollout_decoder(create_llama(**options)).allowed
    )


def put_head_on_meta(model):
    model.lm_head = nn.Linear(64, 61, bias=False).to("meta")


REFUSED = [
    # path, model, reason
    ("training", create_gpt2, "GPT2Model is not of a known family (Llama, Qwen2, Qwen3)"),
    *(
        (path, lambda: tiny_policy().model, f"it reads images, {consequence}")
        for path, consequence in (
            ("training", "whose positions and states this path does not compute"),
            ("packing", "whose positions do not say where a sequence begins"),
            ("decoder", "which the engine does not prefill"),
        )
    ),
    (
        "training",
        lambda: MistralForCausalLM(MistralConfig(**SIZES)),
        "MistralModel is not of a known family",
    ),
    (
        "training",
        lambda: create_llama().double(),
        "its weights are float64, and this path computes in float32 or bfloat16",
    ),
    (
        "training",
        lambda: create_llama().half(),
        "its weights are float16, and this path computes in float32 or bfloat16",
    ),
    (
        "training",
        lambda: create_llama().to("meta"),
        "its weights are on meta; this path is for CPUs",
    ),
    (
        "training",
        lambda: change_model(create_llama(), lambda m: m.set_attn_implementation("eager")),
        "attention is set to 'eager'",
    ),
    (
        "training",
        lambda: create_llama(hidden_act="gelu"),
        "its activation is gelu; this path computes silu",
    ),
    (
        "training",
        lambda: create_llama(attention_dropout=0.1),
        "attention_dropout is 0.1; this path has none",
    ),
    (
        "training",
        lambda: create_llama(**DYNAMIC),
        "its rotary frequencies depend on the length (rope_type 'dynamic')",
    ),
    (
        "training",
        create_sliding_model,
        "some layers do not attend to all earlier tokens (sliding_attention)",
    ),
    (
        "sharing",
        create_sliding_model,
        "its training passes are transformers' own: some layers do not attend to all earlier tokens",
    ),
    (
        "sharing",
        lambda: get_peft_model(create_llama(), LoraConfig(r=2, target_modules=["lm_head"])),
        "its logits are computed over padded rows: its output head is Linear of peft",
    ),
    (
        "sharing",
        lambda: add_lora(create_llama(), lora_dropout=0.1),
        "dropout of its adapters gives equal tokens different noise",
    ),
    (
        "head",
        lambda: Gemma2ForCausalLM(Gemma2Config(**SIZES, head_dim=16)),
        "caps its logits (final_logit_softcapping",
    ),
    (
        "head",
        lambda: GPT2Model(GPT2Config(vocab_size=61, n_embd=32, n_layer=1, n_head=2)),
        "it has no output head",
    ),
    (
        "head",
        lambda: get_peft_model(create_llama(), LoraConfig(r=2, target_modules=["lm_head"])),
        "its output head is Linear of peft.tuners.lora.layer, not torch's",
    ),
    (
        "head",
        lambda: ScaledLlama(LlamaConfig(**SIZES)),
        "in a trial its logits differ from head times last hidden state",
    ),
    (
        "packing",
        lambda: BloomForCausalLM(BloomConfig(vocab_size=61, hidden_size=16, n_layer=1, n_head=2)),
        "in a trial a sequence attended to the one before it in its row",
    ),
    (
        "packing",
        lambda: change_model(
            create_llama(),
            lambda m: m.model.register_forward_pre_hook(refuse_positions, with_kwargs=True),
        ),
        "a trial with position ids failed: TypeError: no positions, please",
    ),
    ("decoder", create_gpt2, "GPT2LMHeadModel is not of a known family (Llama, Qwen2, Qwen3)"),
    (
        "decoder",
        lambda: CustomLlama(LlamaConfig(**SIZES)),
        "which may differ from transformers' version",
    ),
    ("decoder", lambda: create_llama(**DYNAMIC), "rope_type 'dynamic'"),
    ("decoder", create_sliding_model, "sliding_attention"),
    (
        "decoder",
        lambda: change_model(
            create_llama(), lambda m: setattr(m.model.layers[0].self_attn, "head_dim", 32)
        ),
        "rotary embedding rotates 16 of the 32 dimensions of a head",
    ),
    (
        "decoder",
        lambda: change_model(
            create_llama(),
            lambda m: setattr(m.model.layers[1].mlp, "up_proj", nn.Bilinear(64, 1, 48)),
        ),
        "its up_proj is Bilinear (quantised?), not a plain linear layer",
    ),
    (
        "decoder",
        lambda: add_lora(create_llama(), modules_to_save=["embed_tokens"]),
        "replaces whole modules (modules_to_save)",
    ),
    (
        "decoder",
        lambda: change_model(create_llama(), put_head_on_meta),
        "its weights lie on several devices",
    ),
    (
        "decoder",
        lambda: change_model(
            create_llama(),
            lambda m: setattr(
                m.model.norm,
                "weight",
                nn.Parameter(torch.ones(64, dtype=torch.int8), requires_grad=False),
            ),
        ),
        "some of its weights are integers",
    ),
    ("packed", create_gpt2, "needs the path 'rollout decoder'"),
    (
        "packed",
        lambda: create_llama().half(),
        "its weights are float16; only float32, float64 and bfloat16 are copied",
    ),
    (
        "packed",
        lambda: create_llama().to("meta"),
        "its weights are on meta; copies only help on a CPU",
    ),
    ("compiled", lambda: create_llama().half(), "needs the path 'packed weights'"),
    (
        "compiled",
        lambda: create_llama().double(),
        "its weights are float64; compiled code needs float32 or bfloat16",
    ),
    ("compiled", lambda: make_model("llama", head_dim=8), "heads of 8 dimensions"),
    ("fused", lambda: create_llama().double(), "needs the path 'compiled decoding'"),
    (
        "fused",
        lambda: create_llama(hidden_act="gelu"),
        "its activation is GELUActivation; compiled code computes silu",
    ),
]


@pytest.mark.parametrize(("path", "make", "reason"), REFUSED)
def test_obstacles_are_reported(path, make, reason, compiled):
    decision = CHECKS[path](make())
    assert not decision.allowed and not decision.is_undecided
    assert reason in decision.reason
    assert decision.fallback


def test_dropout_matters_only_in_training_mode():
    model = create_llama(attention_dropout=0.1)
    assert not check_training_forward(model).allowed
    assert check_training_forward(model.eval()).allowed
    adapted = add_lora(create_llama(), lora_dropout=0.1).train()
    assert not check_prefix_sharing(adapted).allowed
    assert check_prefix_sharing(adapted.eval()).allowed


def test_autocast_needs_compiled_products_and_attention(monkeypatch):
    monkeypatch.setattr(gemm, "load_bf16_gemm", lambda: None)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (
            check_training_forward(create_llama()).reason
            == "autocast is on, and no compiled products in bfloat16 are at hand (AVX-512 BF16 or AMX)"
        )
        monkeypatch.setattr(gemm, "load_bf16_gemm", lambda: object())
        decision = check_training_forward(create_llama())
        assert decision.allowed and decision.reason.endswith("products round to bfloat16")
        monkeypatch.setattr(
            attention_kernel.AttentionKernel, "supports_head_dim", staticmethod(lambda size: False)
        )
        assert "needs torch's kernel" in check_training_forward(create_llama()).reason


def test_bfloat16_weights_need_compiled_code(monkeypatch):
    halves = create_llama().bfloat16()
    monkeypatch.setattr(gemm, "load_bf16_gemm", lambda: object())
    assert check_training_forward(halves).reason.endswith("products round to bfloat16")
    monkeypatch.setattr(gemm, "load_bf16_gemm", lambda: None)
    decision = check_training_forward(halves)
    assert decision.allowed
    assert decision.reason.endswith("all in float32, bfloat16 weights are widened")
    monkeypatch.setattr(gemm, "load_vectors", lambda: None)
    assert (
        check_training_forward(halves).reason
        == "its weights are bfloat16, and no compiled code is at hand (a C compiler and vectors of 8 numbers)"
    )


def test_weights_sharded_by_layer_are_left_to_transformers(monkeypatch):
    model = create_llama()
    package = SimpleNamespace(FSDPModule=type(model.model.layers[0]))
    monkeypatch.setitem(sys.modules, "torch.distributed.fsdp", package)
    assert (
        check_training_forward(model).reason
        == "its weights are sharded layer by layer among processes"
    )


def test_what_the_machine_lacks(monkeypatch):
    model = create_llama()
    monkeypatch.setattr(packed_gemm, "load_int8_gemm", lambda: None)
    monkeypatch.setattr(packed_gemm, "load_packed_vectors", lambda: object())
    monkeypatch.setattr(fused_decode, "load_decode_kernels", lambda: object())
    assert check_compiled_decoding(model).allowed and check_fused_step(model).allowed
    monkeypatch.setattr(packed_gemm, "load_packed_vectors", lambda: None)
    assert (
        "neither tiles for products of 8-bit integers (AMX) nor vectors"
        in check_fused_step(model).reason
    )
    monkeypatch.setattr(fused_decode, "load_decode_kernels", lambda: None)
    monkeypatch.delenv("POSTTRAIN_NATIVE", raising=False)
    assert "no C compiler, or compilation failed" in check_compiled_decoding(model).reason
    monkeypatch.setenv("POSTTRAIN_NATIVE", "0")
    assert check_compiled_decoding(model).reason == "POSTTRAIN_NATIVE=0 turns compiled code off"


def test_bfloat16_weights_are_packed_where_there_are_products(monkeypatch):
    model, floats = create_llama().bfloat16(), create_llama()
    monkeypatch.setattr(fused_decode, "load_decode_kernels", lambda: object())
    monkeypatch.setattr(packed_gemm, "load_int8_gemm", lambda: object())
    for kernel, words in [
        ("widened", "in bfloat16, widened to float32"),
        ("dots", "in bfloat16, by dot products (AVX-512 BF16)"),
        ("tiles", "in bfloat16, by tiles (AMX)"),
    ]:
        products = SimpleNamespace(kernel=kernel)
        monkeypatch.setattr(packed_gemm, "load_bf16_products", lambda products=products: products)
        assert words in check_packed_weights(model).reason and check_fused_step(model).allowed
        assert words in check_packed_weights(floats, autocast="bfloat16").reason
        assert check_fused_step(floats, autocast="bfloat16").allowed
        assert "bfloat16" not in check_packed_weights(floats).reason
    monkeypatch.setattr(packed_gemm, "load_bf16_products", lambda: None)
    assert (
        check_packed_weights(model).reason
        == "its weights are bfloat16; this processor has no vectors of 8 numbers (AVX2)"
    )
    # float32 weights stay float32
    assert check_packed_weights(floats, autocast="bfloat16") == check_packed_weights(floats)
    monkeypatch.setattr(fused_decode, "load_decode_kernels", lambda: None)
    monkeypatch.setenv("POSTTRAIN_NATIVE", "0")
    assert (
        check_packed_weights(model).reason
        == "its weights are bfloat16; POSTTRAIN_NATIVE=0 turns compiled code off"
    )


def test_half_of_the_bytes_are_copied_in_bfloat16(monkeypatch):
    monkeypatch.setattr(
        packed_gemm, "load_bf16_products", lambda: SimpleNamespace(kernel="widened")
    )
    model = create_llama()
    size = 2 * sum(parameter.numel() for parameter in model.parameters())
    monkeypatch.setattr(decoding, "PACKED_BYTES", size)
    assert check_packed_weights(model, autocast="bfloat16").allowed
    assert not check_packed_weights(model).allowed
    assert check_packed_weights(model.bfloat16()).allowed


def test_linear_layers_of_two_kinds_are_not_copied():
    model = create_llama().bfloat16()
    model.lm_head.float()
    assert (
        check_packed_weights(model).reason
        == "the weights of its linear layers are bfloat16 and float32"
    )


def test_large_models_are_not_copied(monkeypatch):
    model = create_llama()
    size = 4 * sum(parameter.numel() for parameter in model.parameters())
    monkeypatch.setattr(decoding, "PACKED_BYTES", size)
    assert check_packed_weights(model).allowed
    monkeypatch.setattr(decoding, "PACKED_BYTES", size - 1)
    assert "GiB limit for copies" in check_packed_weights(model).reason


@pytest.mark.parametrize(
    ("measured", "reason"),
    [
        ((0.0, 1.0, 0.5, 0.1), "in a trial hidden states differed by 5.0e-01 of their size"),
        (
            (float("nan"), 1.0, 0.0, 0.0),
            "in a trial a sequence attended to the one before it in its row",
        ),
    ],
)
def test_packing_that_mixes_sequences(monkeypatch, measured, reason):
    monkeypatch.setattr(training, "_measure_packing_leak", lambda base: measured)
    assert check_sequence_packing(create_llama()) == Decision(
        "sequence packing", False, reason, "one sequence a row"
    )


def test_without_weights_trials_are_undecided():
    with torch.device("meta"):
        decisions = inspect_capabilities(create_llama(), device="cpu")
    assert (
        decisions.training_forward.allowed
        and decisions.decoder.allowed
        and decisions.packed_weights.allowed
    )
    for decision in (decisions.plain_head, decisions.sequence_packing):
        assert decision.is_undecided and not decision.allowed
    with torch.device("meta"):
        decisions = inspect_capabilities(create_llama(), device="cuda")
    assert decisions.decoder.allowed and "CUDA graphs" in decisions.decoder.reason
    assert "its weights are on cuda" in decisions.training_forward.reason


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (
            lambda: create_llama(head_dim=16).double(),
            "its training passes are transformers' own: its weights are float64",
        ),
        (
            lambda: create_llama(head_dim=12),
            "attention over heads of 12 dimensions needs torch's kernel",
        ),
        (
            lambda: create_llama(head_dim=16, intermediate_size=40),
            "intermediate_size 40 is not a multiple of 16",
        ),
    ],
)
def test_rows_are_dependent_with_other_kernels(make, reason, monkeypatch):
    if (gemm.load_tiles() or gemm.load_vectors()) is None:
        pytest.skip("needs compiled matrix products")
    assert check_independent_rows(create_llama(head_dim=16)).allowed
    assert check_independent_rows(create_qwen3()).allowed
    assert (
        not check_independent_rows(make()).allowed
        and reason in check_independent_rows(make()).reason
    )
    monkeypatch.setattr(gemm, "load_gemm", lambda: None)
    assert (
        "matrix products are not compiled code"
        in check_independent_rows(create_llama(head_dim=16)).reason
    )


def test_every_reason_has_a_case_here():
    """A new reason needs a model that triggers it: part of its constant text occurs in this file."""
    source, missing = Path(__file__).read_text(), []
    files = sorted(Path(inspect.getfile(room)).parent.glob("*.py"))
    reasons = [
        node
        for path in files
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Yield)
    ]
    assert len(reasons) > 20
    for reason in reasons:
        texts = [
            str(constant.value).strip()
            for constant in ast.walk(reason)
            if isinstance(constant, ast.Constant)
        ]
        pieces = [
            text[start : start + 12] for text in texts for start in range(max(1, len(text) - 11))
        ]
        if (
            not isinstance(reason.value, ast.Tuple)
            and texts
            and not any(piece in source for piece in pieces if len(piece) == 12)
        ):
            missing.append(texts)
    assert missing == []


def test_a_torch_without_the_kernel_for_packed_rows_is_refused(monkeypatch):
    monkeypatch.setattr(room.training, "find_spec", lambda name: None)
    decision = room.check_packed_attention(create_llama().to(torch.bfloat16), "cuda")
    assert not decision.allowed and "has no such kernel" in decision.reason
