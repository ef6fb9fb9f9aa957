"""The update worker: live, lagging, killed, resumed and replayed it computes the same bits; labels, alarms, pruning."""

import itertools
import json
import os
import shutil
import signal

import pytest
import torch
from helpers.online_worker import (
    answered,
    make_worker,
    outcome,
    run_to_end,
    settings,
    write_traffic,
)

from rl_core.errors import CheckpointError, DataError, FolderBusy, ResumeRefused
from rl_core.online.experience_log import ExperienceLog, list_segments
from rl_core.online.labels import Label, create_feedback_label
from rl_core.online.service_files import AUDIT_FILE, CONTRIBUTION_FILE
from rl_core.online.update_audit import UpdateAudit
from rl_core.online.update_step import UpdateReport
from rl_core.online.update_worker import collect_worker_state
from rl_core.online.weight_snapshots import WeightSnapshots
from rl_core.settings import (
    OnlineAuditSettings,
    OnlineBufferSettings,
    OnlineDriftSettings,
    OnlineLabelSettings,
)
from rl_core.storage import faults
from rl_core.storage.line_logs import RotatingLineLog


@pytest.fixture(scope="module")
def traffic(tmp_path_factory):
    folder = tmp_path_factory.mktemp("traffic")
    write_traffic(folder / "log", range(13), singles=True)
    return folder / "log"


@pytest.fixture(scope="module")
def whole(traffic, tmp_path_factory):
    """Outcome of a worker that nothing disturbed."""
    with make_worker(tmp_path_factory.mktemp("whole"), traffic) as worker:
        run_to_end(worker)
        return outcome(worker)


def test_updates_are_due_by_records_alone(traffic, tmp_path):
    with make_worker(tmp_path, traffic) as worker:
        places = []
        while worker.step():
            places.append((worker.updates, worker.records))
        # 13 requests, 3 labels
        assert places == [(update, 2 + 2 * update) for update in range(1, 8)]
        assert worker.counts["labels"] == 3 and worker.counts["pseudo_labels"] > 0
        assert worker.learner.num_taken >= 6 and worker.served == 6
        assert worker.learner.snapshots.list_versions()[-2:] == [4, 6]


def test_a_worker_beside_the_writer_equals_one_that_comes_later(tmp_path, whole):
    with make_worker(tmp_path, tmp_path / "log") as worker:
        for number in range(13):
            write_traffic(tmp_path / "log", [number], singles=True)
            if number % 3 == 0:
                while worker.step():
                    pass
        run_to_end(worker)
        assert outcome(worker) == whole


def forked(work):
    """Exit status of a forked child that does this."""
    pid = os.fork()
    if not pid:
        try:
            work()
            os._exit(0)
        except BaseException:
            os._exit(1)
    return os.waitpid(pid, 0)[1]


POINTS = ("online.updated:2:kill", "online.snapshot:4:kill", "online.saved:1:kill")
MORE = (
    "publish.manifest:1:kill",
    "pointer.written:1:kill",
    "online.pruned:1:kill",
    "online.updated:1:kill",
    "publish.file:3:kill",
    "online.saved:1:kill",
)


@pytest.mark.parametrize("points", [POINTS, pytest.param(MORE, marks=pytest.mark.slow)])
def test_killed_anywhere_and_resumed_it_computes_the_same_bits(traffic, whole, tmp_path, points):
    torch.set_num_threads(1)

    def run(fault):
        faults.configure_faults(fault)
        with make_worker(tmp_path, traffic) as worker:
            run_to_end(worker)

    for fault in points:
        assert os.WTERMSIG(forked(lambda fault=fault: run(fault))) == signal.SIGKILL, fault
    with make_worker(tmp_path, traffic) as worker:
        run_to_end(worker)
        assert outcome(worker) == whole


