"""Shared data types: messages, trajectories, rollouts and their groups, training batches.

Suffixes: P prompts, G rollouts per prompt, B = P*G rows, T completion tokens, S whole sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

from rl_core.errors import SettingsError

if TYPE_CHECKING:  # it takes seconds to import, and commands that only look things up do without
    import torch


class Message(TypedDict):
    """One chat message; role is system, user, assistant or tool. The other fields are OpenAI's."""

    role: str
    content: str
    reasoning_content: NotRequired[str]  # thought of an assistant message
    # [{"type": "function", "id": ..., "function": {"name": ..., "arguments": {...}}}] of an assistant message
    tool_calls: NotRequired[list[dict[str, Any]]]
    tool_call_id: NotRequired[str]  # of a tool message: the call that it answers
    name: NotRequired[str]  # of a tool message: the tool
    weight: NotRequired[int]  # of an assistant message: 0 = no loss


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages that a chat answer replied to, as the chat template was given them."""

    messages: list[Message]
    # schemas that the template described; [] = none
    tools: list[dict[str, Any]] = field(default_factory=list)


class StopReason(StrEnum):
    """Reason for which a rollout ended."""

    TERMINATED = "terminated"  # the environment said that the episode is over
    MAX_TURNS = "max_turns"  # the turn limit was reached
    MAX_TOKENS = "max_tokens"  # max_completion_tokens or the context was reached
    ENVIRONMENT = "environment"  # the environment truncated the episode
    FAILED = "failed"  # the environment raised, hung or broke its protocol


@dataclass(slots=True)
class ToolCall:
    """A parsed tool call, as in {"name": ..., "arguments": {...}}."""

    name: str
    arguments: dict[str, Any]


@dataclass(slots=True)
class Turn:
    """One action of the policy and the environment's observation."""

    action: str  # the text that the policy wrote, without its end-of-turn token
    tool_call: ToolCall | None = None  # None = an answer, or text that parses as no call
    observation: str | None = None  # None = the episode ended here
    is_error: bool = (
        False  # True = misuse: the action did not parse, named no tool, or the tool failed
    )
    num_tokens: int = (
        0  # tokens that the policy sampled in this turn, its end-of-turn token included
    )
    # calls after `tool_call`, of a turn with several
    more_calls: list[ToolCall] = field(default_factory=list)
    # what the environment told of this step (`Step.info`)
    info: dict[str, Any] = field(default_factory=dict)

    @property
    def calls(self) -> list[ToolCall]:
        """All calls of the turn, in order."""
        return [*([self.tool_call] if self.tool_call is not None else []), *self.more_calls]

    def to_json(self) -> dict[str, Any]:
        """A plain dict; empty `more_calls` and `info` are left out."""
        plain = asdict(self)
        return {
            name: value
            for name, value in plain.items()
            if value or name not in ("more_calls", "info")
        }

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> Turn:
        """Inverse of `to_json`."""
        call = ToolCall(**row["tool_call"]) if row.get("tool_call") else None
        return cls(
            **{
                **row,
                "tool_call": call,
                "more_calls": [ToolCall(**c) for c in row.get("more_calls", ())],
            }
        )


@dataclass(slots=True)
class Trajectory:
    """The multi-turn record of one episode, kept for analysis. One line of trajectories.jsonl."""

    environment: str
    level: str
    kind: str  # kind of question within the environment
    seed: int  # episode seed: (environment, level, seed) determines the episode
    prompt: str  # the last user message
    target: str  # the correct answer, as text; "" = none
    turns: list[Turn] = field(default_factory=list)
    answer: str | None = None  # the policy's final answer; None = it gave none
    success: bool = False
    # Total reward: the environment's until the rollout is scored for training, then the one that training uses.
    # Set when the trajectory is made and by `rewards.orchestrator`, nowhere else
    reward: float = 0.0
    # raw components by name; once scored also 'weighted/<name>', the contribution of each to the total
    rewards: dict[str, float] = field(default_factory=dict)
    stop_reason: str = StopReason.TERMINATED
    num_prompt_tokens: int = 0
    num_completion_tokens: int = 0  # sampled and observed tokens after the prompt
    num_action_tokens: int = 0  # sampled tokens only
    mean_logprob: float = 0.0  # of the sampled tokens, nats; see `Rollout.sampler_logprobs`
    policy_version: int = 0
    sample: int = 0  # index within the group of rollouts of one prompt
    is_grounded: bool | None = (
        None  # the answer follows from what was observed; None = the environment cannot tell
    )
    temperature: float = 1.0  # at which its tokens were drawn; 0 = greedy
    # columns of the data row behind the episode; {} = it has none
    row: dict[str, Any] = field(default_factory=dict)

    @property
    def info(self) -> dict[str, Any]:
        """Values that the environment told over all turns; of one name the last."""
        return {name: value for turn in self.turns for name, value in turn.info.items()}

    @property
    def completion(self) -> str:
        """Text written by the policy, one line a turn; the answer of a single-turn task, also if it was cut off."""
        return "\n".join(turn.action for turn in self.turns)

    def to_json(self) -> dict[str, Any]:
        """A plain dict, as written to trajectories.jsonl; an empty `row` is left out."""
        plain = asdict(self)
        plain["turns"] = [turn.to_json() for turn in self.turns]
        if not plain["row"]:
            del plain["row"]
        return plain

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> Trajectory:
        """Inverse of `to_json`."""
        return cls(**{**row, "turns": [Turn.from_json(turn) for turn in row["turns"]]})


