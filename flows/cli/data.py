"""`posttrain data FILE`: format, counts, lengths, duplicates, contradictions and examples of a data file."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rl_core.data.files import BadRow, data_files, read_rows
from rl_core.data.formats import Kind, format_of
from rl_core.data.kept_rows import KeptRows
from rl_core.data.near_duplicates import is_available, near_pairs
from rl_core.data.records import Records, read_demonstrations, read_preferences
from rl_core.data.splits import opening_text, prompt_key, prompt_text
from rl_core.errors import DataError

if TYPE_CHECKING:
    from rl_core.data.chat import ChatRenderer

__all__ = ["describe_file"]

_EXAMPLES = 3
_SHOWN = 5  # places named in a line
_BARS = 30  # characters of the longest bar
_BINS = 10
_KINDS: tuple[Kind, ...] = ("preferences", "demonstrations")  # a labelled completion is a demonstration as well

Row = dict[str, Any]


@dataclass(slots=True)
class _File:
    """Rows of a file or folder that can be used, and what was found on the way."""

    kind: Kind
    formats: Counter[str] = field(default_factory=Counter)
    unread: set[str] = field(default_factory=set)
    rows: KeptRows = field(default_factory=KeptRows)
    places: list[str] = field(default_factory=list)  # of each row: "line 3", with the file's name in a folder
    problems: list[str] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    contradictions: list[tuple[int, int]] = field(default_factory=list)
    num_rows: int = 0


def describe_file(
    path: Path,
    *,
    kind: Kind | Literal[""] = "",
    renderer: ChatRenderer | None = None,
    context: int | None = None,
    heldout: Path | None = None,
    max_rows: int = 20_000,
    near: float = 0.8,
) -> str:
    """Report on a file, or all data files of a folder.

    Args:
        kind: demonstrations or preferences; "" = by the columns.
        renderer: of the model that counts tokens and renders the examples; None = characters and plain text.
        context: longest sequence of that model.
        heldout: a file that must not overlap with this one.
        max_rows: rows read of each file.
        near: Jaccard similarity of near duplicates; 0 = not looked for.
    Raises: DataError if the file as a whole cannot be read, or no format is recognised.
    """
    found = _read(path, kind or _kind_of(path), max_rows)
    texts = [_whole_text(row) for row in found.rows]
    lines = [str(path), *_head(found, max_rows)]
    if found.rows:
        lines += _lengths(found.rows, texts, renderer, context)
        lines += _repeats(found, texts, near)
        if heldout is not None:
            lines += _overlap(found, texts, heldout, max_rows, near)
        lines += _examples(found.rows, renderer)
    return "\n".join(lines)


def _kind_of(path: Path) -> Kind:
    """Kind whose formats fit most of the first rows."""
    rows = [row for file in data_files(path)[:1] for _, row in islice(read_rows(file, None), 100)]
    scores = {kind: sum(isinstance(row, dict) and format_of(row, kind) is not None for row in rows) for kind in _KINDS}
    best = max(_KINDS, key=lambda kind: scores[kind])
    if not scores[best]:
        columns = dict.fromkeys(name for row in rows if isinstance(row, dict) for name in row)
        if {"chosen", "rejected"} & set(columns):
            return "preferences"
        if not columns and rows and isinstance(rows[0], BadRow):
            raise DataError(f"{path}: {rows[0]}")
        return "demonstrations"
    return best


def _read(path: Path, kind: Kind, max_rows: int) -> _File:
    found = _File(kind)
    files = data_files(path)
    if not files:
        raise DataError(f"{path}: has no data file in it")
    for file in files:
        records = _records(file, kind, max_rows)
        found.formats += records.formats
        found.unread |= records.unread
        start, prefix = len(found.rows), f"{file.name} " if len(files) > 1 else ""
        found.rows.extend(records.rows)
        found.places += [f"{prefix}line {line}" for line in records.lines]
        found.problems += [
            f"{prefix}line {p.line}: {p.field + ': ' if p.field else ''}{p.reason}" for p in records.problems
        ]
        found.copies += [(start + a, start + b) for a, b in records.repeats.copies]
        found.contradictions += [(start + a, start + b) for a, b in records.repeats.contradictions]
        found.num_rows += records.num_rows
    return found


def _records(file: Path, kind: Kind, max_rows: int) -> Records:
    """Rows of a file, bad ones left out; what the reader logs is told by the report."""
    quiet = logging.getLogger("rl_core.data")
    before, quiet.disabled = quiet.disabled, True
    names = ("rl_core.data.records", "rl_core.data.repeats")
    for name in names:
        logging.getLogger(name).disabled = True
    try:
        reader = read_demonstrations if kind == "demonstrations" else read_preferences
        return reader(file, on_bad_row="skip", max_rows=max_rows)
    finally:
        quiet.disabled = before
        for name in names:
            logging.getLogger(name).disabled = False


def _head(found: _File, max_rows: int) -> Iterator[str]:
    yield f"kind            {found.kind}"
    yield "format          " + ", ".join(
        f"{name or 'not recognised'} ({count} rows)" for name, count in found.formats.most_common()
    )
    whole = " (the first of each file; --max-rows reads more)" if max(found.formats.values()) >= max_rows else ""
    yield f"rows            {found.num_rows}{whole}, {len(found.problems)} cannot be used"
    for problem in found.problems[:_SHOWN]:
        yield f"                  {problem}"
    if len(found.problems) > _SHOWN:
        yield f"                  and {len(found.problems) - _SHOWN} more"
    yield f"not read        {', '.join(sorted(found.unread)) or 'no column'}"
    if found.kind == "demonstrations":
        turns = Counter(sum(m["role"] == "assistant" for m in row["messages"]) for row in found.rows)
        yield "turns           " + ", ".join(f"{count} rows with {number}" for number, count in sorted(turns.items()))
    elif any("label" in row for row in found.rows):
        labels = Counter(row["label"] for row in found.rows if "label" in row)
        yield f"labels          {labels[True]} true, {labels[False]} false"


def _whole_text(row: Row) -> str:
    """Everything that is said in a row, for comparisons."""
    names = ("messages", "prompt", "chosen", "rejected", "completion")
    return "\n".join(_text(row[name]) for name in names if name in row)


def _text(side: str | list[Row]) -> str:
    return side if isinstance(side, str) else "\n".join(f"{m['role']}: {m['content']}" for m in side)


def _prompt(row: Row) -> str:
    return prompt_key(opening_text(row["messages"]) if "messages" in row else prompt_text(row["prompt"]))


# ----------------------------------------------------------------------------------------------- lengths


def _sequences(row: Row, renderer: ChatRenderer) -> list[tuple[list[int], list[bool]]]:
    """Token ids and loss mask of each sequence of a row."""
    from rl_core.data.conversation import training_sequences
    from rl_core.data.preference_rows import row_sides

    if "messages" in row:
        return training_sequences(renderer, row["messages"], row.get("tools"))
    return [(side.ids, [False] * len(side.prompt_ids) + side.loss_mask) for side, _ in row_sides(row, renderer)]


def _lengths(
    rows: Sequence[Row], texts: Sequence[str], renderer: ChatRenderer | None, context: int | None
) -> list[str]:
    """Histogram of the longest sequence of each row."""
    if renderer is None:
        lengths, unit = [len(text) for text in texts], "characters (--model MODEL counts tokens)"
        return [f"lengths         {unit}", *_histogram(lengths)]
    from rl_core.data.row_tokens import Job
    from rl_core.data.token_cache import TokenCache, text_size

    job = Job("demonstrations" if "messages" in rows[0] else "preferences")
    tokens = TokenCache(None).tokens("", lambda: rows, renderer, job, text_size(rows))
    lengths = [length for length in tokens.longest(len(rows)).tolist() if length]
    learnt = int(tokens.rows.loss_tokens.sum())
    lines = [f"lengths         tokens; {tokens.rows.num_tokens} in all, {learnt} with loss"]
    if tokens.refused:
        lines.append(f"                  {len(tokens.refused)} rows are refused by the chat template")
    if context is not None and (over := sum(length > context for length in lengths)):
        lines.append(f"                  {over} rows are longer than the model's context of {context}")
    return [*lines, *_histogram(lengths)]


def _histogram(lengths: Sequence[int]) -> list[str]:
    """Text bars over equal ranges, and the median, 95% and longest."""
    if not lengths:
        return []
    ordered = sorted(lengths)
    low, high = ordered[0], ordered[-1]
    width = max(1, -(-(high - low + 1) // _BINS))
    counts = Counter((length - low) // width for length in lengths)
    lines = []
    for place in range((high - low) // width + 1):
        start, count = low + place * width, counts[place]
        bar = "#" * -(-count * _BARS // max(counts.values()))
        lines.append(f"                  {start:>7} - {start + width - 1:<7} {bar:<{_BARS}} {count}")
    middle, most = ordered[len(ordered) // 2], ordered[min(len(ordered) - 1, len(ordered) * 95 // 100)]
    return [*lines, f"                  median {middle}, 95% up to {most}, longest {high}"]


# ---------------------------------------------------------------------------------------------- repeats


def _pairs(found: Sequence[tuple[int, int]], places: Sequence[str]) -> str:
    shown = "; ".join(f"{places[row]} and {places[first]}" for row, first in found[:_SHOWN])
    return f" ({shown}{f'; and {len(found) - _SHOWN} more' * (len(found) > _SHOWN)})" if found else ""


def _repeats(found: _File, texts: Sequence[str], near: float) -> Iterator[str]:
    prompts = Counter(map(_prompt, found.rows))
    same = _pairs(found.copies, found.places)
    yield f"copies          {len(found.copies)} rows are exact copies of earlier ones{same}"
    yield f"prompts         {len(prompts)} distinct; {sum(prompts.values()) - len(prompts)} rows repeat one"
    if near and not is_available():
        yield "near copies     not looked for: needs the package datasketch (pip install 'posttrain[data]')"
    elif near:
        close = near_pairs(texts, None, near)
        pairs = _pairs([(a, b) for a, b, _ in close], found.places)
        yield f"near copies     {len(close)} rows share {near:.0%} of their shingles with an earlier one{pairs}"
    if found.kind == "preferences":
        pairs = _pairs(found.contradictions, found.places)
        yield f"contradictions  {len(found.contradictions)} rows contradict earlier ones{pairs}"


def _overlap(found: _File, texts: Sequence[str], heldout: Path, max_rows: int, near: float) -> Iterator[str]:
    other = _read(heldout, found.kind, max_rows)
    keys: dict[str, int] = {}
    for place, row in enumerate(other.rows):
        keys.setdefault(_prompt(row), place)
    shared = [(place, keys[key]) for place, key in enumerate(map(_prompt, found.rows)) if key in keys]
    named = "; ".join(f"{found.places[a]} and its {other.places[b]}" for a, b in shared[:_SHOWN])
    more = f"; and {len(shared) - _SHOWN} more" * (len(shared) > _SHOWN)
    yield f"overlap         {len(shared)} rows have a prompt of {heldout}{f' ({named}{more})' * bool(shared)}"
    if near and is_available():
        close = near_pairs(texts, [_whole_text(row) for row in other.rows], near)
        yield f"                {len(close)} rows share {near:.0%} of their shingles with a row of it"


# --------------------------------------------------------------------------------------------- examples


def _examples(rows: Sequence[Row], renderer: ChatRenderer | None) -> Iterator[str]:
    """First, middle and last row, with the tokens that carry loss."""
    from rl_core.data.template_report import marked

    chosen = sorted({0, len(rows) // 2, len(rows) - 1})[:_EXAMPLES]
    for place in chosen:
        yield ""
        yield f"example, row {place + 1} of those that can be used"
        if renderer is None:
            yield from _plain(rows[place])
            continue
        for ids, mask in _sequences(rows[place], renderer):
            yield from marked(renderer, ids, mask)


def _plain(row: Row) -> Iterator[str]:
    """Messages of a row, each with `loss` or `context`."""
    for name in ("messages", "prompt", "chosen", "rejected", "completion"):
        side = row.get(name)
        if side is None:
            continue
        turns = [{"role": name, "content": side}] if isinstance(side, str) else side
        for turn in turns:
            learns = turn["role"] in ("assistant", "text", "chosen", "rejected", "completion")
            learns = learns and turn.get("weight", 1) != 0 and name != "prompt"
            text = turn["content"].replace("\n", "\\n")
            extra = ", ".join(key for key in turn if key not in ("role", "content", "weight"))
            yield f"{'loss' if learns else 'context':7}  {turn['role']:9}  |{text}|{f'  ({extra})' * bool(extra)}"
