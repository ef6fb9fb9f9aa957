"""The worker in this process: order, answers, failures, samplers, saved paths; steps are executed by hand."""

import dataclasses
import json

import numpy as np
import pytest
from helpers.service import bits, loss_request, make_engine, random_data, step_request
from helpers.service_clients import (
    OWNER,
    create,
    load,
    loss,
    open_sampler,
    publish,
    sample,
    save,
    save_external,
    save_for_sampler,
    unload,
    update,
)
from helpers.service_load import settings_of

from posttrain.training_service.store import ServiceStore
from posttrain.training_service.wire.protobuf_messages import create_message
from posttrain.training_service.worker.engine_process import EngineProcess
from rl_core.service.requests import AdapterConfig, CreateModel
from rl_core.service.saved_weights import read_state
from rl_core.storage import faults
from rl_core.storage.faults import InjectedFault


@pytest.fixture
def store(tmp_path):
    store = ServiceStore(f"sqlite:///{tmp_path}/service.db")
    yield store
    store.close()


@pytest.fixture
def worker(store, tmp_path, base_folder):
    return EngineProcess(settings_of(tmp_path, base_folder), store)


def run_worker(worker):
    while worker.step(wait=0.0):
        pass


def execute(store, worker, *requests):
    """Accept requests and execute them; return them with their answers."""
    ids = [store.accept_request(request).request_id for request in requests]
    run_worker(worker)
    return [store.find_request(request_id) for request_id in ids]


def read_body(stored):
    assert stored.state == "done", stored.error
    return json.loads(stored.answer)


def read_loss(stored):
    assert stored.state == "done", stored.error
    output = create_message("ForwardBackwardOutput")
    output.ParseFromString(stored.answer)
    return output.metrics["loss:sum"]


def read_samples(stored):
    assert stored.state == "done", stored.error
    response = create_message("SampleResponse")
    response.ParseFromString(stored.answer)
    return [np.frombuffer(sequence.tokens, "<i4").tolist() for sequence in response.sequences]


def read_weights(worker, run):
    return bits(worker._executor._engine.state_dict(run))


def test_answers_and_weights_are_those_of_the_engine_alone(store, worker, base_folder):
    data = [random_data(number, policy=number == 1) for number in range(3)]
    names = ["cross_entropy", "ppo", "cross_entropy"]
    creation, *passes, step_result = execute(
        store,
        worker,
        create("r", rank=3, seed=4),
        *(loss("r", 1 + number, data[number], names[number]) for number in range(3)),
        update("r", 4, grad_clip_norm=0.5),
    )
    engine = make_engine(base_folder, micro_batch_tokens=48)
    engine.create_model(
        CreateModel(model_id="r", base="base", adapter=AdapterConfig(rank=3, seed=4), seed=4)
    )
    expected = engine.forward_backward([loss_request("r", data[n], names[n]) for n in range(3)])
    metrics = engine.optim_step(step_request("r", grad_clip_norm=0.5)).metrics
    assert read_body(creation)["model_id"] == "r" and [
        read_loss(pass_request) for pass_request in passes
    ] == [item.loss for item in expected]
    assert read_body(step_result)["metrics"] == dict(metrics)
    assert read_weights(worker, "r") == bits(engine.state_dict("r"))
    run = store.find_run("r")
    assert (run.state, run.base, run.steps, run.next_seq, run.info["adapter"]["rank"]) == (
        "live",
        "base",
        1,
        5,
        3,
    )


def test_chunks_that_come_early_wait_for_the_first(store, worker, tmp_path, base_folder):
    data = [random_data(number) for number in range(3)]
    execute(store, worker, create("r"))
    late = execute(store, worker, loss("r", 2, data[1]), update("r", 3))
    assert [item.state for item in late] == ["waiting", "waiting"]
    execute(store, worker, loss("r", 1, data[0]))
    assert [store.find_request(item.request_id).state for item in late] == ["done", "done"]
    in_order = ServiceStore(f"sqlite:///{tmp_path}/other/service.db")
    other = EngineProcess(settings_of(tmp_path / "other", base_folder), in_order)
    execute(
        in_order, other, create("r"), loss("r", 1, data[0]), loss("r", 2, data[1]), update("r", 3)
    )
    assert read_weights(worker, "r") == read_weights(other, "r")
    in_order.close()


