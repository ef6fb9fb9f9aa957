"""Cache key of a stage: a hash of everything that its result depends on."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_core.errors import SettingsError
from rl_core.settings import Settings, code_paths
from rl_core.settings.numerics import decisive_numerics
from rl_core.settings.rollouts import decisive_rollouts
from rl_core.storage.manifest import digest_file, digest_folder
from rl_core.user_code import UserModule, import_paths, user_modules
from tasks.config import PipelineSettings
from tasks.pipeline.result import StageResult
from tasks.pipeline.stage_code import file_digest, stage_code, stage_sources
from tasks.stage_registry import entry

__all__ = ["StageKey", "environment_digests", "input_digest", "stage_key", "stage_key_parts", "stage_seed"]


def stage_seed(seed: int, name: str) -> int:
    """A stage's own seed, derived from the pipeline's, in [0, 2^31)."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:4], "big") >> 1


def input_digest(value: StageResult | Path | str) -> str:
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


def environment_digests(pipeline: PipelineSettings) -> dict[str, str]:
    """Content of the data files that the environment's options name, by option."""
    digests = {}
    for name in ("path", "heldout"):
        option = pipeline.environment.options.get(name)
        if isinstance(option, str) and Path(option).exists():
            digests[name] = input_digest(Path(option))
    return digests


def _content_digests(
    stage_settings: dict[str, Any] | None, pipeline: PipelineSettings, named: Collection[str]
) -> tuple[dict[str, str], dict[str, UserModule]]:
    """Content of what the stage takes from the user besides its inputs: data file, chat template, and code.

    Code is what the environment's name, `named` (import paths) and any other import path in the settings lead to.
    Returns: digests by name; the modules of the user's by module name, whose digests are among them.
    Raises: SettingsError for a module that cannot be found.
    """
    digests = environment_digests(pipeline)
    if pipeline.model.chat_template is not None and Path(pipeline.model.chat_template).is_file():
        digests["chat_template"] = digest_file(Path(pipeline.model.chat_template))
    required = {path for path in (pipeline.environment.name, *named) if ":" in path}
    others = import_paths(stage_settings) | import_paths(dataclasses.asdict(pipeline.environment))
    modules = user_modules(required, others - required)
    return digests | {f"code {name}": module.digest for name, module in modules.items()}, modules


@dataclass(frozen=True)
class StageKey:
    """Everything that decides a stage's result, and the cache key made of it."""

    parts: dict[str, Any]  # plain values by kind: settings, environment, content, model, inputs, seed, code
    modules: dict[str, UserModule]  # of the user's, whose digests are in `parts`
    sources: dict[str, str]  # digests of the project's files behind `code`, by their path

    @property
    def key(self) -> str:
        """The cache key: 16 hex digits of the SHA-256 of all parts."""
        return hashlib.sha256(json.dumps(self.parts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def stage_key(name: str, stage_settings: Any, pipeline: PipelineSettings, digests: Mapping[str, str]) -> str:
    """The cache key of a stage; see `StageKey`."""
    return stage_key_parts(name, stage_settings, pipeline, digests).key


def stage_key_parts(name: str, stage_settings: Any, pipeline: PipelineSettings, digests: Mapping[str, str]) -> StageKey:
    """Everything that decides a stage's result; `digests`: of its inputs."""
    decisive = dataclasses.asdict(stage_settings) if stage_settings is not None else None
    if decisive is not None:
        decisive.pop("launch", None)  # another number of processes gives the same numbers, to rounding
        if isinstance(rollouts := decisive.pop("rollouts", None), dict) and (kept := decisive_rollouts(rollouts)):
            decisive["rollouts"] = kept
        if isinstance(numerics := decisive.pop("numerics", None), dict) and (kept := decisive_numerics(numerics)):
            decisive["numerics"] = kept
    named = [path for _, path in code_paths(stage_settings)] if isinstance(stage_settings, Settings) else []
    if name in pipeline.stages.own:
        named.append(entry(name).task)
    content, modules = _content_digests(decisive, pipeline, named)
    model = dataclasses.asdict(pipeline.model)
    if "chat_template" in content:
        model.pop("chat_template")  # its text decides, not its place
    of_user = [module.content for module in modules.values()]
    of_user += [f'"{path}"'.encode() for path in named]  # one of this project's own modules may be named
    payload = {
        "stage": name,
        "settings": decisive,
        "environment": dataclasses.asdict(pipeline.environment),
        "content": content,
        "model": model,
        "inputs": dict(digests),
        "seed": pipeline.seed,
        **({"stage_seed": pipeline.seed_of(name)} if pipeline.seed_of(name) != pipeline.seed else {}),
        "code": stage_code(name, of_user),
    }
    return StageKey(payload, modules, {path: file_digest(path) for path in stage_sources(name, of_user)})
