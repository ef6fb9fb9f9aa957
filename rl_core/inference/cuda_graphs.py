"""Recorded decoding steps on a GPU (CUDA graphs): each size is recorded once and replayed.

A step is hundreds of kernels of a few microseconds each; launched one by one they mostly wait for Python. Sizes are
rounded up so that few recordings serve a whole run. Steps that are not recorded yet use the same rounded sizes, so a
row's result does not depend on whether its step is recorded.

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

# A size is recorded after this many steps; recording takes as long as a few dozen steps.
_MIN_STEPS_TO_RECORD = 8
_MAX_RECORDINGS = 64
_ROW_MULTIPLE, _LENGTH_MULTIPLE = 8, 128


def round_up_rows(count: int) -> int:
    """Round up to 1, 2, 4, 8 or a multiple of 8."""
    return next((rows for rows in (1, 2, 4) if count <= rows), count + -count % _ROW_MULTIPLE)


def round_up_length(length: int) -> int:
    """Round up to a multiple of 128."""
    return length + -length % _LENGTH_MULTIPLE


class StepGraphs:
    """Recordings of one computation for inputs of several sizes."""

    def __init__(
        self,
        record: Callable[[Compute, torch.Tensor], Replay],
        min_steps: int = _MIN_STEPS_TO_RECORD,
    ) -> None:
        """Create an empty set of recordings.

        Args:
            record: returns a function that recomputes the result from the current contents of the input tensor.
        """
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
        """Return compute(inputs), valid until the next call.

        Equal sizes must mean equal computations, including shapes.
        """
        if size not in self._recorded and self._should_record(size):
            recorded_inputs = inputs.clone()
            try:
                self._recorded[size] = recorded_inputs, self._record(compute, recorded_inputs)
            except RuntimeError as error:
                self._works = False
                logger.warning(
                    "steps cannot be recorded here and are launched one by one, which is slower: %s",
                    error,
                )
        if size not in self._recorded:
            return compute(inputs)
        recorded_inputs, replay = self._recorded[size]
        recorded_inputs.copy_(inputs, non_blocking=True)
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
    """Recorder on a GPU.

    All recordings share one memory pool, because each result is consumed before the next replay.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, compute: Compute, inputs: torch.Tensor) -> Replay:
        side_stream = torch.cuda.Stream()
        side_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side_stream):
            for _ in range(2):  # warm-up: libraries choose kernels and allocate workspaces
                compute(inputs)
        torch.cuda.current_stream().wait_stream(side_stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            out = compute(inputs)

        def replay() -> torch.Tensor:
            graph.replay()
            return out

        return replay


def create_step_graphs(device: torch.device) -> StepGraphs | None:
    """Create the recordings for a GPU; return None for other devices."""
    return StepGraphs(_GraphRecorder()) if device.type == "cuda" else None
