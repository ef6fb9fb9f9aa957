"""A pretended Python of vLLM's environment: `serve` answers by the stand-in, over the model in the folder.

    python fake_vllm.py -m vllm.entrypoints.cli.main serve MODEL --port PORT --fingerprint-value NAME ...

`--fake-failure` among the arguments writes what vLLM writes when its engine cannot start, and ends with 1;
`--fake-hang` never answers. Its engine is a child in another session, as in vLLM.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

FAILURE = """\
(EngineCore pid=71) ERROR 11-29 01:20:37 [core.py:1203] EngineCore failed to start.
(EngineCore pid=71) ERROR 11-29 01:20:37 [core.py:1203] Traceback (most recent call last):
(EngineCore pid=71) ERROR 11-29 01:20:37 [core.py:1203]   File "core.py", line 1194, in run_engine_core
(EngineCore pid=71) ERROR 11-29 01:20:37 [core.py:1203] ValueError: No available memory for the cache blocks.
(APIServer pid=70) Traceback (most recent call last):
(APIServer pid=70) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""


def write_program(folder: Path) -> Path:
    """Write an executable file that runs this one."""
    program = folder / "python"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {__file__} "$@"\n')
    program.chmod(0o755)
    return program


def main(arguments: list[str]) -> None:
    assert arguments[:3] == ["-m", "vllm.entrypoints.cli.main", "serve"], arguments
    assert os.environ["POSTTRAIN_INSTANCE"] == arguments[arguments.index("--fingerprint-value") + 1]
    if "--fake-failure" in arguments:
        sys.exit(FAILURE)
    engine = subprocess.Popen(["sleep", "600"], start_new_session=True)
    if "--fake-hang" in arguments:
        print("loading", flush=True)
        time.sleep(600)
    sys.path[:0] = [
        str(Path(__file__).resolve().parents[2]),
        str(Path(__file__).resolve().parents[1]),
    ]
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from helpers.vllm_stand_in import vllm_stand_in

    folder, port = arguments[3], int(arguments[arguments.index("--port") + 1])
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    instance = os.environ["POSTTRAIN_INSTANCE"]
    with vllm_stand_in(model, tokenizer, port=port, instance=instance, context=128):
        print("engine", engine.pid, flush=True)
        signal.pause()


if __name__ == "__main__":
    main(sys.argv[1:])
