"""Loading of a policy with its renderer and backend, and of the environment, for all stages."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rl_core.data.chat import ChatRenderer
from rl_core.environments import make
from rl_core.environments.environment import Environment
from rl_core.inference.engine import RolloutBackend, make_backend
from rl_core.models import causal_lm
from tasks.config import PipelineSettings

__all__ = ["Policy", "load_policy", "make_environment", "model_folder"]


@dataclass
class Policy:
    """A loaded policy and what is needed to talk to it."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    renderer: ChatRenderer

    @property
    def context(self) -> int:
        """Longest sequence, in tokens."""
        return int(getattr(self.model.config, "max_position_embeddings", 2**20))

    def backend(self) -> RolloutBackend:
        """A rollout backend over this model's own weights."""
        return make_backend(
            self.model, eos_ids=self.renderer.eos_ids, pad_id=self.renderer.pad_id, max_length=self.context
        )


def load_policy(source: Path | str, pipeline: PipelineSettings) -> Policy:
    """The policy of a model folder or hub name, with the pipeline's dtype, device and adapters."""
    model, tokenizer = causal_lm.load(source, pipeline.model)
    return Policy(model, tokenizer, ChatRenderer(tokenizer))


def model_folder(source: Path | str) -> Path | str:
    """A finished stage's folder holds its model in model/; any other folder or hub name is the model itself."""
    folder = Path(source) / "model"
    return folder if folder.is_dir() else source


def make_environment(pipeline: PipelineSettings, data: Path | None) -> Environment:
    """The pipeline's environment; `data` is the data stage's folder, where that stage is part of the pipeline."""
    return make(pipeline.environment.name, dict(pipeline.environment.options), data=data)
