"""Decoding steps on a GPU, recorded once for each size and replayed (CUDA graphs).

A step is hundreds of kernels that run for a few microseconds each; launched one by one they wait for Python most of the
time. Sizes are rounded up, so that few recordings serve a whole run. So are those of steps that are not recorded yet: a
row's result does not depend on whether they are.

R rows.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable

import torch

logger = logging.getLogger(__name__)

Compute = Callable[[torch.Tensor], torch.Tensor]
Replay = Callable[[], torch.Tensor]

# steps of a size before it is recorded, which takes as long as some dozens of them
_MIN_STEPS_TO_RECORD = 8
_MAX_RECORDINGS = 64  # recordings
_ROW_MULTIPLE, _LENGTH_MULTIPLE = 8, 128  # sizes are multiples of these


def round_up_rows(count: int) -> int:
    """1, 2, 4, 8 and the multiples of 8."""
    return next((rows for rows in (1, 2, 4) if count <= rows), count + -count % _ROW_MULTIPLE)


def round_up_length(length: int) -> int:
    """The multiples of 128."""
    return length + -length % _LENGTH_MULTIPLE


class StepGraphs:
    """Recordings of one computation for inputs of several sizes."""

    def __init__(
        self,
        record: Callable[[Compute, torch.Tensor], Replay],
        min_steps: int = _MIN_STEPS_TO_RECORD,
    ) -> None:
        """record: gives a function that computes the result anew from what the tensor then holds."""
        self._record, self._min_steps = record, min_steps
        self._bound_addresses: Hashable = None
        self._works = True
        self._clear_recordings()

    def bind_memory(self, addresses: Hashable) -> None:
        """Discard all recordings if the memory that they read from has changed."""
        if addresses != self._bound_addresses:
            self._bound_addresses = addresses
            self._clear_recordings()

    def run_step(self, size: Hashable, compute: Compute, inputs: torch.Tensor) -> torch.Tensor:
        """compute(inputs), valid until the next call. Equal sizes have to mean equal computations, shapes included."""
        if size not in self._recorded and self._should_record(size):
            kept = inputs.clone()
            try:
                self._recorded[size] = kept, self._record(compute, kept)
            except RuntimeError as error:
                self._works = False
                logger.warning(
                    "steps cannot be recorded here and are launched one by one, which is slower: %s",
                    error,
                )
        if size not in self._recorded:
            return compute(inputs)
        kept, replay = self._recorded[size]
        kept.copy_(inputs, non_blocking=True)
        return replay()

    def _should_record(self, size: Hashable) -> bool:
        self._seen[size] += 1
        return (
            self._works
            and self._seen[size] >= self._min_steps
            and len(self._recorded) < _MAX_RECORDINGS
        )

    def _clear_recordings(self) -> None:
        self._seen: Counter[Hashable] = Counter()
        self._recorded: dict[Hashable, tuple[torch.Tensor, Replay]] = {}


class _GraphRecorder:
    """Records on a GPU; all recordings share one memory pool, as each result is consumed before the next replay."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, compute: Compute, inputs: torch.Tensor) -> Replay:
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(2):  # libraries choose kernels and allocate workspaces beforehand
                compute(inputs)
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            out = compute(inputs)

        def replay() -> torch.Tensor:
            graph.replay()
            return out

        return replay


def create_step_graphs(device: torch.device) -> StepGraphs | None:
    """Recordings for a GPU; None for anything else."""
    return StepGraphs(_GraphRecorder()) if device.type == "cuda" else None
