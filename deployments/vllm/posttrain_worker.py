"""Methods of posttrain in vLLM's workers: who they are, and weights from a folder, with proof of their arrival.

Runs in vLLM's environment, as `--worker-extension-cls posttrain_worker.PosttrainWorker`; start.py says so. vLLM makes
it a base class of its worker, and POST /collective_rpc calls its methods. For vLLM 0.30.0; imports nothing of
posttrain.
"""

import hashlib
import os
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

COMPARED_BYTES = 2**24  # tensors up to this size are looked at after an update
MOST_COMPARED = 64  # of them


class PosttrainWorker:
    """Methods beside vLLM's own; `vllm_config`, `model_config`, `model_runner`, `reload_weights` are the worker's."""

    vllm_config: Any
    model_config: Any
    model_runner: Any
    reload_weights: Any
    posttrain_weights = ""  # digest of those that were loaded last

    def posttrain_state(self) -> dict[str, Any]:
        """Process and weights."""
        return {
            "instance": os.environ.get("POSTTRAIN_INSTANCE", ""),
            "weights": self.posttrain_weights,
        }

    def posttrain_describe(self) -> dict[str, Any]:
        """Model and abilities."""
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
        """Digest of a folder's tensors as this process reads them."""
        found: dict[str, str] = {}
        for _ in _tensors(Path(folder), found):
            pass
        return {"digest": _digest_of(found)}

    def posttrain_load_weights(self, folder: str) -> dict[str, Any]:
        """Load a model folder's weights in place; which of those that were looked at the model does not hold then."""
        found: dict[str, str] = {}
        sent: dict[str, torch.Tensor] = {}
        parameters = dict(self.model_runner.get_model().named_parameters())

        def noted() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in _tensors(Path(folder), found):
                own = parameters.get(name)
                is_small = tensor.nbytes <= COMPARED_BYTES and len(sent) < MOST_COMPARED
                if own is not None and own.shape == tensor.shape and is_small:
                    sent[name] = tensor.clone()
                yield name, tensor

        self.posttrain_weights = "being loaded"  # what stands there if it fails in the middle
        self.reload_weights(weights_iterator=noted())
        held = dict(self.model_runner.get_model().named_parameters())
        differing = [name for name, tensor in sent.items() if not _same(held[name], tensor)]
        self.posttrain_weights = _digest_of(found)
        return {"digest": self.posttrain_weights, "compared": len(sent), "differing": differing}


def _same(held: torch.Tensor, sent: torch.Tensor) -> bool:
    return torch.equal(held.detach().to("cpu"), sent.to(held.dtype))


def _tensors(folder: Path, found: dict[str, str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of a folder's safetensors files; `found` gets the digest of each, as posttrain computes it."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{folder} holds no *.safetensors that this server can read")
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  # no mapping
                tensor = tensors.get_tensor(name).contiguous()
                digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}\n".encode())
                if tensor.numel():
                    digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
                found[name] = digest.hexdigest()
                yield name, tensor


def _digest_of(found: dict[str, str]) -> str:
    """One digest of all tensors'."""
    return hashlib.sha256(
        "\n".join(f"{name} {found[name]}" for name in sorted(found)).encode()
    ).hexdigest()
