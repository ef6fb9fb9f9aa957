"""Rollouts from vLLM, against a stand-in with the answers of vLLM 0.30.0."""

import dataclasses
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch
from helpers import ROOT
from helpers.letters import weights
from helpers.rollout_server import list_sampled_tokens, server_settings
from helpers.vllm_stand_in import INSTANCE, make_worker, vllm_stand_in
from helpers.waiting import wait_for
from helpers.worker_cluster import compiled_model, letters_trainer

from rl_core.data.tokenizer import train_tokenizer
from rl_core.errors import BackendError, SamplerMismatch, SettingsError
from rl_core.models.logprobs import completion_logprobs
from rl_core.models.lora import add_adapter
from rl_core.rollout_workers.inference_server import InferenceServer
from rl_core.rollout_workers.server_backend import ServerBackend, _derive_turn_seed
from rl_core.rollouts.batching import build_batches, build_train_row
from rl_core.settings import (
    LoraSettings,
    NumericsGateSettings,
    SamplingSettings,
)
from rl_core.settings.rollouts import TRIED_VLLM_VERSIONS
from rl_core.storage.session_resources import (
    WEIGHTS_PREFIX,
    SessionFolder,
    remove_stale_session_folders,
)


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["abc xyz"], 300)


@pytest.fixture
def server(tokenizer):
    with vllm_stand_in(compiled_model(tokenizer), tokenizer) as running:
        yield running


def connect_vllm(trainer, server, **options):
    backend = ServerBackend(
        trainer.policy,
        trainer.renderer.tokenizer,
        server_settings(server.url, key_variable=None, **options),
        eos_ids=range(0, trainer.policy.config.vocab_size, 2),
        max_length=32,
    )
    trainer.backend = trainer.server = trainer._numerics.backend = backend
    return trainer


def build_trainer_with_late_updates(tokenizer, **options):
    """Build a trainer whose updates are sent with the next rollouts, because no gate sends the first one earlier."""
    return letters_trainer(tokenizer, numerics=NumericsGateSettings(every=0), **options)


def test_a_run_on_vllm(tokenizer, server):
    """Every token's log-prob is the trainer's at the temperature; every update is sent and verified."""
    sampling = SamplingSettings(max_completion_tokens=4, temperature=0.8)
    trainer = connect_vllm(build_trainer_with_late_updates(tokenizer, sampling=sampling), server)
    for _ in range(2):
        policy = {name: tensor.clone() for name, tensor in trainer.policy.state_dict().items()}
        metrics = trainer.step()
        assert (
            metrics["policy/server_difference"] < 1e-4
            and metrics["policy/sampler_difference_max"] < 1e-4
        )
        # it sampled from the weights before the update
        for name, tensor in server.model.state_dict().items():
            torch.testing.assert_close(tensor, policy[name], atol=0, rtol=0)
    bodies = [body for path, body in server.asked if path == "/v1/completions"]
    rollouts = bodies[-36:]
    assert len({body["seed"] for body in rollouts}) == 36
    assert all(
        body["ignore_eos"] and body["stop_token_ids"] == list(range(0, len(tokenizer), 2))
        for body in rollouts
    )
    assert all(
        body["temperature"] == 0.8 and body["logprobs"] == 0 and body["return_token_ids"]
        for body in rollouts
    )
    orders = [body["method"] for path, body in server.asked if path == "/collective_rpc"]
    assert orders.count("posttrain_load_weights") == 2
    assert sum(path == "/reset_prefix_cache" for path, _ in server.asked) == 2
    trainer.server.close()


def test_ids_without_text_are_not_sampled_by_a_server(tokenizer, server):
    backend = connect_vllm(letters_trainer(tokenizer), server).server
    assert not backend.server.textless_ids  # the tokenizer has all of them
    textless = backend.server.textless_ids = tuple(range(20, len(tokenizer)))
    for seed in range(4):
        served = backend.server.sample_completion(
            "policy", [5, 6], 12, SamplingSettings(), {"seed": seed}, [1]
        )
        assert max(served.tokens) < 20
    body = [body for path, body in server.asked if path == "/v1/completions"][-1]
    assert body["logit_bias"] == {str(token): -100.0 for token in textless}
    backend.close()


