"""Readers that hostile cases call instead of a command."""

from __future__ import annotations

from pathlib import Path


def load_model(folder: str) -> None:
    """Load a model folder as every stage does."""
    import transformers

    from rl_core.models import causal_lm
    from rl_core.settings import ModelSettings

    transformers.utils.logging.disable_progress_bar()  # as a pipeline run does
    transformers.utils.logging.set_verbosity_error()
    model, _ = causal_lm.load_model(folder, ModelSettings(device="cpu"))
    print(f"loaded {causal_lm.count_parameters(model)} parameters")


def render(folder: str) -> None:
    """Render a conversation with the chat template of a model folder."""
    from rl_core.data.chat import ChatRenderer
    from rl_core.models import causal_lm
    from rl_core.settings import ModelSettings

    renderer = ChatRenderer(causal_lm.load_tokenizer(folder, ModelSettings()), ModelSettings())
    print(renderer.prompt_ids([{"role": "user", "content": "t3 t4"}]))


def load_checkpoint(folder: str) -> None:
    """Load version 1 of a run's checkpoints; reading the newest skips it."""
    from rl_core.errors import CorruptError
    from rl_core.storage.checkpoint import CheckpointStore

    store = CheckpointStore(folder)
    try:
        store.load_version(1)
    except CorruptError:
        assert Path(folder, "checkpoint-00000001").is_dir()
        if store.load_latest() is not None:
            raise AssertionError("a version that differs from its manifest was loaded") from None
        raise


def read_metrics(file: str) -> None:
    """Read a journal of metrics."""
    from rl_core.readers import read_metrics

    print(len(read_metrics(file)))


def read_rewards(file: str) -> None:
    """Read a record of rewards."""
    from rl_core.readers import read_rewards

    print(len(read_rewards(file)))


def read_tokens(file: str) -> None:
    """Read token ids of rollouts."""
    from rl_core.rollouts.rollout_files import _read_token_rows

    print(len(list(_read_token_rows(Path(file)))))
