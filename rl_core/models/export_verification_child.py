"""Program: log-probs and scores of model folders by transformers alone, as a user who downloads the model computes
them.

It imports nothing of this project. The argument is the pid of the requesting process; this process ends with it. The
request is one JSON object on standard input, the answer the last line of standard output. See
`rl_core/models/export_verification.py`.
"""

from __future__ import annotations

import base64
import ctypes
import io
import json
import os
import pathlib
import signal
import sys
from typing import Any

_PR_SET_PDEATHSIG = 1  # from linux/prctl.h


def main() -> None:
    """Answer one request with a list of answers, one per model."""
    exit_with_parent(int(sys.argv[1]))
    import torch
    import transformers

    request = json.load(sys.stdin)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(int(request["threads"]))
    print("\n" + json.dumps([process_request(model) for model in request["models"]]))


def exit_with_parent(parent: int) -> None:
    """Make the kernel kill this process when its parent dies, because a resumed run needs the memory."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before the call above
        os._exit(1)


def process_request(request: dict[str, Any]) -> dict[str, Any]:
    """Measure log-probs or scores; return an `error` entry on failure."""
    try:
        return measure_logprobs(request) if "sequences" in request else measure_scores(request)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}


def measure_logprobs(request: dict[str, Any]) -> dict[str, Any]:
    """Compute log-probs of the sequences with the folder's language model; report weights that did not fit."""
    import torch
    import transformers

    config, _ = transformers.PretrainedConfig.get_config_dict(request["folder"])
    kind: Any = transformers.AutoModelForCausalLM
    if "vision_config" in config:
        kind = transformers.AutoModelForImageTextToText
    model, report = load_model(kind, request)
    device = model.device
    logprobs_by_sequence = []
    with torch.no_grad():
        for sequence in request["sequences"]:
            ids = torch.tensor([sequence["ids"]], device=device)
            images = read_images(request, model, ids, sequence.get("images", ()))
            output = model(input_ids=ids, use_cache=False, **images)
            logits = output.logits[0].float() / sequence["temperature"]
            logprobs = torch.log_softmax(logits, dim=-1)
            logprobs_by_sequence.append(
                [float(logprobs[i - 1, sequence["ids"][i]]) for i in sequence["scored"]]
            )
    return {"logprobs": logprobs_by_sequence, **describe_model(model, report)}


def read_images(request: dict[str, Any], model: Any, ids: Any, urls: Any) -> dict[str, Any]:
    """Compute the pixels of images by the folder's image processor; the model finds their positions itself."""
    if not urls:
        return {}
    import torch
    import transformers
    from PIL import Image

    images = [
        Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))).convert("RGB")
        for url in urls
    ]
    processor = transformers.AutoImageProcessor.from_pretrained(request["folder"], backend="pil")
    outputs = processor(images=images, return_tensors="pt").to(model.device)
    outputs["pixel_values"] = outputs["pixel_values"].to(model.dtype)
    kinds = (ids == model.config.image_token_id).to(torch.int32)
    return {**outputs, "mm_token_type_ids": kinds}


def measure_scores(request: dict[str, Any]) -> dict[str, Any]:
    """Compute scores of the rows with the folder's classifier; report weights that did not fit.

    transformers has no heads of several layers. If the configuration names one, it is built from the folder's
    tensors, as a user of the model has to do.
    """
    import torch
    import transformers

    model, report = load_model(
        transformers.AutoModelForSequenceClassification, request, num_labels=1
    )
    head = getattr(model.config, "reward_head", None) or {"layers": 1}
    if head["layers"] > 1:
        weights = load_head_weights(request["folder"])
        widths = [len(weights[f"{2 * i}.weight"]) for i in range(head["layers"])]
        sizes = [model.config.get_text_config().hidden_size, *widths]
        layers: list[Any] = []
        for size, width in zip(sizes, widths, strict=False):
            has_bias = f"{len(layers)}.bias" in weights
            layers += [torch.nn.Linear(size, width, bias=has_bias), torch.nn.GELU()]
        model.score = torch.nn.Sequential(*layers[:-1])
        model.score.load_state_dict(weights)
        model.score.to(model.device, model.dtype)
        report = {
            kind: [key for key in keys if "score." not in str(key)] for kind, keys in report.items()
        }
    scores = []
    with torch.no_grad():
        for row in request["rows"]:
            ids = torch.tensor([row], device=model.device)
            logits = model(input_ids=ids, use_cache=False).logits
            scores.append(float(logits[0, 0]))
    return {"scores": scores, **describe_model(model, report)}


def load_model(kind: Any, request: dict[str, Any], **options: Any) -> tuple[Any, dict[str, Any]]:
    """Load a model of this kind on the request's device, with the report on its weights."""
    import torch

    model, report = kind.from_pretrained(
        request["folder"],
        dtype=getattr(torch, request["dtype"]),
        use_safetensors=True,
        local_files_only=True,
        output_loading_info=True,
        ignore_mismatched_sizes=True,
        trust_remote_code=bool(request["trust_remote_code"]),
        **options,
    )
    device = request["device"]
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return model.to(device).eval(), report


def load_head_weights(folder: str) -> dict[str, Any]:
    """Load the tensors under `score.` in a folder, keyed by the rest of their names."""
    from safetensors import safe_open

    weights: dict[str, Any] = {}
    for path in sorted(pathlib.Path(folder).glob("*.safetensors")):
        with safe_open(path, framework="pt") as tensors:  # the trunk's tensors are not read
            names = [name for name in tensors.keys() if name.startswith("score.")]  # noqa: SIM118  # not a mapping
            weights |= {name.removeprefix("score."): tensors.get_tensor(name) for name in names}
    return weights


def describe_model(model: Any, report: dict[str, Any]) -> dict[str, Any]:
    """Return class, versions, and weights that did not fit."""
    import torch
    import transformers

    return {
        "class": type(model).__name__,
        "missing": sorted(map(str, report["missing_keys"])),
        "unexpected": sorted(map(str, report["unexpected_keys"])),
        "mismatched": sorted(str(key[0]) for key in report["mismatched_keys"]),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


if __name__ == "__main__":
    main()
