"""Tasks over data rows: the policy answers a prompt, in one turn or with tools, and verifiers or rewards score it.

    environment: {name: prompts, options: {path: questions.jsonl, verifier: numeric}}
    Prompts([{"prompt": "2 + 3 = ?", "target": "5"}, ...])

A row's target is the right answer as text; a field of a column is named with a dot (`reward_model.ground_truth`, as in
verl's files). Its level (in all rows or none) is a level of difficulty. All columns reach
reward functions as `trajectory.row`. Without a verifier the environment itself gives no reward and knows no success.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from rl_core.data.files import describe_value, list_field_names, read_field
from rl_core.data.images import describe_images
from rl_core.data.records import (
    PromptRows,
    RowProblem,
    list_table_files,
    read_prompt_rows,
    report_row_problems,
)
from rl_core.environments.answer_checks import AnswerCheck, build_answer_check
from rl_core.environments.environment import (
    HELDOUT_START,
    Demonstration,
    Environment,
    Episode,
    Step,
    compute_content_digest,
    is_heldout,
)
from rl_core.environments.tools import CallFormat, Tool, Toolset
from rl_core.errors import DataError, SettingsError, ToolMisuse, suggest_name
from rl_core.types import Message
from rl_core.user_code.load import import_object

DEFAULT_LEVEL = "all"
MAX_CALLS = 16  # of one turn
_TARGET_COLUMNS = ("target", "answer")  # columns of the right answer unless an option names one
PromptRowSequence = Sequence[Mapping[str, Any]]


class PromptEpisode(Episode):
    """One row: its prompt, then tool calls if there are tools, then the answer, which ends the episode."""

    def __init__(self, seed: int, level: str, row: Mapping[str, Any], environment: Prompts) -> None:
        super().__init__(seed, level)
        self._messages = environment.opening(row)
        self.prompt = self._messages[-1]["content"]
        self.target = environment.target_of(row)
        self.kind = str(row.get("kind", ""))
        self.row = dict(row)
        if isinstance(row["prompt"], list):  # trajectories hold the row, and need no files in it
            messages = row["prompt"]
            self.row["prompt"] = [
                {name: value for name, value in message.items() if name != "images"}
                for message in messages
            ]
        self._answer_check, self._tools = environment.check, environment.tools_of_episode()

    def reset(self) -> list[Message]:
        """Return the prompt, after the system message if there is one."""
        return list(self._messages)

    def act(self, text: str) -> Step:
        """Run the calls, or take the answer."""
        try:
            calls = self._tools.parse_all(text, MAX_CALLS)
        except ToolMisuse as misuse:
            return Step([Message(role="tool", content=f"error: {misuse}")], is_error=True)
        if calls:
            results = self._tools.run_all(calls)
            messages = [Message(role="tool", content=observation) for observation, _ in results]
            is_error = any(failed for _, failed in results)
            info = {}
            if is_error:
                info["failed_calls"] = [n for n, (_, failed) in enumerate(results) if failed]
            return Step(
                messages, tool_call=calls[0], more_calls=calls[1:], is_error=is_error, info=info
            )
        self.close()
        if self._answer_check is None:
            return Step(terminated=True, answer=text)
        score = self._answer_check.score_action(text, self.target, self.row)
        return Step(
            reward=score, terminated=True, answer=text, success=score >= 1, info={"score": score}
        )

    def close(self) -> None:
        """Close the tools' sessions."""
        self._tools.close()


