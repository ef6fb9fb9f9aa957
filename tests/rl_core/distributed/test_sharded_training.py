"""Two processes compute the numbers of one: losses, norms, evaluations, weights; resume, stops, refused losses."""

import json
import os
import subprocess
import sys

import pytest
from helpers import ROOT

from rl_core.distributed import SINGLE_PROCESS, ProcessGroup

slow = pytest.mark.slow  # a scenario of sharded_scenarios.LONG
REFUSED = "train/grad_norm 2"  # metric of the step that the scenarios "refused" skip


@pytest.fixture(scope="module")
def results(request, tmp_path_factory):
    """Return {"alone" | "0" | "1": {scenario: result}}; the result of a failed scenario is its traceback."""
    is_slow = any(
        item.path == request.path and item.get_closest_marker("slow")
        for item in request.session.items
    )
    return compute_scenarios(tmp_path_factory.mktemp("together"), *(["all"] if is_slow else []))


def compute_scenarios(folder, *options):
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests")))
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, ROOT / "tests/helpers/sharded_scenarios.py", folder, *options]
    subprocess.run(command, env=environment, check=True, timeout=1200)
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in ("alone", "0", "1")}


def assert_same_results(result, expected, tolerance):
    assert isinstance(result, dict), result
    assert isinstance(expected, dict), expected
    assert result["iterations"] == expected["iterations"]
    assert result["best"] == expected["best"]
    # After a refused loss one process stops the step and several finish it, so its gradient is not compared.
    metrics = [
        {
            name: value
            for name, value in side["metrics"].items()
            if name != REFUSED or "train/loss 2" in side["metrics"]
        }
        for side in (result, expected)
    ]
    # 1 - a ratio of two small sums has fewer correct digits than the sums
    ratios = [
        {name: side.pop(name) for name in list(side) if "explained_variance" in name}
        for side in metrics
    ]
    assert ratios[0] == pytest.approx(ratios[1], rel=100 * tolerance, abs=100 * tolerance)
    assert metrics[0] == pytest.approx(metrics[1], rel=tolerance, abs=tolerance)
    assert result["weights"] == pytest.approx(expected["weights"], rel=tolerance)


@pytest.mark.parametrize(
    "stage",
    [
        "sft",
        "reward_model",
        "step_reward",
        "preference",
        pytest.param("extras", marks=slow),
        "adapters",
    ],
)
def test_two_processes_give_the_numbers_of_one(results, stage):
    assert_same_results(results["0"][stage], results["alone"][stage], 1e-5)
    assert len(results["alone"][stage]["metrics"]) > 20


POLICIES = ["grpo", "whole policy"]
FURTHER_POLICIES = [
    "limited",
    "inner rewards",
    "dropout",
    "thoughts",
    "thoughts adapters",
    "custom functions",
    "sapo",
    "dppo",
    "gdpo",
    "distill",
    "self distill",
    "distill aligned sampled",
    "distill aligned gold",
    "turn credit",
    "dynamic",
    "ppo separate",
    "ppo shared",
    "policy adapters",
    "process rewards",
    "process rewards, ppo",
]


@pytest.mark.parametrize(
    "name", [*POLICIES, *(pytest.param(name, marks=slow) for name in FURTHER_POLICIES)]
)
def test_two_processes_play_and_learn_like_one(results, name):
    assert_same_results(results["0"][name], results["alone"][name], 1e-5)
    assert len(results["alone"][name]["metrics"]) > 100
    assert results["1"][name]["metrics"] == {}


@slow
@pytest.mark.timeout(1200)
def test_four_processes_give_the_numbers_of_one(tmp_path):
    computed = compute_scenarios(tmp_path, "4")
    for name in ("sft", "reward_model", "preference", "adapters", *POLICIES):
        assert_same_results(computed["0"][name], computed["alone"][name], 1e-5)


@slow
def test_the_features_of_the_policies_are_active(results):
    limited, complete = (results["alone"][name]["metrics"] for name in ("limited", "whole policy"))
    assert max(limited[name] for name in limited if name.startswith("policy/refused_steps")) == 1
    assert complete["curriculum/rollbacks 7"] == 1 - complete["curriculum/rollbacks 3"] == 1
    assert any(
        name.startswith("train/replayed_rollouts") and value for name, value in complete.items()
    )
    assert any(
        name.startswith("reward/curiosity") for name in results["alone"]["inner rewards"]["metrics"]
    )


@slow
def test_processes_may_generate_with_the_modules(results):
    """Let one of two processes play more groups, and call each block more often, than the other."""
    assert_same_results(results["0"]["by layer grpo"], results["alone"]["grpo"], 1e-5)


@slow
def test_processes_may_generate_with_another_backend(results):
    assert_same_results(results["0"]["by layer other backend"], results["alone"]["grpo"], 1e-5)


@slow
def test_the_extras_are_active(results):
    """Check that early stopping ends the run early, and that the clip and Grokfast have an effect."""
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
        assert_same_results(results["0"][name], results["alone"]["refused"], 1e-5)


def test_blocks_one_at_a_time_give_the_same_numbers(results):
    assert_same_results(results["0"]["by layer"], results["alone"]["sft"], 1e-5)


@slow
def test_blocks_that_are_recomputed_give_the_same_numbers(results):
    assert_same_results(results["0"]["by layer recomputed"], results["alone"]["sft"], 1e-5)


@slow
def test_muon_and_low_precision_are_near(results):
    """Allow the tolerance of bfloat16, in which Muon orthogonalises gradients."""
    assert_same_results(results["0"]["muon"], results["alone"]["muon"], 2e-2)
    assert_same_results(results["0"]["bfloat16"], results["alone"]["bfloat16"], 2e-2)


@pytest.mark.parametrize(
    "run",
    [
        "plain",
        pytest.param("muon", marks=slow),
        pytest.param("process rewards", marks=slow),
        "policy",
    ],
)
def test_resume_is_exact_to_the_bit(results, run):
    uninterrupted, interrupted, resumed = (
        results["0"][f"{name} {run}"] for name in ("whole", "cut", "rest")
    )
    assert isinstance(resumed, dict), resumed
    assert {**interrupted["metrics"], **resumed["metrics"]} == {
        **interrupted["metrics"],
        **uninterrupted["metrics"],
    }
    assert resumed["weights"] == uninterrupted["weights"]


def test_a_run_continues_with_another_number_of_processes(results):
    """Continue a run of two processes with one, and of one with two: the result is that of one process throughout."""
    uninterrupted = results["alone"]["whole plain"]
    for continued in (results["alone"]["taken over"], results["0"]["taken over"]):
        assert isinstance(continued, dict), continued
        assert len(continued["metrics"]) > 20
        expected = {name: uninterrupted["metrics"][name] for name in continued["metrics"]}
        assert continued["metrics"] == pytest.approx(expected, rel=1e-5, abs=1e-5)
        assert continued["weights"] == pytest.approx(uninterrupted["weights"], rel=1e-5)


def test_a_stop_signal_to_one_process_stops_all(results):
    assert results["0"]["stopped"] == results["1"]["stopped"] == 15


def test_rows_are_dealt_completely_and_tokens_evenly():
    lengths = [9, 1, 8, 2, 7, 3, 6]
    shares = [ProcessGroup(rank, 3).select_local_rows(lengths) for rank in range(3)]
    # rows by length: 9 8 7, then backwards 6 3 2, then 1; sums 9 + 2 + 1, 8 + 3, 7 + 6
    assert shares == [[0, 1, 3], [2, 5], [4, 6]]
    assert SINGLE_PROCESS.select_local_rows(lengths) == list(range(7))
