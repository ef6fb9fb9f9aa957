"""Cache key of a stage: a hash of everything that its result depends on, including the code that it runs.

The code version is a digest of all sources that the stage's body reaches by imports, followed from the stage's module
and from the user's modules that it runs. Imports inside functions count, and so do strings that name a module
("rl_core.environments.maze:Maze", "math_child.py"), since such modules are imported late or run as programs. C sources
count if a module of their folder is reached. Imports for type checkers do not count.

The frame around every stage (settings, keys, folders, tracking) is not followed: it imports everything needed to check
a configuration, and computes nothing. Frame modules that stages import directly do count.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import hashlib
import json
import re
import shlex
import textwrap
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_core.data.images import list_named_images
from rl_core.errors import SettingsError
from rl_core.models.adapter_folder import is_adapter_folder, read_adapter_folder
from rl_core.settings import Settings, iter_code_paths
from rl_core.settings.common import iter_mixed_environments
from rl_core.settings.rollouts import select_decisive_numerics, select_decisive_rollouts
from rl_core.storage.manifest import digest_bytes, digest_file, digest_folder
from rl_core.user_code.digest import UserModule, find_user_modules
from rl_core.user_code.load import find_import_paths
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
ENVIRONMENT_FILES = ("path", "heldout", "tasks")  # options of environments that name data files
LAZY_PACKAGES = ("rl_core",)  # its strings name the whole public API, for lazy imports

_ROOT = Path(__file__).resolve().parents[2]
_PACKAGES = ("rl_core", "tasks")
_SOURCES = (".py", ".c", ".h", ".csv", ".json")
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
    """Compute the short SHA-256 of all sources of rl_core and tasks, which identifies the code of a run."""
    return _digest_sources(list_project_sources())


def digest_stage_code(stage: str, user_sources: Iterable[bytes] = ()) -> str:
    """Compute the short SHA-256 over paths and contents of `list_stage_sources`."""
    return _digest_sources(list_stage_sources(stage, user_sources))


def list_stage_sources(stage: str, user_sources: Iterable[bytes] = ()) -> tuple[str, ...]:
    """List the files that a stage's numbers depend on, by their path in the project, sorted.

    Args:
        user_sources: content of the user's modules that the stage runs.
    Returns: all sources of the project if the stage's task is not in one of its modules.
    """
    task = find_stage(stage).task if stage in list_stage_names() else ""
    is_custom = stage in list_stage_names() and find_stage(stage).custom is not None
    module = "tasks.stages.custom_stage" if is_custom else task.partition(":")[0]
    if module not in _map_modules():
        return list_project_sources()
    user_imports = {
        name
        for content in user_sources
        for name in find_imported_names(content.decode("utf-8", "replace"))
    }
    return _find_reachable_sources(module, frozenset(user_imports & _map_modules().keys()))


@functools.cache
def list_project_sources() -> tuple[str, ...]:
    """List all sources of rl_core and tasks, by their path in the project, sorted."""
    return tuple(
        sorted(
            str(path.relative_to(_ROOT))
            for package in _PACKAGES
            for suffix in _SOURCES
            for path in (_ROOT / package).rglob(f"*{suffix}")
            if path.name != "metrics.json"  # the reference of metrics, which no result depends on
        )
    )


def find_imported_names(text: str) -> set[str]:
    """Find the dotted names that a source imports or names in a string: `a.b` and `a.b.c` for `from a.b import c`.

    For speed, statements are located by their first word and then parsed as Python; lines that do not parse, such as
    lines of a docstring, are skipped.
    """
    text = _TYPE_CHECKING_BLOCK.sub("", text)
    names = set(_NAMED_MODULE.findall(text))
    for statement in _IMPORT_STATEMENT.findall(text):
        try:
            nodes = ast.parse(textwrap.dedent(statement).strip()).body
        except SyntaxError:
            continue
        for node in nodes:
            names.update(_iter_imported_names(node))
    return names


def _iter_imported_names(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
        yield node.module
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


@functools.cache
def _map_modules() -> dict[str, str]:
    """Map the dotted name of every module to its path in the project; a package goes by its name."""
    python = [path for path in list_project_sources() if path.endswith(".py")]
    return {
        path.removesuffix(".py").removesuffix("/__init__").replace("/", "."): path
        for path in python
    }


@functools.cache
def _find_imported_modules(module: str) -> frozenset[str]:
    """Find the modules of the project that a module imports, names or starts, including those that are not followed."""
    known = _map_modules()
    text = _read_source(known[module]).decode()
    names = find_imported_names(text)
    if module in LAZY_PACKAGES:
        names -= set(_NAMED_MODULE.findall(text))
    folder = known[module].rpartition("/")[0].replace("/", ".")
    names |= {f"{folder}.{name}" for name in _NAMED_FILE.findall(text)}
    return frozenset(names & known.keys() - {module})


@functools.cache
def _find_reachable_sources(start: str, extra_modules: frozenset[str]) -> tuple[str, ...]:
    known, seen = _map_modules(), set[str]()
    pending = [start, *extra_modules, *ALWAYS_INCLUDED_MODULES]
    while pending:
        module = pending.pop()
        if module in seen:
            continue
        seen.add(module)
        if module not in (start, *extra_modules) and is_frame_module(module):
            continue
        parts = module.split(".")
        pending += [
            ".".join(parts[:end]) for end in range(1, len(parts))
        ]  # Python runs the packages around it
        pending += _find_imported_modules(module)
    folders = {known[module].rpartition("/")[0] for module in seen}
    other = [
        path
        for path in list_project_sources()
        if not path.endswith(".py") and path.rpartition("/")[0] in folders
    ]
    return tuple(sorted([*(known[module] for module in seen), *other]))


def is_frame_module(module: str) -> bool:
    """Return whether a module belongs to the frame.

    A frame module counts as a stage's code where the stage imports it, but its imports are not followed.
    """
    return any(module == name or module.startswith(f"{name}.") for name in FRAME_MODULES)


@functools.cache
def _read_source(path: str) -> bytes:
    return (_ROOT / path).read_bytes()


@functools.cache
def digest_source_file(path: str) -> str:
    """Compute the short SHA-256 of a source file, by its path in the project."""
    return digest_bytes(_read_source(path))[:8]


@functools.cache
def _digest_sources(paths: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.encode() + b"\0" + _read_source(path) + b"\0")
    return digest.hexdigest()[:12]


def compute_stage_seed(seed: int, name: str) -> int:
    """Derive a stage's seed from the pipeline's, in [0, 2^31)."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:4], "big") >> 1


