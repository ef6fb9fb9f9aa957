"""A loaded policy with its tokenizer, chat renderer and rollout backend: from a folder, hub name, pair or texts."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from rl_core.data.chat import ChatRenderer
from rl_core.data.images import build_image_reader, set_image_reader
from rl_core.data.token_ids import find_textless_ids, set_end_ids
from rl_core.data.tokenizer import train_tokenizer
from rl_core.errors import CheckpointError, SettingsError
from rl_core.inference.engine import create_rollout_backend
from rl_core.inference.sampling import RolloutBackend
from rl_core.models import causal_lm
from rl_core.models.lora import is_lora
from rl_core.models.named_models import resolve_local_model
from rl_core.models.rotary import read_model_max_length
from rl_core.settings import LoraSettings, ModelSettings, build_settings
from rl_core.types import AutocastPrecision

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


logger = logging.getLogger(__name__)


@dataclass
class Policy:
    """A loaded policy with its tokenizer and chat renderer."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    renderer: ChatRenderer
    origin: ModelSettings | None = None  # settings of loading or creation; None = loaded by caller

    @property
    def kind(self) -> ModelSettings:
        """Model settings that select the defaults of training: preset, full fine-tuning, or LoRA."""
        if self.origin is not None:
            return self.origin
        lora = LoraSettings() if is_lora(self.model) else None
        return ModelSettings(path="loaded by the caller", lora=lora)

    @property
    def context(self) -> int:
        """Longest sequence, in tokens."""
        return read_model_max_length(self.model)

    @property
    def textless_ids(self) -> tuple[int, ...]:
        """Ids of the model that the tokenizer does not have; they are never sampled."""
        config: Any = self.model.config.get_text_config()
        return find_textless_ids(self.tokenizer, config.vocab_size)

    def backend(self, autocast: AutocastPrecision = "none") -> RolloutBackend:
        """Create a rollout backend that samples with this model's weights.

        Args:
            autocast: of the trainer whose rollouts it samples, so that both round the weights alike.
        """
        return create_rollout_backend(
            self.model,
            eos_ids=self.renderer.eos_ids,
            pad_id=self.renderer.pad_id,
            max_length=self.context,
            textless_ids=self.textless_ids,
            autocast=autocast,
        )

    def save(self, folder: str | Path) -> Path:
        """Write model and tokenizer as a Hugging Face folder; with adapters, the merged model and `adapter/`."""
        causal_lm.publish_model(self.model, self.tokenizer, folder)
        return Path(folder)


# A folder, a hub name, settings that name one (or a dict of them), a (model, tokenizer) pair, or a loaded policy.
ModelSource: TypeAlias = str | Path | ModelSettings | Mapping[str, Any] | Policy | tuple[Any, Any]


def build_model_settings(source: ModelSource) -> ModelSettings | Any:
    """Build model settings from a dict; return other sources unchanged. Raises: SettingsError naming the key."""
    return build_settings(source, ModelSettings, "model") if isinstance(source, Mapping) else source


def load_policy(
    source: ModelSource,
    settings: ModelSettings | Mapping[str, Any] | None = None,
    *,
    seed: int = 0,
) -> Policy:
    """Load the policy of a model folder or hub name, or wrap a loaded model and tokenizer.

    A loaded model is used as it is, on its device and in its dtype; training changes its weights in place.
    Args:
        settings: dtype, device and adapters of a model to load, and the chat template's settings, which also apply to a
            loaded tokenizer; `settings.path` is not used.
        seed: of the weights of new adapters.
    Raises: CheckpointError if there is no such model; SettingsError for any other object, or naming an invalid key.
    """
    source = build_model_settings(source)
    if settings is not None:
        settings = build_settings(settings, ModelSettings, "settings")
    if isinstance(source, Policy):
        return source
    if isinstance(source, tuple | list):
        return _build_policy_from_pair(source, settings)
    if isinstance(source, ModelSettings):
        if source.path is None:
            raise SettingsError(
                "model: ModelSettings without a path would start from an untrained model, which needs a tokenizer; "
                "create both with rl_core.create_policy(texts, settings), or set `path` to a folder or hub name"
            )
        settings = settings or source
        source = source.path
    if not isinstance(source, str | Path):
        name = type(source).__name__
        if isinstance(source, torch.nn.Module):
            raise SettingsError(f"model: {name} has no tokenizer; pass both: (model, tokenizer)")
        raise SettingsError(
            f"model: {name} is not a model; pass a folder, a hub name, a (model, tokenizer) pair, "
            "ModelSettings or a dict of them, or what load_policy returned"
        )
    settings = dataclasses.replace(settings or ModelSettings(), path=str(source))
    model, tokenizer = causal_lm.load_model(resolve_model_folder(source), settings, seed=seed)
    return Policy(model, tokenizer, ChatRenderer(tokenizer, settings), settings)


