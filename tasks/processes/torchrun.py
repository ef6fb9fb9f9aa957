"""Entry point that runs torchrun as a child process of a stage: it dies with its parent and reports exit statuses.

    python -m tasks.processes.torchrun PARENT_PID REPORT.json [torchrun's arguments]

On further nodes no stage is the parent, and PARENT_PID is 0.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rl_core.processes.children import bind_to_parent
from rl_core.storage.atomic_files import write_json_atomic

AGENT_PID_VARIABLE = "POSTTRAIN_AGENT_PID"  # pid that the processes expect as their parent


def main(arguments: Sequence[str]) -> int:
    """Run torchrun; write the exit status of each failed process, by rank, to the report."""
    parent, report = int(arguments[0]), Path(arguments[1])
    if parent:
        bind_to_parent(parent)
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    os.environ[AGENT_PID_VARIABLE] = str(os.getpid())
    try:
        run.main(list(arguments[2:]))
    except ChildFailedError as error:
        if str(report) != os.devnull:  # further nodes write no report
            statuses = {str(rank): failure.exitcode for rank, failure in error.failures.items()}
            write_json_atomic(report, statuses)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
