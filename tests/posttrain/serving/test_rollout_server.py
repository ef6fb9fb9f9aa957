"""Rollouts from an inference server over a real port: equal to a run in one process; weight checks, server failures."""

import dataclasses
import json
import threading
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from helpers.letters import weights
from helpers.rollout_server import (
    KEY,
    letters_server,
    list_sampled_tokens,
    served_trainer,
    server_settings,
    with_server,
)
from helpers.serving import TOKEN, make_folder_of_model, running_server
from helpers.worker_cluster import compiled_model, letters_trainer

from posttrain.serving.weight_control import WeightController
from rl_core.data.tokenizer import train_tokenizer
from rl_core.environments import make_environment
from rl_core.errors import BackendError, SamplerMismatch, SettingsError
from rl_core.models.lora import add_adapter
from rl_core.rollout_workers.inference_server import check_server_at_start
from rl_core.settings import LoraSettings, NumericsGateSettings, RolloutSettings, SamplingSettings

CLOSE = 1e-4  # nats: the bound of sampler and trainer in float32


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["abc xyz"], 300)


@pytest.fixture
def server(tokenizer, tmp_path):
    with letters_server(tokenizer, tmp_path) as running:
        yield running


def assert_same_rollouts(rollouts, other_rollouts):
    """Assert the same tokens, with log-probs that agree to CLOSE."""
    assert [tokens for tokens, _ in rollouts] == [tokens for tokens, _ in other_rollouts]
    for (_, logprobs), (_, other_logprobs) in zip(rollouts, other_rollouts, strict=True):
        np.testing.assert_allclose(logprobs, other_logprobs, atol=CLOSE)


def test_a_run_on_a_server_is_the_run_in_one_process(tokenizer, server):
    """GRPO: the tokens of every iteration, their log-probs, and the final weights."""
    options = dict(
        sampling=SamplingSettings(max_completion_tokens=3, temperature=1.3),
        numerics=NumericsGateSettings(every=1),
    )
    alone = letters_trainer(tokenizer, **options)
    alone.backend.disable_cross_row_batching()
    served = served_trainer(tokenizer, server.url, **options)
    for _ in range(3):
        alone.step()
        metrics = served.step()
        assert_same_rollouts(list_sampled_tokens(alone), list_sampled_tokens(served))
        assert (
            metrics["policy/server_difference"] < CLOSE
            and metrics["policy/numerics_difference"] < CLOSE
        )
        assert metrics["perf/weight_bytes"] > 0 and metrics["perf/server_recoveries"] == 0
    torch.testing.assert_close(weights(alone), weights(served), atol=1e-5, rtol=0)
    served.server.close()


def test_trainer_has_a_separate_time_limit(tokenizer, tmp_path):
    """`serving.request_seconds` limits chats only: a trainer would mistake a 504 for a lost server."""
    with letters_server(tokenizer, tmp_path, request_seconds=1e-6) as server:
        refused = server.chat("abc", status=504)["error"]["message"]
        assert "serving.request_seconds: 1e-06" in refused
        served = served_trainer(
            tokenizer, server.url, sampling=SamplingSettings(max_completion_tokens=3)
        )
        assert served.step()["perf/server_recoveries"] == 0
        served.server.close()


@pytest.mark.slow
def test_tools_of_several_turns_on_threads(tmp_path):
    """A later turn continues the sequence's random numbers; observations are tokens and are not encoded again."""
    texts = [
        m["content"]
        for seed in range(50)
        for m in make_environment("arithmetic").demonstration(seed, "easy").messages
    ]
    tool_tokenizer = train_tokenizer(texts, 300)
    sampling = SamplingSettings(max_completion_tokens=60, max_turns=3, temperature=1.1)

    def make_trainer():
        environment = make_environment("arithmetic")
        environment.blocking = True
        return letters_trainer(
            tool_tokenizer,
            environment,
            model=compiled_model(tool_tokenizer, 200),
            sampling=sampling,
            curriculum=(),
            context=200,
        )

    alone = make_trainer()
    alone.backend.disable_cross_row_batching()
    with letters_server(
        tool_tokenizer, tmp_path, compiled_model(tool_tokenizer, 200), context=200
    ) as server:
        served = with_server(make_trainer(), server.url, max_length=200)
        alone.step(), served.step()
        assert any(len(r.trajectory.turns) > 1 for g in served.groups for r in g.rollouts)
        assert_same_rollouts(list_sampled_tokens(alone), list_sampled_tokens(served))


