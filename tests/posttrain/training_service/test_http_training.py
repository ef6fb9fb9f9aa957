"""The clients' routes with a worker: training, saving, loading and sampling, compared with the engine alone."""

import io
import json
import tarfile

import numpy as np
from helpers.service import loss_request, make_engine, random_data, step_request

from posttrain.training_service.wire.protobuf_messages import create_message
from rl_core.service.requests import AdapterConfig, CreateModel

STEP = {"learning_rate": 1e-2}


def parse_message(name, data):
    message = create_message(name)
    message.ParseFromString(data)
    return message


def draw_sample(service, sampler, seq, **fields):
    body = {
        "sampling_session_id": sampler,
        "seq_id": seq,
        "prompt": {"chunks": [{"tokens": [3, 4, 5]}]},
        "sampling_params": {"max_tokens": 4, "seed": 5},
        **fields,
    }
    promise = service.post("asample", body)
    return promise, parse_message("SampleResponse", service.result(promise))


def train(service, run, seqs, seeds):
    """Send forward_backward and optim_step of all steps before asking for the first result; return the outputs."""
    promises = []
    for seq, seed in zip(seqs, seeds, strict=True):
        promises.append(service.forward_backward(run, seq, random_data(seed)))
        service.post("optim_step", {"model_id": run, "seq_id": seq + 1, "adam_params": STEP})
    return [parse_message("ForwardBackwardOutput", service.result(promise)) for promise in promises]


def test_a_training_loop_has_the_engines_numbers(service, base_folder):
    engine = make_engine(base_folder)
    engine.create_model(
        CreateModel(model_id="r", base="base", adapter=AdapterConfig(rank=4, seed=1))
    )
    run = service.new_run(service.session())
    info = service.post("get_info", {"model_id": run})
    assert (
        info["model_data"]["tokenizer_id"] == str(base_folder)
        and info["lora_rank"] == 4
        and info["is_lora"]
    )
    result = train(service, run, [1, 3, 5], [1, 2, 3])
    for seed, output in zip([1, 2, 3], result, strict=True):
        (expected,) = engine.forward_backward([loss_request("r", random_data(seed))])
        engine.optim_step(step_request("r"))
        assert dict(output.metrics) == dict(expected.metrics)
        (record,) = output.loss_fn_outputs
        ours = np.concatenate([output["logprobs"] for output in expected.outputs])
        assert np.frombuffer(record.fields["logprobs"].data, "<f4").tolist() == ours.tolist()
    losses = [dict(output.metrics)["loss:sum"] for output in result]
    assert len(set(losses)) == 3


def test_saved_weights_are_listed_loaded_and_sampled(service):
    session = service.session()
    run = service.new_run(session)
    train(service, run, [1], [4])
    saved = service.result(
        service.post("save_weights", {"model_id": run, "seq_id": 3, "path": "a"})
    )
    assert saved["path"] == f"tinker://{run}/weights/a"
    named = service.result(
        service.post("save_weights_for_sampler", {"model_id": run, "seq_id": 4, "path": "s"})
    )
    assert service.post("weights_info", {"tinker_path": saved["path"]})["lora_rank"] == 4
    other = service.post(
        "load_weights",
        {"session_id": session, "model_seq_id": 1, "path": saved["path"], "optimizer": True},
    )
    assert other["model_id"] == f"{session}:train:1"
    assert service.result(other)["model_id"] == other["model_id"]
    first, second = (
        service.result(service.forward_backward(name, seq, random_data(9), forward_only=True))
        for name, seq in ((run, 5), (other["model_id"], 1))
    )
    assert first == second
    ephemeral = service.result(
        service.post(
            "save_weights_for_sampler", {"model_id": run, "seq_id": 6, "sampling_session_seq_id": 0}
        )
    )["sampling_session_id"]
    assert ephemeral == f"{session}:sample:0"
    body = {"session_id": session, "sampling_session_seq_id": 1, "model_path": named["path"]}
    opened = service.post("create_sampling_session", body)["sampling_session_id"]
    described = service.call("GET", f"samplers/{opened}")
    assert described == {"sampler_id": opened, "base_model": "base", "model_path": named["path"]}
    promise, from_run = draw_sample(service, ephemeral, 0, num_samples=2)
    assert len(set(promise["sample_sequence_ids"])) == 2 == len(from_run.sequences)
    _, from_path = draw_sample(service, opened, 0, num_samples=2, prompt_logprobs=True)
    assert [s.tokens for s in from_run.sequences] == [s.tokens for s in from_path.sequences]
    assert np.isnan(np.frombuffer(from_path.prompt_logprobs, "<f4")).tolist() == [
        True,
        False,
        False,
    ]
    again = service.post("create_sampling_session", body)  # the same request
    assert again["sampling_session_id"] == opened


