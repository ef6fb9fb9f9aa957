"""`textarena`: games alone and against opponents, with a stand-in of the package."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from helpers.adapters import hide_package, stand_in

from rl_core.environments import make_environment
from rl_core.environments.textarena_tasks import TextArena
from rl_core.errors import EnvironmentFault, SettingsError

fake = stand_in("textarena")


def build(game: str, **options: object) -> TextArena:
    environment = make_environment("textarena", {"game": game, "workers": 1, **options})
    assert isinstance(environment, TextArena)
    return environment


def test_a_game_alone_by_hand(fake: None) -> None:
    environment = build("GuessTheNumber-v0", options={"max_number": 9}, instructions="Play.")
    episode = environment.episode(3, "default")  # random.Random(3).randint(1, 9) is 4
    assert episode.reset() == [
        {"role": "system", "content": "Play."},
        {"role": "user", "content": "Guess from 1 to 9 as [5]."},
    ]
    assert episode.hidden == '{"game_number": 4}'
    step = episode.step("<think>low [1]</think>I say [2]")
    assert step.messages == [{"role": "user", "content": "The number is higher."}]
    assert (step.reward, step.terminated, step.success) == (0.0, False, None)
    step = episode.step("five")
    assert step.messages[0]["content"].endswith(
        "attempted an invalid move. Reason: no number in brackets."
    )
    step = episode.step("[4]")
    assert (step.reward, step.terminated, step.success, step.answer) == (1.0, True, True, "[4]")
    assert step.info == {"reason": "Congratulations!", "invalid_move": False}


def test_two_invalid_moves_lose(fake: None) -> None:
    episode = build("GuessTheNumber-v0").episode(3, "default")
    episode.reset()
    episode.step("five")
    step = episode.step("six")
    assert (step.reward, step.terminated, step.success, step.is_error) == (-1.0, True, False, True)
    assert step.info["invalid_move"] and step.info["reason"].startswith("Invalid Move")


def test_only_a_game_with_opponents_is_lost_by_not_moving(fake: None) -> None:
    alone, against = (
        build("GuessTheNumber-v0").episode(3, "default"),
        build("Nim-v0").episode(0, "default"),
    )
    for episode in (alone, against):
        episode.reset()
    assert (alone.cut_reward, against.cut_reward) == (0.0, -1.0)


def test_hidden_numbers_decide_what_is_held_out(fake: None) -> None:
    environment = build("GuessTheNumber-v0", options={"max_number": 10**6})
    assert environment.held_out("default").by == "content"


def test_seats_alternate_and_the_random_player_moves_legally(fake: None) -> None:
    environment = build("Nim-v0")
    even, odd = environment.episode(0, "default"), environment.episode(1, "default")
    first = even.reset()[0]["content"]
    assert first == (
        "You are Player 0 in Nim. Take as '[take 1]'.\nPile: 4. Available Moves: '[take 1]', '[take 2]'"
    )
    second = odd.reset()[0]["content"]  # Player 0 has moved
    assert second.startswith("You are Player 1 in Nim.") and "[Player 0] [take" in second
    step = even.step("[take 1]")
    assert step.messages[0]["content"].startswith("Pile: 3.")  # without an echo of the own move
    assert "[Player 1] [take" in step.messages[0]["content"]
    left = int(step.messages[0]["content"].rpartition("Pile: ")[2][0])
    assert left in (1, 2)
    step = even.step(f"[take {left}]")
    assert (step.reward, step.success, step.info["reason"]) == (1.0, True, "Player 0 has won!")
    again = environment.episode(0, "default")
    assert again.reset()[0]["content"] == first
    assert int(again.step("[take 1]").messages[0]["content"].rpartition("Pile: ")[2][0]) == left


def test_the_random_player_varies_by_seed_and_can_lose(fake: None) -> None:
    environment = build("Nim-v0", seat=1)
    openings = {environment.episode(seed, "default").reset()[0]["content"] for seed in range(8)}
    assert len(openings) == 2  # one or two taken


def test_moves_that_are_not_listed_are_made_up(fake: None) -> None:
    environment = build("Nim-v0", seat=1, options={"lists_moves": False})
    text = environment.episode(0, "default").reset()[0]["content"]
    assert "[Player 0] [take 1]" in text or "[Player 0] [take 2]" in text
    with pytest.raises(EnvironmentFault, match="finds no legal move of this game; let a function"):
        build("Riddle-v0", seat=1).episode(0, "default").reset()


def test_a_move_that_hands_the_turn_over_before_it_is_counted_is_legal(fake: None) -> None:
    game = build("Rounds-v0").create_game(0, "default")
    game.begin()
    moves = 0
    while game.outcome is None:
        game.play(game.choose_random_move(random.Random(0)))
        moves += 1
    assert (moves, game.outcome.rewards) == (2, (1.0, -1.0))


def test_a_demonstration_is_a_game_of_random_legal_moves(fake: None) -> None:
    environment = build("Nim-v0", instructions="Play.", options={"pile": 5})
    demonstrations = [environment.demonstration(seed, "default") for seed in range(6)]
    for seed, demonstration in enumerate(demonstrations):
        assert demonstration is not None and demonstration == environment.demonstration(
            seed, "default"
        )
        roles = [message["role"] for message in demonstration.messages]
        assert roles == ["system"] + ["user", "assistant"] * (len(roles) // 2)
        episode = environment.episode(seed, "default")
        assert episode.reset() == demonstration.messages[:2]
        moves = [m["content"] for m in demonstration.messages if m["role"] == "assistant"]
        steps = [episode.step(move) for move in moves]
        assert steps[-1].terminated and not steps[-1].is_error
        assert steps[-1].success == demonstration.success
    assert len({str(one and one.messages) for one in demonstrations}) >= 3
    assert {one is not None and one.success for one in demonstrations} == {True, False}


def test_a_game_without_known_moves_has_no_demonstration(fake: None) -> None:
    assert build("Riddle-v0", seat=0).demonstration(0, "default") is None


OPPONENT = """
def play(messages, seed):
    assert messages[0]["content"].startswith("You are Player 0")
    if messages[-1]["content"].endswith("take 1]'"):
        raise OSError("asleep")
    return f"[take {1 + seed % 2}]"
