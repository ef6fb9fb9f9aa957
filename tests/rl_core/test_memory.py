"""Lack of memory: recognised from any source; batches are halved with the same numbers, a single row is an error."""

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

CPU_ERROR = RuntimeError(
    "[enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"
)
ERRORS = [
    torch.OutOfMemoryError("CUDA out of memory"),
    MemoryError(),
    CPU_ERROR,
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
    """Provoke real errors: the address space is limited to the used one and 256 MiB."""
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


def test_other_errors_are_not_out_of_memory():
    others = [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        OSError(errno.ENOSPC, "full"),
        ValueError("memory"),
    ]
    assert not any(map(is_out_of_memory, others))
    with pytest.raises(RuntimeError, match="mat1"):
        MemoryFit("x").compute_batches([[1, 2]], lambda part: (_ for _ in ()).throw(others[0]))


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_batches_are_halved_in_order_and_the_size_is_remembered(caplog, error):
    sizes = []

    def compute(part):
        sizes.append(len(part))
        if len(part) > 3:
            raise error
        return sum(part)

    fit = MemoryFit("sums")
    with caplog.at_level(logging.WARNING), timing.collect_seconds() as counts:
        sums = fit.compute_batches([list(range(8)), [8], list(range(10, 16))], compute)
    # 8 and 4 fail, then 2 rows at a time fit; 6 is more than 3, so 3 rows at a time without another attempt
    assert sizes == [8, 4, 2, 2, 2, 2, 1, 3, 3]
    assert sums == [0 + 1, 2 + 3, 4 + 5, 6 + 7, 8, 10 + 11 + 12, 13 + 14 + 15]
    assert fit.limit == 3 and counts["out_of_memory"] == 2
    assert "out of memory: sums: cut to at most 3 rows" in caplog.text


def test_a_row_that_does_not_fit_is_described():
    def compute(part):
        raise CPU_ERROR

    with pytest.raises(
        OutOfMemory,
        match=r"scores: one row of 7 tokens does not fit into memory \(RuntimeError.*; rest",
    ):
        MemoryFit("scores", "rest").compute_batches([[0, 1]], compute, lengths=[7, 5])


EOS = list(range(1, VOCAB, 5))
ROOM = 24


class DelayedAnswer:
    """An answer of an environment that is ready at the second check."""

    def __init__(self, value):
        self.value, self.looks, self.future = value, 0, Future()
        self.future.set_result(None)

    def is_done(self):
        self.looks += 1
        return self.looks > 1

    def wait_until_done(self):
        """Return immediately, because the answer is ready."""

    def wait_for_result(self):
        return self.value


class WaitingSequence(ScriptedSequence):
    """A sequence whose environment answers later."""

    def take_action(self, action_ids, logprobs, hit_limit):
        observation = super().take_action(action_ids, logprobs, hit_limit)
        if hit_limit:
            return observation
        return PendingTurn(DelayedAnswer(observation), lambda result: result())


def play_sequences(backend, kind=ScriptedSequence, slots=100, **options):
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


def make_engine():
    return Engine(make_model("llama", head_dim=16), eos_ids=EOS, pad_id=0, max_length=128)


def limit_decoder_memory(monkeypatch, where, limit, error):
    """Make the decoder run out of memory beyond `limit` rows, and return the list of sizes that it requests."""
    original = getattr(decoder.Decoder, where)
    requested = []

    def limited(self, *arguments, **options):
        size = {
            "_allocate_zeros": lambda: arguments[0][2],
            "step": lambda: arguments[2],
            "prefill_prompts": lambda: len(arguments[0]),
            "fill_slots": lambda: len(arguments[0]),
            "sample_steps": lambda: arguments[1],
        }[where]()
        requested.append(size)
        if size > limit:
            raise error
        return original(self, *arguments, **options)

    monkeypatch.setattr(decoder.Decoder, where, limited)
    return requested


@pytest.mark.parametrize(
    ("kind", "rejoin"),
    [(ScriptedSequence, "together"), (WaitingSequence, "together"), (WaitingSequence, "ready")],
)
@pytest.mark.parametrize(
    ("where", "limit"),
    [
        ("_allocate_zeros", 4),
        ("step", 5),
        ("step", 1),
        ("sample_steps", 2),
        ("prefill_prompts", 1),
        ("fill_slots", 1),
    ],
)
def test_rollouts_in_fewer_slots_are_the_same(monkeypatch, caplog, where, limit, rejoin, kind):
    expected = play_sequences(make_engine(), kind, rejoin=rejoin)
    requested = limit_decoder_memory(monkeypatch, where, limit, CPU_ERROR)
    backend = make_engine()
    with caplog.at_level(logging.WARNING), timing.collect_seconds() as counts:
        played = play_sequences(backend, kind, rejoin=rejoin)
    # prompts are read in different batches: the same tokens, and log-probs equal up to rounding
    if where == "prefill_prompts":
        assert [row[0] for row in played] == [row[0] for row in expected]
        for row, expected_row in zip(played, expected, strict=True):
            assert row[2] == pytest.approx(expected_row[2], abs=1e-5)
    else:
        assert played == expected
    assert (
        max(requested) > limit and counts["out_of_memory"] >= 1 and "out of memory: " in caplog.text
    )
    if where in ("_allocate_zeros", "step", "sample_steps"):
        requested.clear()
        assert play_sequences(backend, kind, rejoin=rejoin) == expected  # the limit is remembered
        assert not requested or max(requested) <= limit


def test_a_failed_step_with_observations_is_repeated(monkeypatch):
    """Raise only in steps that append observations: a failed step must not have changed anything."""
    expected = play_sequences(make_engine())
    original, failures = decoder.Decoder.step, []

    def fail_above_two(
        self, tokens, positions, count, length, appended=None, *arguments, **options
    ):
        if appended is not None and count > 2:
            failures.append(count)
            raise MemoryError
        return original(self, tokens, positions, count, length, appended, *arguments, **options)

    monkeypatch.setattr(decoder.Decoder, "step", fail_above_two)
    assert play_sequences(make_engine()) == expected and failures


@pytest.mark.parametrize("where", ["_allocate_zeros", "step", "sample_steps", "prefill_prompts"])
def test_a_sequence_that_does_not_fit_alone_raises_a_typed_error(monkeypatch, where):
    limit_decoder_memory(monkeypatch, where, 0, CPU_ERROR)
    with pytest.raises(OutOfMemory, match="max_completion_tokens"):
        play_sequences(make_engine())


def test_weights_that_cannot_be_packed_raise_a_typed_error(monkeypatch):
    backend = make_engine()

    def bind(self):
        raise MemoryError

    monkeypatch.setattr(decoder.Decoder, "bind_weights", bind)
    with pytest.raises(OutOfMemory, match="rollouts do not fit into memory"):
        play_sequences(backend)


def test_the_fallback_halves_its_batches_too(monkeypatch):
    model = make_model("llama", head_dim=16)
    backend = TransformersBackend(model, eos_ids=EOS, pad_id=0, max_length=128)
    expected = play_sequences(backend)
    original, calls = type(model).forward, []

    def fail_above_limit(self, *arguments, **options):
        calls.append(len(options["input_ids"]))
        if calls[-1] > 4 or (calls[-1] > 2 and len(calls) == 40):
            raise CPU_ERROR
        return original(self, *arguments, **options)

    monkeypatch.setattr(type(model), "forward", fail_above_limit)
    played = play_sequences(backend)
    assert max(calls) == 12 and len(calls) > 40
    for (ids, turns, logs), (other_ids, other_turns, other_logs) in zip(
        played, expected, strict=True
    ):
        assert (ids, turns and [t[1] for t in turns]) == (other_ids, [t[1] for t in other_turns])
        assert logs == pytest.approx(other_logs, abs=1e-5)  # other shapes, so equal up to rounding


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["abc xyz"], 300)


