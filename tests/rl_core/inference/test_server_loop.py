"""The serving loop: what is answered equals the offline engine's answer, whoever comes, goes or waits beside it."""

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


class Served:
    """A loop that is stepped by hand, with what it delivered."""

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
            assert steps, "the loop does not come to rest"

    def ended(self):
        return [event.request for event in self.events if isinstance(event, RequestEnded)]


def request(
    prompt,
    seed=0,
    *,
    tokens=12,
    stops=None,
    caller="",
    deadline=float("inf"),
    streams=False,
    top=0,
    **drawn,
):
    sampling = SamplingSettings(max_completion_tokens=tokens, **drawn)
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


def offline(model, asked, eos_ids=EOS):
    """Tokens and log-probabilities of the offline engine, one request after the other."""
    backend = create_rollout_backend(model, eos_ids=eos_ids, pad_id=0, max_length=CONTEXT)
    found = []
    for one in asked:
        sequence = AnswerSequence(one.prompt_ids, one.seed, one.sequence.has_stop_text)
        backend.run_sequences(
            [sequence],
            SamplingSettings(
                max_completion_tokens=one.sampling.max_completion_tokens,
                temperature=one.sampling.temperature,
                top_p=one.sampling.top_p,
                stop=("asked",) if one.has_stops else (),
            ),
        )
        found.append(sequence)
    return found


def mixed(count, seed=0, **more):
    """Requests of every kind: greedy and not, restricted, with stops, of several callers."""
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
        request(
            generator.integers(2, VOCAB, generator.integers(1, 40)),
            1000 + index,
            tokens=int(generator.integers(1, 50)),
            caller=f"caller {index % 3}",
            **kinds[index % len(kinds)],
            **more,
        )
        for index in range(count)
    ]


def same(asked, expected):
    for one, other in zip(asked, expected, strict=True):
        assert one.error is None
        assert one.sequence.tokens == other.tokens
        assert one.sequence.hit_limit == other.hit_limit
        np.testing.assert_allclose(one.sequence.logprobs, other.logprobs, atol=1e-5)


def gpt2():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = GPT2Config(
            vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=2, n_positions=128, initializer_range=0.3
        )
        return GPT2LMHeadModel(config).eval()


@pytest.fixture(params=["fused", "torch", "rows", "gpt2"])
def engine(request, monkeypatch):
    """(model, kind of slots): the decoder with compiled code and without, and transformers' own forward pass."""
    if request.param == "fused" and fused_decode.load_decode_kernels() is None:
        pytest.skip("needs a C compiler")
    if request.param == "torch":
        monkeypatch.setattr(
            decoding,
            "check_packed_weights",
            lambda model: Decision("packed weights", False, "as on a GPU"),
        )
    if request.param == "gpt2":
        return gpt2(), FallbackBatcher
    return make_model(
        "qwen3", head_dim=16
    ), FallbackBatcher if request.param == "rows" else ContinuousBatcher


def test_answers_equal_the_offline_engine(engine):
    """Every kind of request, over few slots, with turns that are shorter than the answers."""
    model, kind = engine
    asked = mixed(18)
    served = Served(model, kind=kind, turn_tokens=10)
    served.loop.submit_requests(asked[:12])
    for _ in range(3):
        served.loop.step()
    served.loop.submit_requests(asked[12:])
    served.drain()
    assert len(served.ended()) == 18 and served.loop.state.parkings > 3
    same(asked, offline(model, asked))
    assert served.loop.state.active == served.loop.state.waiting == served.loop.state.parked == 0


def test_requests_with_end_tokens_of_their_own_share_the_slots_with_others(engine):
    """Other end tokens than the model's, none at all, and the model's beside them."""
    model, kind = engine
    asked, ends = mixed(18), (EOS, (), range(3, VOCAB, 5))
    for index, one in enumerate(asked):
        one.end_ids = None if index % 3 == 0 else frozenset(ends[index % 3])
    served = Served(model, kind=kind, turn_tokens=10)
    served.loop.submit_requests(asked)
    served.drain()
    for index, eos_ids in enumerate(ends):
        same(asked[index::3], offline(model, asked[index::3], eos_ids))
    assert any(one.sequence.hit_limit for one in asked) and not all(
        one.sequence.hit_limit for one in asked
    )


