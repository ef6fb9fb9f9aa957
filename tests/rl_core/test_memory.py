"""Lack of memory: recognised wherever it comes from; batches halved with the same numbers; one row: a typed error."""

import copy
import dataclasses
import errno
import logging
import math
import resource
from concurrent.futures import Future

import numpy as np
import pytest
import torch
from helpers.letters import make_trainer
from helpers.scripted_sequences import VOCAB, ScriptedSequence, make_model
from helpers.tiny import PAD, nano
from transformers import LlamaForSequenceClassification

from rl_core import probe, timing
from rl_core.cpu.allocator import allocate_huge_pages
from rl_core.data.pairs import PairSide, PreferencePair
from rl_core.data.tokenizer import train_tokenizer
from rl_core.environments.step_pool import PendingTurn
from rl_core.errors import OutOfMemory
from rl_core.inference import decoder, teacher
from rl_core.inference.engine import Engine
from rl_core.inference.teacher import LocalTeacher
from rl_core.inference.transformers_backend import TransformersBackend
from rl_core.models import heads, logprobs
from rl_core.models import hidden_states as states_module
from rl_core.models.hidden_states import compute_turn_embeddings
from rl_core.out_of_memory import MemoryFit, is_out_of_memory
from rl_core.rollouts.batching import TrainRow
from rl_core.settings import PreferenceSettings, RewardModelSettings, SamplingSettings, SFTSettings
from rl_core.thoughts import baseline, episodes
from rl_core.tracking import MemoryTracker
from rl_core.trainers import preference
from rl_core.trainers.policy_gradient import rollout_buffer
from rl_core.trainers.policy_gradient.samples import TrainingSample
from rl_core.trainers.preference import PreferenceTrainer, compute_reference_logprobs
from rl_core.trainers.reward_model import RewardModelTrainer
from rl_core.trainers.sft import SFTTrainer
from rl_core.training.loop import run_loop

CPU = RuntimeError(
    "[enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"
)
ERRORS = [
    torch.OutOfMemoryError("CUDA out of memory"),
    MemoryError(),
    CPU,
    OSError(errno.ENOMEM, "mmap"),
]


@pytest.mark.parametrize(
    "allocate",
    [
        lambda n: torch.empty(n, dtype=torch.uint8),
        lambda n: np.zeros(n, np.uint8),
        allocate_huge_pages,
    ],
)
def test_a_refused_allocation_is_recognised(allocate):
    """Real ones: the address space is limited to what is in use and 256 MiB."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, before[1]))
    try:
        with pytest.raises((RuntimeError, MemoryError, OSError)) as refused:
            allocate(2**30)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert is_out_of_memory(refused.value)


def test_other_errors_are_none():
    others = [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        OSError(errno.ENOSPC, "full"),
        ValueError("memory"),
    ]
    assert not any(map(is_out_of_memory, others))
    with pytest.raises(RuntimeError, match="mat1"):
        MemoryFit("x").compute_batches([[1, 2]], lambda part: (_ for _ in ()).throw(others[0]))


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_halves_in_order_and_remembers_what_fits(caplog, error):
    tried = []

    def compute(part):
        tried.append(len(part))
        if len(part) > 3:
            raise error
        return sum(part)

    fit = MemoryFit("sums")
    with caplog.at_level(logging.WARNING), timing.collect_seconds() as counts:
        found = fit.compute_batches([list(range(8)), [8], list(range(10, 16))], compute)
    # 8 fails, 4 fails, then 2 at a time; 6 is beyond 3, hence 3 at a time without a try
    assert tried == [8, 4, 2, 2, 2, 2, 1, 3, 3]
    assert found == [0 + 1, 2 + 3, 4 + 5, 6 + 7, 8, 10 + 11 + 12, 13 + 14 + 15]
    assert fit.limit == 3 and counts["out_of_memory"] == 2
    assert "out of memory: sums: cut to at most 3 rows" in caplog.text


def test_one_row_that_does_not_fit_names_what_it_was():
    def compute(part):
        raise CPU

    with pytest.raises(
        OutOfMemory,
        match=r"scores: one row of 7 tokens does not fit into memory \(RuntimeError.*; rest",
    ):
        MemoryFit("scores", "rest").compute_batches([[0, 1]], compute, lengths=[7, 5])


# ------------------------------------------------------------------------------------------------------------- rollouts

EOS = list(range(1, VOCAB, 5))
ROOM = 24


class Answered:
    """An environment's answer that is there at the second look."""

    def __init__(self, value):
        self.value, self.looks, self.future = value, 0, Future()
        self.future.set_result(None)

    def is_done(self):
        self.looks += 1
        return self.looks > 1

    def wait_until_done(self):
        """It is there."""

    def result(self):
        return self.value