def test_a_request_that_fails_is_final_and_the_run_continues(store, worker):
    published, bad, unread, good, stepped = execute(
        store,
        worker,
        create("r"),
        loss("r", 1, random_data(0), "no_such_loss"),
        dataclasses.replace(loss("r", 2, ()), payload=b"\xff\xff"),
        loss("r", 3, random_data(0)),
        update("r", 4),
    )
    assert (bad.state, bad.category) == ("failed", "user") and "no_such_loss" in bad.error
    assert unread.state == "failed" and "ForwardBackwardRequest" in unread.error
    assert [item.state for item in (published, good, stepped)] == ["done"] * 3 and store.find_run(
        "r"
    ).steps == 1
    wrong, later = execute(store, worker, create("w", base="none"), loss("w", 1, random_data(0)))
    assert (
        "base_model" in wrong.error
        and store.find_run("w").state == "failed"
        and "no training run 'w'" in later.error
    )
    assert worker._store.read_worker_counters().get("replay_differences", 0) == 0


def test_a_request_that_kills_every_worker_fails_and_the_others_continue(store, worker):
    execute(store, worker, create("r"))
    deadly, good = (store.accept_request(loss("r", seq, random_data(seq))) for seq in (1, 2))
    for _ in range(24):
        assert [item.seq for item in store.claim_requests([deadly.request_id])] == [1]
        store.reset_running_requests()
    (stepped,) = execute(store, worker, update("r", 3))
    stored = store.find_request(deadly.request_id)
    assert (stored.state, stored.category, stored.deaths) == (
        "failed",
        "server",
        24,
    ) and "24 workers" in stored.error
    assert store.find_request(good.request_id).state == stepped.state == "done"


def test_a_refusal_of_the_server_keeps_its_place_in_the_order(store, worker):
    refused = dataclasses.replace(loss("r", 1, ()), facts={"refused": "the body is too odd"})
    _, results, stepped = execute(store, worker, create("r"), refused, update("r", 2))
    assert (results.state, results.error, stepped.state) == (
        "failed",
        "the body is too odd",
        "done",
    )


def test_samplers_of_a_base_of_a_run_and_of_paths(store, worker):
    execute(
        store,
        worker,
        create("r"),
        *(item for n in (1, 3) for item in (loss("r", n, random_data(n)), update("r", n + 1))),
    )
    published, named, saved = execute(
        store,
        worker,
        publish("r", 5, "fresh"),
        save_for_sampler("r", 6, "named"),
        save("r", 7, "whole"),
    )
    assert (
        read_body(published)["sampling_session_id"] == "fresh"
        and read_body(named)["path"] == "tinker://r/sampler_weights/named"
    )
    result = execute(
        store,
        worker,
        open_sampler("base", base="base"),
        open_sampler("p", path="tinker://r/sampler_weights/named"),
        open_sampler("w", path=read_body(saved)["path"]),
        *(sample(name, 0) for name in ("base", "p", "w", "fresh")),
        sample("base", 1),
        sample("nobody", 0),
        open_sampler("no", path="tinker://r/weights/none"),
    )
    base, by_name, whole, fresh, other = (read_samples(item) for item in result[3:8])
    assert (
        by_name == whole == fresh != base and other != base and len(base) == 2 and len(base[0]) == 4
    )
    assert "no sampler 'nobody'" in result[8].error and "no saved weights" in result[9].error
    assert (
        store.find_sampler("fresh").folder == "weights/r/samplers/fresh"
        and store.find_sampler("base").base == "base"
    )
    assert store.find_checkpoint("tinker://r/weights/whole").steps == 2


def test_a_sampler_outlives_the_worker_and_has_the_weights_of_its_day(
    store, worker, tmp_path, base_folder
):
    train = [create("r"), loss("r", 1, random_data(1)), update("r", 2), publish("r", 3, "old")]
    execute(store, worker, *train)
    (before,) = execute(store, worker, sample("old", 0))
    execute(
        store,
        worker,
        loss("r", 4, random_data(2)),
        update("r", 5, learning_rate=0.5),
        publish("r", 6, "new"),
    )
    again = EngineProcess(settings_of(tmp_path, base_folder, samplers_in_memory=1), store)
    names = ["old", "new", "old"]
    old, new, old_too = execute(
        store, again, *(sample(name, 7 + i, prompt=[5, 6, 7]) for i, name in enumerate(names))
    )
    same = dataclasses.replace(sample("old", 99), facts={"seed": 1000})
    (repeat,) = execute(store, again, same)
    assert read_samples(repeat) == read_samples(before)
    assert len({str(read_samples(item)) for item in (old, new, old_too)}) == 3
    assert len(again._samplers._loaded) == 1


