"""The gradient of one run: that of its adapters as one tensor, and that of anything else by name.

One training run: what it trains, its gradient so far, its optimizer, and all of it as a state.

Everything that later results depend on is in `state_dict`, so a run that is loaded from it goes on bit for bit.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from rl_core.cpu import adamw
from rl_core.errors import CheckpointError
from rl_core.inference.sampling import compute_sequence_seed
from rl_core.models.heads import ValueHead
from rl_core.models.routed_adapters import LowRank
from rl_core.models.trainable_weights import load_trainable_weights
from rl_core.service.base_model import SharedBaseModel
from rl_core.service.requests import AdamParameters, AdapterConfig, CreateModel, OptimStep
from rl_core.service.results import ModelInfo
from rl_core.storage.checkpoint import extract_moments, load_moments
from rl_core.training.optimizers import (
    JointOptimizer,
    clip_gradients,
    find_hidden_matrices,
    step_adamw,
)


class GradientLayout:
    """Places of parameters, one after the other, within a flat tensor."""

    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        self.names = list(parameters)
        self.shapes = [parameter.shape for parameter in parameters.values()]
        sizes = [parameter.numel() for parameter in parameters.values()]
        self.offsets = [0, *itertools.accumulate(sizes)]
        self.size = self.offsets.pop()
        self.sizes = sizes
        self.byte_offsets = 4 * np.array(self.offsets, dtype=np.int64)  # bytes, of float32
        self.index = {name: number for number, name in enumerate(self.names)}


class RunGradient(Mapping[str, torch.Tensor]):
    """Gradient by the name of the parameter; views of the flat tensor."""

    def __init__(
        self,
        layout: GradientLayout,
        flat: torch.Tensor,
        missing: frozenset[str],
        unlaid_gradients: Mapping[str, torch.Tensor],
    ) -> None:
        """flat: float32, 0 at parameters that are `missing`: these have none. loose: those beside the layout."""
        self.layout, self.flat, self.missing, self.unlaid_gradients = (
            layout,
            flat,
            missing,
            unlaid_gradients,
        )
        names = [name for name in layout.names if name not in missing] if missing else layout.names
        self.names = [*names, *unlaid_gradients] if unlaid_gradients else names

    def __getitem__(self, name: str) -> torch.Tensor:
        if name in self.unlaid_gradients:
            return self.unlaid_gradients[name]
        if name in self.missing:
            raise KeyError(name)
        index = self.layout.index[name]
        place = self.layout.offsets[index]
        return self.flat[place : place + self.layout.sizes[index]].view(self.layout.shapes[index])

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    @property
    def data_pointers(self) -> list[int]:
        """Of the gradients of `names`."""
        found: list[int] = (self.layout.byte_offsets + self.flat.data_ptr()).tolist()
        if self.missing:
            found = [
                place
                for place, name in zip(found, self.layout.names, strict=True)
                if name not in self.missing
            ]
        return found + [part.data_ptr() for part in self.unlaid_gradients.values()]

    def copy_to_own_memory(self) -> RunGradient:
        """The same in memory of its own: a part of a pass's tensor would keep the gradients of all its runs."""
        if self.flat.untyped_storage().nbytes() == self.flat.nbytes:
            return self
        return RunGradient(self.layout, self.flat.clone(), self.missing, self.unlaid_gradients)


def add_gradients(
    sum_: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]
) -> Mapping[str, torch.Tensor]:
    """The sum of two gradients of a run; what only one of them has is that one's."""
    if not sum_ or not other:
        return sum_ or other
    if isinstance(sum_, RunGradient) and isinstance(other, RunGradient):
        loose = add_gradients(sum_.unlaid_gradients, other.unlaid_gradients)
        return RunGradient(sum_.layout, sum_.flat + other.flat, sum_.missing & other.missing, loose)
    return {
        **sum_,
        **{name: sum_[name] + own if name in sum_ else own for name, own in other.items()},
    }


STATE_FORMAT = 1


@dataclass(slots=True)
class KLLimitCheck:
    """Limit of the KL that the next update may make, and the tokens on which it is measured."""

    limit: float  # mean KL(old || new), nats per token
    temperature: float
    tokens: list[np.ndarray]  # int64 [T] of each sequence
    targets: list[np.ndarray]  # int64 [T]
    masks: list[np.ndarray]  # bool [T]
    old_logprobs: list[np.ndarray]  # float32 [T], of the policy before the update


