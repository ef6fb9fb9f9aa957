"""Recorded steps: when they are recorded, what discards a recording, and fallbacks; on a GPU, the same tokens with
and without recordings.

Rollouts over recordings are tested in test_engine ("recorded").
"""

import logging

import numpy as np
import pytest
import torch
from helpers.scripted_sequences import ScriptedSequence, make_model

from rl_core.capabilities import Decision, decoding
from rl_core.inference import cuda_graphs, decoder
from rl_core.inference.cuda_graphs import StepGraphs, round_up_length, round_up_rows
from rl_core.inference.engine import create_rollout_backend
from rl_core.inference.recorded_steps import HostStep, build_drawing_rows
from rl_core.settings import SamplingSettings


class Recorder:
    """A recorder of doubling that counts calls."""

    def __init__(self):
        self.recorded = self.replayed = self.computed = 0

    def compute(self, x):
        self.computed += 1
        return 2 * x

    def __call__(self, compute, inputs):
        self.recorded += 1

        def replay():
            self.replayed += 1
            return compute(inputs)

        return replay

    def pop_counts(self):
        counts = self.recorded, self.replayed, self.computed - self.replayed
        self.recorded = self.replayed = self.computed = 0
        return counts


def run_steps(graphs, recorder, times, size=1):
    for value in range(times):
        assert graphs.run_step(size, recorder.compute, torch.tensor([float(value)])) == 2 * value


@pytest.mark.parametrize(
    ("counts", "rounded"),
    [
        ((1, 2, 3, 4, 5, 8, 9, 17, 64), (1, 2, 4, 4, 8, 8, 16, 24, 64)),
        ((65, 81, 128, 129, 161, 256, 257), (80, 96, 128, 160, 192, 256, 320)),
    ],
)
def test_numbers_of_rows(counts, rounded):
    assert tuple(round_up_rows(count) for count in counts) == rounded


def test_lengths():
    lengths = (1, 128, 129, 1000, 1024, 1025, 1300, 2048, 2049, 4097, 16384)
    expected = [128, 128, 256, 1024, 1024, 1280, 1536, 2048, 2560, 5120, 16384]
    assert [round_up_length(length) for length in lengths] == expected


@pytest.mark.parametrize(("limit", "longest"), [(0.97, 4096), (0.97, 16384)])
def test_most_steps_of_a_long_run_are_replayed(limit, longest):
    """256 slots, 1,024 sequences of very different lengths: the sizes of each step, as the engine rounds them."""
    recorder, rng = Recorder(), np.random.default_rng(0)
    graphs = StepGraphs(recorder)
    waiting = np.minimum(rng.lognormal(np.log(longest / 4), 0.8, 1024), longest - 200).astype(int)
    ends, lengths = waiting[:256] + 200, np.full(256, 200)
    waiting, inputs = list(waiting[256:]), torch.zeros(1)
    while len(ends):
        graphs.run_step(
            (round_up_rows(len(ends)), round_up_length(int(lengths.max()) + 1)),
            recorder.compute,
            inputs,
        )
        lengths += 1
        for slot in np.flatnonzero(lengths >= ends)[: len(waiting)]:
            ends[slot], lengths[slot] = waiting.pop() + 200, 200
        active = lengths < ends
        ends, lengths = ends[active], lengths[active]
    assert graphs.num_steps > 5000
    assert graphs.num_replays / graphs.num_steps > limit


def test_repeated_sizes_are_recorded():
    recorder = Recorder()
    graphs = StepGraphs(recorder, min_steps=3)
    run_steps(graphs, recorder, 2)
    assert recorder.pop_counts() == (0, 0, 2)
    run_steps(graphs, recorder, 5)
    assert recorder.pop_counts() == (1, 5, 0)
    run_steps(graphs, recorder, 3, size=2)
    assert recorder.pop_counts() == (1, 1, 2)
    run_steps(graphs, recorder, 1)
    assert recorder.pop_counts() == (0, 1, 0)


def test_other_memory_discards_recordings():
    recorder = Recorder()
    graphs = StepGraphs(recorder, min_steps=1)
    graphs.bind_memory((1, 2))
    run_steps(graphs, recorder, 2)
    graphs.bind_memory((1, 2))
    run_steps(graphs, recorder, 2)
    assert recorder.pop_counts() == (1, 4, 0)
    graphs.bind_memory((1, 3))
    run_steps(graphs, recorder, 2)
    assert recorder.pop_counts() == (1, 2, 0)


