"""The demo's results in the quick start and its two pictures, from one run: `make demo-results` runs the demo again.

    python docs/tools/demo_results.py              # runs configs/demo.yaml into outputs/demo-results, several minutes

The quick start gets the table of the terminal; both pictures are of the same run.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))  # called as a file, from a checkout

__all__ = ["main", "machine", "table_lines", "with_results"]

QUICKSTART = ROOT / "docs" / "quickstart.md"
PICTURES = ROOT / "tests" / "benchmarks" / "pictures"
_TABLE = re.compile(r"(?:^    [┏┃┡│└].*\n)+", re.MULTILINE)
_TOOK = re.compile(r"^On [^\n]*, seed \d+, it took \d+ s and ended with this table:$", re.MULTILINE)


def machine(cpuinfo: str, seed: int) -> str:
    """Clause about where it ran, from the text of /proc/cpuinfo."""
    name = re.search(r"^model name\s*: (.*)$", cpuinfo, re.MULTILINE)
    flags = set(re.findall(r"\b(?:amx_tile|avx512f|avx2)\b", cpuinfo))
    best = next((word for flag, word in _FLAGS.items() if flag in flags), "no AVX2")
    cores = len(re.findall(r"^processor\s*:", cpuinfo, re.MULTILINE))
    shown = re.sub(
        r"\((?:R|TM)\)| CPU| Processor|@.*", "", name[1] if name else "a processor without a name"
    ).strip()
    return f"{cores} cores ({shown}, {best}), seed {seed},"


_FLAGS = {
    "amx_tile": "AMX",
    "avx512f": "AVX-512, no AMX",
    "avx2": "AVX2",
}  # the best one that a processor has


def with_results(text: str, places: Mapping[re.Pattern[str], str]) -> str:
    """A document with these results in their places. Raises: ValueError where it has not one place for each."""
    for place, result in places.items():
        if len(place.findall(text)) != 1:
            raise ValueError(
                f"found {len(place.findall(text))} places like {place.pattern!r}, wanted one"
            )
        text = place.sub(lambda _, result=result: result, text)  # type: ignore[misc]
    return text


def table_lines(table: str) -> str:
    """The table of the terminal, without the lines around it, as a block of code."""
    return "".join(
        f"    {line.rstrip()}\n" for line in table.splitlines() if line[:1] in "┏┃┡│└" and line
    )


def main(arguments: list[str] | None = None) -> int:
    """Run the demo, then write the pictures and the quick start's table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--config", default=str(ROOT / "configs" / "demo.yaml"))
    parser.add_argument(
        "--output", default=str(ROOT / "outputs" / "demo-results"), help="folder of the run"
    )
    chosen = parser.parse_args(arguments)
    os.chdir(ROOT)
    from flows.post_training import run_pipeline
    from rl_core.storage.atomic_files import write_text_atomic
    from tasks.config import load_settings

    shutil.rmtree(
        chosen.output, ignore_errors=True
    )  # a version 1 and no champion, as of whoever runs it first
    settings = load_settings(chosen.config, (f"output={chosen.output}",))
    result = run_pipeline(settings)
    where, seconds = (
        machine(Path("/proc/cpuinfo").read_text(), settings.seed),
        f"{result.seconds:.0f} s",
    )
    changed = {
        QUICKSTART: {
            _TABLE: table_lines(result.format_table(80)),
            _TOOK: f"On {where} it took {seconds} and ended with this table:",
        },
    }
    texts = {
        path: with_results(path.read_text(encoding="utf-8"), places)
        for path, places in changed.items()
    }
    shutil.copyfile(
        Path(chosen.output) / settings.name / "pipeline.png", PICTURES / "demo_pipeline.png"
    )
    shutil.copyfile(
        result.results["analyze"].path / "success_by_level.png",
        PICTURES / "demo_success_by_level.png",
    )
    for path, text in texts.items():
        write_text_atomic(path, text)
    print(f"{QUICKSTART.name} and two pictures are of this run: git diff --stat")
    return 0


if __name__ == "__main__":
    sys.exit(main())
