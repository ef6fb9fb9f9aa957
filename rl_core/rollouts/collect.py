"""Multi-turn collection: episodes played by the policy, in groups of rollouts of the same episode."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol, cast

from rl_core.data.chat import ChatRenderer
from rl_core.data.model_text import plain_json, printable
from rl_core.distributed import SINGLE_PROCESS, ProcessGroup
from rl_core.environments.environment import Environment, Episode, Step
from rl_core.environments.step_pool import PendingTurn, StepPool, Turnover
from rl_core.environments.tool_schema import example, schema_of
from rl_core.environments.tools import Toolset
from rl_core.errors import DataError, EnvironmentFault, SettingsError, ToolMisuse
from rl_core.inference.sampling import RolloutBackend, sequence_seed
from rl_core.settings import SamplingSettings
from rl_core.timing import span
from rl_core.types import Message, Rollout, RolloutGroup, StopReason, ToolCall, Trajectory, Turn

__all__ = ["EpisodeRequest", "Renderer", "collect"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EpisodeRequest:
    """One episode to play."""

    level: str
    seed: int


class Renderer(Protocol):
    """The part of `data.chat.ChatRenderer` that collection needs."""

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of the opening messages and the header of the first action."""

    def observation_ids(self, messages: Sequence[Message]) -> list[int]:
        """Token ids to append after the policy's end-of-turn token, up to the header of its next action."""

    def action_text(self, ids: Sequence[int]) -> str:
        """Text of one sampled action."""


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
) -> list[RolloutGroup]:
    """Play every requested episode `group_size` times.

    The random numbers of sample g of an episode follow from (seed, environment, level, episode seed, g) alone; an
    episode that is requested twice gets new samples the second time. Steps of a `blocking` environment run on threads;
    results and their order do not depend on when they finish, except as `sampling.rejoin` says.

    Args:
        seed: of the sampling; give another one at every iteration.
        policy_version: kept in each trajectory: optimizer steps behind the sampling weights.
        process_group: processes that each play a share of the requests; all of them get all groups.
    Returns: one group per request, in order; a rollout's reward is the sum of its episode's.
    Raises: EnvironmentFault naming environment, level and seed when an environment raises, hangs or breaks its
        protocol; DataError when a prompt leaves no room in the context; SettingsError for native tools that cannot be
        used.
    """
    renderer = _with_native_tools(renderer, environment.tools)
    with ExitStack() as stack:
        pool = None
        if environment.blocking:
            pool = stack.enter_context(StepPool(sampling.max_concurrent_steps, sampling.step_timeout_s))
        groups: list[list[_EpisodeSequence]] = []
        times_seen: dict[EpisodeRequest, int] = {}
        mine = set(process_group.share([1] * len(requests)))
        for index, request in enumerate(requests):
            first = times_seen.get(request, 0) * group_size
            times_seen[request] = times_seen.get(request, 0) + 1
            if index not in mine:
                continue
            keys = [
                sequence_seed(seed, environment.name, request.level, request.seed, sample)
                for sample in range(first, first + group_size)
            ]
            groups.append([_EpisodeSequence(environment, renderer, request, sampling, pool, key) for key in keys])
        for group in groups:
            for sequence in group:
                sequence.begin(backend.max_length)
                if sequence.messages != group[0].messages:
                    raise EnvironmentFault(
                        f"{sequence.place}: two episodes of the same seed began with different messages"
                    )
        try:
            backend.run([sequence for group in groups for sequence in group], sampling)
        finally:
            for group in groups:
                for sequence in group:
                    sequence.close()
    played = [
        RolloutGroup([sequence.rollout(sample, policy_version) for sample, sequence in enumerate(group)])
        for group in groups
    ]
    shares = process_group.all_gather(dict(zip(sorted(mine), played, strict=True)))
    of_all = {index: group for share in shares for index, group in share.items()}
    return [of_all[index] for index in range(len(requests))]


def _with_native_tools(renderer: Renderer, tools: Toolset) -> Renderer:
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


