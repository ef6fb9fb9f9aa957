"""Bodies of the clients' requests and answers: bytes of the public client, hostile bytes, layouts of answers."""

import base64
import json

import numpy as np
import pytest

from posttrain.training_service.commands import (
    LoadWeights,
    OpenSampler,
    SaveForSampler,
    SaveWeights,
)
from posttrain.training_service.paths import parse_tinker_path
from posttrain.training_service.wire import protobuf_messages, request_header
from posttrain.training_service.wire.codec import decode_request, encode_result
from posttrain.training_service.wire.protobuf_messages import create_message
from posttrain.training_service.wire.request_bodies import CreateSession, parse_request_body
from posttrain.training_service.wire.request_header import read_request_header
from rl_core.errors import ServiceError
from rl_core.service.requests import AdamParameters
from rl_core.service.results import (
    ForwardBackwardResult,
    OptimStepResult,
    SampledSequence,
    SampleResult,
    TopLogprobs,
)

# Written by the public client 0.38.0: two datums, the second with sparse targets; forward_only; a text option.
GOLDEN = base64.b64decode(
    "CglzOnRyYWluOjAQrAIaZAoQCg4KDAMAAAAEAAAABQAAABIwCg10YXJnZXRfdG9rZW5zEh8KGAQAAAAAAAAABQAAAAAAAAAGAAAAAAAAABgCIgEDEh4K"
    "B3dlaWdodHMSEwoMAAAAPwAAgL8AAAAAGAEiAQMazgEKDAoKCggHAAAACAAAABJnCg10YXJnZXRfdG9rZW5zElYSTgoYCQAAAAAAAAAKAAAAAAAAAAsA"
    "AAAAAAAAEhgAAAAAAAAAAAEAAAAAAAAAAwAAAAAAAAAaGAIAAAAAAAAAAAAAAAAAAAABAAAAAAAAABgCIgICAxJVCgd3ZWlnaHRzEkoSQgoMAACAPgAA"
    "AD8AAEA/EhgAAAAAAAAAAAEAAAAAAAAAAwAAAAAAAAAaGAIAAAAAAAAAAAAAAAAAAAABAAAAAAAAABgBIgICAyIDcHBvKh0KEmNsaXBfbG93X3RocmVz"
    "aG9sZBEAAAAAAADoPzABOh8KEmNsaXBfbG93X3RocmVzaG9sZBIJCQAAAAAAAOg/OgsKBG5hbWUSAxIBeA=="
)
RUN = "s:train:0"


def build_request(**changes):
    """Build a request of one datum with a modified tensor of weights."""
    result = create_message("ForwardBackwardRequest")
    result.model_id, result.seq_id, result.loss_fn = RUN, 1, "cross_entropy"
    datum = result.data.add()
    datum.model_input.add().encoded_text.tokens = np.arange(4, dtype="<i4").tobytes()
    tensor = datum.loss_fn_inputs["weights"]
    tensor.dtype, tensor.dense = 1, np.ones(4, "<f4").tobytes()
    tensor.shape.append(4)
    for name, value in changes.items():
        if name == "shape":
            del tensor.shape[:]
            tensor.shape.extend(value)
        elif name == "sparse":
            (
                tensor.sparse_csr.values,
                tensor.sparse_csr.crow_indices,
                tensor.sparse_csr.col_indices,
            ) = (
                np.array(part, dtype).tobytes()
                for part, dtype in zip(value, ("<f4", "<i8", "<i8"), strict=True)
            )
        else:
            setattr(tensor, name, value)
    return result


def decode(payload):
    return decode_request("forward_backward", payload, "protobuf", {}, RUN)


def test_the_public_clients_bytes():
    assert read_request_header(GOLDEN) == (RUN, 300)
    request = decode(GOLDEN)
    assert request.forward_only and request.loss_fn == "ppo"
    assert request.loss_fn_config == {"clip_low_threshold": 0.75, "name": "x"}
    first, second = request.data
    assert first.tokens.tolist() == [3, 4, 5] and first.inputs["target_tokens"].tolist() == [
        4,
        5,
        6,
    ]
    assert (
        first.inputs["weights"].tolist() == [0.5, -1.0, 0.0]
        and first.inputs["weights"].dtype == np.float32
    )
    assert second.inputs["target_tokens"].tolist() == [[0, 0, 9], [10, 11, 0]]
    assert second.inputs["weights"].tolist() == [[0, 0, 0.25], [0.5, 0.75, 0]]


