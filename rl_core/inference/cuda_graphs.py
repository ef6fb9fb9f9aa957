"""Recorded decoding steps on a GPU (CUDA graphs): each size is recorded once and replayed.

A step is hundreds of kernels of a few microseconds each; launched one by one they mostly wait for Python. Sizes are
rounded up so that few recordings serve a whole run. Steps that are not recorded yet use the same rounded sizes, so a
row's result does not depend on whether its step is recorded. The least recently used recording makes room for the next.

R rows.
"""

from __future__ import annotations

import gc
import logging
from collections import Counter
from collections.abc import Callable, Hashable

import torch

from rl_core.out_of_memory import is_out_of_memory

logger = logging.getLogger(__name__)

Compute = Callable[[torch.Tensor], torch.Tensor]
Replay = Callable[[], torch.Tensor]

# A size is recorded after this many steps; recording takes as long as a few dozen steps.
_MIN_STEPS_TO_RECORD = 8
_MAX_RECORDINGS = 128
_ROW_MULTIPLE, _LENGTH_MULTIPLE = 8, 128
_CLASSES_PER_OCTAVE = 4  # of large sizes: rounding adds less than a quarter


def round_up_size(count: int, multiple: int, classes: int = _CLASSES_PER_OCTAVE) -> int:
    """Round up to a multiple of `multiple`, and above `classes` multiples to one of `classes` sizes an octave."""
    step = multiple
    while step * 2 * classes < count:
        step *= 2
    return count + -count % step


def round_up_rows(count: int) -> int:
    """Round up to 1, 2, 4, a multiple of 8 up to 64, then of 16 up to 128, of 32 up to 256, and so on."""
    small = next((rows for rows in (1, 2, 4) if count <= rows), None)
    return round_up_size(count, _ROW_MULTIPLE) if small is None else small


def round_up_length(length: int) -> int:
    """Round up to a multiple of 128 up to 1,024, then of 256 up to 2,048, of 512 up to 4,096, and so on."""
    return round_up_size(length, _LENGTH_MULTIPLE)


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
        self._refused: set[Hashable] = set()  # sizes that cannot be recorded
        self.num_steps = self.num_replays = 0  # since the object was made
        self._clear_recordings()

    def bind_memory(self, addresses: Hashable) -> None:
        """Discard all recordings if the memory that they read from has changed."""
        if addresses != self._bound_addresses:
            self._bound_addresses = addresses
            self._clear_recordings()

    def run_step(self, size: Hashable, compute: Compute, inputs: torch.Tensor) -> torch.Tensor:
        """Return compute(inputs), valid until the next call.

        Equal sizes must mean equal computations, including shapes.
        Raises: errors of `compute`; a lack of memory while a step is recorded.
        """
        self.num_steps += 1
        recording = self._recorded.pop(size, None)
        if recording is None and self._should_record(size):
            recording = self._try_to_record(size, compute, inputs)
        if recording is None:
            return compute(inputs)
        self._recorded[size] = recording  # the most recently used one is last
        recorded_inputs, replay = recording
        recorded_inputs.copy_(inputs, non_blocking=True)
        self.num_replays += 1
        return replay()

    def _try_to_record(
        self, size: Hashable, compute: Compute, inputs: torch.Tensor
    ) -> tuple[torch.Tensor, Replay] | None:
        """Record a step instead of the least recently used one; return None if it cannot be recorded."""
        if len(self._recorded) >= _MAX_RECORDINGS:
            # Its last result has been read, so the device has finished it.
            oldest = next(iter(self._recorded))
            del self._recorded[oldest]
            self._seen[oldest] = 0  # recorded again only if it returns as often as a new size
        recorded_inputs = inputs.clone()
        try:
            return recorded_inputs, self._record(compute, recorded_inputs)
        except RuntimeError as error:
            if is_out_of_memory(error):
                self._clear_recordings()  # the caller needs their memory to continue with fewer rows
                raise
            if not self._refused:
                logger.warning(
                    "a step cannot be recorded and is launched kernel by kernel, which is slower: %s",
                    error,
                )
            self._refused.add(size)
            return None

    def _should_record(self, size: Hashable) -> bool:
        self._seen[size] += 1
        return self._seen[size] >= self._min_steps and size not in self._refused

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
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        out = self._capture(graph, side_stream, compute, inputs)

        def replay() -> torch.Tensor:
            graph.replay()
            return out

        return replay

    def _capture(
        self,
        graph: torch.cuda.CUDAGraph,
        stream: torch.cuda.Stream,
        compute: Compute,
        inputs: torch.Tensor,
    ) -> torch.Tensor:
        """Capture `compute(inputs)` on a stream; the current stream is the same before and after, also on an error.

        Only calls of this thread are restricted meanwhile: others may allocate and synchronise. `torch.cuda.graph`
        would stay on its stream if the end of a broken capture raised another error.
        """
        collects_garbage = gc.isenabled()
        gc.disable()  # a collected graph or tensor would free device memory in the middle of the capture
        try:
            with torch.cuda.stream(stream):
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    out = compute(inputs)
                except BaseException:
                    self._end_broken_capture(graph)
                    raise
                graph.capture_end()
        finally:
            if collects_garbage:
                gc.enable()
        return out

    def _end_broken_capture(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a capture whose computation failed; the reason is that error, not the one of its end."""
        try:
            graph.capture_end()
        except RuntimeError as error:
            logger.debug("the end of a failed recording: %s", error)


def create_step_graphs(device: torch.device) -> StepGraphs | None:
    """Create the recordings for a GPU; return None for other devices."""
    return StepGraphs(_GraphRecorder()) if device.type == "cuda" else None