@pytest.mark.parametrize("kind", ["weights", "sampler_weights"])
def test_a_sampler_of_a_path_that_is_written_again_keeps_the_weights_of_its_day(
    store, worker, tmp_path, base_folder, kind
):
    def save_again(seq):
        return (
            save("r", seq, "a", overwrite=True)
            if kind == "weights"
            else save_for_sampler("r", seq, "a")
        )

    def draw_samples(worker, number, *samplers):
        requests = [
            dataclasses.replace(sample(name, number), facts={"seed": 3}) for name in samplers
        ]
        return [read_samples(item) for item in execute(store, worker, *requests)]

    path = f"tinker://r/{kind}/a"
    execute(store, worker, create("r"), save_again(1))
    execute(store, worker, open_sampler("old", path=path), open_sampler("idle", path=path))
    before = draw_samples(worker, 0, "old")
    execute(
        store,
        worker,
        loss("r", 2, random_data(2)),
        update("r", 3, learning_rate=0.5),
        save_again(4),
    )
    execute(store, worker, open_sampler("new", path=path))
    # as after a kill
    again = EngineProcess(settings_of(tmp_path, base_folder, samplers_in_memory=1), store)
    old, new, idle = draw_samples(again, 1, "old", "new", "idle")
    assert [old] == [idle] == before and new != old
    assert (
        store.find_sampler("old").folder == "weights/r/samplers/old"
        and store.find_sampler("old").path == path
    )
    assert {item.name for item in (tmp_path / "weights/r/samplers").iterdir()} == {"old", "idle"}
    again._samplers.remove_unused_samplers(0.0, store.read_clock() + 10)
    assert store.find_sampler("old") is None and not list(
        (tmp_path / "weights/r/samplers").iterdir()
    )
    assert draw_samples(again, 2, "new") == [new]  # what is read under its path stays


def test_a_worker_that_dies_while_a_sampler_keeps_its_weights(store, worker, tmp_path, base_folder):
    execute(store, worker, create("r"), save("r", 1, "a"))
    execute(store, worker, open_sampler("p", path="tinker://r/weights/a"))
    (before,) = execute(store, worker, sample("p", 0))
    faults.configure_faults("service.kept:1:raise")
    with pytest.raises(InjectedFault):
        execute(
            store,
            worker,
            loss("r", 2, random_data(2)),
            update("r", 3, learning_rate=0.5),
            save("r", 4, "a", overwrite=True),
        )
    faults.configure_faults(None)
    store.reset_running_requests()
    again = EngineProcess(settings_of(tmp_path, base_folder), store)
    (results,) = execute(
        store, again, dataclasses.replace(sample("p", 1), facts=sample("p", 0).facts)
    )
    assert (
        read_samples(results) == read_samples(before)
        and store.find_sampler("p").folder == "weights/r/samplers/p"
    )
    assert store.find_checkpoint("tinker://r/weights/a").steps == 1


def test_a_sampler_of_a_path_that_is_deleted_ends(store, worker):
    execute(store, worker, create("r"), save("r", 1, "a"))
    execute(store, worker, open_sampler("p", path="tinker://r/weights/a"))
    store.delete_checkpoint("tinker://r/weights/a")
    (saved,) = execute(store, worker, save("r", 2, "a"))  # before any upkeep
    (results,) = execute(store, worker, sample("p", 1))
    assert saved.state == "done" and "no sampler 'p'" in results.error
    execute(store, worker, open_sampler("q", path="tinker://r/weights/a"))
    store.delete_checkpoint("tinker://r/weights/a")
    worker._housekeeping.run_now()
    (results,) = execute(store, worker, sample("q", 1))
    assert "no sampler 'q'" in results.error


def test_inflight_samplers_follow_their_run_also_over_a_restart(
    store, worker, tmp_path, base_folder
):
    def draw_samples(worker, number, *samplers):
        requests = [
            dataclasses.replace(sample(name, number), facts={"seed": 3}) for name in samplers
        ]
        return [read_samples(item) for item in execute(store, worker, *requests)]

    execute(store, worker, create("r"), publish("r", 1, "one", kind="inflight"))
    (before,) = draw_samples(worker, 0, "one")
    execute(store, worker, loss("r", 2, random_data(2)), update("r", 3, learning_rate=0.5))
    assert draw_samples(worker, 1, "one") == [before]  # nothing is published yet
    execute(store, worker, publish("r", 4, "two", kind="inflight"))
    first, second = draw_samples(worker, 2, "one", "two")
    assert first == second != before
    again = EngineProcess(settings_of(tmp_path, base_folder), store)
    assert draw_samples(again, 3, "one", "two") == [first, second]
    execute(store, again, loss("r", 5, random_data(3)), update("r", 6, learning_rate=0.5))
    again._runs.unload_run("r")  # as an idle run
    execute(store, again, publish("r", 7, "three", kind="inflight"))
    newest = draw_samples(again, 4, "one", "two", "three")
    assert newest[0] == newest[1] == newest[2] != first
    assert [path.name for path in (tmp_path / "weights/r/published").iterdir()] == ["0000000007"]


