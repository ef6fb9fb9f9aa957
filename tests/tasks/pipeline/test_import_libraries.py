"""Imports while Prefect's server starts: MLflow with its sqlite store, torch if a stage computes."""

import subprocess
import sys

import pytest
from helpers import ROOT

SCRIPT = """
import sys
from tasks.config import build_settings
from tasks.pipeline.pipeline_run import import_libraries
settings = build_settings({"name": "own", "model": {"preset": "nano"}, "environment": {"name": "arithmetic"},
                      "stages": {"prepare_data": {"num_demonstrations": 60}}, **eval(sys.argv[1])})
import_libraries(settings, computes=sys.argv[2] == "computes")
for name in ("mlflow.store.tracking.sqlalchemy_store", "torch", "transformers.modeling_utils", "matplotlib",
             "mako.ext.pygmentplugin"):
    if name in sys.modules:
        print(name)
import mako.ext.pygmentplugin
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "computes", "expected"),
    [
        ({}, "cached", ["mlflow.store.tracking.sqlalchemy_store"]),
        ({"tracking": {"uri": "http://127.0.0.1:9"}}, "cached", []),
        (
            {},
            "computes",
            ["mlflow.store.tracking.sqlalchemy_store", "torch", "transformers.modeling_utils"],
        ),
    ],
)
def test_libraries_by_store_and_by_what_is_cached(tmp_path, settings, computes, expected):
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, repr(settings), computes],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.split() == expected
