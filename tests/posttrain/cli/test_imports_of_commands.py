"""Packages that take seconds to import are imported only by the commands that need them."""

import os
import subprocess
import sys
from pathlib import Path

from posttrain.cli import entry

ROOT = Path(__file__).parents[3]
CONFIGS = ROOT / "configs"
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


def test_a_wheel_without_its_packages_says_what_installs_them(tmp_path):
    """`pip install --no-deps` is the first of two steps; `python -S` hides the installed packages."""
    info = tmp_path / "posttrain-0.1.dist-info"
    info.mkdir()
    requirements = ["torch>=2", "safetensors", "numpy>=2", "rich>=13", 'ray>=2; extra == "ray"']
    lines = [f"Requires-Dist: {requirement}\n" for requirement in requirements]
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: posttrain\n" + "".join(lines))

    def run(*words):
        program = [sys.executable, "-S", "-m", "posttrain", *words]
        path = f"{ROOT}{os.pathsep}{tmp_path}"
        environment = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
        return subprocess.run(
            program, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=60
        )

    for words in (["check", "machine"], ["run", "demo"], ["ui"], ["validate", "demo"]):
        done = run(*words)
        assert done.returncode == 2
        assert done.stderr == (
            "posttrain: packages are missing from this environment: torch, safetensors, numpy and 1 more; install "
            f"the tested versions: {sys.executable} -m posttrain.install\n"
        )
    assert "Traceback" in run("check", "machine", "--debug").stderr


def test_the_command_that_installs_packages_can_be_copied_from_a_home_with_a_space(
    monkeypatch, capsys
):
    monkeypatch.setattr(entry.sys, "executable", "/home/my team/bin/python")
    assert entry.format_missing_packages(["torch"]).endswith(
        "torch; install the tested versions: '/home/my team/bin/python' -m posttrain.install"
    )
