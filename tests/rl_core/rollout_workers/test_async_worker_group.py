"""Asynchronous rollouts: staleness bound, queue, checkpoint, and the replay of a recorded schedule."""

import copy
import json
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from helpers.letters import LOW, LetterEpisode, Letters, comparable, weights
from helpers.worker_cluster import LocalCluster, compiled_model, letters_trainer, with_team

from rl_core.data.tokenizer import train_tokenizer
from rl_core.environments.environment import Step
from rl_core.errors import DataError, WorkerFailed
from rl_core.losses.advantages import vtrace
from rl_core.losses.importance import importance_ratios
from rl_core.rollout_workers.async_worker import (
    AsyncRolloutWorker,
    RolloutTask,
    list_token_versions,
)
from rl_core.rollout_workers.async_worker_group import (
    AsyncWorkerGroup,
    ScheduleReplay,
    read_schedule,
)
from rl_core.rollout_workers.weight_transfer import (
    collect_unique_weights,
    copy_without_weights,
    pack_tensors,
)
from rl_core.rollout_workers.worker import WorkerSpec, read_runtime_versions
from rl_core.rollout_workers.worker_group import WorkerSlot
from rl_core.rollouts.episode_sequence import EpisodeRequest
from rl_core.settings import CriticSettings, SamplingSettings
from rl_core.trainers.policy_gradient import advantages as policy_advantages
from rl_core.trainers.policy_gradient import rollout_buffer


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["abc xyz"], 300)


class SlowEpisode(LetterEpisode):
    """An episode of several turns; every fifth one takes as long as several iterations."""

    turns = 0

    def act(self, text):
        self.turns += 1
        if self.turns < 4:
            time.sleep(0.15 if self.seed % 5 == 0 else 0.002)
            is_low = text[:1].lower() in "abcdefghijklm" if text else False
            return Step(messages=[{"role": "user", "content": "more"}], reward=float(is_low))
        return super().act(text)


class SlowLetters(Letters):
    name = "slow_letters"

    def episode(self, seed, level):
        return SlowEpisode(seed, level)


@pytest.fixture(autouse=True)
def clusters():
    """End every worker's thread after a test."""
    _CLUSTERS.clear()
    yield
    for cluster in _CLUSTERS:
        cluster.close()


_CLUSTERS = []


def make_stream(
    tokenizer,
    schedule=None,
    count=2,
    partial="keep",
    staleness=2,
    lose=(),
    importance="token",
    **options,
):
    """Build a trainer whose workers are threads of this process."""
    sampling = SamplingSettings(
        max_completion_tokens=24, max_turns=4, max_concurrent_steps=64, temperature=1.2
    )
    trainer = letters_trainer(
        tokenizer,
        SlowLetters(),
        context=64,
        curriculum=LOW,
        importance=importance,
        sampling=sampling,
        prompts_per_iteration=4,
        group_size=3,
        **options,
    )
    cluster = LocalCluster(lose=lose)
    _CLUSTERS.append(cluster)
    with_team(trainer, cluster, count, max_staleness=staleness, partial=partial)
    team, trainer.worker_group = trainer.worker_group, None
    trainer.stream = AsyncWorkerGroup(team.settings, cluster, team.config, schedule=schedule)
    return trainer


def run_iterations(trainer, iterations):
    rows = []
    for _ in range(iterations):
        metrics = comparable(trainer.step())
        rows.append(
            (
                metrics,
                [
                    (r.completion_ids, r.sampler_logprobs)
                    for g in trainer.groups
                    for r in g.rollouts
                ],
            )
        )
    return rows


def list_versions(trainer):
    return [
        version for g in trainer.groups for r in g.rollouts for version in list_token_versions(r)
    ]


