"""Checks of an inference server before anything is sampled: model, vocabulary, version, abilities."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rl_core.errors import SettingsError
from rl_core.models.lora import is_lora, serves_alone, unwrap
from rl_core.rollout_workers.http_connections import ServerAway, ServerRefusal
from rl_core.rollout_workers.server_dialect import PROCESSED, VLLM, InferenceServer, ServerDescription
from rl_core.settings import RolloutSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["check_abilities", "check_model", "check_shape", "check_tokenizer", "check_when_starting"]

_WORDS = {"vocab_size": "tokens", "hidden_size": "hidden units", "num_hidden_layers": "layers"}
_SHOWN_TOKENS = 64  # of the vocabulary, spread over it, in the text that both tokenizers read


def check_when_starting(settings: RolloutSettings, shape: Mapping[str, int] | None, lora_rank: int) -> None:
    """Ask a server once, before a pipeline begins. Raises: SettingsError with what is wrong and what to do.

    Args:
        shape: of the model, as far as it is known (`check_shape`).
        lora_rank: of the adapter that will be sent; 0 = none.
    """
    server = InferenceServer(settings)
    try:
        description = server.describe()
    except ServerAway as away:
        raise SettingsError(
            f"rollouts.address: no inference server answers ({away}); start one (docs/inference-servers.md), or set "
            "workers: in_process"
        ) from away
    finally:
        server.close()
    check_abilities(description, settings, lora_rank)
    if shape is not None:
        check_shape(description, shape, settings.address or "")


def check_abilities(description: ServerDescription, settings: RolloutSettings, lora_rank: int) -> None:
    """Raises: SettingsError for another version of vLLM, or something that the server was not started for."""
    wanted = settings.server.version
    if description.engine == VLLM and description.version != wanted:
        raise SettingsError(
            f"rollouts.server.version: {settings.address} runs vLLM {description.version}, and {wanted} is accepted; "
            f"install deployments/vllm/requirements.txt there, or set version: {description.version} if you have "
            "compared both"
        )
    if description.logprobs != PROCESSED:
        raise SettingsError(
            f"rollouts.address: {settings.address} tells {description.logprobs}, which are not of the distribution "
            f"that it samples from; start it with --logprobs-mode {PROCESSED} (deployments/vllm/start.py does)"
        )
    if settings.server.sleeps and not description.sleeps:
        raise SettingsError(
            f"rollouts.server.sleeps: {settings.address} was not started with sleep mode; start it with --sleeps, or "
            "leave sleeps out"
        )
    if lora_rank > description.lora_rank:
        can = f"adapters up to rank {description.lora_rank}" if description.lora_rank else "no adapters"
        raise SettingsError(
            f"rollouts.address: {settings.address} takes {can}, and model.lora.rank is {lora_rank}; start it with "
            f"--lora-rank {lora_rank}"
        )


def check_shape(description: ServerDescription, shape: Mapping[str, int], address: str) -> None:
    """Raises: SettingsError where the server's model has another vocabulary, width or depth than ours."""
    for name, words in _WORDS.items():
        if name in shape and shape[name] != description.shape[name]:
            raise SettingsError(
                f"rollouts.address: {address} serves another model ('{description.model}', {description.architecture}) "
                f"of {description.shape[name]:,} {words}, and the policy has {shape[name]:,}; start it with the "
                "policy's base model"
            )


def check_model(description: ServerDescription, model: PreTrainedModel, settings: RolloutSettings) -> None:
    """As `check_abilities` and `check_shape`, for a policy that is loaded."""
    config: Any = unwrap(model).config.get_text_config()
    rank = 0
    if is_lora(model) and serves_alone(model):
        adapted: Any = model
        rank = max(part.r for part in adapted.peft_config.values())
    check_abilities(description, settings, rank)
    known = {name: getattr(config, name) for name in _WORDS if isinstance(getattr(config, name, None), int)}
    check_shape(description, known, settings.address or "")


def check_tokenizer(
    server: InferenceServer, description: ServerDescription, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Raises: SettingsError where the server reads a text as other tokens than the policy's tokenizer does."""
    size = len(tokenizer)
    spread = [place * size // _SHOWN_TOKENS for place in range(_SHOWN_TOKENS)]
    special = set(tokenizer.all_special_ids)
    text = str(tokenizer.decode([token for token in spread if token not in special]))
    ours = [int(token) for token in tokenizer.encode(text, add_special_tokens=False)]
    try:
        theirs = server.tokenize(description.model, text)
    except (ServerRefusal, KeyError, TypeError, ValueError) as error:
        raise SettingsError(f"rollouts.address: {server.address} does not tell its tokens ({error})") from error
    if ours != theirs:
        place = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), len(ours))
        raise SettingsError(
            f"rollouts.address: {server.address} has another tokenizer than the policy: of a text of {len(ours)} "
            f"tokens it reads {len(theirs)}, other ones from number {place + 1} on; start it with the policy's "
            "base model"
        )
