"""AdamW over the parameters of several runs in one call, each run with its own settings.

The numbers are those of torch's fused AdamW; one call per run would cost more than the arithmetic.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rl_core.cpu import build

_GRADIENT, _RUN = 1, 6  # columns of a `Row` in adamw.c


@dataclass(frozen=True, slots=True)
class AdamwSettings:
    """The settings of one run's step."""

    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    scale: float = 1.0  # factor of the gradient, from clipping


class AdamwRows:
    """Addresses of a run's parameters and moments, valid while these tensors stay in place."""

    def __init__(
        self,
        parameters: Mapping[str, torch.Tensor],
        states: Mapping[torch.Tensor, Mapping[str, Any]],
    ) -> None:
        """Collect the addresses.

        Args:
            states: torch's optimiser state by parameter; parameters without moments are left out.
        """
        self._names: list[str] = []
        self._referenced_tensors: list[torch.Tensor] = []
        rows = []
        for name, parameter in parameters.items():
            state = states.get(parameter)
            if not state:
                continue
            tensors = [parameter, state["exp_avg"], state["exp_avg_sq"], state["step"]]
            if all(map(is_contiguous_float32, tensors)):
                address, *state_addresses = [tensor.data_ptr() for tensor in tensors]
                rows.append((address, 0, *state_addresses, parameter.numel(), 0))
                self._names.append(name)
                self._referenced_tensors += tensors
        self._rows = np.array(rows, dtype=np.int64).reshape(-1, 7)
        self._index = {name: index for index, name in enumerate(self._names)}

    def select_rows(self, names: Sequence[str], addresses: Sequence[int]) -> np.ndarray | None:
        """Select the rows of the parameters with a gradient; return None if one of them has no moments yet.

        Args:
            names, addresses: of gradients that are contiguous float32 tensors on the CPU.
        """
        if names == self._names:
            rows = self._rows.copy()
            rows[:, _GRADIENT] = addresses
            return rows
        address_by_name = dict(zip(names, addresses, strict=True))
        if not address_by_name.keys() <= self._index.keys():
            return None
        selected = [name for name in self._names if name in address_by_name]
        rows = self._rows[[self._index[name] for name in selected]]
        rows[:, _GRADIENT] = [address_by_name[name] for name in selected]
        return rows


def is_contiguous_float32(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is contiguous float32 on the CPU."""
    return tensor.dtype == torch.float32 and tensor.is_cpu and tensor.is_contiguous()


class AdamwKernels:
    """The compiled functions of `adamw.c`."""

    def __init__(self, code: ctypes.CDLL) -> None:
        """Bind the functions of the compiled library `code`."""
        count, number, pointer = ctypes.c_int64, ctypes.c_int, ctypes.c_void_p
        self._step, self._norms = code.adamw_step, code.gradient_norms
        self._step.argtypes = (pointer, count, pointer, number)
        self._norms.argtypes = (pointer, count, pointer, pointer, count, number)
        self._step.restype = self._norms.restype = None

    def compute_norms(self, runs: Sequence[np.ndarray]) -> np.ndarray:
        """Compute the norm of each run's whole gradient, float32.

        Args:
            runs: rows of each run.
        """
        rows = _join_rows(runs)
        norms, run_norms = np.empty(len(rows), np.float32), np.empty(len(runs), np.float32)
        self._norms(
            rows.ctypes.data,
            len(rows),
            norms.ctypes.data,
            run_norms.ctypes.data,
            len(runs),
            torch.get_num_threads(),
        )
        return run_norms

    def step(self, runs: Sequence[np.ndarray], settings: Sequence[AdamwSettings]) -> None:
        """Make one step of each run.

        Args:
            runs: rows of each run; parameters and moments change in place.
            settings: of each run.
        """
        rows = _join_rows(runs)
        table = np.array(
            [(s.learning_rate, s.beta1, s.beta2, s.eps, s.weight_decay, s.scale) for s in settings],
            np.float64,
        )
        self._step(rows.ctypes.data, len(rows), table.ctypes.data, torch.get_num_threads())


def _join_rows(runs: Sequence[np.ndarray]) -> np.ndarray:
    rows = np.concatenate(runs)
    rows[:, _RUN] = np.repeat(np.arange(len(runs)), [len(run) for run in runs])
    return rows


@functools.cache
def load_adamw() -> AdamwKernels | None:
    """Load the functions; return None without compiled code or AVX2."""
    code = build.load_library()
    return AdamwKernels(code) if code is not None and code.adamw_ready() else None
