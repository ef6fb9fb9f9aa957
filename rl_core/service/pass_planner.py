"""Planning of passes: which rows of which requests are computed together, and in which order.

A request is cut into parts by its own rows alone (`cut`), so sums over parts have the same order whatever is computed
beside them. Passes then take one part of each of several runs.
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
    """A checked request, its parts, and what was computed of it."""

    run: TrainingRun
    request: ForwardBackward
    checked: CheckedRequest
    parts: list[PassPart]
    part_results: list[PassResult] = field(default_factory=list)
    gradient: Mapping[str, torch.Tensor] = field(default_factory=dict)
    error: ServiceError | None = None

    @property
    def next_part(self) -> PassPart | None:
        """The part that comes next; None = nothing is left to compute."""
        return (
            None
            if self.error is not None or len(self.part_results) == len(self.parts)
            else self.parts[len(self.part_results)]
        )

    def add_part_result(self, result: PassResult) -> None:
        """Keep a part's result; gradients add up in the order of the parts."""
        self.part_results.append(result)
        self.gradient = add_gradients(self.gradient, result.gradient)

    def _iterate_client_data(self) -> Iterator[dict[str, np.ndarray]]:
        """Arrays of each datum; of the client alone, without a reference model's."""
        for tokens, inputs in zip(self.checked.tokens, self.checked.inputs, strict=True):
            given = {name: array for name, array in inputs.items() if name != "ref_logprobs"}
            yield {"tokens": tokens, **(given if self.checked.reference else inputs)}

    def build_result(self) -> ForwardBackwardResult | ServiceError:
        """The answer. The run gets the gradient of a whole request, or nothing."""
        if self.error is not None:
            return self.error
        loss, rows = (
            self.checked.loss,
            [row for result in self.part_results for row in result.columns],
        )
        if not self.request.forward_only:
            self.run.add_gradient(self.gradient)
            self.run.add_data_to_digest(self._iterate_client_data())
            if loss.kl_limit:
                self.run.kl_limit_checks.append(_build_kl_limit_check(self.checked, rows))
        table = _build_token_table(rows)
        metrics = {"loss:sum": float(sum(result.loss for result in self.part_results))}
        metrics |= loss.metrics(table, self.checked.options)
        tokens = metrics.get("tokens:sum", metrics.get("pairs:sum", 0.0))
        metrics["loss_per_token:mean" if "tokens:sum" in metrics else "loss_per_pair:mean"] = (
            metrics["loss:sum"] / tokens if tokens else 0.0
        )
        return ForwardBackwardResult(
            outputs=tuple(map(_select_datum_outputs, rows)), metrics=metrics
        )


def split_into_parts(
    run: TrainingRun, request: ForwardBackward, checked: CheckedRequest, max_tokens: int
) -> PassJob:
    """A job whose parts have at most `most` tokens, in order; a longer datum (or pair) stands alone."""
    step = 2 if checked.loss.is_paired else 1
    ends, used = [0], 0
    for start in range(0, len(checked.tokens), step):
        size = sum(len(row) for row in checked.tokens[start : start + step])
        if used and used + size > max_tokens:
            ends.append(start)
            used = 0
        used += size
    ends.append(len(checked.tokens))
    parts = [
        PassPart(
            run, checked.loss, checked.options, checked.tokens[begin:end], checked.inputs[begin:end]
        )
        for begin, end in pairwise(ends)
    ]
    return PassJob(run, request, checked, parts)


def run_jobs(jobs: Sequence[PassJob], settings: ServiceEngineSettings) -> None:
    """Compute all parts of all jobs; jobs of one run one after the other."""
    while waves := list(_plan_passes(jobs, settings.pass_tokens)):
        for chosen in waves:
            _compute_next_parts(chosen)


def _plan_passes(jobs: Sequence[PassJob], max_tokens: int) -> Iterator[list[PassJob]]:
    """Jobs whose next parts share a pass: the first unfinished one of each run, in groups of at most `most` tokens."""
    first: dict[str, PassJob] = {}
    for job in jobs:
        if job.next_part is not None:
            first.setdefault(job.run.model_id, job)
    groups: dict[tuple[object, ...], list[PassJob]] = {}
    for job in first.values():
        alone = job.run.adapter is None or not job.run.base.batches_runs
        key = (job.run.base.name, job.request.forward_only, job.run.model_id if alone else "")
        groups.setdefault(key, []).append(job)
    for group in groups.values():
        together: list[PassJob] = []
        taken = 0
        for job in group:
            tokens = _count_next_tokens(job)
            if together and taken + tokens > max_tokens:
                yield together
                together, taken = [], 0
            together.append(job)
            taken += tokens
        yield together


def _count_next_tokens(job: PassJob) -> int:
    part = job.next_part
    return part.num_tokens if part is not None else 0


def _compute_next_parts(jobs: list[PassJob]) -> None:
    """The next part of each of these jobs in one pass; where that fails, each alone, so one fault stays one job's."""
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
    """The error for the client."""
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
    """Columns over all tokens, float64; `rows` is the datum's index."""
    several = {name: max(row[name].ndim for row in rows) == 2 for name in rows[0]}
    widths = {
        name: max(row[name].shape[-1] for row in rows) for name, wide in several.items() if wide
    }

    def column(row: dict[str, np.ndarray], name: str) -> np.ndarray:
        values = row[name].astype(np.float64)
        if not several[name]:
            return values
        values = values.reshape(len(values), -1)
        return np.pad(values, ((0, 0), (0, widths[name] - values.shape[1])))

    table = {name: np.concatenate([column(row, name) for row in rows]) for name in rows[0]}
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
    """Outputs of one datum for the client, float32; `advantages` only where they were computed here."""
    found = {
        public: row[name].astype(np.float32)
        for name, public in _CLIENT_OUTPUT_NAMES.items()
        if name in row
    }
    if "returns" in row:
        found["advantages"] = row["advantages"].astype(np.float32)
    return found
