"""vLLM as one of the servers of `posttrain up`: the command that is started, and settings that are refused before."""

import json
import os
import stat
import subprocess

import pytest
from helpers.serving import make_folder_of_model

from flows.parameters import read_settings
from posttrain.cli.main import build_parser, main
from posttrain.cli.up import _add_rollout_server, _resolve_served_pipeline
from posttrain.operations.inference_server import (
    build_inference_specs,
    check_inference_settings,
)
from rl_core.errors import SettingsError
from rl_core.settings import LoraSettings, ModelSettings
from tasks.config import ConfigError, load_settings
from tasks.config.machine_checks import compute_adapter_rank

CONFIG = """
name: served
model: {{path: {model}{model_options}}}
stages:
  prepare_data: {{}}
  policy:
    rollouts: {{workers: server, address: "{address}", server: {{{server}}}}}
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_folder_of_model(tmp_path_factory.mktemp("served") / "model")


@pytest.fixture
def python(tmp_path):
    """Create a program that stands in for vLLM's Python: it writes down its arguments."""
    program = tmp_path / "python"
    program.write_text(
        f'#!/bin/sh\necho "$VLLM_SERVER_DEV_MODE $POSTTRAIN_INSTANCE $@" > {tmp_path}/started\n'
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return program


def write_config(tmp_path, model, python, *, address="127.0.0.1:8123", model_options="", server=""):
    path = tmp_path / "served.yaml"
    server = ", ".join(filter(None, [f"python: {python}" if python else "", server]))
    path.write_text(
        CONFIG.format(model=model, address=address, model_options=model_options, server=server)
    )
    return path


def test_started_command(tmp_path, model, python):
    path = write_config(
        tmp_path,
        model,
        python,
        model_options=", lora: {rank: 12}, dtype: bfloat16, trust_remote_code: true",
        server="sleeps: true",
    )
    builders = []
    arguments = build_parser().parse_args(
        ["up", "--rollouts", str(path), "--output", str(tmp_path / "out")]
    )
    assert _add_rollout_server(arguments, builders) == str(path)
    (spec,) = builders[0](tmp_path / "out", "http://mlflow")
    assert (spec.name, spec.port, spec.url) == (
        "rollouts",
        8123,
        "http://127.0.0.1:8123",
    ) and not spec.check_health()
    # this machine may have no GPU, and without one `start.py` refuses to start a server that sleeps
    assert "--sleeps" in spec.command
    command = [part for part in spec.command if part != "--sleeps"]
    process = subprocess.run(
        command, env={**os.environ, **spec.environment}, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr
    mode, instance, *command = (tmp_path / "started").read_text().split()
    assert mode == "1" and instance.startswith("vllm-")
    text = " ".join(command)
    assert (
        f"serve {model} --served-model-name policy --host 127.0.0.1 --port 8123 --dtype bfloat16"
        in text
    )
    assert (
        "--max-lora-rank 16" in text
        and "--enable-sleep-mode" not in text
        and f"--fingerprint-value {instance}" in text
    )
    assert command[-1] == "--trust-remote-code"


@pytest.mark.parametrize("lora", ["{rank: 8, dora: true}", "{rank: 8, modules_to_save: [lm_head]}"])
def test_adapter_that_is_sent_merged_reserves_no_rank(tmp_path, model, python, lora):
    settings = load_settings(
        write_config(tmp_path, model, python, model_options=f", lora: {lora}"), check_servers=False
    )
    (spec,) = build_inference_specs(settings, tmp_path / "out", "http://mlflow")
    assert "--lora-rank" not in spec.command


def test_settings_check_that_the_server_answers(tmp_path, model, python):
    path = write_config(tmp_path, model, python, address="127.0.0.1:9")
    load_settings(path, check_servers=False)
    with pytest.raises(
        ConfigError,
        match=r"served.yaml:7: stages.policy.rollouts.address: no inference server answers",
    ):
        load_settings(path)


def test_commands_without_sampling_do_not_need_the_server(tmp_path, model, python, capsys):
    """Commands such as `runs` work while vLLM is down, and so does `up --serve` with `--rollouts`."""
    path = write_config(tmp_path, model, python, address="127.0.0.1:9")
    path.write_text(path.read_text() + "serving: {}\n")
    options = ["--set", f"output={tmp_path / 'out'}"]
    assert (
        main(["run", str(path), "--only", "policy", "--dry-run", *options]) == 0
        and main(["runs", str(path), *options]) == 0
    )
    arguments = build_parser().parse_args(["up", "--rollouts", str(path), "--serve", str(path)])
    assert (
        _resolve_served_pipeline(arguments)["serve"]
        == _add_rollout_server(arguments, [])
        == str(path)
    )
    assert read_settings(str(path), check_servers=False).name == "served"
    capsys.readouterr()
    for command in ("run", "validate", "retrain"):
        assert (
            main([command, str(path), *options]) == 2
            and "no inference server answers" in capsys.readouterr().err
        )


def test_quantised_base_is_refused(tmp_path, model, python):
    path = write_config(tmp_path, model, python, model_options=", lora: {rank: 4, quantize: nf4}")
    with pytest.raises(
        ConfigError,
        match=r"stages.policy.rollouts.workers: a server samples from the unquantized base model",
    ):
        load_settings(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"python": None}, "rollouts.server.python is not set"),
        ({"python": "/nowhere/python"}, "/nowhere/python is not an executable program"),
        ({"python": "/tmp"}, "/tmp is not an executable program"),
        ({"address": "gpu.example:8000"}, "address is on gpu.example"),
    ],
)
def test_settings_that_cannot_be_started(tmp_path, model, python, change, message):
    path = write_config(tmp_path, model, **{"python": python, **change})
    with pytest.raises(SettingsError, match=message):
        check_inference_settings(load_settings(path, check_servers=False))


