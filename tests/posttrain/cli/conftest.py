"""A configuration file, a double of the pipeline that records its calls, and a new interpreter."""

import contextlib
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from helpers import ROOT

from posttrain.cli import run_setup


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "good.yaml"
    path.write_text("name: demo\nstages:\n  sft: {}\n  policy: {}\n")
    return str(path)


@pytest.fixture
def flow(monkeypatch):
    """Replace flows.post_training by a double that records its calls."""
    calls = []

    def run_pipeline(settings, *, fresh, quiet, allow_drift, changed=(), keys=None):
        calls.append((settings, fresh, quiet, allow_drift))
        return SimpleNamespace(ok=True, format_table=lambda: "the table")

    module = SimpleNamespace(run_pipeline=run_pipeline, calls=calls)
    monkeypatch.setitem(sys.modules, "flows.post_training", module)
    monkeypatch.setattr(run_setup, "configure_prefect", lambda settings: None)
    monkeypatch.setattr(
        run_setup, "print_banner_and_start_prefect", lambda settings, **_: contextlib.nullcontext()
    )
    return module


@pytest.fixture
def run_python():
    """Return a function that runs code in a new interpreter."""

    def run(code: str, *arguments: str, **options) -> subprocess.CompletedProcess:
        return subprocess.run(
            [sys.executable, "-c", code, *arguments],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            timeout=120,
            **options,
        )

    return run
