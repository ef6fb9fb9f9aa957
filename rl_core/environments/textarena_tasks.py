"""`textarena`: games of TextArena (arXiv:2504.11442), alone or against opponents.

    user    You are Player 0 in Tic Tac Toe. ... Available Moves: '[0]', '[1]', ...
    policy  I take the centre: [4]
    user    [Player 1] [0] ... Current Board: ...

The policy plays one seat, by turns if the game has several. A random player, a function or a model behind a URL plays
the others. With `self_play` the policy and its past versions play both seats of a game of two. The package runs in
subprocesses; each turn is played in a fresh process from the start of the game.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_core.data.model_text import strip_thought
from rl_core.environments.environment import Demonstration, Episode, Step
from rl_core.environments.optional_packages import require_package
from rl_core.environments.subprocess_host import ChildFailed, ChildPool
from rl_core.environments.two_player import (
    NUM_PLAYERS,
    GameOutcome,
    TwoPlayerEnvironment,
    TwoPlayerGame,
)
from rl_core.environments.verifiers_tasks import build_player
from rl_core.errors import EnvironmentFault, SettingsError
from rl_core.types import Message

_SCRIPT = Path(__file__).with_name("textarena_child.py")
_RANDOM = "random"
_MEMORY_GIB = 8.0
_MAX_OPPONENT_MOVES = 1024  # in a game
_MAX_DEMONSTRATED_MOVES = 64


class TextArenaEpisode(Episode):
    """One game, seen from one seat; its reward is that seat's."""

    def __init__(self, environment: TextArena, seed: int, level: str) -> None:
        super().__init__(seed, level)
        self._environment = environment
        self._observations: list[str] = []
        self._replies: list[str] = []
        self._opponent_moves: list[str] = []
        self._move_seed: int | None = None  # of the random moves of a demonstration
        self.random_move: str | None = None  # a legal one for the policy, in a demonstration

    def demonstrate(self, seed: int) -> list[Message]:
        """Open a game of which `random_move` knows a legal move at each turn. Raises: EnvironmentFault."""
        self._move_seed = seed
        return self.reset()

    def reset(self) -> list[Message]:
        """Return the rules and the first observation. Raises: EnvironmentFault."""
        play = self._play()
        if "reward" in play:
            raise EnvironmentFault(
                f"{self._label}: the game is over before the policy's first move"
            )
        self.kind, self.prompt = self._environment.game, play["observations"][0]
        self.hidden = play["hidden"]
        if play["players"] > 1:
            self.cut_reward = -1.0  # as for an invalid move
        instructions = self._environment.instructions
        system = [Message(role="system", content=instructions)] if instructions else []
        return [*system, Message(role="user", content=self.prompt)]

    def act(self, text: str) -> Step:
        """Make a move; the game says what is illegal."""
        move = strip_thought(text).strip()
        self._replies.append(move)
        play = self._play()
        if "reward" not in play:
            return Step([Message(role="user", content=play["observations"][-1])])
        reward = play["reward"]
        info = {"reason": play["reason"], "invalid_move": play["invalid"]}
        return Step(
            reward=reward,
            terminated=True,
            answer=move,
            is_error=play["invalid"],
            success=reward >= self._environment.success_at,
            info=info,
        )

    @property
    def _label(self) -> str:
        return f"game '{self._environment.game}', level '{self.level}', seed {self.seed}"

    def _play(self) -> dict[str, Any]:
        """Play up to the policy's next move. Raises: EnvironmentFault."""
        request = {"level": self.level, "seed": self.seed, "replies": self._replies}
        if self._move_seed is not None:
            request["random_seed"] = self._move_seed + len(self._replies)
        while True:
            play = self._environment.play_game({**request, "others": self._opponent_moves})
            if play["observations"][: len(self._observations)] != self._observations:
                raise EnvironmentFault(f"{self._label}: the game differs when it is played again")
            if "ask" not in play:
                self._observations = play["observations"]
                self.random_move = play.get("move")
                return play
            count = len(self._opponent_moves)
            if count >= _MAX_OPPONENT_MOVES:
                raise EnvironmentFault(f"{self._label}: opponents moved {count} times")
            move = self._environment.ask_opponent(play["ask"], self.seed * 1024 + count)
            self._opponent_moves.append(move)


