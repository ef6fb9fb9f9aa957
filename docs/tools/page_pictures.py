"""Pictures of the pages for the documents, from a finished run of the demo's deployment, in Chromium.

    posttrain up --detach && prefect deployment run post-training/demo      # with Prefect's address, as `up` says it
    posttrain down && python docs/tools/page_pictures.py [--output outputs] [--pictures tests/benchmarks/pictures]

Serves the output folder with `posttrain up` and `posttrain ui --live` on ports of its own, opens each page at 1,400 px,
some also at 420 px and dark, and writes PNGs with 128 colours; of a run that waits for approval the form. Needs the
extra `monitor`, Pillow and Chromium.
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
from typing import Any, NamedTuple

from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from helpers.chromium import Chromium  # noqa: E402

from flows.runtime.prefect_access import (  # noqa: E402
    PREFECT_FIRST_PAGE,
    build_basic_auth_header,
    load_or_create_password,
)
from rl_core.json_client import fetch_json  # noqa: E402

MLFLOW_PORT, PREFECT_PORT, MONITOR_PORT = 5180, 4380, 7980
COLOURS = 128
SIZES = {"": (1400, 1000), "_phone": (420, 900)}


class Shot(NamedTuple):
    """A picture of a page."""

    url: str
    ready: str  # JavaScript that is true once the page is drawn
    top: str = ""  # selector of what is scrolled to
    all_sizes: bool = False  # at 1,400 and 420 px, light and dark; Prefect's pages are always dark
    size: str = ""  # of SIZES, where it is taken once; its name ends so
    press: str = ""  # words of a button that is pressed then
    opened: str = ""  # as `ready`, for what it opens


def main() -> None:
    """Write every picture."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, default=Path("outputs"))
    parser.add_argument("--pictures", type=Path, default=ROOT / "tests/benchmarks/pictures")
    parser.add_argument("--pipeline", default="demo", help="whose newest run is shown")
    parser.add_argument("--only", default="", help="pages whose names begin so")
    options = parser.parse_args()
    output = options.output.resolve()
    options.pictures.mkdir(parents=True, exist_ok=True)
    with served(output) as addresses:
        password = load_or_create_password(output)
        login = (
            "location.protocol == 'http:' && "
            f"localStorage.setItem('prefect-password', btoa({password!r}))"
        )
        for name, shot in pages(output, options.pipeline, addresses).items():
            if not name.startswith(options.only):
                continue
            for size in SIZES if shot.all_sizes else (shot.size,):
                for dark in (False, True) if shot.all_sizes else (False,):
                    whole = f"{name}{size}" if shot.all_sizes else name
                    path = options.pictures / f"{whole}{'_dark' if dark else ''}.png"
                    try:
                        picture(
                            shot,
                            SIZES[size],
                            dark,
                            path,
                            login if name.startswith("prefect") else "",
                        )
                        print(path.name, path.stat().st_size, flush=True)
                    except (TimeoutError, AssertionError) as error:
                        print(f"{path.name}: {str(error)[:600]}", file=sys.stderr, flush=True)


def pages(output: Path, pipeline: str, addresses: dict[str, str]) -> dict[str, Shot]:
    """By name of the picture."""
    runs = stage_runs(output, pipeline)
    mlflow, monitor = addresses["mlflow"], addresses["live"]
    page = f"{mlflow}/#/experiments/{runs['experiment']}"
    table = f"{page}/runs?viewStateShareKey=posttrain&workflowType=machine_learning"
    charts = f"{page}/runs?compareRunsMode=CHART&viewStateShareKey=posttrain-policy&workflowType=machine_learning"
    report = max(output.glob(f"{pipeline}/stages/analyze/*/report.html"), key=os.path.getmtime)

    def run(name: str, tab: str = "") -> str:
        return f"{page}/runs/{runs[name]}{tab}?workflowType=machine_learning"

    drawn = "document.querySelectorAll('.pt-panel .pt-chart svg polyline').length > 6"
    controls = f"{drawn} && !!document.querySelector('#pt-controls input')"
    plotted = "document.querySelectorAll('.js-plotly-plot').length > 2"
    return {
        "monitor": Shot(f"{monitor}/", controls, all_sizes=True),
        "monitor_curves": Shot(f"{monitor}/?tab=curves", controls),
        "report": Shot(report.as_uri(), "!!document.querySelector('#verdict')", all_sizes=True),
        "report_measures": Shot(
            report.as_uri(), "!!document.querySelector('#verdict')", "#overview"
        ),
        "mlflow_runs": Shot(table, said("result")),
        "mlflow_run": Shot(run(""), said("Report"), all_sizes=True),
        "mlflow_policy": Shot(charts, plotted),
        "mlflow_traces": Shot(run("evaluate", "/traces"), said("success")),
        "mlflow_version": Shot(
            f"{mlflow}/#/models/{pipeline}/versions/2?workflowType=machine_learning",
            said("promoted"),
        ),
        **prefect_pages(
            addresses["prefect"].removesuffix(PREFECT_FIRST_PAGE), load_or_create_password(output)
        ),
    }


