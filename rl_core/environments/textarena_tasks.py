"""`textarena`: games of TextArena (arXiv:2504.11442), alone or against opponents.

    user    You are Player 0 in Tic Tac Toe. ... Available Moves: '[0]', '[1]', ...
    policy  I take the centre: [4]
    user    [Player 1] [0] ... Current Board: ...

The policy plays one seat, by turns if the game has several. A random player, a function or a model behind a URL plays
the others; a served snapshot of the policy is such a model. The package runs in subprocesses; each turn is played in a
fresh process from the start of the game.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_core.data.model_text import strip_thought
from rl_core.environments.environment import Environment, Episode, Step
from rl_core.environments.optional_packages import require_package
from rl_core.environments.subprocess_host import ChildFailed, ChildPool
from rl_core.environments.tools import Toolset
from rl_core.environments.verifiers_tasks import build_player
from rl_core.errors import EnvironmentFault, SettingsError
from rl_core.types import Message

_SCRIPT = Path(__file__).with_name("textarena_child.py")
_RANDOM = "random"
_MEMORY_GIB = 8.0
_MAX_OPPONENT_MOVES = 1024  # in a game


class TextArenaEpisode(Episode):
    """One game, seen from one seat; its reward is that seat's."""

    def __init__(self, environment: TextArena, seed: int, level: str) -> None:
        super().__init__(seed, level)
        self._environment = environment
        self._observations: list[str] = []
        self._replies: list[str] = []
        self._opponent_moves: list[str] = []

    def reset(self) -> list[Message]:
        """Return the rules and the first observation. Raises: EnvironmentFault."""
        play = self._play()
        if "reward" in play:
            raise EnvironmentFault(
                f"{self._label}: the game is over before the policy's first move"
            )
        self.kind, self.prompt = self._environment.game, play["observations"][0]
        self.hidden = play["hidden"]
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
        while True:
            play = self._environment.play_game({**request, "others": self._opponent_moves})
            if play["observations"][: len(self._observations)] != self._observations:
                raise EnvironmentFault(f"{self._label}: the game differs when it is played again")
            if "ask" not in play:
                self._observations = play["observations"]
                return play
            count = len(self._opponent_moves)
            if count >= _MAX_OPPONENT_MOVES:
                raise EnvironmentFault(f"{self._label}: opponents moved {count} times")
            move = self._environment.ask_opponent(play["ask"], self.seed * 1024 + count)
            self._opponent_moves.append(move)


class TextArena(Environment):
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
        self._checked_levels: set[str] = set()
        self._lock = threading.Lock()

    @classmethod
    def named_code(cls, options: Mapping[str, Any]) -> tuple[str, ...]:
        """List the function that plays the opponents."""
        opponent = options.get("opponent")
        return (opponent,) if isinstance(opponent, str) and ":" in opponent else ()

    @property
    def tools(self) -> Toolset:
        """No tools: a move is text."""
        return Toolset()

    def episode(self, seed: int, level: str) -> TextArenaEpisode:
        """Return the game of a seed."""
        self.check_level(level)
        return TextArenaEpisode(self, seed, level)

    def play_game(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Play a game with the moves so far. Raises: SettingsError if it cannot be made; EnvironmentFault."""
        level = request["level"]
        with self._lock:
            if level not in self._checked_levels:
                try:
                    self._children.request_reply({"do": "players", "level": level})
                except ChildFailed as error:
                    raise SettingsError(
                        f"options.game: '{self.game}' cannot be played: {error}"
                    ) from error
                self._checked_levels.add(level)
        try:
            play: dict[str, Any] = self._children.request_reply({"do": "play", **request})
        except ChildFailed as error:
            raise EnvironmentFault(f"game '{self.game}', level '{level}': {error}") from error
        return play

    def ask_opponent(self, messages: list[dict[str, str]], seed: int) -> str:
        """Return the move of another player. Raises: EnvironmentFault."""
        assert self._opponent is not None
        return self._opponent(messages, seed)
