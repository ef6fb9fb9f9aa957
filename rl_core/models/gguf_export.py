"""GGUF files written from Hugging Face model folders, for llama.cpp and ollama, and proven by reading them back.

Architectures whose weights need no further conversion are written: Llama (with Mistral and SmolLM2), Qwen2, Qwen3.
Tokenizers are byte-level BPE. Everything else is refused by name. Names of weights come from the package `gguf`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rl_core.errors import ModelError
from rl_core.models import gguf_files
from rl_core.storage.atomic_files import (
    move_into_place,
    reserve_temporary,
    write_text_atomic,
)

if TYPE_CHECKING:
    import numpy as np
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

GgufType = Literal["f32", "bf16", "q8_0"]

# llama.cpp's architecture by transformers' model type
_ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
# largest mean KL divergence per token after reading back, in nats
GGUF_BOUNDS: dict[str, float] = {"f32": 1e-6, "bf16": 0.01, "q8_0": 0.01}


@dataclass(frozen=True)
class GgufProof:
    """A written file compared with the model that it was written from."""

    type: str
    bytes: int
    num_tokens: int
    kl: float  # mean per token of KL(model || file), nats
    largest_difference: float  # of the log-probability of a token of the texts, nats


def write_gguf_file(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, file: Path, kind: GgufType
) -> None:
    """Write a causal language model with its tokenizer and chat template as one GGUF file.

    Args:
        model: weights in any floating dtype; vectors are written in float32.
        kind: of the matrices. A matrix whose rows are no multiple of 32 long stays in float32 under q8_0.
    Raises: ModelError for an architecture, rotary scaling or tokenizer that is not written; CheckpointError if the file
        cannot be written.
    """
    gguf = _import_gguf()
    architecture = _check_architecture(model)
    pre_tokenizer = _check_tokenizer(tokenizer)
    with reserve_temporary(file) as temporary:
        writer = gguf.GGUFWriter(temporary, architecture)
        _add_model_settings(writer, model, file.stem, kind)
        _add_tokenizer(writer, tokenizer, pre_tokenizer, model.config.vocab_size)
        for name, weight in _iter_weights(model, architecture):
            stored, stored_type = _encode_weight(weight, kind)
            writer.add_tensor(name, stored, raw_dtype=stored_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        move_into_place(temporary, file)


def write_ollama_modelfile(file: Path) -> Path:
    """Write the `Modelfile` that `ollama create NAME -f Modelfile` reads, in the folder of a GGUF file.

    The chat template and the end tokens are read from the GGUF file itself.
    """
    target = file.with_name("Modelfile")
    write_text_atomic(target, f"FROM ./{file.name}\n")
    return target


def prove_gguf_file(
    file: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: list[str],
    kind: GgufType,
) -> GgufProof:
    """Read a written file with transformers and compare tokens, chat prompts and log-probabilities.

    Args:
        texts: what the log-probabilities are measured on.
    Raises: ModelError if a token differs, or the mean KL divergence is over `GGUF_BOUNDS`.
    """
    import torch

    read, read_tokenizer = gguf_files.load_gguf_model(file)
    chat = [{"role": "user", "content": text} for text in texts[:1]]
    if tokenizer.chat_template and (
        read_tokenizer.apply_chat_template(chat, tokenize=False)
        != tokenizer.apply_chat_template(chat, tokenize=False)
    ):
        raise ModelError(f"{file}: the chat template read back gives another prompt")
    divergences: list[torch.Tensor] = []
    differences: list[torch.Tensor] = []
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        if read_tokenizer(text, add_special_tokens=False)["input_ids"] != ids:
            raise ModelError(
                f"{file}: the tokenizer read back gives other tokens for {text[:60]!r}"
            )
        input_ids = torch.tensor([ids])
        with torch.no_grad():
            logits = [one(input_ids.to(one.device)).logits[0, :-1] for one in (model, read)]
        expected, stored = (values.double().cpu().log_softmax(-1) for values in logits)
        divergences.append((expected.exp() * (expected - stored)).sum(-1))
        differences.append((expected - stored).gather(-1, input_ids[0, 1:, None]).abs().flatten())
    kl = torch.cat(divergences)
    proof = GgufProof(
        kind,
        file.stat().st_size,
        len(kl),
        float(kl.mean()),
        float(torch.cat(differences).max()),
    )
    if not proof.kl <= GGUF_BOUNDS[kind]:
        raise ModelError(
            f"{file.name}: read back, its distributions differ by a KL divergence of {proof.kl:.3g} nats per token; "
            f"{GGUF_BOUNDS[kind]} is the bound for {kind}"
        )
    return proof


def _import_gguf() -> Any:
    try:
        import gguf
    except ImportError:
        raise ModelError(
            "GGUF files are written by the package gguf; install it with: pip install 'posttrain[gguf]'"
        ) from None
    return gguf


def _check_architecture(model: PreTrainedModel) -> str:
    """Return llama.cpp's name of the model's architecture. Raises: ModelError if it is not written."""
    config = model.config
    architecture = _ARCHITECTURES.get(config.model_type)
    if architecture is None:
        known = ", ".join(sorted(_ARCHITECTURES))
        raise ModelError(
            f"a model of type {config.model_type} is not written as GGUF ({known} are); use llama.cpp's "
            "convert_hf_to_gguf.py on the Hugging Face folder"
        )
    rope = getattr(config, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default")
    if kind != "default":
        raise ModelError(
            f"rotary scaling '{kind}' is not written as GGUF; use llama.cpp's convert_hf_to_gguf.py on the Hugging "
            "Face folder"
        )
    if config.model_type == "mistral" and getattr(config, "sliding_window", None):
        raise ModelError("a sliding window is not written as GGUF; set sliding_window to null")
    return architecture


def _check_tokenizer(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return llama.cpp's name of the tokenizer's way to split text. Raises: ModelError if it has none."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    model = json.loads(backend.to_str())["model"] if backend is not None else {}
    name = gguf_files.find_pre_tokenizer(tokenizer) if model.get("type") == "BPE" else None
    if name is None:
        known = ", ".join(gguf_files.list_pre_tokenizers())
        raise ModelError(
            f"the tokenizer ({type(tokenizer).__name__}) is no byte-level BPE of a kind that is written as GGUF "
            f"({known}); use llama.cpp's convert_hf_to_gguf.py on the Hugging Face folder"
        )
    return name


def _add_model_settings(writer: Any, model: PreTrainedModel, name: str, kind: GgufType) -> None:
    gguf = _import_gguf()
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_name(name)
    writer.add_type("model")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(float(config.rope_parameters["rope_theta"]))
    writer.add_rope_dimension_count(head_dim)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_vocab_size(config.vocab_size)
    types = gguf.LlamaFileType
    writer.add_file_type(
        {"f32": types.ALL_F32, "bf16": types.MOSTLY_BF16, "q8_0": types.MOSTLY_Q8_0}[kind]
    )
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)


def _add_tokenizer(writer: Any, tokenizer: Any, pre_tokenizer: str, vocab_size: int) -> None:
    """Add the vocabulary, its merges, the special tokens and the chat template."""
    gguf = _import_gguf()
    described = json.loads(tokenizer.backend_tokenizer.to_str())
    texts = {token_id: text for text, token_id in described["model"]["vocab"].items()}
    types = dict.fromkeys(texts, gguf.TokenType.NORMAL)
    for added in described["added_tokens"]:
        texts[added["id"]] = added["content"]
        is_special = added["special"]
        types[added["id"]] = gguf.TokenType.CONTROL if is_special else gguf.TokenType.USER_DEFINED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer)
    # ids of the embedding without a text
    writer.add_token_list([texts.get(index, f"[PAD{index}]") for index in range(vocab_size)])
    writer.add_token_types([types.get(index, gguf.TokenType.UNUSED) for index in range(vocab_size)])
    merges = described["model"]["merges"]
    writer.add_token_merges(
        [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]
    )
    writer.add_add_bos_token(False)
    writer.add_add_space_prefix(False)
    for add, token_id in (
        (writer.add_bos_token_id, tokenizer.bos_token_id),
        (writer.add_eos_token_id, tokenizer.eos_token_id),
        (writer.add_unk_token_id, tokenizer.unk_token_id),
        (writer.add_pad_token_id, tokenizer.pad_token_id),
    ):
        if token_id is not None:
            add(token_id)
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)


def _iter_weights(model: PreTrainedModel, architecture: str) -> Any:
    """Yield name in the file and float32 array of every weight, a tied head left out.

    Raises: ModelError for a weight that llama.cpp's architecture does not have.
    """
    gguf = _import_gguf()
    config = model.config
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[architecture], config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stored_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if stored_name is None:
            raise ModelError(f"the weight {name} has no place in a GGUF file of {architecture}")
        array = weight.detach().float().cpu().numpy()
        if architecture == "llama" and ".q_proj." in name:
            array = _interleave_halves(array, config.num_attention_heads)
        if architecture == "llama" and ".k_proj." in name:
            array = _interleave_halves(array, config.num_key_value_heads)
        yield stored_name, array


def _interleave_halves(array: np.ndarray, num_heads: int) -> np.ndarray:
    """Reorder the rows of each head from transformers' rotary layout (two halves) to llama.cpp's (pairs)."""
    halves = array.reshape(num_heads, 2, array.shape[0] // num_heads // 2, *array.shape[1:])
    return halves.swapaxes(1, 2).reshape(array.shape)


def _encode_weight(array: np.ndarray, kind: GgufType) -> tuple[np.ndarray, Any]:
    """Encode a weight: vectors in float32, matrices in the requested type where it divides their rows."""
    gguf = _import_gguf()
    types = gguf.GGMLQuantizationType
    stored_type = {"f32": types.F32, "bf16": types.BF16, "q8_0": types.Q8_0}[kind]
    if array.ndim < 2 or (kind == "q8_0" and array.shape[-1] % 32):
        stored_type = types.F32
    return gguf.quants.quantize(array, stored_type), stored_type
