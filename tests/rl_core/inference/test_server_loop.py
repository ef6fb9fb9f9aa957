"""The serving loop: answers equal the offline engine's, regardless of other requests."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch
from helpers.scripted_sequences import VOCAB, ScriptedSequence, make_model
from transformers import GPT2Config, GPT2LMHeadModel

from rl_core.capabilities import Decision, decoding
from rl_core.cpu import fused_decode
from rl_core.environments.step_pool import PendingTurn, StepPool
from rl_core.errors import OutOfMemory
from rl_core.inference import continuous_batching
from rl_core.inference.continuous_batching import ContinuousBatcher
from rl_core.inference.engine import create_rollout_backend
from rl_core.inference.fallback_batching import FallbackBatcher
from rl_core.inference.server_loop import FairQueue, ServerLoop, ServerLoopLimits
from rl_core.inference.serving_requests import (
    AnswerSequence,
    DeadlineExceeded,
    EngineFault,
    RequestCancelled,
    RequestEnded,
    RequestProgress,
    ServedRequest,
    ServerOverloaded,
)
from rl_core.settings import SamplingSettings

EOS = list(range(1, VOCAB, 17))
CONTEXT = 96


class SteppedLoop:
    """A loop that is stepped by hand, with its delivered events."""

    def __init__(
        self, model, *, slots=4, kind=ContinuousBatcher, version=0, now=lambda: 0.0, **limits
    ):
        self.slots, self.kind = slots, kind
        self.events = []
        self.loop = ServerLoop(
            self.build_slot_opener(model),
            version,
            self.events.extend,
            ServerLoopLimits(**limits),
            now,
        )

    def build_slot_opener(self, model):
        return lambda wake: self.kind(
            model, slots=self.slots, context=CONTEXT, eos_ids=EOS, pad_id=0, wake=wake
        )

    def drain(self, steps=10_000):
        while self.loop.step():
            steps -= 1
            assert steps, "the loop does not become idle"

    def ended(self):
        return [event.request for event in self.events if isinstance(event, RequestEnded)]


def build_request(
    prompt,
    seed=0,
    *,
    tokens=12,
    stops=None,
    caller="",
    deadline=float("inf"),
    streams=False,
    top=0,
    **sampling_options,
):
    sampling = SamplingSettings(max_completion_tokens=tokens, **sampling_options)
    sequence = AnswerSequence(list(prompt), seed, stops)
    return ServedRequest(
        sequence,
        sampling,
        caller=caller,
        deadline=deadline,
        streams=streams,
        top=top,
        has_stops=stops is not None,
    )


def answer_offline(model, requests, eos_ids=EOS):
    """Return tokens and log-probabilities of the offline engine, one request after the other."""
    backend = create_rollout_backend(model, eos_ids=eos_ids, pad_id=0, max_length=CONTEXT)
    sequences = []
    for item in requests:
        sequence = AnswerSequence(item.prompt_ids, item.seed, item.sequence.has_stop_text)
        backend.run_sequences(
            [sequence],
            SamplingSettings(
                max_completion_tokens=item.sampling.max_completion_tokens,
                temperature=item.sampling.temperature,
                top_p=item.sampling.top_p,
                stop=("unused",) if item.has_stops else (),
            ),
        )
        sequences.append(sequence)
    return sequences


def build_mixed_requests(count, seed=0, **options):
    """Build requests of every kind: greedy and not, restricted, with stops, from several callers."""
    generator = np.random.default_rng(seed)
    kinds = [
        dict(temperature=0.0),
        dict(temperature=1.0),
        dict(temperature=0.7),
        dict(temperature=1.0, top_p=0.8),
        dict(temperature=1.0, stops=lambda ids: ids[-1] % 7 == 0),
        dict(temperature=1.0, top=3),
    ]
    return [
        build_request(
            generator.integers(2, VOCAB, generator.integers(1, 40)),
            1000 + index,
            tokens=int(generator.integers(1, 50)),
            caller=f"caller {index % 3}",
            **kinds[index % len(kinds)],
            **options,
        )
        for index in range(count)
    ]


def assert_equal_answers(requests, expected):
    for answered, reference in zip(requests, expected, strict=True):
        assert answered.error is None
        assert answered.sequence.tokens == reference.tokens
        assert answered.sequence.hit_limit == reference.hit_limit
        np.testing.assert_allclose(answered.sequence.logprobs, reference.logprobs, atol=1e-5)


def create_gpt2():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = GPT2Config(
            vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=2, n_positions=128, initializer_range=0.3
        )
        return GPT2LMHeadModel(config).eval()


@pytest.fixture(params=["fused", "torch", "rows", "gpt2"])
def engine(request, monkeypatch):
    """Return (model, kind of slots): the decoder with and without compiled code, and transformers' forward pass."""
    if request.param == "fused" and fused_decode.load_decode_kernels() is None:
        pytest.skip("needs a C compiler")
    if request.param == "torch":
        monkeypatch.setattr(
            decoding,
            "check_packed_weights",
            lambda *_, **__: Decision("packed weights", False, "as on a GPU"),
        )
    if request.param == "gpt2":
        return create_gpt2(), FallbackBatcher
    return make_model(
        "qwen3", head_dim=16
    ), FallbackBatcher if request.param == "rows" else ContinuousBatcher