"""


def test_a_function_plays_the_opponent(fake: None, tmp_path: Path) -> None:
    path = tmp_path / "opponent.py"
    path.write_text(OPPONENT)
    environment = build("Nim-v0", seat=1, opponent=f"{path}:play", options={"pile": 5})
    assert environment.named_code({"opponent": f"{path}:play"}) == (f"{path}:play",)
    episode = environment.episode(0, "default")
    assert "[Player 0] [take 1]" in episode.reset()[0]["content"]  # seed 0 of the first move
    step = episode.step("[take 1]")
    assert "[Player 0] [take 2]" in step.messages[0]["content"]  # seed 1 of the second
    step = episode.step("[take 1]")
    assert (step.reward, step.success) == (1.0, True)
    alone = build("Nim-v0", seat=1, opponent=f"{path}:play", options={"pile": 1})
    with pytest.raises(EnvironmentFault, match=r"opponent\.py:play': OSError: asleep"):
        alone.episode(0, "default").reset()


def test_a_lost_game_is_minus_one(fake: None, tmp_path: Path) -> None:
    path = tmp_path / "opponent.py"
    path.write_text("def play(messages, seed):\n    return '[take 2]'\n")
    episode = build("Nim-v0", seat=0, opponent=f"{path}:play", options={"pile": 3}).episode(
        0, "default"
    )
    episode.reset()
    step = episode.step("[take 1]")
    assert (step.reward, step.terminated, step.success) == (-1.0, True, False)


def test_a_game_that_is_over_before_the_first_move(fake: None, tmp_path: Path) -> None:
    path = tmp_path / "opponent.py"
    path.write_text("def play(messages, seed):\n    return '[take 1]'\n")
    environment = build("Nim-v0", seat=1, opponent=f"{path}:play", options={"pile": 1})
    with pytest.raises(EnvironmentFault, match="over before the policy's first move"):
        environment.episode(0, "default").reset()


def test_a_game_that_differs_when_it_is_replayed_is_refused(fake: None) -> None:
    episode = build("GuessTheNumber-v0", options={"max_number": 10**6}).episode(3, "default")
    episode.reset()
    episode.step("chance [1]")
    with pytest.raises(EnvironmentFault, match="differs when it is played again"):
        episode.step("[2]")


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"game": "Chess-v9"}, "there is no game 'Chess-v9' among GuessTheNumber-v0, Nim-v0"),
        ({"game": "Nim-v0", "options": {"piles": 3}}, "unexpected keyword argument 'piles'"),
        ({"game": "Nim-v0", "players": 0}, "options.players: 0"),
        ({"game": "Nim-v0", "workers": 0}, "workers must be at least 1"),
        ({"game": "Nim-v0", "opponent": "strong"}, "options.opponent"),
        ({"game": "Nim-v0", "opponent": {"url": "http://x"}}, "options.opponent"),
    ],
)
def test_options_are_checked(fake: None, options: dict, part: str) -> None:
    with pytest.raises(SettingsError) as caught:
        make_environment("textarena", {"workers": 1, **options}).episode(0, "default").reset()
    assert part in str(caught.value)


def test_seats_that_do_not_exist(fake: None) -> None:
    with pytest.raises(
        EnvironmentFault, match=r"options\.seat: 2; the game has the players 0 to 1"
    ):
        build("Nim-v0", seat=2).episode(0, "default").reset()


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    hide_package(monkeypatch, "textarena")
    with pytest.raises(SettingsError, match=r"python -m posttrain.install --extras textarena"):
        build("Nim-v0")


def test_with_the_package() -> None:
    pytest.importorskip("textarena")
    alone = build("GuessTheNumber-v0", timeout_s=120.0)
    episode = alone.episode(5, "default")
    assert "You are playing Guess The Number." in episode.reset()[0]["content"]
    step = episode.step("[10]")
    assert step.messages[0]["content"] in (
        "The target number is higher.",
        "The target number is lower.",
    )
    board = build("TicTacToe-v0", timeout_s=120.0)
    episode = board.episode(1, "default")  # Player 1: the random player has moved
    text = episode.reset()[0]["content"]
    assert "You are Player 1 in Tic Tac Toe." in text and "[Player 0] [" in text
    both = board.create_game(3, "default")
    both.begin()
    for number, move in enumerate(("[0]", "[4]", "[1]", "[5]", "[2]")):
        text = both.take_messages(number % 2)[0]["content"]
        assert f"You are Player {number}" in text or number > 1
        both.play(move)
    assert both.outcome is not None and both.outcome.rewards == (1.0, -1.0)
    for game in ("ConnectFour-v0", "Nim-v0", "KuhnPoker-v0"):
        build(game, timeout_s=120.0).episode(0, "default").reset()
        build(game, timeout_s=120.0).episode(1, "default").reset()
