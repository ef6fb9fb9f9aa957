"""Multi-turn collection: training seeds, and episodes played by the policy in groups of rollouts of one episode."""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from rl_core.data.batches import DataOrder
from rl_core.data.chat import ChatRenderer
from rl_core.distributed import SINGLE_PROCESS, ProcessGroup
from rl_core.environments.agent import Agent
from rl_core.environments.environment import Environment
from rl_core.environments.failed_episodes import EpisodeFailureMonitor, FailedEpisode
from rl_core.environments.mixture import LabelledEnvironment
from rl_core.environments.step_pool import StepPool
from rl_core.environments.tool_schemas import build_argument_schema, build_example_value
from rl_core.errors import EnvironmentFault, SettingsError, ToolMisuse
from rl_core.inference.sampling import RolloutBackend, compute_sequence_seed
from rl_core.rollouts.agent_episodes import AgentTurn, play_agent_episodes
from rl_core.rollouts.episode_sequence import EpisodeRequest, EpisodeSequence, Renderer
from rl_core.settings import SamplingSettings
from rl_core.storage.faults import inject_fault
from rl_core.types import RolloutGroup, ToolCall

logger = logging.getLogger(__name__)

AnySequence = TypeVar("AnySequence", bound=EpisodeSequence)

MAX_EPOCH_SEEDS = (
    2**20
)  # levels with at most this many seeds are traversed in epochs; larger ones are sampled


def list_training_seeds(environment: Environment, level: str) -> Sequence[int]:
    """List the seeds of a level's training episodes.

    Raises: SettingsError if there are none.
    """
    seeds = environment.seeds_of("train", level)
    if not len(seeds):
        raise SettingsError(
            f"environment '{environment.name}' has no training episodes of level '{level}'"
        )
    return seeds


