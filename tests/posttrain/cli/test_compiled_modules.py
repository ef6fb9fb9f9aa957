"""Bytecode files under a file size limit."""

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
def test_no_truncated_bytecode_is_written(tmp_path, limit):
    """Write none: Python would write what fits of one and use the truncated file ever after."""
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
    import_again = [sys.executable, "-c", "import large; print(large.TEXT[-3:])"]
    assert (
        subprocess.check_output(import_again, cwd=tmp_path, text=True, env=environment) == "end\n"
    )
