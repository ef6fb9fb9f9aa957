"""Rollouts through transformers' own forward pass: the fallback that works for every causal LM.

Sequences are played in batches of `slots`, turn by turn: each turn reads the whole sequences again, padded on the
left, and then decodes token by token with transformers' cache until every row has ended its action. Models without
such a cache (Mamba) read the whole sequences for every token, padded on the right as in training: slow but equally
exact.

B rows, S padded width.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import torch

from rl_core.capabilities import decoding, reads_images
from rl_core.capabilities.rotary_positions import find_row_limit
from rl_core.data.batches import pad_rows
from rl_core.environments.step_pool import (
    Observation,
    ReplacementContext,
    TurnOutcome,
    wait_for_observation,
)
from rl_core.inference.sampling import (
    RolloutSequence,
    apply_repetition_penalty,
    check_logprob,
    check_observation,
    check_prompt,
    check_weights,
    draw_tokens,
    draw_uniforms,
)
from rl_core.models.causal_lm import use_eval_mode
from rl_core.models.image_inputs import build_image_inputs
from rl_core.models.lora import unwrap_model
from rl_core.out_of_memory import MemoryFit
from rl_core.settings import SamplingSettings
from rl_core.types import ImagePixels

if TYPE_CHECKING:
    from transformers import PreTrainedModel


logger = logging.getLogger(__name__)


class TransformersBackend:
    """A `RolloutBackend` for any transformers causal LM, adapters included."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        eos_ids: Collection[int],
        pad_id: int,
        max_length: int,
        textless_ids: Collection[int] = (),
    ) -> None:
        self.max_length = min(max_length, find_row_limit(model) or max_length)
        self._model = model
        self.set_end_tokens(eos_ids)
        self._pad_id = pad_id
        self._textless_ids = torch.tensor(sorted(textless_ids), dtype=torch.int64)
        self._fit = MemoryFit(
            "rollouts", "lower sampling.max_completion_tokens, or use a smaller model"
        )
        self._keeps_cache = decoding.has_key_value_cache(model)
        if not self._keeps_cache:
            logger.warning(
                "%s keeps no key/value cache: rollouts read whole sequences for every token, which is slow",
                type(unwrap_model(model)).__name__,
            )
        self._reads_images = reads_images(model)
        self._takes_positions = (
            "position_ids" in inspect.signature(type(unwrap_model(model)).forward).parameters
        )

    def set_end_tokens(self, eos_ids: Collection[int]) -> None:
        """Set the tokens that end an action."""
        self._eos_ids = frozenset(eos_ids)

    def build_request_options(self) -> dict[str, Any]:
        """Build arguments of a `FallbackBatcher` over this backend's model."""
        return {
            "model": self._model,
            "eos_ids": self._eos_ids,
            "pad_id": self._pad_id,
            "textless_ids": self._textless_ids.tolist(),
        }

    def refresh_weights(self) -> None:
        """Do nothing: nothing is cached between runs."""

    def run_sequences(
        self, sequences: Sequence[RolloutSequence], sampling: SamplingSettings
    ) -> None:
        """Play every sequence to its end. If memory runs out, play fewer together, in this and later runs.

        An interrupted turn continues from the tokens that it has.
        Raises: OutOfMemory.
        """
        for sequence in sequences:
            check_prompt(sequence, self.max_length)
        check_weights(self._model)
        with use_eval_mode(self._model):
            for start in range(0, len(sequences), sampling.slots):
                rows = [
                    BackendRow(s, sampling, self.max_length)
                    for s in sequences[start : start + sampling.slots]
                ]
                play_turn = self._play_turn if self._keeps_cache else self._play_turn_without_cache
                while rows:
                    self._fit.compute_batches(
                        [rows], functools.partial(play_turn, sampling=sampling)
                    )
                    # start all environment steps before waiting for the first
                    turns = [row.end_turn(self._eos_ids) for row in rows]
                    rows = [
                        row
                        for row, turn in zip(rows, turns, strict=True)
                        if row.append_observation(wait_for_observation(turn))
                    ]

    @torch.inference_mode()
    def _play_turn(self, rows: list[BackendRow], sampling: SamplingSettings) -> None:
        """Sample one action for every row."""
        device = self._model.device
        width = max(len(row.ids) for row in rows)
        ids_BS = torch.tensor(
            [[self._pad_id] * (width - len(row.ids)) + row.ids for row in rows], device=device
        )
        mask_BS = torch.tensor(
            [[0] * (width - len(row.ids)) + [1] * len(row.ids) for row in rows], device=device
        )
        cache: Any = None
        seen_BV: torch.Tensor | None = None
        images: dict[str, torch.Tensor] = {}
        if self._reads_images:
            images = build_image_inputs(
                unwrap_model(self._model),
                [row.ids for row in rows],
                [row.images for row in rows],
                width,
                left=True,
            )
            next_B = images["position_ids"].amax((0, 2)) + 1
        while True:
            # rows that have acted decode on; keep their positions within the model's
            positions = (mask_BS.cumsum(1) - 1).clamp(0, self.max_length - 1)[:, -ids_BS.shape[1] :]
            inputs = {"position_ids": positions} if self._takes_positions else {}
            output = self._model(
                input_ids=ids_BS,
                attention_mask=mask_BS,
                past_key_values=cache,
                use_cache=True,
                **(images or inputs),
            )
            if images:  # of the next token alone; the cache holds the images
                images = {"position_ids": next_B[None, :, None].expand(3, -1, -1)}
                next_B = next_B + 1
            cache = output.past_key_values
            uniforms_B = torch.tensor(
                [row.read_next_uniform() for row in rows], dtype=torch.float64, device=device
            )
            logits_BV = output.logits[:, -1]
            if seen_BV is None and sampling.repetition_penalty != 1:
                seen_BV = _mark_seen_tokens(rows, logits_BV)
            tokens_B, logprobs_B = self._draw_tokens(logits_BV, uniforms_B, sampling, seen_BV)
            if seen_BV is not None:
                seen_BV.scatter_(1, tokens_B[:, None], True)
            self._add_tokens(rows, tokens_B, logprobs_B)
            if all(row.has_acted(self._eos_ids) for row in rows):
                return
            ids_BS = tokens_B[:, None]  # tokens of rows that have acted are dropped
            mask_BS = torch.cat([mask_BS, mask_BS.new_ones(len(rows), 1)], dim=1)

    @torch.inference_mode()
    def _play_turn_without_cache(self, rows: list[BackendRow], sampling: SamplingSettings) -> None:
        """Sample one action for every row without a cache; rows that have acted are left out."""
        device = self._model.device
        while rows := [row for row in rows if not row.has_acted(self._eos_ids)]:
            lengths_B = torch.tensor([len(row.ids) for row in rows], device=device)
            ids_BS = pad_rows([row.ids for row in rows], self._pad_id).to(device)
            logits_BSV = self._model(input_ids=ids_BS, use_cache=False).logits
            logits_BV = logits_BSV[torch.arange(len(rows), device=device), lengths_B - 1]
            uniforms_B = torch.tensor(
                [row.read_next_uniform() for row in rows], dtype=torch.float64, device=device
            )
            seen_BV = (
                _mark_seen_tokens(rows, logits_BV) if sampling.repetition_penalty != 1 else None
            )
            self._add_tokens(rows, *self._draw_tokens(logits_BV, uniforms_B, sampling, seen_BV))

    def _draw_tokens(
        self,
        logits_BV: torch.Tensor,
        uniforms_B: torch.Tensor,
        sampling: SamplingSettings,
        seen_BV: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw as `draw_tokens` does, with the settings' penalty on seen tokens."""
        if seen_BV is not None:
            logits_BV = apply_repetition_penalty(logits_BV, seen_BV, sampling.repetition_penalty)
        return draw_tokens(
            logits_BV,
            uniforms_B,
            sampling.temperature,
            sampling if sampling.is_restricted else None,
            self._textless_ids.to(logits_BV.device),
        )

    def _add_tokens(
        self, rows: list[BackendRow], tokens_B: torch.Tensor, logprobs_B: torch.Tensor
    ) -> None:
        """Append the sampled token to every row that has not acted."""
        for row, token, logprob in zip(rows, tokens_B.tolist(), logprobs_B.tolist(), strict=True):
            if not row.has_acted(self._eos_ids):
                check_logprob(logprob, row.num_sampled, self._model.dtype)
                row.add_token(token, logprob)


def _mark_seen_tokens(rows: list[BackendRow], like_BV: torch.Tensor) -> torch.Tensor:
    """Build bool [B, V], True = the token occurs in the row."""
    seen_BV = torch.zeros_like(like_BV, dtype=torch.bool)
    for row, ids in zip(seen_BV, (row.ids for row in rows), strict=True):
        row[torch.tensor(ids, device=like_BV.device)] = True
    return seen_BV


class BackendRow:
    """A sequence being played."""

    def __init__(
        self,
        sequence: RolloutSequence,
        sampling: SamplingSettings,
        max_length: int,
        has_stops: bool | None = None,
        drawn: int = 0,
    ) -> None:
        """Start with the prompt and no sampled token.

        Args:
            has_stops: call the sequence's `should_stop`; None = if `sampling` has stop texts.
            drawn: random numbers of the seed that are used up.
        """
        self.sequence = sequence
        self.ids = list(sequence.prompt_ids)
        self.limit = min(len(self.ids) + sampling.max_completion_tokens, max_length)
        self._context = self.limit
        self.action: list[int] = []
        self.logprobs: list[float] = []
        self._uniforms = draw_uniforms(sequence.seed, self.limit - len(self.ids), drawn)
        self.num_sampled = 0
        self._hit_limit = False
        self._has_stop_texts = bool(sampling.stop) if has_stops is None else has_stops
        self._is_stopped = False

    @property
    def images(self) -> Sequence[ImagePixels]:
        """Images of the tokens so far; a sequence without the attribute has none."""
        return getattr(self.sequence, "images", ())

    def read_next_uniform(self) -> float:
        """Return the uniform of the next token; it stays the same for a row that has acted."""
        return float(self._uniforms[min(self.num_sampled, len(self._uniforms) - 1)])

    def add_token(self, token: int, logprob: float) -> None:
        """Append a sampled token."""
        self.action.append(token)
        self.logprobs.append(logprob)
        self.ids.append(token)
        self.num_sampled += 1
        self._is_stopped = self._has_stop_texts and self.sequence.should_stop(self.action)

    def has_acted(self, eos_ids: Collection[int]) -> bool:
        """Return whether this turn's action has ended or has reached the sequence's limit."""
        return bool(self.action) and (self._has_ended(eos_ids) or len(self.ids) >= self.limit)

    def _has_ended(self, eos_ids: Collection[int]) -> bool:
        return self.action[-1] in eos_ids or self._is_stopped

    def end_turn(self, eos_ids: Collection[int]) -> TurnOutcome:
        """Hand over the action; return its outcome."""
        self._hit_limit = not self._has_ended(eos_ids)
        return self.sequence.take_action(self.action, self.logprobs, self._hit_limit)

    def append_observation(self, observation: Observation) -> bool:
        """Append an observation; return False if the sequence has ended."""
        if observation is None:
            return False
        draws = len(self._uniforms) - self.num_sampled
        check_observation(
            observation, self.limit - len(self.ids), self._context, self._hit_limit, draws
        )
        if isinstance(observation, ReplacementContext):
            self.ids, self.limit = list(observation.ids), observation.limit
        else:
            self.ids += observation
        self.action, self.logprobs = [], []
        return True
