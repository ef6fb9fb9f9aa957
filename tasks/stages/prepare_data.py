"""Stage: read or generate the data, check and split it; for a preset also train its tokenizer and create its model.

Rows that the template refuses or that are too long are refused, cut or left out; the token ids of the others are
cached. Writes demonstrations_{train,heldout}.jsonl, preferences_{train,heldout}.jsonl, what the environment needs, and
model/ for a from-scratch preset. Later stages train only on checked rows.
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
from rl_core.data.formats import RowKind
from rl_core.data.images import join_message_parts
from rl_core.data.pairs import read_side, truncate_sides
from rl_core.data.row_sequences import CompressedRows
from rl_core.data.row_uses import explain_misfit
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
from rl_core.errors import DataError, SettingsError
from rl_core.settings import DataSettings
from rl_core.storage.atomic_files import replace_file
from rl_core.storage.faults import inject_fault
from rl_core.storage.manifest import digest_bytes, digest_file
from tasks.pipeline.pipeline_run import PipelineRun
from tasks.pipeline.stage import StageContext, run_stage
from tasks.pipeline.stage_fingerprint import read_stage_fingerprint
from tasks.pipeline.stage_key import (
    digest_environment_files,
    digest_input,
    list_environment_files,
)
from tasks.pipeline.stage_result import StageResult
from tasks.stages.data_rows import TOKEN_CACHE_FOLDER, list_split_files, read_json_rows
from tasks.stages.loading import build_pipeline_environment

logger = logging.getLogger(__name__)

Row = dict[str, Any]
SummaryRow = dict[str, Any]


@dataclass
class LocatedRows:
    """Rows and their locations, for messages."""

    rows: CompressedRows = field(default_factory=CompressedRows)
    source: str = ""
    row_locations: list[tuple[str, int]] = field(default_factory=list)  # file and line

    def select_rows(self, row_indices: Sequence[int]) -> None:
        """Keep only these rows."""
        self.rows = self.rows.select_rows(row_indices)
        self.row_locations = [self.row_locations[row] for row in row_indices]


@dataclass(frozen=True)
class FittingRows:
    """The rows of a token table that fit."""

    tokens: TokenRows
    row_indices: NDArray[np.int64]  # rows of the table, ascending
    sequence_indices: NDArray[np.int64]  # of their sequences in the table
    max_tokens: int | None  # sequences are cut here; None = all are shorter

    def select_sequences(self, rows: Sequence[int]) -> NDArray[np.int64]:
        """Return the table's sequence indices for some of the fitting rows, which are counted from 0."""
        is_selected = np.zeros(int(self.row_indices[-1]) + 1, np.bool_)
        is_selected[self.row_indices[np.asarray(rows, np.int64)]] = True
        return self.sequence_indices[is_selected[self.tokens.rows[self.sequence_indices]]]


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
        max_context: context of the model, tokens.
        summary: receives the counts. A row that is cut gets `max_tokens`.
    Raises: RecordsError listing bad rows; DataError if no row is left.
    """
    limit = min(max_context, settings.max_tokens or max_context)
    limit_text = f"max_tokens is {limit}"
    if limit == max_context:
        limit_text = f"the context holds {max_context}"
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
        reasons |= {row: f"is {lengths[row]} tokens long, {limit_text}" for row in too_long}
    problems = [
        records.RowProblem(*table.row_locations[row], "", reasons[row]) for row in sorted(reasons)
    ]
    records.report_row_problems(table.source, problems, len(table.rows), settings.on_bad_row)
    excluded = reasons.keys() | set(too_long)
    kept_rows = [row for row in range(len(table.rows)) if row not in excluded]
    if not kept_rows:
        raise DataError(
            f"{table.source}: every row is longer than {limit} tokens; raise max_tokens, or set long_rows: cut"
        )
    for row in cut:
        table.rows.replace_row(row, {**table.rows[row], "max_tokens": limit})
    max_tokens = limit if cut else None
    sequences = tokens.rows.find_sequence_indices(kept_rows)
    if cut and kind == "demonstrations":  # leave out sequences whose loss tokens were all cut
        sequences = sequences[tokens.rows.select_sequences(sequences, max_tokens).loss_tokens > 0]
    summary[f"{kind}_too_long"] = len(too_long)  # bad rows, or left out
    summary[f"{kind}_cut"] = len(cut)
    fitting = TokenizedRows(tokens.rows.select_sequences(sequences, max_tokens))
    summary[f"{kind}_tokens"] = int(fitting.compute_longest(len(table.rows)).sum())
    table.select_rows(kept_rows)
    return FittingRows(tokens.rows, np.asarray(kept_rows, np.int64), sequences, max_tokens)


def _list_cut_problems(
    tokens: TokenRows, kind: RowKind, rows: Sequence[int], limit: int
) -> Iterator[tuple[int, str]]:
    """Yield (row, why it cannot be cut); "" = it can."""
    for row in rows:
        sequences = tokens.find_sequence_indices([row])
        try:
            if kind == "demonstrations":
                truncate_sequences([tokens[int(index)] for index in sequences], limit)
            else:
                truncate_sides([read_side(tokens, int(index)) for index in sequences], limit)
        except DataError as error:
            yield row, str(error)
        else:
            yield row, ""


def prepare_data(pipeline_run: PipelineRun, base: Path | str | None) -> StageResult:
    """Run the stage.

    Args:
        base: the model to start from; None creates the preset.
    """
    settings = pipeline_run.settings.stages.prepare_data or DataSettings()
    named = {"demonstrations": settings.demonstrations, "preferences": settings.preferences}
    inputs: dict[str, Path | str] = {name: Path(path) for name, path in named.items() if path}
    if base is not None:
        inputs["base"] = base
    # The stage sft is not part of this stage's key, but without it there are no demonstrations.
    needs_demonstrations = pipeline_run.settings.stages.sft is not None
    result = run_stage(
        pipeline_run,
        "prepare_data",
        _prepare_all_data,
        settings=settings,
        inputs=inputs,
        is_complete=lambda folder: (
            not needs_demonstrations
            or all(path.is_file() for path in list_split_files(folder, "demonstrations"))
        ),
    )
    if settings.preferences:
        _check_preference_uses(
            settings.preferences, result.path, pipeline_run.settings.stages.preference_uses
        )
    return result


def _check_preference_uses(source: str, folder: Path, uses: Iterable[str]) -> None:
    """Refuse rows that a later stage cannot use, before any training.

    The stages' losses are not part of this stage's key.
    """
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
    report = environment.prepare(context.folder, context.seed)
    if report:
        summary["environment"] = report
        environment = build_pipeline_environment(context.pipeline, context.folder)
    sets = {
        "demonstrations": _load_demonstrations(context, environment, summary),
        "preferences": _load_preferences(context, summary),
    }
    renderer, max_context = _create_tokenizer_and_model(context, sets, environment, summary)
    cache = TokenCache(context.folder.parent / TOKEN_CACHE_FOLDER)
    for kind, prompt_of in _PROMPT_EXTRACTORS.items():
        table = sets[kind]
        if not table.rows:
            continue
        _drop_repeats(context, table, prompt_of, summary, kind)
        job, rows = TokenisationJob(kind), table.rows
        tokens = cache.load_or_tokenize(
            compute_rows_digest(rows),
            partial(rows.select_rows, range(len(rows))),
            renderer,
            job,
            estimate_text_bytes(rows),
        )
        fitting = select_fitting_rows(table, tokens, kind, max_context, context.settings, summary)
        parts = _split_and_write(context, kind, table.rows, prompt_of, summary)
        for path, row_indices in zip(list_split_files(context.folder, kind), parts, strict=True):
            cache.store_subset(
                digest_file(path),
                renderer,
                job,
                tokens,
                fitting.select_sequences(row_indices),
                fitting.max_tokens,
            )
    _refuse_changed_data(context)
    summary["note"] = _describe_data(summary)
    context.tracker.log_metrics(_flatten_numbers(summary), 0)
    logger.info("data: %s", summary["note"])
    return summary


def _refuse_changed_data(context: StageContext) -> None:
    """Refuse data that changed after the key was computed.

    The finished folder would contain other rows than its key says.
    """
    known = read_stage_fingerprint(context.folder) or {}
    files = {name: value for name, value in context.inputs.items() if name != "base"}
    digests = {name: digest_input(value) for name, value in files.items()}
    content = digest_environment_files(context.pipeline)
    for part, current in (("inputs", digests), ("content", content)):
        for name, digest in current.items():
            if digest != known.get(part, {}).get(name, digest):
                path = files.get(name) or list_environment_files(context.pipeline)[name]
                raise DataError(
                    f"{path}: was changed while it was read; start again when nothing writes to it"
                )


def _load_demonstrations(
    context: StageContext, environment: Environment, summary: Row
) -> LocatedRows:
    """Load rows of {messages, level, kind, seed} from a file, or let the environment's demonstrator write them."""
    settings: DataSettings = context.settings
    if settings.demonstrations is not None:
        table = _read_data_files(
            context, "demonstrations", settings.demonstrations, records.read_demonstrations, summary
        )
        _select_rewarded_rows(table, settings.min_reward, summary)
        return _mark_by_seed(table)
    if context.pipeline.stages.sft is None:
        return LocatedRows()
    levels: Sequence[str] | Mapping[str, float] = settings.levels or environment.levels
    if len(environment.parts) > 1:
        levels = environment.level_weights
        if settings.levels:  # a level that is listed twice comes twice as often
            levels = environment.expand_levels(Counter(settings.levels))
    table = LocatedRows(source=f"demonstrations of {environment.name}")
    num_successes: Counter[str] = Counter()
    num_shown: Counter[str] = Counter()
    for level, seed in itertools.islice(
        _iter_training_seeds(environment, levels), settings.num_demonstrations
    ):
        demonstration = environment.demonstration(seed, level)
        if demonstration is None:
            raise DataError(
                f"environment '{environment.find_part(level).name}' has no demonstrator and "
                "stages.prepare_data.demonstrations names no file, so there is nothing for stages.sft to learn from"
                + "; name the environments that have one in stages.prepare_data.levels"
                * (len(environment.parts) > 1)
            )
        schema = environment.find_part(level).tools.schema()
        # As in rollouts of this environment.
        tools = {"tools": schema} if schema and context.pipeline.model.native_tools else {}
        row = {
            "messages": list(map(join_message_parts, demonstration.messages)),
            "level": level,
            "kind": demonstration.kind,
            "seed": seed,
            **tools,
        }
        by_content = environment.held_out(level).by == "content"
        row["question"] = environment.question(seed, level) if by_content else f"{level} {seed}"
        table.rows.append(row)
        table.row_locations.append((table.source, len(table.rows)))
        num_shown[level] += 1
        num_successes[level] += demonstration.success
        if len(table.rows) % 500 == 0:
            context.tracker.progress(len(table.rows), settings.num_demonstrations, "demonstrations")
    summary["demonstrator_success"] = {
        level: round(num_successes[level] / num_shown[level], 4) for level in num_shown
    }
    return table


