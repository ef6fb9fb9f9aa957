"""Snapshots, log segments and audit files of the update worker."""

import itertools
import json

import pytest
from helpers.online_worker import (
    build_answered_request,
    collect_compared_state,
    make_worker,
    run_to_end,
    settings,
    write_traffic,
)

from rl_core.errors import DataError
from rl_core.online.experience_log import ExperienceLog, list_segments
from rl_core.online.labels import Label
from rl_core.online.service_files import AUDIT_FILE, CONTRIBUTION_FILE
from rl_core.online.update_audit import UpdateAudit
from rl_core.online.update_step import UpdateReport
from rl_core.settings import (
    OnlineAuditSettings,
    OnlineBufferSettings,
    OnlineLabelSettings,
)
from rl_core.storage.append_log import AppendLog


def test_snapshots_that_an_experience_refers_to_stay(tmp_path):
    update = {"snapshot_every": 1, "checkpoint_every": 2, "keep_snapshots": 1}
    log, buffer = tmp_path / "log", OnlineBufferSettings(capacity=4, max_caller_share=1.0)
    with make_worker(tmp_path, log, settings(update, buffer=buffer)) as worker:
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


def test_later_snapshots_of_a_killed_worker_remove_nothing(tmp_path):
    """Resume before updates whose snapshots a killed worker has already published."""
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


def test_unchanged_weights_are_not_published_again(tmp_path):
    worker_settings = settings(
        {"snapshot_every": 1}, labels=OnlineLabelSettings(use_consensus=False)
    )
    log = tmp_path / "log"
    write_traffic(log, range(9), feedback=10**9)
    with make_worker(tmp_path, log, worker_settings) as worker:
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


def test_without_a_promotion_current_answers_are_not_stale(tmp_path):
    buffer = OnlineBufferSettings(capacity=4, max_staleness=2)
    log = tmp_path / "log"
    write_traffic(log, range(25), feedback=10**9)
    with make_worker(tmp_path, log, settings(buffer=buffer)) as worker:
        run_to_end(worker)  # the gate promotes nothing: every answer is of version 0
        assert worker.updates > 9 and worker.live == 0
        assert worker.buffer.evicted["staleness"] == worker.buffer.evicted["late"] == 0
        assert worker.last_report.refused == ""


def test_space_in_a_full_log_is_freed(tmp_path):
    """Give one experience the largest error: its segment must not keep all later segments."""
    size = 60_000
    buffer = OnlineBufferSettings(
        capacity=8, max_caller_share=1.0, segment_bytes=4096, max_bytes=size, keep_segments=False
    )
    log, appended = tmp_path / "log", []
    agreed = (
        number for number in range(9999) if build_answered_request(number).vote.confidence == 1.0
    )
    worker_settings = settings({"checkpoint_every": 1, "update_every": 4}, buffer=buffer)
    with make_worker(tmp_path, log, worker_settings) as worker:
        for number in itertools.islice(agreed, 50):
            with ExperienceLog(log, segment_bytes=4096, max_bytes=size) as writer:
                appended.append(writer.append_experience(build_answered_request(number)))
            while worker.step():
                pass
            if worker.buffer.find_first_number() == 1:
                worker.buffer.record_error(worker.buffer.slots[0].experience.request_id, 99.0)
        assert (
            None not in appended
            and worker.buffer.find_first_number() > 1
            and worker.buffer.evicted["log"] > 0
        )


def test_the_first_model_stays_for_the_gate(tmp_path):
    update = {"snapshot_every": 1, "checkpoint_every": 1, "keep_snapshots": 1}
    log, buffer = tmp_path / "log", OnlineBufferSettings(capacity=4, max_caller_share=1.0)
    with make_worker(tmp_path, log, settings(update, buffer=buffer)) as worker:
        write_traffic(log, range(6), feedback=10**9)
        run_to_end(worker)
        # no experience of the buffer is of the first model, which was not live recently
        for start in (6, 12, 18):
            with ExperienceLog(log) as writer:
                writer.append([("control", {"order": "live", "version": worker.served})])
            write_traffic(log, range(start, start + 6), version=worker.served, feedback=10**9)
            run_to_end(worker)
        live = {worker.live, *worker.past[-1:]}
        assert 0 not in worker.buffer.collect_referenced_versions() | live
        versions = worker.learner.snapshots.list_versions()
        assert 0 in versions and 1 not in versions


def test_segments_of_evicted_experiences_are_removed_unless_retained(tmp_path):
    buffer = OnlineBufferSettings(capacity=4, segment_bytes=4096, keep_segments=False)
    worker_settings = settings({"update_every": 5, "checkpoint_every": 1}, buffer=buffer)
    log = tmp_path / "log"
    with make_worker(tmp_path, log, worker_settings) as worker:
        for start in range(0, 20, 4):
            write_traffic(log, range(start, start + 4))
            run_to_end(worker)
        segments = list_segments(log)
        assert 1 < segments[0][0] <= worker.buffer.find_first_number()
        expected = collect_compared_state(worker)
    with make_worker(tmp_path, log, worker_settings) as restarted:
        assert collect_compared_state(restarted)[:3] == expected[:3]
    with pytest.raises(DataError, match="begins with record"):
        make_worker(tmp_path / "new", log, worker_settings).__enter__()


def test_audit_and_contributions_describe_each_update(traffic, tmp_path):
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
    fields = {"losses", "gradients", "kl_control", "learning_rate", "refused", "experiences"}
    assert fields <= last.keys()
    assert (
        last["losses"] == expected.losses
        and last["kl_control"]["coefficient"] == expected.kl_control["coefficient"]
    )
    experience_ = last["experiences"][0]
    rollout = next(row for row in experience_["rewards"]["rollouts"] if row is not None)
    assert (
        experience_["rewards"]["components"] == ["task", "coherence", "curiosity"]
        and len(rollout["raw"]) == 3
    )
    assert rollout["total"] == pytest.approx(sum(rollout["weighted"]))


def test_an_unwritable_disk_drops_audit_records_without_errors(tmp_path):
    (tmp_path / "file").write_text("")
    with UpdateAudit(tmp_path / "file", OnlineAuditSettings(queue=1)) as audit:
        for number in range(200):
            audit.enqueue_update(UpdateReport(number, "empty"), None)
    assert audit.num_dropped == 200


def test_logs_are_rotated_and_torn_ends_closed(tmp_path):
    log = AppendLog(tmp_path / "a log", max_bytes=10, keep=2)
    for text in (b"one\n", b"two\n", b"three\n", b"four\n", b"five\n", b"six\n", b"seven\n"):
        log.append_lines(text)
    contents = [path.read_bytes() for path in sorted(tmp_path.iterdir())]
    assert contents == [b"six\nseven\n", b"four\nfive\n", b"three\n"]
    (tmp_path / "a log").write_bytes(b"tor")
    log.append_lines(b"ok\n")
    assert (tmp_path / "a log").read_bytes() == b"tor\nok\n"
