"""Shared data types: messages, trajectories, rollouts and their groups, training batches.

Suffixes: P prompts, G rollouts per prompt, B = P*G rows, T completion tokens, S complete sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, NotRequired, TypedDict

from rl_core.errors import DataError, SettingsError

if TYPE_CHECKING:  # importing torch takes seconds, and many commands do not need it
    import torch


# Largest magnitude of a reward. Its square, summed over billions of tokens, is a finite float32; beyond it a step of
# the policy, the critic or the whitening silently becomes 0 or infinite.
REWARD_LIMIT = 1e12
# Metadata of a dataclass field that follows from the others; parts of a batch compute it again.
DERIVED_FIELD = {"is_derived": True}

# Compute dtype of matrix products; weights keep their dtype.
AutocastPrecision = Literal["none", "bfloat16"]


class Message(TypedDict):
    """Chat message; role is system, user, assistant or tool. The other fields are OpenAI's."""

    role: str
    content: str
    reasoning_content: NotRequired[str]  # reasoning of an assistant message
    # [{"type": "function", "id": ..., "function": {"name": ..., "arguments": {...}}}] of an assistant message
    tool_calls: NotRequired[list[dict[str, Any]]]
    tool_call_id: NotRequired[str]  # of a tool message: the call that it answers
    name: NotRequired[str]  # of a tool message: the tool
    weight: NotRequired[int]  # of an assistant message: 0 = no loss
    # data URLs of its images, in the order of the markers <image> in its content (`rl_core.data.images`)
    images: NotRequired[list[str]]


@dataclass(frozen=True, slots=True)
class ImagePixels:
    """Pixels of one image as the model reads them, and the file that they came from; equal if both are."""

    pixels_PD: torch.Tensor = field(compare=False, repr=False)  # float32, D values of each patch
    grid: tuple[int, int, int]  # frames, rows and columns of patches
    num_tokens: int  # that stand for the image in a prompt
    digest: str  # SHA-256 of the pixels and the grid
    source: str = field(repr=False)  # data URL


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages that a chat answer replied to, as passed to the chat template."""

    messages: list[Message]
    tools: list[dict[str, Any]] = field(default_factory=list)  # schemas passed to the template


class StopReason(StrEnum):
    """Reason why a rollout ended."""

    TERMINATED = "terminated"  # the environment ended the episode
    MAX_TURNS = "max_turns"  # the turn limit was reached
    MAX_TOKENS = "max_tokens"  # max_completion_tokens or the context was reached
    ENVIRONMENT = "environment"  # the environment truncated the episode
    FAILED = "failed"  # the environment raised, hung or violated its protocol


@dataclass(slots=True)
class ToolCall:
    """Parsed tool call, as in {"name": ..., "arguments": {...}}."""

    name: str
    arguments: dict[str, Any]


_OPTIONAL_TURN_FIELDS: dict[str, Any] = {
    "more_calls": [],
    "info": {},
    "reward": 0.0,
    "state": None,
    "is_trained": True,
}


@dataclass(slots=True)
class Turn:
    """Action of the policy and the environment's observation."""

    action: str  # text written by the policy, without its end-of-turn token
    tool_call: ToolCall | None = None  # None = an answer, or text that is not a valid call
    observation: str | None = None  # None = the episode ended here
    is_error: bool = False  # misuse: the action did not parse, named no tool, or the tool failed
    num_tokens: int = 0  # sampled by the policy in this turn, including its end-of-turn token
    more_calls: list[ToolCall] = field(default_factory=list)  # calls after `tool_call`
    info: dict[str, Any] = field(default_factory=dict)  # `Step.info` of this step
    reward: float = 0.0  # the environment's, of this step; those of all turns sum to the episode's
    # Key of the state after the step (`Step.state`); None = the text of the observation is it.
    state: str | None = None
    is_trained: bool = True  # False = its tokens carry no loss: an agent drew them in another way

    @property
    def calls(self) -> list[ToolCall]:
        """All calls of the turn, in order."""
        return [*([self.tool_call] if self.tool_call is not None else []), *self.more_calls]

    def to_json(self) -> dict[str, Any]:
        """Return a plain dict; further fields are left out where they have their defaults."""
        fields = asdict(self)
        for name, default in _OPTIONAL_TURN_FIELDS.items():
            if fields[name] == default:
                del fields[name]
        return fields

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> Turn:
        """Parse the output of `to_json`."""
        fields = dict(row)
        fields["tool_call"] = ToolCall(**row["tool_call"]) if row.get("tool_call") else None
        fields["more_calls"] = [ToolCall(**call) for call in row.get("more_calls", ())]
        return cls(**fields)


