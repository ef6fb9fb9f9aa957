"""Folders of trained networks: `network.json` (sizes, actions, environment) and `network.safetensors` (weights).

The statistics of normalised observations are stored with the weights.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch

from rl_core.errors import ModelError, PosttrainError
from rl_core.networks.actor_critic import ActionSpace, ActorCritic, NetworkShape
from rl_core.storage.atomic_files import make_folder
from rl_core.storage.folders import replace_folder, write_folder_file

CONFIG_FILE, WEIGHTS_FILE = "network.json", "network.safetensors"
CONFIG_FORMAT = 1
MAX_CONFIG_BYTES = 1 << 20


def save_network(model: ActorCritic, folder: Path, environment: str) -> None:
    """Write the network's two files into `folder`, which the caller publishes."""
    shape, actions = model.shape, model.shape.actions
    config = {
        "format": CONFIG_FORMAT,
        "environment": environment,
        "observation_size": shape.observation_size,
        "hidden": list(shape.hidden),
        "activation": shape.activation,
        "normalises": shape.normalises,
        "actions": {
            "kind": actions.kind,
            "size": actions.size,
            "start": actions.start,
            "shape": list(actions.shape),
            "low": [repr(bound) for bound in actions.low],
            "high": [repr(bound) for bound in actions.high],
        },
    }
    make_folder(folder)
    write_folder_file(folder / CONFIG_FILE, json.dumps(config, indent=2).encode())
    weights = {name: tensor.detach().contiguous() for name, tensor in model.state_dict().items()}
    write_folder_file(folder / WEIGHTS_FILE, safetensors.torch.save(weights))


def publish_network(model: ActorCritic, folder: str | Path, environment: str) -> None:
    """Write the network's files into a folder that appears when complete, or replaces an earlier network.

    Raises: CheckpointError if writing fails, or the folder contains other files.
    """

    def write_files(temporary: Path) -> None:
        save_network(model, temporary, environment)

    replace_folder(folder, write_files, {"kind": "network"})


def load_network(folder: str | Path) -> ActorCritic:
    """Load the network in a folder written by `Training.save` or the stage `network`. Raises: ModelError naming the
    file.
    """
    path = Path(folder).expanduser()
    config = _read_config(path / CONFIG_FILE)
    try:
        actions = config["actions"]
        low, high = (tuple(float(bound) for bound in actions[name]) for name in ("low", "high"))
        space = ActionSpace(
            actions["kind"],
            int(actions["size"]),
            int(actions["start"]),
            low,
            high,
            tuple(actions["shape"]),
        )
        hidden = tuple(int(width) for width in config["hidden"])
        shape = NetworkShape(
            int(config["observation_size"]),
            space,
            hidden,
            config["activation"],
            normalises=bool(config["normalises"]),
        )
        model = ActorCritic(shape)
    except PosttrainError as error:
        raise ModelError(f"'{path / CONFIG_FILE}': {error}") from error
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ModelError(
            f"'{path / CONFIG_FILE}' is not a network's config ({type(error).__name__}: {error})"
        ) from error
    try:
        model.load_state_dict(_read_weights(path / WEIGHTS_FILE))
    except RuntimeError as error:
        message = " ".join(str(error).split())[:200]
        raise ModelError(
            f"'{path / WEIGHTS_FILE}' does not match the {CONFIG_FILE} next to it: {message}"
        ) from error
    return model.eval()


def _read_config(path: Path) -> Mapping[str, Any]:
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise ModelError(
                f"'{path}' is larger than {MAX_CONFIG_BYTES // 2**20} MiB, so it is not a network's config"
            )
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(
            f"'{path}' cannot be read ({error}); pass the folder of a trained network"
        ) from error
    if not isinstance(config, dict) or config.get("format") != CONFIG_FORMAT:
        raise ModelError(f"'{path}' is not a network's config in format {CONFIG_FORMAT}")
    return config


def _read_weights(path: Path) -> dict[str, torch.Tensor]:
    try:
        return safetensors.torch.load_file(path)
    except (OSError, safetensors.SafetensorError) as error:
        raise ModelError(f"'{path}' contains no weights ({error})") from error
