"""The user's own policy loss and advantage estimator: found, tried on a small example, and called with checked results.

Suffixes: B rows of a micro-batch, T tokens, R rollouts of an iteration, G rollouts per prompt.
"""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rl_core.errors import DataError, SettingsError
from rl_core.importing import import_function
from rl_core.settings import PolicySettings

__all__ = ["OwnAdvantages", "OwnLoss", "OwnParts", "own_parts"]

Metrics = dict[str, torch.Tensor]
Function = Callable[..., Any]  # written by a user

_METRIC_NAME = re.compile(r"\w[\w./-]{0,99}")
_LOSS_ARGUMENTS = "(logprobs_BT, old_logprobs_BT, advantages_BT, loss_mask_BT, *, num_loss_tokens, loss_weights_BT"
_ADVANTAGE_ARGUMENTS = "(rewards_R, groups_R, lengths_R"


@dataclass(frozen=True)
class OwnParts:
    """The user's functions in place of the algorithm's; None = the algorithm's own."""

    loss: OwnLoss | None = None
    advantages: OwnAdvantages | None = None


def own_parts(settings: PolicySettings, functions: Mapping[str, Function] | None = None) -> OwnParts:
    """The parts that the settings name, imported and tried.

    Args:
        functions: those that were handed in, by the name of their setting (loss, advantages); others are imported.
    Raises: SettingsError naming the setting.
    """
    given = functions or {}
    loss = advantages = None
    if settings.loss is not None:
        loss = OwnLoss(settings.loss, settings.loss_options, given.get("loss"))
    if settings.advantages is not None:
        advantages = OwnAdvantages(settings.advantages, settings.advantage_options, given.get("advantages"))
    return OwnParts(loss, advantages)


class OwnLoss:
    """A policy loss of the user's, with the signature of the shipped ones (`losses.policy.clipped_policy_loss`).

        def loss(logprobs_BT, old_logprobs_BT, advantages_BT, loss_mask_BT, *, num_loss_tokens, loss_weights_BT, ...)

    Returns: scalar loss, the sum of the tokens' losses times `loss_weights_BT`; a dict of scalars, sums over tokens
    divided by `num_loss_tokens` (`_max`, `_min`: extremes). So micro-batches and processes add up to the optimizer
    step, and aggregation and importance weights hold as for the shipped losses.
    """

    def __init__(self, name: str, options: Mapping[str, Any], function: Function | None = None) -> None:
        """Find and try the function; `function`: None = the one at the import path `name`.

        Raises: SettingsError where it cannot be found or called, or where parts of a batch do not add up to the whole.
        """
        self.name, self.options = name, dict(options)
        self.function = _found("loss", name, function)
        tensors = (None,) * 4
        _check_call("loss", name, self.function, tensors, _LOSS_ARGUMENTS, self.options | _COUNTS)
        _try_loss(self)

    def __call__(
        self,
        logprobs_BT: torch.Tensor,
        old_logprobs_BT: torch.Tensor,
        advantages_BT: torch.Tensor,
        loss_mask_BT: torch.Tensor,
        *,
        num_loss_tokens: float,
        loss_weights_BT: torch.Tensor,
    ) -> tuple[torch.Tensor, Metrics]:
        """Scalar loss with gradient; its metrics, detached. Raises: DataError for anything else."""
        given = self.function(
            logprobs_BT, old_logprobs_BT, advantages_BT, loss_mask_BT,
            num_loss_tokens=num_loss_tokens, loss_weights_BT=loss_weights_BT, **self.options,
        )  # fmt: skip
        loss, metrics = _pair("loss", self.name, given)
        if loss.ndim != 0:
            raise DataError(f"loss: '{self.name}' gave a tensor of shape {tuple(loss.shape)}; sum it to a scalar")
        return loss, {"loss": loss.detach()} | _scalars("loss", self.name, metrics)


