"""Training by self-play: even roles, resumption after a kill at any point, baselines by role, measures, refusals."""

from __future__ import annotations

import copy
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from helpers.letters import FewLetters
from helpers.tiny import logged_bits, weights_digest
from helpers.two_player import SAMPLING, build_policy, build_policy_settings, build_trainer

from rl_core.environments.kuhn_poker import KuhnPoker
from rl_core.environments.mixture import MixtureEnvironment
from rl_core.errors import CheckpointError, SettingsError
from rl_core.losses.advantages import role_advantages
from rl_core.settings import CurriculumStage, ExitCondition, RollbackSettings
from rl_core.storage.checkpoint import CheckpointStore
from rl_core.tracking import MemoryTracker
from rl_core.trainers.policy_gradient.advantages import RoleBaselines
from rl_core.trainers.policy_gradient.self_play import (
    compute_match_metrics,
    compute_move_probabilities,
)
from rl_core.training.loop import run_loop
from rl_core.training.opponent_pool import OPPONENTS_FOLDER


def run(folder, *, tracker=None, **options):
    """Run a training; return outcome, digest of the weights, and metrics as bits."""
    store = opponents = None
    if folder is not None:
        store = CheckpointStore(Path(folder) / "checkpoints")
        opponents = Path(folder) / "checkpoints" / OPPONENTS_FOLDER
    values = {"checkpoint_every": 3, "eval_every": 4, **options}
    trainer = build_trainer(folder=opponents, **values)
    tracker = tracker or MemoryTracker()
    outcome = run_loop(trainer, trainer.settings, iterations=8, tracker=tracker, checkpoints=store)
    return outcome, weights_digest(trainer.model), logged_bits(tracker)


@pytest.mark.parametrize("opponent", ["current", "pool", "random"])
def test_both_seats_are_played_equally_often_with_the_same_deals(opponent: str) -> None:
    trainer = build_trainer(self_play={"opponent": opponent}, environment=KuhnPoker())
    for _ in range(3):
        metrics = trainer.step()
        deals = {0: Counter(), 1: Counter()}
        for group in trainer.groups:
            players = {rollout.trajectory.info["player"] for rollout in group.rollouts}
            assert len(players) == 1 and 1 <= len(group.rollouts) <= 4
            deals[players.pop()][group.rollouts[0].trajectory.seed] += 1
        assert set(deals[1]) <= set(deals[0]) and sum(deals[0].values()) == 2
        if opponent == "random":  # whose first moves are legal, so both seats always move
            assert deals[1] == deals[0]
        opponents = {
            rollout.trajectory.info["opponent"]
            for group in trainer.groups
            for rollout in group.rollouts
        }
        assert (opponents == {opponent}) or opponent == "pool"
        if opponent == "pool":
            assert "current" in opponents and any(name.startswith("snapshot") for name in opponents)
    if opponent == "current":
        # Both seats of each game are trained: their rewards cancel.
        assert metrics["train/payoff_by_player/0"] == -metrics["train/payoff_by_player/1"]
        assert metrics["perf/weight_swaps"] == 0
    assert ("train/pool_size" in metrics) == (opponent == "pool")


def test_an_untrained_policy_loses_by_illegal_moves_and_moveless_players_are_left_out() -> None:
    trainer = build_trainer(self_play={"opponent": "current"})
    metrics = trainer.step()
    assert (
        metrics["train/illegal_game_rate"] > 0.9
        and metrics["train/opponent_illegal_game_rate"] == 0
    )
    assert 0.3 < metrics["train/moveless_rate"] <= 0.5
    rollouts = [rollout for group in trainer.groups for rollout in group.rollouts]
    assert all(any(rollout.loss_mask) for rollout in rollouts)
    assert metrics["train/turns"] >= 1


@pytest.fixture(scope="module", params=["weights", "adapters"])
def unbroken(request):
    """Return the options of a run, and what it gives without any interruption or folder."""
    options = {"adapters": request.param == "adapters"}
    return options, run(None, **options)


def check_equal(result, expected) -> None:
    assert result[1] == expected[1]
    assert result[0].metrics == expected[0].metrics
    assert result[0].iterations == expected[0].iterations == 8


