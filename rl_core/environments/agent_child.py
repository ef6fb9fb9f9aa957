"""Program that confines itself (`sandbox.py`) and then runs an agent's command.

    python -I -S agent_child.py <options as JSON> COMMAND [ARGUMENT ...]

Standard library only, without imports from this package, so that it starts in milliseconds.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.util
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

START_FAILED = 127  # exit code, as a shell's for a command that it does not find


def _load_sandbox() -> Any:
    path = str(Path(__file__).with_name("sandbox.py"))
    loader = importlib.machinery.SourceFileLoader("sandbox", path)
    spec = importlib.util.spec_from_loader("sandbox", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def main(options: dict[str, Any], command: list[str]) -> None:
    """Run the command in the folder of the options, confined if they say so, and exit with its code.

    A confined command is a child of this process: the first process of a PID namespace ignores most signals.
    """
    try:
        if options["sandbox"] is not None:
            missing = _load_sandbox().enter(**options["sandbox"])
            Path(options["report"]).write_text(json.dumps(missing))
            _fork_and_exit_with_child()
        os.chdir(options["folder"])
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]} cannot be started: {error}", file=sys.stderr)
        sys.exit(START_FAILED)


def _fork_and_exit_with_child() -> None:
    """Continue in a child; this process waits for it, and for orphans of it, and exits with its code."""
    pid = os.fork()
    if pid == 0:
        return

    def pass_on(number: int, frame: object) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            os.kill(pid, number)

    signal.signal(signal.SIGTERM, pass_on)
    ended, status = os.wait()
    while ended != pid:
        ended, status = os.wait()
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), sys.argv[2:])
