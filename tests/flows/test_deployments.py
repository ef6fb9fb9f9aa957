"""deployments/ against the code: entry points exist, parameters fit, and Prefect accepts the automations."""

import importlib
import json
import re
import shutil
import subprocess

import pytest
import yaml
from helpers import ROOT

from tasks.config import dump_settings, load_settings

FOLDER = ROOT / "deployments"
PREFECT = yaml.safe_load((FOLDER / "prefect.yaml").read_text())
DEPLOYMENTS = {deployment["name"]: deployment for deployment in PREFECT["deployments"]}
AUTOMATIONS = {
    item["name"]: item
    for item in yaml.safe_load((FOLDER / "automations.yaml").read_text())["automations"]
}


def import_flow(entrypoint):
    module, _, name = entrypoint.rpartition(".")
    return getattr(importlib.import_module(module), name)


def validate_parameters(entrypoint, parameters):
    """Validate parameters as the server does when it creates a run."""
    from prefect.utilities.callables import parameter_schema
    from prefect.utilities.schema_tools.validation import validate

    validate(
        parameters, parameter_schema(import_flow(entrypoint)).model_dump(), raise_on_error=True
    )


def test_the_deployments_are_the_ones_that_the_readme_describes():
    names = {
        "demo",
        "nightly-retrain",
        "retrain-on-regression",
        "evaluate-champion",
        "single-stage",
        "analyze",
        "nightly-consolidate",
    }
    assert set(DEPLOYMENTS) == names
    readme = (FOLDER / "README.md").read_text()
    assert all(f"`{name}`" in readme for name in [*names, *AUTOMATIONS])


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_entry_point_and_parameters_fit(name):
    from flows.parameters import read_settings

    deployment = DEPLOYMENTS[name]
    validate_parameters(deployment["entrypoint"], deployment["parameters"])
    typed = read_settings(
        deployment["parameters"]["settings"], deployment["parameters"]["overrides"]
    )
    assert typed.run.wait_seconds == 14400
    assert deployment["concurrency_limit"] == {"limit": 1, "collision_strategy": "ENQUEUE"}
    assert deployment["work_pool"]["name"] == "posttrain"


@pytest.mark.parametrize(
    "name",
    [
        name if name == "demo" else pytest.param(name, marks=pytest.mark.slow)
        for name in DEPLOYMENTS
    ],
)
def test_a_complete_config_fits_the_form_but_bad_settings_do_not(name):
    from prefect.utilities.schema_tools.validation import ValidationError

    deployment = DEPLOYMENTS[name]
    config = json.loads(
        json.dumps(dump_settings(load_settings(ROOT / "configs/test.yaml", check_files=False)))
    )
    for threads in (None, 3, "auto"):
        validate_parameters(
            deployment["entrypoint"],
            {**deployment["parameters"], "settings": {**config, "threads": threads}},
        )
    for change in (
        {"seed": -1},
        {"threads": "all"},
        {"threads": 0},
        {"stagess": {}},
        {"retrain": {"margin": 2.0}},
        {"seed": "7"},
    ):
        with pytest.raises(ValidationError):
            validate_parameters(
                deployment["entrypoint"],
                {**deployment["parameters"], "settings": {**config, **change}},
            )


def test_prefect_accepts_the_cron_lines_of_schedules():
    from prefect.client.schemas.schedules import CronSchedule

    crons = {name: d["schedules"][0] for name, d in DEPLOYMENTS.items() if "schedules" in d}
    assert set(crons) == {"nightly-retrain", "evaluate-champion", "nightly-consolidate"}
    for cron in crons.values():
        CronSchedule(cron=cron["cron"], timezone=cron["timezone"])
        assert cron["active"] is False  # `posttrain up` starts nothing that nobody asked for


def replace_ids(item):
    """Replace names of deployments and blocks, which are resolved when the file is applied, by any id."""
    text = json.dumps(item)
    text = re.sub(
        r'("(?:deployment_id|block_document_id)": )"[^"]+"',
        r'\1"00000000-0000-0000-0000-000000000001"',
        text,
    )
    return json.loads(text)


@pytest.mark.parametrize("name", AUTOMATIONS)
def test_prefect_accepts_the_automations(name):
    from prefect.events.schemas.automations import AutomationCore

    automation = AutomationCore.model_validate(replace_ids(AUTOMATIONS[name]))
    assert automation.name == name and len(automation.actions) == 1


