"""Methods of posttrain in vLLM's workers: their description, and weights from a folder with a check of what arrived.

Runs in vLLM's environment as `--worker-extension-cls posttrain_worker.PosttrainWorker`, which start.py passes. vLLM
makes it a base class of its worker, and POST /collective_rpc calls its methods. For vLLM 0.30.0 and 0.32.0; imports
nothing from posttrain.
"""

import hashlib
import os
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

MAX_COMPARED_BYTES = 2**24  # tensors up to this size are compared after an update
MAX_COMPARED_TENSORS = 64
HEAD_NAME = "lm_head"
EMBEDDING_ENDING = (
    "embed_tokens.weight"  # the head's weight in a folder of a model with tied embeddings
)
MAX_HEAD_ROWS, MAX_HEAD_COLUMNS = 256, 16  # of the product that is compared


class PosttrainWorker:
    """Additional methods of vLLM's worker, which provides `vllm_config`, `model_config`, `model_runner` and
    `reload_weights`.
    """

    vllm_config: Any
    model_config: Any
    model_runner: Any
    reload_weights: Any
    posttrain_weights = ""  # digest of the weights loaded last; "" = the initial ones

    def posttrain_state(self) -> dict[str, Any]:
        """Return the instance name of the process and the digest of its weights."""
        return {
            "instance": os.environ.get("POSTTRAIN_INSTANCE", ""),
            "weights": self.posttrain_weights,
        }

    def posttrain_describe(self) -> dict[str, Any]:
        """Describe the model and the capabilities."""
        config, lora = self.model_config.hf_text_config, self.vllm_config.lora_config
        return {
            **self.posttrain_state(),
            "engine": "vllm",
            "architecture": self.model_config.hf_config.architectures[0],
            "shape": {
                "vocab_size": int(self.model_config.get_vocab_size()),
                "hidden_size": int(config.hidden_size),
                "num_hidden_layers": int(config.num_hidden_layers),
            },
            "context": int(self.model_config.max_model_len),
            "dtype": str(self.model_config.dtype),
            "logprobs": str(self.model_config.logprobs_mode),
            "sleeps": bool(self.model_config.enable_sleep_mode),
            "lora_rank": int(lora.max_lora_rank) if lora is not None else 0,
            "versions": {name: version(name) for name in ("vllm", "torch", "transformers")},
        }

    def posttrain_read_weights(self, folder: str) -> dict[str, Any]:
        """Return the digest of a folder's tensors as this process reads them."""
        digests: dict[str, str] = {}
        for _ in _read_tensors(Path(folder), digests):
            pass
        return {"digest": _combine_digests(digests)}

    def posttrain_load_weights(self, folder: str) -> dict[str, Any]:
        """Load a model folder's weights in place; report compared tensors that the model does not hold afterwards.

        The output head of tied embeddings is no tensor of the folder: vLLM's build for CPUs multiplies by a packed copy
        of it, which reloading leaves as it was. The head is packed again, and a product of it is compared.
        """
        digests: dict[str, str] = {}
        sent: dict[str, torch.Tensor] = {}
        head_rows: dict[str, torch.Tensor] = {}
        parameters = dict(self.model_runner.get_model().named_parameters())
        head = _find_head(self.model_runner.get_model())

        def record_tensors() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in _read_tensors(Path(folder), digests):
                if head is not None and name.endswith((f"{HEAD_NAME}.weight", EMBEDDING_ENDING)):
                    head_rows[name] = _read_head_rows(head, tensor).clone()
                parameter = parameters.get(name)
                is_small = tensor.nbytes <= MAX_COMPARED_BYTES and len(sent) < MAX_COMPARED_TENSORS
                if parameter is not None and parameter.shape == tensor.shape and is_small:
                    sent[name] = tensor.clone()
                yield name, tensor

        self.posttrain_weights = "being loaded"  # remains if loading fails
        self.reload_weights(weights_iterator=record_tensors())
        loaded = dict(self.model_runner.get_model().named_parameters())
        differing = [name for name, tensor in sent.items() if not _is_equal(loaded[name], tensor)]
        compared = len(sent)
        own = [name for name in head_rows if name.endswith(f"{HEAD_NAME}.weight")]
        if head is not None and head_rows:
            _renew_head(head)
            compared += 1
            name = (own or list(head_rows))[0]
            if not _is_head_applied(head, head_rows[name]):
                differing.append(f"product of {HEAD_NAME} with {name}")
        self.posttrain_weights = _combine_digests(digests)
        return {"digest": self.posttrain_weights, "compared": compared, "differing": differing}


def _find_head(model: Any) -> Any:
    """Find the output head as vLLM computes with it; None if this process has none, or a packed or quantised one."""
    heads = [
        module
        for name, module in model.named_modules()
        if name.rpartition(".")[2] == HEAD_NAME and hasattr(module, "quant_method")
    ]
    weight = getattr(heads[0], "weight", None) if len(heads) == 1 else None
    is_plain = weight is not None and weight.dim() == 2 and weight.dtype.is_floating_point
    return heads[0] if is_plain else None


def _renew_head(head: Any) -> None:
    """Derive what the head computes with from its weight again."""
    if hasattr(head, "cpu_linear"):
        head.quant_method.process_weights_after_loading(head)


def _read_head_rows(head: Any, tensor: torch.Tensor) -> torch.Tensor:
    """Read the first rows of a weight that this process holds."""
    start = int(getattr(getattr(head, "shard_indices", None), "org_vocab_start_index", 0))
    return tensor[start : start + MAX_HEAD_ROWS]


def _is_head_applied(head: Any, rows: torch.Tensor) -> bool:
    """Return whether products of the head with unit vectors, which no rounding changes, are the columns sent."""
    hidden, device = rows.shape[1], head.weight.device
    columns = torch.linspace(0, hidden - 1, min(MAX_HEAD_COLUMNS, hidden)).long()
    units = torch.zeros(len(columns), hidden, dtype=head.weight.dtype)
    units[torch.arange(len(columns)), columns] = 1
    with torch.inference_mode():
        product = head.quant_method.apply(head, units.to(device), None)
    expected = rows[:, columns].to(head.weight.dtype).T
    return torch.equal(product[:, : len(rows)].to("cpu"), expected)


def _is_equal(loaded: torch.Tensor, sent: torch.Tensor) -> bool:
    return torch.equal(loaded.detach().to("cpu"), sent.to(loaded.dtype))


def _read_tensors(folder: Path, digests: dict[str, str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a folder's safetensors files; put each one's digest, as posttrain computes it, into
    `digests`.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{folder} holds no *.safetensors that this server can read")
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  # not a mapping
                tensor = tensors.get_tensor(name).contiguous()
                digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}\n".encode())
                if tensor.numel():
                    digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
                digests[name] = digest.hexdigest()
                yield name, tensor


def _combine_digests(digests: dict[str, str]) -> str:
    """Combine the digests of all tensors into one."""
    lines = "\n".join(f"{name} {digests[name]}" for name in sorted(digests))
    return hashlib.sha256(lines.encode()).hexdigest()
