"""Programs of vLLM's environment: the worker extension, the start command, the pinned versions."""

import subprocess
import sys

import pytest
import torch
from helpers import ROOT
from helpers.vllm_stand_in import make_worker
from helpers.worker_cluster import compiled_model

from rl_core.data.tokenizer import train_tokenizer
from rl_core.models.causal_lm import save_weights
from rl_core.rollout_workers.server_weights import digest_weight_folder
from rl_core.settings import RolloutServerSettings


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["abc xyz"], 300)


def test_the_extension_digests_as_the_trainer_does(tokenizer, tmp_path):
    model = compiled_model(tokenizer)
    worker = make_worker(compiled_model(tokenizer))
    for dtype in (torch.float32, torch.bfloat16):
        folder = tmp_path / str(dtype)
        save_weights(model.to(dtype), folder)
        assert worker.posttrain_read_weights(str(folder))["digest"] == digest_weight_folder(folder)
    loaded = worker.posttrain_load_weights(str(tmp_path / "torch.bfloat16"))
    assert (
        loaded["digest"]
        == digest_weight_folder(tmp_path / "torch.bfloat16")
        == worker.posttrain_state()["weights"]
    )
    assert loaded["compared"] > 10 and loaded["differing"] == []
    with pytest.raises(FileNotFoundError, match="holds no"):
        worker.posttrain_load_weights(str(tmp_path / "nothing"))
    assert worker.posttrain_state()["weights"] == "being loaded"


def run_start_command(*arguments):
    command = [sys.executable, str(ROOT / "deployments/vllm/start.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


def test_start_command(tmp_path):
    done = run_start_command(
        "--python",
        "env/python",
        "--model",
        "base",
        "--lora-rank",
        20,
        "--sleeps",
        "--print",
        "--",
        "--x",
        "y z",
    )
    assert done.returncode == 0, done.stderr
    for part in (
        "VLLM_SERVER_DEV_MODE=1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1",
        "env/python -m vllm.entrypoints.cli.main serve base",
        "--logprobs-mode processed_logprobs",
        "--worker-extension-cls posttrain_worker.PosttrainWorker",
        "--host 127.0.0.1",
        "--max-lora-rank 32",
        "--enable-sleep-mode",
        "--x 'y z'",
        "--fingerprint-mode custom",
    ):
        assert part in done.stdout, part
    instance = done.stdout.partition("POSTTRAIN_INSTANCE=")[2].split()[0]
    assert f"--fingerprint-value {instance}" in done.stdout
    for python in (tmp_path / "none", tmp_path):  # an environment's folder is not a program either
        refused = run_start_command("--python", python, "--model", "base").stderr
        assert "is not a program" in refused and "Traceback" not in refused
    assert (
        "is beyond 512"
        in run_start_command("--python", "p", "--model", "m", "--lora-rank", 513).stderr
    )


def test_vllm_has_our_versions():
    def read_pins(path):
        lines = (ROOT / path).read_text().splitlines()
        return dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))

    vllm_pins, our_pins, required = (
        read_pins(f"{path}.txt")
        for path in ("deployments/vllm/constraints", "constraints", "deployments/vllm/requirements")
    )
    assert all(vllm_pins[name] == required[name] for name in required)
    assert {name: vllm_pins[name] for name in ("torch", "transformers", "safetensors")} == {
        name: our_pins[name] for name in ("torch", "transformers", "safetensors")
    }
    assert required["vllm"] == RolloutServerSettings().version
    assert vllm_pins["fastapi"] != our_pins["fastapi"] and "vllm" not in our_pins
