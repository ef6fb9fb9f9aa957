"""Fast paths of models: every possible reason is given by a model with that property."""

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
    check_rollout_decoder,
    check_sequence_packing,
    check_training_forward,
    decoding,
    inspect_capabilities,
    training,
)
from rl_core.cpu import fused_decode, gemm, packed_gemm

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 61,
    "max_position_embeddings": 64,
}


def llama(**more):
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, **more})).train()


def qwen2(**more):
    return Qwen2ForCausalLM(Qwen2Config(**SIZES, **more)).train()


def qwen3(**more):
    return Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16, **more)).train()


def gpt2():
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=61, n_embd=32, n_layer=1, n_head=2, n_positions=64)
    ).train()


def lora(model, **options):
    return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], **options))


def window():
    return qwen2(use_sliding_window=True, sliding_window=4, max_window_layers=0)


def changed(model, change):
    change(model)
    return model


class OwnLlama(LlamaForCausalLM):
    """A user's subclass: its forward pass may be anything."""


OwnLlama.__name__ = "LlamaForCausalLM"


class Scaled(LlamaForCausalLM):
    """Logits that are not what the config says."""

    def forward(self, *args, **named):
        output = super().forward(*args, **named)
        return dataclasses.replace(output, logits=output.logits * 2)


def no_positions(module, args, kwargs):
    if "position_ids" in kwargs:
        raise TypeError("no positions, please")


DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}
ASK = {
    "training": check_training_forward,
    "head": check_chunked_head,
    "packing": check_sequence_packing,
    "decoder": check_rollout_decoder,
    "packed": check_packed_weights,
    "compiled": check_compiled_decoding,
    "fused": check_fused_step,
}


@pytest.fixture
def compiled(monkeypatch):
    """A machine with compiled code and tiles, as far as decisions go."""
    monkeypatch.setattr(fused_decode, "load_decode_kernels", lambda: object())
    monkeypatch.setattr(packed_gemm, "load_int8_gemm", lambda: object())
    return monkeypatch


@pytest.mark.parametrize("make", [llama, qwen2, qwen3, lambda: lora(llama())])
def test_a_plain_model_of_each_family_takes_every_path(make, compiled):
    model = make()
    decisions = list(inspect_capabilities(model))
    assert [decision.name for decision in decisions] == [
        "positions",
        "training forward",
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
    assert all(module.training for module in model.modules())  # trials leave the mode as it was


def test_static_ropes_are_fine():
    more = {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}
    assert (
        check_training_forward(llama(**more)).allowed
        and check_rollout_decoder(llama(**more)).allowed
    )


def float_and_double(model):
    model.lm_head = nn.Linear(64, 61, bias=False).to("meta")


REFUSED = [
    # path, model, reason
    ("training", gpt2, "GPT2Model is not of a known family (Llama, Qwen2, Qwen3)"),
    (
        "training",
        lambda: MistralForCausalLM(MistralConfig(**SIZES)),
        "MistralModel is not of a known family",
    ),
    (
        "training",
        lambda: llama().double(),
        "its weights are float64, and this path computes in float32",
    ),
    (
        "training",
        lambda: llama().bfloat16(),
        "its weights are bfloat16, and this path computes in float32",
    ),
    ("training", lambda: llama().to("meta"), "its weights are on meta; this path is for CPUs"),
    (
        "training",
        lambda: changed(llama(), lambda m: m.set_attn_implementation("eager")),
        "attention is set to 'eager'",
    ),
    (
        "training",
        lambda: llama(hidden_act="gelu"),
        "its activation is gelu; this path computes silu",
    ),
    (
        "training",
        lambda: llama(attention_dropout=0.1),
        "attention_dropout is 0.1; this path has none",
    ),
    (
        "training",
        lambda: changed(llama(), lambda m: m.gradient_checkpointing_enable()),
        "activation checkpointing is on",
    ),
    (
        "training",
        lambda: llama(**DYNAMIC),
        "its rotary frequencies depend on the length (rope_type 'dynamic')",
    ),
    (
        "training",
        window,
        "some layers do not attend to all earlier tokens (sliding_attention)",
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
        lambda: get_peft_model(llama(), LoraConfig(r=2, target_modules=["lm_head"])),
        "its output head is Linear of peft.tuners.lora.layer, not torch's",
    ),
    (
        "head",
        lambda: Scaled(LlamaConfig(**SIZES)),
        "in a trial its logits differ from head times last hidden state",
    ),
    (
        "packing",
        lambda: BloomForCausalLM(BloomConfig(vocab_size=61, hidden_size=16, n_layer=1, n_head=2)),
        "in a trial a sequence attended to the one before it in its row",
    ),
    (
        "packing",
        lambda: changed(
            llama(), lambda m: m.model.register_forward_pre_hook(no_positions, with_kwargs=True)
        ),
        "a trial with position ids failed: TypeError: no positions, please",
    ),
    ("decoder", gpt2, "GPT2LMHeadModel is not of a known family (Llama, Qwen2, Qwen3)"),
    ("decoder", lambda: OwnLlama(LlamaConfig(**SIZES)), "which may differ from transformers' version"),
    ("decoder", lambda: llama(**DYNAMIC), "rope_type 'dynamic'"),
    ("decoder", window, "sliding_attention"),
    (
        "decoder",
        lambda: changed(llama(), lambda m: setattr(m.model.layers[0].self_attn, "head_dim", 32)),
        "rotary embedding turns 16 of the 32 dimensions of a head",
    ),
    (
        "decoder",
        lambda: changed(
            llama(), lambda m: setattr(m.model.layers[1].mlp, "up_proj", nn.Bilinear(64, 1, 48))
        ),
        "its up_proj is Bilinear (quantised?), not a plain linear layer",
    ),
    (
        "decoder",
        lambda: lora(llama(), modules_to_save=["embed_tokens"]),
        "replaces whole modules (modules_to_save)",
    ),
    ("decoder", lambda: changed(llama(), float_and_double), "its weights lie on several devices"),
    (
        "decoder",
        lambda: changed(
            llama(),
            lambda m: setattr(
                m.model.norm,
                "weight",
                nn.Parameter(torch.ones(64, dtype=torch.int8), requires_grad=False),
            ),
        ),
        "some of its weights are integers",
    ),
    ("packed", gpt2, "needs the path 'rollout decoder'"),
    (
        "packed",
        lambda: llama().bfloat16(),
        "its weights are bfloat16; only float32 and float64 are copied",
    ),
    ("packed", lambda: llama().to("meta"), "its weights are on meta; copies only help on a CPU"),
    ("compiled", lambda: llama().bfloat16(), "needs the path 'packed weights'"),
    ("compiled", lambda: llama().double(), "its weights are float64; compiled code needs float32"),
    ("compiled", lambda: make_model("llama", head_dim=8), "heads of 8 dimensions"),
    ("fused", lambda: llama().double(), "needs the path 'compiled decoding'"),
    (
        "fused",
        lambda: llama(hidden_act="gelu"),
        "its activation is GELUActivation; compiled code computes silu",
    ),
]


@pytest.mark.parametrize(("path", "make", "reason"), REFUSED)
def test_what_speaks_against_a_path_is_said(path, make, reason, compiled):
    decision = ASK[path](make())
    assert not decision.allowed and not decision.is_undecided
    assert reason in decision.reason
    assert decision.fallback


def test_dropout_and_checkpointing_matter_in_training_mode_alone():
    model = llama(attention_dropout=0.1)
    model.gradient_checkpointing_enable()
    assert not check_training_forward(model).allowed
    assert check_training_forward(model.eval()).allowed


def test_autocast_is_left_to_transformers():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (
            check_training_forward(llama()).reason
            == "autocast is on, and this path computes in float32"
        )


def test_weights_sharded_by_layer_are_left_to_transformers(monkeypatch):
    model = llama()
    package = SimpleNamespace(FSDPModule=type(model.model.layers[0]))
    monkeypatch.setitem(sys.modules, "torch.distributed.fsdp", package)
    assert (
        check_training_forward(model).reason
        == "its weights are sharded layer by layer among processes"
    )


def test_what_the_machine_lacks(monkeypatch):
    model = llama()
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


def test_large_models_are_not_copied(monkeypatch):
    model = llama()
    size = 4 * sum(parameter.numel() for parameter in model.parameters())
    monkeypatch.setattr(decoding, "PACKED_BYTES", size)
    assert check_packed_weights(model).allowed
    monkeypatch.setattr(decoding, "PACKED_BYTES", size - 1)
    assert "GiB limit for copies" in check_packed_weights(model).reason


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        ((0.0, 1.0, 0.5), "in a trial hidden states differed by 5.0e-01 of their size"),
        ((float("nan"), 1.0, 0.0), "in a trial a sequence attended to the one before it in its row"),
    ],
)
def test_packing_that_mixes_sequences(monkeypatch, found, reason):
    monkeypatch.setattr(training, "_measure_packing_leak", lambda base: found)
    assert check_sequence_packing(llama()) == Decision(
        "sequence packing", False, reason, "one sequence a row"
    )


