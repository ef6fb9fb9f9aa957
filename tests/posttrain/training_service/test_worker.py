"""The worker in this process: order, answers, failures, samplers, saved paths; steps are taken by hand."""

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


def go(worker):
    while worker.step(wait=0.0):
        pass


def ask(store, worker, *requests):
    """The stored requests with their answers."""
    ids = [store.accept_request(request).request_id for request in requests]
    go(worker)
    return [store.find_request(request_id) for request_id in ids]


def body(stored):
    assert stored.state == "done", stored.error
    return json.loads(stored.answer)


def loss_of(stored):
    assert stored.state == "done", stored.error
    output = create_message("ForwardBackwardOutput")
    output.ParseFromString(stored.answer)
    return output.metrics["loss:sum"]


def samples_of(stored):
    assert stored.state == "done", stored.error
    response = create_message("SampleResponse")
    response.ParseFromString(stored.answer)
    return [np.frombuffer(one.tokens, "<i4").tolist() for one in response.sequences]


def weights(worker, run):
    return bits(worker._executor._engine.state_dict(run))


def test_answers_and_weights_are_those_of_the_engine_alone(store, worker, base_folder):
    data = [random_data(number, policy=number == 1) for number in range(3)]
    names = ["cross_entropy", "ppo", "cross_entropy"]
    made, *passes, stepped = ask(
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
    wanted = engine.forward_backward([loss_request("r", data[n], names[n]) for n in range(3)])
    metrics = engine.optim_step(step_request("r", grad_clip_norm=0.5)).metrics
    assert body(made)["model_id"] == "r" and [loss_of(one) for one in passes] == [
        one.loss for one in wanted
    ]
    assert body(stepped)["metrics"] == dict(metrics)
    assert weights(worker, "r") == bits(engine.state_dict("r"))
    run = store.run("r")
    assert (run.state, run.base, run.steps, run.next_seq, run.info["adapter"]["rank"]) == (
        "live",
        "base",
        1,
        5,
        3,
    )


def test_chunks_that_come_early_wait_for_the_first(store, worker, tmp_path, base_folder):
    data = [random_data(number) for number in range(3)]
    ask(store, worker, create("r"))
    late = ask(store, worker, loss("r", 2, data[1]), update("r", 3))
    assert [one.state for one in late] == ["waiting", "waiting"]
    ask(store, worker, loss("r", 1, data[0]))
    assert [store.find_request(one.request_id).state for one in late] == ["done", "done"]
    in_order = ServiceStore(f"sqlite:///{tmp_path}/other/service.db")
    other = EngineProcess(settings_of(tmp_path / "other", base_folder), in_order)
    ask(in_order, other, create("r"), loss("r", 1, data[0]), loss("r", 2, data[1]), update("r", 3))
    assert weights(worker, "r") == weights(other, "r")
    in_order.close()


def test_a_request_that_fails_is_final_and_the_run_goes_on(store, worker):
    made, bad, unread, good, stepped = ask(
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
    assert [one.state for one in (made, good, stepped)] == ["done"] * 3 and store.run(
        "r"
    ).steps == 1
    wrong, later = ask(store, worker, create("w", base="none"), loss("w", 1, random_data(0)))
    assert (
        "base_model" in wrong.error
        and store.run("w").state == "failed"
        and "no training run 'w'" in later.error
    )
    assert worker._store.read_worker_counters().get("replay_differences", 0) == 0


def test_a_request_that_ends_every_worker_fails_and_the_others_go_on(store, worker):
    ask(store, worker, create("r"))
    deadly, good = (store.accept_request(loss("r", seq, random_data(seq))) for seq in (1, 2))
    for _ in range(24):
        assert [one.seq for one in store.claim([deadly.request_id])] == [1]
        store.reset_running_requests()
    (stepped,) = ask(store, worker, update("r", 3))
    found = store.find_request(deadly.request_id)
    assert (found.state, found.category, found.deaths) == (
        "failed",
        "server",
        24,
    ) and "24 workers" in found.error
    assert store.find_request(good.request_id).state == stepped.state == "done"


def test_a_refusal_of_the_server_keeps_its_place_in_the_order(store, worker):
    refused = dataclasses.replace(loss("r", 1, ()), facts={"refused": "the body is too odd"})
    _, found, stepped = ask(store, worker, create("r"), refused, update("r", 2))
    assert (found.state, found.error, stepped.state) == ("failed", "the body is too odd", "done")


def test_samplers_of_a_base_of_a_run_and_of_paths(store, worker):
    ask(
        store,
        worker,
        create("r"),
        *(one for n in (1, 3) for one in (loss("r", n, random_data(n)), update("r", n + 1))),
    )
    made, named, saved = ask(
        store,
        worker,
        publish("r", 5, "fresh"),
        save_for_sampler("r", 6, "kept"),
        save("r", 7, "whole"),
    )
    assert (
        body(made)["sampling_session_id"] == "fresh"
        and body(named)["path"] == "tinker://r/sampler_weights/kept"
    )
    found = ask(
        store,
        worker,
        open_sampler("base", base="base"),
        open_sampler("p", path="tinker://r/sampler_weights/kept"),
        open_sampler("w", path=body(saved)["path"]),
        *(sample(name, 0) for name in ("base", "p", "w", "fresh")),
        sample("base", 1),
        sample("nobody", 0),
        open_sampler("no", path="tinker://r/weights/none"),
    )
    base, kept, whole, fresh, other = (samples_of(one) for one in found[3:8])
    assert kept == whole == fresh != base and other != base and len(base) == 2 and len(base[0]) == 4
    assert "no sampler 'nobody'" in found[8].error and "no saved weights" in found[9].error
    assert (
        store.sampler("fresh").folder == "weights/r/samplers/fresh"
        and store.sampler("base").base == "base"
    )
    assert store.find_checkpoint("tinker://r/weights/whole").steps == 2


def test_a_sampler_outlives_the_worker_and_has_the_weights_of_its_day(
    store, worker, tmp_path, base_folder
):
    train = [create("r"), loss("r", 1, random_data(1)), update("r", 2), publish("r", 3, "old")]
    ask(store, worker, *train)
    (before,) = ask(store, worker, sample("old", 0))
    ask(
        store,
        worker,
        loss("r", 4, random_data(2)),
        update("r", 5, learning_rate=0.5),
        publish("r", 6, "new"),
    )
    again = EngineProcess(settings_of(tmp_path, base_folder, samplers_in_memory=1), store)
    names = ["old", "new", "old"]
    old, new, old_too = ask(
        store, again, *(sample(name, 7 + i, prompt=[5, 6, 7]) for i, name in enumerate(names))
    )
    same = dataclasses.replace(sample("old", 99), facts={"seed": 1000})
    (repeat,) = ask(store, again, same)
    assert samples_of(repeat) == samples_of(before)
    assert len({str(samples_of(one)) for one in (old, new, old_too)}) == 3
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

    def asked(worker, number, *samplers):
        more = [dataclasses.replace(sample(name, number), facts={"seed": 3}) for name in samplers]
        return [samples_of(one) for one in ask(store, worker, *more)]

    path = f"tinker://r/{kind}/a"
    ask(store, worker, create("r"), save_again(1))
    ask(store, worker, open_sampler("old", path=path), open_sampler("idle", path=path))
    before = asked(worker, 0, "old")
    ask(
        store,
        worker,
        loss("r", 2, random_data(2)),
        update("r", 3, learning_rate=0.5),
        save_again(4),
    )
    ask(store, worker, open_sampler("new", path=path))
    again = EngineProcess(
        settings_of(tmp_path, base_folder, samplers_in_memory=1), store
    )  # as after a kill
    old, new, idle = asked(again, 1, "old", "new", "idle")
    assert [old] == [idle] == before and new != old
    assert (
        store.sampler("old").folder == "weights/r/samplers/old"
        and store.sampler("old").path == path
    )
    assert {one.name for one in (tmp_path / "weights/r/samplers").iterdir()} == {"old", "idle"}
    again._samplers.remove_unused_samplers(0.0, store.now() + 10)
    assert store.sampler("old") is None and not list((tmp_path / "weights/r/samplers").iterdir())
    assert asked(again, 2, "new") == [new]  # what is read under its path stays


def test_a_worker_that_dies_while_a_sampler_keeps_its_weights(store, worker, tmp_path, base_folder):
    ask(store, worker, create("r"), save("r", 1, "a"))
    ask(store, worker, open_sampler("p", path="tinker://r/weights/a"))
    (before,) = ask(store, worker, sample("p", 0))
    faults.configure_faults("service.kept:1:raise")
    with pytest.raises(InjectedFault):
        ask(
            store,
            worker,
            loss("r", 2, random_data(2)),
            update("r", 3, learning_rate=0.5),
            save("r", 4, "a", overwrite=True),
        )
    faults.configure_faults(None)
    store.reset_running_requests()
    again = EngineProcess(settings_of(tmp_path, base_folder), store)
    (found,) = ask(store, again, dataclasses.replace(sample("p", 1), facts=sample("p", 0).facts))
    assert (
        samples_of(found) == samples_of(before)
        and store.sampler("p").folder == "weights/r/samplers/p"
    )
    assert store.find_checkpoint("tinker://r/weights/a").steps == 1


def test_a_sampler_of_a_path_that_is_deleted_ends(store, worker):
    ask(store, worker, create("r"), save("r", 1, "a"))
    ask(store, worker, open_sampler("p", path="tinker://r/weights/a"))
    store.delete_checkpoint("tinker://r/weights/a")
    (saved,) = ask(store, worker, save("r", 2, "a"))  # before any upkeep
    (found,) = ask(store, worker, sample("p", 1))
    assert saved.state == "done" and "no sampler 'p'" in found.error
    ask(store, worker, open_sampler("q", path="tinker://r/weights/a"))
    store.delete_checkpoint("tinker://r/weights/a")
    worker._housekeeping.run_now()
    (found,) = ask(store, worker, sample("q", 1))
    assert "no sampler 'q'" in found.error


def test_inflight_samplers_follow_their_run_also_over_a_restart(
    store, worker, tmp_path, base_folder
):
    def asked(worker, number, *samplers):
        more = [dataclasses.replace(sample(name, number), facts={"seed": 3}) for name in samplers]
        return [samples_of(one) for one in ask(store, worker, *more)]

    ask(store, worker, create("r"), publish("r", 1, "one", kind="inflight"))
    (before,) = asked(worker, 0, "one")
    ask(store, worker, loss("r", 2, random_data(2)), update("r", 3, learning_rate=0.5))
    assert asked(worker, 1, "one") == [before]  # nothing is published yet
    ask(store, worker, publish("r", 4, "two", kind="inflight"))
    one, two = asked(worker, 2, "one", "two")
    assert one == two != before
    again = EngineProcess(settings_of(tmp_path, base_folder), store)
    assert asked(again, 3, "one", "two") == [one, two]
    ask(store, again, loss("r", 5, random_data(3)), update("r", 6, learning_rate=0.5))
    again._runs.unload_run("r")  # as an idle run
    ask(store, again, publish("r", 7, "three", kind="inflight"))
    newest = asked(again, 4, "one", "two", "three")
    assert newest[0] == newest[1] == newest[2] != one
    assert [path.name for path in (tmp_path / "weights/r/published").iterdir()] == ["0000000007"]


def test_saved_weights_are_loaded_into_the_same_a_new_and_a_foreign_run(store, worker):
    ask(store, worker, create("r"), loss("r", 1, random_data(1)), update("r", 2), save("r", 3, "a"))
    kept = weights(worker, "r")
    ask(store, worker, loss("r", 4, random_data(2)), update("r", 5), loss("r", 6, random_data(3)))
    loaded, fresh = ask(
        store, worker, load("r", 7, "tinker://r/weights/a"), load("n", 0, "tinker://r/weights/a")
    )
    assert body(loaded)["path"] == "tinker://r/weights/a" and body(fresh)["model_id"] == "n"
    assert weights(worker, "r") == weights(worker, "n") == kept and store.run("n").steps == 1
    foreign = dataclasses.replace(load("f", 0, "tinker://r/weights/a"), owner="key-2")
    refused, missing = ask(store, worker, foreign, load("m", 0, "tinker://r/weights/none"))
    assert "no saved weights" in refused.error and "no saved weights" in missing.error
    assert store.run("f").state == store.run("m").state == "failed"
    store.update_checkpoint("tinker://r/weights/a", public=True)
    (shared,) = ask(store, worker, dataclasses.replace(foreign, target="g"))
    assert shared.state == "done"


def test_a_path_is_written_once_unless_it_is_overwritten(store, worker, tmp_path):
    ask(store, worker, create("r"), loss("r", 1, random_data(1)), update("r", 2))
    first, again, over = ask(
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
    (anew,) = ask(store, worker, save("r", 6, "a"))
    assert anew.state == "done" and read_state(tmp_path / record.folder)["run"]["steps"] == 1


def test_no_saved_folder_is_ahead_of_the_store_after_a_power_cut(store, worker, monkeypatch):
    """The update and the order to save may be in SQLite's log alone, of which a power cut keeps a beginning."""
    ask(store, worker, create("r"), loss("r", 1, random_data(1)))
    events, engine = [], worker._executor._engine
    sync, save_weights = store._database.sync, engine.save_weights
    monkeypatch.setattr(store._database, "sync", lambda: (sync(), events.append("store"))[0])
    monkeypatch.setattr(
        engine, "save_weights", lambda *how: (events.append("folder"), save_weights(*how))[1]
    )
    store.accept_batch([update("r", 2), save("r", 3, "a")])
    go(worker)
    assert events[:2] == ["store", "folder"] and events[-1] == "store"


def test_an_external_save_is_an_adapter_or_a_model_that_others_load(store, worker, tmp_path):
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    ask(store, worker, create("r", rank=3), loss("r", 1, random_data(1)), update("r", 2))
    ask(
        store,
        worker,
        create("f", full=True),
        loss("f", 1, random_data(1)),
        update("f", 2, learning_rate=1e-3),
    )
    adapter, model = ask(store, worker, save_external("r", 3, "x"), save_external("f", 3, "x"))
    assert body(adapter)["path"] == "tinker://r/external_weights/x" and model.state == "done"
    config = json.loads((tmp_path / "weights/r/external_weights/x/adapter_config.json").read_text())
    tensors = load_file(tmp_path / "weights/r/external_weights/x/adapter_model.safetensors")
    assert config["r"] == 3 and any(
        float(one.abs().sum()) > 0 for name, one in tensors.items() if "lora_B" in name
    )
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "weights/f/external_weights/x"
    ).state_dict()
    state = worker._executor._engine.state_dict("f")["model"]
    assert bits(loaded["model.layers.0.mlp.up_proj.weight"]) == bits(
        state["model.layers.0.mlp.up_proj.weight"]
    )


def test_an_unloaded_run_is_over_and_what_was_saved_of_it_stays(store, worker, tmp_path):
    ask(store, worker, create("r"), loss("r", 1, random_data(1)), update("r", 2), save("r", 3, "a"))
    worker._runs.save_all_snapshots()
    assert (tmp_path / "snapshots" / "r").is_dir()
    (over,) = ask(store, worker, unload("r", 4))
    assert body(over)["model_id"] == "r" and store.run("r").state == "unloaded"
    assert not (tmp_path / "snapshots" / "r").exists()
    (loaded,) = ask(store, worker, load("n", 0, "tinker://r/weights/a"))
    assert loaded.state == "done"


def test_more_runs_than_fit_into_memory_take_turns(store, tmp_path, base_folder):
    settings = settings_of(tmp_path, base_folder)
    small = dataclasses.replace(settings, engine=dataclasses.replace(settings.engine, max_runs=2))
    worker = EngineProcess(small, store)
    names = ["a", "b", "c"]
    ask(store, worker, *(create(name, seed=1) for name in names))
    for step in range(2):
        ask(store, worker, *(loss(name, 2 * step + 1, random_data(step)) for name in names))
        ask(store, worker, *(update(name, 2 * step + 2) for name in names))
    found = []
    for name in names:
        worker._runs.ensure_loaded(name)
        found.append(weights(worker, name))
        assert len(worker._runs._loaded) <= 2
    assert found[0] == found[1] == found[2] and store.counts().get("replay_differences", 0) == 0


def test_unused_samplers_go_with_their_weights(store, worker, tmp_path):
    ask(store, worker, create("r"), publish("r", 1, "fresh"), save_for_sampler("r", 2, "kept"))
    ask(store, worker, open_sampler("p", path="tinker://r/sampler_weights/kept"))
    folder = tmp_path / store.sampler("fresh").folder
    assert (
        worker._samplers.remove_unused_samplers(3600.0, store.sampler("fresh").touched) == []
        and folder.is_dir()
    )
    assert worker._samplers.remove_unused_samplers(
        3600.0, store.sampler("fresh").touched + 3601
    ) == ["fresh"]
    assert not folder.exists() and store.sampler("fresh") is None and store.sampler("p") is not None


def test_updates_of_several_runs_are_one_round_and_a_fault_of_one_is_its_own(
    store, worker, monkeypatch
):
    """One call of the engine and one transaction; the run with an endless gradient has it forgotten."""
    runs = ("r", "s", "t")
    ask(store, worker, *(create(run, seed=index) for index, run in enumerate(runs)))
    ask(store, worker, *(loss(run, 1, random_data(index)) for index, run in enumerate(runs)))
    before = {run: weights(worker, run)["model"] for run in runs}
    gradient = worker._executor._engine._find_run("s").gradient
    next(iter(gradient.values())).fill_(float("inf"))
    transactions = []
    finish = store.finish
    monkeypatch.setattr(
        store,
        "finish",
        lambda outcomes, **how: (transactions.append(len(outcomes)), finish(outcomes, **how))[1],
    )
    done = ask(store, worker, *(update(run, 2) for run in runs))
    assert transactions == [3] and [one.state for one in done] == ["done", "failed", "done"]
    assert done[1].category == "user" and "not finite" in done[1].error
    assert [weights(worker, run)["model"] == before[run] for run in runs] == [False, True, False]
    assert [store.run(run).steps for run in runs] == [1, 0, 1] and [
        store.run(run).next_seq for run in runs
    ] == [
        3,
        3,
        3,
    ]


def test_an_update_that_broke_off_has_not_happened(store, worker, monkeypatch):
    """The engine fails behind the update (as where memory ends): the run comes back as it was, its gradient too."""
    ask(store, worker, create("r"), loss("r", 1, random_data(0)))
    engine = worker._executor._engine
    before, optim_steps = weights(worker, "r"), engine.optim_steps

    def breaks_off(requests):
        optim_steps(requests)
        raise MemoryError("no memory left")

    monkeypatch.setattr(engine, "optim_steps", breaks_off)
    (failed,) = ask(store, worker, update("r", 2))
    assert (failed.state, failed.category) == (
        "failed",
        "server",
    ) and "no memory left" in failed.error
    monkeypatch.setattr(engine, "optim_steps", optim_steps)
    ask(store, worker, loss("r", 3, random_data(1), forward_only=True))  # it is asked for again
    assert weights(worker, "r") == before and store.run("r").steps == 0