def digest_input(value: StageResult | Path | str) -> str:
    """Compute the digest of an input: a finished stage's, the content of a folder or file, or a hub name as written."""
    if isinstance(value, StageResult):
        return value.digest
    path = Path(value)
    if path.is_dir():
        digest = digest_folder(path)
        if is_adapter_folder(path):  # the model that it belongs to is an input, too
            return digest_bytes(f"{digest} {digest_input(read_adapter_folder(path).base)}".encode())
        return digest
    if path.is_file():
        digest = digest_file(path)
        if images := list_named_images(path):
            return digest_bytes(" ".join([digest, *map(digest_file, images)]).encode())
        return digest
    if isinstance(value, Path):
        raise SettingsError(f"input {value} does not exist")
    return value


def digest_environment_files(pipeline: PipelineSettings) -> dict[str, str]:
    """Digest the data files that the environment's options name, by option."""
    return {name: digest for name, (_, digest) in _digest_environment_paths(pipeline).items()}


def list_environment_files(pipeline: PipelineSettings) -> dict[str, str]:
    """List the data files that the environment's options name, by the names of `digest_environment_files`."""
    return {name: path for name, (path, _) in _digest_environment_paths(pipeline).items()}


def _digest_environment_paths(pipeline: PipelineSettings) -> dict[str, tuple[str, str]]:
    """Digest the environment's files: path and digest by name, of a mixture with the index of the environment."""
    files: dict[str, tuple[str, str]] = {}
    for index, environment in iter_mixed_environments(pipeline.environment):
        prefix = "" if index < 0 else f"environments.{index}."
        for name in ENVIRONMENT_FILES:
            option = environment.options.get(name)
            if isinstance(option, str) and Path(option).exists():
                files[prefix + name] = option, digest_input(Path(option))
        command = environment.options.get("command")
        for word in _split_command(command) if isinstance(command, str) else ():
            if Path(word).is_file():  # the agent's script
                files[f"{prefix}command {word}"] = word, digest_file(Path(word))
    return files


