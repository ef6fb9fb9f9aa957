"""Scoreboard of every public method of an installed tinker SDK against a running service.

`TINKER_BASE_URL=... TINKER_API_KEY=... python scoreboard.py` in the SDK's environment, in a folder where the base
model's name is its folder. EXTRA_PACKAGES: a folder with torch if the environment has none. Prints JSON:
{"ServiceClient.close": "supported", ...}; other values are "refused: ..." (the service or the SDK refuses by name),
"unknown" (no call is defined below) and "failed: ...".
"""

import asyncio
import inspect
import json
import os
import sys
import warnings

os.environ["TINKER_TELEMETRY"] = "0"
os.environ["TINKER_PROJECT_ID"] = "project"
os.environ["HF_HUB_OFFLINE"] = "1"
if "EXTRA_PACKAGES" in os.environ:
    sys.path.append(os.environ["EXTRA_PACKAGES"])  # after the environment's packages
warnings.simplefilter("ignore")

import numpy as np  # noqa: E402
import tinker  # noqa: E402
from tinker import types  # noqa: E402

try:
    from tinker.lib.public_interfaces.rest_client import RestClient
except ImportError:
    RestClient = None

REFUSALS = (
    "is not served here",
    "is not supported",
    "requires JWT auth, but the server has it disabled",
    "client called from incorrect event loop",
)
PROMPT = types.ModelInput.from_ints([3, 4, 5])
PARAMETERS = types.SamplingParams(max_tokens=3, seed=1)


def resolve(value):
    """Return the result behind futures and coroutines."""
    if inspect.iscoroutine(value):
        value = asyncio.run(value)
    for _ in range(3):
        if not callable(getattr(value, "result", None)):
            break
        value = value.result()
    return value


def make_datum(ids=(3, 4, 5, 6)):
    inputs = {"target_tokens": np.array(ids[1:]), "weights": np.ones(len(ids) - 1, np.float32)}
    return types.Datum(
        model_input=types.ModelInput.from_ints(list(ids[:-1])), loss_fn_inputs=inputs
    )


def compute_custom_loss(data, logprobs):
    return sum(-logprob.sum() for logprob in logprobs), {"custom": 1.0}


def compute_traced_loss(logprobs):
    loss = -logprobs.sum()
    return loss, {"custom/loss:sum": loss}


class Scene:
    """Clients and saved weights that the calls need."""

    def __init__(self):
        self.service = tinker.ServiceClient()
        self.training = resolve(self.service.create_lora_training_client(base_model="base", rank=4))
        self.session = (
            self.training.model_id.partition(":")[0] if hasattr(self.training, "model_id") else ""
        )
        self.state = resolve(self.training.save_state("first")).path
        self.weights = resolve(self.training.save_weights_for_sampler("first")).path
        self.sampling = resolve(self.service.create_sampling_client(model_path=self.weights))
        self.rest = resolve(self.service.create_rest_client())
        self.external = self.save_external_path()
        self.count = 0

    def save_external_path(self):
        if not hasattr(self.training, "save_weights_external"):
            return None
        return resolve(self.training.save_weights_external("files")).path

    def save_extra_path(self):
        """Save a path that may be deleted."""
        self.count += 1
        return resolve(self.training.save_state(f"extra-{self.count}")).path


def split_path(path):
    run, kind, name = path.removeprefix("tinker://").split("/")
    return run, f"{kind}/{name}"


