"""Methods of posttrain in vLLM's workers: their description, and weights from a folder with a check of what arrived.

Runs in vLLM's environment as `--worker-extension-cls posttrain_worker.PosttrainWorker`, which start.py passes. vLLM
makes it a base class of its worker, and POST /collective_rpc calls its methods. For vLLM 0.30.0; imports nothing from
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

MAX_COMPARED_BYTES = 2**24  # tensors up to this size are compared after an update
MAX_COMPARED_TENSORS = 64


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
        """Load a model folder's weights in place; report compared tensors that the model does not hold afterwards."""
        digests: dict[str, str] = {}
        sent: dict[str, torch.Tensor] = {}
        parameters = dict(self.model_runner.get_model().named_parameters())

        def record_tensors() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in _read_tensors(Path(folder), digests):
                parameter = parameters.get(name)
                is_small = tensor.nbytes <= MAX_COMPARED_BYTES and len(sent) < MAX_COMPARED_TENSORS
                if parameter is not None and parameter.shape == tensor.shape and is_small:
                    sent[name] = tensor.clone()
                yield name, tensor

        self.posttrain_weights = "being loaded"  # remains if loading fails
        self.reload_weights(weights_iterator=record_tensors())
        loaded = dict(self.model_runner.get_model().named_parameters())
        differing = [name for name, tensor in sent.items() if not _is_equal(loaded[name], tensor)]
        self.posttrain_weights = _combine_digests(digests)
        return {"digest": self.posttrain_weights, "compared": len(sent), "differing": differing}


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
