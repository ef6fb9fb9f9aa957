"""Training run: trained parameters, accumulated gradient, optimizer, and all of it as a state.

`state_dict` contains everything that later results depend on, so a run restored from it continues bit for bit. The
gradient of a run's adapters is one flat tensor; all other gradients are kept by name.
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

STATE_FORMAT = 1


class GradientLayout:
    """Positions of parameters within a flat tensor."""

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
    """Gradient by parameter name; views of the flat tensor."""

    def __init__(
        self,
        layout: GradientLayout,
        flat: torch.Tensor,
        missing: frozenset[str],
        unlaid_gradients: Mapping[str, torch.Tensor],
    ) -> None:
        """Wrap the parts of a gradient.

        Args:
            flat: float32, 0 at `missing` parameters, which have no gradient.
            unlaid_gradients: gradients that are not in the layout.
        """
        self.layout, self.flat = layout, flat
        self.missing, self.unlaid_gradients = missing, unlaid_gradients
        names = [name for name in layout.names if name not in missing] if missing else layout.names
        self.names = [*names, *unlaid_gradients] if unlaid_gradients else names

    def __getitem__(self, name: str) -> torch.Tensor:
        if name in self.unlaid_gradients:
            return self.unlaid_gradients[name]
        if name in self.missing:
            raise KeyError(name)
        index = self.layout.index[name]
        begin = self.layout.offsets[index]
        return self.flat[begin : begin + self.layout.sizes[index]].view(self.layout.shapes[index])

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    @property
    def data_pointers(self) -> list[int]:
        """Data pointers of the gradients, in the order of `names`."""
        pointers: list[int] = (self.layout.byte_offsets + self.flat.data_ptr()).tolist()
        if self.missing:
            pointers = [
                pointer
                for pointer, name in zip(pointers, self.layout.names, strict=True)
                if name not in self.missing
            ]
        return pointers + [tensor.data_ptr() for tensor in self.unlaid_gradients.values()]

    def copy_to_own_memory(self) -> RunGradient:
        """Return the gradient in separate memory.

        A view of a pass's tensor would keep the gradients of all runs of the pass in memory.
        """
        if self.flat.untyped_storage().nbytes() == self.flat.nbytes:
            return self
        return RunGradient(self.layout, self.flat.clone(), self.missing, self.unlaid_gradients)


def add_gradients(
    sum_: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]
) -> Mapping[str, torch.Tensor]:
    """Return the sum of two gradients of a run; a parameter in only one of them keeps that gradient."""
    if not sum_ or not other:
        return sum_ or other
    if isinstance(sum_, RunGradient) and isinstance(other, RunGradient):
        unlaid = add_gradients(sum_.unlaid_gradients, other.unlaid_gradients)
        missing = sum_.missing & other.missing
        return RunGradient(sum_.layout, sum_.flat + other.flat, missing, unlaid)
    total = dict(sum_)
    for name, gradient in other.items():
        total[name] = total[name] + gradient if name in total else gradient
    return total


@dataclass(slots=True)
class KLLimitCheck:
    """Limit of the KL of the next update, and the tokens on which it is measured."""

    limit: float  # mean KL(old || new), nats per token
    temperature: float
    tokens: list[np.ndarray]  # int64 [T] of each sequence
    targets: list[np.ndarray]  # int64 [T]
    masks: list[np.ndarray]  # bool [T]
    old_logprobs: list[np.ndarray]  # float32 [T], of the policy before the update


class _ScalarHeads(nn.Module):
    """Scalar heads on the last hidden states; they are trained only by losses that use them."""

    def __init__(self, size: int, seed: int, device: torch.device) -> None:
        super().__init__()
        self.value_head = ValueHead(size)
        generator = torch.Generator().manual_seed(seed)
        # The scale of Stiennon et al. 2020, arXiv:2009.01325, as in `models.heads`.
        weights = torch.randn(1, size, generator=generator) * (size + 1) ** -0.5
        self.score_head = nn.Parameter(weights)
        self.to(device)


class TrainingRun:
    """Adapters over a shared base, or a separate complete model, with gradient, optimizer and heads."""

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
        head_factors = set()
        if self.head_update is not None:
            head_factors = {f"{base.head_name}.{part}.weight" for part in ("lora_A", "lora_B")}
        # With adapters: the parameters of the output head and the scalar heads.
        self.parameters_outside_layers = {
            name: parameter
            for name, parameter in self.parameters.items()
            if name in head_factors or name not in trained
        }
        self.gradient: Mapping[str, torch.Tensor] = {}  # without parameters that no loss has used
        self.kl_limit_checks: list[KLLimitCheck] = []
        self.steps = 0
        self.data_digest = ""  # of all training data so far, in order; "" = none
        self._next_digest = ""  # including the data of the accumulated gradient
        self._muon_names = hidden if request.optimizer == "muon" else set()
        self._optimizer = self._build_optimizer()
        self._adamw_rows: adamw.AdamwRows | None = None  # current addresses of the moments

    @property
    def info(self) -> ModelInfo:
        """Description for clients and logs."""
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
        """Adapter of the output head."""
        return None if self.adapter is None else self.adapter.get(self.base.head_name)

    def add_gradient(self, gradient: Mapping[str, torch.Tensor]) -> None:
        """Add the gradient of one request."""
        total = add_gradients(self.gradient, gradient)
        self.gradient = total.copy_to_own_memory() if isinstance(total, RunGradient) else total

    def build_pass_gradient(
        self,
        flat: torch.Tensor,
        layers: Collection[str],
        outside_gradients: Mapping[str, torch.Tensor],
    ) -> RunGradient:
        """Build the gradient of a pass.

        Args:
            flat: of the adapter, written only at `layers`.
            outside_gradients: of `parameters_outside_layers`.
        """
        assert self.adapter is not None
        missing, unlaid = [], dict(outside_gradients)
        for layer in self.adapter.keys() - layers:
            for part in ("lora_A", "lora_B"):
                name = f"{layer}.{part}.weight"
                index = self.layout.index[name]
                begin = self.layout.offsets[index]
                values = flat[begin : begin + self.layout.sizes[index]]
                if name in unlaid:
                    values.copy_(unlaid.pop(name).reshape(-1))
                else:
                    values.zero_()
                    missing.append(name)
        return RunGradient(self.layout, flat, frozenset(missing), unlaid)

    def add_data_to_digest(self, rows: Iterable[Mapping[str, np.ndarray]]) -> None:
        """Add the data of one request to the digest of the next update's weights.

        Equal data in the same order have equal digests.
        Args:
            rows: arrays of each datum, by name.
        """
        digest = hashlib.sha256(self._next_digest.encode())
        for row in rows:
            for name in sorted(row):
                digest.update(f"{name} {row[name].dtype} {row[name].shape}\0".encode())
                digest.update(row[name].tobytes())
        self._next_digest = digest.hexdigest()

    def reset_data_digest(self) -> None:
        """Remove the data of a discarded gradient from the digest."""
        self._next_digest = self.data_digest

    def take_gradient(self) -> Mapping[str, torch.Tensor]:
        """Return the accumulated gradient and discard it."""
        gradient, self.gradient = self.gradient, {}
        return gradient

    def build_adamw_rows(self, gradient: Mapping[str, torch.Tensor]) -> np.ndarray | None:
        """Return the addresses that a compiled step by this gradient changes; None if torch has to make the step."""
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
        pointers = [tensor.data_ptr() for tensor in gradient.values()]
        return self._adamw_rows.select_rows(list(gradient), pointers)

    def step_torch_optimizer(
        self, request: OptimStep, gradient: Mapping[str, torch.Tensor], norm: torch.Tensor
    ) -> None:
        """Make one step with torch, which creates missing moments."""
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
        """Count an update: the weights now include the data since the previous one."""
        self.steps += 1
        self.data_digest = self._next_digest

    def state_dict(self) -> dict[str, Any]:
        """Return a copy, on the CPU, of everything that later results depend on."""
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
                {field.name: getattr(check, field.name) for field in dataclasses.fields(check)}
                for check in self.kl_limit_checks
            ],
        }

    def load_state_dict(
        self, state: Mapping[str, Any], *, optimizer: bool = True, gradient: bool = True
    ) -> None:
        """Load a state; inverse of `state_dict`. Weights change in place.

        Args:
            optimizer: False = load only weights; the moments and the count of steps start again.
            gradient: False = discard what was accumulated when the state was taken.
        Raises: CheckpointError for a state of a different kind of run.
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
                    f"the state is for optimizer {state['run']['optimizer']}, this run uses {self.optimizer_kind}"
                )
            self._load_moments(state["optimizer"])
            self.steps = int(state["run"]["steps"])
        # The history of the weights, whatever else is loaded.
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

    def copy_state(self) -> dict[str, Any]:
        """Return the state without the accumulated gradient, which the next update discards."""
        gradient, self.gradient = self.gradient, {}
        state = self.state_dict()
        self.gradient = gradient
        return state

    def restore_state(self, state: Mapping[str, Any]) -> None:
        """Undo an update; its gradient, and the data of it, stay discarded."""
        self.load_state_dict(state, gradient=False)

    def _build_optimizer(self) -> torch.optim.Optimizer | JointOptimizer:
        matrices = [self.parameters[name] for name in self.parameters if name in self._muon_names]
        others = [self.parameters[name] for name in self.parameters if name not in self._muon_names]
        adamw = torch.optim.AdamW(others, lr=1e-4, fused=True)
        if not self._muon_names:
            return adamw
        # adjust_lr_fn as in `training.optimizers`, so that one learning rate fits both.
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
        state = dict(_copy_tree_to_cpu(state))  # torch does not copy the tensors
        if isinstance(self._optimizer, JointOptimizer):
            self._optimizer.load_state_dict(state)
        else:
            load_moments(self._optimizer, state)


