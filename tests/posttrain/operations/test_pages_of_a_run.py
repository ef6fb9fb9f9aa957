"""Pages of Prefect and MLflow about a run of a deployment, checked in a real browser."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from helpers import chromium
from helpers.team import ROOT, Team, wait_for

from flows.parameters import MAIN_SETTINGS, read_main_values
from flows.runtime.prefect_access import load_or_create_password
from tasks.config import load_settings
from tasks.tracking import Tracking

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(chromium.PROGRAM is None, reason="no Chromium here"),
]
CONFIG = ROOT / "configs/test.yaml"
DEPLOYMENT = {
    "name": "demo",
    "entrypoint": "flows.post_training.post_training",
    "work_pool": {"name": "posttrain"},
    "concurrency_limit": 1,
}
TEXT = "(document.body || {innerText: ''}).innerText"


class RunPages(Team):
    """The servers, a minimal deployment of the pipeline, and two finished runs of it."""

    def __init__(self, folder: Path):
        super().__init__(folder, "")
        self.main = read_main_values(load_settings(CONFIG))
        parameters = {
            "settings": str(CONFIG),
            "main": self.main,
            "overrides": [f"output={self.output}"],
        }
        deployments = {
            "name": "pages",
            "pull": None,
            "deployments": [{**DEPLOYMENT, "parameters": parameters}],
        }
        self.declare(yaml.safe_dump(deployments))
        (self.project / "deployments" / "automations.yaml").write_text("automations: []")
        self.flow_run = ""

    def run_twice(self) -> None:
        """Run the deployment twice with settings changed in the form."""
        self.up("--detach")
        self.deployment = self.api("/deployments/name/post-training/demo")["id"]
        self.flow_run = self.run_deployment(sft_learning_rate=0.004)
        self.run_deployment(
            sft_learning_rate=0.004, kl_coef=0.01
        )  # the second run shows what differs from the first

    def run_deployment(self, **settings: float) -> str:
        """Run the deployment with settings changed in the form; return the id of the completed flow run."""
        parameters = {"parameters": {"main": {**self.main, **settings}}}
        flow_run = self.api(f"/deployments/{self.deployment}/create_flow_run", parameters)["id"]
        wait_for(
            lambda: self.state_of(flow_run) not in ("SCHEDULED", "PENDING", "RUNNING"),
            "the run's end",
        )
        assert self.state_of(flow_run) == "COMPLETED"
        return flow_run

    def list_artifacts(self) -> list[dict]:
        return self.api(
            "/artifacts/filter", {"artifacts": {"flow_run_id": {"any_": [self.flow_run]}}}
        )

    def find_experiment_id(self) -> str:
        return Tracking(f"http://127.0.0.1:{self.mlflow}", self.output, "test").experiment_id

    def find_run_id(self, stage: str) -> str:
        """Find MLflow's id of a stage's run; "" = the pipeline's run."""
        rows = Tracking(f"http://127.0.0.1:{self.mlflow}", self.output, "test").list_runs(limit=50)
        return next(row.run_id for row in rows if row.tags.get("stage", "") == stage)

    def open_prefect(self, path: str) -> chromium.Chromium:
        password = repr(load_or_create_password(self.output))
        login = (
            "location.protocol == 'http:' && localStorage.setItem('prefect-password', "
            f"btoa({password}))"
        )
        return chromium.Chromium(
            f"http://127.0.0.1:{self.prefect}{path}", (1400, 1000), first=login
        )

    def open_mlflow(self, path: str) -> chromium.Chromium:
        return chromium.Chromium(f"http://127.0.0.1:{self.mlflow}/#{path}", (1800, 1600))


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    pages = RunPages(tmp_path_factory.mktemp("pages"))
    try:
        pages.run_twice()
        yield pages
    finally:
        pages.call("down")


def test_form_shows_config_values_and_main_settings_first(pages):
    with pages.open_prefect(f"/deployments/deployment/{pages.deployment}/run") as page:
        page.wait(f"{TEXT}.includes('Sft Learning Rate')", 120)
        titles = [name.replace("_", " ").title() for name in MAIN_SETTINGS]
        text = page.run(TEXT).partition("Parameters")[2]
        positions = [text.index(f"\n{title} (Optional)") for title in titles]
        assert (
            len(MAIN_SETTINGS) == 10
            and positions == sorted(positions)
            and positions[-1] < text.index("\noverrides (Optional)")
        )
        values = page.run("[...document.querySelectorAll('input, textarea')].map(e => e.value)")
        numbers = [f"{value:g}" for name, value in pages.main.items() if name != "algorithm"]
        first = values.index(str(CONFIG)) + 1
        assert values[first : first + len(numbers)] == numbers
        assert pages.main["algorithm"] in text


def test_flow_run_name_has_config_and_changes(pages):
    with pages.open_prefect(f"/runs/flow-run/{pages.flow_run}") as page:
        page.wait(f"{TEXT}.includes('test · sft learning_rate=0.004')", 120)
        assert page.wait("!!document.querySelector('canvas')", 60)  # the graph


