"""Start vLLM as the inference server of a trainer: rl_core/rollout_workers/vllm/start.py, by its path.

python deployments/vllm/start.py --python vllm-env/bin/python --model MODEL [--port 8000] [--lora-rank 32] [--
...]
"""

import runpy
from pathlib import Path

PROGRAM = "rl_core/rollout_workers/vllm/start.py"

if __name__ == "__main__":
    # in a checkout two folders up; in an installed package next to `tasks`
    roots = (folder for folder in Path(__file__).resolve().parents if (folder / PROGRAM).is_file())
    runpy.run_path(str(next(roots) / PROGRAM), run_name="__main__")
