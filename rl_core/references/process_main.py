"""Main program of a reference model's own process: load it, then score rows until the connection ends."""

from __future__ import annotations

import os
import select
import sys
import threading
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from rl_core.memory import first_line
from rl_core.references.few_bits import weight_bytes
from rl_core.references.loading import ReferenceSource, load_scorer
from rl_core.references.own_process import receive, send, split
from rl_core.references.scorer import ModelScorer
from rl_core.settings import ModelSettings

__all__ = ["main", "start"]

_NOTHING = np.zeros(0, dtype=np.float32)


def start(source: dict[str, Any], pass_tokens: int, threads: int) -> ModelScorer:
    """The scorer that an owner asks for. `source`: fields of a `ReferenceSource`."""
    import torch

    torch.set_num_threads(threads)
    model = ModelSettings(**source.pop("model"))
    return load_scorer(ReferenceSource(model=model, **source), pass_tokens)


def main(descriptor: int) -> None:
    """Serve the owner at the other end of a connection."""
    connection: Connection = Connection(descriptor)
    threading.Thread(target=_end_with_owner, args=(descriptor,), daemon=True).start()
    scorer: ModelScorer | None = None
    while True:
        try:
            head, tokens = receive(connection)
        except EOFError:
            return
        try:
            if scorer is None:
                scorer = start(**head)
                send(connection, {"bytes": weight_bytes(scorer.model)}, _NOTHING)
                continue
            rows = [row.tolist() for row in split(tokens, head["lengths"])]
            if "begin" in head:
                send(connection, {}, scorer.logits(rows, head["begin"], head["end"]))
                continue
            answer = scorer.score(rows, head["temperature"])
            values = np.concatenate([_NOTHING, *answer])
            send(connection, {"lengths": [len(row) for row in answer]}, values)
        except Exception as error:
            send(connection, {"error": str(error) or first_line(error), "kind": type(error).__name__}, _NOTHING)


def _end_with_owner(descriptor: int) -> None:
    """End this process when the other end of the connection is closed, be it within a pass that nobody waits for."""
    closed = select.poll()
    closed.register(descriptor, select.POLLRDHUP)
    while not closed.poll():
        continue
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
