"""Journaled records as MLflow calls, all of them idempotent.

Episodes become traces: one trace per episode, one span per turn, so that a reviewer can read what the policy did. The
spans of all episodes are sent in one call (15 ms per episode on sqlite; 300 ms with MLflow's live tracing). Their ids
derive from the run and the episode, so sending twice stores one.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from rl_core.data.model_text import convert_to_plain_json
from rl_core.errors import BackendError, DataError
from rl_core.storage.atomic_files import make_folder
from rl_core.storage.faults import inject_fault
from rl_core.storage.folders import remove_folder
from rl_core.types import Trajectory, Turn
from tasks.run_status import STALE_STOP_TAGS
from tasks.tracking.journal import (
    SCRATCH_PREFIX,
    DeliveryCursor,
    build_events_path,
    find_metric_points,
)
from tasks.tracking.models import clear_broken_uploads, find_local_artifacts, register_logged_model
from tasks.tracking.registry import ModelRegistry, read_alias_move_time
from tasks.tracking.shipper import RunNotFound
from tasks.tracking.store import TrackingStore, is_missing_error, read_user_name
from tasks.tracking.values import (
    MAX_VALUE_LENGTH,
    SECONDS_TAG,
    build_metric_store_name,
    sanitize_store_name,
)

if TYPE_CHECKING:
    from mlflow.entities import Assessment, Span, TraceInfo


log = logging.getLogger(__name__)

# in a model's description, replaced by the number of the parent version
PARENT_PLACEHOLDER = "{parent}"
# Tag by which a run is found again if its id was never received. Pages hide it.
RUN_KEY_TAG = "mlflow.posttrain.runKey"
MAX_TAG_LENGTH = 5000
MAX_PARAMS_PER_CALL = 100
NS_PER_MS = 1_000_000
# Episodes are played in batches, so a turn has no duration. Spans of 1 ns keep the order of the turns, and pages show
# them as 0 ms.
SPAN_NS = 1
MAX_PREVIEW_LENGTH = 1000
_TRACED_FIELDS = (
    "environment",
    "level",
    "kind",
    "seed",
    "success",
    "reward",
    "rewards",
    "target",
    "answer",
    "num_action_tokens",
    "mean_logprob",
    "policy_version",
    "sample",
)


def send_traces(
    store: TrackingStore, run_id: str, rows: list[dict[str, Any]], *, time_ms: int, model: str
) -> None:
    """Store `rows` (Trajectory.to_json) as traces of a run. `model`: who played them ('sft', 'policy')."""
    from mlflow.tracing.client import TracingClient

    client = TracingClient(store.uri)
    experiment_id = store.client.get_run(run_id).info.experiment_id
    spans: list[Span] = []
    for index, row in enumerate(rows):
        trajectory = Trajectory.from_json(convert_to_plain_json(row))
        episode = _EpisodeTrace(trajectory, run_id, model, index, time_ms + index)
        client.start_trace(episode.build_trace_info(experiment_id))
        inject_fault("trace.started")
        spans += episode.build_spans()
    if spans:
        client.log_spans(experiment_id, spans)
        inject_fault("trace.sent")


class _EpisodeTrace:
    """Trace of one trajectory."""

    def __init__(
        self, trajectory: Trajectory, run_id: str, model: str, index: int, time_ms: int
    ) -> None:
        self.trajectory, self.run_id, self.model = trajectory, run_id, model
        self.start_ms = time_ms
        key = (
            run_id,
            model,
            index,
            trajectory.environment,
            trajectory.level,
            trajectory.seed,
            trajectory.sample,
        )
        self.trace_bytes = hashlib.sha256(repr(key).encode()).digest()[:16]
        self.trace_id = "tr-" + self.trace_bytes.hex()
        self.name = f"{trajectory.level} {trajectory.kind} #{trajectory.seed}".replace("  ", " ")

    def build_trace_info(self, experiment_id: str) -> TraceInfo:
        """Build the trace's description, with the tags that the list of traces shows and searches."""
        from mlflow.entities import TraceInfo, TraceLocation, TraceState

        trajectory = self.trajectory
        tags = {
            "mlflow.traceName": self.name,
            "environment": trajectory.environment,
            "level": trajectory.level,
            "kind": trajectory.kind,
            "seed": str(trajectory.seed),
            "success": "" if trajectory.success is None else str(trajectory.success).lower(),
            "reward": f"{trajectory.reward:.4g}",
            "stop_reason": str(trajectory.stop_reason),
            "turns": str(len(trajectory.turns)),
            "policy_version": str(trajectory.policy_version),
        }
        if self.model:
            tags["model"] = self.model
        return TraceInfo(
            trace_id=self.trace_id,
            trace_location=TraceLocation.from_experiment_id(experiment_id),
            request_time=self.start_ms,
            execution_duration=None,
            state=TraceState.OK,
            assessments=self._build_assessments(),
            request_preview=trajectory.prompt[:MAX_PREVIEW_LENGTH],
            response_preview=self._describe_verdict()[:MAX_PREVIEW_LENGTH],
            trace_metadata={"mlflow.sourceRun": self.run_id, "mlflow.trace_schema.version": "3"},
            tags={key: value for key, value in tags.items() if value},
        )

    def _build_assessments(self) -> list[Assessment]:
        """Build the environment's judgements, which the list of traces shows as columns and counts."""
        from mlflow.entities import AssessmentSource, Feedback

        source = AssessmentSource(
            source_type="CODE", source_id=self.trajectory.environment or "environment"
        )
        success = self.trajectory.success
        values: dict[str, bool | float | str] = {
            "model": self.model,
            "level": self.trajectory.level,
            "success": "" if success is None else success,
            "reward": self.trajectory.reward,
        }
        assessments: list[Assessment] = [
            Feedback(name=name, value=value, source=source, trace_id=self.trace_id)
            for name, value in values.items()
            if value != ""
        ]
        # With ids assigned by MLflow, each delivery would add another assessment.
        for assessment in assessments:
            assessment.assessment_id = (
                "a-" + hashlib.sha256(self.trace_bytes + assessment.name.encode()).hexdigest()[:32]
            )
        return assessments

    def _describe_verdict(self) -> str:
        trajectory = self.trajectory
        answer = "no answer" if trajectory.answer is None else trajectory.answer
        if trajectory.success is None:
            return answer
        if trajectory.success:
            return f"{answer} (right)"
        if trajectory.target:
            return f"{answer} (wrong; right is {trajectory.target})"
        return f"{answer} (wrong)"

    def build_spans(self) -> Iterator[Span]:
        """Yield the episode's span, its turns, and below each turn its tool call."""
        trajectory = self.trajectory
        attributes = {name: getattr(trajectory, name) for name in _TRACED_FIELDS}
        attributes["stop_reason"] = str(trajectory.stop_reason)
        end_ns = self._compute_time_ns(2 * len(trajectory.turns) + 1)
        yield self._build_span(
            "episode",
            "AGENT",
            None,
            (self._compute_time_ns(0), end_ns),
            trajectory.prompt,
            self._describe_verdict(),
            attributes,
            ok=trajectory.success is not False,
        )
        for index, turn in enumerate(trajectory.turns):
            yield from self._build_turn_spans(index, turn)

    def _build_turn_spans(self, index: int, turn: Turn) -> Iterator[Span]:
        times_ns = (self._compute_time_ns(2 * index), self._compute_time_ns(2 * index + 2))
        name, call = f"turn {index + 1}", turn.tool_call
        attributes = {"turn": index + 1, "is_error": turn.is_error, "num_tokens": turn.num_tokens}
        turns = self.trajectory.turns
        sees = self.trajectory.prompt if index == 0 else turns[index - 1].observation
        action = "misuse" if turn.is_error else "answer"
        if call:
            action = call.name
        yield self._build_span(
            f"{name}: {action}",
            "LLM",
            "episode",
            times_ns,
            {"sees": sees},
            {"action": turn.action, "observation": turn.observation},
            attributes,
            ok=not turn.is_error,
            key=name,
        )
        if call is not None:
            yield self._build_span(
                call.name,
                "TOOL",
                name,
                (self._compute_time_ns(2 * index + 1), times_ns[1]),
                call.arguments,
                turn.observation,
                {"is_error": turn.is_error},
                ok=not turn.is_error,
                key=f"{name} call",
            )

    def _compute_time_ns(self, position: int) -> int:
        """Compute the time of a position in the episode, in ns since the epoch."""
        return self.start_ms * NS_PER_MS + position * SPAN_NS

    def _build_span(
        self,
        name: str,
        kind: str,
        parent: str | None,
        times_ns: tuple[int, int],
        inputs: Any,
        outputs: Any,
        attributes: dict[str, Any],
        *,
        ok: bool,
        key: str | None = None,
    ) -> Span:
        from mlflow.entities import Span

        span_attributes = {
            "mlflow.traceRequestId": self.trace_id,
            "mlflow.spanType": kind,
            "mlflow.spanInputs": inputs,
            "mlflow.spanOutputs": outputs,
            **attributes,
        }
        return Span.from_dict(
            {
                "trace_id": base64.b64encode(self.trace_bytes).decode(),
                "span_id": self._compute_span_id(key or name),
                "parent_span_id": self._compute_span_id(parent) if parent else None,
                "name": name,
                "start_time_unix_nano": times_ns[0],
                "end_time_unix_nano": times_ns[1],
                "events": [],
                "status": {"code": "STATUS_CODE_OK" if ok else "STATUS_CODE_ERROR", "message": ""},
                "attributes": {name: json.dumps(value) for name, value in span_attributes.items()},
            }
        )

    def _compute_span_id(self, key: str) -> str:
        digest = hashlib.sha256(self.trace_bytes + key.encode()).digest()
        return base64.b64encode(digest[:8]).decode()


