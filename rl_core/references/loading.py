"""Reading a reference model from its files: which one, in which precision, and its bytes before it is read."""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_core.errors import SettingsError
from rl_core.models import causal_lm, heads
from rl_core.references.few_bits import expected_bytes, few_bits_loading, keep_rounded
from rl_core.references.scorer import Kind, ModelScorer
from rl_core.settings import ModelSettings
from rl_core.settings.references import Precision

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["ReferenceSource", "load_model", "load_scorer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceSource:
    """A frozen model of a folder or hub name."""

    path: str
    kind: Kind
    precision: Precision
    model: ModelSettings  # dtype, device, positions; adapters are not for frozen models

    @property
    def folder(self) -> Path | None:
        """Its folder; None for a hub name."""
        place = Path(self.path).expanduser()
        return place if place.is_dir() else None

    @property
    def key(self) -> tuple[str, ...]:
        """Name by which it is kept: with the sizes and times of its files, so that a folder that is replaced is new."""
        settings = dataclasses.replace(self.model, path=None, lora=None)
        place, files = self.path, ""
        if (folder := self.folder) is not None:
            stats = [(file.name, file.stat()) for file in sorted(folder.glob("*"))]
            known = [(name, stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, stat in stats]
            place, files = str(folder.resolve()), hashlib.sha256(repr(known).encode()).hexdigest()
        return (place, self.kind, self.precision, repr(settings), files)

    @property
    def expected_bytes(self) -> int:
        """Bytes that it will take; 0 for a hub name."""
        return expected_bytes(self.folder, causal_lm.dtype_of(self.model), self.precision)


def load_model(source: ReferenceSource) -> tuple[PreTrainedModel, Any]:
    """The frozen model, in eval mode, and its tokenizer. Raises: ModelError, SettingsError."""
    if source.model.lora is not None:
        raise SettingsError("a reference model has no adapters; merge them into its folder")
    load = causal_lm.load if source.kind == "policy" else heads.load_reward_model
    device = causal_lm.device_of(source.model)
    options = few_bits_loading(source.precision, device, source.folder)
    model, tokenizer = load(source.path, source.model, options=options)
    if options:
        keep_rounded(model, source.precision)
    return model.requires_grad_(False).eval(), tokenizer


def load_scorer(source: ReferenceSource, pass_tokens: int) -> ModelScorer:
    """A scorer over the model. Raises: as `load_model`."""
    model, tokenizer = load_model(source)
    return ModelScorer(model, source.kind, int(tokenizer.pad_token_id), pass_tokens)
