"""Forward and backward pass over rows of one or several training runs of the same base model.

Trunk and output head are computed for all rows together. Everything that sums over rows (adapters' gradients, losses)
is computed run by run, over that run's rows in their order, so it does not depend on other runs.

Suffixes: B rows, S widest row of the pass, T widest row of a part, N tokens of one or several parts, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch

from rl_core.cpu.low_rank import AdapterSpan
from rl_core.cpu.packed_forward import RowGroups
from rl_core.data.batches import attention_mask, pad_rows
from rl_core.models.chunked_head import (
    compute_chunk_tokens,
    compute_selected_logprobs,
    expand_temperatures,
)
from rl_core.models.hidden_states import compute_prefix_states
from rl_core.models.routed_adapters import AdapterGradients
from rl_core.service.loss_function import LossFunction, LossInputs
from rl_core.service.training_run import RunGradient, TrainingRun
from rl_core.types import TrainBatch


@dataclass(frozen=True, slots=True)
class PassPart:
    """Rows of one run that are computed in one pass."""

    run: TrainingRun
    loss: LossFunction
    options: Mapping[str, float]
    tokens: Sequence[np.ndarray]  # int64 [T] of each row
    inputs: Sequence[Mapping[str, np.ndarray]]

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all rows."""
        return sum(map(len, self.tokens))


@dataclass(frozen=True, slots=True)
class PassResult:
    """Loss, gradient and per-token values of a part."""

    loss: float
    gradient: Mapping[str, torch.Tensor]  # by the run's parameter names; {} without backward
    columns: list[dict[str, np.ndarray]]  # for each row: arrays per token, or [1] for one per row


def run_pass(parts: Sequence[PassPart], *, backward: bool) -> list[PassResult]:
    """Compute the results of some parts, each as if it were computed alone.

    Args:
        parts: of one base model; several parts only for runs with adapters.
    Raises: DataError if a loss rejects its inputs (it is then the only part); any error of torch.
    """
    run = parts[0].run
    with run.base.use_row_by_row_products() if run.adapter is not None else nullcontext():
        return _compute_pass(parts, backward=backward)


def _compute_pass(parts: Sequence[PassPart], *, backward: bool) -> list[PassResult]:
    run = parts[0].run
    rows = [row for part in parts for row in part.tokens]
    lengths = [len(row) for row in rows]
    ids_BS = pad_rows([row.tolist() for row in rows], run.base.pad_id)
    mask_BS = attention_mask(lengths)
    batch = TrainBatch(ids_BS, mask_BS, torch.zeros_like(mask_BS)).to(run.base.device)
    gradients = None
    if backward and run.adapter is not None:
        gradients = AdapterGradients(sum(part.run.layout.size for part in parts), run.base.device)
    with torch.set_grad_enabled(backward):
        with _route_adapters(parts, gradients) as groups:
            states = compute_prefix_states(run.model, batch, None, groups)
        token_indices = mask_BS.reshape(-1).nonzero().squeeze(1).to(run.base.device)
        hidden_of_tokens = states.select(token_indices)
        hidden = hidden_of_tokens.split([part.num_tokens for part in parts])
        scores = _compute_target_scores(parts, hidden)
        loss_inputs = list(map(_build_loss_inputs, parts, hidden, scores))
        losses = [part.loss.loss(inputs) for part, inputs in zip(parts, loss_inputs, strict=True)]
    part_gradients: Sequence[Mapping[str, torch.Tensor]] = [{} for _ in parts]
    if gradients is not None:
        part_gradients = _compute_adapter_gradients(parts, losses, gradients)
    elif backward:
        part_gradients = _compute_gradients(losses, [part.run.parameters for part in parts])
    return [
        PassResult(float(loss.detach()), gradient, _collect_row_columns(part, inputs))
        for part, loss, gradient, inputs in zip(
            parts, losses, part_gradients, loss_inputs, strict=True
        )
    ]


def _route_adapters(
    parts: Sequence[PassPart], gradients: AdapterGradients | None
) -> AbstractContextManager[RowGroups | None]:
    """Return a context that applies the parts' adapters to their rows; a run that trains all weights has none."""
    if parts[0].run.adapter is None:
        assert len(parts) == 1
        return nullcontext()
    num_rows = [len(part.tokens) for part in parts]
    adapters = [part.run.adapter for part in parts]
    return parts[0].run.base.router.route_rows(num_rows, adapters, gradients)


