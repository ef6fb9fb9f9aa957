"""Parts of an optimizer step: schedule, AdamW or Muon, gradient clipping, Grokfast, activation checkpointing.

`rl_core.training.optimizer_step` combines them. All of them work on the float32 parameters, by name.

Norm and clipping equal torch's bit for bit, without torch's lookups at every call, which cost more than the norm for
networks as small as those of `rl_core.networks`. If gradients differ in device or type, torch's functions are used.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn
from torch.optim.adamw import adamw

from rl_core.distributed.sharding import is_sharded_tensor
from rl_core.errors import CheckpointError, DataError, SettingsError
from rl_core.settings import OptimizerSettings
from rl_core.storage.checkpoint import extract_moments, load_moments
from rl_core.training.offloaded_adamw import OffloadedAdamW

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def compute_total_norm(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the Euclidean norm over all gradients as a scalar tensor; equals `torch.nn.utils.get_total_norm`."""
    if not _has_single_device_and_dtype(gradients):
        return torch.nn.utils.get_total_norm(gradients)
    with torch.no_grad():
        norms = torch.stack(torch._foreach_norm(list(gradients), 2.0))
        return torch.linalg.vector_norm(norms, 2.0)


def clip_gradients(parameters: Sequence[torch.Tensor], max_norm: float, norm: torch.Tensor) -> None:
    """Scale the gradients of the parameters in place by min(1, max_norm / (norm + 1e-6)).

    Equals `torch.nn.utils.clip_grads_with_norm_`. Args: norm: of all gradients, scalar.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not _has_single_device_and_dtype(gradients) or norm.device != gradients[0].device:
        torch.nn.utils.clip_grads_with_norm_(list(parameters), max_norm, norm)
        return
    with torch.no_grad():
        torch._foreach_mul_(gradients, torch.clamp(max_norm / (norm + 1e-6), max=1.0))


def _has_single_device_and_dtype(gradients: Sequence[torch.Tensor]) -> bool:
    """Return whether all gradients are dense tensors of one device and type, which torch can process together."""
    if not gradients:
        return False
    device, dtype = gradients[0].device, gradients[0].dtype
    return device.type in ("cpu", "cuda") and all(
        type(gradient) is torch.Tensor
        and gradient.dtype == dtype
        and gradient.device == device
        and gradient.layout == torch.strided
        for gradient in gradients
    )


class Optimizer(Protocol):
    """Interface that `OptimizerStep` needs of an optimizer; torch's optimizers and `JointOptimizer` have it."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Live groups; the schedule writes their `lr`."""

    def step(self) -> Any:
        """Update the parameters by their gradients."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Delete the gradients."""

    def state_dict(self) -> dict[str, Any]:
        """Return moments and settings."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a `state_dict`."""


def compute_learning_rate(step: int, settings: OptimizerSettings, total_steps: int) -> float:
    """Compute the learning rate of optimizer step number `step` (0 = the first).

    Warm-up: peak (step + 1) / warmup_steps, so that step "-1" would be at 0 and the last warm-up step is at the peak.
    Then constant, or a decay from the peak towards min_lr_ratio * peak, which it would reach at step `total_steps`.
    """
    peak = settings.learning_rate
    if step < settings.warmup_steps:
        return peak * (step + 1) / settings.warmup_steps
    if settings.schedule == "constant":
        return peak
    decay_steps = max(1, total_steps - settings.warmup_steps)
    progress = min(1.0, (step - settings.warmup_steps) / decay_steps)
    share = 1.0 - progress
    if settings.schedule != "linear":
        share = 0.5 * (1.0 + math.cos(math.pi * progress))
    return peak * (settings.min_lr_ratio + (1.0 - settings.min_lr_ratio) * share)


def adapt_learning_rate_scale(
    scale: float, kl: float, *, target: float, factor: float, low: float, high: float
) -> float:
    """Return the next scale of the learning rate: divided by `factor` if kl > 2 target, multiplied if kl < target / 2.

    Args:
        kl: KL(old || new), nats per action or token; an estimate may be slightly negative.
        low, high: limits of the scale.
    Raises: DataError for a KL that is not finite, or contradictory limits.
    Source: Rudin et al. 2021, arXiv:2109.11978, appendix A.5 (adaptive learning rate).
    """
    if not math.isfinite(kl) or not 0 < low <= high or target <= 0 or factor <= 1:
        raise DataError(
            f"kl {kl}, limits {low} to {high}, target {target} or factor {factor} is out of range"
        )
    if kl > 2 * target:
        scale = scale / factor
    elif kl < target / 2:
        scale = scale * factor
    return min(max(scale, low), high)


