"""Dockerfile and Kubernetes job: linters, and consistency with the code. Neither is run here."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from helpers import ROOT

from posttrain.cli.main import build_parser
from posttrain.operations.state import StatePaths
from rl_core.storage.locks import FolderLock

DOCKERFILE = (ROOT / "deployments/Dockerfile").read_text()
CLAIM, JOB = yaml.safe_load_all((ROOT / "deployments/kubernetes-job.yaml").read_text())
CONTAINER = JOB["spec"]["template"]["spec"]["containers"][0]


def test_hadolint_finds_nothing():
    program = shutil.which("hadolint", path=Path(sys.executable).parent) or shutil.which("hadolint")
    if program is None:
        pytest.skip("hadolint is not installed (it has no wheel for this platform)")
    done = subprocess.run(
        [program, str(ROOT / "deployments/Dockerfile")], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_copied_files_exist_pass_dockerignore_and_suffice_for_the_packages():
    lines = re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE, re.MULTILINE)
    copied = [name for line in lines for name in line.split()]
    assert all((ROOT / name).exists() for name in copied)
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    allowed = {line[1:] for line in ignored if line.startswith("!")}
    assert "*" in ignored and set(copied) == allowed
    assert {
        "pyproject.toml",
        "constraints.txt",
        "README.md",
        "rl_core",
        "tasks",
        "flows",
        "posttrain",
        "configs",
    } <= set(copied)


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
        validate.validate(
            {**document, "spec": {**document["spec"], "unknown": 1}}, "1.31", strict=True
        )


def test_the_job_runs_a_posttrain_command_with_existing_settings():
    from tasks.config import load_settings

    arguments = build_parser().parse_args(CONTAINER["args"])
    assert arguments.command == "retrain"
    assert load_settings(arguments.config, arguments.set).run.wait_seconds == 14400


def test_the_job_waits_for_a_checkpoint_and_fails_only_on_wrong_settings():
    spec = JOB["spec"]
    pod = spec["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] >= 30
    (rule,) = spec["podFailurePolicy"]["rules"]
    assert rule["action"] == "FailJob" and rule["onExitCodes"]["values"] == [2]
    assert pod["restartPolicy"] == "Never"  # required by podFailurePolicy
    mounted = {mount["name"] for mount in CONTAINER["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
    claims = [
        volume["persistentVolumeClaim"]["claimName"]
        for volume in pod["volumes"]
        if "persistentVolumeClaim" in volume
    ]
    assert claims == [CLAIM["metadata"]["name"]]
    assert (
        pod["securityContext"]["runAsNonRoot"]
        and not CONTAINER["securityContext"]["allowPrivilegeEscalation"]
    )


def write_program(folder, name, code):
    """Write an executable that prints its arguments and ends with this exit code."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\nprintf '%s\\n' \"$@\"\nexit {code}\n")
    (folder / name).chmod(0o755)
    return {"PATH": f"{folder}:/usr/bin:/bin"}


@pytest.mark.skipif(shutil.which("flock") is None, reason="util-linux is not installed")
def test_the_container_is_unhealthy_while_servers_of_up_are_down_but_not_after_a_kill(
    tmp_path,
):
    """Check with an old state file: a killed container leaves state.json in the volume.

    The next container, which executes `run`, was counted as unhealthy.
    """
    (check,) = re.findall(r'^    CMD (\["sh", .+\])$', DOCKERFILE, re.MULTILINE)
    command = json.loads(check)
    assert (
        "VOLUME /work/outputs" in DOCKERFILE
        and build_parser().parse_args(["status"]).output == "outputs"
    )
    assert command[2].endswith("|| posttrain status")
    environment = write_program(tmp_path / "bin", "posttrain", 1)

    def check_health():
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True
        ).returncode

    paths = StatePaths(tmp_path / "outputs")
    assert check_health() == 0
    paths.folder.mkdir(parents=True)
    paths.state_file.write_text("{}")
    with FolderLock(paths.lock_file):
        assert check_health() == 1
        write_program(tmp_path / "bin", "posttrain", 0)
        assert check_health() == 0
        write_program(tmp_path / "bin", "posttrain", 1)
    assert check_health() == 0


@pytest.mark.parametrize(
    ("variables", "code", "arguments"),
    [
        (
            {"VARIANT": "cpu"},
            0,
            ["--extra-index-url", "https://download.pytorch.org/whl/cpu", "torch"],
        ),
        ({"VARIANT": "cuda"}, 0, ["torch"]),
        (
            {"VARIANT": "cuda", "TORCH_INDEX": "https://x/cu"},
            0,
            ["--extra-index-url", "https://x/cu", "torch"],
        ),
        ({"VARIANT": "gpu"}, 2, []),
    ],
)
def test_the_index_of_torch_is_added_to_the_default_one(variables, code, arguments, tmp_path):
    (script,) = re.findall(r"&& (case .+? torch) \\$", DOCKERFILE, re.DOTALL | re.MULTILINE)
    environment = write_program(tmp_path / "bin", "pip", 0)
    process = subprocess.run(
        ["sh", "-c", script], env={**environment, **variables}, capture_output=True, text=True
    )
    assert process.returncode == code
    passed = process.stdout.split()
    assert (
        passed[4:] == arguments
        if arguments
        else "VARIANT must be cpu or cuda, not gpu" in process.stdout
    )
    assert not arguments or passed[:4] == ["install", "--no-cache-dir", "-c", "constraints.txt"]
