"""Stages whose environment or reward fails: what they keep, what they say, and `posttrain replay` of it."""

import json
import math
import sys
import types

import pytest
from helpers.letters import LetterEpisode, Letters
from helpers.policy_stage import context_of, save_base

from posttrain.cli.main import main
from rl_core.environments import make_environment
from rl_core.errors import EnvironmentFault, RewardError
from rl_core.rollouts.rollout_files import read_failed_episodes
from rl_core.types import Trajectory, Turn
from tasks.pipeline.stage_folder import keep_checkpoints
from tasks.pipeline.stage_result import FAILED_EPISODES
from tasks.stages import evaluate, policy


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_base(tmp_path_factory.mktemp("base"))


class Broken(LetterEpisode):
    def act(self, text):
        if self.seed % 2:
            raise ConnectionError("no judge")
        return super().act(text)


class BrokenLetters(Letters):
    blocking = False

    def episode(self, seed, level):
        return Broken(seed, level)


OPTIONS = {
    "rewards": {"task": 1.0},
    "reward_options": {},
    "iterations": 2,
    "prompts_per_iteration": 8,
}


def build_sampling(share):
    return {"max_completion_tokens": 8, "max_turns": 1, "stop": ["e"], "max_failed_share": share}


def test_a_stage_continues_after_failed_episodes_and_stores_them(base, tmp_path, monkeypatch):
    monkeypatch.setattr(
        policy, "build_pipeline_environment", lambda pipeline, data: BrokenLetters()
    )
    context = context_of(base, tmp_path / "stage", **OPTIONS, sampling=build_sampling(0.9))
    summary = policy._run_policy_training(context)
    saved = list(read_failed_episodes(context.folder / FAILED_EPISODES))
    total = context.tracker.series("train/failed_episodes")[-1][1]
    assert len(saved) == total > 0 and summary["iterations"] == 2
    name, first = saved[0]
    assert (
        name
        == f"policy/0/{first.trajectory.level}/{first.trajectory.seed}/{first.trajectory.sample}"
    )
    assert first.error == "ConnectionError: no judge" and first.trajectory.seed % 2
    rows = [
        json.loads(line) for line in (context.folder / "rewards.jsonl").read_text().splitlines()
    ]
    assert len(rows) == 32 - total  # 2 iterations of 8 x 2

    again = context_of(base, tmp_path / "again", **OPTIONS, sampling=build_sampling(0.0))
    with pytest.raises(
        EnvironmentFault, match=r"allows 0\).*no judge; play it again: posttrain replay policy/0/"
    ):
        policy._run_policy_training(again)
    keep_checkpoints(again.folder)  # as after every error of ours
    assert [name for name, _ in read_failed_episodes(again.folder / FAILED_EPISODES)] == [name]


def test_a_failing_reward_is_saved_too(base, tmp_path, monkeypatch):
    module = types.ModuleType("failing_reward_for_test")
    module.score = lambda trajectories: [math.nan if t.sample else 0.5 for t in trajectories]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr("rl_core.user_code.digest.digest_user_code", lambda *names: {})
    options = {**OPTIONS, "rewards": {"task": 1.0, "failing_reward_for_test:score": 1.0}}
    context = context_of(
        base, tmp_path / "stage", **options, sampling={"max_completion_tokens": 20, "max_turns": 1}
    )
    with pytest.raises(
        RewardError, match=r"gave nan, no finite number; play it again: posttrain replay policy/0/"
    ):
        policy._run_policy_training(context)
    saved = list(read_failed_episodes(context.folder / FAILED_EPISODES))
    assert len(saved) == 8 and saved[0][1].failed_in == "reward 'failing_reward_for_test:score'"
    assert saved[0][1].trajectory.turns


