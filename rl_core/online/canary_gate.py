"""The gate at work: plays canary episodes of a candidate, the live snapshot and the champion, and decides.

State and decisions are one file, replaced atomically after every look, so a killed gate goes on with the episodes that
it had played, and never spends the same share of the error twice.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rl_core.api.policy import Policy
from rl_core.environments.environment import Environment
from rl_core.errors import CheckpointError, CorruptError
from rl_core.evaluation import evaluate
from rl_core.models.causal_lm import evaluating
from rl_core.models.trainable_weights import load_trainable_weights
from rl_core.online.canary_episodes import canary_requests
from rl_core.online.sequential_gate import RIVALS, SequentialGate
from rl_core.online.service_files import GATE, METRICS, read_gate, read_object
from rl_core.online.weight_snapshots import CHAMPION, WeightSnapshots
from rl_core.rollouts.episode_sequence import EpisodeRequest
from rl_core.settings import OnlineSettings
from rl_core.storage.faults import fault
from rl_core.storage.single_files import write_json_atomic

__all__ = ["CanaryGate"]

logger = logging.getLogger(__name__)

_KEPT = 1000  # decisions and orders in the file


class CanaryGate:
    """Tests one candidate after the other: always the newest snapshot that was not tested yet."""

    def __init__(self, folder: Path, settings: OnlineSettings, policy: Policy, environment: Environment,
                 snapshots: WeightSnapshots) -> None:  # fmt: skip
        """folder: of the service. policy: its weights are replaced by those of the snapshots that play."""
        self.folder, self.settings = folder, settings
        self.policy, self.environment, self.snapshots = policy, environment, snapshots
        self.gate = SequentialGate(settings.gate)
        self.round = 0  # looks of all candidates: draws the episodes
        self.tested = 0  # newest version that was a candidate
        self.wanted: int | None = None  # the next candidate, once the worker says that it keeps it
        self.rival: int | None = None  # the live version that the candidate is compared with
        self.decisions: list[dict[str, Any]] = []
        self.orders: list[dict[str, Any]] = []  # to the worker, numbered
        self._load()

    def step(self) -> bool:
        """Open a candidate, or play one look of the present one; False = there is nothing to test."""
        live = self.snapshots.live()
        if live is None:
            return False
        if read_object(self.folder / METRICS).get("paused"):
            return self._stand_by()
        if self.gate.version is not None and live != self.rival:
            self._note("abandoned", f"the live snapshot is {live} now, no longer {self.rival}")
            self.gate.abandon()
            self.save()
        if self.gate.version is None:
            return self._open(live)
        self._look()
        return True

    def _stand_by(self) -> bool:
        """While learning is paused nothing is tested: what was learned before the alarm must not go live after it."""
        newest = max([self.tested, *self.snapshots.versions()])
        if self.gate.version is not None:
            self._note("abandoned", "learning is paused")
            self.gate.abandon()
        if (newest, None) != (self.tested, self.wanted):
            self.tested, self.wanted = newest, None
            self.save()
        return False

    def _open(self, live: int) -> bool:
        versions = self.snapshots.versions()
        if self.wanted is None:
            newer = [version for version in versions if version > max(self.tested, live)]
            if newer:
                self.wanted = newer[-1]
                self._order("hold", self.wanted)
                self.save()
            return False
        is_gone = self.wanted not in versions
        if not is_gone and read_object(self.folder / METRICS).get("online/held_version") != self.wanted:
            return False  # a worker that lags reads the order later
        self.tested, self.wanted, self.rival = self.wanted, None, live
        if is_gone or self.snapshots.find_weights(self.tested) is None:  # costs no share of the error
            self.save()
            return False
        self.gate.open(self.tested)
        self.save()
        return True

    def _look(self) -> None:
        version, rival = self.gate.version, self.rival
        assert version is not None and rival is not None
        settings = self.settings.gate
        requests = canary_requests(
            self.environment, settings.levels, settings.episodes_per_look, self.settings.seed, self.round
        )
        try:
            played = {one: self._play(one, requests) for one in dict.fromkeys((version, rival, CHAMPION))}
        except CheckpointError as error:  # a snapshot is damaged or gone
            self._note("abandoned", str(error))
            self.gate.abandon()
            self.save()
            return
        self.round += 1
        common = [request for request in requests if all((request.level, request.seed) in p for p in played.values())]
        for request in common:
            key = (request.level, request.seed)
            self.gate.observe(played[version][key], played[rival][key], played[CHAMPION][key])
        numbers = self._numbers()
        decision = self.gate.decide()
        fault("online.looked")
        if decision == "promote":
            self._note("promoted", self._reason(numbers), numbers, version)
            self._order("live", version)
        elif decision == "reject":
            self._note("rejected", self._reason(numbers), numbers, version)
        self.save()

    def _play(self, version: int, requests: Sequence[EpisodeRequest]) -> dict[tuple[str, int], float]:
        """Success of a snapshot on each episode. Raises: CorruptError for a snapshot that cannot be read."""
        load_trainable_weights(self.policy.model, self.snapshots.weights(version))
        with evaluating(self.policy.model):
            found = evaluate(
                self.environment, self.policy.backend(), self.policy.renderer, list(requests),
                samples=1, sampling=self.settings.gate.sampling, seed=self.settings.seed * 7919 + self.round,
                policy_version=version,
            )  # fmt: skip
        return {episode.key: episode.success for episode in found.episodes}

    # Record

    def _numbers(self) -> dict[str, float]:
        found = {"episodes": float(self.gate.episodes), "level": self.gate.level}
        for rival in RIVALS:
            counts = self.gate.differences[rival]
            found[f"p_value_{rival}"] = self.gate.p_value(rival)
            found[f"difference_{rival}"] = sum(d * n for d, n in counts.items()) / max(1, sum(counts.values()))
        return found

    def _reason(self, numbers: dict[str, float]) -> str:
        return (
            f"{numbers['difference_live']:+.1%} against the live snapshot {self.rival} "
            f"(p {numbers['p_value_live']:.2g}), {numbers['difference_champion']:+.1%} against the champion "
            f"(p {numbers['p_value_champion']:.2g}), level "
            f"{numbers['level']:.2g}, {numbers['episodes']:g} episodes, margin {self.settings.gate.margin:g}"
        )

    def _note(
        self, verdict: str, reason: str, numbers: dict[str, float] | None = None, version: int | None = None
    ) -> None:
        version = self.gate.version if version is None else version
        logger.warning("gate: snapshot %s %s: %s", version, verdict, reason)
        number = self.decisions[-1]["number"] + 1 if self.decisions else 1
        self.decisions.append({
            "number": number, "time": time.time(), "version": version, "rival": self.rival, "verdict": verdict,
            "reason": reason, **(numbers or {}),
        })  # fmt: skip

    def _order(self, name: str, version: int) -> None:
        number = self.orders[-1]["number"] + 1 if self.orders else 1
        self.orders.append({"number": number, "order": {"order": name, "version": version}})

    def save(self) -> None:
        """Write everything down."""
        self.decisions, self.orders = self.decisions[-_KEPT:], self.orders[-_KEPT:]
        write_json_atomic(self.folder / GATE, {
            "gate": self.gate.state_dict(), "round": self.round, "tested": self.tested, "rival": self.rival,
            "wanted": self.wanted,
            "decisions": self.decisions, "orders": self.orders, "metrics": self.gate.metrics(),
        })  # fmt: skip
        fault("online.gated")

    def _load(self) -> None:
        """Take the file over, where there is one. Raises: CorruptError for a damaged one: what is spent is unknown."""
        if not (self.folder / GATE).exists():
            return
        found = read_gate(self.folder)
        try:
            self.gate.load_state_dict(found["gate"])
            self.round, self.tested, self.rival = found["round"], found["tested"], found["rival"]
            self.wanted = found["wanted"]
            self.decisions, self.orders = found["decisions"], found["orders"]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CorruptError(
                f"{self.folder / GATE}: is damaged, so how much of gate.alpha is spent is not known. Put a copy back, "
                "or remove the file: the gate then begins anew, and alpha holds from there on"
            ) from error