@dataclass(slots=True)
class Trajectory:
    """Multi-turn record of one episode, stored for analysis. One line of trajectories.jsonl."""

    environment: str
    level: str
    kind: str  # kind of question within the environment
    seed: int  # episode seed: (environment, level, seed) determines the episode
    prompt: str  # the last user message
    target: str  # the correct answer, as text; "" = none
    turns: list[Turn] = field(default_factory=list)
    answer: str | None = None  # the policy's final answer, if any
    success: bool | None = (
        False  # None = nothing tells it: the environment has no notion of success
    )
    # Total reward: the environment's until the rollout is scored for training, then the one that training uses.
    # Set when the trajectory is created and by `rewards.orchestrator`, nowhere else.
    reward: float = 0.0
    # Raw components by name; once scored also 'weighted/<name>', the contribution of each to the total.
    rewards: dict[str, float] = field(default_factory=dict)
    stop_reason: str = StopReason.TERMINATED
    num_prompt_tokens: int = 0
    num_completion_tokens: int = 0  # sampled and observed tokens after the prompt
    num_action_tokens: int = 0  # sampled tokens only
    mean_logprob: float = 0.0  # of the sampled tokens, nats; see `Rollout.sampler_logprobs`
    policy_version: int = 0
    sample: int = 0  # index within the group of rollouts of one prompt
    is_grounded: bool | None = None  # the answer follows from the observations; None = unknown
    temperature: float = 1.0  # of sampling; 0 = greedy
    row: dict[str, Any] = field(default_factory=dict)  # columns of the episode's data row, if any

    @property
    def info(self) -> dict[str, Any]:
        """Values reported by the environment over all turns; the last one of each name."""
        return {name: value for turn in self.turns for name, value in turn.info.items()}

    @property
    def completion(self) -> str:
        """Text written by the policy, one line per turn; the answer of a single-turn task, even if it was truncated."""
        return "\n".join(turn.action for turn in self.turns)

    def to_json(self) -> dict[str, Any]:
        """Return a plain dict as written to trajectories.jsonl; an empty `row` is left out."""
        fields = asdict(self)
        fields["turns"] = [turn.to_json() for turn in self.turns]
        if not fields["row"]:
            del fields["row"]
        return fields

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> Trajectory:
        """Parse the output of `to_json`."""
        return cls(**{**row, "turns": [Turn.from_json(turn) for turn in row["turns"]]})


