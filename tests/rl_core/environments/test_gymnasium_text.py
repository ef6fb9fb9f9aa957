"""Gymnasium environments as text: by hand with a stand-in, and with the package where it is installed."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.adapters import stand_in

from rl_core.environments import list_environment_code, make_environment
from rl_core.environments.gymnasium_text import replace_terminal_colours
from rl_core.errors import EnvironmentFault, SettingsError

fake = stand_in("gymnasium")


def test_colours_become_brackets() -> None:
    assert replace_terminal_colours("\n\x1b[41mS\x1b[0mFF\nFH\n") == "[S]FF\nFH"
    taxi = "|\x1b[34;1mR\x1b[0m: |\x1b[43m \x1b[0m|\x1b[35mY\x1b[0m|\x1b[42m_\x1b[0m|"
    assert replace_terminal_colours(taxi) == "|(R): |[ ]|<Y>|{_}|"
    assert (
        replace_terminal_colours("\x1b[34;1m\x1b[43mR\x1b[0m\x1b[0m") == "([R])"
    )  # one inside the other
    assert replace_terminal_colours("\x1b[2Jx\x1b[31m") == "\x1b[2Jx"


def test_an_episode_by_hand(fake: None) -> None:
    environment = make_environment(
        "gymnasium",
        {"id": "Line-v0", "actions": ["back", "on"], "task": "Go to G.", "misuse_cost": 0.1},
    )
    episode = environment.episode(2, "default")
    assert episode.reset() == [
        {"role": "user", "content": "Go to G. Write one of: back, on\n[.]..G"}
    ]
    step = episode.step("I go\n ON ")
    assert (step.messages, step.reward, step.terminated) == (
        [{"role": "tool", "content": ".[.].G"}],
        -0.5,
        False,
    )
    step = episode.step("on we go")
    assert step.is_error and step.reward == -0.1
    assert step.messages == [{"role": "tool", "content": "error: write one of: back, on"}]
    episode.step("on")
    step = episode.step("<think>back</think>on")
    assert (step.terminated, step.truncated, step.success, step.reward, step.messages) == (
        True,
        False,
        True,
        1.0,
        [],
    )
    assert step.answer == "on"
    with pytest.raises(EnvironmentFault, match="single-use"):
        episode.step("on")
    import gymnasium

    assert gymnasium.MADE[-1].closed == 1 and gymnasium.MADE[-1].seed == 2


def test_the_seed_goes_to_reset_and_levels_are_options(fake: None) -> None:
    levels = {"near": {"length": 1}, "far": {"length": 5}}
    environment = make_environment("gymnasium", {"id": "Line-v0", "levels": levels})
    assert environment.levels == ("near", "far")
    shown = [
        environment.episode(seed, level).reset()[0]["content"]
        for level in levels
        for seed in (0, 1)
    ]
    lines = ["[.]G", "[.].G", "[.]....G", "[.].....G"]
    assert shown == [f"Write one of: 0, 1\n{line}" for line in lines]
    with pytest.raises(SettingsError, match="no level 'fra'; did you mean 'far'"):
        environment.episode(0, "fra")


def test_truncation(fake: None) -> None:
    environment = make_environment("gymnasium", {"id": "Line-v0", "max_steps": 2})
    episode = environment.episode(0, "default")
    episode.reset()
    assert not episode.step("1").truncated
    step = episode.step("1")
    assert step.truncated and not step.terminated and step.success is False
    episode = make_environment("gymnasium", {"id": "Line-v0"}).episode(0, "default")
    episode.reset()
    episode.step("0")
    assert episode.step("0").truncated, "the built-in limit"


@pytest.mark.parametrize(
    ("told", "above", "success"), [(None, 0.0, True), (None, 1.0, False), (False, 0.0, False)]
)
def test_what_counts_as_success(fake: None, told: bool | None, above: float, success: bool) -> None:
    options = {"length": 1, "told": told}
    episode = make_environment(
        "gymnasium", {"id": "Line-v0", "options": options, "success_above": above}
    ).episode(0, "default")
    episode.reset()
    assert episode.step("1").success is success


def test_where_every_step_costs_the_goal_is_still_a_success(fake: None) -> None:
    for options, success in (({}, True), ({"success_above": 0.0}, False)):
        episode = make_environment("gymnasium", {"id": "CliffWalking-v1", **options}).episode(
            0, "default"
        )
        episode.reset()
        assert not episode.step("up").terminated
        step = episode.step("right")
        assert (step.terminated, step.reward, step.success) == (True, -1.0, success)


def test_values_and_free_text(fake: None) -> None:
    silent = make_environment("gymnasium", {"id": "Silent-v0"}).episode(0, "default")
    assert silent.reset()[0]["content"] == "Write one of: 0, 1\n0"
    talk = make_environment("gymnasium", {"id": "Talk-v0"}).episode(0, "default")
    assert talk.reset()[0]["content"] == "\n0"
    assert talk.step("hello").messages[0]["content"] == "said hello, at 1.23 7"
    assert talk.step("no digits 1").is_error
    assert talk.step("bye").terminated
    assert make_environment("gymnasium", {"id": "Talk-v0"}).demonstration(1, "default") is None


def test_demonstrations_show_the_form(fake: None) -> None:
    environment = make_environment(
        "gymnasium", {"id": "Line-v0", "actions": ["back", "on"], "demonstration_steps": 3}
    )
    shown = [environment.demonstration(seed, "default") for seed in range(30)]
    assert shown[4].messages == environment.demonstration(4, "default").messages
    for row in shown:
        assert row.messages[-1]["role"] == "assistant"
        said = [message["content"] for message in row.messages if message["role"] == "assistant"]
        assert 1 <= len(said) <= 3 and set(said) <= {"back", "on"}
        assert row.success == (said == ["on"] * 3 and row.seed % 2 == 0)


def test_a_class_by_import_path_may_wait(fake: None) -> None:
    environment = make_environment("gymnasium", {"id": "gymnasium:Line", "options": {"length": 1}})
    assert environment.episode(0, "default").reset()[0]["content"].endswith("[.]G")
    assert environment.blocking is True


@pytest.mark.parametrize("id", ["os:mkdir", "pathlib:Path", "gymnasium:make"])
def test_nothing_but_an_environment_class_is_called(fake: None, tmp_path: Path, id: str) -> None:
    made = tmp_path / "made"
    with pytest.raises(
        SettingsError, match=f"options.id: '{id}' is not a subclass of gymnasium.Env"
    ):
        make_environment("gymnasium", {"id": id, "options": {"path": str(made)}})
    assert not made.exists()


def test_code_that_a_config_names_is_listed_without_importing_it() -> None:
    assert list_environment_code("gymnasium", {"id": "some.module:Class"}) == ("some.module:Class",)
    assert list_environment_code("some.module:Own", {}) == ("some.module:Own",)
    for name, options in (
        ("gymnasium", {"id": "FrozenLake-v1"}),
        ("gymnasium", None),
        ("arithmetic", {"id": "a:b"}),
    ):
        assert list_environment_code(name, options) == ()
    assert list_environment_code("rl_core.environments.maze:Maze") == ()


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (
            {"id": "Lime-v0"},
            "options.id: 'Lime-v0' cannot be made for level 'default': no environment Lime-v0",
        ),
        ({"id": "no.such:Class"}, "options.id: module 'no.such' cannot be imported"),
        ({"id": "gymnasium:Lime"}, "no class 'Lime' there; did you mean 'Line'?"),
        ({"id": "gymnasium:make"}, "is not a subclass of gymnasium.Env"),
        ({"id": "Line-v0", "options": {"size": 3}}, "cannot be made"),
        ({"id": "Line-v0", "actions": ["on"]}, "options.actions: 1 words for 2 actions"),
        ({"id": "Arm-v0"}, "it must be Discrete or Text"),
        ({"id": "Silent-v0", "observation": "render"}, "cannot render as ansi; use value"),
        ({"id": "Line-v0", "max_steps": 0}, "options.max_steps: 0"),
        ({"id": "Line-v0", "observation": "picture"}, "is not one of"),
        ({}, "options.id: environment 'gymnasium' needs it"),
    ],
)
def test_mistakes_are_named(fake: None, options: dict, part: str) -> None:
    with pytest.raises(SettingsError) as caught:
        make_environment("gymnasium", options)
    assert part in str(caught.value)


@pytest.mark.filterwarnings("ignore")
def test_with_the_package() -> None:
    pytest.importorskip("gymnasium")
    lake = make_environment("gymnasium", {"id": "FrozenLake-v1", "options": {"is_slippery": False}})
    episode = lake.episode(0, "default")
    assert episode.reset()[0]["content"].endswith("left, down, right, up\n[S]FFF\nFHFH\nFFFH\nHFFG")
    steps = [episode.step(word) for word in ("down", "down", "right", "right", "down", "right")]
    assert (
        [step.terminated for step in steps] == [False] * 5 + [True]
        and steps[-1].success
        and steps[-1].reward == 1
    )
    assert (
        steps[0].messages[0]["content"].endswith("SFFF\n[F]HFH\nFFFH\nHFFG") and not lake.blocking
    )
    card = make_environment("gymnasium", {"id": "Blackjack-v1"})
    assert (
        card.episode(3, "default").reset()[0]["content"].endswith("you have 7, the dealer shows 10")
    )
    slippery = make_environment(
        "gymnasium", {"id": "FrozenLake-v1", "options": {"map_name": "8x8"}}
    )

    def walk(seed: int) -> list[str]:
        episode = slippery.episode(seed, "default")
        episode.reset()
        steps = [episode.step("right") for _ in range(2)]  # too few to come to a hole
        return [step.messages[0]["content"] for step in steps]

    assert walk(1) == walk(1) and len({tuple(walk(seed)) for seed in range(8)}) > 1
    with pytest.raises(SettingsError, match="cannot be made"):
        make_environment("gymnasium", {"id": "FrozenLake-v1", "options": {"slippery": False}})
