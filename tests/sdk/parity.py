"""Training loops written with the tinker SDK on data from a file; prints their losses as JSON.

`TINKER_BASE_URL=... TINKER_API_KEY=... python parity.py DATA.json` in the SDK's environment. DATA.json has a list of
runs: {"rank", "seed", "loss_fn", "config", "adam", "steps": [{"repeats", "data": [{"tokens", per-token arrays}]}]}.
Every step is a forward_backward and an optim_step, `repeats` times; the losses are those of the forward_backwards.
"""

import json
import os
import sys
import warnings
from pathlib import Path

os.environ["TINKER_TELEMETRY"] = "0"
warnings.simplefilter("ignore")
if "EXTRA_PACKAGES" in os.environ:
    sys.path.append(os.environ["EXTRA_PACKAGES"])

import numpy as np  # noqa: E402
import tinker  # noqa: E402
from tinker import types  # noqa: E402


def resolve(value):
    """Return the client behind a future; older SDKs return the client itself."""
    return value.result() if callable(getattr(value, "result", None)) else value


def make_datum(row):
    """Build a datum of a complete sequence; arrays cover the tokens after the first."""
    tokens = row.pop("tokens")
    inputs = {name: np.asarray(values, np.float32) for name, values in row.items()}
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": np.array(tokens[1:]), **inputs},
    )


def train_run(service, run):
    training = resolve(
        service.create_lora_training_client(
            base_model="base", rank=run["rank"], seed=run["seed"], train_unembed=False
        )
    )
    losses = []
    for step in run["steps"]:
        data = [make_datum(row) for row in step["data"]]
        for _ in range(step["repeats"]):
            forward_future = training.forward_backward(data, run["loss_fn"], run["config"] or None)
            step_future = training.optim_step(types.AdamParams(**run["adam"]))
            losses.append(forward_future.result().metrics["loss:sum"])
            step_future.result()
    return losses


def main():
    service = tinker.ServiceClient()
    print(
        json.dumps([train_run(service, run) for run in json.loads(Path(sys.argv[1]).read_text())])
    )
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
