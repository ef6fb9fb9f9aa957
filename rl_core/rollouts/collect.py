"""Seeds of training episodes: traversed in epochs where a level has few, sampled where it has many.

Multi-turn collection: episodes played by the policy, in groups of rollouts of the same episode.
"""

from __future__ import annotations

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
from rl_core.environments.environment import Environment
from rl_core.environments.failed_episodes import EpisodeFailureMonitor, FailedEpisode
from rl_core.environments.step_pool import StepPool
from rl_core.environments.tools import Toolset, build_argument_schema, build_example_value
from rl_core.errors import EnvironmentFault, SettingsError, ToolMisuse
from rl_core.inference.sampling import RolloutBackend, compute_sequence_seed
from rl_core.rollouts.episode_sequence import EpisodeRequest, EpisodeSequence, Renderer
from rl_core.settings import SamplingSettings
from rl_core.storage.faults import inject_fault
from rl_core.types import RolloutGroup, ToolCall

# levels of up to so many seeds are traversed in epochs; larger ones are sampled
MAX_EPOCH_SEEDS = 2**20


def list_training_seeds(environment: Environment, level: str) -> Sequence[int]:
    """Seeds of the training episodes of a level. Raises: SettingsError where it has none."""
    seeds = environment.seeds_of("train", level)
    if not len(seeds):
        raise SettingsError(
            f"environment '{environment.name}' has no training episodes of level '{level}'"
        )
    return seeds