def _select_rewarded_rows(table: LocatedRows, min_reward: float | None, summary: Row) -> None:
    """Leave out, and count, recorded episodes below the least reward; other rows have none.

    Raises: SettingsError if the least reward is missing, or there are no such episodes; DataError if none is left.
    """
    rewards = [row.get("reward") for row in table.rows]
    num_rewards = len(rewards) - rewards.count(None)
    if min_reward is None:
        if num_rewards:
            raise SettingsError(
                f"stages.prepare_data.min_reward: {table.source} holds {num_rewards} recorded episodes, good and bad "
                "ones; set the least reward of those that are to be imitated"
            )
        return
    if not num_rewards:
        raise SettingsError(
            f"stages.prepare_data.min_reward: {table.source} holds no recorded episodes; leave it out"
        )
    selected = [i for i, reward in enumerate(rewards) if reward is None or reward >= min_reward]
    if not selected:
        raise DataError(
            f"{table.source}: no recorded episode has a reward of {min_reward:g} "
            "(stages.prepare_data.min_reward) or more"
        )
    summary["demonstrations_below_min_reward"] = len(rewards) - len(selected)
    table.select_rows(selected)


def _mark_by_seed(table: LocatedRows) -> LocatedRows:
    """Use episode seeds as the questions of demonstrations that all begin with the same text, if they have seeds."""
    openings = (
        splits.normalize_prompt(splits.extract_opening_text(row["messages"])) for row in table.rows
    )
    first = next(openings, None)
    if (
        first is not None
        and all(opening == first for opening in openings)
        and all("seed" in row for row in table.rows)
    ):
        logger.warning(
            "%s: all demonstrations begin with the same text; they are held out by seed only",
            table.source,
        )
        for index, row in enumerate(table.rows):
            table.rows.replace_row(
                index, {**row, "question": f"{row.get('level', '')} {row['seed']}"}
            )
    return table


