"""Entry point of the console script `posttrain`.

Ctrl-C during its imports ends it without a traceback. Where the wheel was installed without its packages, it says which
command installs them; therefore this module imports the standard library alone.
"""

from __future__ import annotations

import re
import shlex
import signal
import sys
from importlib import metadata
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
    try:
        from posttrain.cli.main import command as run_command
        from posttrain.cli.main import import_command_modules

        import_command_modules(sys.argv[1:])
        signal.signal(signal.SIGINT, handler)
        run_command()
    except ModuleNotFoundError:
        missing = list_missing_packages()
        if not missing or "--debug" in sys.argv:
            raise
        print(format_missing_packages(missing), file=sys.stderr)
        sys.exit(2)


def format_missing_packages(missing: list[str]) -> str:
    """Format the error about missing packages, with the command that installs them."""
    names = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if missing[3:] else "")
    return (
        f"posttrain: packages are missing from this environment: {names}; install the tested versions: "
        f"{shlex.quote(sys.executable)} -m posttrain.install"
    )


def list_missing_packages() -> list[str]:
    """List the packages that posttrain requires without any extra and that are not installed."""
    try:
        requirements = metadata.requires("posttrain") or []
    except metadata.PackageNotFoundError:  # a checkout on PYTHONPATH
        return []
    missing = []
    for requirement in requirements:
        name = re.match(r"[\w.-]+", requirement)
        if name is None or "extra ==" in requirement:
            continue
        try:
            metadata.version(name.group())
        except metadata.PackageNotFoundError:
            missing.append(name.group())
    return missing