def test_samples_of_a_repeated_request_are_the_same_without_a_seed(service):
    session = service.session()
    body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "base"}
    sampler = service.post("create_sampling_session", body)["sampling_session_id"]
    unseeded = {"sampling_params": {"max_tokens": 20, "stop": []}}
    first, first_response = draw_sample(service, sampler, 0, **unseeded)
    second, second_response = draw_sample(service, sampler, 0, **unseeded)
    third, third_response = draw_sample(service, sampler, 1, **unseeded)
    assert first == second and first_response == second_response
    assert (
        first["sample_sequence_ids"] != third["sample_sequence_ids"]
        and first_response != third_response
    )


def test_results_of_a_sampling_session_come_by_one_poll(service):
    session = service.session()
    body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "base"}
    sampler = service.post("create_sampling_session", body)["sampling_session_id"]
    promise, _ = draw_sample(service, sampler, 0)
    target = {"type": "sampling_session", "sampling_session_id": sampler}
    response = service.post("retrieve_futures", {"target": target})
    (completion,) = response["completions"]
    assert completion["state"] == "finished" and completion["request_id"] == promise["request_id"]
    assert completion["response_payload_uncompressed_size"] > 0
    invalid = service.post(
        "asample", {"sampling_session_id": sampler, "seq_id": 1, "prompt": {"chunks": []}}
    )
    assert "at least one token" in service.result(invalid)["error"]
    next_page = service.post(
        "retrieve_futures", {"target": target, "prev_cursor": response["cursor"]}
    )
    assert next_page["completions"] == [{"state": "failed", "request_id": invalid["request_id"]}]
    ack = {
        "target": target,
        "prev_cursor": next_page["cursor"],
        "timeout": 0,
        "retrieved_request_ids": [promise["request_id"]],
    }
    assert service.post("retrieve_futures", ack)["completions"] == []
    service.post("retrieve_future", {"request_id": promise["request_id"]}, status=410)
    clone = {
        **target,
        "cloned_sampler_id": service.post("join_sampling_session", target)["client_counter"],
    }
    assert clone["cloned_sampler_id"] == 1
    cloned, _ = draw_sample(service, sampler, 1_000_000_000)
    response = service.post("retrieve_futures", {"target": clone})
    assert [item["request_id"] for item in response["completions"]] == [cloned["request_id"]]


def test_faults_are_results_and_leave_no_hole(service):
    """The client has used the number of a refused request, so the following requests must still be computed."""
    run = service.new_run(service.session())
    huge = service.raw(
        "forward_backward",
        b"\x0a" + bytes([len(run)]) + run.encode() + b"\x10\x01" + bytes(65 << 20),
    )
    wrong = service.post(
        "optim_step", {"model_id": run, "seq_id": 2, "adam_params": {"learning_rate": "fast"}}
    )
    refused = service.forward_backward(run, 3, random_data(1), loss_fn="custom")
    foreign = service.post(
        "load_weights", {"model_id": run, "seq_id": 4, "path": "tinker://x/weights/a"}
    )
    nameless = service.post("save_weights_for_sampler", {"model_id": run, "seq_id": 5})
    short = {"model_id": run, "seq_id": 6, "sampling_session_seq_id": 3, "ttl_seconds": 3600}
    lived = service.post("save_weights_for_sampler", short)
    good = service.forward_backward(run, 7, random_data(1))
    texts = {
        huge["request_id"]: "at most 67108864 are accepted",
        wrong["request_id"]: "learning_rate",
        refused["request_id"]: "'custom' is not supported",
        foreign["request_id"]: "there are no saved weights",
        nameless["request_id"]: "neither path nor",
        lived["request_id"]: "worker.sampler_seconds",
    }
    for request_id, text in texts.items():
        result = service.result({"request_id": request_id})
        assert text in result["error"] and result["category"] == "user"
    assert isinstance(service.result(good), bytes)
    assert json.dumps(service.post("get_info", {"model_id": run}))  # the run is as it was


