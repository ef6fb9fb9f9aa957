"""The model that is served: found by its name, loaded, and slots opened over its weights."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_core.api.policy import model_folder
from rl_core.capabilities import decoding
from rl_core.data.chat import ChatRenderer
from rl_core.errors import SettingsError
from rl_core.inference.request_slots import OpenSlots
from rl_core.inference.served_rows import ServedRows
from rl_core.inference.served_slots import ServedSlots
from rl_core.models import causal_lm
from rl_core.models.rotary import longest_sequence
from rl_core.settings import ModelSettings, ServingSettings
from tasks.tracking import ModelVersion, Tracking, is_registered_reference

__all__ = ["ModelPlace", "NoChampion", "ServedModel", "load_served"]


class NoChampion(SettingsError):
    """The registered model has no version behind the alias yet."""


@dataclass(frozen=True, slots=True)
class ModelPlace:
    """A model's name, and where its versions are looked up."""

    reference: str  # models:/NAME@ALIAS, a folder, or a hub name
    output: Path  # of the store of registered models
    tracking_uri: str | None = None
    other: str = "posttrain serve FOLDER"  # how to name another model, for the message where there is none

    @property
    def is_registered(self) -> bool:
        """True = it is looked up in the registry, where it may get new versions."""
        return is_registered_reference(self.reference)

    def find(self) -> ModelVersion | None:
        """The version that the name stands for now; None for folders and hub names.

        Raises: NoChampion with the next step; BackendError where the store does not answer.
        """
        if not self.is_registered:
            return None
        try:
            return Tracking(self.tracking_uri, self.output).registry.find(self.reference)
        except SettingsError as error:
            name = self.reference.removeprefix("models:/").partition("@")[0]
            raise NoChampion(
                f"{error}; there is no model yet: run the pipeline that promotes one, as with `posttrain run {name}`, "
                f"or name a model that is there: {self.other}"
            ) from None

    def folder(self, found: ModelVersion | None) -> Path | str:
        """Folder or hub name of the files. Raises: SettingsError, BackendError."""
        if found is not None:
            return Tracking(self.tracking_uri, self.output).registry.download(found, self.output / "serving" / "models")
        place = Path(self.reference).expanduser()
        return model_folder(place) if place.is_dir() else self.reference


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One version of a model in memory."""

    model: Any
    renderer: ChatRenderer
    version: int
    context: int
    base: int | None = None  # registered version (0 = a folder) of a service that learns: `version` counts its updates

    @property
    def name(self) -> str:
        """Unambiguous name of the weights: 3 = registered version 3, 3+20 = 20 online updates later; 0 = a folder."""
        return str(self.version) if self.base is None else f"{self.base}+{self.version}"

    @property
    def vocab_size(self) -> int:
        """Tokens that the model gives a probability."""
        return int(self.model.config.get_text_config().vocab_size)

    @property
    def text_digest(self) -> str:
        """Equal for versions that read and write tokens in the same way."""
        vocabulary = json.dumps(sorted(self.renderer.tokenizer.get_vocab().items()))
        return hashlib.sha256(f"{self.renderer.digest}\n{vocabulary}".encode()).hexdigest()

    def opener(self, slots: int) -> OpenSlots:
        """A function that opens slots over these weights: the engine's where it knows the model's family."""
        kind: Any = ServedSlots if decoding.decoder(self.model).allowed else ServedRows
        renderer, context = self.renderer, self.context

        def opened(wake: Callable[[], None]) -> Any:
            return kind(
                self.model, slots=slots, context=context, eos_ids=renderer.eos_ids, pad_id=renderer.pad_id, wake=wake
            )

        return opened


def load_served(place: ModelPlace, settings: ServingSettings, model: ModelSettings) -> ServedModel:
    """The model behind a name. `model`: dtype, device and chat template. Raises: SettingsError, ModelError,
    BackendError, DataError for a tokenizer that cannot hold a conversation."""
    found = place.find()
    plain = dataclasses.replace(model, path=None, lora=None)
    loaded, tokenizer = causal_lm.load(place.folder(found), plain)
    loaded.requires_grad_(False).eval()
    context = min(settings.context, longest_sequence(loaded))
    return ServedModel(loaded, ChatRenderer(tokenizer, plain), found.version if found is not None else 0, context)
