"""One forward pass, and backward, over rows of one or several training runs of the same base model.

Trunk and output head are computed for all rows together. Everything that adds up numbers of several rows (adapters'
gradients, losses) is computed run by run over that run's rows alone and in their order, so it does not depend on the
others.

Suffixes: B rows, S widest row of the pass, T widest row of a part, N tokens of a part or of several, H hidden.
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
from rl_core.models.hidden_states import compute_hidden_states
from rl_core.models.routed_adapters import AdapterGradients
from rl_core.service.loss_function import LossFunction, LossInputs
from rl_core.service.training_run import RunGradient, TrainingRun
from rl_core.types import TrainBatch


@dataclass(frozen=True, slots=True)
class PassPart:
    """Rows of one run that one pass computes."""

    run: TrainingRun
    loss: LossFunction
    options: Mapping[str, float]
    tokens: Sequence[np.ndarray]  # int64 [T] of each row
    inputs: Sequence[Mapping[str, np.ndarray]]

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows."""
        return sum(map(len, self.tokens))


@dataclass(frozen=True, slots=True)
class PassResult:
    """Loss, gradient and per-token numbers of a part."""

    loss: float
    gradient: Mapping[str, torch.Tensor]  # by the run's parameter names; {} without backward
    # of each row: per-token arrays, or [1] where there is one number a row
    columns: list[dict[str, np.ndarray]]


def run_pass(parts: Sequence[PassPart], *, backward: bool) -> list[PassResult]:
    """Results of some parts, each as if it were computed alone.

    Args:
        parts: of one base model; several only of runs with adapters.
    Raises: DataError where a loss refuses its inputs (then it is the only part), and what torch raises.
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
            hidden_BSH = compute_hidden_states(run.model, batch, None, groups)
        places = mask_BS.reshape(-1).nonzero().squeeze(1).to(hidden_BSH.device)
        hidden = (
            hidden_BSH.flatten(0, 1)
            .index_select(0, places)
            .split([part.num_tokens for part in parts])
        )
        scored = _compute_target_scores(parts, hidden)
        given = [
            _build_loss_inputs(part, hidden_NH, one)
            for part, hidden_NH, one in zip(parts, hidden, scored, strict=True)
        ]
        losses = [part.loss.loss(found) for part, found in zip(parts, given, strict=True)]
    found_of: Sequence[Mapping[str, torch.Tensor]] = [{} for _ in parts]
    if gradients is not None:
        found_of = _compute_adapter_gradients(parts, losses, gradients)
    elif backward:
        found_of = _compute_gradients(losses, [part.run.parameters for part in parts])
    return [
        PassResult(float(loss.detach()), gradient, _collect_row_columns(part, found))
        for part, loss, gradient, found in zip(parts, losses, found_of, given, strict=True)
    ]


def _route_adapters(
    parts: Sequence[PassPart], gradients: AdapterGradients | None
) -> AbstractContextManager[RowGroups | None]:
    """The adapters of the parts over their rows; nothing for a run that trains all weights."""
    if parts[0].run.adapter is None:
        assert len(parts) == 1
        return nullcontext()
    router = parts[0].run.base.router
    return router.route_rows(
        [len(part.tokens) for part in parts], [part.run.adapter for part in parts], gradients
    )


def _compute_gradients(
    losses: Sequence[torch.Tensor],
    trained_parameters: Sequence[Mapping[str, torch.Tensor]],
    *anchors: torch.Tensor,
) -> list[dict[str, torch.Tensor]]:
    """Gradients of each loss by the parameters of its own; what a loss has not touched is left out."""
    places = [(index, name) for index, named in enumerate(trained_parameters) for name in named]
    inputs = [*(trained_parameters[index][name] for index, name in places), *anchors]
    # The gradient of a sum is each loss's own: no parameter is in two of them.
    found = torch.autograd.grad(torch.stack(list(losses)).sum(), inputs, allow_unused=True)
    gradients: list[dict[str, torch.Tensor]] = [{} for _ in losses]
    for (index, name), gradient in zip(places, found[: len(places)], strict=True):
        if gradient is not None:
            gradients[index][name] = gradient
    return gradients


def _compute_adapter_gradients(
    parts: Sequence[PassPart], losses: Sequence[torch.Tensor], gradients: AdapterGradients
) -> list[RunGradient]:
    """Gradients of runs with adapters: of the layers in `gradients`, of output heads and scalar heads by autograd."""
    outside = [part.run.parameters_outside_layers for part in parts]
    found = _compute_gradients(losses, outside, gradients.anchor)
    flats = gradients.flat.split([part.run.layout.size for part in parts])
    return [
        part.run.build_pass_gradient(flat, gradients.written_layers, own)
        for part, flat, own in zip(parts, flats, found, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class _TargetScores:
    """Numbers of the output head at a part's tokens."""

    logprobs: torch.Tensor  # [N], or [N, K] of K targets at each token
    entropy_N: torch.Tensor | None


