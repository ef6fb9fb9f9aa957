"""Out-of-memory handling: detect it, and compute batches that do not fit in halves.

A batch that does not fit is computed as its first and second half of rows, these again in halves, down to single rows.
Later batches are limited to the size that fitted. Each halving is logged and counted (`perf/out_of_memory`).
"""

from __future__ import annotations

import copy
import dataclasses
import errno
import logging
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch.utils._pytree import tree_leaves, tree_map

from rl_core.errors import DataError, OutOfMemory
from rl_core.timing import add_to_total

logger = logging.getLogger(__name__)

Batch = TypeVar("Batch")
Result = TypeVar("Result")

# Texts of RuntimeErrors from torch's CPU allocator, its libraries and the C++ runtime.
_OUT_OF_MEMORY_TEXTS = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "std::bad_alloc",
)
_memory_holders: weakref.WeakSet[Any] = weakref.WeakSet()


def register_memory_holder(holder: Any) -> None:
    """Have `holder.release_models()` called whenever memory runs out, for as long as `holder` lives.

    It returns True if it has freed memory of an accelerator: what failed is then tried again before it is halved.
    """
    _memory_holders.add(holder)


def release_held_memory() -> bool:
    """Have all holders release their memory; return True if one had some on an accelerator, so that a retry may fit."""
    has_released = [bool(holder.release_models()) for holder in list(_memory_holders)]
    if any(has_released) and torch.cuda.is_available():
        torch.cuda.empty_cache()
    return any(has_released)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the error reports a failed allocation on a device or on the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if isinstance(error, OSError):  # of an anonymous mapping
        return error.errno == errno.ENOMEM
    message = str(error)
    return isinstance(error, RuntimeError) and any(text in message for text in _OUT_OF_MEMORY_TEXTS)


def format_first_line(error: BaseException) -> str:
    """Return type and first line of an error, for messages."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def record_out_of_memory(subject: str, limit: int, unit: str) -> None:
    """Log and count that memory ran out, and release cached device memory.

    Args:
        limit: size to which batches are limited from now on.
        unit: of the limit, such as 'padded tokens'.
    """
    logger.warning("out of memory: %s: cut to at most %d %s", subject, limit, unit)
    add_to_total("out_of_memory", 1.0)
    for holder in list(_memory_holders):
        holder.release_models()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def has_room_for_copies(device: torch.device, nested: Any) -> bool:
    """Return whether a GPU has room for a copy of the tensors on it and as much again; True for other devices."""
    if device.type != "cuda":
        return True
    free, _ = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    tensors = [leaf for leaf in tree_leaves(nested) if isinstance(leaf, torch.Tensor)]
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor.is_cuda)
    return free >= 2 * size


def copy_to_host(nested: Any) -> Any:
    """Return a deep copy of nested containers with every tensor in host memory."""
    return tree_map(
        lambda leaf: (
            leaf.detach().to("cpu", copy=True)
            if isinstance(leaf, torch.Tensor)
            else copy.deepcopy(leaf)
        ),
        nested,
    )


class MemoryFit:
    """Computation of batches that splits those that do not fit, and remembers the size that fits."""

    def __init__(
        self, subject: str, advice: str = "use a smaller model, or shorter sequences"
    ) -> None:
        """Start without a limit.

        Args:
            subject: what is computed, for messages.
            advice: what to change if even one row does not fit, for messages.
        """
        self.subject = subject
        self.advice = advice
        self.limit: int | None = None  # largest size that may fit; None = memory never ran out

    def compute_batches(
        self,
        batches: Iterable[Batch],
        compute: Callable[[Batch], Result],
        *,
        lengths: Sequence[int] | None = None,
    ) -> list[Result]:
        """Return `compute` of every batch, or of its parts in turn, in order.

        `compute` is called again after a failure, so it must not leave partial results behind.

        Args:
            batches: dataclasses with one entry per row, or lists with one entry per row.
            lengths: for batches that are lists of indices: tokens of each row. None = such a batch is measured in rows.
        Raises: OutOfMemory if a single row does not fit; other errors of `compute`.
        """
        results: list[Result] = []
        for full_batch in batches:
            pending = [full_batch]  # the next one is last
            while pending:
                batch = pending.pop()
                size = _measure_size(batch, lengths)
                is_too_large = self.limit is not None and size > self.limit
                halves = halve_batch(batch) if is_too_large else None
                if halves is None:
                    try:
                        results.append(compute(batch))
                        continue
                    except Exception as error:
                        if not is_out_of_memory(error):
                            raise
                        # Only the text: the error would keep its tensors alive.
                        problem = format_first_line(error)
                    if release_held_memory():
                        pending.append(batch)
                        continue
                    halves = halve_batch(batch)
                    if halves is None:
                        num_tokens = count_padded_tokens(batch) if lengths is None else size
                        raise OutOfMemory(
                            f"{self.subject}: one row of {num_tokens} tokens does not fit into memory ({problem}); "
                            f"{self.advice}"
                        )
                    self.limit = size - 1
                    counts_rows = isinstance(batch, list) and lengths is None
                    unit = "rows" if counts_rows else "padded tokens"
                    record_out_of_memory(self.subject, self.limit, unit)
                pending += reversed(halves)
        return results


def _measure_size(batch: Any, lengths: Sequence[int] | None) -> int:
    if not isinstance(batch, list):
        return count_padded_tokens(batch)
    if lengths is None:
        return len(batch)
    return len(batch) * max((lengths[index] for index in batch), default=0)


def halve_batch(batch: Batch) -> tuple[Batch, Batch] | None:
    """Return a batch as its first and second half of rows; None if it has a single row.

    A list has one entry per row. In a dataclass every tensor and list field must have one per row (first axis). None
    and scalars go to both halves, fields marked `types.DERIVED_FIELD` to neither. Raises: DataError for anything else.
    """
    if isinstance(batch, list):
        middle = len(batch) // 2
        return (batch[:middle], batch[middle:]) if middle else None  # type: ignore[return-value]
    if not dataclasses.is_dataclass(batch) or isinstance(batch, type):
        raise DataError(
            f"a micro-batch must be a dataclass with one row per entry, not {type(batch).__name__}"
        )
    fields = dataclasses.fields(batch)
    derived = {field.name: None for field in fields if field.metadata.get("is_derived")}
    values = {f.name: getattr(batch, f.name) for f in fields if f.name not in derived}
    tensors = [value for value in values.values() if isinstance(value, torch.Tensor) and value.ndim]
    num_rows = len(tensors[0]) if tensors else 0
    if num_rows < 2:
        return None

    def select_rows(rows: slice) -> Batch:
        selected = {
            name: value[rows]
            for name, value in values.items()
            if (isinstance(value, torch.Tensor) and value.ndim) or isinstance(value, list)
        }
        return dataclasses.replace(batch, **selected, **derived)

    middle = num_rows // 2
    return select_rows(slice(0, middle)), select_rows(slice(middle, num_rows))


def count_padded_tokens(batch: object) -> int:
    """Return the number of entries of the batch's largest tensor: its padded tokens."""
    fields = dataclasses.fields(batch) if dataclasses.is_dataclass(batch) else ()
    values = (getattr(batch, field.name) for field in fields)
    return max((value.numel() for value in values if isinstance(value, torch.Tensor)), default=0)