class Waiting(ScriptedSequence):
    """Its environment takes its time."""

    def take_action(self, action_ids, logprobs, hit_limit):
        observation = super().take_action(action_ids, logprobs, hit_limit)
        return (
            observation
            if hit_limit
            else PendingTurn(Answered(observation), lambda result: result())
        )


def play(backend, kind=ScriptedSequence, slots=100, **options):
    generator = np.random.default_rng(0)
    sequences = []
    for index in range(4):
        prompt = generator.integers(3, VOCAB, 1 + 2 * index).tolist()
        for sample in range(3):
            observations = [
                generator.integers(3, VOCAB, generator.integers(1, 8)).tolist() for _ in range(3)
            ]
            sequences.append(kind(prompt, 1000 * index + sample, observations, room=ROOM))
    backend.run_sequences(
        sequences, SamplingSettings(max_completion_tokens=ROOM, slots=slots, **options)
    )
    return [(sequence.completion_ids, sequence.turns, sequence.logprobs) for sequence in sequences]


def engine():
    return Engine(make_model("llama", head_dim=16), eos_ids=EOS, pad_id=0, max_length=128)


def short_of_memory(monkeypatch, where, most, error):
    """Make the decoder run out of memory beyond `most` rows; returns the sizes that it was asked for."""
    plain = getattr(decoder.Decoder, where)
    asked = []

    def limited(self, *arguments, **named):
        size = {
            "_zeros": lambda: arguments[0][2],
            "step": lambda: arguments[2],
            "prefill": lambda: len(arguments[0]),
            "fill": lambda: len(arguments[0]),
            "sample_steps": lambda: arguments[1],
        }[where]()
        asked.append(size)
        if size > most:
            raise error
        return plain(self, *arguments, **named)

    monkeypatch.setattr(decoder.Decoder, where, limited)
    return asked


@pytest.mark.parametrize(
    ("kind", "rejoin"), [(ScriptedSequence, "together"), (Waiting, "together"), (Waiting, "ready")]
)
@pytest.mark.parametrize(
    ("where", "most"),
    [("_zeros", 4), ("step", 5), ("step", 1), ("sample_steps", 2), ("prefill", 1), ("fill", 1)],
)
def test_rollouts_in_fewer_slots_are_the_same(monkeypatch, caplog, where, most, rejoin, kind):
    expected = play(engine(), kind, rejoin=rejoin)
    asked = short_of_memory(monkeypatch, where, most, CPU)
    backend = engine()
    with caplog.at_level(logging.WARNING), timing.collect_seconds() as counts:
        found = play(backend, kind, rejoin=rejoin)
    # prompts are read in other batches: the same tokens, log-probs to rounding
    if where == "prefill":
        assert [row[0] for row in found] == [row[0] for row in expected]
        for row, other in zip(found, expected, strict=True):
            assert row[2] == pytest.approx(other[2], abs=1e-5)
    else:
        assert found == expected
    assert max(asked) > most and counts["out_of_memory"] >= 1 and "out of memory: " in caplog.text
    if where in ("_zeros", "step", "sample_steps"):
        asked.clear()
        assert play(backend, kind, rejoin=rejoin) == expected  # what fits is remembered
        assert not asked or max(asked) <= most


def test_a_step_with_observations_is_taken_up_again(monkeypatch):
    """The step fails only where observations are appended, so what they moved must have been left alone."""
    expected = play(engine())
    plain, failures = decoder.Decoder.step, []

    def limited(self, tokens, positions, count, length, appended=None, *rest, **named):
        if appended is not None and count > 2:
            failures.append(count)
            raise MemoryError
        return plain(self, tokens, positions, count, length, appended, *rest, **named)

    monkeypatch.setattr(decoder.Decoder, "step", limited)
    assert play(engine()) == expected and failures


@pytest.mark.parametrize("where", ["_zeros", "step", "sample_steps", "prefill"])
def test_a_sequence_that_does_not_fit_alone_is_a_typed_error(monkeypatch, where):
    short_of_memory(monkeypatch, where, 0, CPU)
    with pytest.raises(OutOfMemory, match="max_completion_tokens"):
        play(engine())


def test_weights_that_cannot_be_packed_are_a_typed_error(monkeypatch):
    backend = engine()

    def bind(self):
        raise MemoryError

    monkeypatch.setattr(decoder.Decoder, "bind_weights", bind)
    with pytest.raises(OutOfMemory, match="rollouts do not fit into memory"):
        play(backend)


