"""Requests computed by the engine, step by step of a round; every step's answers are stored in one transaction."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from flows.service.commands import (
    Command,
    LoadWeights,
    ModelMade,
    ModelUnloaded,
    OpenSampler,
    Result,
    SamplerOpened,
    SaveForSampler,
    SaveWeights,
    UnloadModel,
    WeightsSaved,
)
from flows.service.store import Answer, StoredRequest
from flows.service.store.records import line_of
from flows.service.store.work import RequestOutcome
from flows.service.wire.decoding import decode
from flows.service.wire.encoding import encode
from flows.service.wire.tinker_paths import is_path
from flows.service.worker.live_runs import LiveRuns
from flows.service.worker.live_samplers import LiveSamplers
from flows.service.worker.rounds import Round
from flows.service.worker.run_metrics import RunMetrics
from flows.service.worker.weights_on_disk import model_facts
from flows.service.worker.worker_parts import WorkerParts
from rl_core.errors import BackendError, ServiceError
from rl_core.memory import first_line
from rl_core.service.answers import ForwardBackwardResult, OptimStepResult
from rl_core.service.evaluation_requests import EvaluateRequest
from rl_core.service.requests import CreateModel
from rl_core.storage.faults import fault

__all__ = ["Computing"]

log = logging.getLogger(__name__)

MOST_TRIES = 5  # then a request fails, and the others go on
# Kills from outside hit any request, some again and again; one that takes all memory ends every worker.
MOST_DEATHS = 24


class Computing:
    """Engine, runs and samplers in memory, and the store that gets the answers."""

    def __init__(self, parts: WorkerParts, runs: LiveRuns, samplers: LiveSamplers, metrics: RunMetrics) -> None:
        self._engine, self._store, self._folder, self._weights = parts.engine, parts.store, parts.folder, parts.weights
        self._runs, self._samplers, self._metrics = runs, samplers, metrics
        self._tries: dict[str, int] = {}  # of requests that met a refusal

    def compute(self, chosen: Round, is_stopping: Callable[[], bool]) -> int:
        """One round; the number of requests that have an answer now. Raises: BackendError, OSError of the store."""
        number = 0
        for request_id in chosen.single:
            if is_stopping():
                return number
            for request in self._store.claim([request_id]):
                if request.kind == "optim_step":  # one that is suspected of ending workers
                    self._updates([request])
                else:
                    self._single(request)
                number += 1
        groups = (chosen.updates, self._updates), (chosen.passes, self._passes), (chosen.samples, self._samples)
        for ids, step in groups:
            if ids and not is_stopping():
                place = {request_id: index for index, request_id in enumerate(ids)}
                requests = sorted(self._store.claim(ids), key=lambda request: place[request.request_id])
                step(requests)
                number += len(requests)
        self._runs.save_due()
        return number

    # -- one by one ----------------------------------------------------------------------------------------------------

    def _single(self, request: StoredRequest) -> None:
        try:
            self._store.sync()  # no folder may be ahead of the requests and answers in the store
            outcome = self._outcome(request)
        except Exception as error:
            outcome = self._failed(request, error)
        self._finish([(request, outcome)], synced=True)  # with folders that come and go
        if isinstance(outcome.answer, ServiceError):
            return
        if request.kind == "load_weights":
            self._runs.save(request.target)  # the path may go: replay must not need it
        elif request.kind == "unload_model":
            self._weights.remove(self._folder.snapshots(request.target))
        elif "published" in outcome.run:
            self._weights.remove_siblings(self._folder.absolute(outcome.run["published"]))

    def _outcome(self, request: StoredRequest) -> RequestOutcome:
        """A request that is computed by itself. Raises: ServiceError."""
        command = self._decoded(request)
        if isinstance(command, CreateModel):
            self._runs.make_room({request.target})
            self._runs.drop(request.target)
            self._engine.create_model(command)
            self._runs.made(request.target, request.seq)
            return self._answered(request, ModelMade(model_id=request.target), run=self._birth(request.target))
        if isinstance(command, UnloadModel):
            self._runs.drop(request.target)
            return self._answered(request, ModelUnloaded(model_id=request.target), run={"state": "unloaded"})
        if isinstance(command, OpenSampler):
            row = self._samplers.open(command, request)
            return self._answered(request, SamplerOpened(sampler_id=request.target), rows=(("samplers", row),))
        if isinstance(command, LoadWeights):
            return self._loaded(command, request)
        if isinstance(command, EvaluateRequest):
            return self._answered(request, self._engine.evaluate(self._with_folders(command, request.owner)))
        self._runs.need(request.target)
        if isinstance(command, SaveForSampler) and command.sampler_id is not None:
            row, run = self._samplers.publish(command, request)
            answer = SamplerOpened(sampler_id=command.sampler_id)
            return self._answered(request, answer, run=run, rows=(("samplers", row),))
        assert isinstance(command, SaveWeights | SaveForSampler), request.kind
        if command.path is not None:
            self._samplers.release(command.path)
        saved = self._weights.save(command, request.owner, request.facts, lambda: self._latest(request.target))
        return self._answered(request, WeightsSaved(path=saved.path), rows=(("checkpoints", asdict(saved)),))

    def _with_folders(self, command: EvaluateRequest, owner: str) -> EvaluateRequest:
        """With the folders of the saved weights that it names. Raises: ServiceError (user)."""
        paths = [name for name in (command.model, command.against) if name is not None and is_path(name)]
        return replace(command, folders={path: str(self._weights.folder_of(path, owner)) for path in paths})

    def _loaded(self, command: LoadWeights, request: StoredRequest) -> RequestOutcome:
        if request.seq == 0:
            self._runs.make_room({request.target})
            self._runs.drop(request.target)
            answer = self._weights.load(command, request.owner)
            self._runs.made(request.target, request.seq)
            return self._answered(request, answer, run=self._birth(request.target))
        self._runs.need(request.target)
        answer = self._weights.load(command, request.owner)
        return self._answered(request, answer, run={"steps": self._engine.model_info(request.target).steps})

    def _birth(self, model_id: str) -> dict[str, Any]:
        info = self._engine.model_info(model_id)
        return {"state": "live", "base": info.base, "steps": info.steps, "info": model_facts(self._engine, model_id)}

    def _latest(self, model_id: str) -> Path:
        """Folder of a snapshot of the run as it is now."""
        if not self._runs.save(model_id):
            raise ServiceError(f"{model_id}: its state could not be written", "server")
        return self._folder.snapshots(model_id)

    # -- together ------------------------------------------------------------------------------------------------------

    def _updates(self, requests: Sequence[StoredRequest]) -> None:
        """Updates of several runs, one of each."""

        def outcome(request: StoredRequest, answer: OptimStepResult, seconds: float) -> RequestOutcome:
            steps = self._engine.model_info(request.target).steps
            self._metrics.stepped(request.target, answer.metrics, steps, seconds / len(requests))
            return self._answered(request, answer, run={"steps": steps})

        self._together(requests, self._runs.need, self._engine.optim_steps, outcome)

    def _passes(self, requests: Sequence[StoredRequest]) -> None:
        """Forward and backward passes of several runs."""

        def outcome(request: StoredRequest, answer: ForwardBackwardResult, seconds: float) -> RequestOutcome:
            self._metrics.passed(request.target, answer.metrics, seconds)
            return self._answered(request, answer)

        self._together(requests, self._runs.need, self._engine.forward_backward, outcome)

    def _samples(self, requests: Sequence[StoredRequest]) -> None:
        """Samples of several samplers."""

        def outcome(request: StoredRequest, answer: Result, seconds: float) -> RequestOutcome:
            return self._answered(request, answer)

        self._together(requests, self._samplers.need, self._engine.sample, outcome)

    def _together(
        self,
        requests: Sequence[StoredRequest],
        need: Callable[[str, set[str]], None],
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
                command: Any = self._decoded(request)
                need(request.target, targets)
                given.append((request, command))
            except Exception as error:
                outcomes[request.request_id] = self._failed(request, error)
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
                outcomes[request.request_id] = self._failed(request, error)
        self._finish([(request, outcomes[request.request_id]) for request in requests], synced=False)

    # -- outcomes ------------------------------------------------------------------------------------------------------

    def _finish(self, pairs: Sequence[tuple[StoredRequest, RequestOutcome]], *, synced: bool) -> None:
        fault("service.computed")
        self._store.finish([outcome for _, outcome in pairs], synced=synced)
        for request, _ in pairs:
            if line_of(request.kind) == "training":
                self._runs.noted(request.target, request.seq, stepped=request.kind == "optim_step")

    @staticmethod
    def _decoded(request: StoredRequest) -> Command:
        if request.deaths >= MOST_DEATHS:
            raise ServiceError(
                f"{request.deaths} workers ended while they computed this request, perhaps for want of memory; send "
                "less at once",
                "server",
            )
        return decode(request.kind, request.payload, request.content_type, request.facts, request.target)

    @staticmethod
    def _answered(request: StoredRequest, result: Result, **more: Any) -> RequestOutcome:
        body, content_type = encode(request.kind, result, request.payload)
        return RequestOutcome(request_id=request.request_id, answer=Answer(body, content_type), **more)

    def _failed(self, request: StoredRequest, error: Exception) -> RequestOutcome:
        """A failed request. What may have changed its run in part has not happened: the run comes back as before.

        A store or disk that refuses is no fault of the request: it is raised, so that the worker tries again.
        """
        if isinstance(error, BackendError | OSError) and self._tries.setdefault(request.request_id, 1) < MOST_TRIES:
            self._tries[request.request_id] += 1
            raise error
        if not isinstance(error, ServiceError):
            log.exception("%s %s of %s", request.kind, request.request_id, request.target, exc_info=error)
            error = ServiceError(f"{type(error).__name__}: {first_line(error)}", "server")
        makes = request.kind in ("create_model", "load_weights")
        if makes or (request.kind in ("forward_backward", "optim_step") and error.category == "server"):
            self._runs.drop(request.target)
        run = {"state": "failed"} if makes and request.seq == 0 else {}
        return RequestOutcome(request_id=request.request_id, answer=error, run=run)
