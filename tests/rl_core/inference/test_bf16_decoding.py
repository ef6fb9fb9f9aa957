"""Decoding with weights packed as bfloat16: the numbers of float32 on the rounded weights where they are widened, those
of the trainer within bfloat16's bound everywhere; no bit depends on other sequences or threads.
"""

from __future__ import annotations

import copy

import pytest
import torch
from helpers.scripted_sequences import (
    MODELS,
    ScriptedSequence,
    make_model,
    make_sessions,
    model_named,
    sampling,
)
from helpers.tile_code import bf16_products, dots_code, tile_code
from transformers import PreTrainedModel

from rl_core.capabilities import decoding
from rl_core.cpu import build, fused_decode, packed_gemm
from rl_core.inference.continuous_batching import ContinuousBatcher
from rl_core.inference.decoder_layers import PackedOutputHead
from rl_core.inference.engine import Engine
from rl_core.inference.serving_requests import AnswerSequence, ServedRequest
from rl_core.models.logprobs import completion_logprobs
from rl_core.models.lora import add_adapter
from rl_core.rollouts.batching import TrainRow, build_batches
from rl_core.settings import LoraSettings
from rl_core.settings.rollouts import select_rounding_bound

pytestmark = pytest.mark.skipif(
    packed_gemm.load_bf16_products() is None, reason="needs a C compiler and vectors of 8 numbers"
)
EOS = 1
PARTS = ["products", "biases", "norms", "embeddings"]


