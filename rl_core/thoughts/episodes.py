r"""Episodes split into thoughts and answers, log-likelihoods of the correct answers, and the gain of a thought.

A turn is a thought and, on its last line, an answer; the thought may be empty:

    history | 7 0 8 \n | answer 8 <end> | +2 -9 ... | ...
            start      end              stop

The environment provides the correct answer (`Episode.next_target` before each turn). The word `answer` itself requires
no knowledge of it, so only the tokens after the word are scored. Token ids are those that were sampled.

Suffix: N questions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import torch

from rl_core.capabilities import check_prefix_sharing
from rl_core.environments.environment import Environment
from rl_core.environments.question_episodes import ANSWER_WORD, read_answer
from rl_core.errors import DataError, EnvironmentFault, SettingsError
from rl_core.losses.masking import check_finite
from rl_core.models.causal_lm import use_eval_mode
from rl_core.models.logprobs import completion_logprobs
from rl_core.out_of_memory import MemoryFit
from rl_core.rollouts.batching import TrainRow, build_batches
from rl_core.rollouts.episode_sequence import Renderer
from rl_core.types import Rollout, StopReason, TrainBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


GainKind = Literal["logprob_gain", "correctness_gain"]


def compute_thought_gain(
    with_thought_N: torch.Tensor,
    without_N: torch.Tensor,
    *,
    kind: GainKind = "logprob_gain",
    clip: float = 3.0,
) -> torch.Tensor:
    """Compute the gain of each thought over no thought, clipped to +-clip.

    logprob_gain:      log p(answer | history, thought) - log p(answer | history), nats, of the correct answer.
    correctness_gain:  p(answer | history, thought) - p(answer | history): the expected correctness of a sampled
                       answer, without the noise of sampling one.

    Args:
        with_thought_N, without_N: float [N], nats, log-probability of the whole correct answer.
    Returns: float [N], no gradient.
    Raises: DataError on shapes, non-finite or positive log-probabilities, an unknown kind, or a clip of 0.
    Source: Zelikman et al. 2024, arXiv:2403.09629, eq. 2 (log-probability, against the mean over thoughts there).
    """
    if with_thought_N.shape != without_N.shape or with_thought_N.ndim != 1:
        raise DataError(
            f"with_thought {tuple(with_thought_N.shape)} and without {tuple(without_N.shape)} must be [N]"
        )
    if clip <= 0 or kind not in ("logprob_gain", "correctness_gain"):
        raise DataError(
            f"kind '{kind}' must be logprob_gain or correctness_gain, clip {clip} above 0"
        )
    check_finite(with_thought=with_thought_N, without=without_N)
    with_N, without_N = with_thought_N.detach(), without_N.detach()
    if bool((with_N > 1e-4).any()) or bool((without_N > 1e-4).any()):  # rounding may exceed 0
        raise DataError("a log-probability is above 0")
    gain_N = with_N - without_N if kind == "logprob_gain" else with_N.exp() - without_N.exp()
    return gain_N.clamp(-clip, clip)


class ThoughtRenderer(Renderer, Protocol):
    """The part of `data.chat.ChatRenderer` that thoughts need, besides that of collection."""

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Tokens that end a turn."""

    def action_ids(self, text: str) -> list[int]:
        """Return the token ids of one action and its end of turn."""


@dataclass(slots=True)
class ThoughtStep:
    """One turn of an episode; positions are token indices within the episode."""

    start: int  # first token of the turn
    end: int  # first token of the answer; the thought is [start, end)
    stop: int  # one past the turn's last token
    target_ids: list[int]  # the correct answer as a turn: word, answer, end of turn
    scored_from: int  # index in target_ids of the first scored token, after the word `answer`
    answered: (
        bool  # False = no answer, or a thought beyond the limit; [start, end) is the whole turn
    )

    @property
    def num_thought_tokens(self) -> int:
        """Tokens of the thought; 0 = answered without one, or not answered."""
        return self.end - self.start if self.answered else 0

    @property
    def thought_positions(self) -> range:
        """Positions that get the thought's advantage: its tokens and the one that ends it."""
        return range(self.start, self.end + 1) if self.answered else range(self.start, self.stop)