def _split_command(command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError:  # validation reports it
        return []


def _digest_user_content(
    stage_settings: dict[str, Any] | None, pipeline: PipelineSettings, named: Collection[str]
) -> tuple[dict[str, str], dict[str, UserModule], bool]:
    """Digest what the stage takes from the user besides its inputs: data file, chat template, and code.

    Code comes from the environment's name, `named` (import paths) and any other import path in the settings.
    Returns: digests by name; the user's modules by name, whose digests are among them; whether the settings name any
        file or import path, so that the digests may change while the pipeline runs.
    Raises: SettingsError if a module cannot be imported.
    """
    digests = digest_environment_files(pipeline)
    if pipeline.model.chat_template is not None and Path(pipeline.model.chat_template).is_file():
        digests["chat_template"] = digest_file(Path(pipeline.model.chat_template))
    environments = [environment for _, environment in iter_mixed_environments(pipeline.environment)]
    names = [environment.name for environment in environments]
    required = {path for path in (*names, *named) if ":" in path}
    others = find_import_paths(stage_settings) | find_import_paths(
        dataclasses.asdict(pipeline.environment)
    )
    modules = find_user_modules(required, others - required)
    is_named = bool(required or others) or pipeline.model.chat_template is not None
    is_named |= any(
        environment.options.get(name) for environment in environments for name in ENVIRONMENT_FILES
    )
    digests |= {f"code {name}": module.digest for name, module in modules.items()}
    return digests, modules, is_named


@dataclass(frozen=True)
class StageKey:
    """Everything that decides a stage's result, and the cache key computed from it."""

    parts: dict[str, Any]  # JSON values: settings, environment, content, model, inputs, seed, code
    modules: dict[str, UserModule]  # of the user, with digests in `parts`
    sources: dict[str, str]  # digests of the project's files that make up `code`, by path
    names_user_content: bool  # True = it covers files or code of the user, which may change

    @property
    def key(self) -> str:
        """The cache key: 16 hex digits of the SHA-256 of all parts."""
        encoded = json.dumps(self.parts, sort_keys=True, default=str).encode()
        return hashlib.sha256(encoded).hexdigest()[:16]

    def replace_inputs(self, digests: Mapping[str, str]) -> StageKey:
        """Return the key of the same stage with other inputs, by their digests."""
        return dataclasses.replace(self, parts={**self.parts, "inputs": dict(digests)})


class StageKeys:
    """Keys of a pipeline's stages, each collected once: for the list of cached stages, for the checks before the run
    and for the stages themselves.
    """

    def __init__(self, pipeline: PipelineSettings) -> None:
        self.pipeline = pipeline
        self._keys: dict[str, StageKey] = {}

    def collect_key(self, stage: str) -> StageKey:
        """Collect the key of a stage under the settings and the code, without its inputs."""
        if stage not in self._keys:
            settings = getattr(self.pipeline.stages, stage, None)
            self._keys[stage] = collect_stage_key(stage, settings, self.pipeline, {})
        return self._keys[stage]

    def forget_user_content(self) -> None:
        """Forget the keys that cover files or code of the user, which may have changed meanwhile."""
        self._keys = {stage: key for stage, key in self._keys.items() if not key.names_user_content}

    def collect_started_key(
        self, stage: str, stage_settings: Any, digests: Mapping[str, str]
    ) -> StageKey:
        """Collect the key of a stage that starts now, whose inputs are known.

        Arguments: see `collect_stage_key`.
        """
        if stage_settings != getattr(self.pipeline.stages, stage, None):
            return collect_stage_key(stage, stage_settings, self.pipeline, digests)
        self.forget_user_content()
        return self.collect_key(stage).replace_inputs(digests)


def collect_stage_key(
    name: str, stage_settings: Any, pipeline: PipelineSettings, digests: Mapping[str, str]
) -> StageKey:
    """Collect everything that decides a stage's result.

    Args:
        digests: of its inputs.
    """
    decisive = _select_decisive_settings(stage_settings)
    named = (
        [path for _, path in iter_code_paths(stage_settings)]
        if isinstance(stage_settings, Settings)
        else []
    )
    if name in pipeline.stages.custom:
        named.append(find_stage(name).task)
    content, modules, is_named = _digest_user_content(decisive, pipeline, named)
    model = dataclasses.asdict(pipeline.model)
    if "chat_template" in content:
        model.pop("chat_template")  # its text decides, not its path
    # the import paths may name modules of this project
    user_sources = [module.content for module in modules.values()]
    user_sources += [f'"{path}"'.encode() for path in named]
    stage_seed = pipeline.find_stage_seed(name)
    parts = {
        "stage": name,
        "settings": decisive,
        "environment": dataclasses.asdict(pipeline.environment),
        "content": content,
        "model": model,
        "inputs": dict(digests),
        "seed": pipeline.seed,
        **({"stage_seed": stage_seed} if stage_seed != pipeline.seed else {}),
        "code": digest_stage_code(name, user_sources),
    }
    sources = {path: digest_source_file(path) for path in list_stage_sources(name, user_sources)}
    return StageKey(parts, modules, sources, is_named)


def _select_decisive_settings(stage_settings: Any) -> dict[str, Any] | None:
    """Return a stage's settings as a dict, without those that do not change its result."""
    if stage_settings is None:
        return None
    decisive = dataclasses.asdict(stage_settings)
    decisive.pop("launch", None)  # another number of processes gives equal numbers, up to rounding
    rollouts = decisive.pop("rollouts", None)
    if isinstance(rollouts, dict) and (selected := select_decisive_rollouts(rollouts)):
        decisive["rollouts"] = selected
    numerics = decisive.pop("numerics", None)
    if isinstance(numerics, dict) and (selected := select_decisive_numerics(numerics)):
        decisive["numerics"] = selected
    return decisive
