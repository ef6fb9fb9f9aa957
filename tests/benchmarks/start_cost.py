"""Processor seconds of a fully cached run: of its process, of Prefect's server, and of imports.

    python tests/benchmarks/start_cost.py --output DIR

The pipeline is that of tests/helpers/small_sweep.py. It runs once, then again `--times` times with every stage finished
before. `before_stages` is what the command and its children had used when the first stage's folder was locked.
"""

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import time
from pathlib import Path

from helpers import ROOT
from helpers.small_sweep import CONFIG

PACKAGES = (
    "torch",
    "transformers",
    "mlflow",
    "prefect.server",
    "prefect",
    "pandas",
    "sqlalchemy",
    "matplotlib",
    "numpy",
)

# Runs the command in this process, so that it can say what it used itself, and when its first stage began.
RUNNER = """
import json, os, resource, sys, time
began = {}
def children():
    total = 0
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            fields = open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(fields[1]) == os.getpid():
            total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")
def hook(event, arguments):
    path = str(arguments[0]) if event == "open" and arguments else ""
    if not began and "/stages/" in path and path.endswith(".lock"):
        began.update(process=time.process_time())
        began.update(children=children())
sys.addaudithook(hook)
from posttrain.cli.main import main
code = main(sys.argv[2:])
used = resource.getrusage(resource.RUSAGE_SELF)
report = {"process": used.ru_utime + used.ru_stime, "before_stages": began, "loaded": sorted(sys.modules)}
open(sys.argv[1], "w").write(json.dumps(report))
sys.exit(code)
"""


def run_pipeline(folder: Path) -> dict[str, object]:
    """Run the pipeline once; it has to succeed."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    command = [
        sys.executable,
        "-X",
        "importtime",
        "-c",
        RUNNER,
        "report.json",
        "run",
        "small.yaml",
        "--quiet",
    ]
    with open(folder / "imports.txt", "w") as log:
        subprocess.run(
            command, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL, stderr=log
        )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    report = json.loads((folder / "report.json").read_text())
    total = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    loaded = set(report["loaded"])
    return {
        "processor": round(total, 1),
        "process": round(report["process"], 1),
        "children": round(total - report["process"], 1),
        "before_stages": {name: round(value, 1) for name, value in report["before_stages"].items()},
        "wall": round(time.monotonic() - began, 1),
        "imports": parse_import_seconds((folder / "imports.txt").read_text()),
        "loaded": [
            name
            for name in ("torch", "transformers", "mlflow", "prefect.server.api.server")
            if name in loaded
        ],
        "modules": len(loaded),
    }


def parse_import_seconds(log: str) -> dict[str, float]:
    """Return seconds by package from the log of `-X importtime`: of its modules, without those that they import."""
    seconds: dict[str, float] = {}
    for line in log.splitlines():
        if match := re.match(r"import time:\s+(\d+) \|\s+\d+ \|\s+(\S+)", line):
            name = match[2]
            package = next(
                (p for p in PACKAGES if name == p or name.startswith(p + ".")),
                name.partition(".")[0],
            )
            seconds[package] = seconds.get(package, 0.0) + int(match[1]) / 1e6
    top = sorted(seconds.items(), key=lambda item: -item[1])[:25]
    return {
        "all": round(sum(seconds.values()), 2),
        **{name: round(value, 2) for name, value in top},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--times", type=int, default=3)
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "small.yaml").write_text(CONFIG)
    runs = {
        "first": [run_pipeline(options.output)],
        "cached": [run_pipeline(options.output) for _ in range(options.times)],
    }
    print(json.dumps(runs, indent=1))


if __name__ == "__main__":
    main()
