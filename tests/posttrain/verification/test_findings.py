"""Two runs compared: the first difference, the part that it names, and suspect lines of user code."""

import json
import os

import pytest

from posttrain.verification.nondeterminism import explain_differences, find_suspect_lines
from posttrain.verification.run_differences import compare_run_folders
from rl_core.storage.line_logs import encode_checked_line

STAGES = ("prepare_data", "sft", "policy", "evaluate")


def make_rollout(iteration, seed, sample, turns=("p", "a"), **changed):
    row = {
        "iteration": iteration,
        "level": "easy",
        "seed": seed,
        "sample": sample,
        "success": True,
        "reward": 1.0,
        "masked": False,
        "rewards": {"task": 1.0, "mine:score": 0.5, "weighted/task": 1.0},
        "turns": list(turns),
    }
    row["rewards"] |= changed.pop("rewards", {})
    return row | changed


def make_metrics(*losses):
    return [
        {
            "step": step,
            "time": os.getpid() + step,
            "metrics": {"train/loss": loss, "perf/step_seconds": 0.1 * step},
        }
        for step, loss in enumerate(losses, start=1)
    ]


ROLLOUTS = [
    make_rollout(number, seed, sample)
    for number in range(3)
    for seed in (4, 5)
    for sample in (0, 1)
]
TRAJECTORY = {
    "level": "easy",
    "seed": 9,
    "sample": 0,
    "prompt": "p",
    "success": True,
    "rewards": {"task": 1.0},
    "turns": [
        {"action": "look", "observation": "red", "tool_call": None, "is_error": False},
        {"action": "red"},
    ],
}


@pytest.fixture
def compare_runs(tmp_path):
    """Return a function that writes and compares two equal runs; its argument changes files of the second one."""

    def write_run(home, changed):
        files = {
            "prepare_data/rows.jsonl": b'{"q": 1}\n{"q": 2}\n{"q": 3}\n',
            "sft/metrics.jsonl": b"".join(map(encode_checked_line, make_metrics(3.0, 2.0))),
            "policy/metrics.jsonl": b"".join(map(encode_checked_line, make_metrics(0.3, 0.2, 0.1))),
            "policy/rewards.jsonl": b"".join(map(encode_checked_line, ROLLOUTS)),
            "policy/model/model.safetensors": b"weights",
            "policy/summary.json": json.dumps(
                {"note": "n", "seconds": float(len(str(home)))}
            ).encode(),
            "policy/recent_rollouts.jsonl": str(home).encode(),
            "evaluate/trajectories_policy.jsonl": json.dumps(TRAJECTORY).encode() + b"\n",
            **changed,
        }
        for number, stage in enumerate(STAGES):
            folder = home / "stages" / stage / f"{number}aa"
            (folder / "model").mkdir(parents=True)
            (folder / "manifest.json").write_text(str(home))
            (folder.with_name(f"{folder.name}.tracking")).mkdir()
            for name, content in files.items():
                if name.startswith(f"{stage}/"):
                    (folder / name.removeprefix(f"{stage}/")).write_bytes(content)
        return home

    def compare(changed):
        return compare_run_folders(
            write_run(tmp_path / "whole" / "t", {}),
            write_run(tmp_path / "killed run" / "t", changed),
        )

    return compare


def test_equal_runs_differ_only_in_timings(compare_runs):
    later_metrics = b"".join(
        encode_checked_line({**row, "time": 7}) for row in make_metrics(0.3, 0.2, 0.1)
    )
    comparison = compare_runs({"policy/metrics.jsonl": later_metrics})
    assert comparison.differences == [] and comparison.stages == list(STAGES)
    assert (comparison.files, comparison.points) == (
        7,
        2 + 3,
    )  # without recent rollouts, manifests and perf/


def encode_changed_rollouts(index, **changes):
    rows = [dict(row) for row in ROLLOUTS]
    rows[index] = make_rollout(
        rows[index]["iteration"], rows[index]["seed"], rows[index]["sample"], **changes
    )
    return b"".join(map(encode_checked_line, rows))


