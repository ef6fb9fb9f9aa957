"""AdamW whose moments stay in host memory and pass through the device during each step.

For full training of a model whose moments, 8 bytes a weight, do not fit on the device with weights and gradients. The
step runs the same fused kernel on pieces of the flat parameters, so every weight has the bits of AdamW with its state
on the device. On a GPU the host memory is pinned, and the copies of one piece overlap with the step of another.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.adamw import adamw

from rl_core.distributed.sharding import is_sharded_tensor
from rl_core.errors import SettingsError

_PIECE_SIZE = 2**26  # weights; two moments in two buffers take 1 GiB of the device
_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(slots=True)
class _Piece:
    """A span of a flat parameter whose moments pass through a buffer together."""

    parameter: nn.Parameter
    start: int
    stop: int


class OffloadedAdamW(torch.optim.AdamW):
    """AdamW with moments in host memory."""

    def __init__(
        self, params: Iterable[Any], *, piece_size: int = _PIECE_SIZE, **options: Any
    ) -> None:
        """Build the groups as AdamW does; the moments are created in the first step.

        Raises: SettingsError for weights that several processes share, each of which has a part of the state anyway.
        """
        super().__init__(params, fused=True, **options)
        self._piece_size = piece_size
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        if any(is_sharded_tensor(parameter) for parameter in parameters):
            raise SettingsError(
                "optimizer_state: host is for a single process; several processes share the state on their devices"
            )
        self._device = parameters[0].device
        self._buffers: list[list[torch.Tensor]] = []  # two of [exp_avg, exp_avg_sq]
        is_cuda = self._device.type == "cuda"
        self._uploads = torch.cuda.Stream(self._device) if is_cuda else None
        self._downloads = torch.cuda.Stream(self._device) if is_cuda else None
        # of each buffer: its last piece is in host memory
        self._is_free = [torch.cuda.Event() for _ in range(2)] if is_cuda else []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Run one step over all parameters that have a gradient."""
        assert closure is None
        if not self._buffers:
            self._buffers = [
                [torch.empty(self._piece_size, device=self._device) for _ in _MOMENTS]
                for _ in range(2)
            ]
        # the last step's moments have to be in host memory
        if self._uploads is not None and self._downloads is not None:
            self._uploads.wait_stream(self._downloads)
        number = 0
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            for parameter in parameters:
                self._create_moments(parameter)
                for start in range(0, parameter.numel(), self._piece_size):
                    stop = min(start + self._piece_size, parameter.numel())
                    self._step_piece(group, _Piece(parameter, start, stop), number)
                    number += 1
                self.state[parameter]["step"] += 1

    def _step_piece(self, group: dict[str, Any], piece: _Piece, number: int) -> None:
        """Upload the moments of a piece, run the fused kernel on it, and download them."""
        parameter, state = piece.parameter, self.state[piece.parameter]
        assert parameter.grad is not None
        span = slice(piece.start, piece.stop)
        host = [state[name].view(-1)[span] for name in _MOMENTS]
        buffers = [buffer[: piece.stop - piece.start] for buffer in self._buffers[number % 2]]
        self._upload(buffers, host, number % 2)
        adamw(
            [parameter.view(-1)[span]],
            [parameter.grad.reshape(-1)[span]],
            [buffers[0]],
            [buffers[1]],
            [],
            [state["step"].clone()],  # the kernel adds 1, and a parameter has several pieces
            fused=True,
            amsgrad=False,
            maximize=False,
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
        )
        self._download(host, buffers, number % 2)

    def _upload(self, buffers: list[torch.Tensor], host: list[torch.Tensor], index: int) -> None:
        """Fill a buffer once its last piece is in host memory; the step waits for it on the device."""
        if self._uploads is None:
            _copy_all(buffers, host)
            return
        self._uploads.wait_event(self._is_free[index])
        with torch.cuda.stream(self._uploads):
            _copy_all(buffers, host)
        torch.cuda.current_stream(self._device).wait_stream(self._uploads)

    def _download(self, host: list[torch.Tensor], buffers: list[torch.Tensor], index: int) -> None:
        """Copy a buffer to host memory once the step has changed it."""
        if self._downloads is None:
            _copy_all(host, buffers)
            return
        self._downloads.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._downloads):
            _copy_all(host, buffers)
            self._is_free[index].record()

    def _create_moments(self, parameter: nn.Parameter) -> None:
        state = self.state[parameter]
        if state:
            return
        state["step"] = torch.zeros((), device=parameter.device)
        for name in _MOMENTS:
            state[name] = torch.zeros(
                parameter.shape, device="cpu", pin_memory=self._uploads is not None
            )

    def state_dict(self) -> dict[str, Any]:
        """Return moments and settings, after the last copy to the host."""
        if self._downloads is not None:
            self._downloads.synchronize()
        return super().state_dict()

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Copy the moments of a `state_dict`, also of an AdamW with its state on the device, into host memory."""
        if self._downloads is not None:
            self._downloads.synchronize()
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        self.state.clear()
        for number, entry in state_dict["state"].items():
            parameter = parameters[number]
            self._create_moments(parameter)
            for name, value in entry.items():
                self.state[parameter][name].copy_(value)


def _copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, non_blocking=True)