class OwnAdvantages:
    """An advantage estimator of the user's, in place of the comparison of rewards.

        def advantages(rewards_R, groups_R, lengths_R, ...)

    Args: float64 [R] rewards of an iteration's rollouts; int64 [R] number of each one's group (prompt), from 0; int64
    [R] number of its loss tokens. Returns: float [R], shared by a rollout's tokens; a dict of scalars. Rollouts whose
    reward failed have their group's mean reward, and whatever they get counts as 0.
    """

    def __init__(self, name: str, options: Mapping[str, Any], function: Function | None = None) -> None:
        """Find and try the function; arguments and errors as `OwnLoss`."""
        self.name, self.options = name, dict(options)
        self.function = _found("advantages", name, function)
        _check_call("advantages", name, self.function, (None,) * 3, _ADVANTAGE_ARGUMENTS, self.options)
        groups = [torch.tensor([1.0, 0.0, 0.0]).double(), torch.tensor([0.5, 0.5]).double()]
        _tried("advantages", name, lambda: self(groups, [4, 2, 3, 5, 1]))

    def __call__(
        self, groups: Sequence[torch.Tensor], lengths: Sequence[int]
    ) -> tuple[list[torch.Tensor], dict[str, float]]:
        """Float [G] for each group, and metrics. Raises: DataError for another shape, or values that are not finite."""
        if not groups:
            return [], {}
        sizes = [len(rewards_G) for rewards_G in groups]
        rewards_R = torch.cat(list(groups))
        groups_R = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
        given = self.function(rewards_R.clone(), groups_R, torch.tensor(list(lengths)), **self.options)
        advantages_R, metrics = _pair("advantages", self.name, given)
        if advantages_R.shape != rewards_R.shape:
            raise DataError(
                f"advantages: '{self.name}' gave shape {tuple(advantages_R.shape)} for {len(rewards_R)} rollouts; one "
                "number for each is expected"
            )
        if not bool(torch.isfinite(advantages_R).all()):
            raise DataError(f"advantages: '{self.name}' gave values that are not finite")
        scalars = _scalars("advantages", self.name, metrics)
        return list(advantages_R.detach().to(rewards_R).split(sizes)), {n: float(v) for n, v in scalars.items()}


# ------------------------------------------------------------------------------------------------- looking up, checking


def _found(key: str, name: str, function: Function | None) -> Function:
    if function is None:
        return import_function(name, key)
    if not callable(function):
        raise SettingsError(f"{key}: '{name}' is a {type(function).__name__}, expected a function")
    return function