def test_snapshots_on_the_disk_change_nothing(tmp_path, unbroken) -> None:
    options, expected = unbroken
    result = run(tmp_path, **options)
    check_equal(result, expected)
    assert result[2] == expected[2]
    names = sorted(path.name for path in (tmp_path / "checkpoints" / OPPONENTS_FOLDER).iterdir())
    assert names[0] == "snapshot-00000000.safetensors" and 3 <= len(names) <= 4


KILLS = [
    "opponent.stored:4",
    *(
        pytest.param(point, marks=pytest.mark.slow)
        for point in (
            "opponent.written:1",
            "opponent.written:3",
            "opponent.stored:1",
            "opponent.removing:1",
            "publish.file:2",
            "publish.renamed:1",
            "loop.stepped:5",
            "loop.saved:1",
            "loop.evaluated:2",
        )
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("kill", KILLS)
def test_kill_9_at_any_point_gives_the_same_bits(tmp_path, unbroken, kill: str) -> None:
    options, expected = unbroken
    here = str(Path(__file__).parent)
    code = (
        f"import sys; sys.path.insert(0, {here!r}); import torch; "
        f"torch.set_num_threads({torch.get_num_threads()}); "
        f"import test_self_play; test_self_play.run({str(tmp_path)!r}, **{options!r})"
    )
    environment = {
        **os.environ,
        "POSTTRAIN_FAULT": f"{kill}:kill",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    child = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert child.returncode == -signal.SIGKILL, child.stderr[-3000:]
    check_equal(run(tmp_path, **options), expected)
    opponents = tmp_path / "checkpoints" / OPPONENTS_FOLDER
    assert not [path for path in opponents.iterdir() if path.name.startswith(".tmp")]


def test_a_changed_opponent_stops_the_resumption_with_a_message(tmp_path) -> None:
    run(tmp_path)
    path = tmp_path / "checkpoints" / OPPONENTS_FOLDER / "snapshot-00000000.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="opponent of iteration 0 is not the file that the"):
        run(tmp_path)


def test_only_few_swaps_of_weights_are_needed_however_many_games() -> None:
    trainer = build_trainer(prompts_per_iteration=16, self_play={"current_share": 0.0})
    trainer.step()
    trainer.step()
    metrics = trainer.step()
    assert metrics["train/opponents"] == 2
    assert metrics["perf/weight_swaps"] <= 2 * 3  # snapshots x rounds, for 128 games


def test_advantages_are_relative_to_the_role(monkeypatch) -> None:
    """Against the oracle, over the rollouts of two iterations in their order."""
    trainer = build_trainer(role_baseline={"decay": 0.8})
    baselines: dict[str, float] = {}
    for _ in range(2):
        metrics = trainer.step()
        rollouts = [rollout for group in trainer.groups for rollout in group.rollouts]
        roles = [f"standard/player {r.trajectory.info['player']}" for r in rollouts]
        rewards = torch.tensor([rollout.reward for rollout in rollouts], dtype=torch.float64)
        expected, baselines = role_advantages(rewards, roles, baselines, decay=0.8)
        found = [advantage for group in trainer.groups for advantage in group.advantages]
        assert found == expected.tolist()
        for role, value in baselines.items():
            assert metrics[f"train/role_baseline/{role}"] == value
    assert trainer.state_dict()["role_baselines"] == baselines


def test_a_share_of_the_group_advantage_is_mixed_in() -> None:
    settings = build_policy_settings({"role_baseline": {"decay": 0.5, "group_weight": 0.25}})
    estimator = RoleBaselines(settings.role_baseline, "dr_grpo")
    groups = [torch.tensor([1.0, -1.0], dtype=torch.float64)]
    advantages, _ = estimator.estimate_advantages(groups, [["a", "a"]])
    # (R - b): 1 and -1.5; group: 1 and -1
    assert advantages[0].tolist() == [0.75 * 1 + 0.25 * 1, 0.75 * -1.5 + 0.25 * -1]


def test_a_rollback_restores_the_baselines() -> None:
    stages = tuple(
        CurriculumStage(name=name, levels={"standard": 1.0}, exit_conditions=conditions)
        for name, conditions in (
            ("one", (ExitCondition(metric="reward/mean", window=1, threshold=-9.0),)),
            ("two", ()),
        )
    )
    trainer = build_trainer(
        curriculum=stages, rollback=RollbackSettings(window=2, margin=0.01, patience=1)
    )
    trainer.step()
    assert trainer.curriculum.index == 1
    entry = dict(trainer.actor_critic.role_baselines.values)
    trainer.step()
    assert trainer.actor_critic.role_baselines.values != entry
    trainer._roll_back_stage(1, None)
    assert trainer.actor_critic.role_baselines.values == entry


def test_a_checkpoint_of_a_trainer_without_folder_holds_its_opponents() -> None:
    trainer = build_trainer()
    for _ in range(3):
        trainer.step()
    state, model = copy.deepcopy(trainer.state_dict()), copy.deepcopy(trainer.policy.state_dict())
    step = copy.deepcopy(trainer.optimizer_step.state_dict())
    other = build_trainer()
    other.policy.load_state_dict(model)
    other.optimizer_step.load_state_dict(step)
    other.load_state_dict(state)
    for _ in range(3):
        assert trainer.step()["reward/mean"] == other.step()["reward/mean"]
    assert weights_digest(trainer.policy) == weights_digest(other.policy)


def test_probabilities_of_moves_are_those_of_the_sampler() -> None:
    """A policy taught to play legally: frequencies of its sampled moves against the computed probabilities."""
    import rl_core

    policy, environment = build_policy(), KuhnPoker()
    rows = [{"messages": environment.demonstration(s, "standard").messages} for s in range(600)]
    options = {"epochs": 3, "batch_size": 16, "learning_rate": 5e-3}
    rl_core.sft(policy, rows, settings=options).run()
    decisions = environment.list_decisions()
    probabilities = compute_move_probabilities(
        policy.model,
        policy.renderer,
        decisions,
        temperature=1.0,
        pad_id=policy.renderer.pad_id,
        max_tokens=4096,
    )
    sums = {key: sum(moves.values()) for key, moves in probabilities.items()}
    assert all(0.9 < total <= 1 + 1e-6 for total in sums.values())
    messages = [dict(decisions[5].opening[0])]
    texts = rl_core.generate(
        policy, [{"prompt": messages}], samples=2000, sampling={"max_completion_tokens": 8}
    )[0]
    for move, p in probabilities[decisions[5].key].items():
        assert texts.count(move) / 2000 == pytest.approx(p, abs=4.5 * (p * (1 - p) / 2000) ** 0.5)
    cold = compute_move_probabilities(
        policy.model, policy.renderer, decisions, temperature=0.2, pad_id=0, max_tokens=64
    )
    assert max(cold["K:b"].values()) > max(probabilities["K:b"].values())


def test_matches_are_summarised_with_intervals_by_hand() -> None:
    class Game:
        def __init__(self, place, player, rewards):
            self.plan = type("Plan", (), {"place": place, "recorded": (player,)})
            self.outcome = type("Outcome", (), {"rewards": rewards})

    games = [Game(0, 0, (1, -1)), Game(0, 1, (2, -2)), Game(1, 0, (1, -1)), Game(1, 1, (-2, 2))]
    metrics = compute_match_metrics(games, "random")
    # deals: (1 - 2) / 2 = -0.5 and (1 + 2) / 2 = 1.5; mean 0.5, standard deviation sqrt(2), error 1
    assert metrics["eval/payoff_against/random"] == 0.5
    assert metrics["eval/payoff_against_low/random"] == pytest.approx(0.5 - 1.959964, abs=1e-6)
    assert metrics["eval/payoff_against_high/random"] == pytest.approx(0.5 + 1.959964, abs=1e-6)
    assert metrics["eval/win_rate_against/random"] == 0.75
    assert metrics["eval/win_rate_against_low/random"] < 0.75
    assert compute_match_metrics([], "random") == {}


def test_an_evaluation_changes_no_weight_and_repeats() -> None:
    trainer = build_trainer()
    before = weights_digest(trainer.policy)
    metrics = trainer.evaluate()
    assert metrics == trainer.evaluate() and weights_digest(trainer.policy) == before
    assert 0 <= metrics["eval/exploitability"] <= 2
    # The first snapshot has the same weights, and the games are seeded: an even match on average.
    low, high = (metrics[f"eval/payoff_against_{side}/first"] for side in ("low", "high"))
    assert low <= 0 <= high


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"prompts_per_iteration": 5}, "prompts_per_iteration 5 must be even"),
        ({"algorithm": "dapo", "role_baseline": None}, "dynamic_sampling_tries would replace"),
        (
            {"rollouts": {"workers": "server", "address": "127.0.0.1:1"}},
            "workers server sample from one",
        ),
        ({"rollouts": {"workers": "ray"}}, "rollouts.workers ray sample from one version"),
        ({"launch": {"kind": "torchrun", "processes": 2}}, "launch.kind torchrun shards"),
        ({"algorithm": "ppo"}, "role_baseline: not used by ppo with a critic"),
        ({"advantages": "x.py:f"}, "role_baseline: not used by a custom advantage estimator"),
        ({"role_baseline": {"decay": 1.0}}, "decay"),
        ({"self_play": {"opponent": "past"}}, "opponent"),
        ({"self_play": {"pool": 3}}, "pool"),
    ],
)
def test_what_is_not_supported_is_refused_with_a_reason(values, message: str) -> None:
    settings = {
        "algorithm": "reinforce",
        "self_play": {},
        "role_baseline": {},
        "sampling": SAMPLING,
        **values,
    }
    with pytest.raises(SettingsError, match=message):
        build_policy_settings({k: v for k, v in settings.items() if v is not None})


