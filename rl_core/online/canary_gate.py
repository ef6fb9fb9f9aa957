"""Canary gate: held-out episodes decide which snapshots go live. Nothing is ever trained on them.

Candidate, live model and champion answer the same canary episodes, and a paired sequential test, which may be evaluated
after every episode for as long as the service runs, decides. With d the difference of their successes, -1 to 1, the
hypothesis to refute is "worse by the margin or more": mean d <= -margin.

Within a candidate: the wealth mean_l prod_i (1 + l (d_i + margin)) of the betting test (`betting_test`) is a
non-negative supermartingale under the hypothesis. So it ever exceeds 1 / level with probability at most `level`,
however often it is evaluated (Ville's inequality): its reciprocal is an anytime-valid p-value.
Over candidates: the k-th is tested at alpha / (k (k + 1)) (`compute_spent_alpha`). The levels of all candidates add up
to alpha, so by the union bound the chance that any snapshot worse by the margin ever goes live is at most alpha.
Against two models: both hypotheses must be refuted at the full level, because a bad candidate is worse than one of the
models, whose test it then has to pass (intersection-union test).

The price of alpha spending: the k-th candidate needs a wealth of k (k + 1) / alpha, whose logarithm grows as 2 log k.

State and decisions are one file, replaced atomically after every look. A killed gate therefore continues with the
episodes that it had played, and never spends the same share of the error twice.

Source: Waudby-Smith and Ramdas 2024, arXiv:2010.09686; Ramdas, Grünwald, Vovk and Shafer 2023, arXiv:2210.01948 (Ville,
e-processes); Tian and Ramdas 2021, arXiv:1910.04900 (alpha-spending); Berger 1982, doi:10.1080/00401706.1982.10487790.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from rl_core.analysis.significance_tests import betting_test, compute_spent_alpha
from rl_core.api.policy import Policy
from rl_core.environments.environment import ContentSeeds, Environment, is_heldout
from rl_core.errors import CheckpointError, CorruptError, DataError, SettingsError
from rl_core.evaluation import evaluate
from rl_core.models.causal_lm import use_eval_mode
from rl_core.models.trainable_weights import load_trainable_weights
from rl_core.online.service_files import GATE_FILE, METRICS_FILE, read_gate_state, read_json_object
from rl_core.online.weight_snapshots import CHAMPION_VERSION, WeightSnapshots
from rl_core.rollouts.episode_sequence import EpisodeRequest
from rl_core.rollouts.heldout_episodes import draw_heldout_requests
from rl_core.settings import EvaluationSettings, OnlineGateSettings, OnlineSettings
from rl_core.storage.atomic_files import write_json_atomic
from rl_core.storage.faults import inject_fault

logger = logging.getLogger(__name__)

GateDecision = Literal["wait", "promote", "reject"]
GATE_OPPONENTS = ("live", "champion")
_SEED_STRIDE = 1_000_003  # a prime above any number of rounds, so that no two rounds share a seed
_MAX_KEPT_ENTRIES = 1000  # decisions and orders in the file


def build_canary_requests(
    environment: Environment, levels: tuple[str, ...], count: int, seed: int, round_number: int
) -> list[EpisodeRequest]:
    """Draw the held-out episodes of one round, with equal shares of the environments and of their levels; at least one
    of each level.

    Rounds are drawn independently, so an episode may recur in a later round.
    Raises: DataError for a level without held-out episodes; SettingsError for an unknown level.
    """
    drawn_levels = tuple(environment.expand_levels(dict.fromkeys(levels, 1.0)))
    drawn_levels = drawn_levels or tuple(environment.levels)
    owners = Counter(environment.find_part(level).name for level in drawn_levels)
    least = len(owners) * max(owners.values())  # an environment's share covers its levels
    settings = EvaluationSettings(episodes=max(count, least, 2), levels=drawn_levels)
    return draw_heldout_requests(environment, settings, seed * _SEED_STRIDE + round_number)


def is_canary(environment: Environment, level: str, seed: int) -> bool:
    """Return whether the question of an episode is held out. Raises: SettingsError, EnvironmentFault."""
    environment.check_level(level)
    heldout_seeds = environment.seeds_of("heldout", level)
    if isinstance(heldout_seeds, ContentSeeds):
        digest = environment.question(seed, level)
        return is_heldout(digest, environment.find_part(level).heldout_share)
    return seed in heldout_seeds


class SequentialGateTest:
    """Test of one candidate at a time. The error is spent over the number of candidates, which never decreases."""

    def __init__(self, settings: OnlineGateSettings) -> None:
        self.settings = settings
        self.candidates = 0  # opened so far
        self.version: int | None = None  # of the current candidate
        self.episodes = 0
        self.differences: dict[str, Counter[float]] = {
            opponent: Counter() for opponent in GATE_OPPONENTS
        }
        self.decisions: Counter[str] = Counter()

    @property
    def level(self) -> float:
        """Significance level of the current candidate."""
        return compute_spent_alpha(self.settings.alpha, max(1, self.candidates))

    def open_candidate(self, version: int) -> None:
        """Start testing a candidate. Raises: DataError while another one is being tested."""
        if self.version is not None:
            raise DataError(f"gate: snapshot {self.version} is still being tested")
        self.candidates += 1
        self.version = version
        self.episodes = 0
        self.differences = {opponent: Counter() for opponent in GATE_OPPONENTS}

    def observe_episode(self, candidate: float, live: float, champion: float) -> None:
        """Add one canary episode: the success of each model on it, 0 to 1. Raises: DataError."""
        if self.version is None:
            raise DataError("gate: no snapshot is being tested; call open_candidate first")
        if not all(0 <= value <= 1 for value in (candidate, live, champion)):
            raise DataError(
                f"gate: successes {candidate}, {live}, {champion} must lie between 0 and 1"
            )
        self.episodes += 1
        self.differences["live"][candidate - live] += 1
        self.differences["champion"][candidate - champion] += 1

    def compute_p_value(self, opponent: str) -> float:
        """Return the anytime-valid p-value of "worse than the opponent by the margin or more"; 1 without an episode."""
        return self._run_betting_test(opponent, 1.0)

    def compute_worse_p_value(self, opponent: str) -> float:
        """Return the anytime-valid p-value of "not worse by the margin or more"; small if the candidate is worse."""
        return self._run_betting_test(opponent, -1.0)

    def _run_betting_test(self, opponent: str, sign: float) -> float:
        counts = self.differences[opponent]
        if not counts:
            return 1.0
        values = sorted(counts)
        signed_values = [sign * value for value in values]
        multiplicities = [counts[value] for value in values]
        return betting_test(signed_values, multiplicities, -sign * self.settings.margin)

    def decide_candidate(self) -> GateDecision:
        """Return the current decision; any but `wait` closes the candidate.

        Promote if both hypotheses are refuted. Reject if the candidate is proven worse than an opponent by the margin
        (which does not affect the error), or after `max_episodes`.
        """
        if self.version is None:
            raise DataError("gate: no snapshot is being tested; call open_candidate first")
        level = self.level
        if all(self.compute_p_value(opponent) <= level for opponent in GATE_OPPONENTS):
            return self._close_candidate("promote")
        is_worse = any(
            self.compute_worse_p_value(opponent) <= self.settings.alpha
            for opponent in GATE_OPPONENTS
        )
        if is_worse or self.episodes >= self.settings.max_episodes:
            return self._close_candidate("reject")
        return "wait"

    def abandon_candidate(self) -> None:
        """Abandon the candidate undecided because its opponents have changed. Its share of the error stays spent."""
        self.version = None
        self.decisions["abandon"] += 1

    def _close_candidate(self, decision: GateDecision) -> GateDecision:
        self.version = None
        self.decisions[decision] += 1
        return decision

    def compute_metrics(self) -> dict[str, float]:
        """Return counts of candidates and decisions, and the state of the current test."""
        return {
            "online/gate_candidates": float(self.candidates),
            "online/gate_promoted": float(self.decisions["promote"]),
            "online/gate_rejected": float(self.decisions["reject"]),
            "online/gate_episodes": float(self.episodes),
            "online/gate_p_value": max(
                self.compute_p_value(opponent) for opponent in GATE_OPPONENTS
            ),
            "online/gate_level": self.level,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the complete state, including the number of candidates."""
        return {
            "candidates": self.candidates,
            "version": self.version,
            "episodes": self.episodes,
            "differences": {
                opponent: sorted(counts.items()) for opponent, counts in self.differences.items()
            },
            "decisions": dict(self.decisions),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state; inverse of `state_dict`."""
        self.candidates = state["candidates"]
        self.version, self.episodes = state["version"], state["episodes"]
        self.differences = {
            opponent: Counter(dict(pairs)) for opponent, pairs in state["differences"].items()
        }
        self.decisions = Counter(state["decisions"])


class CanaryGate:
    """Gate that tests one candidate after the other: always the newest untested snapshot."""

    def __init__(
        self,
        folder: Path,
        settings: OnlineSettings,
        policy: Policy,
        environment: Environment,
        snapshots: WeightSnapshots,
    ) -> None:
        """Load the gate's state.

        Args:
            folder: of the service.
            policy: its weights are replaced by those of the snapshots that play.
        """
        if not environment.knows_success:
            raise SettingsError(
                "gate: compares success, which is unknown without a verifier; set environment.options.verifier"
            )
        self.folder, self.settings = folder, settings
        self.policy, self.environment, self.snapshots = policy, environment, snapshots
        self.gate = SequentialGateTest(settings.gate)
        self.round = 0  # looks at all candidates so far; seeds the episodes
        self.newest_tested = 0  # newest version that was a candidate
        self.next_candidate: int | None = None  # opened once the worker confirms that it holds it
        self.live_opponent: int | None = None  # live version that the candidate is compared with
        self.decisions: list[dict[str, Any]] = []
        self.orders: list[dict[str, Any]] = []  # for the worker, numbered
        self._load_state()

    def step(self) -> bool:
        """Open a candidate, or play one look of the current one; return False if there is nothing to test."""
        live = self.snapshots.read_live_version()
        if live is None:
            return False
        if read_json_object(self.folder / METRICS_FILE).get("paused"):
            return self._abandon_while_paused()
        if self.gate.version is not None and live != self.live_opponent:
            reason = f"the live snapshot is now {live}, no longer {self.live_opponent}"
            self._record_decision("abandoned", reason)
            self.gate.abandon_candidate()
            self.save_state()
        if self.gate.version is None:
            return self._open_next_candidate(live)
        self._play_look()
        return True

    def _abandon_while_paused(self) -> bool:
        """Test nothing while learning is paused: what was learned before the alarm must not go live after it."""
        newest = max([self.newest_tested, *self.snapshots.list_versions()])
        if self.gate.version is not None:
            self._record_decision("abandoned", "learning is paused")
            self.gate.abandon_candidate()
        if (newest, None) != (self.newest_tested, self.next_candidate):
            self.newest_tested, self.next_candidate = newest, None
            self.save_state()
        return False

    def _open_next_candidate(self, live: int) -> bool:
        versions = self.snapshots.list_versions()
        if self.next_candidate is None:
            newer = [version for version in versions if version > max(self.newest_tested, live)]
            if newer:
                self.next_candidate = newer[-1]
                self._append_order("hold", self.next_candidate)
                self.save_state()
            return False
        is_missing = self.next_candidate not in versions
        held_version = read_json_object(self.folder / METRICS_FILE).get("online/held_version")
        if not is_missing and held_version != self.next_candidate:
            return False  # the worker lags and reads the order later
        self.newest_tested, self.next_candidate = self.next_candidate, None
        self.live_opponent = live
        # An unusable snapshot is never opened, so it costs no share of the error.
        if is_missing or self.snapshots.load_weights_if_valid(self.newest_tested) is None:
            self.save_state()
            return False
        self.gate.open_candidate(self.newest_tested)
        self.save_state()
        return True

    def _play_look(self) -> None:
        version, opponent = self.gate.version, self.live_opponent
        assert version is not None and opponent is not None
        settings = self.settings.gate
        requests = build_canary_requests(
            self.environment,
            settings.levels,
            settings.episodes_per_look,
            self.settings.seed,
            self.round,
        )
        try:
            successes = {
                player: self._measure_success(player, requests)
                for player in dict.fromkeys((version, opponent, CHAMPION_VERSION))
            }
        except CheckpointError as error:  # a snapshot is damaged or missing
            self._record_decision("abandoned", str(error))
            self.gate.abandon_candidate()
            self.save_state()
            return
        self.round += 1
        for request in requests:
            key = (request.level, request.seed)
            if all(key in played for played in successes.values()):
                self.gate.observe_episode(
                    successes[version][key],
                    successes[opponent][key],
                    successes[CHAMPION_VERSION][key],
                )
        statistics = self._collect_statistics()
        decision = self.gate.decide_candidate()
        inject_fault("online.looked")
        if decision != "wait":
            verdict = "promoted" if decision == "promote" else "rejected"
            reason = self._describe_decision(statistics)
            self._record_decision(verdict, reason, statistics, version)
        if decision == "promote":
            self._append_order("live", version)
        self.save_state()

    def _measure_success(
        self, version: int, requests: Sequence[EpisodeRequest]
    ) -> dict[tuple[str, int], float]:
        """Play the episodes with a snapshot; return its success on each.

        Raises: CorruptError for an unreadable snapshot.
        """
        load_trainable_weights(self.policy.model, self.snapshots.load_weights(version))
        with use_eval_mode(self.policy.model):
            evaluation = evaluate(
                self.environment,
                self.policy.backend(),
                self.policy.renderer,
                list(requests),
                samples=1,
                sampling=self.settings.gate.sampling,
                seed=self.settings.seed * 7919 + self.round,
                policy_version=version,
            )
        return {
            episode.key: episode.success
            for episode in evaluation.episodes
            if episode.success is not None
        }

    def _collect_statistics(self) -> dict[str, float]:
        statistics = {"episodes": float(self.gate.episodes), "level": self.gate.level}
        for opponent in GATE_OPPONENTS:
            counts = self.gate.differences[opponent]
            total = sum(difference * count for difference, count in counts.items())
            statistics[f"p_value_{opponent}"] = self.gate.compute_p_value(opponent)
            statistics[f"difference_{opponent}"] = total / max(1, sum(counts.values()))
        return statistics

    def _describe_decision(self, statistics: dict[str, float]) -> str:
        return (
            f"{statistics['difference_live']:+.1%} against the live snapshot {self.live_opponent} "
            f"(p {statistics['p_value_live']:.2g}), {statistics['difference_champion']:+.1%} against the champion "
            f"(p {statistics['p_value_champion']:.2g}), level "
            f"{statistics['level']:.2g}, {statistics['episodes']:g} episodes, margin {self.settings.gate.margin:g}"
        )

    def _record_decision(
        self,
        verdict: str,
        reason: str,
        statistics: dict[str, float] | None = None,
        version: int | None = None,
    ) -> None:
        version = self.gate.version if version is None else version
        logger.warning("gate: snapshot %s %s: %s", version, verdict, reason)
        number = self.decisions[-1]["number"] + 1 if self.decisions else 1
        self.decisions.append(
            {
                "number": number,
                "time": time.time(),
                "version": version,
                "rival": self.live_opponent,
                "verdict": verdict,
                "reason": reason,
                **(statistics or {}),
            }
        )

    def _append_order(self, name: str, version: int) -> None:
        number = self.orders[-1]["number"] + 1 if self.orders else 1
        self.orders.append({"number": number, "order": {"order": name, "version": version}})

    def save_state(self) -> None:
        """Write state, decisions, orders and metrics to the gate's file."""
        self.decisions = self.decisions[-_MAX_KEPT_ENTRIES:]
        self.orders = self.orders[-_MAX_KEPT_ENTRIES:]
        write_json_atomic(
            self.folder / GATE_FILE,
            {
                "gate": self.gate.state_dict(),
                "round": self.round,
                "tested": self.newest_tested,
                "rival": self.live_opponent,
                "wanted": self.next_candidate,
                "decisions": self.decisions,
                "orders": self.orders,
                "metrics": self.gate.compute_metrics(),
            },
        )
        inject_fault("online.gated")

    def _load_state(self) -> None:
        """Load the file if it exists.

        Raises: CorruptError if it is damaged, because the spent error is then unknown.
        """
        if not (self.folder / GATE_FILE).exists():
            return
        state = read_gate_state(self.folder)
        try:
            self.gate.load_state_dict(state["gate"])
            self.round, self.newest_tested = state["round"], state["tested"]
            self.live_opponent, self.next_candidate = state["rival"], state["wanted"]
            self.decisions, self.orders = state["decisions"], state["orders"]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CorruptError(
                f"{self.folder / GATE_FILE}: is damaged, so it is unknown how much of gate.alpha is spent. Restore a "
                "copy, or remove the file: the gate then starts again, and alpha holds from then on"
            ) from error
