"""Canary episodes: held-out episodes that decide about snapshots, and that nothing is ever learned from.

The gate of snapshots: a paired test that may be looked at after every episode, for as long as the service lives.

Candidate and live model (and the champion) answer the same canary episodes, which nobody trains on. With d the
difference of their successes, -1 to 1, the hypothesis to be refuted is "worse by the margin or more": mean d <=
-margin.

Within a candidate: the wealth mean_l prod_i (1 + l (d_i + margin)) of the betting test (`betting_test`) is a
non-negative supermartingale under the hypothesis, so it ever exceeds 1 / level with probability `level` at most,
however often one looks (Ville's inequality): its reciprocal is an anytime-valid p-value.
Over candidates: the k-th is tested at alpha / (k (k + 1)) (`compute_spent_alpha`); the levels of all of them add up to alpha,
so by the union bound the chance that any snapshot worse by the margin ever goes live is at most alpha.
Against two models: both hypotheses have to be refuted at the full level, since a bad candidate is bad against one of
them, whose test it then has to pass (intersection-union test).

The price of the spending: the k-th candidate needs a wealth of k (k + 1) / alpha, whose logarithm grows as 2 log k.

Source: Waudby-Smith and Ramdas 2024, arXiv:2010.09686; Ramdas, Grünwald, Vovk and Shafer 2023, arXiv:2210.01948 (Ville,
e-processes); Tian and Ramdas 2021, arXiv:1910.04900 (alpha-spending); Berger 1982, doi:10.1080/00401706.1982.10487790.

The gate at work: plays canary episodes of a candidate, the live snapshot and the champion, and decides.

State and decisions are one file, replaced atomically after every look, so a killed gate goes on with the episodes that
it had played, and never spends the same share of the error twice.
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
from rl_core.errors import CheckpointError, CorruptError, DataError
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

_SEED_STRIDE = (
    1_000_003  # a prime above the rounds of a service: no two rounds of two seeds draw alike
)


def build_canary_requests(
    environment: Environment, levels: tuple[str, ...], count: int, seed: int, round_number: int
) -> list[EpisodeRequest]:
    """Held-out episodes of one round, levels in equal shares.

    Each round is a draw of its own, so an episode may come again in a later one, as in any sample.
    Raises: DataError for a level without held-out episodes; SettingsError for an unknown level.
    """
    chosen = levels or tuple(environment.levels)
    settings = EvaluationSettings(episodes=max(count, len(chosen), 2), levels=chosen)
    return draw_heldout_requests(environment, settings, seed * _SEED_STRIDE + round_number)


def is_canary(environment: Environment, level: str, seed: int) -> bool:
    """True = the question of this episode is held out, whatever its seed. Raises: SettingsError, EnvironmentFault."""
    environment.check_level(level)
    held = environment.seeds_of("heldout", level)
    if isinstance(held, ContentSeeds):
        return is_heldout(
            environment.compute_question_digest(seed, level), environment.heldout_share
        )
    return seed in held


GateDecision = Literal["wait", "promote", "reject"]
GATE_OPPONENTS = ("live", "champion")


class SequentialGateTest:
    """One candidate at a time; the number of candidates is what the error is spent over, and never goes back."""

    def __init__(self, settings: OnlineGateSettings) -> None:
        self.settings = settings
        self.candidates = 0  # opened so far
        self.version: int | None = None  # of the candidate that is tested; None = there is none
        self.episodes = 0
        self.differences: dict[str, Counter[float]] = {rival: Counter() for rival in GATE_OPPONENTS}
        self.decisions: Counter[str] = Counter()

    @property
    def level(self) -> float:
        """Level of the present candidate."""
        return compute_spent_alpha(self.settings.alpha, max(1, self.candidates))

    def open_candidate(self, version: int) -> None:
        """Begin with a candidate. Raises: DataError while another one is being tested."""
        if self.version is not None:
            raise DataError(f"gate: snapshot {self.version} is still being tested")
        self.candidates += 1
        self.version = version
        self.episodes = 0
        self.differences = {rival: Counter() for rival in GATE_OPPONENTS}

    def observe_episode(self, candidate: float, live: float, champion: float) -> None:
        """Take one canary episode in: the success of each model on it, 0 to 1. Raises: DataError."""
        if self.version is None:
            raise DataError("gate: no snapshot is being tested; open one first")
        if not all(0 <= value <= 1 for value in (candidate, live, champion)):
            raise DataError(
                f"gate: successes {candidate}, {live}, {champion} must lie between 0 and 1"
            )
        self.episodes += 1
        self.differences["live"][candidate - live] += 1
        self.differences["champion"][candidate - champion] += 1

    def compute_p_value(self, opponent: str) -> float:
        """Anytime-valid p-value of "worse than this rival by the margin or more"; 1 without an episode."""
        return self._run_betting_test(opponent, 1.0)

    def compute_worse_p_value(self, opponent: str) -> float:
        """Anytime-valid p-value of "better than worse by the margin": small = it is worse."""
        return self._run_betting_test(opponent, -1.0)

    def _run_betting_test(self, opponent: str, sign: float) -> float:
        counts = self.differences[opponent]
        if not counts:
            return 1.0
        values = sorted(counts)
        return betting_test(
            [sign * v for v in values], [counts[v] for v in values], -sign * self.settings.margin
        )

    def decide_candidate(self) -> GateDecision:
        """The decision by now; any but `wait` closes the candidate.

        Promoted where both hypotheses are refuted. Rejected where it is proven to be worse than a rival by the margin
        (which decides nothing about the error), or after `max_episodes`.
        """
        if self.version is None:
            raise DataError("gate: no snapshot is being tested; open one first")
        level = self.level
        if all(self.compute_p_value(rival) <= level for rival in GATE_OPPONENTS):
            return self._close_candidate("promote")
        is_worse = any(
            self.compute_worse_p_value(rival) <= self.settings.alpha for rival in GATE_OPPONENTS
        )
        if is_worse or self.episodes >= self.settings.max_episodes:
            return self._close_candidate("reject")
        return "wait"

    def abandon_candidate(self) -> None:
        """Give the candidate up undecided: its rivals have changed. Its share of the error stays spent."""
        self.version = None
        self.decisions["abandon"] += 1

    def _close_candidate(self, decision: GateDecision) -> GateDecision:
        self.version = None
        self.decisions[decision] += 1
        return decision

    def compute_metrics(self) -> dict[str, float]:
        """Candidates and decisions so far, and the present test."""
        return {
            "online/gate_candidates": float(self.candidates),
            "online/gate_promoted": float(self.decisions["promote"]),
            "online/gate_rejected": float(self.decisions["reject"]),
            "online/gate_episodes": float(self.episodes),
            "online/gate_p_value": max(self.compute_p_value(rival) for rival in GATE_OPPONENTS),
            "online/gate_level": self.level,
        }

    def state_dict(self) -> dict[str, Any]:
        """Everything; the number of candidates above all."""
        return {
            "candidates": self.candidates,
            "version": self.version,
            "episodes": self.episodes,
            "differences": {
                rival: sorted(counts.items()) for rival, counts in self.differences.items()
            },
            "decisions": dict(self.decisions),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`."""
        self.candidates, self.version, self.episodes = (
            state["candidates"],
            state["version"],
            state["episodes"],
        )
        self.differences = {
            rival: Counter(dict(pairs)) for rival, pairs in state["differences"].items()
        }
        self.decisions = Counter(state["decisions"])