def test_stopped_between_two_updates_it_goes_on(traffic, whole, tmp_path):
    with make_worker(tmp_path, traffic) as worker:
        for _ in range(3):
            worker.step()
        for record in worker.log_reader.read_records():  # one record of the next update
            worker._process_record(record)
            break
        worker.save_checkpoint()
    with make_worker(tmp_path, traffic) as worker:
        run_to_end(worker)
        assert outcome(worker) == whole


def test_without_its_snapshots_it_uses_what_was_recorded(traffic, tmp_path):
    with make_worker(tmp_path, traffic) as worker:
        shutil.rmtree(tmp_path / "snapshots" / "snapshot-00000000")
        while worker.updates < 2:
            worker.step()
        assert worker.last_report.is_lower_bound and worker.last_report.refused == ""


def test_another_setting_or_log_is_refused(traffic, tmp_path):
    with make_worker(tmp_path, traffic) as worker:
        run_to_end(worker)
        with pytest.raises(FolderBusy):
            make_worker(tmp_path, traffic).__enter__()
    with pytest.raises(ResumeRefused, match="another settings"):
        make_worker(tmp_path, traffic, fingerprint={"settings": "2"}).__enter__()
    write_traffic(tmp_path / "other", range(13), seed=5)
    with pytest.raises(CheckpointError, match="differs from the one that was learned from"):
        make_worker(tmp_path, tmp_path / "other").__enter__()
    with pytest.raises(CheckpointError, match="are gone"):
        make_worker(tmp_path, tmp_path / "nothing").__enter__()


# --------------------------------------------------------------------------------------------------- labels and records


def worker_with(tmp_path, records, chosen=None):
    with ExperienceLog(tmp_path / "log") as log:
        for record in records:
            if isinstance(record, tuple):
                log.append_label(*record)
            elif isinstance(record, dict):
                log.append([("control", record)])
            else:
                log.append_experience(record)
    return make_worker(tmp_path, tmp_path / "log", chosen)


def test_feedback_wins_late_and_the_precision_is_measured(tmp_path):
    first = answered(0)
    winner = first.vote.answer
    other = "b" if winner == "a" else "a"
    records = [
        first,
        (first.request_id, create_feedback_label(winner, right_answer=other)),
        (first.request_id, Label("answer", "consensus", text=winner)),  # comes too late
        ("nobody", create_feedback_label("a", thumbs="up")),
    ]
    with worker_with(tmp_path, records, settings({"first_update": 100})) as worker:
        run_to_end(worker)
        assert worker.buffer.find_experience("r0").label.text == other
        assert (worker.precision.agreed, worker.precision.disagreed) == (0, 1)
        assert worker.counts["labels_without_experience"] == 1
        with ExperienceLog(tmp_path / "log") as log:
            # the caller thinks again
            log.append_label("r0", create_feedback_label(winner, right_answer=winner))
        run_to_end(worker)
        assert (worker.precision.agreed, worker.precision.disagreed) == (1, 0)


def test_where_consensus_is_not_trusted_it_is_measured_alone(tmp_path):
    chosen = settings(
        {"first_update": 2}, labels=OnlineLabelSettings(min_confidence=0.5, use_consensus=False)
    )
    records = [answered(0), answered(1), ("r1", create_feedback_label(None, right_answer="a"))]
    with worker_with(tmp_path, records, chosen) as worker:
        run_to_end(worker)
        assert worker.learner.refused["empty"] == 1 and worker.updates == 1  # nothing had a label
        assert (
            worker.buffer.num_drawable == 1
            and worker.precision.agreed + worker.precision.disagreed == 1
        )


