"""Stage bodies for test_launch.py; run as a program, a separate stage process that runs one of them.

python launch_bodies.py FOLDER BODY
"""

import json
import sys
import threading
import time
from pathlib import Path

from helpers.tiny import PAD, nano
from rl_core.api.recipes import Recipe
from rl_core.errors import RecordsError
from rl_core.tracking import MemoryTracker
from tasks.config import build_settings
from tasks.pipeline.stage import StageContext


class FileTracker(MemoryTracker):
    """Keeps what is logged when the process is killed."""

    def __init__(self, path):
        super().__init__()
        self._path = path

    def log_metrics(self, metrics, step):
        super().log_metrics(metrics, step)
        with self._path.open("a") as file:
            file.write(json.dumps([step, metrics]) + "\n")


def context_of(folder, tracker=None, **options):
    """Make the context of a stage of two processes, without a pipeline run."""
    sft = {"batch_size": 4, "epochs": 4.0, "warmup_steps": 0, "checkpoint_every": 1, **options}
    sft["launch"] = {"kind": "torchrun", "processes": 2, "timeout_seconds": 120.0}
    stages = {"prepare_data": {}, "sft": sft}
    pipeline = build_settings(
        {"name": "launch", "output": str(folder), "stages": stages}, check_files=False
    )
    folder.mkdir(parents=True, exist_ok=True)
    return StageContext(
        name="sft",
        folder=folder,
        settings=pipeline.stages.sft,
        pipeline=pipeline,
        inputs={"data": Path("/data"), "model": "hub/name"},
        tracker=tracker or MemoryTracker(),
        pipeline_run=None,
        threads=2,
        seed=3,
        fingerprint={"key": "1"},
        stop=threading.Event(),
    )


def train(context):
    """Train sixteen steps, slowly enough to be stopped."""
    from rl_core.trainers.sft import SFTTrainer

    rows = [([1 + i % 9, 2, 3, 1 + i % 7], [False, False, True, True]) for i in range(16)]
    trainer = SFTTrainer(
        nano(tie_word_embeddings=True),
        PAD,
        rows,
        rows[:3],
        context.settings,
        context.seed,
        context.process_group,
    )
    step = trainer.step

    def slowly():
        time.sleep(0.1)
        return step()

    trainer.step = slowly
    outcome = context.train(Recipe(trainer, trainer.total_steps))
    kinds = {name: type(value).__name__ for name, value in context.inputs.items()}
    return {"steps": outcome.steps, "loss": outcome.metrics["eval/loss"], "kinds": kinds}


def fail_in_the_second(context):
    """Fail in the second process, for which the first waits."""
    context.tracker.log_metrics({"train/loss": 2.5}, 1)
    context.process_group.all_reduce_max(0)
    if context.process_group.rank == 1:
        raise RecordsError("data.jsonl:3: prompt: found 7")
    context.process_group.all_reduce_max(0)
    return {}


def main(folder, name):
    from tasks.processes.launch import recover_events, run_in_workers

    context = context_of(folder, FileTracker(folder.with_name("metrics.jsonl")))
    recover_events(folder, context.tracker)
    from helpers import launch_bodies

    summary = run_in_workers(context, getattr(launch_bodies, name))
    folder.with_name("summary.json").write_text(json.dumps(summary))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
