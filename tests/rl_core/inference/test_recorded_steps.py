"""Steps of rounded sizes: draws of rows that differ in their settings, host reads, and every kind of step replayed.

The device is a pretended one (`helpers.pretended_device`); tests marked `gpu` need a real one.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from helpers.pretended_device import use_pretended_device
from helpers.scripted_sequences import VOCAB, ScriptedSequence, make_model

from rl_core.capabilities import Decision, decoding
from rl_core.inference import sampling
from rl_core.inference.continuous_batching import ContinuousBatcher
from rl_core.inference.engine import create_rollout_backend
from rl_core.inference.recorded_steps import MAX_TOP, HostStep, build_drawing_rows
from rl_core.inference.sampling import RowDrawing
from rl_core.inference.serving_requests import AnswerSequence, ServedRequest
from rl_core.settings import SamplingSettings

SETTINGS = [
    SamplingSettings(),
    SamplingSettings(temperature=0),
    SamplingSettings(temperature=0, top_k=3),
    SamplingSettings(temperature=0.7),
    SamplingSettings(temperature=2.0, top_k=5),
    SamplingSettings(top_p=0.8),
    SamplingSettings(min_p=0.1),
    SamplingSettings(temperature=0.9, top_k=20, top_p=0.9, min_p=0.02),
]


def build_drawing(settings, *, is_restricted=True):
    temperature, top_k, top_p, log_min_p, _ = torch.from_numpy(build_drawing_rows(settings))
    return RowDrawing(temperature.float(), top_k.long(), top_p, log_min_p.float(), is_restricted)


@pytest.mark.parametrize("textless", [None, [2, 5]])
def test_rows_are_drawn_as_alone(textless):
    """Each row gets the token and the log-probability of `draw_tokens` with its settings."""
    generator = torch.Generator().manual_seed(0)
    settings = SETTINGS * 40
    logits_BV = 2 * torch.randn(len(settings), 64, generator=generator)
    uniforms_B = torch.rand(len(settings), generator=generator, dtype=torch.float64)
    excluded = torch.tensor(textless) if textless is not None else None
    tokens_B, logprobs_B = sampling.draw_row_tokens(
        logits_BV, uniforms_B, build_drawing(settings), excluded
    )
    for index, item in enumerate(settings):
        token, logprob = sampling.draw_tokens(
            logits_BV[index : index + 1],
            uniforms_B[index : index + 1],
            item.temperature,
            item if item.is_restricted else None,
            excluded,
        )
        assert tokens_B[index] == token and logprobs_B[index] == logprob, item
    assert len(set(tokens_B.tolist())) > 20


def test_rows_without_restrictions_need_no_sort(monkeypatch):
    monkeypatch.setattr(sampling, "_filter_rows", None)
    drawing = build_drawing(SETTINGS[:2], is_restricted=False)
    tokens_B, _ = sampling.draw_row_tokens(
        torch.tensor([[0.0, 1.0, 2.0]] * 2), torch.tensor([0.0, 0.0], dtype=torch.float64), drawing
    )
    assert tokens_B.tolist() == [0, 2]


@pytest.mark.parametrize("vocab_size", [5, 1024, 3000])
def test_blocks_draw_the_tokens_of_one_cumulative_sum(vocab_size):
    generator = torch.Generator().manual_seed(vocab_size)
    log_p_BV = torch.log_softmax(3 * torch.randn(400, vocab_size, generator=generator), -1)
    log_p_BV[::2, ::3] = -math.inf  # tokens that must never be drawn
    uniforms_B = torch.rand(400, generator=generator, dtype=torch.float64)
    uniforms_B[:4] = torch.tensor([0.0, 0.0, 1 - 2**-53, 1 - 2**-53], dtype=torch.float64)
    expected_B1 = sampling._invert_cumulative(log_p_BV, uniforms_B)
    tokens_B1 = sampling._invert_cumulative_by_blocks(log_p_BV, uniforms_B)
    assert torch.equal(tokens_B1, expected_B1)
    assert torch.isfinite(log_p_BV.gather(1, tokens_B1)).all()


def test_a_draw_between_two_blocks_takes_a_possible_token():
    """Levels at the very end of a block whose last tokens are impossible."""
    log_p_BV = torch.full((3, 2048), -math.inf)
    log_p_BV[:, [10, 1030]] = math.log(0.5)
    uniforms_B = torch.tensor(
        [np.nextafter(0.5, 0), 0.5, np.nextafter(0.5, 1)], dtype=torch.float64
    )
    tokens_B1 = sampling._invert_cumulative_by_blocks(log_p_BV, uniforms_B)
    assert tokens_B1.squeeze(1).tolist() == [10, 1030, 1030]


def test_a_packed_step_is_unpacked():
    """Padding rows and tokens go to the padding slot; rounded sizes hold every number."""
    from rl_core.inference.decoder_layers import HostAppendedTokens
    from rl_core.inference.recorded_steps import DeviceStep

    lengths = np.array([4, 9, 2])
    appended = HostAppendedTokens.from_slots({2: [7, 8, 9], 0: [5]}, lengths)
    assert appended.real_tokens.tolist() == [7, 8, 9, 5]
    assert appended.real_positions.tolist() == [2, 3, 4, 4]
    step = HostStep(
        np.array([1, 2, 3]),
        np.array([5, 9, 5]),
        np.array([0.1, 0.2, 0.3]),
        build_drawing_rows(SETTINGS[:3]),
        is_restricted=True,
        appended=appended,
    )
    shape = step.round_shape(slots=16, max_length=200)
    assert (shape.rows, shape.length, shape.appended_rows, shape.appended_width) == (4, 128, 2, 8)
    packed = DeviceStep.unpack(torch.from_numpy(step.pack(shape, padding_slot=16)), shape)
    assert packed.slots_R.tolist() == [0, 1, 2, 16]
    assert packed.tokens_N[:4].tolist() == [1, 2, 3, 0]
    assert packed.positions_N[:4].tolist() == [5, 9, 5, 0]
    assert packed.drawing.temperature_B.tolist() == [1.0, 0.0, 0.0, 1.0]
    extra = packed.appended
    assert extra is not None and extra.slots_X.tolist() == [2, 0]
    inside = extra.slots_E != 16
    assert extra.slots_E[inside].tolist() == [2, 2, 2, 0]
    assert packed.tokens_N[4:][inside].tolist() == [7, 8, 9, 5]
    assert packed.positions_N[4:][inside].tolist() == [2, 3, 4, 4]
    assert extra.rows_XW.tolist() == [list(range(4, 12)), list(range(12, 20))]


@pytest.fixture
def in_place(monkeypatch):
    """Decode on a CPU as on a GPU, without packed weights."""
    refuse = lambda model, device=None, **_: Decision("packed weights", False, "as on a GPU", "")  # noqa: E731
    monkeypatch.setattr(decoding, "check_packed_weights", refuse)


def play_episodes(model, **options):
    """Play 6 episodes of up to 3 turns; return their tokens and log-probabilities."""
    engine = create_rollout_backend(model, eos_ids=range(1, VOCAB, 7), pad_id=0, max_length=96)
    sequences = [
        ScriptedSequence(
            [5, 6, 7 + index], index, [[9, 10, 11][: 1 + index % 3], [12] * (2 + index)], room=60
        )
        for index in range(6)
    ]
    engine.run_sequences(sequences, SamplingSettings(max_completion_tokens=60, slots=4, **options))
    tokens = [sequence.completion_ids for sequence in sequences]
    return tokens, [sequence.logprobs for sequence in sequences], engine._decoder


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.7}, {"top_p": 0.9, "top_k": 30}, {"repetition_penalty": 1.3}]
)
def test_every_step_of_an_episode_reads_once(options, in_place):
    """Observations and penalties decode in recorded steps too: one upload and one read each, none within them."""
    model = make_model("qwen3", head_dim=16).eval()
    expected, logprobs, _ = play_episodes(model, **options)
    with use_pretended_device() as counts:
        tokens, device_logprobs, decoder = play_episodes(model.to("cuda"), **options)
        graphs = decoder.graphs
        assert tokens == expected
        for ours, theirs in zip(device_logprobs, logprobs, strict=True):
            assert ours == pytest.approx(theirs, abs=1e-5)
        assert not counts.captured and not counts.mixed
        assert graphs.num_steps > 20 and counts.replays == graphs.num_replays > 0
        reads = [name for name in counts.reads if "sample_with_graphs" in name]
        assert sum(counts.reads[name] for name in reads) == graphs.num_steps
        assert not [name for name in counts.blocking_uploads if "sample_with_graphs" in name]


def build_requests():
    """Build requests of every kind, some with the most likely tokens."""
    return [
        ServedRequest(
            AnswerSequence([5, 6, 7 + index], index),
            SamplingSettings(
                max_completion_tokens=12,
                temperature=item.temperature,
                top_k=item.top_k,
                top_p=item.top_p,
                min_p=item.min_p,
            ),
            top=3 if index % 2 else 0,
        )
        for index, item in enumerate(SETTINGS)
    ]


def answer_requests(model, requests):
    """Answer requests together; return the batcher."""
    batcher = ContinuousBatcher(model, slots=8, context=64, eos_ids=[1], pad_id=0)
    batcher.start_requests(requests)
    while not batcher.is_empty:
        batcher.step()
    return batcher


def test_a_mixture_of_requests_is_one_step(in_place):
    model = make_model("llama").eval()
    expected = build_requests()
    answer_requests(model, expected)
    requests = build_requests()
    with use_pretended_device() as counts:
        graphs = answer_requests(model.to("cuda"), requests)._decoder.graphs
        assert not counts.captured and not counts.mixed
        reads = sum(n for name, n in counts.reads.items() if "sample_with_graphs" in name)
        assert reads == graphs.num_steps <= 12
    for ours, theirs in zip(requests, expected, strict=True):
        assert ours.sequence.tokens == theirs.sequence.tokens
        assert ours.sequence.logprobs == pytest.approx(theirs.sequence.logprobs, abs=1e-5)
        if ours.top:
            assert np.array_equal(ours.top_tokens.ids_TK, theirs.top_tokens.ids_TK)
            np.testing.assert_allclose(
                ours.top_tokens.logprobs_TK, theirs.top_tokens.logprobs_TK, atol=1e-5
            )
            np.testing.assert_allclose(ours.top_tokens.rest_T, theirs.top_tokens.rest_T, atol=1e-5)


def test_more_top_tokens_than_a_recording_returns(in_place):
    model = make_model("llama").eval()
    (request,) = build_requests()[:1]
    request.top = MAX_TOP + 2
    with use_pretended_device():
        answer_requests(model.to("cuda"), [request])
    assert request.top_tokens.ids_TK.shape == (12, MAX_TOP + 2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.7}, {"top_p": 0.9, "top_k": 30}, {"repetition_penalty": 1.3}]
)
def test_every_step_of_an_episode_is_recorded_on_a_gpu(options, in_place):
    model = make_model("qwen3", head_dim=64, hidden_size=128).eval()
    expected, logprobs, _ = play_episodes(model, **options)
    tokens, device_logprobs, decoder = play_episodes(model.to("cuda"), **options)
    assert decoder.graphs.num_replays > 0 and not decoder.graphs._refused
    assert tokens == expected
    for ours, theirs in zip(device_logprobs, logprobs, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_failed_recording_leaves_the_stream_on_a_gpu():
    from rl_core.inference.cuda_graphs import create_step_graphs

    graphs = create_step_graphs(torch.device("cuda"))
    stream = torch.cuda.current_stream()

    def read(inputs):
        return inputs * float(inputs.sum()) if torch.cuda.is_current_stream_capturing() else inputs

    inputs = torch.ones(4, device="cuda")
    for _ in range(20):
        assert torch.equal(graphs.run_step("reads", read, inputs), inputs)
        assert torch.cuda.current_stream() == stream
    for _ in range(20):
        assert torch.equal(graphs.run_step("doubles", lambda x: 2 * x, inputs), 2 * inputs)
    assert graphs._refused == {"reads"} and graphs.num_replays == 13
