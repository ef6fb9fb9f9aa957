"""Requests of a training service's clients as its store accepts them: bodies, and scripts of several clients."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from helpers.service import VOCAB, random_data
from posttrain.training_service.store import NewRequest, StoredRequest
from posttrain.training_service.wire.protobuf_messages import create_message, write_tensor
from rl_core.service.requests import Datum, ProvenanceSpan

OWNER, SESSION = "key-1", "s"


def _open_run(kind, target, seq, body, **more):
    payload = json.dumps(body).encode()
    return NewRequest(
        kind=kind,
        owner=OWNER,
        session_id=SESSION,
        target=target,
        seq=seq,
        payload=payload,
        content_type="json",
        **more,
    )


def create(run, *, base="base", rank=4, seed=0, optimizer="adamw", full=False):
    lora = None if full else {"rank": rank, "seed": seed}
    body = {
        "session_id": SESSION,
        "model_seq_id": 0,
        "base_model": base,
        "lora_config": lora,
        "optimizer_config": {"type": optimizer},
    }
    return _open_run("create_model", run, 0, body, facts={"seed": seed})


def loss(run, seq, data, loss_fn="cross_entropy", forward_only=False, **options):
    body = create_message("ForwardBackwardRequest")
    body.model_id, body.seq_id, body.loss_fn, body.forward_only = run, seq, loss_fn, forward_only
    for name, value in options.items():
        body.loss_fn_config[name] = value
    for datum in data:
        message = body.data.add()
        message.model_input.add().encoded_text.tokens = (
            np.asarray(datum.tokens).astype("<i4").tobytes()
        )
        for name, array in datum.inputs.items():
            write_tensor(message.loss_fn_inputs[name], np.asarray(array))
        for spans, field in (
            (datum.token_spans, message.model_input_spans),
            (datum.target_spans, message.loss_fn_input_spans),
        ):
            for span in spans:
                tokens = getattr(field.add(), f"{span.source}_tokens")
                tokens.sequence_id, tokens.offset = span.sequence_id, span.offset
                tokens.length = span.length
                tokens.SetInParent()
    payload = body.SerializeToString(deterministic=True)
    return NewRequest(
        kind="forward_backward",
        owner=OWNER,
        session_id=SESSION,
        target=run,
        seq=seq,
        payload=payload,
        content_type="protobuf",
    )


def update(run, seq, learning_rate=1e-2, **adam):
    return _open_run(
        "optim_step",
        run,
        seq,
        {"model_id": run, "seq_id": seq, "adam_params": {"learning_rate": learning_rate, **adam}},
    )


def save(run, seq, name, **more):
    return _open_run(
        "save_weights", run, seq, {"model_id": run, "seq_id": seq, "path": name, **more}
    )


def save_external(run, seq, name):
    return _open_run(
        "save_weights_external", run, seq, {"model_id": run, "seq_id": seq, "path": name}
    )


def save_for_sampler(run, seq, name):
    return _open_run(
        "save_weights_for_sampler", run, seq, {"model_id": run, "seq_id": seq, "path": name}
    )


def publish(run, seq, sampler, kind="snapshot"):
    body = {"model_id": run, "seq_id": seq, "sampling_session_seq_id": seq, "kind": kind}
    return _open_run(
        "save_weights_for_sampler", run, seq, body, facts={"sampling_session_id": sampler}
    )


def load(run, seq, path, optimizer=True):
    body = {"model_id": run, "seq_id": seq} if seq else {"session_id": SESSION, "model_seq_id": 0}
    return _open_run("load_weights", run, seq, {**body, "path": path, "optimizer": optimizer})


def open_sampler(sampler, *, base=None, path=None):
    body = {
        "session_id": SESSION,
        "sampling_session_seq_id": 0,
        "base_model": base,
        "model_path": path,
    }
    return _open_run("create_sampler", sampler, 0, body)


def sample(sampler, seq, prompt=(5, 6, 7), num_samples=2, max_tokens=4, temperature=1.0, **more):
    body = {
        "sampling_session_id": sampler,
        "seq_id": seq,
        "num_samples": num_samples,
        "prompt": {
            "chunks": [{"type": "encoded_text", "tokens": [int(token) for token in prompt]}]
        },
        "sampling_params": {"max_tokens": max_tokens, "temperature": temperature, "stop": []},
        **more,
    }
    ids = [f"{sampler}-{seq}-{index}" for index in range(num_samples)]
    facts = {"seed": 1000 + seq, "sample_sequence_ids": ids}
    return _open_run("sample", sampler, seq, body, facts=facts)


def evaluate(
    run, number, model, against=None, texts=((5, 6, 7, 8), (9, 8, 7)), prompts=((5, 6),), **more
):
    """Evaluate; number: of the evaluation among its run's; the server draws it from the evaluation's id."""
    body = {
        "model": model,
        "against": against,
        "texts": [[int(token) for token in text] for text in texts],
        "prompts": [[int(token) for token in prompt] for prompt in prompts],
        "num_samples": 2,
        "resamples": 20,
        "sampling": {"max_tokens": 4, "stop": []},
        **more,
    }
    return _open_run("evaluate", run, number, body, facts={"evaluation_id": f"e-{run}-{number}"})


def unload(run, seq):
    return _open_run("unload_model", run, seq, {"model_id": run, "seq_id": seq})


# ------------------------------------------------------------------------------------------------- recorded sequences


def read_sequences(stored):
    """Return id and tokens of every sequence of a sample's answer."""
    assert stored.state == "done", stored.error
    response = create_message("SampleResponse")
    response.ParseFromString(stored.answer)
    ids = stored.facts["sample_sequence_ids"]
    return [
        (sequence_id, np.frombuffer(sequence.tokens, "<i4"))
        for sequence_id, sequence in zip(ids, response.sequences, strict=True)
    ]


