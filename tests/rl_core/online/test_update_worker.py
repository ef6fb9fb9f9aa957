"""The update worker: live, delayed, killed and resumed it computes the same bits; labels and alarms."""

import os
import shutil
import signal

import pytest
import torch
from helpers.online_worker import (
    build_answered_request,
    collect_compared_state,
    make_worker,
    run_to_end,
    settings,
    write_traffic,
)

from rl_core.errors import CheckpointError, FolderBusy, ResumeRefused
from rl_core.online.experience_log import ExperienceLog
from rl_core.online.labels import Label, create_feedback_label
from rl_core.online.update_worker import collect_worker_state
from rl_core.online.weight_snapshots import WeightSnapshots
from rl_core.settings import (
    OnlineBufferSettings,
    OnlineDriftSettings,
    OnlineLabelSettings,
)
from rl_core.storage import faults


@pytest.fixture(scope="module")
def undisturbed(traffic, tmp_path_factory):
    """Return the outcome of a worker that is never interrupted."""
    with make_worker(tmp_path_factory.mktemp("whole"), traffic) as worker:
        run_to_end(worker)
        return collect_compared_state(worker)


def test_updates_are_due_by_records_alone(traffic, tmp_path):
    with make_worker(tmp_path, traffic) as worker:
        progress = []
        while worker.step():
            progress.append((worker.updates, worker.records))
        # 13 requests, 3 labels
        assert progress == [(update, 2 + 2 * update) for update in range(1, 8)]
        assert worker.counts["labels"] == 3 and worker.counts["pseudo_labels"] > 0
        assert worker.learner.num_taken >= 6 and worker.served == 6
        assert worker.learner.snapshots.list_versions()[-2:] == [4, 6]


def test_a_worker_parallel_to_the_writer_equals_a_later_one(tmp_path, undisturbed):
    with make_worker(tmp_path, tmp_path / "log") as worker:
        for number in range(13):
            write_traffic(tmp_path / "log", [number], singles=True)
            if number % 3 == 0:
                while worker.step():
                    pass
        run_to_end(worker)
        assert collect_compared_state(worker) == undisturbed


def run_forked(work):
    """Run `work` in a forked child, and return its exit status."""
    pid = os.fork()
    if not pid:
        try:
            work()
            os._exit(0)
        except BaseException:
            os._exit(1)
    return os.waitpid(pid, 0)[1]


KILL_POINTS = ("online.updated:2:kill", "online.snapshot:4:kill", "online.saved:1:kill")
FURTHER_KILL_POINTS = (
    "publish.manifest:1:kill",
    "pointer.written:1:kill",
    "online.pruned:1:kill",
    "online.updated:1:kill",
    "publish.file:3:kill",
    "online.saved:1:kill",
)


@pytest.mark.parametrize(
    "points", [KILL_POINTS, pytest.param(FURTHER_KILL_POINTS, marks=pytest.mark.slow)]
)
def test_a_worker_killed_at_any_point_and_resumed_computes_the_same_bits(
    traffic, undisturbed, tmp_path, points
):
    torch.set_num_threads(1)

    def run(fault):
        faults.configure_faults(fault)
        with make_worker(tmp_path, traffic) as worker:
            run_to_end(worker)

    for fault in points:
        assert os.WTERMSIG(run_forked(lambda fault=fault: run(fault))) == signal.SIGKILL, fault
    with make_worker(tmp_path, traffic) as worker:
        run_to_end(worker)
        assert collect_compared_state(worker) == undisturbed


def test_a_worker_stopped_between_two_updates_continues(traffic, undisturbed, tmp_path):
    with make_worker(tmp_path, traffic) as worker:
        for _ in range(3):
            worker.step()
        for record in worker.log_reader.read_records():  # one record of the next update
            worker.experience_reader.process_record(record, worker.log, worker.updates, worker.live)
            break
        worker.save_checkpoint()
    with make_worker(tmp_path, traffic) as worker:
        run_to_end(worker)
        assert collect_compared_state(worker) == undisturbed


def test_without_its_snapshots_it_uses_the_recorded_tokens(traffic, tmp_path):
    with make_worker(tmp_path, traffic) as worker:
        shutil.rmtree(tmp_path / "snapshots" / "snapshot-00000000")
        while worker.updates < 2:
            worker.step()
        assert worker.last_report.is_lower_bound and worker.last_report.refused == ""