def test_the_same_seeds_give_the_same_run(tokenizer):
    runs = []
    for _ in range(2):
        with vllm_stand_in(compiled_model(tokenizer), tokenizer) as server:
            trainer = connect_vllm(letters_trainer(tokenizer), server)
            trainer.step()
            runs.append((list_sampled_tokens(trainer), weights(trainer).numpy().tobytes()))
    assert runs[0] == runs[1]
    seeds = {_derive_turn_seed(seed, drawn) for seed in (0, 1, 2**127) for drawn in (0, 1, 7)}
    assert len(seeds) == 9 and all(0 <= seed < 2**63 for seed in seeds)


def test_log_probs_are_those_of_the_trainers_forward_pass(tokenizer, server):
    trainer = connect_vllm(
        letters_trainer(tokenizer, sampling=SamplingSettings(max_completion_tokens=5)), server
    )
    groups = trainer._play_groups(
        trainer._draw_episodes(np.random.default_rng(0), 4),
        group_size=3,
        sampling=trainer.settings.sampling,
        purpose=("rollouts", 0),
    )
    for group in groups:
        for rollout in group.rollouts:
            (batch,) = build_batches([build_train_row(rollout)], 100, 0)
            with torch.no_grad():
                logprobs = completion_logprobs(trainer.policy, batch)[0][batch.loss_mask_BS]
            np.testing.assert_allclose(rollout.sampler_logprobs, logprobs.numpy(), atol=1e-4)


def spread_error(backend, error):
    """Make a backend's served log-probs wrong by `error(position)` nats."""
    request = ServerBackend.request_tokens

    def request_tokens(row, sampling):
        served = request(backend, row, sampling)
        start = row.num_sampled
        wrong = [value + error(start + i) for i, value in enumerate(served.logprobs)]
        return dataclasses.replace(served, logprobs=wrong)

    backend.request_tokens = request_tokens


@pytest.mark.parametrize(
    ("first", "later", "message"),
    [
        # the old limit of 0.5 nats passed the first two, and a lower one would refuse the rounding of one token
        (
            lambda i: -0.1,
            None,
            r"0\.(1|099)\d* nats on average.*limits of the first comparison 0.08",
        ),
        (lambda i: 0.0, lambda i: 0.1 * (-1) ** i, "limits of what the first comparison allows"),
        (lambda i: 0.33 * (i == 5), lambda i: -0.33 * (i == 7), None),
        (lambda i: 3.0 * (i == 5), None, "with a KL of"),
        (lambda i: -9.0 * (i == 5), None, "with a KL of"),
    ],
)
def test_half_precision_is_judged_by_mean_and_kl_on_texts(tokenizer, first, later, message):
    model = compiled_model(tokenizer).to(torch.bfloat16)
    with vllm_stand_in(model, tokenizer, context=64) as server:
        trainer = letters_trainer(tokenizer)
        trainer.policy.to(torch.bfloat16)
        backend = connect_vllm(trainer, server).server
        sampling = SamplingSettings()

        def compare(error):
            spread_error(backend, error)
            backend.weights.forget_server_state()
            backend._sync_weights(sampling)

        if message is not None and later is None:
            with pytest.raises(SamplerMismatch, match=message):
                compare(first)
            return
        compare(first)
        assert backend.weights._first_differences.keys() == {1.0}
        prompts = [body["prompt"] for path, body in server.asked if path == "/v1/completions"]
        assert tokenizer.encode("The capital of France is")[:16] in prompts
        if message is None:
            compare(later)
            assert backend.weights.difference > 0.3
            return
        with pytest.raises(SamplerMismatch, match=message):
            compare(later)


def test_an_adapter_for_each_version(tokenizer, server):
    model = add_adapter(compiled_model(tokenizer), LoraSettings(rank=4, alpha=8.0))
    trainer = connect_vllm(letters_trainer(tokenizer, model=model), server)
    trainer.step(), trainer.step()
    orders = [(path, body["lora_name"]) for path, body in server.asked if "lora_adapter" in path]
    names = [name for path, name in orders if path == "/v1/load_lora_adapter"]
    assert (
        len(names) == 2
        and ("/v1/unload_lora_adapter", names[0]) in orders
        and list(server.adapters) == [names[1]]
    )
    rank = LoraSettings(rank=32)
    wide = letters_trainer(tokenizer, model=add_adapter(compiled_model(tokenizer), rank))
    with pytest.raises(
        SettingsError, match=r"supports adapters up to rank 16, but model.lora.rank is 32"
    ):
        connect_vllm(wide, server)
    trainer.server.close()
    assert not server.adapters