@dataclass(slots=True)
class ThoughtEpisode:
    """One episode as a row of tokens, with its turns."""

    ids: list[int]  # prompt and completion, as sampled
    steps: list[ThoughtStep]
    level: str
    # True = truncated by its environment: bootstrapped from the baseline. Limits of sampling terminate an episode.
    is_truncated: bool


class ThoughtReader:
    """Splitter of turns into thought and answer, and tokeniser of correct answers."""

    def __init__(self, renderer: ThoughtRenderer, *, max_thought_tokens: int = 2**20) -> None:
        if getattr(renderer, "opened_thought", ""):
            raise SettingsError(
                "thoughts: the model's chat template opens its own thought before every action, which this trainer "
                "would count as part of the answer; train it with stages.policy, or set model.chat_template to a "
                "template that opens none"
            )
        self._renderer = renderer
        self._max_thought_tokens = max_thought_tokens
        self._word_ids = renderer.action_ids(ANSWER_WORD)[:-1]
        self._targets: dict[str, tuple[list[int], int]] = {}

    def encode_target(self, target: str) -> tuple[list[int], int]:
        """Return the correct answer as token ids of a turn without a thought, and how many of them are the word
        `answer`.

        Raises: DataError without a correct answer to score.
        """
        if target not in self._targets:
            if not target.strip():
                raise DataError(
                    "an episode without a correct answer (Episode.next_target) cannot reward thoughts"
                )
            ids = self._renderer.action_ids(f"{ANSWER_WORD} {target}")
            num_word_ids = 0
            for token_id, word_id in zip(ids, self._word_ids, strict=False):
                if token_id != word_id:
                    break
                num_word_ids += 1
            self._targets[target] = ids, num_word_ids
        return self._targets[target]

    def split_thought(self, action_ids: Sequence[int]) -> int | None:
        """Return the number of tokens before the answer; None without an answer that starts at a token boundary."""
        if not action_ids or action_ids[-1] not in self._renderer.eos_ids:
            return None
        text = self._renderer.action_text(action_ids)
        if not read_answer(text):
            return None
        answer_start = text.rindex(text.rstrip().splitlines()[-1].lstrip())
        length, thought = 0, self._renderer.action_text(action_ids[:0])
        while length < len(action_ids) and len(thought) < answer_start:
            length += 1
            thought = self._renderer.action_text(action_ids[:length])
        is_aligned = thought == text[:answer_start]
        return length if is_aligned and length <= self._max_thought_tokens else None

    def count_separator_tokens(self, thought_ids: Sequence[int]) -> int:
        """Count the blank tokens at the end of a thought, which separate it from the answer."""
        for count in range(len(thought_ids)):
            if self._renderer.action_text(thought_ids[-count - 1 :]).strip():
                return count
        return len(thought_ids)


def read_thought_episode(
    environment: Environment, reader: ThoughtReader, rollout: Rollout
) -> ThoughtEpisode:
    """Read the thoughts of one rollout. The episode is replayed action by action to obtain each turn's correct answer.

    Raises: EnvironmentFault if the replay ends earlier; DataError for a turn without a correct answer; SettingsError
        for an episode of several contexts.
    """
    rollout.check_one_context("the training of thoughts")
    trajectory = rollout.trajectory
    episode = environment.episode(seed=trajectory.seed, level=trajectory.level)
    episode.reset()
    steps: list[ThoughtStep] = []
    offset, start = len(rollout.prompt_ids), 0
    has_ended = False
    for index, turn in enumerate(trajectory.turns):
        if has_ended:
            raise EnvironmentFault(
                f"episode {trajectory.level}/{trajectory.seed} ended earlier when it was replayed"
            )
        while not rollout.loss_mask[start]:  # observation
            start += 1
        stop = start + turn.num_tokens
        target_ids, scored_from = reader.encode_target(episode.next_target)
        num_thought_tokens = reader.split_thought(rollout.completion_ids[start:stop])
        end = stop if num_thought_tokens is None else start + num_thought_tokens
        steps.append(
            ThoughtStep(
                offset + start,
                offset + end,
                offset + stop,
                target_ids,
                scored_from,
                num_thought_tokens is not None,
            )
        )
        start = stop
        if index < len(trajectory.turns) - 1:
            step = episode.step(turn.action)
            has_ended = step.terminated or step.truncated
    return ThoughtEpisode(
        ids=[*rollout.prompt_ids, *rollout.completion_ids],
        steps=steps,
        level=trajectory.level,
        is_truncated=trajectory.stop_reason == StopReason.ENVIRONMENT,
    )