def test_environments_without_two_players_are_refused() -> None:
    with pytest.raises(SettingsError, match="'letters' is not a two-player game; use kuhn_poker"):
        build_trainer(environment=FewLetters())
    with pytest.raises(SettingsError, match="not supported in a mixture"):
        build_trainer(environment=MixtureEnvironment({"a": KuhnPoker(), "b": KuhnPoker()}))


def test_a_group_of_one_is_enough_with_a_role_baseline() -> None:
    trainer = build_trainer(algorithm="dr_grpo", group_size=1)
    assert trainer.step()["train/zero_advantage_rate"] < 1
    with pytest.raises(SettingsError, match="group_size: 1 leaves dr_grpo without a baseline"):
        build_trainer(algorithm="dr_grpo", group_size=1, role_baseline=None)


def test_role_baselines_work_without_self_play() -> None:
    from helpers.letters import LOW, make_trainer

    from rl_core.data.tokenizer import train_tokenizer
    from rl_core.settings import RoleBaselineSettings

    trainer = make_trainer(
        train_tokenizer(["abc xyz"], 300), curriculum=LOW, role_baseline=RoleBaselineSettings()
    )
    metrics = trainer.step()
    assert any(name.startswith("train/role_baseline/low") for name in metrics)


@pytest.mark.slow
def test_self_play_lowers_the_exploitability_of_a_policy_that_plays_at_random() -> None:
    """The settings of configs/self-play.yaml with half of the games; measured in tests/benchmarks/self_play.py."""
    import rl_core

    environment, policy = KuhnPoker(skill=0.2), build_policy()
    rows = [{"messages": environment.demonstration(s, "standard").messages} for s in range(2000)]
    options = {"epochs": 4, "batch_size": 32, "learning_rate": 3e-3}
    rl_core.sft(policy, rows, settings=options).run()
    settings = {
        "algorithm": "reinforce",
        "iterations": 100,
        "prompts_per_iteration": 32,
        "learning_rate": 1e-3,
        "schedule": "cosine",
        "self_play": {},
        "role_baseline": {},
        "sampling": {"max_completion_tokens": 24, "max_turns": 4},
    }
    training = rl_core.policy_gradient(policy, environment=environment, settings=settings)
    before = training.trainer.evaluate()
    after = training.run().metrics
    assert before["eval/exploitability"] > 0.25
    assert after["eval/exploitability"] < before["eval/exploitability"] - 0.03
    assert after["eval/payoff_against_low/first"] > 0
