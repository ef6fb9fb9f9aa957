import pytest

from rl_core.analysis import write_trajectories
from rl_core.errors import DataError
from rl_core.rollouts.rollout_files import build_tokens_path, read_rollouts, write_tokens
from rl_core.types import Rollout, Trajectory

MASKS = ([True, True, False, True], [False, True], [True])


def build_rollouts():
    results = []
    for number, mask in enumerate(MASKS):
        trajectory = Trajectory(
            "fake",
            "easy",
            "k",
            number,
            "p",
            "t",
            num_completion_tokens=len(mask),
            num_action_tokens=sum(mask),
            temperature=0.5 * number,
        )
        results.append(
            Rollout([7, number], list(range(len(mask))), mask, [0.0] * len(mask), trajectory)
        )
    return results


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "trajectories_sft.jsonl"
    write_trajectories(path, [rollout.trajectory for rollout in build_rollouts()])
    write_tokens(build_tokens_path(path), build_rollouts())
    return path


def test_tokens_and_masks_are_restored(path):
    assert build_tokens_path(path).name == "tokens_sft.jsonl"
    assert read_rollouts(path, 10) == build_rollouts()
    assert read_rollouts(path, 2) == build_rollouts()[:2]
    assert read_rollouts(path, 0) == []
    assert [rollout.temperature for rollout in read_rollouts(path, 10)] == [0.0, 0.5, 1.0]


def test_files_without_temperatures_have_log_probs_at_1(path):
    path.write_text(
        path.read_text().replace(', "temperature": 0.5', "").replace(',"temperature":0.5', "")
    )
    assert [rollout.temperature for rollout in read_rollouts(path, 2)] == [0.0, 1.0]


def test_files_that_do_not_match(path):
    lines = build_tokens_path(path).read_text().splitlines(keepends=True)
    build_tokens_path(path).write_text("".join(lines[1:]))
    with pytest.raises(DataError, match=r"tokens_sft.jsonl:1: 2 tokens, but the trajectory has 4"):
        read_rollouts(path, 3)
    build_tokens_path(path).write_text("".join(lines[:2]))
    with pytest.raises(DataError, match=r"tokens_sft.jsonl:3: 0 tokens"):
        read_rollouts(path, 3)
    build_tokens_path(path).write_text('{"prompt": [1]}\n')
    with pytest.raises(DataError, match=r"tokens_sft.jsonl:1: invalid line in a tokens file"):
        read_rollouts(path, 3)