@dataclass(slots=True)
class Rollout:
    """Sampled episode. Token ids are stored as sampled: they are never re-tokenised.

    An episode whose history is rendered again (`model.history_thoughts: template`), or whose agent has several
    conversations, has several contexts: at each of `context_starts` begins another prompt, in which earlier turns
    appear as the chat template writes them; the tokens after it follow from that prompt alone.
    """

    prompt_ids: list[int]  # [prompt tokens]
    completion_ids: list[int]  # [T] sampled tokens and observations after the prompt, in order
    loss_mask: list[bool]  # [T] True = sampled by the policy, including end-of-turn tokens
    # [T] nats, log softmax(logits / temperature) of the sampling policy (with penalties and only over the remaining
    # tokens if evaluation restricts its sampling); 0.0 at observations. Greedy tokens (temperature 0) have no such
    # distribution: theirs are at temperature 1.
    sampler_logprobs: list[float]
    trajectory: Trajectory
    is_truncated: bool = False  # ended by a limit, not by the environment
    is_masked: bool = False  # no reward could be computed, so it carries no loss
    context_starts: list[int] = field(default_factory=list)  # ascending indices of completion_ids
    # (sampled tokens before it, policy version) of asynchronous rollouts, ascending; [] = one version for all tokens
    version_starts: list[tuple[int, int]] = field(default_factory=list)
    # before the first action, as rendered into prompt_ids; [] = unknown (an agent's episodes, recorded ones)
    messages: list[Message] = field(default_factory=list)
    # (index of its last token in completion_ids, score) of each step, set by the reward `process`
    step_scores: list[tuple[int, float]] = field(default_factory=list)
    # of prompt and observations, in the order of their tokens: the very pixels that the sampler read
    images: list[ImagePixels] = field(default_factory=list)

    @property
    def temperature(self) -> float:
        """Temperature of sampling; 0 = greedy."""
        return self.trajectory.temperature

    @property
    def reward(self) -> float:
        """Total reward, stored in the trajectory."""
        return self.trajectory.reward

    @property
    def success(self) -> bool | None:
        """Success as judged by the environment; None = it judges none."""
        return self.trajectory.success

    @property
    def num_episode_tokens(self) -> int:
        """Number of tokens after the prompt, without the prompts of later contexts; sampling's limit applies to it."""
        num_repeated = 0
        for start in self.context_starts:
            if True in self.loss_mask[start:]:
                num_repeated += self.loss_mask.index(True, start) - start
        return len(self.completion_ids) - num_repeated

    def list_turn_tokens(self) -> list[range]:
        """Return the tokens of each turn's action, as indices of the completion; empty for a turn without loss.

        Raises: DataError if the sampled tokens are not those of the turns.
        """
        turns = self.trajectory.turns
        sampled = [index for index, counts in enumerate(self.loss_mask) if counts]
        if len(sampled) != sum(turn.num_tokens for turn in turns if turn.is_trained):
            raise DataError(
                f"an episode of {self.trajectory.environment} has {len(sampled)} sampled tokens, but its turns do not "
                "sum to them; it was recorded without the tokens of each turn"
            )
        num_used = 0
        tokens: list[range] = []
        for turn in turns:
            start = stop = 0
            if turn.is_trained and turn.num_tokens:
                start, stop = sampled[num_used], sampled[num_used + turn.num_tokens - 1] + 1
                num_used += turn.num_tokens
            tokens.append(range(start, stop))
        return tokens

    @property
    def positions(self) -> list[int]:
        """Position of each token, including the prompt, within its context."""
        num_prompt, num_completion = len(self.prompt_ids), len(self.completion_ids)
        return compute_context_positions(num_prompt, num_completion, self.context_starts)

    def check_one_context(self, purpose: str) -> None:
        """Raise SettingsError if the rollout has several contexts, because `purpose` needs one sequence of tokens."""
        if self.context_starts:
            raise SettingsError(
                f"model.history_thoughts: {purpose} takes one sequence of tokens an episode, and this one has several "
                "contexts: the chat template renders earlier turns again (set it to keep), or an agent began further "
                "conversations"
            )

    @property
    def last_context(self) -> list[int]:
        """Token ids of the context in which the episode ended; the complete sequence if there is only one."""
        if not self.context_starts:
            return [*self.prompt_ids, *self.completion_ids]
        return self.completion_ids[self.context_starts[-1] :]


def compute_context_positions(
    num_prompt: int, num_completion: int, starts: Sequence[int]
) -> list[int]:
    """Return the position of each token within its context.

    Contexts begin at 0 and at the indices `starts` of the completion.
    """
    edges = [0, *(num_prompt + start for start in starts), num_prompt + num_completion]
    return [position for begin, end in pairwise(edges) for position in range(end - begin)]


@dataclass(slots=True)
class RolloutGroup:
    """The G rollouts of one prompt."""

    rollouts: list[Rollout]  # [G]
    # [G], set by the trainer after its update; None = values were used instead
    advantages: list[float] | None = None

    @property
    def rewards(self) -> list[float]:
        """[G] rewards."""
        return [rollout.reward for rollout in self.rollouts]


@dataclass(frozen=True, slots=True)
class SequenceBounds:
    """Starts of the sequences of packed rows in the flat batch, and the length of the longest."""

    starts_N: torch.Tensor  # int32 [N + 1], ascending; the last one is the number of tokens
    longest: int

    def to(self, device: torch.device) -> SequenceBounds:
        """Return the same bounds on another device."""
        return SequenceBounds(self.starts_N.to(device, non_blocking=True), self.longest)