@pytest.mark.parametrize("partial", ["keep", "drop"])
def test_a_recorded_schedule_is_replayed_bit_for_bit(tokenizer, tmp_path, partial):
    file = tmp_path / "schedule.jsonl"
    trainer = make_stream(tokenizer, file, partial=partial, model=compiled_model(tokenizer, 64))
    rows, num_mixed, untrained = [], 0, weights(trainer)
    for iteration in range(8):
        rows += run_iterations(trainer, 1)
        versions = list_versions(trainer)
        assert all(iteration - 2 <= version <= iteration for version in versions)
        starts = [r.version_starts for g in trainer.groups for r in g.rollouts]
        num_mixed += sum(len({version for _, version in start}) > 1 for start in starts)
    used = [
        group["number"]
        for rows_of in read_schedule(file).values()
        for row in rows_of
        for group in row["groups"]
    ]
    assert len(used) == len(set(used)) == 8 * 4  # each learned from once
    assert (weights(trainer) - untrained).abs().max() > 1e-2  # versions differ
    open_tasks = [task.number for task in trainer.stream._list_open_tasks()]
    # none is lost
    assert sorted([*used, *open_tasks]) == list(range(trainer.stream._next_number))
    assert len(open_tasks) <= 4 * 3
    assert num_mixed == 0 if partial == "drop" else num_mixed > 0

    replay = make_stream(tokenizer, model=compiled_model(tokenizer, 64))
    replay.stream = ScheduleReplay(file, replay.stream.config, 2)
    replayed = run_iterations(replay, 8)
    unreplayed = ("policy/staleness_mean", "policy/staleness_max")
    assert [row for _, row in replayed] == [row for _, row in rows]
    assert [metrics for metrics, _ in replayed] == [
        {name: value for name, value in metrics.items() if name not in unreplayed}
        for metrics, _ in rows
    ]
    assert weights(replay).numpy().tobytes() == weights(trainer).numpy().tobytes()
    with pytest.raises(DataError, match="the schedule ends before iteration 9"):
        replay.step()


def test_a_critic_learns_from_stale_rollouts_by_v_trace(tokenizer, tmp_path, monkeypatch):
    calls = []

    def record_call(rewards_RS, values_RS, ratios_RS, mask_RS, **options):
        calls.append((rewards_RS, values_RS, ratios_RS, mask_RS, options))
        calls.append(vtrace(rewards_RS, values_RS, ratios_RS, mask_RS, **options))
        return calls[-1]

    def record_ratios(old_RS, sampler_RS, mask_RS):
        given.append((old_RS, sampler_RS))
        return importance_ratios(old_RS, sampler_RS, mask_RS)

    given = []
    monkeypatch.setattr(policy_advantages, "vtrace", record_call)
    monkeypatch.setattr(rollout_buffer, "importance_ratios", record_ratios)
    options = {"algorithm": "ppo", "importance": "vtrace", "critic": CriticSettings(kind="shared")}
    file = tmp_path / "schedule.jsonl"
    trainer = make_stream(tokenizer, file, model=compiled_model(tokenizer, 64), **options)
    rows, ratios = [], {0: [], 1: []}
    for iteration in range(6):
        rows += run_iterations(trainer, 1)
        (rewards_RS, values_RS, ratios_RS, mask_RS, options_of), (advantages_RS, targets_RS) = calls
        ((old_RS, sampler_RS),) = given
        calls.clear(), given.clear()
        sampled = [
            logprob
            for group in trainer.groups
            for rollout in group.rollouts
            for logprob, counts in zip(rollout.sampler_logprobs, rollout.loss_mask, strict=True)
            if counts
        ]
        assert sampler_RS[mask_RS].tolist() == pytest.approx(sampled)
        assert torch.allclose(ratios_RS[mask_RS], (old_RS - sampler_RS)[mask_RS].exp())
        versions = [list_token_versions(r) for g in trainer.groups for r in g.rollouts]
        assert [len(row) for row in versions] == mask_RS.sum(1).tolist()
        for row, tokens in enumerate(versions):
            mask_S = mask_RS[row]
            # a rollout that continued under new weights has states of the old ones before it
            ratios[int(min(tokens) < iteration)] += ratios_RS[row][mask_S].tolist()
            expected = trace_by_hand(
                *(part[row][mask_S].tolist() for part in (rewards_RS, values_RS, ratios_RS)),
                last_value=float(options_of["bootstrap_B"][row]),
                trace_lambda=options_of["trace_lambda"],
            )
            for got, want in zip((advantages_RS, targets_RS), expected, strict=True):
                assert got[row][mask_S].tolist() == pytest.approx(want, abs=1e-5)
    assert ratios[0] == pytest.approx([1.0] * len(ratios[0]), abs=1e-4)
    assert max(ratios[1]) > 1.05 and min(ratios[1]) < 0.95  # the weights moved in between

    replay = make_stream(tokenizer, model=compiled_model(tokenizer, 64), **options)
    replay.stream = ScheduleReplay(file, replay.stream.config, 2)
    assert [row for _, row in run_iterations(replay, 6)] == [row for _, row in rows]
    assert weights(replay).numpy().tobytes() == weights(trainer).numpy().tobytes()