@pytest.fixture(params=["widened", "dots", "tiles"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Use one kernel, emulated where the processor lacks its instruction."""
    use_kernel(request.param, monkeypatch)
    return str(request.param)


def use_kernel(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    products = bf16_products(name)
    assert products is not None
    code = {"widened": build.load_library, "dots": dots_code, "tiles": tile_code}[name]()
    monkeypatch.setattr(build, "load_library", lambda: code)
    monkeypatch.setattr(packed_gemm, "load_bf16_products", lambda: products)
    # float32 models, for comparison, by the kernel whose bits widened weights have
    monkeypatch.setattr(packed_gemm, "load_int8_gemm", lambda: None)


def create_engine(model: PreTrainedModel, **options: str) -> Engine:
    return Engine(model, eos_ids=(EOS,), pad_id=0, max_length=128, **options)


def play(engine: Engine, sequences: list[ScriptedSequence] | None = None) -> list[ScriptedSequence]:
    sequences = make_sessions() if sequences is None else sequences
    engine.run_sequences(sequences, sampling())
    return sequences


def read_results(sequences: list[ScriptedSequence]) -> list[object]:
    return [(sequence.turns, sequence.logprobs) for sequence in sequences]


def round_weights(model: PreTrainedModel, kinds: list[str]) -> PreTrainedModel:
    """Return a float32 copy of a model with some kinds of weights rounded to bfloat16."""
    rounded = copy.deepcopy(model)
    with torch.no_grad():
        for name, parameter in rounded.named_parameters():
            kinds_by_part = {"norm": "norms", "embed": "embeddings", "bias": "biases"}
            kind = next((kinds_by_part[part] for part in kinds_by_part if part in name), "products")
            if kind in kinds:
                parameter.copy_(parameter.bfloat16())
    return rounded


def halve(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy as a checkpoint is loaded in bfloat16: rotary frequencies stay float32."""
    halved = copy.deepcopy(model)
    for parameter in halved.parameters():
        parameter.data = parameter.data.bfloat16()
    return halved


def remove_norm_weights(model: PreTrainedModel) -> PreTrainedModel:
    """Set the norms' weights to 1: the float32 decoder multiplies them into the weights, which rounds them."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "layernorm" in name or name.endswith("model.norm.weight"):
                parameter.fill_(1.0)
    return model


def measure_gaps(model: PreTrainedModel, sequences: list[ScriptedSequence]) -> torch.Tensor:
    """Return the differences between the sampler's and the trainer's log-probabilities of the sampled tokens."""
    rows = [
        TrainRow(s.prompt_ids, s.completion_ids, s.loss_mask, s.logprobs, 1.0) for s in sequences
    ]
    gaps = []
    for batch in build_batches(rows, 256, 0):
        with torch.no_grad():
            logprobs_BS, _ = completion_logprobs(model, batch)
        assert batch.sampler_logprobs_BS is not None
        gaps.append((logprobs_BS.float() - batch.sampler_logprobs_BS)[batch.loss_mask_BS].abs())
    return torch.cat(gaps)


@pytest.mark.parametrize("name", MODELS)
def test_widened_weights_sample_what_float32_samples_of_the_rounded_weights(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_kernel("widened", monkeypatch)
    model = remove_norm_weights(model_named(name))
    halves, floats = halve(model), round_weights(model, PARTS)
    for fused in (True, False):
        if not fused:  # one call per operation
            monkeypatch.setattr(fused_decode, "load_decode_kernels", lambda: None)
        ours, expected = play(create_engine(halves)), play(create_engine(floats))
        assert sum(len(sequence.completion_ids) for sequence in ours) > 100
        assert read_results(ours) == read_results(expected)


@pytest.mark.parametrize("name", MODELS)
def test_norms_multiply_the_activations(name: str, kernel: str) -> None:
    """Their product with the weights would be rounded: an error of up to 2^-9 for every weight."""
    model = model_named(name)
    gaps = measure_gaps(round_weights(model, PARTS), play(create_engine(halve(model))))
    if kernel == "widened":
        assert gaps.max() < 1e-4
    else:
        assert gaps.max() < 0.5 and gaps.mean() < 0.04


@pytest.mark.parametrize("name", ["llama, wide heads and biases", "qwen3"])
def test_sampler_and_trainer_agree_within_the_bound(name: str, kernel: str) -> None:
    """These models' logits are large, so that bfloat16 rounds them more than those of a trained model."""
    model = halve(model_named(name))
    gaps = measure_gaps(model, play(create_engine(model)))
    assert gaps.max() < select_rounding_bound(False) and gaps.mean() < 0.08


@pytest.mark.parametrize("name", MODELS)
def test_autocast_rounds_the_weights_of_products_alone(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_kernel("widened", monkeypatch)
    model = remove_norm_weights(model_named(name))
    expected = read_results(play(create_engine(round_weights(model, ["products"]))))
    if model.config.tie_word_embeddings:  # the head is rounded, the embedding is not
        expected = read_results(play(create_engine(untie_rounded_head(model))))
    assert read_results(play(create_engine(model, autocast="bfloat16"))) == expected
    assert read_results(play(create_engine(model))) != expected


def untie_rounded_head(model: PreTrainedModel) -> PreTrainedModel:
    untied = round_weights(model, ["products"])
    head = torch.nn.Parameter(untied.model.embed_tokens.weight.detach().bfloat16().float())
    untied.lm_head.weight = head
    return untied


def test_autocast_is_nearer_to_the_trainer_than_float32(kernel: str) -> None:
    model = make_model("llama", head_dim=16, intermediate_size=192, hidden_size=96)
    gaps = {}
    for autocast in ("none", "bfloat16"):
        sequences = play(create_engine(model, autocast=autocast))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            gaps[autocast] = measure_gaps(model, sequences).square().mean().sqrt().item()
    assert gaps["bfloat16"] < gaps["none"] and gaps["bfloat16"] < 0.08


def test_a_sequence_alone_has_the_bits_of_one_among_others(kernel: str) -> None:
    engine = create_engine(halve(make_model("llama", head_dim=16)))
    engine.disable_cross_row_batching()
    together = read_results(play(engine))
    alone = [read_results(play(engine, [sequence]))[0] for sequence in make_sessions()]
    assert alone == together


@pytest.mark.parametrize("min_rows", [1, 100])  # rows per thread, or columns of each product
def test_neither_threads_nor_their_division_of_work_change_a_bit(
    kernel: str, monkeypatch: pytest.MonkeyPatch, min_rows: int
) -> None:
    engine = create_engine(halve(make_model("qwen3", head_dim=16)))
    expected = read_results(play(engine))
    assert read_results(play(engine)) == expected
    monkeypatch.setattr(fused_decode, "MIN_ROWS_PER_THREAD", min_rows)
    for threads in (2, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert read_results(play(engine)) == expected


def test_a_run_follows_changed_weights(kernel: str) -> None:
    model = halve(make_model("llama", head_dim=16))
    engine = create_engine(model)
    before = read_results(play(engine))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.25)
    after = read_results(play(engine))
    assert after != before and after == read_results(play(create_engine(model)))


def test_an_adapter_over_frozen_bfloat16_weights_is_sampled(kernel: str) -> None:
    model = add_adapter(halve(make_model("llama", head_dim=16)), LoraSettings(rank=4))
    numbers = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.2, generator=numbers)
    assert decoding.check_fused_step(model).allowed
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    gaps = measure_gaps(model, play(create_engine(model)))
    assert gaps.max() < 0.5 and gaps.mean() < 0.08
    assert all(torch.equal(before[name], value) for name, value in model.named_parameters())
    with model.disable_adapter():
        assert measure_gaps(model, play(create_engine(model))).mean() > 0.2


def test_served_requests_decode_compiled(kernel: str) -> None:
    """The chat server's batches give a request the bits that it has alone."""
    model = halve(make_model("qwen3", head_dim=16))

    def serve(prompts: list[list[int]]) -> list[object]:
        batcher = ContinuousBatcher(model, slots=4, context=64, eos_ids=(EOS,), pad_id=0)
        assert batcher._decoder.can_append_tokens
        requests = [
            ServedRequest(AnswerSequence(prompt, len(prompt)), sampling(max_completion_tokens=12))
            for prompt in prompts
        ]
        batcher.start_requests(requests)
        while not batcher.is_empty:
            batcher.step()
        return [(request.sequence.tokens, request.sequence.logprobs) for request in requests]

    prompts = [[5, 9, 33, 12], [7, 3], [40, 41, 42]]
    assert serve(prompts) == [serve([prompt])[0] for prompt in prompts]


def test_packed_weights_and_cache(kernel: str) -> None:
    engine = create_engine(halve(make_model("llama", head_dim=16)))
    play(engine)
    decoder = engine._decoder
    assert isinstance(decoder._head, PackedOutputHead)
    packed, _ = decoder._head.read_packed_weight()
    assert packed.gemm.kernel == kernel
    assert decoder._cache is not None and decoder._cache.dtype == torch.float32