def _iter_training_seeds(
    environment: Environment, levels: Iterable[str] | Mapping[str, float]
) -> Iterable[tuple[str, int]]:
    """Yield (level, seed) in turn over the levels, each with its training seeds, until all levels run out.

    A level that is named twice comes twice as often, with different seeds. With weights, the next level is the one
    whose count is furthest behind its weight, the first of several (stride scheduling).
    """
    turns = list(levels)
    streams = {level: iter(environment.seeds_of("train", level)) for level in turns}
    if isinstance(levels, Mapping):
        counts = Counter(dict.fromkeys(turns, 0))
        while turns:
            level = min(turns, key=lambda level: (counts[level] + 1) / levels[level])
            counts[level] += 1
            seed = next(streams[level], None)
            if seed is None:
                turns.remove(level)
            else:
                yield level, seed
        return
    while turns:
        for level in list(turns):
            seed = next(streams[level], None)
            if seed is None:
                turns = [other for other in turns if other != level]
            else:
                yield level, seed


def _load_preferences(context: StageContext, summary: Row) -> LocatedRows:
    path = context.settings.preferences
    if not path:
        return LocatedRows()
    return _read_data_files(context, "preferences", path, records.read_preferences, summary)


def _read_data_files(
    context: StageContext,
    name: str,
    path: str,
    reader: Callable[..., records.Records],
    summary: Row,
) -> LocatedRows:
    """Read the rows of a file, or of every data file of a folder."""
    settings: DataSettings = context.settings
    table = LocatedRows(source=path)
    digests: list[str] = []
    num_rows = num_skipped = num_copies = num_contradictions = 0
    for file in list_data_files(Path(path)):
        data = reader(file, on_bad_row=settings.on_bad_row, max_rows=settings.max_rows)
        context.tracker.log_dataset(file, data.digest, name, "training")
        digests.append(data.digest)
        num_rows += data.num_rows
        num_skipped += data.num_skipped
        num_copies += len(data.repeats.copies)
        num_contradictions += len(data.repeats.contradictions)
        table.rows.extend_rows(data.rows)
        file_name = str(file)
        table.row_locations += [(file_name, line) for line in data.lines]
    digest = digests[0] if len(digests) == 1 else digest_bytes("\n".join(digests).encode())
    summary[f"{name}_file"] = {
        "rows": num_rows,
        "skipped": num_skipped,
        "copies": num_copies,
        "contradictions": num_contradictions,
        "sha256": digest,
    }
    return table


