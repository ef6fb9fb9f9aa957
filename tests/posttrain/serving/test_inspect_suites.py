"""The real inspect-ai, in an environment of its own, asks a server that the suites start (`make clients-test`)."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from helpers.serving import make_folder_of_model

from posttrain.cli.main import main

sys.path.append(str(Path(__file__).parent))
from test_clients import find_python

pytestmark = [pytest.mark.slow, pytest.mark.clients]

TASKS = """
import sys

from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.model import GenerateConfig
from inspect_ai.scorer import includes, match
from inspect_ai.solver import generate

CONFIG = GenerateConfig(max_tokens=12, temperature=0)


def build(rows):
    samples = [Sample(input=f"colour at row {n}?", target="red") for n in range(rows)]
    return Task(samples, solver=generate(), scorer=[includes(), match()], config=CONFIG, version=4)


@task
def colours():
    return build(6)


@task
def leaves():
    sys.exit(0)


@task
def empty():
    return build(0)
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    environments = Path(os.environ.get("POSTTRAIN_CLIENTS", tmp_path_factory.mktemp("clients")))
    return find_python(environments / "inspect-ai", ["inspect-ai", "openai"])


@pytest.mark.timeout(1200)
def test_tasks_of_a_file(python, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # not for loopback
    model = make_folder_of_model(tmp_path / "small", context=1024)
    (tmp_path / "evals.py").write_text(TASKS)
    options = ["--json", "--set", f"stages.suites.inspect_python={python}"]
    command = ["evaluate", str(model), "--suite", "inspect:evals.py@colours", *options]
    assert main([*command, "--limit", "4"]) == 0
    record = json.loads(capsys.readouterr().out)
    ((name, tasks),) = record["models"]["suites"].items()
    row = tasks["inspect/colours"]
    assert (name, row["samples"], row["version"]) == ("small", 4, "4")
    assert row["evaluator"].startswith("inspect-ai 0.3.")
    assert set(row["metrics"]) == {"includes.accuracy", "match.accuracy"}
    metric = row["metrics"]["includes.accuracy"]
    assert metric["samples"] == 4 and metric["low"] <= metric["value"] <= metric["high"]
    (samples,) = Path(record["output"]).glob("stages/suites/*/small/inspect-colours/samples.jsonl")
    lines = [json.loads(line) for line in samples.read_text().splitlines()]
    assert len(lines) == 4 and all("completion" in line["sample"] for line in lines)

    for task, text in (("leaves", "exit code 0 before inspect/leaves"), ("empty", "is empty")):
        assert main(["evaluate", str(model), "--suite", f"inspect:evals.py@{task}", *options]) == 2
        assert text in capsys.readouterr().err
