"""Live page in a real browser during a real run: an empty folder, training, the finished run."""

import importlib.util
import json
import os
import subprocess
import sys
import time

import pytest
from helpers import ROOT, chromium
from helpers.monitor_runs import run_page

from tasks.config import load_settings

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(chromium.PROGRAM is None, reason="no Chromium here"),
    pytest.mark.skipif(
        importlib.util.find_spec("gradio") is None, reason="needs posttrain[monitor]"
    ),
]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def open_tab(page, name):
    page.run(
        "[...document.querySelectorAll('button[role=tab]')]"
        f".find(b => b.textContent.trim().toLowerCase() == '{name}').click()"
    )
    page.wait(f"!!document.querySelector('.pt-panel[data-tab={name}] .pt-block')")


def read_text(page, selector):
    return page.run(f"(document.querySelector({selector!r}) || {{innerText: ''}}).innerText")


def choose_option(page, label, option):
    """Choose from one of Gradio's lists as a person does: click into it, click an option."""

    def click(x, y):
        for kind in ("mousePressed", "mouseReleased"):
            page.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    centre = "(e => { const b = e.getBoundingClientRect(); return [b.left + 20, b.top + b.height / 2]; })"
    option_element = f"[...document.querySelectorAll('[role=option]')].find(e => e.textContent.includes({option!r}))"
    click(*page.run(f"{centre}(document.querySelector('input[aria-label={json.dumps(label)}]'))"))
    page.wait(f"!!{option_element}")
    click(*page.run(f"{centre}({option_element})"))


@pytest.fixture
def monitor(tmp_path):
    output = tmp_path / "out"
    output.mkdir()
    with run_page(output, 18860) as (url, _):
        yield output, url


@pytest.mark.timeout(600)
def test_page_follows_a_run_from_start_to_end(monitor):
    output, url = monitor
    with chromium.Chromium(url) as page:
        page.wait("!!document.body && document.body.innerText.includes('No runs here yet')")
        command = ["run", str(ROOT / "configs/test.yaml"), "--quiet", "--set", f"output={output}"]
        command += [
            "--set",
            "stages.policy.iterations=40",
            "--set",
            "tracking.system_metrics_seconds=1",
        ]
        run = subprocess.Popen(
            [sys.executable, "-m", "posttrain.cli.main", *command],
            cwd=output,
            env=ENVIRONMENT,
            stdout=subprocess.DEVNULL,
        )
        try:
            page.wait(
                "(document.querySelector('.pt-header .pt-badge') || {}).textContent == 'running'",
                240,
            )
            page.wait("document.querySelectorAll('.pt-panel .pt-chart polyline').length > 2", 240)
            assert run.wait(400) == 0
        finally:
            if run.poll() is None:
                run.kill()
        page.wait("document.querySelector('.pt-header .pt-badge').textContent == 'finished'")
        stages = load_settings(ROOT / "configs/test.yaml").stages.active
        finished = "document.querySelectorAll('.pt-panel[data-tab=overview] .pt-badge.good').length"
        page.wait(f"{finished} == {len(stages)}")

        (policy,) = (output / "test/stages/policy").glob("*/summary.json")
        rows = [
            json.loads(line) for line in (policy.parent / "metrics.jsonl").read_text().splitlines()
        ]
        rewards = [row["metrics"]["reward/mean"] for row in rows if "reward/mean" in row["metrics"]]
        assert "40 / 40" in read_text(page, ".pt-panel[data-tab=overview]")
        displayed = page.run(
            "[...document.querySelectorAll('.pt-chart')].find(c => c.querySelector('.pt-title b').dataset.metric"
            " == 'reward/mean').querySelector('.pt-legend b').textContent"
        )
        assert float(displayed) == pytest.approx(sum(rewards[-10:]) / 10, rel=1e-3)

        page.drag(".pt-chart .pt-plot", 0.3, 0.7)
        page.wait("Object.keys(posttrain.zoom).length == 1")
        zoom_before = page.run("JSON.stringify(posttrain.zoom)")
        page.run("window.firstChart = document.querySelector('.pt-chart'); 0")
        time.sleep(4)  # more than one tick
        assert page.run("JSON.stringify(posttrain.zoom)") == zoom_before
        assert page.run(
            "window.firstChart === document.querySelector('.pt-chart') && window.firstChart.isConnected"
        )

        open_tab(page, "trajectories")
        (recent,) = (output / "test/stages/policy").glob("*/recent_rollouts.jsonl")
        newest = json.loads(recent.read_text().splitlines()[-1])
        assert newest["prompt"] in read_text(page, ".pt-row.chosen") and newest["iteration"] == 39
        assert newest["turns"][0]["action"].split()[0] in read_text(page, ".pt-episode")
        page.wait("(document.querySelector('.pt-question img') || {}).naturalWidth > 50")
        for name, words in (
            ("curves", "Loss in training"),
            ("rewards", "Weighted parts"),
            ("tools", "misuse"),
            ("curriculum", "medium"),
            ("system", "Throughput"),
            ("export", "metrics.csv"),
        ):
            open_tab(page, name)
            assert words in read_text(page, f".pt-panel[data-tab={name}]")

        second_command = [*command, "--set", "stages.policy.iterations=20"]
        subprocess.run(
            [sys.executable, "-m", "posttrain.cli.main", *second_command],
            cwd=output,
            env=ENVIRONMENT,
            stdout=subprocess.DEVNULL,
            check=True,
            timeout=240,
        )
        first, second = (
            f"{folder.name[:10]} {folder.name[11:].replace('-', ':')}"
            for folder in sorted((output / "test/runs").iterdir())
        )
        open_tab(page, "overview")
        page.wait(f"document.querySelector('.pt-header .pt-name').textContent == 'test · {second}'")
        choose_option(page, "Compare with", first)
        lines = (
            "[...document.querySelectorAll('.pt-chart')].filter(c => c.querySelector('.pt-title b').dataset.metric"
            " == 'reward/mean').flatMap(c => [...c.querySelectorAll('.pt-key span')].map(e => e.textContent))"
        )
        page.wait(f"{lines}.length == 2")
        assert page.run(lines) == [second[5:16], first[5:16]]

        assert page.errors == []
        external_requests = [
            address for address in page.requests if not address.startswith((url, "data:", "blob:"))
        ]
        assert external_requests == []