def test_saved_weights_are_loaded_into_the_same_a_new_and_a_foreign_run(store, worker):
    execute(
        store, worker, create("r"), loss("r", 1, random_data(1)), update("r", 2), save("r", 3, "a")
    )
    saved = read_weights(worker, "r")
    execute(
        store, worker, loss("r", 4, random_data(2)), update("r", 5), loss("r", 6, random_data(3))
    )
    loaded, fresh = execute(
        store, worker, load("r", 7, "tinker://r/weights/a"), load("n", 0, "tinker://r/weights/a")
    )
    assert (
        read_body(loaded)["path"] == "tinker://r/weights/a" and read_body(fresh)["model_id"] == "n"
    )
    assert (
        read_weights(worker, "r") == read_weights(worker, "n") == saved
        and store.find_run("n").steps == 1
    )
    foreign = dataclasses.replace(load("f", 0, "tinker://r/weights/a"), owner="key-2")
    refused, missing = execute(store, worker, foreign, load("m", 0, "tinker://r/weights/none"))
    assert "no saved weights" in refused.error and "no saved weights" in missing.error
    assert store.find_run("f").state == store.find_run("m").state == "failed"
    store.update_checkpoint("tinker://r/weights/a", public=True)
    (shared,) = execute(store, worker, dataclasses.replace(foreign, target="g"))
    assert shared.state == "done"


def test_a_path_is_written_once_unless_it_is_overwritten(store, worker, tmp_path):
    execute(store, worker, create("r"), loss("r", 1, random_data(1)), update("r", 2))
    first, again, over = execute(
        store,
        worker,
        save("r", 3, "a"),
        save("r", 4, "a"),
        save("r", 5, "a", overwrite=True, ttl_seconds=60),
    )
    assert first.state == over.state == "done" and "exists already" in again.error
    record = store.find_checkpoint("tinker://r/weights/a")
    assert record.expires == record.created + 60 and record.bytes > 1000 and record.owner == OWNER
    assert store.delete_checkpoint(record.path)
    worker._housekeeping.run_now()
    assert not (tmp_path / record.folder).exists() and store.find_checkpoint(record.path) is None
    (saved_again,) = execute(store, worker, save("r", 6, "a"))
    assert saved_again.state == "done" and read_state(tmp_path / record.folder)["run"]["steps"] == 1


def test_no_saved_folder_is_ahead_of_the_store_after_a_power_cut(store, worker, monkeypatch):
    """The update and the save request may be only in SQLite's log, which a power cut truncates."""
    execute(store, worker, create("r"), loss("r", 1, random_data(1)))
    events, engine = [], worker._executor._engine
    sync, save_weights = store._database.sync_to_disk, engine.save_weights
    monkeypatch.setattr(
        store._database, "sync_to_disk", lambda: (sync(), events.append("store"))[0]
    )
    monkeypatch.setattr(
        engine,
        "save_weights",
        lambda *arguments: (events.append("folder"), save_weights(*arguments))[1],
    )
    store.accept_batch([update("r", 2), save("r", 3, "a")])
    run_worker(worker)
    assert events[:2] == ["store", "folder"] and events[-1] == "store"


def test_an_external_save_is_an_adapter_or_a_model_that_others_load(store, worker, tmp_path):
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    execute(store, worker, create("r", rank=3), loss("r", 1, random_data(1)), update("r", 2))
    execute(
        store,
        worker,
        create("f", full=True),
        loss("f", 1, random_data(1)),
        update("f", 2, learning_rate=1e-3),
    )
    adapter, model = execute(store, worker, save_external("r", 3, "x"), save_external("f", 3, "x"))
    assert read_body(adapter)["path"] == "tinker://r/external_weights/x" and model.state == "done"
    config = json.loads((tmp_path / "weights/r/external_weights/x/adapter_config.json").read_text())
    tensors = load_file(tmp_path / "weights/r/external_weights/x/adapter_model.safetensors")
    assert config["r"] == 3 and any(
        float(tensor.abs().sum()) > 0 for name, tensor in tensors.items() if "lora_B" in name
    )
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "weights/f/external_weights/x"
    ).state_dict()
    state = worker._executor._engine.state_dict("f")["model"]
    assert bits(loaded["model.layers.0.mlp.up_proj.weight"]) == bits(
        state["model.layers.0.mlp.up_proj.weight"]
    )


