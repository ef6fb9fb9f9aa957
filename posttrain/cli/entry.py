"""Entry point of the console script `posttrain`. Ctrl-C during its imports ends it without a traceback."""

from __future__ import annotations

import signal
import sys
from typing import NoReturn

from flows.runtime.import_setup import disable_bytecode_under_file_limit


def command() -> NoReturn:
    """Run the command.

    While modules are imported, SIGINT has its default action: the kernel ends the process silently.
    """
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:  # background jobs ignore the signal
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    disable_bytecode_under_file_limit()
    from posttrain.cli.main import command as run_command
    from posttrain.cli.main import import_command_modules

    import_command_modules(sys.argv[1:])
    signal.signal(signal.SIGINT, handler)
    run_command()
