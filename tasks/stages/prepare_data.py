"""Rows that fit: those that are refused, too long, cut or left out, and the token ids of the rest.

Stage: read or make the data, check and split it; for a preset also train its tokenizer and create its model.

Writes demonstrations_{train,heldout}.jsonl, preferences_{train,heldout}.jsonl, what the environment needs, and
model/ for a from-scratch preset. Nothing is trained on a row that was not checked.
"""

from __future__ import annotations

import itertools
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rl_core.data import records, splits
from rl_core.data.chat import ChatRenderer
from rl_core.data.chat_template import format_hermes_call
from rl_core.data.files import list_data_files
from rl_core.data.formats import RowKind, explain_misfit
from rl_core.data.pairs import read_side, truncate_sides
from rl_core.data.row_sequences import CompressedRows
from rl_core.data.splits import compute_short_digest
from rl_core.data.token_cache import (
    TokenCache,
    TokenizedRows,
    compute_rows_digest,
    estimate_text_bytes,
)
from rl_core.data.tokenising import TokenisationJob
from rl_core.data.tokenizer import train_tokenizer
from rl_core.data.training_sequences import TokenRows, truncate_sequences
from rl_core.environments.environment import Environment
from rl_core.errors import DataError
from rl_core.settings import DataSettings
from rl_core.storage.atomic_files import replace_file
from rl_core.storage.faults import inject_fault
from rl_core.storage.manifest import digest_bytes, digest_file
from tasks.pipeline.pipeline_run import PipelineRun
from tasks.pipeline.stage import StageContext, run_stage
from tasks.pipeline.stage_fingerprint import read_stage_fingerprint
from tasks.pipeline.stage_key import digest_environment_files, digest_input
from tasks.pipeline.stage_result import StageResult
from tasks.stages.data_rows import TOKEN_CACHE_FOLDER, list_split_files, read_json_rows
from tasks.stages.loading import build_pipeline_environment

SummaryRow = dict[str, Any]


@dataclass
class LocatedRows:
    """Rows and the place of each, for messages."""

    rows: CompressedRows = field(default_factory=CompressedRows)
    source: str = ""
    row_locations: list[tuple[str, int]] = field(default_factory=list)  # file and line

    def select_rows(self, row_indices: Sequence[int]) -> None:
        """Leave out all but these rows."""
        self.rows, self.row_locations = (
            self.rows.select_rows(row_indices),
            [self.row_locations[row] for row in row_indices],
        )


@dataclass(frozen=True)
class FittingRows:
    """Rows of a table of tokens that fit."""

    tokens: TokenRows
    row_indices: NDArray[np.int64]  # rows of the table, ascending
    sequence_indices: NDArray[np.int64]  # of their sequences in the table
    max_tokens: int | None  # sequences are cut there; None = none is longer

    def select_sequences(self, rows: Sequence[int]) -> NDArray[np.int64]:
        """Places, in the table, of the sequences of some of the kept rows, which are counted from 0."""
        wanted = np.zeros(int(self.row_indices[-1]) + 1, np.bool_)
        wanted[self.row_indices[np.asarray(rows, np.int64)]] = True
        return self.sequence_indices[wanted[self.tokens.rows[self.sequence_indices]]]


