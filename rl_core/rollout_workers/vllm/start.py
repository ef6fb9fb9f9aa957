"""Start vLLM as the inference server of a trainer. Standard library only; any Python.

    python deployments/vllm/start.py --python vllm-env/bin/python --model MODEL [--port 8000] [--lora-rank 32] [--
    ...]

Arguments after `--` go to `vllm serve` unchanged. The server listens on loopback, because its commands (weights,
sleep) require no key. `--print` shows the command and its environment without starting it.
"""

import argparse
import os
import secrets
import shlex
import sys
from pathlib import Path

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # values of --max-lora-rank that vLLM accepts
MODEL_NAME = "policy"  # in requests


def main(arguments: list[str] | None = None) -> None:
    """Replace this process by the server."""
    arguments = sys.argv[1:] if arguments is None else arguments
    end = arguments.index("--") if "--" in arguments else len(arguments)
    options = parse_options(arguments[:end])
    instance = f"vllm-{secrets.token_hex(8)}"
    command = build_command(options, instance) + arguments[end + 1 :]
    environment = build_environment(instance)
    if options.print:
        variables = [f"{name}={shlex.quote(value)}" for name, value in environment.items()]
        print(" ".join([*variables, shlex.join(command)]))
        return
    if options.sleeps and not has_gpu():
        sys.exit(
            "start.py: --sleeps: vLLM releases the memory of a GPU alone, and this machine has none; remove --sleeps "
            "(rollouts.server.sleeps: false)"
        )
    python = Path(options.python)
    if not (python.is_file() and os.access(python, os.X_OK)):
        sys.exit(
            f"start.py: --python: {python} is not a program; create the environment of "
            "deployments/vllm/requirements.txt"
        )
    os.execve(python, command, {**os.environ, **environment})


def has_gpu() -> bool:
    """Return whether this machine shows a GPU of NVIDIA or AMD that is not hidden from the process."""
    if any(
        os.environ.get(name) in ("", "-1")
        for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
    ):
        return False
    names = ("nvidia[0-9]*", "nvidiactl", "kfd", "dxg")  # dxg: Windows' Linux
    return any(path for name in names for path in Path("/dev").glob(name))


def parse_options(arguments: list[str]) -> argparse.Namespace:
    """Parse the options of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--python", required=True, help="Python of the environment that vLLM is installed in"
    )
    parser.add_argument(
        "--model", required=True, help="folder or hub name of the policy's base model"
    )
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="loopback, unless the network belongs to the trainer alone",
    )
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument(
        "--dtype", default="auto", help="float32, bfloat16 or float16, as in the trainer"
    )
    parser.add_argument(
        "--context", type=int, help="longest prompt and completion together; default: the model's"
    )
    parser.add_argument(
        "--lora-rank", type=int, default=0, help="support adapters up to this rank; 0 = none"
    )
    parser.add_argument(
        "--sleeps", action="store_true", help="can release its GPU memory during updates"
    )
    parser.add_argument("--gpu-memory", type=float, default=0.9, help="share of the GPU's memory")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="GPUs of one replica")
    parser.add_argument("--print", action="store_true", help="show the command without starting it")
    options = parser.parse_args(arguments)
    if not 0 <= options.lora_rank <= RANKS[-1]:
        parser.error(
            f"--lora-rank: {options.lora_rank} is beyond {RANKS[-1]}, the highest that vLLM supports"
        )
    return options


def build_command(options: argparse.Namespace, instance: str) -> list[str]:
    """Build the command without further arguments."""
    command = [
        options.python,
        "-m",
        "vllm.entrypoints.cli.main",
        "serve",
        options.model,
        "--served-model-name",
        MODEL_NAME,
        "--host",
        options.host,
        "--port",
        str(options.port),
        "--dtype",
        options.dtype,
        "--seed",
        "0",
        "--logprobs-mode",
        "processed_logprobs",  # of the sampling distribution
        "--generation-config",
        "vllm",  # no defaults of the model: every request is complete
        "--fingerprint-mode",
        "custom",
        "--fingerprint-value",
        instance,  # every answer names its process
        "--worker-extension-cls",
        "posttrain_worker.PosttrainWorker",
        "--gpu-memory-utilization",
        str(options.gpu_memory),
        "--tensor-parallel-size",
        str(options.tensor_parallel),
    ]
    if options.context is not None:
        command += ["--max-model-len", str(options.context)]
    if options.lora_rank:
        rank = next(rank for rank in RANKS if rank >= options.lora_rank)
        # two on the CPU, because the next adapter is loaded before the last one is dropped
        command += [
            "--enable-lora",
            "--max-lora-rank",
            str(rank),
            "--max-loras",
            "1",
            "--max-cpu-loras",
            "2",
        ]
    if options.sleeps:
        command += ["--enable-sleep-mode"]
    return command


def build_environment(instance: str) -> dict[str, str]:
    """Build the additional environment variables."""
    path = [
        str(Path(__file__).resolve().parent),
        *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)),
    ]
    return {
        "PYTHONPATH": os.pathsep.join(path),
        "POSTTRAIN_INSTANCE": instance,
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }


if __name__ == "__main__":
    main()
