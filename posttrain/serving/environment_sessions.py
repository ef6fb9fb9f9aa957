"""Sessions with an environment on the server's side: the model acts, the environment answers, until the episode ends.

For trying a served policy in its task, with the same turns, tools and rewards as in training.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from posttrain.serving.errors import ServingHTTPError
from posttrain.serving.request_bodies import EpisodeBody
from rl_core.data.chat import ChatRenderer
from rl_core.environments import SHIPPED_ENVIRONMENTS, make_environment
from rl_core.environments.environment import Environment
from rl_core.environments.failed_episodes import FailedEpisode
from rl_core.environments.step_pool import StepPool
from rl_core.errors import DataError, EnvironmentFault, PosttrainError, SettingsError, suggest_name
from rl_core.inference.sampling import compute_sequence_seed
from rl_core.rollouts.collect import enable_native_tools
from rl_core.rollouts.episode_sequence import EpisodeRequest, EpisodeSequence, Renderer
from rl_core.settings import EnvironmentSettings, SamplingSettings


class EnvironmentSession(EpisodeSequence):
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
        super().__init__(
            environment, renderer, request, sampling, pool, seed, sample, self.failures.append
        )

    @property
    def failure_reason(self) -> str:
        """Reason for which the environment failed; "" = it did not."""
        return "".join(
            f"{failed.episode_label}: {failed.failed_in}: {failed.error}"
            for failed in self.failures[:1]
        )


class EnvironmentSessions:
    """Environments by name: the pipeline's own with its options, and the shipped ones that need none."""

    def __init__(self, configured: EnvironmentSettings | None) -> None:
        self._configured = configured
        self._environments: dict[str, Environment] = {}
        self._lock = threading.Lock()
        self._pool = StepPool(
            SamplingSettings().max_concurrent_steps, SamplingSettings().step_timeout_s
        )

    def close_pool(self) -> None:
        """End the threads of blocking environments."""
        self._pool.__exit__(None, None, None)

    def open_session(
        self,
        body: EpisodeBody,
        renderer: ChatRenderer,
        sampling: SamplingSettings,
        seed: int,
        sample: int,
        context: int,
    ) -> EnvironmentSession:
        """An episode that has begun; it may wait for its environment. Raises: RefusedRequest."""
        environment = self._find_environment(body.name)
        level = body.level if body.level is not None else environment.levels[0]
        try:
            environment.check_level(level)
            session = EnvironmentSession(
                environment,
                enable_native_tools(renderer, environment.tools),
                EpisodeRequest(level, body.seed),
                sampling,
                self._pool if environment.blocking else None,
                compute_sequence_seed(seed, environment.name, level, body.seed, sample),
                sample,
            )
            session.begin_episode(context)
        except (SettingsError, DataError) as error:
            raise ServingHTTPError(422, f"environment: {error}", param="environment") from None
        if session.failure_reason:
            session.close()
            raise ServingHTTPError(500, session.failure_reason, param="environment")
        return session

    def _find_environment(self, name: str) -> Environment:
        own = (
            self._configured
            if self._configured is not None and name == self._configured.name
            else None
        )
        if own is None and name not in SHIPPED_ENVIRONMENTS:
            known = [
                *SHIPPED_ENVIRONMENTS,
                *([self._configured.name] if self._configured is not None else []),
            ]
            raise ServingHTTPError(
                422,
                f"environment.name: '{name}' is not served; {suggest_name(name, known)}",
                param="environment.name",
            )
        with self._lock:
            if name not in self._environments:
                try:
                    self._environments[name] = make_environment(
                        name, own.options if own is not None else None
                    )
                except (PosttrainError, EnvironmentFault) as error:
                    raise ServingHTTPError(
                        422, f"environment.name: {error}", param="environment.name"
                    ) from None
            return self._environments[name]


def build_session_report(session: EnvironmentSession, policy_version: int) -> Mapping[str, Any]:
    """Record of an episode for its answer: turns with calls and observations, reward, success, reason of the end."""
    trajectory = session.build_rollout(policy_version).trajectory
    plain = trajectory.to_json()
    kept = (
        "environment",
        "level",
        "seed",
        "turns",
        "answer",
        "success",
        "reward",
        "stop_reason",
        "is_grounded",
    )
    return {name: plain[name] for name in kept} | {"opening": session.messages}
