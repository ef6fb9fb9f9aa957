"""Pages of Prefect and MLflow about a run of a deployment, in a real browser: each of their promises is looked at."""

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


class Pages(Team):
    """The servers, a deployment of the pipeline as small as it can be, and two finished runs of it."""

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

    def play(self) -> None:
        """Two runs that change settings in the form."""
        self.up("--detach")
        self.deployment = self.api("/deployments/name/post-training/demo")["id"]
        self.flow_run = self.finished(sft_learning_rate=0.004)
        self.finished(
            sft_learning_rate=0.004, kl_coef=0.01
        )  # what differs from the run before is told of the second one

    def finished(self, **changed: float) -> str:
        """The id of a flow run with settings changed in the form, once it is completed."""
        asked = {"parameters": {"main": {**self.main, **changed}}}
        flow_run = self.api(f"/deployments/{self.deployment}/create_flow_run", asked)["id"]
        wait_for(
            lambda: self.state_of(flow_run) not in ("SCHEDULED", "PENDING", "RUNNING"),
            "the run's end",
        )
        assert self.state_of(flow_run) == "COMPLETED"
        return flow_run

    def artifacts(self) -> list[dict]:
        return self.api(
            "/artifacts/filter", {"artifacts": {"flow_run_id": {"any_": [self.flow_run]}}}
        )

    def experiment(self) -> str:
        return Tracking(f"http://127.0.0.1:{self.mlflow}", self.output, "test").experiment_id

    def run_of(self, stage: str) -> str:
        """MLflow's id of a stage's run; "" = the pipeline's."""
        rows = Tracking(f"http://127.0.0.1:{self.mlflow}", self.output, "test").list_runs(limit=50)
        return next(row.run_id for row in rows if row.tags.get("stage", "") == stage)

    def in_prefect(self, path: str) -> chromium.Chromium:
        login = f"location.protocol == 'http:' && localStorage.setItem('prefect-password', btoa({load_or_create_password(self.output)!r}))"
        return chromium.Chromium(
            f"http://127.0.0.1:{self.prefect}{path}", (1400, 1000), first=login
        )

    def in_mlflow(self, path: str) -> chromium.Chromium:
        return chromium.Chromium(f"http://127.0.0.1:{self.mlflow}/#{path}", (1800, 1600))


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    pages = Pages(tmp_path_factory.mktemp("pages"))
    try:
        pages.play()
        yield pages
    finally:
        pages.call("down")


def test_the_form_opens_with_the_configs_values_and_the_ten_settings_first(pages):
    with pages.in_prefect(f"/deployments/deployment/{pages.deployment}/run") as page:
        page.wait(f"{TEXT}.includes('Sft Learning Rate')", 120)
        titles = [name.replace("_", " ").title() for name in MAIN_SETTINGS]
        text = page.run(TEXT).partition("Parameters")[2]
        places = [text.index(f"\n{title} (Optional)") for title in titles]
        assert (
            len(MAIN_SETTINGS) == 10
            and places == sorted(places)
            and places[-1] < text.index("\noverrides (Optional)")
        )
        shown = page.run("[...document.querySelectorAll('input, textarea')].map(e => e.value)")
        numbers = [f"{value:g}" for name, value in pages.main.items() if name != "algorithm"]
        first = shown.index(str(CONFIG)) + 1
        assert shown[first : first + len(numbers)] == numbers
        assert pages.main["algorithm"] in text


def test_a_flow_run_is_named_after_its_config_and_what_was_changed(pages):
    with pages.in_prefect(f"/runs/flow-run/{pages.flow_run}") as page:
        page.wait(f"{TEXT}.includes('test · sft learning_rate=0.004')", 120)
        assert page.wait("!!document.querySelector('canvas')", 60)  # the graph


def test_a_flow_run_has_one_artifact_of_its_result_and_one_a_stage_each_with_a_description(pages):
    found = pages.artifacts()
    stages = load_settings(CONFIG).stages.active
    keys = [artifact["key"] for artifact in found]
    assert sorted(keys) == sorted(
        ["test-result", *(f"test-{name.replace('_', '-')}" for name in stages)]
    )
    assert all(artifact["description"] and artifact["type"] == "markdown" for artifact in found)
    [result] = [artifact for artifact in found if artifact["key"] == "test-result"]
    assert "policy" in result["description"] and "%" in result["description"]
    with pages.in_prefect(f"/artifacts/artifact/{result['id']}") as page:
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


def test_the_table_of_runs_says_what_was_changed_and_whether_it_helped(pages):
    experiment = pages.experiment()
    with pages.in_mlflow(
        f"/experiments/{experiment}/runs?viewStateShareKey=posttrain&workflowType=machine_learning"
    ) as page:
        page.wait(f"{TEXT}.includes('result') && {TEXT}.includes('test ·')", 120)
        heads = page.run(  # from left to right, which is not their order in the document
            "[...document.querySelectorAll('[role=columnheader]')].map(e => [e.getBoundingClientRect().left, "
            "e.innerText.trim()]).sort((a, b) => a[0] - b[0]).map(e => e[1])"
        )
        wanted = ["result", "changed", "success_rate/base", "success_rate/sft"]
        places = [heads.index(name) for name in wanted if name in heads]
        assert {"result", "changed"} <= set(heads) and places == sorted(places)
        assert page.wait(f"{TEXT}.includes('kl_coef')")
        assert page.wait(
            f"/sft [\\d.]+% \\[/.test({TEXT})"
        )  # success with its interval, in the column `result`


def test_curves_open_with_success_reward_kl_entropy_and_length(pages):
    with pages.in_mlflow(
        f"/experiments/{pages.experiment()}/runs/{pages.run_of('')}?workflowType=machine_learning"
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
        places = [text.index(name) for name in names if name in text]
        assert len(places) >= 4 and places == sorted(places) and "window_filled" not in text
        assert page.run("location.hash").count("machine_learning") == 1


def test_a_runs_page_links_what_it_left_above_the_fold_and_its_stages(pages):
    page_of_run = (
        f"/experiments/{pages.experiment()}/runs/{pages.run_of('')}?workflowType=machine_learning"
    )
    with pages.in_mlflow(page_of_run) as page:
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
        assert 0 < count < 120  # what was set, not every default


def test_traces_have_model_level_success_and_reward_as_columns(pages):
    traces = f"/experiments/{pages.experiment()}/runs/{pages.run_of('evaluate')}/traces?workflowType=machine_learning"
    with pages.in_mlflow(traces) as page:
        page.wait(f"{TEXT}.includes('success') && {TEXT}.includes('reward')", 120)
        text = page.run(TEXT)
        assert all(f"\n{name}\n" in text for name in ("level", "model", "success", "reward"))


def test_a_version_says_what_it_is_from_and_what_the_gate_decided(pages):
    with pages.in_mlflow("/models/test/versions/2?workflowType=machine_learning") as page:
        page.wait(f"{TEXT}.includes('Gate:')", 120)
        text = page.run(TEXT)
        assert "policy from version 1" in text and "iterations" in text and "held-out" in text
        assert "AI Gateway" not in text  # the menu of model training