def select_fitting_rows(
    table: LocatedRows,
    tokens: TokenizedRows,
    kind: RowKind,
    max_context: int,
    settings: DataSettings,
    summary: SummaryRow,
) -> FittingRows:
    """Refuse, cut, or leave out and count the rows that the template refuses or that are too long.

    Args:
        longest: context of the model.
        summary: gets the counts; a row that is cut gets `max_tokens`.
    Raises: RecordsError listing bad rows; DataError where no row is left.
    """
    limit = min(max_context, settings.max_tokens or max_context)
    holds = f"the context holds {max_context}" if limit == max_context else f"max_tokens is {limit}"
    lengths = tokens.compute_longest(len(table.rows))
    too_long = np.flatnonzero(lengths > limit).tolist()
    reasons = dict(tokens.refused)
    cut: list[int] = []
    if settings.long_rows == "cut":
        for row, reason in _list_cut_problems(tokens.rows, kind, too_long, limit):
            reasons |= {row: reason} if reason else {}
            cut += [] if reason else [row]
        too_long = []
    elif settings.long_rows == "refuse":
        reasons |= {row: f"is {lengths[row]} tokens long, {holds}" for row in too_long}
    problems = [
        records.RowProblem(*table.row_locations[row], "", reasons[row]) for row in sorted(reasons)
    ]
    records.report_row_problems(table.source, problems, len(table.rows), settings.on_bad_row)
    out = reasons.keys() | set(too_long)
    kept = [row for row in range(len(table.rows)) if row not in out]
    if not kept:
        raise DataError(
            f"{table.source}: every row is longer than {limit} tokens; raise max_tokens, or cut long_rows"
        )
    for row in cut:
        table.rows.replace_row(row, {**table.rows[row], "max_tokens": limit})
    max_tokens = limit if cut else None
    places = tokens.rows.find_sequence_indices(kept)
    if cut and kind == "demonstrations":  # a sequence that has no loss left is left out
        places = places[tokens.rows.select_sequences(places, max_tokens).loss_tokens > 0]
    summary[f"{kind}_too_long"] = len(too_long)  # bad rows, or left out
    summary[f"{kind}_cut"] = len(cut)
    summary[f"{kind}_tokens"] = int(
        TokenizedRows(tokens.rows.select_sequences(places, max_tokens))
        .compute_longest(len(table.rows))
        .sum()
    )
    table.select_rows(kept)
    return FittingRows(tokens.rows, np.asarray(kept, np.int64), places, max_tokens)


def _list_cut_problems(
    tokens: TokenRows, kind: RowKind, rows: Sequence[int], limit: int
) -> Iterator[tuple[int, str]]:
    """(row, why it cannot be cut); "" = it can."""
    for row in rows:
        places = tokens.find_sequence_indices([row])
        try:
            if kind == "demonstrations":
                truncate_sequences([tokens[int(place)] for place in places], limit)
            else:
                truncate_sides([read_side(tokens, int(place)) for place in places], limit)
        except DataError as error:
            yield row, str(error)
        else:
            yield row, ""


logger = logging.getLogger(__name__)

Row = dict[str, Any]


def prepare_data(pipeline_run: PipelineRun, base: Path | str | None) -> StageResult:
    """Run the data stage. `base`: the model to start from; None makes the preset."""
    settings = pipeline_run.settings.stages.prepare_data or DataSettings()
    named = {"demonstrations": settings.demonstrations, "preferences": settings.preferences}
    inputs: dict[str, Path | str] = {name: Path(path) for name, path in named.items() if path}
    if base is not None:
        inputs["base"] = base
    result = run_stage(
        pipeline_run, "prepare_data", _prepare_all_data, settings=settings, inputs=inputs
    )
    if settings.preferences:
        _check_preference_uses(
            settings.preferences, result.path, pipeline_run.settings.stages.preference_uses
        )
    return result


def _check_preference_uses(source: str, folder: Path, uses: Iterable[str]) -> None:
    """Refuse rows that a later stage cannot use, before anything is trained; their losses are no part of the key."""
    for path in list_split_files(folder, "preferences"):
        for row in read_json_rows(path):
            reason = next(filter(None, (explain_misfit(row, use) for use in uses)), "")
            if reason:
                raise DataError(
                    f"{source}: the row with the prompt {row['prompt'][:80]!r}: {reason}"
                )


