"""Folders of an adapter in peft's format, without its base model, from which a run starts."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_core.errors import ModelError, SettingsError
from rl_core.settings import LoraSettings

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel
    from transformers import PreTrainedModel


ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
MAX_CONFIG_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True)
class StoredAdapter:
    """An adapter and the base model that its config names."""

    path: Path
    base: str  # a folder or a hub name
    values: dict[str, Any]  # of its config

    @property
    def has_tokenizer(self) -> bool:
        """True if the tokenizer is stored with the adapter."""
        return (self.path / "tokenizer_config.json").is_file()


def is_adapter_folder(path: str | Path) -> bool:
    """Return whether a path is a folder with an adapter alone; a folder with a config.json is a model."""
    folder = Path(os.path.expanduser(path))  # Path.expanduser raises for an unknown user
    try:
        has_adapter = (folder / ADAPTER_CONFIG).is_file()
        return has_adapter and not (folder / "config.json").is_file()
    except (OSError, ValueError):  # a name that is too long, a folder that may not be read
        return False


def read_adapter_folder(path: str | Path) -> StoredAdapter:
    """Read an adapter's config; a base named by a relative path is looked up here and in the folder.

    Raises: ModelError if it cannot be read, is no LoRA of a language model, or its weights or base are missing.
    """
    folder = Path(os.path.expanduser(path))
    file = folder / ADAPTER_CONFIG
    try:
        if file.stat().st_size > MAX_CONFIG_BYTES:
            raise ValueError(f"larger than {MAX_CONFIG_BYTES // 2**20} MiB")
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"'{file}' cannot be read: {type(error).__name__}: {error}") from error
    if not isinstance(values, dict):
        raise ModelError(f"'{file}' is not a JSON object")
    kind, task = values.get("peft_type"), values.get("task_type")
    if kind != "LORA" or task not in (None, "CAUSAL_LM"):
        raise ModelError(
            f"'{folder}' holds an adapter of kind {kind} for {task}; only LORA for CAUSAL_LM can be continued"
        )
    if not (folder / ADAPTER_WEIGHTS).is_file():
        raise ModelError(
            f"'{folder}' holds no {ADAPTER_WEIGHTS}; pickles (adapter_model.bin) are never read"
        )
    base = values.get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise ModelError(
            f"'{file}' does not say which model the adapter is for; set base_model_name_or_path to its folder"
        )
    for candidate in (Path(os.path.expanduser(base)), folder / base):
        if candidate.is_dir():
            return StoredAdapter(folder, str(candidate), values)
    if base.startswith((".", "/", "~")) or base.count("/") > 1:
        hint = f"; or start from {folder.parent}, the model with this adapter merged"
        is_merged = (folder.parent / "config.json").is_file()
        raise ModelError(
            f"'{folder}' is an adapter for '{base}', and there is no such folder; correct base_model_name_or_path in "
            f"{ADAPTER_CONFIG}{hint if is_merged else ''}"
        )
    return StoredAdapter(folder, base, values)


def check_adapter_settings(adapter: StoredAdapter, settings: LoraSettings) -> None:
    """Raise SettingsError if the settings describe another adapter than the folder holds."""
    stored = {
        "rank": adapter.values.get("r"),
        "alpha": adapter.values.get("lora_alpha"),
        "rank_stabilized": bool(adapter.values.get("use_rslora")),
        "dora": bool(adapter.values.get("use_dora")),
    }
    for name, value in stored.items():
        if value != getattr(settings, name):
            values = ", ".join(f"{key}: {json.dumps(each)}" for key, each in stored.items())
            raise SettingsError(
                f"lora.{name}: {getattr(settings, name)}, but the adapter in {adapter.path}, which the run continues, "
                f"has {value}; set lora: {{{values}}}"
            )


def load_adapter(
    model: PreTrainedModel, adapter: StoredAdapter, settings: LoraSettings
) -> PreTrainedModel:
    """Put the folder's adapter on its base model, to be trained on.

    Raises: SettingsError if the settings describe another one; ModelError if its weights do not fit.
    """
    check_adapter_settings(adapter, settings)
    wrapped: Any = _load_peft_model(model, adapter, dropout=settings.dropout)
    return wrapped


def merge_adapter(model: PreTrainedModel, adapter: StoredAdapter) -> PreTrainedModel:
    """Merge the folder's adapter into its base model, all of whose weights can be trained.

    Raises: ModelError if its weights do not fit.
    """
    merged: Any = _load_peft_model(model, adapter, dropout=0.0).merge_and_unload()
    return merged.requires_grad_(True)


def build_empty_adapter(model: PreTrainedModel, adapter: StoredAdapter) -> PreTrainedModel:
    """Add layers of the folder's shapes without reading its weights."""
    from peft import get_peft_model

    wrapped: Any = get_peft_model(model, _build_config(adapter, dropout=0.0))
    return wrapped


def _load_peft_model(model: Any, adapter: StoredAdapter, *, dropout: float) -> PeftModel:
    from peft import PeftModelForCausalLM

    try:
        wrapped = PeftModelForCausalLM(model, _build_config(adapter, dropout=dropout))
        report = wrapped.load_adapter(str(adapter.path), "default", is_trainable=True)
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise ModelError(
            f"the adapter in '{adapter.path}' does not fit its base model '{adapter.base}': {reason}"
        ) from error
    for kind, names in (
        ("are missing", report.missing_keys),
        ("have no layer", report.unexpected_keys),
    ):
        if names:
            raise ModelError(
                f"the adapter in '{adapter.path}' does not fit its base model '{adapter.base}': {len(names)} weights "
                f"{kind}, first {sorted(names)[0]}"
            )
    return wrapped


def _build_config(adapter: StoredAdapter, *, dropout: float) -> LoraConfig:
    """Build peft's config of the folder, to be trained."""
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise SettingsError("lora: needs the peft package, which is not installed") from error
    config: LoraConfig = LoraConfig.from_pretrained(str(adapter.path))
    config.inference_mode = False
    config.lora_dropout = dropout
    config.task_type = "CAUSAL_LM"
    return config
