"""Cache key of a stage: a hash of everything that its result depends on."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_core.errors import SettingsError
from rl_core.storage.folders import digest_file, digest_folder
from tasks.config import PipelineSettings
from tasks.pipeline.result import StageResult

__all__ = ["code_version", "input_digest", "stage_key", "stage_seed"]

_SOURCES = (".py", ".c", ".h")


@functools.cache
def code_version() -> str:
    """Short SHA-256 of the source of rl_core and tasks: what decides a stage's numbers."""
    root = Path(__file__).resolve().parents[2]
    digest = hashlib.sha256()
    for package in ("rl_core", "tasks"):
        for path in sorted(path for ending in _SOURCES for path in (root / package).rglob(f"*{ending}")):
            digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


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


def _environment_digests(settings: PipelineSettings) -> dict[str, str]:
    """Content of what the environment is made from: its data file, and its source where it is the user's own."""
    digests = {}
    option = settings.environment.options.get("path")
    if isinstance(option, str) and Path(option).is_file():
        digests["path"] = digest_file(Path(option))
    if ":" in settings.environment.name:
        spec = importlib.util.find_spec(settings.environment.name.split(":")[0])
        if spec and spec.origin and Path(spec.origin).is_file():
            digests["source"] = digest_file(Path(spec.origin))
    return digests


def stage_key(name: str, stage_settings: Any, pipeline: PipelineSettings, digests: Mapping[str, str]) -> str:
    """The cache key: 16 hex digits of the SHA-256 of everything that decides the stage's result."""
    decisive = dataclasses.asdict(stage_settings) if stage_settings is not None else None
    if decisive is not None:
        decisive.pop("launch", None)  # another number of processes gives the same numbers, to rounding
    payload = {
        "stage": name,
        "settings": decisive,
        "environment": dataclasses.asdict(pipeline.environment),
        "environment_content": _environment_digests(pipeline),
        "model": dataclasses.asdict(pipeline.model),
        "inputs": dict(digests),
        "seed": pipeline.seed,
        "code": code_version(),
    }
    return hashlib.sha256(json.dumps(payload, sort_keys=True, default=str).encode()).hexdigest()[:16]