def test_answers_equal_the_offline_engine(engine):
    """Every kind of request, over few slots, with turns shorter than the answers."""
    model, kind = engine
    requests = build_mixed_requests(18)
    served = SteppedLoop(model, kind=kind, turn_tokens=10)
    served.loop.submit_requests(requests[:12])
    for _ in range(3):
        served.loop.step()
    served.loop.submit_requests(requests[12:])
    served.drain()
    assert len(served.ended()) == 18 and served.loop.state.parkings > 3
    assert_equal_answers(requests, answer_offline(model, requests))
    assert served.loop.state.active == served.loop.state.waiting == served.loop.state.parked == 0


def test_requests_with_custom_end_tokens_share_the_slots(engine):
    """Other end tokens than the model's, none, and the model's, side by side."""
    model, kind = engine
    requests, ends = build_mixed_requests(18), (EOS, (), range(3, VOCAB, 5))
    for index, item in enumerate(requests):
        item.end_ids = None if index % 3 == 0 else frozenset(ends[index % 3])
    served = SteppedLoop(model, kind=kind, turn_tokens=10)
    served.loop.submit_requests(requests)
    served.drain()
    for index, eos_ids in enumerate(ends):
        assert_equal_answers(requests[index::3], answer_offline(model, requests[index::3], eos_ids))
    assert any(item.sequence.hit_limit for item in requests) and not all(
        item.sequence.hit_limit for item in requests
    )


def test_ends_of_a_request_and_random_numbers_that_are_used_up(engine):
    """Requests with their own end tokens next to others, and one that continues where another was cut."""
    model, kind = engine
    requests, ends = build_mixed_requests(12), range(3, VOCAB, 5)
    for item in requests[::2]:
        item.end_ids = frozenset(ends)
    complete = build_request([5, 9, 33], 7, tokens=9)
    complete.end_ids = frozenset()
    served = SteppedLoop(model, kind=kind)
    served.loop.submit_requests([*requests, complete])
    served.drain()
    assert_equal_answers(requests[::2], answer_offline(model, requests[::2], ends))
    assert_equal_answers(requests[1::2], answer_offline(model, requests[1::2]))
    assert len(complete.sequence.tokens) == 9 and complete.sequence.hit_limit
    rest = build_request([5, 9, 33, *complete.sequence.tokens[:4]], 7, tokens=5)
    rest.end_ids, rest.drawn = frozenset(), 4
    served.loop.submit_requests([rest])
    served.drain()
    assert rest.sequence.tokens == complete.sequence.tokens[4:]


def test_samples_do_not_depend_on_what_shares_the_slots():
    """Bit for bit, alone and among others, paused and not."""
    if fused_decode.load_decode_kernels() is None:
        pytest.skip("needs a C compiler")
    model = make_model("llama", head_dim=16)

    def serve_bits(slots, turn, others):
        served, requests = (
            SteppedLoop(model, slots=slots, turn_tokens=turn),
            build_mixed_requests(6),
        )
        served.loop.submit_requests(build_mixed_requests(others, seed=5))
        for item in requests:
            served.loop.submit_requests([item])
            served.loop.step()
        served.drain()
        return [
            (item.sequence.tokens, [value.hex() for value in item.sequence.logprobs])
            for item in requests
        ]

    alone = serve_bits(1, 10**6, 0)
    assert (
        serve_bits(3, 5, 7) == alone
        and serve_bits(16, 10**6, 10) == alone
        and serve_bits(1, 3, 4) == alone
    )


