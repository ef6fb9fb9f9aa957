"""Episodes as MLflow traces: one trace an episode, one span a turn, so that a reviewer reads what the policy did.

The spans of all episodes go out in one call (15 ms an episode on sqlite; through MLflow's live tracing it was 300).
Ids follow from the run and the episode, so sending twice stores one.

Journaled records as MLflow calls, all of them idempotent.
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
from tasks.tracking.journal import SCRATCH_PREFIX, DeliveryCursor, build_events_path
from tasks.tracking.models import clear_broken_uploads, find_local_artifacts, register_logged_model
from tasks.tracking.registry import ModelRegistry, read_alias_move_time
from tasks.tracking.shipper import RunNotFound
from tasks.tracking.store import TrackingStore, is_missing_error, read_user_name
from tasks.tracking.values import (
    MAX_VALUE_LENGTH,
    SECONDS_TAG,
    sanitize_metric_name,
    sanitize_tag_name,
)

if TYPE_CHECKING:
    from mlflow.entities import Assessment, Span, TraceInfo


MILLISECOND = 1_000_000  # nanoseconds
# Episodes are played in batches, so that no turn has a time of its own: spans of 1 ns, in the order of the turns, which
# pages show as 0 ms.
SPAN_NS = 1
MAX_PREVIEW_LENGTH = 1000


def send_traces(
    store: TrackingStore, run_id: str, rows: list[dict[str, Any]], *, time_ms: int, model: str
) -> None:
    """Store `rows` (Trajectory.to_json) as traces of a run. `model` says who played them ('sft', 'policy')."""
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
    """One trajectory on its way to a trace."""

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
        """Tags by which the list of traces is shown and searched."""
        from mlflow.entities import TraceInfo, TraceLocation, TraceState

        trajectory = self.trajectory
        tags = {
            "mlflow.traceName": self.name,
            "environment": trajectory.environment,
            "level": trajectory.level,
            "kind": trajectory.kind,
            "seed": str(trajectory.seed),
            "success": str(trajectory.success).lower(),
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
        """The environment's judgements, which the list of traces shows as columns and counts."""
        from mlflow.entities import AssessmentSource, Feedback

        source = AssessmentSource(
            source_type="CODE", source_id=self.trajectory.environment or "environment"
        )
        values: dict[str, bool | float | str] = {
            "model": self.model,
            "level": self.trajectory.level,
            "success": self.trajectory.success,
            "reward": self.trajectory.reward,
        }
        found: list[Assessment] = [
            Feedback(name=name, value=value, source=source, trace_id=self.trace_id)
            for name, value in values.items()
            if value != ""
        ]
        # else each delivery would add another one under an id that MLflow draws
        for judgement in found:
            judgement.assessment_id = (
                "a-" + hashlib.sha256(self.trace_bytes + judgement.name.encode()).hexdigest()[:32]
            )
        return found

    def _describe_verdict(self) -> str:
        said = "no answer" if self.trajectory.answer is None else self.trajectory.answer
        if self.trajectory.success:
            return f"{said} (right)"
        return (
            f"{said} (wrong; right is {self.trajectory.target})"
            if self.trajectory.target
            else f"{said} (wrong)"
        )

    def build_spans(self) -> Iterator[Span]:
        """The episode, its turns, and under each turn that called a tool the call."""
        trajectory = self.trajectory
        attributes = {
            name: getattr(trajectory, name)
            for name in (
                "environment",
                "level",
                "kind",
                "seed",
                "success",
                "reward",
                "rewards",
                "target",
                "answer",
            )
        } | {
            "stop_reason": str(trajectory.stop_reason),
            "num_action_tokens": trajectory.num_action_tokens,
            "mean_logprob": trajectory.mean_logprob,
            "policy_version": trajectory.policy_version,
            "sample": trajectory.sample,
        }
        yield self._build_span(
            "episode",
            "AGENT",
            None,
            (self._compute_time_ns(0), self._compute_time_ns(2 * len(trajectory.turns) + 1)),
            trajectory.prompt,
            self._describe_verdict(),
            attributes,
            ok=trajectory.success,
        )
        for index, turn in enumerate(trajectory.turns):
            yield from self._build_turn_spans(index, turn)

    def _build_turn_spans(self, index: int, turn: Turn) -> Iterator[Span]:
        when = (self._compute_time_ns(2 * index), self._compute_time_ns(2 * index + 2))
        name, call = f"turn {index + 1}", turn.tool_call
        attributes = {"turn": index + 1, "is_error": turn.is_error, "num_tokens": turn.num_tokens}
        sees = (
            self.trajectory.prompt if index == 0 else self.trajectory.turns[index - 1].observation
        )
        title = (
            f"{name}: {call.name}" if call else f"{name}: {'misuse' if turn.is_error else 'answer'}"
        )
        yield self._build_span(
            title,
            "LLM",
            "episode",
            when,
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
                (self._compute_time_ns(2 * index + 1), when[1]),
                call.arguments,
                turn.observation,
                {"is_error": turn.is_error},
                ok=not turn.is_error,
                key=f"{name} call",
            )

    def _compute_time_ns(self, position: int) -> int:
        """Time of a place in the episode's order, in ns since the epoch."""
        return self.start_ms * MILLISECOND + position * SPAN_NS

    def _build_span(
        self,
        name: str,
        kind: str,
        parent: str | None,
        when_ns: tuple[int, int],
        inputs: Any,
        outputs: Any,
        attributes: dict[str, Any],
        *,
        ok: bool,
        key: str | None = None,
    ) -> Span:
        from mlflow.entities import Span

        everything = {
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
                "start_time_unix_nano": when_ns[0],
                "end_time_unix_nano": when_ns[1],
                "events": [],
                "status": {"code": "STATUS_CODE_OK" if ok else "STATUS_CODE_ERROR", "message": ""},
                "attributes": {name: json.dumps(value) for name, value in everything.items()},
            }
        )

    def _compute_span_id(self, key: str) -> str:
        return base64.b64encode(
            hashlib.sha256(self.trace_bytes + key.encode()).digest()[:8]
        ).decode()


