"""Weights on their way to an inference server: one folder a version, in a folder that no killed run leaves behind."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

from rl_core.errors import CheckpointError, SettingsError
from rl_core.models.causal_lm import save_weights
from rl_core.models.lora import save_adapter, serves_alone
from rl_core.rollout_workers.weights import digest_of, digests
from rl_core.storage.session_folders import WEIGHTS_PREFIX, SessionFolder, reap_session_folders

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["WeightFolder", "WeightFolders", "folder_digest"]


@dataclass(frozen=True, slots=True)
class WeightFolder:
    """One version of the weights as files."""

    path: Path
    digest: str  # of the tensors in it
    num_bytes: int
    is_adapter: bool  # False = a whole model, adapters merged


class WeightFolders:
    """Writes versions of one model; the newest stays, for a server that is started again."""

    def __init__(self, model: PreTrainedModel, root: str | None = None) -> None:
        """`root`: a folder that the server sees under the same path; None = the temporary folder. Nothing is made."""
        self._model: Any = model
        self._root = Path(root).expanduser().resolve() if root is not None else None
        self._session: SessionFolder | None = None
        self._number = 0
        self._newest: Path | None = None

    def write(self) -> WeightFolder:
        """The present weights: the adapter where a server takes it alone, else the whole model.

        Raises: SettingsError for a folder that cannot be made; CheckpointError where the disk refuses.
        """
        session = self._opened()
        folder = session.path / f"version-{self._number}"
        self._number += 1
        is_adapter = serves_alone(self._model)
        try:
            with torch.no_grad():
                (save_adapter if is_adapter else save_weights)(self._model, folder)
            found = WeightFolder(folder, folder_digest(folder), _size(folder), is_adapter)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(folder, ignore_errors=True)
            raise CheckpointError(
                f"{folder}: the weights for the inference server cannot be written ({error}); make room, or set "
                "rollouts.server.folder"
            ) from error
        if self._newest is not None:
            shutil.rmtree(self._newest, ignore_errors=True)
        self._newest = folder
        return found

    def close(self) -> None:
        """Remove everything that was written."""
        if self._session is not None:
            self._session.close()
        self._session, self._newest = None, None

    def _opened(self) -> SessionFolder:
        if self._session is None:
            try:
                reap_session_folders(WEIGHTS_PREFIX, self._root)
                self._session = SessionFolder(WEIGHTS_PREFIX, self._root)
            except OSError as error:
                raise SettingsError(
                    f"rollouts.server.folder: {self._root or 'the temporary folder'} cannot be written ({error})"
                ) from error
        return self._session


def folder_digest(folder: Path) -> str:
    """Digest of all tensors in a folder's safetensors files, whatever file each is in."""
    found: dict[str, str] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  # no mapping
                found |= digests({name: tensors.get_tensor(name)})
    return digest_of(found)


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*.safetensors"))