def test_long_prompts_are_read_between_other_steps(monkeypatch):
    """Piece by piece, with EOS tokens in them, and paused in the middle."""
    monkeypatch.setattr(continuous_batching, "PROMPT_PIECE_TOKENS", 7)
    model = make_model("llama", head_dim=16)
    generator = np.random.default_rng(3)
    requests = [
        build_request(
            generator.integers(1, VOCAB, 80 - index), index, temperature=0.5, top=2 * (index % 2)
        )
        for index in range(5)
    ]
    served = SteppedLoop(model, slots=2, turn_tokens=1)
    served.loop.submit_requests(requests)
    served.drain()
    assert_equal_answers(requests, answer_offline(model, requests))
    for item in requests:
        assert len(item.top_rows) == (len(item.sequence.tokens) if item.top else 0)


def test_top_tokens_are_those_of_the_distribution_that_was_drawn_from(engine):
    model, kind = engine
    requests = [
        build_request([5, 9, 33], 1, temperature=0.5, top=4),
        build_request([5, 9, 33], 1, temperature=0.0, top=VOCAB),
    ]
    requests.append(build_request([5, 9, 33], 1, temperature=1.0, top_p=0.3, top=8))
    served = SteppedLoop(model, kind=kind)
    served.loop.submit_requests(requests)
    served.drain()
    for item in requests:
        ids = torch.tensor([item.prompt_ids + item.sequence.tokens])
        with torch.no_grad():
            logits = model(ids).logits[0, len(item.prompt_ids) - 1 : -1]
        top = item.top_tokens
        is_finite = np.isfinite(top.logprobs_TK)
        if item.sampling.top_p == 1:
            log_p = torch.log_softmax(logits / (item.sampling.temperature or 1.0), -1)
            picked = log_p.gather(1, torch.from_numpy(top.ids_TK).long()).numpy()
            np.testing.assert_allclose(top.logprobs_TK, picked, atol=1e-4)
            assert is_finite.all()
            np.testing.assert_allclose(top.rest_T, 1 - np.exp(picked).sum(1), atol=1e-5)
        else:
            assert not is_finite.all() and is_finite[:, 0].all()
        for token, logprob, ids, values in zip(
            item.sequence.tokens, item.sequence.logprobs, top.ids_TK, top.logprobs_TK, strict=True
        ):
            if token in ids.tolist():
                assert values[ids.tolist().index(token)] == pytest.approx(logprob, abs=1e-4)


def test_progress_reports_every_token_once(engine):
    model, kind = engine
    requests = build_mixed_requests(7, streams=True)
    served = SteppedLoop(model, kind=kind, slots=3, turn_tokens=4)
    served.loop.submit_requests(requests)
    served.drain()
    for item in requests:
        events = [
            event
            for event in served.events
            if isinstance(event, RequestProgress) and event.request is item
        ]
        assert [token for event in events for token in event.tokens] == item.sequence.tokens
        assert [value for event in events for value in event.logprobs] == item.sequence.logprobs
        rows = [
            row for event in events if event.top is not None for row in event.top.ids_TK.tolist()
        ]
        assert rows == ([row[0].tolist() for row in item.top_rows])


def test_cancelling_frees_the_slot_immediately(engine):
    model, kind = engine
    long = [build_request([3 + index], index, tokens=90) for index in range(3)]
    served = SteppedLoop(model, kind=kind, slots=2)
    served.loop.submit_requests(long)
    served.loop.step()
    assert served.loop.state.active == 2 and served.loop.state.waiting == 1
    served.loop.cancel_request(long[0])
    served.loop.step()
    assert (
        long[0].has_ended
        and isinstance(long[0].error, RequestCancelled)
        and long[2].policy_version == 0
    )
    served.loop.cancel_request(long[0])  # cancelling again has no effect
    waiting = build_request([9])
    served.loop.submit_requests([waiting])
    served.loop.cancel_request(waiting)
    served.drain()
    assert isinstance(waiting.error, RequestCancelled) and waiting.policy_version is None
    assert served.ended().count(long[0]) == 1
    assert_equal_answers(long[1:], answer_offline(model, long[1:]))


