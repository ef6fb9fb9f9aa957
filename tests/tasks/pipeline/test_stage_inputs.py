"""Inputs of a stage: which results it receives, and which of them the others were not made from."""

from pathlib import Path

import pytest

from tasks.pipeline.prefect_stages import find_direct_inputs, find_input_stages
from tasks.pipeline.stage_result import StageResult

INPUT_STAGES = {
    "prepare_data": (),
    "sft": ("prepare_data",),
    "reward_model": ("prepare_data", "sft"),
    "policy": ("prepare_data", "sft", "reward_model"),
    "evaluate": ("prepare_data", "sft", "policy"),
}


def result(name):
    return StageResult(
        name, f"/out/{name}/key", "d", "k", cached=False, seconds=1.0, run_id="", summary={}
    )


def test_results_are_located_anywhere_among_the_arguments():
    results = {name: result(name) for name in ("prepare_data", "sft", "policy")}
    arguments = [
        (results["prepare_data"],),
        {"models": {"a": [results["policy"]]}, "base": None, "name": "sft"},
    ]
    assert find_input_stages(arguments, results) == ("prepare_data", "policy")
    assert find_input_stages([(Path("/out/sft/key/model"), "/out/policy/key")], results) == ("sft",)
    assert (
        find_input_stages([(result("sft"), Path("/out/sft/key2"))], results) == ()
    )  # another run's


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        ((), []),
        (("prepare_data",), ["prepare_data"]),
        (("prepare_data", "sft"), ["sft"]),
        (("prepare_data", "sft", "reward_model"), ["reward_model"]),
        (
            ("prepare_data", "evaluate", "reward_model"),
            ["evaluate"],
        ),  # through the policy, which is not among the inputs
        (("unknown", "sft"), ["unknown", "sft"]),
    ],
)
def test_inputs_of_another_input_are_left_out(inputs, expected):
    assert find_direct_inputs(inputs, INPUT_STAGES) == expected