def test_every_truncation_of_a_message_is_refused():
    for end in range(len(GOLDEN)):
        try:
            request = decode(GOLDEN[:end])
        except ServiceError as error:
            assert error.category == "user"
        else:  # it ends after a complete field, so protobuf sees fewer fields
            assert end >= 14 and len(request.data) <= 2


def test_no_changed_byte_crashes():
    rng = np.random.default_rng(0)
    outcomes = set()
    for position in range(len(GOLDEN)):
        broken = bytearray(GOLDEN)
        broken[position] ^= int(rng.integers(1, 256))
        try:
            decode(bytes(broken))
            outcomes.add("taken")
        except ServiceError as error:
            assert error.category == "user", error
            outcomes.add("refused")
    assert outcomes == {"taken", "refused"}


LIES = {
    "bytes that are no floats": (
        lambda: build_request(dense=b"123"),
        "3 bytes are not a multiple of float32",
    ),
    "a shape that the values do not fill": (
        lambda: build_request(shape=[5]),
        r"4 values do not fill shape \(5,\)",
    ),
    "a negative size": (lambda: build_request(shape=[-4]), "is not possible"),
    "a size beyond all memory": (
        lambda: build_request(dense=b"", shape=[0, 1 << 62]),
        "is not possible",
    ),
    "a hundred dimensions": (lambda: build_request(shape=[4] + [1] * 99), "is not possible"),
    "an unknown type": (lambda: build_request(dtype=9), "dtype 9, expected one of"),
    "no type": (lambda: build_request(dtype=0), "dtype 0"),
    "a sparse vector": (
        lambda: build_request(sparse=([1.0], [0, 1], [0]), shape=[4]),
        "two dimensions",
    ),
    "sparse rows that fall": (
        lambda: build_request(sparse=([1.0, 2.0], [0, 2, 1], [0, 0]), shape=[2, 2]),
        "must rise",
    ),
    "a sparse column outside": (
        lambda: build_request(sparse=([1.0], [0, 1], [7]), shape=[1, 2]),
        "must lie in 0..1",
    ),
    "a sparse tensor of 16 GB": (
        lambda: build_request(sparse=([], [0], []), shape=[1 << 16, 1 << 16]),
        "more than 67108864",
    ),
}


@pytest.mark.parametrize("case", LIES)
def test_lying_tensors(case):
    make, text = LIES[case]
    with pytest.raises(ServiceError, match=text) as caught:
        decode(make().SerializeToString())
    assert caught.value.category == "user" and "loss_fn_inputs['weights']" in str(caught.value)


def test_sparse_tensors_of_one_request_share_their_bound(monkeypatch):
    monkeypatch.setattr(protobuf_messages.DenseBudget.__init__, "__defaults__", (10,))
    message = build_request(sparse=([1.0], [0, 1, 1], [0]), shape=[2, 3])
    assert decode(message.SerializeToString()).data[0].inputs["weights"].tolist() == [
        [1, 0, 0],
        [0, 0, 0],
    ]
    message.data.append(message.data[0])
    with pytest.raises(ServiceError, match=r"data\[1\].*sparse tensors of more than"):
        decode(message.SerializeToString())


def test_other_parts_of_a_prompt_and_options_without_a_value():
    result = build_request()
    result.data[0].model_input.add().image.data = b"png"
    with pytest.raises(
        ServiceError, match=r"data\[0\].model_input: image chunks are not supported"
    ):
        decode(result.SerializeToString())
    result = build_request()
    result.loss_fn_config_v2["beta"].SetInParent()
    with pytest.raises(ServiceError, match="'beta' is neither"):
        decode(result.SerializeToString())


def test_bfloat16_and_an_absent_shape():
    values = np.array([1.5, -2.0], np.float32)
    halves = (values.view(np.uint32) >> 16).astype("<u2").tobytes()
    request = decode(build_request(dense=halves, dtype=4, shape=[]).SerializeToString())
    assert request.data[0].inputs["weights"].tolist() == [1.5, -2.0]