def _compute_gradients(
    losses: Sequence[torch.Tensor],
    trained_parameters: Sequence[Mapping[str, torch.Tensor]],
    *anchors: torch.Tensor,
) -> list[dict[str, torch.Tensor]]:
    """Compute the gradient of each loss with respect to its own parameters; unused parameters are left out."""
    keys = [(index, name) for index, names in enumerate(trained_parameters) for name in names]
    inputs = [*(trained_parameters[index][name] for index, name in keys), *anchors]
    # No parameter belongs to two losses, so the gradient of the sum is that of each loss.
    total = torch.stack(list(losses)).sum()
    gradients = torch.autograd.grad(total, inputs, allow_unused=True)
    by_loss: list[dict[str, torch.Tensor]] = [{} for _ in losses]
    for (index, name), gradient in zip(keys, gradients[: len(keys)], strict=True):
        if gradient is not None:
            by_loss[index][name] = gradient
    return by_loss


def _compute_adapter_gradients(
    parts: Sequence[PassPart], losses: Sequence[torch.Tensor], gradients: AdapterGradients
) -> list[RunGradient]:
    """Compute the gradients of runs with adapters: layers through `gradients`, output and scalar heads by autograd."""
    outside_parameters = [part.run.parameters_outside_layers for part in parts]
    outside_gradients = _compute_gradients(losses, outside_parameters, gradients.anchor)
    flats = gradients.flat.split([part.run.layout.size for part in parts])
    return [
        part.run.build_pass_gradient(flat, gradients.written_layers, outside)
        for part, flat, outside in zip(parts, flats, outside_gradients, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class _TargetScores:
    """Output of the head at a part's tokens."""

    logprobs: torch.Tensor  # [N], or [N, K] for K targets at each token
    entropy_N: torch.Tensor | None


def _compute_target_scores(
    parts: Sequence[PassPart], hidden: Sequence[torch.Tensor]
) -> list[_TargetScores | None]:
    """Compute log-probabilities of each part's targets from its hidden states [N, H]; None for a loss without targets.

    Parts share the head's matrix products as long as they fit one chunk. Whether a part is split into chunks, and how,
    depends only on its size.
    """
    scores: list[_TargetScores | None] = [None] * len(parts)
    for indices in _group_parts_by_head_chunk(parts):
        group = [parts[index] for index in indices]
        lengths = [part.num_tokens for part in group]
        temperatures = [part.options.get("temperature", 1.0) for part in group]
        head = group[0].run.model.get_output_embeddings()
        joint_NH = hidden[indices[0]]
        if len(indices) > 1:
            joint_NH = torch.cat([hidden[index] for index in indices])
        targets = _concatenate_arrays(
            [_list_scored_tokens(part, row) for part in group for row in part.inputs]
        )
        logprobs, entropy_N = compute_selected_logprobs(
            joint_NH,
            head.weight,
            head.bias,
            torch.from_numpy(targets).to(joint_NH.device),
            temperatures_N=expand_temperatures(temperatures, lengths, joint_NH.device),
            adapters=_list_head_adapters(group),
            with_entropy="entropy" in group[0].loss.needs,
        )
        entropies = [None] * len(group) if entropy_N is None else entropy_N.split(lengths)
        part_scores = map(_TargetScores, logprobs.split(lengths), entropies)
        for index, part_score in zip(indices, part_scores, strict=True):
            scores[index] = part_score
    return scores


def _group_parts_by_head_chunk(parts: Sequence[PassPart]) -> Iterator[list[int]]:
    """Yield the indices of parts with targets in groups that need the same outputs and fit one chunk of the head."""
    groups: dict[tuple[bool, int], list[int]] = {}
    for index, part in enumerate(parts):
        if "target_tokens" in part.inputs[0]:
            targets = [_list_scored_tokens(part, row) for row in part.inputs]
            num_columns = max(array.shape[1] if array.ndim == 2 else 0 for array in targets)
            groups.setdefault(("entropy" in part.loss.needs, num_columns), []).append(index)
    base = parts[0].run.base
    max_tokens = compute_chunk_tokens(base.device.type, base.head.weight.shape[0])
    for group in groups.values():
        chunk: list[int] = []
        chunk_tokens = 0
        for index in group:
            num_tokens = parts[index].num_tokens
            if chunk and chunk_tokens + num_tokens > max_tokens:
                yield chunk
                chunk, chunk_tokens = [], 0
            chunk.append(index)
            chunk_tokens += num_tokens
        yield chunk


def _list_scored_tokens(part: PassPart, inputs: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return the tokens whose log-probabilities the loss needs: [T], [T, K], or target and recorded ones [T, 1 + K]."""
    targets = inputs["target_tokens"]
    if not part.loss.scored_tokens:
        return targets
    return np.concatenate([targets[:, None], inputs[part.loss.scored_tokens]], axis=1)


def _list_head_adapters(parts: Sequence[PassPart]) -> Sequence[AdapterSpan]:
    """Return the adapters of the head over the concatenated tokens of their parts."""
    base = parts[0].run.base
    if parts[0].run.adapter is None or all(part.run.head_update is None for part in parts):
        return []
    return base.router.build_separate_spans(
        [part.run.adapter for part in parts],
        base.head_name,
        base.head.weight.shape[0],
        [part.num_tokens for part in parts],
    )


def _build_loss_inputs(
    part: PassPart, hidden_NH: torch.Tensor, scores: _TargetScores | None
) -> LossInputs:
    """Assemble the inputs of a part's loss: log-probabilities, entropies, values, scores and the client's arrays."""
    run, needs = part.run, part.loss.needs
    device, lengths = hidden_NH.device, [len(row) for row in part.tokens]
    mask_BT = attention_mask(lengths).to(device)
    token_indices = None if len(set(lengths)) == 1 else mask_BT.reshape(-1).nonzero().squeeze(1)

    def spread(values_N: torch.Tensor) -> torch.Tensor:
        if token_indices is not None:
            padded = values_N.new_zeros(mask_BT.numel(), *values_N.shape[1:])
            values_N = padded.index_copy(0, token_indices, values_N)
        return values_N.unflatten(0, mask_BT.shape)

    loss_inputs = LossInputs(mask_BT, part.options, _pad_datum_inputs(part, spread, device))
    if scores is not None:
        loss_inputs.logprobs = spread(scores.logprobs)
        loss_inputs.entropy_BT = None if scores.entropy_N is None else spread(scores.entropy_N)
    if "values" in needs:
        loss_inputs.values_BT = spread(run.heads.value_head(hidden_NH))
    if "scores" in needs:
        last_B = torch.tensor(lengths, device=device).cumsum(0) - 1
        loss_inputs.scores_B = (hidden_NH[last_B].float() * run.heads.score_head).sum(-1)
    return loss_inputs


def _pad_datum_inputs(
    part: PassPart, spread: Callable[[torch.Tensor], torch.Tensor], device: torch.device
) -> dict[str, torch.Tensor]:
    """Return the datums' inputs except target tokens as [B, T], [B, T, K] or [B]."""
    padded = {}
    for name in part.inputs[0]:
        arrays = [row[name] for row in part.inputs]
        if part.loss.inputs[name].shape == "one":
            padded[name] = torch.from_numpy(np.concatenate(arrays)).to(device)
        elif name not in ("target_tokens", part.loss.scored_tokens):
            padded[name] = spread(torch.from_numpy(_concatenate_arrays(arrays)).to(device))
    return padded


def _concatenate_arrays(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Concatenate arrays [T]; if one has several columns, pad all to the same number of columns with 0."""
    if all(array.ndim == 1 for array in arrays):
        return np.concatenate(arrays)
    columns = [array.reshape(len(array), -1) for array in arrays]
    width = max(array.shape[1] for array in columns)
    return np.concatenate(
        [np.pad(array, ((0, 0), (0, width - array.shape[1]))) for array in columns]
    )


def _collect_row_columns(part: PassPart, loss_inputs: LossInputs) -> list[dict[str, np.ndarray]]:
    """Collect the raw values of outputs and metrics row by row, without padding."""
    tensors = dict(loss_inputs.outputs)
    if loss_inputs.logprobs is not None:
        tensors.setdefault("logprobs", loss_inputs.logprobs)
    arrays = {name: tensor.detach().float().cpu().numpy() for name, tensor in tensors.items()}
    columns = []
    for index, (tokens, inputs) in enumerate(zip(part.tokens, part.inputs, strict=True)):
        renamed = {"logprobs": "old_logprobs"}
        row = {
            renamed.get(name, name): value
            for name, value in inputs.items()
            if part.loss.inputs[name].shape != "columns"
        }
        shape = inputs["target_tokens"].shape if "target_tokens" in inputs else tokens.shape
        for name, array in arrays.items():
            if array.ndim == 1:  # one value per row
                row[name] = array[index : index + 1]
                continue
            values = array[index, : len(tokens)]
            if values.ndim == 2:  # several targets
                values = values[:, : shape[1] if len(shape) == 2 else 1].reshape(shape)
            row[name] = values
        columns.append(row)
    return columns
