"""Settings of the stage `suites`: tasks of other evaluators (lm-eval, inspect-ai), and their grammar.

lm-eval:TASK,TASK           tasks of lm-eval, its own or those of `include_path`
inspect:FILE.py@TASK,TASK   tasks of inspect-ai that a file defines
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rl_core.errors import SettingsError, suggest_name
from rl_core.settings.base import Settings, setting

Evaluator = Literal["lm_eval", "inspect"]

EVALUATOR_PREFIXES: dict[str, Evaluator] = {"lm-eval": "lm_eval", "inspect": "inspect"}
_TASK_NAME = re.compile(r"[A-Za-z0-9][\w.\- ]*")
_FORMS = "lm-eval:TASK,TASK or inspect:FILE.py@TASK"


@dataclass(frozen=True, slots=True)
class SuiteTask:
    """One task of an evaluator."""

    evaluator: Evaluator
    name: str  # of the task
    file: str = ""  # Python file that defines it; "" for lm-eval

    @property
    def label(self) -> str:
        """Name in tables, and beginning of the names of its metrics."""
        return f"{self.evaluator}/{self.name}"


def parse_suite(text: str) -> list[SuiteTask]:
    """Parse one suite. Raises: SettingsError that says what is wrong with it."""
    prefix, colon, rest = text.partition(":")
    evaluator = EVALUATOR_PREFIXES.get(prefix.strip())
    if not colon or evaluator is None:
        hint = f"; {suggest_name(prefix, EVALUATOR_PREFIXES)}" if colon else ""
        raise SettingsError(f"'{text}' names no evaluator; write {_FORMS}{hint}")
    file, names = "", rest
    if evaluator == "inspect":
        file, at, names = rest.rpartition("@")
        if not at or not file.endswith(".py"):
            raise SettingsError(f"'{text}' names no task of a file; write inspect:FILE.py@TASK")
    tasks = [name.strip() for name in names.split(",")]
    for name in tasks:
        if not _TASK_NAME.fullmatch(name):
            raise SettingsError(f"'{text}': '{name}' is no name of a task; write {_FORMS}")
    return [SuiteTask(evaluator, name, file.strip()) for name in tasks]


def list_suite_tasks(suites: Sequence[str]) -> list[SuiteTask]:
    """List the tasks of suites in order.

    Raises: SettingsError for a malformed suite, and for two tasks whose metrics would have the same names.
    """
    tasks: dict[str, SuiteTask] = {}
    for suite in suites:
        for task in parse_suite(suite):
            if (other := tasks.get(task.label)) is not None:
                places = " and ".join(dict.fromkeys((other.file, task.file)))
                where = f" (of {places})" if task.file else ""
                raise SettingsError(
                    f"'{suite}': a task {task.name}{where} is named twice, and metrics go by the task's name; "
                    "leave one out, or rename it"
                )
            tasks[task.label] = task
    return list(tasks.values())


@dataclass(frozen=True, kw_only=True)
class SuitesSettings(Settings):
    """Tasks of other evaluators, lm-eval and inspect-ai, for every model of the run."""

    tasks: tuple[str, ...] = setting(
        (),
        doc="suites, each lm-eval:TASK,TASK or inspect:FILE.py@TASK; their packages are the extra `evaluators`",
    )
    include_path: str | None = setting(
        None, doc="folder of lm-eval tasks of your own: YAML files and the data that they name"
    )
    limit: int | None = setting(None, ge=1, doc="first rows of each task; unset: all")
    num_fewshot: int | None = setting(
        None, ge=0, le=1_000, doc="examples in lm-eval's prompts; unset: as the task says"
    )
    chat_template: bool = setting(
        False, doc="lm-eval: apply the model's chat template; inspect-ai always does"
    )
    max_completion_tokens: int = setting(
        256, ge=1, le=1_048_576, doc="tokens of an answer, where the task sets no limit"
    )
    unsafe_code: bool = setting(
        False,
        doc="run lm-eval tasks that execute code of the model, which lm-eval does not confine",
    )
    slots: int = setting(16, ge=1, le=65_536, doc="answers decoded together")
    pass_tokens: int = setting(
        8_192,
        ge=1,
        le=1_073_741_824,
        doc="tokens of a scoring pass, common beginnings counted once",
    )
    inspect_python: str | None = setting(
        None, doc="Python of another environment that has inspect-ai and openai; unset: this one"
    )
    start_timeout_seconds: float = setting(
        600.0, gt=0, doc="time limit for the start of the server that inspect-ai asks"
    )

    def check(self) -> None:
        """Check the suites."""
        try:
            self.list_tasks()
        except SettingsError as error:
            raise SettingsError(f"tasks: {error}") from None

    def find_missing_paths(self) -> list[tuple[str, str]]:
        """List the settings that name a file or folder that does not exist, each with what is wrong."""
        problems = [
            ("tasks", f"the file {task.file} of {task.name} does not exist")
            for task in self.list_tasks()
            if task.file and not Path(task.file).expanduser().is_file()
        ]
        if self.include_path and not Path(self.include_path).expanduser().is_dir():
            problems.append(("include_path", f"{self.include_path} is no folder"))
        if self.inspect_python and not Path(self.inspect_python).expanduser().is_file():
            problems.append(("inspect_python", f"{self.inspect_python} does not exist"))
        return problems

    def list_tasks(self) -> list[SuiteTask]:
        """List the tasks in order."""
        return list_suite_tasks(self.tasks)


@dataclass(frozen=True, kw_only=True)
class MetricCondition(Settings):
    """Conditions of the promotion gate on one metric of `stages.suites`."""

    min: float | None = setting(None, doc="the value must be at least this")
    max: float | None = setting(None, doc="the value must be at most this")
    max_loss: float | None = setting(
        None,
        ge=0,
        doc="against a champion: by interval and test, it must have lost less than this (0.05 = 5 points)",
    )

    def check(self) -> None:
        """Refuse a condition without content."""
        if self.min is None and self.max is None and self.max_loss is None:
            raise SettingsError(
                "min: set min, max or max_loss; a condition without any decides nothing"
            )
