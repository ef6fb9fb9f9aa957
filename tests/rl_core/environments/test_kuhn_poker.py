"""`kuhn_poker`: the rules by hand, and exact values of strategies against the known equilibria and by brute force."""

from __future__ import annotations

import itertools
import random

import pytest

from rl_core.environments import make_environment
from rl_core.environments.kuhn_poker import DEALS, KuhnPoker, KuhnPokerGame
from rl_core.environments.kuhn_strategies import (
    CARDS,
    HISTORIES,
    build_equilibrium,
    compute_best_response_value,
    compute_expected_value,
    find_player,
    measure_exploitability,
)
from rl_core.environments.two_player import GameOutcome, SeatEpisode
from rl_core.errors import DataError, EnvironmentFault, SettingsError

SETS = [f"{card}:{history}" for history in HISTORIES for card in CARDS]


@pytest.fixture
def environment() -> KuhnPoker:
    environment = make_environment("kuhn_poker")
    assert isinstance(environment, KuhnPoker)
    return environment


def play(cards: tuple[str, str], *moves: str) -> KuhnPokerGame:
    game = KuhnPokerGame(cards)
    for move in moves:
        game.play(move)
    return game


@pytest.mark.parametrize(
    ("cards", "moves", "value"),
    [
        (("K", "J"), ("pass", "pass"), 1.0),
        (("J", "Q"), ("pass", "pass"), -1.0),
        (("J", "K"), ("bet", "pass"), 1.0),  # the second player folds the better card
        (("Q", "K"), ("bet", "bet"), -2.0),
        (("K", "Q"), ("bet", "bet"), 2.0),
        (("K", "J"), ("pass", "bet", "pass"), -1.0),  # the first player folds the better card
        (("K", "Q"), ("pass", "bet", "bet"), 2.0),
        (("J", "Q"), ("pass", "bet", "bet"), -2.0),
    ],
)
def test_payoffs_by_hand(cards: tuple[str, str], moves: tuple[str, ...], value: float) -> None:
    outcome = play(cards, *moves).outcome
    assert outcome is not None
    assert outcome.rewards == (value, -value) and outcome.illegal_player is None


@pytest.mark.parametrize("text", ["", "raise", "bet bet", "BET", "p"])
@pytest.mark.parametrize(("before", "loser"), [((), 0), (("pass",), 1), (("pass", "bet"), 0)])
def test_an_illegal_move_loses_the_most_with_a_reason(
    text: str, before: tuple[str, ...], loser: int
) -> None:
    game = play(("K", "J"), *before, text)  # the player with the better card, too
    assert game.outcome is not None
    assert game.outcome.rewards == ((-2.0, 2.0) if loser == 0 else (2.0, -2.0))
    assert game.outcome.illegal_player == loser
    assert game.outcome.reason.startswith(f"player {loser} loses: illegal move {text!r}")
    with pytest.raises(EnvironmentFault, match="after the end"):
        game.play("pass")


def test_each_player_sees_its_card_and_the_other_ones_moves_only() -> None:
    game = KuhnPokerGame(("Q", "K"))
    assert game.take_messages(0) == [{"role": "user", "content": "card Q first"}]
    game.play(" pass\n")
    assert game.take_messages(1) == [{"role": "user", "content": "card K second they pass"}]
    game.play("bet")
    assert game.to_move == 0
    assert game.take_messages(0) == [{"role": "user", "content": "they bet"}]


def test_deals_are_all_six_equally_often_and_follow_from_the_seed(environment: KuhnPoker) -> None:
    games = [environment.create_game(seed, "standard").cards for seed in range(3000)]
    counts = [games.count(deal) for deal in DEALS]
    assert len(DEALS) == 6 and all(abs(count - 500) < 100 for count in counts)
    assert [environment.create_game(seed, "standard").cards for seed in range(20)] == games[:20]
    with pytest.raises(SettingsError, match="no level 'hard'"):
        environment.create_game(0, "hard")


def test_an_episode_is_a_game_from_one_seat_against_a_random_player(
    environment: KuhnPoker,
) -> None:
    payoffs: dict[int, list[float]] = {0: [], 1: []}
    for seed in range(2000):
        episode = environment.episode(seed, "standard")
        assert isinstance(episode, SeatEpisode)
        assert episode.reset()[0]["content"].startswith("card ")
        step = episode.step("bet")
        while not step.terminated:
            step = episode.step("bet")
        assert step.info["player"] == seed % 2 and step.success == (step.reward > 0)
        payoffs[seed % 2].append(step.reward)
    # Half of the bets win the pot of 1; calls are worth 0 on average.
    for values in payoffs.values():
        assert sum(values) / len(values) == pytest.approx(
            0.5 if values is payoffs[0] else 0.25, abs=0.12
        )


def test_demonstrations_are_legal_games(environment: KuhnPoker) -> None:
    seen = set()
    for seed in range(60):
        messages = environment.demonstration(seed, "standard").messages
        assert messages[-1]["role"] == "assistant"
        moves = [m["content"] for m in messages if m["role"] == "assistant"]
        assert set(moves) <= {"pass", "bet"}
        seen.add((messages[0]["content"], *moves))
    assert len(seen) > 12


@pytest.mark.parametrize("alpha", [0.0, 0.1, 0.2, 1 / 3])
def test_no_equilibrium_can_be_exploited_and_the_game_is_worth_a_loss_of_one_18th(
    alpha: float,
) -> None:
    values = measure_exploitability(build_equilibrium(alpha))
    assert values.exploitability == pytest.approx(0, abs=1e-15)
    assert values.game_value == pytest.approx(-1 / 18, rel=1e-14)
    assert values.best_response_values == pytest.approx((-1 / 18, 1 / 18), rel=1e-13)


