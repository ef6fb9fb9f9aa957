"""Blocking environment steps: concurrency, timeouts, and no effect on sampling."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from helpers.scripted_sequences import VOCAB, ScriptedSequence, make_model, make_sessions, sampling
from helpers.typed_episodes import EOS, Looking, LookThenAnswer, Renderer, Typist

from rl_core.cpu import fused_decode
from rl_core.environments.environment import Environment, Episode, Step
from rl_core.environments.step_pool import PendingTurn, StepPool, wait_for_any_turn
from rl_core.errors import EnvironmentFault
from rl_core.inference import decoder
from rl_core.inference import engine as engine_run
from rl_core.inference.engine import Engine
from rl_core.inference.sampling import RolloutSequence
from rl_core.inference.slot_table import MAX_COMPILED_STEPS
from rl_core.inference.transformers_backend import TransformersBackend
from rl_core.rollouts.collect import collect_rollouts
from rl_core.rollouts.episode_sequence import EpisodeRequest
from rl_core.settings import SamplingSettings
from rl_core.types import Message

EOS_IDS = list(range(1, VOCAB, 5))
PATIENCE_S = 20.0  # timeout of tests that would otherwise hang
BACKENDS = [Engine, TransformersBackend]


def create_backend(cls: type, eos_ids: list[int] = EOS_IDS) -> Engine | TransformersBackend:
    return cls(make_model("llama"), eos_ids=eos_ids, pad_id=0, max_length=128)


class SlowSequence(ScriptedSequence):
    """A scripted sequence whose observations arrive after `work` on a thread."""

    pool: StepPool
    work: Callable[[], None]

    def take_action(self, action_ids: list[int], logprobs: list[float], hit_limit: bool) -> object:
        observation = super().take_action(action_ids, logprobs, hit_limit)
        return (
            observation
            if hit_limit
            else PendingTurn(self.pool.submit_call("s", self.work), lambda _: observation)
        )


def make_slow_sessions(pool: StepPool, work: Callable[[int], None]) -> list[SlowSequence]:
    sequences = make_sessions()
    for index, sequence in enumerate(sequences):
        sequence.__class__ = SlowSequence
        sequence.pool, sequence.work = pool, lambda index=index: work(index)
    return sequences  # type: ignore[return-value]


def get_results(sequence: ScriptedSequence) -> tuple:
    return sequence.turns, sequence.completion_ids, sequence.logprobs


class CountingPool(StepPool):
    """A pool that counts concurrent calls."""

    def __init__(self, max_concurrent: int, timeout_s: float = PATIENCE_S) -> None:
        super().__init__(max_concurrent, timeout_s)
        self.lock, self.running, self.most = threading.Lock(), 0, 0

    def submit_call(self, what: str, function: Callable, *args: object) -> object:
        def counted() -> object:
            with self.lock:
                self.running += 1
                self.most = max(self.most, self.running)
            try:
                return function(*args)
            finally:
                with self.lock:
                    self.running -= 1

        return super().submit_call(what, counted)


def test_the_pool_runs_as_many_as_it_may_and_no_more() -> None:
    barrier = threading.Barrier(3)
    with CountingPool(3) as pool:
        calls = [
            pool.submit_call("c", lambda index=index: (barrier.wait(PATIENCE_S), index)[1])
            for index in range(9)
        ]
        assert [call.wait_for_result() for call in calls] == list(range(9))
    assert pool.most == 3


def test_an_idle_thread_is_used_again_and_all_end_with_the_pool() -> None:
    previous = set(threading.enumerate())
    with StepPool(8, PATIENCE_S) as pool:
        seen = []
        for _ in range(3):
            seen.append(pool.submit_call("c", threading.current_thread).wait_for_result())
            assert pool._idle.acquire(timeout=PATIENCE_S), "the thread is idle again"
            pool._idle.release()
        assert seen == [seen[0]] * 3
        gate = threading.Barrier(2)
        two = [pool.submit_call("c", gate.wait, PATIENCE_S) for _ in range(2)]
        assert sorted(call.wait_for_result() for call in two) == [0, 1]
        threads = set(threading.enumerate()) - previous
        assert len(threads) == 2 and seen[0] in threads
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def test_a_failing_call_raises_on_its_result_and_the_pool_continues() -> None:
    def fail() -> None:
        raise KeyError("cell")

    with StepPool(1, PATIENCE_S) as pool:
        failing, fine = pool.submit_call("c", fail), pool.submit_call("c", lambda: 3)
        assert fine.wait_for_result() == 3
        with pytest.raises(KeyError, match="cell"):
            failing.wait_for_result()


def test_a_call_that_has_not_begun_is_not_overdue_and_never_begins_after_the_end() -> None:
    release, began = threading.Event(), []
    with StepPool(1, PATIENCE_S) as pool:
        hanging = pool.submit_call("first", release.wait, PATIENCE_S)
        waiting = pool.submit_call("second", began.append, 1)
        assert not waiting.is_done() and not hanging.is_done()
    release.set()
    hanging.wait_for_result()
    assert not waiting.future.done() and began == []


def test_a_call_after_a_hanging_one_does_not_wait_forever() -> None:
    release = threading.Event()
    with StepPool(1, 0.05) as pool:
        hanging = pool.submit_call("first", release.wait, PATIENCE_S)
        waiting = [pool.submit_call("later", lambda number=number: number) for number in (2, 3)]
        # a new thread has replaced the hanging one
        assert [call.wait_for_result() for call in waiting] == [2, 3]
        turns = [PendingTurn(hanging, lambda result: [1])]
        wait_for_any_turn(turns)
        with pytest.raises(EnvironmentFault, match=r"first has not returned within 0\.05 s"):
            hanging.wait_for_result()
        release.set()  # the late thread ends without taking a call
        assert pool.submit_call("last", lambda: 4).wait_for_result() == 4


@pytest.mark.parametrize("cls", BACKENDS)
def test_all_episodes_wait_at_the_same_time(cls: type) -> None:
    """12 sequences whose first steps only return once all 12 are waiting."""
    barrier = threading.Barrier(12)
    first = dict.fromkeys(range(12), True)

    def work(index: int) -> None:
        if first.pop(index, False):
            barrier.wait(PATIENCE_S)

    direct = [ScriptedSequence(s.prompt_ids, s.seed) for s in make_sessions()]
    backend = create_backend(cls)
    backend.run_sequences(direct, sampling())
    assert not any(hit for s in direct for _, hit in s.turns[:1]), "every sequence takes a step"
    with CountingPool(32) as pool:
        sequences = make_slow_sessions(pool, work)
        backend.run_sequences(sequences, sampling())
    assert pool.most == 12
    expected = make_sessions()
    backend.run_sequences(expected, sampling())
    assert [s.turns for s in sequences] == [s.turns for s in expected]
    assert sum(len(s.turns) > 1 for s in sequences) >= 3


@pytest.mark.parametrize("cls", BACKENDS)
@pytest.mark.parametrize("slots", [100, 5])
def test_the_order_in_which_steps_finish_changes_no_bit(cls: type, slots: int) -> None:
    def play_delayed(delay: Callable[[int], float]) -> list[tuple]:
        with StepPool(32, PATIENCE_S) as pool:
            sequences = make_slow_sessions(pool, lambda index: time.sleep(delay(index)))
            create_backend(cls).run_sequences(sequences, sampling(slots=slots))
        return [get_results(sequence) for sequence in sequences]

    forward = play_delayed(lambda index: 0.002 * index)
    assert play_delayed(lambda index: 0.002 * (12 - index)) == forward
    assert play_delayed(lambda index: 0.0) == forward


@pytest.mark.parametrize("slots", [100, 5])
def test_ready_sessions_play_to_their_end_while_one_still_waits(slots: int) -> None:
    """With 'ready', the first sequence's first step returns only when all others are over."""
    over, lock, others_over = set(), threading.Lock(), threading.Event()
    waited: list[bool] = []

    def work(index: int) -> None:
        if index == 0 and not waited:
            waited.append(others_over.wait(PATIENCE_S))

    class Watched(SlowSequence):
        def take_action(
            self, action_ids: list[int], logprobs: list[float], hit_limit: bool
        ) -> object:
            outcome = super().take_action(action_ids, logprobs, hit_limit)
            if outcome is None:
                self.end()
                return None
            finish = outcome._finish
            outcome._finish = lambda step: (
                observation if (observation := finish(step)) is not None else self.end()
            )
            return outcome

        def end(self) -> None:
            with lock:
                over.add(id(self))
                if len(over) == 11:
                    others_over.set()

    with StepPool(32, PATIENCE_S + 10) as pool:
        sequences = make_slow_sessions(pool, work)
        for sequence in sequences:
            sequence.__class__ = Watched
        create_backend(Engine).run_sequences(sequences, sampling(slots=slots, rejoin="ready"))
    assert waited == [True] and len(over) == 12
    expected = make_sessions()
    create_backend(Engine).run_sequences(expected, sampling(slots=slots))
    assert [s.turns for s in sequences] == [s.turns for s in expected], (
        "the waiting order changes no token"
    )


