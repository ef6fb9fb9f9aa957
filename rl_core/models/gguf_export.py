"""GGUF files written from Hugging Face model folders, for llama.cpp and ollama, and proven by reading them back.

Architectures whose weights need no further conversion are written: Llama (with Mistral and SmolLM2), Qwen2, Qwen3.
Tokenizers are byte-level BPE. Everything else is refused by name. Names of weights come from the package `gguf`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rl_core.errors import ModelError
from rl_core.models import gguf_files
from rl_core.settings import ModelSettings
from rl_core.storage.atomic_files import (
    move_into_place,
    reserve_temporary,
    write_text_atomic,
)

if TYPE_CHECKING:
    import numpy as np
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

GgufType = Literal["f32", "bf16", "q8_0"]

# llama.cpp's architecture by transformers' model type
_ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
_PROOF_TEXTS = (  # prose, numbers, code and lines, so that every rule of the tokenizer is used
    "The quick brown fox jumps over the lazy dog. It's 12,345 steps from  here\n\nto there!",
    "def area(width, height=3):\n    return width * height  # 42\n",
)
# bits of a weight of a matrix; q8_0: blocks of 32 bytes with a scale of two
GGUF_BITS: dict[str, float] = {"f32": 32, "bf16": 16, "q8_0": 8.5}
# largest mean KL divergence per token after reading back, in nats
GGUF_BOUNDS: dict[str, float] = {"f32": 1e-6, "bf16": 0.01, "q8_0": 0.01}


@dataclass(frozen=True)
class GgufProof:
    """A written file compared with the model that it was written from."""

    file: str  # its name
    bytes: int
    num_tokens: int
    kl: float  # mean per token of KL(model || file), nats
    largest_difference: float  # of the log-probability of a token of the texts, nats

    def describe(self) -> str:
        """Describe the comparison in a sentence."""
        return (
            f"{self.bytes / 1e6:,.1f} MB; read back, tokens and chat prompt are equal, the KL divergence is "
            f"{self.kl:.2g} nats per token over {self.num_tokens} tokens, log-probs differ by "
            f"{self.largest_difference:.2g} at most"
        )


def explain_unwritable_config(config: Mapping[str, Any]) -> str | None:
    """Explain why a model with this `config.json` is not written as GGUF; None if nothing speaks against it."""
    advice = "use llama.cpp's convert_hf_to_gguf.py on the Hugging Face folder"
    kind = config.get("model_type")
    if kind not in _ARCHITECTURES:
        known = ", ".join(sorted(_ARCHITECTURES))
        return f"a model of type {kind} is not written as GGUF ({known} are); {advice}"
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope_kind = rope.get("rope_type", rope.get("type", "default"))
    if rope_kind != "default":
        return f"rotary scaling '{rope_kind}' is not written as GGUF; {advice}"
    if kind == "mistral" and config.get("sliding_window"):
        return "a sliding window is not written as GGUF; set sliding_window to null"
    return None


def explain_unwritable_tokenizer(described: Mapping[str, Any]) -> str | None:
    """Explain why a tokenizer with this `tokenizer.json` is not written as GGUF; None if it is."""
    if (described.get("model") or {}).get("type") == "BPE" and gguf_files.find_pre_tokenizer(
        described
    ):
        return None
    known = ", ".join(gguf_files.list_pre_tokenizers())
    return (
        f"the tokenizer is no byte-level BPE of a kind that is written as GGUF ({known}); use llama.cpp's "
        "convert_hf_to_gguf.py on the Hugging Face folder"
    )


def export_gguf_folder(source: str | Path, folder: Path, name: str, kind: GgufType) -> GgufProof:
    """Write a model folder as NAME-KIND.gguf with a Modelfile into an existing folder, and read it back.

    Raises: as `write_gguf_file` and `prove_gguf_file`; ModelError if the model cannot be loaded.
    """
    from rl_core.models import causal_lm

    model, tokenizer = causal_lm.load_model(source, ModelSettings(device="cpu"))
    model.eval()
    file = folder / f"{name}-{kind}.gguf"
    write_gguf_file(model, tokenizer, file, kind)
    proof = prove_gguf_file(file, model, tokenizer, list(_PROOF_TEXTS), kind)
    write_ollama_modelfile(file, tokenizer)
    return proof


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
    import numpy as np

    gguf = _import_gguf()
    if problem := explain_unwritable_config(model.config.to_dict()):
        raise ModelError(problem)
    architecture = _ARCHITECTURES[model.config.model_type]
    pre_tokenizer = _check_tokenizer(tokenizer)
    with reserve_temporary(file) as temporary:
        writer = gguf.GGUFWriter(temporary, architecture)
        _add_model_settings(writer, model, file.stem, kind)
        _add_tokenizer(writer, tokenizer, pre_tokenizer, model.config.vocab_size)
        # Described first, then encoded one by one: a second copy of the model never stands in memory.
        for name, weight, _ in _iter_weights(model, architecture):
            stored_type = _choose_stored_type(weight, kind)
            byte_shape = gguf.quants.quant_shape_to_byte_shape(tuple(weight.shape), stored_type)
            writer.add_tensor_info(
                name, tuple(weight.shape), np.float32, math.prod(byte_shape), stored_type
            )
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for _, weight, num_heads in _iter_weights(model, architecture):
            array = weight.detach().float().cpu().numpy()
            if num_heads:
                array = _interleave_halves(array, num_heads)
            writer.write_tensor_data(gguf.quants.quantize(array, _choose_stored_type(weight, kind)))
        writer.close()
        move_into_place(temporary, file)


def write_ollama_modelfile(file: Path, tokenizer: PreTrainedTokenizerBase) -> Path:
    """Write the `Modelfile` that `ollama create NAME -f Modelfile` reads, in the folder of a GGUF file.

    ollama does not render Jinja. It compares the file's chat template with those that it knows, and without a similar
    one sends the user's text as it is: the Modelfile contains the template in Go's language, if there is an equal one.
    Source: ollama, template/template.go (`Named`, `DefaultTemplate`).
    """
    lines = [f"FROM ./{file.name}"]
    template = build_ollama_template(tokenizer)
    if template is not None:
        text, stop = template
        lines.append(f'TEMPLATE """{text}"""')
        lines += [f'PARAMETER stop "{stop}"'] if stop else []
    elif tokenizer.chat_template:
        lines.append(
            "# This model's chat template has no equal in Go's language: add a TEMPLATE, or use llama-server."
        )
    target = file.with_name("Modelfile")
    write_text_atomic(target, "\n".join(lines) + "\n")
    return target


def build_ollama_template(tokenizer: PreTrainedTokenizerBase) -> tuple[str, str] | None:
    """Build a Go template for ollama that renders conversations as the chat template does.

    It is derived from rendered conversations and compared with further ones, so that it covers templates that put
    fixed text around each message. Tools are not covered.
    Returns: the template, and the special token that ends an answer ("" = none); None if there is no equal one.
    """
    if not tokenizer.chat_template:
        return None

    def render(*contents: str, roles: str, prompt: bool = False) -> str:
        names = {"s": "system", "u": "user", "a": "assistant"}
        chat = [
            {"role": names[role], "content": text}
            for role, text in zip(roles, contents, strict=True)
        ]
        return str(
            tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=prompt)
        )

    try:
        one = render("Xu", roles="u")
        two = render("Xu", "Xa", roles="ua")
        three = render("Xu", "Xa", "Xv", roles="uau")
        before_answer, after_answer = two.removeprefix(one).split("Xa")
        before, after = three.removeprefix(two).split("Xv")
        opening = one.removesuffix(f"Xu{after}").removesuffix(before)
        system = render("Xs", "Xu", roles="su").removesuffix(f"{before}Xu{after}")
        before_system, after_system = system.split("Xs")
        prompt = render("Xu", roles="u", prompt=True).removeprefix(one)
    except Exception:  # a template may refuse a conversation with any error
        return None

    def render_parts(*contents: str, roles: str) -> str:
        has_system = roles.startswith("s")
        text = f"{before_system}{contents[0]}{after_system}" if has_system else opening
        for role, content in zip(roles[has_system:], contents[has_system:], strict=True):
            pair = (before, after) if role == "u" else (before_answer, after_answer)
            text += pair[0] + content + pair[1]
        return text + prompt

    parts = (
        opening,
        before_system,
        after_system,
        before,
        after,
        before_answer,
        after_answer,
        prompt,
    )
    if any("{{" in part or '"""' in part for part in parts):
        return None
    texts = ("Be kind.", "What is 2 + 2?", "It is 4.\n\nAnything else?", "No.", "Bye!", "So: why?")
    for roles in ("u", "uau", "uauau", "su", "suau", "suauau"):
        chosen = texts[0 if roles.startswith("s") else 1 :][: len(roles)]
        if render(*chosen, roles=roles, prompt=True) != render_parts(*chosen, roles=roles):
            return None
    stop = after_answer.strip()
    text = (
        f"{{{{ if .System }}}}{before_system}{{{{ .System }}}}{after_system}{{{{ else }}}}{opening}{{{{ end }}}}"
        f'{{{{ range .Messages }}}}{{{{ if eq .Role "user" }}}}{before}{{{{ .Content }}}}{after}'
        f'{{{{ else if eq .Role "assistant" }}}}{before_answer}{{{{ .Content }}}}{after_answer}'
        f"{{{{ end }}}}{{{{ end }}}}{prompt}"
    )
    return text, stop if stop in tokenizer.get_added_vocab() else ""


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
        file.name,
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
            "GGUF files are written by the package gguf; install it with: python -m posttrain.install --extras gguf"
        ) from None
    return gguf


