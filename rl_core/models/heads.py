"""Heads: reward models with a scalar head on the last real token, and value functions of token sequences.

B rows, S tokens of a sequence, N positions, H hidden.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rl_core.data.images import find_image_reader
from rl_core.errors import CheckpointError, DataError, SettingsError
from rl_core.models.causal_lm import load_pretrained, load_tokenizer, resolve_device, use_eval_mode
from rl_core.models.hidden_states import compute_prefix_states
from rl_core.models.logprobs import TokenOutputs, compute_token_outputs
from rl_core.models.lora import unwrap_model
from rl_core.out_of_memory import MemoryFit
from rl_core.settings import ModelSettings
from rl_core.types import TrainBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


# config key: {"layers", "width"} of a head with several layers
_SHAPE_KEY = "reward_head"
_STEPS_KEY = "scores_steps"  # config key: True = trained on labels of steps


@dataclass(frozen=True, slots=True)
class HeadShape:
    """The shape of a reward model's head: number of layers and width of hidden ones."""

    layers: int = 1
    width: int = 256

    def list_weight_names(self) -> tuple[str, ...]:
        """List the names of the head's weights in a model."""
        if self.layers == 1:
            return ("score.weight",)
        names = tuple(
            f"score.{2 * i}.{kind}" for i in range(self.layers) for kind in ("weight", "bias")
        )
        return names[:-1]  # no offset in the last layer: ranking would not determine it

    def build_module(self, hidden_size: int) -> torch.nn.Module:
        """Build the head: linear layers with GELU between them."""
        widths = [hidden_size, *[self.width] * (self.layers - 1)]
        hidden = [
            module
            for num_inputs, num_outputs in itertools.pairwise(widths)
            for module in (torch.nn.Linear(num_inputs, num_outputs), torch.nn.GELU())
        ]
        return torch.nn.Sequential(*hidden, torch.nn.Linear(widths[-1], 1, bias=False))


