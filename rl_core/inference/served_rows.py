"""Requests that come and go on transformers' own forward pass: correct for every causal language model.

Each request has a cache of its own and is decoded by itself, so that a family's cache is never cut or joined, and what
a request gets depends on nothing beside it. Slower than the engine by about the number of requests.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rl_core.capabilities import decoding
from rl_core.environments.step_pool import Observation, PendingTurn
from rl_core.inference.sampling import check_logprob, check_weights, draw, log_probabilities
from rl_core.inference.served_requests import Progress, ServedRequest, TopTokens
from rl_core.inference.transformers_backend import BackendRow
from rl_core.models.lora import unwrap

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["ServedRows"]


@dataclass(eq=False, slots=True)
class _Served:
    """One request and what the model keeps of it."""

    request: ServedRequest
    row: BackendRow
    cache: Any = None
    read: int = 0  # tokens of the row that the cache holds
    turn: PendingTurn | None = None


class ServedRows:
    """As `ServedSlots`, for models that the engine's decoder does not know."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        slots: int,
        context: int,
        eos_ids: Collection[int],
        pad_id: int,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        """See `ServedSlots`."""
        check_weights(model)
        self.capacity = slots
        self._model, self._context, self._wake = model.eval(), context, wake
        self._eos_ids = frozenset(eos_ids)
        self._keeps_cache = decoding.keeps_cache(model)
        names = inspect.signature(type(unwrap(model)).forward).parameters
        self._newest_only = {"logits_to_keep": 1} if "logits_to_keep" in names else {}
        self._served: dict[ServedRequest, _Served] = {}
        self._parked: dict[ServedRequest, _Served] = {}

    @property
    def free(self) -> int:
        """See `ServedSlots`."""
        return self.capacity - len(self._served)

    @property
    def is_empty(self) -> bool:
        """See `ServedSlots`."""
        return not self._served and not self._parked

    @property
    def requests(self) -> list[ServedRequest]:
        """See `ServedSlots`."""
        return [*self._served, *self._parked]

    @property
    def can_step(self) -> bool:
        """See `ServedSlots`."""
        return any(served.turn is None or served.turn.done() for served in self._served.values())

    def held(self) -> list[tuple[ServedRequest, int]]:
        """See `ServedSlots`."""
        return [
            (request, 2**62 if served.turn is not None else served.row.num_sampled - request.held_since)
            for request, served in self._served.items()
        ]

    def admit(self, requests: Sequence[ServedRequest]) -> None:
        """See `ServedSlots`."""
        for request in requests:
            request.held_since = 0
            row = BackendRow(request, request.sampling, self._context, request.has_stops, request.drawn)
            self._served[request] = _Served(request, row)

    def remove(self, request: ServedRequest) -> None:
        """See `ServedSlots`."""
        if self._served.pop(request, None) is None:
            del self._parked[request]

    def park(self, request: ServedRequest) -> None:
        """See `ServedSlots`."""
        self._parked[request] = self._served.pop(request)

    def resume(self, request: ServedRequest) -> None:
        """See `ServedSlots`."""
        self._served[request] = self._parked.pop(request)
        request.held_since = self._served[request].row.num_sampled

    def may_resume(self, request: ServedRequest) -> bool:
        """See `ServedSlots`."""
        turn = self._parked[request].turn
        return turn is None or turn.done()

    def release(self) -> None:
        """See `ServedSlots`."""
        self._served.clear()

    def step(self) -> tuple[list[ServedRequest], list[Progress]]:
        """See `ServedSlots`."""
        ended: list[ServedRequest] = []
        progress: list[Progress] = []
        for served in list(self._served.values()):
            if not self._advance(served, progress):
                del self._served[served.request]
                ended.append(served.request)
        return ended, progress

    def _advance(self, served: _Served, progress: list[Progress]) -> bool:
        """One token of a request; False = it has ended."""
        request, row = served.request, served.row
        try:
            if served.turn is not None:
                if not served.turn.done():
                    return True
                turn, served.turn = served.turn, None
                return self._goes_on(served, turn.result())
            token, logprob, top = self._sample(served)
            check_logprob(logprob, row.num_sampled, self._model.dtype)
            row.add(token, logprob)
            if request.streams:
                progress.append(Progress(request, [token], [logprob], top))
            return not row.has_acted(self._ends_of(request)) or self._end_turn(served)
        except Exception as error:
            request.error = error
            return False

    def _ends_of(self, request: ServedRequest) -> frozenset[int]:
        return self._eos_ids if request.end_ids is None else request.end_ids

    def _end_turn(self, served: _Served) -> bool:
        turnover = served.row.end_turn(self._ends_of(served.request))
        if isinstance(turnover, PendingTurn):
            served.turn = turnover
            turnover.call.future.add_done_callback(lambda future: self._wake())
            return True
        return self._goes_on(served, turnover)

    def _goes_on(self, served: _Served, observation: Observation) -> bool:
        """Take what the environment answered; False = the sequence has ended."""
        before = served.row.ids
        goes_on = served.row.goes_on(observation)
        if served.row.ids is not before:  # a new context
            served.cache, served.read = None, 0
        return goes_on

    @torch.inference_mode()
    def _sample(self, served: _Served) -> tuple[int, float, TopTokens | None]:
        """The next token, its log-probability, and the most likely ones where they are asked for."""
        request, row, device = served.request, served.row, self._model.device
        new = row.ids[served.read :]
        if self._keeps_cache:
            ids, mask = torch.tensor([new], device=device), torch.ones(1, len(row.ids), dtype=torch.long, device=device)
            output = self._model(
                input_ids=ids, attention_mask=mask, past_key_values=served.cache, use_cache=True, **self._newest_only
            )
            served.cache, served.read = output.past_key_values, len(row.ids)
        else:
            output = self._model(input_ids=torch.tensor([row.ids], device=device), use_cache=False)
        logits_1V, drawing = output.logits[:, -1], request.drawing
        restriction = drawing if drawing.is_restricted else None
        uniforms_1 = torch.tensor([row.next_uniform()], dtype=torch.float64, device=device)
        token_1, logprob_1 = draw(logits_1V, uniforms_1, drawing.temperature, restriction)
        top = None
        if request.top:
            log_p_1V = log_probabilities(logits_1V, drawing.temperature, restriction)
            best = log_p_1V.topk(min(request.top, log_p_1V.shape[-1]), dim=-1)
            kept = best.values[0].cpu().numpy()
            rest = max(0.0, 1.0 - float(np.exp(kept.astype(np.float64)).sum()))
            request.top_rows.append((best.indices[0].cpu().numpy(), kept, rest))
            top = TopTokens.stacked(request.top_rows[-1:])
        return int(token_1), float(logprob_1), top
