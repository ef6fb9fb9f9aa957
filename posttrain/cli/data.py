"""Command `posttrain data`: format, counts, lengths, duplicates, contradictions and examples of a data file."""

from __future__ import annotations

import argparse
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from flows.runtime.terminal import escape_control_characters
from posttrain.cli.arguments import parse_positive_integer
from rl_core.data.files import BadRow, list_data_files, read_rows
from rl_core.data.formats import RowKind, detect_format
from rl_core.data.records import Records, read_demonstrations, read_preferences
from rl_core.data.row_sequences import CompressedRows
from rl_core.data.splits import (
    extract_opening_text,
    extract_prompt_text,
    find_near_duplicates,
    is_datasketch_available,
    normalize_prompt,
)
from rl_core.errors import DataError

if TYPE_CHECKING:
    from rl_core.data.chat import ChatRenderer

_NUM_EXAMPLES = 3
_MAX_LISTED_ROWS = 5  # named in one line
_MAX_BAR_CHARACTERS = 30
_NUM_BINS = 10
# Preferences come first: a labelled completion is also a demonstration.
_KINDS: tuple[RowKind, ...] = ("preferences", "demonstrations")
_INDENT = " " * 18

Row = dict[str, Any]

EXAMPLES = (
    "data rows.jsonl",
    "data pairs.csv --model Qwen/Qwen2.5-0.5B-Instruct",
    "data rows.jsonl --heldout h.jsonl",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("file", metavar="FILE", help="JSONL, CSV or Parquet, or a folder of them")
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help="folder or hub name whose tokenizer and chat template are used",
    )
    parser.add_argument("--heldout", metavar="FILE", help="report rows that this file also has")
    parser.add_argument(
        "--as",
        dest="kind",
        choices=("demonstrations", "preferences"),
        default="",
        help="default: detected by the columns",
    )
    parser.add_argument(
        "--max-rows",
        type=parse_positive_integer,
        default=20_000,
        metavar="N",
        help="rows read of each file (default: 20000)",
    )
    parser.add_argument(
        "--near",
        type=float,
        default=0.8,
        metavar="S",
        help="similarity of near copies, from 0 (off) to 1 (default: 0.8)",
    )


def run_command(arguments: argparse.Namespace) -> int:
    """Print a report on a data file."""

    options: dict[str, Any] = {}
    if arguments.model is not None:
        from rl_core.data.chat import ChatRenderer
        from rl_core.models import causal_lm
        from rl_core.settings import ModelSettings

        settings = ModelSettings(path=arguments.model)
        renderer = ChatRenderer(causal_lm.load_tokenizer(arguments.model, settings), settings)
        options = {
            "renderer": renderer,
            "context": causal_lm.read_context_length(arguments.model, settings),
        }
    heldout = Path(arguments.heldout) if arguments.heldout else None
    report = describe_data_file(
        Path(arguments.file),
        kind=arguments.kind,
        heldout_path=heldout,
        max_rows=arguments.max_rows,
        near_duplicate_threshold=arguments.near,
        **options,
    )
    print(escape_control_characters(report))
    return 0


@dataclass(slots=True)
class _DataFileContents:
    """Usable rows of a file or folder, and statistics of reading them."""

    kind: RowKind
    formats: Counter[str] = field(default_factory=Counter)
    unread_columns: set[str] = field(default_factory=set)
    rows: CompressedRows = field(default_factory=CompressedRows)
    row_locations: list[str] = field(default_factory=list)  # "line 3", in a folder "FILE line 3"
    problems: list[str] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    contradictions: list[tuple[int, int]] = field(default_factory=list)
    num_rows: int = 0


