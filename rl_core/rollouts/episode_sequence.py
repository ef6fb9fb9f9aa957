"""One episode as a sequence of the rollout backend: sampled tokens become actions, observations become tokens."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from rl_core.data.chat import ChatRenderer
from rl_core.data.images import join_message_parts
from rl_core.data.model_text import convert_to_plain_json, replace_unprintable
from rl_core.environments.environment import Environment, Episode, Step
from rl_core.environments.failed_episodes import FailedEpisode, format_error_trace
from rl_core.environments.step_pool import (
    EnvironmentCall,
    Observation,
    PendingTurn,
    ReplacementContext,
    StepPool,
    TurnOutcome,
)
from rl_core.errors import DataError, EnvironmentFault, SettingsError
from rl_core.settings import SamplingSettings
from rl_core.timing import span
from rl_core.types import ImagePixels, Message, Rollout, StopReason, ToolCall, Trajectory, Turn
from rl_core.user_code.checks import USER_CODE_ERRORS

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EpisodeRequest:
    """One episode to play."""

    level: str
    seed: int


class Renderer(Protocol):
    """The part of `data.chat.ChatRenderer` that collection needs."""

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """Return token ids of the opening messages and the header of the first action."""

    def observation_ids(self, messages: Sequence[Message]) -> list[int]:
        """Return token ids to append after the policy's end-of-turn token, up to the header of its next action."""

    def action_text(self, ids: Sequence[int]) -> str:
        """Return the text of one sampled action."""