def test_without_weights_trials_are_left_open():
    with torch.device("meta"):
        found = inspect_capabilities(llama(), device="cpu")
    assert found.training_forward.allowed and found.decoder.allowed and found.packed_weights.allowed
    for decision in (found.plain_head, found.sequence_packing):
        assert decision.is_undecided and not decision.allowed
    with torch.device("meta"):
        found = inspect_capabilities(llama(), device="cuda")
    assert found.decoder.allowed and "CUDA graphs" in found.decoder.reason
    assert "its weights are on cuda" in found.training_forward.reason


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (
            lambda: llama(head_dim=16).double(),
            "its training passes are transformers' own: its weights are float64",
        ),
        (lambda: llama(head_dim=12), "attention over heads of 12 dimensions needs torch's kernel"),
        (
            lambda: llama(head_dim=16, intermediate_size=40),
            "intermediate_size 40 is not a multiple of 16",
        ),
    ],
)
def test_rows_depend_on_others_where_a_kernel_is_not_ours(make, reason, monkeypatch):
    if (gemm.load_tiles() or gemm.load_vectors()) is None:
        pytest.skip("needs compiled matrix products")
    assert check_independent_rows(llama(head_dim=16)).allowed
    assert check_independent_rows(qwen3()).allowed
    assert (
        not check_independent_rows(make()).allowed
        and reason in check_independent_rows(make()).reason
    )
    monkeypatch.setattr(gemm, "load_gemm", lambda: None)
    assert (
        "matrix products are not compiled code"
        in check_independent_rows(llama(head_dim=16)).reason
    )


def test_every_reason_has_a_case_here():
    """A reason that is new in the room needs a model that gives it: part of its constant text stands in this file."""
    asked, missing = Path(__file__).read_text(), []
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
            str(part.value).strip() for part in ast.walk(reason) if isinstance(part, ast.Constant)
        ]
        pieces = [
            text[start : start + 12] for text in texts for start in range(max(1, len(text) - 11))
        ]
        if (
            not isinstance(reason.value, ast.Tuple)
            and texts
            and not any(piece in asked for piece in pieces if len(piece) == 12)
        ):
            missing.append(texts)
    assert missing == []