class TokenSpan(NamedTuple):
    """Tokens [start, stop) of one row."""

    row: int
    start: int
    stop: int


@dataclass(slots=True)
class AnswerRows:
    """Token rows in which correct answers are scored: first the episodes, then rows that they do not contain."""

    rows: list[list[int]]
    # (episode, turn) of each answered turn, and the spans of its correct answer, equal if the thought is empty.
    steps: list[tuple[int, int]] = field(default_factory=list)
    with_thought: list[TokenSpan] = field(default_factory=list)
    without: list[TokenSpan] = field(default_factory=list)


def build_answer_rows(episodes: Sequence[ThoughtEpisode]) -> AnswerRows:
    """Build rows and spans of the correct answer of every answered turn, with its thought and without.

    Both follow the same history. A correct answer that was sampled is scored in place; others get a row.
    """
    plan = AnswerRows(rows=[episode.ids for episode in episodes])

    def add_row(history: list[int], step: ThoughtStep) -> TokenSpan:
        row = history + step.target_ids
        plan.rows.append(row)
        return TokenSpan(len(plan.rows) - 1, len(history) + step.scored_from, len(row))

    for index, episode in enumerate(episodes):
        for turn, step in enumerate(episode.steps):
            if not step.answered:
                continue
            if episode.ids[step.end : step.stop] == step.target_ids:
                with_thought = TokenSpan(index, step.end + step.scored_from, step.stop)
            else:
                with_thought = add_row(episode.ids[: step.end], step)
            without = with_thought
            if step.end > step.start:
                without = add_row(episode.ids[: step.start], step)
            plan.steps.append((index, turn))
            plan.with_thought.append(with_thought)
            plan.without.append(without)
    return plan


@torch.no_grad()
def compute_span_logprobs(
    model: PreTrainedModel,
    rows: Sequence[Sequence[int]],
    spans: Sequence[TokenSpan],
    *,
    pad_id: int,
    max_tokens: int = 16384,
) -> torch.Tensor:
    """Compute log p(tokens of the span | tokens before it in its row), float64 [number of spans], nats, on the CPU.

    Rows without a span are not run.
    """
    masks = {span.row: [False] * len(rows[span.row]) for span in spans}
    for span in spans:
        masks[span.row][span.start : span.stop] = [True] * (span.stop - span.start)
    if not spans:
        return torch.empty(0)
    indices = sorted(masks)
    train_rows = [TrainRow(rows[i][:1], rows[i][1:], masks[i][1:]) for i in indices]
    logprobs: dict[int, torch.Tensor] = {}
    device = next(model.parameters()).device

    def fill_logprobs(batch: TrainBatch) -> None:
        logprobs_BS = completion_logprobs(model, batch.to(device))[0].double().cpu()
        for b, index in enumerate(batch.rows):
            logprobs[indices[index]] = logprobs_BS[b]

    with use_eval_mode(model):
        shares_prefixes = check_prefix_sharing(model).allowed
        batches = build_batches(train_rows, max_tokens, pad_id, shares_prefixes=shares_prefixes)
        MemoryFit("scoring of answers").compute_batches(batches, fill_logprobs)
    return torch.stack([logprobs[span.row][span.start : span.stop].sum() for span in spans])