def test_a_silent_server_does_not_hold_the_end_of_a_run(tokenizer, server, monkeypatch):
    monkeypatch.setattr("rl_core.rollout_workers.server_weights.UNLOAD_TIMEOUT_S", 0.1)
    model = add_adapter(compiled_model(tokenizer), LoraSettings())
    trainer = connect_vllm(letters_trainer(tokenizer, model=model), server)
    trainer.step()
    is_over, waited = threading.Event(), []
    server.before = lambda path, body: (
        waited.append(is_over.wait(20)) if path == "/v1/unload_lora_adapter" else None
    )
    trainer.server.close()
    is_over.set()
    wait_for(lambda: waited, "the end of its silence")
    assert waited == [True]


def test_an_adapter_on_whole_weights_of_an_earlier_run(tokenizer, server):
    trainer = connect_vllm(letters_trainer(tokenizer), server)
    trainer.step()
    model = add_adapter(compiled_model(tokenizer), LoraSettings(rank=4))
    late = connect_vllm(letters_trainer(tokenizer, model=model), server)
    with pytest.raises(SettingsError, match=r"holds full weights of an earlier run .* restart it"):
        late.step()


def test_sleep_around_updates(tokenizer, server):
    trainer = connect_vllm(letters_trainer(tokenizer), server, sleeps=True)
    trainer.step()
    assert server.is_asleep
    trainer.step()
    orders = [path for path, _ in server.asked if path in ("/sleep?level=1", "/wake_up")]
    # also for the gate of the first update
    assert orders == ["/sleep?level=1", "/wake_up"] * 2 + ["/sleep?level=1"]
    assert server.is_asleep


def test_a_server_that_an_earlier_run_left_asleep(tokenizer, server):
    server.is_asleep = True
    connect_vllm(letters_trainer(tokenizer), server).step()
    assert not server.is_asleep


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({"version": "0.29.0"}, {}, "runs vLLM 0.29.0, but 0.30.0 or 0.32.0 is required"),
        (
            {},
            {"logprobs": "raw_logprobs"},
            "returns raw_logprobs, which are not those of its sampling distribution",
        ),
        ({}, {"extension": False}, "start vLLM with deployments/vllm/start.py"),
        ({}, {"model": 600}, "of 600 tokens, and the policy has 267"),
    ],
)
def test_servers_that_are_refused(tokenizer, change, options, message):
    vocabulary = options.pop("model", None)
    model = (
        compiled_model(tokenizer)
        if vocabulary is None
        else compiled_model(range_of(tokenizer, vocabulary))
    )
    extension = options.pop("extension", True)
    with vllm_stand_in(model, tokenizer, **options) as server:
        for name, value in change.items():
            setattr(server, name, value)
        if not extension:
            server.worker = object()
        with pytest.raises(SettingsError, match=message) as caught:
            connect_vllm(letters_trainer(tokenizer), server)
        assert "\n" not in str(caught.value) and str(caught.value).startswith("rollouts.")


class range_of:  # noqa: N801  # only the size of a tokenizer
    def __init__(self, tokenizer, size):
        self.pad_token_id, self.size = tokenizer.pad_token_id, size

    def __len__(self):
        return self.size


@pytest.mark.parametrize("version", [*TRIED_VLLM_VERSIONS, "0.32.0+cpu"])
def test_tried_versions_are_accepted(tokenizer, server, version):
    server.version = version
    backend = connect_vllm(letters_trainer(tokenizer), server).server
    assert backend.description.version == version


def test_a_version_by_setting_is_the_only_one(tokenizer, server):
    server.version = "0.30.0"
    with pytest.raises(SettingsError, match=r"runs vLLM 0\.30\.0, but 0\.31\.0 is required"):
        connect_vllm(letters_trainer(tokenizer), server, version="0.31.0")


def test_another_version_by_setting(tokenizer, server):
    server.version = "0.31.0"
    assert (
        connect_vllm(
            letters_trainer(tokenizer), server, version="0.31.0"
        ).server.description.version
        == "0.31.0"
    )


def test_a_server_without_instance_names(tokenizer, server):
    """Started by hand with our workers and vLLM's default fingerprint."""
    server.instance = "vllm-0.30.0-0a1b2c3d"
    with pytest.raises(
        SettingsError,
        match=r"cannot be attributed to their weights; start it with deployments/vllm/start.py",
    ):
        connect_vllm(letters_trainer(tokenizer), server).step()


