"""Continuous batching on transformers' own forward pass: works for every causal language model.

Each request has its own cache and is decoded separately, so no model family's cache is ever cut or joined, and a
request's tokens are independent of all others. Slower than the engine by about the number of requests.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rl_core.capabilities import decoding, reads_images
from rl_core.environments.step_pool import Observation, PendingTurn
from rl_core.inference.prompt_scores import score_prompts
from rl_core.inference.sampling import (
    check_logprob,
    check_weights,
    compute_log_probabilities,
    draw_tokens,
)
from rl_core.inference.serving_requests import RequestProgress, ServedRequest, TopTokens
from rl_core.inference.transformers_backend import BackendRow
from rl_core.models.causal_lm import use_eval_mode
from rl_core.models.image_inputs import build_image_inputs
from rl_core.models.lora import unwrap_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(eq=False, slots=True)
class _FallbackRequest:
    """One request and its model state."""

    request: ServedRequest
    row: BackendRow
    cache: Any = None
    num_cached_tokens: int = 0  # cached tokens of the row
    num_cached_images: int = 0
    next_position: int = 0  # of a model that reads images: where the newest token stands
    turn: PendingTurn | None = None


class FallbackBatcher:
    """A `ContinuousBatcher` for models that the engine's decoder does not support."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        slots: int,
        context: int,
        eos_ids: Collection[int],
        pad_id: int,
        textless_ids: Collection[int] = (),
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        """See `ContinuousBatcher`."""
        check_weights(model)
        self.capacity = slots
        self._stack = ExitStack()
        self._stack.enter_context(use_eval_mode(model))
        self._model, self._context, self._wake = model, context, wake
        self._eos_ids = frozenset(eos_ids)
        self._textless_ids = torch.tensor(
            sorted(textless_ids), dtype=torch.int64, device=model.device
        )
        self._reads_images = reads_images(model)
        self._keeps_cache = decoding.has_key_value_cache(model)
        names = inspect.signature(type(unwrap_model(model)).forward).parameters
        self._newest_logits_option = {"logits_to_keep": 1} if "logits_to_keep" in names else {}
        self._active: dict[ServedRequest, _FallbackRequest] = {}
        self._paused: dict[ServedRequest, _FallbackRequest] = {}

    @property
    def is_batch_independent(self) -> bool:
        """See `ContinuousBatcher.is_batch_independent`: each request is decoded separately."""
        return True

    @property
    def free(self) -> int:
        """See `ContinuousBatcher.free`."""
        return self.capacity - len(self._active)

    @property
    def is_empty(self) -> bool:
        """See `ContinuousBatcher.is_empty`."""
        return not self._active and not self._paused

    @property
    def requests(self) -> list[ServedRequest]:
        """See `ContinuousBatcher.requests`."""
        return [*self._active, *self._paused]

    @property
    def can_step(self) -> bool:
        """See `ContinuousBatcher.can_step`."""
        return any(served.turn is None or served.turn.is_done() for served in self._active.values())

    def list_held_requests(self) -> list[tuple[ServedRequest, int]]:
        """See `ContinuousBatcher.list_held_requests`."""
        return [
            (
                request,
                2**62
                if served.turn is not None
                else served.row.num_sampled - request.num_sampled_at_start,
            )
            for request, served in self._active.items()
        ]

    def start_requests(self, requests: Sequence[ServedRequest]) -> None:
        """See `ContinuousBatcher.start_requests`."""
        score_prompts(self._model, list(requests))
        for request in requests:
            request.num_sampled_at_start = 0
            row = BackendRow(
                request, request.sampling, self._context, request.has_stops, request.drawn
            )
            self._active[request] = _FallbackRequest(request, row)

    def remove_request(self, request: ServedRequest) -> None:
        """See `ContinuousBatcher.remove_request`."""
        if self._active.pop(request, None) is None:
            del self._paused[request]

    def pause_request(self, request: ServedRequest) -> None:
        """See `ContinuousBatcher.pause_request`."""
        self._paused[request] = self._active.pop(request)

    def resume_request(self, request: ServedRequest) -> None:
        """See `ContinuousBatcher.resume_request`."""
        self._active[request] = self._paused.pop(request)
        request.num_sampled_at_start = self._active[request].row.num_sampled

    def can_resume(self, request: ServedRequest) -> bool:
        """See `ContinuousBatcher.can_resume`."""
        turn = self._paused[request].turn
        return turn is None or turn.is_done()

    def release_memory(self) -> None:
        """See `ContinuousBatcher.release_memory`."""
        self._active.clear()
        self._stack.close()

    def step(self) -> tuple[list[ServedRequest], list[RequestProgress]]:
        """See `ContinuousBatcher.step`."""
        ended: list[ServedRequest] = []
        progress: list[RequestProgress] = []
        for served in list(self._active.values()):
            if not self._step_request(served, progress):
                del self._active[served.request]
                ended.append(served.request)
        return ended, progress

    def _step_request(self, served: _FallbackRequest, progress: list[RequestProgress]) -> bool:
        """Advance a request by one token; return False if it has ended."""
        request, row = served.request, served.row
        try:
            if served.turn is not None:
                if not served.turn.is_done():
                    return True
                turn, served.turn = served.turn, None
                return self._append_observation(served, turn.finish_turn())
            token, logprob, top = self._sample_token(served)
            check_logprob(logprob, row.num_sampled, self._model.dtype)
            row.add_token(token, logprob)
            if request.streams:
                progress.append(RequestProgress(request, [token], [logprob], top))
            return not row.has_acted(self._select_end_ids(request)) or self._end_turn(served)
        except Exception as error:
            request.error = error
            return False

    def _select_end_ids(self, request: ServedRequest) -> frozenset[int]:
        return self._eos_ids if request.end_ids is None else request.end_ids

    def _end_turn(self, served: _FallbackRequest) -> bool:
        outcome = served.row.end_turn(self._select_end_ids(served.request))
        if isinstance(outcome, PendingTurn):
            served.turn = outcome
            outcome.call.future.add_done_callback(lambda future: self._wake())
            return True
        return self._append_observation(served, outcome)

    def _append_observation(self, served: _FallbackRequest, observation: Observation) -> bool:
        """Append the environment's answer; return False if the sequence has ended."""
        previous_ids = served.row.ids
        continues = served.row.append_observation(observation)
        if served.row.ids is not previous_ids:  # a new context
            served.cache, served.num_cached_tokens, served.num_cached_images = None, 0, 0
        return continues

    def _build_image_inputs(
        self, served: _FallbackRequest, num_new: int
    ) -> dict[str, torch.Tensor]:
        """Build positions of the newest tokens, and the pixels of images among them."""
        row = served.row
        if num_new == 1 and served.num_cached_tokens:
            served.next_position += 1
            position = torch.full((3, 1, 1), served.next_position - 1, device=self._model.device)
            return {"position_ids": position}
        inputs = build_image_inputs(
            unwrap_model(self._model), [row.ids], [row.images], len(row.ids)
        )
        positions_31S = inputs["position_ids"]
        served.next_position = int(positions_31S.max()) + 1
        inputs["position_ids"] = positions_31S[:, :, -num_new:]
        if "pixel_values" in inputs:
            num_patches = sum(
                len(image.pixels_PD) for image in row.images[: served.num_cached_images]
            )
            inputs["pixel_values"] = inputs["pixel_values"][num_patches:]
            inputs["image_grid_thw"] = inputs["image_grid_thw"][served.num_cached_images :]
            if served.num_cached_images == len(row.images):
                del inputs["pixel_values"], inputs["image_grid_thw"]
            served.num_cached_images = len(row.images)
        return inputs

    @torch.inference_mode()
    def _sample_token(self, served: _FallbackRequest) -> tuple[int, float, TopTokens | None]:
        """Sample the next token; return it with its log-probability and the requested most likely tokens."""
        request, row, device = served.request, served.row, self._model.device
        new = row.ids[served.num_cached_tokens :]
        if self._keeps_cache:
            ids = torch.tensor([new], device=device)
            images = self._build_image_inputs(served, len(new)) if self._reads_images else {}
            mask = torch.ones(1, len(row.ids), dtype=torch.long, device=device)
            output = self._model(
                input_ids=ids,
                attention_mask=mask,
                past_key_values=served.cache,
                use_cache=True,
                **self._newest_logits_option,
                **images,
            )
            served.cache, served.num_cached_tokens = output.past_key_values, len(row.ids)
        else:
            output = self._model(input_ids=torch.tensor([row.ids], device=device), use_cache=False)
        logits_1V, drawing = output.logits[:, -1], request.drawing
        if request.editor is not None:
            logits_1V = request.editor.edit_logits(logits_1V, row.action)
        restriction = drawing if drawing.is_restricted else None
        uniforms_1 = torch.tensor([row.read_next_uniform()], dtype=torch.float64, device=device)
        token_1, logprob_1 = draw_tokens(
            logits_1V, uniforms_1, drawing.temperature, restriction, self._textless_ids
        )
        top = None
        if request.top:
            log_p_1V = compute_log_probabilities(logits_1V, drawing.temperature, restriction)
            best = log_p_1V.topk(min(request.top, log_p_1V.shape[-1]), dim=-1)
            top_logprobs = best.values[0].cpu().numpy()
            rest = max(0.0, 1.0 - float(np.exp(top_logprobs.astype(np.float64)).sum()))
            request.top_rows.append((best.indices[0].cpu().numpy(), top_logprobs, rest))
            top = TopTokens.from_rows(request.top_rows[-1:])
        return int(token_1), float(logprob_1), top
