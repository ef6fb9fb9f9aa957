"""Growth of time and memory with length, batch, parameters, rollouts and iterations; exponents of power laws.

    python tests/benchmarks/scaling.py --output DIR [--axes length,batch,...] [--threads 1] [--repeats 3] [--quick]

Each point is a fresh process, so that peak memory is that point's; memory is counted above what the imports took. A
finished point is DIR/points/*.json and is not run again. At the end: DIR/scaling.md and DIR/scaling.png, logarithmic on
both axes: a straight line is a power law. --quick takes the three smallest values of each axis.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

from compare_speed import describe_processor, parse_names, read_commit, read_or_make, run_python
from speed import growth

# axis -> its values, the works that are measured along it, and what is fixed meanwhile
AXES = {
    "length": ((64, 128, 256, 512, 1024, 2048), ("update", "rollout"), {"batch": 4}),
    "batch": ((8, 16, 32, 64, 128, 256), ("update", "rollout"), {"length": 128}),
    "parameters": (
        (1, 3, 10, 32, 100),
        ("update", "rollout"),
        {"batch": 8, "length": 128},
    ),  # millions
    "trajectories": ((16, 64, 256, 1024, 4096), ("collect",), {}),
    "iterations": (
        (10, 30, 100, 300, 1000),
        ("policy",),
        {"parameters": 0},
    ),  # of the smallest model
}
COUNTED = {"trajectories": "count", "iterations": "count"}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--axes", type=parse_names(tuple(AXES)), default=list(AXES))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--repeats", type=int, default=3, help="measured calls of an update or a rollout"
    )
    parser.add_argument(
        "--quick", action="store_true", help="the three smallest values of each axis"
    )
    options = parser.parse_args()
    output = options.output.resolve()
    (output / "points").mkdir(parents=True, exist_ok=True)
    run_python(
        ["-c", f"from speed import inputs; inputs.build({str(output / 'inputs')!r}, 'small')"]
    )
    points, failures = [], 0
    for axis in options.axes:
        values, works, fixed = AXES[axis]
        for work in works:
            for value in values[:3] if options.quick else values:
                name = f"{axis}-{value}-{work}-{options.threads}t"
                print(f"{time.strftime('%H:%M:%S')} {name}", flush=True)
                arguments = {**fixed, COUNTED.get(axis, axis): value}
                try:
                    point = read_or_make(
                        output / f"points/{name}.json",
                        partial(measure, output, work, arguments, options),
                    )
                except subprocess.CalledProcessError as error:
                    print(f"{name}: failed with exit code {error.returncode}", file=sys.stderr)
                    failures += 1
                    continue
                points.append({"axis": axis, "value": value, "work": work, **point})
    about = [
        f"machine: {describe_processor()}, {options.threads} thread(s), Python {sys.version.split()[0]}; "
        f"commit {', '.join(sorted({point['commit'] or '?' for point in points}))}",
        "fixed unless it is the axis: 3.2M parameters, 4 to 8 rows, 128 tokens; float32; "
        f"median of {options.repeats} calls after one that is dropped, collect and policy: one",
        "iterations are of a model of 0.04M parameters; parameters are in millions",
    ]
    (output / "scaling.md").write_text(growth.format_report(points, about))
    growth.draw_growth(points, output / "scaling.png")
    print((output / "scaling.md").read_text())
    return int(failures > 0)


def measure(output, work, arguments, options):
    """Measure one point, in a separate process."""
    command = ["-m", "speed.point", work, "--folder", str(output / "inputs" / "small")]
    for name, value in (
        *arguments.items(),
        ("threads", options.threads),
        ("repeats", options.repeats),
    ):
        command += [f"--{name}", str(value)]
    return {**json.loads(run_python(command, options.threads)), "commit": read_commit()}


if __name__ == "__main__":
    sys.exit(main())