@dataclass(slots=True)
class Rollout:
    """One sampled episode. Token ids are kept as sampled: they are never re-tokenised.

    An episode whose history is rendered anew (`model.history_thoughts: template`) has several contexts: at each of
    `context_starts` begins a prompt of its own, in which earlier turns stand as the chat template writes them; the
    tokens after it follow from that prompt alone.
    """

    prompt_ids: list[int]  # [prompt tokens]
    # [T] every token after the prompt: sampled ones and observations, in order
    completion_ids: list[int]
    # [T] True = the policy sampled this token (its end-of-turn tokens included)
    loss_mask: list[bool]
    # [T] nats, log softmax(logits / temperature) of the sampling policy (penalised, over kept tokens alone, where
    # evaluation restricts its sampling); 0.0 at observations. Greedy tokens (temperature 0) have no such
    # distribution: theirs are at temperature 1
    sampler_logprobs: list[float]
    trajectory: Trajectory
    is_truncated: bool = False  # True = cut by a limit, not ended by the environment
    is_masked: bool = False  # True = no reward could be computed: it carries no loss
    # indices into completion_ids, rising; [] = one context
    context_starts: list[int] = field(default_factory=list)
    # (sampled tokens before it, policy version) of asynchronous rollouts, rising; [] = one version for all tokens
    version_starts: list[tuple[int, int]] = field(default_factory=list)

    @property
    def temperature(self) -> float:
        """Temperature at which its tokens were drawn; 0 = greedy."""
        return self.trajectory.temperature

    @property
    def reward(self) -> float:
        """Total reward, kept in the trajectory."""
        return self.trajectory.reward

    @property
    def success(self) -> bool:
        """Success as judged by the environment."""
        return self.trajectory.success

    @property
    def num_episode_tokens(self) -> int:
        """Tokens after the prompt, without the prompts of later contexts: those that sampling's limit counts."""
        repeated = 0
        for start in self.context_starts:
            repeated += (
                self.loss_mask.index(True, start) - start if True in self.loss_mask[start:] else 0
            )
        return len(self.completion_ids) - repeated

    @property
    def positions(self) -> list[int]:
        """Position of each token, prompt included, within its context."""
        return compute_context_positions(
            len(self.prompt_ids), len(self.completion_ids), self.context_starts
        )

    def check_one_context(self, purpose: str) -> None:
        """Raise SettingsError where a `purpose` that reads one sequence of tokens is given several contexts."""
        if self.context_starts:
            raise SettingsError(
                f"model.history_thoughts: {purpose} takes one sequence of tokens an episode, and this chat template "
                "renders earlier turns anew; set it to keep"
            )

    @property
    def last_context(self) -> list[int]:
        """Token ids of the context in which the episode ended: the whole sequence, where it has no other."""
        if not self.context_starts:
            return [*self.prompt_ids, *self.completion_ids]
        return self.completion_ids[self.context_starts[-1] :]


def compute_context_positions(
    num_prompt: int, num_completion: int, starts: Sequence[int]
) -> list[int]:
    """Position of each token within its context; contexts begin at 0 and at these indices of the completion."""
    edges = [0, *(num_prompt + start for start in starts), num_prompt + num_completion]
    return [position for begin, end in pairwise(edges) for position in range(end - begin)]


@dataclass(slots=True)
class RolloutGroup:
    """The G rollouts of one prompt."""

    rollouts: list[Rollout]  # [G]
    advantages: list[float] | None = (
        None  # [G], set by the trainer after its update; None = values were used instead
    )

    @property
    def rewards(self) -> list[float]:
        """[G] rewards."""
        return [rollout.reward for rollout in self.rollouts]


@dataclass(slots=True)
class TrainBatch:
    """One padded micro-batch. Rows are left-aligned: prompt, completion, padding on the right.

    A packed row holds several sequences one after the other, separated by `position_ids_BS`.
    """

    input_ids_BS: torch.Tensor  # int64 [B, S], prompt then completion, right-padded
    attention_mask_BS: torch.Tensor  # bool [B, S], True = real token
    loss_mask_BS: torch.Tensor  # bool [B, S], True = token carries loss; position 0 is never True
    # float32 [B, S], nats, log p(token s | tokens < s) of the policy that sampled; 0 where loss_mask is False
    sampler_logprobs_BS: torch.Tensor | None = None
    # int64 [B, S], only where rows hold several sequences: 0 begins a sequence, which attends to itself alone
    position_ids_BS: torch.Tensor | None = None
    # [B] index of each row in the list that it was made from; [] packed
    rows: list[int] = field(default_factory=list)
    # float32 [B, S] above 0: log-probs and entropies are those of softmax(logits / temperature); None = 1 everywhere
    temperatures_BS: torch.Tensor | None = None

    @property
    def num_loss_tokens(self) -> int:
        """Number of tokens that carry loss."""
        return int(self.loss_mask_BS.sum())

    def to(self, device: torch.device | str) -> TrainBatch:
        """The same batch on another device."""
        moved: dict[str, Any] = {
            name: getattr(self, name).to(device, non_blocking=True)
            if getattr(self, name) is not None
            else None
            for name in self.__slots__
            if name != "rows"
        }
        return TrainBatch(**moved, rows=self.rows)