def test_ends_of_a_request_and_random_numbers_that_are_used_up(engine):
    """Requests with ends of their own beside others, and one that goes on where another was cut."""
    model, kind = engine
    asked, ends = mixed(12), range(3, VOCAB, 5)
    for one in asked[::2]:
        one.end_ids = frozenset(ends)
    whole = request([5, 9, 33], 7, tokens=9)
    whole.end_ids = frozenset()
    served = Served(model, kind=kind)
    served.loop.submit_requests([*asked, whole])
    served.drain()
    same(asked[::2], offline(model, asked[::2], ends))
    same(asked[1::2], offline(model, asked[1::2]))
    assert len(whole.sequence.tokens) == 9 and whole.sequence.hit_limit
    rest = request([5, 9, 33, *whole.sequence.tokens[:4]], 7, tokens=5)
    rest.end_ids, rest.drawn = frozenset(), 4
    served.loop.submit_requests([rest])
    served.drain()
    assert rest.sequence.tokens == whole.sequence.tokens[4:]


def test_samples_do_not_depend_on_what_shares_the_slots():
    """To the last bit, alone and among others, parked and not."""
    if fused_decode.load_decode_kernels() is None:
        pytest.skip("needs a C compiler")
    model = make_model("llama", head_dim=16)

    def bits(slots, turn, others):
        served, asked = Served(model, slots=slots, turn_tokens=turn), mixed(6)
        served.loop.submit_requests(mixed(others, seed=5))
        for one in asked:
            served.loop.submit_requests([one])
            served.loop.step()
        served.drain()
        return [
            (one.sequence.tokens, [value.hex() for value in one.sequence.logprobs]) for one in asked
        ]

    alone = bits(1, 10**6, 0)
    assert bits(3, 5, 7) == alone and bits(16, 10**6, 10) == alone and bits(1, 3, 4) == alone


def test_long_prompts_are_read_beside_others(monkeypatch):
    """Piece by piece, EOS tokens in them included, and parked in the middle."""
    monkeypatch.setattr(continuous_batching, "PROMPT_PIECE_TOKENS", 7)
    model = make_model("llama", head_dim=16)
    generator = np.random.default_rng(3)
    asked = [
        request(
            generator.integers(1, VOCAB, 80 - index), index, temperature=0.5, top=2 * (index % 2)
        )
        for index in range(5)
    ]
    served = Served(model, slots=2, turn_tokens=1)
    served.loop.submit_requests(asked)
    served.drain()
    same(asked, offline(model, asked))
    for one in asked:
        assert len(one.top_rows) == (len(one.sequence.tokens) if one.top else 0)


def test_top_tokens_are_those_of_the_distribution_that_was_drawn_from(engine):
    model, kind = engine
    asked = [
        request([5, 9, 33], 1, temperature=0.5, top=4),
        request([5, 9, 33], 1, temperature=0.0, top=VOCAB),
    ]
    asked.append(request([5, 9, 33], 1, temperature=1.0, top_p=0.3, top=8))
    served = Served(model, kind=kind)
    served.loop.submit_requests(asked)
    served.drain()
    for one in asked:
        ids = torch.tensor([one.prompt_ids + one.sequence.tokens])
        with torch.no_grad():
            logits = model(ids).logits[0, len(one.prompt_ids) - 1 : -1]
        top = one.top_tokens
        kept = np.isfinite(top.logprobs_TK)
        if one.sampling.top_p == 1:
            log_p = torch.log_softmax(logits / (one.sampling.temperature or 1.0), -1)
            picked = log_p.gather(1, torch.from_numpy(top.ids_TK).long()).numpy()
            np.testing.assert_allclose(top.logprobs_TK, picked, atol=1e-4)
            assert kept.all()
            np.testing.assert_allclose(top.rest_T, 1 - np.exp(picked).sum(1), atol=1e-5)
        else:
            assert not kept.all() and kept[:, 0].all()
        for token, logprob, ids, values in zip(
            one.sequence.tokens, one.sequence.logprobs, top.ids_TK, top.logprobs_TK, strict=True
        ):
            if token in ids.tolist():
                assert values[ids.tolist().index(token)] == pytest.approx(logprob, abs=1e-4)


