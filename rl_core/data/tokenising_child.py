"""Child process of `tokenising`: `python -m rl_core.data.tokenising_child DESCRIPTOR`, which exchanges pickles.

First (tokenizer, settings, job), answered by the renderer's digest; then (number of the first row, rows), each answered
by `tokenize_chunk`, or by None where that failed and the parent is to fail by itself. Ends with its connection.
"""

from __future__ import annotations

import pickle
import sys

from rl_core.data.chat import ChatRenderer
from rl_core.data.tokenising import tokenize_chunk
from rl_core.processes.process_pool import connect_to_owner


def main(descriptor: int) -> None:
    """Serve the owner at the other end of the connection."""
    connection = connect_to_owner(descriptor)
    tokenizer, settings, job = pickle.loads(connection.recv_bytes())
    renderer = ChatRenderer(tokenizer, settings)
    connection.send_bytes(pickle.dumps(renderer.digest))
    while True:
        first, rows = pickle.loads(connection.recv_bytes())
        try:
            result = tokenize_chunk(renderer, job, rows, first)
        except Exception:
            result = None
        connection.send_bytes(pickle.dumps(result, pickle.HIGHEST_PROTOCOL))


if __name__ == "__main__":
    main(int(sys.argv[1]))