def _prepare_all_data(context: StageContext) -> dict[str, Any]:
    environment = build_pipeline_environment(context.pipeline, None)
    summary: dict[str, Any] = {}
    report = environment.prepare_data(context.folder, context.seed)
    if report:
        summary["environment"] = report
        environment = build_pipeline_environment(context.pipeline, context.folder)
    sets = {
        "demonstrations": _load_demonstrations(context, environment, summary),
        "preferences": _load_preferences(context, summary),
    }
    renderer, length = _create_tokenizer_and_model(context, sets, environment, summary)
    cache = TokenCache(context.folder.parent / TOKEN_CACHE_FOLDER)
    for kind, prompt_of in _PROMPT_EXTRACTORS.items():
        found = sets[kind]
        if not found.rows:
            continue
        _drop_repeats(context, found, prompt_of, summary, kind)
        job, rows = TokenisationJob(kind), found.rows
        every = range(len(rows))
        tokens = cache.load_or_tokenize(
            compute_rows_digest(rows),
            partial(rows.select_rows, every),
            renderer,
            job,
            estimate_text_bytes(rows),
        )
        fitting = select_fitting_rows(found, tokens, kind, length, context.settings, summary)
        parts = _split_and_write(context, kind, found.rows, prompt_of, summary)
        for path, places in zip(list_split_files(context.folder, kind), parts, strict=True):
            cache.store_subset(
                digest_file(path),
                renderer,
                job,
                tokens,
                fitting.select_sequences(places),
                fitting.max_tokens,
            )
    _refuse_changed_data(context)
    summary["note"] = _describe_data(summary)
    context.tracker.log_metrics(_flatten_numbers(summary), 0)
    logger.info("data: %s", summary["note"])
    return summary


def _refuse_changed_data(context: StageContext) -> None:
    """Refuse data that changed since the stage got its key: the finished folder would stand for other rows."""
    known = read_stage_fingerprint(context.folder) or {}
    files = {name: value for name, value in context.inputs.items() if name != "base"}
    digests = {name: digest_input(value) for name, value in files.items()}
    for part, found in (
        ("inputs", digests),
        ("content", digest_environment_files(context.pipeline)),
    ):
        for name, digest in found.items():
            if digest != known.get(part, {}).get(name, digest):
                place = files.get(name) or context.pipeline.environment.options[name]
                raise DataError(
                    f"{place}: was changed while it was read; start again when nothing writes to it"
                )


def _load_demonstrations(
    context: StageContext, environment: Environment, summary: Row
) -> LocatedRows:
    """Rows of {messages, level, kind, seed}: from a file, or written by the environment's demonstrator."""
    settings: DataSettings = context.settings
    if settings.demonstrations is not None:
        found = _read_data_files(
            context, "demonstrations", settings.demonstrations, records.read_demonstrations, summary
        )
        return _mark_by_seed(found)
    if context.pipeline.stages.sft is None:
        return LocatedRows()
    levels = settings.levels or environment.levels
    found = LocatedRows(source=f"demonstrations of {environment.name}")
    schema = environment.tools.schema() if context.pipeline.model.native_tools else []
    tools = {"tools": schema} if schema else {}  # as rollouts of this environment show them
    right: Counter[str] = Counter()
    shown: Counter[str] = Counter()
    for level, seed in itertools.islice(
        _iter_training_seeds(environment, levels), settings.num_demonstrations
    ):
        demonstration = environment.demonstration(seed, level)
        if demonstration is None:
            raise DataError(
                f"environment '{environment.name}' has no demonstrator and stages.prepare_data.demonstrations names no "
                "file, so there is nothing for stages.sft to learn from"
            )
        row = {
            "messages": demonstration.messages,
            "level": level,
            "kind": demonstration.kind,
            "seed": seed,
            **tools,
        }
        by_content = environment.held_out(level).by == "content"
        row["question"] = (
            environment.compute_question_digest(seed, level) if by_content else f"{level} {seed}"
        )  # decides the split
        found.rows.append(row)
        found.row_locations.append((found.source, len(found.rows)))
        shown[level] += 1
        right[level] += demonstration.success
        if len(found.rows) % 500 == 0:
            context.tracker.progress(len(found.rows), settings.num_demonstrations, "demonstrations")
    summary["demonstrator_success"] = {
        level: round(right[level] / shown[level], 4) for level in shown
    }
    return found


def _mark_by_seed(found: LocatedRows) -> LocatedRows:
    """Demonstrations that all begin alike are told apart by the seeds of their episodes, if they have some."""
    openings = (
        splits.normalize_prompt(splits.extract_opening_text(row["messages"])) for row in found.rows
    )
    first = next(openings, None)
    if (
        first is not None
        and all(opening == first for opening in openings)
        and all("seed" in row for row in found.rows)
    ):
        logger.warning(
            "%s: all demonstrations begin with the same text; they are held out by seed only",
            found.source,
        )
        for place, row in enumerate(found.rows):
            found.rows.replace_row(
                place, {**row, "question": f"{row.get('level', '')} {row['seed']}"}
            )
    return found


