"""Lack of memory: recognising it, and computing in halves what does not fit.

A batch that does not fit is computed as its first and second half of rows, these again in halves, down to single rows.
Later batches are cut to what was seen to fit. Each halving is logged and counted (`perf/out_of_memory`).
"""

from __future__ import annotations

import dataclasses
import errno
import logging
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch

from rl_core.errors import DataError, OutOfMemory
from rl_core.timing import add_to_total

logger = logging.getLogger(__name__)

Batch = TypeVar("Batch")
Result = TypeVar("Result")

# What torch's CPU allocator, its libraries and the C++ runtime say in a plain RuntimeError.
_OUT_OF_MEMORY_TEXTS = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "std::bad_alloc",
)
_memory_holders: weakref.WeakSet[Any] = weakref.WeakSet()


def register_memory_holder(holder: Any) -> None:
    """Have `holder.release()` called whenever memory runs out, for as long as `holder` lives."""
    _memory_holders.add(holder)


def is_out_of_memory(error: BaseException) -> bool:
    """True for an error that says that an allocation failed, on a device or on the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if isinstance(error, OSError):  # of an anonymous mapping
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(
        words in str(error) for words in _OUT_OF_MEMORY_TEXTS
    )


def format_first_line(error: BaseException) -> str:
    """Type and first line of an error, for messages."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def record_out_of_memory(subject: str, limit: int, unit: str) -> None:
    """Log and count that memory ran out, and hand cached device memory back.

    Args:
        limit: size that batches are cut to from now on. unit: of the limit, such as 'padded tokens'.
    """
    logger.warning("out of memory: %s: cut to at most %d %s", subject, limit, unit)
    add_to_total("out_of_memory", 1.0)
    for holder in list(_memory_holders):
        holder.release()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class MemoryFit:
    """Computes batches, those that do not fit in halves; remembers what fits for as long as it lives."""

    def __init__(
        self, subject: str, advice: str = "use a smaller model, or shorter sequences"
    ) -> None:
        """`what`: what is computed; `advice`: what to change when even one row does not fit. Both for messages."""
        self.subject = subject
        self.advice = advice
        self.limit: int | None = (
            None  # size of a batch that may fit; None = nothing ever ran out of memory
        )

    def compute_batches(
        self,
        batches: Iterable[Batch],
        compute: Callable[[Batch], Result],
        *,
        lengths: Sequence[int] | None = None,
    ) -> list[Result]:
        """`compute` of every batch, or of its parts in turn, in order.

        `compute` is called again after it has failed, so it must leave nothing half-done.

        Args:
            batches: dataclasses with one row per entry, or lists with one entry a row.
            lengths: where batches are lists of indices: tokens of each row. None = such a batch is measured in rows.
        Raises: OutOfMemory where a single row does not fit; whatever else `compute` raises.
        """
        results: list[Result] = []
        for whole in batches:
            waiting = [whole]  # the next one last
            while waiting:
                batch = waiting.pop()
                size = _measure_size(batch, lengths)
                halves = (
                    halve_batch(batch) if self.limit is not None and size > self.limit else None
                )
                if halves is None:
                    try:
                        results.append(compute(batch))
                        continue
                    except Exception as error:
                        if not is_out_of_memory(error):
                            raise
                        # the error itself would keep its tensors alive
                        problem = format_first_line(error)
                    halves = halve_batch(batch)
                    if halves is None:
                        raise OutOfMemory(
                            f"{self.subject}: one row of {count_padded_tokens(batch) if lengths is None else size} tokens does "
                            f"not fit into memory ({problem}); {self.advice}"
                        )
                    self.limit = size - 1
                    unit = (
                        "rows" if isinstance(batch, list) and lengths is None else "padded tokens"
                    )
                    record_out_of_memory(self.subject, self.limit, unit)
                waiting += reversed(halves)
        return results


def _measure_size(batch: Any, lengths: Sequence[int] | None) -> int:
    if not isinstance(batch, list):
        return count_padded_tokens(batch)
    return (
        len(batch)
        if lengths is None
        else len(batch) * max((lengths[index] for index in batch), default=0)
    )


def halve_batch(batch: Batch) -> tuple[Batch, Batch] | None:
    """A batch as its first and second half of rows; None when it has a single row.

    A list has one entry a row. In a dataclass every tensor and list field must have one (first axis); None and scalars
    go to both halves. Raises: DataError for anything else.
    """
    if isinstance(batch, list):
        middle = len(batch) // 2
        return (batch[:middle], batch[middle:]) if middle else None  # type: ignore[return-value]
    if not dataclasses.is_dataclass(batch) or isinstance(batch, type):
        raise DataError(
            f"a micro-batch must be a dataclass with one row per entry, not {type(batch).__name__}"
        )
    values = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    rows = next(
        (len(value) for value in values.values() if isinstance(value, torch.Tensor) and value.ndim),
        0,
    )
    if rows < 2:
        return None

    def part(bounds: slice) -> Batch:
        cut = {
            name: value[bounds]
            for name, value in values.items()
            if (isinstance(value, torch.Tensor) and value.ndim) or isinstance(value, list)
        }
        return dataclasses.replace(batch, **cut)

    return part(slice(0, rows // 2)), part(slice(rows // 2, rows))


def count_padded_tokens(batch: object) -> int:
    """Entries of the batch's largest tensor: its padded tokens."""
    fields = dataclasses.fields(batch) if dataclasses.is_dataclass(batch) else ()
    tensors = (getattr(batch, field.name) for field in fields)
    return max(
        (tensor.numel() for tensor in tensors if isinstance(tensor, torch.Tensor)), default=0
    )
