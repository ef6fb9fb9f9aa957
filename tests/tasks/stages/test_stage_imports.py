"""A run of which every stage was finished before imports neither torch nor Prefect's server."""

import json
import os
import subprocess
import sys

from helpers import ROOT

from tasks import stage_registry

SCRIPT = """
import importlib, json, sys
import flows.post_training
for task in sys.argv[1:]:
    importlib.import_module(task)
wanted = ("torch", "transformers", "prefect.server.api.server", "mlflow")
print(json.dumps([name for name in wanted if name in sys.modules]))
"""


def test_stages_are_known_without_torch():
    """torch, transformers and Prefect's server took half of the processor time of such a run."""
    modules = sorted({stage.task.partition(":")[0] for stage in stage_registry.list_stages()})
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *modules],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == []
