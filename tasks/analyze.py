"""Stage: what the evaluated trajectories show; tables, pictures and a self-contained report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rl_core.analysis import analyze
from rl_core.environments.base import Environment
from rl_core.environments.pixel_grid_render import to_png
from rl_core.errors import DataError
from rl_core.settings import AnalysisSettings
from tasks.policy_model import make_environment
from tasks.session import Session
from tasks.stage import StageContext, StageResult, run_stage

__all__ = ["analyze_trajectories", "find_trajectories", "image_function"]


def analyze_trajectories(
    session: Session, evaluation: StageResult, training: dict[str, StageResult], data: StageResult | None
) -> StageResult:
    """Run the stage. `evaluation`: the evaluation's result; `training`: trained stages, for their curves."""
    inputs: dict[str, StageResult | Path | str] = {"evaluation": evaluation}
    inputs |= {f"training.{name}": result for name, result in training.items()}
    if data is not None:
        inputs["data"] = data
    settings = session.settings.stages.analyze or AnalysisSettings()
    return run_stage(session, "analyze", _body, settings=settings, inputs=inputs)


def _body(context: StageContext) -> dict[str, Any]:
    evaluation = Path(context.inputs["evaluation"])
    data = Path(context.inputs["data"]) if "data" in context.inputs else None
    models = find_trajectories([evaluation])
    training = {
        name.removeprefix("training."): Path(folder) / "metrics.jsonl"
        for name, folder in context.inputs.items()
        if name.startswith("training.") and (Path(folder) / "metrics.jsonl").is_file()
    }
    result = analyze(
        models,
        context.folder,
        context.settings,
        training=training or None,
        title=f"{context.pipeline.name}: trajectory analysis",
        seed=context.seed,
        image_of=image_function(make_environment(context.pipeline, data)),
    )
    context.tracker.log_metrics(result.metrics, 0)
    for path in result.files:
        context.tracker.log_artifact(path, "figures" if path.suffix == ".png" else "")
    context.session.parent.log_artifact(result.report)
    for path in result.files:
        if path.suffix == ".png":
            context.session.parent.log_artifact(path, "figures")
    note = "; ".join([f"report.html compares {', '.join(models)}", *result.notes])
    return {"rows": result.summary, "report": result.report.name, "note": note, "metrics": result.metrics}


def find_trajectories(paths: Sequence[Path]) -> dict[str, Path]:
    """Model name -> trajectory file, of files and of folders that hold some (finished stages' folders included).

    In the order of the pipeline: the first model is what the others are compared with.
    Raises: DataError when there is none.
    """
    models: dict[str, Path] = {}
    for path in paths:
        for file in _trajectory_files(path):
            name = file.stem.removeprefix("trajectories").strip("_-") or file.parent.name
            while name in models:
                name += "'"
            models[name] = file
    if not models:
        raise DataError(f"{', '.join(map(str, paths))}: no trajectories*.jsonl there")
    order = {"base": 0, "sft": 1, "preference": 2, "policy": 3, "thoughts": 4}
    return dict(sorted(models.items(), key=lambda item: order.get(item[0].rstrip("'"), 4)))


def _trajectory_files(path: Path) -> list[Path]:
    """A file itself; of a folder its own files, or else those of the finished stages in it (no dot in their names)."""
    if not path.is_dir():
        return [path]
    finished = [folder for folder in sorted(path.iterdir()) if folder.is_dir() and "." not in folder.name]
    return sorted(path.glob("trajectories*.jsonl")) or [
        file for folder in finished for file in sorted(folder.glob("trajectories*.jsonl"))
    ]


def image_function(environment: Environment) -> Callable[[str, int], bytes | None]:
    """(level, seed) -> PNG of the episode's hidden image; None for episodes that have no `image()`."""

    def draw(level: str, seed: int) -> bytes | None:
        image = getattr(environment.episode(seed, level), "image", None)
        return to_png(image()) if callable(image) else None

    return draw
