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


class PackingMethod:
    """What vLLM's build for CPUs does with a head: it multiplies by a copy made after loading."""

    def process_weights_after_loading(self, layer):
        packed = layer.weight.detach().clone()
        layer.cpu_linear = lambda inputs: inputs @ packed.T

    def apply(self, layer, inputs, bias=None):
        return layer.cpu_linear(inputs)


class StaleMethod(PackingMethod):
    """A build in which packing again has no effect."""

    def process_weights_after_loading(self, layer):
        if not hasattr(layer, "cpu_linear"):
            super().process_weights_after_loading(layer)


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_packed_head_is_renewed_and_compared(tokenizer, tmp_path, is_tied, dtype):
    """A head that multiplies by a copy of its weight computes with the new one, or the update is refused."""
    model, sent = (compiled_model(tokenizer).to(dtype) for _ in range(2))
    for each in (model, sent):
        each.config.tie_word_embeddings = is_tied
        if is_tied:
            each.lm_head.weight = each.model.embed_tokens.weight
    with torch.no_grad():  # of a size that a comparison up to rounding would not see
        head = sent.lm_head.weight
        head[3] = head[3] * (1 + 2 * torch.finfo(dtype).eps)
    sent.save_pretrained(tmp_path)
    for method, differing in ((PackingMethod(), False), (StaleMethod(), True)):
        model.lm_head.quant_method = method
        model.lm_head.__dict__.pop("cpu_linear", None)
        with torch.no_grad():
            model.lm_head.weight[3] = 0
        method.process_weights_after_loading(model.lm_head)
        result = make_worker(model).posttrain_load_weights(str(tmp_path))
        name = "model.embed_tokens.weight" if is_tied else "lm_head.weight"
        expected = [f"product of lm_head with {name}"] if differing else []
        assert [each for each in result["differing"] if "product" in each] == expected
        units = torch.eye(model.config.hidden_size, dtype=dtype)
        is_new = torch.equal(method.apply(model.lm_head, units).T, sent.lm_head.weight)
        assert is_new is not differing


def test_sleep_mode_needs_a_gpu(monkeypatch):
    """A server that cannot sleep is refused before it loads; the command can be printed anywhere."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    refused = run_start_command("--python", sys.executable, "--model", "base", "--sleeps")
    assert refused.returncode == 1 and "Traceback" not in refused.stderr
    assert refused.stderr.startswith("start.py: --sleeps: vLLM releases the memory of a GPU alone")
    printed = run_start_command("--python", "p", "--model", "base", "--sleeps", "--print")
    assert printed.returncode == 0 and "--enable-sleep-mode" in printed.stdout


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