def prefect_pages(prefect: str, auth: str) -> dict[str, Shot]:
    """Pages of the newest finished flow run of the demo, of its result, and the deployment's form."""

    def api(path: str, body: Any = None) -> Any:
        return fetch_json(
            f"{prefect}/api{path}", body, timeout_s=60, headers=build_basic_auth_header(auth)
        )

    finished = {
        "flow_runs": {"state": {"type": {"any_": ["COMPLETED"]}}},
        "flows": {"name": {"any_": ["post-training"]}},
    }
    run = api("/flow_runs/filter", {**finished, "sort": "START_TIME_DESC", "limit": 1})[0]
    made = {"artifacts": {"key": {"like_": "-result"}, "flow_run_id": {"any_": [run["id"]]}}}
    artifact = api("/artifacts/filter", made)[0]["id"]
    deployment = api("/deployments/name/post-training/demo")["id"]
    paused = api(
        "/flow_runs/filter", {"flow_runs": {"state": {"type": {"any_": ["PAUSED"]}}}, "limit": 1}
    )
    return {
        **(approval_form(f"{prefect}/runs/flow-run/{paused[0]['id']}") if paused else {}),
        "prefect_run": Shot(
            f"{prefect}/runs/flow-run/{run['id']}",
            f"{said(run['name'])} && !!document.querySelector('canvas')",
        ),
        "prefect_result": Shot(f"{prefect}/artifacts/artifact/{artifact}", said("success (95")),
        "prefect_result_phone": Shot(
            f"{prefect}/artifacts/artifact/{artifact}", said("success (95"), size="_phone"
        ),
        "prefect_form": Shot(
            f"{prefect}/deployments/deployment/{deployment}/run", said("SFT: Learning rate")
        ),
    }


def approval_form(page: str) -> dict[str, Shot]:
    """The form of a flow run that waits for a person; on a phone its button is in a menu."""
    has_button = (
        "[...document.querySelectorAll('button')].some(e => e.innerText.trim() == 'Resume')"
    )
    opened = f"{said('Reviewer')} && {said('Decision')}"
    return {"prefect_approval": Shot(page, has_button, press="Resume", opened=opened)}


def said(text: str) -> str:
    """JavaScript that is true where the page has this text."""
    return f"document.body.innerText.includes({text!r})"


def stage_runs(output: Path, pipeline: str) -> dict[str, str]:
    """MLflow's newest run of a pipeline ("") and of each of its stages, and the experiment."""
    with closing(sqlite3.connect(f"file:{output}/mlflow/mlflow.db?mode=ro", uri=True)) as store:
        rows = store.execute(
            "SELECT r.run_uuid, r.experiment_id, COALESCE(t.value, '') FROM runs r LEFT JOIN tags t "
            "ON t.run_uuid = r.run_uuid AND t.key = 'stage' JOIN experiments e ON e.experiment_id = r.experiment_id "
            "WHERE e.name = ? ORDER BY r.start_time",
            (pipeline,),
        ).fetchall()
    return {name: run for run, _, name in rows} | {"experiment": str(rows[0][1])}


@contextmanager
def served(output: Path) -> Iterator[dict[str, str]]:
    """Addresses of the pages by their names."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    posttrain = [sys.executable, "-m", "posttrain.cli.main"]
    ports = ["--mlflow-port", str(MLFLOW_PORT), "--prefect-port", str(PREFECT_PORT)]
    up = [*posttrain, "up", "--detach", "--output", str(output), *ports]
    monitor = [*posttrain, "ui", "--live", "--output", str(output), "--port", str(MONITOR_PORT)]
    process = None
    try:
        output_text = subprocess.run(
            up, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True
        ).stdout
        process = subprocess.Popen(monitor, env=environment, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        output_text += process.stdout.readline()
        yield dict(re.findall(r"^(\w+)\s+(http\S+)", output_text, re.MULTILINE))
    finally:
        if process is not None:
            process.send_signal(signal.SIGINT)
            process.wait(60)
        subprocess.run(
            [*posttrain, "down", "--output", str(output)], cwd=ROOT, env=environment, check=True
        )


def picture(shot: Shot, size: tuple[int, int], dark: bool, path: Path, first: str = "") -> None:
    """One picture of the upper part of a page."""
    with Chromium("about:blank", size, dark, first=first) as page:
        page.call("Page.navigate", url=shot.url)
        page.wait("!!document.body", 30)
        page.wait(shot.ready, 90)
        if shot.press:
            page.run(
                f"[...document.querySelectorAll('button')].find(e => e.innerText.trim() == {shot.press!r}).click()"
            )
            page.wait(shot.opened, 30)
        if shot.top:
            page.run(f"document.querySelector({shot.top!r}).scrollIntoView()")
        page.run("new Promise(done => setTimeout(done, 2500))")
        page.picture(path)
    with Image.open(path) as image:
        image.convert("RGB").quantize(COLOURS, method=Image.Quantize.MEDIANCUT).save(
            path, optimize=True
        )


if __name__ == "__main__":
    main()