def change_completions(change):
    """Build a hook that changes answers of /v1/completions."""

    def answer_changed(server, path, body):
        if path != "/v1/completions":
            return None
        status, completion = server._complete(body)
        change(completion)
        return status, completion

    return answer_changed


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda a: a["choices"][0].pop("token_ids"), BackendError, "has no token_ids"),
        (
            lambda a: a["choices"][0].update(prompt_token_ids=None),
            BackendError,
            "has no token_ids, prompt_token_ids",
        ),
        (
            lambda a: a["choices"][0].update(logprobs=None),
            BackendError,
            "prompt_token_ids or logprobs",
        ),
        (
            lambda a: a["choices"][0]["prompt_token_ids"].insert(0, 1),
            BackendError,
            "read another prompt",
        ),
        (lambda a: a["choices"][0]["token_ids"].append(10**6), BackendError, "log-probs for"),
        (
            lambda a: a["choices"][0]["logprobs"].update(
                token_logprobs=[-1.5] * len(a["choices"][0]["token_ids"])
            ),
            SamplerMismatch,
            r"differ by up to \d",
        ),
        (
            lambda a: a["choices"][0]["logprobs"].update(
                token_logprobs=[-9999.0] * len(a["choices"][0]["token_ids"])
            ),
            SamplerMismatch,
            "returned -inf as the log-prob of a sampled token",
        ),
    ],
)
def test_invalid_answers(tokenizer, server, change, error, message):
    server.before = lambda path, body: change_completions(change)(server, path, body)
    trainer = connect_vllm(letters_trainer(tokenizer), server)
    with pytest.raises(error, match=message) as caught:
        trainer.step()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [-9999.0, float("nan")])
def test_a_rollout_with_an_invalid_log_prob(tokenizer, server, value):
    """After the probe has passed: learning from it would give ratios of infinity or NaN."""
    trainer = connect_vllm(letters_trainer(tokenizer), server)
    change = change_completions(
        lambda answer: answer["choices"][0]["logprobs"]["token_logprobs"].__setitem__(0, value)
    )
    server.before = lambda path, body: (
        change(server, path, body) if body and body.get("max_tokens") == 3 else None
    )
    with pytest.raises(
        SamplerMismatch, match=r"returned (-inf|nan) as the log-prob .* None of its rollouts"
    ):
        trainer.step()


def test_a_folder_that_the_server_does_not_see(tokenizer, server):
    server.before = lambda path, body: (
        server._rpc({**body, "kwargs": {"folder": "/elsewhere"}})
        if path == "/collective_rpc" and body["method"] == "posttrain_load_weights"
        else None
    )
    trainer = connect_vllm(letters_trainer(tokenizer), server)
    with pytest.raises(
        BackendError, match=r"/elsewhere holds no .* under the same path \(rollouts.server.folder\)"
    ):
        trainer.step()


def test_an_update_that_was_not_applied(tokenizer, server):
    server.worker.reload_weights = lambda weights_iterator: [None for _ in weights_iterator]
    trainer = connect_vllm(letters_trainer(tokenizer), server)
    with torch.no_grad():
        trainer.policy.model.norm.weight.mul_(2.0)
    with pytest.raises(
        SamplerMismatch, match=r"differ from what was sent, first model.norm.weight"
    ):
        trainer.step()


def test_a_prefix_cache_that_is_held_by_requests_of_a_stopped_run(tokenizer, server, monkeypatch):
    """Keys and values of the previous weights would be read for equal prompts."""
    trainer = connect_vllm(build_trainer_with_late_updates(tokenizer), server)
    is_held = [True, True, False]

    def answer(path, body):
        assert path != "/v1/completions" or not is_held[0], (
            "sampled from a cache that was not emptied"
        )
        return (
            (200, {"success": not is_held.pop(0)})
            if path == "/reset_prefix_cache" and len(is_held) > 1
            else None
        )

    server.before = answer
    trainer.step()
    assert (
        is_held == [False] and sum(path == "/reset_prefix_cache" for path, _ in server.asked) >= 3
    )
    monkeypatch.setattr("rl_core.rollout_workers.inference_server.CACHE_RESET_TIMEOUT_S", 0.0)
    server.before = lambda path, body: (
        (200, {"success": False}) if path == "/reset_prefix_cache" else None
    )
    with pytest.raises(
        BackendError, match=r"could not empty its prefix cache .* use one server per run"
    ):
        trainer.step()