def create_policy(
    texts: Iterable[str],
    settings: ModelSettings | Mapping[str, Any] | None = None,
    *,
    seed: int = 0,
) -> Policy:
    """Create a small untrained policy: a byte-level BPE tokenizer trained on `texts`, and a model of the settings'
    preset.

    Needs no network and takes about a second; for tests, examples and experiments from scratch.
    Args:
        texts: samples of what the policy will read and write, at least a few hundred characters.
        settings: preset, vocab_size, context, device and dtype.
        seed: of the weights.
    """
    settings = build_settings(settings or {}, ModelSettings, "settings")
    tokenizer = train_tokenizer(texts, settings.vocab_size, with_images=settings.sees_images)
    causal_lm.set_chat_template(tokenizer, settings)
    model = causal_lm.create_model(settings, tokenizer, seed)
    return Policy(model, tokenizer, ChatRenderer(tokenizer, settings), settings)


def describe_model_source(source: ModelSource) -> str:
    """Return the model's name for a run's records: its folder or hub name, or its class if loaded by the caller."""
    source = build_model_settings(source)
    if isinstance(source, ModelSettings):
        return str(source.path)
    if isinstance(source, str | Path):
        return str(source)
    model = source.model if isinstance(source, Policy) else source[0]
    return f"{type(model).__name__} of {causal_lm.count_parameters(model)} parameters"


def _build_policy_from_pair(
    pair: tuple[Any, ...] | list[Any], settings: ModelSettings | None
) -> Policy:
    """Build a policy from a caller's model and tokenizer, or processor of images and text."""
    is_pair = len(pair) == 2 and isinstance(pair[0], torch.nn.Module)
    if not is_pair or not hasattr(pair[1], "apply_chat_template"):
        types = ", ".join(type(part).__name__ for part in pair)
        raise SettingsError(f"model: expected a pair (model, tokenizer), found ({types})")
    model, tokenizer = pair
    if hasattr(tokenizer, "image_processor"):  # a processor of transformers
        processor, tokenizer = tokenizer, tokenizer.tokenizer
        config, image_settings = model.config.to_dict(), processor.image_processor.to_dict()
        set_image_reader(tokenizer, build_image_reader(tokenizer, config, image_settings))
    if settings is not None and settings.lora is not None:
        raise SettingsError(
            "model: lora adapters can only be added to a model loaded from a folder or hub name"
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
    if getattr(model, "generation_config", None) is not None:
        settings_of_model = model.generation_config
        names = ("eos_token_id", "_from_model_config")
        set_end_ids(tokenizer, {name: getattr(settings_of_model, name, None) for name in names})
    if settings is not None:
        causal_lm.set_chat_template(tokenizer, settings)
    return Policy(model.train(), tokenizer, ChatRenderer(tokenizer, settings))


def resolve_model_folder(source: str | Path) -> str | Path:
    """Return model/ in the folder of a finished stage or a run's output, and the folder of a named model or GGUF file.

    Any other source is returned unchanged.
    """
    local = resolve_local_model(source)
    if local is not None:
        return local
    folder = Path(source) / "model"
    return folder if folder.is_dir() and not (Path(source) / "config.json").is_file() else source


def select_device_settings(policy: Policy) -> ModelSettings:
    """Return model settings that load another model onto the policy's kind of device."""
    is_cuda = next(policy.model.parameters()).device.type == "cuda"
    return ModelSettings(device="cuda" if is_cuda else "cpu")
