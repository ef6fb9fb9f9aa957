"""Argument parsers of `posttrain` and its commands: grouped help, suggestions for mistyped words, examples.

Only the standard library is imported, so that `--help` starts quickly.
"""

from __future__ import annotations

import argparse
import enum
import re
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

DESCRIPTION = """\
Post-train language-model policies: prepare data, SFT, preference optimisation (DPO), reward model, policy
optimisation, evaluation, analysis, promotion. A pipeline is one YAML file."""

_FIRST_COMMANDS = {
    "run demo": "the whole pipeline on an environment that needs no download",
    "init my_task": "a config, an environment and a reward to start from",
    "runs": "what ran, how it ended, how good it is",
    "ui": "watch runs live in the web UI",
    "check machine": "what this machine has, and what is missing",
}


class ExitCode(enum.IntEnum):
    """Exit codes of every command; `docs/operations.md` lists them for schedulers."""

    OK = 0
    FAILED = 1  # also: a check found differences, a server is down, a promotion is postponed
    WRONG_INPUT = 2  # wrong command, settings or data: the same command fails again
    NOTHING_NEW = 3  # `retrain`: no new data, so nothing was trained
    INTERRUPTED = 130  # by Ctrl-C, with the state saved
    TERMINATED = 143  # by SIGTERM or --stop-after, with the state saved


EXIT_CODE_MEANINGS = {
    ExitCode.OK: "OK",
    ExitCode.FAILED: "failed",
    ExitCode.WRONG_INPUT: "wrong command, settings or data",
    ExitCode.NOTHING_NEW: "retrain: nothing new",
    ExitCode.INTERRUPTED: "stopped by Ctrl-C; the same command resumes",
    ExitCode.TERMINATED: "stopped by SIGTERM or a time limit; the same command resumes",
}
_NAME_COLUMNS = 18
_COMMAND_COLUMNS = 26  # of "posttrain NAME"


# Options that people type from other training scripts -> the option here.
SETTING_OPTIONS: dict[tuple[str, ...], str] = {
    (
        "model",
        "model-name",
        "model-path",
        "model-name-or-path",
        "base-model",
        "sft-model",
        "policy-model",
        "pretrain",
    ): "--set model.path=FOLDER_OR_HUB_NAME",
    (
        "multi-gpu",
        "gpus",
        "num-gpus",
        "n-gpus",
        "n-gpus-per-node",
        "nproc-per-node",
        "num-processes",
        "world-size",
    ): "--set 'stages.policy.launch={kind: torchrun, processes: N}' (each training stage has it)",
    (
        "exp-name",
        "experiment",
        "experiment-name",
        "run-name",
        "project-name",
        "name",
    ): "--set name=NAME, the pipeline's name and folder (in MLflow: tracking.experiment)",
    (
        "num-samples",
        "n-samples",
        "num-generations",
        "num-rollouts",
        "n-samples-per-prompt",
        "group-size",
    ): "--set stages.policy.group_size=N (rollouts of a prompt), or stages.evaluate.samples=N",
    ("lr", "learning-rate"): "--set stages.policy.learning_rate=X (each training stage has it)",
    ("seed",): "--set seed=N",
    ("epochs", "num-epochs", "num-train-epochs"): "--set stages.sft.epochs=N",
    (
        "batch-size",
        "train-batch-size",
        "per-device-train-batch-size",
    ): "--set stages.sft.batch_size=N, or stages.policy.prompts_per_iteration=N",
    (
        "max-steps",
        "steps",
        "total-steps",
    ): "--set stages.sft.max_steps=N, or stages.policy.iterations=N",
    ("iterations", "num-iterations", "max-iterations"): "--set stages.policy.iterations=N",
    ("temperature",): "--set stages.policy.sampling.temperature=X",
    (
        "max-tokens",
        "max-new-tokens",
        "max-completion-length",
    ): "--set stages.policy.sampling.max_completion_tokens=N",
    ("output-dir", "out-dir", "save-dir", "save-path"): "--output FOLDER",
    ("device",): "--set model.device=DEVICE",
    (
        "data",
        "dataset",
        "dataset-name",
        "train-file",
    ): "--set stages.prepare_data.demonstrations=FILE",
    ("env", "environment", "env-name"): "--set environment.name=NAME",
    ("config", "config-file"): "an argument without an option: posttrain COMMAND CONFIG",
    ("resume", "resume-from-checkpoint"): "the same command without it, which resumes by itself",
}


