"""Safe loading of YAML as plain data: bounded, no tags, no duplicate keys, and a line number for every key.

Scalars follow YAML 1.2: `1e-5` is a number, `yes` and `2024-01-01` are text. PyYAML's resolver follows YAML 1.1,
where `1e-5` is text. Anchors, aliases and merge keys (`<<`) work as long as their expansion stays small.

Also overrides from the command line: `--set stages.policy.learning_rate=3e-4`.
"""

from __future__ import annotations

import errno
import math
import re
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from rl_core.errors import SettingsError
from tasks.config.problems import ConfigProblem, Key, KeyLocations, join_key
from tasks.shipped import list_config_names

MAX_BYTES = 256 * 1024  # a pipeline's file has a few KiB; PyYAML needs about a second for 256 KiB
MAX_DEPTH = 32  # nested blocks
MAX_NODES = 10_000  # values, before and after the expansion of aliases; a thousand take 0.1 s
MAX_OVERRIDE_DEPTH = 32  # nested keys; settings are read recursively

_INIT_HINT = " (`posttrain init FOLDER` writes one to start from)"

_NULL = re.compile(r"~|null|Null|NULL|")
_BOOL = re.compile(r"true|True|TRUE|false|False|FALSE")
_INT = re.compile(r"[-+]?[0-9]{1,40}")
_BASED_INT = re.compile(r"0o[0-7]{1,40}|0x[0-9a-fA-F]{1,40}")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]{1,10})?")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")


@dataclass
class YamlDocument:
    """A YAML file as plain dicts, lists, text, numbers, booleans and None."""

    data: Any
    lines: dict[Key, int] = field(default_factory=dict)  # line of every key and list item, from 1
    problems: list[ConfigProblem] = field(
        default_factory=list
    )  # those that do not stop the reading


def read_yaml(path: str | Path, shipped_names: Sequence[str] | None = None) -> YamlDocument:
    """Read a YAML file that contains one mapping.

    Args:
        shipped_names: the shipped files of its kind, for the error of a missing one; None = a pipeline's configs.
    Raises: SettingsError if the file is missing, a folder, empty, too large, not UTF-8 or not valid YAML, if it
        contains a tag or several documents, nests or expands too far, or is not a mapping.
    """
    is_pipeline = shipped_names is None
    known_names = list_config_names() if shipped_names is None else shipped_names
    text = _read_yaml_text(Path(path), str(path), known_names)
    document = _parse_yaml(text, str(path))
    if document.data is None and not document.problems:
        needs = (
            f"a pipeline needs at least `name` and `stages`{_INIT_HINT}"
            if is_pipeline
            else "write settings into it"
        )
        raise SettingsError(f"{path}: is empty; {needs}")
    if not isinstance(document.data, dict):
        kind = "a list" if isinstance(document.data, list) else "a single value"
        expected = f"a pipeline is a mapping of `key: value` lines{_INIT_HINT}"
        if not is_pipeline:
            expected = "settings are a mapping of `key: value` lines"
        raise SettingsError(f"{path}: contains {kind}; {expected}")
    return document


def parse_value(text: str) -> Any:
    """Parse the YAML value of an override, such as 3e-4, true, [easy, hard] or {task: 1}.

    Raises: SettingsError.
    """
    try:
        document = _parse_yaml(text, "value")
    except SettingsError as error:
        raise SettingsError(re.sub(r"^value(:\d+)?: ", "the value ", str(error))) from error
    if document.problems:
        raise SettingsError(document.problems[0].text)
    return document.data


def _read_yaml_text(path: Path, name: str, shipped_names: Sequence[str]) -> str:
    try:
        kind = path.stat().st_mode
    except ValueError:  # a NUL in its name
        raise SettingsError(f"{name!r}: no such file") from None
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR):  # such as a long name, a loop of links
            raise SettingsError(f"{name[:200]}: cannot be read: {error.strerror}") from error
        kind = 0
    if path.is_dir():
        raise SettingsError(f"{name}: is a folder; name a YAML file in it")
    if not path.exists():
        raise SettingsError(f"{name}: no such file{_suggest_file(path, name, shipped_names)}")
    if not stat.S_ISREG(kind):  # reading a pipe without a writer would block
        raise SettingsError(
            f"{name}: is not a regular file (a pipe, a socket or a device); name a YAML file"
        )
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise SettingsError(f"{name}: cannot be read: {error.strerror}") from error
    if len(raw) > MAX_BYTES:
        raise SettingsError(
            f"{name}: is larger than {MAX_BYTES // 1024} KiB; this is not a configuration"
        )
    if raw.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise SettingsError(f"{name}: is UTF-16; save it as UTF-8")
    try:
        return raw.decode("utf-8-sig")  # drops the byte order mark that some editors write
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise SettingsError(
            f"{name}:{line}: byte 0x{raw[error.start]:02x} at offset {error.start} is not UTF-8; save the file as UTF-8"
        ) from error


