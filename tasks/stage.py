"""The contract of every stage: cache key, folders, lock, resume, tracking, hand-over.

    <output>/<pipeline>/stages/<stage>/
        <key>/            finished: model/, *.jsonl, summary.json, metrics.jsonl, manifest.json; never written again
                          (after training also metrics_history.json, which is replaced every few seconds meanwhile)
        <key>.open/       being written; checkpoints/ inside survive a kill and are resumed
        <key>.tracking/   the journal of metrics and what was shipped of it
        <key>.lock        held while the stage runs

The key is (stage, its settings, environment and model settings, digests of its inputs, seed, code version). The same
key is not run twice; a changed one is. In how many processes a stage runs (`launch`) is no part of its key. A finished
folder is verified against its manifest before it is used.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib.util
import json
import logging
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_core.errors import CorruptError, PosttrainError, SettingsError, Stopped
from rl_core.folders import FolderLock, digest_file, digest_folder, seal_folder, verify_folder, write_json_atomic
from tasks.config import PipelineSettings, resolve
from tasks.tracking import RunTracker, read_metrics

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from rl_core.distributed import Workers
    from rl_core.trainers.loop import LoopOutcome, Trainer
    from rl_core.trainers.update import Updater
    from tasks.session import Session

__all__ = [
    "RECENT_ROLLOUTS",
    "REWARD_RECORD",
    "StageContext",
    "StageResult",
    "code_version",
    "input_digest",
    "run_stage",
    "stage_key",
    "stage_seed",
]

logger = logging.getLogger(__name__)

METRICS_HISTORY = "metrics_history.json"  # for dashboards: the newest values of every metric while a stage trains
REWARD_RECORD = "rewards.jsonl"  # grows with training, so an interrupted run's is kept

RECENT_ROLLOUTS = "recent_rollouts.jsonl"  # for people who look on: whole trajectories of the newest iterations

# Files that hold timings, or what a resumed run has less of: they are part of a stage's folder but not of its content
# digest, so that a stage that was run again to the same result does not make the ones after it run again.
TIMED_FILES = frozenset({"summary.json", "metrics.jsonl", METRICS_HISTORY, RECENT_ROLLOUTS})


@dataclass(frozen=True)
class StageResult:
    """What a finished stage hands over: a path and digests, never a model."""

    stage: str
    folder: str
    digest: str  # of the folder's content
    key: str
    cached: bool  # True = an earlier run's folder was used
    seconds: float  # this time; 0 when cached
    run_id: str  # MLflow run that produced it
    summary: dict[str, Any]  # numbers for people, from summary.json

    @property
    def path(self) -> Path:
        """The finished folder."""
        return Path(self.folder)

    @property
    def model(self) -> Path:
        """The model folder that the stage wrote."""
        return self.path / "model"


def _alone() -> Workers:
    from rl_core.distributed import ALONE  # here, as it loads torch

    return ALONE


@dataclass
class StageContext:
    """What the body of a stage gets."""

    name: str
    folder: Path  # write here; renamed when finished
    settings: Any  # the stage's own settings
    pipeline: PipelineSettings
    inputs: dict[str, Path | str]  # folders of finished stages, model folders or hub names
    tracker: RunTracker  # in one of several processes a Tracker alone, that tells the stage's own process
    session: Session  # not there in one of several processes
    seed: int
    fingerprint: dict[str, str]  # what has to be equal for a checkpoint to be resumed
    stop: threading.Event
    started: float = field(default_factory=time.monotonic)
    workers: Workers = field(default_factory=_alone)  # the processes that run this stage's body together

    @property
    def checkpoints(self) -> Path:
        """Where the stage keeps its checkpoints; removed when it has finished."""
        return self.folder / "checkpoints"

    def train(
        self, trainer: Trainer, iterations: int, *, best_metric: str | None = None, larger_is_better: bool = True
    ) -> LoopOutcome:
        """Run a trainer to its end, or resume it: tracked, checkpointed and stoppable as every stage is.

        Args: as `rl_core.trainers.loop.run_loop`.
        """
        from rl_core.checkpoint import (
            CheckpointStore,
        )  # here, as it loads torch, which those who only read folders do not need
        from rl_core.trainers.loop import run_loop

        return run_loop(
            trainer,
            self.settings,
            iterations=iterations,
            tracker=self.tracker,
            checkpoints=CheckpointStore(self.checkpoints, keep=self.settings.keep_checkpoints),
            best_metric=best_metric,
            larger_is_better=larger_is_better,
            fingerprint=self.fingerprint,
            stop_event=self.stop,
            history=self.folder / METRICS_HISTORY,
        )

    def save_model(
        self,
        updater: Updater,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        load: Callable[[PipelineSettings], PreTrainedModel],
    ) -> None:
        """Write the trained model into the stage's folder.

        Where several processes share its weights out, the first one puts them together, in a model made anew on the
        CPU: no GPU need hold them all.

        Args:
            updater: that has trained the model.
            load: gives the model that training started from, for settings with another device.
        """
        from rl_core.models import causal_lm
        from rl_core.trainers.resume import load_trainable_weights, trainable_weights

        if self.workers.size > 1:
            weights = updater.whole(trainable_weights(model))
            if not self.workers.is_first:
                return
            on_cpu = dataclasses.replace(self.pipeline.model, device="cpu")
            model = load(dataclasses.replace(self.pipeline, model=on_cpu))
            load_trainable_weights(model, weights)
        causal_lm.save(model, tokenizer, self.folder / "model")


@functools.cache
def code_version() -> str:
    """Short SHA-256 of the source of rl_core and tasks: what decides a stage's numbers."""
    root = Path(__file__).resolve().parent.parent
    digest = hashlib.sha256()
    for package in ("rl_core", "tasks"):
        for path in sorted((root / package).rglob("*.py")):
            digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def stage_seed(seed: int, name: str) -> int:
    """A stage's own seed, derived from the pipeline's, in [0, 2^31)."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:4], "big") >> 1


def input_digest(value: StageResult | Path | str) -> str:
    """Digest of one input: a finished stage's, a folder's or file's content, or a hub name as it is written."""
    if isinstance(value, StageResult):
        return value.digest
    path = Path(value)
    if path.is_dir():
        return digest_folder(path)
    if path.is_file():
        return digest_file(path)
    if isinstance(value, Path):
        raise SettingsError(f"input {value} does not exist")
    return value