class SuggestingParser(argparse.ArgumentParser):
    """`argparse.ArgumentParser` that suggests the nearest known name; subparsers are of this class, too."""

    def parse_known_args(  # type: ignore[override]
        self, args: Any = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse arguments and options in any order; refuse unknown options here, where known ones can be suggested."""
        if args is not None and not self._subparsers:
            args = self._move_arguments_first(args)
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            options = [name for action in self._actions for name in action.option_strings]
            names = [word.partition("=")[0] for word in unknown if word.startswith("-")]
            hints = [
                _suggest_setting(name, options) or _suggest_nearest(name, options) for name in names
            ]
            hint = next((hint for hint in hints if hint), "")
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return parsed, unknown

    def _move_arguments_first(self, words: Sequence[str]) -> list[str]:
        """Return the words with arguments before options.

        argparse assigns all arguments that stand together at once: in `evaluate demo --quiet MODEL` it would take demo
        for the model, because the configuration is optional.
        """
        if "--" in words:
            return list(words)
        arguments: list[str] = []
        options: list[str] = []
        position = 0
        while position < len(words):
            word = words[position]
            position += 1
            if not word.startswith("-") or word == "-" or re.fullmatch(r"-\d+(\.\d*)?", word):
                arguments.append(word)
                continue
            options.append(word)
            count = self._count_option_values(word, words[position:])
            if count is None:  # the parser refuses it, and shows the words as they are
                return list(words)
            options += words[position : position + count]
            position += count
        return [*arguments, *options]

    def _count_option_values(self, option: str, following: Sequence[str]) -> int | None:
        """Return how many of the following words are values of an option; None = it is unknown or ambiguous."""
        if "=" in option or (not option.startswith("--") and len(option) > 2):
            return 0  # joined with its value
        known = self._option_string_actions
        matches = (
            [option] if option in known else [name for name in known if name.startswith(option)]
        )
        actions = {
            id(known[name]): known[name]
            for name in matches
            if name.startswith("--") or name == option
        }
        if len(actions) != 1:
            return None
        (action,) = actions.values()
        if action.nargs is None:
            return 1
        if isinstance(action.nargs, int):
            return action.nargs
        return int(action.nargs == "?" and bool(following) and not following[0].startswith("-"))

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        choices = action.choices
        if choices is None or value in choices:
            return
        names = [str(choice) for choice in choices]
        if isinstance(action, argparse._SubParsersAction):
            names = [choice.dest for choice in action._choices_actions]  # not former names
        hint = _suggest_nearest(str(value), names) or f"; choose from {', '.join(names)}"
        if isinstance(action, argparse._SubParsersAction):
            self.error(f"there is no command {value!r}{hint}")
        raise argparse.ArgumentError(action, f"invalid choice: {value!r}{hint}")

    def error(self, message: str) -> NoReturn:
        """Print the short usage and the message; exit with code 2."""
        self.print_usage(_get_stderr())
        self.exit(2, f"{self.prog}: {message}\n")


def _get_stderr() -> Any:
    import sys

    return sys.stderr


def _suggest_nearest(name: str, candidates: Iterable[str]) -> str:
    """Return "; did you mean 'run'?", or "" if no known name is near."""
    import difflib  # only needed after a mistake

    names: Sequence[str] = list(candidates)
    completions = [known for known in names if len(name) > 2 and known.startswith(name)]
    match = completions or difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f"; did you mean '{match[0]}'?" if match else ""


def _suggest_setting(name: str, options: Sequence[str]) -> str:
    """Return "; here it is --set seed=N" for a usual option of training scripts; "" for others."""
    if "--set" not in options:
        return ""
    plain_name = name.lstrip("-").lower().replace("_", "-")
    answer = next((text for names, text in SETTING_OPTIONS.items() if plain_name in names), "")
    return f"; here it is {answer}" if answer else ""


class OverviewParser(SuggestingParser):
    """Parser of `posttrain` itself, whose help lists the commands in groups."""

    def __init__(self, groups: Mapping[str, Mapping[str, str]]) -> None:
        """Take the summaries of the commands, by heading and name."""
        super().__init__(prog="posttrain", description=DESCRIPTION)
        self._groups = groups
        self.add_argument("--version", action=_PrintVersion, nargs=0, help="print the version")
        self.set_defaults(debug=False, command=None)

    def format_help(self) -> str:
        """Format the commands in their groups, within the width of the terminal."""
        lines = [
            "usage: posttrain COMMAND ...",
            "",
            *_wrap_help_text(DESCRIPTION.replace("\n", " "), ""),
            "",
            "start here",
        ]
        lines += _format_help_rows(
            {f"posttrain {name}": summary for name, summary in _FIRST_COMMANDS.items()},
            _COMMAND_COLUMNS,
        )
        for heading, summaries in self._groups.items():
            lines += ["", heading, *_format_help_rows(summaries)]
        options = {"-h, --help": "this; `posttrain COMMAND --help`: one command, with examples"}
        lines += ["", "options", *_format_help_rows({**options, "--version": "print the version"})]
        codes = {str(code.value): meaning for code, meaning in EXIT_CODE_MEANINGS.items()}
        lines += ["", "exit codes", *_format_help_rows(codes)]
        return "\n".join(lines) + "\n"

    def format_usage(self) -> str:
        """Return one line instead of a list of all commands."""
        return "usage: posttrain COMMAND ...    (posttrain --help lists the commands)\n"


def format_first_commands() -> str:
    """Format the five commands to start with."""
    rows = _format_help_rows(
        {f"posttrain {name}": summary for name, summary in _FIRST_COMMANDS.items()},
        _COMMAND_COLUMNS,
    )
    return "\n".join(
        [
            *rows,
            "",
            *_wrap_help_text(
                "posttrain --help lists all commands, posttrain COMMAND --help one.", "  "
            ),
        ]
    )


def _format_help_rows(summaries: Mapping[str, str], margin: int = _NAME_COLUMNS) -> Iterator[str]:
    for name, summary in summaries.items():
        first, *further_lines = _wrap_help_text(summary, " " * margin)
        yield f"  {name}".ljust(margin) + first[margin:]
        yield from further_lines


def _wrap_help_text(text: str, indent: str) -> list[str]:
    width = max(36, min(120, shutil.get_terminal_size().columns))
    return textwrap.wrap(
        text, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
    )


class ExamplesHelpFormatter(argparse.HelpFormatter):
    """Help within the width of the terminal; longer examples are folded so that a shell still accepts them."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        heading, *examples = text.splitlines()
        if not examples:
            return super()._fill_text(text, width, indent)
        return "\n".join(
            [heading, *(line for example in examples for line in _fold_example(example, width))]
        )


def _fold_example(example: str, width: int) -> Iterator[str]:
    """Yield the lines of an example that is wider than the terminal.

    Lines are cut at spaces outside quotes, and an option stays with its value. A note in brackets gets its own line.
    """
    if len(example) <= width:
        yield example
        return
    command, separator, note = example.partition("    (")
    line, *words = re.findall(r" *(?:--?[a-z-]+ (?=[^-]))?(?:'[^']*'|[^\s'])+", command)
    for word in words:
        if len(line) + len(word) + 2 > width:  # with the backslash
            yield f"{line} \\"
            line = "     "
        line += word
    yield line
    yield from (
        textwrap.wrap(f"({note}", width, initial_indent="    ", subsequent_indent="     ")
        if separator
        else ()
    )


class _PrintVersion(argparse.Action):
    """Action that prints the version, which is looked up only then."""

    def __call__(self, parser: argparse.ArgumentParser, *arguments: Any, **named: Any) -> None:
        from importlib.metadata import PackageNotFoundError, version

        try:
            print(f"posttrain {version('posttrain')}")
        except PackageNotFoundError:
            print("posttrain, not installed")
        parser.exit()