def test_an_unloaded_run_is_over_and_what_was_saved_of_it_stays(store, worker, tmp_path):
    execute(
        store, worker, create("r"), loss("r", 1, random_data(1)), update("r", 2), save("r", 3, "a")
    )
    worker._runs.save_all_snapshots()
    assert (tmp_path / "snapshots" / "r").is_dir()
    (over,) = execute(store, worker, unload("r", 4))
    assert read_body(over)["model_id"] == "r" and store.find_run("r").state == "unloaded"
    assert not (tmp_path / "snapshots" / "r").exists()
    (loaded,) = execute(store, worker, load("n", 0, "tinker://r/weights/a"))
    assert loaded.state == "done"


def test_more_runs_than_fit_into_memory_take_turns(store, tmp_path, base_folder):
    settings = settings_of(tmp_path, base_folder)
    small = dataclasses.replace(settings, engine=dataclasses.replace(settings.engine, max_runs=2))
    worker = EngineProcess(small, store)
    names = ["a", "b", "c"]
    execute(store, worker, *(create(name, seed=1) for name in names))
    for step in range(2):
        execute(store, worker, *(loss(name, 2 * step + 1, random_data(step)) for name in names))
        execute(store, worker, *(update(name, 2 * step + 2) for name in names))
    results = []
    for name in names:
        worker._runs.ensure_loaded(name)
        results.append(read_weights(worker, name))
        assert len(worker._runs._loaded) <= 2
    assert (
        results[0] == results[1] == results[2]
        and store.read_worker_counters().get("replay_differences", 0) == 0
    )


def test_unused_samplers_go_with_their_weights(store, worker, tmp_path):
    execute(store, worker, create("r"), publish("r", 1, "fresh"), save_for_sampler("r", 2, "named"))
    execute(store, worker, open_sampler("p", path="tinker://r/sampler_weights/named"))
    folder = tmp_path / store.find_sampler("fresh").folder
    assert (
        worker._samplers.remove_unused_samplers(3600.0, store.find_sampler("fresh").touched) == []
        and folder.is_dir()
    )
    assert worker._samplers.remove_unused_samplers(
        3600.0, store.find_sampler("fresh").touched + 3601
    ) == ["fresh"]
    assert (
        not folder.exists()
        and store.find_sampler("fresh") is None
        and store.find_sampler("p") is not None
    )


def test_updates_of_several_runs_are_one_round_and_a_fault_affects_one_run(
    store, worker, monkeypatch
):
    """One engine call and one transaction; the run with an infinite gradient has it cleared."""
    runs = ("r", "s", "t")
    execute(store, worker, *(create(run, seed=index) for index, run in enumerate(runs)))
    execute(store, worker, *(loss(run, 1, random_data(index)) for index, run in enumerate(runs)))
    before = {run: read_weights(worker, run)["model"] for run in runs}
    gradient = worker._executor._engine._find_run("s").gradient
    next(iter(gradient.values())).fill_(float("inf"))
    transactions = []
    finish = store.finish_requests
    monkeypatch.setattr(
        store,
        "finish_requests",
        lambda outcomes, **options: (
            transactions.append(len(outcomes)),
            finish(outcomes, **options),
        )[1],
    )
    done = execute(store, worker, *(update(run, 2) for run in runs))
    assert transactions == [3] and [item.state for item in done] == ["done", "failed", "done"]
    assert done[1].category == "user" and "not finite" in done[1].error
    assert [read_weights(worker, run)["model"] == before[run] for run in runs] == [
        False,
        True,
        False,
    ]
    assert [store.find_run(run).steps for run in runs] == [1, 0, 1] and [
        store.find_run(run).next_seq for run in runs
    ] == [
        3,
        3,
        3,
    ]


def test_an_update_that_broke_off_has_not_happened(store, worker, monkeypatch):
    """The engine fails after the update (for example out of memory): the run is restored with its gradient."""
    execute(store, worker, create("r"), loss("r", 1, random_data(0)))
    engine = worker._executor._engine
    before, optim_steps = read_weights(worker, "r"), engine.optim_steps

    def breaks_off(requests):
        optim_steps(requests)
        raise MemoryError("no memory left")

    monkeypatch.setattr(engine, "optim_steps", breaks_off)
    (failed,) = execute(store, worker, update("r", 2))
    assert (failed.state, failed.category) == (
        "failed",
        "server",
    ) and "no memory left" in failed.error
    monkeypatch.setattr(engine, "optim_steps", optim_steps)
    execute(store, worker, loss("r", 3, random_data(1), forward_only=True))  # it is asked for again
    assert read_weights(worker, "r") == before and store.find_run("r").steps == 0
