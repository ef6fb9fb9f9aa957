"""Episodes played on the server: the model acts and the environment responds until the episode ends.

Use them to try a served policy on its task, with the turns, tools and rewards of training.
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
from rl_core.rollouts.collect import enable_native_tools, limit_turns
from rl_core.rollouts.episode_sequence import EpisodeRequest, EpisodeSequence, Renderer
from rl_core.settings import EnvironmentSettings, SamplingSettings

_REPORTED_FIELDS = (
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


class EnvironmentSession(EpisodeSequence):
    """An episode that records its failure in `failures`."""

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
        """Why the environment failed; "" if it did not."""
        if not self.failures:
            return ""
        failure = self.failures[0]
        return f"{failure.episode_label}: {failure.failed_in}: {failure.error}"


class EnvironmentSessions:
    """Environments by name: the configured one with its options, and the shipped ones that need none."""

    def __init__(self, configured: EnvironmentSettings | None) -> None:
        self._configured = configured
        self._environments: dict[str, Environment] = {}
        self._lock = threading.Lock()
        self._pool = StepPool(
            SamplingSettings().max_concurrent_steps, SamplingSettings().step_timeout_s
        )

    def close_pool(self) -> None:
        """Stop the threads of blocking environments."""
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
        """Begin an episode; may wait for the environment. Raises: ServingHTTPError."""
        environment = self._find_environment(body.name)
        level = body.level if body.level is not None else environment.levels[0]
        try:
            environment.check_level(level)
            part = environment.find_part(level)  # of a mixture
            session = EnvironmentSession(
                part,
                enable_native_tools(renderer, part),
                EpisodeRequest(level, body.seed),
                limit_turns(part, sampling),
                self._pool if part.blocking else None,
                compute_sequence_seed(seed, part.name, level, body.seed, sample),
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
        configured = self._configured
        is_configured = configured is not None and name == configured.name
        if not is_configured and name not in SHIPPED_ENVIRONMENTS:
            known = [*SHIPPED_ENVIRONMENTS]
            if configured is not None:
                known.append(configured.name)
            raise ServingHTTPError(
                422,
                f"environment.name: '{name}' is not served; {suggest_name(name, known)}",
                param="environment.name",
            )
        options = configured.options if configured is not None and is_configured else None
        with self._lock:
            if name not in self._environments:
                try:
                    self._environments[name] = make_environment(name, options)
                except (PosttrainError, EnvironmentFault) as error:
                    raise ServingHTTPError(
                        422, f"environment.name: {error}", param="environment.name"
                    ) from None
            return self._environments[name]


def build_session_report(session: EnvironmentSession, policy_version: int) -> Mapping[str, Any]:
    """Build the report of an episode: opening messages, turns with calls and observations, reward, stop reason."""
    trajectory = session.build_rollout(policy_version).trajectory.to_json()
    return {name: trajectory[name] for name in _REPORTED_FIELDS} | {"opening": session.messages}