def trace_by_hand(rewards, values, ratios, last_value, trace_lambda):
    """V-trace with gamma 1 and both caps 1: Espeholt et al. 2018, eq. 1 backwards (remark 1), lambda: remark 2."""
    advantages, targets = [], []
    next_target = next_value = last_value
    for reward, value, ratio in reversed(list(zip(rewards, values, ratios, strict=True))):
        rho = min(1.0, ratio)
        trace = trace_lambda * min(1.0, ratio)
        target = value + rho * (reward + next_value - value) + trace * (next_target - next_value)
        bootstrap = next_value + trace_lambda * (next_target - next_value)
        advantages.append(rho * (reward + bootstrap - value))
        targets.append(target)
        next_target, next_value = target, value
    return advantages[::-1], targets[::-1]


def test_open_tasks_survive_a_kill_and_a_lost_worker(tokenizer, tmp_path):
    file = tmp_path / "schedule.jsonl"
    trainer = make_stream(tokenizer, file, model=compiled_model(tokenizer, 64))
    run_iterations(trainer, 3)
    parts = trainer, trainer.policy, trainer.optimizer_step
    states = copy.deepcopy([part.state_dict() for part in parts])
    run_iterations(trainer, 1)  # recorded after the checkpoint, with an incomplete last line
    with open(file, "ab") as torn:
        torn.write(b'{"iteration": 4, "part": 0, "gro')
    resumed = make_stream(tokenizer, file, model=compiled_model(tokenizer, 64), lose={8, 13})
    for part, state in zip((resumed, resumed.policy, resumed.optimizer_step), states, strict=True):
        part.load_state_dict(state)
    run_iterations(resumed, 3)
    assert resumed.stream.lost_workers == 2
    used = [
        group["number"]
        for rows in read_schedule(file).values()
        for row in rows
        for group in row["groups"]
    ]
    open_tasks = [task.number for task in resumed.stream._list_open_tasks()]
    assert len(used) == len(set(used)) == 6 * 4
    assert sorted([*used, *open_tasks]) == list(range(resumed.stream._next_number))
    assert [json.loads(line)["iteration"] for line in file.read_bytes().splitlines()] == list(
        range(6)
    )
    replay = make_stream(tokenizer, model=compiled_model(tokenizer, 64))
    replay.stream = ScheduleReplay(file, replay.stream.config, 2)
    run_iterations(replay, 6)
    assert weights(replay).numpy().tobytes() == weights(resumed).numpy().tobytes()


def test_a_stale_group_goes_to_another_worker(
    tokenizer,
):
    trainer = make_stream(tokenizer, staleness=1)
    stream = trainer.stream
    stream._slots = [WorkerSlot(number, number) for number in range(2)]
    assigned = []
    stream.cluster = SimpleNamespace(
        call_worker=lambda worker, method, tasks, *_: assigned.append(
            (worker, [t.number for t in tasks])
        ),
        wait_for_calls=lambda calls, timeout_s: calls,
        fetch_result=lambda call: None,
    )

    def build_task(number, plays=0):
        return RolloutTask(number, EpisodeRequest(number, "low"), 3, 1.0, 5, plays)

    stream._last_workers = {0: 0, 1: 1, 2: 0}  # each was too slow for some of them
    stream._queue.extend(
        [build_task(0, 1), build_task(1, 1), build_task(2, 2), build_task(3), build_task(4)]
    )
    stream._assign_tasks(1, SamplingSettings())  # 2 in progress at a time, so 1 each
    # 0 and 1 swap workers; an iteration will wait for 2, so it exceeds the share; 3 and 4 stay queued
    assert assigned == [(0, [1]), (1, [0, 2])] and [t.number for t in stream._queue] == [3, 4]


def test_a_worker_that_does_not_answer_is_replaced(tokenizer, monkeypatch):
    monkeypatch.setattr("rl_core.rollout_workers.async_worker_group.HEARTBEAT_TIMEOUT_S", 0.2)
    monkeypatch.setattr("rl_core.rollout_workers.async_worker_group.HEARTBEAT_TIMEOUT_S", 0.2)
    trainer = make_stream(tokenizer)
    run_iterations(trainer, 1)
    cluster, events = trainer.stream.cluster, []
    trainer.stream.on_event = events.append
    cluster.hung = [cluster.workers[1]]
    run_iterations(trainer, 3)
    assert (
        trainer.stream.lost_workers == 1
        and "rollout worker 1 was lost (no heartbeat for 120 s)" in events[0]
    )


