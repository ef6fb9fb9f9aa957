"""The rollout engine and its fallback over one model, and episodes to play with them."""

from __future__ import annotations

from transformers import PreTrainedModel

from helpers.scripted_sequences import VOCAB, ScriptedSequence, make_sessions, sampling
from rl_core.inference.engine import Engine, create_rollout_backend
from rl_core.inference.transformers_backend import TransformersBackend

EOS = list(range(1, VOCAB, 5))  # often enough for several turns


def play(backend: Engine | TransformersBackend, **options: float) -> list[ScriptedSequence]:
    """Play the episodes of `make_sessions` with these sampling settings."""
    sequences = make_sessions()
    backend.run_sequences(sequences, sampling(**options))
    return sequences


def create_backends(model: PreTrainedModel) -> tuple[Engine, TransformersBackend]:
    """Create both backends for one model."""
    engine = create_rollout_backend(model, eos_ids=EOS, pad_id=0, max_length=128)
    assert isinstance(engine, Engine)
    return engine, TransformersBackend(model, eos_ids=EOS, pad_id=0, max_length=128)