def test_stop_texts_end_an_action(tokenizer, server):
    sampling = SamplingSettings(max_completion_tokens=12, stop=("a", "x"))
    alone, served = (
        letters_trainer(tokenizer, sampling=sampling),
        served_trainer(tokenizer, server.url, sampling=sampling),
    )
    alone.backend.set_end_tokens([0])
    served.backend.set_end_tokens([0])
    alone.step(), served.step()
    texts = [turn.action for g in served.groups for r in g.rollouts for turn in r.trajectory.turns]
    assert any(text.endswith(("a", "x")) for text in texts)
    assert_same_rollouts(list_sampled_tokens(alone), list_sampled_tokens(served))


@pytest.mark.parametrize("kind", ["alone", "merged"])
def test_adapters(tokenizer, server, kind):
    """A standard adapter is sent by itself, with a name per version; an unsupported kind is sent merged."""
    settings = LoraSettings(rank=4, alpha=16.0, dora=kind == "merged")

    def make_trainer():
        with torch.random.fork_rng():
            torch.manual_seed(1)
            model, numerics = (
                add_adapter(compiled_model(tokenizer), settings),
                NumericsGateSettings(every=0),
            )
            return letters_trainer(tokenizer, model=model, numerics=numerics)

    alone, served = make_trainer(), with_server(make_trainer(), server.url)
    names = []
    for _ in range(3):
        alone.step(), served.step()
        assert_same_rollouts(list_sampled_tokens(alone), list_sampled_tokens(served))
        names.append(served.server.weights.name)
    bytes_sent = served.server.weights.sent_bytes
    if kind == "alone":
        assert len(set(names)) == 3 and all(name.startswith("posttrain-") for name in names)
        assert bytes_sent < sum(p.numel() * 4 for p in served.policy.parameters()) / 4
        assert (
            server.client.post(
                "/v1/completions", json={"model": names[0], "prompt": [1]}
            ).status_code
            == 404
        )
    else:
        assert set(names) == {"small"} and bytes_sent > 1e5
    served.server.close()
    assert (
        server.client.post("/v1/completions", json={"model": "small", "prompt": [1]}).status_code
        == 200
    )


def test_a_server_sleeps_during_updates(tokenizer, server):
    served = served_trainer(tokenizer, server.url, sleeps=True)
    sleep_states = []
    update = served._update_policy

    def check_while_updating(rng):
        sleep_states.append(server.client.get("/is_sleeping").json()["is_sleeping"])
        answer = server.client.post("/v1/completions", json={"model": "small", "prompt": [1]})
        assert answer.status_code == 503 and "sleeps" in answer.json()["error"]["message"]
        return update(rng)

    served._update_policy = check_while_updating
    served.step(), served.step()
    assert sleep_states == [True, True]


def ignore_weights(controller, monkeypatch):
    """Read the weights but do not publish them."""
    monkeypatch.setattr(controller, "_publish_model", lambda controller, model: None)


def report_another_digest(controller, monkeypatch):
    """Report another digest, as of a folder that has not arrived."""
    load = controller.load_weights
    monkeypatch.setattr(
        controller,
        "load_weights",
        lambda controller, folder: load(controller, folder) | {"digest": "0" * 64},
    )


def report_differing_tensor(controller, monkeypatch):
    load = controller.load_weights
    monkeypatch.setattr(
        controller,
        "load_weights",
        lambda controller, folder: load(controller, folder) | {"differing": ["model.norm.weight"]},
    )


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (
            ignore_weights,
            r"its log-probs differ by up to \d.* nats from the trainer's \(limit 0.001",
        ),
        (report_another_digest, "it has read weights with the digest 000000000000"),
        (report_differing_tensor, "differ from what was sent, first model.norm.weight"),
    ],
)
def test_weights_that_do_not_arrive_are_refused(tokenizer, tmp_path, monkeypatch, fault, message):
    fault(WeightController, monkeypatch)
    with letters_server(tokenizer, tmp_path) as server:
        trainer = letters_trainer(tokenizer)
        with torch.no_grad():
            trainer.policy.lm_head.weight.mul_(1.5)  # not the initial weights of the server
        served = with_server(trainer, server.url)
        with pytest.raises(SamplerMismatch, match=message) as raised:
            served.step()
        assert "\n" not in str(raised.value) and served.groups == []


