"""Two processes compute what one does: losses, gradient norms, evaluations, weights; resume, stops, refusals."""

import json
import os
import subprocess
import sys

import pytest
from helpers import ROOT

from rl_core.distributed import SINGLE_PROCESS, ProcessGroup

slow = pytest.mark.slow  # a scenario of sharded_scenarios.LONG
REFUSED = "train/grad_norm 2"  # of the step that the scenarios "refused" skip


@pytest.fixture(scope="module")
def results(request, tmp_path_factory):
    """{"alone" | "0" | "1": {scenario: result}}; a scenario that raised is its traceback."""
    is_slow = any(
        item.path == request.path and item.get_closest_marker("slow")
        for item in request.session.items
    )
    return computed(tmp_path_factory.mktemp("together"), *(["all"] if is_slow else []))


def computed(folder, *options):
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests")))
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, ROOT / "tests/helpers/sharded_scenarios.py", folder, *options]
    subprocess.run(command, env=environment, check=True, timeout=1200)
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in ("alone", "0", "1")}


def same(one, other, tolerance):
    assert isinstance(one, dict), one
    assert isinstance(other, dict), other
    assert one["iterations"] == other["iterations"]
    assert one["best"] == other["best"]
    # One process leaves out what comes after a refused loss, several go on: the gradient of that step means nothing.
    metrics = [
        {
            name: value
            for name, value in side["metrics"].items()
            if name != REFUSED or "train/loss 2" in side["metrics"]
        }
        for side in (one, other)
    ]
    # 1 - a ratio of two small sums, which has fewer digits than they have
    ratios = [
        {name: side.pop(name) for name in list(side) if "explained_variance" in name}
        for side in metrics
    ]
    assert ratios[0] == pytest.approx(ratios[1], rel=100 * tolerance, abs=100 * tolerance)
    assert metrics[0] == pytest.approx(metrics[1], rel=tolerance, abs=tolerance)
    assert one["weights"] == pytest.approx(other["weights"], rel=tolerance)


@pytest.mark.parametrize("stage", ["sft", "reward_model", "preference", "extras", "adapters"])
def test_two_processes_give_the_numbers_of_one(results, stage):
    same(results["0"][stage], results["alone"][stage], 1e-5)
    assert len(results["alone"][stage]["metrics"]) > 20


POLICIES = ["grpo", "limited", "inner rewards", "dropout", "thoughts", "whole policy"]
MORE = [
    "thoughts adapters",
    "own parts",
    "sapo",
    "distill",
    "dynamic",
    "ppo separate",
    "ppo shared",
    "policy adapters",
]


@pytest.mark.parametrize("name", [*POLICIES, *(pytest.param(name, marks=slow) for name in MORE)])
def test_two_processes_play_and_learn_as_one(results, name):
    same(results["0"][name], results["alone"][name], 1e-5)
    assert len(results["alone"][name]["metrics"]) > 100
    assert results["1"][name]["metrics"] == {}


@slow
@pytest.mark.timeout(1200)
def test_four_processes_give_the_numbers_of_one(tmp_path):
    found = computed(tmp_path, "4")
    for name in ("sft", "reward_model", "preference", "extras", "adapters", *POLICIES):
        same(found["0"][name], found["alone"][name], 1e-5)


def test_the_parts_of_the_policies_are_at_work(results):
    limited, whole = (results["alone"][name]["metrics"] for name in ("limited", "whole policy"))
    assert max(limited[name] for name in limited if name.startswith("policy/refused_steps")) == 1
    assert whole["curriculum/rollbacks 7"] == 1 - whole["curriculum/rollbacks 3"] == 1
    assert any(
        name.startswith("train/replayed_rollouts") and value for name, value in whole.items()
    )
    assert any(
        name.startswith("reward/curiosity") for name in results["alone"]["inner rewards"]["metrics"]
    )


def test_processes_may_generate_with_the_modules_themselves(results):
    """One of two plays more groups, and calls each block more often, than the other."""
    same(results["0"]["by layer grpo"], results["alone"]["grpo"], 1e-5)


@slow
def test_processes_may_generate_with_another_backend(results):
    same(results["0"]["by layer other backend"], results["alone"]["grpo"], 1e-5)


def test_the_extras_are_at_work(results):
    """Early stopping ends the run before its time, and the clip and Grokfast do something."""
    alone = results["alone"]["extras"]
    assert alone["iterations"] < 18
    assert alone["metrics"]["train/grad_norm 1"] > 0.3
    assert "train/grokfast_grad_norm 1" in alone["metrics"]


def test_only_the_first_process_logs(results):
    assert results["1"]["sft"]["metrics"] == {}
    assert results["1"]["sft"]["iterations"] == results["0"]["sft"]["iterations"]


def test_a_refused_loss_of_one_process_is_a_skipped_step_of_all(results):
    for name in ("refused", "by layer refused"):
        assert results["0"][name]["metrics"]["train/skipped_steps 2"] == 1
        assert results["0"][name]["metrics"]["train/skipped_steps 6"] == 1
        same(results["0"][name], results["alone"]["refused"], 1e-5)


def test_blocks_one_at_a_time_give_the_same_numbers(results):
    same(results["0"]["by layer"], results["alone"]["sft"], 1e-5)


@slow
def test_blocks_that_are_recomputed_give_the_same_numbers(results):
    same(results["0"]["by layer recomputed"], results["alone"]["sft"], 1e-5)


def test_muon_and_low_precision_are_near(results):
    """Muon orthogonalises in bfloat16, where a last bit of a gradient becomes a last bit of bfloat16."""
    same(results["0"]["muon"], results["alone"]["muon"], 2e-2)
    same(results["0"]["bfloat16"], results["alone"]["bfloat16"], 2e-2)


@pytest.mark.parametrize("run", ["plain", pytest.param("muon", marks=slow), "policy"])
def test_resume_is_exact_to_the_bit(results, run):
    whole, cut, rest = (results["0"][f"{name} {run}"] for name in ("whole", "cut", "rest"))
    assert isinstance(rest, dict), rest
    assert {**cut["metrics"], **rest["metrics"]} == {**cut["metrics"], **whole["metrics"]}
    assert rest["weights"] == whole["weights"]


def test_another_number_of_processes_takes_over(results):
    """Two begin and one goes on, and the other way round: what one process would have had throughout."""
    whole = results["alone"]["whole plain"]
    for taken in (results["alone"]["taken over"], results["0"]["taken over"]):
        assert isinstance(taken, dict), taken
        assert len(taken["metrics"]) > 20
        expected = {name: whole["metrics"][name] for name in taken["metrics"]}
        assert taken["metrics"] == pytest.approx(expected, rel=1e-5, abs=1e-5)
        assert taken["weights"] == pytest.approx(whole["weights"], rel=1e-5)


def test_a_stop_signal_to_one_process_stops_all(results):
    assert results["0"]["stopped"] == results["1"]["stopped"] == 15


def test_every_row_is_somebodys_and_tokens_are_even():
    lengths = [9, 1, 8, 2, 7, 3, 6]
    shares = [ProcessGroup(rank, 3).select_local_rows(lengths) for rank in range(3)]
    # dealt 9 8 7 | 6 3 2 back | 1: 9 + 2 + 1, 8 + 3, 7 + 6
    assert shares == [[0, 1, 3], [2, 5], [4, 6]]
    assert SINGLE_PROCESS.select_local_rows(lengths) == list(range(7))