def test_a_checkpoint_id_without_its_kind_is_refused(service):
    run = service.new_run(service.session())
    service.result(service.post("save_weights", {"model_id": run, "seq_id": 1, "path": "ckpt0"}))
    paths = f"training_runs/{run}/checkpoints"
    for method, suffix, body in (
        ("DELETE", "ckpt0", None),
        ("POST", "ckpt0/publish", None),
        ("DELETE", "ckpt0/publish", None),
        ("PUT", "ckpt0/ttl", {"ttl_seconds": 60}),
    ):
        refused = service.call(method, f"{paths}/{suffix}", status=400, json=body)
        assert "write weights/ckpt0 or sampler_weights/ckpt0" in refused["detail"]
    (listed,) = service.call("GET", paths)["checkpoints"]
    assert listed["checkpoint_id"] == "weights/ckpt0" and listed["expires_at"] is None
    # a name that is an action's
    service.result(service.post("save_weights", {"model_id": run, "seq_id": 2, "path": "publish"}))
    service.call("DELETE", f"{paths}/weights/publish", status=204)
    unload = service.post("unload_model", {"model_id": run}, status=404)
    assert "worker.idle_seconds" in unload["detail"]


def test_exported_weights_are_fetched_by_signed_addresses(service):
    run = service.new_run(service.session())
    saved = service.result(
        service.post("save_weights_external", {"model_id": run, "seq_id": 1, "path": "x"})
    )
    path = f"training_runs/{run}/checkpoints/external_weights/x"
    assert saved["path"] == f"tinker://{run}/external_weights/x"
    response = service.call("GET", f"{path}/external_weights_urls")
    url = response["urls"]["adapter_config.json"].removeprefix("http://127.0.0.1:8123/api/v1/")
    assert service.call("GET", url, headers={"X-API-Key": ""})["r"] == 4
    assert service.call("GET", url.replace("adapter_config.json", "tokenizer.json"), status=403)[
        "detail"
    ]
    parts = url.split("/")
    parts[1] = str(int(parts[1]) + 1000)
    assert "not signed" in service.call("GET", "/".join(parts), status=403)["detail"]
    archive = service.call("GET", f"{path}/archive")["url"].removeprefix(
        "http://127.0.0.1:8123/api/v1/"
    )
    with tarfile.open(
        fileobj=io.BytesIO(service.call("GET", archive, headers={"X-API-Key": ""}))
    ) as files:
        assert sorted(files.getnames()) == sorted(response["urls"])
        config = files.extractfile("adapter_config.json")
        assert config is not None and json.loads(config.read())["r"] == 4
    old = service.call(
        "GET",
        f"training_runs/{run}/checkpoints",
        headers={"User-Agent": "AsyncTinker/Python 0.25.0"},
    )
    new = service.call(
        "GET",
        f"training_runs/{run}/checkpoints",
        headers={"User-Agent": "AsyncTinker/Python 0.38.0"},
    )
    assert old["checkpoints"] == [] and new["checkpoints"][0]["checkpoint_type"] == "external"
    service.call("DELETE", path, status=204)
    service.call("GET", url, status=404)


def test_runs_and_checkpoints_are_listed_published_and_expire(service):
    run = service.new_run(service.session())
    body = {
        "model_id": run,
        "seq_id": 1,
        "path": "a",
        "ttl_seconds": 3600,
        "user_metadata": {"epoch": "3"},
    }
    path = service.result(service.post("save_weights", body))["path"]
    address = f"training_runs/{run}/checkpoints/weights/a"
    (listed,) = service.call("GET", f"training_runs/{run}/checkpoints")["checkpoints"]
    assert (
        listed["checkpoint_type"] == "training"
        and listed["expires_at"]
        and listed["size_bytes"] > 0
    )
    assert listed["user_metadata"] == {"epoch": "3"}
    service.call("PUT", f"{address}/ttl", json={"ttl_seconds": None}, status=204)
    service.call("POST", f"{address}/publish", status=204)
    (listed,) = service.call("GET", f"training_runs/{run}/checkpoints")["checkpoints"]
    assert listed["public"] and listed["expires_at"] is None and listed["tinker_path"] == path
    page = service.call("GET", "training_runs", params={"limit": 1, "offset": 0})
    assert page["training_runs"][0]["training_run_id"] == run and page["cursor"]["total_count"] >= 1
    assert service.call("GET", f"training_runs/{run}")["last_checkpoint"]["tinker_path"] == path
    assert path in [
        checkpoint["tinker_path"]
        for checkpoint in service.call("GET", "checkpoints")["checkpoints"]
    ]
    service.call("DELETE", f"{address}/publish", status=204)
    service.call("DELETE", address, status=204)
    assert service.call("GET", f"training_runs/{run}/checkpoints")["checkpoints"] == []
    service.call("DELETE", address, status=404)
    service.post("weights_info", {"tinker_path": path}, status=404)