def test_another_temperature_is_refused(tokenizer, server, monkeypatch):
    import rl_core.rollout_workers.inference_server as inference_server

    served = served_trainer(
        tokenizer, server.url, sampling=SamplingSettings(max_completion_tokens=3, temperature=2.0)
    )
    complete = inference_server.InferenceServer.sample_completion
    monkeypatch.setattr(
        inference_server.InferenceServer,
        "sample_completion",
        lambda self, name, ids, most, sampling, seed, eos: complete(
            self, name, ids, most, dataclasses.replace(sampling, temperature=1.0), seed, eos
        ),
    )
    with pytest.raises(SamplerMismatch, match="trained weights, adapter and temperature"):
        served.step()


def test_weights_of_another_run_are_detected(tokenizer, server, tmp_path):
    served = served_trainer(tokenizer, server.url)
    served.step()
    other = served_trainer(tokenizer, server.url, learning_rate=0.5)
    other.step()
    served.step()  # the other run's weights are replaced before rollouts
    alone = letters_trainer(tokenizer)
    alone.step(), alone.step()
    assert_same_rollouts(list_sampled_tokens(alone), list_sampled_tokens(served))
    sample_completion = served.server.server.sample_completion
    began = threading.Event()

    def change_weights_once(*arguments):
        if not began.is_set() and served.server.weights._verified_temperatures:
            began.set()
            other.server.weights.forget_server_state()
            other.server._sync_weights(other.settings.sampling)
        return sample_completion(*arguments)

    served.server.server.sample_completion = change_weights_once
    with pytest.raises(SamplerMismatch, match="another client changed its weights"):
        served.step()


def test_one_error_before_anything_starts(tokenizer, server, tmp_path, monkeypatch):
    settings = server_settings(server.url)
    check_server_at_start(settings, {"vocab_size": len(tokenizer)}, 8)

    def read_refusal(settings, shape=None, rank=0):
        with pytest.raises(SettingsError) as raised:
            check_server_at_start(settings, shape, rank)
        assert "\n" not in str(raised.value)
        return str(raised.value)

    with pytest.raises(SettingsError, match="address: workers: server needs host:port"):
        RolloutSettings(workers="server")
    dead = server_settings("http://127.0.0.1:9")
    assert "rollouts.address: no inference server answers" in read_refusal(dead)
    assert f"of {len(tokenizer):,} tokens, and the policy has 1,000" in read_refusal(
        settings, {"vocab_size": 1000}
    )
    assert "does not serve 'other'; it serves small" in read_refusal(
        server_settings(server.url, model="other")
    )
    monkeypatch.setenv(KEY, "wrong")
    assert "set rollouts.server.key_variable" in read_refusal(settings)
    monkeypatch.delenv(KEY)
    assert f"the environment variable {KEY} is not set" in read_refusal(settings)
    monkeypatch.setenv(KEY, TOKEN)
    with running_server(tmp_path / "ordinary", tmp_path / "base", context=32) as ordinary:
        assert "--set serving.rollouts=true" in read_refusal(server_settings(ordinary.url))
        assert ordinary.client.post("/sleep").status_code == 404


def test_another_tokenizer_or_model_is_refused(tokenizer, tmp_path):
    """Equal in size, so that only the tokens differ."""
    other = make_folder_of_model(
        tmp_path / "other", texts=["quite another alphabet of words"] * 40, vocab_size=300
    )
    config = json.loads((Path(other) / "config.json").read_text())
    with running_server(tmp_path, other, rollouts=True, context=32) as server:
        trainer = letters_trainer(tokenizer)
        if config["vocab_size"] == len(tokenizer) and config["hidden_size"] == 64:
            expected = "has another tokenizer than the policy"
        else:
            expected = "serves another model"
        with pytest.raises(SettingsError, match=expected):
            with_server(trainer, server.url)


