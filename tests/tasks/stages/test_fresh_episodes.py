"""Held-out episodes of a comparison: the pipeline's draw, fresh ones, and none left."""

from types import SimpleNamespace

import pytest
from helpers.model_tags import ModelTags

from rl_core.environments import make_environment
from rl_core.evaluation import summarize_trajectories
from rl_core.rollouts.heldout_episodes import draw_heldout_requests
from rl_core.types import Trajectory
from tasks.config import build_settings
from tasks.config.settings import PromotionSettings
from tasks.lifecycle.promotion import build_attempt, claim_attempt
from tasks.stages import promotion_gate
from tasks.stages.evaluate import (
    list_reported_episodes,
    list_validation_episodes,
    resolve_episodes_seed,
)
from tasks.stages.promotion_gate import choose_episode_draw

FRESH = PromotionSettings(repeated_attempts="fresh")


def outcome(requests):
    return summarize_trajectories(
        Trajectory(
            environment="e",
            level=r.level,
            kind="k",
            seed=r.seed,
            prompt="",
            target="",
            success=True,
            reward=1.0,
        )
        for r in requests
    )


@pytest.fixture
def gate(monkeypatch):
    """A gate whose environment has 100 held-out episodes of each of two levels; 20 of each are for validation."""
    environment = make_environment("arithmetic")
    environment.seeds_of = lambda split, level: range(2**30, 2**30 + 100)
    environment.question = lambda seed, level: str(seed)  # all different
    monkeypatch.setattr(
        promotion_gate, "build_pipeline_environment", lambda settings, data: environment
    )
    settings = build_settings(
        {
            "name": "t",
            "environment": {"name": "arithmetic"},
            "stages": {
                "prepare_data": {},
                "sft": {},
                "policy": {
                    "eval_every": 5,
                    "eval_episodes": 40,
                    "curriculum": [{"name": "all", "levels": {"medium": 1, "hard": 1}}],
                },
                "evaluate": {"episodes": 40, "levels": ["medium", "hard"]},
                "promote": {},
            },
        }
    )
    run = SimpleNamespace(settings=settings, registered_model="m", tracking=ModelTags())
    evaluation = settings.stages.evaluate
    standard = outcome(
        draw_heldout_requests(environment, evaluation, resolve_episodes_seed(evaluation, settings))
    )

    def ask(comparison, promotion=FRESH):
        draw = choose_episode_draw(run, promotion, comparison, standard, None)
        requests = list_reported_episodes(environment, draw.settings, settings)
        played = outcome(requests)
        attempt = build_attempt(
            "arithmetic",
            comparison,
            draw.number,
            version=1,
            champion=1,
            challenger_evaluation=played,
            champion_evaluation=played,
        )
        return draw.number, claim_attempt(run.tracking, "m", attempt).number, set(requests)

    return SimpleNamespace(ask=ask, environment=environment, settings=settings)


def test_each_comparison_gets_episodes_that_none_has_seen_while_there_are_some(gate, caplog):
    asked = [gate.ask(f"comparison {n}") for n in range(4)]
    # 100 of a level: 20 for each draw, 20 for validation
    assert [(draw, number) for draw, number, _ in asked] == [(0, 1), (1, 1), (2, 1), (3, 1)]
    episodes = [requests for *_, requests in asked]
    validated = set(list_validation_episodes(gate.environment, gate.settings))
    assert (
        len(set.union(*episodes)) == 4 * 40
        and not validated & set.union(*episodes)
        and len(validated) == 40
    )
    # None is left: the pipeline's draw again, as its second and third attempt.
    assert gate.ask("comparison 4")[:2] == (0, 2)
    assert gate.ask("comparison 5")[:2] == (0, 3)
    assert (
        "no fresh episodes (level 'medium' has 100 held-out episodes, too few for draw 4"
        in caplog.text
    )


def test_the_same_comparison_keeps_its_episodes(gate):
    first, second = gate.ask("a"), gate.ask("b")
    assert gate.ask("a") == first and gate.ask("b") == second
    assert gate.ask("c")[:2] == (2, 1)


def test_spent_alpha_needs_no_other_episodes(gate):
    spend = PromotionSettings()
    assert [gate.ask(name, spend)[:2] for name in "aba"] == [(0, 1), (0, 2), (0, 1)]