def build_optimizer(
    model: nn.Module, masters: Mapping[str, nn.Parameter], settings: OptimizerSettings
) -> Optimizer:
    """Build AdamW over all of `masters`, or Muon over the hidden matrices and AdamW over the rest.

    Muon's update is scaled by 0.2 sqrt(max(rows, columns)) (arXiv:2502.16982, section 2.2), which gives it the size of
    an AdamW update: one learning rate and one schedule serve both.

    Args:
        masters: float32 parameters to train, named as in `model`.
    """
    hidden = find_hidden_matrices(model) & masters.keys() if settings.optimizer == "muon" else set()
    rest = [parameter for name, parameter in masters.items() if name not in hidden]
    # Decay only matrices: norms and biases are scales, not directions (arXiv:1711.05101 leaves it open).
    groups: list[dict[str, Any]] = [
        {"params": [p for p in rest if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0},
    ]
    if not settings.weight_decay:  # one group over all, in the same order
        groups = [{"params": [p for group in groups for p in group["params"]], "weight_decay": 0.0}]
    optimizers: dict[str, torch.optim.Optimizer] = {}
    if rest:
        used_groups = [group for group in groups if group["params"]]
        options: dict[str, Any] = {
            "lr": settings.learning_rate,
            "betas": settings.betas,
            "eps": settings.eps,
        }
        if settings.optimizer_state == "host":
            optimizers["adamw"] = OffloadedAdamW(used_groups, **options)
        else:  # fused: one pass over memory instead of a dozen
            optimizers["adamw"] = torch.optim.AdamW(used_groups, fused=True, **options)
    if hidden:
        matrices = [parameter for name, parameter in masters.items() if name in hidden]
        is_sharded = any(is_sharded_tensor(matrix) for matrix in matrices)
        optimizers["muon"] = (GatheredMuon if is_sharded else torch.optim.Muon)(
            matrices,
            lr=settings.learning_rate,
            weight_decay=settings.weight_decay,
            momentum=settings.muon_momentum,
            adjust_lr_fn="match_rms_adamw",
        )
    return optimizers["adamw"] if settings.optimizer == "adamw" else JointOptimizer(optimizers)


@torch.no_grad()
def step_adamw(optimizer: torch.optim.AdamW) -> None:
    """Run one step of a fused AdamW with the same bits as its `step`, without its checks for profilers and first steps.

    For the networks of `rl_core.networks` these checks cost as much as the step itself.
    """
    updates: list[tuple[dict[str, Any], list[torch.Tensor], list[dict[str, torch.Tensor]]]] = []
    for group in optimizer.param_groups:
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        states = [optimizer.state.get(parameter, {}) for parameter in parameters]
        if not all(states):  # the first step creates the moments
            optimizer.step()
            return
        updates.append((group, parameters, states))
    for group, parameters, states in updates:
        adamw(
            parameters,
            [parameter.grad for parameter in parameters if parameter.grad is not None],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=True,
            amsgrad=False,
            maximize=False,
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
        )


def find_hidden_matrices(model: nn.Module) -> set[str]:
    """Return the names of the trainable parameters that Muon is meant for.

    These are the 2D matrices between embedding and head (of the adapters, if there are any), but not an embedding, the
    output head (which may share the embedding's weight) or another head (`score`, or any name that ends in `head`).
    Three-dimensional stacks of experts are excluded too.
    Source: Jordan et al. 2024, "Muon: an optimizer for hidden layers".
    """
    output = getattr(model, "get_output_embeddings", lambda: None)()
    excluded = {id(p) for p in output.parameters()} if isinstance(output, nn.Module) else set()
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            excluded |= {id(p) for p in module.parameters()}
    return {
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
        and parameter.ndim == 2
        and id(parameter) not in excluded
        and not any(part == "score" or part.endswith("head") for part in name.split("."))
    }


class GatheredMuon(torch.optim.Muon):
    """Muon over sharded matrices: every process computes the whole step and stores its rows.

    Muon orthogonalises whole matrices, so every process holds copies of them and of their momentum besides its rows.
    """

    def __init__(self, params: Iterable[nn.Parameter], **options: Any) -> None:
        self._sharded: list[DTensor] = [
            parameter for parameter in params if is_sharded_tensor(parameter)
        ]
        full_matrices = [nn.Parameter(parameter.full_tensor()) for parameter in self._sharded]
        super().__init__(full_matrices, **options)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Run one step with the gradients of the sharded matrices."""
        from torch.distributed.tensor import distribute_tensor

        full_matrices = self.param_groups[0]["params"]
        for sharded, full in zip(self._sharded, full_matrices, strict=True):
            full.copy_(sharded.full_tensor())
            full.grad = None if sharded.grad is None else sharded.grad.full_tensor()  # type: ignore[attr-defined]
        super().step()
        for sharded, full in zip(self._sharded, full_matrices, strict=True):
            mesh, placements = sharded.device_mesh, sharded.placements
            sharded.copy_(distribute_tensor(full, mesh, placements, src_data_rank=None))
            full.grad = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Delete the gradients of the sharded matrices."""
        for sharded in self._sharded:
            sharded.grad = None


class JointOptimizer:
    """Several optimizers over different parameters, used as one."""

    def __init__(self, parts: Mapping[str, torch.optim.Optimizer]) -> None:
        self.parts = dict(parts)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all parts."""
        return [group for part in self.parts.values() for group in part.param_groups]

    def step(self) -> None:
        """Run one step of each part."""
        for part in self.parts.values():
            part.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Delete the gradients of all parts."""
        for part in self.parts.values():
            part.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the moments of each part, under its name."""
        return {name: extract_moments(part) for name, part in self.parts.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a `state_dict`. Raises: CheckpointError for the state of another optimizer."""
        if state_dict.keys() != self.parts.keys():
            raise CheckpointError(
                f"optimizer: state of {sorted(state_dict)}, expected {sorted(self.parts)}"
            )
        for name, part in self.parts.items():
            load_moments(part, state_dict[name])


class Grokfast:
    """Amplifier of the slow part of gradients: mu <- alpha mu + (1 - alpha) g, then g <- g + lambda mu.

    mu starts as the first gradient. A parameter without a gradient keeps its mu.
    Source: Lee et al. 2024, arXiv:2405.20233, Grokfast-EMA.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], *, amplification: float, alpha: float
    ) -> None:
        self.parameters = parameters
        self.amplification = amplification  # lambda
        self.alpha = alpha
        self.averages: dict[str, torch.Tensor] = {}  # mu, float32

    @torch.no_grad()
    def amplify_gradients(self) -> None:
        """Update the averages with the current gradients, all finite, and add them to the gradients in place."""
        for name, parameter in self.parameters.items():
            if parameter.grad is None:
                continue
            average = self.averages.setdefault(name, parameter.grad.clone())
            average.mul_(self.alpha).add_(parameter.grad, alpha=1.0 - self.alpha)
            parameter.grad.add_(average, alpha=self.amplification)

    def state_dict(self) -> dict[str, Any]:
        """Return the averages by parameter."""
        return dict(self.averages)

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load a `state_dict`."""
        self.averages = load_averages(state, self.parameters)


def load_averages(
    tensors: Mapping[str, torch.Tensor], parameters: Mapping[str, nn.Parameter]
) -> dict[str, torch.Tensor]:
    """Copy a checkpoint's tensors to their parameters' devices. Raises: CheckpointError for an unknown name."""
    unknown = sorted(tensors.keys() - parameters.keys())
    if unknown:
        raise CheckpointError(
            f"averages of another model: there is no trainable parameter {unknown[0]}"
        )
    return {name: tensor.to(parameters[name].device, copy=True) for name, tensor in tensors.items()}


def enable_activation_checkpointing(model: nn.Module) -> None:
    """Let the transformers model in `model` recompute activations in backward instead of storing them.

    This applies in training mode only. Raises: SettingsError if `model` contains no model that supports it.
    """
    targets = _find_checkpointable_modules(model)
    if not targets:
        raise SettingsError(
            f"activation_checkpointing: {type(model).__name__} contains no transformers model that supports it; "
            "leave it false"
        )
    # The reentrant form loses gradients if inputs need none (adapters).
    options = {"use_reentrant": False}
    for target in targets:
        try:
            if hasattr(target, "activation_checkpointing_enable"):  # the name in transformers 5
                target.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
            else:
                target.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
        except ValueError as error:
            raise SettingsError(f"activation_checkpointing: {error}; leave it false") from error


def _find_checkpointable_modules(module: nn.Module) -> Sequence[Any]:
    """Return the outermost modules that can checkpoint their activations."""
    if hasattr(module, "gradient_checkpointing_enable"):
        return [module]
    return [target for child in module.children() for target in _find_checkpointable_modules(child)]
