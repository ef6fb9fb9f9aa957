"""Two-player games between policies: each player has its own context, and only some seats become rollouts.

Games advance together. In each round the policy's current weights choose the moves of all seats that they play, then
each snapshot those of its seats, so weights are swapped once per snapshot and round, not per game. A turn is one
sequence of the rollout backend over the player's context so far; the opponent's tokens are in no rollout. A player
that runs out of tokens or turns loses, as after an illegal move.

The random numbers of a seat depend only on (seed, environment, level, episode seed, number of the game, player).
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any

from rl_core.environments.environment import Environment, Episode, Step
from rl_core.environments.failed_episodes import FailedEpisode
from rl_core.environments.step_pool import Observation, ReplacementContext, StepPool, TurnOutcome
from rl_core.environments.two_player import (
    NUM_PLAYERS,
    GameOutcome,
    TwoPlayerEnvironment,
    TwoPlayerGame,
    build_last_step,
    check_game_length,
    describe_seat,
)
from rl_core.errors import EnvironmentFault
from rl_core.inference.sampling import RolloutBackend, compute_sequence_seed
from rl_core.rollouts.episode_sequence import (
    EpisodeRequest,
    EpisodeSequence,
    Renderer,
    normalize_messages,
    normalize_step,
)
from rl_core.settings import SamplingSettings
from rl_core.timing import span
from rl_core.types import Message, Rollout, StopReason

logger = logging.getLogger(__name__)

CURRENT_PLAYER = "current"  # the policy with the weights that are trained
RANDOM_PLAYER = "random"  # uniformly random legal moves


@dataclass(frozen=True, slots=True)
class GamePlan:
    """One game to play."""

    request: EpisodeRequest
    sample: int  # index within its group
    number: int  # among all games of this request; random numbers depend on it
    # Of players 0 and 1: CURRENT_PLAYER, RANDOM_PLAYER or the name of a snapshot.
    players: tuple[str, str]
    recorded: tuple[int, ...]  # players whose turns become rollouts
    place: int = 0  # of the request among all of them


@dataclass(slots=True)
class PlayedGame:
    """A game after its end."""

    plan: GamePlan
    outcome: GameOutcome | None  # None = the environment failed
    num_moves: int
    # By recorded player; a player without a single move has none.
    rollouts: dict[int, Rollout] = field(default_factory=dict)


@dataclass(slots=True)
class TwoPlayerResult:
    """Games in the order of their plans."""

    games: list[PlayedGame]
    num_weight_swaps: int  # times that a snapshot's weights were loaded


def play_two_player_games(
    environment: TwoPlayerEnvironment,
    backend: RolloutBackend,
    renderer: Renderer,
    plans: Sequence[GamePlan],
    *,
    sampling: SamplingSettings,
    seed: int,
    policy_version: int,
    use_player: Callable[[str], AbstractContextManager[None]],
    on_failure: Callable[[FailedEpisode], None],
) -> TwoPlayerResult:
    """Play games to their end.

    Args:
        use_player: returns a context in which the backend samples with the weights of a snapshot, given its name.
        on_failure: takes the recorded seats of each game whose environment failed.
    Raises: DataError if a prompt leaves no room in the context; EnvironmentFault of `on_failure`.
    """
    num_swaps = 0
    with ExitStack() as stack:
        pool = None
        if environment.blocking:
            pool = stack.enter_context(
                StepPool(sampling.max_concurrent_steps, sampling.step_timeout_s)
            )
        games = [
            _LiveGame(environment, renderer, plan, sampling, seed, backend.max_length, on_failure)
            for plan in plans
        ]
        try:
            _advance_games(games, pool)
            while any(game.mover is not None for game in games):
                for name in _list_movers(games):
                    if name == CURRENT_PLAYER:
                        _play_turns(games, name, backend, sampling, pool)
                        continue
                    num_swaps += 1
                    with use_player(name):
                        _play_turns(games, name, backend, sampling, pool)
        finally:
            for game in games:
                game.close()
    played = [game.build_result(policy_version) for game in games]
    return TwoPlayerResult(played, num_swaps)


def _list_movers(games: Sequence[_LiveGame]) -> list[str]:
    """List the players whose moves are missing: the current weights first, then snapshots by name."""
    names = {game.mover for game in games if game.mover is not None}
    return sorted(names, key=lambda name: (name != CURRENT_PLAYER, name))


def _play_turns(
    games: Sequence[_LiveGame],
    name: str,
    backend: RolloutBackend,
    sampling: SamplingSettings,
    pool: StepPool | None,
) -> None:
    """Play the turns of one player until every game waits for another one or has ended."""
    while waiting := [game for game in games if game.mover == name]:
        backend.run_sequences([game.build_turn() for game in waiting], sampling)
        _advance_games(waiting, pool)


def _advance_games(games: Sequence[_LiveGame], pool: StepPool | None) -> None:
    """Play the chosen moves up to the next one that a policy has to choose."""
    while games:
        calls = []
        for game in games:
            work = game.prepare_advance()
            label = f"{game.description}: a move"
            calls.append(work if pool is None else pool.submit_call(label, work).wait_for_result)
        with span("environment"):
            for game, call in zip(games, calls, strict=True):
                game.take_result(call)
        games = [game for game in games if game.must_forfeit]


class _Turn:
    """One turn as a `RolloutSequence`: the player's context as the prompt, and a single action."""

    def __init__(self, prompt_ids: list[int], seed: int, owner: _SeatSequence) -> None:
        self.prompt_ids, self.seed, self._owner = prompt_ids, seed, owner

    def take_action(
        self, action_ids: list[int], logprobs: list[float], hit_limit: bool
    ) -> TurnOutcome:
        """Store the action for the game; nothing follows in this sequence."""
        self._owner.store_action(action_ids, logprobs, hit_limit)
        return None

    def should_stop(self, action_ids: list[int]) -> bool:
        """Return whether the newest token completes a stop text."""
        return self._owner.should_stop(action_ids)