def test_server_loss_is_one_error_and_resume_continues(tokenizer, tmp_path):
    with letters_server(tokenizer, tmp_path / "first") as server:
        served = served_trainer(tokenizer, server.url, patience_s=0.3)
        messages = []
        served.server.on_event = messages.append
        served.step()
        state, weights_before = served.state_dict(), weights(served).clone()
        server.stop()
        with pytest.raises(
            BackendError, match=r"has not answered for 0.3 s .* the same command resumes"
        ) as raised:
            served.step()
        assert "\n" not in str(raised.value) and "was lost" in messages[0]
        torch.testing.assert_close(weights(served), weights_before, atol=0, rtol=0)
    alone = letters_trainer(tokenizer)
    alone.step(), alone.step()
    with letters_server(tokenizer, tmp_path / "second") as new_server:
        resumed = with_server(served, new_server.url)
        resumed.load_state_dict(state)
        resumed.step()
        assert_same_rollouts(list_sampled_tokens(alone), list_sampled_tokens(resumed))


def test_server_restart_changes_no_token(tokenizer, tmp_path):
    """The restarted server has its initial weights: they are sent again, and its turns are repeated."""
    alone = letters_trainer(tokenizer)
    alone.step(), alone.step()
    with letters_server(tokenizer, tmp_path) as server:
        served = served_trainer(tokenizer, server.url, patience_s=30.0)
        served.step()
        calls, sample_completion = [], served.server.server.sample_completion
        idle, num_active = threading.Condition(), 0

        def restart_at_twentieth_call(*arguments):
            nonlocal num_active
            with idle:
                calls.append(None)
                if len(calls) == 20:  # after the probe, in the middle of the rollouts
                    # a real restart breaks the connections of requests in flight, so none is computed across it
                    assert idle.wait_for(lambda: num_active == 0, timeout=60)
                    controller = server.web.config.app.app.state.weight_controller
                    controller.instance, controller._weights_digest = "posttrain-another", ""
                    controller._publish_model(controller._start_model.model)
                num_active += 1
            try:
                return sample_completion(*arguments)
            finally:
                with idle:
                    num_active -= 1
                    idle.notify_all()

        served.server.server.sample_completion = restart_at_twentieth_call
        metrics = served.step()
        assert metrics["perf/server_recoveries"] == 1.0
        assert_same_rollouts(list_sampled_tokens(alone), list_sampled_tokens(served))


def test_full_queue_loses_nothing(tokenizer, tmp_path):
    with letters_server(tokenizer, tmp_path, max_waiting=4, slots=2) as server:
        served = served_trainer(tokenizer, server.url)
        metrics = served.step()
        assert metrics["perf/server_recoveries"] == 0.0 and len(list_sampled_tokens(served)) == 36


def test_tokens_in_and_out(tokenizer, server):
    body = {
        "model": "small",
        "prompt": [5, 6, 7],
        "max_tokens": 6,
        "seed": 2**100 + 3,
        "temperature": 0.7,
        "n": 2,
        "logprobs": 2,
        "return_token_ids": True,
        "ignore_eos": True,
        "return_tokens_as_token_ids": True,
    }
    first = server.client.post("/v1/completions", json=body).json()
    choice = first["choices"][0]
    assert choice["prompt_token_ids"] == [5, 6, 7] and choice["finish_reason"] == "length"
    logprobs = choice["logprobs"]
    assert (
        len(choice["token_ids"])
        == len(logprobs["token_logprobs"])
        == len(logprobs["top_logprobs"])
        == 6
    )
    assert logprobs["tokens"] == [f"token_id:{token}" for token in choice["token_ids"]]
    for token, value, top in zip(
        choice["token_ids"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        assert len(top) == 2 and value <= max(top.values()) + 1e-6
        assert f"token_id:{token}" not in top or top[f"token_id:{token}"] == pytest.approx(
            value, abs=1e-5
        )
    assert first["choices"][1]["token_ids"] != choice["token_ids"]
    # The same sequence in two requests: the second one continues the random numbers.
    continuation = {
        **body,
        "n": 1,
        "prompt": [5, 6, 7, *choice["token_ids"][:2]],
        "drawn": 2,
        "max_tokens": 4,
    }
    assert (
        server.client.post("/v1/completions", json=continuation).json()["choices"][0]["token_ids"]
        == choice["token_ids"][2:]
    )
    stop = {**body, "n": 1, "stop_token_ids": [choice["token_ids"][3]], "max_tokens": 20}
    stopped = server.client.post("/v1/completions", json=stop).json()["choices"][0]
    end_index = choice["token_ids"].index(choice["token_ids"][3])
    assert stopped["token_ids"] == choice["token_ids"][: end_index + 1]
    assert stopped["finish_reason"] == "stop" and stopped["stop_reason"] == choice["token_ids"][3]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [10**6]}, "not in the vocabulary"),
        ({"prompt": [1] * 32}, "leave no room in a context of 32"),
        ({"best_of": 2}, "best_of"),
        ({"stop_token_ids": [10**6]}, "not in the vocabulary"),
        ({"seed": 2**128}, "seed"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"stream": "yes"}, "stream"),
        ({"n": 2, "drawn": 1}, "drawn"),
        ({"model": "nobody"}, "there is no model 'nobody'"),
    ],
)
def test_refused_bodies(tokenizer, server, change, message):
    answer = server.client.post(
        "/v1/completions", json={"model": "small", "prompt": [1, 2], **change}
    )
    assert answer.status_code in (404, 422) and message in answer.json()["error"]["message"]


