"""Rows that a verifier cannot use are refused before any episode, with file and row."""

import json
import re

import pytest
from helpers.adapters import fakes

from rl_core.environments import make_environment
from rl_core.environments.prompts import Prompts
from rl_core.errors import RecordsError
from rl_core.rewards.orchestrator import RewardOrchestrator

GOOD = [{"prompt": f"{n} + 1 = ?", "answer": str(n + 1)} for n in range(12)]
BAD = {"prompt": "root?", "answer": "2\\sqrt{3}"}
TESTS = {"prompt": "Write add.", "tests": "assert add(1, 2) == 3"}


def written(path, rows):
    if path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix == ".csv":
        lines = [
            ",".join(rows[0]),
            *(",".join(f'"{cell}"' for cell in row.values()) for row in rows),
        ]
        path.write_text("\n".join(lines))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize(
    ("name", "place"), [("a.jsonl", ":13"), ("a.json", ": row 13"), ("a.csv", ": row 13")]
)
def test_a_file_is_refused_with_the_row(tmp_path, name, place):
    path = written(tmp_path / name, [*GOOD, BAD])
    with pytest.raises(RecordsError) as error:
        make_environment("prompts", {"path": path, "verifier": "numeric"})
    assert f"{path}: 1 of 13 rows cannot be used:" in str(error.value)
    assert (
        f"{path}{place}: verifier 'numeric': the target '2\\\\sqrt{{3}}' is not one number"
        in str(error.value)
    )
    # without a verifier, or with another one, the same file is fine
    make_environment("prompts", {"path": path})
    make_environment("prompts", {"path": path, "verifier": "exact"})


def test_unusable_rows_may_be_skipped(tmp_path):
    path = written(tmp_path / "a.jsonl", [BAD, *GOOD, {"answer": "1"}, BAD])
    options = {"path": path, "verifier": "numeric", "on_bad_row": "skip"}
    for _ in range(2):  # the second reading is cached
        environment = make_environment("prompts", options)
        report = environment.prepare(tmp_path, 0)
        assert (report["num_rows"], report["num_skipped"]) == (15, 3)
        places = {row["prompt"]: place for place, _, row in environment.iter_target_rows()}
        assert len(places) == 12 and places["0 + 1 = ?"] == f"{path}:2"
        assert places["11 + 1 = ?"] == f"{path}:13"


def test_places_of_several_files(tmp_path):
    for name, rows in (("a-0.jsonl", GOOD), ("a-1.jsonl", [*GOOD[:2], BAD])):
        written(tmp_path / name, rows)
    with pytest.raises(RecordsError, match=re.escape(f"{tmp_path / 'a-1.jsonl'}:3: ")):
        make_environment("prompts", {"path": str(tmp_path), "verifier": "numeric"})


def test_heldout_rows_and_rows_in_memory(tmp_path):
    path, heldout = (
        written(tmp_path / "a.jsonl", GOOD),
        written(tmp_path / "b.jsonl", [GOOD[0], BAD]),
    )
    with pytest.raises(RecordsError, match=re.escape(f"{heldout}:2: ")):
        make_environment("prompts", {"path": path, "heldout": heldout, "verifier": "numeric"})
    with pytest.raises(RecordsError, match=r"data\[1\]: verifier 'numeric'"):
        Prompts([GOOD[0], BAD], verifier="numeric")
    with pytest.raises(RecordsError, match=r"heldout\[0\]: verifier 'numeric'"):
        Prompts(GOOD, [BAD], verifier="numeric")


@pytest.mark.parametrize(
    ("verifier", "row", "reason"),
    [
        ("exact", {"prompt": "p", "answer": " "}, "has no target to compare with"),
        ("regex", {"prompt": "p", "answer": "a(b"}, "is not a regular expression"),
        ("math", {"prompt": "p", "answer": ""}, "has no target to compare with"),
        ("code", {"prompt": "p", "tests": "add(1, 2)"}, "the test asserts nothing"),
    ],
)
def test_every_verifier_checks_its_rows(verifier, row, reason):
    with fakes("math_verify"), pytest.raises(RecordsError, match=reason):
        Prompts([row], verifier=verifier)


def test_rewards_check_the_rows_of_the_environment():
    rewards = RewardOrchestrator({"numeric": 1.0, "length": 1.0})
    rewards.check_rows(Prompts(GOOD).iter_target_rows())
    with pytest.raises(
        RecordsError,
        match=r"rewards: 1 of 13 rows.*\n  data\[12\]: rewards.numeric: verifier 'numeric'",
    ):
        rewards.check_rows(Prompts([*GOOD, BAD]).iter_target_rows())
    code = RewardOrchestrator({"code": 1.0})
    code.check_rows(Prompts([TESTS]).iter_target_rows())
    with pytest.raises(
        RecordsError, match=r"data\[0\]: rewards.code: .*calls nothing of the program"
    ):
        code.check_rows(Prompts([{**TESTS, "tests": "assert 1 == 1"}]).iter_target_rows())