def _iter_training_seeds(
    environment: Environment, levels: Iterable[str]
) -> Iterable[tuple[str, int]]:
    """(level, seed) in turn over the levels, each level from its own training seeds; one that runs out drops out.

    A level that is named twice comes twice as often, with other seeds each time.
    """
    turns = list(levels)
    streams = {level: iter(environment.seeds_of("train", level)) for level in turns}
    while turns:
        for level in list(turns):
            seed = next(streams[level], None)
            if seed is None:
                turns = [other for other in turns if other != level]
            else:
                yield level, seed


def _load_preferences(context: StageContext, summary: Row) -> LocatedRows:
    path = context.settings.preferences
    return (
        _read_data_files(context, "preferences", path, records.read_preferences, summary)
        if path
        else LocatedRows()
    )


def _read_data_files(
    context: StageContext,
    name: str,
    path: str,
    reader: Callable[..., records.Records],
    summary: Row,
) -> LocatedRows:
    """Rows of a file, or of every data file of a folder."""
    settings: DataSettings = context.settings
    found, rows, skipped = LocatedRows(source=path), 0, 0
    digests: list[str] = []
    copies = contradictions = 0
    for file in list_data_files(Path(path)):
        read = reader(file, on_bad_row=settings.on_bad_row, max_rows=settings.max_rows)
        context.tracker.log_dataset(file, read.digest, name, "training")
        rows, skipped, digests = (
            rows + read.num_rows,
            skipped + read.num_skipped,
            [*digests, read.digest],
        )
        copies, contradictions = (
            copies + len(read.repeats.copies),
            contradictions + len(read.repeats.contradictions),
        )
        found.rows.extend_rows(read.rows)
        name_of_file = str(file)
        found.row_locations += [(name_of_file, line) for line in read.lines]
    digest = digests[0] if len(digests) == 1 else digest_bytes("\n".join(digests).encode())
    summary[f"{name}_file"] = {
        "rows": rows,
        "skipped": skipped,
        "copies": copies,
        "contradictions": contradictions,
        "sha256": digest,
    }
    return found


def _create_tokenizer_and_model(
    context: StageContext, sets: Mapping[str, LocatedRows], environment: Environment, summary: Row
) -> tuple[ChatRenderer, int]:
    """Make the preset's tokenizer and model, or read the base's tokenizer; returns the renderer and the context."""
    from rl_core.models import causal_lm  # here: it loads torch, not needed if cached

    settings = context.pipeline.model
    if "base" in context.inputs:
        tokenizer = causal_lm.load_tokenizer(context.inputs["base"], settings)
        return ChatRenderer(tokenizer, settings), causal_lm.read_context_length(
            context.inputs["base"], settings
        )
    has_texts = any(len(found.rows) for found in sets.values())
    tokenizer = train_tokenizer(
        _iter_row_texts(sets) if has_texts else _list_opening_texts(environment),
        settings.vocab_size,
    )
    causal_lm.set_chat_template(tokenizer, settings)
    model = causal_lm.create_model(settings, tokenizer, context.seed)
    causal_lm.save(model, tokenizer, context.folder / "model")
    summary["parameters"] = causal_lm.count_parameters(model)
    tokenizer = causal_lm.load_tokenizer(
        context.folder / "model", settings
    )  # as later stages have it
    return ChatRenderer(tokenizer, settings), settings.context


def _list_message_texts(message: Row) -> list[str]:
    """Everything in a message that becomes tokens."""
    calls = [format_hermes_call(call) for call in message.get("tool_calls", ())]
    return [text for text in (message.get("reasoning_content"), message["content"], *calls) if text]


def _iter_row_texts(sets: Mapping[str, LocatedRows]) -> Iterator[str]:
    """Everything in all rows that becomes tokens."""
    for row in sets["demonstrations"].rows:
        yield from _list_texts(row["messages"])
    for row in sets["preferences"].rows:
        for side in (
            row[name] for name in ("prompt", "chosen", "rejected", "completion") if name in row
        ):
            yield from [side] if isinstance(side, str) else _list_texts(side)


