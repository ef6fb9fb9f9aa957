"""Custom policy loss and advantage estimator: imported, tried on a small example, and called with checked results.

Suffixes: B rows of a micro-batch, T tokens, R rollouts of an iteration, G rollouts per prompt.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rl_core.errors import DataError, SettingsError
from rl_core.settings import PolicySettings
from rl_core.user_code.checks import USER_CODE_ERRORS, check_signature, inspect_signature
from rl_core.user_code.load import import_function

Metrics = dict[str, torch.Tensor]
CustomFunction = Callable[..., Any]  # written by the user
_METRIC_NAME = re.compile(r"\w[\w./-]{0,99}")
_LOSS_ARGUMENTS = (
    "(logprobs_BT, old_logprobs_BT, advantages_BT, loss_mask_BT, *, num_loss_tokens, "
    "loss_weights_BT, ...options)"
)
_ADVANTAGE_ARGUMENTS = "(rewards_R, groups_R, lengths_R, ...options)"
_COMPONENTS_ARGUMENT = "components_R"  # passed to an estimator that has a parameter of this name

# A small example of two rows, on which a custom loss is tried.
_EXAMPLE_KEYWORDS = {"num_loss_tokens": 3.0, "loss_weights_BT": None}
_EXAMPLE_MASK = ((False, True, True, False), (False, True, False, False))
_EXAMPLE_LOGPROBS = ((-0.7, -1.1, -0.4, -2.0), (-0.9, -1.7, -0.3, -1.2))
_EXAMPLE_OLD_LOGPROBS = ((0.0, -0.9, -0.7, 0.0), (0.0, -1.4, 0.0, 0.0))
_EXAMPLE_ADVANTAGES = ((0.0, 1.0, 1.0, 0.0), (0.0, -0.5, 0.0, 0.0))
_EXAMPLE_WEIGHTS = (0.2, 0.6)


@dataclass(frozen=True)
class CustomFunctions:
    """The user's functions that replace those of the algorithm; None = the algorithm's."""

    loss: CustomLoss | None = None
    advantages: CustomAdvantages | None = None


def load_custom_functions(
    settings: PolicySettings, functions: Mapping[str, CustomFunction] | None = None
) -> CustomFunctions:
    """Load the functions that the settings name, and try them on an example.

    Args:
        functions: functions passed as objects, by the name of their setting (loss, advantages); others are imported.
    Raises: SettingsError naming the setting.
    """
    functions_by_setting = functions or {}
    loss = advantages = None
    if settings.loss is not None:
        loss = CustomLoss(settings.loss, settings.loss_options, functions_by_setting.get("loss"))
    if settings.advantages is not None:
        advantages = CustomAdvantages(
            settings.advantages, settings.advantage_options, functions_by_setting.get("advantages")
        )
    return CustomFunctions(loss, advantages)


class CustomLoss:
    """A user's policy loss, with the signature of the shipped ones (`losses.policy.clipped_policy_loss`).

        def loss(logprobs_BT, old_logprobs_BT, advantages_BT, loss_mask_BT, *, num_loss_tokens, loss_weights_BT, ...)

    Returns: scalar loss, the sum of the tokens' losses times `loss_weights_BT`; a dict of scalars, sums over tokens
    divided by `num_loss_tokens` (`_max`, `_min`: extremes). Then micro-batches and processes add up to the optimizer
    step, and aggregation and importance weights work as for the shipped losses.
    """

    def __init__(
        self, name: str, options: Mapping[str, Any], function: CustomFunction | None = None
    ) -> None:
        """Resolve and try the function; `function`: None = the one at the import path `name`.

        Raises: SettingsError if it cannot be found or called, or if parts of a batch do not add up to the whole.
        """
        self.name, self.options = name, dict(options)
        self.function = import_function(name, "loss", function)
        check_signature(
            self.function, f"loss: '{name}'", _LOSS_ARGUMENTS, 4, self.options | _EXAMPLE_KEYWORDS
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
        """Return the scalar loss with gradient and its detached metrics. Raises: DataError for any other result."""
        result = self.function(
            logprobs_BT,
            old_logprobs_BT,
            advantages_BT,
            loss_mask_BT,
            num_loss_tokens=num_loss_tokens,
            loss_weights_BT=loss_weights_BT,
            **self.options,
        )
        loss, metrics = _unpack_result("loss", self.name, result)
        if loss.ndim != 0:
            raise DataError(
                f"loss: '{self.name}' returned a tensor of shape {tuple(loss.shape)}; sum it to a scalar"
            )
        return loss, {"loss": loss.detach()} | _convert_metrics("loss", self.name, metrics)


class CustomAdvantages:
    """A user's advantage estimator, which replaces the comparison of rewards.

        def advantages(rewards_R, groups_R, lengths_R, ...)

    Args: float64 [R] rewards of an iteration's rollouts; int64 [R] index of each one's group (prompt), from 0; int64
        [R]
    number of its loss tokens. An estimator with a parameter `components_R` also gets the contribution of each reward
    component, by name: float64 [R], which sum to the rewards; 0 for a rollout without the component (of another
    environment of a mixture). Returns: float [R], shared by a rollout's tokens; a dict of scalars. Rollouts whose
    reward failed are left out, and have the advantage 0.
    """

    def __init__(
        self, name: str, options: Mapping[str, Any], function: CustomFunction | None = None
    ) -> None:
        """Resolve and try the function; arguments and errors as `CustomLoss`."""
        self.name, self.options = name, dict(options)
        self.function = import_function(name, "advantages", function)
        signature = inspect_signature(self.function)
        self.takes_components = (
            signature is not None
            and _COMPONENTS_ARGUMENT in signature.parameters
            and _COMPONENTS_ARGUMENT not in self.options
        )
        named = {_COMPONENTS_ARGUMENT: None} if self.takes_components else {}
        check_signature(
            self.function, f"advantages: '{name}'", _ADVANTAGE_ARGUMENTS, 3, self.options | named
        )
        groups = [torch.tensor([1.0, 0.0, 0.0]).double(), torch.tensor([0.5, 0.5]).double()]
        components = {"task": torch.cat(groups)}
        _run_on_example("advantages", name, lambda: self(groups, [4, 2, 3, 5, 1], components))

    def __call__(
        self,
        groups: Sequence[torch.Tensor],
        lengths: Sequence[int],
        components: Mapping[str, torch.Tensor] | None = None,
    ) -> tuple[list[torch.Tensor], dict[str, float]]:
        """Return float [G] for each group, and metrics. Raises: DataError for another shape or non-finite values.

        Args:
            components: float [R] contributions by name, for an estimator that takes them.
        """
        if not groups:
            return [], {}
        sizes = [len(rewards_G) for rewards_G in groups]
        rewards_R = torch.cat(list(groups))
        groups_R = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
        named: dict[str, Any] = {}
        if self.takes_components:
            named[_COMPONENTS_ARGUMENT] = {
                key: values_R.clone() for key, values_R in (components or {}).items()
            }
        result = self.function(
            rewards_R.clone(), groups_R, torch.tensor(list(lengths)), **self.options, **named
        )
        advantages_R, metrics = _unpack_result("advantages", self.name, result)
        if advantages_R.shape != rewards_R.shape:
            raise DataError(
                f"advantages: '{self.name}' returned shape {tuple(advantages_R.shape)} for {len(rewards_R)} rollouts; "
                "one number for each is expected"
            )
        if not bool(torch.isfinite(advantages_R).all()):
            raise DataError(f"advantages: '{self.name}' returned values that are not finite")
        scalars = _convert_metrics("advantages", self.name, metrics)
        advantages = list(advantages_R.detach().to(rewards_R).split(sizes))
        return advantages, {metric: float(value) for metric, value in scalars.items()}


def _run_on_example(key: str, name: str, call: Callable[[], Any]) -> Any:
    """Call a function on the example; turn whatever it raises into a SettingsError. Preserve the random state."""
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            return call()
    except DataError as error:
        raise SettingsError(str(error)) from error
    except USER_CODE_ERRORS as error:  # a user's function may raise anything
        raise SettingsError(
            f"{key}: '{name}' raised {type(error).__name__} on a small example: {error}"
        ) from error


def _unpack_result(key: str, name: str, result: Any) -> tuple[torch.Tensor, Mapping[str, Any]]:
    if isinstance(result, tuple) and len(result) == 2:
        tensor, metrics = result
        if isinstance(tensor, torch.Tensor) and isinstance(metrics, Mapping):
            return tensor, metrics
    raise DataError(
        f"{key}: '{name}' returned {_describe_result(result)}; return a tensor and a dict of scalars ({{}} = none)"
    )


def _describe_result(result: Any) -> str:
    if isinstance(result, tuple):
        return f"a tuple of {', '.join(type(part).__name__ for part in result) or 'nothing'}"
    return f"a {type(result).__name__}"


def _convert_metrics(key: str, name: str, metrics: Mapping[str, Any]) -> Metrics:
    """Convert metrics to detached tensors without dimensions."""
    converted = {}
    for metric, value in metrics.items():
        if not isinstance(metric, str) or not _METRIC_NAME.fullmatch(metric):
            raise DataError(
                f"{key}: '{name}' returned a metric named {metric!r}; use letters, digits and _ . / -"
            )
        tensor = value.detach() if isinstance(value, torch.Tensor) else None
        if tensor is None and isinstance(value, int | float):
            tensor = torch.tensor(float(value))
        if tensor is None or tensor.ndim != 0:
            shown = repr(value) if tensor is None else f"a tensor of shape {tuple(tensor.shape)}"
            raise DataError(f"{key}: '{name}' returned {metric} = {shown}; a metric is one number")
        converted[metric] = tensor
    return converted


def _check_loss_on_example(loss: CustomLoss) -> None:
    """Compare the loss of a batch with the losses of its rows, with other weights, and with other masked tokens."""

    def compute(
        rows: slice = slice(None), weight: float = 1.0, shift: float = 0.0
    ) -> tuple[torch.Tensor, Metrics]:
        mask_BT = torch.tensor(_EXAMPLE_MASK)[rows]
        logprobs_BT = torch.tensor(_EXAMPLE_LOGPROBS)[rows] - shift * (~mask_BT).float()
        weights_BT = weight * mask_BT.float() * torch.tensor(_EXAMPLE_WEIGHTS)[rows, None]
        return loss(
            logprobs_BT.requires_grad_(),
            torch.tensor(_EXAMPLE_OLD_LOGPROBS)[rows],
            torch.tensor(_EXAMPLE_ADVANTAGES)[rows],
            mask_BT,
            num_loss_tokens=3.0,
            loss_weights_BT=weights_BT,
        )

    def run(**changes: Any) -> tuple[torch.Tensor, Metrics]:
        return _run_on_example("loss", loss.name, functools.partial(compute, **changes))

    batch_loss, batch_metrics = run()
    total = float(batch_loss.detach())
    if not batch_loss.requires_grad or not math.isfinite(total):
        raise SettingsError(
            f"loss: '{loss.name}' returned {total} on a small example, "
            f"{'with' if batch_loss.requires_grad else 'without'} gradient; a finite loss with gradient is needed"
        )
    rows = [run(rows=slice(row, row + 1)) for row in range(2)]
    sum_of_rows = sum(float(row_loss.detach()) for row_loss, _ in rows)
    difference = _describe_difference("the loss", total, sum_of_rows)
    for name, value in batch_metrics.items():
        values = [float(row_metrics[name]) for _, row_metrics in rows if name in row_metrics]
        combine = max if name.endswith("_max") else min if name.endswith("_min") else sum
        difference = difference or _describe_difference(
            f"the metric {name}", float(value), float(combine(values or [0.0]))
        )
    if difference:
        raise SettingsError(
            f"loss: '{loss.name}': {difference}, so micro-batches would not add up; weigh each token's loss by "
            "loss_weights_BT and sum, divide sums of metrics by num_loss_tokens"
        )
    doubled = float(run(weight=2.0)[0].detach())
    if not _is_close(doubled, 2 * total):
        raise SettingsError(
            f"loss: '{loss.name}' returned {total:.6g}, and {doubled:.6g} with twice the weights: it does not weigh "
            "each token's loss by loss_weights_BT, which hold aggregation and importance"
        )
    if not _is_close(float(run(shift=0.5)[0].detach()), total):
        raise SettingsError(
            f"loss: '{loss.name}' reads tokens where loss_mask_BT is False; leave them out"
        )


def _describe_difference(quantity: str, batch_value: float, sum_of_rows: float) -> str:
    if _is_close(batch_value, sum_of_rows):
        return ""
    return f"{quantity} of two rows is {batch_value:.6g}, and {sum_of_rows:.6g} with the rows one at a time"


def _is_close(value: float, expected: float) -> bool:
    return math.isclose(value, expected, rel_tol=1e-4, abs_tol=1e-6)
