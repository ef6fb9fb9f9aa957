"""Streaming reader and writer of trajectories.jsonl, and turning points between trajectories."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Hashable, Iterable, Iterator
from pathlib import Path
from typing import Any

from rl_core.errors import DataError
from rl_core.storage.atomic_files import replace_file
from rl_core.types import Trajectory, Turn

MAX_LINE = 64 * 2**20  # bytes; a longer line is not a trajectory, and refusing it bounds memory
_FOREIGN_FILE_TYPES = {
    b"\x1f\x8b": "is gzip-compressed; unpack it first (gunzip)",
    b"\xff\xfe": "is UTF-16; save it as UTF-8",
    b"\xfe\xff": "is UTF-16; save it as UTF-8",
    b"PAR1": "is Parquet; trajectories are read from JSONL",
    b"version https://git-lfs": "is a Git LFS pointer; fetch the file itself with `git lfs pull`",
    b"[": "starts with '[' as a JSON array does; one JSON object per line is expected",
}
_KINDS: dict[str, type | tuple[type, ...]] = {
    "str": str,
    "int": int,
    "float": (int, float),
    "bool": bool,
}
# Exact types accepted without further checks, which cover nearly all values; a float may still be infinite.
_EXACT_TYPES: dict[str, set[type]] = {"str": {str}, "int": {int}, "float": {int}, "bool": {bool}}
_encode_json = json.JSONEncoder(
    sort_keys=True, default=str
).encode  # created once; json.dumps would create one per call


def _build_field_table(kind: type) -> dict[str, tuple[set[type], str]]:
    """Build a table: field -> (types accepted without further checks, kind)."""
    table = {}
    for field in dataclasses.fields(kind):
        name = str(field.type).removesuffix(" | None")
        optional: set[type] = {type(None)} if name != str(field.type) else set()
        table[field.name] = (_EXACT_TYPES.get(name, set()) | optional, name)
    return table


_FIELDS, _TURN_FIELDS = _build_field_table(Trajectory), _build_field_table(Turn)
_REQUIRED = [
    f.name
    for f in dataclasses.fields(Trajectory)
    if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
]


def write_trajectories(path: Path, trajectories: Iterable[Trajectory]) -> int:
    """Write one line per trajectory, fsynced; returns their number.

    Raises: DataError for a number that JSON cannot represent (NaN, infinity).
    """
    count = 0
    with replace_file(path) as file:
        for trajectory in trajectories:
            try:
                # ASCII escapes keep lone surrogates and U+2028 readable by every JSON parser.
                file.write(json.dumps(trajectory.to_json(), allow_nan=False) + "\n")
            except (ValueError, TypeError) as error:
                where = f"{trajectory.environment}/{trajectory.level}/{trajectory.seed}"
                raise DataError(
                    f"{path}: trajectory {count + 1} ({where}) cannot be written as JSON: {error}"
                ) from error
            count += 1
    return count


def read_trajectories(path: Path | str) -> Iterator[Trajectory]:
    """Read the trajectories of a file, one at a time.

    Raises: DataError with file, line and reason, when the line is reached: the file is missing, a folder, empty,
        compressed or not JSONL; the line is truncated, not a JSON object, or has missing, unknown or mistyped fields.
    """
    for _, trajectory in read_trajectories_with_offsets(path):
        yield trajectory


def read_trajectories_with_offsets(path: Path | str) -> Iterator[tuple[int, Trajectory]]:
    """As `read_trajectories`, with the byte offset of each line."""
    path = Path(path)
    num_trajectories = 0
    with _open_trajectory_file(path) as file:
        offset = 0
        for number, line in enumerate(iter(lambda: file.readline(MAX_LINE), b""), start=1):
            if number == 1 and (
                problem := next(
                    (p for start, p in _FOREIGN_FILE_TYPES.items() if line.startswith(start)), None
                )
            ):
                raise DataError(f"{path}: the file {problem}")
            body = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if body.strip():
                yield offset, _parse_line(body, path, number)
                num_trajectories += 1
            offset += len(line)
    if not num_trajectories:
        raise DataError(f"{path}: the file holds no trajectories")


def read_trajectory_at(path: Path | str, offset: int) -> Trajectory:
    """Read the trajectory at a byte offset from `read_trajectories_with_offsets`."""
    with _open_trajectory_file(Path(path)) as file:
        file.seek(offset)
        return _parse_line(file.readline(MAX_LINE).removeprefix(b"\xef\xbb\xbf"), Path(path), None)


def build_action_key(turn: Turn) -> Hashable:
    """Return the canonical form of an action, equal for equivalent actions.

    A tool call is compared by name and arguments; other text ignoring case and extra white space.
    """
    call = turn.tool_call
    if call is not None:
        if turn.more_calls:
            return _encode_json([[each.name, each.arguments] for each in turn.calls])
        try:
            return call.name, frozenset(call.arguments.items())
        except TypeError:  # unhashable arguments (list or object)
            return _encode_json([call.name, call.arguments])
    return " ".join(turn.action.split()).casefold()


def build_state_key(turn: Turn) -> str:
    """Return the state after an action as seen by the policy: its observation."""
    return "" if turn.observation is None else " ".join(turn.observation.split()).casefold()


def find_turning_point(a: Trajectory, b: Trajectory) -> int | None:
    """Return the index of the first turn in which two trajectories of one episode differ; None if they do not.

    Turns are compared by their actions (`build_action_key`); if one trajectory is a prefix of the other, the turning
    point is
    the first turn of the longer one after it.
    """
    for index, (turn_a, turn_b) in enumerate(zip(a.turns, b.turns, strict=False)):
        if build_action_key(turn_a) != build_action_key(turn_b):
            return index
    return None if len(a.turns) == len(b.turns) else min(len(a.turns), len(b.turns))


def _open_trajectory_file(path: Path) -> Any:
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):  # a pipe would be waited for
            raise DataError(f"{path}: is no regular file (a pipe, a socket or a device)")
        return path.open("rb")
    except FileNotFoundError:
        raise DataError(
            f"{path}: no such file; trajectories.jsonl is written by the evaluation stage"
        ) from None
    except IsADirectoryError:
        raise DataError(f"{path}: is a folder; name the trajectories.jsonl in it") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error


def _parse_line(line: bytes, path: Path, number: int | None) -> Trajectory:
    place = f"{path}:{number}" if number else str(path)
    torn = not line.endswith(b"\n")
    if torn and len(line) >= MAX_LINE:
        raise DataError(f"{place}: the line is longer than {MAX_LINE // 2**20} MiB")
    try:
        row = json.loads(line.decode("utf-8"), parse_constant=_refuse_json_constant)
    except UnicodeDecodeError as error:
        raise DataError(f"{place}: byte {error.start + 1} of the line is not UTF-8") from None
    except RecursionError:
        raise DataError(f"{place}: the JSON is nested too deeply") from None
    except ValueError as error:
        if torn:
            raise DataError(
                f"{place}: the last line is cut off after {len(line)} bytes; was the writer killed?"
            ) from None
        what = (
            f"{error.msg}, character {error.pos + 1}"
            if isinstance(error, json.JSONDecodeError)
            else str(error)
        )
        raise DataError(f"{place}: this is not JSON ({what}); fix or remove the line") from None
    try:
        return _build_trajectory(row)
    except DataError as error:
        raise DataError(f"{place}: {error}") from None


def _refuse_json_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def _build_trajectory(row: Any) -> Trajectory:
    if not isinstance(row, dict):
        raise DataError(
            f"found {_describe_value(row)}, expected an object with the fields of a trajectory"
        )
    missing = [name for name in _REQUIRED if name not in row]
    if missing:
        raise DataError(
            f"field '{missing[0]}' is missing; this is not a line of a trajectories.jsonl"
        )
    _check_fields(row, _FIELDS, "")
    if not -(2**63) <= row["seed"] < 2**63:
        raise DataError("field 'seed': the number does not fit into 64 bits")
    if not isinstance(turns := row.get("turns", []), list):
        raise DataError(f"field 'turns': found {_describe_value(turns)}, expected a list")
    rewards = row.get("rewards", {})
    if not isinstance(rewards, dict) or not all(
        _is_of_kind(value, "float") for value in rewards.values()
    ):
        raise DataError("field 'rewards': expected an object of numbers")
    if not isinstance(columns := row.get("row", {}), dict):
        raise DataError(f"field 'row': found {_describe_value(columns)}, expected an object")
    return Trajectory(
        **{
            **row,
            "turns": [_build_turn(turn, f"turns[{index}]") for index, turn in enumerate(turns)],
        }
    )


def _build_turn(row: Any, place: str) -> Turn:
    if not isinstance(row, dict):
        raise DataError(f"field '{place}': found {_describe_value(row)}, expected an object")
    if "action" not in row:
        raise DataError(f"field '{place}.action' is missing")
    _check_fields(row, _TURN_FIELDS, f"{place}.")
    for name in ("tool_call", "more_calls"):
        calls = row.get(name)
        calls = [] if calls is None else calls if name == "more_calls" else [calls]
        if not isinstance(calls, list) or not all(map(_is_call, calls)):
            kind = "null or an object" if name == "tool_call" else "a list of objects"
            raise DataError(f"field '{place}.{name}': expected {kind} of 'name' and 'arguments'")
    if not isinstance(row.get("info", {}), dict):
        raise DataError(
            f"field '{place}.info': found {_describe_value(row['info'])}, expected an object"
        )
    return Turn.from_json(row)


def _is_call(call: Any) -> bool:
    return (
        isinstance(call, dict)
        and call.keys() == {"name", "arguments"}
        and isinstance(call["name"], str)
        and isinstance(call["arguments"], dict)
    )


def _check_fields(
    row: dict[str, Any], fields: dict[str, tuple[set[type], str]], prefix: str
) -> None:
    for name, value in row.items():
        if name not in fields:
            raise DataError(
                f"field '{prefix}{name}' is unknown; the file was written by another version (play the episodes again) "
                "or holds no trajectories"
            )
        quick, kind = fields[name]
        if type(value) not in quick and kind in _KINDS and not _is_of_kind(value, kind):
            raise DataError(
                f"field '{prefix}{name}': found {_describe_value(value)}, expected {kind}"
            )


def _is_of_kind(value: Any, kind: str) -> bool:
    if (
        isinstance(value, bool) and kind != "bool"
    ):  # bool is a subclass of int, but not a number here
        return False
    # 1e999 is valid JSON and parses as infinity
    return isinstance(value, _KINDS[kind]) and not (
        isinstance(value, float) and not math.isfinite(value)
    )


def _describe_value(value: Any) -> str:
    names = {
        dict: "an object",
        list: "a list",
        str: "text",
        bool: "true or false",
        type(None): "null",
    }
    return names.get(
        type(value),
        f"the number {value}" if isinstance(value, int | float) else type(value).__name__,
    )
