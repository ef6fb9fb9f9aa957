"""Pages of Prefect and MLflow about a run of a deployment, in a real browser: each of their promises is looked at."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from helpers import chromium
from helpers.team import ROOT, Team, wait_for

from flows.main_settings import MAIN, main_values
from flows.runtime.prefect_access import password
from tasks.config import load

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(chromium.PROGRAM is None, reason="no Chromium here"),
]
CONFIG = ROOT / "configs/test.yaml"
DEPLOYMENT = {
    "name": "demo", "entrypoint": "flows.post_training.post_training", "work_pool": {"name": "posttrain"},
    "concurrency_limit": 1,
}  # fmt: skip
TEXT = "document.body.innerText"


class Pages(Team):
    """The servers, a deployment of the pipeline as small as it can be, and a finished run of it."""

    def __init__(self, folder: Path):
        super().__init__(folder, "")
        self.main = main_values(load(CONFIG))
        parameters = {"settings": str(CONFIG), "main": self.main, "overrides": [f"output={self.output}"]}
        deployments = {"name": "pages", "pull": None, "deployments": [{**DEPLOYMENT, "parameters": parameters}]}
        self.declare(yaml.safe_dump(deployments))
        (self.project / "deployments" / "automations.yaml").write_text("automations: []")
        self.flow_run = ""

    def play(self) -> None:
        """A run that changes one setting in the form."""
        self.up("--detach")
        self.deployment = self.api("/deployments/name/post-training/demo")["id"]
        asked = {"parameters": {"main": {**self.main, "sft_learning_rate": 0.004}}}
        self.flow_run = self.api(f"/deployments/{self.deployment}/create_flow_run", asked)["id"]
        wait_for(lambda: self.state_of(self.flow_run) not in ("SCHEDULED", "PENDING", "RUNNING"), "the run's end")
        assert self.state_of(self.flow_run) == "COMPLETED"

    def artifacts(self) -> list[dict]:
        return self.api("/artifacts/filter", {"artifacts": {"flow_run_id": {"any_": [self.flow_run]}}})

    def in_prefect(self, path: str) -> chromium.Chromium:
        login = f"localStorage.setItem('prefect-password', btoa({password(self.output)!r}))"
        return chromium.Chromium(f"http://127.0.0.1:{self.prefect}{path}", (1400, 1000), first=login)

    def in_mlflow(self, path: str) -> chromium.Chromium:
        return chromium.Chromium(f"http://127.0.0.1:{self.mlflow}/#{path}", (1400, 1000))


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    pages = Pages(tmp_path_factory.mktemp("pages"))
    try:
        pages.play()
        yield pages
    finally:
        pages.call("down")
