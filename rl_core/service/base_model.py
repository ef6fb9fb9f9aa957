"""Base model in memory: its weights, what adapters may update, and a rollout engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from rl_core.capabilities import (
    check_chunked_head,
    check_independent_rows,
    check_slot_adapters,
    refuse_image_model,
)
from rl_core.cpu import gemm
from rl_core.data.completion_decoding import CompletionDecoder
from rl_core.data.token_ids import find_textless_ids, list_end_ids
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
    """Frozen causal language model that training runs and samplers share."""

    def __init__(self, name: str, path: str, settings: ServiceEngineSettings) -> None:
        """Load the model. Raises: ModelError if it does not exist, or its head scales or caps logits."""
        self.name, self.path = name, path
        model, self.tokenizer = causal_lm.load_model(
            path, ModelSettings(dtype=settings.dtype, device=settings.device)
        )
        refuse_image_model(model, "service", f"base model '{name}'")
        self.model: Any = model.requires_grad_(False).eval()
        decision = check_chunked_head(self.model)
        if not decision.allowed:
            raise ModelError(f"base model '{name}' cannot be served: {decision.reason}")
        self.device = next(self.model.parameters()).device
        self.head: nn.Linear = self.model.get_output_embeddings()
        modules = list(self.model.named_modules())
        self.head_name = next(name for name, module in modules if module is self.head)
        embedding = self.model.get_input_embeddings()
        vocab_size = min(embedding.weight.shape[0], self.head.weight.shape[0])
        self.limits = ModelLimits(read_model_max_length(self.model), vocab_size)
        self.hidden_size = read_hidden_size(self.model)
        self._inner_linear_names = [
            name
            for name, module in modules
            if type(module) is nn.Linear and module is not self.head
        ]
        self.router = AdapterRouter(self.model, self._inner_linear_names)
        self._batching = settings.batch_runs
        self._independence = check_independent_rows(self.model)
        self.samples_adapters = check_slot_adapters(self.model)
        self.decoder = CompletionDecoder(self.tokenizer)
        self.pad_id = self.tokenizer.pad_token_id or 0
        self.eos_ids = tuple(
            sorted({*list_end_ids(self.tokenizer), int(self.tokenizer.eos_token_id)})
        )
        self._backend: RolloutBackend | None = None

    @property
    def batches_runs(self) -> bool:
        """True if rows of several training runs share a pass."""
        return self._batching == "always" or (
            self._batching == "exact" and self._independence.allowed
        )

    def use_row_by_row_products(self) -> AbstractContextManager[None]:
        """Return a context in which a pass's matrix products are row-invariant if runs may share passes.

        It applies to a run that is alone in its pass too, so that its results do not depend on other runs.
        """
        is_exact = self.batches_runs and self._independence.allowed
        return gemm.use_row_invariant_products() if is_exact else nullcontext()

    @property
    def info(self) -> BaseInfo:
        """Description for clients and logs."""
        return BaseInfo(
            name=self.name,
            path=self.path,
            context=self.limits.context,
            vocab_size=self.limits.vocab_size,
            batches_runs=self.batches_runs,
            note=self._independence.reason,
        )

    def list_adapter_targets(self, config: AdapterConfig) -> list[str]:
        """List the linear layers that an adapter updates.

        Raises: ServiceError (user) if the model has no layers of a requested kind.
        """
        kinds = {}
        for name in self._inner_linear_names:
            is_attention = any(part in name for part in _ATTENTION_NAME_PARTS)
            kinds[name] = "train_attn" if is_attention else "train_mlp"
        for kind in ("train_attn", "train_mlp"):
            if getattr(config, kind) and kind not in kinds.values():
                raise ServiceError(
                    f"lora_config: '{self.name}' ({type(self.model).__name__}) has no linear layers for {kind}; "
                    "switch it off, or train all weights",
                    "user",
                )
        targets = [name for name, kind in kinds.items() if getattr(config, kind)]
        return [*targets, self.head_name] if config.train_unembed else targets

    @contextmanager
    def swap_weights(self, weights: Mapping[str, torch.Tensor]) -> Iterator[Any]:
        """Yield the model with other weights of the same shapes; afterwards the original parameters are restored.

        Args:
            weights: by parameter name. For a tied parameter, its first name replaces all tied uses, any other name only
                the named one.
        """
        aliases = _list_tied_names(self.model)
        replaced: list[tuple[nn.Module, str, nn.Parameter]] = []
        try:
            for name, weight in weights.items():
                for alias in aliases.get(name, [name]):
                    owner, _, attribute = alias.rpartition(".")
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
        """Decode sequences with the model's current weights and the adapters that the sequences name.

        Args:
            eos_ids: tokens that end an action.
            adapters: only if `samples_adapters`.
        """
        if self._backend is None:
            self._backend = create_rollout_backend(
                self.model,
                eos_ids=eos_ids,
                pad_id=self.pad_id,
                max_length=self.limits.context,
                textless_ids=find_textless_ids(self.tokenizer, self.limits.vocab_size),
            )
        self._backend.set_end_tokens(eos_ids)
        if isinstance(self._backend, Engine):
            self._backend.run_sequences(sequences, sampling, adapters)
        else:
            assert not adapters
            self._backend.run_sequences(sequences, sampling)


def _list_tied_names(model: nn.Module) -> dict[str, list[str]]:
    """Map the first name of each tied parameter to all its names."""
    first_names: dict[int, str] = {}
    names: dict[str, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(first_names.setdefault(id(parameter), name), []).append(name)
    return {name: aliases for name, aliases in names.items() if len(aliases) > 1}