def test_other_settings_or_another_log_are_refused(traffic, tmp_path):
    with make_worker(tmp_path, traffic) as worker:
        run_to_end(worker)
        with pytest.raises(FolderBusy):
            make_worker(tmp_path, traffic).__enter__()
    with pytest.raises(ResumeRefused, match="another settings"):
        make_worker(tmp_path, traffic, fingerprint={"settings": "2"}).__enter__()
    write_traffic(tmp_path / "other", range(13), seed=5)
    with pytest.raises(CheckpointError, match="differs from the one that was learned from"):
        make_worker(tmp_path, tmp_path / "other").__enter__()
    with pytest.raises(CheckpointError, match="are missing"):
        make_worker(tmp_path, tmp_path / "nothing").__enter__()


def make_worker_with_records(tmp_path, records, worker_settings=None):
    with ExperienceLog(tmp_path / "log") as log:
        for record in records:
            if isinstance(record, tuple):
                log.append_label(*record)
            elif isinstance(record, dict):
                log.append([("control", record)])
            else:
                log.append_experience(record)
    return make_worker(tmp_path, tmp_path / "log", worker_settings)


def test_feedback_wins_late_and_the_precision_is_measured(tmp_path):
    first = build_answered_request(0)
    winner = first.vote.answer
    other = "b" if winner == "a" else "a"
    records = [
        first,
        (first.request_id, create_feedback_label(winner, right_answer=other)),
        (first.request_id, Label("answer", "consensus", text=winner)),  # arrives too late
        ("nobody", create_feedback_label("a", thumbs="up")),
    ]
    with make_worker_with_records(tmp_path, records, settings({"first_update": 100})) as worker:
        run_to_end(worker)
        assert worker.buffer.find_experience("r0").label.text == other
        assert (worker.precision.agreed, worker.precision.disagreed) == (0, 1)
        assert worker.counts["labels_without_experience"] == 1
        with ExperienceLog(tmp_path / "log") as log:
            # the caller changes the feedback
            log.append_label("r0", create_feedback_label(winner, right_answer=winner))
        run_to_end(worker)
        assert (worker.precision.agreed, worker.precision.disagreed) == (1, 0)


def test_untrusted_consensus_is_only_measured(tmp_path):
    worker_settings = settings(
        {"first_update": 2}, labels=OnlineLabelSettings(min_confidence=0.5, use_consensus=False)
    )
    records = [
        build_answered_request(0),
        build_answered_request(1),
        ("r1", create_feedback_label(None, right_answer="a")),
    ]
    with make_worker_with_records(tmp_path, records, worker_settings) as worker:
        run_to_end(worker)
        assert worker.learner.refused["empty"] == 1 and worker.updates == 1  # nothing had a label
        assert (
            worker.buffer.num_drawable == 1
            and worker.precision.agreed + worker.precision.disagreed == 1
        )


def test_pseudo_labels_refuted_by_feedback_are_revoked(tmp_path, caplog):
    """Refute four pseudo-labels, then confirm two.

    The 95% interval of 0 in 4 ends at 49%; two right ones lift it to 70%.
    """

    def build_feedback(number, is_right):
        winner = build_answered_request(number).vote.answer
        right_answer = winner if is_right else "ab".replace(winner, "")
        return f"r{number}", create_feedback_label(winner, right_answer=right_answer)

    votes = {number: build_answered_request(number).vote for number in range(40)}
    voted = [n for n, vote in votes.items() if vote.answer is not None and vote.confidence > 0.6]
    buffer = OnlineBufferSettings(capacity=32, max_caller_share=1.0)
    worker_settings = settings(
        {"first_update": 1000}, buffer=buffer, labels=OnlineLabelSettings(min_confidence=0.6)
    )
    records = [build_answered_request(n) for n in voted[:8]] + [
        build_feedback(n, False) for n in voted[:3]
    ]
    with make_worker_with_records(tmp_path, records, worker_settings) as worker:
        run_to_end(worker)
        sources = [buffered.label.source for buffered in worker.buffer.slots.values()]
        assert (
            sources.count("consensus") == 5
            and worker.collect_metrics()["online/trusts_consensus"] == 1.0
        )
        with ExperienceLog(tmp_path / "log") as log:
            log.append_label(*build_feedback(voted[3], False))
            log.append_experience(build_answered_request(voted[8]))
        run_to_end(worker)
        assert worker.buffer.num_drawable == 4 and worker.buffer.tree.total == pytest.approx(
            4 * 1.001**0.6
        )
        assert (
            worker.counts["pseudo_labels_taken_back"] == 4 and worker.counts["pseudo_labels"] == 8
        )
        assert "feedback confirmed 0 of 4" in caplog.text
        state = collect_worker_state(worker)
    with make_worker(
        tmp_path, tmp_path / "log", worker_settings
    ) as worker:  # distrust survives a restart
        assert (
            collect_worker_state(worker) == state and not worker.experience_reader.trusts_consensus
        )
        with ExperienceLog(tmp_path / "log") as log:
            for number in voted[4:6]:
                log.append_label(*build_feedback(number, True))
            log.append_experience(build_answered_request(voted[9]))
        run_to_end(worker)
        assert worker.buffer.find_experience(f"r{voted[9]}").label.source == "consensus"
        # revoked pseudo-labels wait for feedback
        assert worker.buffer.find_experience(f"r{voted[6]}").label is None


