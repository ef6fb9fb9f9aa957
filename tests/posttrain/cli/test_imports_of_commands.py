"""Packages that take seconds to import are imported only by the commands that need them."""

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

def print_loaded():
    print("loaded", *(name for name in {SLOW} if name in sys.modules))

CHEAP = ("numpy", "regex")  # a third of a second each, while the check takes less than one
code = main(["validate", r"{CONFIGS / "demo.yaml"}"])
print("cheap", *(name for name in CHEAP if name in sys.modules))
print_loaded()
import tasks.pipeline.dag
print_loaded()
sys.exit(code)
"""


def test_validate_and_the_dag_need_no_torch(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "demo.yaml: OK" in done.stdout
    assert [line for line in done.stdout.splitlines() if line.startswith("loaded")] == [
        "loaded",
        "loaded",
    ]
    assert "cheap\n" in done.stdout
