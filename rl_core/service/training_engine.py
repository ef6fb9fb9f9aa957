"""The training engine: training runs and samplers over base models, by requests of plain data.

One thread calls it. Faults of a request are `ServiceError`s; where several requests are given at once, each has its own
answer, and a fault of one leaves the others as they are.
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
)
from rl_core.service.responses import ModelEvaluation
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
    ) -> None:
        """`reference_models`: frozen models beside the bases, name -> model folder or hub name."""
        keep_freed_memory()
        limit_openmp_spin()
        self.settings = settings
        self.references = ServiceReferenceModels(
            reference_models or {}, references or ReferenceSettings(), settings
        )
        self._bases: dict[str, SharedBaseModel] = {}
        self._runs: dict[str, TrainingRun] = {}
        self._samplers: dict[str, Sampler] = {}
        self._published: dict[str, PublishedWeights] = {}  # by run

    # -- base models and runs ------------------------------------------------------------------------------------------

    def base_info(self, name: str) -> BaseInfo:
        """A base model, which is loaded if it is not yet. Raises: ServiceError."""
        return self._load_base_model(name).info

    def create_model(self, request: CreateModel) -> ModelInfo:
        """A new training run. Raises: ServiceError."""
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
        """Forget a run; its samplers keep their weights. Raises: ServiceError where there is none."""
        self._find_run(model_id).base.router.clear_routes()
        del self._runs[model_id]
        self._published.pop(model_id, None)

    def model_info(self, model_id: str) -> ModelInfo:
        """A training run. Raises: ServiceError where there is none."""
        return self._find_run(model_id).info

    # -- training ------------------------------------------------------------------------------------------------------

    def forward_backward(
        self, requests: Sequence[ForwardBackward]
    ) -> list[ForwardBackwardResult | ServiceError]:
        """Answers in order. Requests of one run are computed in their order, those of several runs together.

        A request's numbers do not depend on the others, nor does the gradient that it adds to its run's.
        """
        answers: dict[int, ForwardBackwardResult | ServiceError] = {}
        jobs = {}
        for index, request in enumerate(requests):
            try:
                run = self._find_run(request.model_id)
                checked = check_forward_backward(request, run.base.limits, self.settings)
                checked = add_reference_logprobs(
                    run, checked, self.references, self.settings.micro_batch_tokens
                )
                jobs[index] = split_into_parts(
                    run, request, checked, self.settings.micro_batch_tokens
                )
            except ServiceError as error:
                answers[index] = error
        run_jobs(list(jobs.values()), self.settings)
        for index, job in jobs.items():
            answers[index] = job.build_result()
        return [answers[index] for index in range(len(requests))]

    def optim_step(self, request: OptimStep) -> OptimStepResult:
        """One update by the gradient accumulated so far. Raises: ServiceError."""
        (answer,) = step_runs_within_kl_limits([self._check_optim_step(request)], [request])
        if isinstance(answer, Exception):
            raise answer
        return OptimStepResult(metrics=answer)

    def optim_steps(self, requests: Sequence[OptimStep]) -> list[OptimStepResult | ServiceError]:
        """Answers in order, to updates of several runs."""
        answers: dict[int, OptimStepResult | ServiceError] = {}
        runs: dict[int, TrainingRun] = {}
        for index, request in enumerate(requests):
            try:
                runs[index] = self._check_optim_step(request)
            except ServiceError as error:
                answers[index] = error
        found = step_runs_within_kl_limits(list(runs.values()), [requests[index] for index in runs])
        for index, answer in zip(runs, found, strict=True):
            if isinstance(answer, Exception):
                if not isinstance(answer, ServiceError):
                    logger.error(
                        "optim_step of %s failed", requests[index].model_id, exc_info=answer
                    )
                answers[index] = _convert_to_service_error(answer)
            else:
                answers[index] = OptimStepResult(metrics=answer)
        return [answers[index] for index in range(len(requests))]

    def _check_optim_step(self, request: OptimStep) -> TrainingRun:
        """The run of a checked request. Raises: ServiceError."""
        run = self._find_run(request.model_id)
        check_adam(request.adam, request.muon_momentum)
        if request.optimizer not in (None, run.optimizer_kind):
            raise ServiceError(
                f"optim_step: the parameters are of {request.optimizer}, and the run was made with "
                f"{run.optimizer_kind}; send those of its optimizer",
                "user",
            )
        return run

    # -- states --------------------------------------------------------------------------------------------------------

    def state_dict(self, model_id: str) -> dict[str, Any]:
        """All that a run's later results depend on. Raises: ServiceError."""
        return self._find_run(model_id).state_dict()

    def restore_model(self, model_id: str, state: Mapping[str, Any]) -> ModelInfo:
        """A run as it was when its state was taken, in place of one of this name. Raises: ServiceError."""
        if (before := self._runs.pop(model_id, None)) is not None:
            before.base.router.clear_routes()
        self.create_model(build_create_request(state, model_id))
        self._load_run_state(model_id, state, optimizer=True, gradient=True)
        return self.model_info(model_id)

    def save_weights(
        self, model_id: str, folder: str | Path, metadata: Mapping[str, Any] | None = None
    ) -> None:
        """Write a run's state (see `state_dict`), with the caller's note, as a whole. Raises: ServiceError."""
        self._write_state(
            folder, self._find_run(model_id).state_dict() | {"note": dict(metadata or {})}
        )

    def load_weights(
        self,
        model_id: str,
        folder: str | Path,
        *,
        optimizer: bool,
        kind: OptimizerKind | None = None,
    ) -> ModelInfo:
        """Take saved weights, and the optimizer's moments if asked for; the accumulated gradient is forgotten.

        A run that does not exist is made as the saved one was; `kind`: with another optimizer, if not with its moments.
        Raises: ServiceError.
        """
        state = self._read_state(folder)
        if model_id not in self._runs:
            made = build_create_request(state, model_id)
            self.create_model(
                made if optimizer or kind is None else dataclasses.replace(made, optimizer=kind)
            )
        self._load_run_state(model_id, state, optimizer=optimizer, gradient=False)
        return self.model_info(model_id)

    def read_saved_metadata(self, folder: str | Path) -> dict[str, Any]:
        """The note that was saved with weights. Raises: ServiceError."""
        note: dict[str, Any] = self._read_state(folder).get("note", {})
        return note

    def save_sampler_weights(self, model_id: str, folder: str | Path) -> None:
        """Write what samplers of a run need. Raises: ServiceError."""
        self._write_state(folder, extract_sampling_state(self._find_run(model_id).state_dict()))

    def export(self, source: str | Path, folder: str | Path, *, peft: bool = False) -> None:
        """Saved weights as a model folder of Hugging Face, or as an adapter of peft. Raises: ServiceError."""
        state = self._read_state(source)
        base = self._load_base_model(state["run"]["base"])
        try:
            (export_peft if peft else export_model)(base, state, folder)
        except CheckpointError as error:
            raise ServiceError(str(error), "server") from error

    # -- sampling ------------------------------------------------------------------------------------------------------

    def create_sampler(self, request: CreateSampler) -> BaseInfo:
        """A sampler; the base model that it samples from. Raises: ServiceError."""
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
        """Base model and fixed weights of a new sampler."""
        named = [
            name for name in ("base", "model_id", "folder") if getattr(request, name) is not None
        ]
        if request.kind == "inflight" and named not in (["model_id"], ["model_id", "folder"]):
            raise ServiceError(
                "create_sampler: inflight needs model_id, and may have folder", "user"
            )
        if request.kind != "inflight" and len(named) != 1:
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
        """Forget a sampler. Raises: ServiceError where there is none."""
        self._find_sampler(sampler_id)
        del self._samplers[sampler_id]

    def sample(self, requests: Sequence[SampleRequest]) -> list[SampleResult | ServiceError]:
        """Answers in order; a request's samples depend on its sampler's weights, prompt, parameters and seed alone."""
        answers: dict[int, SampleResult | ServiceError] = {}
        jobs: dict[int, SampleJob] = {}
        for index, request in enumerate(requests):
            try:
                sampler = self._find_sampler(request.sampler_id)
                prompt = check_sample(request, sampler.base.limits, self.settings)
                jobs[index] = SampleJob(sampler, request, prompt)
            except ServiceError as error:
                answers[index] = error
        found = run_sample_jobs(list(jobs.values()), self.settings.slots)
        for index, answer in zip(jobs, found, strict=True):
            answers[index] = (
                _convert_to_service_error(answer) if isinstance(answer, Exception) else answer
            )
        return [answers[index] for index in range(len(requests))]

    # -- evaluation ----------------------------------------------------------------------------------------------------

    def evaluate(self, request: EvaluateRequest) -> ModelEvaluation:
        """Scores of a model on texts and of its samples, and of another beside it; training is left as it is.

        Raises: ServiceError.
        """
        request.check_limits(self.settings)
        model = self._load_evaluated_model(request.model, request)
        against = (
            None
            if request.against is None
            else self._load_evaluated_model(request.against, request, model.base)
        )
        try:
            return evaluate_models(request, model, against, self.settings)
        except (PosttrainError, RuntimeError) as error:
            raise _convert_to_service_error(error) from error

    def _load_evaluated_model(
        self, name: str, request: EvaluateRequest, comparison_base: SharedBaseModel | None = None
    ) -> EvaluatedModel:
        """The model of a name: saved weights, a base model, or (beside one of these) a reference model."""
        if name in request.folders:
            state = extract_sampling_state(self._read_state(request.folders[name]))
            base = self._load_base_model(state["run"]["base"])
            source = SamplerWeights(base, state)
        elif name in self.settings.bases:
            base = self._load_base_model(name)
            source = SamplerWeights(base)
        elif name in self.references.paths and comparison_base is not None:
            reader = self.references.create_reader(name)
            return EvaluatedModel(
                name,
                comparison_base,
                self.references.read_limits(name, comparison_base),
                reader,
                None,
            )
        else:
            known = [
                *self.settings.bases,
                *(self.references.paths if comparison_base is not None else ()),
            ]
            raise ServiceError(
                f"evaluate: there is no {'base or reference' if comparison_base is not None else 'base'} model '{name[:200]}'; "
                f"{suggest_name(name, known)}",
                "user",
            )
        return EvaluatedModel(
            name,
            base,
            base.limits,
            BaseModelReader(base, source.merge_weights()),
            Sampler(name, base, source),
        )

    # -- looking up ----------------------------------------------------------------------------------------------------

    def _load_base_model(self, name: str) -> SharedBaseModel:
        if name not in self._bases:
            if name not in self.settings.bases:
                raise ServiceError(
                    f"base_model: there is no '{name}' here; {suggest_name(name, self.settings.bases)}",
                    "user",
                )
            try:
                self._bases[name] = SharedBaseModel(
                    name, str(self.settings.bases[name]), self.settings
                )
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
    return ServiceError(
        format_first_line(error), "user" if isinstance(error, DataError) else "server"
    )