class _EpisodeSequence:
    """A `RolloutSequence` over one episode: turns sampled tokens into actions, and observations into tokens."""

    def __init__(
        self,
        environment: Environment,
        renderer: Renderer,
        request: EpisodeRequest,
        sampling: SamplingSettings,
        pool: StepPool | None,
        seed: int,
    ) -> None:
        self.place = f"environment '{environment.name}', level '{request.level}', seed {request.seed}"
        self.seed = seed
        self.messages: list[Message] = []
        self.prompt_ids: list[int] = []
        self._environment_name = environment.name
        self._renderer = renderer
        self._max_turns, self._room = sampling.max_turns, sampling.max_completion_tokens
        self._temperature = sampling.temperature
        self._stop = sampling.stop
        self._pool = pool  # None = the environment is called on the caller's thread
        self._episode: Episode = self._guard(environment.episode, seed=request.seed, level=request.level)
        self._reset = pool.submit(f"{self.place}: its reset", self._guard, self._episode.reset) if pool else None
        self._request = request
        self._turns: list[Turn] = []
        self._completion_ids: list[int] = []
        self._loss_mask: list[bool] = []
        self._logprobs: list[float] = []
        self._reward = 0.0
        self._last = Step()
        self._stop_reason: StopReason | None = None

    def begin(self, max_length: int) -> None:
        """Take the opening messages, of which a context of `max_length` tokens has to leave some room."""
        with span("environment"):
            self.messages = self._reset.result() if self._reset else self._guard(self._episode.reset)
        self.messages = _plain(self.messages)
        if not self.messages:
            raise EnvironmentFault(f"{self.place}: the episode began without a message")
        self.prompt_ids = self._renderer.prompt_ids(self.messages)
        self._room = min(self._room, max_length - len(self.prompt_ids))
        if self._room < 1:
            raise DataError(
                f"{self.place}: a prompt of {len(self.prompt_ids)} tokens leaves no room in a context of {max_length}"
            )

    def advance(self, action_ids: list[int], logprobs: list[float], hit_limit: bool) -> Turnover:
        """Play one action; see `RolloutSequence`."""
        self._append(action_ids, logprobs, sampled=True)
        text = self._renderer.action_text(action_ids)
        self._turns.append(Turn(action=text, num_tokens=len(action_ids)))
        if hit_limit:  # cut in the middle: the environment is not shown half an action
            self._stop_reason = StopReason.MAX_TOKENS
            return None
        if self._pool is None:
            with span("environment"):
                step = self._guard(self._episode.step, text)
            return self._take(step)
        call = self._pool.submit(f"{self.place}: a step", self._guard, self._episode.step, text)
        return PendingTurn(call, self._take)

    def should_stop(self, action_ids: list[int]) -> bool:
        """True = the newest token completes a stop text; see `RolloutSequence`."""
        # A token has at least one byte, a character at most four. More tokens than that: decoding may strip the first.
        newest = action_ids[-(4 * max(map(len, self._stop)) + 8) :]
        text = self._renderer.action_text(newest)
        return any(stop in text for stop in self._stop)

    def _take(self, step: Step) -> list[int] | None:
        """Observation tokens of a finished step; None = the episode is over.

        An environment may hand back what the policy wrote (in a message, an answer, a call): it is made plain here.
        """
        if isinstance(step.answer, str):
            step.answer = printable(step.answer)
        self._last, turn = step, self._turns[-1]
        if not math.isfinite(step.reward):
            raise EnvironmentFault(f"{self.place}: step returned reward {step.reward}, not a finite reward")
        self._reward += step.reward
        if step.tool_call is not None:
            turn.tool_call = _plain_call(step.tool_call)
        turn.more_calls = [_plain_call(call) for call in step.more_calls]
        turn.info = plain_json(step.info)
        turn.is_error = step.is_error
        if step.terminated or step.truncated:
            self._stop_reason = StopReason.TERMINATED if step.terminated else StopReason.ENVIRONMENT
            return None
        if not step.messages:
            raise EnvironmentFault(f"{self.place}: a step neither ended the episode nor returned an observation")
        if len(self._turns) >= self._max_turns:
            self._stop_reason = StopReason.MAX_TURNS
            return None
        messages = _plain(step.messages)
        observation_ids = self._renderer.observation_ids(messages)
        if len(self._completion_ids) + len(observation_ids) >= self._room:  # no room for a single token after it
            self._stop_reason = StopReason.MAX_TOKENS
            return None
        turn.observation = "\n".join(message["content"] for message in messages)
        self._append(observation_ids, [0.0] * len(observation_ids), sampled=False)
        return observation_ids

    def close(self) -> None:
        """End the episode's sessions, where it has some; an error of that is logged."""
        try:
            self._episode.close()
        except Exception:
            logger.warning("%s: its close failed", self.place, exc_info=True)

    def rollout(self, sample: int, policy_version: int) -> Rollout:
        """The finished episode as a rollout."""
        assert self._stop_reason is not None, f"{self.place}: the backend left the episode unfinished"
        num_actions = sum(self._loss_mask)
        trajectory = Trajectory(
            environment=self._environment_name,
            level=self._request.level,
            kind=self._episode.kind,
            seed=self._request.seed,
            prompt=next((m["content"] for m in reversed(self.messages) if m["role"] == "user"), ""),
            target=self._episode.target,
            turns=self._turns,
            answer=self._last.answer,
            success=bool(self._last.success),
            is_grounded=self._last.is_grounded,
            temperature=self._temperature,
            reward=self._reward,
            rewards={"task": self._reward},
            stop_reason=self._stop_reason,
            num_prompt_tokens=len(self.prompt_ids),
            num_completion_tokens=len(self._completion_ids),
            num_action_tokens=num_actions,
            mean_logprob=sum(self._logprobs) / num_actions,
            policy_version=policy_version,
            sample=sample,
            row=self._episode.row,
        )
        return Rollout(
            prompt_ids=self.prompt_ids,
            completion_ids=self._completion_ids,
            loss_mask=self._loss_mask,
            sampler_logprobs=self._logprobs,
            trajectory=trajectory,
            is_truncated=self._stop_reason is not StopReason.TERMINATED,
        )

    def _append(self, ids: list[int], logprobs: list[float], *, sampled: bool) -> None:
        self._completion_ids += ids
        self._logprobs += logprobs
        self._loss_mask += [sampled] * len(ids)

    def _guard(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Call into the environment; whatever it raises names the episode."""
        try:
            return function(*args, **kwargs)
        except SettingsError:  # an unknown level is for the user to correct
            raise
        except (Exception, SystemExit) as error:  # SystemExit: an environment must not end the run
            raise EnvironmentFault(f"{self.place}: {type(error).__name__}: {error}") from error


def _plain_call(call: ToolCall) -> ToolCall:
    return ToolCall(printable(call.name), plain_json(call.arguments))


def _plain(messages: Sequence[Message]) -> list[Message]:
    """The messages with texts that a tokenizer takes."""
    return [cast(Message, plain_json(message)) for message in messages]
