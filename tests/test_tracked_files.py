"""Files under version control: regular files only, as a link leads out of a checkout to a path of one machine."""

from __future__ import annotations

import subprocess

import pytest
from helpers import ROOT

REGULAR_MODES = {"100644", "100755"}


def test_every_tracked_file_is_a_regular_file() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("no version control here")
    listed = subprocess.run(
        ["git", "ls-files", "-s"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    kinds = {
        name: line.split()[0] for line, name in (row.split("\t", 1) for row in listed.splitlines())
    }
    assert "pyproject.toml" in kinds
    assert {name: kind for name, kind in kinds.items() if kind not in REGULAR_MODES} == {}