class _ScalarHeads(nn.Module):
    """Scalar heads on the last hidden states; without a gradient they are not trained."""

    def __init__(self, size: int, seed: int, device: torch.device) -> None:
        super().__init__()
        self.value_head = ValueHead(size)
        # the scale of Stiennon et al. 2020, arXiv:2009.01325, as in `models.heads`
        generator = torch.Generator().manual_seed(seed)
        self.score_head = nn.Parameter(
            torch.randn(1, size, generator=generator) * (size + 1) ** -0.5
        )
        self.to(device)


class TrainingRun:
    """Adapters over a shared base, or a whole model of its own, with gradient, optimizer and heads."""

    def __init__(self, request: CreateModel, base: SharedBaseModel) -> None:
        self.model_id, self.base, self.config = request.model_id, base, request.adapter
        self.optimizer_kind, self.seed = request.optimizer, request.seed
        self.model: Any = base.model
        self.adapter: dict[str, LowRank] | None = None
        self.heads = _ScalarHeads(base.hidden_size, request.seed, base.device)
        if request.adapter is None:
            self.model = copy.deepcopy(base.model).requires_grad_(True)
            trained = dict(self.model.named_parameters())
            hidden = find_hidden_matrices(self.model)
        else:
            self.adapter = _build_adapter(base, request.adapter)
            trained = _list_adapter_factors(self.adapter)
            hidden = {name for name in trained if not name.startswith(f"{base.head_name}.")}
        self.num_trained = sum(parameter.numel() for parameter in trained.values())
        self.parameters: dict[str, torch.Tensor] = {
            **trained,
            **{f"heads.{name}": parameter for name, parameter in self.heads.named_parameters()},
        }
        self.layout = GradientLayout({} if request.adapter is None else trained)
        head = (
            set()
            if self.head_update is None
            else {f"{base.head_name}.{part}.weight" for part in ("lora_A", "lora_B")}
        )
        # with adapters: parameters that are in none of the model's layers, those of the output and scalar heads
        self.parameters_outside_layers = {
            name: parameter
            for name, parameter in self.parameters.items()
            if name in head or name not in trained
        }
        # by name; what no loss has touched is left out
        self.gradient: Mapping[str, torch.Tensor] = {}
        self.kl_limit_checks: list[KLLimitCheck] = []
        self.steps = 0
        self.data_digest = (
            ""  # of all data that the weights have learned from, in order; "" = none yet
        )
        self._next_digest = ""  # with the data of the gradient so far
        self._hidden = hidden if request.optimizer == "muon" else set()
        self._optimizer = self._build_optimizer()
        self._adamw_rows: adamw.AdamwRows | None = (
            None  # of the optimizer's moments as they are placed now
        )

    @property
    def info(self) -> ModelInfo:
        """For people and clients."""
        return ModelInfo(
            model_id=self.model_id,
            base=self.base.name,
            adapter=self.config,
            optimizer=self.optimizer_kind,
            steps=self.steps,
            num_trained=self.num_trained,
            data_digest=self.data_digest,
        )

    @property
    def head_update(self) -> LowRank | None:
        """The adapter of the output head."""
        return None if self.adapter is None else self.adapter.get(self.base.head_name)

    def add_gradient(self, gradient: Mapping[str, torch.Tensor]) -> None:
        """Add the gradient of one request."""
        sum_ = add_gradients(self.gradient, gradient)
        self.gradient = sum_.copy_to_own_memory() if isinstance(sum_, RunGradient) else sum_

    def build_pass_gradient(
        self,
        flat: torch.Tensor,
        layers: Collection[str],
        outside_gradients: Mapping[str, torch.Tensor],
    ) -> RunGradient:
        """The gradient of a pass. Args: flat: of the adapter, written at these layers; others: of `parameters_outside_layers`."""
        assert self.adapter is not None
        missing, loose = [], dict(outside_gradients)
        for layer in self.adapter.keys() - layers:
            for part in ("lora_A", "lora_B"):
                name = f"{layer}.{part}.weight"
                index = self.layout.index[name]
                place = flat[
                    self.layout.offsets[index] : self.layout.offsets[index]
                    + self.layout.sizes[index]
                ]
                if name in loose:
                    place.copy_(loose.pop(name).reshape(-1))
                else:
                    place.zero_()
                    missing.append(name)
        return RunGradient(self.layout, flat, frozenset(missing), loose)

    def add_data_to_digest(self, rows: Iterable[Mapping[str, np.ndarray]]) -> None:
        """Take the data of one request into the digest of the next update's weights.

        The same data in the same order have the same digest. Args: rows: arrays of each datum, by name.
        """
        digest = hashlib.sha256(self._next_digest.encode())
        for row in rows:
            for name in sorted(row):
                digest.update(f"{name} {row[name].dtype} {row[name].shape}\0".encode())
                digest.update(row[name].tobytes())
        self._next_digest = digest.hexdigest()

    def reset_data_digest(self) -> None:
        """Leave the data of a gradient that is forgotten out of the digest."""
        self._next_digest = self.data_digest

    def take_gradient(self) -> Mapping[str, torch.Tensor]:
        """The gradient so far, which is then forgotten."""
        gradient, self.gradient = self.gradient, {}
        return gradient

    def build_adamw_rows(self, gradient: Mapping[str, torch.Tensor]) -> np.ndarray | None:
        """Places of what a step by this gradient changes, for compiled code; None where torch has to make the step."""
        if adamw.load_adamw() is None or isinstance(self._optimizer, JointOptimizer):
            return None
        if self._adamw_rows is None:
            self._adamw_rows = adamw.AdamwRows(self.parameters, self._optimizer.state)
        if (
            isinstance(gradient, RunGradient)
            and gradient.flat.is_cpu
            and all(map(adamw.is_contiguous_float32, gradient.unlaid_gradients.values()))
        ):
            return self._adamw_rows.select_rows(gradient.names, gradient.data_pointers)
        if not all(map(adamw.is_contiguous_float32, gradient.values())):
            return None
        return self._adamw_rows.select_rows(
            list(gradient), [part.data_ptr() for part in gradient.values()]
        )

    def step_torch_optimizer(
        self, request: OptimStep, gradient: Mapping[str, torch.Tensor], norm: torch.Tensor
    ) -> None:
        """One step, which makes the moments where there are none yet."""
        for name, parameter in self.parameters.items():
            parameter.grad = gradient.get(name)
        if request.adam.grad_clip_norm > 0 and gradient:
            clip_gradients(list(self.parameters.values()), request.adam.grad_clip_norm, norm)
        self._set_optimizer_parameters(request.adam, request.muon_momentum)
        if isinstance(self._optimizer, torch.optim.AdamW):
            step_adamw(self._optimizer)
        else:
            self._optimizer.step()
        for parameter in self.parameters.values():
            parameter.grad = None
        self._adamw_rows = None

    def count_step(self) -> None:
        """Note that an update was made: the weights have now learned from the data since the one before."""
        self.steps += 1
        self.data_digest = self._next_digest

    # -- state ---------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All that later results depend on, on the CPU and apart from the run."""
        return {
            "run": {
                "format": STATE_FORMAT,
                "base": self.base.name,
                "adapter": None if self.config is None else dataclasses.asdict(self.config),
                "optimizer": self.optimizer_kind,
                "seed": self.seed,
                "steps": self.steps,
                "data_digest": self.data_digest,
                "next_digest": self._next_digest,
            },
            "model": {name: _copy_to_cpu(parameter) for name, parameter in self.parameters.items()},
            "optimizer": _copy_tree_to_cpu(self._read_moments()),
            "gradient": {name: _copy_to_cpu(part) for name, part in self.gradient.items()},
            "guards": [
                {field.name: getattr(guard, field.name) for field in dataclasses.fields(guard)}
                for guard in self.kl_limit_checks
            ],
        }

    def load_state_dict(
        self, state: Mapping[str, Any], *, optimizer: bool = True, gradient: bool = True
    ) -> None:
        """Inverse of `state_dict`; weights change in place.

        Args:
            optimizer: False = weights alone: the moments start afresh, and so does the count of steps.
            gradient: False = nothing of what was accumulated when the state was taken.
        Raises: CheckpointError for a state of another kind of run.
        """
        module = _build_parameter_dict(self.parameters)
        load_trainable_weights(
            module, {_replace_dots(name): tensor for name, tensor in state["model"].items()}
        )
        self._optimizer, self._adamw_rows = self._build_optimizer(), None
        self.steps = 0
        if optimizer:
            if state["run"]["optimizer"] != self.optimizer_kind:
                raise CheckpointError(
                    f"the state is of optimizer {state['run']['optimizer']}, this run has {self.optimizer_kind}"
                )
            self._load_moments(state["optimizer"])
            self.steps = int(state["run"]["steps"])
        # the weights' past, whatever is taken along
        self.data_digest = str(state["run"].get("data_digest", ""))
        self.reset_data_digest()
        self.gradient, self.kl_limit_checks = {}, []
        if gradient:
            self._next_digest = str(state["run"].get("next_digest", ""))
            device = self.base.device
            self.gradient = {
                name: part.to(device, copy=True) for name, part in state["gradient"].items()
            }
            self.kl_limit_checks = [KLLimitCheck(**fields) for fields in state["guards"]]

    # -- optimizer -----------------------------------------------------------------------------------------------------

    def _build_optimizer(self) -> torch.optim.Optimizer | JointOptimizer:
        rest = [
            parameter for name, parameter in self.parameters.items() if name not in self._hidden
        ]
        adamw = torch.optim.AdamW(rest, lr=1e-4, fused=True)
        if not self._hidden:
            return adamw
        matrices = [
            parameter for name, parameter in self.parameters.items() if name in self._hidden
        ]
        # adjust_lr_fn as in `training.optimizers`: one learning rate serves both
        muon = torch.optim.Muon(matrices, lr=1e-4, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
        return JointOptimizer({"adamw": adamw, "muon": muon})

    def _set_optimizer_parameters(self, adam: AdamParameters, momentum: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"], group["weight_decay"] = adam.learning_rate, adam.weight_decay
            if "betas" in group:
                group["betas"], group["eps"] = (adam.beta1, adam.beta2), adam.eps
            else:
                group["momentum"] = momentum

    def _read_moments(self) -> dict[str, Any]:
        if isinstance(self._optimizer, JointOptimizer):
            return self._optimizer.state_dict()
        return extract_moments(self._optimizer)

    def _load_moments(self, state: Mapping[str, Any]) -> None:
        state = dict(_copy_tree_to_cpu(state))  # torch keeps what it is given
        if isinstance(self._optimizer, JointOptimizer):
            self._optimizer.load_state_dict(state)
        else:
            load_moments(self._optimizer, state)


def merge_adapter_weights(
    base: SharedBaseModel, adapter: Mapping[str, LowRank]
) -> dict[str, torch.Tensor]:
    """Weights of the base with an adapter's update, by the name of the parameter."""
    return {
        f"{name}.weight": update.add_to_weight(base.model.get_submodule(name).weight.detach())
        for name, update in adapter.items()
    }


def _build_adapter(base: SharedBaseModel, config: AdapterConfig) -> dict[str, LowRank]:
    """A ~ U(-1 / sqrt(I), 1 / sqrt(I)) (peft's), each matrix by a generator of its own; B = 0."""
    adapter = {}
    for name in base.list_adapter_targets(config):
        rows, columns = base.model.get_submodule(name).weight.shape
        generator = torch.Generator().manual_seed(
            compute_sequence_seed("adapter", config.seed, name) % 2**63
        )
        down_RI = (
            torch.rand(config.rank, columns, generator=generator)
            .mul_(2)
            .sub_(1)
            .mul_(columns**-0.5)
        )
        adapter[name] = LowRank(
            nn.Parameter(down_RI.to(base.device)),
            nn.Parameter(torch.zeros(rows, config.rank, device=base.device)),
            config.alpha / config.rank,
        )
    return adapter


def _list_adapter_factors(adapter: Mapping[str, LowRank]) -> dict[str, torch.Tensor]:
    """Parameters by name; named as peft names them."""
    return {
        f"{name}.{part}.weight": factor
        for name, update in adapter.items()
        for part, factor in (("lora_A", update.down_RI), ("lora_B", update.up_OR))
    }


def _replace_dots(name: str) -> str:
    return name.replace(".", "/")  # no dots in the names of a ParameterDict


def _build_parameter_dict(parameters: Mapping[str, torch.Tensor]) -> nn.ParameterDict:
    return nn.ParameterDict(
        {_replace_dots(name): parameter for name, parameter in parameters.items()}
    )


def _copy_to_cpu(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


def _copy_tree_to_cpu(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _copy_to_cpu(value)
    return (
        {key: _copy_tree_to_cpu(item) for key, item in value.items()}
        if isinstance(value, Mapping)
        else value
    )
