"""Hostile model folders and checkpoints: false headers, pickles, links, code, wrong shapes, forged manifests."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hostile.case import BASE, CONFIG, Case, Content, device, fifo, link, sparse

__all__ = ["CASES"]

_HIDDEN, _INNER, _WORDS = 8, 12, 16
_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": _HIDDEN,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": _INNER,
    "vocab_size": _WORDS,
    "max_position_embeddings": 32,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
    "torch_dtype": "float32",
}
_SHAPES = {
    "model.embed_tokens.weight": [_WORDS, _HIDDEN],
    "model.norm.weight": [_HIDDEN],
    **{
        f"model.layers.0.{name}_layernorm.weight": [_HIDDEN] for name in ("input", "post_attention")
    },
    **{f"model.layers.0.self_attn.{name}_proj.weight": [_HIDDEN, _HIDDEN] for name in "qkvo"},
    "model.layers.0.mlp.gate_proj.weight": [_INNER, _HIDDEN],
    "model.layers.0.mlp.up_proj.weight": [_INNER, _HIDDEN],
    "model.layers.0.mlp.down_proj.weight": [_HIDDEN, _INNER],
}
_TOKENIZER: dict[str, Any] = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [],
    "normalizer": None,
    "pre_tokenizer": {"type": "Whitespace"},
    "post_processor": None,
    "decoder": None,
    "model": {"type": "WordLevel", "vocab": {f"t{n}": n for n in range(_WORDS)}, "unk_token": "t2"},
}
_TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "pad_token": "t0",
    "eos_token": "t1",
    "unk_token": "t2",
}
_CODE = "import pathlib\npathlib.Path('../../canary-ran').touch()\n"
_PICKLE = b"\x80\x04cos\nsystem\n(S'touch ../canary-ran'\ntR."


def safetensors(shapes: Mapping[str, list[int]], **header: Any) -> bytes:
    """Build a safetensors file of float32 zeros with header entries from `header`."""
    entries: dict[str, Any] = {}
    offset = 0
    for name, shape in shapes.items():
        size = 4
        for number in shape:
            size *= number
        entries[name] = {"dtype": "F32", "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps({**entries, **header}).encode()
    return struct.pack("<Q", len(text)) + text + bytes(offset)


GOOD = safetensors(_SHAPES, __metadata__={"format": "pt"})


def _model(**changed: Content | None) -> dict[str, Content]:
    """Build a model folder that loads, with some files changed, added or (None) left out.

    '__' in a keyword stands for '.' in the file name.
    """
    files: dict[str, Content | None] = {
        "config.json": json.dumps(_CONFIG),
        "model.safetensors": GOOD,
        "tokenizer.json": json.dumps(_TOKENIZER),
        "tokenizer_config.json": json.dumps(_TOKENIZER_CONFIG),
    }
    files |= {name.replace("__", "."): content for name, content in changed.items()}
    return {f"m/{name}": content for name, content in files.items() if content is not None}


def model(
    files: Mapping[str, Content], says: str | tuple[str, ...], name: str, code: int = 2
) -> Case:
    """Build a case with a model folder that cannot be loaded."""
    parts = (says,) if isinstance(says, str) else says
    return Case(f"model: {name}", ("call", "hostile.calls:load_model", "m"), parts, files, code)


def _config(**changed: Any) -> str:
    return json.dumps({**_CONFIG, **changed})


def _weights(change: Callable[[bytearray], None]) -> bytes:
    content = bytearray(GOOD)
    change(content)
    return bytes(content)


def _length(number: int) -> bytes:
    return struct.pack("<Q", number) + GOOD[8:]


def _header(text: str) -> bytes:
    return (
        struct.pack("<Q", len(text.encode()))
        + text.encode()
        + GOOD[8 + struct.unpack("<Q", GOOD[:8])[0] :]
    )


def _entry(**changed: Any) -> bytes:
    entry = {"dtype": "F32", "shape": [_HIDDEN], "data_offsets": [0, 4 * _HIDDEN], **changed}
    return safetensors({}, **{"model.norm.weight": entry}) + bytes(4 * _HIDDEN)


_index = json.dumps(
    {"metadata": {}, "weight_map": {name: "../outside/canary.txt" for name in _SHAPES}}
)
_NO = "cannot be read"
_MODELS = [
    Case(
        "model: one that loads",
        ("call", "hostile.calls:load_model", "m"),
        ("loaded",),
        _model(),
        code=0,
    ),
    model(_model(model__safetensors=GOOD[:100]), _NO, "weights cut in the header"),
    model(_model(model__safetensors=GOOD[:-100]), _NO, "weights cut in the data"),
    model(_model(model__safetensors=b""), _NO, "weights empty"),
    model(_model(model__safetensors=b"\0" * 8), _NO, "weights of zeros"),
    model(_model(model__safetensors=_length(2**63)), _NO, "header of 2^63 bytes"),
    model(_model(model__safetensors=_length(2**64 - 1)), _NO, "header of 2^64 - 1 bytes"),
    model(_model(model__safetensors=_length(90_000_000)), _NO, "header of 90 MB declared"),
    model(_model(model__safetensors=_length(0)), _NO, "header of no bytes"),
    model(_model(model__safetensors=_header("{")), _NO, "header no JSON"),
    model(_model(model__safetensors=_header("[]")), _NO, "header a list"),
    model(_model(model__safetensors=_header("{}")), _NO, "header without tensors"),
    model(_model(model__safetensors=_header('{"a":' * 50_000)), _NO, "header nested"),
    model(
        _model(model__safetensors=_header('{"a": {"dtype": "F32"}}')), _NO, "header without shape"
    ),
    model(
        _model(model__safetensors=_entry(data_offsets=[0, 2**62])), _NO, "offsets beyond the file"
    ),
    model(_model(model__safetensors=_entry(data_offsets=[32, 0])), _NO, "offsets turned round"),
    model(_model(model__safetensors=_entry(data_offsets=[-8, 24])), _NO, "negative offset"),
    model(
        _model(model__safetensors=_entry(shape=[2**31, 2**31, 2**31])), _NO, "shape that overflows"
    ),
    model(_model(model__safetensors=_entry(shape=[2**40])), _NO, "shape beyond its data"),
    model(_model(model__safetensors=_entry(shape=[-8])), _NO, "negative shape"),
    model(_model(model__safetensors=_entry(dtype="X99")), _NO, "unknown dtype"),
    model(_model(model__safetensors=GOOD + b"x" * 1000), _NO, "data behind the last tensor"),
    model(_model(model__safetensors=safetensors({})), "are missing", "no weight at all"),
    model(
        _model(model__safetensors=safetensors({**_SHAPES, "model.norm.weight": [99]})),
        "norm",
        "a weight of another shape",
    ),
    model(
        _model(
            model__safetensors=safetensors({n: s for n, s in _SHAPES.items() if "norm" not in n})
        ),
        "3 are missing",
        "weights missing",
    ),
    model(_model(model__safetensors=sparse(2**29, GOOD)), _NO, "zeros behind the weights"),
    model(_model(model__safetensors=_PICKLE), _NO, "a pickle by the name of safetensors"),
    model(
        _model(model__safetensors=None, pytorch_model__bin=_PICKLE),
        ("pickle", "never read"),
        "a pickle",
    ),
    model(
        _model(model__safetensors=None, model__pt=_PICKLE), ("pickle", "never read"), "a pickle .pt"
    ),
    model(_model(model__safetensors=None), "holds no weights", "no weights"),
    model(_model(model__safetensors=lambda path: path.mkdir()), "m", "weights are a folder"),
    model(_model(model__safetensors=fifo), "m", "weights are a pipe"),
    model(_model(model__safetensors=device("zero")), "m", "weights are /dev/zero"),
    model(_model(model__safetensors=link("nowhere")), "m", "weights are a broken link"),
    model(
        {**_model(model__safetensors=None), "m/model.safetensors.index.json": _index},
        "m",
        "index that names a file outside",
    ),
    model(
        {**_model(model__safetensors=GOOD), "m/model.safetensors.index.json": "[" * 5000},
        "loaded",
        "index that is not used",
        0,
    ),
    model(_model(config__json="{"), _NO, "config no JSON"),
    model(_model(config__json=""), _NO, "config empty"),
    model(_model(config__json="[]"), "m", "config a list"),
    model(_model(config__json="null"), "m", "config null"),
    model(_model(config__json='{"a":' * 50_000), _NO, "config nested"),
    model(_model(config__json=b"\xff\xfe\x00"), _NO, "config no UTF-8"),
    model(_model(config__json=fifo), "m", "config is a pipe"),
    model(_model(config__json=link("config.json")), "m", "config links to itself"),
    model(_model(config__json=sparse(4 * 2**30)), "larger than", "config of 4 GiB"),
    model(_model(config__json=_config(model_type="nonsense")), _NO, "unknown kind of model"),
    model(_model(config__json=_config(model_type=5)), _NO, "kind of model a number"),
    model(_model(config__json=_config(hidden_size=-1)), _NO, "negative width"),
    model(_model(config__json=_config(hidden_size="8")), _NO, "width a text"),
    model(_model(config__json=_config(hidden_size=0)), _NO, "width 0"),
    model(_model(config__json=_config(num_attention_heads=0)), _NO, "no heads"),
    model(_model(config__json=_config(hidden_size=10**9)), "m", "width of 1e9"),
    model(_model(config__json=_config(vocab_size=10**12)), "m", "vocabulary of 1e12"),
    model(_model(config__json=_config(num_hidden_layers=10**9)), "m", "1e9 layers"),
    model(_model(config__json=_config(num_hidden_layers=10**5)), "m", "100000 layers"),
    model(_model(config__json=_config(vocab_size=float("nan"))), _NO, "vocabulary NaN"),
    model(
        _model(config__json=_config(rope_scaling={"rope_type": "nonsense"})),
        "m",
        "unknown rotary kind",
    ),
    model(
        {
            **_model(
                config__json=_config(model_type="own", auto_map={"AutoConfig": "canary_model.C"})
            ),
            "m/canary_model.py": _CODE,
        },
        _NO,
        "code of the folder",
    ),
    model(
        {
            **_model(
                config__json=_config(
                    model_type="own", auto_map={"AutoConfig": "../outside--canary_model.C"}
                )
            ),
            "m/canary_model.py": _CODE,
        },
        _NO,
        "code of another folder",
    ),
    model(_model(tokenizer__json="{"), _NO, "tokenizer no JSON"),
    model(_model(tokenizer__json="{}"), _NO, "tokenizer empty object"),
    model(_model(tokenizer__json='{"a":' * 50_000), _NO, "tokenizer nested"),
    model(_model(tokenizer__json=None), _NO, "no tokenizer"),
    model(_model(tokenizer__json=fifo), "m", "tokenizer is a pipe"),
    model(_model(tokenizer__json=_PICKLE), _NO, "tokenizer a pickle"),
    model(
        _model(tokenizer_config__json='{"tokenizer_class": "os.system"}'),
        "m",
        "tokenizer of no class",
    ),
    model(_model(tokenizer_config__json="[1]"), _NO, "tokenizer's config a list"),
    model(
        {
            **_model(
                tokenizer_config__json=json.dumps(
                    {
                        **_TOKENIZER_CONFIG,
                        "tokenizer_class": "X",
                        "auto_map": {"AutoTokenizer": ["canary_model.T", None]},
                    }
                )
            ),
            "m/canary_model.py": _CODE,
        },
        "m",
        "tokenizer's code",
    ),
    model(
        _model(tokenizer_config__json=json.dumps({"unk_token": "t2"})),
        "end-of-sequence",
        "tokenizer without end",
    ),
]


def template(text: str, name: str, says: str = "chat template") -> Case:
    """Build a case with a hostile chat template."""
    config = json.dumps({**_TOKENIZER_CONFIG, "chat_template": text})
    files = _model(tokenizer_config__json=config)
    return Case(f"template: {name}", ("call", "hostile.calls:render", "m"), (says,), files)


_TEMPLATES = [
    template("{{ ''.__class__.__mro__[1].__subclasses__() }}", "classes"),
    template("{{ cycler.__init__.__globals__.os.system('touch ../canary-ran') }}", "globals"),
    template("{{ messages.append('x') }}", "changes its input"),
    template("{{ lipsum.__globals__['os'].popen('touch ../canary-ran').read() }}", "lipsum"),
    template("{% include '/etc/passwd' %}", "include"),
    template("{% import 'os' as o %}{{ o.system('x') }}", "import"),
    template("{{ raise_exception('\x1b[31mno') }}", "raises"),
    template("{% for x in range(10**9) %}a{% endfor %}", "range of 1e9"),
    template("{{ 'a' * 10**10 }}", "10^10 letters"),
    template("{{ 9**9**9 }}", "tower of powers"),
    template("{{ undefined.x.y }}", "undefined"),
    template("{% for %}", "no Jinja"),
    template("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    template(
        "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}{% endfor %}"
        "{% endfor %}{% endfor %}",
        "loops in loops",
    ),
    template("{{ '%s' | format(messages.__class__) }}", "format"),
    template("{{ namespace.__init__ }}", "namespace"),
    template("constant", "says nothing of the messages"),
]


def _digest(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()


def checkpoint(
    files: Mapping[str, bytes],
    says: str,
    name: str,
    manifest: Callable[[dict[str, Any]], Any] = lambda values: values,
    seal: bool = True,
    **files_: Content,
) -> Case:
    """Build a case with a checkpoint version whose manifest was forged by somebody who knows its format."""
    entries = {key: {"size": len(data), "sha256": _digest(data)} for key, data in files.items()}
    lines = "".join(
        f"{key}\0{entries[key]['size']}\0{entries[key]['sha256']}\n" for key in sorted(entries)
    )
    content: Any = {
        "kind": "checkpoint",
        "version": 1,
        "parent": None,
        "settings_digest": "",
        "format_version": 1,
        "files": entries,
        "content_digest": _digest(lines.encode()),
    }
    content = manifest(content)
    if seal and isinstance(content, dict):
        content["manifest_digest"] = _digest(json.dumps(content, sort_keys=True).encode())
    folder = "outputs/checkpoints/checkpoint-00000001"
    return Case(
        f"checkpoint: {name}",
        ("call", "hostile.calls:load_checkpoint", "outputs/checkpoints"),
        (folder, says),
        {
            **{f"{folder}/{key}": data for key, data in files.items() if ".." not in key},
            f"{folder}/manifest.json": content
            if isinstance(content, bytes)
            else json.dumps(content),
            **files_,
        },
        code=1,
        writes=True,
    )


def _state(value: Any) -> dict[str, bytes]:
    return {"state.json": json.dumps({"model": value}).encode()}


def _with(**changed: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda values: {**values, **changed}


_ARRAY = {"$": "ndarray", "dtype": "<f8", "shape": [1], "data": "AAAAAAAAAAA="}
_BAD = "not a state"
_unsealed = _with(manifest_digest="x")


def _naming(name: str) -> Callable[[dict[str, Any]], Any]:
    return _with(files={name: {"size": 9, "sha256": ""}})


_CHECKPOINTS = [
    checkpoint(
        _state(1),
        "differs from its own digest",
        "manifest without its digest",
        _unsealed,
        seal=False,
    ),
    checkpoint(_state(1), "unsafe file name", "manifest with dots", _naming("../../../canary.txt")),
    checkpoint(_state(1), "unsafe file name", "manifest absolute", _naming("/etc/passwd")),
    checkpoint(_state(1), "unsafe file name", "manifest backslash", _naming("..\\x")),
    checkpoint(_state(1), "unsafe file name", "manifest NUL", _naming("a\0b")),
    checkpoint(_state(1), "not a manifest", "manifest entries numbers", _with(files={"a": 5})),
    checkpoint(_state(1), "not a manifest", "manifest files a list", _with(files=["a"])),
    checkpoint(
        _state(1),
        "not a manifest",
        "manifest size a text",
        _with(files={"a": {"size": "x", "sha256": ""}}),
    ),
    checkpoint(_state(1), "format 99", "manifest of another format", _with(format_version=99)),
    checkpoint(_state(1), "belongs to", "manifest of another version", _with(version=2)),
    checkpoint(_state(1), "belongs to", "manifest of a model", _with(kind="model")),
    checkpoint(_state(1), "not a manifest", "manifest a list", lambda _: [1]),
    checkpoint(_state(1), "not a manifest", "manifest nested", lambda _: b'{"a":' * 50_000),
    checkpoint(_state(1), "not a manifest", "manifest NaN", lambda _: b'{"format_version": NaN}'),
    checkpoint(_state(1), "not a manifest", "manifest no UTF-8", lambda _: b"\xff\xfe{"),
    checkpoint(_state(1), "not a manifest", "manifest empty", lambda _: b""),
    checkpoint(
        _state(1),
        "the manifest says",
        "file shorter than said",
        _with(files={"state.json": {"size": 2**40, "sha256": ""}}),
    ),
    checkpoint(
        _state(1),
        "SHA-256 differs",
        "file changed",
        lambda values: {
            **values,
            "files": {"state.json": {**values["files"]["state.json"], "sha256": "0" * 64}},
        },
    ),
    checkpoint(
        _state(1),
        "cannot be read",
        "file that is not there",
        lambda values: {
            **values,
            "files": {**values["files"], "model-0.safetensors": {"size": 1, "sha256": ""}},
        },
    ),
    checkpoint({"state.json": b"{"}, _BAD, "state no JSON"),
    checkpoint({"state.json": b"[]"}, _BAD, "state a list"),
    checkpoint({"state.json": b"\xff"}, _BAD, "state no UTF-8"),
    checkpoint({"state.json": b'{"a":' * 50_000}, _BAD, "state nested"),
    checkpoint({"state.json": b'{"a": ' + b"[" * 900 + b"]" * 900 + b"}"}, _BAD, "state 900 deep"),
    checkpoint(_state({"$": "os.system"}), _BAD, "state of an unknown kind"),
    checkpoint(_state({"$": []}), _BAD, "state whose kind is a list"),
    checkpoint(
        _state({"$": "tensor", "file": "../x", "name": "y"}), _BAD, "tensor of a foreign file"
    ),
    checkpoint(_state({"$": "dict", "items": [[[1], 2]]}), _BAD, "dict with a list as key"),
    checkpoint(_state({"$": "bytes", "data": "%%%"}), _BAD, "bytes no base64"),
    checkpoint(_state({"$": "float", "value": "x"}), _BAD, "float no number"),
    checkpoint(_state({**_ARRAY, "dtype": "O"}), _BAD, "array of objects"),
    checkpoint(_state({**_ARRAY, "dtype": "nonsense"}), _BAD, "array of no dtype"),
    checkpoint(_state({**_ARRAY, "dtype": "f8,(1000000000,)f8"}), _BAD, "array of a huge dtype"),
    checkpoint(
        _state({**_ARRAY, "dtype": {"names": "a", "formats": ["O"]}}),
        _BAD,
        "array of objects in a structure",
    ),
    checkpoint(_state({**_ARRAY, "shape": [10**12]}), _BAD, "array of another shape"),
    checkpoint(_state({**_ARRAY, "shape": [-1, 0]}), _BAD, "array of an impossible shape"),
    checkpoint(
        {**_state(1), "model-0.safetensors": _PICKLE},
        "not a safetensors file",
        "a pickle as weights",
    ),
    checkpoint(
        {**_state(1), "model-0.safetensors": _length(2**63)},
        "not a safetensors file",
        "a lying header",
    ),
    checkpoint(
        {**_state(1), "model-0.safetensors": GOOD[:-1]}, "not a safetensors file", "weights cut off"
    ),
    checkpoint(
        _state(1),
        "is not a regular file",
        "weights that are a link to /dev/zero",
        _with(files={"model-0.safetensors": {"size": 1, "sha256": ""}}),
        **{"outputs/checkpoints/checkpoint-00000001/model-0.safetensors": device("zero")},
    ),
    checkpoint(
        _state(1),
        "is not a regular file",
        "a pipe in the place of weights",
        _with(files={"model-0.safetensors": {"size": 1, "sha256": ""}}),
        **{"outputs/checkpoints/checkpoint-00000001/model-0.safetensors": fifo},
    ),
]


def _named(path: str, says: str, name: str, **files: Content) -> Case:
    """Build a case with a model folder that a configuration names."""
    text = BASE.replace("preset: nano, vocab_size: 320, context: 128", f"path: {path}")
    return Case(f"named: {name}", ("validate", CONFIG), (CONFIG, says), {CONFIG: text, **files})


def _examined(
    name: str, says: tuple[str, ...], files: Mapping[str, Content], code: int = 2
) -> Case:
    """Build a case of `doctor --model`, which looks for servers by a lock in the output folder."""
    return Case(
        f"check machine: {name}",
        ("check", "machine", "--model", "m"),
        says,
        files,
        code,
        writes=True,
    )


_NAMED = [
    _named("m", "contains no config.json", "folder without a config", **{"m/x": b""}),
    _named("m", "is a file", "a file", m=b""),
    _named("m", "is a file", "a pipe", m=fifo),
    _named("./m", "neither a model folder", "a link to itself", m=link("m")),
    _named("m/../../outside", "config.json", "folder outside"),
    _examined("lying header", ("m", _NO), _model(model__safetensors=_length(2**60))),
    _examined(
        "pickle",
        ("only the configuration was read",),
        _model(model__safetensors=None, a__bin=_PICKLE),
        0,
    ),
    _examined("config", ("m", _NO), _model(config__json="[" * 9999)),
]

CASES = _MODELS + _TEMPLATES + _CHECKPOINTS + _NAMED
assert os.name == "posix" and Path("/dev/zero").exists()
