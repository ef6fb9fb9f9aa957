"""Saved states of training runs, and their export as Hugging Face model folders and peft adapters."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from rl_core.errors import CheckpointError, ServiceError
from rl_core.models.causal_lm import save_tokenizer_and_card, save_weights
from rl_core.models.routed_adapters import LowRank
from rl_core.service.base_model import SharedBaseModel
from rl_core.service.requests import AdapterConfig, CreateModel
from rl_core.service.training_run import STATE_FORMAT, merge_adapter_weights
from rl_core.storage.checkpoint import CheckpointStore
from rl_core.storage.folders import replace_folder, write_folder_file


def write_state(folder: str | Path, state: Mapping[str, Any]) -> None:
    """Publish a state.

    The previous content of the folder stays until the new one is complete, and remains as a fallback.
    Raises: CheckpointError for a disk error; NonFiniteError for weights that are not finite.
    """
    CheckpointStore(folder).save_version(state)


def read_state(folder: str | Path) -> dict[str, Any]:
    """Return the newest valid state in a folder. Raises: CheckpointError if there is none."""
    state = CheckpointStore(folder).load_latest()
    if state is None:
        raise CheckpointError(f"{folder}: holds no saved weights")
    if state.get("run", {}).get("format") != STATE_FORMAT:
        raise CheckpointError(
            f"{folder}: saved by another version of the service (format {state.get('run')})"
        )
    return state


def extract_sampling_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a state that samplers need: weights without heads, optimizer and gradient."""
    weights = {
        name: tensor for name, tensor in state["model"].items() if not name.startswith("heads.")
    }
    return {"run": state["run"], "model": weights}


def build_create_request(state: Mapping[str, Any], model_id: str) -> CreateModel:
    """Build the request that creates a run able to load this state."""
    run = state["run"]
    adapter = None if run["adapter"] is None else AdapterConfig(**run["adapter"])
    return CreateModel(
        model_id=model_id,
        base=run["base"],
        adapter=adapter,
        optimizer=run["optimizer"],
        seed=run["seed"],
    )


def load_adapter(
    state: Mapping[str, Any], device: torch.device | str = "cpu"
) -> dict[str, LowRank] | None:
    """Return the adapter of a state, by linear layer; None if the state holds all weights."""
    config = state["run"]["adapter"]
    if config is None:
        return None
    weights: Mapping[str, torch.Tensor] = state["model"]
    layers = [
        name.removesuffix(".lora_A.weight") for name in weights if name.endswith(".lora_A.weight")
    ]
    return {
        layer: LowRank(
            weights[f"{layer}.lora_A.weight"].to(device),
            weights[f"{layer}.lora_B.weight"].to(device),
            config["alpha"] / config["rank"],
        )
        for layer in layers
    }


def load_sampling_weights(
    base: SharedBaseModel, state: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    """Return the weights, by name, that turn the base into the saved model."""
    if state["run"]["base"] != base.name:
        raise ServiceError(
            f"the saved weights are of base model '{state['run']['base']}', not '{base.name}'",
            "user",
        )
    adapter = load_adapter(state, base.device)
    if adapter is not None:
        return merge_adapter_weights(base, adapter)
    return {
        name: tensor.to(base.device)
        for name, tensor in state["model"].items()
        if not name.startswith("heads.")
    }


def export_model(base: SharedBaseModel, state: Mapping[str, Any], folder: str | Path) -> None:
    """Export a Hugging Face model folder with the adapter merged, replacing an earlier export.

    An adapter of the output head unties it from the embedding.
    Raises: CheckpointError for a disk error, or if the folder holds other files.
    """
    weights, head = load_sampling_weights(base, state), f"{base.head_name}.weight"
    unties = (
        state["run"]["adapter"] is not None
        and head in weights
        and base.model.config.tie_word_embeddings
    )

    def write(target: Path) -> None:
        tied = base.model.config.tie_word_embeddings
        with base.swap_weights(weights) as model:
            try:
                model.config.tie_word_embeddings = tied and not unties
                save_weights(model, target)
            finally:
                model.config.tie_word_embeddings = tied
        save_tokenizer_and_card(base.model, base.tokenizer, target)

    replace_folder(folder, write, {"kind": "model"})


def export_peft(base: SharedBaseModel, state: Mapping[str, Any], folder: str | Path) -> None:
    """Export a peft adapter folder.

    Raises: ServiceError (user) for a run that trains all weights; CheckpointError.
    """
    adapter, config = load_adapter(state), state["run"]["adapter"]
    if adapter is None:
        raise ServiceError(
            "this run trains all weights, so there is no adapter to export; export the model",
            "user",
        )
    adapter_config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base.path,
        "r": config["rank"],
        "lora_alpha": config["alpha"],
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": sorted(adapter),
    }
    tensors = {
        f"base_model.model.{name}.{part}.weight": factor.contiguous()
        for name, update in adapter.items()
        for part, factor in (("lora_A", update.down_RI), ("lora_B", update.up_OR))
    }

    def write(target: Path) -> None:
        write_folder_file(
            target / "adapter_config.json", (json.dumps(adapter_config, indent=2) + "\n").encode()
        )
        write_folder_file(target / "adapter_model.safetensors", safetensors.torch.save(tensors))
        base.tokenizer.save_pretrained(target)

    replace_folder(folder, write, {"kind": "adapter"})
