"""vLLM among the servers of `posttrain up`: what is started, and what is refused before anything is."""

import json
import os
import runpy
import stat
import subprocess

import pytest
from helpers import ROOT
from helpers.serving import make_folder_of_model

from flows.parameters import read_settings
from posttrain.cli.main import main
from posttrain.cli.operate_commands import _add_rollout_server, _resolve_served_pipeline
from posttrain.cli.parser import build_parser
from posttrain.operations.inference_server import (
    MAX_ADAPTER_RANK,
    build_inference_specs,
    check_inference_settings,
)
from rl_core.errors import SettingsError
from rl_core.settings import LoraSettings, ModelSettings
from tasks.config import ConfigError, load_settings
from tasks.config.machine_checks import compute_adapter_rank

CONFIG = """
name: served
model: {{path: {model}{more}}}
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
    """A program in the place of vLLM's Python: writes down what it was started with."""
    program = tmp_path / "python"
    program.write_text(
        f'#!/bin/sh\necho "$VLLM_SERVER_DEV_MODE $POSTTRAIN_INSTANCE $@" > {tmp_path}/started\n'
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return program


def config(tmp_path, model, python, *, address="127.0.0.1:8123", more="", server=""):
    path = tmp_path / "served.yaml"
    server = ", ".join(filter(None, [f"python: {python}" if python else "", server]))
    path.write_text(CONFIG.format(model=model, address=address, more=more, server=server))
    return path


def test_what_is_started(tmp_path, model, python):
    path = config(
        tmp_path,
        model,
        python,
        more=", lora: {rank: 12}, dtype: bfloat16, trust_remote_code: true",
        server="sleeps: true",
    )
    more = []
    arguments = build_parser().parse_args(
        ["up", "--rollouts", str(path), "--output", str(tmp_path / "out")]
    )
    assert _add_rollout_server(arguments, more) == str(path)
    (spec,) = more[0](tmp_path / "out", "http://mlflow")
    assert (spec.name, spec.port, spec.url) == (
        "rollouts",
        8123,
        "http://127.0.0.1:8123",
    ) and not spec.check_health()
    done = subprocess.run(
        spec.command, env={**os.environ, **spec.environment}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    mode, instance, *command = (tmp_path / "started").read_text().split()
    assert mode == "1" and instance.startswith("vllm-")
    text = " ".join(command)
    assert (
        f"serve {model} --served-model-name policy --host 127.0.0.1 --port 8123 --dtype bfloat16"
        in text
    )
    assert (
        "--max-lora-rank 16" in text
        and "--enable-sleep-mode" in text
        and f"--fingerprint-value {instance}" in text
    )
    assert command[-1] == "--trust-remote-code"


@pytest.mark.parametrize("lora", ["{rank: 8, dora: true}", "{rank: 8, modules_to_save: [lm_head]}"])
def test_an_adapter_that_cannot_be_served_alone_needs_no_room(tmp_path, model, python, lora):
    settings = load_settings(
        config(tmp_path, model, python, more=f", lora: {lora}"), check_servers=False
    )
    (spec,) = build_inference_specs(settings, tmp_path / "out", "http://mlflow")
    assert "--lora-rank" not in spec.command


def test_a_configuration_with_a_server_asks_for_it(tmp_path, model, python):
    path = config(tmp_path, model, python, address="127.0.0.1:9")
    load_settings(path, check_servers=False)
    with pytest.raises(
        ConfigError,
        match=r"served.yaml:7: stages.policy.rollouts.address: no inference server answers",
    ):
        load_settings(path)


def test_commands_that_sample_nothing_do_without_the_server(tmp_path, model, python, capsys):
    """As `runs` while vLLM is away, and `up --serve` beside the `--rollouts` that starts it."""
    path = config(tmp_path, model, python, address="127.0.0.1:9")
    path.write_text(path.read_text() + "serving: {}\n")
    here = ["--set", f"output={tmp_path / 'out'}"]
    assert (
        main(["why", "policy", str(path), *here]) == 0
        and main(["runs", "--config", str(path), *here]) == 0
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
            main([command, str(path), *here]) == 2
            and "no inference server answers" in capsys.readouterr().err
        )


def test_a_quantised_base_is_another_model(tmp_path, model, python):
    path = config(tmp_path, model, python, more=", lora: {rank: 4, quantize: nf4}")
    with pytest.raises(
        ConfigError,
        match=r"stages.policy.rollouts.workers: a server samples from the base model as it is",
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
def test_what_cannot_be_started(tmp_path, model, python, change, message):
    path = config(tmp_path, model, **{"python": python, **change})
    with pytest.raises(SettingsError, match=message):
        check_inference_settings(load_settings(path, check_servers=False))


def test_an_adapter_beyond_the_highest_rank_is_refused_before_the_start(tmp_path, model, python):
    ranks = runpy.run_path(str(ROOT / "deployments/vllm/start.py"))["RANKS"]
    assert ranks[-1] == MAX_ADAPTER_RANK
    check_inference_settings(
        load_settings(
            config(tmp_path, model, python, more=", lora: {rank: 512}"), check_servers=False
        )
    )
    path = config(tmp_path, model, python, more=", lora: {rank: 513}")
    with pytest.raises(
        SettingsError, match=r"model.lora.rank is 513, but vLLM supports adapters up to 512"
    ):
        check_inference_settings(load_settings(path, check_servers=False))


def test_weights_that_are_the_other_way_round_are_merged_and_need_no_room_for_an_adapter(
    tmp_path, python
):
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


def test_a_pipeline_without_a_server(tmp_path):
    with pytest.raises(SettingsError, match="does not sample rollouts from a server"):
        check_inference_settings(load_settings("demo"))
