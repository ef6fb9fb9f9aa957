"""Stage: read or make the data, check and split it; for a preset also train its tokenizer and create its model.

Writes demonstrations_{train,heldout}.jsonl, preferences_{train,heldout}.jsonl, what the environment needs, and
model/ for a from-scratch preset. Nothing is trained on a row that was not checked.
"""

from __future__ import annotations

import itertools
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rl_core.data import records, splits
from rl_core.data.assistant_message import call_text
from rl_core.data.chat import ChatRenderer
from rl_core.data.files import data_files
from rl_core.data.formats import Kind
from rl_core.data.repeats import digest_of
from rl_core.data.row_tokens import Job
from rl_core.data.row_uses import misfit
from rl_core.data.token_cache import TokenCache, rows_digest, text_size
from rl_core.data.tokenizer import train_tokenizer
from rl_core.environments.environment import Environment
from rl_core.errors import DataError
from rl_core.settings import DataSettings
from rl_core.storage.faults import fault
from rl_core.storage.manifest import digest_bytes, digest_file
from rl_core.storage.single_files import replacing
from tasks.pipeline.conditions import read_conditions
from tasks.pipeline.key import environment_digests, input_digest
from tasks.pipeline.run import PipelineRun
from tasks.pipeline.stage import StageContext, StageResult, run_stage
from tasks.stages.fitting_rows import Found, keep_what_fits
from tasks.stages.loading import make_environment
from tasks.stages.part_tokens import CACHE, part_files
from tasks.stages.row_files import rows_of

__all__ = ["prepare_data"]

logger = logging.getLogger(__name__)

Row = dict[str, Any]


def prepare_data(pipeline_run: PipelineRun, base: Path | str | None) -> StageResult:
    """Run the data stage. `base`: the model to start from; None makes the preset."""
    settings = pipeline_run.settings.stages.prepare_data or DataSettings()
    named = {"demonstrations": settings.demonstrations, "preferences": settings.preferences}
    inputs: dict[str, Path | str] = {name: Path(path) for name, path in named.items() if path}
    if base is not None:
        inputs["base"] = base
    result = run_stage(pipeline_run, "prepare_data", _body, settings=settings, inputs=inputs)
    if settings.preferences:
        _check_uses(settings.preferences, result.path, pipeline_run.settings.stages.preference_uses)
    return result


def _check_uses(source: str, folder: Path, uses: Iterable[str]) -> None:
    """Refuse rows that a later stage cannot use, before anything is trained; their losses are no part of the key."""
    for path in part_files(folder, "preferences"):
        for row in rows_of(path):
            reason = next(filter(None, (misfit(row, use) for use in uses)), "")
            if reason:
                raise DataError(f"{source}: the row with the prompt {row['prompt'][:80]!r}: {reason}")


def _body(context: StageContext) -> dict[str, Any]:
    environment = make_environment(context.pipeline, None)
    summary: dict[str, Any] = {}
    report = environment.prepare(context.folder, context.seed)
    if report:
        summary["environment"] = report
        environment = make_environment(context.pipeline, context.folder)
    sets = {
        "demonstrations": _demonstrations(context, environment, summary),
        "preferences": _preferences(context, summary),
    }
    renderer, length = _tokenizer_and_model(context, sets, environment, summary)
    cache = TokenCache(context.folder.parent / CACHE)
    for kind, prompt_of in _PROMPTS.items():
        found = sets[kind]
        if not found.rows:
            continue
        _leave_out_repeats(context, found, prompt_of, summary, kind)
        job, rows = Job(kind), found.rows
        every = range(len(rows))
        tokens = cache.tokens(rows_digest(rows), partial(rows.select, every), renderer, job, text_size(rows))
        fitting = keep_what_fits(found, tokens, kind, length, context.settings, summary)
        parts = _split_and_write(context, kind, found.rows, prompt_of, summary)
        for path, places in zip(part_files(context.folder, kind), parts, strict=True):
            cache.keep_part(digest_file(path), renderer, job, tokens, fitting.part(places), fitting.max_tokens)
    _refuse_changed(context)
    summary["note"] = _note(summary)
    context.tracker.log_metrics(_numbers(summary), 0)
    logger.info("data: %s", summary["note"])
    return summary


def _refuse_changed(context: StageContext) -> None:
    """Refuse data that changed since the stage got its key: the finished folder would stand for other rows."""
    known = read_conditions(context.folder) or {}
    files = {name: value for name, value in context.inputs.items() if name != "base"}
    digests = {name: input_digest(value) for name, value in files.items()}
    for part, found in (("inputs", digests), ("content", environment_digests(context.pipeline))):
        for name, digest in found.items():
            if digest != known.get(part, {}).get(name, digest):
                place = files.get(name) or context.pipeline.environment.options[name]
                raise DataError(f"{place}: was changed while it was read; start again when nothing writes to it")


