"""The compiled parts of a decoding step against torch."""

import dataclasses

import numpy as np
import pytest
import torch
from helpers.scripted_sequences import VOCAB, ScriptedSequence, make_model
from helpers.tile_code import tile_code
from torch.nn import functional

from rl_core.cpu import build, fused_decode, packed_gemm
from rl_core.cpu.fused_decode import DecodeKernels, DecodeStep
from rl_core.cpu.packed_gemm import PackedProducts
from rl_core.inference.decoder import Decoder
from rl_core.inference.engine import Engine
from rl_core.inference.sampling import draw_tokens
from rl_core.models.routed_adapters import LowRank
from rl_core.settings import SamplingSettings

needs_compiler = pytest.mark.skipif(
    fused_decode.load_decode_kernels() is None, reason="needs a C compiler"
)


@pytest.fixture
def numbers():
    return torch.Generator().manual_seed(0)


@needs_compiler
@pytest.mark.parametrize("width", [1, 15, 16, 33, 256])
def test_norms_and_gates(numbers, width):
    compiled = fused_decode.load_decode_kernels()
    x = torch.randn(5, width, generator=numbers)
    expected = x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    torch.testing.assert_close(compiled.compute_rms_norm(x, 1e-5), expected, rtol=1e-6, atol=1e-7)
    both = 6 * torch.randn(5, 2 * width, generator=numbers)
    both[0, 0], both[1, 0], both[2, 0] = 200.0, -200.0, 0.0
    gate, up = both.chunk(2, dim=1)
    torch.testing.assert_close(
        compiled.compute_gated_silu(both), functional.silu(gate) * up, rtol=2e-6, atol=1e-7
    )


@dataclasses.dataclass
class Norm:
    weight: torch.Tensor
    eps: float = 1e-6

    def __call__(self, x):
        return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