class TrainingSeedOrders:
    """Draws of training seeds: epochs without replacement for levels with few seeds, otherwise uniform.

    In a mixture of environments, the k-th seed of a level depends only on the run's seed, the level and k.
    """

    def __init__(self, environment: Environment, seed: int) -> None:
        self._environment = environment
        self._seed = seed
        self._orders: dict[str, DataOrder] = {}  # by level, for levels with few seeds
        self._draws = Counter[str]()  # of levels with many seeds, in a mixture

    def draw_seed(self, level: str, rng: np.random.Generator) -> int:
        """Draw one seed.

        Raises: SettingsError for a level without training episodes.
        """
        seeds = list_training_seeds(self._environment, level)
        if len(seeds) > MAX_EPOCH_SEEDS:
            if len(self._environment.parts) > 1:
                number = self._draws[level]
                self._draws[level] += 1
                key = compute_sequence_seed(self._seed, "draw", level, number) % 2**63
                rng = np.random.default_rng(key)
            return int(seeds[int(rng.integers(len(seeds)))])
        return int(seeds[self._load_order(level, len(seeds)).next_batch()[0]])

    def state_dict(self) -> dict[str, Any]:
        """Return the position in each level's order, or the number of its draws."""
        orders = {level: order.state_dict() for level, order in self._orders.items()}
        return {**orders, **{level: {"draws": count} for level, count in self._draws.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the positions returned by `state_dict`."""
        self._orders = {}
        self._draws.clear()
        for level, order in state.items():
            if "draws" in order:
                self._draws[level] = int(order["draws"])
            else:
                self._load_order(level, int(order["num_rows"])).load_state_dict(order)

    def _load_order(self, level: str, num_rows: int) -> DataOrder:
        if level not in self._orders:
            # 63 bits; each level's order is independent of the other levels
            seed = compute_sequence_seed(self._seed, "order", level) % 2**63
            self._orders[level] = DataOrder(num_rows, batch_size=1, seed=seed)
        return self._orders[level]


def collect_rollouts(
    environment: Environment,
    backend: RolloutBackend,
    renderer: Renderer,
    requests: Sequence[EpisodeRequest],
    *,
    group_size: int,
    sampling: SamplingSettings,
    seed: int,
    policy_version: int = 0,
    process_group: ProcessGroup = SINGLE_PROCESS,
    failures: EpisodeFailureMonitor | None = None,
) -> list[RolloutGroup]:
    """Play every requested episode `group_size` times.

    The random numbers of sample g of an episode depend only on (seed, environment, level, episode seed, g); an
    episode that is requested twice gets new samples the second time. Steps of a `blocking` environment run on
    threads; results and their order do not depend on when they finish, except as `sampling.rejoin` says.

    Args:
        seed: of the sampling; pass another one at every iteration.
        policy_version: stored in each trajectory: optimizer steps behind the sampling weights.
        process_group: processes that each play a share of the requests; all of them get all groups.
        failures: monitor of episodes whose environment raised, hung or broke its protocol. Such episodes are left out
            of their groups, which may then be empty. None = a new monitor for this call, up to
            `sampling.max_failed_share`.
    Returns: one group per request, in order; a rollout's reward is the sum of its episode's rewards.
    Raises: EnvironmentFault naming environment, level and seed if too many episodes failed, or if two episodes of the
        same seed began differently; DataError if a prompt leaves no room in the context; SettingsError if native
        tools cannot be used.
    """
    renderer = enable_native_tools(renderer, environment)
    failures = failures or EpisodeFailureMonitor(sampling.max_failed_share)
    failures.watch_environments(environment)
    plans = plan_groups(requests, group_size)
    failed = FailedEpisodes(failures, len(requests) * group_size)
    local_indices = process_group.select_local_rows([1] * len(requests))
    played = play_groups(
        environment,
        backend,
        renderer,
        [plans[index] for index in local_indices],
        group_size=group_size,
        sampling=sampling,
        seed=seed,
        policy_version=policy_version,
        on_failure=failed.add_episode,
    )
    shares = process_group.all_gather(
        (dict(zip(local_indices, played, strict=True)), failed.episodes)
    )
    groups = {index: group for share, _ in shares for index, group in share.items()}
    all_failed = [episode for _, episodes in shares for episode in episodes]
    inject_fault("rollouts.played")
    record_failures(all_failed, [request.level for request in requests] * group_size, failures)
    return [groups[index] for index in range(len(requests))]


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """One group to play: a requested episode, and the number of its first sample among all samples of this episode."""

    request: EpisodeRequest
    first: int


def plan_groups(requests: Sequence[EpisodeRequest], group_size: int) -> list[GroupPlan]:
    """Plan one group per request, in order; an episode that is requested again gets other samples."""
    plans, times_seen = [], Counter[EpisodeRequest]()
    for request in requests:
        plans.append(GroupPlan(request, times_seen[request] * group_size))
        times_seen[request] += 1
    return plans


def play_groups(
    environment: Environment,
    backend: RolloutBackend,
    renderer: Renderer,
    plans: Sequence[GroupPlan],
    *,
    group_size: int,
    sampling: SamplingSettings,
    seed: int,
    policy_version: int,
    on_failure: Callable[[FailedEpisode], None],
) -> list[RolloutGroup]:
    """Play these groups in this process.

    Failed episodes are passed to `on_failure` and left out of their groups.
    Raises: as `collect_rollouts`.
    """
    if isinstance(environment, Agent):
        return _play_agent_groups(
            environment,
            backend,
            renderer,
            plans,
            group_size=group_size,
            sampling=sampling,
            seed=seed,
            policy_version=policy_version,
            on_failure=on_failure,
        )
    with ExitStack() as stack:
        pool = None
        if environment.blocking:
            pool = stack.enter_context(
                StepPool(sampling.max_concurrent_steps, sampling.step_timeout_s)
            )
        groups: list[list[EpisodeSequence]] = [
            build_group(environment, renderer, plan, group_size, sampling, pool, seed, on_failure)
            for plan in plans
        ]
        for group in groups:
            begin_group(group, backend.max_length)
        sequences = [s for group in groups for s in group if not s.has_failed]
        try:
            backend.run_sequences(sequences, sampling)
        finally:
            for group in groups:
                for sequence in group:
                    sequence.close()
    return [
        RolloutGroup([s.build_rollout(policy_version) for s in group if not s.has_failed])
        for group in groups
    ]


def _play_agent_groups(
    environment: Agent,
    backend: RolloutBackend,
    renderer: Renderer,
    plans: Sequence[GroupPlan],
    *,
    group_size: int,
    sampling: SamplingSettings,
    seed: int,
    policy_version: int,
    on_failure: Callable[[FailedEpisode], None],
) -> list[RolloutGroup]:
    """Play groups whose episodes are run by the user's agent; see `play_groups`."""
    if not isinstance(renderer, ChatRenderer):
        raise SettingsError("environment 'agent' needs a tokenizer with a chat format")
    turns = [
        AgentTurn(
            plan.request.level,
            plan.request.seed,
            sample,
            _compute_episode_seed(seed, environment, plan, sample),
        )
        for plan in plans
        for sample in range(group_size)
    ]
    rollouts = play_agent_episodes(
        environment,
        backend,
        renderer,
        turns,
        sampling=sampling,
        policy_version=policy_version,
        on_failure=on_failure,
    )
    groups = [rollouts[start : start + group_size] for start in range(0, len(turns), group_size)]
    return [RolloutGroup([row for row in group if row is not None]) for group in groups]


def _compute_episode_seed(seed: int, environment: Environment, plan: GroupPlan, sample: int) -> int:
    request = plan.request
    name = environment.find_part(request.level).name
    return compute_sequence_seed(seed, name, request.level, request.seed, plan.first + sample)


def build_group(
    environment: Environment,
    renderer: Renderer,
    plan: GroupPlan,
    group_size: int,
    sampling: SamplingSettings,
    pool: StepPool | None,
    seed: int,
    on_failure: Callable[[FailedEpisode], None],
    kind: type[AnySequence] = EpisodeSequence,  # type: ignore[assignment]
) -> list[AnySequence]:
    """Build the sequences of one group, each with its own random numbers."""
    sequences = []
    part = environment.find_part(plan.request.level)
    if part is not environment:
        renderer = enable_native_tools(renderer, part)
        sampling = limit_turns(part, sampling)
        pool = pool if part.blocking else None
    for sample in range(group_size):
        key = _compute_episode_seed(seed, environment, plan, sample)
        sequences.append(
            kind(part, renderer, plan.request, sampling, pool, key, sample, on_failure)
        )
    return sequences


def limit_turns(part: Environment, sampling: SamplingSettings) -> SamplingSettings:
    """Return the sampling with the turn limit of an environment of a mixture, if it has one."""
    limit = part.settings.max_turns if isinstance(part, LabelledEnvironment) else None
    if limit is None or limit >= sampling.max_turns:
        return sampling
    return dataclasses.replace(sampling, max_turns=limit)


def begin_group(group: Sequence[EpisodeSequence], max_length: int) -> None:
    """Read the opening messages.

    Raises: EnvironmentFault if the messages of one seed differ.
    """
    for sequence in group:
        sequence.begin_episode(max_length)
    started = [sequence for sequence in group if not sequence.has_failed]
    if any(sequence.messages != started[0].messages for sequence in started):
        raise EnvironmentFault(
            f"{started[0].description}: two episodes of the same seed began with different messages"
        )


def record_failures(
    failed: list[FailedEpisode], planned_levels: Sequence[str], failures: EpisodeFailureMonitor
) -> None:
    """Log and count one collection's failed episodes.

    Args:
        planned_levels: level of each planned episode.
    Raises: EnvironmentFault if there are too many.
    """
    planned = len(planned_levels)

    def get_position(episode: FailedEpisode) -> tuple[str, int, int]:
        trajectory = episode.trajectory
        return trajectory.level, trajectory.seed, trajectory.sample

    failed.sort(key=get_position)
    if failed:
        _log_failures(failed, planned, logging.INFO if failures.total else logging.WARNING)
    failures.close_collection(failed, planned, planned_levels)


@dataclass
class FailedEpisodes:
    """Failed episodes of this process in one collection of `planned` episodes."""

    failures: EpisodeFailureMonitor
    planned: int
    episodes: list[FailedEpisode] = field(default_factory=list)

    def add_episode(self, episode: FailedEpisode) -> None:
        """Add one.

        Raises: EnvironmentFault as soon as there are too many, regardless of the remaining episodes.
        """
        self.episodes.append(episode)
        self.failures.check_failures(self.episodes, self.planned)


def _log_failures(failed: Sequence[FailedEpisode], planned: int, level: int) -> None:
    """Log failed episodes; the caller warns only the first time, because metrics count later ones."""
    first = failed[0]
    logger.log(
        level,
        "%d of %d episodes failed and are left out; the first: %s: %s",
        len(failed),
        planned,
        first.episode_label,
        first.failure_label,
    )


def enable_native_tools(renderer: Renderer, environment: Environment) -> Renderer:
    """Return a renderer whose chat template describes the tools if `native_tools` is set, otherwise the renderer
    itself.

    For a mixture the tools of all environments are checked, and the renderer is returned unchanged: `build_group` adds
    the tools of an episode's environment.

    Raises: SettingsError if the template does not describe tools or writes calls in a form that the environment
        cannot read.
    """
    if not isinstance(renderer, ChatRenderer):
        return renderer
    if len(environment.parts) > 1 or environment.parts[0] is not environment:
        for part in environment.parts:
            enable_native_tools(renderer, part)
        return renderer
    tools = environment.tools
    tools.follow_template(renderer.template.tool_source)
    if not renderer.settings.native_tools or not tools.tools:
        return renderer
    tool = next(iter(tools.tools.values()))
    arguments = {
        name: build_example_value(build_argument_schema(kind))
        for name, kind in tool.parameters.items()
    }
    call = ToolCall(tool.name, arguments)
    function = {"name": call.name, "arguments": call.arguments}
    native_renderer = renderer.with_tools(tools.schema())
    text = native_renderer.render_assistant_text(
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": function}],
        }
    )
    try:
        parsed = tools.parse(text)
    except ToolMisuse:
        parsed = None
    if parsed != call:
        raise SettingsError(
            f"model.native_tools: the chat template writes calls as {text[:200]!r}, which environments cannot read; "
            "remove native_tools: environments describe their tools in the system message"
        )
    return native_renderer