def build_pairs(count):
    sides = [
        (
            PairSide([1, 2], [3] * (1 + i % 3), [True] * (1 + i % 3)),
            PairSide([1, 2], [4, 5], [True, True]),
        )
        for i in range(count)
    ]
    return [PreferencePair(*pair) for pair in sides]


def limit_rows(function, count_rows, limit, calls):
    """Wrap `function` so that it fails on more than `limit` rows."""

    def call(*arguments, **options):
        calls.append(count_rows(*arguments))
        if calls[-1] > limit:
            raise MemoryError
        return function(*arguments, **options)

    return call


def count_batch_rows(model, batch, *rest):
    return len(batch.input_ids_BS)


def build_scoring(name, tokenizer):
    """Return (computation, module and name of the function that allocates) of a place that scores."""
    rows = [[1, 2, 3 + i % 4, *[5] * (i % 5)] for i in range(8)]
    if name == "reference":
        model = nano()
        pairs = build_pairs(8)
        return (
            lambda: compute_reference_logprobs(model, pairs, pad_id=PAD, max_tokens=10**6),
            preference,
            "completion_logprobs",
        )
    if name == "reward model":
        model = nano(model_class=LlamaForSequenceClassification, num_labels=1)
        return lambda: heads.score_rows(model, rows), heads, "compute_sequence_scores"
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

    def pool_states():
        pooled = baseline.compute_pooled_states(model, rows, ends, pad_id=PAD)
        return [tuple(states.flatten().tolist()) for states in pooled]

    return pool_states, baseline, "compute_hidden_states"