def test_deadlines_hold_in_the_queue_and_in_a_slot():
    now = [0.0]
    served = SteppedLoop(make_model("llama", head_dim=16), slots=1, now=lambda: now[0])
    running, waiting = (
        build_request([5], tokens=90, temperature=1.0, deadline=2.0),
        build_request([6], deadline=1.0),
    )
    # one token per step
    running.sequence.has_stop_text, running.has_stops = (lambda ids: False), True
    served.loop.submit_requests([running, waiting])
    served.loop.step()
    now[0] = 1.5
    served.loop.step()
    assert isinstance(waiting.error, DeadlineExceeded) and not running.has_ended
    now[0] = 2.0
    served.drain()
    assert isinstance(running.error, DeadlineExceeded)


def test_a_full_queue_refuses_all_of_a_group():
    served = SteppedLoop(make_model("llama"), slots=2, max_waiting=3)
    served.loop.submit_requests([build_request([5]), build_request([6])])
    with pytest.raises(ServerOverloaded) as refused:
        served.loop.submit_requests([build_request([7]), build_request([8])])
    assert refused.value.retry_after >= 1
    served.loop.submit_requests([build_request([7])])
    served.drain()
    assert len(served.ended()) == 3
    served.loop.submit_requests([build_request([5]), build_request([6]), build_request([7])])
    served.loop.close()
    with pytest.raises(EngineFault):
        served.loop.submit_requests([build_request([5])])
    served.loop.serve_until_closed()
    assert [type(item.error) for item in served.ended()[3:]] == [EngineFault] * 3


def test_a_long_request_starves_nobody():
    """One slot, an endless answer, and short ones after it: each ends within its caller's turns."""
    model = make_model("llama", head_dim=16)
    long = build_request([5], tokens=90, temperature=1.0, stops=lambda ids: False, caller="long")
    long.sequence.has_stop_text = lambda ids: False
    short = [build_request([6 + n], n, tokens=2, caller="short") for n in range(3)]
    served = SteppedLoop(model, slots=1, turn_tokens=8)
    served.loop._weights[0].slots._is_eos[:] = False
    served.loop.submit_requests([long])
    served.loop.step()
    served.loop.submit_requests(short)
    for _ in range(60):
        served.loop.step()
    assert [item.has_ended for item in short] == [True] * 3 and not long.has_ended
    served.drain()
    assert len(long.sequence.tokens) == 90


def test_callers_take_turns():
    queue = FairQueue()
    many, single = (
        [build_request([5], caller="many") for _ in range(3)],
        build_request([5], caller="one"),
    )
    for entry in (*many, single):
        queue.add_request(entry)
    assert [queue.take_request() for _ in range(5)] == [many[0], single, many[1], many[2], None]
    queue.add_request(single)
    assert queue.remove_request(single) and not queue.remove_request(single) and len(queue) == 0


@pytest.mark.parametrize("kind", [ContinuousBatcher, FallbackBatcher])
def test_a_request_ends_on_the_weights_that_it_began_on(kind):
    """Three sets of weights while requests arrive: none is dropped, none mixed."""
    models = [
        make_model("llama", head_dim=16, initializer_range=size) for size in (0.3, 0.28, 0.32, 0.26)
    ]
    served, requests = SteppedLoop(models[0], kind=kind, slots=3, turn_tokens=6), []
    for version, model in enumerate(models):
        if version:
            served.loop.publish_weights(served.build_slot_opener(model), version)
        for item in build_mixed_requests(5, seed=version):
            requests.append(item)
            served.loop.submit_requests([item])
            served.loop.step()
    served.drain()  # the fourth set waited until the first was idle
    requests += (last := build_mixed_requests(3, seed=9))
    served.loop.submit_requests(last)
    served.drain()
    assert {item.policy_version for item in requests} == {0, 1, 2, 3}
    for version, model in enumerate(models):
        of_version = [item for item in requests if item.policy_version == version]
        assert_equal_answers(of_version, answer_offline(model, of_version))
    assert served.loop.state.versions == 1 and served.loop.state.policy_version == 3


