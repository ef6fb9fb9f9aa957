"""Console script `posttrain`: Ctrl-C while its modules are still imported ends it without a traceback."""

from __future__ import annotations

import signal
from typing import NoReturn

from flows.runtime.import_setup import disable_bytecode_under_file_limit


def command() -> NoReturn:
    """Run the command; until it can answer Ctrl-C in words, the kernel answers it."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:  # a job in the background ignores the signal
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    disable_bytecode_under_file_limit()
    from posttrain.cli.main import command as run_command

    signal.signal(signal.SIGINT, handler)
    run_command()