def test_the_event_runs_a_deployment_that_exists():
    from flows.evaluate_champion import REGRESSION_EVENT

    automation = AUTOMATIONS["posttrain-retrain-on-regression"]
    assert automation["trigger"]["expect"] == [REGRESSION_EVENT]
    flow, _, deployment = automation["actions"][0]["deployment_id"].partition("/")
    assert import_flow(DEPLOYMENTS[deployment]["entrypoint"]).name == flow
    assert DEPLOYMENTS[deployment]["parameters"]["force"] is True


def test_heartbeats_distinguish_zombies_from_waiting_runs():
    from flows.runtime.approval_wait import WAITING_EVENT
    from flows.runtime.prefect_home import HEARTBEAT_SECONDS, build_prefect_environment

    zombies = AUTOMATIONS["posttrain-crash-zombies"]["trigger"]
    beat = int(
        DEPLOYMENTS["demo"]["work_pool"]["job_variables"]["env"][
            "PREFECT_FLOWS_HEARTBEAT_FREQUENCY"
        ]
    )
    assert zombies["within"] == 3 * beat and beat == HEARTBEAT_SECONDS
    # A run from a shell joins the server of `posttrain up`; the worker has the same frequency.
    assert build_prefect_environment()["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"] == str(beat)
    orderly = {f"prefect.flow-run.{state}" for state in ("Suspended", "Paused", "Completed")}
    assert {*orderly, WAITING_EVENT} <= set(zombies["expect"])


def test_the_webhook_gets_json_for_any_message():
    from jinja2.sandbox import SandboxedEnvironment

    environment = SandboxedEnvironment()
    environment.filters["ui_url"] = lambda run: "http://127.0.0.1:4200/runs/1"
    payload = AUTOMATIONS["posttrain-notify-on-failure"]["actions"][0]["payload"]
    run = {"name": "a", "state": {"name": "Failed", "message": 'it said "no"\nand more'}}
    text = json.loads(
        environment.from_string(payload).render(flow={"name": "retrain"}, flow_run=run)
    )
    assert text == {
        "text": 'retrain / a: Failed: it said "no"\nand more',
        "link": "http://127.0.0.1:4200/runs/1",
    }


def fill_in_template(name, folder):
    """Return a template for an environment and a config whose paths have spaces."""
    text = (FOLDER / name).read_text()
    for word, value in (("VENV", folder / "my env"), ("FOLDER", folder), ("CONFIG", "my config")):
        text = text.replace(word, str(value))
    return text


def write_stand_in(folder, exit_code):
    """Write a posttrain that prints its arguments, one per line."""
    program = folder / "my env/bin/posttrain"
    program.parent.mkdir(parents=True, exist_ok=True)
    program.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@"\nexit {exit_code}\n')
    program.chmod(0o755)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
def test_systemd_accepts_the_units_with_spaces_in_paths(tmp_path):
    write_stand_in(tmp_path, 0)
    units = ["posttrain-retrain.service", "posttrain-retrain.timer"]
    for name in units:
        (tmp_path / name).write_text(fill_in_template(name, tmp_path))
    result = subprocess.run(
        ["systemd-analyze", "verify", *(str(tmp_path / name) for name in units)],
        capture_output=True,
        text=True,
    )
    assert (result.returncode, result.stderr) == (0, "")


def test_the_retraining_unit_gives_up_and_is_started_again_the_next_night():
    text = (FOLDER / "posttrain-retrain.service").read_text()
    settings = dict(re.findall(r"^(\w+)=(.*)$", text, re.MULTILINE))
    assert (settings["StartLimitBurst"], settings["StartLimitIntervalSec"]) == ("3", "20h")
    # A user's manager has no such unit.
    assert "network-online" not in text and "loginctl enable-linger" in text


@pytest.mark.parametrize("exit_code", [0, 1, 3])
def test_cron_mails_after_a_training_or_a_failure_only(tmp_path, exit_code):
    write_stand_in(tmp_path, exit_code)
    line = fill_in_template("posttrain.crontab", tmp_path).splitlines()[-1]
    command = line.split(maxsplit=5)[5]
    mail = subprocess.run(["/bin/sh", "-c", command], capture_output=True, text=True, check=False)
    printed = ["retrain", "my config", "--quiet", "--set", "run.wait_seconds=14400"]
    expected = [] if exit_code == 3 else [f"exit code {exit_code}", *printed]
    assert (mail.stdout.splitlines(), mail.stderr) == (expected, "")
