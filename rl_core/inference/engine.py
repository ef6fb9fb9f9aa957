"""The rollout engine: sequences decoded together over preallocated key/value slots.

prompts are prefilled once and copied to every sequence that begins with them;
a slot is refilled as soon as its sequence ends; when the queue is empty, active slots are compacted;
observations are appended to the live cache in the same step in which the other slots decode;
a sequence whose environment step is pending keeps its slot, and the others go on;
a token's sampling and its log-probability come from one pass over the logits, with one read-back per step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from rl_core.capabilities import decoding
from rl_core.capabilities.positions import row_limit
from rl_core.cpu.allocator import keep_freed_memory
from rl_core.cpu.waiting import bound_waiting
from rl_core.errors import OutOfMemory
from rl_core.inference.decoder import Decoder
from rl_core.inference.engine_run import EngineRun
from rl_core.inference.sampling import RolloutBackend, RolloutSequence, check_prompt, check_weights
from rl_core.inference.transformers_backend import TransformersBackend
from rl_core.memory import MemoryFit, first_line, is_out_of_memory
from rl_core.models.lora import merged
from rl_core.models.routed_adapters import Adapter
from rl_core.settings import SamplingSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Engine", "RolloutBackend", "RolloutSequence", "make_backend"]

_ADVICE = "lower sampling.max_completion_tokens, or use a smaller model"  # where one sequence does not fit


def make_backend(model: PreTrainedModel, *, eos_ids: Collection[int], pad_id: int, max_length: int) -> RolloutBackend:
    """The engine where the decoder supports the model (`rl_core.capabilities`), else transformers' own forward pass.

    Args:
        eos_ids: tokens that end an action.
        pad_id: any token; used where a batch needs filling.
        max_length: longest prompt and completion together, in tokens.
    """
    backend = Engine if decoding.decoder(model).allowed else TransformersBackend
    return backend(model, eos_ids=eos_ids, pad_id=pad_id, max_length=max_length)


class Engine:
    """A `RolloutBackend` over the model's own weights; sampling follows them without any copy."""

    def __init__(self, model: PreTrainedModel, *, eos_ids: Collection[int], pad_id: int, max_length: int) -> None:
        keep_freed_memory()
        bound_waiting()
        self.max_length = min(max_length, row_limit(model) or max_length)
        self._model = model
        self._pad_id = pad_id
        self._decoder = Decoder(model)
        self._fit = MemoryFit("slots of the rollout engine", _ADVICE)  # limit: slots that are decoded together
        self.end_at(eos_ids)

    def end_at(self, eos_ids: Collection[int]) -> None:
        """Tokens that end an action from now on."""
        self._is_eos = np.zeros(self._decoder.vocab_size, dtype=bool)
        self._is_eos[[token for token in eos_ids if token < len(self._is_eos)]] = True

    def keep_apart(self) -> None:
        """Make a sequence's numbers independent of the others, to the last bit where the step is compiled code."""
        self._decoder.prefills_by_length = True

    def refresh(self) -> None:
        """Weights are read where the model keeps them, so there is nothing to copy."""

    @contextmanager
    def bound(self) -> Iterator[Decoder]:
        """The decoder over the present weights, adapters merged, for a run that is played elsewhere."""
        check_weights(self._model)
        with merged(self._model):
            self._decoder.bind()
            yield self._decoder

    def run_options(self) -> dict[str, Any]:
        """Arguments of an `EngineRun` that are this engine's."""
        return {"is_eos": self._is_eos, "pad_id": self._pad_id, "max_length": self.max_length, "fit": self._fit}

    @property
    def takes_adapters(self) -> bool:
        """True = sequences may have adapters of their own (`run`)."""
        return self._decoder.takes_adapters

    def run(
        self, sequences: Sequence[RolloutSequence], sampling: SamplingSettings, adapters: Sequence[Adapter] = ()
    ) -> None:
        """Play every sequence to its end. Adapters of the model are merged meanwhile, and taken out again bit for bit.

        Sequences may have adapters of their own beside each other: those whose attribute `adapter` is a number of
        `adapters` (only where `takes_adapters`). Their tokens and log-probabilities depend on no other's.

        Where memory runs out, fewer sequences are decoded together, now and in later runs. A sequence's tokens depend
        on its own random numbers alone, so they stay the same. Raises: OutOfMemory where not even one fits.
        """
        for sequence in sequences:
            check_prompt(sequence, self.max_length)
        if not sequences:
            return
        check_weights(self._model)
        try:
            with merged(self._model):
                self._decoder.bind()
                run = EngineRun(
                    self._decoder, sequences, sampling, self._is_eos, self._pad_id, self.max_length, self._fit, adapters
                )
                run.play()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise OutOfMemory(
                f"rollouts do not fit into memory ({first_line(error)}); lower sampling.slots, {_ADVICE}"
            ) from error