class Prompts(Environment):
    """One episode per row; held-out rows are episodes of the held-out split."""

    name = "prompts"
    blocking = False
    knows_success = False

    def __init__(
        self,
        rows: PromptRowSequence | None = None,
        heldout: PromptRowSequence | float | str | None = None,
        *,
        path: str | None = None,
        files: str | None = None,
        revision: str | None = None,
        prompt: str = "prompt",
        target: str | None = None,
        level: str = "level",
        system: str = "",
        verifier: str | dict[str, Any] | None = None,
        tools: str | list[Any] | None = None,
        mcp: dict[str, Any] | None = None,
        call_format: CallFormat = "hermes",
        describe_tools: bool = True,
        demonstrations: str | None = None,
        on_bad_row: Literal["stop", "skip"] = "stop",
        max_rows: int | None = None,
        data: Path | None = None,
    ) -> None:
        """Read rows from a file, or take them in memory as returned by `data.records.read_prompts`.

        Args:
            rows: rows in memory, instead of a path.
            heldout: share of distinct questions to hold out (default 0.1 with a path, else none), a file of held-out
                rows,
                or the rows.
            path: JSONL, JSON array, Parquet or CSV file, a folder of them, or with `revision` a hub data set.
            files: pattern of the files to read from a folder or data set, such as 'data/train-*.parquet'.
            revision: commit of the hub data set, 40 hex digits.
            prompt: column of the prompt, text or a list of messages. This and the other columns may be fields of a
                column: 'reward_model.ground_truth'.
            target: column of the right answer; default: target or answer, if the rows have one; '' = none.
            level: column of the level of difficulty.
            system: system message before every prompt.
            verifier: exact, numeric, regex, math, code, or {name: options}: reward and success of an answer.
            tools: functions with type hints, a list of them or of `Tool`, or a `Toolset`, at an import path or file.
            mcp: MCP servers by name, see `environments.mcp_tools`.
            call_format: syntax of calls in the system message, line or hermes.
            describe_tools: False omits their description from the system message (with model.native_tools).
            demonstrations: column of an answer to imitate, text or the messages after the prompt.
            on_bad_row: 'skip' drops bad rows; 'stop' refuses the file.
            max_rows: maximum number of rows to read.
        Raises: SettingsError; DataError if there are no rows, or only some rows have a level.
        """
        super().__init__(data)
        self._prompt, self._target = prompt, target
        self._level, self._demonstrations = level, demonstrations
        self.check = _build_verifier(verifier)
        self.knows_success = self.check is not None
        self._tools = _build_toolset(tools, mcp)
        self._has_tools = bool(mcp) or bool(self._tools.tools)
        self._system_option = system
        self._call_format, self._describe_tools = call_format, describe_tools
        self._report: dict[str, Any] = {}
        # Rows as they were read, with a function that says where each stands.
        self._sources: list[tuple[PromptRowSequence, Callable[[int], str]]] = []
        self._verifier_key, self._on_bad_row = repr(verifier), on_bad_row
        reader = functools.partial(_read_rows_cached, prompt, on_bad_row, max_rows)
        self._rows = self._split_rows(
            rows, heldout, path, functools.partial(self._read_usable_rows, reader), files, revision
        )
        all_rows = [row for split_rows in self._rows.values() for row in split_rows]
        self.columns = tuple(dict.fromkeys(name for row in all_rows for name in row))
        self._check_column_options(all_rows)
        self._check_values_are_plain(all_rows)
        if path is None:
            self._refuse_unusable_rows()
        self.levels = list_row_levels([read_field(row, level) for row in all_rows], level)
        self._seeds: dict[tuple[str, str], list[int]] = {
            (split, row_level): [] for split in self._rows for row_level in self.levels
        }
        for split, split_rows in self._rows.items():
            for seed, row in zip(self.seeds(split), split_rows, strict=True):
                row_level = self.levels[0] if len(self.levels) == 1 else str(read_field(row, level))
                self._seeds[split, row_level].append(seed)
        tools_block = bool(mcp) or any(tool.may_wait for tool in self._tools.tools.values())
        self.blocking = tools_block or bool(self.check is not None and self.check.blocking)

    @classmethod
    def named_code(cls, options: Mapping[str, Any]) -> tuple[str, ...]:
        """List the import paths of the tools."""
        tools = options.get("tools")
        paths = tools if isinstance(tools, list) else [tools]
        return tuple(path for path in paths if isinstance(path, str))

    @functools.cached_property
    def _system(self) -> str:
        """System message: the option's text and the description of the tools, which asks the MCP servers."""
        if not self._has_tools or not self._describe_tools:
            return self._system_option
        max_calls = 1 if self._call_format == "line" else MAX_CALLS
        description = self._tools.instructions(self._call_format, max_calls)
        return "\n\n".join(part for part in (self._system_option, description) if part)

    @property
    def tools(self) -> Toolset:
        """Tools of the options."""
        return self._tools

    def tools_of_episode(self) -> Toolset:
        """Open the tools with separate sessions."""
        return self._tools.session()

    def episode(self, seed: int, level: str) -> Episode:
        """Return the episode of the seed's row."""
        self.check_level(level)
        return PromptEpisode(seed, level, self._find_row(seed), self)

    def opening(self, row: Mapping[str, Any]) -> list[Message]:
        """Build the opening messages of a row."""
        messages = _read_prompt_messages(row)
        if self._system and messages[0]["role"] == "system":
            first = Message(role="system", content=f"{messages[0]['content']}\n\n{self._system}")
            return [first, *messages[1:]]
        if self._system:
            return [Message(role="system", content=self._system), *messages]
        return messages

    def target_of(self, row: Mapping[str, Any]) -> str:
        """Return the right answer of a row as text; "" = none."""
        values = (read_field(row, name) for name in self._target_columns)
        return next((str(value) for value in values if value is not None), "")

    @property
    def _target_columns(self) -> tuple[str, ...]:
        return _TARGET_COLUMNS if self._target is None else tuple(filter(None, (self._target,)))

    def iter_target_rows(self) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
        """Yield (place, right answer, row) of every row, see `Environment`."""
        for rows, describe_place in self._sources:
            for index, row in enumerate(rows):
                yield describe_place(index), self.target_of(row), row

    def demonstration(self, seed: int, level: str) -> Demonstration | None:
        """Return the row's answer in the column of demonstrations. Raises: DataError for a row without one."""
        if self._demonstrations is None:
            return None
        row = self._find_row(seed)
        answer = read_field(row, self._demonstrations)
        if isinstance(answer, str) and answer.strip():
            answer = [Message(role="assistant", content=answer)]
        if not isinstance(answer, list) or not answer or answer[-1].get("role") != "assistant":
            raise DataError(
                f"options.demonstrations: the column '{self._demonstrations}' of the row of "
                f"{str(row['prompt'])[:60]!r} holds no answer (text, or messages that end with the assistant's)"
            )
        return Demonstration(
            [*self.opening(row), *answer],
            level,
            str(row.get("kind", "")),
            seed,
            True,
        )

    def prepare(self, folder: Path, seed: int) -> dict[str, Any]:
        """Return a summary of the rows read, for the data stage; the rows stay in their file."""
        counts = {f"num_{split}_rows": len(rows) for split, rows in self._rows.items()}
        return {**self._report, **counts, "levels": list(self.levels)} if self._report else {}

    def seeds(self, split: str) -> range:
        """Return one seed per row."""
        start = 0 if split == "train" else HELDOUT_START
        return range(start, start + len(self._rows[split]))

    def seeds_of(self, split: str, level: str) -> Sequence[int]:
        """Return the seeds of the rows of one level."""
        self.check_level(level)
        return self._seeds[split, level]

    def heldout_levels(self) -> list[tuple[str, int]]:
        """List (level, seed) of every held-out row, in order."""
        levels = {seed: level for level in self.levels for seed in self._seeds["heldout", level]}
        return [(levels[seed], seed) for seed in self.seeds("heldout")]

    def _find_row(self, seed: int) -> Mapping[str, Any]:
        return find_split_row(self._rows, seed, "rows")

    def _split_rows(
        self,
        rows: PromptRowSequence | None,
        heldout: PromptRowSequence | float | str | None,
        path: str | None,
        read: Callable[..., PromptRows],
        files: str | None,
        revision: str | None,
    ) -> dict[str, PromptRowSequence]:
        """Split into training and held-out rows."""
        if (rows is None) == (path is None):
            problem = "both are given" if path is not None else "neither is given"
            raise SettingsError(
                f"options.path: {problem}; name a file of rows with a prompt, or hand in rows"
            )
        if path is not None:
            records = read(path, files, revision)
            rows = records.rows
            self._report = {
                "files": records.files,
                "digest": records.digest,
                "num_rows": records.num_rows,
                "num_skipped": records.num_skipped,
            }
            heldout = 0.1 if heldout is None else heldout
        else:
            for name, given in (("data", rows), ("heldout", heldout)):
                if isinstance(given, Sequence) and not isinstance(given, str):
                    self._sources.append((given, (f"{name}[{{}}]").format))
        if not rows:
            raise DataError("prompts: there is no row to train on")
        if isinstance(heldout, str):
            return {"train": rows, "heldout": read(heldout, None, None).rows}
        if isinstance(heldout, int | float):
            if not 0 <= heldout < 1:
                raise SettingsError(
                    f"options.heldout: {heldout} must be a share from 0 to below 1, or a file"
                )
            self.splits_itself = heldout > 0
            return self._split_by_content(rows, heldout)
        return {"train": rows, "heldout": heldout or ()}

    def _split_by_content(
        self, rows: PromptRowSequence, share: float
    ) -> dict[str, PromptRowSequence]:
        """Split rows by the digest of their question, with at least one question of each level in both splits."""
        if not share:
            return {"train": rows, "heldout": ()}
        keys = []
        for row in rows:
            messages = [
                [m["role"], f"{m['content']}{describe_images(m)}"]
                for m in _read_prompt_messages(row)
            ]
            keys.append(compute_content_digest(messages))
        heldout = {key for key in keys if is_heldout(key, share)}
        row_levels = [str(read_field(row, self._level)) for row in rows]
        for level in dict.fromkeys(row_levels):
            keyed_levels = zip(keys, row_levels, strict=True)
            level_keys = sorted({key for key, row_level in keyed_levels if row_level == level})
            if len(level_keys) > 1 and heldout.isdisjoint(level_keys):
                heldout.add(level_keys[0])
            elif len(level_keys) > 1 and heldout.issuperset(level_keys):
                heldout.discard(level_keys[-1])
        if not heldout or heldout.issuperset(keys):
            raise SettingsError(
                f"options.heldout: {len(set(keys))} different questions cannot be split into a training and a held-out "
                "set; give more rows, or heldout: 0"
            )
        splits: dict[str, list[Any]] = {"train": [], "heldout": []}
        for key, row in zip(keys, rows, strict=True):
            splits["heldout" if key in heldout else "train"].append(row)
        return {name: split_rows for name, split_rows in splits.items()}

    def _read_usable_rows(self, read: Callable[..., PromptRows], *source: Any) -> PromptRows:
        """Read rows; refuse or skip, by `on_bad_row`, those that the verifier cannot use. Raises: RecordsError."""
        records = read(*source)
        self._check_values_are_plain(records.rows)
        names = (name for row in records.rows for name in list_field_names(row))
        if self.check is not None and self._can_check_rows(tuple(dict.fromkeys(names))):
            key = f"{self._verifier_key} {self._target}"
            if key not in records.refused:
                records.refused[key] = list(_find_unusable_rows(self, self.check, records.rows))
            if refused := records.refused[key]:
                problems = [
                    RowProblem(records.describe_place(i), 0, "", text) for i, text in refused
                ]
                report_row_problems(str(source[0]), problems, records.num_rows, self._on_bad_row)
                records = records.drop_rows({index for index, _ in refused})
        self._sources.append((records.rows, records.describe_place))
        return records

    def _refuse_unusable_rows(self) -> None:
        """Refuse rows in memory that the verifier cannot use. Raises: RecordsError."""
        if self.check is None:
            return
        for rows, describe_place in self._sources:
            refused = _find_unusable_rows(self, self.check, rows)
            problems = [RowProblem(describe_place(i), 0, "", text) for i, text in refused]
            report_row_problems("prompts", problems, len(rows), "stop")

    def _can_check_rows(self, columns: tuple[str, ...]) -> bool:
        """Return whether the rows have the verifier's column; `_check_column_options` reports a missing one."""
        if self.check is None:
            return False
        if self.check.column is not None:
            return self.check.column in columns
        return not self.check.needs_target or bool(set(self._target_columns) & set(columns))

    def _check_values_are_plain(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Refuse targets and levels that are objects or lists, whose text would be Python's. Raises: DataError."""
        options = dict.fromkeys(self._target_columns, "target") | {self._level: "level"}
        for number, row in enumerate(rows, start=1):
            for column, option in options.items():
                value = read_field(row, column)
                if not isinstance(value, Mapping | list):
                    continue
                fields = list_field_names({column: value})[1:]
                advice = "set the option to a column of text or numbers"
                if fields:
                    advice = (
                        f"name a field of it, options.{option}: {fields[-1]} ({', '.join(fields)})"
                    )
                elif option == "target":
                    advice += ", or to '' if no verifier needs the right answer"
                raise DataError(
                    f"options.{option}: the column '{column}' of row {number} holds {describe_value(value)}; {advice}"
                )

    def _check_column_options(self, all_rows: Sequence[Mapping[str, Any]]) -> None:
        """Raise SettingsError for options that name a missing column."""
        assert self.columns is not None
        columns = {"target": self._target or None, "demonstrations": self._demonstrations}
        if self._level != "level":
            columns["level"] = self._level
        if self.check is not None and "." in (self.check.column or ""):
            columns["verifier"] = self.check.column
        known_columns = dict.fromkeys(name for row in all_rows for name in list_field_names(row))
        for option, column in columns.items():
            if column is not None and column not in known_columns:
                raise SettingsError(
                    f"options.{option}: no row has a column '{column}', they have {', '.join(known_columns)}; "
                    f"{suggest_name(column, tuple(known_columns))}"
                )
        if self.check is None:
            return
        self.check.check_columns(self.columns)
        if (
            self.check.needs_target
            and not self._target
            and not set(self._target_columns) & set(self.columns)
        ):
            raise SettingsError(
                f"options.target: the verifier '{self.check.name}' compares with the right answer; name its column, "
                f"one of {', '.join(self.columns)}"
            )


def _find_unusable_rows(
    environment: Prompts, check: AnswerCheck, rows: PromptRowSequence
) -> Iterator[tuple[int, str]]:
    """Yield (index, reason) of the rows that a verifier cannot use."""
    for index, row in enumerate(rows):
        try:
            check.check_row(environment.target_of(row), row)
        except DataError as error:
            yield index, str(error)


def _read_prompt_messages(row: Mapping[str, Any]) -> list[Message]:
    prompt = row["prompt"]
    return [Message(role="user", content=prompt)] if isinstance(prompt, str) else list(prompt)


def _read_rows_cached(
    prompt: str,
    on_bad_row: str,
    max_rows: int | None,
    path: str,
    files: str | None,
    revision: str | None,
) -> PromptRows:
    """Return the rows of a path, read once per process unless a file changes.

    Raises: SettingsError, DataError.
    """
    source = Path(path).expanduser()
    stamps: tuple[Any, ...] = ()
    if source.exists() and revision is None:
        states = [(str(file), file.stat()) for file in list_table_files(source, files)]
        stamps = tuple((name, state.st_mtime_ns, state.st_size) for name, state in states)
    return _read_stamped_rows(prompt, on_bad_row, max_rows, path, files, revision, stamps)


@functools.lru_cache(maxsize=4)
def _read_stamped_rows(
    prompt: str,
    on_bad_row: str,
    max_rows: int | None,
    path: str,
    files: str | None,
    revision: str | None,
    stamps: tuple[Any, ...],
) -> PromptRows:
    return read_prompt_rows(
        path,
        prompt=prompt,
        files=files,
        revision=revision,
        on_bad_row=on_bad_row,
        max_rows=max_rows,
    )


def _build_verifier(verifier: str | dict[str, Any] | None) -> AnswerCheck | None:
    if verifier is None:
        return None
    if isinstance(verifier, dict) and len(verifier) != 1:
        raise SettingsError(
            f"options.verifier: {sorted(verifier)}: name one, as {{numeric: {{tolerance: 0.01}}}}"
        )
    name, options = (verifier, None) if isinstance(verifier, str) else next(iter(verifier.items()))
    try:
        return build_answer_check(name, options)
    except SettingsError as error:
        raise SettingsError(f"options.verifier: {error}") from error


def _build_toolset(sources: str | list[Any] | None, mcp: dict[str, Any] | None) -> Toolset:
    """Build the toolset from import paths or objects, and from MCP servers."""
    tools: list[Tool] = []
    for item in sources if isinstance(sources, list) else [sources] if sources is not None else []:
        value = import_object(item, "options.tools", "tool") if isinstance(item, str) else item
        if isinstance(value, Toolset):
            tools += value.tools.values()
            continue
        for tool in value if isinstance(value, Iterable) and not callable(value) else [value]:
            if not isinstance(tool, Tool) and not callable(tool):
                raise SettingsError(f"options.tools: {tool!r} is neither a Tool nor a function")
            tools.append(tool if isinstance(tool, Tool) else Tool.from_function(tool))
    if mcp:
        from rl_core.environments.mcp_tools import McpToolset

        return McpToolset(mcp, tools)
    return Toolset(tools)


def find_split_row(
    splits: Mapping[str, Sequence[Mapping[str, Any]]], seed: int, noun: str
) -> Mapping[str, Any]:
    """Return the row of a seed; held-out rows count from HELDOUT_START. Raises: SettingsError if there is none."""
    is_heldout = seed >= HELDOUT_START
    split, index = ("heldout", seed - HELDOUT_START) if is_heldout else ("train", seed)
    if not 0 <= index < len(splits[split]):
        raise SettingsError(f"seed {seed}: there are {len(splits[split])} {split} {noun}")
    return splits[split][index]


def list_row_levels(levels: Sequence[Any], column: str) -> tuple[str, ...]:
    """List the distinct levels of rows, in order; DEFAULT_LEVEL if no row has one.

    Raises: DataError if only some rows have one.
    """
    if any(level is None for level in levels) and any(level is not None for level in levels):
        count = sum(level is None for level in levels)
        raise DataError(
            f"prompts: {count} of {len(levels)} rows have no {column}; give it in every row or in none"
        )
    return tuple(dict.fromkeys(str(level) for level in levels if level is not None)) or (
        DEFAULT_LEVEL,
    )