def describe_data_file(
    path: Path,
    *,
    kind: RowKind | Literal[""] = "",
    renderer: ChatRenderer | None = None,
    context: int | None = None,
    heldout_path: Path | None = None,
    max_rows: int = 20_000,
    near_duplicate_threshold: float = 0.8,
) -> str:
    """Return a report on a file, or on all data files of a folder.

    Args:
        kind: demonstrations or preferences; "" = detected by the columns.
        renderer: of the model that counts tokens and renders the examples; None = characters and plain text.
        context: longest sequence of that model.
        heldout_path: a file that must not overlap with this one.
        max_rows: rows read of each file.
        near_duplicate_threshold: Jaccard similarity of near duplicates; 0 = they are not searched.
    Raises: DataError if the file as a whole cannot be read, or no format is recognised.
    """
    contents = _read_data_files(path, kind or _detect_row_kind(path), max_rows)
    texts = [_join_row_text(row) for row in contents.rows]
    lines = [str(path), *_format_header(contents, max_rows)]
    if contents.rows:
        lines += _format_lengths(contents.rows, texts, renderer, context)
        lines += _format_duplicates(contents, texts, near_duplicate_threshold)
        if heldout_path is not None:
            lines += _format_heldout_overlap(
                contents, texts, heldout_path, max_rows, near_duplicate_threshold
            )
        lines += _format_examples(contents.rows, renderer)
    return "\n".join(lines)


def _detect_row_kind(path: Path) -> RowKind:
    """Return the kind whose formats match most of the first rows."""
    first_file = list_data_files(path)[:1]
    rows = [row for file in first_file for _, row in islice(read_rows(file, None), 100)]
    scores = {
        kind: sum(isinstance(row, dict) and detect_format(row, kind) is not None for row in rows)
        for kind in _KINDS
    }
    best = max(_KINDS, key=lambda kind: scores[kind])
    if not scores[best]:
        columns = dict.fromkeys(name for row in rows if isinstance(row, dict) for name in row)
        if {"chosen", "rejected"} & set(columns):
            return "preferences"
        if not columns and rows and isinstance(rows[0], BadRow):
            raise DataError(f"{path}: {rows[0]}")
        return "demonstrations"
    return best


def _read_data_files(path: Path, kind: RowKind, max_rows: int) -> _DataFileContents:
    contents = _DataFileContents(kind)
    files = list_data_files(path)
    if not files:
        raise DataError(f"{path}: has no data file in it")
    for file in files:
        records = _read_records_quietly(file, kind, max_rows)
        contents.formats += records.formats
        contents.unread_columns |= records.unread_columns
        start = len(contents.rows)
        prefix = f"{file.name} " if len(files) > 1 else ""
        contents.rows.extend_rows(records.rows)
        contents.row_locations += [f"{prefix}line {line}" for line in records.lines]
        contents.problems += [
            f"{prefix}line {problem.line}: {problem.field + ': ' if problem.field else ''}{problem.reason}"
            for problem in records.problems
        ]
        contents.copies += [(start + a, start + b) for a, b in records.repeats.copies]
        contents.contradictions += [
            (start + a, start + b) for a, b in records.repeats.contradictions
        ]
        contents.num_rows += records.num_rows
    return contents


def _read_records_quietly(file: Path, kind: RowKind, max_rows: int) -> Records:
    """Read the rows of a file without bad ones; mute the reader's log, whose content the report shows."""
    names = ("rl_core.data", "rl_core.data.records", "rl_core.data.splits")
    loggers = [logging.getLogger(name) for name in names]
    was_disabled = loggers[0].disabled
    for logger in loggers:
        logger.disabled = True
    try:
        reader = read_demonstrations if kind == "demonstrations" else read_preferences
        return reader(file, on_bad_row="skip", max_rows=max_rows)
    finally:
        loggers[0].disabled = was_disabled
        for logger in loggers[1:]:
            logger.disabled = False


def _format_header(contents: _DataFileContents, max_rows: int) -> Iterator[str]:
    yield f"kind            {contents.kind}"
    yield "format          " + ", ".join(
        f"{name or 'not recognised'} ({count} rows)"
        for name, count in contents.formats.most_common()
    )
    is_partial = max(contents.formats.values()) >= max_rows
    extent = " (the first of each file; --max-rows reads more)" if is_partial else ""
    yield f"rows            {contents.num_rows}{extent}, {len(contents.problems)} cannot be used"
    for problem in contents.problems[:_MAX_LISTED_ROWS]:
        yield f"{_INDENT}{problem}"
    if len(contents.problems) > _MAX_LISTED_ROWS:
        yield f"{_INDENT}and {len(contents.problems) - _MAX_LISTED_ROWS} more"
    yield f"not read        {', '.join(sorted(contents.unread_columns)) or 'no column'}"
    if contents.kind == "demonstrations":
        turns = Counter(
            sum(m["role"] == "assistant" for m in row["messages"]) for row in contents.rows
        )
        yield "turns           " + ", ".join(
            f"{count} rows with {number}" for number, count in sorted(turns.items())
        )
    elif any("label" in row for row in contents.rows):
        labels = Counter(row["label"] for row in contents.rows if "label" in row)
        yield f"labels          {labels[True]} true, {labels[False]} false"


