"""Training engine: training runs and samplers over base models, driven by requests of plain data.

Only one thread may call it. Errors in a request are `ServiceError`s; each of several requests gets its own result, and
an error in one does not affect the others.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rl_core.cpu.allocator import keep_freed_memory
from rl_core.cpu.openmp_spin import limit_openmp_spin
from rl_core.errors import (
    CheckpointError,
    DataError,
    ModelError,
    PosttrainError,
    ServiceError,
    suggest_name,
)
from rl_core.out_of_memory import format_first_line
from rl_core.service.base_model import SharedBaseModel
from rl_core.service.model_evaluation import BaseModelReader, EvaluatedModel, evaluate_models
from rl_core.service.optimizer_updates import step_runs_within_kl_limits
from rl_core.service.pass_planner import run_jobs, split_into_parts
from rl_core.service.reference_models import ServiceReferenceModels, add_reference_logprobs
from rl_core.service.request_checks import (
    EvaluateRequest,
    check_adam,
    check_adapter,
    check_forward_backward,
    check_sample,
)
from rl_core.service.requests import (
    CreateModel,
    CreateSampler,
    ForwardBackward,
    OptimizerKind,
    OptimStep,
    SampleRequest,
    ScoreRequest,
)
from rl_core.service.responses import ModelEvaluation, ReferenceScores
from rl_core.service.results import (
    BaseInfo,
    ForwardBackwardResult,
    ModelInfo,
    OptimStepResult,
    SampleResult,
)
from rl_core.service.samplers import (
    PublishedWeights,
    SampleJob,
    Sampler,
    SamplerWeights,
    run_sample_jobs,
)
from rl_core.service.saved_weights import (
    build_create_request,
    export_model,
    export_peft,
    extract_sampling_state,
    read_state,
    write_state,
)
from rl_core.service.training_run import TrainingRun
from rl_core.settings import ReferenceSettings, ServiceEngineSettings

logger = logging.getLogger(__name__)


class TrainingEngine:
    """All training runs and samplers of one process."""

    def __init__(
        self,
        settings: ServiceEngineSettings,
        references: ReferenceSettings | None = None,
        reference_models: Mapping[str, Any] | None = None,
        reward_models: Mapping[str, Any] | None = None,
    ) -> None:
        """Prepare an engine without models.

        Args:
            reference_models: frozen models in addition to the bases, name -> model folder or hub name.
            reward_models: frozen reward models, likewise.
        """
        keep_freed_memory()
        limit_openmp_spin()
        self.settings = settings
        self.references = ServiceReferenceModels(
            reference_models or {}, references or ReferenceSettings(), settings, reward_models
        )
        self._bases: dict[str, SharedBaseModel] = {}
        self._runs: dict[str, TrainingRun] = {}
        self._samplers: dict[str, Sampler] = {}
        self._published: dict[str, PublishedWeights] = {}  # by run

    def base_info(self, name: str) -> BaseInfo:
        """Describe a base model, loading it if necessary. Raises: ServiceError."""
        return self._load_base_model(name).info

    def create_model(self, request: CreateModel) -> ModelInfo:
        """Create a training run. Raises: ServiceError."""
        self._check_new_name(
            request.model_id, self._runs, self.settings.max_runs, "model", "max_runs"
        )
        if request.optimizer not in ("adamw", "muon"):
            raise ServiceError(f"optimizer: '{request.optimizer}', expected adamw or muon", "user")
        if request.adapter is not None:
            check_adapter(request.adapter, self.settings)
        elif self.settings.dtype != "float32":
            raise ServiceError(
                "training all weights needs base models in float32 (dtype); train an adapter",
                "user",
            )
        run = TrainingRun(request, self._load_base_model(request.base))
        self._runs[request.model_id] = run
        return run.info

    def unload_model(self, model_id: str) -> None:
        """Remove a run; its samplers keep their weights. Raises: ServiceError if it does not exist."""
        self._find_run(model_id).base.router.clear_routes()
        del self._runs[model_id]
        self._published.pop(model_id, None)

    def model_info(self, model_id: str) -> ModelInfo:
        """Describe a training run. Raises: ServiceError if it does not exist."""
        return self._find_run(model_id).info

    def forward_backward(
        self, requests: Sequence[ForwardBackward]
    ) -> list[ForwardBackwardResult | ServiceError]:
        """Return results in order. Requests of one run are computed in their order, those of several runs together.

        Neither a request's results nor the gradient that it adds to its run depend on the other requests.
        """
        results: dict[int, ForwardBackwardResult | ServiceError] = {}
        jobs = {}
        for index, request in enumerate(requests):
            try:
                run = self._find_run(request.model_id)
                checked = check_forward_backward(request, run.base.limits, self.settings)
                max_tokens = self.settings.micro_batch_tokens
                checked = add_reference_logprobs(run, checked, self.references, max_tokens)
                jobs[index] = split_into_parts(run, request, checked, max_tokens)
            except ServiceError as error:
                results[index] = error
        run_jobs(list(jobs.values()), self.settings)
        for index, job in jobs.items():
            results[index] = job.build_result()
        return [results[index] for index in range(len(requests))]

    def optim_step(self, request: OptimStep) -> OptimStepResult:
        """Update a run by the gradient accumulated so far. Raises: ServiceError."""
        (metrics,) = step_runs_within_kl_limits([self._check_optim_step(request)], [request])
        if isinstance(metrics, Exception):
            raise metrics
        return OptimStepResult(metrics=metrics)

    def optim_steps(self, requests: Sequence[OptimStep]) -> list[OptimStepResult | ServiceError]:
        """Update several runs; return results in order."""
        results: dict[int, OptimStepResult | ServiceError] = {}
        runs: dict[int, TrainingRun] = {}
        for index, request in enumerate(requests):
            try:
                runs[index] = self._check_optim_step(request)
            except ServiceError as error:
                results[index] = error
        checked_requests = [requests[index] for index in runs]
        outcomes = step_runs_within_kl_limits(list(runs.values()), checked_requests)
        for index, outcome in zip(runs, outcomes, strict=True):
            if not isinstance(outcome, Exception):
                results[index] = OptimStepResult(metrics=outcome)
                continue
            if not isinstance(outcome, ServiceError):
                model_id = requests[index].model_id
                logger.error("optim_step of %s failed", model_id, exc_info=outcome)
            results[index] = _convert_to_service_error(outcome)
        return [results[index] for index in range(len(requests))]

    def _check_optim_step(self, request: OptimStep) -> TrainingRun:
        """Check a request and return its run. Raises: ServiceError."""
        run = self._find_run(request.model_id)
        check_adam(request.adam, request.muon_momentum)
        if request.optimizer not in (None, run.optimizer_kind):
            raise ServiceError(
                f"optim_step: the parameters are for {request.optimizer}, but the run was created with "
                f"{run.optimizer_kind}; send parameters of that optimizer",
                "user",
            )
        return run

    def state_dict(self, model_id: str) -> dict[str, Any]:
        """Return everything that a run's later results depend on. Raises: ServiceError."""
        return self._find_run(model_id).state_dict()

    def restore_model(self, model_id: str, state: Mapping[str, Any]) -> ModelInfo:
        """Restore a run from its state, replacing any run with this id. Raises: ServiceError."""
        previous = self._runs.pop(model_id, None)
        if previous is not None:
            previous.base.router.clear_routes()
        self.create_model(build_create_request(state, model_id))
        self._load_run_state(model_id, state, optimizer=True, gradient=True)
        return self.model_info(model_id)

    def save_weights(
        self, model_id: str, folder: str | Path, metadata: Mapping[str, Any] | None = None
    ) -> None:
        """Write a run's complete state (see `state_dict`), with the caller's metadata. Raises: ServiceError."""
        state = self._find_run(model_id).state_dict() | {"note": dict(metadata or {})}
        self._write_state(folder, state)

    def load_weights(
        self,
        model_id: str,
        folder: str | Path,
        *,
        optimizer: bool,
        kind: OptimizerKind | None = None,
    ) -> ModelInfo:
        """Load saved weights, and the optimizer's moments if requested; the accumulated gradient is discarded.

        A run that does not exist is created like the saved one. Raises: ServiceError.
        Args:
            optimizer: load the moments.
            kind: optimizer of a new run if the moments are not loaded.
        """
        state = self._read_state(folder)
        if model_id not in self._runs:
            request = build_create_request(state, model_id)
            if kind is not None and not optimizer:
                request = dataclasses.replace(request, optimizer=kind)
            self.create_model(request)
        self._load_run_state(model_id, state, optimizer=optimizer, gradient=False)
        return self.model_info(model_id)

    def read_saved_metadata(self, folder: str | Path) -> dict[str, Any]:
        """Return the metadata that was saved with weights. Raises: ServiceError."""
        metadata: dict[str, Any] = self._read_state(folder).get("note", {})
        return metadata

    def save_sampler_weights(self, model_id: str, folder: str | Path) -> None:
        """Write the part of a run's state that samplers need. Raises: ServiceError."""
        self._write_state(folder, extract_sampling_state(self._find_run(model_id).state_dict()))

    def export(self, source: str | Path, folder: str | Path, *, peft: bool = False) -> None:
        """Export saved weights as a Hugging Face model folder or as a peft adapter. Raises: ServiceError."""
        state = self._read_state(source)
        base = self._load_base_model(state["run"]["base"])
        export = export_peft if peft else export_model
        try:
            export(base, state, folder)
        except CheckpointError as error:
            raise ServiceError(str(error), "server") from error

    def create_sampler(self, request: CreateSampler) -> BaseInfo:
        """Create a sampler and return its base model. Raises: ServiceError."""
        self._check_new_name(
            request.sampler_id,
            self._samplers,
            self.settings.max_samplers,
            "sampler",
            "max_samplers",
        )
        weights = self._load_sampler_weights(request)
        source: SamplerWeights | PublishedWeights = weights
        if request.kind == "inflight":
            source = self._published.setdefault(str(request.model_id), PublishedWeights(weights))
            source.newest = weights
        self._samplers[request.sampler_id] = Sampler(request.sampler_id, weights.base, source)
        return weights.base.info

    def _load_sampler_weights(self, request: CreateSampler) -> SamplerWeights:
        """Load the base model and weights of a new sampler."""
        fields = ("base", "model_id", "folder")
        sources = [name for name in fields if getattr(request, name) is not None]
        if request.kind == "inflight" and sources not in (["model_id"], ["model_id", "folder"]):
            raise ServiceError(
                "create_sampler: inflight needs model_id, and may have folder", "user"
            )
        if request.kind != "inflight" and len(sources) != 1:
            raise ServiceError(
                "create_sampler: give exactly one of base, model_id and folder", "user"
            )
        if request.folder is not None:
            state = extract_sampling_state(self._read_state(request.folder))
        elif request.model_id is not None:
            state = extract_sampling_state(self._find_run(request.model_id).state_dict())
        else:
            return SamplerWeights(self._load_base_model(str(request.base)))
        return SamplerWeights(self._load_base_model(state["run"]["base"]), state)

    def unload_sampler(self, sampler_id: str) -> None:
        """Remove a sampler. Raises: ServiceError if it does not exist."""
        self._find_sampler(sampler_id)
        del self._samplers[sampler_id]

    def sample(self, requests: Sequence[SampleRequest]) -> list[SampleResult | ServiceError]:
        """Return results in order.

        A request's samples depend only on its sampler's weights, its prompt, parameters and seed.
        """
        results: dict[int, SampleResult | ServiceError] = {}
        jobs: dict[int, SampleJob] = {}
        for index, request in enumerate(requests):
            try:
                sampler = self._find_sampler(request.sampler_id)
                prompt = check_sample(request, sampler.base.limits, self.settings)
                jobs[index] = SampleJob(sampler, request, prompt)
            except ServiceError as error:
                results[index] = error
        outcomes = run_sample_jobs(list(jobs.values()), self.settings.slots)
        for index, outcome in zip(jobs, outcomes, strict=True):
            if isinstance(outcome, Exception):
                results[index] = _convert_to_service_error(outcome)
            else:
                results[index] = outcome
        return [results[index] for index in range(len(requests))]

    def evaluate(self, request: EvaluateRequest) -> ModelEvaluation:
        """Score a model on texts and by its samples, optionally against another; training is unaffected.

        Raises: ServiceError.
        """
        request.check_limits(self.settings)
        model = self._load_evaluated_model(request.model, request)
        against = None
        if request.against is not None:
            against = self._load_evaluated_model(request.against, request, model.base)
        try:
            return evaluate_models(request, model, against, self.settings)
        except (PosttrainError, RuntimeError) as error:
            raise _convert_to_service_error(error) from error

    def score_rows(self, request: ScoreRequest) -> ReferenceScores:
        """Score rows by a reference or reward model. Raises: as `ServiceReferenceModels.score_rows`."""
        return self.references.score_rows(request)

    def _load_evaluated_model(
        self, name: str, request: EvaluateRequest, comparison_base: SharedBaseModel | None = None
    ) -> EvaluatedModel:
        """Load a model by name: saved weights, a base model, or (only for comparison) a reference model."""
        if name in request.folders:
            state = extract_sampling_state(self._read_state(request.folders[name]))
            base = self._load_base_model(state["run"]["base"])
            source = SamplerWeights(base, state)
        elif name in self.settings.bases:
            base = self._load_base_model(name)
            source = SamplerWeights(base)
        elif name in self.references.paths and comparison_base is not None:
            limits = self.references.read_limits(name, comparison_base)
            reference_reader = self.references.create_reader(name)
            return EvaluatedModel(name, comparison_base, limits, reference_reader, None)
        else:
            known, kinds = [*self.settings.bases], "base"
            if comparison_base is not None:
                known, kinds = [*known, *self.references.paths], "base or reference"
            raise ServiceError(
                f"evaluate: there is no {kinds} model '{name[:200]}'; {suggest_name(name, known)}",
                "user",
            )
        reader = BaseModelReader(base, source.merge_weights())
        return EvaluatedModel(name, base, base.limits, reader, Sampler(name, base, source))

    def _load_base_model(self, name: str) -> SharedBaseModel:
        if name not in self._bases:
            if name not in self.settings.bases:
                raise ServiceError(
                    f"base_model: there is no '{name}' here; {suggest_name(name, self.settings.bases)}",
                    "user",
                )
            path = str(self.settings.bases[name])
            try:
                self._bases[name] = SharedBaseModel(name, path, self.settings)
            except (CheckpointError, ModelError) as error:
                raise ServiceError(str(error), "server") from error
        return self._bases[name]

    def _find_run(self, model_id: str) -> TrainingRun:
        if model_id not in self._runs:
            raise ServiceError(f"model_id: there is no training run '{model_id}'", "user")
        return self._runs[model_id]

    def _find_sampler(self, sampler_id: str) -> Sampler:
        if sampler_id not in self._samplers:
            raise ServiceError(f"sampler_id: there is no sampler '{sampler_id}'", "user")
        return self._samplers[sampler_id]

    @staticmethod
    def _check_new_name(
        name: str, known: Mapping[str, Any], max_count: int, noun: str, setting: str
    ) -> None:
        if name in known:
            raise ServiceError(f"{noun}_id: '{name}' exists already", "user")
        if len(known) >= max_count:
            raise ServiceError(
                f"{len(known)} {noun}s are in memory ({setting}); unload some", "server"
            )

    def _load_run_state(
        self, model_id: str, state: Mapping[str, Any], *, optimizer: bool, gradient: bool
    ) -> None:
        run = self._find_run(model_id)
        if state["run"]["base"] != run.base.name:
            raise ServiceError(
                f"the saved weights are of base model '{state['run']['base']}', the run is of '{run.base.name}'",
                "user",
            )
        try:
            run.load_state_dict(state, optimizer=optimizer, gradient=gradient)
        except CheckpointError as error:
            raise ServiceError(str(error), "user") from error

    @staticmethod
    def _read_state(folder: str | Path) -> dict[str, Any]:
        try:
            return read_state(folder)
        except CheckpointError as error:
            raise ServiceError(str(error), "user") from error

    @staticmethod
    def _write_state(folder: str | Path, state: Mapping[str, Any]) -> None:
        try:
            write_state(folder, state)
        except PosttrainError as error:
            raise ServiceError(str(error), "server") from error


def _convert_to_service_error(error: Exception) -> ServiceError:
    if isinstance(error, ServiceError):
        return error
    message = format_first_line(error)
    return ServiceError(message, "user" if isinstance(error, DataError) else "server")
