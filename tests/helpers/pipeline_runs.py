"""Runs of configs/test.yaml, or of a copy, and what they leave: metrics of stages and tags of runs."""

import json
import sys
from pathlib import Path

from helpers import ROOT
from tasks.config import load_settings

CONFIG = ROOT / "configs/test.yaml"
DISABLED_STAGES = ("sft", "reward_model", "evaluate", "analyze", "promote")


def run_test_pipeline(output, *overrides, fresh=False, config=CONFIG):
    from flows.post_training import run_pipeline

    settings = load_settings(config, [f"output={output}", *overrides])
    return run_pipeline(settings, fresh=fresh, quiet=True)


def build_run_command(config, output, overrides, *options, program=("-m", "posttrain.cli.main")):
    """Return the command line of a run in a new process."""
    command = [sys.executable, *program, "run", str(config), *options]
    for override in (f"output={output}", *overrides):
        command += ["--set", override]
    return command


def disable_stages(*names):
    return [f"stages.{name}=null" for name in names]


def write_policy_config(folder):
    """Write a config, and return it with overrides that leave only the data and policy stages.

    Fault points then count iterations of the policy.
    """
    config = folder / "test.yaml"
    config.write_text(CONFIG.read_text())
    return config, [*disable_stages(*DISABLED_STAGES), "stages.policy.rewards.learned=0"]


def read_metric_rows(folder):
    """Read the metrics of a finished stage, without those that measure time or the machine."""
    rows = []
    for line in (Path(folder) / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        metrics = {
            name: value
            for name, value in row["metrics"].items()
            if not name.startswith(("perf/", "system/"))
        }
        if metrics:
            rows.append((row["step"], sorted(metrics.items())))
    return rows


def read_run_tags(output, run):
    """Read the tags of one run, by its id."""
    from tasks.tracking import Tracking

    (row,) = [row for row in Tracking(None, output, "test").list_runs() if row.run_id == run]
    return row.tags


def find_newest_run(output):
    """Return the id of the newest pipeline run."""
    from tasks.tracking import Tracking

    rows = Tracking(None, output, "test").list_runs()
    return next(row.run_id for row in rows if row.parent_run_id is None)
