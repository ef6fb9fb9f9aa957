"""Word problems with a calculator, read from a JSONL file in GSM8K format (arXiv:2110.14168).

A row is {"question", "answer", "final"}; `answer` is a worked solution with <<48/2=24>> annotations, which become
calculator calls in the demonstrations:

    assistant   Natalia sold 48/2 =
                calculator 48/2
    tool        24
    assistant   24 clips in May.
                #### 24
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from rl_core.data.files import BadRow
from rl_core.data.formats import Row
from rl_core.data.records import read_questions
from rl_core.data.splits import split_by_prompt
from rl_core.environments.calculator import (
    CALCULATOR,
    convert_solution,
    extract_final_answer,
    extract_solution_final,
    is_same_number,
    parse_single_number,
)
from rl_core.environments.environment import (
    HELDOUT_START,
    Demonstration,
    Environment,
    Episode,
    Step,
)
from rl_core.environments.tools import CallFormat, Toolset
from rl_core.errors import SettingsError, ToolMisuse
from rl_core.storage.atomic_files import make_folder, write_text_atomic
from rl_core.types import Message

_FILES = {"train": "questions_train.jsonl", "heldout": "questions_heldout.jsonl"}
_TASK = "Solve the problem step by step. End with a line '#### NUMBER'."


def classify_level(num_steps: int) -> str:
    """Return the level for a number of <<>> annotations in the worked solution."""
    return "short" if num_steps <= 2 else "medium" if num_steps <= 4 else "long"


def validate_question(row: Row) -> Row:
    """Return the row with `final` as one number in plain digits. Raises: BadRow.

    `final` may be missing if the solution ends in a line `#### NUMBER`, as in the original files.
    """
    stated = extract_solution_final(row["answer"])
    final = parse_single_number(row["final"] or stated or "")
    if final is None:
        if row["final"]:
            raise BadRow("final", "must hold one number")
        raise BadRow("answer", "has no final and no line '#### NUMBER'")
    if stated is not None and not is_same_number(stated, final):
        raise BadRow("final", f"is {final}, but the solution ends in '#### {stated}'")
    return {**row, "final": final}


class GSM8KEpisode(Episode):
    """One question. Reward 1 for the exact final number, else 0.

    A failed or malformed call returns an error and the episode continues; an action with neither a call nor an answer
    ends it with reward 0.
    """

    def __init__(
        self, seed: int, level: str, row: Row, kind: str, tools: Toolset, system: str
    ) -> None:
        super().__init__(seed, level)
        self.kind, self.prompt, self.target = kind, row["question"], row["final"]
        self._tools, self._system = tools, system

    def reset(self) -> list[Message]:
        """Return the tool instructions and the question."""
        return [
            Message(role="system", content=self._system),
            Message(role="user", content=self.prompt),
        ]

    def act(self, text: str) -> Step:
        """Run a call or score an answer."""
        try:
            call = self._tools.parse(text)
        except ToolMisuse as misuse:
            return Step([Message(role="tool", content=f"error: {misuse}")], is_error=True)
        if call is not None:
            observation, is_error = self._tools.run(call)
            return Step(
                [Message(role="tool", content=observation)], tool_call=call, is_error=is_error
            )
        answer = extract_final_answer(text)
        success = answer is not None and is_same_number(answer, self.target)
        return Step(reward=float(success), terminated=True, answer=answer, success=success)


class GSM8K(Environment):
    """Questions from a file, split once into training and held-out sets; seeds index the rows of each split.

    Args:
        path: raw JSONL or Parquet file of questions; optional if `data` already holds the split files.
        heldout: share of distinct questions held out from training.
        call_format: call syntax in demonstrations: 'line' (calculator 48/2) or 'hermes' (<tool_call> JSON).
        on_bad_row: 'stop' refuses a file with bad rows, 'skip' drops and counts them.
        max_rows: read at most this many rows.
    """

    name: ClassVar[str] = "gsm8k"
    levels = ("short", "medium", "long")
    blocking = False
    splits_itself = True  # by the text of the question, when the file is read

    def __init__(
        self,
        path: str | None = None,
        heldout: float = 0.1,
        call_format: CallFormat = "line",
        on_bad_row: Literal["stop", "skip"] = "stop",
        max_rows: int | None = None,
        data: Path | None = None,
    ) -> None:
        super().__init__(data)
        if not 0 < heldout < 1:
            raise SettingsError(f"options.heldout: {heldout} must be between 0 and 1")
        if call_format not in ("line", "hermes"):
            raise SettingsError(f"options.call_format: '{call_format}' must be 'line' or 'hermes'")
        if max_rows is not None and max_rows < 2:
            raise SettingsError(f"options.max_rows: {max_rows} must be at least 2")
        self._path = None if path is None else Path(path)
        if not self._is_prepared():
            if self._path is None:
                raise SettingsError(
                    "options.path: environment 'gsm8k' needs a JSONL file of questions"
                )
            if not self._path.exists():
                raise SettingsError(f"options.path: no such file: {self._path}")
        self._heldout, self._on_bad_row, self._max_rows = heldout, on_bad_row, max_rows
        self._call_format: CallFormat = call_format
        self._tools = Toolset([CALCULATOR])
        self._system = f"{_TASK} {self._tools.instructions(call_format)}"
        self._splits: dict[str, list[Row]] | None = None
        self._by_level: dict[tuple[str, str], list[int]] = {}

    @property
    def tools(self) -> Toolset:
        """The calculator."""
        return self._tools

    def prepare(self, folder: Path, seed: int) -> dict[str, Any]:
        """Validate and split the raw file; write questions_train.jsonl and questions_heldout.jsonl and return a report.

        Raises: DataError or RecordsError if the file cannot be used; then nothing is written.
        """
        splits, report = self._read_raw_file(seed)
        make_folder(folder)
        for split, rows in splits.items():
            lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            write_text_atomic(folder / _FILES[split], lines)
        self._index_splits(splits)
        return report

    def seeds(self, split: str) -> range:
        """Return the seeds of all rows of 'train' or 'heldout'."""
        _check_split_name(split)
        start = HELDOUT_START if split == "heldout" else 0
        return range(start, start + len(self._load_split_rows(split)))

    def seeds_of(self, split: str, level: str) -> Sequence[int]:
        """Return the seeds of the rows of one level."""
        self.check_level(level)
        _check_split_name(split)
        self._load_split_rows(split)
        return self._by_level.get((split, level), [])

    def episode(self, seed: int, level: str) -> GSM8KEpisode:
        """Return the episode of a row. Raises: SettingsError if the row does not exist or has another level."""
        row, kind = self._find_row(seed, level)
        return GSM8KEpisode(seed, level, row, kind, self._tools, self._system)

    def demonstration(self, seed: int, level: str) -> Demonstration:
        """Return the worked solution of a row, with its annotations converted to calls."""
        row, kind = self._find_row(seed, level)
        opening = self.episode(seed, level).reset()
        solution = convert_solution(row["answer"], row["final"], self._tools, self._call_format)
        messages = [*opening, *solution.messages]
        return Demonstration(messages=messages, level=level, kind=kind, seed=seed, success=True)

    def _is_prepared(self) -> bool:
        return self.data is not None and all(
            (self.data / name).is_file() for name in _FILES.values()
        )

    def _find_row(self, seed: int, level: str) -> tuple[Row, str]:
        """Return the row of a seed, and its kind."""
        self.check_level(level)
        split, index = (
            ("heldout", seed - HELDOUT_START) if seed >= HELDOUT_START else ("train", seed)
        )
        rows = self._load_split_rows(split)
        if not 0 <= index < len(rows):
            raise SettingsError(f"seed {seed}: the {split} set of 'gsm8k' has {len(rows)} rows")
        num_steps = rows[index]["answer"].count("<<")
        if classify_level(num_steps) != level:
            raise SettingsError(
                f"seed {seed}: that question is of level '{classify_level(num_steps)}', not '{level}'"
            )
        return rows[index], f"{num_steps} steps"

    def _load_split_rows(self, split: str) -> list[Row]:
        if self._splits is None:
            if self._is_prepared():
                assert self.data is not None
                splits: dict[str, list[Row]] = {}
                for split_name, file in _FILES.items():
                    records = read_questions(self.data / file, check=validate_question)
                    splits[split_name] = list(records.rows)
                self._index_splits(splits)
            else:
                self._index_splits(self._read_raw_file(seed=0)[0])
        assert self._splits is not None
        return self._splits[split]

    def _index_splits(self, splits: dict[str, list[Row]]) -> None:
        self._splits = splits
        self._by_level = {}
        for split, rows in splits.items():
            start = HELDOUT_START if split == "heldout" else 0
            for index, row in enumerate(rows):
                level = classify_level(row["answer"].count("<<"))
                self._by_level.setdefault((split, level), []).append(start + index)

    def _read_raw_file(self, seed: int) -> tuple[dict[str, list[Row]], dict[str, Any]]:
        """Read both splits from the raw file, and return them with the report."""
        if self._path is None:
            raise SettingsError(
                "options.path: environment 'gsm8k' needs a JSONL file of questions to prepare"
            )
        records = read_questions(
            self._path,
            on_bad_row=self._on_bad_row,
            max_rows=self._max_rows,
            check=validate_question,
        )
        train, heldout, split_report = split_by_prompt(
            records.rows, _read_question_text, self._heldout, seed
        )
        calls: Counter[str] = Counter()
        for row in records.rows:
            solution = convert_solution(row["answer"], row["final"], self._tools, self._call_format)
            calls += solution.counts
        report: dict[str, Any] = {
            "file": str(self._path),
            "digest": records.digest,
            "num_skipped": records.num_skipped,
            "problems": [str(problem) for problem in records.problems[:10]],
            **split_report,
            **{
                f"num_calls_{name}": calls[name]
                for name in ("exact", "rounded", "wrong", "unreadable")
            },
        }
        splits = {"train": train, "heldout": heldout}
        for split, rows in splits.items():
            levels = Counter(classify_level(row["answer"].count("<<")) for row in rows)
            report |= {f"num_{split}_{level}": levels[level] for level in self.levels}
        return splits, report


def _read_question_text(row: Row) -> str:
    return row["question"]


def _check_split_name(split: str) -> None:
    if split not in _FILES:
        raise SettingsError(f"split '{split}' must be 'train' or 'heldout'")
