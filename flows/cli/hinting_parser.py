"""An argument parser that says what was probably meant: commands, options, choices. Standard library only."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

__all__ = ["HintingParser"]


class HintingParser(argparse.ArgumentParser):
    """`argparse.ArgumentParser` with hints at the nearest known name; its subparsers are of this class, too."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[argparse.Namespace, list[str]]:  # type: ignore[override]
        """As the base class; an option that this command has not is refused here, where its options are known."""
        found, rest = super().parse_known_args(args, namespace)
        if rest:
            options = [name for action in self._actions for name in action.option_strings]
            hints = [_nearest(word.partition("=")[0], options) for word in rest if word.startswith("-")]
            hint = next((hint for hint in hints if hint), "")
            self.error(f"unrecognized arguments: {' '.join(rest)}{hint}")
        return found, rest

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        choices = action.choices
        if choices is None or value in choices:
            return
        names = [str(choice) for choice in choices]
        hint = _nearest(str(value), names) or f"; choose from {', '.join(names)}"
        if isinstance(action, argparse._SubParsersAction):
            self.error(f"there is no command {value!r}{hint}")
        raise argparse.ArgumentError(action, f"invalid choice: {value!r}{hint}")

    def error(self, message: str) -> NoReturn:
        """The usage in short, and the message; exit code 2."""
        self.print_usage(_stderr())
        self.exit(2, f"{self.prog}: {message}\n")


def _stderr() -> Any:
    import sys

    return sys.stderr


def _nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'run'?`, or "" where nothing is near."""
    import difflib  # where something is wrong

    names: Sequence[str] = list(known)
    starts = [one for one in names if len(name) > 2 and one.startswith(name)]
    match = starts or difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f"; did you mean '{match[0]}'?" if match else ""
