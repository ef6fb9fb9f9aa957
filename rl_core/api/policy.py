"""A loaded policy with its tokenizer, chat renderer and rollout backend: from a folder, hub name, pair or texts."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from rl_core.data.chat import ChatRenderer
from rl_core.data.tokenizer import train_tokenizer
from rl_core.errors import CheckpointError, SettingsError
from rl_core.inference.engine import create_rollout_backend
from rl_core.inference.sampling import RolloutBackend
from rl_core.models import causal_lm
from rl_core.models.lora import is_lora
from rl_core.models.rotary import read_model_max_length
from rl_core.settings import LoraSettings, ModelSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


logger = logging.getLogger(__name__)


@dataclass
class Policy:
    """A loaded policy and what is needed to talk to it."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    renderer: ChatRenderer
    origin: ModelSettings | None = (
        None  # settings that it was read or made with; None = loaded by the caller
    )

    @property
    def default_settings(self) -> ModelSettings:
        """Model settings that choose the defaults of training: preset, full fine-tuning, or LoRA."""
        if self.origin is not None:
            return self.origin
        return ModelSettings(
            path="loaded by the caller", lora=LoraSettings() if is_lora(self.model) else None
        )

    @property
    def context(self) -> int:
        """Longest sequence, in tokens."""
        return read_model_max_length(self.model)

    def backend(self) -> RolloutBackend:
        """A rollout backend over this model's own weights."""
        return create_rollout_backend(
            self.model,
            eos_ids=self.renderer.eos_ids,
            pad_id=self.renderer.pad_id,
            max_length=self.context,
        )

    def save(self, folder: str | Path) -> Path:
        """Write model and tokenizer as a Hugging Face folder; with adapters, the merged model and `adapter/`."""
        causal_lm.publish_model(self.model, self.tokenizer, folder)
        return Path(folder)


# A folder, a hub name, settings that name one, a (model, tokenizer) pair, or a policy that is loaded already.
ModelSource: TypeAlias = str | Path | ModelSettings | Policy | tuple[Any, Any]


def load_policy(
    source: ModelSource, settings: ModelSettings | None = None, *, seed: int = 0
) -> Policy:
    """The policy of a model folder or hub name, or of a model and a tokenizer that are loaded already.

    A loaded model is used as it is, on its device and in its dtype; training changes its weights in place.
    Args:
        settings: dtype, device and adapters of a model that is read here, and the chat template's settings, which a
            loaded tokenizer takes as well; `settings.path` is not used.
        seed: of the weights of new adapters.
    Raises: CheckpointError when there is no such model; SettingsError for an object that is none.
    """
    if isinstance(source, Policy):
        return source
    if isinstance(source, tuple | list):
        return _build_policy_from_pair(source, settings)
    if isinstance(source, ModelSettings):
        if source.path is None:
            raise SettingsError(
                "model: ModelSettings without a path would start from an untrained model, which needs a tokenizer; "
                "make one with rl_core.create_policy(texts, settings), or name a folder or hub name in `path`"
            )
        settings = settings or source
        source = source.path
    if not isinstance(source, str | Path):
        hint = (
            "; hand it in together with its tokenizer: (model, tokenizer)"
            if hasattr(source, "config")
            else ""
        )
        raise SettingsError(
            f"model: {type(source).__name__} is no model; give a folder, a hub name, a (model, tokenizer) pair, "
            f"ModelSettings, or what load_policy returned{hint}"
        )
    settings = dataclasses.replace(settings or ModelSettings(), path=str(source))
    model, tokenizer = causal_lm.load_model(resolve_model_folder(source), settings, seed=seed)
    return Policy(model, tokenizer, ChatRenderer(tokenizer, settings), settings)


def create_policy(
    texts: Iterable[str], settings: ModelSettings | None = None, *, seed: int = 0
) -> Policy:
    """A small untrained policy: a byte-level BPE tokenizer trained on `texts`, and a Llama of the settings' preset.

    Needs no network and takes about a second; for tests, examples and experiments from scratch.
    Args:
        texts: what the policy will read and write, a few hundred characters at least.
        settings: preset, vocab_size, context, device and dtype.
        seed: of the weights.
    """
    settings = settings or ModelSettings()
    tokenizer = train_tokenizer(texts, settings.vocab_size)
    causal_lm.set_chat_template(tokenizer, settings)
    renderer = ChatRenderer(tokenizer, settings)
    return Policy(causal_lm.create_model(settings, tokenizer, seed), tokenizer, renderer, settings)


def describe_model_source(source: ModelSource) -> str:
    """Model name in a run's records: its folder or hub name, or its class if loaded by the caller."""
    if isinstance(source, ModelSettings):
        return str(source.path)
    if isinstance(source, str | Path):
        return str(source)
    model = source.model if isinstance(source, Policy) else source[0]
    return f"{type(model).__name__} of {causal_lm.count_parameters(model)} parameters"


def _build_policy_from_pair(
    pair: tuple[Any, ...] | list[Any], settings: ModelSettings | None
) -> Policy:
    """A policy over a caller's model and tokenizer."""
    if (
        len(pair) != 2
        or not isinstance(pair[0], torch.nn.Module)
        or not hasattr(pair[1], "apply_chat_template")
    ):
        kinds = ", ".join(type(part).__name__ for part in pair)
        raise SettingsError(f"model: expected a pair (model, tokenizer), found ({kinds})")
    model, tokenizer = pair
    if settings is not None and settings.lora is not None:
        raise SettingsError(
            "model: lora adapters are added to a model that is read from a folder or hub name only"
        )
    if tokenizer.eos_token_id is None:
        raise CheckpointError(
            "the tokenizer has no end-of-sequence token (eos_token); it needs one"
        )
    if tokenizer.pad_token_id is None:
        logger.info("the tokenizer has no padding token and pads with its end-of-sequence token")
        tokenizer.pad_token = tokenizer.eos_token
    if model.config.pad_token_id is None:
        model.config.pad_token_id = tokenizer.pad_token_id
    if settings is not None:
        causal_lm.set_chat_template(tokenizer, settings)
    return Policy(model.train(), tokenizer, ChatRenderer(tokenizer, settings))


def resolve_model_folder(source: str | Path) -> str | Path:
    """The folder of a finished stage or a run's output holds its model in model/; other places are the model itself."""
    folder = Path(source) / "model"
    return folder if folder.is_dir() and not (Path(source) / "config.json").is_file() else source


def select_device_settings(policy: Policy) -> ModelSettings:
    """Model settings that load another model onto the policy's kind of device."""
    return ModelSettings(
        device="cuda" if next(policy.model.parameters()).device.type == "cuda" else "cpu"
    )
