"""A base model in memory: its weights, what adapters may update, and a rollout engine over it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from rl_core.capabilities import check_chunked_head, check_independent_rows, check_slot_adapters
from rl_core.cpu import gemm
from rl_core.errors import ModelError, ServiceError
from rl_core.inference.engine import Engine, create_rollout_backend
from rl_core.inference.sampling import RolloutBackend, RolloutSequence
from rl_core.models import causal_lm
from rl_core.models.heads import read_hidden_size
from rl_core.models.rotary import read_model_max_length
from rl_core.models.routed_adapters import Adapter, AdapterRouter
from rl_core.service.request_checks import ModelLimits
from rl_core.service.requests import AdapterConfig
from rl_core.service.results import BaseInfo
from rl_core.settings import ModelSettings, SamplingSettings, ServiceEngineSettings

_ATTENTION_NAME_PARTS = ("attn", "attention")


class SharedBaseModel:
    """A frozen causal language model that training runs and samplers share."""

    def __init__(self, name: str, path: str, settings: ServiceEngineSettings) -> None:
        """Raises: ModelError when there is no such model, or its head scales or caps logits."""
        self.name, self.path = name, path
        model, self.tokenizer = causal_lm.load_model(
            path, ModelSettings(dtype=settings.dtype, device=settings.device)
        )
        self.model: Any = model.requires_grad_(False).eval()
        if not (decision := check_chunked_head(self.model)).allowed:
            raise ModelError(f"base model '{name}' cannot be served: {decision.reason}")
        self.device = next(self.model.parameters()).device
        self.head: nn.Linear = self.model.get_output_embeddings()
        self.head_name = next(
            name for name, part in self.model.named_modules() if part is self.head
        )
        vocab_size = min(
            self.model.get_input_embeddings().weight.shape[0], self.head.weight.shape[0]
        )
        self.limits = ModelLimits(read_model_max_length(self.model), vocab_size)
        self.hidden_size = read_hidden_size(self.model)
        names = [
            name
            for name, part in self.model.named_modules()
            if type(part) is nn.Linear and part is not self.head
        ]
        self._inner_linear_names = names
        self.router = AdapterRouter(self.model, names)
        self._batching = settings.batch_runs
        self._independence = check_independent_rows(self.model)
        self.samples_adapters = check_slot_adapters(self.model)
        self.pad_id = self.tokenizer.pad_token_id or 0
        self.eos_ids = _collect_eos_ids(self.model, self.tokenizer)
        self._backend: RolloutBackend | None = None

    @property
    def batches_runs(self) -> bool:
        """True = rows of several training runs share a pass."""
        return self._batching == "always" or (
            self._batching == "exact" and self._independence.allowed
        )

    def use_row_by_row_products(self) -> AbstractContextManager[None]:
        """Within: matrix products of passes that several runs may share, also for a run that is alone in its pass."""
        is_exact = self.batches_runs and self._independence.allowed
        return gemm.use_row_invariant_products() if is_exact else nullcontext()

    @property
    def info(self) -> BaseInfo:
        """For people and clients."""
        return BaseInfo(
            name=self.name,
            path=self.path,
            context=self.limits.context,
            vocab_size=self.limits.vocab_size,
            batches_runs=self.batches_runs,
            note=self._independence.reason,
        )

    def list_adapter_targets(self, config: AdapterConfig) -> list[str]:
        """Names of the linear layers that an adapter updates.

        Raises: ServiceError (user) where the model has none of a kind that is asked for.
        """
        kind_of = {
            name: "train_attn"
            if any(word in name for word in _ATTENTION_NAME_PARTS)
            else "train_mlp"
            for name in self._inner_linear_names
        }
        for kind in ("train_attn", "train_mlp"):
            if getattr(config, kind) and kind not in kind_of.values():
                raise ServiceError(
                    f"lora_config: '{self.name}' ({type(self.model).__name__}) has no linear layers for {kind}; "
                    "switch it off, or train all weights",
                    "user",
                )
        found = [name for name, kind in kind_of.items() if getattr(config, kind)]
        return [*found, self.head_name] if config.train_unembed else found

    @contextmanager
    def swap_weights(self, weights: Mapping[str, torch.Tensor]) -> Iterator[Any]:
        """The model with other weights of its own shapes inside; afterwards it is the very same again.

        Args:
            weights: by the name of a parameter. A weight that is tied to others replaces only those that are named, or
                all where the first name of the parameter is given.
        """
        aliases = _list_tied_names(self.model)
        replaced: list[tuple[nn.Module, str, nn.Parameter]] = []
        try:
            for name, weight in weights.items():
                for place in aliases.get(name, [name]):
                    owner, _, attribute = place.rpartition(".")
                    module = self.model.get_submodule(owner)
                    replaced.append((module, attribute, module._parameters[attribute]))
                    module._parameters[attribute] = nn.Parameter(weight, requires_grad=False)
            yield self.model
        finally:
            for module, attribute, parameter in reversed(replaced):
                module._parameters[attribute] = parameter

    def generate_sequences(
        self,
        sequences: Sequence[RolloutSequence],
        sampling: SamplingSettings,
        eos_ids: Sequence[int],
        adapters: Sequence[Adapter] = (),
    ) -> None:
        """Play sequences by the model's present weights and the adapters that they name; actions end at these tokens.

        Args:
            adapters: only where `samples_adapters`.
        """
        if self._backend is None:
            self._backend = create_rollout_backend(
                self.model, eos_ids=eos_ids, pad_id=self.pad_id, max_length=self.limits.context
            )
        self._backend.set_end_tokens(eos_ids)
        if isinstance(self._backend, Engine):
            self._backend.run_sequences(sequences, sampling, adapters)
        else:
            assert not adapters
            self._backend.run_sequences(sequences, sampling)


def _list_tied_names(model: nn.Module) -> dict[str, list[str]]:
    """First name of each tied parameter -> all its names."""
    first: dict[int, str] = {}
    names: dict[str, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(first.setdefault(id(parameter), name), []).append(name)
    return {name: places for name, places in names.items() if len(places) > 1}


def _collect_eos_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Tokens that end a sequence, by the model's generation settings and the tokenizer."""
    named = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    found = set(named if isinstance(named, list | tuple) else [] if named is None else [named])
    return tuple(sorted(found | {tokenizer.eos_token_id}))