@dataclass(slots=True)
class TrainBatch:
    """Padded micro-batch. Rows are left-aligned: prompt, completion, padding on the right.

    A packed row holds several concatenated sequences, separated by `position_ids_BS`.
    """

    input_ids_BS: torch.Tensor  # int64 [B, S], prompt then completion, right-padded
    attention_mask_BS: torch.Tensor  # bool [B, S], True = real token
    loss_mask_BS: torch.Tensor  # bool [B, S], True = token carries loss; position 0 is never True
    # float32 [B, S], nats, log p(token s | tokens < s) of the policy that sampled; 0 where loss_mask is False
    sampler_logprobs_BS: torch.Tensor | None = None
    # int64 [B, S], only for packed rows: 0 starts a sequence, which attends only to itself
    position_ids_BS: torch.Tensor | None = None
    rows: list[int] = field(default_factory=list)  # [B] index of each row in its source; [] packed
    # float32 [B, S] above 0: log-probs and entropies are those of softmax(logits / temperature); None = 1
    temperatures_BS: torch.Tensor | None = None
    # images of each row, in the order of their tokens; [] = no row has one
    images: list[tuple[ImagePixels, ...]] = field(default_factory=list)
    # int64 [N], flat positions of the tokens that carry loss in a batch without a problem; set by `to` on the host,
    # as finding them on an accelerator stops the host. None = unknown
    loss_positions_N: torch.Tensor | None = field(default=None, metadata=DERIVED_FIELD)
    # of packed rows on an accelerator, set by `to`
    sequence_bounds: SequenceBounds | None = field(default=None, metadata=DERIVED_FIELD)

    @property
    def num_loss_tokens(self) -> int:
        """Number of tokens that carry loss."""
        if self.loss_positions_N is not None:
            return len(self.loss_positions_N)
        return int(self.loss_mask_BS.sum())

    def find_problem(self) -> str | None:
        """Return why the masked tokens have no log-probabilities; None = they have. Reads the tensors on the host."""
        ids_BS, mask_BS, temperatures_BS = (
            self.input_ids_BS,
            self.loss_mask_BS,
            self.temperatures_BS,
        )
        if ids_BS.ndim != 2 or mask_BS.shape != ids_BS.shape:
            return f"input_ids {tuple(ids_BS.shape)} and loss_mask {tuple(mask_BS.shape)} must be equal [B, S]"
        if bool(mask_BS[:, 0].any()):
            return "loss_mask is True at position 0, which has no token before it"
        if self.position_ids_BS is not None and bool((mask_BS & (self.position_ids_BS == 0)).any()):
            return "loss_mask is True at the first token of a packed sequence, which has no token before it"
        if temperatures_BS is None:
            return None
        if temperatures_BS.shape != ids_BS.shape:
            return f"temperatures {tuple(temperatures_BS.shape)} must be {tuple(ids_BS.shape)}"
        if bool((mask_BS & ~(temperatures_BS > 0)).any()):
            return "temperatures must be above 0 for tokens that carry loss"
        return None

    def find_loss_positions(self) -> torch.Tensor:
        """Return the flat positions [N] of the tokens that carry loss."""
        if self.loss_positions_N is not None:
            return self.loss_positions_N
        return self.loss_mask_BS.reshape(-1).nonzero().squeeze(1)

    def find_sequence_bounds(self) -> SequenceBounds | None:
        """Return where the sequences of packed rows begin, on the host; None for rows of one sequence.

        Padding behind the last sequence of a row is one more sequence.
        """
        positions_BS, real_BS = self.position_ids_BS, self.attention_mask_BS
        if positions_BS is None:
            return None
        begins_BS = real_BS & (positions_BS == 0)
        begins_BS[:, 1:] |= real_BS[:, :-1] & ~real_BS[:, 1:]
        begins_BS[:, 0] = True
        starts_N = begins_BS.reshape(-1).nonzero().squeeze(1)
        edges = [*starts_N.tolist(), real_BS.numel()]
        return SequenceBounds(
            starts_N.new_tensor(edges).int(), max(stop - start for start, stop in pairwise(edges))
        )

    def to(self, device: torch.device | str) -> TrainBatch:
        """Return the same batch on another device; from the host to an accelerator, check it and find its tokens."""
        tensors: dict[str, Any] = {}
        for name in self.__slots__:
            tensor = getattr(self, name)
            if name not in ("rows", "images", "sequence_bounds") and tensor is not None:
                tensors[name] = tensor.to(device, non_blocking=True)
        moved = TrainBatch(**tensors, rows=self.rows, images=self.images)
        is_upload = self.loss_mask_BS.device.type == "cpu" != moved.loss_mask_BS.device.type
        if is_upload and self.find_problem() is None:
            positions_N = self.find_loss_positions()
            moved.loss_positions_N = positions_N.to(moved.loss_mask_BS.device, non_blocking=True)
        if is_upload and (bounds := self.find_sequence_bounds()) is not None:
            moved.sequence_bounds = bounds.to(moved.loss_mask_BS.device)
        return moved
