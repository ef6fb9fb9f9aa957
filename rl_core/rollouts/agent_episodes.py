"""Episodes played by the user's agents: they run side by side, and one loop answers their calls from the policy."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rl_core.chat.prompts import PromptBuilder
from rl_core.data.chat import ChatRenderer
from rl_core.environments.agent import Agent, AgentEndpoint, AgentFailed
from rl_core.environments.failed_episodes import FailedEpisode, format_error_trace
from rl_core.errors import EnvironmentFault, RewardError, SettingsError
from rl_core.inference.continuous_batching import ContinuousBatcher
from rl_core.inference.engine import Engine
from rl_core.inference.fallback_batching import FallbackBatcher
from rl_core.inference.sampling import RolloutBackend
from rl_core.inference.server_loop import ServerLoop, ServerLoopLimits
from rl_core.inference.serving_requests import (
    EngineFault,
    RequestEnded,
    RequestProgress,
    RequestSlots,
)
from rl_core.inference.transformers_backend import TransformersBackend
from rl_core.json_client import exempt_loopback_from_proxies
from rl_core.rollouts.agent_recorder import AgentSession
from rl_core.rollouts.agent_server import (
    AgentServer,
    CallGate,
    deliver_events,
    require_call,
)
from rl_core.settings import SamplingSettings
from rl_core.types import Rollout, StopReason

_JOIN_S = 30.0  # for the agents' threads to end once the run stops
_SLOTS_PER_AGENT = 2  # an agent may send requests side by side; more of them queue


@dataclass(frozen=True, slots=True)
class AgentTurn:
    """One episode to play: a task, and the number and random numbers of the sample."""

    level: str
    seed: int  # of the task
    sample: int  # index within its group
    sampling_seed: int


def check_agent_backend(backend: RolloutBackend, sampling: SamplingSettings) -> None:
    """Refuse what agents cannot be played with. Raises: SettingsError."""
    if not isinstance(backend, Engine | TransformersBackend):
        raise SettingsError(
            "rollouts.workers: environment 'agent' needs the policy in this process; an inference server cannot "
            "record its calls yet: set workers: in_process"
        )
    if sampling.repetition_penalty != 1:
        raise SettingsError(
            "sampling.repetition_penalty: is not supported by environment 'agent'; set it to 1"
        )


def play_agent_episodes(
    environment: Agent,
    backend: RolloutBackend,
    renderer: ChatRenderer,
    turns: Sequence[AgentTurn],
    *,
    sampling: SamplingSettings,
    policy_version: int,
    on_failure: Callable[[FailedEpisode], None],
) -> list[Rollout | None]:
    """Play episodes, at most sampling.max_concurrent_steps at once; None = the episode failed.

    Raises: EnvironmentFault if too many failed; SettingsError as `check_agent_backend`; errors of the engine.
    """
    check_agent_backend(backend, sampling)
    assert isinstance(backend, Engine | TransformersBackend)
    if not turns:
        return []
    exempt_loopback_from_proxies()  # for clients of OpenAI's API within a function
    players = _Players(environment, renderer, turns, sampling, backend.max_length)
    slots = min(sampling.slots, _SLOTS_PER_AGENT * players.num_threads)
    batcher: Any = ContinuousBatcher if isinstance(backend, Engine) else FallbackBatcher
    opened: list[RequestSlots] = []

    def open_slots(wake: Callable[[], None]) -> RequestSlots:
        options = backend.build_request_options()
        opened.append(batcher(**options, slots=slots, context=players.context, wake=wake))
        return opened[-1]

    loop = ServerLoop(
        open_slots, policy_version, players.deliver_events, ServerLoopLimits(max_waiting=2**31)
    )
    gate = CallGate(is_open=sampling.rejoin == "ready" or opened[0].is_batch_independent)
    gate.loop = loop
    with AgentServer(gate) as server:
        players.start_threads(server, loop.close)
        try:
            loop.serve_until_closed()
        finally:
            players.stop_threads()
    players.raise_error()
    outcomes = [outcome for outcome in players.outcomes if outcome is not None]
    assert len(outcomes) == len(turns)
    for outcome in outcomes:
        if isinstance(outcome, FailedEpisode):
            on_failure(outcome)
    rollouts = [None if isinstance(outcome, FailedEpisode) else outcome for outcome in outcomes]
    for rollout in rollouts:
        if rollout is not None:
            rollout.trajectory.policy_version = policy_version
    return rollouts


class _Players:
    """Threads that each run one agent after the other."""

    def __init__(
        self,
        environment: Agent,
        renderer: ChatRenderer,
        turns: Sequence[AgentTurn],
        sampling: SamplingSettings,
        max_length: int,
    ) -> None:
        self.context = min(environment.context, max_length)
        self.num_threads = min(sampling.max_concurrent_steps, len(turns))
        self.outcomes: list[Rollout | FailedEpisode | None] = [None] * len(turns)
        self._environment, self._turns, self._sampling = environment, turns, sampling
        self._prompts = PromptBuilder(
            renderer, self.context, environment.tool_style, "environment.options.context"
        )
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._next = 0
        self._error: BaseException | None = None
        self._threads: list[threading.Thread] = []

    def start_threads(self, server: AgentServer, on_end: Callable[[], None]) -> None:
        """Start to play. `on_end` is called when all episodes have ended, or after an error."""
        self._server, self._on_end, self._num_running = server, on_end, self.num_threads
        self._next = self.num_threads
        for index in range(self.num_threads):
            server.gate.change_episode(None, index)
        for index in range(self.num_threads):
            thread = threading.Thread(
                target=self._play, args=(index,), daemon=True, name=f"episode {index}"
            )
            self._threads.append(thread)
            thread.start()

    def stop_threads(self) -> None:
        """End the agents that still run, and wait for their threads."""
        self._stopping.set()
        for thread in self._threads:
            thread.join(_JOIN_S)

    def raise_error(self) -> None:
        """Raise the error that ended the episodes early, if any."""
        if self._error is not None:
            raise self._error

    def deliver_events(self, events: Sequence[RequestProgress | RequestEnded]) -> None:
        """Deliver events; an error of the engine ends all episodes, as it would end a run of other environments."""
        for event in events:
            error = event.request.error
            is_fault = isinstance(event, RequestEnded) and isinstance(error, EngineFault)
            if is_fault and not self._stopping.is_set() and self._num_running:
                assert error is not None
                self._end_early(error)
        deliver_events(self._server.gate, events)

    def _end_early(self, error: BaseException) -> None:
        self._error = self._error or error
        self._stopping.set()
        self._on_end()

    def _play(self, index: int) -> None:
        """Play an episode, and further ones as long as there are any."""
        try:
            while index < len(self._turns) and not self._stopping.is_set():
                self.outcomes[index] = self._play_episode(index)
                with self._lock:
                    ended, index, self._next = index, self._next, self._next + 1
                    begun = index if index < len(self._turns) else None
                    self._server.gate.change_episode(ended, begun)
        except BaseException as error:
            self._end_early(error)
        finally:
            with self._lock:
                self._num_running -= 1
                is_last = not self._num_running
            if is_last:
                self._on_end()

    def _play_episode(self, index: int) -> Rollout | FailedEpisode:
        turn, environment = self._turns[index], self._environment
        session = AgentSession(
            number=index,
            episode=environment.episode(turn.seed, turn.level),
            seed=turn.sampling_seed,
            sample=turn.sample,
            sampling=self._sampling,
            prompts=self._prompts,
            context=self.context,
            uses_run_sampling=environment.sampling_source == "run",
        )
        key = f"sk-episode-{secrets.token_hex(16)}"
        url = self._server.add_session(key, session)
        endpoint = AgentEndpoint(
            url,
            key,
            session.agent_seed,
            session.measure_agent_seconds,
            self._stopping.is_set,
            lambda: session.score,
            lambda: session.limit.value if session.limit is not None else "",
        )
        where = "the agent"
        try:
            session.start_clock()
            with environment.run_agent(session.episode, endpoint) as result:
                session.close()
                require_call(len(session.answers), session.limit, result.stderr)
                where = "its reward"
                score = environment.score_episode(session.episode, session.list_calls(), result)
            return session.build_rollout(environment.name, score, 0)
        except (EnvironmentFault, RewardError) as fault:
            session.close()
            return self._build_failure(session, fault, where)

    def _build_failure(
        self, session: AgentSession, fault: EnvironmentFault | RewardError, where: str
    ) -> FailedEpisode:
        """Build the record of a failed episode, with the end of the agent's log."""
        trace = fault.log if isinstance(fault, AgentFailed) else ""
        if not trace and fault.__cause__ is not None:
            trace = format_error_trace(fault.__cause__)
        trajectory = session.build_trajectory(self._environment.name, None, StopReason.FAILED)
        messages = session.list_opening_messages()
        return FailedEpisode(
            trajectory, messages, where, str(fault), trace, agent_seed=session.agent_seed
        )