def _suggest_file(path: Path, name: str, shipped_names: Sequence[str]) -> str:
    """Suggest another file for a missing one, as the end of a message."""
    siblings: list[str] = []
    if path.parent.is_dir():
        siblings = sorted(item.name for item in path.parent.glob("*.y*ml"))
    stems = {Path(item).stem: item for item in siblings}
    if match := get_close_matches(path.stem, stems, n=1, cutoff=0.6):
        suggestion = f"; did you mean '{path.parent / stems[match[0]]}'?"
    elif siblings:
        suggestion = f"; {path.parent} has {', '.join(siblings[:8])}"
    else:
        suggestion = f"; the current folder is {Path.cwd()}"
    if path.name == name and not path.suffix and shipped_names:
        if match := get_close_matches(name, [*shipped_names, *siblings], n=1, cutoff=0.6):
            return f", and no shipped config; did you mean '{match[0]}'?"
        names = ", ".join(shipped_names)
        return f", and no shipped config; these are shipped: {names}{suggestion}"
    if path.stem in shipped_names:
        return f"; the shipped config is named without folder and suffix: {path.stem}{suggestion}"
    return suggestion


def _parse_yaml(text: str, name: str) -> YamlDocument:
    try:
        _check_yaml_events(text, name)
        loader = yaml.SafeLoader(text)
        try:
            node = loader.get_single_node()
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        hint = "; indent with spaces" if error.problem and "'\\t'" in error.problem else ""
        raise SettingsError(
            f"{_format_location(name, mark)}: is not valid YAML: {error.problem or error.context}{hint}"
        ) from error
    except (ValueError, OverflowError) as error:
        if isinstance(error, SettingsError):
            raise
        # such as the escape "\\UFFFFFFFF"
        raise SettingsError(f"{name}: is not valid YAML: {error}") from error
    except yaml.reader.ReaderError as error:
        line = text[: error.position].count("\n") + 1
        code = error.character if isinstance(error.character, int) else ord(error.character)
        raise SettingsError(
            f"{name}:{line}: character U+{code:04X} is not allowed in YAML; remove it"
        ) from error
    document = YamlDocument(None)
    if node is not None:
        document.data = _NodeReader(document, name).read_value(node, (), 0)
    return document


def _format_location(name: str, mark: Any) -> str:
    return f"{name}:{mark.line + 1}" if mark is not None else name


def _check_yaml_events(text: str, name: str) -> None:
    """Refuse tags, further documents, deep nesting and too many values before PyYAML builds them."""
    depth = documents = values = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        location = _format_location(name, event.start_mark)
        values += isinstance(event, yaml.NodeEvent)
        if values > MAX_NODES:
            raise SettingsError(f"{location}: contains more than {MAX_NODES} values")
        tag = getattr(event, "tag", None)
        if tag is not None:
            raise SettingsError(
                f"{location}: contains the tag {_quote_shortened(tag)}; tags are not allowed, write plain values"
            )
        if isinstance(event, yaml.DocumentStartEvent):
            documents += 1
            if documents > 1:
                raise SettingsError(f"{location}: a second document starts here ('---'); keep one")
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > MAX_DEPTH:
                raise SettingsError(f"{location}: nests deeper than {MAX_DEPTH} levels")
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1


