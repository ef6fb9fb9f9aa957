"""Packages that take seconds to import are imported by the commands that need them alone."""

import subprocess
import sys
from pathlib import Path

CONFIGS = Path(__file__).parents[3] / "configs"
SLOW = (
    "torch",
    "transformers",
    "mlflow",
    "prefect",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
)
PROGRAM = f"""
import sys
from posttrain.cli.main import main

def loaded():
    print("loaded", *(name for name in {SLOW} if name in sys.modules))

CHEAP = ("numpy", "regex")  # a third of a second each, of less than one that the check takes
code = main(["validate", r"{CONFIGS / "demo.yaml"}"])
print("cheap", *(name for name in CHEAP if name in sys.modules))
loaded()
import tasks.pipeline.dag
loaded()
sys.exit(code)
"""


def test_validate_and_the_dag_need_no_torch(tmp_path):
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr
    assert "demo.yaml: fine" in found.stdout
    assert [line for line in found.stdout.splitlines() if line.startswith("loaded")] == [
        "loaded",
        "loaded",
    ]
    assert "cheap\n" in found.stdout