class MlflowSink:
    """Sink that delivers the records of a run folder to one MLflow store."""

    def __init__(
        self,
        store: TrackingStore,
        folder: Path,
        deliver_older_models: Callable[[str, int], None] | None = None,
    ) -> None:
        """Open the store.

        Args:
            folder: the run folder; paths in its records are relative to it.
            deliver_older_models: called with a name and a time in ms; delivers the models of that name recorded before
                that time, or raises BackendError.
        """
        self._store = store
        self._folder = folder
        self._deliver_older_models = deliver_older_models or (lambda name, time_ms: None)
        self.store = store.label
        assert store.client
        self._start_time = time.time()
        self._cleaned_runs: set[str] = set()  # runs from which broken uploads have been removed

    @property
    def identity(self) -> str:
        """See `TrackingStore.identity`."""
        return self._store.identity

    def create_run(self, event: dict[str, Any], *, retried: bool) -> tuple[str, str]:
        """Create the run, or find the one that an earlier attempt created."""
        parent = self._find_parent_run(event)
        with self._store.translate_errors("create a run"):
            experiment_id = self._store.experiment_id
            if event.get("run_id"):
                run = self._store.client.get_run(event["run_id"])
                self._store.client.update_run(run.info.run_id, status="RUNNING")
                return run.info.run_id, run.info.experiment_id
            if retried:
                matches = self._store.client.search_runs(
                    [experiment_id], f"tags.`{RUN_KEY_TAG}` = '{event['key']}'", max_results=1
                )
                if matches:
                    return matches[0].info.run_id, experiment_id
            tags = {
                RUN_KEY_TAG: event["key"],
                "mlflow.user": read_user_name(),
                "mlflow.source.name": "posttrain",
                "mlflow.source.type": "LOCAL",
            }
            if parent:
                tags["mlflow.parentRunId"] = parent
            run = self._store.client.create_run(
                experiment_id, start_time=event["time"], tags=tags, run_name=event["name"]
            )
            return run.info.run_id, experiment_id

    def _find_parent_run(self, event: dict[str, Any]) -> str | None:
        # The folder comes first: a store that lost everything has the parent under another id.
        if event.get("parent_folder"):
            cursor = DeliveryCursor.load(Path(event["parent_folder"]))
            is_same_store = cursor.store == self.store and cursor.identity in ("", self.identity)
            if cursor.run_id is None or not is_same_store:
                raise BackendError("the parent run is not created yet")
            return cursor.run_id
        return str(event["parent_run_id"]) if event.get("parent_run_id") else None

    def has_run(self, run_id: str) -> bool:
        """Return whether the run exists and is not in the bin."""
        return self._read_lifecycle_stage(run_id) == "active"

    def has_run_or_deleted(self, run_id: str) -> bool:
        """Return whether the run exists, possibly in the bin."""
        return self._read_lifecycle_stage(run_id) != ""

    def _read_lifecycle_stage(self, run_id: str) -> str:
        try:
            return str(self._store.client.get_run(run_id).info.lifecycle_stage)
        except Exception as error:
            if is_missing_error(error):
                return ""
            raise BackendError(f"{self.store} could not look for a run: {error}") from error

    @contextmanager
    def _translate_write_errors(self, run_id: str, action: str) -> Iterator[None]:
        """Translate errors of the store. A refusal because the run is missing becomes RunNotFound."""
        try:
            with self._store.translate_errors(action):
                yield
        except DataError:
            if not self.has_run(run_id):
                raise RunNotFound(run_id) from None
            raise

    def store_metrics(self, run_id: str, rows: list[tuple[str, float, int, int]]) -> None:
        """Store metrics with one call."""
        from mlflow.entities import Metric

        metrics = [
            Metric(build_metric_store_name(name), value, time_ms, step)
            for name, value, time_ms, step in rows
        ]
        with self._translate_write_errors(run_id, "store metrics"):
            self._store.client.log_batch(run_id, metrics=metrics, synchronous=True)

    def store_event(self, run_id: str, event: dict[str, Any]) -> int | None:
        """Store a record other than a metric; return the version of a model."""
        op = event.get("op", "")
        handler = getattr(self, f"_op_{op}", None) if op.isidentifier() else None
        if handler is None:
            log.warning("tracking: a record of unknown kind %r was skipped", op)
            return None
        with self._translate_write_errors(run_id, f"store {op}"):
            version: int | None = handler(run_id, event)
        return version

    def _op_start(self, run_id: str, event: dict[str, Any]) -> None:
        """Do nothing: the run was created before any record."""

    def _op_resume(self, run_id: str, event: dict[str, Any]) -> None:
        client = self._store.client
        tags = client.get_run(run_id).data.tags
        for name in STALE_STOP_TAGS:
            if name in tags:
                client.delete_tag(run_id, name)
        client.update_run(run_id, status="RUNNING")

    def _op_end(self, run_id: str, event: dict[str, Any]) -> None:
        if event.get("seconds") is not None:
            self._store.client.set_tag(run_id, SECONDS_TAG, f"{event['seconds']:.1f}")
        self._store.client.set_terminated(run_id, status=event["status"], end_time=event["time"])

    def _op_tags(self, run_id: str, event: dict[str, Any]) -> None:
        from mlflow.entities import RunTag

        tags = [
            RunTag(sanitize_store_name(key), value[:MAX_TAG_LENGTH])
            for key, value in event["tags"].items()
        ]
        for key, model in event.get("versions", {}).items():
            version = self._find_version_by_content(model, event["time"])
            if version is not None:
                tags.append(RunTag(sanitize_store_name(key), f"models:/{model['name']}/{version}"))
        self._log_batch(run_id, tags=tags)

    def _find_version_by_content(self, model: dict[str, str], time_ms: int) -> int | None:
        """Return the newest version with a model's content; None if there is none."""
        self._deliver_older_models(model["name"], time_ms)
        versions = self._store.client.search_model_versions(
            f"name = '{model['name']}'", max_results=1000
        )
        matching = [
            int(version.version)
            for version in versions
            if version.tags.get("model_sha256") == model["sha256"]
        ]
        return max(matching, default=None)

    def _op_model(self, run_id: str, event: dict[str, Any]) -> int:
        """Create a version of a registered model. The same bytes from the same run are the same version."""
        self._deliver_older_models(event["name"], event["time"])
        parent = None
        if event.get("parent"):
            parent = self._find_version_by_content(event["parent"], event["time"])
        copy = self._folder / event["path"]
        parent_tags = {"parent_version": str(parent)} if parent else {}
        parent_name = str(parent) if parent else "?"
        version = register_logged_model(
            self._store,
            run_id,
            _resolve_content(copy, event["origin"]),
            event["kind"],
            event["name"],
            metrics=event["metrics"],
            points=find_metric_points(self._folder, event["metrics"], event["step"], event["time"]),
            tags=event["tags"] | parent_tags,
            step=event["step"],
            input_example=event["input_example"],
            description=event["description"].replace(PARENT_PLACEHOLDER, parent_name),
            scratch=build_events_path(self._folder).parent,
        )
        remove_folder(copy.parent)
        return version

    def _op_params(self, run_id: str, event: dict[str, Any]) -> None:
        """Log parameters.

        They never change in MLflow: a resumed run with another value keeps the first and gets a tag.
        """
        from mlflow.entities import Param, RunTag

        known = self._store.client.get_run(run_id).data.params
        new = [
            Param(key, value[:MAX_VALUE_LENGTH])
            for key, value in event["params"].items()
            if key not in known
        ]
        for start in range(0, len(new), MAX_PARAMS_PER_CALL):
            self._log_batch(run_id, params=new[start : start + MAX_PARAMS_PER_CALL])
        changed = {
            key: value for key, value in event["params"].items() if known.get(key, value) != value
        }
        if changed:
            self._log_batch(
                run_id, tags=[RunTag("changed_params", json.dumps(changed)[:MAX_TAG_LENGTH])]
            )
            log.warning(
                "resumed with other values, kept as tag 'changed_params': %s", ", ".join(changed)
            )

    def _log_batch(
        self, run_id: str, *, params: Sequence[Any] = (), tags: Sequence[Any] = ()
    ) -> None:
        self._store.client.log_batch(run_id, params=params, tags=tags, synchronous=True)

    def _op_alias(self, run_id: str, event: dict[str, Any]) -> None:
        """Repeat a recorded alias move in a store that lost it, unless the alias was moved later."""
        registry, name, alias = ModelRegistry(self._store), event["model"]["name"], event["alias"]
        version = self._find_version_by_content(event["model"], event["time"])
        current = registry.find_by_alias(name, alias)
        if version is None or (current is not None and current.version == version):
            return
        if current is None or read_alias_move_time(current, alias) <= event["time"]:
            registry.set_alias(name, alias, version, time_ms=event["time"])
            registry.tag_version(name, version, event["tags"])

    def _op_artifact(self, run_id: str, event: dict[str, Any]) -> None:
        copy = self._folder / event["path"]
        if not copy.exists() and copy.parent.exists():
            raise DataError(f"{copy} does not exist any more")
        path = _resolve_content(copy, event.get("origin", ""))
        if not path.exists():
            return  # sent by a process that was killed before it recorded that
        target = event.get("folder") or None
        self._clear_broken_uploads(run_id)
        if path.is_dir():
            target_folder = f"{target}/{path.name}" if target else path.name
            self._store.client.log_artifacts(run_id, str(path), artifact_path=target_folder)
        else:
            self._store.client.log_artifact(run_id, str(path), artifact_path=target)
        inject_fault("artifact.sent")
        remove_folder(copy.parent)

    def _op_text(self, run_id: str, event: dict[str, Any]) -> None:
        """Log a text like MLflow's `log_text`, whose temporaries would stay in the system's folder after a kill."""
        self._clear_broken_uploads(run_id)
        name = PurePosixPath(event["name"])
        folder = str(name.parent) if name.parent.name else None
        scratch = make_folder(build_events_path(self._folder).parent)
        with tempfile.TemporaryDirectory(prefix=SCRATCH_PREFIX, dir=scratch) as temporary:
            path = Path(temporary, name.name)
            path.write_text(event["text"], encoding="utf-8")
            self._store.client.log_artifact(run_id, str(path), artifact_path=folder)

    def _clear_broken_uploads(self, run_id: str) -> None:
        """Clear broken uploads once per run: a record whose upload was killed is delivered again."""
        if run_id in self._cleaned_runs:
            return
        self._cleaned_runs.add(run_id)
        artifact_uri = self._store.client.get_run(run_id).info.artifact_uri
        folder = find_local_artifacts(artifact_uri, run_id)
        if folder is not None:
            clear_broken_uploads(folder, self._start_time)

    def _op_dataset(self, run_id: str, event: dict[str, Any]) -> None:
        from mlflow.entities import Dataset, DatasetInput, InputTag

        dataset = Dataset(
            name=event["name"],
            digest=event["digest"][:36],  # MLflow stores no more; the profile has the full digest
            source_type="local",
            source=json.dumps({"uri": event["path"]}),
            profile=json.dumps({**event.get("profile", {}), "digest": event["digest"]}),
        )
        tags = [InputTag("mlflow.data.context", event["context"])]
        self._store.client.log_inputs(run_id, [DatasetInput(dataset, tags)])

    def _op_traces(self, run_id: str, event: dict[str, Any]) -> None:
        send_traces(
            self._store, run_id, event["rows"], time_ms=event["time"], model=event.get("model", "")
        )


def _resolve_content(copy: Path, origin: str) -> Path:
    """Return the location of an artifact or a model: the journal's copy, or its origin if the copy was delivered.

    A stage's folder loses its suffix `.open` when the stage has finished.
    """
    if copy.exists() or not origin:
        return copy
    finished = [part.removesuffix(".open") for part in Path(origin).parts]
    for path in (Path(origin), Path(*finished)):
        if path.exists():
            return path
    return copy
