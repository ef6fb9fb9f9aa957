"""Hostile requests over HTTP to a running service: each gets a user error and changes nothing else.

Bodies that misstate their contents are tested in test_wire.py, invalid engine requests in test_request_limits.py,
foreign resources, repeated numbers and a thousand idle polls in test_http_access.py, clocks in test_service_clock.py.
"""

import numpy as np
import pytest
from helpers.service import VOCAB, random_data
from helpers.service_clients import loss

from posttrain.training_service.wire.protobuf_messages import create_message
from rl_core.service.requests import Datum

MIB = 1 << 20
TOKENS = np.arange(2, 8)


def make_datum(**changes):
    inputs = {
        "target_tokens": TOKENS + 1,
        "logprobs": -np.ones(6, np.float32),
        "advantages": np.ones(6, np.float32),
    }
    return Datum(changes.pop("tokens", TOKENS), {**inputs, **changes})


def to_array(values, dtype=np.float32):
    return np.array(values, dtype)


CASES = {
    "NaN log-probabilities": (
        dict(logprobs=to_array([0, 0, np.nan, 0, 0, 0])),
        r"['logprobs']: nan at [2]",
    ),
    "infinite log-probabilities": (
        dict(logprobs=to_array([0, -np.inf, 0, 0, 0, 0])),
        "expected finite",
    ),
    "NaN advantages": (dict(advantages=to_array([np.nan] * 6)), "['advantages']: nan at [0]"),
    "a token beyond the vocabulary": (
        dict(tokens=to_array([2, 3, VOCAB, 4, 5, 6], int)),
        f"token {VOCAB} at 2 is outside",
    ),
    "the largest token": (dict(tokens=to_array([2**31 - 1] * 6, int)), "outside the vocabulary"),
    "a negative token": (
        dict(tokens=to_array([2, 3, -1, 4, 5, 6], int)),
        "token -1 at 2 is outside",
    ),
    "a negative target": (
        dict(target_tokens=to_array([-1] * 6, int)),
        "['target_tokens']: token -1 at 0",
    ),
    "a target beyond the vocabulary": (
        dict(target_tokens=to_array([2**40] * 6, int)),
        "token 1099511627776 at 0",
    ),
    "targets as floats": (dict(target_tokens=to_array([2] * 6)), "float32, expected integers"),
    "log-probabilities in a square": (dict(logprobs=np.zeros((6, 6), np.float32)), "shape (6, 6)"),
    "log-probabilities of fewer tokens": (dict(logprobs=np.zeros(5, np.float32)), "shape (5,)"),
    "no log-probabilities": (dict(logprobs=np.zeros(0, np.float32)), "shape (0,)"),
    "advantages as whole numbers": (dict(advantages=np.ones(6, int)), None),  # are numbers
}


@pytest.fixture(scope="module")
def run(service):
    return service.new_run(service.session(), seed=5)


@pytest.fixture
def next_seq(service, run):
    return service.store.find_run(run).next_seq


def read_error(service, promise):
    result = service.result(promise)
    assert result["category"] == "user"
    return result["error"]


def compute_logprobs(service, run, seq):
    """Compute the log-probabilities of a fixed request, which changes nothing."""
    message = create_message("ForwardBackwardOutput")
    message.ParseFromString(
        service.result(service.forward_backward(run, seq, random_data(7), forward_only=True))
    )
    return message.loss_fn_outputs[0].fields["logprobs"].data


@pytest.mark.parametrize("case", CASES)
def test_a_bad_tensor_is_the_users_fault_and_changes_nothing(service, run, next_seq, case):
    changes, text = CASES[case]
    before = compute_logprobs(service, run, next_seq)
    promise = service.forward_backward(
        run, next_seq + 1, [make_datum(), make_datum(**changes)], loss_fn="ppo"
    )
    if text is None:
        assert isinstance(service.result(promise), bytes)
    else:
        message = read_error(service, promise)
        assert text in message and "data[1]" in message
    stepped = service.result(
        service.post("optim_step", {"model_id": run, "seq_id": next_seq + 2, "adam_params": {}})
    )
    # the valid datum of the same request contributes no gradient either
    assert stepped["metrics"]["empty:mean"] == float(text is not None)
    if text is not None:
        assert compute_logprobs(service, run, next_seq + 3) == before