def test_progress_tells_every_token_once(engine):
    model, kind = engine
    asked = mixed(7, streams=True)
    served = Served(model, kind=kind, slots=3, turn_tokens=4)
    served.loop.submit_requests(asked)
    served.drain()
    for one in asked:
        told = [
            event
            for event in served.events
            if isinstance(event, RequestProgress) and event.request is one
        ]
        assert [token for event in told for token in event.tokens] == one.sequence.tokens
        assert [value for event in told for value in event.logprobs] == one.sequence.logprobs
        rows = [row for event in told if event.top is not None for row in event.top.ids_TK.tolist()]
        assert rows == ([row[0].tolist() for row in one.top_rows])


def test_cancelling_frees_the_slot_at_once(engine):
    model, kind = engine
    long = [request([3 + index], index, tokens=90) for index in range(3)]
    served = Served(model, kind=kind, slots=2)
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
    served.loop.cancel_request(long[0])  # once more does nothing
    waiting = request([9])
    served.loop.submit_requests([waiting])
    served.loop.cancel_request(waiting)
    served.drain()
    assert isinstance(waiting.error, RequestCancelled) and waiting.policy_version is None
    assert served.ended().count(long[0]) == 1
    same(long[1:], offline(model, long[1:]))


def test_deadlines_are_kept_in_the_queue_and_in_a_slot():
    now = [0.0]
    served = Served(make_model("llama", head_dim=16), slots=1, now=lambda: now[0])
    running, waiting = (
        request([5], tokens=90, temperature=1.0, deadline=2.0),
        request([6], deadline=1.0),
    )
    running.sequence.has_stop_text, running.has_stops = (
        (lambda ids: False),
        True,
    )  # one token a step
    served.loop.submit_requests([running, waiting])
    served.loop.step()
    now[0] = 1.5
    served.loop.step()
    assert isinstance(waiting.error, DeadlineExceeded) and not running.has_ended
    now[0] = 2.0
    served.drain()
    assert isinstance(running.error, DeadlineExceeded)


def test_a_full_queue_refuses_all_of_a_group():
    served = Served(make_model("llama"), slots=2, max_waiting=3)
    served.loop.submit_requests([request([5]), request([6])])
    with pytest.raises(ServerOverloaded) as refused:
        served.loop.submit_requests([request([7]), request([8])])
    assert refused.value.retry_after >= 1
    served.loop.submit_requests([request([7])])
    served.drain()
    assert len(served.ended()) == 3
    served.loop.submit_requests([request([5]), request([6]), request([7])])
    served.loop.close()
    with pytest.raises(EngineFault):
        served.loop.submit_requests([request([5])])
    served.loop.serve_until_closed()
    assert [type(one.error) for one in served.ended()[3:]] == [EngineFault] * 3


def test_a_long_request_starves_nobody():
    """One slot, an endless answer, and short ones behind it: each ends within its caller's turns."""
    model = make_model("llama", head_dim=16)
    long = request([5], tokens=90, temperature=1.0, stops=lambda ids: False, caller="long")
    long.sequence.has_stop_text, short = (
        (lambda ids: False),
        [request([6 + n], n, tokens=2, caller="short") for n in range(3)],
    )
    served = Served(model, slots=1, turn_tokens=8)
    served.loop._weights[0].slots._is_eos[:] = False
    served.loop.submit_requests([long])
    served.loop.step()
    served.loop.submit_requests(short)
    for _ in range(60):
        served.loop.step()
    assert [one.has_ended for one in short] == [True] * 3 and not long.has_ended
    served.drain()
    assert len(long.sequence.tokens) == 90


def test_callers_take_turns():
    queue = FairQueue()
    many, one = [request([5], caller="many") for _ in range(3)], request([5], caller="one")
    for entry in (*many, one):
        queue.add_request(entry)
    assert [queue.take_request() for _ in range(5)] == [many[0], one, many[1], many[2], None]
    queue.add_request(one)
    assert queue.remove_request(one) and not queue.remove_request(one) and len(queue) == 0