def _check_tokenizer(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return llama.cpp's name of the tokenizer's way to split text. Raises: ModelError if it has none."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    described = json.loads(backend.to_str()) if backend is not None else {}
    if problem := explain_unwritable_tokenizer(described):
        raise ModelError(problem)
    return str(gguf_files.find_pre_tokenizer(described))


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


def _iter_weights(
    model: PreTrainedModel, architecture: str
) -> Iterator[tuple[str, torch.Tensor, int]]:
    """Yield every weight with its name in the file, a tied head left out.

    The number is that of the heads whose rows are reordered; 0 = none.
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
        num_heads = 0
        if architecture == "llama" and ".q_proj." in name:
            num_heads = config.num_attention_heads
        if architecture == "llama" and ".k_proj." in name:
            num_heads = config.num_key_value_heads
        yield stored_name, weight, num_heads


def _interleave_halves(array: np.ndarray, num_heads: int) -> np.ndarray:
    """Reorder the rows of each head from transformers' rotary layout (two halves) to llama.cpp's (pairs)."""
    halves = array.reshape(num_heads, 2, array.shape[0] // num_heads // 2, *array.shape[1:])
    return halves.swapaxes(1, 2).reshape(array.shape)


def _choose_stored_type(weight: torch.Tensor, kind: GgufType) -> Any:
    """Choose the type of a weight: vectors in float32, matrices as requested where it divides their rows."""
    types = _import_gguf().GGMLQuantizationType
    if weight.ndim < 2 or (kind == "q8_0" and weight.shape[-1] % 32):
        return types.F32
    return {"f32": types.F32, "bf16": types.BF16, "q8_0": types.Q8_0}[kind]
