"""Multi-turn collection: episodes played by the policy, in groups of rollouts of the same episode."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TypeVar

from rl_core.data.chat import ChatRenderer
from rl_core.distributed import SINGLE_PROCESS, ProcessGroup
from rl_core.environments.environment import Environment
from rl_core.environments.failed_episodes import EpisodeFailures, FailedEpisode
from rl_core.environments.step_pool import StepPool
from rl_core.environments.tool_schema import example, schema_of
from rl_core.environments.tools import Toolset
from rl_core.errors import EnvironmentFault, SettingsError, ToolMisuse
from rl_core.inference.sampling import RolloutBackend, sequence_seed
from rl_core.rollouts.episode_sequence import EpisodeRequest, EpisodeSequence, Renderer
from rl_core.settings import SamplingSettings
from rl_core.storage.faults import fault
from rl_core.types import RolloutGroup, ToolCall

__all__ = [
    "EpisodeRequest",
    "GroupPlan",
    "Renderer",
    "begin_group",
    "collect",
    "make_group",
    "plan_groups",
    "play_groups",
    "settle_failures",
    "with_native_tools",
]

logger = logging.getLogger(__name__)

AnySequence = TypeVar("AnySequence", bound=EpisodeSequence)


def collect(
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
    failures: EpisodeFailures | None = None,
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
    renderer = with_native_tools(renderer, environment.tools)
    failures = failures or EpisodeFailures(sampling.max_failed_share)
    plans = plan_groups(requests, group_size)
    failed = _Failed(failures, len(requests) * group_size)
    mine = process_group.share([1] * len(requests))
    played = play_groups(
        environment, backend, renderer, [plans[index] for index in mine],
        group_size=group_size, sampling=sampling, seed=seed, policy_version=policy_version, on_failure=failed.add,
    )  # fmt: skip
    shares = process_group.all_gather((dict(zip(mine, played, strict=True)), failed.episodes))
    of_all = {index: group for share, _ in shares for index, group in share.items()}
    all_failed = [episode for _, episodes in shares for episode in episodes]
    fault("rollouts.played")
    settle_failures(all_failed, len(requests) * group_size, failures)
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
            pool = stack.enter_context(StepPool(sampling.max_concurrent_steps, sampling.step_timeout_s))
        groups: list[list[EpisodeSequence]] = [
            make_group(environment, renderer, plan, group_size, sampling, pool, seed, on_failure) for plan in plans
        ]
        for group in groups:
            begin_group(group, backend.max_length)
        try:
            backend.run([sequence for group in groups for sequence in group if not sequence.has_failed], sampling)
        finally:
            for group in groups:
                for sequence in group:
                    sequence.close()
    return [
        RolloutGroup([sequence.rollout(policy_version) for sequence in group if not sequence.has_failed])
        for group in groups
    ]


def make_group(
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
        key = sequence_seed(seed, environment.name, plan.request.level, plan.request.seed, plan.first + sample)
        made.append(kind(environment, renderer, plan.request, sampling, pool, key, sample, on_failure))
    return made


def begin_group(group: Sequence[EpisodeSequence], max_length: int) -> None:
    """Take the opening messages. Raises: EnvironmentFault where those of one seed differ."""
    for sequence in group:
        sequence.begin(max_length)
    begun = [sequence for sequence in group if not sequence.has_failed]
    if any(sequence.messages != begun[0].messages for sequence in begun):
        raise EnvironmentFault(f"{begun[0].place}: two episodes of the same seed began with different messages")


def settle_failures(failed: list[FailedEpisode], planned: int, failures: EpisodeFailures) -> None:
    """Take the failures of one collection into account. Raises: EnvironmentFault if they are too many."""
    failed.sort(key=lambda episode: (episode.trajectory.level, episode.trajectory.seed, episode.trajectory.sample))
    if failed:
        _log_failures(failed, planned, logging.INFO if failures.total else logging.WARNING)
    failures.close(failed, planned)


@dataclass
class _Failed:
    """Failed episodes of this process, in one collection of `planned` episodes."""

    failures: EpisodeFailures
    planned: int
    episodes: list[FailedEpisode] = field(default_factory=list)

    def add(self, episode: FailedEpisode) -> None:
        """Note one. Raises: EnvironmentFault as soon as they are too many, however the rest will go."""
        self.episodes.append(episode)
        self.failures.check(self.episodes, self.planned)


def _log_failures(failed: Sequence[FailedEpisode], planned: int, level: int) -> None:
    """Log them: as a warning the first time; after that the metrics count them."""
    first = failed[0]
    logger.log(
        level,
        "%d of %d episodes failed and are left out; the first: %s: %s",
        len(failed), planned, first.place, first.what,
    )  # fmt: skip


def with_native_tools(renderer: Renderer, tools: Toolset) -> Renderer:
    """The renderer whose template describes the tools, where `native_tools` says so.

    Raises: SettingsError if the template does not, or writes calls in a form that the environment does not read.
    """
    if not isinstance(renderer, ChatRenderer) or not renderer.settings.native_tools or not tools.tools:
        return renderer
    tool = next(iter(tools.tools.values()))
    call = ToolCall(tool.name, {name: example(schema_of(kind)) for name, kind in tool.parameters.items()})
    function = {"name": call.name, "arguments": call.arguments}
    told = renderer.with_tools(tools.schema())
    text = told.assistant_text(
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
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