class TrainingSeedOrders:
    """Draws training seeds: without replacement within an epoch of a level that has few, else uniformly."""

    def __init__(self, environment: Environment, seed: int) -> None:
        self._environment = environment
        self._seed = seed
        self._orders: dict[str, DataOrder] = {}  # of the levels that have few seeds

    def draw_seed(self, level: str, rng: np.random.Generator) -> int:
        """One seed. Raises: SettingsError for a level without training episodes."""
        seeds = list_training_seeds(self._environment, level)
        if len(seeds) > MAX_EPOCH_SEEDS:
            return int(seeds[int(rng.integers(len(seeds)))])
        return int(seeds[self._load_order(level, len(seeds)).next_batch()[0]])

    def state_dict(self) -> dict[str, Any]:
        """Position in the order of each level."""
        return {level: order.state_dict() for level, order in self._orders.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`."""
        self._orders = {}
        for level, order in state.items():
            self._load_order(level, int(order["num_rows"])).load_state_dict(order)

    def _load_order(self, level: str, num_rows: int) -> DataOrder:
        if level not in self._orders:
            # 63 bits: a level's order is its own, whatever other levels there are
            seed = compute_sequence_seed(self._seed, "order", level) % 2**63
            self._orders[level] = DataOrder(num_rows, batch_size=1, seed=seed)
        return self._orders[level]


logger = logging.getLogger(__name__)

AnySequence = TypeVar("AnySequence", bound=EpisodeSequence)


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

    The random numbers of sample g of an episode follow from (seed, environment, level, episode seed, g) alone; an
    episode that is requested twice gets new samples the second time. Steps of a `blocking` environment run on threads;
    results and their order do not depend on when they finish, except as `sampling.rejoin` says.

    Args:
        seed: of the sampling; give another one at every iteration.
        policy_version: kept in each trajectory: optimizer steps behind the sampling weights.
        process_group: processes that each play a share of the requests; all of them get all groups.
        failures: counts the episodes whose environment raised, hung or broke its protocol. They are left out of their
            groups, which may be empty then. None = those of this call alone, up to `sampling.max_failed_share`.
    Returns: one group per request, in order; a rollout's reward is the sum of its episode's.
    Raises: EnvironmentFault naming environment, level and seed when too many episodes failed, or two of the same seed
        began differently; DataError when a prompt leaves no room in the context; SettingsError for native tools that
        cannot be used.
    """
    renderer = enable_native_tools(renderer, environment.tools)
    failures = failures or EpisodeFailureMonitor(sampling.max_failed_share)
    plans = plan_groups(requests, group_size)
    failed = _FailedEpisodes(failures, len(requests) * group_size)
    mine = process_group.select_local_rows([1] * len(requests))
    played = play_groups(
        environment,
        backend,
        renderer,
        [plans[index] for index in mine],
        group_size=group_size,
        sampling=sampling,
        seed=seed,
        policy_version=policy_version,
        on_failure=failed.add_episode,
    )
    shares = process_group.all_gather((dict(zip(mine, played, strict=True)), failed.episodes))
    of_all = {index: group for share, _ in shares for index, group in share.items()}
    all_failed = [episode for _, episodes in shares for episode in episodes]
    inject_fault("rollouts.played")
    record_failures(all_failed, len(requests) * group_size, failures)
    return [of_all[index] for index in range(len(requests))]


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """One group to play: a requested episode, and the number of its first sample among all of this episode."""

    request: EpisodeRequest
    first: int


def plan_groups(requests: Sequence[EpisodeRequest], group_size: int) -> list[GroupPlan]:
    """One plan per request, in order; an episode that is requested again gets other samples."""
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
    """Play these groups here; a group lacks its failed episodes, which `on_failure` is given. Raises: as `collect`."""
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
        try:
            backend.run_sequences(
                [sequence for group in groups for sequence in group if not sequence.has_failed],
                sampling,
            )
        finally:
            for group in groups:
                for sequence in group:
                    sequence.close()
    return [
        RolloutGroup(
            [
                sequence.build_rollout(policy_version)
                for sequence in group
                if not sequence.has_failed
            ]
        )
        for group in groups
    ]


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
    """The sequences of one group, each with random numbers of its own."""
    made = []
    for sample in range(group_size):
        key = compute_sequence_seed(
            seed, environment.name, plan.request.level, plan.request.seed, plan.first + sample
        )
        made.append(
            kind(environment, renderer, plan.request, sampling, pool, key, sample, on_failure)
        )
    return made


def begin_group(group: Sequence[EpisodeSequence], max_length: int) -> None:
    """Take the opening messages. Raises: EnvironmentFault where those of one seed differ."""
    for sequence in group:
        sequence.begin_episode(max_length)
    begun = [sequence for sequence in group if not sequence.has_failed]
    if any(sequence.messages != begun[0].messages for sequence in begun):
        raise EnvironmentFault(
            f"{begun[0].description}: two episodes of the same seed began with different messages"
        )


def record_failures(
    failed: list[FailedEpisode], planned: int, failures: EpisodeFailureMonitor
) -> None:
    """Take the failures of one collection into account. Raises: EnvironmentFault if they are too many."""
    failed.sort(
        key=lambda episode: (
            episode.trajectory.level,
            episode.trajectory.seed,
            episode.trajectory.sample,
        )
    )
    if failed:
        _log_failures(failed, planned, logging.INFO if failures.total else logging.WARNING)
    failures.close_collection(failed, planned)


@dataclass
class _FailedEpisodes:
    """Failed episodes of this process, in one collection of `planned` episodes."""

    failures: EpisodeFailureMonitor
    planned: int
    episodes: list[FailedEpisode] = field(default_factory=list)

    def add_episode(self, episode: FailedEpisode) -> None:
        """Note one. Raises: EnvironmentFault as soon as they are too many, however the rest will go."""
        self.episodes.append(episode)
        self.failures.check_failures(self.episodes, self.planned)


def _log_failures(failed: Sequence[FailedEpisode], planned: int, level: int) -> None:
    """Log them: as a warning the first time; after that the metrics count them."""
    first = failed[0]
    logger.log(
        level,
        "%d of %d episodes failed and are left out; the first: %s: %s",
        len(failed),
        planned,
        first.episode_label,
        first.failure_label,
    )


def enable_native_tools(renderer: Renderer, tools: Toolset) -> Renderer:
    """The renderer whose template describes the tools, where `native_tools` says so.

    Raises: SettingsError if the template does not, or writes calls in a form that the environment does not read.
    """
    if (
        not isinstance(renderer, ChatRenderer)
        or not renderer.settings.native_tools
        or not tools.tools
    ):
        return renderer
    tool = next(iter(tools.tools.values()))
    call = ToolCall(
        tool.name,
        {
            name: build_example_value(build_argument_schema(kind))
            for name, kind in tool.parameters.items()
        },
    )
    function = {"name": call.name, "arguments": call.arguments}
    told = renderer.with_tools(tools.schema())
    text = told.render_assistant_text(
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": function}],
        }
    )
    try:
        read = tools.parse(text)
    except ToolMisuse:
        read = None
    if read != call:
        raise SettingsError(
            f"model.native_tools: the chat template writes calls as {text[:200]!r}, which environments do not read; "
            "leave native_tools out: environments describe their tools in the system message"
        )
    return told