def test_pseudo_labels_that_feedback_refutes_are_taken_back(tmp_path, caplog):
    """0 of 4 right: the 95% interval ends at 49%. Two that are right lift it to 70%."""

    def told(number, is_right):
        winner = answered(number).vote.answer
        return f"r{number}", create_feedback_label(
            winner, right_answer=winner if is_right else "ab".replace(winner, "")
        )

    voted = [
        n
        for n in range(40)
        if answered(n).vote.answer is not None and answered(n).vote.confidence > 0.6
    ][:12]
    buffer = OnlineBufferSettings(capacity=32, max_caller_share=1.0)
    chosen = settings(
        {"first_update": 1000}, buffer=buffer, labels=OnlineLabelSettings(min_confidence=0.6)
    )
    records = [answered(n) for n in voted[:8]] + [told(n, False) for n in voted[:3]]
    with worker_with(tmp_path, records, chosen) as worker:
        run_to_end(worker)
        sources = [kept.label.source for kept in worker.buffer.slots.values()]
        assert (
            sources.count("consensus") == 5
            and worker.collect_metrics()["online/trusts_consensus"] == 1.0
        )
        with ExperienceLog(tmp_path / "log") as log:
            log.append_label(*told(voted[3], False))
            log.append_experience(answered(voted[8]))
        run_to_end(worker)
        assert worker.buffer.num_drawable == 4 and worker.buffer.tree.total == pytest.approx(
            4 * 1.001**0.6
        )
        assert (
            worker.counts["pseudo_labels_taken_back"] == 4 and worker.counts["pseudo_labels"] == 8
        )
        assert "feedback confirmed 0 of 4" in caplog.text
        lost = collect_worker_state(worker)
    with make_worker(tmp_path, tmp_path / "log", chosen) as worker:  # distrust survives a restart
        assert (
            collect_worker_state(worker) == lost and not worker.experience_reader.trusts_consensus
        )
        with ExperienceLog(tmp_path / "log") as log:
            for number in voted[4:6]:
                log.append_label(*told(number, True))
            log.append_experience(answered(voted[9]))
        run_to_end(worker)
        assert worker.buffer.find_experience(f"r{voted[9]}").label.source == "consensus"
        # what was taken back waits for feedback
        assert worker.buffer.find_experience(f"r{voted[6]}").label is None


def test_bad_records_are_counted_and_cost_nothing_else(tmp_path, caplog):
    bad = answered(1)
    bad.rollouts[0].completion_ids[0] = 4711
    odd = answered(4)
    odd.rollouts[0].trajectory.policy_version = None
    records = [
        odd,
        answered(0),
        bad,
        answered(2, version=9),
        {"order": "dance"},
        {"order": "live", "version": 77},
        answered(3),
    ]
    with worker_with(tmp_path, records) as worker:
        run_to_end(worker)
        assert worker.counts["refused"] == 5 and len(worker.buffer) == 2
    assert "4711" in caplog.text and "later update" in caplog.text and "dance" in caplog.text


def test_a_label_that_no_component_can_use_spoils_no_other_experience(tmp_path):
    chosen = settings({"first_update": 4, "batch_size": 8}, rewards={"task": 1.0, "numeric": 1.0})
    records = [
        answered(0),
        answered(1),
        ("r0", create_feedback_label(None, right_answer="banana")),
        ("r1", create_feedback_label(None, right_answer="7")),
    ]
    with worker_with(tmp_path, records, chosen) as worker:
        run_to_end(worker)
        assert worker.counts["unscorable"] == 1 and worker.learner.num_taken == 1
        assert {request for request in worker.last_report.requests} == {"r1"}
        assert worker.buffer.errors[worker.buffer.slot_of["r0"]] == 0.0


# --------------------------------------------------------------------------------------------------------------- alarms


def test_an_alarm_stops_learning_and_goes_back_to_the_snapshot_before(tmp_path):
    drift = OnlineDriftSettings(
        watched=("confidence",), reference=6, run_length=10.0, slack=0.0, reference_error=0.9
    )
    chosen = settings({"first_update": 4, "update_every": 6, "snapshot_every": 1}, drift=drift)
    log = tmp_path / "log"
    with make_worker(tmp_path, log, chosen) as worker:
        agreed = [n for n in range(400) if answered(n).vote.confidence == 1.0][:12]
        split = [n for n in range(400) if answered(n).vote.confidence < 1.0][:14]
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
        with ExperienceLog(log) as writer:  # the gate, which did not know yet
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
        write_traffic(
            log,
            [n for n in range(400, 900) if answered(n).vote.confidence == 1.0][:6],
            feedback=10**9,
        )
        taken = worker.learner.num_taken
        run_to_end(worker)
        assert not worker.paused and worker.learner.num_taken > taken
    with make_worker(tmp_path, log, chosen) as again:  # and all of it survives
        assert again.live == 0 and again.past == [] and again.counts["pauses"] == 1


