"""AdamW over the parameters of several runs in one call, each run with settings of its own.

The numbers are those of torch's fused AdamW; a call for every run would cost more than the arithmetic.
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
    """Of one run's step."""

    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    scale: float = 1.0  # of the gradient: what clipping multiplies it by


class AdamwRows:
    """Places of a run's parameters and of their moments, as long as these tensors stay where they are."""

    def __init__(
        self,
        parameters: Mapping[str, torch.Tensor],
        states: Mapping[torch.Tensor, Mapping[str, Any]],
    ) -> None:
        """states: torch's, of each parameter; one without moments is left out."""
        self._names: list[str] = []
        self._referenced_tensors: list[torch.Tensor] = []
        rows = []
        for name, parameter in parameters.items():
            state = states.get(parameter)
            if not state:
                continue
            tensors = [parameter, state["exp_avg"], state["exp_avg_sq"], state["step"]]
            if all(map(is_contiguous_float32, tensors)):
                places = [tensor.data_ptr() for tensor in tensors]
                rows.append((places[0], 0, *places[1:], parameter.numel(), 0))
                self._names.append(name)
                self._referenced_tensors += tensors
        self._rows = np.array(rows, dtype=np.int64).reshape(-1, 7)
        self._index = {name: index for index, name in enumerate(self._names)}

    def select_rows(self, names: Sequence[str], addresses: Sequence[int]) -> np.ndarray | None:
        """Rows of the parameters that have a gradient; None where one of these has no moments yet.

        Args: names, addresses: of gradients that are plain float32 tensors on the CPU.
        """
        if names == self._names:
            rows = self._rows.copy()
            rows[:, _GRADIENT] = addresses
            return rows
        at = dict(zip(names, addresses, strict=True))
        if not at.keys() <= self._index.keys():
            return None
        chosen = [name for name in self._names if name in at]
        rows = self._rows[[self._index[name] for name in chosen]]
        rows[:, _GRADIENT] = [at[name] for name in chosen]
        return rows


def is_contiguous_float32(tensor: torch.Tensor) -> bool:
    """True = float32 on the CPU, without gaps."""
    return tensor.dtype == torch.float32 and tensor.is_cpu and tensor.is_contiguous()


class AdamwKernels:
    """The compiled functions of `adamw.c`."""

    def __init__(self, code: ctypes.CDLL) -> None:
        """`code`: the compiled library."""
        count, number, place = ctypes.c_int64, ctypes.c_int, ctypes.c_void_p
        self._step, self._norms = code.adamw_step, code.gradient_norms
        self._step.argtypes = (place, count, place, number)
        self._norms.argtypes = (place, count, place, place, count, number)
        self._step.restype = self._norms.restype = None

    def compute_norms(self, runs: Sequence[np.ndarray]) -> np.ndarray:
        """Norm of each run's whole gradient, float32. Args: rows of each run."""
        rows = _join_rows(runs)
        norms, of_runs = np.empty(len(rows), np.float32), np.empty(len(runs), np.float32)
        self._norms(
            rows.ctypes.data,
            len(rows),
            norms.ctypes.data,
            of_runs.ctypes.data,
            len(runs),
            torch.get_num_threads(),
        )
        return of_runs

    def step(self, runs: Sequence[np.ndarray], settings: Sequence[AdamwSettings]) -> None:
        """One step of each run. Args: rows of each run, which it changes in place, and its settings."""
        rows = _join_rows(runs)
        table = np.array(
            [(s.learning_rate, s.beta1, s.beta2, s.eps, s.weight_decay, s.scale) for s in settings],
            np.float64,
        )
        self._step(rows.ctypes.data, len(rows), table.ctypes.data, torch.get_num_threads())


def _join_rows(runs: Sequence[np.ndarray]) -> np.ndarray:
    rows = np.concatenate(runs)
    rows[:, _RUN] = np.repeat(np.arange(len(runs)), [len(one) for one in runs])
    return rows


@functools.cache
def load_adamw() -> AdamwKernels | None:
    """The functions, or None where nothing is compiled or the processor has no AVX2."""
    code = build.load_library()
    return AdamwKernels(code) if code is not None and code.adamw_ready() else None