logger = logging.getLogger(__name__)

_MAX_KEPT_ENTRIES = 1000  # decisions and orders in the file


class CanaryGate:
    """Tests one candidate after the other: always the newest snapshot that was not tested yet."""

    def __init__(
        self,
        folder: Path,
        settings: OnlineSettings,
        policy: Policy,
        environment: Environment,
        snapshots: WeightSnapshots,
    ) -> None:
        """folder: of the service. policy: its weights are replaced by those of the snapshots that play."""
        self.folder, self.settings = folder, settings
        self.policy, self.environment, self.snapshots = policy, environment, snapshots
        self.gate = SequentialGateTest(settings.gate)
        self.round = 0  # looks of all candidates: draws the episodes
        self.newest_tested = 0  # newest version that was a candidate
        self.next_candidate: int | None = (
            None  # the next candidate, once the worker says that it keeps it
        )
        self.live_opponent: int | None = (
            None  # the live version that the candidate is compared with
        )
        self.decisions: list[dict[str, Any]] = []
        self.orders: list[dict[str, Any]] = []  # to the worker, numbered
        self._load_state()

    def step(self) -> bool:
        """Open a candidate, or play one look of the present one; False = there is nothing to test."""
        live = self.snapshots.read_live_version()
        if live is None:
            return False
        if read_json_object(self.folder / METRICS_FILE).get("paused"):
            return self._abandon_while_paused()
        if self.gate.version is not None and live != self.live_opponent:
            self._record_decision(
                "abandoned", f"the live snapshot is {live} now, no longer {self.live_opponent}"
            )
            self.gate.abandon_candidate()
            self.save_state()
        if self.gate.version is None:
            return self._open_next_candidate(live)
        self._play_look()
        return True

    def _abandon_while_paused(self) -> bool:
        """While learning is paused nothing is tested: what was learned before the alarm must not go live after it."""
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
        is_gone = self.next_candidate not in versions
        if (
            not is_gone
            and read_json_object(self.folder / METRICS_FILE).get("online/held_version")
            != self.next_candidate
        ):
            return False  # a worker that lags reads the order later
        self.newest_tested, self.next_candidate, self.live_opponent = (
            self.next_candidate,
            None,
            live,
        )
        # costs no share of the error
        if is_gone or self.snapshots.load_weights_if_valid(self.newest_tested) is None:
            self.save_state()
            return False
        self.gate.open_candidate(self.newest_tested)
        self.save_state()
        return True

    def _play_look(self) -> None:
        version, rival = self.gate.version, self.live_opponent
        assert version is not None and rival is not None
        settings = self.settings.gate
        requests = build_canary_requests(
            self.environment,
            settings.levels,
            settings.episodes_per_look,
            self.settings.seed,
            self.round,
        )
        try:
            played = {
                one: self._measure_success(one, requests)
                for one in dict.fromkeys((version, rival, CHAMPION_VERSION))
            }
        except CheckpointError as error:  # a snapshot is damaged or gone
            self._record_decision("abandoned", str(error))
            self.gate.abandon_candidate()
            self.save_state()
            return
        self.round += 1
        common = [
            request
            for request in requests
            if all((request.level, request.seed) in p for p in played.values())
        ]
        for request in common:
            key = (request.level, request.seed)
            self.gate.observe_episode(
                played[version][key], played[rival][key], played[CHAMPION_VERSION][key]
            )
        numbers = self._collect_numbers()
        decision = self.gate.decide_candidate()
        inject_fault("online.looked")
        if decision == "promote":
            self._record_decision("promoted", self._describe_decision(numbers), numbers, version)
            self._append_order("live", version)
        elif decision == "reject":
            self._record_decision("rejected", self._describe_decision(numbers), numbers, version)
        self.save_state()

    def _measure_success(
        self, version: int, requests: Sequence[EpisodeRequest]
    ) -> dict[tuple[str, int], float]:
        """Success of a snapshot on each episode. Raises: CorruptError for a snapshot that cannot be read."""
        load_trainable_weights(self.policy.model, self.snapshots.load_weights(version))
        with use_eval_mode(self.policy.model):
            found = evaluate(
                self.environment,
                self.policy.backend(),
                self.policy.renderer,
                list(requests),
                samples=1,
                sampling=self.settings.gate.sampling,
                seed=self.settings.seed * 7919 + self.round,
                policy_version=version,
            )
        return {episode.key: episode.success for episode in found.episodes}

    # Record

    def _collect_numbers(self) -> dict[str, float]:
        found = {"episodes": float(self.gate.episodes), "level": self.gate.level}
        for rival in GATE_OPPONENTS:
            counts = self.gate.differences[rival]
            found[f"p_value_{rival}"] = self.gate.compute_p_value(rival)
            found[f"difference_{rival}"] = sum(d * n for d, n in counts.items()) / max(
                1, sum(counts.values())
            )
        return found

    def _describe_decision(self, numbers: dict[str, float]) -> str:
        return (
            f"{numbers['difference_live']:+.1%} against the live snapshot {self.live_opponent} "
            f"(p {numbers['p_value_live']:.2g}), {numbers['difference_champion']:+.1%} against the champion "
            f"(p {numbers['p_value_champion']:.2g}), level "
            f"{numbers['level']:.2g}, {numbers['episodes']:g} episodes, margin {self.settings.gate.margin:g}"
        )

    def _record_decision(
        self,
        verdict: str,
        reason: str,
        numbers: dict[str, float] | None = None,
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
                **(numbers or {}),
            }
        )

    def _append_order(self, name: str, version: int) -> None:
        number = self.orders[-1]["number"] + 1 if self.orders else 1
        self.orders.append({"number": number, "order": {"order": name, "version": version}})

    def save_state(self) -> None:
        """Write everything down."""
        self.decisions, self.orders = (
            self.decisions[-_MAX_KEPT_ENTRIES:],
            self.orders[-_MAX_KEPT_ENTRIES:],
        )
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
        """Take the file over, where there is one. Raises: CorruptError for a damaged one: what is spent is unknown."""
        if not (self.folder / GATE_FILE).exists():
            return
        found = read_gate_state(self.folder)
        try:
            self.gate.load_state_dict(found["gate"])
            self.round, self.newest_tested, self.live_opponent = (
                found["round"],
                found["tested"],
                found["rival"],
            )
            self.next_candidate = found["wanted"]
            self.decisions, self.orders = found["decisions"], found["orders"]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CorruptError(
                f"{self.folder / GATE_FILE}: is damaged, so how much of gate.alpha is spent is not known. Put a copy back, "
                "or remove the file: the gate then begins anew, and alpha holds from there on"
            ) from error
