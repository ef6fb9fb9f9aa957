"""torchrun as a child process of a stage: dies with its parent and reports the exit status of its processes.

    python -m tasks.processes.torchrun PARENT_PID REPORT.json [torchrun's own arguments]

On further nodes, where no stage is the parent, PARENT_PID is 0.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rl_core.storage.atomic_files import write_json_atomic
from tasks.processes.child_processes import bind_to_parent

AGENT_PID_VARIABLE = "POSTTRAIN_AGENT_PID"  # tells the processes who their parent has to be


def main(arguments: Sequence[str]) -> int:
    """Run torchrun; the report holds the exit status of each process that failed, by rank."""
    parent, report = int(arguments[0]), Path(arguments[1])
    if parent:
        bind_to_parent(parent)
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    os.environ[AGENT_PID_VARIABLE] = str(os.getpid())
    try:
        run.main(list(arguments[2:]))
    except ChildFailedError as error:
        if str(report) != os.devnull:  # on further nodes nobody asks
            write_json_atomic(
                report, {str(rank): failure.exitcode for rank, failure in error.failures.items()}
            )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