def _join_row_text(row: Row) -> str:
    """Join all text of a row, for comparisons."""
    names = ("messages", "prompt", "chosen", "rejected", "completion")
    return "\n".join(_join_messages(row[name]) for name in names if name in row)


def _join_messages(side: str | list[Row]) -> str:
    if isinstance(side, str):
        return side
    return "\n".join(f"{message['role']}: {message['content']}" for message in side)


def _compute_prompt_key(row: Row) -> str:
    if "messages" in row:
        return normalize_prompt(extract_opening_text(row["messages"]))
    return normalize_prompt(extract_prompt_text(row["prompt"]))


def _tokenize_sequences(row: Row, renderer: ChatRenderer) -> list[tuple[list[int], list[bool]]]:
    """Return token ids and loss mask of each sequence of a row."""
    from rl_core.data.chat import compute_tokenizer_digest
    from rl_core.data.pairs import build_row_sides
    from rl_core.data.recorded_rows import build_recorded_sequences
    from rl_core.data.training_sequences import build_training_sequences

    if "sequences" in row:
        digest = compute_tokenizer_digest(renderer.tokenizer)
        return build_recorded_sequences(row, digest, len(renderer.tokenizer))
    if "messages" in row:
        return build_training_sequences(renderer, row["messages"], row.get("tools"))
    return [
        (side.ids, [False] * len(side.prompt_ids) + side.loss_mask)
        for side, _ in build_row_sides(row, renderer)
    ]


def _format_lengths(
    rows: Sequence[Row], texts: Sequence[str], renderer: ChatRenderer | None, context: int | None
) -> list[str]:
    """Format a histogram of the longest sequence of each row."""
    if renderer is None:
        lengths = [len(text) for text in texts]
        title = "lengths         characters (--model MODEL counts tokens)"
        return [title, *_format_histogram(lengths)]
    from rl_core.data.token_cache import TokenCache, estimate_text_bytes
    from rl_core.data.tokenising import TokenisationJob

    job = TokenisationJob("demonstrations" if "messages" in rows[0] else "preferences")
    tokens = TokenCache(None).load_or_tokenize(
        "", lambda: rows, renderer, job, estimate_text_bytes(rows)
    )
    lengths = [length for length in tokens.compute_longest(len(rows)).tolist() if length]
    num_loss_tokens = int(tokens.rows.loss_tokens.sum())
    lines = [
        f"lengths         tokens; {tokens.rows.num_tokens} in all, {num_loss_tokens} with loss"
    ]
    if tokens.refused:
        lines.append(f"{_INDENT}{len(tokens.refused)} rows are refused by the chat template")
    num_too_long = sum(length > context for length in lengths) if context is not None else 0
    if num_too_long:
        lines.append(
            f"{_INDENT}{num_too_long} rows are longer than the model's context of {context}"
        )
    return [*lines, *_format_histogram(lengths)]


