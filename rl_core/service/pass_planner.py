"""Planning of passes: which rows of which requests are computed together, and in which order.

A request is split into parts by its own rows only (`split_into_parts`), so sums over parts have the same order whatever
is computed at the same time. Each pass then takes one part from each of several runs.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch

from rl_core.errors import DataError, ServiceError
from rl_core.out_of_memory import format_first_line, is_out_of_memory
from rl_core.service.batched_pass import PassPart, PassResult, run_pass
from rl_core.service.request_checks import CheckedRequest
from rl_core.service.requests import ForwardBackward
from rl_core.service.results import ForwardBackwardResult
from rl_core.service.training_run import KLLimitCheck, TrainingRun, add_gradients
from rl_core.settings import ServiceEngineSettings

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class PassJob:
    """Checked request, its parts, and their results so far."""

    run: TrainingRun
    request: ForwardBackward
    checked: CheckedRequest
    parts: list[PassPart]
    part_results: list[PassResult] = field(default_factory=list)
    gradient: Mapping[str, torch.Tensor] = field(default_factory=dict)
    error: ServiceError | None = None

    @property
    def next_part(self) -> PassPart | None:
        """The next part to compute, or None."""
        if self.error is not None or len(self.part_results) == len(self.parts):
            return None
        return self.parts[len(self.part_results)]

    def add_part_result(self, result: PassResult) -> None:
        """Store a part's result; gradients are added in the order of the parts."""
        self.part_results.append(result)
        self.gradient = add_gradients(self.gradient, result.gradient)

    def _iterate_client_data(self) -> Iterator[dict[str, np.ndarray]]:
        """Yield the client's arrays of each datum, without those of a reference model."""
        for tokens, inputs in zip(self.checked.tokens, self.checked.inputs, strict=True):
            data = {"tokens": tokens, **inputs}
            if self.checked.reference:
                data.pop("ref_logprobs", None)
            yield data

    def build_result(self) -> ForwardBackwardResult | ServiceError:
        """Return the result. The run gets the gradient of the complete request, or nothing."""
        if self.error is not None:
            return self.error
        loss = self.checked.loss
        rows = [row for result in self.part_results for row in result.columns]
        if not self.request.forward_only:
            self.run.add_gradient(self.gradient)
            self.run.add_data_to_digest(self._iterate_client_data())
            if loss.kl_limit:
                self.run.kl_limit_checks.append(_build_kl_limit_check(self.checked, rows))
        table = _build_token_table(rows)
        metrics = {"loss:sum": float(sum(result.loss for result in self.part_results))}
        metrics |= loss.metrics(table, self.checked.options)
        unit = "token" if "tokens:sum" in metrics else "pair"
        count = metrics.get(f"{unit}s:sum", 0.0)
        metrics[f"loss_per_{unit}:mean"] = metrics["loss:sum"] / count if count else 0.0
        outputs = tuple(map(_select_datum_outputs, rows))
        return ForwardBackwardResult(outputs=outputs, metrics=metrics)


def split_into_parts(
    run: TrainingRun, request: ForwardBackward, checked: CheckedRequest, max_tokens: int
) -> PassJob:
    """Build a job whose parts have at most `max_tokens` tokens, in order; a longer datum (or pair) is one part."""
    step = 2 if checked.loss.is_paired else 1
    ends, part_tokens = [0], 0
    for start in range(0, len(checked.tokens), step):
        num_tokens = sum(len(row) for row in checked.tokens[start : start + step])
        if part_tokens and part_tokens + num_tokens > max_tokens:
            ends.append(start)
            part_tokens = 0
        part_tokens += num_tokens
    ends.append(len(checked.tokens))
    parts = [
        PassPart(
            run, checked.loss, checked.options, checked.tokens[begin:end], checked.inputs[begin:end]
        )
        for begin, end in pairwise(ends)
    ]
    return PassJob(run, request, checked, parts)


def run_jobs(jobs: Sequence[PassJob], settings: ServiceEngineSettings) -> None:
    """Compute all parts of all jobs; jobs of one run follow each other."""
    while passes := list(_plan_passes(jobs, settings.pass_tokens)):
        for pass_jobs in passes:
            _compute_next_parts(pass_jobs)