@pytest.mark.skipif(fused_decode.load_decode_kernels() is None, reason="needs a C compiler")
@pytest.mark.parametrize(("step_s", "steps"), [(1e-5, MAX_COMPILED_STEPS), (4.9e-4, 4), (0.01, 1)])
def test_environments_are_polled_every_two_milliseconds_of_sampling(
    monkeypatch: pytest.MonkeyPatch, step_s: float, steps: int
) -> None:
    model = make_model("llama", head_dim=16)
    engine = Engine(model, eos_ids=EOS_IDS, pad_id=0, max_length=128)
    now = [0.0]
    step_counts: dict[bool, list[int]] = {True: [], False: []}  # by whether a step is pending
    sample_steps = decoder.Decoder.sample_steps
    count_steps = engine_run.EngineRun._count_compiled_steps

    def sample(
        self: decoder.Decoder,
        states: object,
        count: int,
        is_end_V: object,
        steps: int,
        drafts: object,
    ) -> None:
        now[0] += step_s * steps
        sample_steps(self, states, count, is_end_V, steps, drafts)  # type: ignore[arg-type]

    def count_and_record(self: engine_run.EngineRun) -> int:
        steps = count_steps(self)
        step_counts[bool(self._waiting_on_env)].append(steps)
        return steps

    with StepPool(32, PATIENCE_S) as pool, monkeypatch.context() as patch:
        patch.setattr(decoder.Decoder, "sample_steps", sample)
        patch.setattr(engine_run.EngineRun, "_count_compiled_steps", count_and_record)
        patch.setattr(engine_run.time, "perf_counter", lambda: now[0])
        sequences = make_slow_sessions(pool, lambda index: time.sleep(0.02))
        engine.run_sequences(sequences, sampling(rejoin="ready"))
    assert set(step_counts[False]) == {MAX_COMPILED_STEPS} and set(step_counts[True]) == {steps}
    expected = make_sessions()
    engine.run_sequences(expected, sampling())
    assert [get_results(s)[:2] for s in sequences] == [get_results(s)[:2] for s in expected]


