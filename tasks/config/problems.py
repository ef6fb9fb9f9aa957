"""Problems of a configuration with their locations, collected and reported all at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from rl_core.errors import SettingsError

Key = tuple[str | int, ...]  # path of a key: ("stages", "policy", "curriculum", 0, "name")


@dataclass(frozen=True, slots=True)
class ConfigProblem:
    """One thing to mend: where it is and what to do."""

    key: Key  # () = the whole file
    text: str  # what was found; what is allowed; what to do
    location: str = ""  # "file:line" or "--set ..."; "" = look the key up in the places


class ConfigError(SettingsError):
    """A configuration cannot be used; the message lists every problem, `problems` holds them."""

    def __init__(self, problems: Iterable[ConfigProblem], places: KeyLocations) -> None:
        unique = list(dict.fromkeys(problems))
        self.problems = tuple(sorted(unique, key=lambda problem: places.compute_sort_key(problem)))
        lines = [places.format_problem(problem) for problem in self.problems]
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
        """The place of the key, or of the nearest block around it."""
        for end in range(len(key), 0, -1):
            if key[:end] in self.overrides:
                return self.overrides[key[:end]]
            if key[:end] in self.lines:
                return f"{self.source}:{self.lines[key[:end]]}"
        return self.source

    def format_problem(self, problem: ConfigProblem) -> str:
        """One line of the report: place, key's path, text."""
        where = problem.location or self.find_location(problem.key)
        return (
            f"{where}: {join_key(problem.key)}: {problem.text}"
            if problem.key
            else f"{where}: {problem.text}"
        )

    def compute_sort_key(self, problem: ConfigProblem) -> tuple[int, int, str]:
        """Sort by line of the file; overrides come last."""
        place = problem.location or self.find_location(problem.key)
        number = place.removeprefix(f"{self.source}:")
        return (
            place.startswith("--set"),
            int(number) if number.isdigit() else 0,
            join_key(problem.key),
        )


def keys_overlap(one: Key, other: Key) -> bool:
    """True = one key is the other, or lies inside it."""
    length = min(len(one), len(other))
    return one[:length] == other[:length]


def join_key(key: Key) -> str:
    """The key's path as `--set` takes it: stages.policy.curriculum.0.name."""
    return ".".join(str(part) for part in key)


def describe_value(value: object) -> str:
    """A value for a message: its kind and a short, escaped form."""
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