def test_weights_are_copied_once_and_outlive_their_source(service):
    session = service.session()
    run = service.new_run(session)
    path = service.result(
        service.post("save_weights", {"model_id": run, "seq_id": 1, "path": "a"})
    )["path"]
    headers = {"X-Idempotency-Key": "k"}
    copy = service.post(
        "copy_weights", {"source_path": path, "ttl_seconds": 3600}, headers=headers
    )["tinker_path"]
    assert (
        service.post("copy_weights", {"source_path": path, "ttl_seconds": 3600}, headers=headers)[
            "tinker_path"
        ]
        == copy
    )
    assert service.post("copy_weights", {"source_path": path})["tinker_path"] != copy
    request = {"source_path": path, "session_id": session, "model_seq_id": 7}
    assert (
        service.post("copy_weights", request)["tinker_path"]
        == f"tinker://{session}:train:7/weights/a"
    )
    service.post("copy_weights", {**request, "model_seq_id": 0}, status=422)
    service.call("DELETE", f"training_runs/{run}/checkpoints/weights/a", status=204)
    body = {"session_id": session, "model_seq_id": 8, "path": copy, "optimizer": True}
    assert service.result(service.post("load_weights", body))["model_id"] == f"{session}:train:8"
    copied_run = copy.removeprefix("tinker://").partition("/")[0]
    (listed,) = service.call("GET", f"training_runs/{copied_run}/checkpoints")["checkpoints"]
    assert (
        listed["expires_at"]
        and service.post("weights_info", {"tinker_path": copy})["lora_rank"] == 4
    )
    # it holds weights, and is not trained
    service.forward_backward(copied_run, 1, random_data(1), status=422)


def test_the_optimizer_of_a_run_created_from_saved_weights(service):
    """With optimizer state the optimizer is that of the weights; otherwise any, and AdamW by default."""
    session = service.session()
    run = service.new_run(session)
    saved = service.result(
        service.post("save_weights", {"model_id": run, "seq_id": 1, "path": "a"})
    )["path"]
    body = {"session_id": session, "model_seq_id": 1, "path": saved}
    muon = {"type": "dimuon", "version": 1}
    refused = service.post(
        "load_weights", {**body, "optimizer": True, "optimizer_config": muon}, status=422
    )
    assert refused["detail"] == f"optimizer_config: {saved} has adamw, and its state is loaded"
    created = service.result(
        service.post("load_weights", {**body, "optimizer": False, "optimizer_config": muon})
    )
    assert service.post("get_info", {"model_id": created["model_id"]})["optimizer_config"] == muon
    step = {
        "model_id": created["model_id"],
        "seq_id": 2,
        "optimizer_params": {"type": "dimuon", "learning_rate": 1e-3},
    }
    service.forward_backward(created["model_id"], 1, random_data(1))
    assert "grad_norm:mean" in service.result(service.post("optim_step", step))["metrics"]
    service.forward_backward(run, 2, random_data(1))
    invalid = service.post("optim_step", {**step, "model_id": run, "seq_id": 3})
    assert "for muon, but the run was created with adamw" in service.result(invalid)["error"]
    reload = {"model_id": created["model_id"], "seq_id": 3, "path": saved, "optimizer": False}
    foreign = service.result(
        service.post("load_weights", {**reload, "optimizer_config": {"type": "adamw"}})
    )
    assert foreign["error"] == "optimizer_config: the run was created with dimuon"
    muon_saved = service.result(
        service.post("save_weights", {"model_id": created["model_id"], "seq_id": 4, "path": "m"})
    )
    default_request = {
        "session_id": session,
        "model_seq_id": 2,
        "path": muon_saved["path"],
        "optimizer": False,
    }
    assert (
        service.result(service.post("load_weights", default_request))["model_id"]
        == f"{session}:train:2"
    )
    assert (
        service.post("get_info", {"model_id": f"{session}:train:2"})["optimizer_config"]["type"]
        == "adamw"
    )