class _SeatView(Episode):
    """A player's view of a game, filled in by the game before each call."""

    opening: list[Message]
    next_step: Step

    def reset(self) -> list[Message]:
        return self.opening

    def act(self, text: str) -> Step:
        return self.next_step


class _SeatEnvironment:
    """Environment of one player's `EpisodeSequence`."""

    def __init__(self, environment: Environment, player: int) -> None:
        self.name, self.knows_success, self._player = environment.name, True, player

    def episode(self, seed: int, level: str) -> _SeatView:
        view = _SeatView(seed, level)
        view.kind = describe_seat(self._player)
        return view


class _SeatSequence(EpisodeSequence):
    """One player's context, whose turns end when the other player has answered."""

    def __init__(
        self,
        environment: Environment,
        renderer: Renderer,
        plan: GamePlan,
        player: int,
        sampling: SamplingSettings,
        seed: int,
        on_failure: Callable[[FailedEpisode], None],
    ) -> None:
        super().__init__(
            _SeatEnvironment(environment, player),  # type: ignore[arg-type]
            renderer,
            plan.request,
            sampling,
            None,
            seed,
            plan.sample,
            self._report_failure,
        )
        self.player = player
        self._report, self._game_moves = on_failure, list[str]()
        self.context: list[int] | None = None  # of the next turn; None = the player has not begun
        self.num_turns = 0
        self._waiting: tuple[list[int], list[float], bool] | None = None  # an unanswered action

    @property
    def view(self) -> _SeatView:
        assert isinstance(self._episode, _SeatView)
        return self._episode

    @property
    def limit_reason(self) -> str | None:
        """Why the newest action is not a complete move; None = it is one."""
        if self._waiting is not None and self._waiting[2]:
            return "no complete move within the token limit"
        if self.is_over:
            is_tokens = self._stop_reason is StopReason.MAX_TOKENS
            return "no tokens left" if is_tokens else "no turns left"
        return None

    def open(self, messages: list[Message], max_length: int) -> None:
        """Begin with the player's first messages."""
        self.view.opening = messages
        self.begin_episode(max_length)
        self.context = list(self.prompt_ids)

    def build_turn(self) -> _Turn:
        """Build the sequence of the next turn."""
        assert self.context is not None
        self.num_turns += 1
        return _Turn(self.context, compute_sequence_seed(self.seed, "turn", self.num_turns), self)

    def store_action(self, ids: list[int], logprobs: list[float], hit_limit: bool) -> None:
        """Store an action, cut to the tokens that the player has left."""
        room = self._token_budget - self._used_tokens
        if len(ids) > room:
            ids, logprobs, hit_limit = ids[:room], logprobs[:room], True
        self._waiting = (list(ids), list(logprobs), hit_limit)

    def read_move(self) -> str:
        """Return the text of the stored action."""
        assert self._waiting is not None
        return self._renderer.action_text(self._waiting[0])

    @property
    def last_move(self) -> str:
        """Text of the newest action."""
        return self.read_move() if self._waiting is not None else self._turns[-1].action

    def observe(self, messages: list[Message]) -> None:
        """Append the stored action and the messages after it; without room the player is over (`is_over`)."""
        self.view.next_step = Step(messages)
        observation = self._take_stored_action()
        if isinstance(observation, ReplacementContext):
            self.context = observation.ids
        elif observation is not None:
            self.context = self._collect_context_ids()

    def finish(self, step: Step) -> None:
        """End the player's episode with the result of the game."""
        self.view.next_step = step
        if self._waiting is not None:
            self._take_stored_action()
        if (
            self._stop_reason is not StopReason.TERMINATED
        ):  # cut by a limit: the move was not played
            step, turn = normalize_step(step), self._turns[-1]
            self._last_step, self._reward = step, self._reward + step.reward
            turn.reward, turn.info, turn.is_error = step.reward, step.info, step.is_error

    def _report_failure(self, episode: FailedEpisode) -> None:
        episode.game_moves = self._game_moves
        self._report(episode)

    def record_fault(self, fault: EnvironmentFault, where: str, moves: Sequence[str]) -> None:
        """Record that the game failed.

        Args:
            moves: of both players so far, for a replay.
        Raises: EnvironmentFault if too many have failed.
        """
        self._game_moves = list(moves)
        if (
            self._waiting is not None
        ):  # the action that the game did not answer belongs to the record
            ids, logprobs, _ = self._waiting
            self._waiting = None
            super().take_action(ids, logprobs, True)
        self._record_failure(fault, where)

    def _take_stored_action(self) -> Observation:
        assert self._waiting is not None
        (ids, logprobs, hit_limit), self._waiting = self._waiting, None
        outcome = super().take_action(ids, logprobs, hit_limit)
        assert outcome is None or isinstance(outcome, list | ReplacementContext)
        return outcome