def test_an_adapter_beyond_the_highest_rank_is_refused_before_the_start(tmp_path, model, python):
    check_inference_settings(
        load_settings(
            write_config(tmp_path, model, python, model_options=", lora: {rank: 512}"),
            check_servers=False,
        )
    )
    path = write_config(tmp_path, model, python, model_options=", lora: {rank: 513}")
    with pytest.raises(
        SettingsError, match=r"model.lora.rank is 513, but vLLM supports adapters up to 512"
    ):
        check_inference_settings(load_settings(path, check_servers=False))


def test_transposed_weights_are_sent_merged_and_reserve_no_rank(tmp_path, python):
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "gpt2" / "config.json").write_text(
        json.dumps({"model_type": "gpt2", "n_positions": 64})
    )
    gpt2 = ModelSettings(path=str(tmp_path / "gpt2"), lora=LoraSettings(rank=8))
    assert (
        compute_adapter_rank(gpt2) == 0
        and compute_adapter_rank(ModelSettings(lora=LoraSettings(rank=8))) == 8
    )
    assert compute_adapter_rank(gpt2.__class__(path=str(tmp_path / "gpt2"))) == 0


def test_a_run_that_starts_its_own_server(tmp_path, model, python, monkeypatch):
    """Its settings are checked before anything starts; `up --rollouts` would start a second one."""
    path = write_config(tmp_path, model, python, server="start: true")
    text = path.read_text().replace('address: "127.0.0.1:8123", ', "")
    path.write_text(text)
    settings = load_settings(path)
    with pytest.raises(SettingsError, match=r"server.start is true, so the run starts its own"):
        check_inference_settings(settings)
    path.write_text(text.replace(str(python), "/nowhere/python"))
    with pytest.raises(ConfigError, match=r"rollouts.server.python: /nowhere/python is not an exe"):
        load_settings(path, check_servers=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    path.write_text(text.replace("start: true", "start: true, sleeps: true"))
    with pytest.raises(
        ConfigError, match=r"server.sleeps: vLLM releases the memory of a GPU alone"
    ):
        load_settings(path, check_servers=False)


def test_further_arguments_reach_vllm(tmp_path, model, python):
    path = write_config(tmp_path, model, python, server="arguments: [--max-model-len=64]")
    settings = load_settings(path, check_servers=False)
    (spec,) = build_inference_specs(settings, tmp_path / "out", "http://mlflow")
    assert spec.command[-2:] == ("--", "--max-model-len=64")


def test_a_pipeline_without_a_server(tmp_path):
    with pytest.raises(SettingsError, match="does not sample rollouts from a server"):
        check_inference_settings(load_settings("demo"))
