"""The teacher of a distillation: from a model or a server, with the policy's vocabulary."""

from __future__ import annotations

import dataclasses

from rl_core.api.policy import ModelSource, Policy, load_policy
from rl_core.errors import SettingsError
from rl_core.inference.teacher import LocalTeacher, ServedTeacher, Teacher, check_vocabulary
from rl_core.models import causal_lm
from rl_core.settings import ModelSettings, TeacherSettings

__all__ = ["make_teacher"]


def make_teacher(settings: TeacherSettings, policy: Policy, source: ModelSource | None = None) -> Teacher:
    """The teacher that the settings name, checked against the policy's tokenizer.

    Args:
        source: a model in place of `settings.model`, which may be loaded already; its weights are frozen.
    Raises: SettingsError for no teacher, or one of another vocabulary; CheckpointError without such a model.
    """
    as_policy = dataclasses.replace(policy.origin or ModelSettings(), lora=None, path=None)
    if settings.url is not None:
        if source is not None:
            raise SettingsError("teacher: a model and an address; give one of the two")
        served = ServedTeacher(settings)
        place = settings.tokenizer or str(settings.model)
        check_vocabulary(policy.tokenizer, causal_lm.load_tokenizer(place, as_policy), place)
        return served
    source = source if source is not None else settings.model
    if source is None:
        raise SettingsError(
            "teacher: none is named; set teacher.model to a folder or hub name, or teacher.url and model"
        )
    teacher = load_policy(source, as_policy) if not isinstance(source, ModelSettings) else load_policy(source)
    if teacher.model is policy.model:
        raise SettingsError("teacher: it is the policy itself, which has nothing to learn from it")
    check_vocabulary(policy.tokenizer, teacher.tokenizer, str(settings.model or "the model"))
    return LocalTeacher(teacher.model, context=teacher.context)