def test_other_bluffs_can_be_exploited() -> None:
    strategy = dict(build_equilibrium(1 / 3))
    strategy["J:"] = (0.5, 0.5, 0.0)
    assert measure_exploitability(strategy).exploitability > 0.01
    with pytest.raises(DataError, match=r"alpha: 0\.4"):
        build_equilibrium(0.4)


def test_moves_whose_probabilities_round_to_more_than_1_are_scaled() -> None:
    above = {key: {"pass": 0.75, "bet": 0.75} for key in SETS}
    even = {key: {"pass": 0.5, "bet": 0.5} for key in SETS}
    assert KuhnPoker().measure_strategy(above) == KuhnPoker().measure_strategy(even)


def test_known_strategies_by_hand() -> None:
    uniform = {key: (0.5, 0.5, 0.0) for key in SETS}
    values = measure_exploitability(uniform)
    assert values.exploitability == pytest.approx(11 / 24)  # NashConv 11/12
    assert values.game_value == pytest.approx(1 / 8)
    always_pass = {key: (1.0, 0.0, 0.0) for key in SETS}
    assert measure_exploitability(always_pass).exploitability == 1  # a bet takes every pot
    always_bet = {key: (0.0, 1.0, 0.0) for key in SETS}
    # K wins 2, Q wins 0 on average, J folds: (2 + 0 - 1) / 3 in both seats
    assert measure_exploitability(always_bet).exploitability == pytest.approx(1 / 3)
    illegal = {key: (0.0, 0.0, 1.0) for key in SETS}
    values = measure_exploitability(illegal)
    # As player 0 the policy loses 2 at once; as player 1 also after the best first move.
    assert values.exploitability == 2 and values.illegal_probability == 1
    assert values.game_value == -2


def draw_strategy(rng: random.Random) -> dict[str, tuple[float, float, float]]:
    strategy = {}
    for key in SETS:
        weights = [rng.random() ** 3 for _ in range(3)]
        strategy[key] = tuple(weight / sum(weights) for weight in weights)
    return strategy  # type: ignore[return-value]


def play_out(first: dict, second: dict) -> float:
    """Return player 0's value by following each deal and each pair of moves, without recursion."""
    total = 0.0
    for cards in DEALS:
        paths = [("", 1.0)]
        while paths:
            history, weight = paths.pop()
            player = len(history) % 2
            passes, bets, illegal = (first, second)[player][f"{cards[player]}:{history}"]
            total += weight * illegal * (-2 if player == 0 else 2)
            for letter, p in (("p", passes), ("b", bets)):
                after, higher = history + letter, "JQK".index(cards[0]) > "JQK".index(cards[1])
                sign = 1 if higher else -1
                if after == "pp":
                    total += weight * p * sign
                elif after in ("bb", "pbb"):
                    total += weight * p * 2 * sign
                elif after == "bp":
                    total += weight * p
                elif after == "pbp":
                    total -= weight * p
                else:
                    paths.append((after, weight * p))
    return total / 6


@pytest.mark.parametrize("seed", range(5))
def test_best_responses_are_the_best_of_all_pure_strategies(seed: int) -> None:
    strategy = draw_strategy(random.Random(seed))
    assert compute_expected_value(strategy, strategy) == pytest.approx(play_out(strategy, strategy))
    choices = [(1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)]
    for player in (0, 1):
        mine = [key for key in SETS if find_player(key[2:]) == player]
        best = -10.0
        for plan in itertools.product(choices, repeat=len(mine)):
            pure = dict(zip(mine, plan, strict=True))
            value = play_out(pure, strategy) if player == 0 else -play_out(strategy, pure)
            best = max(best, value)
        assert compute_best_response_value(strategy, player) == pytest.approx(best)


def test_incomplete_strategies_are_refused() -> None:
    strategy = dict(build_equilibrium(0.0))
    del strategy["Q:pb"]
    with pytest.raises(DataError, match="information set 'Q:pb' is missing"):
        measure_exploitability(strategy)
    strategy["Q:pb"] = (0.5, 0.6, 0.0)
    with pytest.raises(DataError, match=r"Q:pb: .* sum to 1"):
        measure_exploitability(strategy)


def test_decisions_are_the_twelve_information_sets_as_a_game_shows_them(
    environment: KuhnPoker,
) -> None:
    decisions = {decision.key: decision for decision in environment.list_decisions()}
    assert sorted(decisions) == sorted(SETS)
    for cards in DEALS:
        for history in HISTORIES:
            game, player = KuhnPokerGame(cards), find_player(history)
            shown = []
            for letter in history:
                if game.to_move == player:
                    shown.append(game.take_messages(player))
                game.play({"p": "pass", "b": "bet"}[letter])
            shown.append(game.take_messages(player))
            decision = decisions[f"{cards[player]}:{history}"]
            expected = [list(decision.opening), *(list(m) for _, m in decision.history)]
            assert expected == shown
    metrics = environment.measure_strategy(
        {key: {"pass": p, "bet": b} for key, (p, b, _) in build_equilibrium(0.2).items()}
    )
    assert metrics["eval/exploitability"] == pytest.approx(0, abs=1e-12)
    assert metrics["eval/game_value"] == pytest.approx(-1 / 18)


def test_rewards_that_do_not_cancel_are_refused() -> None:
    with pytest.raises(EnvironmentFault, match="do not sum to 0"):
        GameOutcome((1.0, 0.0), "both win")
    with pytest.raises(EnvironmentFault, match="do not sum to 0"):
        GameOutcome((float("nan"), float("nan")), "nobody knows")
