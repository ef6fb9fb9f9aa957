"""Durations that a simulation of this machine needs in addition to `parts.py`: weights, calls, crowded cores.

publish, verify: the trainer's side of a weight update; load: a worker's. call, group: a task to an actor on Ray and its
result back, by least squares over tasks of one and of eight groups. crowding: times as long as alone that an iteration
takes in each of 2, 3, 4 ... processes that train and sample at the same time.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from itertools import pairwise

import torch

from asynchrony.slow_tools import IN_PROCESS, SharedRay, make_ray_settings, make_trainer

REPEATS = 12
BEGIN_S = 25.0  # for processes to start and warm up before they are measured together


class Echo:
    """An actor that gives back what it gets."""

    def answer(self, value):
        return value


def measure_costs(options):
    """Measure the seconds of each cost (medians)."""
    results = {
        **measure_weight_update(options.get("shape", "0.9M")),
        **measure_calls(options.get("shape", "0.9M")),
    }
    alone = measure_crowded_iterations(1, options["crowd_seconds"])
    crowding = [
        1.0,
        *(
            measure_crowded_iterations(count, options["crowd_seconds"]) / alone
            for count in range(2, options["most"] + 1)
        ),
    ]
    return {**results, "crowding": crowding}


def time_call(work):
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def measure_weight_update(shape):
    """Time a weight update, both sides in this process, one after the other, through Ray's object store."""
    from rl_core.models.trainable_weights import collect_trainable_weights
    from rl_core.rollout_workers.weight_transfer import (
        collect_unique_weights,
        copy_without_weights,
        digest_tensors,
        pack_tensors,
    )
    from rl_core.rollout_workers.worker import RolloutWorker, WorkerSpec, read_runtime_versions

    trainer, _ = make_trainer(make_ray_settings(1), shape=shape)
    trainer.worker_group.cluster.open_cluster(0)
    team, parts, sampling = (
        trainer.worker_group,
        trainer.worker_group.config,
        trainer.settings.sampling,
    )
    spec = WorkerSpec(
        copy_without_weights(parts.model),
        "cpu",
        parts.renderer,
        parts.environment,
        list(parts.eos_ids),
        parts.pad_id,
        parts.backend.max_length,
        1,
        read_runtime_versions(),
    )
    worker = RolloutWorker(spec, pack_tensors(collect_unique_weights(parts.model)))
    rows = {"publish_seconds": [], "verify_seconds": [], "load_seconds": []}
    for number in range(REPEATS):
        with torch.no_grad():
            for parameter in parts.model.parameters():
                parameter.add_(1e-6)
        rows["publish_seconds"].append(
            time_call(
                lambda n=number: team.cluster.share_value(
                    team._build_update(
                        digest_tensors(collect_trainable_weights(parts.model)), n, sampling
                    )
                )
            )
        )
        rows["verify_seconds"].append(time_call(team._sample_trainer_probe))
        rows["load_seconds"].append(time_call(lambda: worker.load(team._update, team._probe)))
    return {name: statistics.median(values[2:]) for name, values in rows.items()}


def measure_calls(shape):
    """Time a call with a task's result to an actor and back, by number of groups."""
    from rl_core.rollout_workers.worker import FinishedRolloutBatch

    trainer, _ = make_trainer(IN_PROCESS, shape=shape)
    trainer.step()
    cluster = SharedRay(make_ray_settings(1))
    cluster.open_cluster(0)
    actor = cluster.create_actor(Echo, num_cpus=1)
    seconds = {}
    for count in (1, len(trainer.groups)):
        task = FinishedRolloutBatch(list(range(count)), list(trainer.groups[:count]), [])
        rows = [
            time_call(lambda t=task: cluster.fetch_result(actor.answer.remote(t)))
            for _ in range(2 * REPEATS)
        ]
        seconds[count] = statistics.median(rows[4:])
    ((few, short), (many, long)) = sorted(seconds.items())
    group = max(0.0, (long - short) / (many - few))
    cluster.stop_worker(actor)
    return {"call_seconds": max(0.0, short - few * group), "group_seconds": group}


def measure_crowded_iterations(count, seconds):
    """Return the median seconds of an iteration of `count` processes that train and sample at the same time."""
    job = {
        "kind": "steps",
        "mean": 0.0,
        "workers": 0,
        "seconds": seconds,
        "begin_at": time.time() + BEGIN_S,
    }
    command = [sys.executable, "-W", "ignore", "-m", "asynchrony.one_run", json.dumps(job)]
    processes = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        for _ in range(count)
    ]
    results = [json.loads(process.communicate()[0]) for process in processes]
    begins = sorted(row["began_at"] for row in results)
    assert all(after - before < 1.0 for before, after in pairwise(begins)), (
        "they did not begin together: raise BEGIN_S"
    )
    return statistics.median(row["median_s"] for row in results)
