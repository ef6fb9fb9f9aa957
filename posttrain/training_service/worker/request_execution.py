"""Execution of requests in rounds (`fair_rounds` selects them): engine calls, and storage of the answers.

A round computes, in this order: the next request of every run that is not a forward_backward, together with new
samplers, where optimizer updates of all runs form one batch; then the next forward_backward requests of every run in
one batch; then samples in one batch. The passes of all runs are thus computed together although each run is at another
point of its loop, and training alternates with sampling. The answers of every step are stored in one transaction.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from posttrain.training_service.commands import (
    Command,
    LoadWeights,
    ModelCreated,
    ModelUnloaded,
    OpenSampler,
    Result,
    SamplerOpened,
    SaveForSampler,
    SaveWeights,
    UnloadModel,
    WeightsSaved,
)
from posttrain.training_service.paths import is_tinker_path
from posttrain.training_service.store import ResultBody, StoredRequest
from posttrain.training_service.store.records import resolve_request_line
from posttrain.training_service.store.work_queue import RequestOutcome
from posttrain.training_service.wire.codec import decode_request, encode_result
from posttrain.training_service.worker.fair_rounds import ExecutionRound, FairRounds
from posttrain.training_service.worker.loaded_runs import LoadedRuns
from posttrain.training_service.worker.loaded_samplers import LoadedSamplers
from posttrain.training_service.worker.recorded_sequences import (
    add_recorded_inputs,
    build_recorded_rows,
)
from posttrain.training_service.worker.run_tracking import RunMetrics
from posttrain.training_service.worker.saved_weights import WorkerContext, describe_model
from rl_core.errors import BackendError, ServiceError
from rl_core.out_of_memory import format_first_line
from rl_core.service.request_checks import EvaluateRequest
from rl_core.service.requests import CreateModel, ForwardBackward, SampleRequest, ScoreRequest
from rl_core.service.results import ForwardBackwardResult, OptimStepResult, SampleResult
from rl_core.storage.faults import inject_fault

log = logging.getLogger(__name__)

MAX_ATTEMPTS = 5  # after which a request fails, and the others continue
# Kills from outside hit any request, some repeatedly; a request that takes all memory kills every worker.
MAX_WORKER_DEATHS = 24


class RequestExecutor:
    """Executor that connects the engine, runs and samplers in memory, and the store that receives the answers."""

    def __init__(
        self,
        context: WorkerContext,
        runs: LoadedRuns,
        samplers: LoadedSamplers,
        metrics: RunMetrics,
        rounds: FairRounds,
    ) -> None:
        self._engine = context.engine
        self._store = context.store
        self._folder = context.folder
        self._weights = context.weights
        self._settings = context.settings.worker
        self._runs, self._samplers, self._metrics = runs, samplers, metrics
        self._rounds = rounds  # to which the time of computing is reported
        # of requests that a store or disk error interrupted
        self._num_attempts: dict[str, int] = {}

    def execute_round(self, selected: ExecutionRound, is_stopping: Callable[[], bool]) -> int:
        """Execute a round; return the number of answered requests. Raises: BackendError, OSError of the store."""
        num_answered = 0
        for request_id in selected.single:
            if is_stopping():
                return num_answered
            for request in self._store.claim_requests([request_id]):
                if request.kind == "optim_step":  # isolated because it may crash workers
                    self._execute_updates([request])
                else:
                    self._execute_single(request)
                num_answered += 1
        batches = (
            (selected.updates, self._execute_updates),
            (selected.passes, self._execute_passes),
            (selected.samples, self._execute_samples),
        )
        for ids, execute in batches:
            if ids and not is_stopping():
                position = {request_id: index for index, request_id in enumerate(ids)}
                requests = self._store.claim_requests(ids)
                execute(sorted(requests, key=lambda request: position[request.request_id]))
                num_answered += len(requests)
        self._runs.save_due_snapshots()
        return num_answered

    def _execute_single(self, request: StoredRequest) -> None:
        started_at = time.perf_counter()
        try:
            self._store.sync_to_disk()  # folders must not be ahead of requests and answers in the store
            outcome = self._execute_command(request)
        except Exception as error:
            outcome = self._build_failed_outcome(request, error)
        # Synced, because folders are created and deleted with it.
        self._finish_requests([(request, outcome)], synced=True)
        self._record_seconds([(request, outcome)], started_at)
        if isinstance(outcome.answer, ServiceError):
            return
        if request.kind == "load_weights":
            # The path may be deleted later, so replay must not need it.
            self._runs.save_snapshot(request.target)
        elif request.kind == "unload_model":
            self._weights.delete_folder(self._folder.resolve_snapshot_folder(request.target))
        elif "published" in outcome.run:
            self._weights.delete_sibling_folders(
                self._folder.to_absolute_path(outcome.run["published"])
            )

    def _execute_command(self, request: StoredRequest) -> RequestOutcome:
        """Compute a request alone. Raises: ServiceError."""
        command = self._decode_command(request)
        target = request.target
        if isinstance(command, CreateModel):
            self._runs.evict_unused_runs({target})
            self._runs.drop_run(target)
            self._engine.create_model(command)
            self._runs.add_new_run(target, request.seq)
            created = ModelCreated(model_id=target)
            return self._build_outcome(request, created, run=self._describe_new_run(target))
        if isinstance(command, UnloadModel):
            self._runs.drop_run(target)
            unloaded = ModelUnloaded(model_id=target)
            return self._build_outcome(request, unloaded, run={"state": "unloaded"})
        if isinstance(command, OpenSampler):
            row = self._samplers.open_sampler(command, request)
            opened = SamplerOpened(sampler_id=target)
            return self._build_outcome(request, opened, rows=(("samplers", row),))
        if isinstance(command, LoadWeights):
            return self._execute_load(command, request)
        if isinstance(command, EvaluateRequest):
            evaluation = self._engine.evaluate(self._resolve_model_folders(command, request.owner))
            return self._build_outcome(request, evaluation)
        if isinstance(command, ScoreRequest):
            return self._build_outcome(request, self._engine.score_rows(command))
        self._runs.ensure_loaded(target)
        if isinstance(command, SaveForSampler) and command.sampler_id is not None:
            row, run = self._samplers.publish_sampler(command, request)
            opened = SamplerOpened(sampler_id=command.sampler_id)
            return self._build_outcome(request, opened, run=run, rows=(("samplers", row),))
        assert isinstance(command, SaveWeights | SaveForSampler), request.kind
        if command.path is not None:
            self._samplers.detach_samplers(command.path)
        checkpoint = self._weights.save_weights(
            command, request.owner, request.facts, lambda: self._save_latest_snapshot(target)
        )
        saved = WeightsSaved(path=checkpoint.path)
        return self._build_outcome(request, saved, rows=(("checkpoints", asdict(checkpoint)),))

    def _resolve_model_folders(self, command: EvaluateRequest, owner: str) -> EvaluateRequest:
        """Add the folders of the saved weights that the evaluation names. Raises: ServiceError (user)."""
        folders = {
            name: str(self._weights.resolve_folder(name, owner))
            for name in (command.model, command.against)
            if name is not None and is_tinker_path(name)
        }
        return replace(command, folders=folders)

    def _execute_load(self, command: LoadWeights, request: StoredRequest) -> RequestOutcome:
        if request.seq == 0:
            self._runs.evict_unused_runs({request.target})
            self._runs.drop_run(request.target)
            answer = self._weights.load_weights(command, request.owner)
            self._runs.add_new_run(request.target, request.seq)
            return self._build_outcome(request, answer, run=self._describe_new_run(request.target))
        self._runs.ensure_loaded(request.target)
        answer = self._weights.load_weights(command, request.owner)
        return self._build_outcome(
            request, answer, run={"steps": self._engine.model_info(request.target).steps}
        )

    def _describe_new_run(self, model_id: str) -> dict[str, Any]:
        info = self._engine.model_info(model_id)
        return {
            "state": "live",
            "base": info.base,
            "steps": info.steps,
            "info": describe_model(self._engine, model_id),
        }

    def _save_latest_snapshot(self, model_id: str) -> Path:
        """Save a snapshot of the run's current state; return its folder."""
        if not self._runs.save_snapshot(model_id):
            raise ServiceError(f"{model_id}: the run's state could not be written", "server")
        return self._folder.resolve_snapshot_folder(model_id)

    def _execute_updates(self, requests: Sequence[StoredRequest]) -> None:
        """Execute updates of several runs, one of each."""

        def build_outcome(
            request: StoredRequest, answer: OptimStepResult, seconds: float
        ) -> RequestOutcome:
            steps = self._engine.model_info(request.target).steps
            self._metrics.record_step(
                request.target, answer.metrics, steps, seconds / len(requests)
            )
            return self._build_outcome(request, answer, run={"steps": steps})

        self._execute_batch(
            requests, self._runs.ensure_loaded, self._engine.optim_steps, build_outcome
        )

    def _execute_passes(self, requests: Sequence[StoredRequest]) -> None:
        """Execute forward and backward passes of several runs."""

        used_sequences: dict[str, tuple[str, ...]] = {}

        def decode(request: StoredRequest) -> Command:
            command = self._decode_command(request)
            assert isinstance(command, ForwardBackward), request.kind
            command, used_sequences[request.request_id] = add_recorded_inputs(
                command, request, self._store, self._settings.recorded_seconds
            )
            return command

        def build_outcome(
            request: StoredRequest, answer: ForwardBackwardResult, seconds: float
        ) -> RequestOutcome:
            self._metrics.record_pass(request.target, answer.metrics, seconds)
            return self._build_outcome(
                request,
                answer,
                used_sequences=used_sequences[request.request_id],
                used_at=request.accepted,
            )

        self._execute_batch(
            requests, self._runs.ensure_loaded, self._engine.forward_backward, build_outcome, decode
        )

    def _execute_samples(self, requests: Sequence[StoredRequest]) -> None:
        """Execute sampling requests of several samplers."""

        commands: dict[str, SampleRequest] = {}

        def decode(request: StoredRequest) -> Command:
            command = self._decode_command(request)
            assert isinstance(command, SampleRequest), request.kind
            commands[request.request_id] = command
            return command

        def build_outcome(
            request: StoredRequest, answer: SampleResult, seconds: float
        ) -> RequestOutcome:
            rows = build_recorded_rows(request, commands[request.request_id], answer)
            return self._build_outcome(request, answer, rows=rows)

        self._execute_batch(
            requests, self._samplers.ensure_loaded, self._engine.sample, build_outcome, decode
        )

    def _execute_batch(
        self,
        requests: Sequence[StoredRequest],
        ensure_loaded: Callable[[str, set[str]], None],
        compute: Callable[[list[Any]], Sequence[Any]],
        build_outcome: Callable[[StoredRequest, Any, float], RequestOutcome],
        decode: Callable[[StoredRequest], Command] | None = None,
    ) -> None:
        """Pass all valid requests to the engine in one call, and store all answers in one transaction.

        Args:
            ensure_loaded: loads a target into memory without evicting the others.
            build_outcome: of a request, its answer, and the seconds of the call.
            decode: of a request; None = its body alone.
        """
        begun_at = time.perf_counter()
        targets = {request.target for request in requests}
        outcomes: dict[str, RequestOutcome] = {}
        valid: list[tuple[StoredRequest, Any]] = []
        for request in requests:
            try:
                command: Any = (decode or self._decode_command)(request)
                ensure_loaded(request.target, targets)
                valid.append((request, command))
            except Exception as error:
                outcomes[request.request_id] = self._build_failed_outcome(request, error)
        started_at = time.perf_counter()
        try:
            answers = compute([command for _, command in valid]) if valid else []
        except Exception as error:
            answers = [error] * len(valid)
        seconds = time.perf_counter() - started_at
        for (request, _), answer in zip(valid, answers, strict=True):
            try:
                if isinstance(answer, Exception):
                    raise answer
                outcomes[request.request_id] = build_outcome(request, answer, seconds)
            except Exception as error:
                outcomes[request.request_id] = self._build_failed_outcome(request, error)
        pairs = [(request, outcomes[request.request_id]) for request in requests]
        self._finish_requests(pairs, synced=False)
        self._record_seconds(pairs, begun_at)

    def _record_seconds(
        self, pairs: Sequence[tuple[StoredRequest, RequestOutcome]], started_at: float
    ) -> None:
        """Report the time of a batch; bytes of requests and answers stand for their parts of the work."""
        sizes = [
            len(request.payload)
            + (len(outcome.answer.body) if isinstance(outcome.answer, ResultBody) else 0)
            for request, outcome in pairs
        ]
        self._rounds.record_seconds(
            [request for request, _ in pairs], sizes, time.perf_counter() - started_at
        )

    def _finish_requests(
        self, pairs: Sequence[tuple[StoredRequest, RequestOutcome]], *, synced: bool
    ) -> None:
        inject_fault("service.computed")
        self._store.finish_requests([outcome for _, outcome in pairs], is_synced=synced)
        for request, _ in pairs:
            if resolve_request_line(request.kind) == "training":
                self._runs.record_applied_request(
                    request.target, request.seq, is_update=request.kind == "optim_step"
                )

    @staticmethod
    def _decode_command(request: StoredRequest) -> Command:
        if request.deaths >= MAX_WORKER_DEATHS:
            raise ServiceError(
                f"{request.deaths} workers crashed while computing this request, perhaps out of memory; send smaller "
                "requests",
                "server",
            )
        return decode_request(
            request.kind, request.payload, request.content_type, request.facts, request.target
        )

    @staticmethod
    def _build_outcome(request: StoredRequest, result: Result, **changes: Any) -> RequestOutcome:
        body, content_type = encode_result(request.kind, result, request.payload)
        return RequestOutcome(
            request_id=request.request_id, answer=ResultBody(body, content_type), **changes
        )

    def _build_failed_outcome(self, request: StoredRequest, error: Exception) -> RequestOutcome:
        """Build the outcome of a failed request.

        A failure that may have changed the run in part is undone: the run is dropped and restored on demand. A store or
        disk error is no fault of the request; it is raised so that the worker tries again.
        """
        if (
            isinstance(error, BackendError | OSError)
            and self._num_attempts.setdefault(request.request_id, 1) < MAX_ATTEMPTS
        ):
            self._num_attempts[request.request_id] += 1
            raise error
        if not isinstance(error, ServiceError):
            log.exception(
                "%s %s of %s", request.kind, request.request_id, request.target, exc_info=error
            )
            error = ServiceError(f"{type(error).__name__}: {format_first_line(error)}", "server")
        creates = request.kind in ("create_model", "load_weights")
        if creates or (
            request.kind in ("forward_backward", "optim_step") and error.category == "server"
        ):
            self._runs.drop_run(request.target)
        run = {"state": "failed"} if creates and request.seq == 0 else {}
        return RequestOutcome(request_id=request.request_id, answer=error, run=run)
