"""Dockerfile and Kubernetes job: linters, and consistency with the code. Neither is run here."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from helpers import ROOT

from flows.cli.parser import build_parser

DOCKERFILE = (ROOT / "deployments/Dockerfile").read_text()
CLAIM, JOB = yaml.safe_load_all((ROOT / "deployments/kubernetes-job.yaml").read_text())
CONTAINER = JOB["spec"]["template"]["spec"]["containers"][0]


def test_hadolint_finds_nothing():
    program = shutil.which("hadolint", path=Path(sys.executable).parent) or shutil.which("hadolint")
    if program is None:
        pytest.skip("hadolint is not installed (it has no wheel for this platform)")
    done = subprocess.run([program, str(ROOT / "deployments/Dockerfile")], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def test_what_is_copied_exists_passes_dockerignore_and_is_all_that_the_packages_need():
    lines = re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE, re.MULTILINE)
    copied = [name for line in lines for name in line.split()]
    assert all((ROOT / name).exists() for name in copied)
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    allowed = {line[1:] for line in ignored if line.startswith("!")}
    assert "*" in ignored and set(copied) == allowed
    assert {"pyproject.toml", "constraints.txt", "README.md", "rl_core", "tasks", "flows", "configs"} <= set(copied)


def test_the_image_is_not_root_and_its_commands_parse():
    assert re.search(r"^USER 1000", DOCKERFILE, re.MULTILINE)
    assert 'ENTRYPOINT ["tini", "--", "posttrain"]' in DOCKERFILE
    (command,) = re.findall(r"^CMD (.+)$", DOCKERFILE, re.MULTILINE)
    build_parser().parse_args(yaml.safe_load(command))


@pytest.mark.parametrize("document", [CLAIM, JOB], ids=["claim", "job"])
def test_the_schema_of_kubernetes_holds(document):
    validate = pytest.importorskip("kubernetes_validate")
    validate.validate(document, "1.31", strict=True)
    with pytest.raises(validate.ValidationError):
        validate.validate({**document, "spec": {**document["spec"], "unknown": 1}}, "1.31", strict=True)


def test_the_job_runs_a_command_of_ours_with_settings_that_exist():
    from tasks.config import load

    arguments = build_parser().parse_args(CONTAINER["args"])
    assert arguments.command == "retrain"
    assert load(arguments.config, arguments.set).run.wait_seconds == 14400


def test_the_job_waits_for_a_checkpoint_and_gives_up_on_wrong_settings_alone():
    spec = JOB["spec"]
    pod = spec["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] >= 30
    (rule,) = spec["podFailurePolicy"]["rules"]
    assert rule["action"] == "FailJob" and rule["onExitCodes"]["values"] == [2]
    assert pod["restartPolicy"] == "Never"  # what a podFailurePolicy needs
    mounted = {mount["name"] for mount in CONTAINER["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
    claims = [
        volume["persistentVolumeClaim"]["claimName"] for volume in pod["volumes"] if "persistentVolumeClaim" in volume
    ]
    assert claims == [CLAIM["metadata"]["name"]]
    assert pod["securityContext"]["runAsNonRoot"] and not CONTAINER["securityContext"]["allowPrivilegeEscalation"]


def test_the_health_check_is_a_command_of_ours_in_the_folder_of_the_volume():
    (check,) = re.findall(r"^    CMD \[.+\"(test ! -e \S+ \|\| posttrain status)\"\]$", DOCKERFILE, re.MULTILINE)
    assert build_parser().parse_args(["status"]).output == "outputs" and "outputs/operations/state.json" in check
    assert "VOLUME /work/outputs" in DOCKERFILE


def test_a_variant_that_is_none_is_refused():
    (script,) = re.findall(r"&& (case .+?esac)", DOCKERFILE, re.DOTALL)
    for variant, code in (("cpu", 0), ("cuda", 0), ("gpu", 2)):
        done = subprocess.run(["sh", "-c", script], env={"VARIANT": variant, "PATH": "/bin:/usr/bin"})
        assert done.returncode == code
