"""Needs of stages from the stages before them, or from model.path."""

from __future__ import annotations

from collections.abc import Iterator

from tasks.config.problems import Key, Problem
from tasks.config.settings import PipelineSettings, StagesSettings
from tasks.stage_registry import names, policy_stages

__all__ = ["stage_problems"]

Finding = tuple[Problem, tuple[Key, ...]]  # with the other keys that it rests on

_MODEL: Key = ("model", "path")
_DATA: Key = ("stages", "prepare_data")


def stage_problems(settings: PipelineSettings) -> Iterator[Finding]:
    """Stages that lack what they work on, each with the keys that the problem rests on."""
    trained = any(getattr(settings.stages, name) is not None for name in policy_stages())
    own = settings.stages.own.items()
    trained = trained or any(block and name not in names() for name, block in own)  # not imported
    yield from _training(settings)
    yield from _results(settings, trained=trained)


def _finding(key: Key, text: str, *about: Key) -> Finding:
    return Problem(key, text), about


def _training(settings: PipelineSettings) -> Iterator[Finding]:
    """Data, pairs and teachers of the stages that train."""
    stages, path = settings.stages, settings.model.path
    has_pairs = stages.prepare_data is not None and stages.prepare_data.preferences is not None
    if stages.sft is not None and stages.prepare_data is None and path is not None:
        text = "learns from what stages.prepare_data reads or makes; add `prepare_data: {}`"
        yield _finding(("stages", "sft"), text, _MODEL, _DATA)
    if stages.reward_model is not None and stages.reward_model.loss == "mse" and not has_pairs:
        yield _finding(
            ("stages", "reward_model", "loss"),
            "mse learns from scored answers; name a file of rows with prompt, completion and score in "
            "stages.prepare_data.preferences, or use bradley_terry",
            _DATA,
        )
    if stages.distill is not None and stages.distill.teacher.model is None:
        yield _finding(
            ("stages", "distill", "teacher", "model"),
            "no teacher is named; give a model folder, a hub name or models:/NAME@ALIAS, or with url the name that the "
            "server knows it by",
        )
    for name in ("preference", "reward_model"):
        if getattr(stages, name) is None or has_pairs or stages.sft is not None or path is not None:
            continue
        yield _finding(
            ("stages", name),
            "has no pairs to learn from; set stages.prepare_data.preferences to a file of them, or give it a policy "
            "whose scored rollouts make them (stages.sft or model.path)",
            _MODEL,
            ("stages", "sft"),
            _DATA,
        )


def _results(settings: PipelineSettings, *, trained: bool) -> Iterator[Finding]:
    """Episodes and models of the stages that judge; `trained`: a stage trains a policy."""
    stages = settings.stages
    policies = [("stages", name) for name in policy_stages()]
    any_policy = f"{', '.join(policy_stages()[:-1])} or {policy_stages()[-1]}"
    if stages.evaluate is not None and not trained and settings.model.path is None:
        text = f"has no policy to evaluate; add stages.{any_policy}, or set model.path"
        yield _finding(("stages", "evaluate"), text, _MODEL, *policies)
    for name, needed, purpose in _judges(stages):
        if stages.evaluate is None:
            text = f"needs {needed} of stages.evaluate; add `evaluate: {{}}`"
            yield _finding(("stages", name), text, ("stages", "evaluate"))
        if purpose and not trained:
            yield _finding(("stages", name), f"has no new model to {purpose}; add stages.{any_policy}", *policies)


def _judges(stages: StagesSettings) -> Iterator[tuple[str, str, str]]:
    """(stage, its need from the evaluation, its purpose with a new model), of the stages after the evaluation."""
    if stages.analyze is not None:
        yield "analyze", "the episodes", ""
    if stages.export is not None and stages.promote is None:  # else it comes with promote, which says it
        yield "export", "the log-probs", "prove"
    if stages.promote is not None:
        yield "promote", "the result", "promote"
