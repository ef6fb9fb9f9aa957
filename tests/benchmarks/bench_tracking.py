"""Cost of tracking: python tests/benchmarks/bench_tracking.py [calls] [metrics per call]."""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

from tasks.tracking import Tracking


def main(calls: int = 2000, width: int = 30) -> None:
    """Print the cost of a start, of each call on the training thread, and of delivery in the background."""
    with tempfile.TemporaryDirectory() as folder:
        tracking = Tracking(f"sqlite:///{folder}/mlflow/mlflow.db", Path(folder), "bench")
        started = time.perf_counter()
        run = tracking.start_run("bench", Path(folder) / "run")
        print(f"first start (import, new store): {time.perf_counter() - started:.2f} s")
        times = []
        for step in range(calls):
            row = {f"train/metric_{index}": index * 0.1 for index in range(width)}
            begin = time.perf_counter()
            run.log_metrics(row, step)
            times.append(time.perf_counter() - begin)
        begin = time.perf_counter()
        run.close(timeout_s=300)
        micro = [1e6 * value for value in times]
        print(
            f"log_metrics of {width}: median {statistics.median(micro):.0f} us, "
            f"99th percentile {sorted(micro)[int(0.99 * calls)]:.0f} us, longest {max(micro):.0f} us"
        )
        print(f"close after {calls * width} values: {time.perf_counter() - begin:.2f} s")
        background = tracking.cost.background_seconds
        print(
            f"processor time in the background: {1e6 * background / (calls * width):.0f} us a value"
        )


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:]))