def _demonstrations(context: StageContext, environment: Environment, summary: Row) -> Found:
    """Rows of {messages, level, kind, seed}: from a file, or written by the environment's demonstrator."""
    settings: DataSettings = context.settings
    if settings.demonstrations is not None:
        found = _read(context, "demonstrations", settings.demonstrations, records.read_demonstrations, summary)
        return _told_apart(found)
    if context.pipeline.stages.sft is None:
        return Found()
    levels = settings.levels or environment.levels
    found = Found(source=f"demonstrations of {environment.name}")
    schema = environment.tools.schema() if context.pipeline.model.native_tools else []
    tools = {"tools": schema} if schema else {}  # as rollouts of this environment show them
    right: Counter[str] = Counter()
    shown: Counter[str] = Counter()
    for level, seed in itertools.islice(_training_seeds(environment, levels), settings.num_demonstrations):
        demonstration = environment.demonstration(seed, level)
        if demonstration is None:
            raise DataError(
                f"environment '{environment.name}' has no demonstrator and stages.prepare_data.demonstrations names no "
                "file, so there is nothing for stages.sft to learn from"
            )
        row = {"messages": demonstration.messages, "level": level, "kind": demonstration.kind, "seed": seed, **tools}
        by_content = environment.held_out(level).by == "content"
        row["question"] = environment.question(seed, level) if by_content else f"{level} {seed}"  # decides the split
        found.rows.append(row)
        found.places.append((found.source, len(found.rows)))
        shown[level] += 1
        right[level] += demonstration.success
        if len(found.rows) % 500 == 0:
            context.tracker.progress(len(found.rows), settings.num_demonstrations, "demonstrations")
    summary["demonstrator_success"] = {level: round(right[level] / shown[level], 4) for level in shown}
    return found


def _told_apart(found: Found) -> Found:
    """Demonstrations that all begin alike are told apart by the seeds of their episodes, if they have some."""
    openings = (splits.prompt_key(splits.opening_text(row["messages"])) for row in found.rows)
    first = next(openings, None)
    if first is not None and all(opening == first for opening in openings) and all("seed" in row for row in found.rows):
        logger.warning("%s: all demonstrations begin with the same text; they are held out by seed only", found.source)
        for place, row in enumerate(found.rows):
            found.rows.replace(place, {**row, "question": f"{row.get('level', '')} {row['seed']}"})
    return found


def _training_seeds(environment: Environment, levels: Iterable[str]) -> Iterable[tuple[str, int]]:
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


def _preferences(context: StageContext, summary: Row) -> Found:
    path = context.settings.preferences
    return _read(context, "preferences", path, records.read_preferences, summary) if path else Found()


def _read(context: StageContext, name: str, path: str, reader: Callable[..., records.Records], summary: Row) -> Found:
    """Rows of a file, or of every data file of a folder."""
    settings: DataSettings = context.settings
    found, rows, skipped = Found(source=path), 0, 0
    digests: list[str] = []
    copies = contradictions = 0
    for file in data_files(Path(path)):
        read = reader(file, on_bad_row=settings.on_bad_row, max_rows=settings.max_rows)
        context.tracker.log_dataset(file, read.digest, name, "training")
        rows, skipped, digests = rows + read.num_rows, skipped + read.num_skipped, [*digests, read.digest]
        copies, contradictions = copies + len(read.repeats.copies), contradictions + len(read.repeats.contradictions)
        found.rows.extend(read.rows)
        name_of_file = str(file)
        found.places += [(name_of_file, line) for line in read.lines]
    digest = digests[0] if len(digests) == 1 else digest_bytes("\n".join(digests).encode())
    summary[f"{name}_file"] = {
        "rows": rows, "skipped": skipped, "copies": copies, "contradictions": contradictions, "sha256": digest,
    }  # fmt: skip
    return found


