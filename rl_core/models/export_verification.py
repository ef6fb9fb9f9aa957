"""Proof of export: a model folder, loaded by transformers in a fresh process, has the live model's log-probs or scores.

The records are of the trainer's model (adapters not merged) and of the evaluation (by the rollout engine), so a folder
without the adapter, with it twice or with an older one is told from the right one by a figure.
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
from rl_core.user_code import build_child_import_path

_PROGRAM = Path(__file__).with_name("plain_logprobs.py")
_REMEDY = (
    "Nothing is promoted; write the model anew (--fresh with its stage), or mend what writes it"
)


@dataclass(frozen=True, slots=True)
class ExportDifference:
    """Difference of log-probs between a record and the written model, in nats per token."""

    largest: float
    mean: float
    tokens: int


def compare_logprobs(
    records: Sequence[TokenRecord], found: Sequence[Sequence[float]]
) -> ExportDifference:
    """Largest and mean absolute difference; infinite where a log-prob is no number.

    Raises: ExportMismatch where there is nothing to compare.
    """
    gaps = [
        abs(ours - theirs)
        for record, logprobs in zip(records, found, strict=True)
        for ours, theirs in zip(record.logprobs, logprobs, strict=True)
    ]
    if not gaps:
        raise ExportMismatch(
            "there is no token to compare log-probs on: the records are empty; run their stage again"
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
    """Compare a written model with its records; facts of the proof as plain values.

    Args:
        name: of the model, for messages.
        records: `evaluated`, `trained` or both; `base`: the model without its adapter, for the diagnosis alone.
        answer: of `score_in_fresh_process`, for this folder and these records.
        dtype: of the weights, as they were evaluated.
    Raises: ExportMismatch with the figure.
    """
    place = f"export of {name}, {folder}"
    if not (records.get("trained") or records.get("evaluated")):
        raise ExportMismatch(
            f"{place}: has no record of log-probs to compare with; run its stage and evaluate again"
        )
    _check_loaded_weights(place, answer)
    bound, mean_bound = _resolve_bounds(settings, dtype)
    logprobs = iter(answer["logprobs"])
    found = {of: [next(logprobs) for _ in rows] for of, rows in records.items()}
    facts: dict[str, Any] = {"bound": bound, "mean_bound": mean_bound}
    for of, rows in records.items():
        if of == "base":
            continue
        difference = compare_logprobs(rows, found[of])
        if not (difference.largest <= bound and difference.mean <= mean_bound):
            share = _describe_adapter_share(records, found)
            raise ExportMismatch(
                f"{place}: loaded by transformers in a fresh process, its log-probs differ from the {of} model's by up "
                f"to {difference.largest:.3g} nats, {difference.mean:.3g} on average over {difference.tokens} tokens "
                f"(limits {bound:g} and {mean_bound:g}): it is not the model that was {of}{share}. {_REMEDY}"
            )
        facts[of] = {
            "max": difference.largest,
            "mean": difference.mean,
            "tokens": difference.tokens,
        }
    return (
        facts
        | {name: answer[name] for name in ("class", "torch", "transformers")}
        | {"dtype": dtype}
    )


def verify_scores(
    name: str,
    folder: Path,
    records: Sequence[ScoreRecord],
    answer: Mapping[str, Any],
    settings: ExportSettings,
    dtype: str = "float32",
) -> dict[str, Any]:
    """As `verify_export`, for a written reward model and the scores of the trained one.

    The bounds count in units of the scores, or of the largest one where that is above 1. Without a record the weights
    alone are checked: a stage of the user's may keep none.
    """
    place = f"export of {name}, {folder}"
    _check_loaded_weights(place, answer)
    facts = {name: answer[name] for name in ("class", "torch", "transformers")} | {"dtype": dtype}
    if not records:
        return facts
    unit = max(1.0, *(abs(record.score) for record in records))
    bound, mean_bound = (unit * limit for limit in _resolve_bounds(settings, dtype))
    gaps = [
        abs(record.score - found) for record, found in zip(records, answer["scores"], strict=True)
    ]
    gaps = [math.inf if math.isnan(gap) else gap for gap in gaps]
    largest, mean = max(gaps), sum(gaps) / len(gaps)
    if not (largest <= bound and mean <= mean_bound):
        raise ExportMismatch(
            f"{place}: loaded by transformers in a fresh process, its scores differ from the trained model's by up to "
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
    """Load model folders in one fresh process, by transformers alone; for each its log-probs at the records' tokens.

    Args:
        kind: dtype and device that they were evaluated with.
        reward_models: folders of which scores are asked for; their answers come last.
    Raises: BackendError where the process ends without an answer.
    """
    same = {"dtype": kind.dtype, "device": kind.device, "trust_remote_code": kind.trust_remote_code}
    request = {
        "threads": torch.get_num_threads(),
        "models": [
            {
                "folder": str(folder),
                **same,
                "sequences": [
                    {"ids": record.ids, "scored": record.scored, "temperature": record.temperature}
                    for found in records.values()
                    for record in found
                ],
            }
            for folder, records in models
        ]
        + [
            {"folder": str(folder), **same, "rows": [record.ids for record in scored] or [[0]]}
            for folder, scored in reward_models
        ],
    }
    models = [*models, *((folder, {}) for folder, _ in reward_models)]
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
            f"{_format_folders(models)}: not loaded within {settings.timeout_seconds:g} s by a fresh process; raise "
            "stages.export.timeout_seconds"
        ) from error
    try:
        answers: list[dict[str, Any]] = json.loads(done.stdout.strip().rpartition("\n")[2])
    except ValueError as error:
        end = " ".join(done.stderr.split())[-300:]
        raise BackendError(
            f"{_format_folders(models)}: a fresh process that loads them ended with {done.returncode} and no answer (out of "
            f"memory?): {end}"
        ) from error
    return answers


def _resolve_bounds(settings: ExportSettings, dtype: str) -> tuple[float, float]:
    """Limits of the largest and of the mean difference."""
    bound = (
        settings.bound if settings.bound is not None else select_rounding_bound(dtype == "float32")
    )
    return bound, settings.mean_bound if settings.mean_bound is not None else bound / 5


def _format_folders(models: Sequence[tuple[Path, Any]]) -> str:
    return ", ".join(str(folder) for folder, _ in models)


def _check_loaded_weights(place: str, answer: Mapping[str, Any]) -> None:
    """Raises: ExportMismatch for a folder that cannot be loaded, or weights that are made up or dropped then."""
    if "error" in answer:
        raise ExportMismatch(
            f"{place}: transformers alone cannot load it ({answer['error']}). {_REMEDY}"
        )
    for kind, consequence in (
        ("missing", "are missing, and transformers makes them up"),
        ("mismatched", "have another shape, and transformers makes them up"),
        ("unexpected", "have no place in it, and transformers drops them"),
    ):
        if names := answer[kind]:
            raise ExportMismatch(
                f"{place}: {len(names)} weights of {answer['class']} {consequence}, first {names[0]}. {_REMEDY}"
            )


def _describe_adapter_share(
    records: Mapping[str, Sequence[TokenRecord]], found: Mapping[str, Sequence[Sequence[float]]]
) -> str:
    """Diagnosis for adapters: the part of their effect on the log-probs that the written model shows; "" without them.

    The least-squares factor s of (written - base) = s (trained - base): 1 = merged once, 0 = not at all, about 2 =
    twice.
    """
    if "base" not in records or "trained" not in records:
        return ""
    base = [value for record in records["base"] for value in record.logprobs]
    trained = [value for record in records["trained"] for value in record.logprobs]
    written = [value for row in found["trained"] for value in row]
    square = sum((t - b) ** 2 for t, b in zip(trained, base, strict=True))
    if not square > 0:
        return ""
    share = sum((w - b) * (t - b) for w, t, b in zip(written, trained, base, strict=True)) / square
    away = max(abs(w - b) for w, b in zip(written, base, strict=True))
    return (
        f" (it shows {share:.2f} of the adapter's effect: 1 is merged once, 0 not at all, about 2 a small one twice; "
        f"from the base model it is {away:.3g} nats away)"
    )