def _create_tokenizer_and_model(
    context: StageContext, sets: Mapping[str, LocatedRows], environment: Environment, summary: Row
) -> tuple[ChatRenderer, int]:
    """Create the preset's tokenizer and model, or load the base's tokenizer.

    Return the renderer and the context length.
    """
    # imported here: loads torch, which a cached run does not need
    from rl_core.models import causal_lm

    settings = context.pipeline.model
    if "base" in context.inputs:
        tokenizer = causal_lm.load_tokenizer(context.inputs["base"], settings)
        max_context = causal_lm.read_context_length(context.inputs["base"], settings)
        return ChatRenderer(tokenizer, settings), max_context
    has_texts = any(len(table.rows) for table in sets.values())
    texts = _iter_row_texts(sets) if has_texts else _list_opening_texts(environment)
    tokenizer = train_tokenizer(texts, settings.vocab_size, with_images=settings.sees_images)
    causal_lm.set_chat_template(tokenizer, settings)
    model = causal_lm.create_model(settings, tokenizer, context.seed)
    causal_lm.save(model, tokenizer, context.folder / "model")
    summary["parameters"] = causal_lm.count_parameters(model)
    tokenizer = causal_lm.load_tokenizer(context.folder / "model", settings)  # as later stages do
    return ChatRenderer(tokenizer, settings), settings.context


