"""Files of a saved model for readers that are older than transformers 5: transformers 4, llama.cpp's converter, vLLM.

transformers 5 writes rotary parameters, tokenizer classes and additional special tokens under names that these do not
know: they would compute with default frequencies, or refuse the tokenizer. Each is written under both names. The
model card is the README.md that a hub shows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_core.storage.folders import write_folder_file

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


MODEL_CARD = "README.md"
# transformers 5's names of classes that read tokenizer.json alone
_BACKEND_CLASSES = ("TokenizersBackend", "SentencePieceBackend", "PythonBackend")
_FAST_CLASS = "PreTrainedTokenizerFast"
_UNSET_LENGTH = 10**9  # transformers writes 10^30 for a length that is not known
# names of the base and the rotated share in transformers 4, where they differ
_FORMER_NAMES = {
    "gpt_neox": ("rotary_emb_base", "rotary_pct"),
    "gpt_neox_japanese": ("rotary_emb_base", "rotary_pct"),
}
# kinds of layers, by family
_FORMER_LAYER_TYPES = {
    "granitemoehybrid": {"full_attention": "attention", "linear_attention": "mamba"},
}
_EXPERT_COUNTS = ("num_experts", "num_local_experts")  # one is an alias of the other
_CARD_HEAD_LINES = 50  # of the front matter
_PHI3_SCALING = ("short_factor", "long_factor")  # transformers 4 refuses any other entry there


def adapt_config(folder: Path, config: PreTrainedConfig) -> None:
    """Add the former names to config.json, as far as transformers 5 reads the same model from it afterwards."""
    path = folder / "config.json"
    original = path.read_bytes()
    values, before = json.loads(original), _read_config(folder, config)
    for with_scaling in (True, False):
        adapted = _add_former_names(values, with_scaling=with_scaling)
        _add_expert_alias(adapted, config)
        text = json.dumps(adapted, indent=2, sort_keys=True, ensure_ascii=False)
        write_folder_file(path, (text + "\n").encode())
        if _is_part(before, _read_config(folder, config)):
            return
    write_folder_file(path, original)


def adapt_tokenizer(folder: Path, max_length: int) -> None:
    """Write the tokenizer's class, additional special tokens and longest text under names that older readers know.

    Args:
        max_length: longest sequence of the model in tokens, for a tokenizer that names none.
    """
    path = folder / "tokenizer_config.json"
    values = json.loads(path.read_text(encoding="utf-8"))
    if values.get("tokenizer_class") in _BACKEND_CLASSES and (folder / "tokenizer.json").is_file():
        values["tokenizer_class"] = _FAST_CLASS
    extra = values.get("extra_special_tokens")
    if isinstance(
        extra, list
    ):  # transformers 4 expects names there, and a list under the former name
        values["additional_special_tokens"] = values.pop("extra_special_tokens")
    length = values.get("model_max_length")
    if length is None or length > _UNSET_LENGTH:
        values["model_max_length"] = max_length
    text = json.dumps(values, indent=2, sort_keys=True, ensure_ascii=False)
    write_folder_file(path, (text + "\n").encode())


def write_model_card(
    folder: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    parameters: int,
    max_length: int,
    source: str | None = None,
) -> None:
    """Write README.md: what the model is, what it was trained from, and how to load it.

    Args:
        model: without adapters around it.
        source: the starting model: a hub name, or a folder whose model card names one. A path is not printed,
            because it means nothing elsewhere.
    """
    is_classifier = "SequenceClassification" in type(model).__name__
    base = _find_base_name(source) if source else None
    lines = ["---", "library_name: transformers"]
    lines += [f"base_model: {base}"] if base else []
    lines.append(f"pipeline_tag: {'text-classification' if is_classifier else 'text-generation'}")
    lines += ["tags:", "- posttrain", "---", "", f"# {type(model).__name__}", ""]
    kind = "Reward model" if is_classifier else "Policy"
    origin = f" from [{base}](https://huggingface.co/{base})" if base else ""
    dtype = str(model.dtype).removeprefix("torch.")
    has_template = "yes" if tokenizer.chat_template else "no"
    lines += [
        f"{kind} trained with posttrain{origin}.",
        "",
        "| | |",
        "|---|---|",
        f"| parameters | {parameters:,} ({dtype}) |",
        f"| longest sequence | {max_length:,} tokens |",
        f"| chat template | {has_template} |",
        "",
        "```python",
        *_build_example(is_classifier=is_classifier, has_template=bool(tokenizer.chat_template)),
        "```",
        "",
        "`config.json` and `tokenizer_config.json` hold the names of transformers 4 and 5.",
    ]
    write_folder_file(folder / MODEL_CARD, ("\n".join(lines) + "\n").encode())


def _build_example(*, is_classifier: bool, has_template: bool) -> list[str]:
    auto_class = "AutoModelForSequenceClassification" if is_classifier else "AutoModelForCausalLM"
    lines = [
        f"from transformers import {auto_class}, AutoTokenizer",
        "",
        'tokenizer = AutoTokenizer.from_pretrained("FOLDER")',
        f'model = {auto_class}.from_pretrained("FOLDER")',
    ]
    if has_template:
        lines += [
            'messages = [{"role": "user", "content": "Hello"}]',
            "inputs = tokenizer.apply_chat_template(",
            f"    messages, add_generation_prompt={not is_classifier}, return_dict=True, "
            'return_tensors="pt"',
            ")",
        ]
    else:
        lines.append('inputs = tokenizer("Hello", return_tensors="pt")')
    if is_classifier:
        return [*lines, "print(model(**inputs).logits)"]
    return [*lines, "print(tokenizer.decode(model.generate(**inputs, max_new_tokens=64)[0]))"]


def _find_base_name(source: str) -> str | None:
    """Find the hub name of a starting model; None for a model from scratch or without a model card."""
    folder = Path(source)
    if not folder.exists():
        is_path = source.startswith((".", "/", "~")) or source.count("/") > 1
        return None if is_path else source
    card = folder / MODEL_CARD
    if not card.is_file():
        return None
    head = card.read_text(encoding="utf-8", errors="replace").splitlines()[:_CARD_HEAD_LINES]
    names = [line.partition(":")[2].strip() for line in head if line.startswith("base_model:")]
    return names[0] if names and "/" in names[0] else None


def _add_former_names(values: Mapping[str, Any], *, with_scaling: bool) -> dict[str, Any]:
    """Add the former names to a config and the configs in it.

    Args:
        with_scaling: also `rope_scaling`, which transformers 5 prefers to `rope_parameters`.
    """
    adapted = {
        name: _add_former_names(value, with_scaling=with_scaling)
        if isinstance(value, dict) and name.endswith("_config")
        else value
        for name, value in values.items()
    }
    if isinstance(values.get("dtype"), str):
        adapted["torch_dtype"] = values["dtype"]
    kinds = _FORMER_LAYER_TYPES.get(str(values.get("model_type")))
    if kinds and isinstance(values.get("layer_types"), list):
        adapted["layer_types"] = [kinds.get(kind, kind) for kind in values["layer_types"]]
    rope = values.get("rope_parameters")
    if not isinstance(rope, dict):
        return adapted
    if (
        "rope_type" in rope
    ):  # `type` is the former name, read from `rope_scaling` of an earlier save
        rope = {name: value for name, value in rope.items() if name != "type"}
        adapted["rope_parameters"] = rope
    main = rope
    if isinstance(rope.get("full_attention"), dict):  # rotary parameters by the kind of a layer
        main = rope["full_attention"]
        local = rope.get("sliding_attention")
        if isinstance(local, dict) and "rope_theta" in local:
            adapted["rope_local_base_freq"] = local["rope_theta"]
    theta, share = _FORMER_NAMES.get(
        str(values.get("model_type")), ("rope_theta", "partial_rotary_factor")
    )
    if "rope_theta" in main:
        adapted[theta] = main["rope_theta"]
    if "partial_rotary_factor" in main:
        adapted[share] = main["partial_rotary_factor"]
    kind = main.get("rope_type", "default")
    adapted["rope_scaling"] = None  # some families have another default in transformers 4
    if with_scaling and kind != "default":
        names = [name for name in main if name not in ("rope_theta", "partial_rotary_factor")]
        scaling = {name: main[name] for name in names}
        if str(values.get("model_type")).startswith("phi3"):
            scaling = {"type": kind} | {name: main[name] for name in _PHI3_SCALING if name in main}
        adapted["rope_scaling"] = scaling
    return adapted


def _add_expert_alias(values: dict[str, Any], config: PreTrainedConfig) -> None:
    """Add the other name of the number of experts: transformers 4 reads one of the two."""
    for name, other in (_EXPERT_COUNTS, reversed(_EXPERT_COUNTS)):
        if config.attribute_map.get(name) == other and other in values:
            values.setdefault(name, values[other])


def _read_config(folder: Path, config: PreTrainedConfig) -> dict[str, Any] | None:
    """Read a folder's config as transformers does; None if its class refuses a name or value."""
    try:
        values: dict[str, Any] = type(config).from_pretrained(str(folder)).to_dict()
    except Exception:  # of any kind: each config class checks its values in its way
        return None
    return values


def _is_part(before: Any, after: Any) -> bool:
    """Return whether all entries of `before` are in `after`, at every depth."""
    if isinstance(before, dict) and isinstance(after, dict):
        return all(name in after and _is_part(value, after[name]) for name, value in before.items())
    return bool(before == after)