def test_a_million_empty_parts_are_counted_not_built(monkeypatch):
    monkeypatch.setattr(request_header, "MAX_FIELDS", 1000)
    many = GOLDEN + b"\x1a\x00" * 1000
    with pytest.raises(ServiceError, match="more than 1000 parts"):
        read_request_header(many)
    inside = GOLDEN + b"\x1a\xd0\x0f" + b"\x0a\x00" * 1000
    with pytest.raises(ServiceError, match="more than 1000 parts"):
        read_request_header(inside)


def test_the_head_of_a_body_that_is_too_large_is_enough():
    assert read_request_header(GOLDEN[:60], is_complete=False) == (RUN, 300)
    for cut in (b"", GOLDEN[:5], b"\x0a\xff\xff\xff\xff\xff", b"{}"):
        with pytest.raises(ServiceError):
            read_request_header(cut, is_complete=False)


def decode_step(**parameters):
    payload = json.dumps({"model_id": RUN, "seq_id": 1, **parameters}).encode()
    return decode_request("optim_step", payload, "json", {}, RUN)


def test_parameters_of_updates():
    assert decode_step(adam_params={}).adam == AdamParameters()
    assert decode_step(adam_params={"learning_rate": 0.5, "new": 1}).adam.learning_rate == 0.5
    result = decode_step(
        optimizer_params={"type": "dimuon", "learning_rate": 0.1, "beta1": 0.8, "grad_clip_norm": 2}
    )
    assert result.muon_momentum == 0.8 and result.adam == AdamParameters(
        learning_rate=0.1, grad_clip_norm=2.0
    )
    for wrong, text in (
        ({}, "expected either"),
        ({"adam_params": {}, "optimizer_params": {"type": "adamw"}}, "expected either"),
        ({"optimizer_params": {"type": "sgd"}}, "expected adamw or dimuon"),
        (
            {"adam_params": {"learning_rate": True}},
            "adam_params.learning_rate: expected a number, found true",
        ),
        ({"adam_params": {"eps": False}}, "adam_params.eps: expected a number, found false"),
        ({"optimizer_params": {"weight_decay": True}}, "optimizer_params.weight_decay: expected"),
    ):
        with pytest.raises(ServiceError, match=text):
            decode_step(**wrong)


def test_saving_and_loading():
    def decode_fields(name, facts=None, **fields):
        payload = json.dumps({"model_id": RUN, "seq_id": 3, **fields}).encode()
        return decode_request(name, payload, "json", facts or {}, RUN)

    assert decode_fields("save_weights") == SaveWeights(
        model_id=RUN, path=f"tinker://{RUN}/weights/checkpoint-000003"
    )
    assert decode_fields(
        "save_weights_for_sampler", {"sampling_session_id": "s:sample:2"}, kind="inflight"
    ) == SaveForSampler(model_id=RUN, sampler_id="s:sample:2", kind="inflight")
    assert (
        decode_fields("save_weights_for_sampler", path="x").path
        == f"tinker://{RUN}/sampler_weights/x"
    )
    assert decode_fields("save_weights_external", path="x").external
    path = "tinker://a:train:1/weights/x"
    assert decode_fields("load_weights", path=path, optimizer=True) == LoadWeights(
        model_id=RUN, path=path, optimizer=True
    )
    session = {"session_id": "s", "sampling_session_seq_id": 1}
    request = decode_request(
        "create_sampler",
        json.dumps(session | {"model_path": path}).encode(),
        "json",
        {},
        "s:sample:1",
    )
    assert request == OpenSampler(sampler_id="s:sample:1", path=path)
    refused = {
        "age_encryption_recipients": (
            "save_weights_external",
            {"path": "x", "age_encryption_recipients": ["age1"]},
        ),
        "cannot be a name": ("save_weights", {"path": "../x"}),
        "is for other programs": ("load_weights", {"path": "tinker://a/external_weights/x"}),
        "holds no optimizer": (
            "load_weights",
            {"path": "tinker://a/sampler_weights/x", "optimizer": True},
        ),
        "the fault before": ("save_weights", {}),
    }
    for text, (kind, fields) in refused.items():
        with pytest.raises(ServiceError, match=text):
            decode_fields(kind, {"refused": text} if text == "the fault before" else None, **fields)