def test_the_least_recently_used_recording_makes_room(monkeypatch):
    monkeypatch.setattr(cuda_graphs, "_MAX_RECORDINGS", 2)
    recorder = Recorder()
    graphs = StepGraphs(recorder, min_steps=2)
    for size in (0, 1):
        run_steps(graphs, recorder, 2, size)
    run_steps(graphs, recorder, 1, 0)
    assert recorder.pop_counts() == (2, 3, 2)
    run_steps(graphs, recorder, 2, 2)  # replaces 1, which was used before 0
    run_steps(graphs, recorder, 1, 0)
    assert recorder.pop_counts() == (1, 2, 1)
    run_steps(graphs, recorder, 1, 1)  # has to return as often as a new size
    assert recorder.pop_counts() == (0, 0, 1)
    run_steps(graphs, recorder, 1, 1)
    assert recorder.pop_counts() == (1, 1, 0)
    assert (graphs.num_steps, graphs.num_replays) == (10, 6)


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("CUDA error: out of memory")],
)
def test_a_lack_of_memory_is_not_a_step_that_cannot_be_recorded(error):
    """The caller halves its rows; the recordings' memory is free by then, and later steps are recorded."""
    recorder, refuse = Recorder(), [False]

    def record(compute, inputs):
        if refuse[0]:
            raise error
        return recorder(compute, inputs)

    graphs = StepGraphs(record, min_steps=1)
    run_steps(graphs, recorder, 1, 1)
    refuse[0] = True
    with pytest.raises(RuntimeError, match="out of memory"):
        run_steps(graphs, recorder, 1, 2)
    assert not graphs._recorded
    refuse[0] = False
    run_steps(graphs, recorder, 1, 2)
    assert recorder.pop_counts() == (2, 2, 0)


def test_steps_that_cannot_be_recorded_are_computed(caplog):
    recorder = Recorder()

    def refuse(compute, inputs):
        raise RuntimeError("operation not permitted when stream is capturing")

    graphs = StepGraphs(refuse, min_steps=2)
    with caplog.at_level(logging.WARNING):
        run_steps(graphs, recorder, 5)
        run_steps(graphs, recorder, 5, size=2)
    assert recorder.pop_counts() == (0, 0, 10)
    assert [record.message.count("not permitted") for record in caplog.records] == [1]


def test_recordings_follow_the_weights_and_outlive_a_run(monkeypatch):
    """In-place steps change what is replayed; a larger cache discards the recordings."""
    recorder = Recorder()
    monkeypatch.setattr(
        decoding,
        "check_packed_weights",
        lambda *_, **__: Decision("packed weights", False, "as on a GPU"),
    )
    monkeypatch.setattr(
        decoder, "create_step_graphs", lambda device: StepGraphs(recorder, min_steps=4)
    )
    model = make_model("llama")
    engine = create_rollout_backend(model, eos_ids=(), pad_id=0, max_length=128)

    def play(slots=4, room=10):
        sequences = [
            ScriptedSequence([5, 6, 7 + index], index, room=room) for index in range(slots)
        ]
        engine.run_sequences(sequences, SamplingSettings(max_completion_tokens=room, slots=slots))
        return [sequence.completion_ids for sequence in sequences]

    first = play()
    assert recorder.recorded == 1 and recorder.replayed == 7
    assert play() == first and recorder.recorded == 1 and recorder.replayed == 17
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(
                0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
            )
    assert play() != first and recorder.recorded == 1
    play(slots=8)
    assert recorder.recorded == 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_recordings_change_nothing_on_a_gpu(dtype, monkeypatch):
    model = make_model("qwen3", head_dim=64, hidden_size=128).to("cuda", dtype).eval()

    def play():
        engine = create_rollout_backend(model, eos_ids=(), pad_id=0, max_length=200)
        sequences = [
            ScriptedSequence([5, 6, 7 + index], index, room=150 - 9 * index) for index in range(12)
        ]
        engine.run_sequences(
            sequences, SamplingSettings(max_completion_tokens=150, slots=12, temperature=0)
        )
        assert engine._decoder.graphs._recorded and not engine._decoder.graphs._refused
        return [sequence.completion_ids for sequence in sequences], [
            sequence.logprobs for sequence in sequences
        ]

    recorded, logprobs = play()
    monkeypatch.setattr(
        cuda_graphs, "_GraphRecorder", lambda: lambda compute, inputs: lambda: compute(inputs)
    )
    launched, expected = play()
    assert recorded == launched
    for recorded_logprobs, launched_logprobs in zip(logprobs, expected, strict=True):
        assert recorded_logprobs == pytest.approx(launched_logprobs, abs=1e-5)


def test_padding_rows_write_only_to_the_padding_slot(monkeypatch):
    """Slots after the active ones may belong to waiting sequences."""
    monkeypatch.setattr(
        decoding,
        "check_packed_weights",
        lambda *_, **__: Decision("packed weights", False, "as on a GPU"),
    )
    monkeypatch.setattr(
        decoder, "create_step_graphs", lambda device: StepGraphs(Recorder(), min_steps=2)
    )
    step_decoder = decoder.Decoder(make_model("llama"))
    step_decoder.reserve_cache(6, 20)
    assert step_decoder.slots == 6 and step_decoder._cache.shape[2] == 7
    with torch.inference_mode():
        step_decoder._cache.normal_(generator=torch.Generator().manual_seed(0))
    previous = step_decoder._cache.clone()
    for _ in range(3):
        both = step_decoder.sample_with_graphs(
            HostStep(
                np.array([5, 6, 7]),
                np.array([3, 0, 9]),
                np.array([0.1, 0.5, 0.9]),
                build_drawing_rows([SamplingSettings()]),
            )
        )
        assert both.shape == (2, 3) and (both[1] < 0).all()
    changed = (step_decoder._cache != previous).any(-1)  # [layers, 2, slots, K, length]
    positions = {(slot, position) for _, _, slot, _, position in torch.nonzero(changed).tolist()}
    assert positions == {(0, 3), (1, 0), (2, 9), (6, 0)}