def build_datum(sequence_id, tokens, advantage, prompt):
    """Build a datum as the cookbook does: targets of the prompt are 0, spans name the sequence."""
    skipped, size = len(prompt) - 1, len(tokens)
    spans = (
        ProvenanceSpan("prompt", sequence_id, 0, len(prompt)),
        ProvenanceSpan("sampled", sequence_id, 0, size - 1),
    )
    target_spans = (
        ProvenanceSpan("prompt", sequence_id, 1, skipped),
        ProvenanceSpan("sampled", sequence_id, 0, size),
    )
    inputs = {
        "target_tokens": np.concatenate([np.zeros(skipped, int), tokens]),
        "logprobs": np.zeros(skipped + size, np.float32),
        "advantages": np.pad(np.full(size, advantage, np.float32), (skipped, 0)),
    }
    return Datum(np.concatenate([prompt, tokens[:-1]]), inputs, spans, target_spans)


def build_recorded_data(stored, prompt, advantages=(1.0, -0.5)):
    """Build the data of `stable_reinforce` from a sample's answer, one advantage for each sequence."""
    return tuple(
        build_datum(*sequence, advantage, prompt)
        for sequence, advantage in zip(read_sequences(stored), advantages, strict=True)
    )


# ------------------------------------------------------------------------------------------------------------ scripts


@dataclass(frozen=True)
class Line:
    """One request of a script, and the requests whose answers its client awaits before it sends this one."""

    request: NewRequest | Callable[[StoredRequest], NewRequest]  # or what builds it from that one
    after: int = -1  # place in the script of the last one that has to be final; -1 = none


def train_on_recorded(run, seq, prompt, sampled):
    """Pass the sequences of a sample's answer to `stable_reinforce`."""
    return loss(run, seq, build_recorded_data(sampled, prompt), "stable_reinforce", kl_coeff=0.05)


def script(run: str, number: int, steps: int) -> list[Line]:
    """Run a client: train with the next requests in flight, save, evaluate, sample from fresh weights and train on it,
    load.

    Args:
        number: of the client; sets its data, rank, losses and optimizer.
    """
    rng = np.random.default_rng(1000 + number)
    lines: list[Line] = []
    seq, sampler_seq = 0, 0

    def add(request, after=-1):
        lines.append(Line(request, after))
        return len(lines) - 1

    optimizer = "dimuon" if number % 4 == 3 else "adamw"
    created = add(create(run, rank=2 + number % 3, seed=number, optimizer=optimizer))
    opened = add(open_sampler(f"{run}.base", base="base"))
    for step in range(steps):
        policy = (step + number) % 2 == 1
        for part in range(1 + step % 2):  # gradients add up
            seq += 1
            data = random_data(int(rng.integers(1 << 30)), rows=2, policy=policy)
            name = ("ppo", "conservative_ppo")[step % 3 == 1] if policy else "cross_entropy"
            add(loss(run, seq, data, name, forward_only=step % 5 == 4 and part == 0), created)
        if step == 2:
            seq += 1
            add(
                loss(run, seq, random_data(number, rows=1), "no_such_loss"), created
            )  # fails, and the run continues
        seq += 1
        add(update(run, seq, weight_decay=0.1, grad_clip_norm=float(step % 2)), created)
        if step % 3 == 2:
            seq += 1
            name = f"{run}.fresh.{step}"
            published = add(publish(run, seq, name), created)
            prompt = rng.integers(2, VOCAB, 4)
            sampled = add(sample(name, 0, prompt, record_stability_info=True), published)
            seq += 1
            add(partial(train_on_recorded, run, seq, prompt), sampled)
            add(
                sample(f"{run}.base", sampler_seq, rng.integers(2, VOCAB, 3), prompt_logprobs=True),
                opened,
            )
            sampler_seq += 1
        if step % 4 == 3:
            seq += 1
            saved = add(save(run, seq, f"at-{step}"), created)
            texts = rng.integers(2, VOCAB, (3, 5))
            add(
                evaluate(
                    run, step, f"tinker://{run}/weights/at-{step}", "base", texts, seed=number
                ),
                saved,
            )
            if step % 8 == 7:
                seq += 1
                add(
                    load(
                        run, seq, f"tinker://{run}/weights/at-{step - 4}", optimizer=number % 2 == 0
                    ),
                    saved,
                )
    add(save(run, seq + 1, "last"), created)
    return lines
