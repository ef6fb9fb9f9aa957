"""Log-probabilities of a reference model for losses that are held to one, where the client leaves them to the service.

The base model of a run needs no second copy: it is what is left when the run's adapter is switched off.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from rl_core.data.batches import micro_batches, unscored_batch
from rl_core.errors import nearest
from rl_core.models.chunked_head import selected_logprobs, temperatures_of
from rl_core.models.hidden_states import hidden_states
from rl_core.service.input_checks import CheckedRequest, refuse
from rl_core.service.reference_models import ReferenceModels
from rl_core.service.training_run import TrainingRun

__all__ = ["with_reference"]

BASE = "base"  # the run's own base model


def with_reference(
    run: TrainingRun, checked: CheckedRequest, models: ReferenceModels, pass_tokens: int
) -> CheckedRequest:
    """The request with `ref_logprobs` of the reference model that it names, if it names one.

    They depend on the request's own rows alone. Raises: ServiceError.
    """
    name = checked.reference
    if not name:
        return checked
    if any("ref_logprobs" in inputs for inputs in checked.inputs):
        refuse("loss_fn_config: reference is given, and so are ref_logprobs; give one of them")
    temperature = checked.options["temperature"]
    if name in (BASE, run.base.name):
        found = _of_base(run, checked, temperature, pass_tokens)
    elif name in models.names:
        found = _of_model(run, checked, models, temperature)
    else:
        known = [BASE, run.base.name, *models.names]
        refuse(f"loss_fn_config: there is no reference model '{name[:200]}'; {nearest(name, known)}")
    inputs = [
        {**given, "ref_logprobs": values.astype(np.float32)}
        for given, values in zip(checked.inputs, found, strict=True)
    ]
    return dataclasses.replace(checked, inputs=inputs)


@torch.no_grad()
def _of_base(run: TrainingRun, checked: CheckedRequest, temperature: float, pass_tokens: int) -> list[np.ndarray]:
    """By the frozen base, without any adapter."""
    base, found = run.base, [np.zeros(0)] * len(checked.tokens)
    for chosen in micro_batches([len(row) for row in checked.tokens], pass_tokens):
        rows = [checked.tokens[index] for index in chosen]
        batch = unscored_batch([row.tolist() for row in rows], base.pad_id).to(base.device)
        states_BSH = hidden_states(base.model, batch)
        states_NH = torch.cat([states_BSH[place, : len(row)] for place, row in enumerate(rows)])
        targets_N = torch.from_numpy(np.concatenate([checked.inputs[index]["target_tokens"] for index in chosen]))
        logprobs_N, _ = selected_logprobs(
            states_NH, base.head.weight, base.head.bias, targets_N.to(base.device),
            temperatures_N=temperatures_of([temperature], [len(states_NH)], base.device),
        )  # fmt: skip
        ends = np.cumsum([len(row) for row in rows])[:-1]
        for index, values in zip(chosen, np.split(logprobs_N.float().cpu().numpy(), ends), strict=True):
            found[index] = values
    return found


def _of_model(
    run: TrainingRun, checked: CheckedRequest, models: ReferenceModels, temperature: float
) -> list[np.ndarray]:
    """By a model of the pool, which reads the targets as the tokens that follow."""
    limits = models.limits(checked.reference, run.base)
    rows = []
    for index, (tokens, inputs) in enumerate(zip(checked.tokens, checked.inputs, strict=True)):
        targets = inputs["target_tokens"]
        if not np.array_equal(targets[:-1], tokens[1:]):
            refuse(
                f"data[{index}]: target_tokens are not the tokens that follow; a reference model scores those alone. "
                "Send ref_logprobs"
            )
        if len(tokens) >= limits.context:
            refuse(
                f"data[{index}]: {len(tokens) + 1} tokens with the last target, and '{checked.reference}' takes "
                f"{limits.context}"
            )
        rows.append([*tokens.tolist(), int(targets[-1])])
    return models.logprobs(checked.reference, rows, temperature)