def test_positional_arguments_and_time_limit_of_a_command(server, tmp_path, monkeypatch):
    """As in vLLM: a caller that times out gets an error, and its command continues."""
    began, ended = threading.Event(), threading.Event()

    def read_slowly(self, folder):
        began.set()
        ended.wait(30)
        return {"digest": folder}

    controller = server.web.config.app.app.state.weight_controller
    monkeypatch.setitem(
        controller._methods, "posttrain_read_weights", read_slowly.__get__(controller)
    )

    def call_method(**body):
        return server.client.post(
            "/collective_rpc", json={"method": "posttrain_read_weights", **body}
        )

    late = call_method(args=["/folder"], timeout=0.05)
    assert (
        late.status_code == 504
        and "takes longer than 0.05 s; it continues" in late.text
        and began.is_set()
    )
    ended.set()
    assert call_method(args=["/folder"], timeout=30).json() == {"results": [{"digest": "/folder"}]}
    for body, message in (
        ({"args": ["a", "b"]}, "args: too many positional arguments"),
        ({"args": ["a"], "kwargs": {"folder": "b"}}, "args: multiple values for argument 'folder'"),
        ({"args": [1]}, "args"),
        ({"args": ["a"], "timeout": 0}, "timeout"),
    ):
        refused = call_method(**body)
        assert refused.status_code == 422 and message in refused.text


def test_starting_server_is_not_asleep_and_refuses_commands(server):
    state = server.web.config.app.app.state
    engine, state.server.engine = state.server.engine, None  # as while the engine is created
    try:
        assert server.client.get("/is_sleeping").json() == {"is_sleeping": False}
        for path in ("/wake_up", "/sleep"):
            refused = server.client.post(path)
            assert refused.status_code == 503 and "about to be served" in refused.text
        assert state.server.engine is None, "no second engine"
    finally:
        state.server.engine = engine
    assert server.client.post("/sleep").status_code == 200
    assert server.client.get("/is_sleeping").json() == {"is_sleeping": True}
    assert server.client.post("/wake_up").status_code == 200
    assert server.client.get("/is_sleeping").json() == {"is_sleeping": False}


def test_refused_commands(tokenizer, server, tmp_path):
    def call_method(method, **arguments):
        answer = server.client.post("/collective_rpc", json={"method": method, "kwargs": arguments})
        return answer.status_code, answer.text

    assert call_method("exit")[0] == 404
    assert call_method("posttrain_load_weights")[0] == 422
    for folder in ("/nowhere", "relative", str(tmp_path)):
        code, text = call_method("posttrain_load_weights", folder=folder)
        assert code == 422 and "no folder of *.safetensors" in text
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    torch.save({}, pickled / "adapter_model.bin")
    lora = {"lora_name": "x", "lora_path": str(pickled)}
    assert server.client.post("/v1/load_lora_adapter", json=lora).status_code == 422
    assert server.client.post("/v1/unload_lora_adapter", json={"lora_name": "x"}).status_code == 404
    assert server.client.post("/sleep?level=2").status_code == 422
    with httpx.Client(base_url=server.url) as stranger:
        assert {
            stranger.post(path, json={}).status_code for path in ("/collective_rpc", "/sleep")
        } == {401}
        assert stranger.get("/health").status_code == 200
    assert server.client.get("/version").json()["server"] == "posttrain"
