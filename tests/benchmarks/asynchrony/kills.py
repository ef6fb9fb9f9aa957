"""Kills of rollout workers and of the driver while the policy stage trains on Ray; the results are compared afterwards.

    python -m asynchrony.kills workers FOLDER --kills N [--staleness K]   SIGKILL to one actor after another
    python -m asynchrony.kills driver FOLDER --kills N [--staleness K]    SIGKILL to the trainer, then the same command

workers, synchronous: weights and metrics are those of one process, bit for bit. Asynchronous: each group is learned
from once, none is lost, none is older than the bound, and replaying the schedule gives the same weights. driver,
synchronous: the finished model has the bytes of a run that nobody killed; asynchronous: the same, once its schedule is
replayed from the weights that it began with.
After each kill of the driver no Ray process is left running; at the end nothing is left in /dev/shm or the temporary
folder.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch

ITERATIONS = 8  # of each run whose driver is killed


def list_leftovers():
    """List our session folders and files in shared memory."""
    from rl_core.storage.session_resources import RAY_PREFIX

    folders = Path(tempfile.gettempdir()).glob(f"{RAY_PREFIX}*")
    return {str(path) for path in [*folders, *Path("/dev/shm").glob("plasma*")]}


def find_processes(mark):
    """Processes whose command line has this text, this one left out."""
    pids = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = entry.read_bytes().decode(errors="replace")
        except OSError:
            continue
        if mark in text and int(entry.parent.name) != os.getpid():
            pids.append(int(entry.parent.name))
    return pids


def drop_timings(metrics):
    return {
        name: float(value).hex() for name, value in metrics.items() if not name.startswith("perf/")
    }


def weights_of(trainer):
    return hashlib.sha256(
        b"".join(p.detach().numpy().tobytes() for p in trainer.model.parameters())
    ).hexdigest()


# ------------------------------------------------------------------------------------------------------------- workers


class Killer(threading.Thread):
    """Kills a living actor of a team after random pauses, until it has done so often enough."""

    def __init__(self, team, kills, generator):
        super().__init__(daemon=True)
        self.team, self.kills, self.random, self.done = team, kills, generator, 0
        self.living = {}  # number of a seat -> the seat, and the process that reported from it last
        self.killed = set()
        verify = team._verify
        team._verify = lambda seat, report: (
            verify(seat, report),
            self.living.update({seat.number: (seat, report.pid)}),
        )

    def run(self):
        while self.done < self.kills:
            time.sleep(self.random.uniform(0.05, 1.0))
            alive = {
                number: pid
                for number, (seat, pid) in self.living.items()
                if pid not in self.killed and seat.losses < 3
            }
            if alive:
                pid = alive[self.random.choice(sorted(alive))]
                self.killed.add(pid)
                os.kill(pid, signal.SIGKILL)
                self.done += 1


def kill_workers(folder, kills, staleness, seed):
    """Run as many iterations as the kills take."""
    from asynchrony.slow_tools import IN_PROCESS, SharedRay, make_ray_settings, make_trainer

    before, schedule = list_leftovers(), folder / "schedule.jsonl"
    schedule.unlink(missing_ok=True)
    options = dict(
        prompts_per_iteration=4, group_size=3, learning_rate=1e-3, importance="token", mean=0.02
    )
    trainer, close = make_trainer(make_ray_settings(2, staleness), schedule=schedule, **options)
    team = trainer.stream or trainer.worker_group
    rows, killer = [], Killer(team, kills, random.Random(seed))
    try:
        rows.append(drop_timings(trainer.step()))
        killer.start()
        while killer.is_alive():
            rows.append(drop_timings(trainer.step()))
        results = {
            "kills": killer.done,
            "lost": team.lost_workers,
            "replayed_groups": team.replayed_groups,
        }
        if trainer.stream is not None:
            used = list_learned_groups(schedule)
            numbers = sorted([*used, *(ticket.number for ticket in team._list_open_tasks())])
            results["each_group_once"] = numbers == list(range(team._next_number)) and len(
                used
            ) == 4 * len(rows)
            results["stale_groups"] = team.stale_groups
    finally:
        close()
        SharedRay.end()
    results["left_over"] = sorted(list_leftovers() - before)
    if staleness:
        from rl_core.rollout_workers.async_worker_group import ScheduleReplay

        again, _ = make_trainer(make_ray_settings(2, staleness), schedule=None, **options)
        again.stream = ScheduleReplay(schedule, again.stream.config, staleness)
    else:
        again, _ = make_trainer(IN_PROCESS, **options)
    same = 0
    for row in rows:
        other = drop_timings(again.step())
        same += all(
            other[name] == row.get(name)
            for name in other
            if not name.startswith("policy/staleness")
        )
    return {
        **results,
        "iterations": len(rows),
        "equal_iterations": same,
        "equal_weights": weights_of(again) == weights_of(trainer),
    }


def list_learned_groups(schedule):
    """List the numbers of the groups that were learned from; the last attempt counts for a repeated iteration."""
    from rl_core.rollout_workers.async_worker_group import read_schedule

    return [
        group["number"]
        for lines in read_schedule(schedule).values()
        for line in lines
        for group in line["groups"]
    ]


# -------------------------------------------------------------------------------------------------------------- driver


def finish_stage(folder, rollouts):
    """Run the policy stage from its last checkpoint to its end, as a killed driver would."""
    from helpers import policy_stage

    from tasks.stages import policy

    base = folder.parent / "base"
    options = {
        "rewards": {"task": 1.0},
        "iterations": ITERATIONS,
        "checkpoint_every": 1,
        "importance": "token",
    }
    policy._run_policy_training(policy_stage.context_of(base, folder, rollouts=rollouts, **options))


def kill_driver(folder, kills, staleness, seed):
    """Runs of the stage, one after the other, each killed at random moments until it ends."""
    from helpers import policy_stage

    generator, before = random.Random(seed), list_leftovers()
    if not (folder / "base").exists():
        policy_stage.save_base(folder / "base", "tiny")
    rollouts = {"workers": "ray", "count": 1}
    rollouts |= {"max_staleness": staleness} if staleness else {}
    run_stage(folder / "whole", {"independent": True})
    took = run_stage(folder / "whole-ray", rollouts)
    digest = digest_model(folder / "whole")
    assert staleness or digest_model(folder / "whole-ray") == digest
    done, runs, equal, lingering, once = 0, 0, 0, 0, 0
    while done < kills:
        run_folder = folder / f"run-{runs}"
        while True:
            process = start(run_folder, rollouts)
            try:
                process.wait(generator.uniform(0.2, 1.0) * took if done < kills else 600)
                break
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
                process.wait()
                done += 1
                lingering += len(wait_for_processes())
        assert process.returncode == 0, run_folder
        runs += 1
        if staleness:
            used = list_learned_groups(run_folder / "schedule.jsonl")
            once += len(used) == len(set(used)) == 3 * ITERATIONS
            run_stage(
                folder / f"again-{runs}",
                {**rollouts, "replay_schedule": str(run_folder / "schedule.jsonl")},
            )
            equal += digest_model(folder / f"again-{runs}") == digest_model(run_folder)
        else:
            equal += digest_model(run_folder) == digest
        print(
            json.dumps({"kills": done, "runs": runs, "equal": equal, "lingering": lingering}),
            flush=True,
        )
    return {
        "kills": done,
        "runs": runs,
        "equal": equal,
        "each_group_once": once,
        "lingering": lingering,
        "left_over": sorted(list_leftovers() - before),
    }


def start(folder, rollouts):
    command = [
        sys.executable,
        "-m",
        "asynchrony.kills",
        "stage",
        str(folder),
        "--rollouts",
        json.dumps(rollouts),
    ]
    with open(f"{folder}.log", "ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log)


def run_stage(folder, rollouts):
    """Run the stage to its end; returns its seconds."""
    began = time.monotonic()
    assert start(folder, rollouts).wait() == 0, folder
    return time.monotonic() - began


def digest_model(folder):
    return hashlib.sha256((folder / "model" / "model.safetensors").read_bytes()).hexdigest()


def wait_for_processes(seconds=20.0):
    """Processes of Ray that still run so long after their driver was killed."""
    from rl_core.storage.session_resources import RAY_PREFIX

    end = time.monotonic() + seconds
    while (
        pids := find_processes(f"{tempfile.gettempdir()}/{RAY_PREFIX}")
    ) and time.monotonic() < end:
        time.sleep(0.2)
    return pids


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("kind", choices=("workers", "driver", "stage"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--staleness", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rollouts", type=json.loads, default={})
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.kind == "stage":
        return finish_stage(options.folder, options.rollouts)
    options.folder.mkdir(parents=True, exist_ok=True)
    do = {"workers": kill_workers, "driver": kill_driver}[options.kind]
    results = do(options.folder, options.kills, options.staleness, options.seed)
    print(json.dumps({"kind": options.kind, "staleness": options.staleness, **results}))


if __name__ == "__main__":
    main()
