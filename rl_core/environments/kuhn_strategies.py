"""Exact values of strategies in Kuhn poker, by enumeration in float64: expected value, best response, exploitability.

A strategy maps each of the 12 information sets, `CARD:HISTORY`, to the probabilities of (pass, bet, illegal). Histories
are letters of the moves so far: p pass, b bet. An illegal move costs the mover 2 chips.

    exploitability = (max_a v(a, s) + max_b -v(s, b)) / 2

where v(x, y) is the expected payoff of player 0 in chips if x plays player 0 and y plays player 1, and the maxima are
over all strategies. It is 0 in an equilibrium. It is the mean loss per game, over both seats, against the best
opponent; NashConv is twice as large.

Source: Kuhn 1950; Lanctot et al. 2017, arXiv:1711.00832 (NashConv), whose halves OpenSpiel reports (arXiv:1908.09453).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rl_core.errors import DataError

CARDS = ("J", "Q", "K")
HISTORIES = ("", "p", "b", "pb")  # after which somebody moves
ILLEGAL_COST = 2.0  # chips: the most that a game can cost
Strategy = Mapping[str, Sequence[float]]  # (pass, bet, illegal) by information set
_LETTERS = ("p", "b")


@dataclass(frozen=True, slots=True)
class StrategyValues:
    """Exact values of one strategy that plays both seats."""

    exploitability: float  # chips per game, mean over the seats
    game_value: float  # chips of player 0 against itself; -1/18 in equilibrium
    best_response_values: tuple[float, float]  # chips of the best response as player 0 and as 1
    illegal_probability: float  # mean over the information sets


def find_player(history: str) -> int:
    """Return the player who moves after a history."""
    return len(history) % 2


def is_terminal(history: str) -> bool:
    """Return whether a game has ended by the moves of a history."""
    return history.endswith(("pp", "bp", "bb"))


def compute_showdown(cards: Sequence[str], history: str) -> float:
    """Return the payoff of player 0 in chips at the end of a game."""
    if history.endswith("bp"):  # the player who passed after a bet has folded
        folder = find_player(history[:-1])
        return -1.0 if folder == 0 else 1.0
    stake = 2.0 if history.endswith("bb") else 1.0
    return stake if CARDS.index(cards[0]) > CARDS.index(cards[1]) else -stake


def check_strategy(strategy: Strategy) -> None:
    """Raise DataError unless every information set has three probabilities that sum to 1."""
    for history, card in itertools.product(HISTORIES, CARDS):
        key = f"{card}:{history}"
        values = strategy.get(key)
        if values is None:
            raise DataError(f"strategy: information set '{key}' is missing")
        is_valid = len(values) == 3 and all(0 <= value <= 1 for value in values)
        if not is_valid or not math.isclose(math.fsum(values), 1.0, abs_tol=1e-6):
            raise DataError(f"strategy: {key}: {values} are not three probabilities that sum to 1")


def compute_expected_value(first: Strategy, second: Strategy) -> float:
    """Return the expected payoff of player 0 in chips, if `first` plays it and `second` plays player 1."""
    deals = list(itertools.permutations(CARDS, 2))
    return math.fsum(_compute_value((first, second), cards, "") for cards in deals) / len(deals)


def _compute_value(strategies: tuple[Strategy, Strategy], cards: Sequence[str], at: str) -> float:
    """Return the expected payoff of player 0 in one deal from the history `at` on."""
    if is_terminal(at):
        return compute_showdown(cards, at)
    player = find_player(at)
    *legal, illegal = strategies[player][f"{cards[player]}:{at}"]
    value = illegal * (-ILLEGAL_COST if player == 0 else ILLEGAL_COST)
    for letter, probability in zip(_LETTERS, legal, strict=True):
        if probability:
            value += probability * _compute_value(strategies, cards, at + letter)
    return value


def compute_best_response_value(strategy: Strategy, player: int) -> float:
    """Return the largest expected payoff in chips of `player` against a strategy in the other seat.

    Each card has two information sets of the player, so it has four deterministic plans; the best one of each card is
    found by enumeration. An illegal move is never better than a legal one, as it costs the most.
    """
    histories = [history for history in HISTORIES if find_player(history) == player]
    best_values = []
    for card in CARDS:
        others = [other for other in CARDS if other != card]
        values = []
        for plan in itertools.product(((1.0, 0.0, 0.0), (0.0, 1.0, 0.0)), repeat=len(histories)):
            response = {f"{card}:{at}": choice for at, choice in zip(histories, plan, strict=True)}
            strategies = (response, strategy) if player == 0 else (strategy, response)
            deals = [(card, other) if player == 0 else (other, card) for other in others]
            total = math.fsum(_compute_value(strategies, cards, "") for cards in deals)
            values.append(total if player == 0 else -total)
        best_values.append(max(values))
    return math.fsum(best_values) / (len(CARDS) * (len(CARDS) - 1))


def measure_exploitability(strategy: Strategy) -> StrategyValues:
    """Return the exact values of a strategy that plays both seats.

    Raises: DataError for a strategy that lacks information sets or probabilities.
    """
    check_strategy(strategy)
    best_values = (
        compute_best_response_value(strategy, 0),
        compute_best_response_value(strategy, 1),
    )
    illegal = [strategy[f"{c}:{h}"][2] for c, h in itertools.product(CARDS, HISTORIES)]
    return StrategyValues(
        exploitability=sum(best_values) / 2,
        game_value=compute_expected_value(strategy, strategy),
        best_response_values=best_values,
        illegal_probability=math.fsum(illegal) / len(illegal),
    )


def build_equilibrium(alpha: float) -> dict[str, tuple[float, float, float]]:
    """Build the equilibrium in which player 0 bets a J with probability `alpha` (0 to 1/3) and a K with 3 alpha.

    Raises: DataError for another alpha.
    """
    if not 0 <= alpha <= 1 / 3:
        raise DataError(f"alpha: {alpha} must be between 0 and 1/3")
    bets = {
        "J:": alpha,
        "Q:": 0.0,
        "K:": min(1.0, 3 * alpha),
        "J:pb": 0.0,
        "Q:pb": alpha + 1 / 3,
        "K:pb": 1.0,
        "J:p": 1 / 3,
        "Q:p": 0.0,
        "K:p": 1.0,
        "J:b": 0.0,
        "Q:b": 1 / 3,
        "K:b": 1.0,
    }
    return {key: (1 - bet, bet, 0.0) for key, bet in bets.items()}
