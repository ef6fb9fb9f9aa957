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
from rl_core.settings import PolicySettings
from rl_core.user_code import import_function

Metrics = dict[str, torch.Tensor]
CustomFunction = Callable[..., Any]  # written by a user

_METRIC_NAME = re.compile(r"\w[\w./-]{0,99}")
_LOSS_ARGUMENTS = "(logprobs_BT, old_logprobs_BT, advantages_BT, loss_mask_BT, *, num_loss_tokens, loss_weights_BT"
_ADVANTAGE_ARGUMENTS = "(rewards_R, groups_R, lengths_R"


@dataclass(frozen=True)
class CustomFunctions:
    """The user's functions in place of the algorithm's; None = the algorithm's own."""

    loss: CustomLoss | None = None
    advantages: CustomAdvantages | None = None


def load_custom_functions(
    settings: PolicySettings, functions: Mapping[str, CustomFunction] | None = None
) -> CustomFunctions:
    """The parts that the settings name, imported and tried.

    Args:
        functions: those that were handed in, by the name of their setting (loss, advantages); others are imported.
    Raises: SettingsError naming the setting.
    """
    given = functions or {}
    loss = advantages = None
    if settings.loss is not None:
        loss = CustomLoss(settings.loss, settings.loss_options, given.get("loss"))
    if settings.advantages is not None:
        advantages = CustomAdvantages(
            settings.advantages, settings.advantage_options, given.get("advantages")
        )
    return CustomFunctions(loss, advantages)


class CustomLoss:
    """A policy loss of the user's, with the signature of the shipped ones (`losses.policy.clipped_policy_loss`).

        def loss(logprobs_BT, old_logprobs_BT, advantages_BT, loss_mask_BT, *, num_loss_tokens, loss_weights_BT, ...)

    Returns: scalar loss, the sum of the tokens' losses times `loss_weights_BT`; a dict of scalars, sums over tokens
    divided by `num_loss_tokens` (`_max`, `_min`: extremes). So micro-batches and processes add up to the optimizer
    step, and aggregation and importance weights hold as for the shipped losses.
    """

    def __init__(
        self, name: str, options: Mapping[str, Any], function: CustomFunction | None = None
    ) -> None:
        """Find and try the function; `function`: None = the one at the import path `name`.

        Raises: SettingsError where it cannot be found or called, or where parts of a batch do not add up to the whole.
        """
        self.name, self.options = name, dict(options)
        self.function = _resolve_function("loss", name, function)
        tensors = (None,) * 4
        _check_signature(
            "loss", name, self.function, tensors, _LOSS_ARGUMENTS, self.options | _EXAMPLE_KEYWORDS
        )
        _check_loss_on_example(self)

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
            logprobs_BT,
            old_logprobs_BT,
            advantages_BT,
            loss_mask_BT,
            num_loss_tokens=num_loss_tokens,
            loss_weights_BT=loss_weights_BT,
            **self.options,
        )
        loss, metrics = _unpack_result("loss", self.name, given)
        if loss.ndim != 0:
            raise DataError(
                f"loss: '{self.name}' gave a tensor of shape {tuple(loss.shape)}; sum it to a scalar"
            )
        return loss, {"loss": loss.detach()} | _convert_metrics("loss", self.name, metrics)


