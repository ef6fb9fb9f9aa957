"""`kuhn_poker`: poker with the three cards J, Q, K between two players, who each put in one chip and get one card.

    user    card Q first
    policy  pass
    user    they bet
    policy  bet

A player passes or bets one more chip. Passing after a bet folds, betting after a bet calls; after two passes or a call
the higher card takes the pot. Payoffs are in chips: 1 or 2. An illegal move costs 2 chips, the most that a game can
cost. All six deals are equally likely, and the first player's value in equilibrium is -1/18.

Source: Kuhn 1950, A simplified two-person poker. The family of equilibria is in `kuhn_strategies`.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rl_core.environments.environment import Demonstration
from rl_core.environments.kuhn_strategies import (
    CARDS,
    HISTORIES,
    ILLEGAL_COST,
    compute_showdown,
    find_player,
    is_terminal,
    measure_exploitability,
)
from rl_core.environments.two_player import (
    GameDecision,
    GameOutcome,
    SeatEpisode,
    TwoPlayerEnvironment,
    TwoPlayerGame,
)
from rl_core.errors import EnvironmentFault, SettingsError
from rl_core.types import Message

LEVEL = "standard"
MOVES = {"pass": "p", "bet": "b"}  # the text of a move and its letter in a history
_WORDS = {"p": "they pass", "b": "they bet"}
DEALS = tuple(itertools.permutations(CARDS, 2))


class KuhnPokerGame(TwoPlayerGame):
    """One game; `cards` are those of players 0 and 1, `history` the letters of all moves."""

    def __init__(self, cards: tuple[str, str]) -> None:
        self.cards = cards
        self.history = ""
        self.hidden = list(cards)
        self.moves: list[str] = []  # texts as written, illegal ones included
        self._seen = [-1, -1]  # letters that each player has seen; -1 = not even its card

    def take_messages(self, player: int) -> list[Message]:
        """Return the card at the first move; later the opponent's move."""
        messages = build_messages(self.cards[player], self.history, player, self._seen[player] < 0)
        self._seen[player] = len(self.history)
        return messages

    def play(self, text: str) -> None:
        """Play `pass` or `bet`; anything else loses. Raises: EnvironmentFault after the end."""
        if self.outcome is not None:
            raise EnvironmentFault("a move after the end of a game of kuhn_poker")
        move = text.strip()
        self.moves.append(move)
        if move not in MOVES:
            self.forfeit(f"illegal move {move[:40]!r}: neither pass nor bet")
            return
        self.history += MOVES[move]
        if is_terminal(self.history):
            value = compute_showdown(self.cards, self.history)
            winner = 0 if value > 0 else 1
            folded = self.history.endswith("bp")
            reason = "the other player folded" if folded else "the higher card"
            self.outcome = GameOutcome((value, -value), f"player {winner} wins: {reason}")
            return
        self.to_move = find_player(self.history)

    def forfeit(self, reason: str) -> None:
        """End the game at the largest stake."""
        loser = self.to_move
        rewards = (-ILLEGAL_COST, ILLEGAL_COST) if loser == 0 else (ILLEGAL_COST, -ILLEGAL_COST)
        self.outcome = GameOutcome(rewards, f"player {loser} loses: {reason}", illegal_player=loser)

    def choose_random_move(self, rng: random.Random) -> str:
        """Choose pass or bet."""
        return rng.choice(tuple(MOVES))

    def describe(self) -> dict[str, Any]:
        """Return both cards and all moves."""
        return {"cards": " ".join(self.cards), "moves": list(self.moves)}


def build_messages(card: str, history: str, player: int, is_first: bool) -> list[Message]:
    """Build the message to a player before its move after a history."""
    place = ("first", "second")[player]
    parts = [f"card {card} {place}"] if is_first else []
    if history:
        parts.append(_WORDS[history[-1]])
    return [Message(role="user", content=" ".join(parts))]


class KuhnPoker(TwoPlayerEnvironment):
    """Kuhn poker; a seed decides the deal and, in an episode against the random player, the seat."""

    name = "kuhn_poker"
    levels = (LEVEL,)
    blocking = False
    columns = ()
    # Six deals are too few to hold any out: training and evaluation differ in their seeds.
    heldout_share = 0.0

    def __init__(self, data: Path | None = None, *, skill: float = 0.5) -> None:
        """Set up the game.

        Args:
            skill: share of the demonstrator's moves that look at its card: it bets and calls with a K, passes with a J,
                and with a Q only calls, half of the time, so it never bluffs. The others are random legal moves. From
                random moves alone a model learns not to read its card.
        Raises: SettingsError for a skill out of range.
        """
        super().__init__(data)
        if not 0 <= skill <= 1:
            raise SettingsError(f"options.skill: {skill} must be between 0 and 1")
        self.skill = skill

    def create_game(self, seed: int, level: str) -> KuhnPokerGame:
        """Return the game of a seed."""
        self.check_level(level)
        return KuhnPokerGame(DEALS[random.Random(f"kuhn/{seed}").randrange(len(DEALS))])

    def demonstration(self, seed: int, level: str) -> Demonstration:
        """Return a game of the demonstrator, whose moves are all legal."""
        self.check_level(level)
        player = self.choose_seat(seed)
        episode = SeatEpisode(self.create_game(seed, level), seed, level, player)
        rng = random.Random(f"kuhn/demonstrator/{seed}")
        messages = episode.reset()
        while True:
            move = self._choose_demonstrated_move(episode.game, player, rng)
            messages.append(Message(role="assistant", content=move))
            step = episode.step(move)
            if step.terminated:
                return Demonstration(messages, level, episode.kind, seed, bool(step.success))
            messages += step.messages

    def _choose_demonstrated_move(
        self, game: TwoPlayerGame, player: int, rng: random.Random
    ) -> str:
        assert isinstance(game, KuhnPokerGame)
        if rng.random() >= self.skill:
            return game.choose_random_move(rng)
        card = game.cards[player]
        calls = card == "Q" and game.history.endswith("b") and rng.random() < 0.5
        return "bet" if card == "K" or calls else "pass"

    def list_decisions(self) -> Sequence[GameDecision]:
        """List the 12 information sets: three cards for each of four histories."""
        return [_build_decision(card, history) for history in HISTORIES for card in CARDS]

    def measure_strategy(
        self, probabilities: Mapping[str, Mapping[str, float]]
    ) -> dict[str, float]:
        """Return the exploitability of a policy in chips, its value as first player, and its share of illegal moves."""
        strategy = {}
        for key, moves in probabilities.items():
            # Each move has its own forward pass, so that in bfloat16 the two may sum to a little more than 1.
            scale = max(1.0, moves["pass"] + moves["bet"])
            legal = moves["pass"] / scale, moves["bet"] / scale
            strategy[key] = (*legal, max(0.0, 1 - sum(legal)))
        result = measure_exploitability(strategy)
        return {
            "eval/exploitability": result.exploitability,
            "eval/game_value": result.game_value,
            "eval/illegal_probability": result.illegal_probability,
        }


def _build_decision(card: str, history: str) -> GameDecision:
    player = find_player(history)
    moves = tuple(MOVES)
    if history == "pb":  # the first player, who passed and was bet at
        opening = build_messages(card, "", player, is_first=True)
        answer = build_messages(card, history, player, is_first=False)
        return GameDecision(f"{card}:{history}", tuple(opening), (("pass", tuple(answer)),), moves)
    opening = build_messages(card, history, player, is_first=True)
    return GameDecision(f"{card}:{history}", tuple(opening), (), moves)