# Name of a method, without "_async" -> the positional and keyword arguments.
CALLS = {
    "ServiceClient": {
        "close": lambda s: ((), {"status": "success"}),
        "copy_weights": lambda s: ((s.state,), {}),
        "create_custom_loss": lambda s: ((compute_traced_loss,), {"input_ranks": {"logprobs": 1}}),
        "create_lora_training_client": lambda s: ((), {"base_model": "base", "rank": 4}),
        "create_rest_client": lambda s: ((), {}),
        "create_sampling_client": lambda s: ((), {"base_model": "base"}),
        "create_training_client_from_state": lambda s: ((s.state,), {}),
        "create_training_client_from_state_with_optimizer": lambda s: ((s.state,), {}),
        "get_console_url": lambda s: ((), {}),
        "get_server_capabilities": lambda s: ((), {}),
        "get_telemetry": lambda s: ((), {}),
    },
    "TrainingClient": {
        "create_sampling_client": lambda s: ((s.weights,), {}),
        "forward": lambda s: (([make_datum()], "cross_entropy"), {}),
        "forward_backward": lambda s: (([make_datum()], "cross_entropy"), {}),
        "forward_backward_custom": lambda s: (([make_datum()], compute_custom_loss), {}),
        "get_console_url": lambda s: ((), {}),
        "get_info": lambda s: ((), {}),
        "get_telemetry": lambda s: ((), {}),
        "get_tokenizer": lambda s: ((), {}),
        "load_state": lambda s: ((s.state,), {}),
        "load_state_with_optimizer": lambda s: ((s.state,), {}),
        "optim_step": lambda s: ((types.AdamParams(learning_rate=1e-3),), {}),
        "save_state": lambda s: ((f"state-{next_number()}",), {}),
        "save_weights_and_get_sampling_client": lambda s: ((), {}),
        "save_weights_external": lambda s: ((f"external-{next_number()}",), {}),
        "save_weights_for_sampler": lambda s: ((f"sampler-{next_number()}",), {}),
    },
    "SamplingClient": {
        "compute_logprobs": lambda s: ((PROMPT,), {}),
        "create": lambda s: ((s.service.holder,), {"base_model": "base"}),
        "from_sampler_handle": lambda s: ((s.sampling.get_sampler_handle(),), {}),
        "get_base_model": lambda s: ((), {}),
        "get_sampler_handle": lambda s: ((), {}),
        "get_telemetry": lambda s: ((), {}),
        "get_tokenizer": lambda s: ((), {}),
        "on_queue_state_change": lambda s: ((get_queue_state(), None), {}),
        "sample": lambda s: (
            (),
            {"prompt": PROMPT, "num_samples": 2, "sampling_params": PARAMETERS},
        ),
    },
    "AdminClient": {
        "get_audit_log": lambda s: ((), {}),
        "get_billing_usage": lambda s: (("2026-07-13T00:00:00Z", "2026-07-14T00:00:00Z"), {}),
        "get_current_checkpoint_storage_usage": lambda s: ((), {}),
        "get_telemetry": lambda s: ((), {}),
    },
    "RestClient": {
        "assign_session_project": lambda s: ((s.session, "project"), {}),
        "copy_weights": lambda s: ((s.state,), {}),
        "delete_checkpoint": lambda s: (split_path(s.save_extra_path()), {}),
        "delete_checkpoint_from_tinker_path": lambda s: ((s.save_extra_path(),), {}),
        "export_session_trace": lambda s: ((s.session,), {}),
        "get_audit_log": lambda s: ((), {}),
        "get_billing_usage": lambda s: (("2026-07-13T00:00:00Z", "2026-07-14T00:00:00Z"), {}),
        "get_current_checkpoint_storage_usage": lambda s: ((), {}),
        "get_checkpoint_archive_url": lambda s: (split_path(s.weights), {}),
        "get_checkpoint_archive_url_from_tinker_path": lambda s: ((s.weights,), {}),
        "get_external_weights_urls": lambda s: ((s.external,), {}),
        "get_sampler": lambda s: ((s.sampling._sampling_session_id,), {}),
        "get_server_capabilities": lambda s: ((), {}),
        "get_session": lambda s: ((s.session,), {}),
        "get_telemetry": lambda s: ((), {}),
        "get_training_run": lambda s: ((split_path(s.state)[0],), {}),
        "get_training_run_by_tinker_path": lambda s: ((s.state,), {}),
        "get_weights_info_by_tinker_path": lambda s: ((s.state,), {}),
        "list_checkpoints": lambda s: ((split_path(s.state)[0],), {}),
        "list_sessions": lambda s: ((), {}),
        "list_training_runs": lambda s: ((), {}),
        "list_user_checkpoints": lambda s: ((), {}),
        "publish_checkpoint_from_tinker_path": lambda s: ((s.state,), {}),
        "search_sessions": lambda s: ((types.SessionSearchRequest(display_name="x"),), {}),
        "set_checkpoint_ttl_from_tinker_path": lambda s: ((s.save_extra_path(), 7200), {}),
        "unpublish_checkpoint_from_tinker_path": lambda s: ((s.state,), {}),
        "whoami": lambda s: ((), {}),
    },
}
_NUMBER = 0


def next_number():
    global _NUMBER
    _NUMBER += 1
    return _NUMBER


def get_queue_state():
    from tinker.lib.api_future_impl import QueueState

    return QueueState.ACTIVE


def list_methods(kind):
    for name, _ in inspect.getmembers(kind, callable):
        if not name.startswith("_"):
            yield name


def classify_method(owner, kind, name, scene):
    build_arguments = CALLS[kind].get(name.removesuffix("_async"))
    if build_arguments is None:
        return "unknown"
    try:
        arguments, keywords = build_arguments(scene)
        call = getattr(owner, name)
        parameters = inspect.signature(call).parameters
        keywords = {key: value for key, value in keywords.items() if key in parameters}
        resolve(call(*arguments, **keywords))
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        return ("refused: " if any(part in text for part in REFUSALS) else "failed: ") + text[:300]
    return "supported"


def main():
    scene = Scene()
    owners = {
        "TrainingClient": scene.training,
        "SamplingClient": scene.sampling,
        "RestClient": scene.rest,
    }
    if hasattr(tinker, "AdminClient"):
        owners["AdminClient"] = tinker.AdminClient()
    owners["ServiceClient"] = scene.service  # the end comes last
    others = {name for name in tinker.__all__ if name.endswith("Client")} - owners.keys()
    assert not others, f"clients of the SDK that nothing here calls: {others}"
    results = {}
    for kind, owner in owners.items():
        # the end comes last
        names = sorted(list_methods(type(owner)), key=lambda name: (name.startswith("close"), name))
        for name in names:
            results[f"{kind}.{name}"] = classify_method(owner, kind, name, scene)
    print(json.dumps(results))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