class _NodeReader:
    """Conversion of nodes to plain values, which records lines and counts the values that aliases expand to."""

    def __init__(self, document: YamlDocument, name: str) -> None:
        self.document = document
        self.name = name
        self.num_nodes = 0
        self.open_node_ids: set[int] = (
            set()
        )  # nodes being read; meeting one again is a loop of aliases

    def read_value(self, node: yaml.Node, key: Key, depth: int) -> Any:
        """Return the plain value of a node; `key` is its path."""
        self.num_nodes += 1
        location = _format_location(self.name, node.start_mark)
        if self.num_nodes > MAX_NODES or depth > MAX_DEPTH:
            raise SettingsError(
                f"{location}: expands to more than {MAX_NODES} values or {MAX_DEPTH} levels through aliases"
            )
        if isinstance(node, yaml.ScalarNode):
            return self._parse_scalar(node, key)
        if id(node) in self.open_node_ids:
            raise SettingsError(f"{location}: an alias refers to the block that contains it")
        self.open_node_ids.add(id(node))
        result: Any
        if isinstance(node, yaml.SequenceNode):
            result = []
            for index, item in enumerate(node.value):
                self.document.lines[(*key, index)] = item.start_mark.line + 1
                result.append(self.read_value(item, (*key, index), depth + 1))
        else:
            assert isinstance(node, yaml.MappingNode)
            result = {}
            # merged blocks are read first, so that the block's values and lines take precedence
            for base in self._list_merged_blocks(node):
                result.update(self.read_value(base, key, depth + 1))
            first_lines: dict[str, int] = {}
            for key_node, value_node in node.value:
                line = key_node.start_mark.line + 1
                if _is_merge_key(key_node):
                    continue
                if not isinstance(key_node, yaml.ScalarNode):
                    text = "a key must be text, not a list or block"
                    raise SettingsError(f"{self.name}:{line}: {text}")
                name = key_node.value  # as written: `1: 0.5` has the key "1"
                path = (*key, name)
                if name in first_lines:
                    text = f"the key occurs twice, first on line {first_lines[name]}; keep one"
                    self._report_problem(path, line, text)
                first_lines.setdefault(name, line)
                if self._check_text(name, path, line):
                    self.document.lines[path] = line
                    result[name] = self.read_value(value_node, path, depth + 1)
        self.open_node_ids.discard(id(node))
        return result

    def _list_merged_blocks(self, node: yaml.MappingNode) -> list[yaml.MappingNode]:
        """List the blocks that `<<: *base` or `<<: [*first, *second]` merges in, lowest precedence first."""
        bases: list[yaml.MappingNode] = []
        for key_node, value_node in node.value:
            if _is_merge_key(key_node):
                bases += (
                    value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]
                )
                if not all(isinstance(base, yaml.MappingNode) for base in bases):
                    raise SettingsError(
                        f"{_format_location(self.name, key_node.start_mark)}: '<<' merges blocks, not single values"
                    )
        return bases[::-1]

    def _parse_scalar(self, node: yaml.ScalarNode, key: Key) -> Any:
        text: str = node.value
        line = node.start_mark.line + 1
        self._check_text(text, key, line)
        if node.style is not None:  # quoted or block text
            return text
        if _NULL.fullmatch(text):
            return None
        if _BOOL.fullmatch(text):
            return text.lower() == "true"
        if _INT.fullmatch(text):
            return int(text)
        if _BASED_INT.fullmatch(text):
            return int(text, 0)
        if _FLOAT.fullmatch(text) and math.isfinite(float(text)):
            return float(text)
        if _NOT_FINITE.fullmatch(text) or _FLOAT.fullmatch(text):
            self._report_problem(
                key, line, f"found {_quote_shortened(text)}; a finite number is needed"
            )
            return 0.0
        return text

    def _check_text(self, text: str, key: Key, line: int) -> bool:
        """Return False, and report a problem, for text that no file can store."""
        for character in text:
            if character == "\0" or "\ud800" <= character <= "\udfff":
                self._report_problem(
                    key,
                    line,
                    f"contains the character U+{ord(character):04X}, which no file can store; remove it",
                )
                return False
        return True

    def _report_problem(self, key: Key, line: int, text: str) -> None:
        self.document.problems.append(ConfigProblem(key, text, f"{self.name}:{line}"))


def _is_merge_key(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.value == "<<" and node.style is None


def _quote_shortened(text: str) -> str:
    return repr(text) if len(text) <= 60 else repr(text[:57]) + "..."


def apply_overrides(
    data: dict[str, Any], overrides: Iterable[str], locations: KeyLocations
) -> list[ConfigProblem]:
    """Set each "key.path=value" in `data`, in order, and record in `locations` where the key now comes from.

    The value is YAML (3e-4, null, [easy, hard], {task: 1}). Blocks on the path that are missing or null are created;
    items of a list are named by their index from 0. Return what could not be set; keys and types are checked later.
    """
    problems = []
    for override in overrides:
        source = f"--set {override}"
        name, equals, text = override.partition("=")
        path = name.strip().split(".")
        if not equals or not all(path):
            problems.append(
                ConfigProblem(
                    (), "must be key.path=value, as in stages.policy.learning_rate=3e-4", source
                )
            )
            continue
        if len(path) > MAX_OVERRIDE_DEPTH:
            text = f"names {len(path)} nested keys; that is too deep"
            problems.append(ConfigProblem(tuple(path[:3]), text, "--set"))
            continue
        try:
            new_keys = _set_value_at_path(data, path, parse_value(text))
        except SettingsError as error:
            problems.append(ConfigProblem(tuple(path), str(error), source))
            continue
        for key in new_keys:
            locations.lines = {
                known: line for known, line in locations.lines.items() if known[: len(key)] != key
            }
            locations.overrides = {
                known: item
                for known, item in locations.overrides.items()
                if known[: len(key)] != key
            }
        locations.overrides.update(dict.fromkeys(new_keys, source))
    return problems


def _set_value_at_path(data: dict[str, Any], path: list[str], value: Any) -> list[Key]:
    """Set the value at the path; return the keys that were created or replaced, list indices as numbers."""
    block: Any = data
    new_keys: list[Key] = []
    key: Key = ()
    for position, part in enumerate(path):
        is_last = position == len(path) - 1
        block_name = join_key(key) or "the file"
        if isinstance(block, list):
            if not (part.isascii() and part.isdigit() and len(part) < 9):
                raise SettingsError(
                    f"{block_name} is a list: name an item by its index from 0, not '{part}'"
                )
            index = int(part)
            if index >= len(block):
                raise SettingsError(
                    f"{block_name} has {len(block)} items, so {max(len(block) - 1, 0)} is the largest index"
                )
            part_key: str | int = index
        elif isinstance(block, dict):
            block.setdefault(part, None)
            part_key = part
        else:
            raise SettingsError(f"{block_name} is a single value, so nothing can be set inside it")
        key = (*key, part_key)
        if is_last or block[part_key] is None:
            block[part_key] = value if is_last else {}
            new_keys.append(key)
        block = block[part_key]
    return new_keys