class ScriptedEnvironment(Looking):
    """A LookThenAnswer environment whose reset or step does something first."""

    def __init__(self, on: str, work: Callable[[], object], blocking: bool = True) -> None:
        super().__init__()
        self.on, self.work, self.looks = on, work, False
        self.blocking = blocking  # type: ignore[misc]

    def episode(self, seed: int, level: str) -> Episode:
        environment = self

        class Working(LookThenAnswer):
            looks = seed % 3 if self.looks else 0  # forced look turns

            def reset(self) -> list[Message]:
                if environment.on == "reset":
                    environment.work()
                return super().reset()

            def act(self, text: str) -> Step:
                if environment.on == "step":
                    environment.work()
                self.looks -= 1
                return super().act(text if self.looks < 0 else "L" + text)

        return Working(seed, level)


def play(
    environment: Environment,
    backend: object,
    count: int = 4,
    group_size: int = 2,
    **options: object,
) -> list:
    settings = SamplingSettings(**{"max_completion_tokens": 24, **options})
    requests = [EpisodeRequest("easy", seed) for seed in range(1, count + 1)]
    groups = collect_rollouts(
        environment, backend, Renderer(), requests, group_size=group_size, sampling=settings, seed=4
    )
    return [rollout for group in groups for rollout in group.rollouts]