def _check_call(
    key: str, name: str, function: Function, tensors: Sequence[None], arguments: str, named: Mapping[str, Any]
) -> None:
    """Raise SettingsError where the function cannot be called with these tensors and names."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # written in C: it shows no parameters
        return
    try:
        signature.bind(*tensors, **named)
    except TypeError as error:
        raise SettingsError(
            f"{key}: '{name}' takes {signature} ({error}); it is called with {arguments}, ...options)"
        ) from error


def _tried(key: str, name: str, call: Callable[[], Any]) -> Any:
    """Result of a call on the example; whatever it raises is a SettingsError. Random numbers go on as before."""
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            return call()
    except DataError as error:
        raise SettingsError(str(error)) from error
    except Exception as error:  # a user's function may raise anything
        raise SettingsError(f"{key}: '{name}' raised {type(error).__name__} on a small example: {error}") from error


def _pair(key: str, name: str, given: Any) -> tuple[torch.Tensor, Mapping[str, Any]]:
    if isinstance(given, tuple) and len(given) == 2:
        tensor, metrics = given
        if isinstance(tensor, torch.Tensor) and isinstance(metrics, Mapping):
            return tensor, metrics
    raise DataError(f"{key}: '{name}' gave {_words(given)}; return a tensor and a dict of scalars ({{}} = none)")


def _words(given: Any) -> str:
    if isinstance(given, tuple):
        return f"a tuple of {', '.join(type(part).__name__ for part in given) or 'nothing'}"
    return f"a {type(given).__name__}"


def _scalars(key: str, name: str, metrics: Mapping[str, Any]) -> Metrics:
    """The metrics as detached tensors without dimensions."""
    found = {}
    for metric, value in metrics.items():
        if not isinstance(metric, str) or not _METRIC_NAME.fullmatch(metric):
            raise DataError(f"{key}: '{name}' gave a metric named {metric!r}; use letters, digits and _ . / -")
        tensor = value.detach() if isinstance(value, torch.Tensor) else None
        if tensor is None and isinstance(value, int | float):
            tensor = torch.tensor(float(value))
        if tensor is None or tensor.ndim != 0:
            words = f"a tensor of shape {tuple(tensor.shape)}" if tensor is not None else repr(value)
            raise DataError(f"{key}: '{name}' gave {metric} = {words}; a metric is one number")
        found[metric] = tensor
    return found


# ------------------------------------------------------------------------------------ a small example, split into parts

_COUNTS = {"num_loss_tokens": 3.0, "loss_weights_BT": None}
_MASK = ((False, True, True, False), (False, True, False, False))
_LOGPROBS = ((-0.7, -1.1, -0.4, -2.0), (-0.9, -1.7, -0.3, -1.2))
_OLD = ((0.0, -0.9, -0.7, 0.0), (0.0, -1.4, 0.0, 0.0))
_ADVANTAGES = ((0.0, 1.0, 1.0, 0.0), (0.0, -0.5, 0.0, 0.0))
_WEIGHTS = (0.2, 0.6)


def _try_loss(loss: OwnLoss) -> None:
    """Compare the loss of a batch with that of its rows, at other weights, and with other masked tokens."""

    def of(rows: slice = slice(None), weight: float = 1.0, shift: float = 0.0) -> tuple[torch.Tensor, Metrics]:
        mask_BT = torch.tensor(_MASK)[rows]
        logprobs_BT = torch.tensor(_LOGPROBS)[rows] - shift * (~mask_BT).float()
        weights_BT = weight * mask_BT.float() * torch.tensor(_WEIGHTS)[rows, None]
        given = logprobs_BT.requires_grad_(), torch.tensor(_OLD)[rows], torch.tensor(_ADVANTAGES)[rows], mask_BT
        return loss(*given, num_loss_tokens=3.0, loss_weights_BT=weights_BT)

    whole, metrics = _tried("loss", loss.name, of)
    if not whole.requires_grad or not bool(torch.isfinite(whole)):
        raise SettingsError(
            f"loss: '{loss.name}' gave {_number(whole)} on a small example, "
            f"{'with' if whole.requires_grad else 'without'} gradient; a finite loss with gradient is needed"
        )
    parts = [_tried("loss", loss.name, functools.partial(of, slice(row, row + 1))) for row in range(2)]
    wrong = _differs("the loss", _number(whole), sum(_number(part) for part, _ in parts))
    for name in metrics:
        values = [_number(found[name]) for _, found in parts if name in found]
        combine = max if name.endswith("_max") else min if name.endswith("_min") else sum
        wrong = wrong or _differs(f"the metric {name}", _number(metrics[name]), float(combine(values or [0.0])))
    if wrong:
        raise SettingsError(
            f"loss: '{loss.name}': {wrong}, so micro-batches would not add up; weigh each token's loss by "
            "loss_weights_BT and sum, divide sums of metrics by num_loss_tokens"
        )
    once, twice = _number(whole), _number(_tried("loss", loss.name, lambda: of(weight=2.0))[0])
    if not _close(twice, 2 * once):
        raise SettingsError(
            f"loss: '{loss.name}' gave {once:.6g}, and {twice:.6g} with twice the weights: it does not weigh "
            "each token's loss by loss_weights_BT, which hold aggregation and importance"
        )
    if not _close(_number(_tried("loss", loss.name, lambda: of(shift=0.5))[0]), once):
        raise SettingsError(f"loss: '{loss.name}' reads tokens where loss_mask_BT is False; leave them out")


def _number(value: torch.Tensor) -> float:
    return float(value.detach())


def _differs(what: str, whole: float, parts: float) -> str:
    if _close(whole, parts):
        return ""
    return f"{what} of two rows is {whole:.6g}, and {parts:.6g} with the rows one at a time"


def _close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-4, abs_tol=1e-6)
