"""Program: log-probs of model folders by transformers alone, as anyone who downloads a model computes them.

Nothing of this project is imported. The request is one JSON object on the standard input, the answer the last line of
the standard output. See `rl_core/models/export_proof.py`.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def main() -> None:
    """Answer one request: a list of answers, one for each model."""
    import torch
    import transformers

    request = json.load(sys.stdin)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(int(request["threads"]))
    print("\n" + json.dumps([answer(model) for model in request["models"]]))


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """As `measure`, or an `error`."""
    try:
        return measure(request)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}


def measure(request: dict[str, Any]) -> dict[str, Any]:
    """Log-probs of the sequences under the folder's model, and the weights that did not fit."""
    import torch
    import transformers

    loader: Any = transformers.AutoModelForCausalLM
    model, report = loader.from_pretrained(
        request["folder"],
        dtype=getattr(torch, request["dtype"]),
        use_safetensors=True,
        local_files_only=True,
        output_loading_info=True,
        ignore_mismatched_sizes=True,
        trust_remote_code=bool(request["trust_remote_code"]),
    )
    device = request["device"]
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    model = model.to(device).eval()
    found = []
    with torch.no_grad():
        for sequence in request["sequences"]:
            ids = torch.tensor([sequence["ids"]], device=device)
            logits = model(input_ids=ids, use_cache=False).logits[0].float() / sequence["temperature"]
            logprobs = torch.log_softmax(logits, dim=-1)
            found.append([float(logprobs[place - 1, sequence["ids"][place]]) for place in sequence["scored"]])
    return {
        "logprobs": found,
        "class": type(model).__name__,
        "missing": sorted(map(str, report["missing_keys"])),
        "unexpected": sorted(map(str, report["unexpected_keys"])),
        "mismatched": sorted(str(key[0]) for key in report["mismatched_keys"]),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


if __name__ == "__main__":
    main()