class TextArenaGame(TwoPlayerGame):
    """One game of two players, who are asked in turn; the package decides what is legal."""

    def __init__(self, environment: TextArena, seed: int, level: str) -> None:
        self._environment, self._seed, self._level = environment, seed, level
        self._log: list[list[Any]] = []  # [player, text] of every observation
        self._moves: list[str] = []
        self._has_seen_instructions = [False, False]

    def begin(self) -> None:
        """Open the game. Raises: EnvironmentFault."""
        self._play_moves()

    def take_messages(self, player: int) -> list[Message]:
        """Return the newest observation, at first with the system message."""
        messages = [Message(role="user", content=self._log[-1][1])]
        instructions = self._environment.instructions
        if instructions and not self._has_seen_instructions[player]:
            messages.insert(0, Message(role="system", content=instructions))
        self._has_seen_instructions[player] = True
        return messages

    def play(self, text: str) -> None:
        """Play a move. Raises: EnvironmentFault."""
        self._moves.append(strip_thought(text).strip())
        self._play_moves()

    def forfeit(self, reason: str) -> None:
        """End the game as a loss of 1."""
        loser = self.to_move
        rewards = (-1.0, 1.0) if loser == 0 else (1.0, -1.0)
        self.outcome = GameOutcome(rewards, f"player {loser} loses: {reason}", illegal_player=loser)

    def choose_random_move(self, rng: random.Random) -> str:
        """Choose a legal move. Raises: EnvironmentFault for a game whose legal moves cannot be guessed."""
        return str(self._request_play(random_seed=rng.getrandbits(62))["move"])

    def describe(self) -> dict[str, Any]:
        """Return all moves in their order."""
        return {"moves": list(self._moves)}

    def _request_play(self, **extra: Any) -> dict[str, Any]:
        request = {"level": self._level, "seed": self._seed, "moves": self._moves, **extra}
        return self._environment.play_game(request, "two_players")

    def _play_moves(self) -> None:
        """Play the game with the moves so far."""
        play = self._request_play()
        if play["log"][: len(self._log)] != self._log:
            raise EnvironmentFault(
                f"game '{self._environment.game}', level '{self._level}', seed {self._seed}: the game differs when it "
                "is played again"
            )
        self._log, self.hidden = play["log"], play["hidden"]
        self.to_move = int(self._log[-1][0])
        if "rewards" in play:
            invalid = play["invalid"]
            illegal_player = invalid.index(True) if True in invalid else None
            first, second = play["rewards"]
            self.outcome = GameOutcome((first, second), play["reason"], illegal_player)


