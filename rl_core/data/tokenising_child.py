"""Child process of `tokenising`: `python -m rl_core.data.tokenising_child`, which speaks pickles on its pipes.

First (tokenizer, settings, job), answered by the renderer's digest; then (number of the first row, rows), each answered
by `tokenize_chunk`, or by None where that failed and the parent is to fail by itself. Ends with its input.
"""

from __future__ import annotations

import io
import os
import pickle
import signal
import sys

from rl_core.data.chat import ChatRenderer
from rl_core.data.tokenising import tokenize_chunk


def main() -> None:
    """Serve one parent."""
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C comes to the parent too, which then closes the pipe
    requests, answers = sys.stdin.buffer, io.FileIO(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    tokenizer, settings, job = pickle.load(requests)
    renderer = ChatRenderer(tokenizer, settings)
    _send_pickle(answers, renderer.digest)
    while True:
        try:
            first, rows = pickle.load(requests)
        except EOFError:
            return
        try:
            result = tokenize_chunk(renderer, job, rows, first)
        except Exception:
            result = None
        _send_pickle(answers, result)


def _send_pickle(answers: io.FileIO, value: object) -> None:
    rest = memoryview(pickle.dumps(value, pickle.HIGHEST_PROTOCOL))
    while rest:
        rest = rest[answers.write(rest) :]


if __name__ == "__main__":
    main()
