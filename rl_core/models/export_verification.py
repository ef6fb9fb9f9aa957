"""Export verification: a model folder, loaded by transformers in a fresh process, has the live model's log-probs or
scores.

The records come from the trainer's model (adapters not merged) and from the evaluation (by the rollout engine). A
folder without the adapter, with the adapter merged twice or with an older one is therefore detected by a figure.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rl_core.errors import BackendError, ExportMismatch
from rl_core.models.export_records import ScoreRecord, TokenRecord
from rl_core.settings import ExportSettings, ModelSettings
from rl_core.settings.rollouts import select_rounding_bound
from rl_core.user_code.load import build_child_import_path

_PROGRAM = Path(__file__).with_name("export_verification_child.py")
_REMEDY = "Nothing is promoted; write the model again (--fresh with its stage), or fix the code that writes it"


@dataclass(frozen=True, slots=True)
class ExportDifference:
    """The difference of log-probs between a record and the written model, in nats per token."""

    largest: float
    mean: float
    tokens: int


def compare_logprobs(
    records: Sequence[TokenRecord], written: Sequence[Sequence[float]]
) -> ExportDifference:
    """Compute the largest and mean absolute difference; infinity if a log-prob is NaN.

    Raises: ExportMismatch if there is nothing to compare.
    """
    gaps = [
        abs(recorded - loaded)
        for record, logprobs in zip(records, written, strict=True)
        for recorded, loaded in zip(record.logprobs, logprobs, strict=True)
    ]
    if not gaps:
        raise ExportMismatch(
            "no tokens to compare log-probs on: the records are empty; run their stage again"
        )
    gaps = [math.inf if math.isnan(gap) else gap for gap in gaps]
    return ExportDifference(max(gaps), sum(gaps) / len(gaps), len(gaps))


def verify_export(
    name: str,
    folder: Path,
    records: Mapping[str, Sequence[TokenRecord]],
    answer: Mapping[str, Any],
    settings: ExportSettings,
    dtype: str = "float32",
) -> dict[str, Any]:
    """Compare a written model with its records; return the facts of the verification as plain values.

    Args:
        name: of the model, for messages.
        records: `evaluated`, `trained` or both; `base`, the model without its adapter, is used for diagnosis only.
        answer: of `score_in_fresh_process`, for this folder and these records.
        dtype: of the weights during evaluation.
    Raises: ExportMismatch with the figure.
    """
    label = f"export of {name}, {folder}"
    if not (records.get("trained") or records.get("evaluated")):
        raise ExportMismatch(
            f"{label}: has no record of log-probs to compare with; run its stage and evaluate again"
        )
    _check_loaded_weights(label, answer)
    bound, mean_bound = _resolve_bounds(settings, dtype)
    logprobs = iter(answer["logprobs"])
    written = {kind: [next(logprobs) for _ in rows] for kind, rows in records.items()}
    facts: dict[str, Any] = {"bound": bound, "mean_bound": mean_bound}
    for kind, rows in records.items():
        if kind == "base":
            continue
        difference = compare_logprobs(rows, written[kind])
        if not (difference.largest <= bound and difference.mean <= mean_bound):
            share = _describe_adapter_share(records, written)
            raise ExportMismatch(
                f"{label}: loaded by transformers in a fresh process, its log-probs differ from the {kind} model's by "
                f"up to {difference.largest:.3g} nats, {difference.mean:.3g} on average over {difference.tokens} "
                f"tokens (limits {bound:g} and {mean_bound:g}): it is not the model that was {kind}{share}. {_REMEDY}"
            )
        facts[kind] = {
            "max": difference.largest,
            "mean": difference.mean,
            "tokens": difference.tokens,
        }
    versions = {key: answer[key] for key in ("class", "torch", "transformers")}
    return facts | versions | {"dtype": dtype}


def verify_scores(
    name: str,
    folder: Path,
    records: Sequence[ScoreRecord],
    answer: Mapping[str, Any],
    settings: ExportSettings,
    dtype: str = "float32",
) -> dict[str, Any]:
    """Compare a written reward model with the trained one's scores, as `verify_export` does with log-probs.

    The bounds count in units of the scores, or of the largest score if that is above 1. Without records, which a
    user-defined stage need not write, only the weights are checked.
    """
    label = f"export of {name}, {folder}"
    _check_loaded_weights(label, answer)
    facts = {name: answer[name] for name in ("class", "torch", "transformers")} | {"dtype": dtype}
    if not records:
        return facts
    unit = max(1.0, *(abs(record.score) for record in records))
    bound, mean_bound = (unit * limit for limit in _resolve_bounds(settings, dtype))
    gaps = [
        abs(record.score - score) for record, score in zip(records, answer["scores"], strict=True)
    ]
    gaps = [math.inf if math.isnan(gap) else gap for gap in gaps]
    largest, mean = max(gaps), sum(gaps) / len(gaps)
    if not (largest <= bound and mean <= mean_bound):
        raise ExportMismatch(
            f"{label}: loaded by transformers in a fresh process, its scores differ from the trained model's by up to "
            f"{largest:.3g}, {mean:.3g} on average over {len(gaps)} sequences (limits {bound:g} and {mean_bound:g}): "
            f"it is not the model that was trained. {_REMEDY}"
        )
    return facts | {
        "bound": bound,
        "mean_bound": mean_bound,
        "trained": {"max": largest, "mean": mean, "sequences": len(gaps)},
    }


def score_in_fresh_process(
    models: Sequence[tuple[Path, Mapping[str, Sequence[TokenRecord]]]],
    kind: ModelSettings,
    settings: ExportSettings,
    reward_models: Sequence[tuple[Path, Sequence[ScoreRecord]]] = (),
) -> list[dict[str, Any]]:
    """Load model folders in one fresh process with transformers alone; return each one's log-probs at the records'
    tokens.

    Args:
        kind: dtype and device of the evaluation.
        reward_models: folders whose scores are requested; their answers come last.
    Raises: BackendError if the process ends without an answer.
    """
    options = {
        "dtype": kind.dtype,
        "device": kind.device,
        "trust_remote_code": kind.trust_remote_code,
    }
    requests: list[dict[str, Any]] = []
    for folder, records in models:
        sequences = [
            {
                "ids": record.ids,
                "scored": record.scored,
                "temperature": record.temperature,
                "images": record.images,
            }
            for group in records.values()
            for record in group
        ]
        requests.append({"folder": str(folder), **options, "sequences": sequences})
    for folder, scored in reward_models:
        rows = [record.ids for record in scored] or [[0]]
        requests.append({"folder": str(folder), **options, "rows": rows})
    request = {"threads": torch.get_num_threads(), "models": requests}
    folders = ", ".join(str(entry["folder"]) for entry in requests)
    try:
        done = subprocess.run(
            [sys.executable, "-P", str(_PROGRAM), str(os.getpid())],
            input=json.dumps(request),
            capture_output=True,
            text=True,
            timeout=settings.timeout_seconds,
            env={**os.environ, "PYTHONPATH": build_child_import_path(), "HF_HUB_OFFLINE": "1"},
        )
    except subprocess.TimeoutExpired as error:
        raise BackendError(
            f"{folders}: not loaded within {settings.timeout_seconds:g} s by a fresh process; raise "
            "stages.export.timeout_seconds"
        ) from error
    try:
        answers: list[dict[str, Any]] = json.loads(done.stdout.strip().rpartition("\n")[2])
    except ValueError as error:
        end = " ".join(done.stderr.split())[-300:]
        raise BackendError(
            f"{folders}: a fresh process that loads them ended with {done.returncode} and no answer (out of memory?): "
            f"{end}"
        ) from error
    return answers


def _resolve_bounds(settings: ExportSettings, dtype: str) -> tuple[float, float]:
    """Return the limits of the largest and the mean difference."""
    bound = settings.bound
    if bound is None:
        bound = select_rounding_bound(dtype == "float32")
    return bound, settings.mean_bound if settings.mean_bound is not None else bound / 5


def _check_loaded_weights(label: str, answer: Mapping[str, Any]) -> None:
    """Raise ExportMismatch if the folder cannot be loaded or loading initialises or drops weights."""
    if "error" in answer:
        raise ExportMismatch(
            f"{label}: transformers alone cannot load it ({answer['error']}). {_REMEDY}"
        )
    for kind, consequence in (
        ("missing", "are missing, and transformers initialises them"),
        ("mismatched", "have another shape, and transformers initialises them"),
        ("unexpected", "do not belong to it, and transformers drops them"),
    ):
        if names := answer[kind]:
            raise ExportMismatch(
                f"{label}: {len(names)} weights of {answer['class']} {consequence}, first {names[0]}. {_REMEDY}"
            )


def _describe_adapter_share(
    records: Mapping[str, Sequence[TokenRecord]], logprobs: Mapping[str, Sequence[Sequence[float]]]
) -> str:
    """Describe how much of the adapter's effect on the log-probs the written model shows; "" without adapters.

    The least-squares factor s of (written - base) = s (trained - base): 1 = merged once, 0 = not at all, about 2 =
    twice.
    """
    if "base" not in records or "trained" not in records:
        return ""
    base = [value for record in records["base"] for value in record.logprobs]
    trained = [value for record in records["trained"] for value in record.logprobs]
    written = [value for row in logprobs["trained"] for value in row]
    square = sum((t - b) ** 2 for t, b in zip(trained, base, strict=True))
    if not square > 0:
        return ""
    share = sum((w - b) * (t - b) for w, t, b in zip(written, trained, base, strict=True)) / square
    distance = max(abs(w - b) for w, b in zip(written, base, strict=True))
    return (
        f" (it shows {share:.2f} of the adapter's effect: 1 is merged once, 0 not at all, about 2 a small one twice; "
        f"its distance from the base model is {distance:.3g} nats)"
    )