def test_the_fallback_halves_its_batches_too(monkeypatch):
    model = make_model("llama", head_dim=16)
    backend = TransformersBackend(model, eos_ids=EOS, pad_id=0, max_length=128)
    expected = play(backend)
    plain, calls = type(model).forward, []

    def limited(self, *arguments, **named):
        calls.append(len(named["input_ids"]))
        if calls[-1] > 4 or (calls[-1] > 2 and len(calls) == 40):
            raise CPU
        return plain(self, *arguments, **named)

    monkeypatch.setattr(type(model), "forward", limited)
    found = play(backend)
    assert max(calls) == 12 and len(calls) > 40
    for (ids, turns, logs), (other_ids, other_turns, other_logs) in zip(
        found, expected, strict=True
    ):
        assert (ids, turns and [t[1] for t in turns]) == (other_ids, [t[1] for t in other_turns])
        assert logs == pytest.approx(other_logs, abs=1e-5)  # other shapes: to rounding


# -------------------------------------------------------------------------------------------------- evaluation, scoring


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["abc xyz"], 300)


def pairs_of(count):
    sides = [
        (
            PairSide([1, 2], [3] * (1 + i % 3), [True] * (1 + i % 3)),
            PairSide([1, 2], [4, 5], [True, True]),
        )
        for i in range(count)
    ]
    return [PreferencePair(*both) for both in sides]


def limited(function, rows_of, most, calls):
    """`function`, which cannot take more than `most` rows."""

    def call(*arguments, **named):
        calls.append(rows_of(*arguments))
        if calls[-1] > most:
            raise MemoryError
        return function(*arguments, **named)

    return call


def rows_of_batch(model, batch, *rest):
    return len(batch.input_ids_BS)


def scoring_of(name, tokenizer):
    """(computation, module and name of what it allocates in, rows of one call) of each place that scores."""
    rows = [[1, 2, 3 + i % 4, *[5] * (i % 5)] for i in range(8)]
    if name == "reference":
        model = nano()
        pairs = pairs_of(8)
        return (
            lambda: compute_reference_logprobs(model, pairs, pad_id=PAD, max_tokens=10**6),
            preference,
            "completion_logprobs",
        )
    if name == "reward model":
        model = nano(model_class=LlamaForSequenceClassification, num_labels=1)
        return lambda: heads.score_rows(model, rows), heads, "sequence_scores"
    if name == "answers":
        model = nano()
        spans = [episodes.TokenSpan(i, 1, len(row)) for i, row in enumerate(rows)]
        return (
            lambda: episodes.compute_span_logprobs(model, rows, spans, pad_id=PAD).tolist(),
            episodes,
            "completion_logprobs",
        )
    model = nano()
    ends = [[1, len(row)] for row in rows]

    def pooled():
        return [
            tuple(t.flatten().tolist())
            for t in baseline.compute_pooled_states(model, rows, ends, pad_id=PAD)
        ]

    return pooled, baseline, "hidden_states"


@pytest.mark.parametrize("name", ["reference", "reward model", "answers", "states"])
def test_scoring_in_halves_gives_the_same_numbers(monkeypatch, tokenizer, name):
    compute, module, function = scoring_of(name, tokenizer)
    expected, calls = compute(), []
    rows_of = (lambda model, ids, *rest: len(ids)) if name == "reward model" else rows_of_batch
    monkeypatch.setattr(module, function, limited(getattr(module, function), rows_of, 3, calls))
    with timing.collect_seconds() as counts:
        found = compute()
    assert max(calls) > 3 and counts["out_of_memory"] >= 1
    flat = [np.ravel(np.array(part, dtype=float)) for part in (found, expected)]
    np.testing.assert_allclose(flat[0], flat[1], atol=1e-6)
    monkeypatch.setattr(module, function, limited(getattr(module, function), rows_of, 0, calls))
    with pytest.raises(OutOfMemory, match="one row of"):
        compute()