def test_bad_records_are_counted_and_affect_no_others(tmp_path, caplog):
    bad_token = build_answered_request(1)
    bad_token.rollouts[0].completion_ids[0] = 4711
    without_version = build_answered_request(4)
    without_version.rollouts[0].trajectory.policy_version = None
    records = [
        without_version,
        build_answered_request(0),
        bad_token,
        build_answered_request(2, version=9),
        {"order": "dance"},
        {"order": "live", "version": 77},
        build_answered_request(3),
    ]
    with make_worker_with_records(tmp_path, records) as worker:
        run_to_end(worker)
        assert worker.counts["refused"] == 5 and len(worker.buffer) == 2
    assert "4711" in caplog.text and "later update" in caplog.text and "dance" in caplog.text


def test_a_label_that_no_component_can_use_affects_no_other_experience(tmp_path):
    worker_settings = settings(
        {"first_update": 4, "batch_size": 8}, rewards={"task": 1.0, "numeric": 1.0}
    )
    records = [
        build_answered_request(0),
        build_answered_request(1),
        ("r0", create_feedback_label(None, right_answer="banana")),
        ("r1", create_feedback_label(None, right_answer="7")),
    ]
    with make_worker_with_records(tmp_path, records, worker_settings) as worker:
        run_to_end(worker)
        assert worker.counts["unscorable"] == 1 and worker.updates == 1
        assert {request for request in worker.last_report.requests} == {"r1"}
        assert worker.buffer.errors[worker.buffer.slots_by_request["r0"]] == 0.0


def test_an_alarm_stops_learning_and_restores_the_previous_snapshot(tmp_path):
    drift = OnlineDriftSettings(
        watched=("confidence",), reference=6, run_length=10.0, slack=0.0, reference_error=0.9
    )
    worker_settings = settings(
        {"first_update": 4, "update_every": 6, "snapshot_every": 1}, drift=drift
    )
    log = tmp_path / "log"
    with make_worker(tmp_path, log, worker_settings) as worker:
        agreed = [n for n in range(400) if build_answered_request(n).vote.confidence == 1.0][:12]
        split = [n for n in range(400) if build_answered_request(n).vote.confidence < 1.0][:14]
        write_traffic(log, agreed, feedback=10**9)
        run_to_end(worker)
        live = worker.learner.snapshots.list_versions()[-1]
        with ExperienceLog(log) as writer:
            writer.append([("control", {"order": "live", "version": live})])
        run_to_end(worker)
        assert (
            worker.live == live == worker.learner.snapshots.read_live_version()
            and not worker.paused
        )
        before = worker.learner.snapshots.load_weights(0)
        write_traffic(log, split, feedback=10**9)
        run_to_end(worker)
        assert worker.paused.startswith("drift: confidence falls") and worker.counts["pauses"] == 1
        assert all(
            (worker.learner.model.state_dict()[name] == value).all()
            for name, value in before.items()
        )
        assert worker.live == 0 == worker.learner.snapshots.read_live_version()
        with ExperienceLog(log) as writer:  # an order of a gate that does not know the alarm yet
            writer.append([("control", {"order": "live", "version": live})])
        run_to_end(worker)
        assert (
            worker.live == 0 == worker.learner.snapshots.read_live_version()
            and worker.counts["refused"] == 1
        )
        refused = worker.learner.refused["paused"]
        assert refused > 0 and worker.collect_metrics()["online/paused"] == 1.0
        with ExperienceLog(log) as writer:
            writer.append([("control", {"order": "resume"})])
        later = [n for n in range(400, 900) if build_answered_request(n).vote.confidence == 1.0][:6]
        write_traffic(log, later, feedback=10**9)
        taken = worker.learner.num_taken
        run_to_end(worker)
        assert not worker.paused and worker.learner.num_taken > taken
    with make_worker(tmp_path, log, worker_settings) as restarted:  # the state survives a restart
        assert restarted.live == 0 and restarted.past == [] and restarted.counts["pauses"] == 1


def test_success_is_observed_once_per_request(tmp_path):
    drift = OnlineDriftSettings(watched=("success",))
    first = build_answered_request(0)
    right = create_feedback_label(first.vote.answer, right_answer=first.vote.answer)
    with make_worker_with_records(
        tmp_path, [first, *[("r0", right)] * 5], settings({"first_update": 100}, drift=drift)
    ) as worker:
        run_to_end(worker)
        assert worker.counts["labels"] == 5 and worker.drift.detectors["success"].count == 1