def _tokenizer_and_model(
    context: StageContext, sets: Mapping[str, Found], environment: Environment, summary: Row
) -> tuple[ChatRenderer, int]:
    """Make the preset's tokenizer and model, or read the base's tokenizer; returns the renderer and the context."""
    from rl_core.models import causal_lm  # here: it loads torch, not needed if cached

    settings = context.pipeline.model
    if "base" in context.inputs:
        tokenizer = causal_lm.load_tokenizer(context.inputs["base"], settings)
        return ChatRenderer(tokenizer, settings), causal_lm.context_length(context.inputs["base"], settings)
    has_texts = any(len(found.rows) for found in sets.values())
    tokenizer = train_tokenizer(_row_texts(sets) if has_texts else _opening_texts(environment), settings.vocab_size)
    causal_lm.use_own_template(tokenizer, settings)
    model = causal_lm.create(settings, tokenizer, context.seed)
    causal_lm.save(model, tokenizer, context.folder / "model")
    summary["parameters"] = causal_lm.num_parameters(model)
    tokenizer = causal_lm.load_tokenizer(context.folder / "model", settings)  # as later stages have it
    return ChatRenderer(tokenizer, settings), settings.context


def _texts(message: Row) -> list[str]:
    """Everything in a message that becomes tokens."""
    calls = [call_text(call) for call in message.get("tool_calls", ())]
    return [text for text in (message.get("reasoning_content"), message["content"], *calls) if text]


def _row_texts(sets: Mapping[str, Found]) -> Iterator[str]:
    """Everything in all rows that becomes tokens."""
    for row in sets["demonstrations"].rows:
        yield from _all_texts(row["messages"])
    for row in sets["preferences"].rows:
        for side in (row[name] for name in ("prompt", "chosen", "rejected", "completion") if name in row):
            yield from [side] if isinstance(side, str) else _all_texts(side)


def _all_texts(messages: Iterable[Row]) -> list[str]:
    return [text for message in messages for text in _texts(message)]


def _leave_out_repeats(
    context: StageContext, found: Found, prompt_of: Callable[[Row], str], summary: Row, name: str
) -> None:
    """Leave out, and count, copies of earlier rows or further rows of a prompt, as `deduplicate` says."""
    kind = context.settings.deduplicate
    if kind == "off":
        return
    first: dict[bytes, int] = {}
    for index, row in enumerate(found.rows):
        first.setdefault(digest_of(row if kind == "rows" else splits.prompt_key(prompt_of(row))), index)
    kept = sorted(first.values())
    summary[f"{name}_repeats_left_out"] = len(found.rows) - len(kept)
    found.keep(kept)


def _opening_texts(environment: Environment) -> list[str]:
    """Openings of some training episodes: text for a tokenizer where there is nothing else."""
    seeds = itertools.islice(_training_seeds(environment, environment.levels), 500)
    return [message["content"] for level, seed in seeds for message in environment.episode(seed, level).reset()]


def _demonstration_prompt(row: Row) -> str:
    """Split key of a demonstration: its question if the environment knows it, else its text before the first answer."""
    return str(row["question"]) if "question" in row else splits.opening_text(row["messages"])


def _preference_prompt(row: Row) -> str:
    return splits.prompt_text(row["prompt"])


_PROMPTS: dict[Kind, Callable[[Row], str]] = {
    "demonstrations": _demonstration_prompt,
    "preferences": _preference_prompt,
}


def _split_and_write(
    context: StageContext, kind: Kind, rows: Sequence[Row], prompt_of: Callable[[Row], str], summary: Row
) -> tuple[list[int], list[int]]:
    """Split by prompt, report duplicates and overlap, write both parts; returns the places of the rows of each."""
    train, heldout, report = splits.split_places(rows, prompt_of, context.settings.heldout_fraction, context.seed)
    summary[kind] = report
    for path, split, part in zip(part_files(context.folder, kind), ("train", "heldout"), (train, heldout), strict=True):
        _write_rows(path, (rows[place] for place in part))
        fault("data.rows")
        for tracker in (context.tracker, context.pipeline_run.parent):
            tracker.log_dataset(path, digest_file(path), f"{kind}_{split}", split)
    return train, heldout


def _write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    with replacing(path) as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def _numbers(summary: Mapping[str, Any]) -> dict[str, float]:
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


def _note(summary: Mapping[str, Any]) -> str:
    parts = []
    for name in ("demonstrations", "preferences"):
        if name in summary:
            parts.append(f"{summary[name]['num_train_rows']} {name}, {summary[name]['num_heldout_rows']} held out")
        if summary.get(f"{name}_repeats_left_out"):
            parts.append(f"{summary[f'{name}_repeats_left_out']} repeated {name} left out")
        if summary.get(f"{name}_too_long"):
            parts.append(f"{summary[f'{name}_too_long']} {name} too long and left out")
        if summary.get(f"{name}_cut"):
            parts.append(f"{summary[f'{name}_cut']} {name} cut at max_tokens or the context")
    if "parameters" in summary:
        parts.append(f"model of {summary['parameters'] / 1e6:.2f}M parameters")
    return "; ".join(parts) or "nothing to prepare"
