"""Version of the code that a stage's numbers rest on: a digest of what its body reaches by imports.

Followed from the stage's module, and from the user's modules that it runs, are all imports of this project's modules:
within functions too, and texts that name a module ("rl_core.environments.maze:Maze", "math_child.py"), by which modules
are imported late or run as programs. C sources count where a module of their folder is reached. What only a type
checker sees does not.

The frame of every stage (settings, keys, folders, tracking) is not followed: it imports all there is to check a
configuration, and computes nothing. Those of its modules that stages import are part of their code themselves.

Cache key of a stage: a hash of everything that its result depends on.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import hashlib
import json
import re
import textwrap
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_core.errors import SettingsError
from rl_core.settings import Settings, iter_code_paths
from rl_core.settings.rollouts import select_decisive_numerics, select_decisive_rollouts
from rl_core.storage.manifest import digest_bytes, digest_file, digest_folder
from rl_core.user_code import UserModule, find_import_paths, find_user_modules
from tasks.config import PipelineSettings
from tasks.pipeline.stage_result import StageResult
from tasks.stage_registry import find_stage, list_stage_names

FRAME_MODULES = (
    "tasks.config",
    "tasks.mlflow_environment",
    "tasks.pipeline",
    "tasks.processes",
    "tasks.lifecycle",
    "tasks.shipped",
    "tasks.stage_registry",
    "tasks.tracking",
)
ALWAYS_INCLUDED_MODULES = (
    "tasks.pipeline.stage_key",
    "tasks.pipeline.stage",
    "tasks.pipeline.stage_worker",
)  # seeds, threads, hand-over
LAZY_PACKAGES = (
    "rl_core",
)  # its texts name all of the public API, for whoever imports the package itself

_ROOT = Path(__file__).resolve().parents[2]
_PACKAGES = ("rl_core", "tasks")
_SOURCES = (".py", ".c", ".h")
_IMPORT_STATEMENT = re.compile(
    r"^[ \t]*(?:from[ \t]+[\w.]+[ \t]+import[ \t]*(?:\([^)]*\)|[^\n(]*)|import[ \t]+[\w., \t]+)",
    re.M,
)
_TYPE_CHECKING_BLOCK = re.compile(
    r"^([ \t]*)if (?:typing\.)?TYPE_CHECKING:\n(?:\1[ \t]+[^\n]*\n|[ \t]*\n)*", re.M
)
_NAMED_MODULE = re.compile(r"""["']((?:rl_core|tasks)(?:\.\w+)+)[:"']""")
_NAMED_FILE = re.compile(r"""["'](\w+)\.py["']""")


@functools.cache
def compute_code_version() -> str:
    """Short SHA-256 of the whole source of rl_core and tasks, by which a run is recognised."""
    return _digest_sources(list_project_sources())


def digest_stage_code(stage: str, user_sources: Iterable[bytes] = ()) -> str:
    """Short SHA-256 of the sources of `list_stage_sources`, where they are and what they hold."""
    return _digest_sources(list_stage_sources(stage, user_sources))


def list_stage_sources(stage: str, user_sources: Iterable[bytes] = ()) -> tuple[str, ...]:
    """Files that a stage's numbers rest on, by their path in the project, sorted.

    Args:
        user_sources: content of the user's modules that the stage runs.
    Returns: all sources of the project for a stage whose task is none of its modules.
    """
    task = find_stage(stage).task if stage in list_stage_names() else ""
    own = stage in list_stage_names() and find_stage(stage).custom is not None
    module = "tasks.stages.custom_stage" if own else task.partition(":")[0]
    if module not in _map_modules():
        return list_project_sources()
    of_user = {
        name
        for content in user_sources
        for name in find_imported_names(content.decode("utf-8", "replace"))
    }
    return _find_reachable_sources(module, frozenset(of_user & _map_modules().keys()))


@functools.cache
def list_project_sources() -> tuple[str, ...]:
    """All sources of rl_core and tasks, by their path in the project, sorted."""
    return tuple(
        sorted(
            str(path.relative_to(_ROOT))
            for package in _PACKAGES
            for ending in _SOURCES
            for path in (_ROOT / package).rglob(f"*{ending}")
        )
    )


def find_imported_names(text: str) -> set[str]:
    """Dotted names that a source imports or names in a text, `a.b` and `a.b.c` of `from a.b import c`.

    Statements are found by their first word, for speed, and read as Python; what is none (a line of a docstring) is
    passed over.
    """
    text = _TYPE_CHECKING_BLOCK.sub("", text)
    found = set(_NAMED_MODULE.findall(text))
    for statement in _IMPORT_STATEMENT.findall(text):
        try:
            nodes = ast.parse(textwrap.dedent(statement).strip()).body
        except SyntaxError:
            continue
        for node in nodes:
            found.update(_iter_imported_names(node))
    return found


def _iter_imported_names(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
        yield node.module
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


@functools.cache
def _map_modules() -> dict[str, str]:
    """Dotted name -> path in the project of every module; a package goes by its own name."""
    python = [path for path in list_project_sources() if path.endswith(".py")]
    return {
        path.removesuffix(".py").removesuffix("/__init__").replace("/", "."): path
        for path in python
    }


@functools.cache
def _find_imported_modules(module: str) -> frozenset[str]:
    """Modules of the project that a module imports, names or starts, those not followed included."""
    known = _map_modules()
    text = _read_source(known[module]).decode()
    found = find_imported_names(text)
    if module in LAZY_PACKAGES:
        found -= set(_NAMED_MODULE.findall(text))
    folder = known[module].rpartition("/")[0].replace("/", ".")
    found |= {f"{folder}.{name}" for name in _NAMED_FILE.findall(text)}
    return frozenset(found & known.keys() - {module})


@functools.cache
def _find_reachable_sources(start: str, more: frozenset[str]) -> tuple[str, ...]:
    known, seen = _map_modules(), set[str]()
    waiting = [start, *more, *ALWAYS_INCLUDED_MODULES]
    while waiting:
        module = waiting.pop()
        if module in seen:
            continue
        seen.add(module)
        if module not in (start, *more) and is_frame_module(module):
            continue
        parts = module.split(".")
        waiting += [
            ".".join(parts[:end]) for end in range(1, len(parts))
        ]  # Python runs the packages around it
        waiting += _find_imported_modules(module)
    folders = {known[module].rpartition("/")[0] for module in seen}
    other = [
        path
        for path in list_project_sources()
        if not path.endswith(".py") and path.rpartition("/")[0] in folders
    ]
    return tuple(sorted([*(known[module] for module in seen), *other]))


def is_frame_module(module: str) -> bool:
    """True = a module that is part of a stage's code where it imports it, but whose own imports are not."""
    return any(module == name or module.startswith(f"{name}.") for name in FRAME_MODULES)


@functools.cache
def _read_source(path: str) -> bytes:
    return (_ROOT / path).read_bytes()


@functools.cache
def digest_source_file(path: str) -> str:
    """Short SHA-256 of a source file, by its path in the project."""
    return digest_bytes(_read_source(path))[:8]


@functools.cache
def _digest_sources(paths: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.encode() + b"\0" + _read_source(path) + b"\0")
    return digest.hexdigest()[:12]


def compute_stage_seed(seed: int, name: str) -> int:
    """A stage's own seed, derived from the pipeline's, in [0, 2^31)."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:4], "big") >> 1


def digest_input(value: StageResult | Path | str) -> str:
    """Digest of one input: a finished stage's, a folder's or file's content, or a hub name as it is written."""
    if isinstance(value, StageResult):
        return value.digest
    path = Path(value)
    if path.is_dir():
        return digest_folder(path)
    if path.is_file():
        return digest_file(path)
    if isinstance(value, Path):
        raise SettingsError(f"input {value} does not exist")
    return value


def digest_environment_files(pipeline: PipelineSettings) -> dict[str, str]:
    """Content of the data files that the environment's options name, by option."""
    digests = {}
    for name in ("path", "heldout"):
        option = pipeline.environment.options.get(name)
        if isinstance(option, str) and Path(option).exists():
            digests[name] = digest_input(Path(option))
    return digests


def _digest_user_content(
    stage_settings: dict[str, Any] | None, pipeline: PipelineSettings, named: Collection[str]
) -> tuple[dict[str, str], dict[str, UserModule]]:
    """Content of what the stage takes from the user besides its inputs: data file, chat template, and code.

    Code is what the environment's name, `named` (import paths) and any other import path in the settings lead to.
    Returns: digests by name; the modules of the user's by module name, whose digests are among them.
    Raises: SettingsError for a module that cannot be found.
    """
    digests = digest_environment_files(pipeline)
    if pipeline.model.chat_template is not None and Path(pipeline.model.chat_template).is_file():
        digests["chat_template"] = digest_file(Path(pipeline.model.chat_template))
    required = {path for path in (pipeline.environment.name, *named) if ":" in path}
    others = find_import_paths(stage_settings) | find_import_paths(
        dataclasses.asdict(pipeline.environment)
    )
    modules = find_user_modules(required, others - required)
    return digests | {f"code {name}": module.digest for name, module in modules.items()}, modules


@dataclass(frozen=True)
class StageKey:
    """Everything that decides a stage's result, and the cache key made of it."""

    parts: dict[
        str, Any
    ]  # plain values by kind: settings, environment, content, model, inputs, seed, code
    modules: dict[str, UserModule]  # of the user's, whose digests are in `parts`
    sources: dict[str, str]  # digests of the project's files behind `code`, by their path

    @property
    def key(self) -> str:
        """The cache key: 16 hex digits of the SHA-256 of all parts."""
        return hashlib.sha256(
            json.dumps(self.parts, sort_keys=True, default=str).encode()
        ).hexdigest()[:16]


def compute_stage_key(
    name: str, stage_settings: Any, pipeline: PipelineSettings, digests: Mapping[str, str]
) -> str:
    """The cache key of a stage; see `StageKey`."""
    return collect_stage_key(name, stage_settings, pipeline, digests).key


def collect_stage_key(
    name: str, stage_settings: Any, pipeline: PipelineSettings, digests: Mapping[str, str]
) -> StageKey:
    """Everything that decides a stage's result; `digests`: of its inputs."""
    decisive = dataclasses.asdict(stage_settings) if stage_settings is not None else None
    if decisive is not None:
        decisive.pop(
            "launch", None
        )  # another number of processes gives the same numbers, to rounding
        if isinstance(rollouts := decisive.pop("rollouts", None), dict) and (
            kept := select_decisive_rollouts(rollouts)
        ):
            decisive["rollouts"] = kept
        if isinstance(numerics := decisive.pop("numerics", None), dict) and (
            kept := select_decisive_numerics(numerics)
        ):
            decisive["numerics"] = kept
    named = (
        [path for _, path in iter_code_paths(stage_settings)]
        if isinstance(stage_settings, Settings)
        else []
    )
    if name in pipeline.stages.own:
        named.append(find_stage(name).task)
    content, modules = _digest_user_content(decisive, pipeline, named)
    model = dataclasses.asdict(pipeline.model)
    if "chat_template" in content:
        model.pop("chat_template")  # its text decides, not its place
    of_user = [module.content for module in modules.values()]
    of_user += [
        f'"{path}"'.encode() for path in named
    ]  # one of this project's own modules may be named
    payload = {
        "stage": name,
        "settings": decisive,
        "environment": dataclasses.asdict(pipeline.environment),
        "content": content,
        "model": model,
        "inputs": dict(digests),
        "seed": pipeline.seed,
        **(
            {"stage_seed": pipeline.find_stage_seed(name)}
            if pipeline.find_stage_seed(name) != pipeline.seed
            else {}
        ),
        "code": digest_stage_code(name, of_user),
    }
    return StageKey(
        payload,
        modules,
        {path: digest_source_file(path) for path in list_stage_sources(name, of_user)},
    )
