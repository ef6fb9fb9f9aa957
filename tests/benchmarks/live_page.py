"""The live page in a browser over a folder of 100 runs of 10,000 iterations each: first paint and updates.

    python tests/benchmarks/live_page.py [--runs 100] [--iterations 10000] [--output live_page.json] [--pictures DIR]

Makes the folder by itself (journals as `tasks/tracking` writes them, 53 metrics an iteration; finished runs share the
bytes of four files by hard links), then opens the page in Chromium. The newest run continues: an iteration per second
is appended meanwhile. Seconds from the navigation to the first contentful paint, the page's header and the charts, of
a server that has just been started and of one that has shown the run before; milliseconds of an update,
from the browser's request to the end of drawing, and from a click on a tab to its blocks; seconds of opening a
comparison of four runs.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from helpers.chromium import Chromium  # noqa: E402
from helpers.monitor_runs import CONFIG, write_journal  # noqa: E402

from rl_core.storage.append_log import encode_checked_line  # noqa: E402

PORT = 4390
SPACING = 100  # seconds from one run to the next
START = int(time.time()) - 200 * SPACING
DISTINCT = 4  # files of metrics
STAGES = ("prepare_data", "sft", "reward_model", "evaluate", "analyze", "promote")
NAMES = (
    *(
        f"reward/{name}"
        for name in ("mean", "std", "task", "learned", "weighted/task", "weighted/learned", "alarm")
    ),
    *(
        f"train/{name}"
        for name in ("success_rate", "loss", "grad_norm", "turns", "action_tokens", "learning_rate")
    ),
    *(
        f"policy/{name}"
        for name in (
            "update_kl",
            "entropy",
            "clip_fraction",
            "sampler_kl",
            "ratio_mean",
            "ratio_max",
        )
    ),
    *(
        f"tool/{name}"
        for name in ("calls", "misuse_rate", "share/zoom", "share/scan", "share/count")
    ),
    *(
        f"perf/{name}"
        for name in ("tokens_per_second", "step_seconds", "rollout_seconds", "update_seconds")
    ),
    *(f"curriculum/{name}" for name in ("stage", "stage_iterations", "window_filled")),
    *(f"train/success_rate_by_level/level_{number}" for number in range(10)),
    *(f"reward/correlation/part_{number}" for number in range(10)),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--iterations", type=int, default=10_000)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--pictures", type=Path, help="folder for a screenshot of each tab")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="live-page-") as folder:
        live = make_store(Path(folder), options.runs, options.iterations)
        results: dict[str, Any] = {
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "load": os.getloadavg()[0],
            "runs": options.runs,
            "iterations": options.iterations,
            "metrics": len(NAMES),
        }
        with serve_folder(Path(folder)) as address, append_iterations(live, options.iterations):
            results["fresh_server_s"] = measure_first_paint(address)
            results["warm_server_s"] = measure_first_paint(address)
            results["update_ms"] = measure_updates(address)
            print(json.dumps(results, indent=1), file=sys.stderr, flush=True)
            results |= {"actions_ms": measure_tab_clicks(address, options.pictures)}
    print(json.dumps(results, indent=1))
    if options.output:
        options.output.write_text(json.dumps(results, indent=1) + "\n")


# --------------------------------------------------------------------------------------------------------- the folder


def make_row(step: int, draw: random.Random) -> dict[str, float]:
    """Make the metrics of one iteration: curves that rise or fall with noise."""
    share = 1 - math.exp(-step / 2000)
    metrics = {
        name: share * (0.4 + 0.01 * number) + 0.05 * draw.random()
        for number, name in enumerate(NAMES)
    }
    return metrics | {"reward/alarm": 0.0}


def make_store(output: Path, runs: int, iterations: int) -> Path:
    """`runs` runs of a pipeline; returns the journal of the newest one's policy, which is left running."""
    files = []
    for number in range(min(DISTINCT, runs)):
        draw = random.Random(number)
        path = output / f".metrics-{number}.jsonl"
        with path.open("wb") as file:
            for step in range(1, iterations + 1):
                when = (START + step) * 1000
                file.write(
                    encode_checked_line(
                        {"step": step, "time": when, "metrics": make_row(step, draw)}
                    )
                )
        files.append(path)
    for number in range(runs):
        live = _make_run(
            output, number, files[number % len(files)], iterations, is_last=number == runs - 1
        )
    return live


def _make_run(output: Path, number: int, metrics: Path, iterations: int, *, is_last: bool) -> Path:
    home = output / "demo"
    begun = START + SPACING * number
    started = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(begun))
    parent = home / "runs" / started.replace(" ", "-").replace(":", "-")
    texts = [{"op": "text", "name": "config.json", "text": json.dumps(CONFIG)}]
    texts.append(
        {"op": "tags", "tags": {"result": "sft 59.0%; policy 97.8%; version 2 of demo promoted"}}
    )
    ended = None if is_last else begun + 90
    load = [
        (index, 5 * index, {"system/process_cpu_percentage": 100.0 + index}) for index in range(200)
    ]
    write_journal(
        parent, f"demo · {started}", started=begun, ended=ended, events=texts, metrics=load
    )
    for position, stage in enumerate(STAGES):
        rows = [(step, step / 10, {"train/loss": 2.0 / step}) for step in range(1, 100)]
        folder = home / "stages" / stage / f"{number:04x}.tracking"
        write_journal(
            folder,
            stage,
            started=begun + position,
            ended=begun + position + 1,
            parent=parent,
            metrics=rows,
        )
    folder = home / "stages/policy" / f"{number:04x}.tracking"
    write_journal(
        folder,
        "policy",
        started=begun + 10,
        ended=ended,
        parent=parent,
        events=[{"op": "params", "params": {"iterations": str(2 * iterations)}}],
    )
    target = folder / "metrics.jsonl"
    target.unlink()
    if is_last:
        target.write_bytes(metrics.read_bytes())
    else:
        os.link(metrics, target)
    if is_last:
        record = {
            "started": started,
            "status": "running",
            "pid": os.getpid(),
            "host": platform.node(),
        }
        (home / "run.json").write_text(json.dumps(record))
    return target


