"""One side of one case: `python -m speed.worker SIDE STAGE FOLDER --threads 1 --steps 7`; see protocol."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

for name, value in (
    ("HF_HUB_OFFLINE", "1"),
    ("HF_DATASETS_OFFLINE", "1"),
    ("TOKENIZERS_PARALLELISM", "false"),
    ("TRANSFORMERS_VERBOSITY", "error"),
    ("TRL_EXPERIMENTAL_SILENCE", "1"),
):
    os.environ.setdefault(name, value)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("side", choices=("ours", "trl", "generating"))
    parser.add_argument("stage")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True, help="warm-up included")
    options = parser.parse_args()

    from speed.protocol import Gate

    gate = Gate()
    import torch

    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    if options.side == "ours":
        from speed import ours as side
    elif options.side == "trl":
        from speed import trl_side as side
    else:
        from speed import generating as side
    side.run(options.stage, options.folder, options.steps, gate)


if __name__ == "__main__":
    main()