def _compute_target_scores(
    parts: Sequence[PassPart], hidden: Sequence[torch.Tensor]
) -> list[_TargetScores | None]:
    """Log-probabilities of each part's targets, [N, H] of each part given; None = its loss has no targets.

    Parts share the products of the head as long as they are one chunk of it; that a part has no chunks, or those of its
    own, depends on its size alone.
    """
    found: list[_TargetScores | None] = [None] * len(parts)
    for chosen in _group_parts_by_head_chunk(parts):
        some = [parts[index] for index in chosen]
        lengths = [part.num_tokens for part in some]
        run, temperatures = some[0].run, [part.options.get("temperature", 1.0) for part in some]
        head = run.model.get_output_embeddings()
        joint_NH = (
            hidden[chosen[0]]
            if len(chosen) == 1
            else torch.cat([hidden[index] for index in chosen])
        )
        targets = _concatenate_arrays(
            [row["target_tokens"] for part in some for row in part.inputs]
        )
        logprobs, entropy_N = compute_selected_logprobs(
            joint_NH,
            head.weight,
            head.bias,
            torch.from_numpy(targets).to(joint_NH.device),
            temperatures_N=expand_temperatures(temperatures, lengths, joint_NH.device),
            adapters=_list_head_adapters(some),
            with_entropy="entropy" in some[0].loss.needs,
        )
        entropies = [None] * len(some) if entropy_N is None else entropy_N.split(lengths)
        for index, own, entropy in zip(chosen, logprobs.split(lengths), entropies, strict=True):
            found[index] = _TargetScores(own, entropy)
    return found


def _group_parts_by_head_chunk(parts: Sequence[PassPart]) -> Iterator[list[int]]:
    """Parts with targets whose head is one chunk of products, by what is computed there."""
    groups: dict[tuple[bool, int], list[int]] = {}
    for index, part in enumerate(parts):
        if "target_tokens" in part.inputs[0]:
            columns = max(
                row["target_tokens"].shape[1] if row["target_tokens"].ndim == 2 else 0
                for row in part.inputs
            )
            groups.setdefault(("entropy" in part.loss.needs, columns), []).append(index)
    for group in groups.values():
        most = compute_chunk_tokens(
            parts[0].run.base.device.type, parts[0].run.base.head.weight.shape[0]
        )
        together: list[int] = []
        taken = 0
        for index in group:
            tokens = parts[index].num_tokens
            if together and taken + tokens > most:
                yield together
                together, taken = [], 0
            together.append(index)
            taken += tokens
        yield together


def _list_head_adapters(parts: Sequence[PassPart]) -> Sequence[AdapterSpan]:
    """The updates of the head, over the tokens of their parts one after the other."""
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
    part: PassPart, hidden_NH: torch.Tensor, scored: _TargetScores | None
) -> LossInputs:
    """Log-probabilities, entropies, values and scores of a part, beside its inputs."""
    run, needs = part.run, part.loss.needs
    device, lengths = hidden_NH.device, [len(row) for row in part.tokens]
    mask_BT = attention_mask(lengths).to(device)
    places = None if len(set(lengths)) == 1 else mask_BT.reshape(-1).nonzero().squeeze(1)

    def spread(values_N: torch.Tensor) -> torch.Tensor:
        if places is not None:
            values_N = values_N.new_zeros(mask_BT.numel(), *values_N.shape[1:]).index_copy(
                0, places, values_N
            )
        return values_N.unflatten(0, mask_BT.shape)

    given = LossInputs(mask_BT, part.options, _pad_datum_inputs(part, spread, device))
    if scored is not None:
        given.logprobs = spread(scored.logprobs)
        given.entropy_BT = None if scored.entropy_N is None else spread(scored.entropy_N)
    if "values" in needs:
        given.values_BT = spread(run.heads.value_head(hidden_NH))
    if "scores" in needs:
        last_B = torch.tensor(lengths, device=device).cumsum(0) - 1
        given.scores_B = (hidden_NH[last_B].float() * run.heads.score_head).sum(-1)
    return given


def _pad_datum_inputs(
    part: PassPart, spread: Callable[[torch.Tensor], torch.Tensor], device: torch.device
) -> dict[str, torch.Tensor]:
    """The datums' inputs, but for target tokens, as [B, T], [B, T, K] or [B]."""
    found = {}
    for name in part.inputs[0]:
        arrays = [row[name] for row in part.inputs]
        if part.loss.inputs[name].shape == "one":
            found[name] = torch.from_numpy(np.concatenate(arrays)).to(device)
        elif name != "target_tokens":
            found[name] = spread(torch.from_numpy(_concatenate_arrays(arrays)).to(device))
    return found


def _concatenate_arrays(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Arrays [T] one after the other; where one has several columns, all get as many, of 0."""
    if all(array.ndim == 1 for array in arrays):
        return np.concatenate(arrays)
    columns = [array.reshape(len(array), -1) for array in arrays]
    width = max(array.shape[1] for array in columns)
    return np.concatenate(
        [np.pad(array, ((0, 0), (0, width - array.shape[1]))) for array in columns]
    )


def _collect_row_columns(part: PassPart, loss_inputs: LossInputs) -> list[dict[str, np.ndarray]]:
    """Raw material of outputs and metrics, row by row, with the rows' own numbers of targets."""
    tensors = dict(loss_inputs.outputs)
    if loss_inputs.logprobs is not None:
        tensors["logprobs"] = loss_inputs.logprobs
    arrays = {name: tensor.detach().float().cpu().numpy() for name, tensor in tensors.items()}
    columns = []
    for index, (tokens, inputs) in enumerate(zip(part.tokens, part.inputs, strict=True)):
        row = {
            ("old_logprobs" if name == "logprobs" else name): value
            for name, value in inputs.items()
        }
        shape = inputs["target_tokens"].shape if "target_tokens" in inputs else tokens.shape
        for name, array in arrays.items():
            if array.ndim == 1:  # one number a row
                row[name] = array[index : index + 1]
                continue
            values = array[index, : len(tokens)]
            if values.ndim == 2:  # several targets
                values = values[:, : shape[1] if len(shape) == 2 else 1].reshape(shape)
            row[name] = values
        columns.append(row)
    return columns
