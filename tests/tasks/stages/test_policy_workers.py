"""The stage `policy` with rollouts on Ray: the weights of one process, lost workers, a schedule to replay."""

import os
import signal
import threading

import pytest
from helpers.policy_stage import context_of, save_base

from rl_core.rollout_workers.async_worker_group import read_schedule
from tasks.stages import policy

pytest.importorskip("ray")
pytestmark = pytest.mark.slow

RAY = {"workers": "ray", "count": 2}
OPTIONS = {
    "rewards": {"task": 1.0, "length": 0.1},
    "iterations": 3,
    "checkpoint_every": 1,
    "importance": "token",
}


def run(base, folder, rollouts):
    context = context_of(base, folder, rollouts=rollouts, **OPTIONS)
    summary = policy._run_policy_training(context)
    return context, summary, (folder / "model" / "model.safetensors").read_bytes()


def test_the_stage_on_ray(tmp_path):
    base = save_base(tmp_path / "base", "tiny")
    _, _, alone = run(base, tmp_path / "alone", {"independent": True})
    context, _, weights = run(base, tmp_path / "ray", RAY)
    rows = [row for _, row in context.tracker.metrics if "perf/rollout_workers" in row]
    assert [row["perf/rollout_workers"] for row in rows] == [2.0] * 3 and all(
        row["perf/weight_bytes"] for row in rows
    )
    names = sorted(path.name for path in (tmp_path / "ray").iterdir())
    assert "schedule.jsonl" not in names
    assert compiled(base) is False or weights == alone

    late = {**RAY, "max_staleness": 1}
    context, _, weights = run(base, tmp_path / "late", late)
    schedule = tmp_path / "late" / "schedule.jsonl"
    assert sorted(read_schedule(schedule)) == [0, 1, 2]
    assert {"policy/staleness_max", "perf/queued_groups"} <= {
        name for _, row in context.tracker.metrics for name in row
    }
    _, _, again = run(base, tmp_path / "again", {**late, "replay_schedule": str(schedule)})
    assert compiled(base) is False or again == weights


def test_a_killed_worker_is_reported_to_the_tracker(tmp_path, monkeypatch):
    from rl_core.rollout_workers.worker_group import WorkerGroup

    verify, pids = WorkerGroup._verify_worker, []

    def kill_the_first(team, seat, report):
        verify(team, seat, report)
        if not pids:
            threading.Timer(0.0, os.kill, (report.pid, signal.SIGKILL)).start()
        pids.append(report.pid)

    monkeypatch.setattr(WorkerGroup, "_verify_worker", kill_the_first)
    context, _, _ = run(save_base(tmp_path / "base"), tmp_path / "ray", {**RAY, "count": 1})
    assert "rollout worker 0 was lost" in context.tracker.tags["rollouts.lost"]
    assert max(row.get("perf/lost_workers", 0.0) for _, row in context.tracker.metrics) == 1.0


def compiled(base):
    """True = compiled code decodes this model: then bits do not depend on the batch."""
    from rl_core.api.policy import load_policy
    from rl_core.capabilities import decoding

    return decoding.check_fused_step(load_policy(base).model).allowed