@contextmanager
def append_iterations(path: Path, iterations: int) -> Iterator[None]:
    """Append one iteration per second."""
    ended = threading.Event()

    def append() -> None:
        draw, step = random.Random(9), iterations
        while not ended.wait(1.0):
            step += 1
            with path.open("ab") as file:
                file.write(
                    encode_checked_line(
                        {
                            "step": step,
                            "time": (START + step) * 1000,
                            "metrics": make_row(step, draw),
                        }
                    )
                )

    thread = threading.Thread(target=append, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


# --------------------------------------------------------------------------------------------------------- the browser


@contextmanager
def serve_folder(output: Path) -> Iterator[str]:
    """Serve the folder by `posttrain ui --live`; yield its address."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [
        sys.executable,
        "-m",
        "posttrain.cli.main",
        "ui",
        "--live",
        "--output",
        str(output),
        "--port",
        str(PORT),
    ]
    process = subprocess.Popen(
        command, cwd=output, env=environment, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        yield process.stdout.readline().split()[1]
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(30)


CHARTS = "[...document.querySelectorAll('.pt-panel .pt-chart svg polyline')].length"
DRAWN = f"{CHARTS} > 6"
HOOK = """(() => {  // each update: from the request to the end of drawing, and to the frame in which it is seen
  window.updates = [];
  document.addEventListener('posttrain-update', ({detail: one}) => requestAnimationFrame(() => setTimeout(() => {
    if (one.blocks) window.updates.push({whole: one.drawn - one.begun, answer: one.arrived - one.begun,
      drawing: one.drawn - one.arrived, seen: performance.now() - one.begun}); })));
})()"""


MARK = f"""document.addEventListener('posttrain-update', () => requestAnimationFrame(() => setTimeout(() => {{
  if ({CHARTS} > 6) window.chartsSeen ??= performance.now() / 1000; }})))"""


def measure_first_paint(address: str) -> dict[str, float]:
    """Return seconds since the navigation; for the charts, those of the frame in which they are seen."""
    with Chromium("about:blank", (1400, 1000), first=MARK) as page:
        page.call("Page.navigate", url=address)
        charts = page.wait("window.chartsSeen", 120)
        controls = page.wait(
            "document.querySelector('#pt-controls input') && performance.now() / 1000", 120
        )
        first = page.run(
            "performance.getEntriesByName('first-contentful-paint')[0].startTime / 1000"
        )
        assert page.errors == [], page.errors
        return {
            "first_paint": round(first, 2),
            "charts": round(charts, 2),
            "controls": round(controls, 2),
        }


def measure_updates(address: str, count: int = 8) -> dict[str, Any]:
    """Return the milliseconds of updates while the run continues."""
    with Chromium(address, (1400, 1000)) as page:
        page.wait(DRAWN, 120)
        page.run(HOOK)
        page.wait(f"window.updates.length >= {count}", 120)
        updates = page.run("window.updates")
        size = page.run(
            "fetch('view?tab=overview').then(answer => answer.text()).then(text => text.length)"
        )
        parts = {name: sorted(round(update[name]) for update in updates) for name in updates[0]}
        return {**parts, "kilobytes_in_full": round(size / 1000)}


def measure_tab_clicks(address: str, pictures: Path | None) -> dict[str, float]:
    """Return the milliseconds from a click on a tab to its last block."""
    took = {}
    with Chromium(address, (1400, 1000)) as page:
        page.wait(DRAWN, 120)
        for tab in ("Curves", "Rewards", "Tools", "System", "Overview"):
            script = f"""(async () => {{
              const begun = performance.now();
              [...document.querySelectorAll('button[role=tab]')].find(b => b.textContent.trim() == '{tab}').click();
              const at = '.pt-panel[data-tab={tab.lower()}] .pt-block';
              const drawn = () => [...document.querySelectorAll(at)].some(e => e.offsetParent);
              while (!drawn()) await new Promise(r => setTimeout(r, 5));
              return performance.now() - begun;
            }})()"""
            took[tab.lower()] = round(page.run(script))
            if pictures:
                pictures.mkdir(parents=True, exist_ok=True)
                page.picture(pictures / f"{tab.lower()}.png")
    return {**took, **measure_comparison(address)}


def measure_comparison(address: str) -> dict[str, float]:
    """Return the seconds from opening an address that compares four runs to their charts."""
    texts = [
        time.strftime("%Y-%m-%d-%H-%M-%S", time.gmtime(START + SPACING * number))
        for number in (0, 1, 2)
    ]
    chosen = ",".join(f"demo/{text}" for text in texts)
    with Chromium(f"{address}/?compare={chosen}&tab=overview", (1400, 1000)) as page:
        seconds = page.wait(
            "[...document.querySelectorAll('.pt-chart')].some(c => c.querySelectorAll('.pt-key').length > 3) && "
            "performance.now() / 1000",
            120,
        )
        return {"open_comparing_four_s": round(seconds, 2)}


if __name__ == "__main__":
    main()