def test_success_is_told_once_by_request(tmp_path):
    drift = OnlineDriftSettings(watched=("success",))
    first = answered(0)
    right = create_feedback_label(first.vote.answer, right_answer=first.vote.answer)
    with worker_with(
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
    chosen, log = (
        settings({"first_update": 4, "update_every": 2, "snapshot_every": 1}, drift=drift),
        tmp_path / "log",
    )
    with make_worker(tmp_path, log, chosen) as worker:
        write_traffic(log, range(8), feedback=10**9)
        run_to_end(worker)  # answers of the champion: exactly 0, whatever their log-probs say
        assert (
            worker.signals[0] == ("champion_kl", 0.0)
            and worker.collect_metrics()["online/champion_kl"] == 0.0
        )
        with ExperienceLog(log) as writer:
            writer.append([("control", {"order": "live", "version": 2})])
        write_traffic(log, range(8, 30), version=2, feedback=10**9)
        run_to_end(worker)
        assert worker.paused.startswith("drift: champion_kl rises") and worker.live == 0


def test_a_live_snapshot_that_cannot_be_read_is_passed_over(tmp_path):
    drift = OnlineDriftSettings(
        watched=("length",),
        reference=4,
        run_length=10.0,
        slack=0.0,
        reference_error=0.9,
        max_length=4,
    )
    chosen = settings(
        {"first_update": 4, "update_every": 2, "snapshot_every": 1, "keep_snapshots": 9},
        drift=drift,
    )
    log = tmp_path / "log"
    short = [
        n for n in range(4000) if all(len(r.completion_ids) == 1 for r in answered(n).rollouts)
    ][:20]
    long = [n for n in range(4000) if all(len(r.completion_ids) > 2 for r in answered(n).rollouts)][
        :20
    ]
    with make_worker(tmp_path, log, chosen) as worker:
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


def test_refused_again_and_again_it_pauses(tmp_path, traffic):
    chosen = settings(
        {
            "kl_limit": 0.0601,
            "learning_rate": 0.9,
            "min_learning_rate": 0.9,
            "max_refused": 2,
            "max_grad_norm": 1e3,
        }
    )
    with make_worker(tmp_path, traffic, chosen) as worker:
        run_to_end(worker)
        assert (
            worker.learner.refused["kl"] == 2
            and "in a row were refused, the last one: kl" in worker.paused
        )


# ----------------------------------------------------------------------------------------------------- disk and logs


def test_snapshots_that_an_experience_refers_to_stay(tmp_path):
    update = {"snapshot_every": 1, "checkpoint_every": 2, "keep_snapshots": 1}
    log, chosen = (
        tmp_path / "log",
        settings(update, buffer=OnlineBufferSettings(capacity=4, max_caller_share=1.0)),
    )
    with make_worker(tmp_path, log, chosen) as worker:
        write_traffic(log, range(6), feedback=10**9)
        run_to_end(worker)
        write_traffic(log, [6], version=2, feedback=10**9)
        write_traffic(log, range(7, 9), version=2, feedback=10**9)
        run_to_end(worker)
        assert {0, 2} <= set(worker.learner.snapshots.list_versions())
        write_traffic(log, range(9, 19), version=worker.updates, feedback=10**9)
        run_to_end(worker)
        versions = set(worker.learner.snapshots.list_versions())
        assert (
            worker.buffer.collect_referenced_versions() <= versions and not {1, 4, 5, 7} & versions
        )


def test_what_a_killed_worker_published_later_removes_nothing(tmp_path):
    """After a kill, snapshots of updates that are computed again are there before their time."""
    update = {"snapshot_every": 1, "checkpoint_every": 4, "keep_snapshots": 2}
    log = tmp_path / "log"
    write_traffic(log, range(17), feedback=10**9)
    with make_worker(tmp_path / "whole", log, settings(update)) as worker:
        while worker.updates < 6:
            worker.step()
        expected = worker.learner.snapshots.list_versions()
    with make_worker(tmp_path / "killed", log, settings(update)) as worker:
        while worker.updates < 7:
            worker.step()
    with make_worker(tmp_path / "killed", log, settings(update)) as worker:
        assert worker.updates == 4
        while worker.updates < 6:
            worker.step()
        assert (
            [v for v in worker.learner.snapshots.list_versions() if v <= 6]
            == expected
            == [0, 3, 4, 5, 6]
        )


def test_snapshots_of_what_is_known_already_are_not_published(tmp_path):
    chosen = settings({"snapshot_every": 1}, labels=OnlineLabelSettings(use_consensus=False))
    log = tmp_path / "log"
    write_traffic(log, range(9), feedback=10**9)
    with make_worker(tmp_path, log, chosen) as worker:
        run_to_end(worker)
        assert worker.updates == 3 and worker.learner.refused["empty"] == 3
        assert worker.learner.snapshots.list_versions() == [0]
        with ExperienceLog(log) as writer:
            writer.append_label("r8", Label("answer", "feedback", text="a"))
        write_traffic(log, range(9, 14), feedback=10**9)
        run_to_end(worker)
        assert worker.updates == 6 and worker.learner.snapshots.list_versions()[0] == 0
        assert worker.served == max(worker.learner.snapshots.list_versions()) > 3
        assert worker.learner.num_taken > 0


def test_where_nothing_better_is_found_what_is_answered_by_now_is_not_stale(tmp_path):
    buffer = OnlineBufferSettings(capacity=4, max_staleness=2)
    log = tmp_path / "log"
    write_traffic(log, range(25), feedback=10**9)
    with make_worker(tmp_path, log, settings(buffer=buffer)) as worker:
        run_to_end(worker)  # the gate lets nothing through: every answer is of version 0
        assert worker.updates > 9 and worker.live == 0
        assert worker.buffer.evicted["staleness"] == worker.buffer.evicted["late"] == 0
        assert worker.last_report.refused == ""


def test_a_log_that_is_full_is_emptied_again(tmp_path):
    """One experience that is never evicted must not hold all segments after its own."""
    size = 60_000
    buffer = OnlineBufferSettings(
        capacity=8, max_caller_share=1.0, segment_bytes=4096, max_bytes=size, keep_segments=False
    )
    log, kept = tmp_path / "log", []
    agreed = (number for number in range(9999) if answered(number).vote.confidence == 1.0)
    with make_worker(
        tmp_path, log, settings({"checkpoint_every": 1, "update_every": 4}, buffer=buffer)
    ) as worker:
        for number in itertools.islice(agreed, 50):
            with ExperienceLog(log, segment_bytes=4096, max_bytes=size) as writer:
                kept.append(writer.append_experience(answered(number)))
            while worker.step():
                pass
            if worker.buffer.find_first_number() == 1:
                worker.buffer.record_error(worker.buffer.slots[0].experience.request_id, 99.0)
        assert (
            None not in kept
            and worker.buffer.find_first_number() > 1
            and worker.buffer.evicted["log"] > 0
        )


def test_the_model_that_it_began_with_stays_for_the_gate(tmp_path):
    update = {"snapshot_every": 1, "checkpoint_every": 1, "keep_snapshots": 1}
    log, chosen = (
        tmp_path / "log",
        settings(update, buffer=OnlineBufferSettings(capacity=4, max_caller_share=1.0)),
    )
    with make_worker(tmp_path, log, chosen) as worker:
        write_traffic(log, range(6), feedback=10**9)
        run_to_end(worker)
        # nothing in the buffer is of the first model, and it was not live of late
        for start in (
            6,
            12,
            18,
        ):
            with ExperienceLog(log) as writer:
                writer.append([("control", {"order": "live", "version": worker.served})])
            write_traffic(log, range(start, start + 6), version=worker.served, feedback=10**9)
            run_to_end(worker)
        assert 0 not in worker.buffer.collect_referenced_versions() | {
            worker.live,
            *worker.past[-1:],
        }
        assert (
            0 in worker.learner.snapshots.list_versions()
            and 1 not in worker.learner.snapshots.list_versions()
        )


def test_segments_of_evicted_experiences_go_where_they_are_not_kept(tmp_path):
    buffer = OnlineBufferSettings(capacity=4, segment_bytes=4096, keep_segments=False)
    log = tmp_path / "log"
    with make_worker(
        tmp_path, log, settings({"update_every": 5, "checkpoint_every": 1}, buffer=buffer)
    ) as worker:
        for start in range(0, 20, 4):
            write_traffic(log, range(start, start + 4))
            run_to_end(worker)
        left = list_segments(log)
        assert 1 < left[0][0] <= worker.buffer.find_first_number()
        expected = outcome(worker)
    with make_worker(
        tmp_path, log, settings({"update_every": 5, "checkpoint_every": 1}, buffer=buffer)
    ) as again:
        assert outcome(again)[:3] == expected[:3]
    with pytest.raises(DataError, match="begins with record"):
        make_worker(
            tmp_path / "new",
            log,
            settings({"update_every": 5, "checkpoint_every": 1}, buffer=buffer),
        ).__enter__()


def test_audit_and_contributions_say_what_was_done(traffic, tmp_path):
    with (
        UpdateAudit(tmp_path, OnlineAuditSettings()) as audit,
        make_worker(tmp_path, traffic, audit=audit) as worker,
    ):
        run_to_end(worker)
        expected = worker.last_report
    lines = (tmp_path / AUDIT_FILE).read_text().splitlines()
    records = [json.loads(line) for line in (tmp_path / CONTRIBUTION_FILE).read_text().splitlines()]
    assert len(lines) == len(records) == 7 and audit.num_dropped == 0
    assert (
        "update 7: taken; loss" in lines[-1]
        and f"KL {expected.kl_control['mean_kl']:.4g} of 0.05" in lines[-1]
    )
    last = records[-1]
    assert {
        "losses",
        "gradients",
        "kl_control",
        "learning_rate",
        "refused",
        "experiences",
    } <= last.keys()
    assert (
        last["losses"] == expected.losses
        and last["kl_control"]["coefficient"] == expected.kl_control["coefficient"]
    )
    one = last["experiences"][0]
    known = next(row for row in one["rewards"]["rollouts"] if row is not None)
    assert (
        one["rewards"]["components"] == ["task", "coherence", "curiosity"]
        and len(known["raw"]) == 3
    )
    assert known["total"] == pytest.approx(sum(known["weighted"]))


def test_a_disk_that_takes_nothing_drops_records_and_stops_nobody(tmp_path):
    (tmp_path / "file").write_text("")
    with UpdateAudit(tmp_path / "file", OnlineAuditSettings(queue=1)) as audit:
        for number in range(200):
            audit.enqueue_update(UpdateReport(number, "empty"), None)
    assert audit.num_dropped == 200


def test_logs_are_rotated_and_torn_ends_closed(tmp_path):
    log = RotatingLineLog(tmp_path / "a log", max_bytes=10, keep=2)
    for text in (b"one\n", b"two\n", b"three\n", b"four\n", b"five\n", b"six\n", b"seven\n"):
        log.append_lines(text)
    found = [path.read_bytes() for path in sorted(tmp_path.iterdir())]
    assert found == [b"six\nseven\n", b"four\nfive\n", b"three\n"]
    (tmp_path / "a log").write_bytes(b"tor")
    log.append_lines(b"ok\n")
    assert (tmp_path / "a log").read_bytes() == b"tor\nok\n"
