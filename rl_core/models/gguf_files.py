"""GGUF files, the format of llama.cpp and ollama: read as Hugging Face model folders.

A quantised file is dequantised to float32 once, into the user's cache (`resolve_gguf_folder`); everything else reads
that folder. The package `gguf` (extra `gguf`) reads the file, transformers maps its names.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.resources
import io
import json
import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_core.errors import ModelError
from rl_core.models.quiet_loading import quiet_transformers
from rl_core.storage.atomic_files import make_folder, resolve_cache_folder
from rl_core.storage.folders import publish_folder
from rl_core.storage.locks import FolderLock
from rl_core.storage.manifest import digest_file

if TYPE_CHECKING:
    from gguf import GGUFReader

logger = logging.getLogger(__name__)

GGUF_MAGIC = b"GGUF"
_SPLIT_FILE = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
_PROJECTORS = ("clip", "mmproj")  # general.architecture of files that go with a model
_CONVERSION_WAIT_S = 1800.0  # of another process that converts the same file


@dataclass(frozen=True)
class GgufHeader:
    """Description of the model in the header of a GGUF file."""

    architecture: str  # as llama.cpp names it: llama, qwen2
    pre_tokenizer: str | None  # as llama.cpp names it: smollm, qwen2; None = a SentencePiece model
    quantization: str  # of most of the weights: F32, BF16, Q8_0, Q4_1
    num_parameters: int
    context: int | None  # longest sequence, tokens
    vocabulary: int | None
    width: int | None  # of the hidden states
    num_layers: int | None
    head_dim: int | None  # of the keys; None = the width divided by the heads

    def describe(self) -> str:
        """Describe the model in a few words: llama, 134.5 M parameters, Q4_1."""
        return f"{self.architecture}, {self.num_parameters / 1e6:.1f} M parameters, {self.quantization}"

    def build_config(self) -> dict[str, Any]:
        """Build the entries of a `config.json` that commands read before the model is converted."""
        entries = {
            "model_type": self.architecture,
            "max_position_embeddings": self.context,
            "vocab_size": self.vocabulary,
            "hidden_size": self.width,
            "num_hidden_layers": self.num_layers,
        }
        return {name: value for name, value in entries.items() if value is not None}


def find_gguf_file(path: str | Path) -> Path | None:
    """Return the GGUF file that a path names: the file, or the only one in a folder without `config.json`.

    Returns: None if the path names something else.
    Raises: ModelError if a folder holds several, or the file is a part of a split one.
    """
    source = Path(os.path.expanduser(path))  # Path.expanduser raises for a user that nobody knows
    try:
        is_folder = source.is_dir()
        if not is_folder and not source.is_file():
            return None
        files = sorted(source.glob("*.gguf")) if is_folder else [source]
        has_config = (source / "config.json").is_file()
    except (OSError, ValueError):  # a name that is too long, a folder that may not be read
        return None
    if is_folder:
        if not files or has_config:
            return None
        if len(files) > 1:
            names = ", ".join(file.name for file in files[:6])
            raise ModelError(f"'{path}' holds {len(files)} GGUF files ({names}); name one of them")
        source = files[0]
    elif not _has_magic(source):
        return None
    if match := _SPLIT_FILE.search(source.name):
        raise ModelError(
            f"'{source}' is part {int(match[1])} of {int(match[2])} of a model; join them with llama.cpp's "
            "`llama-gguf-split --merge`"
        )
    return source


def _has_magic(file: Path) -> bool:
    if file.suffix.lower() == ".gguf":
        return True
    try:
        with file.open("rb") as opened:
            return opened.read(len(GGUF_MAGIC)) == GGUF_MAGIC
    except OSError:
        return False


def read_gguf_header(file: Path) -> GgufHeader:
    """Read the description of the model in the header of a GGUF file.

    Raises: ModelError if the file cannot be read, or the package `gguf` is not installed.
    """
    stamp = file.stat()
    return _read_header(file, stamp.st_mtime_ns, stamp.st_size)


@functools.lru_cache(maxsize=16)
def _read_header(file: Path, modified_ns: int, size: int) -> GgufHeader:
    reader = _open_reader(file)
    try:
        return _collect_header(reader, file)
    except ModelError:
        raise
    except Exception as error:  # values of other types than the format has, text that is no UTF-8
        raise _build_damage_error(file, error) from error


def _collect_header(reader: GGUFReader, file: Path) -> GgufHeader:
    def read_value(name: str) -> Any:
        value = reader.get_field(name)
        return None if value is None else value.contents()

    architecture = str(read_value("general.architecture"))

    def read_number(name: str) -> int | None:
        number = read_value(f"{architecture}.{name}")
        return int(number) if isinstance(number, int) else None

    sizes: Counter[str] = Counter()
    for tensor in reader.tensors:
        sizes[tensor.tensor_type.name] += int(tensor.n_elements)
    if not sizes:
        raise ModelError(f"'{file}' holds no weights")
    tokens = reader.get_field("tokenizer.ggml.tokens")
    if architecture in _PROJECTORS:
        raise ModelError(
            f"'{file}' holds the image or audio encoder of a model (mmproj, {architecture}), not a language model; "
            "name the model's other GGUF file"
        )
    if tokens is None:
        raise ModelError(
            f"'{file}' ({architecture}) holds no tokenizer, so no text can be read with it"
        )
    return GgufHeader(
        architecture=architecture,
        pre_tokenizer=read_value("tokenizer.ggml.pre"),
        quantization=sizes.most_common(1)[0][0],
        num_parameters=sum(sizes.values()),
        context=read_number("context_length"),
        vocabulary=len(tokens.data),
        width=read_number("embedding_length"),
        num_layers=read_number("block_count"),
        head_dim=read_number("attention.key_length"),
    )


def _open_reader(file: Path) -> GGUFReader:
    try:
        from gguf import GGUFReader
    except ImportError:
        raise ModelError(
            f"'{file}' is a GGUF file, which the package gguf reads: python -m posttrain.install --extras gguf"
        ) from None
    try:
        return GGUFReader(file)
    except Exception as error:  # the reader raises whatever numpy raises on a damaged file
        raise _build_damage_error(file, error) from error


def _build_damage_error(file: Path, error: Exception) -> ModelError:
    reason = " ".join(str(error).split())[:200]
    return ModelError(
        f"'{file}' is not a whole GGUF file: {type(error).__name__}: {reason}; download it again"
    )


def resolve_gguf_folder(file: Path, report: Callable[[str], object] = logger.info) -> Path:
    """Return the Hugging Face folder of a GGUF file, dequantised to float32 in the user's cache on first use.

    Args:
        report: called with a line before the conversion.
    Raises: ModelError if the file cannot be read or transformers does not know its architecture.
    """
    header = read_gguf_header(file)
    caches = resolve_cache_folder("gguf")
    folder = caches / f"{file.stem}-{digest_file(file)[:16]}"
    if folder.is_dir():
        return folder
    make_folder(caches)
    with FolderLock(caches / f"{folder.name}.lock", wait_s=_CONVERSION_WAIT_S):
        if not folder.is_dir():
            gigabytes = 4e-9 * header.num_parameters
            report(
                f"{file.name}: {header.describe()}; dequantised once to float32 ({gigabytes:.2f} GB) in {folder}"
            )
            convert_gguf_file(file, folder)
    return folder


def convert_gguf_file(file: Path, folder: Path) -> None:
    """Write a GGUF file's model, dequantised to float32, and its tokenizer as a Hugging Face folder.

    Raises: ModelError if the file cannot be read or transformers does not know its architecture.
    """
    header = read_gguf_header(file)
    try:
        model, tokenizer = load_gguf_model(file)
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise ModelError(
            f"'{file}' ({header.architecture}) cannot be read as a model: {type(error).__name__}: {reason}"
        ) from error

    def write_model(target: Path) -> None:
        with quiet_transformers():
            model.save_pretrained(target)
        tokenizer.save_pretrained(target)

    publish_folder(
        folder,
        write_model,
        {"kind": "model", "source": file.name, "quantization": header.quantization},
    )


@contextlib.contextmanager
def _share_reader(file: Path) -> Iterator[None]:
    """Let transformers read a GGUF file once: it opens a reader each for tokenizer, config and weights, and builds
    the table of tensor names for each module. Both take seconds, and neither is changed by its users.
    """
    import gguf

    open_reader, reader = gguf.GGUFReader, _open_reader(file)

    def open_shared(path: Any, *options: Any) -> GGUFReader:
        is_shared = not options and Path(path) == file
        return reader if is_shared else open_reader(path, *options)

    replacements = {
        "GGUFReader": open_shared,
        "get_tensor_name_map": functools.cache(gguf.get_tensor_name_map),
    }
    originals = {name: getattr(gguf, name) for name in replacements}
    for name, function in replacements.items():
        setattr(gguf, name, function)
    try:
        yield
    finally:
        for name, function in originals.items():
            setattr(gguf, name, function)


def load_gguf_model(file: Path) -> tuple[Any, Any]:
    """Load the dequantised model and the tokenizer of a GGUF file."""
    with _share_reader(file):
        return _load_model_and_tokenizer(file)


def _load_model_and_tokenizer(file: Path) -> tuple[Any, Any]:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    options = {"gguf_file": file.name}
    tokenizer: Any = AutoTokenizer.from_pretrained(file.parent, **options)
    header = read_gguf_header(file)
    if header.pre_tokenizer is not None:
        _set_pre_tokenizer(tokenizer, header.pre_tokenizer, file)
    if header.context is not None:
        tokenizer.model_max_length = header.context
    config = AutoConfig.from_pretrained(file.parent, **options)
    if header.head_dim is not None and hasattr(config, "head_dim"):  # not read for some families
        config.head_dim = header.head_dim
    with quiet_transformers(), contextlib.redirect_stderr(io.StringIO()):  # bars of the reader
        model: Any = AutoModelForCausalLM.from_pretrained(
            file.parent, config=config, dtype=torch.float32, **options
        )
    # `save_pretrained` refuses a model that was read from a quantised file, although its weights are float32 now.
    model.hf_quantizer = None
    for name in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        model.config.__dict__.pop(name, None)
    model.eval()
    return model, tokenizer


@functools.cache
def list_pre_tokenizers() -> dict[str, list[dict[str, Any]]]:
    """List how text is split before merging, by llama.cpp's name (`tokenizer.ggml.pre`).

    Source: llama.cpp, src/llama-vocab.cpp.
    """
    data = importlib.resources.files(__package__).joinpath("gguf_pre_tokenizers.json")
    parts: dict[str, list[dict[str, Any]]] = json.loads(data.read_text(encoding="utf-8"))
    return parts


def _set_pre_tokenizer(tokenizer: Any, name: str, file: Path) -> None:
    """Split text as the file says; transformers splits every byte-level tokenizer as GPT-2 does."""
    from tokenizers import Regex, pre_tokenizers

    parts = list_pre_tokenizers().get(name)
    if parts is None:
        logger.warning(
            "%s: its pre-tokenizer '%s' is not known here, so text is split as by GPT-2 and some of it may become "
            "other tokens than the model was trained on; prefer a folder with a tokenizer.json",
            file,
            name,
        )
        return
    built: list[Any] = []
    for part in parts:
        if part["type"] == "Digits":
            built.append(pre_tokenizers.Digits(individual_digits=part["individual_digits"]))
        elif part["type"] == "Split":
            built.append(pre_tokenizers.Split(Regex(part["pattern"]), behavior="isolated"))
        else:
            built.append(
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=part["use_regex"])
            )
    tokenizer.backend_tokenizer.pre_tokenizer = (
        built[0] if len(built) == 1 else pre_tokenizers.Sequence(built)
    )


def find_pre_tokenizer(tokenizer: Mapping[str, Any]) -> str | None:
    """Return llama.cpp's name for the way a tokenizer splits text; None if it has none here.

    Args:
        tokenizer: contents of its `tokenizer.json`.
    """
    described = tokenizer.get("pre_tokenizer") or {}
    parts = described["pretokenizers"] if described.get("type") == "Sequence" else [described]
    plain = []
    for part in parts:
        kind = part.get("type")
        if kind == "ByteLevel" and not part["add_prefix_space"]:
            plain.append({"type": kind, "use_regex": part["use_regex"]})
        elif kind == "Digits":
            plain.append({"type": kind, "individual_digits": part["individual_digits"]})
        elif kind == "Split" and part["behavior"] == "Isolated" and not part["invert"]:
            plain.append({"type": kind, "pattern": part["pattern"].get("Regex")})
        else:
            return None
    return next((name for name, known in list_pre_tokenizers().items() if known == plain), None)