def _environment_digests(settings: PipelineSettings) -> dict[str, str]:
    """Content of what the environment is made from: its data file, and its source where it is the user's own."""
    digests = {}
    option = settings.environment.options.get("path")
    if isinstance(option, str) and Path(option).is_file():
        digests["path"] = digest_file(Path(option))
    if ":" in settings.environment.name:
        spec = importlib.util.find_spec(settings.environment.name.split(":")[0])
        if spec and spec.origin and Path(spec.origin).is_file():
            digests["source"] = digest_file(Path(spec.origin))
    return digests


def stage_key(name: str, stage_settings: Any, pipeline: PipelineSettings, digests: Mapping[str, str]) -> str:
    """The cache key: 16 hex digits of the SHA-256 of everything that decides the stage's result."""
    decisive = dataclasses.asdict(stage_settings) if stage_settings is not None else None
    if decisive is not None:
        decisive.pop("launch", None)  # another number of processes gives the same numbers, to rounding
    payload = {
        "stage": name,
        "settings": decisive,
        "environment": dataclasses.asdict(pipeline.environment),
        "environment_content": _environment_digests(pipeline),
        "model": dataclasses.asdict(pipeline.model),
        "inputs": dict(digests),
        "seed": pipeline.seed,
        "code": code_version(),
    }
    return hashlib.sha256(json.dumps(payload, sort_keys=True, default=str).encode()).hexdigest()[:16]


def content_digest(manifest: Mapping[str, Any]) -> str:
    """SHA-256 over names and digests of a finished folder's files, those that hold timings left out."""
    lines = [
        f"{name} {entry['sha256']}" for name, entry in sorted(manifest["files"].items()) if name not in TIMED_FILES
    ]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def load_finished(folder: Path, name: str, key: str) -> StageResult | None:
    """The finished stage in `folder`, or None. A folder that fails verification is set aside, with a warning."""
    if not folder.is_dir():
        return None
    try:
        manifest = verify_folder(folder)
    except CorruptError as error:
        aside = folder.with_name(f"{folder.name}.corrupt-{time.time_ns()}")
        folder.rename(aside)
        logger.warning("%s: the finished folder is damaged (%s); set aside as %s, running again", name, error, aside)
        return None
    summary = json.loads((folder / "summary.json").read_text())
    return StageResult(
        stage=name,
        folder=str(folder),
        digest=content_digest(manifest),
        key=key,
        cached=True,
        seconds=0.0,
        run_id=summary.get("run_id", ""),
        summary=summary,
    )


