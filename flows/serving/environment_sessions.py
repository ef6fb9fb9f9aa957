"""Sessions with an environment on the server's side: the model acts, the environment answers, until the episode ends.

For trying a served policy in its task, with the same turns, tools and rewards as in training.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from flows.serving.chat_bodies import EpisodeBody
from flows.serving.refused import RefusedRequest
from rl_core.data.chat import ChatRenderer
from rl_core.environments import SHIPPED, make
from rl_core.environments.environment import Environment
from rl_core.environments.failed_episodes import FailedEpisode
from rl_core.environments.step_pool import StepPool
from rl_core.errors import DataError, EnvironmentFault, PosttrainError, SettingsError, nearest
from rl_core.inference.sampling import sequence_seed
from rl_core.rollouts.collect import with_native_tools
from rl_core.rollouts.episode_sequence import EpisodeRequest, EpisodeSequence, Renderer
from rl_core.settings import EnvironmentSettings, SamplingSettings

__all__ = ["EnvironmentSessions", "Session", "session_report"]


class Session(EpisodeSequence):
    """An episode that notes its failure in `failures`."""

    def __init__(
        self,
        environment: Environment,
        renderer: Renderer,
        request: EpisodeRequest,
        sampling: SamplingSettings,
        pool: StepPool | None,
        seed: int,
        sample: int,
    ) -> None:
        self.failures: list[FailedEpisode] = []
        super().__init__(environment, renderer, request, sampling, pool, seed, sample, self.failures.append)

    @property
    def fault(self) -> str:
        """Reason for which the environment failed; "" = it did not."""
        return "".join(f"{failed.place}: {failed.failed_in}: {failed.error}" for failed in self.failures[:1])


class EnvironmentSessions:
    """Environments by name: the pipeline's own with its options, and the shipped ones that need none."""

    def __init__(self, own: EnvironmentSettings | None) -> None:
        self._own = own
        self._made: dict[str, Environment] = {}
        self._lock = threading.Lock()
        self._pool = StepPool(SamplingSettings().max_concurrent_steps, SamplingSettings().step_timeout_s)

    def close(self) -> None:
        """End the threads of blocking environments."""
        self._pool.__exit__(None, None, None)

    def open(
        self,
        body: EpisodeBody,
        renderer: ChatRenderer,
        sampling: SamplingSettings,
        seed: int,
        sample: int,
        context: int,
    ) -> Session:
        """An episode that has begun; it may wait for its environment. Raises: RefusedRequest."""
        environment = self._environment(body.name)
        level = body.level if body.level is not None else environment.levels[0]
        try:
            environment.check_level(level)
            session = Session(
                environment, with_native_tools(renderer, environment.tools), EpisodeRequest(level, body.seed), sampling,
                self._pool if environment.blocking else None,
                sequence_seed(seed, environment.name, level, body.seed, sample), sample,
            )  # fmt: skip
            session.begin(context)
        except (SettingsError, DataError) as error:
            raise RefusedRequest(422, f"environment: {error}", param="environment") from None
        if session.fault:
            session.close()
            raise RefusedRequest(500, session.fault, param="environment")
        return session

    def _environment(self, name: str) -> Environment:
        own = self._own if self._own is not None and name == self._own.name else None
        if own is None and name not in SHIPPED:
            known = [*SHIPPED, *([self._own.name] if self._own is not None else [])]
            raise RefusedRequest(422, f"environment.name: '{name}' is not served; {nearest(name, known)}",
                                 param="environment.name")  # fmt: skip
        with self._lock:
            if name not in self._made:
                try:
                    self._made[name] = make(name, own.options if own is not None else None)
                except (PosttrainError, EnvironmentFault) as error:
                    raise RefusedRequest(422, f"environment.name: {error}", param="environment.name") from None
            return self._made[name]


def session_report(session: Session, policy_version: int) -> Mapping[str, Any]:
    """Record of an episode for its answer: turns with calls and observations, reward, success, reason of the end."""
    trajectory = session.rollout(policy_version).trajectory
    plain = trajectory.to_json()
    kept = ("environment", "level", "seed", "turns", "answer", "success", "reward", "stop_reason", "is_grounded")
    return {name: plain[name] for name in kept} | {"opening": session.messages}
