"""A GPU without a GPU: CPU tensors that call themselves cuda:0, and counts of what would stop the host.

Inside `use_pretended_device()`, tensors moved to "cuda" stay in CPU memory, but report the device cuda:0, as does every
result computed from them. Code that chooses its path by the device takes that of a GPU, with the numbers of CPU
kernels. `DeviceCounts` lists what a real device would make the host wait for (reads, uploads that block), and
operations that mix devices, which a real device refuses. It knows nothing of kernels' limits, streams and memory.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rl_core.inference import cuda_graphs

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
_ROOT = Path(__file__).parents[2]
# Operations whose result, or its size, the host has to know.
_READS = {
    "_local_scalar_dense",
    "_unique2",
    "bincount",
    "equal",
    "is_nonzero",
    "masked_select",
    "nonzero",
    "unique_consecutive",
    "unique_dim",
}
_INDEXING = {
    "index",
    "_unsafe_index",
    "index_put",
    "index_put_",
    "_index_put_impl_",
    "_unsafe_index_put",
}


@dataclass
class DeviceCounts:
    """Events since the last `clear`, by operation and line of this project."""

    reads: Counter[str] = field(default_factory=Counter)  # from the device to the host
    blocking_uploads: Counter[str] = field(default_factory=Counter)
    queued_uploads: Counter[str] = field(default_factory=Counter)  # copies with non_blocking
    mixed: Counter[str] = field(default_factory=Counter)  # operations on both devices
    captured: Counter[str] = field(default_factory=Counter)  # reads and uploads within a recording
    replays: int = 0
    is_capturing: bool = False

    @property
    def stops(self) -> Counter[str]:
        """Everything that stops the host."""
        return self.reads + self.blocking_uploads

    def clear(self) -> None:
        """Forget all events."""
        for counter in (self.reads, self.blocking_uploads, self.queued_uploads, self.mixed):
            counter.clear()
        self.captured.clear()
        self.replays = 0

    def add_event(self, counter: Counter[str], operation: str) -> None:
        """Count an event at the current line."""
        event = f"{operation} @ {_find_line()}"
        counter[event] += 1
        if self.is_capturing:
            self.captured[event] += 1


def _find_line() -> str:
    """Return file, line and function of the innermost frame of this project outside this module."""
    frame = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(_ROOT) and path.name != Path(__file__).name:
            name = path.relative_to(_ROOT)
            if name.parts[0] in ("rl_core", "tests"):
                return f"{name}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return "?"


class _DeviceMemory:
    """The storages that are on the pretended device."""

    def __init__(self) -> None:
        # A weak reference keeps the address from being used for another storage.
        self._storages: dict[int, StorageWeakRef] = {}

    def holds(self, value: Any) -> bool:
        """Return whether a value is a tensor on the device."""
        if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
            return False
        with torch._C.DisableTorchFunction():
            return not value.is_meta and value.untyped_storage()._cdata in self._storages

    def place(self, value: Any) -> Any:
        """Put the tensors of a nested value on the device, in place; return it."""
        with torch._C.DisableTorchFunction():
            for tensor in tree_leaves(value):
                if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
                    reference = StorageWeakRef(tensor.untyped_storage())
                    self._storages.setdefault(reference.cdata, reference)
        return value


class _Operations(TorchDispatchMode):
    """Marks results of device tensors and counts operations that stop the host."""

    def __init__(self, memory: _DeviceMemory, counts: DeviceCounts) -> None:
        super().__init__()
        self._memory, self._counts = memory, counts

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        is_held = [self._memory.holds(tensor) for tensor in tensors]
        if any(is_held):
            name = func._schema.name.split("::")[-1]
            with torch._C.DisableTorchFunction():
                self._count_operation(func, name, args, kwargs, tensors, is_held)
        result = func(*args, **kwargs)
        if any(is_held) and name != "copy_":
            self._memory.place(result)
        return result

    def _count_operation(self, func, name, args, kwargs, tensors, is_held) -> None:
        counts = self._counts
        if name in _READS or (
            name == "repeat_interleave" and "output_size" not in kwargs and len(args) < 3
        ):
            counts.add_event(counts.reads, name)
        elif name in _INDEXING:
            self._count_indexing(name, args)
        elif name == "copy_":
            if is_held[0] != is_held[1]:
                counter = counts.reads if is_held[1] else counts.blocking_uploads
                is_queued = kwargs.get("non_blocking") or (len(args) > 2 and args[2])
                queued = counts.queued_uploads if not is_held[1] and is_queued else counter
                counts.add_event(queued, name)
        elif any(
            not held and tensor.ndim > 0 for held, tensor in zip(is_held, tensors, strict=True)
        ):
            shapes = [
                f"{'cuda' if held else 'cpu'}{tuple(tensor.shape)}"
                for held, tensor in zip(is_held, tensors, strict=True)
            ]
            counts.add_event(counts.mixed, f"{func} {' '.join(shapes)}")

    def _count_indexing(self, name, args) -> None:
        indices = [index for index in args[1] if isinstance(index, torch.Tensor)]
        if any(index.dtype in (torch.bool, torch.uint8) for index in indices):
            # one value for all masked entries is filled in without counting them
            fills = "put" in name and args[2].numel() == 1
            if not fills:
                self._counts.add_event(self._counts.reads, f"{name} by a mask")
        elif "put" in name and not self._memory.holds(args[2]):
            self._counts.add_event(self._counts.blocking_uploads, f"{name} of a host value")
        if any(not self._memory.holds(index) for index in indices):
            self._counts.add_event(self._counts.blocking_uploads, f"{name} by a host index")


class _Calls(TorchFunctionMode):
    """Answers questions for the device, and moves tensors between the two."""

    def __init__(self, memory: _DeviceMemory, counts: DeviceCounts) -> None:
        super().__init__()
        self._memory, self._counts = memory, counts

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        first = args[0] if args else None
        is_held = self._memory.holds(first)
        if name == "__get__" and is_held:
            if func == torch.Tensor.device.__get__:
                return CUDA
            if func == torch.Tensor.is_cuda.__get__:
                return True
            if func == torch.Tensor.is_cpu.__get__:
                return False
        if isinstance(first, torch.Tensor) and name in ("to", "cpu", "cuda"):
            return self._move(func, name, first, args[1:], kwargs)
        if is_held and name in ("numpy", "__array__"):
            raise TypeError("a tensor on cuda:0 has no numpy array; copy it to the host first")
        if is_held and name == "tolist":
            self._counts.add_event(self._counts.reads, name)
        if name == "pin_memory":
            return first
        if kwargs.get("device") is not None and name != "_parse_to":
            return self._create(func, name, args, kwargs)
        if name == "new_tensor" and is_held:
            self._counts.add_event(self._counts.blocking_uploads, name)
            return self._memory.place(func(*args, **kwargs))
        return func(*args, **kwargs)

    def _create(self, func, name, args, kwargs):
        """Create a tensor on the device that a call names."""
        if torch.device(kwargs["device"]).type != "cuda":
            result = func(*args, **kwargs)
            is_on_device = isinstance(result, torch.Tensor) and self._memory.holds(result)
            return result.clone() if is_on_device and name.endswith("_like") else result
        kwargs["device"] = "cpu"
        result = func(*args, **kwargs)
        if name in ("tensor", "as_tensor", "new_tensor", "asarray"):
            if not any(self._memory.holds(leaf) for leaf in tree_leaves(args)):
                self._counts.add_event(self._counts.blocking_uploads, name)
            with torch._C.DisableTorchFunction():
                result = result.clone()
        return self._memory.place(result)

    def _move(self, func, name, tensor, args, kwargs):
        """Run `to`, `cpu` or `cuda`."""
        if name != "to":
            device, dtype, is_queued = (CPU if name == "cpu" else CUDA), None, False
        elif args and isinstance(args[0], torch.Tensor):
            device, dtype = args[0].device, args[0].dtype
            is_queued = bool(kwargs.get("non_blocking", False))
        else:
            options = {key: value for key, value in kwargs.items() if key != "copy"}
            with torch._C.DisableTorchFunction():
                device, dtype, is_queued, _ = torch._C._nn._parse_to(*args, **options)
        is_held = self._memory.holds(tensor)
        wants_device = is_held if device is None else device.type == "cuda"
        if device is not None and device.type == "meta":
            return func(tensor, *args, **kwargs)
        keywords = {
            key: kwargs[key] for key in ("copy", "memory_format") if kwargs.get(key) is not None
        }
        if dtype is not None:
            keywords["dtype"] = dtype
        if wants_device == is_held:
            return tensor.to(**keywords) if keywords else tensor
        if is_held:
            self._counts.add_event(self._counts.reads, name)
            moved = _copy_to_new_memory(tensor)
        else:
            counts = self._counts
            counts.add_event(counts.queued_uploads if is_queued else counts.blocking_uploads, name)
            moved = self._memory.place(tensor.clone())
        keywords.pop("copy", None)
        return moved.to(**keywords) if keywords else moved


class _Untracked(torch.autograd.Function):
    """A copy in memory that no mode marks, with gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return _copy_to_host(tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def _copy_to_host(tensor: torch.Tensor) -> torch.Tensor:
    with torch.utils._python_dispatch._disable_current_modes(), torch._C.DisableTorchFunction():
        return tensor.detach().clone()


def _copy_to_new_memory(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.requires_grad and torch.is_grad_enabled():
        copied: torch.Tensor = _Untracked.apply(tensor)
        return copied
    return _copy_to_host(tensor)


class _Recorder:
    """A recorder of decoding steps whose replays compute them again; see `cuda_graphs`."""

    def __init__(self, counts: DeviceCounts) -> None:
        self._counts = counts

    def __call__(self, compute, inputs):
        self._counts.is_capturing = True
        try:
            compute(inputs)
        finally:
            self._counts.is_capturing = False

        def replay():
            self._counts.replays += 1
            return compute(inputs)

        return replay


@contextmanager
def use_pretended_device() -> Iterator[DeviceCounts]:
    """Pretend a GPU inside the context; move a model to it with `model.to("cuda")`."""
    memory, counts = _DeviceMemory(), DeviceCounts()
    answers = {
        "synchronize": None,
        "empty_cache": None,
        "reset_peak_memory_stats": None,
        "max_memory_allocated": 0,
        "memory_allocated": 0,
        "memory_reserved": 0,
        "mem_get_info": (70 << 30, 80 << 30),
        "get_device_name": "pretended GPU",
        "get_device_capability": (9, 0),
        "device_count": 1,
        "set_rng_state": None,
        "get_rng_state_all": [],
    }
    with ExitStack() as stack:
        for name, answer in answers.items():
            function = mock.Mock(return_value=answer)
            stack.enter_context(mock.patch.object(torch.cuda, name, function))
        state = mock.Mock(side_effect=lambda *_: torch.zeros(16, dtype=torch.uint8))
        stack.enter_context(mock.patch.object(torch.cuda, "get_rng_state", state))
        stack.enter_context(
            mock.patch.object(cuda_graphs, "_GraphRecorder", lambda: _Recorder(counts))
        )
        stack.enter_context(_Operations(memory, counts))
        stack.enter_context(_Calls(memory, counts))
        yield counts