@pytest.mark.parametrize(
    "text", [b"", b"{}\n", b'{"iteration": 0, "part": 0, "groups": [{"number": 1}]}\n', b"\xff\n"]
)
def test_an_invalid_schedule_is_refused(tmp_path, text):
    file = tmp_path / "schedule.jsonl"
    file.write_bytes(text)
    with pytest.raises(DataError, match=r"schedule\.jsonl"):
        read_schedule(file)


def test_results_and_errors_are_reported_immediately(tokenizer):
    worker = create_worker(tokenizer)
    worker.version = 0
    start_time = time.monotonic()
    assert worker.collect(0.2).finished == [] and time.monotonic() - start_time >= 0.2
    with ThreadPoolExecutor(1) as thread:
        result = thread.submit(worker.collect, 60.0)
        worker.begin(
            [build_task(0, 1)], SamplingSettings(max_completion_tokens=16, max_turns=2), 1, "keep"
        )
        assert [finished.task.number for finished in result.result(20).finished] == [0]
        result = thread.submit(worker.collect, 60.0)
        worker._record_error(WorkerFailed("ended by the test"))
        with pytest.raises(WorkerFailed, match="ended by the test"):
            result.result(20)
        worker._error = None
        result = thread.submit(worker.collect, 60.0)
        worker.end()
        assert result.result(20).finished == []


class OneSlowLetters(Letters):
    """Letters in which episodes of seed 0 take half a second at their tool, the others none."""

    name = "one_slow"

    def episode(self, seed, level):
        return OneSlowEpisode(seed, level)


class OneSlowEpisode(LetterEpisode):
    acted = 0

    def act(self, text):
        self.acted += 1
        if self.acted == 1:
            time.sleep(0.5 if self.seed == 0 else 0.0)
            return Step(messages=[{"role": "user", "content": "more"}])
        return super().act(text)


def create_worker(tokenizer, context=64):
    trainer = with_team(
        letters_trainer(
            tokenizer, OneSlowLetters(), context=context, model=compiled_model(tokenizer, context)
        ),
        LocalCluster(),
        1,
        max_staleness=1,
    )
    config = trainer.worker_group.config
    spec = WorkerSpec(
        copy_without_weights(config.model),
        "cpu",
        config.renderer,
        config.environment,
        list(config.eos_ids),
        config.pad_id,
        context,
        1,
        read_runtime_versions(),
    )
    return AsyncRolloutWorker(spec, pack_tensors(collect_unique_weights(config.model)))


def play_tasks(worker, tasks, max_concurrent, sampling):
    """Play tasks; return their numbers in the order in which they end."""
    worker.begin(tasks, sampling, max_concurrent, "keep")
    numbers, end = [], time.monotonic() + 20
    while len(numbers) < len(tasks) and time.monotonic() < end:
        numbers += [finished.task.number for finished in worker.collect().finished]
        time.sleep(0.01)
    worker.end()
    return numbers


def build_task(number, seed, temperature=1.0):
    return RolloutTask(number, EpisodeRequest("low", seed), 2, temperature, 7 + number)


def test_the_next_task_begins_when_one_has_ended(tokenizer):
    sampling = SamplingSettings(max_completion_tokens=16, max_turns=2, max_concurrent_steps=8)
    worker = create_worker(tokenizer)
    worker.version = 0
    runs, run_groups = [], worker._run_groups
    worker._run_groups = lambda groups, *rest: (runs.append(len(groups)), run_groups(groups, *rest))
    numbers = play_tasks(worker, [build_task(number, number) for number in range(6)], 2, sampling)
    assert numbers == [1, 2, 3, 4, 5, 0] and runs == [2]


def test_a_task_of_another_temperature_or_length_waits_for_the_next_run(tokenizer, monkeypatch):
    sampling = SamplingSettings(max_completion_tokens=16, max_turns=2, max_concurrent_steps=8)
    worker = create_worker(tokenizer)
    worker.version = 0
    tasks = [build_task(0, 0), build_task(1, 1), build_task(2, 2, 0.5), build_task(3, 3)]
    assert play_tasks(worker, tasks, 2, sampling)[-1] == 3
    refused = []
    monkeypatch.setattr(
        "rl_core.inference.versioned_run.StreamingEngineRun.can_fit",
        lambda run, sequence: bool(refused.append(1)),
    )
    worker = create_worker(tokenizer)
    worker.version = 0
    assert sorted(
        play_tasks(worker, [build_task(number, number) for number in range(4)], 2, sampling)
    ) == [
        0,
        1,
        2,
        3,
    ]
    assert len(refused) >= 1