@pytest.mark.parametrize("kind", [ContinuousBatcher, FallbackBatcher])
def test_a_request_ends_on_the_weights_that_it_began_on(kind):
    """Three sets of weights while requests come: none is dropped, none mixed."""
    models = [
        make_model("llama", head_dim=16, initializer_range=size) for size in (0.3, 0.28, 0.32, 0.26)
    ]
    served, asked = Served(models[0], kind=kind, slots=3, turn_tokens=6), []
    for version, model in enumerate(models):
        if version:
            served.loop.publish_weights(served.build_slot_opener(model), version)
        for one in mixed(5, seed=version):
            asked.append(one)
            served.loop.submit_requests([one])
            served.loop.step()
    served.drain()  # the fourth set waited for the first to be done with
    asked += (last := mixed(3, seed=9))
    served.loop.submit_requests(last)
    served.drain()
    assert {one.policy_version for one in asked} == {0, 1, 2, 3}
    for version, model in enumerate(models):
        own = [one for one in asked if one.policy_version == version]
        same(own, offline(model, own))
    assert served.loop.state.versions == 1 and served.loop.state.policy_version == 3


def test_weights_that_do_not_fit_beside_others_wait(monkeypatch):
    old, new = (
        make_model("llama", head_dim=16),
        make_model("llama", head_dim=16, initializer_range=0.2),
    )
    served = Served(old, slots=2)
    first, second = request([5], tokens=40, temperature=1.0, top=1), request([6], tokens=5)
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
    same([first], offline(old, [first]))
    same([second], offline(new, [second]))
    broken = make_model("llama", head_dim=16)
    with torch.no_grad():
        broken.model.norm.weight[0] = float("nan")
    served.loop.publish_weights(served.build_slot_opener(broken), 2)
    third = request([7])
    served.loop.submit_requests([third])
    served.drain()
    assert third.policy_version == 1 and third.error is None


def test_a_request_that_fails_fails_alone(engine):
    model, kind = engine

    def fails(ids):
        raise ValueError("in the middle")

    good, bad = request([5, 6], tokens=10, temperature=0.7), request([5, 6], tokens=10, stops=fails)
    served = Served(model, kind=kind)
    served.loop.submit_requests([bad, good])
    served.drain()
    assert isinstance(bad.error, ValueError) and good.error is None
    same([good], offline(model, [good]))


def test_a_step_that_fails_gives_its_requests_back():
    model = make_model("llama", head_dim=16)
    served = Served(model)
    asked = mixed(3)
    served.loop.submit_requests(asked)
    slots = served.loop._weights[0].slots
    whole, slots._sample_active_slots = slots._sample_active_slots, lambda: 1 / 0
    served.drain()
    assert [type(one.error) for one in asked] == [EngineFault] * 3
    slots._sample_active_slots = whole
    again = mixed(3)
    served.loop.submit_requests(again)
    served.drain()
    same(again, offline(model, again))


class Slow(ScriptedSequence):
    """A sequence whose observations come from another thread."""

    def __init__(self, *arguments, pool, **more):
        super().__init__(*arguments, **more)
        self.pool = pool

    def take_action(self, action_ids, logprobs, hit_limit):
        found = super().take_action(action_ids, logprobs, hit_limit)
        return PendingTurn(
            self.pool.submit("a step", time.sleep, 0.01), lambda result: (result(), found)[1]
        )


@pytest.mark.parametrize("kind", [ContinuousBatcher, FallbackBatcher])
def test_sessions_share_the_slots_and_step_aside_while_their_environment_works(kind):
    model = make_model("llama", head_dim=16)
    observations = [[7, 8, 9], [11], [4, 5]]

    def sessions(cls, **more):
        return [cls([3 + n, 9], n, observations, room=60, **more) for n in range(5)]

    backend = create_rollout_backend(model, eos_ids=EOS, pad_id=0, max_length=CONTEXT)
    expected = sessions(ScriptedSequence)
    backend.run_sequences(expected, SamplingSettings(max_completion_tokens=60))
    with StepPool(4, 10.0) as pool:
        played = sessions(Slow, pool=pool)
        served = Served(model, kind=kind, slots=2, turn_tokens=4)
        thread = threading.Thread(target=served.loop.serve_until_closed)
        thread.start()
        served.loop.submit_requests(
            [ServedRequest(one, SamplingSettings(max_completion_tokens=60)) for one in played]
        )
        late = time.monotonic() + 20
        while len(served.ended()) < 5 and time.monotonic() < late:
            time.sleep(0.005)
        served.loop.close()
        thread.join(10)
    assert [one.turns for one in played] == [one.turns for one in expected]
    assert sum(len(one.turns) > 1 for one in played) >= 3
