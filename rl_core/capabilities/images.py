"""Models that read images, and what is not done with them: each refusal with its reason."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rl_core.capabilities.decision import unwrap_adapters
from rl_core.errors import SettingsError
from rl_core.settings import PolicySettings

# Families whose images are read: patches of all images of a batch in one row, positions by M-RoPE.
IMAGE_FAMILIES = ("Qwen2VL", "Qwen2_5_VL")
_CLASSES = {
    f"{family}{suffix}"
    for family in IMAGE_FAMILIES
    for suffix in ("ForConditionalGeneration", "Model")
}
_REASONS = {
    "processes": "a process whose rows have no image would make other passes than the others",
    "workers": "rollout workers and inference servers are not sent pixels",
    "teacher": "the teacher's prompts are texts",
    "self_play": "the prompts of other players are texts",
    "reward_model": "a reward model reads texts",
    "service": "its requests hold token ids alone",
    "online": "its records hold token ids alone",
    "thoughts": "its sequences are texts",
    "prompt_scores": "a prompt is scored without its pixels",
    "gguf": "the file would lack the image encoder",
}


def reads_images(model: Any) -> bool:
    """Return whether a transformers model, with or without adapters, or its trunk reads images here."""
    return type(unwrap_adapters(model)).__name__ in _CLASSES


def find_image_obstacles(model: Any, consequence: str) -> Iterator[str]:
    """Yield the obstacle to a fast path if the model reads images."""
    if reads_images(model):
        yield f"it reads images, {consequence}"


def refuse_image_model(model: Any, use: str, setting: str) -> None:
    """Raise SettingsError if the model reads images and this use does not support that.

    Args:
        use: a key of `_REASONS`.
        setting: name of the setting that asks for it.
    """
    if reads_images(model):
        raise SettingsError(
            f"{setting}: is not supported by {type(unwrap_adapters(model)).__name__}, which reads images: "
            f"{_REASONS[use]}"
        )


def refuse_image_training(model: Any, settings: PolicySettings) -> None:
    """Raise SettingsError for settings of policy optimisation that a model that reads images does not support."""
    if settings.is_taught:
        refuse_image_model(model, "teacher", f"algorithm: {settings.algorithm}")
    if settings.self_play is not None:
        refuse_image_model(model, "self_play", "self_play")
    if settings.rewards.get("learned"):
        refuse_image_model(model, "reward_model", "rewards.learned")
    if settings.rollouts.workers != "in_process":
        refuse_image_model(model, "workers", f"rollouts.workers: {settings.rollouts.workers}")
