"""Training loops written with the tinker SDK, in its environment; prints the results for the test as JSON."""

import json
import os
import sys
import warnings

os.environ["TINKER_TELEMETRY"] = "0"
warnings.simplefilter("ignore")
if "EXTRA_PACKAGES" in os.environ:
    sys.path.append(os.environ["EXTRA_PACKAGES"])

import numpy as np  # noqa: E402
import tinker  # noqa: E402
from tinker import types  # noqa: E402

STEP = types.AdamParams(learning_rate=2e-2, eps=1e-8)


def resolve(value):
    """Return the client behind a future; older SDKs return the client itself."""
    return value.result() if callable(getattr(value, "result", None)) else value


def make_datum(tokens, **inputs):
    inputs = {name: np.asarray(values) for name, values in inputs.items()}
    return types.Datum(
        model_input=types.ModelInput.from_ints(list(tokens[:-1])),
        loss_fn_inputs={"target_tokens": np.array(tokens[1:]), **inputs},
    )


def train_supervised(service, results):
    training = resolve(service.create_lora_training_client(base_model="base", rank=8, seed=3))
    rng = np.random.default_rng(0)
    rows = [rng.integers(2, 60, 8).tolist() for _ in range(4)]
    data = [make_datum(row, weights=np.ones(7, np.float32)) for row in rows]
    losses = []
    for _ in range(8):
        forward_future = training.forward_backward(data, "cross_entropy")
        step_future = training.optim_step(STEP)  # in flight with the pass
        losses.append(forward_future.result().metrics["loss:sum"])
        step_future.result()
    results["sft_losses"] = losses
    before = training.forward(data, "cross_entropy").result()
    results["saved_loss"] = before.metrics["loss:sum"]
    results["logprobs"] = before.loss_fn_outputs[0]["logprobs"].tolist()
    path = training.save_state("done").result().path
    resumed = resolve(service.create_training_client_from_state_with_optimizer(path))
    results["resumed_loss"] = resumed.forward(data, "cross_entropy").result().metrics["loss:sum"]
    seen = []

    def loss(data, logprobs):
        seen.extend(logprob.detach().tolist() for logprob in logprobs)
        return -sum(logprob.sum() for logprob in logprobs), {"custom": 1.0}

    resumed.forward_backward_custom(data, loss).result()
    results["custom_logprobs"] = seen[0]
    sampling = training.save_weights_and_get_sampling_client()
    sampling = resolve(sampling)
    prompt = types.ModelInput.from_ints(rows[0][:3])
    parameters = types.SamplingParams(max_tokens=5, seed=1, stop=[])
    sequence = (
        sampling.sample(prompt=prompt, num_samples=1, sampling_params=parameters)
        .result()
        .sequences[0]
    )
    sequence_input = types.ModelInput.from_ints(rows[0][:3] + list(sequence.tokens))
    recomputed = sampling.compute_logprobs(sequence_input).result()[3:]
    results["sampled_difference"] = float(
        np.abs(np.array(recomputed) - np.array(sequence.logprobs)).max()
    )
    many = data * 300  # more than one request
    results["chunked_loss"] = training.forward(many, "cross_entropy").result().metrics["loss:sum"]
    results["whole_loss"] = 300 * results["saved_loss"]


def probe_waits(service, results):
    """Record which results a custom loss can wait for; the others would block it for ever."""
    training = resolve(service.create_lora_training_client(base_model="base", rank=4, seed=6))
    sampling = resolve(training.save_weights_and_get_sampling_client())
    data = [make_datum([3, 4, 5, 6], weights=np.ones(3, np.float32))]
    calls = {
        "same_run": lambda: training.forward(data, "cross_entropy"),
        "sampler": lambda: sampling.compute_logprobs(types.ModelInput.from_ints([3, 4, 5])),
    }

    def loss(data, logprobs):
        for name, call in calls.items():
            try:
                call().result(timeout=5)
                results["waits"][name] = True
            except TimeoutError:
                results["waits"][name] = False
        return -sum(logprob.sum() for logprob in logprobs), {}

    results["waits"] = {}
    training.forward_backward_custom(data, loss).result()


def train_policy(service, results):
    """Train a group-relative policy gradient that rewards odd tokens."""
    training = resolve(service.create_lora_training_client(base_model="base", rank=8, seed=4))
    prompt, parameters = [3, 4], types.SamplingParams(max_tokens=6, stop=[])
    rewards = []
    for _ in range(10):
        sampling = resolve(training.save_weights_and_get_sampling_client())
        answer = sampling.sample(
            prompt=types.ModelInput.from_ints(prompt), num_samples=48, sampling_params=parameters
        ).result()
        scores = np.array([np.mean(np.array(item.tokens) % 2) for item in answer.sequences])
        rewards.append(float(scores.mean()))
        advantages = (scores - scores.mean()) / (scores.std() + 1e-6)
        data = []
        for sequence, advantage in zip(answer.sequences, advantages, strict=True):
            tokens, skipped = prompt + list(sequence.tokens), len(prompt) - 1
            zeros = [0.0] * skipped
            data.append(
                make_datum(
                    tokens,
                    logprobs=np.array(zeros + list(sequence.logprobs), np.float32),
                    advantages=np.array(
                        zeros + [advantage / 100] * len(sequence.tokens), np.float32
                    ),
                )
            )
        forward_future = training.forward_backward(data, "importance_sampling")
        training.optim_step(STEP).result()
        forward_future.result()
    results["rewards"] = rewards


def train_stable(service, results):
    """Train stable_reinforce on samples of a stale sampler: odd tokens are rewarded, and weights are renewed rarely."""
    if not hasattr(types, "SampledProvenanceSpan"):
        return  # older SDKs
    training = resolve(service.create_lora_training_client(base_model="base", rank=8, seed=5))
    prompt, parameters = [3, 4], types.SamplingParams(max_tokens=6, stop=[])
    rewards = []
    for step in range(12):
        if step % 3 == 0:
            sampling = resolve(
                training.save_weights_and_get_sampling_client(record_stability_info=True)
            )
        answer = sampling.sample(
            prompt=types.ModelInput.from_ints(prompt), num_samples=48, sampling_params=parameters
        ).result()
        scores = np.array([np.mean(np.array(item.tokens) % 2) for item in answer.sequences])
        rewards.append(float(scores.mean()))
        data = []
        for sequence, score in zip(answer.sequences, scores - scores.mean(), strict=True):
            tokens, name = list(sequence.tokens), sequence.sequence_id
            datum = make_datum(
                prompt + tokens,
                advantages=np.array([0.0] + [score / 20] * len(tokens), np.float32),
            )
            data.append(
                datum.with_provenance(
                    model_input=[
                        types.PromptProvenanceSpan(sequence_id=name, length=2),
                        types.SampledProvenanceSpan(sequence_id=name, length=len(tokens) - 1),
                    ],
                    loss_fn_inputs=[
                        types.PromptProvenanceSpan(sequence_id=name, offset=1, length=1),
                        types.SampledProvenanceSpan(sequence_id=name, length=len(tokens)),
                    ],
                )
            )
        forward_future = training.forward_backward(data, "stable_reinforce")
        training.optim_step(STEP).result()
        results["stable_metrics"] = dict(forward_future.result().metrics)
    results["stable_rewards"] = rewards


def main():
    service, results = tinker.ServiceClient(), {}
    train_supervised(service, results)
    train_policy(service, results)
    train_stable(service, results)
    probe_waits(service, results)
    print(json.dumps(results))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
