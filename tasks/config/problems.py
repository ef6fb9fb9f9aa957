"""Problems of a configuration with their locations, collected and reported together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from rl_core.errors import SettingsError

Key = tuple[str | int, ...]  # path of a key: ("stages", "policy", "curriculum", 0, "name")


@dataclass(frozen=True, slots=True)
class ConfigProblem:
    """One problem: its location and what to do."""

    key: Key  # () = the whole file
    text: str  # the value; what is allowed; what to do
    location: str = ""  # "file:line" or "--set ..."; "" = look up the key in KeyLocations


class ConfigError(SettingsError):
    """Error of an unusable configuration; the message lists every problem, `problems` holds them."""

    def __init__(self, problems: Iterable[ConfigProblem], locations: KeyLocations) -> None:
        unique = list(dict.fromkeys(problems))
        self.problems = tuple(
            sorted(unique, key=lambda problem: locations.compute_sort_key(problem))
        )
        lines = [locations.format_problem(problem) for problem in self.problems]
        super().__init__(
            lines[0] if len(lines) == 1 else "\n".join([f"{len(lines)} problems:", *lines])
        )


@dataclass
class KeyLocations:
    """Location of each key: a line of the file, or an override."""

    source: str  # the file's name as the user wrote it; "settings" for a dict
    lines: dict[Key, int] = field(default_factory=dict)  # key -> line of the file, from 1
    overrides: dict[Key, str] = field(default_factory=dict)  # key -> "--set key=value"

    def find_location(self, key: Key) -> str:
        """Return the location of the key, or of the nearest enclosing block."""
        for end in range(len(key), 0, -1):
            if key[:end] in self.overrides:
                return self.overrides[key[:end]]
            if key[:end] in self.lines:
                return f"{self.source}:{self.lines[key[:end]]}"
        return self.source

    def rename_key(self, old: Key, new: Key) -> None:
        """Give the location of a key, and of those below it, to another key."""
        for key, line in list(self.lines.items()):
            if key[: len(old)] == old:
                self.lines[(*new, *key[len(old) :])] = line
        for key, source in list(self.overrides.items()):
            if key[: len(old)] == old:
                self.overrides[(*new, *key[len(old) :])] = source

    def format_problem(self, problem: ConfigProblem) -> str:
        """Format one line of the report: location, key's path, text."""
        location = problem.location or self.find_location(problem.key)
        if not problem.key:
            return f"{location}: {problem.text}"
        return f"{location}: {join_key(problem.key)}: {problem.text}"

    def compute_sort_key(self, problem: ConfigProblem) -> tuple[int, int, str]:
        """Compute a key that sorts by line of the file, with overrides last."""
        location = problem.location or self.find_location(problem.key)
        number = location.removeprefix(f"{self.source}:")
        return (
            location.startswith("--set"),
            int(number) if number.isdigit() else 0,
            join_key(problem.key),
        )


def keys_overlap(first: Key, second: Key) -> bool:
    """Return whether the keys are equal or one contains the other."""
    length = min(len(first), len(second))
    return first[:length] == second[:length]


def join_key(key: Key) -> str:
    """Join the key's path as `--set` accepts it: stages.policy.curriculum.0.name."""
    return ".".join(str(part) for part in key)


def describe_value(value: object) -> str:
    """Describe a value for a message: its kind and a short, escaped form."""
    if value is None:
        return "nothing (null)"
    if isinstance(value, bool):
        return f"{str(value).lower()} (true/false)"
    if isinstance(value, Mapping):
        return "a block of keys"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}"
    text = repr(value)
    text = text if len(text) <= 80 else text[:77] + "..."
    kind = {str: "text", int: "whole number", float: "number"}.get(
        type(value), type(value).__name__
    )
    return f"{text} ({kind})"