@pytest.mark.parametrize(
    ("changes", "part", "difference"),
    [
        ({"seed": 8}, "the order of prompts", "('easy', 4, 1) and ('easy', 8, 1)"),
        ({"turns": ["q", "a"]}, "the environment's opening messages", "p and q"),
        ({"turns": ["p", "b"]}, "the sampled tokens", "action of turn 1: 'a' and 'b'"),
        (
            {"turns": ["p", "a", "o", "a"]},
            "the environment's observations",
            "after the same action in turn 1",
        ),
        (
            {"rewards": {"mine:score": 0.25}},
            "the reward function mine:score",
            "gave 0.5 and 0.25 for the same",
        ),
        ({"rewards": {"task": 0.0}}, "the environment's reward", "1.0 and 0.0"),
        ({"success": False}, "the environment's reward", "success True and False"),
    ],
)
def test_the_first_rollout_that_differs_names_the_part(compare_runs, changes, part, difference):
    rollouts = encode_changed_rollouts(
        5, **{key: value for key, value in changes.items() if key != "seed"}
    )
    if "seed" in changes:
        rollouts = rollouts.replace(
            encode_checked_line(ROLLOUTS[5]), encode_checked_line({**ROLLOUTS[5], "seed": 8})
        )
    later_metrics = b"".join(
        map(encode_checked_line, make_metrics(0.3, 0.7, 0.7))
    )  # of the update that follows
    finding = explain_differences(
        compare_runs({"policy/rewards.jsonl": rollouts, "policy/metrics.jsonl": later_metrics})
    )
    assert finding.cause.name == part and difference in finding.difference
    assert (finding.stage, finding.file) == ("policy", "rewards.jsonl")
    assert (
        finding.location == "iteration 1, level easy, seed 4, sample 1"
        and finding.num_other_files == 1
    )
    assert (
        f"NOT deterministic: {part}\n" in finding.format_text()
        and "remedy" in finding.format_text()
    )


def test_an_update_that_differs_before_the_rollouts_do(compare_runs):
    losses = b"".join(map(encode_checked_line, make_metrics(0.3, 0.21, 0.1)))
    changed = encode_changed_rollouts(8, turns=["p", "b"])  # of iteration 2
    finding = explain_differences(
        compare_runs({"policy/rewards.jsonl": changed, "policy/metrics.jsonl": losses})
    )
    assert finding.cause.name == "the update" and finding.location == "iteration 1, step 2"
    assert finding.difference == "train/loss 0.2 and 0.21"


def test_prepared_rows_in_another_order(compare_runs):
    finding = explain_differences(
        compare_runs({"prepare_data/rows.jsonl": b'{"q": 1}\n{"q": 3}\n{"q": 2}\n'})
    )
    assert finding.cause.name == "the prepared data" and finding.location == "line 2"
    assert finding.difference.startswith("the same 3 rows in another order")


def test_prepared_rows_with_other_content(compare_runs):
    finding = explain_differences(
        compare_runs({"prepare_data/rows.jsonl": b'{"q": 1}\n{"q": 7}\n{"q": 3}\n'})
    )
    assert finding.cause.name == "the prepared data" and finding.difference == repr(
        '{"q": 2}'
    ) + " and " + repr('{"q": 7}')


def test_losses_of_a_stage_without_rollouts(compare_runs):
    finding = explain_differences(
        compare_runs(
            {"sft/metrics.jsonl": b"".join(map(encode_checked_line, make_metrics(3.0, 2.5)))}
        )
    )
    assert (finding.stage, finding.cause.name, finding.difference) == (
        "sft",
        "the update",
        "train/loss 2.0 and 2.5",
    )


def test_evaluated_episodes(compare_runs):
    other = json.loads(json.dumps(TRAJECTORY))
    other["turns"][0]["observation"] = "blue"
    finding = explain_differences(
        compare_runs({"evaluate/trajectories_policy.jsonl": json.dumps(other).encode() + b"\n"})
    )
    assert finding.cause.name == "the environment's observations"
    assert (
        finding.location == "line 1, level easy, seed 9, sample 0"
        and "red" in finding.difference
        and "blue" in finding.difference
    )


def test_weights_that_differ_without_a_rollout_are_a_file(compare_runs):
    comparison = compare_runs({"policy/model/model.safetensors": b"weightz"})
    finding = explain_differences(comparison)
    assert (finding.stage, finding.file, finding.cause.name) == (
        "policy",
        "model/model.safetensors",
        "a published file",
    )


def test_suspect_lines(tmp_path, monkeypatch):
    (tmp_path / "my_suspect_code.py").write_text(
        "import os, random, time\n"
        "RNG = random.Random(3)\n"  # 2: seeded, not suspect
        "def score(ts):\n"
        "    return [RNG.random() + random.random() for t in ts]\n"  # 4
        "def order(words):\n"
        "    for word in set(words):\n"  # 6
        "        print(word, time.time())\n"  # 7
        "    return sorted(set(words)), sorted(os.listdir()), os.listdir()\n"  # 8: only the last one
    )
    monkeypatch.syspath_prepend(tmp_path)
    suspects = find_suspect_lines(["my_suspect_code:score", "not_there"])
    assert [(suspect.line, suspect.code) for suspect in suspects] == [
        (4, "random.random()"),
        (6, "set(words)"),
        (7, "time.time()"),
        (8, "os.listdir()"),
    ]
    assert str(suspects[0]).startswith(
        "my_suspect_code.py:4 has `random.random()`: numbers of a global generator"
    )
    assert find_suspect_lines(["no_such_module_of_mine:x"]) == []


def test_suspect_lines_of_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("import time\nSTART = time.time()\n")
    assert [str(suspect)[:9] for suspect in find_suspect_lines(["mine.py:score"])] == ["mine.py:2"]
