"""Reward models: a scalar head on the last real token of any causal language model.

B rows, S tokens, H hidden.

Value functions over token sequences: a critic with a trunk of its own, or a head on the policy's.

B rows, S sequence, N positions, H hidden.
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

from rl_core.errors import CheckpointError, DataError
from rl_core.models.causal_lm import load_pretrained, load_tokenizer, resolve_device, use_eval_mode
from rl_core.models.hidden_states import compute_hidden_states
from rl_core.models.logprobs import TokenOutputs, compute_token_outputs
from rl_core.models.lora import unwrap_model
from rl_core.out_of_memory import MemoryFit
from rl_core.settings import ModelSettings
from rl_core.types import TrainBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


# of a model's config: {"layers", "width"} of a head that is no single matrix
_SHAPE = "reward_head"


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Layers of a reward model's head, and units of its hidden ones."""

    layers: int = 1
    width: int = 256

    def list_weight_names(self) -> tuple[str, ...]:
        """Names of its weights in a model."""
        if self.layers == 1:
            return ("score.weight",)
        names = tuple(
            f"score.{2 * place}.{kind}"
            for place in range(self.layers)
            for kind in ("weight", "bias")
        )
        return names[:-1]  # the last layer has no offset, which ranking would leave free

    def build_module(self, hidden_size: int) -> torch.nn.Module:
        """The head: matrices with GELU between them."""
        widths = [hidden_size, *[self.width] * (self.layers - 1)]
        hidden = [
            part
            for before, after in itertools.pairwise(widths)
            for part in (torch.nn.Linear(before, after), torch.nn.GELU())
        ]
        return torch.nn.Sequential(*hidden, torch.nn.Linear(widths[-1], 1, bias=False))