def test_resets_happen_side_by_side_too() -> None:
    barrier = threading.Barrier(8)
    rollouts = play(
        ScriptedEnvironment("reset", lambda: barrier.wait(PATIENCE_S)),
        Typist(lambda sequence, turn: "A"),
    )
    assert [rollout.trajectory.seed for rollout in rollouts] == [1, 1, 2, 2, 3, 3, 4, 4]


def test_non_blocking_environments_stay_on_the_callers_thread() -> None:
    threads: list[threading.Thread] = []
    for blocking in (False, True):
        environment = ScriptedEnvironment(
            "step", lambda: threads.append(threading.current_thread()), blocking
        )
        play(environment, Typist(lambda sequence, turn: "A"), count=1, group_size=1)
    assert (
        threads[0] is threading.current_thread()
        and threads[1] is not threads[0]
        and threads[1].daemon
    )


def test_blocking_episodes_give_the_same_rollouts_as_non_blocking_ones() -> None:
    """Same tokens; complete rollouts bit-identical between two blocking runs."""
    backend = create_backend(Engine, [EOS, *range(2, VOCAB, 7)])

    def play_episodes(blocking: bool, **options: object) -> list:
        environment = ScriptedEnvironment("step", lambda: time.sleep(0.0005), blocking)
        environment.looks = True
        return play(environment, backend, count=8, group_size=3, **options)

    direct, threaded, repeated, ready = (
        play_episodes(False),
        play_episodes(True),
        play_episodes(True),
        play_episodes(True, rejoin="ready"),
    )
    assert sum(len(rollout.trajectory.turns) > 1 for rollout in direct) > 2
    for other in (threaded, ready):
        assert [r.completion_ids for r in other] == [r.completion_ids for r in direct]
        assert [r.reward for r in other] == [r.reward for r in direct]
    assert threaded == repeated


@pytest.fixture
def no_collection() -> Iterator[None]:
    """Disable garbage collection.

    A late call's thread is ended by an exception. Inside a garbage collector callback (hypothesis has one) Python
    drops it, and pytest fails whichever test is running.
    """
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize(
    ("on", "what", "where"),
    [
        ("step", "a step", "step 1 of the environment"),
        ("reset", "its reset", "the environment's reset"),
    ],
)
@pytest.mark.parametrize("rejoin", ["together", "ready"])
def test_an_episode_that_hangs_is_named(on: str, what: str, where: str, rejoin: str) -> None:
    release = threading.Event()

    def script(sequence: RolloutSequence, turn: int) -> str:
        return "A"

    try:
        with pytest.raises(EnvironmentFault) as caught:
            play(
                ScriptedEnvironment(on, lambda: release.wait(PATIENCE_S)),
                Typist(script),
                count=1,
                step_timeout_s=0.05,
            )
        assert str(caught.value) == (
            "2 of the newest 2 episodes failed (nothing is left to use). The first of this round: environment "
            f"'looking', level 'easy', seed 1, sample 0: {where}: {what} has not returned within 0.05 s "
            "(sampling.step_timeout_s)"
        )
        with pytest.raises(EnvironmentFault, match="level 'easy', seed 1, sample "):
            play(
                ScriptedEnvironment(on, lambda: release.wait(PATIENCE_S)),
                create_backend(Engine),
                count=1,
                step_timeout_s=0.05,
                rejoin=rejoin,
            )
    finally:
        release.set()
