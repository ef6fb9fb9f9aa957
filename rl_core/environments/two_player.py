"""Two-player zero-sum games: the game itself, and its view from one seat against a random opponent.

A game has players 0 and 1, who move in any order. Each of them sees its own messages only. At the end the rewards of
the two players sum to 0. A player whose move is illegal loses, with the reason in the game's outcome.

    game = environment.create_game(seed=7, level="standard")
    game.begin()
    messages = game.take_messages(game.to_move)   # new to this player since its last move
    game.play("bet")
    game.outcome                                  # None while the game runs

`rl_core.rollouts.two_player_games` plays such games between a policy and its opponents (`self_play`).
"""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl_core.environments.environment import Environment, Episode, Step
from rl_core.environments.tools import Toolset
from rl_core.errors import EnvironmentFault, SettingsError
from rl_core.types import Message

NUM_PLAYERS = 2
MAX_GAME_MOVES = 4096  # of both players; a game that does not end is a fault of its environment


@dataclass(frozen=True, slots=True)
class GameOutcome:
    """End of a game."""

    rewards: tuple[float, float]  # of players 0 and 1; they sum to 0
    reason: str  # for the record
    illegal_player: int | None = None  # who lost by an illegal move; None = nobody

    def __post_init__(self) -> None:
        if not all(map(math.isfinite, self.rewards)) or sum(self.rewards) != 0:
            raise EnvironmentFault(
                f"the rewards {self.rewards} of a two-player game do not sum to 0"
            )


class TwoPlayerGame(ABC):
    """One single-use game. `outcome` is None until it ends; `to_move` is the player whose move is missing."""

    to_move: int = 0
    outcome: GameOutcome | None = None
    hidden: Any = None  # state that a player's first messages do not show

    def begin(self) -> None:  # noqa: B027 most need nothing
        """Deal cards or open the board; called once."""

    @abstractmethod
    def take_messages(self, player: int) -> list[Message]:
        """Return the messages that are new to a player since its last move; called before each of its moves."""

    @abstractmethod
    def play(self, text: str) -> None:
        """Play a move of the player `to_move`; an illegal one ends the game."""

    @abstractmethod
    def forfeit(self, reason: str) -> None:
        """End the game: the player `to_move` loses."""

    @abstractmethod
    def choose_random_move(self, rng: random.Random) -> str:
        """Choose a legal move of the player `to_move` uniformly at random."""

    def describe(self) -> dict[str, Any]:
        """Describe what happened in plain values, for the trace."""
        return {}

    def close(self) -> None:  # noqa: B027 most hold nothing open
        """Close what the game holds open."""


class TwoPlayerEnvironment(Environment):
    """A family of two-player games. An episode of it is a game against a random opponent; the seed decides the seat."""

    @property
    def tools(self) -> Toolset:
        """No tools: a move is text."""
        return Toolset()

    @abstractmethod
    def create_game(self, seed: int, level: str) -> TwoPlayerGame:
        """Return the game of a seed. Raises: SettingsError for an unknown level, or a game of another kind."""

    def episode(self, seed: int, level: str) -> Episode:
        """Return the game of a seed, seen from one seat."""
        self.check_level(level)
        return SeatEpisode(self.create_game(seed, level), seed, level, self.choose_seat(seed))

    def choose_seat(self, seed: int) -> int:
        """Return the policy's player in the episode of a seed."""
        return seed % NUM_PLAYERS

    def list_decisions(self) -> Sequence[GameDecision]:
        """List all situations in which a player may have to move, if they can be enumerated; () = they cannot."""
        return ()

    def measure_strategy(
        self, probabilities: Mapping[str, Mapping[str, float]]
    ) -> dict[str, float]:
        """Return exact `eval/...` metrics of a policy from the probabilities of its moves; {} = none are known.

        Args:
            probabilities: by the key of each of `list_decisions`, of each of its legal moves; the rest is illegal.
        """
        return {}


@dataclass(frozen=True, slots=True)
class GameDecision:
    """A situation in which a player moves, as it sees the game, and its legal moves."""

    key: str
    # What the player has seen and written so far: messages, move, messages, move, ..., messages.
    opening: tuple[Message, ...]
    history: tuple[
        tuple[str, tuple[Message, ...]], ...
    ]  # its moves, each with the messages after it
    moves: tuple[str, ...]


class SeatEpisode(Episode):
    """A game seen from one seat; a random player moves for the other one."""

    cut_reward = -1.0  # a player without a move loses

    def __init__(self, game: TwoPlayerGame, seed: int, level: str, player: int) -> None:
        super().__init__(seed, level)
        self.game, self.player = game, player
        self._rng = random.Random(f"two-player/{level}/{seed}")

    def reset(self) -> list[Message]:
        """Return the seat's opening messages. Raises: EnvironmentFault if the game ends before its first move."""
        self.game.begin()
        self._play_opponent()
        if self.game.outcome is not None:
            raise EnvironmentFault(
                f"game {self.level}/{self.seed} is over before the policy's first move"
            )
        self.kind, self.hidden = describe_seat(self.player), self.game.hidden
        messages = self.game.take_messages(self.player)
        self.prompt = messages[-1]["content"]
        return messages

    def act(self, text: str) -> Step:
        """Play a move, and the opponent's moves after it."""
        self.game.play(text)
        self._play_opponent()
        if self.game.outcome is None:
            return Step(self.game.take_messages(self.player))
        return build_last_step(self.game, self.player, text)

    def close(self) -> None:
        """Close the game."""
        self.game.close()

    def _play_opponent(self) -> None:
        for _ in range(MAX_GAME_MOVES):
            if self.game.outcome is not None or self.game.to_move == self.player:
                return
            self.game.take_messages(self.game.to_move)
            self.game.play(self.game.choose_random_move(self._rng))
        raise EnvironmentFault(f"the opponent moved {MAX_GAME_MOVES} times in one game")


def describe_seat(player: int) -> str:
    """Return the kind of an episode by the policy's seat, for tables and baselines."""
    return f"player {player}"


def check_game_length(num_moves: int) -> None:
    """Raise EnvironmentFault for a game that has not ended after `MAX_GAME_MOVES` moves."""
    if num_moves > MAX_GAME_MOVES:
        raise EnvironmentFault(f"the game has not ended after {MAX_GAME_MOVES} moves")


def read_seat(kind: str) -> int:
    """Return the player of a kind that `describe_seat` returned."""
    return int(kind.rpartition(" ")[2])


def build_last_step(game: TwoPlayerGame, player: int, move: str) -> Step:
    """Build the step that ends a player's episode. Raises: EnvironmentFault if the game runs."""
    outcome = game.outcome
    if outcome is None:
        raise EnvironmentFault("the game has not ended")
    reward = outcome.rewards[player]
    info = {
        "player": player,
        "reason": outcome.reason,
        "illegal_move": outcome.illegal_player == player,
        **game.describe(),
    }
    return Step(
        reward=reward,
        terminated=True,
        answer=move,
        is_error=outcome.illegal_player == player,
        success=reward > 0,
        info=info,
    )


def check_two_player_environment(environment: Environment) -> TwoPlayerEnvironment:
    """Return the environment of self-play. Raises: SettingsError if its episodes have no two players."""
    if len(environment.parts) > 1:
        raise SettingsError("self_play: is not supported in a mixture; train the game alone")
    if not isinstance(environment, TwoPlayerEnvironment):
        raise SettingsError(
            f"self_play: environment '{environment.name}' is not a two-player game; use kuhn_poker or textarena, or a "
            "subclass of TwoPlayerEnvironment"
        )
    return environment
