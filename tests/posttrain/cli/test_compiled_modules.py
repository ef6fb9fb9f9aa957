"""Compiled modules under a limit of file sizes."""

import os
import subprocess
import sys

import pytest
from helpers import ROOT

PROGRAM = """
import sys
from posttrain.cli.main import main
code = main(["completion", "bash"])
sys.path.insert(0, sys.argv[1])
import large
print(large.TEXT[-3:], file=sys.stderr)
"""


@pytest.mark.parametrize("limit", ["ulimit -f 64; ", ""])
def test_none_is_left_cut_off(tmp_path, limit):
    """Python writes what fits of a compiled module, and takes it for whole ever after."""
    (tmp_path / "large.py").write_text(f"TEXT = {'x' * 300_000 + 'end'!r}\n")
    environment = {
        name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"
    }
    command = [
        "bash",
        "-c",
        f'{limit}exec "$0" -c "$1" "$2"',
        sys.executable,
        PROGRAM,
        str(tmp_path),
    ]
    done = subprocess.run(
        command,
        env={**environment, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stderr == "end\n", done.stderr
    assert (tmp_path / "__pycache__").exists() == (not limit)
    again = [sys.executable, "-c", "import large; print(large.TEXT[-3:])"]
    assert subprocess.check_output(again, cwd=tmp_path, text=True, env=environment) == "end\n"