log = logging.getLogger(__name__)

# in a model's description, for the number of the version that it was trained from
PARENT_PLACEHOLDER = "{parent}"
RUN_KEY_TAG = "mlflow.posttrain.runKey"  # tag by which a run is found again when its id was never learnt; pages hide it
MAX_TAG_LENGTH = 5000
MAX_PARAMS_PER_CALL = 100  # of one call


class MlflowSink:
    """Delivers records to one MLflow store."""

    def __init__(
        self, store: TrackingStore, folder: Path, settle: Callable[[str, int], None] | None = None
    ) -> None:
        """Open the store.

        Args:
            folder: the run folder; paths in its records are relative to it.
            settle: has models of a name that were recorded before a time (ms) delivered first, or raises BackendError.
        """
        self._store = store
        self._folder = folder
        self._deliver_older_models = settle or (lambda name, time_ms: None)
        self.store = store.label
        assert store.client
        self._start_time = time.time()
        self._cleaned_runs: set[str] = set()  # runs without files of an upload that a kill ended

    @property
    def identity(self) -> str:
        """As `Store.identity`."""
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
                found = self._store.client.search_runs(
                    [experiment_id], f"tags.`{RUN_KEY_TAG}` = '{event['key']}'", max_results=1
                )
                if found:
                    return found[0].info.run_id, experiment_id
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
        # first: a store that lost everything knows the parent by another id
        if event.get("parent_folder"):
            state = DeliveryCursor.load(Path(event["parent_folder"]))
            if (
                state.run_id is None
                or state.store != self.store
                or state.identity not in ("", self.identity)
            ):
                raise BackendError("the parent run is not created yet")
            return state.run_id
        return str(event["parent_run_id"]) if event.get("parent_run_id") else None

    def has_run(self, run_id: str) -> bool:
        """True = the run exists and is not in the bin."""
        return self._read_lifecycle_stage(run_id) == "active"

    def has_run_or_deleted(self, run_id: str) -> bool:
        """True = the run exists, be it in the bin."""
        return self._read_lifecycle_stage(run_id) != ""

    def _read_lifecycle_stage(self, run_id: str) -> str:
        try:
            return str(self._store.client.get_run(run_id).info.lifecycle_stage)
        except Exception as error:
            if is_missing_error(error):
                return ""
            raise BackendError(f"{self.store} could not look for a run: {error}") from error

    @contextmanager
    def _translate_write_errors(self, run_id: str, doing: str) -> Iterator[None]:
        """As `Store.answers`; a refusal because the run is gone is RunGone."""
        try:
            with self._store.translate_errors(doing):
                yield
        except DataError:
            if not self.has_run(run_id):
                raise RunNotFound(run_id) from None
            raise

    def store_metrics(self, run_id: str, rows: list[tuple[str, float, int, int]]) -> None:
        """Store metrics with one call."""
        from mlflow.entities import Metric

        batch = [
            Metric(sanitize_metric_name(name), value, when, step)
            for name, value, when, step in rows
        ]
        with self._translate_write_errors(run_id, "store metrics"):
            self._store.client.log_batch(run_id, metrics=batch, synchronous=True)

    def store_event(self, run_id: str, event: dict[str, Any]) -> int | None:
        """Store a record that is no metric; returns the version that a model became."""
        op = event.get("op", "")
        handler = getattr(self, f"_op_{op}", None) if op.isidentifier() else None
        if handler is None:
            log.warning("tracking: a record of unknown kind %r was left out", op)
            return None
        with self._translate_write_errors(run_id, f"store {op}"):
            version: int | None = handler(run_id, event)
        return version

    def _op_start(self, run_id: str, event: dict[str, Any]) -> None:
        """The run exists already: its creation comes before everything."""

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
            RunTag(sanitize_tag_name(key), value[:MAX_TAG_LENGTH])
            for key, value in event["tags"].items()
        ]
        for key, model in event.get("versions", {}).items():
            version = self._find_version_by_content(model, event["time"])
            if version is not None:
                tags.append(RunTag(sanitize_tag_name(key), f"models:/{model['name']}/{version}"))
        self._log_batch(run_id, tags=tags)

    def _find_version_by_content(self, model: dict[str, str], time_ms: int) -> int | None:
        """The newest version that holds a model's content; None where there is none."""
        self._deliver_older_models(model["name"], time_ms)
        found = self._store.client.search_model_versions(
            f"name = '{model['name']}'", max_results=1000
        )
        same = [
            int(one.version) for one in found if one.tags.get("model_sha256") == model["sha256"]
        ]
        return max(same, default=None)

    def _op_model(self, run_id: str, event: dict[str, Any]) -> int:
        """A version of a registered model; the same bytes from the same run are the same version again."""
        self._deliver_older_models(event["name"], event["time"])
        parent = (
            self._find_version_by_content(event["parent"], event["time"])
            if event.get("parent")
            else None
        )
        kept = self._folder / event["path"]
        version = register_logged_model(
            self._store,
            run_id,
            _resolve_content(kept, event["origin"]),
            event["kind"],
            event["name"],
            metrics=event["metrics"],
            tags=event["tags"] | ({"parent_version": str(parent)} if parent else {}),
            step=event["step"],
            input_example=event["input_example"],
            description=event["description"].replace(
                PARENT_PLACEHOLDER, str(parent) if parent else "?"
            ),
            scratch=build_events_path(self._folder).parent,
            time_ms=event["time"],
        )
        remove_folder(kept.parent)
        return version

    def _op_params(self, run_id: str, event: dict[str, Any]) -> None:
        """Parameters never change in MLflow: a resumed run with another value keeps the first, and says so."""
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
        """A move that was made when it was recorded: made again in a store that lost it, never against a later one."""
        registry, name, alias = ModelRegistry(self._store), event["model"]["name"], event["alias"]
        version = self._find_version_by_content(event["model"], event["time"])
        present = registry.find_by_alias(name, alias)
        if version is None or (present is not None and present.version == version):
            return
        if present is None or read_alias_move_time(present, alias) <= event["time"]:
            registry.set_alias(name, alias, version, time_ms=event["time"])
            registry.tag_version(name, version, event["tags"])

    def _op_artifact(self, run_id: str, event: dict[str, Any]) -> None:
        kept = self._folder / event["path"]
        if not kept.exists() and kept.parent.exists():
            raise DataError(f"{kept} does not exist any more")
        path = _resolve_content(kept, event.get("origin", ""))
        if not path.exists():
            return  # sent by a process that was killed before it noted that
        target = event.get("folder") or None
        self._clear_broken_uploads(run_id)
        if path.is_dir():
            inner = f"{target}/{path.name}" if target else path.name
            self._store.client.log_artifacts(run_id, str(path), artifact_path=inner)
        else:
            self._store.client.log_artifact(run_id, str(path), artifact_path=target)
        inject_fault("artifact.sent")
        remove_folder(kept.parent)

    def _op_text(self, run_id: str, event: dict[str, Any]) -> None:
        """As MLflow's `log_text`, whose temporaries stay in the system's folder when a kill ends it."""
        self._clear_broken_uploads(run_id)
        name = PurePosixPath(event["name"])
        folder = str(name.parent) if name.parent.name else None
        scratch = make_folder(build_events_path(self._folder).parent)
        with tempfile.TemporaryDirectory(prefix=SCRATCH_PREFIX, dir=scratch) as temporary:
            path = Path(temporary, name.name)
            path.write_text(event["text"], encoding="utf-8")
            self._store.client.log_artifact(run_id, str(path), artifact_path=folder)

    def _clear_broken_uploads(self, run_id: str) -> None:
        """Before the first upload to a run, since a record whose upload was killed is delivered again."""
        if run_id not in self._cleaned_runs:
            self._cleaned_runs.add(run_id)
            folder = find_local_artifacts(
                self._store.client.get_run(run_id).info.artifact_uri, run_id
            )
            if folder is not None:
                clear_broken_uploads(folder, self._start_time)

    def _op_dataset(self, run_id: str, event: dict[str, Any]) -> None:
        from mlflow.entities import Dataset, DatasetInput, InputTag

        dataset = Dataset(
            name=event["name"],
            digest=event["digest"][:36],  # all that MLflow keeps; the whole one is in the profile
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


def _resolve_content(kept: Path, origin: str) -> Path:
    """Place of an artifact or a model: the journal's copy, or, where that was delivered before, what it came from.

    A stage's folder loses the ending `.open` when it has finished.
    """
    if kept.exists() or not origin:
        return kept
    finished = [part.removesuffix(".open") for part in Path(origin).parts]
    return next((path for path in (Path(origin), Path(*finished)) if path.exists()), kept)