@pytest.mark.parametrize("name", ["reference", "reward model", "answers", "states"])
def test_scoring_in_halves_gives_the_same_numbers(monkeypatch, tokenizer, name):
    compute, module, function = build_scoring(name, tokenizer)
    expected, calls = compute(), []
    count_rows = (
        (lambda model, ids, *rest: len(ids)) if name == "reward model" else count_batch_rows
    )
    monkeypatch.setattr(
        module, function, limit_rows(getattr(module, function), count_rows, 3, calls)
    )
    with timing.collect_seconds() as counts:
        halved = compute()
    assert max(calls) > 3 and counts["out_of_memory"] >= 1
    flat = [np.ravel(np.array(part, dtype=float)) for part in (halved, expected)]
    np.testing.assert_allclose(flat[0], flat[1], atol=1e-6)
    monkeypatch.setattr(
        module, function, limit_rows(getattr(module, function), count_rows, 0, calls)
    )
    with pytest.raises(OutOfMemory, match="one row of"):
        compute()


@pytest.mark.parametrize("kind", ["sft", "reward_model", "dpo", "kto"])
def test_evaluation_in_halves_gives_the_same_metrics(monkeypatch, kind):
    def make_evaluated_trainer():
        if kind == "sft":
            rows = [([1, 2, 3 + i % 5, 4], [False, True, True, True]) for i in range(9)]
            return SFTTrainer(nano(), PAD, rows, rows, SFTSettings(batch_size=9), 0)
        if kind == "reward_model":
            pairs = [([1, 2, 3 + i % 4], [1, 2]) for i in range(9)]
            model = nano(model_class=LlamaForSequenceClassification, num_labels=1)
            return RewardModelTrainer(
                model, PAD, pairs, pairs, RewardModelSettings(batch_size=9), 0
            )
        pairs = build_pairs(9)
        if kind == "kto":
            pairs = [
                dataclasses.replace(pair, desirable=i % 2 == 0) for i, pair in enumerate(pairs)
            ]
        return PreferenceTrainer(
            nano(), PAD, pairs, pairs, PreferenceSettings(loss=kind, batch_size=9), 0
        )

    trainer = make_evaluated_trainer()
    expected = trainer.evaluate()
    calls = []
    for module in (logprobs, heads):
        monkeypatch.setattr(
            module,
            "compute_prefix_states",
            limit_rows(module.compute_prefix_states, count_batch_rows, 4, calls),
        )
    halved = trainer.evaluate()
    assert max(calls) > 4
    assert halved == {name: pytest.approx(value, abs=1e-5) for name, value in expected.items()}
    trainer.step()  # training splits its batches too
    assert trainer.optimizer_step.max_tokens is not None