class CustomAdvantages:
    """An advantage estimator of the user's, in place of the comparison of rewards.

        def advantages(rewards_R, groups_R, lengths_R, ...)

    Args: float64 [R] rewards of an iteration's rollouts; int64 [R] number of each one's group (prompt), from 0; int64
    [R] number of its loss tokens. Returns: float [R], shared by a rollout's tokens; a dict of scalars. Rollouts whose
    reward failed have their group's mean reward, and whatever they get counts as 0.
    """

    def __init__(
        self, name: str, options: Mapping[str, Any], function: CustomFunction | None = None
    ) -> None:
        """Find and try the function; arguments and errors as `CustomLoss`."""
        self.name, self.options = name, dict(options)
        self.function = _resolve_function("advantages", name, function)
        _check_signature(
            "advantages", name, self.function, (None,) * 3, _ADVANTAGE_ARGUMENTS, self.options
        )
        groups = [torch.tensor([1.0, 0.0, 0.0]).double(), torch.tensor([0.5, 0.5]).double()]
        _run_on_example("advantages", name, lambda: self(groups, [4, 2, 3, 5, 1]))

    def __call__(
        self, groups: Sequence[torch.Tensor], lengths: Sequence[int]
    ) -> tuple[list[torch.Tensor], dict[str, float]]:
        """Float [G] for each group, and metrics. Raises: DataError for another shape, or values that are not finite."""
        if not groups:
            return [], {}
        sizes = [len(rewards_G) for rewards_G in groups]
        rewards_R = torch.cat(list(groups))
        groups_R = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
        given = self.function(
            rewards_R.clone(), groups_R, torch.tensor(list(lengths)), **self.options
        )
        advantages_R, metrics = _unpack_result("advantages", self.name, given)
        if advantages_R.shape != rewards_R.shape:
            raise DataError(
                f"advantages: '{self.name}' gave shape {tuple(advantages_R.shape)} for {len(rewards_R)} rollouts; one "
                "number for each is expected"
            )
        if not bool(torch.isfinite(advantages_R).all()):
            raise DataError(f"advantages: '{self.name}' gave values that are not finite")
        scalars = _convert_metrics("advantages", self.name, metrics)
        return list(advantages_R.detach().to(rewards_R).split(sizes)), {
            n: float(v) for n, v in scalars.items()
        }


# ------------------------------------------------------------------------------------------------- looking up, checking


def _resolve_function(key: str, name: str, function: CustomFunction | None) -> CustomFunction:
    if function is None:
        return import_function(name, key)
    if not callable(function):
        raise SettingsError(f"{key}: '{name}' is a {type(function).__name__}, expected a function")
    return function


