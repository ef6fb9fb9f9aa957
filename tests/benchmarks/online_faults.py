"""Kills of a learning service at random moments under load: server, update worker, spare process.

    PYTHONPATH=.:tests python tests/benchmarks/online_faults.py --output DIR [--kills 200] [--longest 10] [--pause 1]

Three clients ask and label, `--pause` seconds apart (a worker that is killed every few seconds learns little: without a
pause the backlog only grows); every newest snapshot is made live, so that answers change their weights all the
time. Afterwards: acknowledged answers that the log lacks or has twice, answers that are a mixture, snapshots and final
weights that differ from those of an unkilled replay of the same records, processes and segments that were left.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from pathlib import Path

from helpers.killed_service import KilledService


def main() -> None:
    """Kill, print, and write faults.json."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument(
        "--longest", type=float, default=3.0, help="seconds between two kills, at most"
    )
    parser.add_argument(
        "--pause", type=float, default=0.02, help="seconds between two questions of a client"
    )
    parser.add_argument(
        "--checked", type=int, default=500, help="answers whose tokens are computed again"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    folder = options.output.resolve() / "service"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    began = time.time()
    service = KilledService(folder, seed=options.seed, pause=options.pause)
    service.run(options.kills, options.longest)
    verdict = service.verdict(options.checked) | {"seconds": time.time() - began}
    (options.output / "faults.json").write_text(json.dumps(verdict, indent=1))
    print(json.dumps(verdict, indent=1))


if __name__ == "__main__":
    main()