class TextArena(TwoPlayerEnvironment):
    """Games of one id; a seed is the game's, and of several seats it chooses the policy's."""

    name = "textarena"

    def __init__(
        self,
        data: Path | None = None,
        *,
        game: str,
        options: dict[str, Any] | None = None,
        levels: dict[str, dict[str, Any]] | None = None,
        opponent: Any = _RANDOM,
        players: int | None = None,
        seat: int | None = None,
        instructions: str = "",
        success_at: float = 1.0,
        workers: int = 2,
        timeout_s: float = 30.0,
    ) -> None:
        """Set the game, its opponents and the subprocess limits.

        Args:
            game: id of the package, as 'TicTacToe-v0' or 'GuessTheNumber-v0-hardcore'.
            options: keyword arguments of the game.
            levels: level -> further keyword arguments; default: one level, 'default'.
            opponent: who plays the other seats: random = a random legal move, for games whose messages show how moves
                look; the import path of a function of (messages, seed) that returns a move; or {url, model, ...} as
                `others` of `verifiers`.
            players: number of players; default: the least that the game takes.
            seat: the policy's player, from 0; default: the seed decides, so that all seats take turns.
            instructions: system message.
            success_at: least reward of a success; a win is 1, a draw 0, a loss -1.
            workers: maximum number of subprocesses.
            timeout_s: time limit of a turn, in which the game is replayed from its start.
        Raises: SettingsError if the package is missing or an option is invalid.
        """
        super().__init__(data)
        if players is not None and players < 1:
            raise SettingsError(f"options.players: {players} must be at least 1")
        if workers < 1 or not timeout_s > 0:
            raise SettingsError("options: workers must be at least 1 and timeout_s above 0")
        require_package("textarena", self.name)
        by_level = levels or {"default": {}}
        self.levels = tuple(by_level)
        self.game, self.instructions, self.success_at = game, instructions, success_at
        self._opponent = None if opponent == _RANDOM else build_player(opponent, "options.opponent")
        self._children = ChildPool(
            _SCRIPT,
            setup={
                "game": game,
                "levels": {
                    name: {**(options or {}), **values} for name, values in by_level.items()
                },
                "opponent": _RANDOM if self._opponent is None else "asked",
                "players": players,
                "seat": seat,
            },
            count=workers,
            timeout_s=timeout_s,
            memory_gib=_MEMORY_GIB,
            readable=[path for path in [Path.home() / "nltk_data"] if path.is_dir()],
        )
        self._checked_levels: dict[str, int] = {}  # number of players
        self._players = players
        self._lock = threading.Lock()

    @classmethod
    def named_code(cls, options: Mapping[str, Any]) -> tuple[str, ...]:
        """List the function that plays the opponents."""
        opponent = options.get("opponent")
        return (opponent,) if isinstance(opponent, str) and ":" in opponent else ()

    def create_game(self, seed: int, level: str) -> TextArenaGame:
        """Return the game of a seed, for two players who are both asked.

        Raises: SettingsError for a game of another number of players.
        """
        self.check_level(level)
        players = self._players
        if players is None:
            players = self._players = int(self._check_game(level))
        if players != NUM_PLAYERS:
            raise SettingsError(
                f"self_play: game '{self.game}' has {players} players here; only games of two are supported"
            )
        return TextArenaGame(self, seed, level)

    def episode(self, seed: int, level: str) -> TextArenaEpisode:
        """Return the game of a seed."""
        self.check_level(level)
        return TextArenaEpisode(self, seed, level)

    def demonstration(self, seed: int, level: str) -> Demonstration | None:
        """Return a game of random legal moves, which teaches SFT the format; None if no legal move is known."""
        episode = self.episode(seed, level)
        rng = random.Random(f"textarena/demonstrator/{level}/{seed}")
        messages = episode.demonstrate(rng.getrandbits(48))
        for _ in range(_MAX_DEMONSTRATED_MOVES):
            move = episode.random_move
            if move is None:
                break
            step = episode.step(move)
            messages += [Message(role="assistant", content=move), *step.messages]
            if step.terminated:
                return Demonstration(messages, level, episode.kind, seed, bool(step.success))
        while messages and messages[-1]["role"] != "assistant":
            messages.pop()
        return Demonstration(messages, level, episode.kind, seed, False) if messages else None

    def _check_game(self, level: str) -> int:
        """Return the number of players of a level. Raises: SettingsError if its game cannot be made."""
        with self._lock:
            if level not in self._checked_levels:
                try:
                    count = self._children.request_reply({"do": "players", "level": level})
                except ChildFailed as error:
                    raise SettingsError(
                        f"options.game: '{self.game}' cannot be played: {error}"
                    ) from error
                self._checked_levels[level] = int(count)
            return self._checked_levels[level]

    def play_game(self, request: Mapping[str, Any], kind: str = "play") -> dict[str, Any]:
        """Play a game with the moves so far. Raises: SettingsError if it cannot be made; EnvironmentFault.

        Args:
            kind: of the request: play = from one seat, two_players = both seats are asked.
        """
        level = request["level"]
        self._check_game(level)
        try:
            play: dict[str, Any] = self._children.request_reply({"do": kind, **request})
        except ChildFailed as error:
            raise EnvironmentFault(f"game '{self.game}', level '{level}': {error}") from error
        return play

    def ask_opponent(self, messages: list[dict[str, str]], seed: int) -> str:
        """Return the move of another player. Raises: EnvironmentFault."""
        assert self._opponent is not None
        return self._opponent(messages, seed)
