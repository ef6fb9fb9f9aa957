"""`posttrain check judge`: agreement with labels, exit codes, refusals."""

import json

import pytest
from helpers.fakes.judge_server import run_judge_server

from posttrain.cli import main as cli

CONFIG = """
name: judged
environment: {name: arithmetic}
stages:
  policy:
    rewards: {judge: 1.0}
    reward_options:
      judge: {mode: pairwise, url: "%s", model: tall, cache: "%s", min_agreement: %s, labels: "%s"}
"""


@pytest.fixture
def check(tmp_path, capsys):
    """Return a function that runs the command with a judge that prefers longer answers."""
    labels = tmp_path / "labels.jsonl"
    rows = [
        {"prompt": f"q{n}", "chosen": "x" * (n + 2), "rejected": "x" * (n + 1)} for n in range(7)
    ]
    labels.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def run(minimum, *arguments, labels=labels):
        with run_judge_server(lambda question, answer, prompt: len(answer)) as server:
            config = tmp_path / "judged.yaml"
            config.write_text(CONFIG % (server.url, tmp_path / "cache", minimum, labels))
            code = cli.main(["check", "judge", str(config), *arguments])
        return code, capsys.readouterr()

    return run


def test_the_agreement_is_printed_and_decides_the_exit_code(check, tmp_path):
    code, shown = check(0.9)
    assert code == 0
    assert "tall (pairwise) agrees with 100.0% of 7 human choices" in shown.out.replace("\n", " ")
    code, shown = check(0.9, "--json")
    record = json.loads(shown.out)
    assert (code, record["passed"], record["result"]["decided"]) == (0, True, 7)
    opposite = tmp_path / "opposite.jsonl"
    opposite.write_text('{"prompt": "q", "chosen": "x", "rejected": "xx"}\n')
    code, shown = check(0.9, "--labels", str(opposite))
    assert code == 1 and "below min_agreement 90.0%" in shown.out


def test_refusals(check, tmp_path, capsys):
    code, shown = check(0.9, "--labels", str(tmp_path / "none.jsonl"))
    assert code != 0 and "none.jsonl does not exist" in shown.err.replace("\n", " ")
    other = tmp_path / "other.yaml"
    other.write_text("name: o\nenvironment: {name: arithmetic}\nstages: {policy: {}}\n")
    assert cli.main(["check", "judge", str(other)]) != 0
    assert "names no judge to check" in capsys.readouterr().err.replace("\n", " ")