PATHS = (
    "",
    "tinker://",
    "tinker://a/weights",
    "tinker://a/weights/b/c",
    "tinker://a/x/b",
    "tinker://../weights/b",
    "tinker://a/weights/..",
    "tinker://a/weights/.x",
    "/etc/passwd",
    "tinker://a/weights/b\n",
    "tinker://a/weights/" + "x" * 201,
    "TINKER://a/weights/b",
)


@pytest.mark.parametrize("path", PATHS)
def test_paths_that_are_none(path):
    with pytest.raises(ServiceError):
        parse_tinker_path(path)


def test_a_body_that_is_no_object_is_refused_with_a_message():
    for wrong, text in (
        (b"[1]", "body"),
        (b"{", "body"),
        (b'{"tags": 3}', "tags"),
        (b"[" * 5000, "body"),
    ):
        with pytest.raises(ServiceError, match=text):
            parse_request_body(CreateSession, wrong)


def encode_sample_body(**fields):
    values = {
        "sampling_session_id": "x",
        "seq_id": 0,
        "prompt": {"chunks": [{"tokens": [1, 2]}, {"tokens": [3]}]},
    }
    return json.dumps(values | fields).encode()


def test_requests_for_samples():
    request = decode_request(
        "sample", encode_sample_body(sampling_params={"stop": "a"}), "json", {"seed": 7}, "x"
    )
    assert (
        request.prompt.tolist() == [1, 2, 3]
        and request.seed == 7
        and request.parameters.stop == ("a",)
    )
    stops = {None: None, "[]": (), "[1, 2]": (1, 2), '["a"]': ("a",)}
    for text, expected in stops.items():
        stop = None if text is None else json.loads(text)
        payload = encode_sample_body(sampling_params={"stop": stop, "seed": 3})
        request = decode_request("sample", payload, "json", {"seed": 7}, "x")
        assert (request.parameters.stop, request.seed) == (expected, 3)
    tensor = {
        "data": [5, 6],
        "dtype": "int64",
        "shape": [2, 2],
        "sparse_crow_indices": [0, 1, 2],
        "sparse_col_indices": [1, 0],
    }
    request = decode_request(
        "sample", encode_sample_body(target_prompt_logprobs=tensor), "json", {"seed": 7}, "x"
    )
    assert request.target_prompt_logprobs.tolist() == [[-1, 5], [6, -1]]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"prompt_alt_tokens_k": 2}, "prompt_alt_tokens_k is not supported"),
        ({"prompt_logprobs_last_n": 1}, "with prompt_logprobs"),
        ({"prompt_logprobs_last_n": 3, "prompt_logprobs": True}, "expected 1 to 2"),
        ({"prompt": {"chunks": [{"type": "image"}]}}, "image chunks are not supported"),
        ({"prompt": {"chunks": [{"tokens": [1 << 80]}]}}, "beyond"),
        ({"target_prompt_logprobs": {"data": [1], "dtype": "int64", "shape": [3]}}, "shape"),
        (
            {"target_prompt_logprobs": {"data": [1], "dtype": "int64", "shape": [1, 2]}},
            "do not fill",
        ),
        ({"sampling_params": {"temperature": "hot"}}, "temperature"),
        (
            {"sampling_params": {"temperature": True}},
            "sampling_params.temperature: expected a numb",
        ),
        ({"sampling_params": {"top_p": True}}, "sampling_params.top_p: expected a number"),
        (
            {"sampling_params": {"max_tokens": True}},
            "sampling_params.max_tokens: expected a number",
        ),
        ({"sampling_params": {"stop": [True]}}, "sampling_params.stop: expected numbers"),
        ({"num_samples": True}, "num_samples: expected a number, found true"),
        ({"seq_id": False}, "seq_id: expected a number, found false"),
        ({"prompt": {"chunks": [{"tokens": [1, True]}]}}, "tokens: expected numbers, found true"),
        ({"target_prompt_logprobs": {"data": [True], "dtype": "int64"}}, "data: expected numbers"),
    ],
)
def test_samples_that_are_refused(fields, text):
    with pytest.raises(ServiceError, match=text) as caught:
        decode_request("sample", encode_sample_body(**fields), "json", {"seed": 7}, "x")
    assert caught.value.category == "user"


