"""Tests of arithmetic: targets compared with Python's arithmetic, looks, answers, determinism."""

import re

import pytest

from rl_core.environments.arithmetic import LEVELS, Arithmetic
from rl_core.environments.calculator import calculate_text
from rl_core.environments.environment import HELDOUT_START
from rl_core.errors import EnvironmentFault, SettingsError


def compute_chain(chain):
    """Compute a chain of + - * by hand: products first, then sums."""
    total = 0
    for sign, product in re.findall(r"(^|[+-])([\d* ]+)", chain.replace(" ", "")):
        term = 1
        for number in product.split("*"):
            term *= int(number)
        total += -term if sign == "-" else term
    return total


@pytest.mark.parametrize(
    ("chain", "value"), [("3 + 4 * 2", 11), ("10 - 2 * 3 - 4", 0), ("2 * 3 * 4", 24)]
)
def test_chains_by_hand(chain, value):
    assert compute_chain(chain) == value and calculate_text(chain) == str(value)


@pytest.mark.parametrize("level", LEVELS)
def test_targets_kinds_and_looks(level):
    environment = Arithmetic(max_number=30)
    targets, kinds = {}, set()
    for seed in range(300):
        episode = environment.episode(seed, level)
        chain = episode.prompt.removesuffix(" = ?")
        assert episode.target == str(compute_chain(chain))
        numbers = [int(number) for number in re.findall(r"\d+", chain)]
        assert len(numbers) == LEVELS[level] and all(1 <= number <= 30 for number in numbers)
        signs = set(re.findall(r"[-+*]", chain))
        kind = "product" if signs == {"*"} else "mixed" if "*" in signs else "sum"
        assert episode.kind == kind
        look = episode.step(f"calculator {chain}")
        assert (
            look.messages == [{"role": "tool", "content": episode.target}]
            and look.tool_call is not None
        )
        step = episode.step(f"answer {look.messages[0]['content']}")
        assert step.success and step.reward == 1.0 and step.terminated
        with pytest.raises(EnvironmentFault):
            episode.step("answer 1")
        targets[episode.target] = targets.get(episode.target, 0) + 1
        kinds.add(kind)
    assert max(targets.values()) / 300 < 0.1  # guessing
    assert kinds == ({"sum", "product"} if level == "easy" else {"sum", "product", "mixed"})


def test_misuse_costs_and_wrong_answers():
    episode = Arithmetic(look_cost=0.125, misuse_cost=0.25).episode(1, "easy")
    assert episode.step("calculator 1 + 1").reward == -0.125
    for action, part in (
        ("calculator 1 / 0", "error: "),
        ("calculator", "takes 1 arguments"),
        ("hm", "neither"),
    ):
        step = episode.step(action)
        assert step.is_error and step.reward == -0.25 and part in step.messages[0]["content"]
    assert episode.step("answer -999").success is False


def test_level_and_seed_determine_everything():
    first, second = Arithmetic(), Arithmetic()
    for level in LEVELS:
        for seed in (0, 5, HELDOUT_START):
            assert first.episode(seed, level).prompt == second.episode(seed, level).prompt
            assert first.demonstration(seed, level) == second.demonstration(seed, level)
    assert first.episode(1, "hard").prompt != first.episode(2, "hard").prompt
    assert first.seeds("train").stop <= first.seeds("heldout").start


def test_options():
    assert (
        "calculator EXPRESSION"
        in Arithmetic(instructions=True).episode(0, "easy").reset()[0]["content"]
    )
    for options in (
        {"max_number": 4},
        {"max_number": 10**6},
        {"skill": {"hrd": 0.1}},
        {"look_cost": 2.0},
    ):
        with pytest.raises(SettingsError):
            Arithmetic(**options)
    with pytest.raises(SettingsError, match="easy"):
        Arithmetic().episode(0, "eazy")