def run_stage(
    session: Session,
    name: str,
    body: Callable[[StageContext], dict[str, Any]],
    *,
    settings: Any,
    inputs: Mapping[str, StageResult | Path | str],
    label: str | None = None,
) -> StageResult:
    """Run one stage, or take its finished folder when its key has been run before.

    Args:
        session: the pipeline run that this stage belongs to.
        name: the stage; also the folder under which its keys lie.
        body: writes into `context.folder` and returns numbers for people (summary.json).
        settings: the stage's own settings.
        inputs: by name, what the stage reads; its content decides the key.
        label: name of the tracking run, where it differs from the stage's.
    Raises: FolderBusy when another process runs the same stage; whatever the body raises.
    """
    digests = {key: input_digest(value) for key, value in inputs.items()}
    session.tag_data(digests)
    key = stage_key(name, settings, session.settings, digests)
    final = session.stages / name / key
    fresh = session.is_fresh(name) and key not in session.keys_run
    final.parent.mkdir(parents=True, exist_ok=True)
    with FolderLock(final.with_name(f"{key}.lock")):
        done = None if fresh else load_finished(final, name, key)
        if done is not None:
            logger.info("%s: finished before (%s), not run again", label or name, key)
            session.stage_cached(label or name, done)
            return done
        if fresh:
            _discard(final)
        session.keys_run.add(key)
        return _run_open(session, name, body, settings, inputs, digests, key, final, label or name)


def _run_open(
    session: Session,
    name: str,
    body: Callable[[StageContext], dict[str, Any]],
    settings: Any,
    inputs: Mapping[str, StageResult | Path | str],
    digests: dict[str, str],
    key: str,
    final: Path,
    label: str,
) -> StageResult:
    """Open or reopen the stage's folder, run the body, and seal the folder under its final name."""
    folder = final.with_name(f"{key}.open")
    journal = final.with_name(f"{key}.tracking")
    _clear_leftovers(folder)
    from tasks.launch import recover_events, run_in_workers  # here, as it knows this module

    started = time.monotonic()
    tracker = session.open_stage_run(label, name, journal, settings, digests, key)
    context = StageContext(
        name=name,
        folder=folder,
        settings=settings,
        pipeline=session.settings,
        inputs={k: v.path if isinstance(v, StageResult) else v for k, v in inputs.items()},
        tracker=tracker,
        session=session,
        seed=stage_seed(session.settings.seed, name),
        fingerprint={"stage key": key, "threads": str(session.threads)},
        stop=session.stop,
    )
    try:
        recover_events(folder, tracker)
        launch = getattr(settings, "launch", None)
        in_workers = launch is not None and launch.kind == "torchrun"
        summary = run_in_workers(context, body) if in_workers else body(context)
        if (folder / "model").is_dir() and name != "prepare_data":
            summary = {**summary, **session.register(tracker, folder / "model", name, summary)}
        summary.setdefault("tokens_per_second", tokens_per_second(journal))
        seconds = round(time.monotonic() - started, 2)
        summary = {**summary, "seconds": seconds, "run_id": tracker.run_id or "", "key": key}
        tracker.log_dict(summary, "summary.json")
        if summary.get("note"):
            tracker.set_tag("result", str(summary["note"])[:250])
        write_json_atomic(folder / "summary.json", summary)
    except Stopped:
        tracker.close("KILLED")
        raise
    except BaseException as error:
        if isinstance(error, PosttrainError):
            tracker.set_tag("error", f"{type(error).__name__}: {error}"[:4000])
            _clear_leftovers(folder)
            with contextlib.suppress(OSError):  # checkpoints stay
                folder.rmdir()
        tracker.close("KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED")
        raise
    tracker.close("FINISHED")
    if (journal / "metrics.jsonl").is_file():
        shutil.copyfile(journal / "metrics.jsonl", folder / "metrics.jsonl")
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    manifest = seal_folder(folder, final, extra={"stage": name, "key": key, "settings": resolve(settings)})
    return StageResult(
        stage=name,
        folder=str(final),
        digest=content_digest(manifest),
        key=key,
        cached=False,
        seconds=seconds,
        run_id=tracker.run_id or "",
        summary=summary,
    )


def tokens_per_second(journal: Path) -> float | None:
    """Tokens over seconds of all training steps in a stage's journal; None where it did not train."""
    tokens = seconds = 0.0
    for _, row in read_metrics(journal):
        if "perf/tokens_per_second" in row and "perf/step_seconds" in row:
            tokens += row["perf/tokens_per_second"] * row["perf/step_seconds"]
            seconds += row["perf/step_seconds"]
    return tokens / seconds if seconds else None


def _clear_leftovers(folder: Path) -> None:
    """Keep the checkpoints of an interrupted run and what grows with them; everything else is written again."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        if path.name in ("checkpoints", REWARD_RECORD, "workers"):  # workers: recover_events reads it first
            continue
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _discard(final: Path) -> None:
    """Remove a finished or open folder and its journal; renamed first, so that no reader sees half of it."""
    for path in (final, final.with_name(f"{final.name}.open"), final.with_name(f"{final.name}.tracking")):
        if path.exists():
            trash = path.with_name(f".trash-{time.time_ns()}-{path.name}")
            path.rename(trash)
            shutil.rmtree(trash, ignore_errors=True)