def test_answers_of_ragged_datums():
    outputs = (
        {"logprobs": np.array([-1, -2, -3], np.float32)},
        {"logprobs": np.array([-4], np.float32)},
        {"logprobs": np.array([[-5, -6], [-7, -8]], np.float32)},
    )
    data, kind = encode_result(
        "forward_backward", ForwardBackwardResult(outputs=outputs, metrics={"loss:sum": 2.5})
    )
    message = create_message("ForwardBackwardOutput")
    message.ParseFromString(data)
    assert kind == "protobuf" and dict(message.metrics) == {"loss:sum": 2.5}
    first, second = message.loss_fn_outputs
    field = first.fields["logprobs"]
    assert first.num_datums == 2 and np.frombuffer(field.offsets, "<i8").tolist() == [0, 12, 16]
    assert (
        np.frombuffer(field.data, "<f4").tolist() == [-1, -2, -3, -4]
        and list(field.trailing_shape) == []
    )
    field = second.fields["logprobs"]
    assert list(field.trailing_shape) == [2] and np.frombuffer(field.data, "<f4").tolist() == [
        -5,
        -6,
        -7,
        -8,
    ]


def test_metrics_without_a_value_are_left_out_of_json():
    data, kind = encode_result(
        "optim_step", OptimStepResult(metrics={"a:mean": float("nan"), "b:mean": 1.0})
    )
    assert (json.loads(data), kind) == ({"metrics": {"b:mean": 1.0}}, "json")


def test_answers_of_samples():
    top = TopLogprobs(np.array([[4], [5], [6]], np.int32), np.array([[-1], [-2], [-3]], np.float32))
    answer = SampleResult(
        sequences=(
            SampledSequence(
                tokens=np.array([7, 8]), logprobs=np.array([-1.0, -2.0]), stop_reason="length"
            ),
        ),
        prompt_logprobs=np.array([np.nan, -1, -2], np.float32),
        topk_prompt=top,
        target_prompt_logprobs=np.array([[np.nan, -5.0], [-6.0, np.nan]], np.float32),
    )
    tensor = {
        "data": [5, 6],
        "dtype": "int64",
        "shape": [2, 2],
        "sparse_crow_indices": [0, 1, 2],
        "sparse_col_indices": [1, 0],
    }
    payload = encode_sample_body(
        target_prompt_logprobs=tensor, prompt_logprobs=True, prompt_logprobs_last_n=1
    )
    message = create_message("SampleResponse")
    message.ParseFromString(encode_result("sample", answer, payload)[0])
    assert message.sequences[0].stop_reason == 1 and np.frombuffer(
        message.sequences[0].tokens, "<i4"
    ).tolist() == [7, 8]
    assert np.isnan(np.frombuffer(message.prompt_logprobs, "<f4")).tolist() == [True, True, False]
    assert np.frombuffer(message.topk_prompt_logprobs.token_ids, "<i4").tolist() == [0, 0, 6]
    assert np.frombuffer(message.target_prompt_logprobs.sparse_csr.values, "<f4").tolist() == [
        -5,
        -6,
    ]
    message.ParseFromString(encode_result("sample", answer)[0])
    assert np.frombuffer(message.target_prompt_logprobs.dense, "<f4").tolist() == [0, -5, -6, 0]
    assert list(message.target_prompt_logprobs.shape) == [2, 2]


def test_the_clients_seed_is_that_of_adapter_and_heads():
    """Without a seed the one drawn at acceptance is used, which a restart finds again."""

    def decode_seeds(lora):
        body = {"session_id": "s", "model_seq_id": 0, "base_model": "base", "lora_config": lora}
        command = decode_request(
            "create_model", json.dumps(body).encode(), "json", {"seed": 99}, "r"
        )
        return command.seed, command.adapter.seed

    assert decode_seeds({"rank": 2, "seed": 7}) == (7, 7) and decode_seeds(
        {"rank": 2, "seed": 0}
    ) == (0, 0)
    assert decode_seeds({"rank": 2}) == (99, 99)