@pytest.mark.parametrize("is_adapted", [False, True])
def test_a_server_that_was_started_again(tokenizer, server, is_adapted):
    """Its fingerprint in the answer identifies it: no result of its initial weights is used.

    It does not know an adapter and refuses it.
    """

    def build_trainer():
        if not is_adapted:
            return letters_trainer(tokenizer)
        with torch.random.fork_rng():
            torch.manual_seed(1)
            return letters_trainer(
                tokenizer, model=add_adapter(compiled_model(tokenizer), LoraSettings(rank=4))
            )

    trainer = connect_vllm(build_trainer(), server, patience_s=5.0)
    trainer.step()
    with vllm_stand_in(compiled_model(tokenizer), tokenizer) as undisturbed:
        other = connect_vllm(build_trainer(), undisturbed)
        other.step(), other.step()
    count = len(server.asked)

    def restart(path, body):
        if len(server.asked) == count + 20:
            server.instance = "vllm-another"
            server.adapters.clear()
            server.worker = make_worker(server.model)
            server.model.load_state_dict(compiled_model(tokenizer).state_dict())
        if path == "/collective_rpc" and server.instance != INSTANCE:
            status, answer = server._rpc(body)
            [result] = answer["results"]
            return status, {
                "results": [
                    result | ({"instance": server.instance} if "instance" in result else {})
                ]
            }
        return None

    server.before = restart
    assert trainer.step()["perf/server_recoveries"] == 1.0
    assert list_sampled_tokens(trainer) == list_sampled_tokens(other)


@pytest.mark.parametrize("weights_then", ["", "0" * 64])
def test_other_weights_right_after_an_update(tokenizer, server, weights_then):
    """Initial weights mean a loss; those of another run, too similar for the probe, end this one."""
    trainer = connect_vllm(letters_trainer(tokenizer), server)
    orders = []

    def answer_others(path, body):
        if path != "/collective_rpc":
            return None
        orders.append(body["method"])
        if orders[-2:] == ["posttrain_load_weights", "posttrain_state"] and len(orders) == 2:
            return 200, {"results": [{"instance": INSTANCE, "weights": weights_then}]}
        return None

    server.before = answer_others
    if weights_then:
        with pytest.raises(
            SamplerMismatch, match=r"another client changed its weights \(digest 000000000000, ours"
        ):
            trainer.step()
    else:
        assert (
            trainer.step()["perf/server_recoveries"] == 1.0
            and orders.count("posttrain_load_weights") >= 2
        )


@pytest.mark.parametrize("status", [500, 502, 503])
def test_losses_are_bounded(tokenizer, server, status):
    """A server that answers queries but no request for tokens: nine times, then one error."""
    trainer = connect_vllm(letters_trainer(tokenizer), server)
    trainer.step()
    server.before = lambda path, body: (
        (status, {"error": {"message": "EngineDeadError", "code": status}})
        if (path == "/v1/completions" and body["max_tokens"] == 3)
        else None
    )
    with pytest.raises(
        BackendError, match="9 times within one collection; the same command resumes"
    ) as caught:
        trainer.step()
    assert "EngineDeadError" in str(caught.value) and "\n" not in str(caught.value)


def test_a_server_that_dies_after_each_start_is_not_started_forever(tokenizer, server):
    class DyingProcess:
        starts = 0

        def restart_if_ended(self):
            self.starts += 1
            return True

    trainer = connect_vllm(letters_trainer(tokenizer), server, patience_s=0.0)
    trainer.server._process = process = DyingProcess()
    server.before = lambda path, body: (503, {"error": {"message": "dead", "code": 503}})
    with pytest.raises(BackendError, match="has not answered for 0 s"):
        trainer.step()
    assert process.starts == 1