def _plan_passes(jobs: Sequence[PassJob], max_tokens: int) -> Iterator[list[PassJob]]:
    """Yield groups of jobs whose next parts share a pass of at most `max_tokens` tokens.

    Of each run, only the first unfinished job takes part.
    """
    first_jobs: dict[str, PassJob] = {}
    for job in jobs:
        if job.next_part is not None:
            first_jobs.setdefault(job.run.model_id, job)
    groups: dict[tuple[object, ...], list[PassJob]] = {}
    for job in first_jobs.values():
        is_separate = job.run.adapter is None or not job.run.base.batches_runs
        run_key = job.run.model_id if is_separate else ""
        key = (job.run.base.name, job.request.forward_only, run_key)
        groups.setdefault(key, []).append(job)
    for group in groups.values():
        pass_jobs: list[PassJob] = []
        pass_tokens = 0
        for job in group:
            part = job.next_part
            num_tokens = part.num_tokens if part is not None else 0
            if pass_jobs and pass_tokens + num_tokens > max_tokens:
                yield pass_jobs
                pass_jobs, pass_tokens = [], 0
            pass_jobs.append(job)
            pass_tokens += num_tokens
        yield pass_jobs


def _compute_next_parts(jobs: list[PassJob]) -> None:
    """Compute the next part of each job in one pass.

    If that fails, compute each part alone, so that an error stays in its job.
    """
    parts = [part for job in jobs if (part := job.next_part) is not None]
    try:
        results = run_pass(parts, backward=not jobs[0].request.forward_only)
    except Exception as error:
        if len(jobs) > 1:
            for job in jobs:
                _compute_next_parts([job])
            return
        jobs[0].error = _convert_to_service_error(error)
        return
    for job, result in zip(jobs, results, strict=True):
        job.add_part_result(result)


def _convert_to_service_error(error: Exception) -> ServiceError:
    """Convert an error to one for the client, and log unexpected ones."""
    if isinstance(error, ServiceError):
        return error
    if isinstance(error, DataError):
        return ServiceError(str(error), "user")
    logger.exception("forward_backward failed")
    if is_out_of_memory(error):
        return ServiceError(
            f"out of memory: {format_first_line(error)}; send shorter sequences or fewer at once",
            "server",
        )
    return ServiceError(f"forward_backward failed: {format_first_line(error)}", "server")


def _build_kl_limit_check(
    checked: CheckedRequest, rows: list[dict[str, np.ndarray]]
) -> KLLimitCheck:
    return KLLimitCheck(
        limit=checked.options[checked.loss.kl_limit],
        temperature=checked.options["temperature"],
        tokens=list(checked.tokens),
        targets=[inputs["target_tokens"] for inputs in checked.inputs],
        masks=[row["mask"] != 0 for row in rows],
        old_logprobs=[row["logprobs"] for row in rows],
    )


def _build_token_table(rows: Sequence[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Concatenate the columns of all rows, float64; `rows` holds the index of the datum."""

    def concatenate_column(name: str) -> np.ndarray:
        arrays = [row[name].astype(np.float64) for row in rows]
        if max(array.ndim for array in arrays) == 1:
            return np.concatenate(arrays)
        width = max(array.shape[-1] for array in arrays)
        padded = []
        for array in arrays:
            matrix = array.reshape(len(array), -1)
            padded.append(np.pad(matrix, ((0, 0), (0, width - matrix.shape[1]))))
        return np.concatenate(padded)

    table = {name: concatenate_column(name) for name in rows[0]}
    lengths = [len(next(iter(row.values()))) for row in rows]
    return table | {"rows": np.repeat(np.arange(len(rows)), lengths)}


_CLIENT_OUTPUT_NAMES = {
    "logprobs": "logprobs",
    "entropy": "entropy",
    "new_values": "values",
    "scores": "scores",
    "returns": "returns",
}


def _select_datum_outputs(row: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Select the outputs of one datum for the client, float32; `advantages` only if they were computed here."""
    outputs = {
        client_name: row[name].astype(np.float32)
        for name, client_name in _CLIENT_OUTPUT_NAMES.items()
        if name in row
    }
    if "returns" in row:
        outputs["advantages"] = row["advantages"].astype(np.float32)
    return outputs