class _LiveGame:
    """A running game with the contexts of both players."""

    def __init__(
        self,
        environment: TwoPlayerEnvironment,
        renderer: Renderer,
        plan: GamePlan,
        sampling: SamplingSettings,
        seed: int,
        max_length: int,
        on_failure: Callable[[FailedEpisode], None],
    ) -> None:
        request = plan.request
        self.description = (
            f"environment '{environment.name}', level '{request.level}', seed {request.seed}"
        )
        self.plan = plan
        self.mover: str | None = None  # whose move is missing; None = nobody's
        self.must_forfeit = False  # the player to move has no room left
        self._environment, self._max_length = environment, max_length
        parts = (seed, environment.name, request.level, request.seed, plan.number)
        self._rng = random.Random(compute_sequence_seed(*parts, RANDOM_PLAYER))
        self._seats = [
            _SeatSequence(
                environment,
                renderer,
                plan,
                player,
                sampling,
                compute_sequence_seed(*parts, "player", player),
                on_failure,
            )
            for player in range(NUM_PLAYERS)
        ]
        self._game: TwoPlayerGame | None = None
        self._outcome: GameOutcome | None = None
        self._moves: list[str] = []  # of both players
        self._forfeit: str | None = None  # why a player had no move left
        self._where = ""  # what the environment is called for

    def build_turn(self) -> _Turn:
        """Build the sequence of the player to move."""
        return self._seats[self._running_game.to_move].build_turn()

    def prepare_advance(self) -> Callable[[], list[Message] | None]:
        """Return the work of the environment: the chosen move, and what follows up to the next choice."""
        move: str | None = None
        reason: str | None = None
        self._where = "the game's begin"
        if self._game is not None:
            self._where = f"move {len(self._moves) + 1} of the game"
            seat = self._seats[self._game.to_move]
            reason = seat.limit_reason
            move = seat.read_move() if reason is None else None
        self.mover, self.must_forfeit = None, False
        return lambda: self._advance(move, reason)

    def _advance(self, move: str | None, reason: str | None) -> list[Message] | None:
        """Play up to the next move of a policy and return its messages; None = the game has ended."""
        if self._game is None:
            request = self.plan.request
            self._game = self._environment.create_game(request.seed, request.level)
            self._game.begin()
        elif reason is not None:
            self._forfeit = reason
            self._game.forfeit(reason)
            if self._game.outcome is None:
                raise EnvironmentFault("the game's forfeit() has not ended it")
        else:
            assert move is not None
            self._moves.append(move)
            self._game.play(move)
        game = self._game
        while game.outcome is None:
            messages = game.take_messages(game.to_move)
            if self.plan.players[game.to_move] != RANDOM_PLAYER:
                return messages
            self._moves.append(game.choose_random_move(self._rng))
            game.play(self._moves[-1])
            check_game_length(len(self._moves))
        return None

    def take_result(self, call: Callable[[], list[Message] | None]) -> None:
        """Take the result of the environment's work; a fault of it ends the game."""
        try:
            call_environment = self._seats[0]._call_environment
            messages = call_environment(call)
            game = self._running_game
            if messages is None:
                self._finish()
                return
            if not messages:
                raise EnvironmentFault(f"{self.description}: a player got no message to act on")
            # Here, not in the seat: its own failure would be a loss of the player.
            messages = call_environment(normalize_messages, messages)
        except EnvironmentFault as fault:
            for player in self.plan.recorded:
                self._seats[player].record_fault(fault, self._where, self._moves)
            return
        seat = self._seats[game.to_move]
        if seat.context is None:
            seat.open(messages, self._max_length)
        else:
            seat.observe(messages)
        self.must_forfeit = seat.is_over
        if not seat.is_over:
            self.mover = self.plan.players[game.to_move]

    def _finish(self) -> None:
        game = self._running_game
        moved = [seat for seat in self._seats if seat.num_turns]
        steps = [
            seat._call_environment(build_last_step, game, seat.player, seat.last_move)
            for seat in moved
        ]
        self._outcome = game.outcome
        record: dict[str, Any] = {"game_moves": list(self._moves)}  # for a replay
        if self._forfeit is not None:
            record["forfeit"] = self._forfeit
        for seat, step in zip(moved, steps, strict=True):
            step.info |= {"opponent": self.plan.players[1 - seat.player], **record}
            seat.finish(step)

    @property
    def _running_game(self) -> TwoPlayerGame:
        assert self._game is not None
        return self._game

    def build_result(self, policy_version: int) -> PlayedGame:
        """Return the game with the rollouts of its recorded players."""
        result = PlayedGame(self.plan, self._outcome, len(self._moves))
        if self._outcome is not None:
            for player in self.plan.recorded:
                seat = self._seats[player]
                if seat.num_turns:
                    result.rollouts[player] = seat.build_rollout(policy_version)
        return result

    def close(self) -> None:
        """Close the game; log an error of that."""
        if self._game is None:
            return
        try:
            self._game.close()
        except Exception:
            logger.warning("%s: its close failed", self.description, exc_info=True)