def _check_signature(
    key: str,
    name: str,
    function: CustomFunction,
    tensors: Sequence[None],
    arguments: str,
    named: Mapping[str, Any],
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


def _run_on_example(key: str, name: str, call: Callable[[], Any]) -> Any:
    """Result of a call on the example; whatever it raises is a SettingsError. Random numbers go on as before."""
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            return call()
    except DataError as error:
        raise SettingsError(str(error)) from error
    except Exception as error:  # a user's function may raise anything
        raise SettingsError(
            f"{key}: '{name}' raised {type(error).__name__} on a small example: {error}"
        ) from error


def _unpack_result(key: str, name: str, given: Any) -> tuple[torch.Tensor, Mapping[str, Any]]:
    if isinstance(given, tuple) and len(given) == 2:
        tensor, metrics = given
        if isinstance(tensor, torch.Tensor) and isinstance(metrics, Mapping):
            return tensor, metrics
    raise DataError(
        f"{key}: '{name}' gave {_describe_result(given)}; return a tensor and a dict of scalars ({{}} = none)"
    )


def _describe_result(given: Any) -> str:
    if isinstance(given, tuple):
        return f"a tuple of {', '.join(type(part).__name__ for part in given) or 'nothing'}"
    return f"a {type(given).__name__}"


def _convert_metrics(key: str, name: str, metrics: Mapping[str, Any]) -> Metrics:
    """The metrics as detached tensors without dimensions."""
    found = {}
    for metric, value in metrics.items():
        if not isinstance(metric, str) or not _METRIC_NAME.fullmatch(metric):
            raise DataError(
                f"{key}: '{name}' gave a metric named {metric!r}; use letters, digits and _ . / -"
            )
        tensor = value.detach() if isinstance(value, torch.Tensor) else None
        if tensor is None and isinstance(value, int | float):
            tensor = torch.tensor(float(value))
        if tensor is None or tensor.ndim != 0:
            words = (
                f"a tensor of shape {tuple(tensor.shape)}" if tensor is not None else repr(value)
            )
            raise DataError(f"{key}: '{name}' gave {metric} = {words}; a metric is one number")
        found[metric] = tensor
    return found


# ------------------------------------------------------------------------------------ a small example, split into parts

_EXAMPLE_KEYWORDS = {"num_loss_tokens": 3.0, "loss_weights_BT": None}
_EXAMPLE_MASK = ((False, True, True, False), (False, True, False, False))
_EXAMPLE_LOGPROBS = ((-0.7, -1.1, -0.4, -2.0), (-0.9, -1.7, -0.3, -1.2))
_EXAMPLE_OLD_LOGPROBS = ((0.0, -0.9, -0.7, 0.0), (0.0, -1.4, 0.0, 0.0))
_EXAMPLE_ADVANTAGES = ((0.0, 1.0, 1.0, 0.0), (0.0, -0.5, 0.0, 0.0))
_EXAMPLE_WEIGHTS = (0.2, 0.6)


def _check_loss_on_example(loss: CustomLoss) -> None:
    """Compare the loss of a batch with that of its rows, at other weights, and with other masked tokens."""

    def of(
        rows: slice = slice(None), weight: float = 1.0, shift: float = 0.0
    ) -> tuple[torch.Tensor, Metrics]:
        mask_BT = torch.tensor(_EXAMPLE_MASK)[rows]
        logprobs_BT = torch.tensor(_EXAMPLE_LOGPROBS)[rows] - shift * (~mask_BT).float()
        weights_BT = weight * mask_BT.float() * torch.tensor(_EXAMPLE_WEIGHTS)[rows, None]
        given = (
            logprobs_BT.requires_grad_(),
            torch.tensor(_EXAMPLE_OLD_LOGPROBS)[rows],
            torch.tensor(_EXAMPLE_ADVANTAGES)[rows],
            mask_BT,
        )
        return loss(*given, num_loss_tokens=3.0, loss_weights_BT=weights_BT)

    whole, metrics = _run_on_example("loss", loss.name, of)
    if not whole.requires_grad or not bool(torch.isfinite(whole)):
        raise SettingsError(
            f"loss: '{loss.name}' gave {_read_scalar(whole)} on a small example, "
            f"{'with' if whole.requires_grad else 'without'} gradient; a finite loss with gradient is needed"
        )
    parts = [
        _run_on_example("loss", loss.name, functools.partial(of, slice(row, row + 1)))
        for row in range(2)
    ]
    wrong = _describe_difference(
        "the loss", _read_scalar(whole), sum(_read_scalar(part) for part, _ in parts)
    )
    for name in metrics:
        values = [_read_scalar(found[name]) for _, found in parts if name in found]
        combine = max if name.endswith("_max") else min if name.endswith("_min") else sum
        wrong = wrong or _describe_difference(
            f"the metric {name}", _read_scalar(metrics[name]), float(combine(values or [0.0]))
        )
    if wrong:
        raise SettingsError(
            f"loss: '{loss.name}': {wrong}, so micro-batches would not add up; weigh each token's loss by "
            "loss_weights_BT and sum, divide sums of metrics by num_loss_tokens"
        )
    once, twice = (
        _read_scalar(whole),
        _read_scalar(_run_on_example("loss", loss.name, lambda: of(weight=2.0))[0]),
    )
    if not _is_close(twice, 2 * once):
        raise SettingsError(
            f"loss: '{loss.name}' gave {once:.6g}, and {twice:.6g} with twice the weights: it does not weigh "
            "each token's loss by loss_weights_BT, which hold aggregation and importance"
        )
    if not _is_close(
        _read_scalar(_run_on_example("loss", loss.name, lambda: of(shift=0.5))[0]), once
    ):
        raise SettingsError(
            f"loss: '{loss.name}' reads tokens where loss_mask_BT is False; leave them out"
        )


def _read_scalar(value: torch.Tensor) -> float:
    return float(value.detach())


def _describe_difference(what: str, whole: float, parts: float) -> str:
    if _is_close(whole, parts):
        return ""
    return f"{what} of two rows is {whole:.6g}, and {parts:.6g} with the rows one at a time"


def _is_close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-4, abs_tol=1e-6)