def _format_histogram(lengths: Sequence[int]) -> list[str]:
    """Format bars over equal ranges, and the median, 95% quantile and longest."""
    if not lengths:
        return []
    ordered = sorted(lengths)
    low, high = ordered[0], ordered[-1]
    width = max(1, -(-(high - low + 1) // _NUM_BINS))
    counts = Counter((length - low) // width for length in lengths)
    lines = []
    for index in range((high - low) // width + 1):
        start, count = low + index * width, counts[index]
        bar = "#" * -(-count * _MAX_BAR_CHARACTERS // max(counts.values()))
        lines.append(
            f"{_INDENT}{start:>7} - {start + width - 1:<7} {bar:<{_MAX_BAR_CHARACTERS}} {count}"
        )
    median = ordered[len(ordered) // 2]
    quantile = ordered[min(len(ordered) - 1, len(ordered) * 95 // 100)]
    return [*lines, f"{_INDENT}median {median}, 95% up to {quantile}, longest {high}"]


def _format_row_pairs(row_pairs: Sequence[tuple[int, int]], row_locations: Sequence[str]) -> str:
    """Return the locations of the first pairs in brackets; "" without a pair."""
    if not row_pairs:
        return ""
    parts = [
        f"{row_locations[row]} and {row_locations[first]}"
        for row, first in row_pairs[:_MAX_LISTED_ROWS]
    ]
    if len(row_pairs) > _MAX_LISTED_ROWS:
        parts.append(f"and {len(row_pairs) - _MAX_LISTED_ROWS} more")
    return f" ({'; '.join(parts)})"


def _format_duplicates(
    contents: _DataFileContents, texts: Sequence[str], near: float
) -> Iterator[str]:
    prompts = Counter(map(_compute_prompt_key, contents.rows))
    copies = _format_row_pairs(contents.copies, contents.row_locations)
    yield f"copies          {len(contents.copies)} rows are exact copies of earlier ones{copies}"
    yield f"prompts         {len(prompts)} distinct; {sum(prompts.values()) - len(prompts)} rows repeat one"
    if near and not is_datasketch_available():
        yield "near copies     not searched: needs the package datasketch (python -m posttrain.install --extras data)"
    elif near:
        duplicates = find_near_duplicates(texts, None, near)
        pairs = _format_row_pairs([(a, b) for a, b, _ in duplicates], contents.row_locations)
        yield f"near copies     {len(duplicates)} rows share {near:.0%} of their shingles with an earlier one{pairs}"
    if contents.kind == "preferences":
        pairs = _format_row_pairs(contents.contradictions, contents.row_locations)
        yield f"contradictions  {len(contents.contradictions)} rows contradict earlier ones{pairs}"


def _format_heldout_overlap(
    contents: _DataFileContents, texts: Sequence[str], heldout: Path, max_rows: int, near: float
) -> Iterator[str]:
    other = _read_data_files(heldout, contents.kind, max_rows)
    positions: dict[str, int] = {}
    for position, row in enumerate(other.rows):
        positions.setdefault(_compute_prompt_key(row), position)
    keys = map(_compute_prompt_key, contents.rows)
    shared = [(position, positions[key]) for position, key in enumerate(keys) if key in positions]
    parts = [
        f"{contents.row_locations[a]} and its {other.row_locations[b]}"
        for a, b in shared[:_MAX_LISTED_ROWS]
    ]
    if len(shared) > _MAX_LISTED_ROWS:
        parts.append(f"and {len(shared) - _MAX_LISTED_ROWS} more")
    locations = f" ({'; '.join(parts)})" if shared else ""
    yield f"overlap         {len(shared)} rows have a prompt of {heldout}{locations}"
    if near and is_datasketch_available():
        duplicates = find_near_duplicates(texts, [_join_row_text(row) for row in other.rows], near)
        yield f"                {len(duplicates)} rows share {near:.0%} of their shingles with a row of it"


def _format_examples(rows: Sequence[Row], renderer: ChatRenderer | None) -> Iterator[str]:
    """Format the first, middle and last row, with the tokens that carry loss."""
    from rl_core.data.template_report import format_loss_runs

    indices = sorted({0, len(rows) // 2, len(rows) - 1})[:_NUM_EXAMPLES]
    for index in indices:
        yield ""
        yield f"example, usable row {index + 1}"
        if renderer is None:
            yield from _format_messages(rows[index])
            continue
        for ids, mask in _tokenize_sequences(rows[index], renderer):
            yield from format_loss_runs(renderer, ids, mask)


def _format_messages(row: Row) -> Iterator[str]:
    """Format the messages of a row, each with `loss` or `context`."""
    for name in ("messages", "prompt", "chosen", "rejected", "completion"):
        side = row.get(name)
        if side is None:
            continue
        turns = [{"role": name, "content": side}] if isinstance(side, str) else side
        for turn in turns:
            has_loss = turn["role"] in ("assistant", "text", "chosen", "rejected", "completion")
            has_loss = has_loss and turn.get("weight", 1) != 0 and name != "prompt"
            text = turn["content"].replace("\n", "\\n")
            extra = ", ".join(key for key in turn if key not in ("role", "content", "weight"))
            label = "loss" if has_loss else "context"
            suffix = f"  ({extra})" if extra else ""
            yield f"{label:7}  {turn['role']:9}  |{text}|{suffix}"
