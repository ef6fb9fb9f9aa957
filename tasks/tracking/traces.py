"""Episodes as MLflow traces: one trace an episode, one span a turn, so that a reviewer reads what the policy did.

The spans of all episodes go out in one call (15 ms an episode on sqlite; through MLflow's live tracing it was 300).
Ids follow from the run and the episode, so sending twice stores one.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rl_core.data.model_text import plain_json
from rl_core.storage.faults import fault
from rl_core.types import Trajectory, Turn

if TYPE_CHECKING:
    from mlflow.entities import Assessment, Span, TraceInfo

    from tasks.tracking.store import Store

__all__ = ["send_traces"]

MILLISECOND = 1_000_000  # nanoseconds
# Episodes are played in batches, so that no turn has a time of its own: spans of 1 ns, in the order of the turns, which
# pages show as 0 ms.
SPAN_NS = 1
PREVIEW = 1000


def send_traces(store: Store, run_id: str, rows: list[dict[str, Any]], *, time_ms: int, model: str) -> None:
    """Store `rows` (Trajectory.to_json) as traces of a run. `model` says who played them ('sft', 'policy')."""
    from mlflow.tracing.client import TracingClient

    client = TracingClient(store.uri)
    experiment_id = store.client.get_run(run_id).info.experiment_id
    spans: list[Span] = []
    for index, row in enumerate(rows):
        trajectory = Trajectory.from_json(plain_json(row))
        episode = _Episode(trajectory, run_id, model, index, time_ms + index)
        client.start_trace(episode.info(experiment_id))
        fault("trace.started")
        spans += episode.spans()
    if spans:
        client.log_spans(experiment_id, spans)
        fault("trace.sent")


class _Episode:
    """One trajectory on its way to a trace."""

    def __init__(self, trajectory: Trajectory, run_id: str, model: str, index: int, time_ms: int) -> None:
        self.trajectory, self.run_id, self.model = trajectory, run_id, model
        self.start_ms = time_ms
        key = (run_id, model, index, trajectory.environment, trajectory.level, trajectory.seed, trajectory.sample)
        self.trace_bytes = hashlib.sha256(repr(key).encode()).digest()[:16]
        self.trace_id = "tr-" + self.trace_bytes.hex()
        self.name = f"{trajectory.level} {trajectory.kind} #{trajectory.seed}".replace("  ", " ")

    def info(self, experiment_id: str) -> TraceInfo:
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
            assessments=self._assessments(),
            request_preview=trajectory.prompt[:PREVIEW],
            response_preview=self._verdict()[:PREVIEW],
            trace_metadata={"mlflow.sourceRun": self.run_id, "mlflow.trace_schema.version": "3"},
            tags={key: value for key, value in tags.items() if value},
        )

    def _assessments(self) -> list[Assessment]:
        """The environment's judgements, which the list of traces shows as columns and counts."""
        from mlflow.entities import AssessmentSource, Feedback

        source = AssessmentSource(source_type="CODE", source_id=self.trajectory.environment or "environment")
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
        for judgement in found:  # else each delivery would add another one under an id that MLflow draws
            judgement.assessment_id = "a-" + hashlib.sha256(self.trace_bytes + judgement.name.encode()).hexdigest()[:32]
        return found

    def _verdict(self) -> str:
        said = "no answer" if self.trajectory.answer is None else self.trajectory.answer
        if self.trajectory.success:
            return f"{said} (right)"
        return f"{said} (wrong; right is {self.trajectory.target})" if self.trajectory.target else f"{said} (wrong)"

    def spans(self) -> Iterator[Span]:
        """The episode, its turns, and under each turn that called a tool the call."""
        trajectory = self.trajectory
        attributes = {
            name: getattr(trajectory, name)
            for name in ("environment", "level", "kind", "seed", "success", "reward", "rewards", "target", "answer")
        } | {
            "stop_reason": str(trajectory.stop_reason),
            "num_action_tokens": trajectory.num_action_tokens,
            "mean_logprob": trajectory.mean_logprob,
            "policy_version": trajectory.policy_version,
            "sample": trajectory.sample,
        }
        yield self._span(
            "episode", "AGENT", None, (self._ns(0), self._ns(2 * len(trajectory.turns) + 1)), trajectory.prompt,
            self._verdict(), attributes, ok=trajectory.success,
        )  # fmt: skip
        for index, turn in enumerate(trajectory.turns):
            yield from self._turn(index, turn)

    def _turn(self, index: int, turn: Turn) -> Iterator[Span]:
        when = (self._ns(2 * index), self._ns(2 * index + 2))
        name, call = f"turn {index + 1}", turn.tool_call
        attributes = {"turn": index + 1, "is_error": turn.is_error, "num_tokens": turn.num_tokens}
        sees = self.trajectory.prompt if index == 0 else self.trajectory.turns[index - 1].observation
        title = f"{name}: {call.name}" if call else f"{name}: {'misuse' if turn.is_error else 'answer'}"
        yield self._span(
            title, "LLM", "episode", when, {"sees": sees}, {"action": turn.action, "observation": turn.observation},
            attributes, ok=not turn.is_error, key=name,
        )  # fmt: skip
        if call is not None:
            yield self._span(
                call.name, "TOOL", name, (self._ns(2 * index + 1), when[1]), call.arguments, turn.observation,
                {"is_error": turn.is_error}, ok=not turn.is_error, key=f"{name} call",
            )  # fmt: skip

    def _ns(self, place: int) -> int:
        """Time of a place in the episode's order, in ns since the epoch."""
        return self.start_ms * MILLISECOND + place * SPAN_NS

    def _span(
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
                "span_id": self._span_id(key or name),
                "parent_span_id": self._span_id(parent) if parent else None,
                "name": name,
                "start_time_unix_nano": when_ns[0],
                "end_time_unix_nano": when_ns[1],
                "events": [],
                "status": {"code": "STATUS_CODE_OK" if ok else "STATUS_CODE_ERROR", "message": ""},
                "attributes": {name: json.dumps(value) for name, value in everything.items()},
            }
        )

    def _span_id(self, key: str) -> str:
        return base64.b64encode(hashlib.sha256(self.trace_bytes + key.encode()).digest()[:8]).decode()