def merge_adapter_weights(
    base: SharedBaseModel, adapter: Mapping[str, LowRank]
) -> dict[str, torch.Tensor]:
    """Return the base's weights with an adapter's update, by parameter name."""
    return {
        f"{name}.weight": update.add_to_weight(base.model.get_submodule(name).weight.detach())
        for name, update in adapter.items()
    }


def _build_adapter(base: SharedBaseModel, config: AdapterConfig) -> dict[str, LowRank]:
    """Build an adapter: A ~ U(-1 / sqrt(I), 1 / sqrt(I)) as in peft, each matrix with a separate generator; B = 0."""
    adapter = {}
    for name in base.list_adapter_targets(config):
        rows, columns = base.model.get_submodule(name).weight.shape
        seed = compute_sequence_seed("adapter", config.seed, name) % 2**63
        uniform_RI = torch.rand(config.rank, columns, generator=torch.Generator().manual_seed(seed))
        down_RI = uniform_RI.mul_(2).sub_(1).mul_(columns**-0.5)
        adapter[name] = LowRank(
            nn.Parameter(down_RI.to(base.device)),
            nn.Parameter(torch.zeros(rows, config.rank, device=base.device)),
            config.alpha / config.rank,
        )
    return adapter


def _list_adapter_factors(adapter: Mapping[str, LowRank]) -> dict[str, torch.Tensor]:
    """Return the parameters of an adapter by the names that peft uses."""
    return {
        f"{name}.{part}.weight": factor
        for name, update in adapter.items()
        for part, factor in (("lora_A", update.down_RI), ("lora_B", update.up_OR))
    }


def _replace_dots(name: str) -> str:
    return name.replace(".", "/")  # a ParameterDict allows no dots in names


def _build_parameter_dict(parameters: Mapping[str, torch.Tensor]) -> nn.ParameterDict:
    return nn.ParameterDict(
        {_replace_dots(name): parameter for name, parameter in parameters.items()}
    )


def _copy_to_cpu(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


def _copy_tree_to_cpu(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _copy_to_cpu(value)
    if isinstance(value, Mapping):
        return {key: _copy_tree_to_cpu(item) for key, item in value.items()}
    return value