def test_passes_of_a_policy_over_its_rollouts_in_halves(monkeypatch, tokenizer):
    """Compute old, reference and local teacher's log-probs in halves."""
    trainer = make_trainer(
        tokenizer, reference=make_trainer(tokenizer).policy, kl_coef=0.1, epochs=2
    )
    samples = [
        [TrainingSample(TrainRow([5, 6], [7 + i, 8], [True, True], [-5.0, -5.0]), 0.0, False)]
        for i in range(8)
    ]
    trainer.actor_critic.teacher = LocalTeacher(copy.deepcopy(trainer.policy))

    def measure_logprobs():
        buffer = rollout_buffer.RolloutBuffer(trainer.actor_critic, trainer.settings, samples)
        plan = [list(range(8))]
        buffer.compute_old_logprobs(plan)
        buffer.compute_ref_logprobs(plan)
        buffer.compute_teacher_logprobs(plan)
        return [buffer.old_logprobs_RS, buffer.ref_logprobs_RS, buffer.teacher_logprobs_RS]

    expected, calls = measure_logprobs(), []
    for module in (rollout_buffer, teacher):
        monkeypatch.setattr(
            module,
            "completion_logprobs",
            limit_rows(logprobs.completion_logprobs, count_batch_rows, 3, calls),
        )
    for halved, complete in zip(measure_logprobs(), expected, strict=True):
        torch.testing.assert_close(halved, complete, atol=1e-6, rtol=0)
    assert max(calls) == 8 and calls.count(2) >= 9


def test_probe_and_turn_states_in_halves(monkeypatch, tokenizer):
    trainer = make_trainer(tokenizer)
    trainer.step()
    rollouts = [rollout for group in trainer.groups for rollout in group.rollouts][:9]
    other = make_trainer(tokenizer, model_seed=1).policy

    def measure_states():
        spread = probe.measure_divergence(trainer.policy, other, rollouts, trainer.pad_id)
        states = compute_turn_embeddings(trainer.policy, rollouts, pad_id=trainer.pad_id)
        return [spread.entropy, spread.kl, *(float(s.states_NH.sum()) for s in states)]

    expected, calls = measure_states(), []
    monkeypatch.setattr(
        probe,
        "iter_next_token_logprobs",
        limit_rows(logprobs.iter_next_token_logprobs, count_batch_rows, 4, calls),
    )
    monkeypatch.setattr(
        states_module,
        "compute_hidden_states",
        limit_rows(states_module.compute_hidden_states, count_batch_rows, 4, calls),
    )
    assert measure_states() == pytest.approx(expected, abs=1e-4)
    assert max(calls) == 9 and not any(map(math.isnan, expected))


def test_the_loop_reports_how_often_memory_ran_out(monkeypatch):
    rows = [([1, 2, 3 + i % 5, 4], [False, True, True, True]) for i in range(9)]
    trainer = SFTTrainer(nano(), PAD, rows, rows, SFTSettings(batch_size=9, eval_every=1), 0)
    monkeypatch.setattr(
        logprobs,
        "compute_prefix_states",
        limit_rows(logprobs.compute_prefix_states, count_batch_rows, 4, []),
    )
    tracker = MemoryTracker()
    run_loop(trainer, trainer.settings, iterations=2, tracker=tracker)
    # 9 rows do not fit, nor does the half of 5; training remembers the limit, an evaluation discovers it again
    assert tracker.series("perf/out_of_memory") == [(1, 2.0)]
    assert tracker.series("perf/eval_out_of_memory") == [(1, 2.0), (2, 2.0)]