class EpisodeSequence:
    """A `RolloutSequence` over one episode: it turns sampled tokens into actions, and observations into tokens."""

    def __init__(
        self,
        environment: Environment,
        renderer: Renderer,
        request: EpisodeRequest,
        sampling: SamplingSettings,
        pool: StepPool | None,
        seed: int,
        sample: int,
        on_failure: Callable[[FailedEpisode], None],
    ) -> None:
        self.description = (
            f"environment '{environment.name}', level '{request.level}', seed {request.seed}"
        )
        self.seed = seed
        self.messages: list[Message] = []
        self.prompt_ids: list[int] = []
        self.images: list[ImagePixels] = []  # of prompt and observations, in order
        self._environment_name = environment.name
        self._knows_success = environment.knows_success
        self._renderer = renderer
        self._max_turns, self._token_budget = sampling.max_turns, sampling.max_completion_tokens
        self._temperature = sampling.temperature
        self._stop = sampling.stop
        self._pool = pool  # None = the environment is called on the caller's thread
        self._request = request
        self._sample = sample  # index within its group
        self._on_failure = on_failure
        self.has_failed = False
        self._turns: list[Turn] = []
        self._history: list[Message] = []  # messages so far, including the policy's
        self._completion_ids: list[int] = []
        self._context_starts: list[int] = []
        self._used_tokens = 0  # sampled and appended tokens, out of _token_budget
        self._loss_mask: list[bool] = []
        self._logprobs: list[float] = []
        self._reward = 0.0
        self._last_step = Step()
        self._stop_reason: StopReason | None = None
        self._episode: Episode | None = None
        self._reset_call: EnvironmentCall | None = None
        try:
            self._episode = self._call_environment(
                environment.episode, seed=request.seed, level=request.level
            )
        except EnvironmentFault as fault:
            self._record_failure(fault, "the environment's episode()")
        else:
            if pool:
                label = f"{self.description}: its reset"
                self._reset_call = pool.submit_call(
                    label, self._call_environment, self._episode.reset
                )

    @property
    def is_over(self) -> bool:
        """True if the episode has ended."""
        return self._stop_reason is not None

    def begin_episode(self, max_length: int) -> None:
        """Read the opening messages, which must leave some room in a context of `max_length` tokens."""
        if self._episode is None:
            return
        try:
            with span("environment"):
                messages = (
                    self._reset_call.wait_for_result()
                    if self._reset_call
                    else self._call_environment(self._episode.reset)
                )
                self.messages = self._call_environment(normalize_messages, messages)
            if not self.messages:
                raise EnvironmentFault(f"{self.description}: the episode began without a message")
        except EnvironmentFault as fault:
            self._record_failure(fault, "the environment's reset")
            return
        self._add_images(self.messages)
        self.prompt_ids = self._renderer.prompt_ids(self.messages)
        self._history = list(self.messages)
        self._token_budget = min(self._token_budget, max_length - len(self.prompt_ids))
        if self._token_budget < 1:
            raise DataError(
                f"{self.description}: a prompt of {len(self.prompt_ids)} tokens leaves no room in a context "
                f"of {max_length}"
            )

    def _add_images(self, messages: list[Message]) -> None:
        """Read the images of messages. Raises: DataError naming the episode."""
        if not any("images" in message for message in messages):
            return
        if not isinstance(self._renderer, ChatRenderer):
            raise DataError(
                f"{self.description}: its messages have images, and the renderer reads none"
            )
        try:
            self.images += self._renderer.read_images(messages)
        except DataError as error:
            raise DataError(f"{self.description}: {error}") from error

    def take_action(
        self, action_ids: list[int], logprobs: list[float], hit_limit: bool
    ) -> TurnOutcome:
        """Play one action; see `RolloutSequence`."""
        self._append_tokens(action_ids, logprobs, sampled=True)
        self._used_tokens += len(action_ids)
        text = self._renderer.action_text(action_ids)
        self._turns.append(Turn(action=text, num_tokens=len(action_ids)))
        assert self._episode is not None
        if hit_limit:  # the environment is not shown an incomplete action
            self._end_at_limit(StopReason.MAX_TOKENS)
            return None
        step = functools.partial(self._call_environment, self._episode.step, text)
        if self._pool is None:
            return self._take_step(functools.partial(_run_timed, step))
        return PendingTurn(
            self._pool.submit_call(f"{self.description}: a step", step), self._take_step
        )

    def should_stop(self, action_ids: list[int]) -> bool:
        """Return whether the newest token completes a stop text; see `RolloutSequence`."""
        # A token has at least one byte, a character at most four; decoding may strip the first bytes.
        newest = action_ids[-(4 * max(map(len, self._stop)) + 8) :]
        text = self._renderer.action_text(newest)
        return any(stop in text for stop in self._stop)

    def _take_step(self, result: Callable[[], Step]) -> Observation:
        """Return the observation of a finished step; None = the episode is over or has failed.

        Args:
            result: returns the step.
        """
        try:
            return self._observe_step(self._call_environment(normalize_step, result()))
        except EnvironmentFault as fault:
            self._record_failure(fault, f"step {len(self._turns)} of the environment")
            return None

    def _observe_step(self, step: Step) -> Observation:
        """Return the observation of a step; None = the episode is over."""
        if not math.isfinite(step.reward):
            raise EnvironmentFault(
                f"{self.description}: step returned reward {step.reward}, not a finite reward"
            )
        self._last_step, turn = step, self._turns[-1]
        self._reward += step.reward
        turn.tool_call, turn.is_error = step.tool_call, step.is_error
        turn.more_calls, turn.info = step.more_calls, step.info
        turn.reward, turn.state = step.reward, step.state
        if step.terminated or step.truncated:
            self._stop_reason = StopReason.TERMINATED if step.terminated else StopReason.ENVIRONMENT
            return None
        if not step.messages:
            raise EnvironmentFault(
                f"{self.description}: a step neither ended the episode nor returned an observation"
            )
        if len(self._turns) >= self._max_turns:
            self._end_at_limit(StopReason.MAX_TURNS)
            return None
        observation = self._build_continuation(step.messages)
        if observation is None:
            self._end_at_limit(StopReason.MAX_TOKENS)
            return None
        turn.observation = "\n".join(message["content"] for message in step.messages)
        ids = observation.ids if isinstance(observation, ReplacementContext) else observation
        self._add_images(step.messages)
        self._append_tokens(ids, [0.0] * len(ids), sampled=False)
        return observation

    def _end_at_limit(self, reason: StopReason) -> None:
        """End the episode at a limit of the sampler, with the reward that the environment gives for that."""
        assert self._episode is not None
        self._stop_reason = reason
        cut_reward = self._episode.cut_reward
        if cut_reward:
            self._reward += cut_reward
            self._turns[-1].reward += cut_reward

    def close(self) -> None:
        """Close the episode's sessions; log an error of that."""
        if self._episode is None:
            return
        try:
            self._episode.close()
        except Exception:
            logger.warning("%s: its close failed", self.description, exc_info=True)

    def _build_continuation(self, messages: list[Message]) -> Observation:
        """Return the tokens to append, or a context rendered from the whole history; None = no room for another
        token.
        """
        self._history += [{"role": "assistant", "content": self._turns[-1].action}, *messages]
        if not (
            isinstance(self._renderer, ChatRenderer)
            and self._renderer.needs_history_rewrite(messages)
        ):
            ids = self._renderer.observation_ids(messages)
        else:
            rendered = self._renderer.encode_history_prompt(self._history)
            context = self._collect_context_ids()
            if rendered[: len(context)] != context:
                limit = min(
                    len(rendered) + self._token_budget - self._used_tokens,
                    len(self.prompt_ids) + self._token_budget,
                )
                if len(rendered) >= limit:
                    return None
                self._context_starts.append(len(self._completion_ids))
                return ReplacementContext(rendered, limit)
            ids = rendered[len(context) :]
        self._used_tokens += len(ids)
        return ids if self._used_tokens < self._token_budget and self._has_room_for(ids) else None

    def _collect_context_ids(self) -> list[int]:
        """Return all tokens of the policy's current context."""
        if not self._context_starts:
            return [*self.prompt_ids, *self._completion_ids]
        return self._completion_ids[self._context_starts[-1] :]

    def _has_room_for(self, ids: list[int]) -> bool:
        """Return whether a later context has room for these tokens and one more."""
        return (
            not self._context_starts
            or len(self._collect_context_ids()) + len(ids)
            < len(self.prompt_ids) + self._token_budget
        )

    def build_rollout(self, policy_version: int) -> Rollout:
        """Build the rollout of the finished episode."""
        assert self._stop_reason is not None, (
            f"{self.description}: the backend left the episode unfinished"
        )
        return Rollout(
            prompt_ids=self.prompt_ids,
            completion_ids=self._completion_ids,
            loss_mask=self._loss_mask,
            sampler_logprobs=self._logprobs,
            trajectory=self._build_trajectory(policy_version),
            is_truncated=self._stop_reason is not StopReason.TERMINATED,
            context_starts=self._context_starts,
            messages=self.messages,
            images=self.images,
        )

    def _build_trajectory(self, policy_version: int = 0) -> Trajectory:
        episode, num_actions = self._episode, sum(self._loss_mask)
        return Trajectory(
            environment=self._environment_name,
            level=self._request.level,
            kind=episode.kind if episode is not None else "",
            seed=self._request.seed,
            prompt=next((m["content"] for m in reversed(self.messages) if m["role"] == "user"), ""),
            target=episode.target if episode is not None else "",
            turns=self._turns,
            answer=self._last_step.answer,
            success=bool(self._last_step.success) if self._knows_success else None,
            is_grounded=self._last_step.is_grounded,
            temperature=self._temperature,
            reward=self._reward,
            rewards={"task": self._reward},
            stop_reason=self._stop_reason if self._stop_reason is not None else StopReason.FAILED,
            num_prompt_tokens=len(self.prompt_ids),
            num_completion_tokens=len(self._completion_ids),
            num_action_tokens=num_actions,
            mean_logprob=sum(self._logprobs) / max(1, num_actions),
            policy_version=policy_version,
            sample=self._sample,
            row=episode.row if episode is not None else {},
        )

    def _record_failure(self, fault: EnvironmentFault, where: str) -> None:
        """Record that the environment failed, in `where`.

        Raises: EnvironmentFault if too many episodes have failed.
        """
        self.has_failed = True
        self._stop_reason = StopReason.FAILED
        error = str(fault).removeprefix(f"{self.description}: ")
        trace = format_error_trace(fault.__cause__) if fault.__cause__ is not None else ""
        self._on_failure(
            FailedEpisode(self._build_trajectory(), self.messages, where, error, trace)
        )

    def _append_tokens(self, ids: list[int], logprobs: list[float], *, sampled: bool) -> None:
        self._completion_ids += ids
        self._logprobs += logprobs
        self._loss_mask += [sampled] * len(ids)

    def _call_environment(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Call into the environment; name the episode in whatever it raises."""
        try:
            return function(*args, **kwargs)
        except SettingsError:  # an unknown level is for the user to correct
            raise
        except USER_CODE_ERRORS as error:  # an environment must not end the run
            raise EnvironmentFault(
                f"{self.description}: {type(error).__name__}: {error}"
            ) from error


def was_last_action_played(trajectory: Trajectory, cut_reward: float, answer: str | None) -> bool:
    """Return whether the environment was shown the last action of an episode.

    It was not if the limit of tokens cut the action off. If it was, and its observation did not fit, the step left a
    trace: a call, an error, values, a reward or an answer.

    Args:
        cut_reward: of the episode.
        answer: of the step before; None = there was none.
    """
    if trajectory.stop_reason != StopReason.MAX_TOKENS:
        return True
    turn = trajectory.turns[-1]
    has_trace = bool(turn.tool_call is not None or turn.is_error or turn.info)
    has_trace = has_trace or turn.state is not None or turn.reward != cut_reward
    return has_trace or trajectory.answer != answer


def compute_cut_reward(trajectory: Trajectory, episode: Episode) -> float:
    """Return what the environment gave because a limit of the sampler ended the episode; 0 = none did."""
    is_cut = trajectory.stop_reason in (StopReason.MAX_TOKENS, StopReason.MAX_TURNS)
    return episode.cut_reward if is_cut else 0.0


def _run_timed(step: Callable[[], Step]) -> Step:
    with span("environment"):
        return step()


def normalize_step(step: Step) -> Step:
    """Clean the texts of a step: an environment may return what the policy wrote (message, answer, call)."""
    if isinstance(step.answer, str):
        step.answer = replace_unprintable(step.answer)
    if step.tool_call is not None:
        step.tool_call = _normalize_call(step.tool_call)
    step.more_calls = [_normalize_call(call) for call in step.more_calls]
    if step.state is not None:
        if not isinstance(step.state, str):
            raise ValueError(f"state {step.state!r:.200} is no text; use str() of it, or None")
        step.state = replace_unprintable(step.state)
    step.info = convert_to_plain_json(step.info)
    step.messages = normalize_messages(step.messages)
    step.reward = float(step.reward)
    return step


def _normalize_call(call: ToolCall) -> ToolCall:
    return ToolCall(replace_unprintable(call.name), convert_to_plain_json(call.arguments))


def normalize_messages(messages: Sequence[Message]) -> list[Message]:
    """Convert messages to texts that a tokenizer accepts.

    Content parts become text with markers; an image may be a data URL, bytes or an image of Pillow.
    Raises: ValueError for a message without role or text, or an image that cannot be read.
    """
    normalized = []
    for message in messages:
        message = join_message_parts(message)
        if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
            raise ValueError(f"message {message!r:.200} has no role, or no text as its content")
        normalized.append(cast(Message, convert_to_plain_json(message)))
    return normalized
