"""Self-play: games of a policy against itself, its past versions or a random player, and their measures.

Each pair of prompts is one deal, played from both seats, so roles are exactly even. Against the current policy both
seats of a game are trained; against a snapshot each seat has its own games. Opponents of an iteration follow from the
seed and the iteration's number, so a resumed run plays the same games.

An evaluation plays the same deals against the random player and against the first snapshot, and measures the policy's
strategy exactly if the environment can enumerate its decisions.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rl_core.analysis.statistics import wilson_interval
from rl_core.environments.environment import Environment
from rl_core.environments.failed_episodes import EpisodeFailureMonitor
from rl_core.environments.two_player import (
    NUM_PLAYERS,
    GameDecision,
    check_two_player_environment,
)
from rl_core.inference.sampling import RolloutBackend
from rl_core.models.causal_lm import use_eval_mode
from rl_core.models.logprobs import completion_logprobs
from rl_core.rollouts.batching import TrainRow, build_batches
from rl_core.rollouts.collect import FailedEpisodes, record_failures
from rl_core.rollouts.episode_sequence import EpisodeRequest, Renderer
from rl_core.rollouts.two_player_games import (
    CURRENT_PLAYER,
    RANDOM_PLAYER,
    GamePlan,
    PlayedGame,
    TwoPlayerResult,
    play_two_player_games,
)
from rl_core.settings import PolicySettings, SamplingSettings, SelfPlaySettings
from rl_core.training.opponent_pool import OpponentPool
from rl_core.types import RolloutGroup

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_Z_95 = 1.959963984540054  # of the normal distribution
FIRST_OPPONENT = "first"  # in metrics: the snapshot before the first iteration


class SelfPlay:
    """The opponents of one policy, and the games against them."""

    def __init__(
        self,
        model: PreTrainedModel,
        backend: RolloutBackend,
        renderer: Renderer,
        environment: Environment,
        settings: PolicySettings,
        seed: int,
        *,
        levels: Sequence[str],
        pad_id: int,
        folder: Path | None,
    ) -> None:
        """Build the pool; no snapshot is taken yet.

        Args:
            folder: of the snapshots; None = in memory.
        Raises: SettingsError for an environment without two players.
        """
        assert settings.self_play is not None
        self.environment = check_two_player_environment(environment)
        self.settings: SelfPlaySettings = settings.self_play
        self._policy_settings = settings
        self._model, self._backend, self._renderer = model, backend, renderer
        self._seed, self._levels, self._pad_id = seed, list(levels), pad_id
        self.metrics: dict[str, float] = {}  # of the games of the newest iteration
        self.pool = OpponentPool(
            model,
            self.settings,
            seed,
            folder=folder,
            keep_checkpoints=settings.keep_checkpoints,
        )

    def prepare_iteration(self, iteration: int) -> None:
        """Take a snapshot if one is due; without a pool only the first one, for evaluations."""
        if self.settings.opponent == "pool" or self.pool.first is None:
            self.pool.take_snapshot_when_due(iteration)

    def play_iteration(
        self,
        iteration: int,
        requests: Sequence[EpisodeRequest],
        *,
        group_size: int,
        sampling: SamplingSettings,
        seed: int,
        policy_version: int,
        failures: EpisodeFailureMonitor,
    ) -> list[RolloutGroup]:
        """Play every request from both seats; return two groups per request, of player 0 and of player 1.

        A rollout without a move of its player, because the other one lost at once by an illegal move, is left out.
        Raises: EnvironmentFault if too many games failed.
        """
        opponents = self._choose_opponents(iteration, len(requests))
        plans = _plan_games(requests, opponents, group_size)
        num_rollouts = len(requests) * NUM_PLAYERS * group_size
        failed = FailedEpisodes(failures, num_rollouts)
        result = self._play(plans, sampling, seed, policy_version, failed)
        levels = [request.level for request in requests] * (NUM_PLAYERS * group_size)
        record_failures(failed.episodes, levels, failures)
        groups: list[RolloutGroup] = []
        for place in range(len(requests)):
            games = [g for g in result.games if g.plan.place == place]
            for player in range(NUM_PLAYERS):
                rollouts = [game.rollouts[player] for game in games if player in game.rollouts]
                groups.append(RolloutGroup(rollouts))
        num_expected = num_rollouts - len(failed.episodes)
        self.metrics = self._compute_metrics(result, iteration, num_expected)
        return groups

    def _choose_opponents(self, iteration: int, count: int) -> list[str]:
        """Choose the opponent of each request."""
        if self.settings.opponent != "pool":
            return [self.settings.opponent] * count
        num_current = self.settings.count_current_pairs(count)
        drawn = self.pool.draw_opponents(iteration, max(1, count - num_current))
        return [CURRENT_PLAYER] * num_current + [s.name for s in drawn[: count - num_current]]

    def _play(
        self,
        plans: Sequence[GamePlan],
        sampling: SamplingSettings,
        seed: int,
        policy_version: int,
        failed: FailedEpisodes,
    ) -> TwoPlayerResult:
        self._backend.refresh_weights()
        return play_two_player_games(
            self.environment,
            self._backend,
            self._renderer,
            plans,
            sampling=sampling,
            seed=seed,
            policy_version=policy_version,
            use_player=self._use_snapshot,
            on_failure=failed.add_episode,
        )

    @contextmanager
    def _use_snapshot(self, name: str) -> Iterator[None]:
        """Sample with the weights of a snapshot."""
        try:
            with self.pool.use_snapshot(name):
                self._backend.refresh_weights()
                yield
        finally:
            self._backend.refresh_weights()

    def _compute_metrics(
        self, result: TwoPlayerResult, iteration: int, num_expected: int
    ) -> dict[str, float]:
        """Compute payoffs by seat, illegal moves, and which opponents were played."""
        games = [game for game in result.games if game.outcome is not None]
        metrics = {"perf/weight_swaps": float(result.num_weight_swaps)}
        if self.settings.opponent == "pool":
            metrics["train/pool_size"] = float(len(self.pool.snapshots))
        if not games:
            return metrics
        names: list[str] = []
        payoffs: dict[int, list[float]] = {player: [] for player in range(NUM_PLAYERS)}
        illegal = Counter[bool]()  # by whether the policy itself made the move
        for game in games:
            assert game.outcome is not None
            for player in game.plan.recorded:
                names.append(game.plan.players[1 - player])
                payoffs[player].append(game.outcome.rewards[player])
            loser = game.outcome.illegal_player
            if loser is not None:
                illegal[game.plan.players[loser] == CURRENT_PLAYER] += 1
        for player, values in payoffs.items():
            if values:
                metrics[f"train/payoff_by_player/{player}"] = statistics.fmean(values)
        metrics["train/illegal_game_rate"] = illegal[True] / len(games)
        metrics["train/opponent_illegal_game_rate"] = illegal[False] / len(games)
        metrics["train/game_moves"] = statistics.fmean(game.num_moves for game in games)
        num_rollouts = sum(len(game.rollouts) for game in games)
        metrics["train/moveless_rate"] = 1 - num_rollouts / max(1, num_expected)
        past = [name for name in names if name not in (CURRENT_PLAYER, RANDOM_PLAYER)]
        if past:
            metrics["train/opponent_age"] = self.pool.compute_mean_age(past, iteration)
            metrics["train/opponents"] = float(len(set(past)))
        return metrics

    def evaluate(self, iteration: int) -> dict[str, float]:
        """Play against the random player and the first snapshot with the current weights, and measure the strategy."""
        if self.pool.first is None:
            self.prepare_iteration(iteration)
        metrics: dict[str, float] = {}
        opponents = {RANDOM_PLAYER: RANDOM_PLAYER}
        if self.pool.first is not None:
            opponents[FIRST_OPPONENT] = self.pool.first.name
        for label, name in opponents.items():
            metrics |= compute_match_metrics(self._play_match(label, name), label)
        return metrics | self.measure_strategy()

    def _play_match(self, label: str, name: str) -> list[PlayedGame]:
        """Play the evaluation's deals from both seats against one opponent."""
        settings = self._policy_settings
        num_deals = max(1, self.settings.eval_games // NUM_PLAYERS)
        plans = []
        for index in range(num_deals):
            level = self._levels[index % len(self._levels)]
            seeds = self.environment.seeds_of("heldout", level)
            request = EpisodeRequest(level, int(seeds[index % len(seeds)]))
            plans += [
                GamePlan(request, 0, index, _seat_players(player, name), (player,), index)
                for player in range(NUM_PLAYERS)
            ]
        failures = EpisodeFailureMonitor(settings.sampling.max_failed_share)
        failed = FailedEpisodes(failures, len(plans))
        seed = self._seed
        result = self._play(plans, settings.sampling, seed, 0, failed)
        record_failures(failed.episodes, [plan.request.level for plan in plans], failures)
        return [game for game in result.games if game.outcome is not None]

    def measure_strategy(self) -> dict[str, float]:
        """Measure the policy's strategy exactly from the probabilities of its moves; {} = the game is too large."""
        decisions = self.environment.list_decisions()
        if not decisions:
            return {}
        probabilities = compute_move_probabilities(
            self._model,
            self._renderer,
            decisions,
            temperature=self._policy_settings.sampling.temperature,
            pad_id=self._pad_id,
            max_tokens=self._policy_settings.micro_batch_tokens,
        )
        return self.environment.measure_strategy(probabilities)

    def state_dict(self, iteration: int) -> dict[str, Any]:
        """Return the pool's state."""
        return self.pool.state_dict(iteration)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a `state_dict`. Raises: CheckpointError for a snapshot that is missing or was changed."""
        self.pool.load_state_dict(state)


def _seat_players(player: int, opponent: str) -> tuple[str, str]:
    """Return the players of both seats if the policy takes `player`."""
    return (CURRENT_PLAYER, opponent) if player == 0 else (opponent, CURRENT_PLAYER)


def _plan_games(
    requests: Sequence[EpisodeRequest], opponents: Sequence[str], group_size: int
) -> list[GamePlan]:
    """Plan the games of an iteration; a request that occurs again gets other random numbers."""
    plans: list[GamePlan] = []
    times_seen = Counter[EpisodeRequest]()
    for place, (request, opponent) in enumerate(zip(requests, opponents, strict=True)):
        first = times_seen[request] * NUM_PLAYERS * group_size
        times_seen[request] += 1
        for sample in range(group_size):
            if opponent == CURRENT_PLAYER:
                players = (CURRENT_PLAYER, CURRENT_PLAYER)
                plans.append(GamePlan(request, sample, first + sample, players, (0, 1), place))
                continue
            for player in range(NUM_PLAYERS):
                number = first + player * group_size + sample
                players = _seat_players(player, opponent)
                plans.append(GamePlan(request, sample, number, players, (player,), place))
    return plans


def compute_match_metrics(games: Sequence[PlayedGame], label: str) -> dict[str, float]:
    """Compute mean payoff and win rate of a match with 95% intervals; {} without a game.

    Both seats of one deal are one observation of the payoff's interval, as their luck is shared; the interval is
    normal. The win rate's is Wilson's over games.
    """
    by_deal: dict[int, list[float]] = {}
    wins = 0
    for game in games:
        assert game.outcome is not None
        (player,) = game.plan.recorded
        payoff = game.outcome.rewards[player]
        by_deal.setdefault(game.plan.place, []).append(payoff)
        wins += payoff > 0
    if not games:
        return {}
    deals = [statistics.fmean(values) for values in by_deal.values()]
    mean = statistics.fmean(deals)
    half = _Z_95 * statistics.stdev(deals) / math.sqrt(len(deals)) if len(deals) > 1 else math.inf
    low, high = wilson_interval(wins, len(games))
    metrics = {
        f"eval/payoff_against/{label}": mean,
        f"eval/win_rate_against/{label}": wins / len(games),
        f"eval/win_rate_against_low/{label}": low,
        f"eval/win_rate_against_high/{label}": high,
    }
    if math.isfinite(half):
        metrics[f"eval/payoff_against_low/{label}"] = mean - half
        metrics[f"eval/payoff_against_high/{label}"] = mean + half
    return metrics


@torch.no_grad()
def compute_move_probabilities(
    model: PreTrainedModel,
    renderer: Renderer,
    decisions: Sequence[GameDecision],
    *,
    temperature: float,
    pad_id: int,
    max_tokens: int,
    action_ids: Callable[[str], list[int]] | None = None,
) -> dict[str, dict[str, float]]:
    """Compute the probability of each legal move in each decision, float64.

    A move's probability is that of its text as the tokenizer writes it, with the end of turn. Other spellings of the
    same text by other tokens are not counted, so the rest that is called illegal is an upper bound.

    Args:
        temperature: of the sampling.
        action_ids: encodes a move; None = the renderer's.
    Returns: by key of the decision and text of the move.
    """
    encode = action_ids or renderer.action_ids  # type: ignore[attr-defined]
    rows, owners = [], []
    for decision in decisions:
        prompt = renderer.prompt_ids(decision.opening)
        for move, messages in decision.history:
            prompt = [*prompt, *encode(move), *renderer.observation_ids(messages)]
        for move in decision.moves:
            ids = encode(move)
            rows.append(TrainRow(prompt, ids, [True] * len(ids), temperature=temperature or 1.0))
            owners.append((decision.key, move))
    probabilities: dict[str, dict[str, float]] = {decision.key: {} for decision in decisions}
    device = next(model.parameters()).device
    with use_eval_mode(model):
        for batch in build_batches(rows, max_tokens, pad_id):
            logprobs_BS, _ = completion_logprobs(model, batch.to(device))
            totals_B = logprobs_BS.double().sum(1).exp().tolist()
            for row, total in zip(batch.rows, totals_B, strict=True):
                key, move = owners[row]
                probabilities[key][move] = total
    return probabilities