def test_weights_that_do_not_fit_next_to_others_wait(monkeypatch):
    old, new = (
        make_model("llama", head_dim=16),
        make_model("llama", head_dim=16, initializer_range=0.2),
    )
    served = SteppedLoop(old, slots=2)
    first, second = (
        build_request([5], tokens=40, temperature=1.0, top=1),
        build_request([6], tokens=5),
    )
    served.loop.submit_requests([first])
    served.loop.step()
    opened = []

    def scarce(wake):
        if not served.loop._weights[-1].slots.is_empty:
            raise OutOfMemory("no room")
        opened.append(True)
        return served.build_slot_opener(new)(wake)

    served.loop.publish_weights(scarce, 1)
    served.loop.submit_requests([second])
    served.drain()
    assert opened and (first.policy_version, second.policy_version) == (0, 1)
    assert_equal_answers([first], answer_offline(old, [first]))
    assert_equal_answers([second], answer_offline(new, [second]))
    broken = make_model("llama", head_dim=16)
    with torch.no_grad():
        broken.model.norm.weight[0] = float("nan")
    served.loop.publish_weights(served.build_slot_opener(broken), 2)
    third = build_request([7])
    served.loop.submit_requests([third])
    served.drain()
    assert third.policy_version == 1 and third.error is None


def test_a_failing_request_does_not_affect_others(engine):
    model, kind = engine

    def fail(ids):
        raise ValueError("in the middle")

    good, bad = (
        build_request([5, 6], tokens=10, temperature=0.7),
        build_request([5, 6], tokens=10, stops=fail),
    )
    served = SteppedLoop(model, kind=kind)
    served.loop.submit_requests([bad, good])
    served.drain()
    assert isinstance(bad.error, ValueError) and good.error is None
    assert_equal_answers([good], answer_offline(model, [good]))


def test_a_failed_step_fails_its_requests():
    model = make_model("llama", head_dim=16)
    served = SteppedLoop(model)
    requests = build_mixed_requests(3)
    served.loop.submit_requests(requests)
    slots = served.loop._weights[0].slots
    original, slots._sample_active_slots = slots._sample_active_slots, lambda: 1 / 0
    served.drain()
    assert [type(item.error) for item in requests] == [EngineFault] * 3
    slots._sample_active_slots = original
    retried = build_mixed_requests(3)
    served.loop.submit_requests(retried)
    served.drain()
    assert_equal_answers(retried, answer_offline(model, retried))


class SlowSequence(ScriptedSequence):
    """A sequence whose observations come from another thread."""

    def __init__(self, *arguments, pool, **options):
        super().__init__(*arguments, **options)
        self.pool = pool

    def take_action(self, action_ids, logprobs, hit_limit):
        outcome = super().take_action(action_ids, logprobs, hit_limit)
        return PendingTurn(
            self.pool.submit_call("a step", time.sleep, 0.01), lambda result: (result(), outcome)[1]
        )


@pytest.mark.parametrize("kind", [ContinuousBatcher, FallbackBatcher])
def test_sessions_share_the_slots_and_step_aside_while_their_environment_works(kind):
    model = make_model("llama", head_dim=16)
    observations = [[7, 8, 9], [11], [4, 5]]

    def build_sessions(cls, **options):
        return [cls([3 + n, 9], n, observations, room=60, **options) for n in range(5)]

    backend = create_rollout_backend(model, eos_ids=EOS, pad_id=0, max_length=CONTEXT)
    expected = build_sessions(ScriptedSequence)
    backend.run_sequences(expected, SamplingSettings(max_completion_tokens=60))
    with StepPool(4, 10.0) as pool:
        played = build_sessions(SlowSequence, pool=pool)
        served = SteppedLoop(model, kind=kind, slots=2, turn_tokens=4)
        thread = threading.Thread(target=served.loop.serve_until_closed)
        thread.start()
        served.loop.submit_requests(
            [ServedRequest(item, SamplingSettings(max_completion_tokens=60)) for item in played]
        )
        end = time.monotonic() + 20
        while len(served.ended()) < 5 and time.monotonic() < end:
            time.sleep(0.005)
        served.loop.close()
        thread.join(10)
    assert [item.turns for item in played] == [item.turns for item in expected]
    assert sum(len(item.turns) > 1 for item in played) >= 3