def test_artifacts_of_a_flow_run(pages):
    artifacts = pages.list_artifacts()
    stages = load_settings(CONFIG).stages.active
    keys = [artifact["key"] for artifact in artifacts]
    assert sorted(keys) == sorted(
        ["test-result", *(f"test-{name.replace('_', '-')}" for name in stages)]
    )
    assert all(artifact["description"] and artifact["type"] == "markdown" for artifact in artifacts)
    [result] = [artifact for artifact in artifacts if artifact["key"] == "test-result"]
    assert "policy" in result["description"] and "%" in result["description"]
    with pages.open_prefect(f"/artifacts/artifact/{result['id']}") as page:
        page.wait(f"{TEXT}.includes('success (95% interval)')", 120)
        rows = page.run(
            "[...document.querySelectorAll('table tbody tr')].map(e => e.innerText.split(/\\t/)[0].trim())"
        )
        assert [row.replace(" ", "_") for row in rows if row.replace(" ", "_") in stages] == list(
            stages
        )
        links = page.run(
            "[...document.querySelectorAll('.artifact-data-markdown a')].map(e => e.innerText.trim())"
        )
        assert {"MLflow run", "Report", "Curves of policy", "Episodes", "Settings"} <= set(links)
        assert page.wait(
            "[...document.querySelectorAll('img')].some(e => e.src.startsWith('data:') && e.naturalWidth > 500)"
        )


def test_table_of_runs_shows_changes_and_success(pages):
    experiment = pages.find_experiment_id()
    with pages.open_mlflow(
        f"/experiments/{experiment}/runs?viewStateShareKey=posttrain&workflowType=machine_learning"
    ) as page:
        page.wait(f"{TEXT}.includes('result') && {TEXT}.includes('test ·')", 120)
        heads = page.run(  # from left to right, unlike their order in the document
            "[...document.querySelectorAll('[role=columnheader]')].map(e => [e.getBoundingClientRect().left, "
            "e.innerText.trim()]).sort((a, b) => a[0] - b[0]).map(e => e[1])"
        )
        columns = ["result", "changed", "success_rate/base", "success_rate/sft"]
        positions = [heads.index(name) for name in columns if name in heads]
        assert {"result", "changed"} <= set(heads) and positions == sorted(positions)
        assert page.wait(f"{TEXT}.includes('kl_coef')")
        assert page.wait(
            f"/sft [\\d.]+% \\[/.test({TEXT})"
        )  # success with its interval, in the column `result`


def test_curves_begin_with_the_main_metrics(pages):
    with pages.open_mlflow(
        f"/experiments/{pages.find_experiment_id()}/runs/{pages.find_run_id('')}?workflowType=machine_learning"
    ) as page:
        page.wait(f"{TEXT}.includes('Curves of policy')", 120)
        link = "[...document.querySelectorAll('a')].find(e => e.innerText.trim() == 'Curves of policy')"
        page.run(f"location.href = {link}.href")  # a click opens another window
        page.wait("document.querySelectorAll('.js-plotly-plot').length > 4", 120)
        text = page.run(TEXT)
        names = (
            "train/success_rate",
            "reward/mean",
            "policy/update_kl",
            "policy/entropy",
            "train/completion_tokens",
        )
        positions = [text.index(name) for name in names if name in text]
        assert (
            len(positions) >= 4 and positions == sorted(positions) and "window_filled" not in text
        )
        assert page.run("location.hash").count("machine_learning") == 1


def test_run_page_links_results_and_stages(pages):
    run_id = pages.find_run_id("")
    page_of_run = (
        f"/experiments/{pages.find_experiment_id()}/runs/{run_id}?workflowType=machine_learning"
    )
    with pages.open_mlflow(page_of_run) as page:
        page.wait(f"{TEXT}.includes('Curves of policy')", 120)
        links = page.run(
            "Object.fromEntries([...document.querySelectorAll('a')].map(e => [e.innerText.trim(), e.href]))"
        )
        for name in (
            "Report",
            "Pipeline",
            "Success by level",
            "Episodes",
            "Settings",
            "policy",
            "reward model",
        ):
            assert f"127.0.0.1:{pages.mlflow}/#/experiments/" in links[name], name
            assert "workflowType=machine_learning" in links[name]
        text = page.run(TEXT)
        assert text.index("Report") < text.index("sft") < text.index("Show more")
        count = int(text.partition("Parameters (")[2].partition(")")[0])
        assert 0 < count < 120  # settings that were changed, not every default


def test_columns_of_traces(pages):
    run_path = f"/experiments/{pages.find_experiment_id()}/runs/{pages.find_run_id('evaluate')}"
    traces = f"{run_path}/traces?workflowType=machine_learning"
    with pages.open_mlflow(traces) as page:
        page.wait(f"{TEXT}.includes('success') && {TEXT}.includes('reward')", 120)
        text = page.run(TEXT)
        assert all(f"\n{name}\n" in text for name in ("level", "model", "success", "reward"))


def test_version_page_shows_origin_and_gate(pages):
    with pages.open_mlflow("/models/test/versions/2?workflowType=machine_learning") as page:
        page.wait(f"{TEXT}.includes('Gate:')", 120)
        text = page.run(TEXT)
        assert "policy from version 1" in text and "iterations" in text and "held-out" in text
        assert "AI Gateway" not in text  # the menu of model training
