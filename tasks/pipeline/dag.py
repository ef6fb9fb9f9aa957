"""The DAG of one pipeline run: each stage takes what the ones before it gave (tasks/stage_registry.py)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rl_core.errors import BackendError, SettingsError
from tasks import stage_registry
from tasks.pipeline.result import StageResult
from tasks.pipeline.run import PipelineRun
from tasks.stage_registry import Product

__all__ = ["StageCaller", "run_dag"]

# (name, the stage's function, run) -> that function, to be called with what the stage takes
StageCaller = Callable[[str, Callable[..., StageResult], PipelineRun], Callable[..., StageResult]]


@dataclass
class _Handed:
    """Outputs of the stages so far, for the next ones; each property is a name that `PipelineStage.takes` may use."""

    pipeline_run: PipelineRun
    base: Path | str | None  # the model to start from; None = a preset, which prepare_data makes
    given: Mapping[str, str]  # models to evaluate in place of those that the run trains
    results: dict[Product, StageResult] = field(default_factory=dict)  # the newest of each kind
    trained: dict[str, StageResult] = field(default_factory=dict)  # policies by stage, in order

    @property
    def data(self) -> StageResult | None:
        return self.results.get("data")

    @property
    def reward_model(self) -> StageResult | None:
        return self.results.get("reward_model")

    @property
    def evaluation(self) -> StageResult | None:
        return self.results.get("evaluation")

    @property
    def proof(self) -> StageResult | None:
        return self.results.get("proof")

    @property
    def model(self) -> Path | str:
        """The newest policy, else the base model."""
        if "policy" in self.results:
            return self.results["policy"].model
        if self.base is not None:
            return self.base
        return self.results["data"].model

    @property
    def models(self) -> Mapping[str, StageResult | Path | str]:
        """The policies to evaluate, by name; of a trial the newest alone, as it shares the others."""
        named = {name: self.pipeline_run.models.resolve(source)[0] for name, source in self.given.items()}
        trained = list(self.trained.items())
        if self.pipeline_run.options.trial is not None:
            trained = trained[-1:]
        return named or dict(trained) or {"base": self.model}

    @property
    def challenger(self) -> StageResult | None:
        """The policy that was trained last."""
        return self.results.get("policy")


def run_dag(
    pipeline_run: PipelineRun, given: Mapping[str, str], call: StageCaller, *, skip: Collection[str] = ()
) -> None:
    """Run the stages that the settings name, in their order.

    Args:
        given: models to evaluate in place of those that the run trains, by name.
        call: makes a stage's function callable, as a Prefect task or as it is.
        skip: stages that do not run although the settings name them.
    Raises: SettingsError where a stage lacks what it needs; whatever the stages raise. A gate that cannot ask the
        tracking store postpones its decision instead.
    """
    handed = _Handed(pipeline_run, pipeline_run.models.resolve_base(), given)
    active = {
        stage.name
        for stage in stage_registry.stages()
        if getattr(pipeline_run.settings.stages, stage.name) is not None and stage.name not in skip
    }
    takes_any = any(stage_registry.entry(name).takes for name in active)  # a network takes nothing, a preset neither
    for stage in stage_registry.stages():
        makes_preset = stage.gives == "data" and handed.base is None and takes_any
        is_active = stage.name in active
        if not is_active and not makes_preset:
            continue
        taken = {name: getattr(handed, name) for name in stage.takes}
        if missing := [name for name in stage.needs if taken[name] is None]:
            raise SettingsError(f"stages.{stage.name} needs {' and '.join(missing)}, which no stage before it gives")
        try:
            result = call(stage.name, stage_registry.task_of(stage), pipeline_run)(*taken.values())
        except BackendError as error:
            if stage.name != "promote":
                raise
            pipeline_run.postpone(
                f"not decided: the champion is known to the tracking store alone, which does not answer ({error}). "
                "Nothing is lost; when it answers, the same command decides"
            )
            return
        if stage.gives is not None:
            handed.results[stage.gives] = result
        if stage.gives == "policy":
            handed.trained[stage.name] = result