def create_reward_model(
    policy_path: str | Path,
    settings: ModelSettings,
    *,
    seed: int = 0,
    shape: HeadShape | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Create a reward model whose trunk is the causal LM in `policy_path` and whose new head is drawn from `seed`.

    The last matrix starts at N(0, 1 / (H + 1)), the scale of Stiennon et al. 2020, arXiv:2009.01325; earlier ones at
    N(0, 2 / H), He et al. 2015, arXiv:1502.01852, with zero offsets. H = inputs of the matrix.

    Args:
        shape: of the head; None = one matrix.
    Raises: CheckpointError if the model cannot be read or its family has no sequence head.
    """
    shape = shape or HeadShape()
    model, tokenizer = _load_classifier(
        policy_path, settings, allowed_missing=shape.list_weight_names(), shape=shape
    )
    generator = torch.Generator().manual_seed(seed)
    score_modules = model.get_submodule("score").modules()
    *hidden, last = [module for module in score_modules if isinstance(module, torch.nn.Linear)]
    with torch.no_grad():
        for layer in hidden:
            noise = torch.randn(layer.weight.shape, generator=generator)
            layer.weight.copy_(noise * (2 / layer.in_features) ** 0.5)
            layer.bias.zero_()
        noise = torch.randn(last.weight.shape, generator=generator)
        last.weight.copy_(noise * (last.in_features + 1) ** -0.5)
    return model, tokenizer


def load_reward_model(
    path: str | Path, settings: ModelSettings, *, options: Mapping[str, Any] | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the reward model and tokenizer from a folder or hub name.

    Args:
        options: as in `causal_lm.load_model`.
    Raises: CheckpointError if it cannot be read, has no trained head, or its family has no sequence head.
    """
    return _load_classifier(path, settings, allowed_missing=(), options=options)


def _load_classifier(
    path: str | Path,
    settings: ModelSettings,
    *,
    allowed_missing: tuple[str, ...],
    options: Mapping[str, Any] | None = None,
    shape: HeadShape | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a classifier and its tokenizer.

    Args:
        shape: of a new head; None = as in the model's config.
    """
    tokenizer = load_tokenizer(path, settings)
    if find_image_reader(tokenizer) is not None:
        raise SettingsError(
            f"'{path}' reads images, and a reward model reads texts; name a model of text"
        )
    # transformers draws a missing head; the fork keeps the caller's random state unchanged
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = load_pretrained(
            _ClassifierLoader(shape),
            path,
            settings,
            allowed_missing=allowed_missing,
            num_labels=1,
            **(options or {}),
        )
    if not isinstance(getattr(model, "score", None), torch.nn.Linear | torch.nn.Sequential):
        raise CheckpointError(
            f"'{path}' ({model.config.model_type}) has no linear sequence head named 'score'"
        )
    if model.config.pad_token_id is None:
        model.config.pad_token_id = tokenizer.pad_token_id
    return (model if options else model.to(resolve_device(settings))).train(), tokenizer


class _ClassifierLoader:
    """A loader of a family's transformers classifier, with a head of a given shape or the one in its config."""

    def __init__(self, shape: HeadShape | None) -> None:
        self._shape = shape

    def from_pretrained(self, source: str, **options: Any) -> Any:
        """Load as `AutoModelForSequenceClassification.from_pretrained` does."""
        from transformers import AutoConfig, AutoModelForSequenceClassification

        config = AutoConfig.from_pretrained(
            source, trust_remote_code=options.get("trust_remote_code", False)
        )
        shape = self._shape or HeadShape(**(getattr(config, _SHAPE_KEY, None) or {}))
        if shape.layers == 1:
            result = AutoModelForSequenceClassification.from_pretrained(source, **options)
            model = result[0] if isinstance(result, tuple) else result
            model.config.__dict__.pop(_SHAPE_KEY, None)  # left by an earlier head
            return result
        family: Any = AutoModelForSequenceClassification._model_mapping.get(type(config), None)
        if family is None:
            raise CheckpointError(f"'{source}' ({config.model_type}) has no sequence head")
        options.pop("trust_remote_code", None)
        return _build_class_with_head(family, shape).from_pretrained(source, **options)


def _build_class_with_head(family: type[Any], shape: HeadShape) -> Any:
    """Build a subclass of a family's classifier with a head of this shape, recorded in its config."""

    def init(self: Any, config: Any, *arguments: Any, **keywords: Any) -> None:
        family.__init__(self, config, *arguments, **keywords)
        if isinstance(getattr(self, "score", None), torch.nn.Linear):
            self.score = shape.build_module(self.score.in_features)
            setattr(self.config, _SHAPE_KEY, {"layers": shape.layers, "width": shape.width})

    return type(family.__name__, (family,), {"__init__": init, "__module__": family.__module__})


def compute_sequence_scores(
    model: PreTrainedModel, input_ids_BS: torch.Tensor, lengths_B: torch.Tensor
) -> torch.Tensor:
    """Compute scalar scores of right-padded rows, read at each row's last real token, with gradient.

    Args:
        input_ids_BS: int64 [B, S], right-padded. Causal attention keeps padding out of every real token, so no mask
            is needed, and the padding token may equal the end-of-sequence token.
        lengths_B: int64 [B], real tokens of each row, at least 1; on the CPU, as they are checked there.
    Returns: float32 [B].
    Raises: DataError if shapes differ or a row is empty.
    """
    states_BH = _read_last_states(model, input_ids_BS, lengths_B)
    head = model.get_submodule("score")
    scores_B1: torch.Tensor = head(states_BH.to(next(head.parameters()).dtype))
    return scores_B1.squeeze(-1).float()


def compute_step_scores(
    model: PreTrainedModel,
    input_ids_BS: torch.Tensor,
    lengths_B: torch.Tensor,
    positions: Sequence[Sequence[int]],
) -> torch.Tensor:
    """Compute scalar scores of right-padded rows at several positions of each, with gradient.

    Args:
        input_ids_BS, lengths_B: as in `compute_sequence_scores`.
        positions: of each row, at least one, below its length.
    Returns: float32 [N], row after row.
    Raises: DataError if shapes differ, or a position is not a real token.
    """
    if len(positions) != len(lengths_B):
        raise DataError(f"positions of {len(positions)} rows for {len(lengths_B)} rows")
    for index, (row, length) in enumerate(zip(positions, lengths_B.tolist(), strict=True)):
        if not len(row) or not all(0 <= position < length for position in row):
            raise DataError(f"row {index}: positions {list(row)} must be real tokens of {length}")
    rows_N = torch.tensor([index for index, row in enumerate(positions) for _ in row])
    places_N = torch.tensor([position for row in positions for position in row])
    states_NH = _read_states(model, input_ids_BS, lengths_B, rows_N, places_N)
    head = model.get_submodule("score")
    scores_N1: torch.Tensor = head(states_NH.to(next(head.parameters()).dtype))
    return scores_N1.squeeze(-1).float()


def _read_last_states(
    model: PreTrainedModel, input_ids_BS: torch.Tensor, lengths_B: torch.Tensor
) -> torch.Tensor:
    """Return states [B, H] at the last real token of each row; arguments and errors as in `compute_sequence_scores`."""
    if input_ids_BS.ndim != 2 or lengths_B.shape != input_ids_BS.shape[:1]:
        raise DataError(
            f"input_ids {tuple(input_ids_BS.shape)} and lengths {tuple(lengths_B.shape)} do not match"
        )
    if lengths_B.numel() and not (
        int(lengths_B.min()) >= 1 and int(lengths_B.max()) <= input_ids_BS.shape[1]
    ):
        raise DataError(f"lengths must be in 1..{input_ids_BS.shape[1]}, got {lengths_B.tolist()}")
    return _read_states(
        model, input_ids_BS, lengths_B, torch.arange(len(lengths_B)), lengths_B.cpu() - 1
    )


def _read_states(
    model: PreTrainedModel,
    input_ids_BS: torch.Tensor,
    lengths_B: torch.Tensor,
    rows_N: torch.Tensor,
    places_N: torch.Tensor,
) -> torch.Tensor:
    """Return states [N, H] at places of rows, on the CPU, as read by one pass."""
    width = input_ids_BS.shape[1]
    positions_S = torch.arange(width, device=input_ids_BS.device)
    lengths_B1 = lengths_B.to(input_ids_BS.device, non_blocking=True)[:, None]
    batch = TrainBatch(
        input_ids_BS, positions_S < lengths_B1, torch.zeros_like(input_ids_BS, dtype=torch.bool)
    )
    flat_N = (rows_N * width + places_N).to(input_ids_BS.device, non_blocking=True)
    needed_BS = torch.zeros_like(input_ids_BS, dtype=torch.bool)
    needed_BS.view(-1).index_fill_(0, flat_N, True)
    states = compute_prefix_states(model, batch, needed_BS)
    return states.select(flat_N)


@torch.no_grad()
def score_rows(
    model: PreTrainedModel,
    rows: Sequence[Sequence[int]],
    *,
    pad_id: int | None = None,
    max_tokens: int = 16384,
) -> list[float]:
    """Score token rows in length-sorted micro-batches of at most `max_tokens` padded tokens; keep their order.

    Args:
        pad_id: padding token; None = the model configuration's.
    Raises: DataError for an empty row or a missing padding token; OutOfMemory for a row that does not fit.
    """
    for index, row in enumerate(rows):
        if not row:
            raise DataError(f"row {index} has no tokens to score")
    scores = [0.0] * len(rows)
    lengths = [len(row) for row in rows]

    def fill(batch: list[int]) -> None:
        values = score_batch(model, [rows[index] for index in batch], pad_id=pad_id)
        for index, value in zip(batch, values, strict=True):
            scores[index] = value

    with use_eval_mode(model):
        MemoryFit("scoring by the reward model").compute_batches(
            build_score_batches(lengths, max_tokens), fill, lengths=lengths
        )
    return scores


@torch.no_grad()
def score_steps(
    model: PreTrainedModel,
    rows: Sequence[Sequence[int]],
    positions: Sequence[Sequence[int]],
    *,
    pad_id: int | None = None,
    max_tokens: int = 16384,
) -> list[list[float]]:
    """Compute the probability that each step is right, with a reward model of steps; in order.

    Args:
        positions: of the last token of each step of each row. others: as in `score_rows`.
    Raises: as `score_rows`; DataError for a position outside its row.
    """
    for index, (row, places) in enumerate(zip(rows, positions, strict=True)):
        if not len(places) or not all(0 <= place < len(row) for place in places):
            raise DataError(f"row {index}: steps end at {list(places)} in {len(row)} tokens")
    scores: list[list[float]] = [[] for _ in rows]
    lengths = [len(row) for row in rows]

    def fill(batch: list[int]) -> None:
        ids_BS, lengths_B = _pad_rows(model, [rows[index] for index in batch], pad_id)
        chosen = [positions[index] for index in batch]
        values = compute_step_scores(model, ids_BS, lengths_B, chosen).sigmoid().tolist()
        for index, places in zip(batch, chosen, strict=True):
            scores[index], values = values[: len(places)], values[len(places) :]

    with use_eval_mode(model):
        MemoryFit("scoring of steps by the reward model").compute_batches(
            build_score_batches(lengths, max_tokens), fill, lengths=lengths
        )
    return scores


def mark_step_model(model: PreTrainedModel) -> None:
    """Record in a reward model's config that it scores steps."""
    setattr(model.config, _STEPS_KEY, True)


def scores_steps(model: PreTrainedModel) -> bool:
    """Return whether a reward model was trained to score steps."""
    return bool(getattr(model.config, _STEPS_KEY, False))


def build_score_batches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Group row indices for scoring: shortest first, at most `max_tokens` padded tokens, or one longer row."""
    order = sorted(range(len(lengths)), key=lambda index: lengths[index])
    batches: list[list[int]] = []
    for index in order:
        if batches and (len(batches[-1]) + 1) * lengths[index] <= max_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


@torch.no_grad()
def score_batch(
    model: PreTrainedModel, rows: Sequence[Sequence[int]], *, pad_id: int | None = None
) -> list[float]:
    """Score token rows in one pass, in the model's current mode."""
    scores: list[float] = compute_sequence_scores(model, *_pad_rows(model, rows, pad_id)).tolist()
    return scores


@torch.no_grad()
def compute_last_states(
    model: PreTrainedModel, rows: Sequence[Sequence[int]], *, pad_id: int | None = None
) -> torch.Tensor:
    """Compute states [B, H] at the last token of token rows, in one pass of a causal model or a classifier."""
    return _read_last_states(model, *_pad_rows(model, rows, pad_id))


def _pad_rows(
    model: PreTrainedModel, rows: Sequence[Sequence[int]], pad_id: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad token rows to a tensor [B, S] on the model's device; return it with the lengths [B] on the CPU."""
    pad = pad_id if pad_id is not None else model.config.pad_token_id
    if pad is None or pad < 0:
        raise DataError(
            f"pad_id: the model's configuration names no padding token (pad_token_id: {pad}); set it there, "
            "or pass pad_id"
        )
    device = next(model.parameters()).device
    width = max(len(row) for row in rows)
    ids_BS = torch.tensor([list(row) + [pad] * (width - len(row)) for row in rows], device=device)
    return ids_BS, torch.tensor([len(row) for row in rows])


def read_hidden_size(model: PreTrainedModel) -> int:
    """Return the width of the hidden states that the model's head reads."""
    return int(unwrap_model(model).get_output_embeddings().weight.shape[1])


class ValueHead(nn.Module):
    """A linear map from hidden states to values in float32.

    It starts at 0, so the first advantages use no values.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.head = nn.Linear(size, 1)  # Muon skips names that end in `head`
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, hidden_NH: torch.Tensor) -> torch.Tensor:
        """Map [N, H] to float32 [N] (float64 for float64)."""
        dtype = torch.promote_types(hidden_NH.dtype, torch.float32)
        with torch.autocast(hidden_NH.device.type, enabled=False):
            weight, bias = self.head.weight.to(dtype), self.head.bias.to(dtype)
            return nn.functional.linear(hidden_NH.to(dtype), weight, bias).squeeze(-1)


class SeparateCritic(nn.Module):
    """A copy of a causal model's trunk, adapters included, with a value head.

    Training it never changes the policy.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.trunk: Any = copy.deepcopy(unwrap_model(model).base_model)
        reference = next(model.parameters())
        self.head = ValueHead(read_hidden_size(model)).to(device=reference.device)

    def forward(self, batch: TrainBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the value before each loss token, [B, S] (0 elsewhere), and after each row's last real token, [B].

        Raises: DataError if position 0 carries loss.
        """
        mask_BS = batch.loss_mask_BS
        if batch.loss_positions_N is None and bool(mask_BS[:, 0].any()):
            raise DataError("loss_mask is True at position 0, which has no token before it")
        states = compute_prefix_states(self.trunk, batch)
        after_N = self.head(states.states_NH)
        after_BS = after_N.index_select(0, states.numbers_BS.reshape(-1)).view(mask_BS.shape)
        before_BS = torch.cat([after_BS.new_zeros(len(after_BS), 1), after_BS[:, :-1]], dim=1)
        last_B1 = batch.attention_mask_BS.sum(1, keepdim=True) - 1
        values_BS = torch.where(mask_BS, before_BS, before_BS.new_zeros(()))
        return values_BS, after_BS.gather(1, last_B1).squeeze(1)


class PolicyWithCritic(nn.Module):
    """A policy and its value function in one module, so that one checkpoint holds both."""

    def __init__(self, policy: PreTrainedModel, critic: SeparateCritic | ValueHead) -> None:
        super().__init__()
        self.policy = policy
        self.critic = critic

    @property
    def value_head(self) -> ValueHead | None:
        """The head on the policy's hidden states, or None with a separate critic."""
        return self.critic if isinstance(self.critic, ValueHead) else None

    def compute_values(self, batch: TrainBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute values before each loss token, [B, S], and after each row's last real token, [B]."""
        if isinstance(self.critic, SeparateCritic):
            values_BS, after_B = self.critic(batch)
            return values_BS, after_B
        outputs: TokenOutputs = compute_token_outputs(self.policy, batch, value_head=self.critic)
        assert outputs.values_BS is not None and outputs.value_after_B is not None
        return outputs.values_BS, outputs.value_after_B

    def get_output_embeddings(self) -> nn.Module | None:
        """Return the policy's output head."""
        return self.policy.get_output_embeddings()