def _list_texts(messages: Iterable[Row]) -> list[str]:
    return [text for message in messages for text in _list_message_texts(message)]


def _drop_repeats(
    context: StageContext,
    found: LocatedRows,
    prompt_of: Callable[[Row], str],
    summary: Row,
    name: str,
) -> None:
    """Leave out, and count, copies of earlier rows or further rows of a prompt, as `deduplicate` says."""
    kind = context.settings.deduplicate
    if kind == "off":
        return
    first: dict[bytes, int] = {}
    for index, row in enumerate(found.rows):
        first.setdefault(
            compute_short_digest(
                row if kind == "rows" else splits.normalize_prompt(prompt_of(row))
            ),
            index,
        )
    kept = sorted(first.values())
    summary[f"{name}_repeats_left_out"] = len(found.rows) - len(kept)
    found.select_rows(kept)


def _list_opening_texts(environment: Environment) -> list[str]:
    """Openings of some training episodes: text for a tokenizer where there is nothing else."""
    seeds = itertools.islice(_iter_training_seeds(environment, environment.levels), 500)
    return [
        message["content"]
        for level, seed in seeds
        for message in environment.episode(seed, level).reset()
    ]


def _extract_demonstration_prompt(row: Row) -> str:
    """Split key of a demonstration: its question if the environment knows it, else its text before the first answer."""
    return (
        str(row["question"]) if "question" in row else splits.extract_opening_text(row["messages"])
    )


def _extract_preference_prompt(row: Row) -> str:
    return splits.extract_prompt_text(row["prompt"])


_PROMPT_EXTRACTORS: dict[RowKind, Callable[[Row], str]] = {
    "demonstrations": _extract_demonstration_prompt,
    "preferences": _extract_preference_prompt,
}


def _split_and_write(
    context: StageContext,
    kind: RowKind,
    rows: Sequence[Row],
    prompt_of: Callable[[Row], str],
    summary: Row,
) -> tuple[list[int], list[int]]:
    """Split by prompt, report duplicates and overlap, write both parts; returns the places of the rows of each."""
    train, heldout, report = splits.split_indices(
        rows, prompt_of, context.settings.heldout_fraction, context.seed
    )
    summary[kind] = report
    for path, split, part in zip(
        list_split_files(context.folder, kind), ("train", "heldout"), (train, heldout), strict=True
    ):
        _write_rows(path, (rows[place] for place in part))
        inject_fault("data.rows")
        for tracker in (context.tracker, context.pipeline_run.parent):
            tracker.log_dataset(path, digest_file(path), f"{kind}_{split}", split)
    return train, heldout


def _write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    with replace_file(path) as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def _flatten_numbers(summary: Mapping[str, Any]) -> dict[str, float]:
    """Flat numbers of the summary, as metrics `data/...`."""
    numbers: dict[str, float] = {}

    def visit(prefix: str, value: Any) -> None:
        if isinstance(value, Mapping):
            for key, inner in value.items():
                visit(f"{prefix}/{key}", inner)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            numbers[prefix] = float(value)

    visit("data", summary)
    return numbers


def _describe_data(summary: Mapping[str, Any]) -> str:
    parts = []
    for name in ("demonstrations", "preferences"):
        if name in summary:
            parts.append(
                f"{summary[name]['num_train_rows']} {name}, {summary[name]['num_heldout_rows']} held out"
            )
        if summary.get(f"{name}_repeats_left_out"):
            parts.append(f"{summary[f'{name}_repeats_left_out']} repeated {name} left out")
        if summary.get(f"{name}_too_long"):
            parts.append(f"{summary[f'{name}_too_long']} {name} too long and left out")
        if summary.get(f"{name}_cut"):
            parts.append(f"{summary[f'{name}_cut']} {name} cut at max_tokens or the context")
    if "parameters" in summary:
        parts.append(f"model of {summary['parameters'] / 1e6:.2f}M parameters")
    return "; ".join(parts) or "nothing to prepare"