def test_answers_far_from_the_champion_raise_an_alarm(tmp_path):
    drift = OnlineDriftSettings(
        watched=("champion_kl",),
        reference=2,
        run_length=10.0,
        slack=0.0,
        reference_error=0.9,
        max_champion_kl=1.0,
    )
    worker_settings = settings(
        {"first_update": 4, "update_every": 2, "snapshot_every": 1}, drift=drift
    )
    log = tmp_path / "log"
    with make_worker(tmp_path, log, worker_settings) as worker:
        write_traffic(log, range(8), feedback=10**9)
        run_to_end(worker)  # the KL of the champion's answers is exactly 0 for any log-probs
        assert (
            worker.signals[0] == ("champion_kl", 0.0, 1.0)
            and worker.collect_metrics()["online/champion_kl"] == 0.0
        )
        with ExperienceLog(log) as writer:
            writer.append([("control", {"order": "live", "version": 2})])
        write_traffic(log, range(8, 30), version=2, feedback=10**9)
        run_to_end(worker)
        assert worker.paused.startswith("drift: champion_kl rises") and worker.live == 0


def test_an_unreadable_live_snapshot_is_skipped(tmp_path):
    drift = OnlineDriftSettings(
        watched=("length",),
        reference=4,
        run_length=10.0,
        slack=0.0,
        reference_error=0.9,
        max_length=4,
    )
    worker_settings = settings(
        {"first_update": 4, "update_every": 2, "snapshot_every": 1, "keep_snapshots": 9},
        drift=drift,
    )
    log = tmp_path / "log"
    lengths = {
        number: [len(rollout.completion_ids) for rollout in build_answered_request(number).rollouts]
        for number in range(4000)
    }
    short = [number for number, counts in lengths.items() if max(counts) == 1][:20]
    long = [number for number, counts in lengths.items() if min(counts) > 2][:20]
    with make_worker(tmp_path, log, worker_settings) as worker:
        write_traffic(log, short[:10], feedback=10**9)
        run_to_end(worker)
        for version in worker.learner.snapshots.list_versions()[-2:]:
            with ExperienceLog(log) as writer:
                writer.append([("control", {"order": "live", "version": version})])
            run_to_end(worker)
        *_, before, live = worker.learner.snapshots.list_versions()
        assert (worker.live, worker.past) == (live, [0, before])
        worker.learner.snapshots = WeightSnapshots(tmp_path / "snapshots", cached=0)
        (worker.learner.snapshots.build_path(before) / "weights.safetensors").write_bytes(b"torn")
        write_traffic(log, long, feedback=10**9)
        run_to_end(worker)
        assert worker.paused.startswith("drift: length rises")
        assert (
            worker.live == 0 == worker.learner.snapshots.read_live_version() and worker.past == []
        )


def test_repeatedly_refused_updates_pause_the_worker(tmp_path, traffic):
    worker_settings = settings(
        {
            "kl_max": 0.0601,
            "learning_rate": 0.9,
            "min_learning_rate": 0.9,
            "max_refused": 2,
            "max_grad_norm": 1e3,
        }
    )
    with make_worker(tmp_path, traffic, worker_settings) as worker:
        run_to_end(worker)
        assert (
            worker.learner.refused["kl"] == 2
            and "in a row were refused, the last one: kl" in worker.paused
        )


def test_updates_with_nothing_to_learn_make_no_snapshot(tmp_path):
    """Check traffic whose answers are all worth the same; the gate only looks at new snapshots."""
    log = tmp_path / "log"
    with ExperienceLog(log, segment_bytes=4096) as writer:
        for number in range(12):
            writer.append_experience(build_answered_request(number))
            label = Label("score", "feedback", text=None, score=0.0)
            writer.append_label(f"r{number}", label)
    chosen = settings(rewards={"task": 1.0})  # every known total is 0, so every advantage is
    with make_worker(tmp_path, log, chosen) as worker:
        before = worker.learner.copy_served_weights()
        run_to_end(worker)
        metrics = worker.collect_metrics()
        assert worker.updates >= 5 and metrics["online/updates_taken"] == 0
        assert metrics["online/refused/null"] + metrics["online/refused/empty"] == worker.updates
        assert metrics["online/refused/null"] > 0
        assert metrics["online/update_success_rate"] == 1.0
        assert worker.learner.snapshots.list_versions() == [0] and not worker.paused
        after = worker.learner.copy_served_weights()
        assert all(torch.equal(after[name], before[name]) for name in before)