def _list_message_texts(message: Row) -> list[str]:
    """List every text of a message that becomes tokens."""
    calls = [format_hermes_call(call) for call in message.get("tool_calls", ())]
    return [text for text in (message.get("reasoning_content"), message["content"], *calls) if text]


def _iter_row_texts(sets: Mapping[str, LocatedRows]) -> Iterator[str]:
    """Yield every text of all rows that becomes tokens."""
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
    table: LocatedRows,
    prompt_of: Callable[[Row], str],
    summary: Row,
    name: str,
) -> None:
    """Leave out, and count, copies of earlier rows or further rows of a prompt, as `deduplicate` says."""
    kind = context.settings.deduplicate
    if kind == "off":
        return
    first_indices: dict[bytes, int] = {}
    for index, row in enumerate(table.rows):
        content = row if kind == "rows" else splits.normalize_prompt(prompt_of(row))
        first_indices.setdefault(compute_short_digest(content), index)
    kept = sorted(first_indices.values())
    summary[f"{name}_repeats_left_out"] = len(table.rows) - len(kept)
    table.select_rows(kept)


def _list_opening_texts(environment: Environment) -> list[str]:
    """List the openings of some training episodes: text for a tokenizer if there are no rows."""
    seeds = itertools.islice(_iter_training_seeds(environment, environment.levels), 500)
    return [
        message["content"]
        for level, seed in seeds
        for message in map(join_message_parts, environment.episode(seed, level).reset())
    ]


def _extract_demonstration_prompt(row: Row) -> str:
    """Return the split key of a demonstration: its question if it has one, else its text up to the first answer."""
    if "question" in row:
        return str(row["question"])
    return splits.extract_opening_text(row["messages"])


_PROMPT_EXTRACTORS: dict[RowKind, Callable[[Row], str]] = {
    "demonstrations": _extract_demonstration_prompt,
    "preferences": lambda row: splits.extract_prompt_text(row["prompt"]),
}


def _split_and_write(
    context: StageContext,
    kind: RowKind,
    rows: Sequence[Row],
    prompt_of: Callable[[Row], str],
    summary: Row,
) -> tuple[list[int], list[int]]:
    """Split by prompt, report duplicates and overlap, write both parts, and return the row indices of each."""
    train, heldout, report = splits.split_indices(
        rows, prompt_of, context.settings.heldout_fraction, context.seed
    )
    summary[kind] = report
    for path, split, part in zip(
        list_split_files(context.folder, kind), ("train", "heldout"), (train, heldout), strict=True
    ):
        _write_rows(path, (rows[index] for index in part))
        inject_fault("data.rows")
        for tracker in (context.tracker, context.pipeline_run.parent):
            tracker.log_dataset(path, digest_file(path), f"{kind}_{split}", split)
    return train, heldout


def _write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    with replace_file(path) as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def _flatten_numbers(summary: Mapping[str, Any]) -> dict[str, float]:
    """Flatten the numbers of the summary to metrics `data/...`."""
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
        for key, text in (
            ("repeats_left_out", f"repeated {name} left out"),
            ("too_long", f"{name} too long and left out"),
            ("cut", f"{name} cut at max_tokens or the context"),
        ):
            if count := summary.get(f"{name}_{key}"):
                parts.append(f"{count} {text}")
    if "parameters" in summary:
        parts.append(f"model of {summary['parameters'] / 1e6:.2f}M parameters")
    return "; ".join(parts) or "nothing to prepare"