def create_reward_model(
    policy_path: str | Path,
    settings: ModelSettings,
    *,
    seed: int = 0,
    shape: HeadShape | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A reward model whose trunk is the causal LM in `policy_path` and whose head is new, drawn from `seed`.

    The last matrix starts at N(0, 1 / (H + 1)), the scale of Stiennon et al. 2020, arXiv:2009.01325; those before it at
    N(0, 2 / H), He et al. 2015, arXiv:1502.01852, with offsets of 0. H = inputs of the matrix.
    Args:
        shape: of the head; None = one matrix.
    Raises: CheckpointError when the model cannot be read or its family has no sequence head.
    """
    shape = shape or HeadShape()
    model, tokenizer = _load_classifier(
        policy_path, settings, allowed_missing=shape.list_weight_names(), shape=shape
    )
    generator = torch.Generator().manual_seed(seed)
    *hidden, last = [
        part for part in model.get_submodule("score").modules() if isinstance(part, torch.nn.Linear)
    ]
    with torch.no_grad():
        for part in hidden:
            part.weight.copy_(
                torch.randn(part.weight.shape, generator=generator) * (2 / part.in_features) ** 0.5
            )
            part.bias.zero_()
        last.weight.copy_(
            torch.randn(last.weight.shape, generator=generator) * (last.in_features + 1) ** -0.5
        )
    return model, tokenizer


def load_reward_model(
    path: str | Path, settings: ModelSettings, *, options: Mapping[str, Any] | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The reward model and tokenizer in a folder, or under a hub name. `options`: as in `causal_lm.load`.

    Raises: CheckpointError when it cannot be read, has no trained head, or its family has no sequence head.
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
    """`shape`: of a new head; None = that of the model's config."""
    tokenizer = load_tokenizer(path, settings)
    # transformers draws the head that a policy folder lacks: under a fork, so that the caller's random state stays
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
    """transformers' classifier of a model's family, with a head of the given shape or of the one in its config."""

    def __init__(self, shape: HeadShape | None) -> None:
        self._shape = shape

    def from_pretrained(self, place: str, **options: Any) -> Any:
        """As `AutoModelForSequenceClassification.from_pretrained`."""
        from transformers import AutoConfig, AutoModelForSequenceClassification

        config = AutoConfig.from_pretrained(
            place, trust_remote_code=options.get("trust_remote_code", False)
        )
        shape = self._shape or HeadShape(**(getattr(config, _SHAPE, None) or {}))
        if shape.layers == 1:
            found = AutoModelForSequenceClassification.from_pretrained(place, **options)
            model = found[0] if isinstance(found, tuple) else found
            model.config.__dict__.pop(_SHAPE, None)  # of the head before this one
            return found
        family: Any = AutoModelForSequenceClassification._model_mapping.get(type(config), None)
        if family is None:
            raise CheckpointError(f"'{place}' ({config.model_type}) has no sequence head")
        options.pop("trust_remote_code", None)
        return _build_class_with_head(family, shape).from_pretrained(place, **options)


def _build_class_with_head(family: type[Any], shape: HeadShape) -> Any:
    """The class of a family's classifiers, with a head of this shape, which its config records."""

    def make(self: Any, config: Any, *arguments: Any, **named: Any) -> None:
        family.__init__(self, config, *arguments, **named)
        if isinstance(getattr(self, "score", None), torch.nn.Linear):
            self.score = shape.build_module(self.score.in_features)
            setattr(self.config, _SHAPE, {"layers": shape.layers, "width": shape.width})

    return type(family.__name__, (family,), {"__init__": make, "__module__": family.__module__})


def compute_sequence_scores(
    model: PreTrainedModel, input_ids_BS: torch.Tensor, lengths_B: torch.Tensor
) -> torch.Tensor:
    """Scalar scores of right-padded rows, read at each row's last real token, with gradient.

    Args:
        input_ids_BS: int64 [B, S], right-padded. Causal attention keeps padding out of every real token, so no mask is
            needed, and a padding token that equals the end-of-sequence token does no harm.
        lengths_B: int64 [B], real tokens of each row, at least 1.
    Returns: float32 [B].
    Raises: DataError when shapes differ or a row is empty.
    """
    return (
        model.get_submodule("score")(_read_last_states(model, input_ids_BS, lengths_B))
        .squeeze(-1)
        .float()
    )


def _read_last_states(
    model: PreTrainedModel, input_ids_BS: torch.Tensor, lengths_B: torch.Tensor
) -> torch.Tensor:
    """States [B, H] at the last real token of each row; arguments and errors of `compute_sequence_scores`."""
    if input_ids_BS.ndim != 2 or lengths_B.shape != input_ids_BS.shape[:1]:
        raise DataError(
            f"input_ids {tuple(input_ids_BS.shape)} and lengths {tuple(lengths_B.shape)} do not match"
        )
    if lengths_B.numel() and not (
        int(lengths_B.min()) >= 1 and int(lengths_B.max()) <= input_ids_BS.shape[1]
    ):
        raise DataError(
            f"lengths must lie in 1..{input_ids_BS.shape[1]}, found {lengths_B.tolist()}"
        )
    places_S = torch.arange(input_ids_BS.shape[1], device=input_ids_BS.device)
    lengths_B1 = lengths_B.to(input_ids_BS.device)[:, None]
    batch = TrainBatch(
        input_ids_BS, places_S < lengths_B1, torch.zeros_like(input_ids_BS, dtype=torch.bool)
    )
    last_BS = places_S == lengths_B1 - 1
    return compute_hidden_states(model, batch, last_BS)[last_BS]


@torch.no_grad()
def score_rows(
    model: PreTrainedModel,
    rows: Sequence[Sequence[int]],
    *,
    pad_id: int | None = None,
    max_tokens: int = 16384,
) -> list[float]:
    """Scores of token rows, in the order given; length-sorted micro-batches of at most `max_tokens` padded tokens.

    Args:
        pad_id: token id on the right of short rows; None = the model configuration's.
    Raises: DataError for an empty row, or where there is no padding token; OutOfMemory for a row that does not fit.
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


def build_score_batches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Indices of rows that are scored together: shortest first, at most `max_tokens` padded tokens, or a row alone."""
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
    """Scores of token rows in one pass, in the model's present mode."""
    scores: list[float] = compute_sequence_scores(model, *_pad_rows(model, rows, pad_id)).tolist()
    return scores


@torch.no_grad()
def compute_last_states(
    model: PreTrainedModel, rows: Sequence[Sequence[int]], *, pad_id: int | None = None
) -> torch.Tensor:
    """States [B, H] at the last token of token rows, in one pass of a causal model or a classifier."""
    return _read_last_states(model, *_pad_rows(model, rows, pad_id))


def _pad_rows(
    model: PreTrainedModel, rows: Sequence[Sequence[int]], pad_id: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token rows as one tensor [B, S] on the model's device, and their lengths [B]."""
    pad = pad_id if pad_id is not None else model.config.pad_token_id
    if pad is None or pad < 0:
        raise DataError(
            f"pad_id: the model's configuration names no padding token (pad_token_id: {pad}); set it there, "
            "or pass pad_id"
        )
    device = next(model.parameters()).device
    width = max(len(row) for row in rows)
    ids_BS = torch.tensor([list(row) + [pad] * (width - len(row)) for row in rows], device=device)
    lengths_B = torch.tensor([len(row) for row in rows], device=device)
    return ids_BS, lengths_B


def read_hidden_size(model: PreTrainedModel) -> int:
    """Width of the hidden states that the model's head reads."""
    return int(unwrap_model(model).get_output_embeddings().weight.shape[1])


class ValueHead(nn.Module):
    """Linear map of hidden states to values in float32. It starts at 0: the first advantages use no values."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.head = nn.Linear(size, 1)  # a name that ends in `head` keeps it out of Muon
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, hidden_NH: torch.Tensor) -> torch.Tensor:
        """[N, H] -> float32 [N] (float64 for float64)."""
        dtype = torch.promote_types(hidden_NH.dtype, torch.float32)
        with torch.autocast(hidden_NH.device.type, enabled=False):
            weight, bias = self.head.weight.to(dtype), self.head.bias.to(dtype)
            return nn.functional.linear(hidden_NH.to(dtype), weight, bias).squeeze(-1)


class SeparateCritic(nn.Module):
    """A copy of a causal model's trunk, adapters included, with a value head. Its training never changes the policy."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.trunk: Any = copy.deepcopy(unwrap_model(model).base_model)
        reference = next(model.parameters())
        self.head = ValueHead(read_hidden_size(model)).to(device=reference.device)

    def forward(self, batch: TrainBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Value of the state before each loss token, [B, S] (0 elsewhere), and after each row's last real token, [B].

        Raises: DataError when position 0 carries loss.
        """
        mask_BS = batch.loss_mask_BS
        if bool(mask_BS[:, 0].any()):
            raise DataError("loss_mask is True at position 0, which has no token before it")
        hidden_BSH = compute_hidden_states(self.trunk, batch)
        after_BS = self.head(hidden_BSH.reshape(-1, hidden_BSH.shape[-1])).view(mask_BS.shape)
        before_BS = torch.cat([after_BS.new_zeros(len(after_BS), 1), after_BS[:, :-1]], dim=1)
        last_B1 = batch.attention_mask_BS.sum(1, keepdim=True) - 1
        return torch.where(mask_BS, before_BS, before_BS.new_zeros(())), after_BS.gather(
            1, last_B1
        ).squeeze(1)


class PolicyWithCritic(nn.Module):
    """A policy and its value function as one module, so that one checkpoint holds both."""

    def __init__(self, policy: PreTrainedModel, critic: SeparateCritic | ValueHead) -> None:
        super().__init__()
        self.policy = policy
        self.critic = critic

    @property
    def value_head(self) -> ValueHead | None:
        """The head on the policy's own hidden states, where there is one."""
        return self.critic if isinstance(self.critic, ValueHead) else None

    def compute_values(self, batch: TrainBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Values before each loss token, [B, S], and after each row's last real token, [B]."""
        if isinstance(self.critic, SeparateCritic):
            values_BS, after_B = self.critic(batch)
            return values_BS, after_B
        outputs: TokenOutputs = compute_token_outputs(self.policy, batch, value_head=self.critic)
        assert outputs.values_BS is not None and outputs.value_after_B is not None
        return outputs.values_BS, outputs.value_after_B

    def get_output_embeddings(self) -> nn.Module | None:
        """The policy's output head."""
        return self.policy.get_output_embeddings()
