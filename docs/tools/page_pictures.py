"""Pictures of the pages for the documents, from a finished run of the demo, in Chromium.

    make demo && python docs/tools/page_pictures.py [--output outputs] [--pictures tests/benchmarks/pictures]

Serves the output folder with `posttrain ui` and `posttrain monitor` on ports of its own, opens each page at 1,400 and
420 px, light and dark, and writes PNGs with 128 colours. Needs the extra `monitor`, Pillow and Chromium.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from helpers.chromium import Chromium  # noqa: E402

MLFLOW_PORT, PREFECT_PORT, MONITOR_PORT = 5180, 4380, 7980
COLOURS = 128
CLOSE_ASSISTANT = (1363, 36)  # the cross of the panel that MLflow opens at the first visit, at 1,400 px
SIZES = {"": (1400, 1000), "_phone": (420, 900)}


def main() -> None:
    """Write every picture."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, default=Path("outputs"))
    parser.add_argument("--pictures", type=Path, default=ROOT / "tests/benchmarks/pictures")
    parser.add_argument("--only", default="", help="pages whose names begin so")
    options = parser.parse_args()
    output = options.output.resolve()
    options.pictures.mkdir(parents=True, exist_ok=True)
    with served(output) as addresses:
        for name, (url, ready, top) in pages(output, addresses).items():
            if name.startswith(options.only):
                is_ours = not name.startswith("mlflow")  # whose pages are made for wide screens, light unless switched
                for size, pixels in SIZES.items() if is_ours else (("", SIZES[""]),):
                    for dark in (False, True) if is_ours else (False,):
                        path = options.pictures / f"{name}{size}{'_dark' if dark else ''}.png"
                        try:
                            picture(url, ready, top, pixels, dark, path)
                            print(path.name, path.stat().st_size, flush=True)
                        except (TimeoutError, AssertionError) as error:
                            print(f"{path.name}: {str(error)[:600]}", file=sys.stderr, flush=True)


def pages(output: Path, addresses: dict[str, str]) -> dict[str, tuple[str, str, str]]:
    """By name of the picture: address, what is true once the page is drawn, selector of what is scrolled to."""
    runs = stage_runs(output)
    mlflow, monitor = addresses["MLflow"], addresses["monitor"]
    page = f"{mlflow}/#/experiments/{runs['experiment']}"
    table = f"{page}/runs?viewStateShareKey=posttrain&workflowType=machine_learning"
    report = next(output.glob("demo/stages/analyze/*/report.html"))

    def run(name: str, tab: str = "") -> str:
        return f"{page}/runs/{runs[name]}{tab}?workflowType=machine_learning"

    drawn = "document.querySelectorAll('.pt-panel .pt-chart svg polyline').length > 6"
    return {
        "monitor": (f"{monitor}/", drawn, ""),
        "monitor_curves": (f"{monitor}/?tab=curves", drawn, ""),
        "report": (report.as_uri(), "!!document.querySelector('#verdict')", ""),
        "report_measures": (report.as_uri(), "!!document.querySelector('#verdict')", "#overview"),
        "mlflow_runs": (table, "document.body.innerText.includes('sft 5')", ""),
        "mlflow_run": (run("demo"), "document.body.innerText.includes('Report')", ""),
        "mlflow_policy": (
            run("policy", "/model-metrics"),
            "document.querySelectorAll('.js-plotly-plot').length > 2",
            "",
        ),
        "mlflow_traces": (run("evaluate", "/traces"), "document.body.innerText.includes('digit')", ""),
        "mlflow_version": (f"{mlflow}/#/models/demo/versions/2", "document.body.innerText.includes('promoted')", ""),
    }


def stage_runs(output: Path) -> dict[str, str]:
    """MLflow's run of the demo and of each of its stages, and the experiment."""
    with closing(sqlite3.connect(f"file:{output}/mlflow/mlflow.db?mode=ro", uri=True)) as store:
        rows = store.execute(
            "SELECT r.run_uuid, r.experiment_id, COALESCE(t.value, 'demo') FROM runs r LEFT JOIN tags t "
            "ON t.run_uuid = r.run_uuid AND t.key = 'stage' ORDER BY r.start_time"
        ).fetchall()
    return {name: run for run, _, name in rows} | {"experiment": str(rows[0][1])}


@contextmanager
def served(output: Path) -> Iterator[dict[str, str]]:
    """Addresses of the pages by their names."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    posttrain = [sys.executable, "-m", "flows.cli.main"]
    ui = ["ui", "--output", str(output), "--mlflow-port", str(MLFLOW_PORT), "--prefect-port", str(PREFECT_PORT)]
    monitor = ["monitor", "--output", str(output), "--port", str(MONITOR_PORT)]
    processes, found = [], {}
    try:
        for command, wanted in ((ui, {"MLflow", "Prefect"}), (monitor, {"monitor"})):
            process = subprocess.Popen([*posttrain, *command], env=environment, stdout=subprocess.PIPE, text=True)
            processes.append(process)
            assert process.stdout is not None
            while not wanted <= set(found):
                if line := re.match(r"(\w+)\s+(http\S+)", process.stdout.readline()):
                    found[line[1]] = line[2]
        yield found
    finally:
        for process in processes:
            process.send_signal(signal.SIGINT)
            process.wait(60)


def picture(url: str, ready: str, top: str, size: tuple[int, int], dark: bool, path: Path) -> None:
    """One picture of the upper part of a page."""
    with Chromium("about:blank", size, dark) as page:
        page.call("Page.navigate", url=url)
        page.wait("!!document.body", 30)
        page.wait(ready, 90)
        if page.run("document.body.innerText.includes('MLflow Assistant')"):
            for kind in ("mousePressed", "mouseReleased"):
                x, y = CLOSE_ASSISTANT
                page.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
        if top:
            page.run(f"document.querySelector({top!r}).scrollIntoView()")
        page.run("new Promise(done => setTimeout(done, 1500))")
        page.picture(path)
    with Image.open(path) as image:
        image.convert("RGB").quantize(COLOURS, method=Image.Quantize.MEDIANCUT).save(path, optimize=True)


if __name__ == "__main__":
    main()