def compute_attention(heads, slots, positions, cos, sin, cache, query_heads, q_norm, k_norm, scale):
    """Compute attention token by token by the definition; write the cache too."""
    size, kv_heads = cache.shape[-1], cache.shape[2]
    q, k, v = heads.view(len(heads), -1, size).split([query_heads, kv_heads, kv_heads], dim=1)
    q, k = (q_norm(q), k_norm(k)) if q_norm is not None else (q, k)

    def rotate(x):
        return x * cos[positions][:, None] + torch.roll(x, size // 2, -1) * sin[positions][:, None]

    q, k = rotate(q), rotate(k)
    for token, (slot, position) in enumerate(zip(slots.tolist(), positions.tolist(), strict=True)):
        cache[0, slot, :, position], cache[1, slot, :, position] = k[token], v[token]
    rows = []
    for token, (slot, position) in enumerate(zip(slots.tolist(), positions.tolist(), strict=True)):
        keys, values = cache[:, slot, :, : position + 1].repeat_interleave(
            query_heads // kv_heads, dim=1
        )
        weights = torch.softmax(torch.einsum("hd,hld->hl", q[token], keys) * scale, dim=-1)
        rows.append(torch.einsum("hl,hld->hd", weights, values).reshape(-1))
    return torch.stack(rows)


@needs_compiler
@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize(
    ("size", "query_heads", "kv_heads"),
    [(16, 3, 1), (32, 4, 2), (64, 4, 2), (128, 8, 1), (80, 2, 2)],
)
def test_attention_over_slots(numbers, size, query_heads, kv_heads, has_norms):
    """Slots of different lengths; slot 2 has three new tokens, which attend to each other; the last two do not
    attend.
    """
    length = 70
    cache = torch.randn(1, 2, 5, kv_heads, length, size, generator=numbers)
    slots = torch.tensor([0, 1, 2, 3, 2, 2])
    positions = torch.tensor([0, 69, 33, 15, 31, 32])
    cos, sin = torch.randn(2, length, size, generator=numbers)
    heads = torch.randn(6, (query_heads + 2 * kv_heads) * size, generator=numbers)
    q_norm, k_norm = (
        (Norm(torch.rand(size, generator=numbers)) for _ in range(2)) if has_norms else (None, None)
    )
    expected_cache = cache[0].clone()
    expected = compute_attention(
        heads, slots, positions, cos, sin, expected_cache, query_heads, q_norm, k_norm, 0.3
    )
    step = DecodeStep(positions, slots, cos, sin, cache, query_heads)
    step.rows = 4
    assert DecodeKernels.can_attend(head_dim=size, query_heads=query_heads, kv_heads=kv_heads)
    result = fused_decode.load_decode_kernels().attend_slots(
        step, heads, cache[0], q_norm, k_norm, 0.3
    )
    torch.testing.assert_close(result, expected[:4], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(cache[0], expected_cache, rtol=1e-6, atol=1e-6)


@needs_compiler
def test_the_number_of_threads_changes_no_bit(numbers, monkeypatch):
    # Enough work for threads to run at the same time, because each needs its own scores.
    cache = torch.randn(1, 2, 64, 2, 400, 64, generator=numbers)
    slots, positions = torch.arange(64), torch.arange(336, 400)
    cos, sin = torch.randn(2, 400, 64, generator=numbers)
    heads = torch.randn(64, 8 * 64, generator=numbers)
    results = []
    for threads in (1, 2, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        step = DecodeStep(positions, slots, cos, sin, cache, 4)
        assert step.fields.threads == threads
        results.append(
            fused_decode.load_decode_kernels().attend_slots(
                step, heads, cache[0], None, None, 0.125
            )
        )
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_heads_that_do_not_fit_are_left_to_torch():
    assert not DecodeKernels.can_attend(head_dim=24, query_heads=2, kv_heads=2)
    assert not DecodeKernels.can_attend(head_dim=272, query_heads=2, kv_heads=2)
    assert not DecodeKernels.can_attend(head_dim=64, query_heads=18, kv_heads=2)


@needs_compiler
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0, 3.0])
@pytest.mark.parametrize("size", [2, 16, 61, 2048])
def test_tokens_equal_those_of_torch(numbers, size, temperature):
    logits = 3 * torch.randn(400, size, generator=numbers)
    drawn = torch.rand(400, generator=numbers, dtype=torch.float64)
    (tokens, logprobs), expected = (
        fused_decode.load_decode_kernels().draw_tokens(logits, drawn, temperature),
        draw_tokens(logits, drawn, temperature),
    )
    assert torch.equal(tokens, expected[0])
    torch.testing.assert_close(logprobs, expected[1], rtol=1e-6, atol=2e-6)


@needs_compiler
def test_edges_of_drawing():
    compiled, highest = fused_decode.load_decode_kernels(), np.nextafter(1.0, 0.0)
    far = torch.full((1, 40), -200.0)  # low enough for a probability of 0 in float32
    far[0, 7] = 0.0
    for value in (0.0, 0.5, highest):
        assert (
            compiled.draw_tokens(far, torch.tensor([value], dtype=torch.float64), 1.0)[0].item()
            == 7
        )
    ties = torch.zeros(1, 40)
    assert compiled.draw_tokens(ties, torch.zeros(1, dtype=torch.float64), 0.0)[0].item() == 0
    assert (
        compiled.draw_tokens(ties, torch.tensor([highest], dtype=torch.float64), 1.0)[0].item()
        == 39
    )
    half, lost = torch.tensor([0.5], dtype=torch.float64), torch.full((1, 40), torch.nan)
    # a diverged model is detected elsewhere; here it must not crash
    for temperature in (0.0, 1.0):
        token, logprob = compiled.draw_tokens(lost, half, temperature)
        assert 0 <= token.item() < 40 and not np.isfinite(logprob.item())


@needs_compiler
def test_threads_draw_the_same_tokens(numbers, monkeypatch):
    logits, drawn = (
        torch.randn(40, 2048, generator=numbers),
        torch.rand(40, generator=numbers, dtype=torch.float64),
    )
    alone = fused_decode.load_decode_kernels().draw_tokens(logits, drawn, 0.7)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    together = fused_decode.load_decode_kernels().draw_tokens(logits, drawn, 0.7)
    assert torch.equal(alone[0], together[0]) and torch.equal(alone[1], together[1])
    assert torch.equal(alone[0], draw_tokens(logits, drawn, 0.7)[0])


@pytest.fixture(params=["tiles", "vectors"])
def products(request, monkeypatch):
    """Use products with packed weights by tiles, in plain C if the processor has none, or by vectors."""
    code = tile_code() if request.param == "tiles" else build.load_library()
    if code is None or not code.vectors_ready():
        pytest.skip("needs a C compiler, and a processor with vectors of 8 numbers")
    monkeypatch.setattr(build, "load_library", lambda: code)
    monkeypatch.setattr(
        packed_gemm,
        "load_int8_gemm",
        lambda: PackedProducts(code, "int8") if request.param == "tiles" else None,
    )
    assert packed_gemm.load_packed_vectors() is not None


def play_sequences(**options):
    """Play ten sequences with observations, using a model with biases everywhere; return turns and log-probs."""
    engine = Engine(
        make_model("llama", head_dim=32, attention_bias=True, mlp_bias=True),
        eos_ids=range(1, VOCAB, 9),
        pad_id=0,
        max_length=128,
    )
    sequences = [
        ScriptedSequence([3 + i, 5, 9], i, [[7, 8, 3 + i], [4]], room=40) for i in range(10)
    ]
    engine.run_sequences(sequences, SamplingSettings(max_completion_tokens=40, slots=10, **options))
    return [sequence.turns for sequence in sequences], [sequence.logprobs for sequence in sequences]


@pytest.mark.parametrize("min_rows", [1, 100])  # rows per thread, or columns of each product
def test_neither_threads_nor_their_division_of_work_change_a_bit(products, monkeypatch, min_rows):
    expected = play_sequences()
    assert any(len(turns) > 1 for turns in expected[0])
    monkeypatch.setattr(fused_decode, "MIN_ROWS_PER_THREAD", min_rows)
    for threads in (2, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert play_sequences() == expected


def test_one_call_takes_several_tokens_of_a_turn(products, monkeypatch):
    """The result equals that of one call per token, which other ways of sampling need."""
    calls, sample_steps = [], Decoder.sample_steps

    def sample_and_count(self, states, count, is_end, *rest):
        acted_before = states.acted[:count].copy()
        sample_steps(self, states, count, is_end, *rest)
        has_ended = is_end[states.tokens[:count]] | (
            states.positions[:count] + 1 >= states.limits[:count]
        )
        calls.append((states.acted[:count] - acted_before, has_ended))

    monkeypatch.setattr(Decoder, "sample_steps", sample_and_count)
    turns, logprobs = play_sequences()
    assert all((taken[~has_ended] == 8).all() for taken, has_ended in calls)
    ended = np.concatenate([taken[has_ended] for taken, has_ended in calls])
    assert set(ended.tolist()) >= {1, 3, 8}  # turns end anywhere within a call
    monkeypatch.setattr(Decoder, "can_sample_steps", lambda self, sampling: False)
    count = len(calls)
    assert play_sequences() == (turns, logprobs)
    assert len(calls) == count


def record_drafts(monkeypatch):
    """Let every model draft; return the list in which each run's table of drafts appears."""
    monkeypatch.setattr(fused_decode, "MAX_CACHED_BYTES", 0)
    tables, sample_steps = [], Decoder.sample_steps

    def sample_and_record(self, states, count, is_end, steps, drafts=None):
        if drafts is not None and not any(drafts is table for table in tables):
            tables.append(drafts)
        sample_steps(self, states, count, is_end, steps, drafts)

    monkeypatch.setattr(Decoder, "sample_steps", sample_and_record)
    return tables


def play_repetitions(slots, temperature=1.0, **options):
    """Play three sequences six times each; return turns and log-probs."""
    engine = Engine(make_model("llama", head_dim=32), eos_ids=(11, 40), pad_id=0, max_length=128)
    sequences = [
        ScriptedSequence([3 + i % 3, 5, 9], i % 3, [[7, 8, 3], [4]], room=90) for i in range(18)
    ]
    sampling = SamplingSettings(max_completion_tokens=90, slots=slots, temperature=temperature)
    engine.run_sequences(sequences, sampling, **options)
    return [(sequence.turns, sequence.logprobs) for sequence in sequences]


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_change_no_token(products, monkeypatch, threads, temperature):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    expected = play_repetitions(18, temperature)
    tables = record_drafts(monkeypatch)
    for slots in (1, 3, 18):
        assert play_repetitions(slots, temperature) == expected
    assert min(table.counts[1] for table in tables[:2]) > 100


def test_drafts_follow_what_was_sampled_before(monkeypatch):
    tables = record_drafts(monkeypatch)
    played = play_repetitions(1)
    num_tokens = sum(len(ids) for turns, _ in played for ids, _ in turns)
    drafted, taken = tables[0].counts
    assert taken > num_tokens / 3  # a third of all tokens took no step of their own
    assert taken > 0.8 * drafted


def test_drafts_keep_limits_and_seeds_of_adapters(monkeypatch):
    """Sequences with adapters of their own draw the same tokens; a limit cuts a draft."""
    model = make_model("llama", head_dim=32)
    names = [f"model.layers.{layer}.mlp.down_proj" for layer in range(2)]
    numbers = torch.Generator().manual_seed(0)
    adapters = [
        {
            name: LowRank(
                torch.randn(2, 64, generator=numbers), torch.randn(32, 2, generator=numbers), 0.1
            )
            for name in names
        }
        for _ in range(2)
    ]

    def play():
        engine = Engine(model, eos_ids=(), pad_id=0, max_length=40)
        sequences = [ScriptedSequence([3, 5, 9 + i % 2], i % 2) for i in range(8)]
        for i, sequence in enumerate(sequences):
            sequence.adapter = i % 3 - 1
        engine.run_sequences(
            sequences, SamplingSettings(max_completion_tokens=30 + 7, slots=2), adapters
        )
        return [(sequence.turns, sequence.logprobs) for sequence in sequences]

    expected = play()
    assert {len(turns[0][0]) for turns, _ in expected} == {37}
    tables = record_drafts(monkeypatch)
    assert play() == expected
    assert tables[0].counts[1] > 0


def test_a_common_beginning_is_prefilled_with_each_adapter(monkeypatch):
    """At temperature 0.7; keys and values of the beginning are those of the prompt's adapter."""
    model = make_model("llama", head_dim=32)
    numbers = torch.Generator().manual_seed(1)
    adapters = [
        {
            f"model.layers.{layer}.mlp.down_proj": LowRank(
                torch.randn(2, 64, generator=numbers), torch.randn(32, 2, generator=numbers), 0.1
            )
            for layer in range(2)
        }
        for _ in range(2)
    ]

    def play():
        engine = Engine(model, eos_ids=(), pad_id=0, max_length=40)
        sequences = [ScriptedSequence([*range(3, 23), 9 + i], i) for i in range(9)]
        for i, sequence in enumerate(sequences):
            sequence.adapter = i % 3 - 1
        sampling = SamplingSettings(max_completion_tokens=8, temperature=0.7)
        engine.run_sequences(sequences, sampling, adapters)
        return sequences

    whole = play()
    monkeypatch.setattr("rl_core.inference.engine._MIN_SAVED_PRODUCTS", 0)
    for shared, expected in zip(play(), whole, strict=True):
        assert shared.turns == expected.turns
        assert shared.logprobs == pytest.approx(expected.logprobs, abs=2e-5)