def test_an_evaluation_says_how_many_failed_and_were_cut(base, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(
        evaluate, "build_pipeline_environment", lambda pipeline, data: BrokenLetters()
    )
    context = context_of(base, tmp_path / "stage", **OPTIONS)
    settings = {"episodes": 12, "samples": 1, "greedy": True, "sampling": build_sampling(0.9)}
    from tasks.config import build_settings, dump_settings

    pipeline = build_settings(
        {**dump_settings(context.pipeline), "stages": {"evaluate": settings, "reward_model": {}}}
    )
    context.settings, context.pipeline, context.name = (
        pipeline.stages.evaluate,
        pipeline,
        "evaluate",
    )
    context.inputs = {"model.mine": base}
    context.tracker.log_traces = lambda *arguments, **options: None
    context.tracker.log_artifact = lambda *arguments, **options: None
    with caplog.at_level("WARNING"):
        summary = evaluate._run_evaluation(context)
    cut = summary["models"]["mine"]["truncated"]
    assert cut > 0.4 and f"; episodes that limits cut short: mine {cut:.0%}" in summary["note"]
    assert f"limits cut {cut:.0%} of the episodes of mine: raise sampling.max_comp" in caplog.text
    names = [name for name, _ in read_failed_episodes(context.folder / FAILED_EPISODES)]
    assert summary["models"]["mine"]["failed_episodes"] == len(names) > 0
    assert summary["note"].endswith(
        f"; {len(names)} episodes failed and are not counted (failed_episodes.jsonl)"
    ) or (f"; {len(names)} episodes failed and are not counted" in summary["note"])
    assert {name.split("/")[1] for name in names} <= {"mine", "mine_greedy"}


# --------------------------------------------------------------------------------------------------- posttrain replay


def play_arithmetic(seed, *actions):
    """Play an episode of the arithmetic environment and return its trajectory."""
    episode = make_environment("arithmetic").episode(seed, "easy")
    messages = episode.reset()
    trajectory = Trajectory(
        environment="arithmetic",
        level="easy",
        kind=episode.kind,
        seed=seed,
        prompt=messages[-1]["content"],
        target=episode.target,
        turns=[],
        temperature=1.0,
    )
    for action in actions:
        step = episode.step(action)
        turn = Turn(action, step.tool_call, is_error=step.is_error)
        if not step.terminated:
            turn.observation = "\n".join(message["content"] for message in step.messages)
        trajectory.turns.append(turn)
        trajectory.reward += step.reward
        trajectory.answer, trajectory.success = step.answer, bool(step.success)
    trajectory.rewards = {"task": trajectory.reward}
    return trajectory


@pytest.fixture
def pipeline(tmp_path, monkeypatch):
    """Record episodes in a folder and return the arguments that name its configuration."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chance_for_test.py").write_text(
        "import itertools\nCOUNT = itertools.count()\n\n\ndef score(ts):\n    return [0.1 * next(COUNT) for t in ts]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "c.yaml").write_text(
        "name: t\nenvironment: {name: arithmetic}\nmodel: {preset: nano}\nstages:\n"
        "  prepare_data: {}\n  policy: {rewards: {task: 1.0, 'chance_for_test:score': 0.1}}\n  evaluate: {}\n"
    )
    stages = tmp_path / "outputs/t/stages"
    for name in ("policy/aa.open", "evaluate/bb"):
        (stages / name).mkdir(parents=True)
    good = play_arithmetic(3, "answer 1")
    (stages / "evaluate/bb/trajectories_mine.jsonl").write_text(json.dumps(good.to_json()) + "\n")
    wrong = play_arithmetic(4, "answer 1")
    wrong.target = "another"
    scored = play_arithmetic(5, "answer 1")
    scored.rewards["chance_for_test:score"] = 7.0
    rows = [{"iteration": number, **t.to_json()} for number, t in ((6, wrong), (7, scored))]
    (stages / "policy/aa.open/recent_rollouts.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows)
    )
    return ["c.yaml"]


def test_replay_of_an_evaluated_episode(pipeline, capsys):
    assert main(["replay", *pipeline, "evaluate/mine/easy/3/0"]) == 0
    output = capsys.readouterr().out
    assert "the same result as recorded" in output and "turn 1: answer 1" in output
    assert "evaluate/bb/trajectories_mine.jsonl:1" in output


def test_replay_says_what_differs(pipeline, capsys):
    assert main(["replay", *pipeline, "policy/6/easy/4/0"]) == 1
    assert "right answer (target): recorded another, now " in capsys.readouterr().out
    assert main(["replay", *pipeline, "policy/7/easy/5/0"]) == 1
    output = capsys.readouterr().out
    assert "reward 'chance_for_test:score' gave 0.0 and 0.1 for the same trajectory" in output
    assert "no global random numbers" in output


def test_replay_refuses_unsaved_episodes_and_lists_saved_ones(pipeline, capsys, tmp_path):
    assert main(["replay", *pipeline, "policy/6/easy/99/0"]) == 2
    assert "is not stored in" in capsys.readouterr().err
    assert main(["replay", *pipeline, "policy/6"]) == 2
    assert "must read STAGE/ITERATION/LEVEL/SEED/SAMPLE" in capsys.readouterr().err
    assert main(["replay", *pipeline]) == 0
    assert "no failed episodes are stored" in capsys.readouterr().out
    assert main(["replay", "policy/6/easy/4/0", "--output", str(tmp_path / "none")]) == 2
    assert "no runs in" in capsys.readouterr().err