@pytest.mark.parametrize("kind", ["sft", "reward_model", "dpo", "kto"])
def test_evaluation_in_halves_gives_the_same_metrics(monkeypatch, kind):
    def made():
        if kind == "sft":
            rows = [([1, 2, 3 + i % 5, 4], [False, True, True, True]) for i in range(9)]
            return SFTTrainer(nano(), PAD, rows, rows, SFTSettings(batch_size=9), 0)
        if kind == "reward_model":
            pairs = [([1, 2, 3 + i % 4], [1, 2]) for i in range(9)]
            model = nano(model_class=LlamaForSequenceClassification, num_labels=1)
            return RewardModelTrainer(
                model, PAD, pairs, pairs, RewardModelSettings(batch_size=9), 0
            )
        pairs = pairs_of(9)
        if kind == "kto":
            pairs = [
                dataclasses.replace(pair, desirable=i % 2 == 0) for i, pair in enumerate(pairs)
            ]
        return PreferenceTrainer(
            nano(), PAD, pairs, pairs, PreferenceSettings(loss=kind, batch_size=9), 0
        )

    trainer = made()
    expected = trainer.evaluate()
    calls = []
    for module in (logprobs, heads):
        monkeypatch.setattr(
            module,
            "compute_hidden_states",
            limited(module.compute_hidden_states, rows_of_batch, 4, calls),
        )
    found = trainer.evaluate()
    assert max(calls) > 4
    assert found == {name: pytest.approx(value, abs=1e-5) for name, value in expected.items()}
    trainer.step()  # training, too
    assert trainer.optimizer_step.max_tokens is not None


def test_passes_of_a_policy_over_its_rollouts_in_halves(monkeypatch, tokenizer):
    """Old and reference log-probs, and a local teacher's."""
    trainer = make_trainer(
        tokenizer, reference=make_trainer(tokenizer).policy, kl_coef=0.1, epochs=2
    )
    samples = [
        [TrainingSample(TrainRow([5, 6], [7 + i, 8], [True, True], [-5.0, -5.0]), 0.0, False)]
        for i in range(8)
    ]
    trainer.actor_critic.teacher = LocalTeacher(copy.deepcopy(trainer.policy))

    def measured():
        buffer = rollout_buffer.RolloutBuffer(trainer.actor_critic, trainer.settings, samples)
        plan = [list(range(8))]
        buffer.compute_old_logprobs(plan)
        buffer.compute_ref_logprobs(plan)
        buffer.compute_teacher_logprobs(plan)
        return [buffer.old_logprobs_RS, buffer.ref_logprobs_RS, buffer.teacher_logprobs_RS]

    expected, calls = measured(), []
    for module in (rollout_buffer, teacher):
        monkeypatch.setattr(
            module,
            "completion_logprobs",
            limited(logprobs.completion_logprobs, rows_of_batch, 3, calls),
        )
    for found, plain in zip(measured(), expected, strict=True):
        torch.testing.assert_close(found, plain, atol=1e-6, rtol=0)
    assert max(calls) == 8 and calls.count(2) >= 9


def test_probe_and_turn_states_in_halves(monkeypatch, tokenizer):
    trainer = make_trainer(tokenizer)
    trainer.step()
    rollouts = [rollout for group in trainer.groups for rollout in group.rollouts][:9]
    other = make_trainer(tokenizer, model_seed=1).policy

    def measured():
        spread = probe.measure_divergence(trainer.policy, other, rollouts, trainer.pad_id)
        states = compute_turn_embeddings(trainer.policy, rollouts, pad_id=trainer.pad_id)
        return [spread.entropy, spread.kl, *(float(s.states_NH.sum()) for s in states)]

    expected, calls = measured(), []
    monkeypatch.setattr(
        probe,
        "iter_next_token_logprobs",
        limited(logprobs.iter_next_token_logprobs, rows_of_batch, 4, calls),
    )
    monkeypatch.setattr(
        states_module,
        "compute_hidden_states",
        limited(states_module.compute_hidden_states, rows_of_batch, 4, calls),
    )
    assert measured() == pytest.approx(expected, abs=1e-4)
    assert max(calls) == 9 and not any(map(math.isnan, expected))


def test_the_loop_reports_how_often_memory_ran_out(monkeypatch):
    rows = [([1, 2, 3 + i % 5, 4], [False, True, True, True]) for i in range(9)]
    trainer = SFTTrainer(nano(), PAD, rows, rows, SFTSettings(batch_size=9, eval_every=1), 0)
    monkeypatch.setattr(
        logprobs,
        "compute_hidden_states",
        limited(logprobs.compute_hidden_states, rows_of_batch, 4, []),
    )
    tracker = MemoryTracker()
    run_loop(trainer, trainer.settings, iterations=2, tracker=tracker)
    # neither 9 rows fit nor 5 of their halves of 4 and 5; training keeps the limit, an evaluation finds it out again
    assert tracker.series("perf/out_of_memory") == [(1, 2.0)]
    assert tracker.series("perf/eval_out_of_memory") == [(1, 2.0), (2, 2.0)]