def truncate(payload):
    return payload[: len(payload) * 2 // 3]


def set_unknown_dtype(payload):
    """Replace a dtype by an unknown number."""
    body = create_message("ForwardBackwardRequest")
    body.ParseFromString(payload)
    body.data[0].loss_fn_inputs["advantages"].dtype = 77
    return body.SerializeToString()


def claim_size(size):
    """Return a function that claims another size for a tensor of 6 numbers."""

    def spoil(payload):
        body = create_message("ForwardBackwardRequest")
        body.ParseFromString(payload)
        tensor = body.data[0].loss_fn_inputs["advantages"]
        del tensor.shape[:]
        tensor.shape.append(size)
        return body.SerializeToString()

    return spoil


LIES = [
    (set_unknown_dtype, "dtype 77"),
    (claim_size(7), "do not fill shape"),
    (claim_size(1 << 40), "is not possible"),
]


@pytest.mark.parametrize(("spoil", "text"), LIES)
def test_a_lying_body_is_the_users_fault_as_its_result(service, run, next_seq, spoil, text):
    payload = spoil(loss(run, next_seq, [make_datum()], "ppo").payload)
    assert text in read_error(service, service.raw("forward_backward", payload))
    assert compute_logprobs(service, run, next_seq + 1)


def test_a_truncated_body_is_refused_and_takes_no_number(service, run, next_seq):
    payload = loss(run, next_seq, [make_datum()], "ppo").payload
    assert service.raw("forward_backward", truncate(payload), status=400)["detail"]
    assert isinstance(service.result(service.raw("forward_backward", payload)), bytes)


def test_bodies_of_100_megabytes_are_refused_without_being_stored(service, run, next_seq):
    stored = sum(path.stat().st_size for path in service.folder.rglob("*") if path.is_file())
    payload = loss(run, next_seq, [make_datum()], "ppo").payload + bytes(100 * MIB)
    assert "at most 67108864 are accepted" in read_error(
        service, service.raw("forward_backward", payload)
    )
    body = b'{"model_id": "' + run.encode() + b'", "seq_id": 9, "x": "' + b"x" * (100 * MIB) + b'"}'
    for route in ("optim_step", "asample", "create_session", "retrieve_future"):
        service.call("POST", route, content=body, status=413)
    assert (
        sum(path.stat().st_size for path in service.folder.rglob("*") if path.is_file())
        < stored + 8 * MIB
    )
    assert compute_logprobs(service, run, next_seq + 1)


NAMES = (
    "..",
    "../x",
    "../../etc/passwd",
    "a/../../x",
    "/etc/passwd",
    ".hidden",
    "a/b",
    "a\\..\\b",
    "%2e%2e",
    "a\x00b",
)


@pytest.mark.parametrize(
    "route", ["save_weights", "save_weights_for_sampler", "save_weights_external"]
)
def test_names_with_dots_and_slashes_leave_no_file(service, run, next_seq, route):
    before = sorted(
        path for path in service.folder.parent.rglob("*") if "tracking" not in path.parts
    )
    for number, name in enumerate(NAMES):
        promise = service.post(route, {"model_id": run, "seq_id": next_seq + number, "path": name})
        message = read_error(service, promise)
        assert "cannot be a name" in message or "path" in message, name
    after = sorted(
        path for path in service.folder.parent.rglob("*") if "tracking" not in path.parts
    )
    assert [path for path in after if path not in before and "snapshots" not in path.parts] == []


def test_foreign_paths_with_dots_lead_nowhere(service, run, next_seq):
    for number, path in enumerate(
        ("tinker://../weights/x", "tinker://x/weights/..", "tinker://x/weights/../../y", "/etc")
    ):
        assert read_error(
            service,
            service.post(
                "load_weights",
                {"model_id": run, "seq_id": next_seq + number, "path": path, "optimizer": False},
            ),
        )
        service.post("weights_info", {"tinker_path": path}, status=422)
        body = {
            "session_id": run.partition(":")[0],
            "sampling_session_seq_id": 50 + number,
            "model_path": path,
        }
        service.post("create_sampling_session", body, status=422)
    for subpath in ("..%2f..%2f..%2fetc%2fpasswd", "weights%2f..%2f..", "weights/..%5c.."):
        response = service.client.get(
            f"/api/v1/training_runs/{run}/checkpoints/{subpath}/external_weights_urls"
        )
        assert response.status_code in (404, 405, 422) and "root:" not in response.text
