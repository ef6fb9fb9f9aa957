"""Choice of what is computed together, from the requests that are ready.

A round: of every run the next request that is no forward_backward, and new samplers, updates of all runs together;
then every run's next forward_backwards in one batch; then samples in one batch. So the runs' passes fall together
although each is at another point of its loop, and training and sampling take turns.

Requests computed by the engine, step by step of a round; every step's answers are stored in one transaction.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
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
from posttrain.training_service.store.work_queue import ReadyRequest, RequestOutcome
from posttrain.training_service.wire.codec import decode_request, encode_result
from posttrain.training_service.worker.loaded_runs import LoadedRuns
from posttrain.training_service.worker.loaded_samplers import LoadedSamplers
from posttrain.training_service.worker.run_tracking import RunMetrics
from posttrain.training_service.worker.saved_weights import WorkerContext, describe_model
from rl_core.errors import BackendError, ServiceError
from rl_core.out_of_memory import format_first_line
from rl_core.service.request_checks import EvaluateRequest
from rl_core.service.requests import CreateModel
from rl_core.service.results import ForwardBackwardResult, OptimStepResult
from rl_core.storage.faults import inject_fault

BATCH_BYTES = 64 << 20  # payloads of one batch; the engine cuts passes by itself
DEATHS_BEFORE_ISOLATION = (
    3  # deaths of workers after which a request is computed by itself: it may be the reason
)


@dataclass(slots=True)
class ExecutionRound:
    """Request ids of the four steps, each in the order of acceptance."""

    single: list[str] = field(default_factory=list)  # computed one by one
    updates: list[str] = field(default_factory=list)  # optim_step, together
    passes: list[str] = field(default_factory=list)  # forward_backward, together
    samples: list[str] = field(default_factory=list)  # together


def select_round(ready: Iterable[ReadyRequest], max_requests: int, max_runs: int) -> ExecutionRound:
    """One round.

    Args:
        ready: in the order of acceptance; of each run without holes (`Work.ready`).
        most: requests of a batch. most_runs: runs that fit into memory.
    """
    chains: dict[str, list[ReadyRequest]] = {}
    found, samples = ExecutionRound(), []
    for one in ready:
        if resolve_request_line(one.kind) == "training":
            chains.setdefault(one.target, []).append(one)
        elif one.kind == "sample":
            samples.append(one)
        else:
            found.single.append(one.request_id)
    passes: list[ReadyRequest] = []
    for chain in list(chains.values())[:max_runs]:
        chain.sort(key=lambda one: one.seq)
        start = 0
        if chain[0].kind != "forward_backward":
            is_update = chain[0].kind == "optim_step" and chain[0].deaths < DEATHS_BEFORE_ISOLATION
            (found.updates if is_update else found.single).append(chain[0].request_id)
            start = 1
        for one in chain[start:]:
            if one.kind != "forward_backward":
                break
            passes.append(one)
    found.passes = _limit_batch(_sort_by_turn(passes), max_requests)
    found.samples = _limit_batch(samples, max_requests)
    return found


def _sort_by_turn(passes: Sequence[ReadyRequest]) -> list[ReadyRequest]:
    """The first of every run, then the second of every run, and so on: a long queue of one keeps none from its turn."""
    turns: dict[str, int] = {}
    ranked = []
    for one in passes:
        turns[one.target] = turns.get(one.target, -1) + 1
        ranked.append((turns[one.target], one.place, one))
    return [one for _, _, one in sorted(ranked, key=lambda entry: entry[:2])]


def _limit_batch(requests: Sequence[ReadyRequest], max_requests: int) -> list[str]:
    """As many as a batch may hold, one at least; suspects one by one."""
    found: list[str] = []
    size = 0
    for one in requests[:max_requests]:
        size += one.size
        if found and (size > BATCH_BYTES or one.deaths >= DEATHS_BEFORE_ISOLATION):
            break
        found.append(one.request_id)
        if one.deaths >= DEATHS_BEFORE_ISOLATION:
            break
    return found


log = logging.getLogger(__name__)

MAX_ATTEMPTS = 5  # then a request fails, and the others go on
# Kills from outside hit any request, some again and again; one that takes all memory ends every worker.
MAX_WORKER_DEATHS = 24


class RequestExecutor:
    """Engine, runs and samplers in memory, and the store that gets the answers."""

    def __init__(
        self,
        context: WorkerContext,
        runs: LoadedRuns,
        samplers: LoadedSamplers,
        metrics: RunMetrics,
    ) -> None:
        self._engine, self._store, self._folder, self._weights = (
            context.engine,
            context.store,
            context.folder,
            context.weights,
        )
        self._runs, self._samplers, self._metrics = runs, samplers, metrics
        self._num_attempts: dict[str, int] = {}  # of requests that met a refusal

    def execute_round(self, selected: ExecutionRound, is_stopping: Callable[[], bool]) -> int:
        """One round; the number of requests that have an answer now. Raises: BackendError, OSError of the store."""
        number = 0
        for request_id in selected.single:
            if is_stopping():
                return number
            for request in self._store.claim_requests([request_id]):
                if request.kind == "optim_step":  # one that is suspected of ending workers
                    self._execute_updates([request])
                else:
                    self._execute_single(request)
                number += 1
        groups = (
            (selected.updates, self._execute_updates),
            (selected.passes, self._execute_passes),
            (selected.samples, self._execute_samples),
        )
        for ids, step in groups:
            if ids and not is_stopping():
                place = {request_id: index for index, request_id in enumerate(ids)}
                requests = sorted(
                    self._store.claim_requests(ids), key=lambda request: place[request.request_id]
                )
                step(requests)
                number += len(requests)
        self._runs.save_due_snapshots()
        return number

    # -- one by one ----------------------------------------------------------------------------------------------------

    def _execute_single(self, request: StoredRequest) -> None:
        try:
            self._store.sync_to_disk()  # no folder may be ahead of the requests and answers in the store
            outcome = self._execute_command(request)
        except Exception as error:
            outcome = self._build_failed_outcome(request, error)
        self._finish_requests([(request, outcome)], synced=True)  # with folders that come and go
        if isinstance(outcome.answer, ServiceError):
            return
        if request.kind == "load_weights":
            self._runs.save_snapshot(request.target)  # the path may go: replay must not need it
        elif request.kind == "unload_model":
            self._weights.delete_folder(self._folder.resolve_snapshot_folder(request.target))
        elif "published" in outcome.run:
            self._weights.delete_sibling_folders(
                self._folder.to_absolute_path(outcome.run["published"])
            )

    def _execute_command(self, request: StoredRequest) -> RequestOutcome:
        """A request that is computed by itself. Raises: ServiceError."""
        command = self._decode_command(request)
        if isinstance(command, CreateModel):
            self._runs.evict_unused_runs({request.target})
            self._runs.drop_run(request.target)
            self._engine.create_model(command)
            self._runs.add_new_run(request.target, request.seq)
            return self._build_outcome(
                request,
                ModelCreated(model_id=request.target),
                run=self._describe_new_run(request.target),
            )
        if isinstance(command, UnloadModel):
            self._runs.drop_run(request.target)
            return self._build_outcome(
                request, ModelUnloaded(model_id=request.target), run={"state": "unloaded"}
            )
        if isinstance(command, OpenSampler):
            row = self._samplers.open_sampler(command, request)
            return self._build_outcome(
                request, SamplerOpened(sampler_id=request.target), rows=(("samplers", row),)
            )
        if isinstance(command, LoadWeights):
            return self._execute_load(command, request)
        if isinstance(command, EvaluateRequest):
            return self._build_outcome(
                request, self._engine.evaluate(self._resolve_model_folders(command, request.owner))
            )
        self._runs.ensure_loaded(request.target)
        if isinstance(command, SaveForSampler) and command.sampler_id is not None:
            row, run = self._samplers.publish_sampler(command, request)
            answer = SamplerOpened(sampler_id=command.sampler_id)
            return self._build_outcome(request, answer, run=run, rows=(("samplers", row),))
        assert isinstance(command, SaveWeights | SaveForSampler), request.kind
        if command.path is not None:
            self._samplers.detach_samplers(command.path)
        saved = self._weights.save_weights(
            command,
            request.owner,
            request.facts,
            lambda: self._save_latest_snapshot(request.target),
        )
        return self._build_outcome(
            request, WeightsSaved(path=saved.path), rows=(("checkpoints", asdict(saved)),)
        )

    def _resolve_model_folders(self, command: EvaluateRequest, owner: str) -> EvaluateRequest:
        """With the folders of the saved weights that it names. Raises: ServiceError (user)."""
        paths = [
            name
            for name in (command.model, command.against)
            if name is not None and is_tinker_path(name)
        ]
        return replace(
            command,
            folders={path: str(self._weights.resolve_folder(path, owner)) for path in paths},
        )

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
        """Folder of a snapshot of the run as it is now."""
        if not self._runs.save_snapshot(model_id):
            raise ServiceError(f"{model_id}: its state could not be written", "server")
        return self._folder.resolve_snapshot_folder(model_id)

    # -- together ------------------------------------------------------------------------------------------------------

    def _execute_updates(self, requests: Sequence[StoredRequest]) -> None:
        """Updates of several runs, one of each."""

        def outcome(
            request: StoredRequest, answer: OptimStepResult, seconds: float
        ) -> RequestOutcome:
            steps = self._engine.model_info(request.target).steps
            self._metrics.record_step(
                request.target, answer.metrics, steps, seconds / len(requests)
            )
            return self._build_outcome(request, answer, run={"steps": steps})

        self._execute_batch(requests, self._runs.ensure_loaded, self._engine.optim_steps, outcome)

    def _execute_passes(self, requests: Sequence[StoredRequest]) -> None:
        """Forward and backward passes of several runs."""

        def outcome(
            request: StoredRequest, answer: ForwardBackwardResult, seconds: float
        ) -> RequestOutcome:
            self._metrics.record_pass(request.target, answer.metrics, seconds)
            return self._build_outcome(request, answer)

        self._execute_batch(
            requests, self._runs.ensure_loaded, self._engine.forward_backward, outcome
        )

    def _execute_samples(self, requests: Sequence[StoredRequest]) -> None:
        """Samples of several samplers."""

        def outcome(request: StoredRequest, answer: Result, seconds: float) -> RequestOutcome:
            return self._build_outcome(request, answer)

        self._execute_batch(requests, self._samplers.ensure_loaded, self._engine.sample, outcome)

    def _execute_batch(
        self,
        requests: Sequence[StoredRequest],
        ensure_loaded: Callable[[str, set[str]], None],
        compute: Callable[[list[Any]], Sequence[Any]],
        outcome: Callable[[StoredRequest, Any, float], RequestOutcome],
    ) -> None:
        """Give what is valid to the engine in one call, and store all answers in one transaction.

        Args:
            need: has a target in memory, while the others stay there.
            outcome: of a request, its answer, and the seconds of the call.
        """
        targets = {request.target for request in requests}
        outcomes: dict[str, RequestOutcome] = {}
        given: list[tuple[StoredRequest, Any]] = []
        for request in requests:
            try:
                command: Any = self._decode_command(request)
                ensure_loaded(request.target, targets)
                given.append((request, command))
            except Exception as error:
                outcomes[request.request_id] = self._build_failed_outcome(request, error)
        begun = time.perf_counter()
        try:
            answers = compute([command for _, command in given]) if given else []
        except Exception as error:
            answers = [error] * len(given)
        seconds = time.perf_counter() - begun
        for (request, _), answer in zip(given, answers, strict=True):
            try:
                if isinstance(answer, Exception):
                    raise answer
                outcomes[request.request_id] = outcome(request, answer, seconds)
            except Exception as error:
                outcomes[request.request_id] = self._build_failed_outcome(request, error)
        self._finish_requests(
            [(request, outcomes[request.request_id]) for request in requests], synced=False
        )

    # -- outcomes ------------------------------------------------------------------------------------------------------

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
                f"{request.deaths} workers ended while they computed this request, perhaps for want of memory; send "
                "less at once",
                "server",
            )
        return decode_request(
            request.kind, request.payload, request.content_type, request.facts, request.target
        )

    @staticmethod
    def _build_outcome(request: StoredRequest, result: Result, **more: Any) -> RequestOutcome:
        body, content_type = encode_result(request.kind, result, request.payload)
        return RequestOutcome(
            request_id=request.request_id, answer=ResultBody(body, content_type), **more
        )

    def _build_failed_outcome(self, request: StoredRequest, error: Exception) -> RequestOutcome:
        """A failed request. What may have changed its run in part has not happened: the run comes back as before.

        A store or disk that refuses is no fault of the request: it is raised, so that the worker tries again.
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
        makes = request.kind in ("create_model", "load_weights")
        if makes or (
            request.kind in ("forward_backward", "optim_step") and error.category == "server"
        ):
            self._runs.drop_run(request.target)
        run = {"state": "failed"} if makes and request.seq == 0 else {}
        return RequestOutcome(request_id=request.request_id, answer=error, run=run)
