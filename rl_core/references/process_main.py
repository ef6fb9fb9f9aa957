"""Main program of a separate process for a reference model: load it, then score rows until the connection ends."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from rl_core.out_of_memory import format_first_line
from rl_core.processes.process_pool import connect_to_owner
from rl_core.references.quantized import count_weight_bytes
from rl_core.references.scorer import ModelScorer, ReferenceSource, load_scorer
from rl_core.references.scorer_process import receive_message, send_message, split_rows
from rl_core.settings import ModelSettings

_EMPTY_ARRAY = np.zeros(0, dtype=np.float32)


def load_requested_scorer(source: dict[str, Any], pass_tokens: int, threads: int) -> ModelScorer:
    """Load the scorer that the owner requests.

    Args:
        source: fields of a `ReferenceSource`.
    """
    import torch

    torch.set_num_threads(threads)
    model = ModelSettings(**source.pop("model"))
    return load_scorer(ReferenceSource(model=model, **source), pass_tokens)


def main(descriptor: int) -> None:
    """Serve the owner at the other end of the connection."""
    connection = connect_to_owner(descriptor)
    scorer: ModelScorer | None = None
    while True:
        head, tokens = receive_message(connection)
        try:
            if scorer is None:
                scorer = load_requested_scorer(**head)
                send_message(connection, {"bytes": count_weight_bytes(scorer.model)}, _EMPTY_ARRAY)
                continue
            rows = [row.tolist() for row in split_rows(tokens, head["lengths"])]
            if "begin" in head:
                logits = scorer.compute_logits(rows, head["begin"], head["end"])
                send_message(connection, {}, logits)
                continue
            scores = scorer.score_rows(rows, head["temperature"])
            values = np.concatenate([_EMPTY_ARRAY, *scores])
            send_message(connection, {"lengths": [len(row) for row in scores]}, values)
        except Exception as error:
            reply = {"error": str(error) or format_first_line(error), "kind": type(error).__name__}
            send_message(connection, reply, _EMPTY_ARRAY)


if __name__ == "__main__":
    main(int(sys.argv[1]))