def test_after_a_loss_no_request_is_sent(tokenizer, server):
    """Otherwise each pair of 36 requests would wait for a silent server in turn."""
    trainer = connect_vllm(letters_trainer(tokenizer), server, concurrency=2)
    trainer.step()
    lost, is_over = [], threading.Event()

    def fail(path, body):
        if path == "/v1/completions" and body["max_tokens"] == 3 and not is_over.is_set():
            lost.append(body)
            time.sleep(0.05)  # the trainer notices the loss meanwhile
            return 503, {"error": {"message": "overloaded", "code": 503}}
        if lost and path == "/collective_rpc":
            is_over.set()
        return None

    server.before = fail
    assert trainer.step()["perf/server_recoveries"] == 1.0
    assert 1 <= len(lost) < 12 and len(list_sampled_tokens(trainer)) == 36


def empty_answer(answer):
    """Empty an answer as vLLM does for requests that have not begun when it is stopped."""
    answer["choices"][0].update(token_ids=[], finish_reason="abort")
    answer["choices"][0]["logprobs"].update(
        token_logprobs=[], tokens=[], top_logprobs=[], text_offset=[]
    )


@pytest.mark.slow
def test_requests_that_a_stopping_server_returns(tokenizer, server):
    """Answers without a token are requested again; a server without other answers ends the run."""
    with vllm_stand_in(compiled_model(tokenizer), tokenizer) as undisturbed:
        other = connect_vllm(letters_trainer(tokenizer), undisturbed)
        other.step()
    trainer = connect_vllm(letters_trainer(tokenizer), server)
    returned = []

    def stop(path, body):
        if path == "/v1/completions" and len(server.asked) >= 20 and len(returned) < 5:
            returned.append(body)
            return change_completions(empty_answer)(server, path, body)
        return None

    server.before = stop
    assert trainer.step()["perf/server_recoveries"] >= 1.0
    assert list_sampled_tokens(trainer) == list_sampled_tokens(other) and len(returned) == 5
    server.before = lambda path, body: change_completions(empty_answer)(server, path, body)
    with pytest.raises(
        BackendError, match=r"an answer has no token.* 9 times within one collection"
    ):
        trainer.step()


@pytest.mark.parametrize("begins", ["/wake_up", "posttrain_load_weights", "/v1/completions"])
def test_an_engine_that_dies_is_waited_for(tokenizer, server, monkeypatch, begins):
    """Until the server ends, vLLM answers everything with 500, commands and requests for tokens."""
    monkeypatch.setattr("rl_core.rollout_workers.server_backend._RETRY_INTERVAL_S", 0.01)
    trainer = connect_vllm(
        build_trainer_with_late_updates(tokenizer), server, patience_s=20.0, sleeps=True
    )
    trainer.step()
    refused = []

    def die(path, body):
        target = body["method"] if path == "/collective_rpc" else path
        if (not refused and target != begins) or refused.count("posttrain_state") == 3:
            return None
        refused.append(target)
        return 500, {"error": {"message": "EngineCore encountered an issue.", "code": 500}}

    server.before = die
    assert trainer.step()["perf/server_recoveries"] == 1.0
    assert refused[0] == begins and refused.count("posttrain_state") == 3


def test_no_folder_of_a_killed_run_remains(tmp_path):
    killed, alive = SessionFolder(WEIGHTS_PREFIX, tmp_path), SessionFolder(WEIGHTS_PREFIX, tmp_path)
    killed.release_lock()
    assert remove_stale_session_folders(WEIGHTS_PREFIX, tmp_path) == [killed.path.name]
    assert alive.path.is_dir()
    alive.close()


@pytest.mark.slow
def test_in_process_rollouts_do_not_import_it():
    program = (
        "import sys; import rl_core.api.recipes.policy_gradient; from rl_core.settings import PolicySettings; "
        "PolicySettings(); print(*[n for n in sys.modules if 'rollout_workers.server' in n or 'http_conn' in n])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert done.stdout.split() == []


def test_keys(monkeypatch, server):
    """A key from a file edited elsewhere, and one that is invalid in a header: http.client would print it."""
    settings = server_settings(server.url, key_variable="POSTTRAIN_TEST_KEY")
    monkeypatch.setenv("POSTTRAIN_TEST_KEY", "abc\r\n")
    assert InferenceServer(settings).describe_server().engine == "vllm"
    for key in ("a\nb", "schlüssel", "a\x7f"):
        monkeypatch.setenv("POSTTRAIN_TEST_KEY", key)
        with pytest.raises(
            SettingsError, match="POSTTRAIN_TEST_KEY contains characters that are invalid in a key"
        ) as caught:
            InferenceServer(settings)
        assert key not in str(caught.value)
