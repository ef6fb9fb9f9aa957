"""Saved paths in the model registry: one version each, with its lineage, also across crashes and outages."""

import pytest
from helpers.service import bits, random_data
from helpers.service_clients import create, loss, save, save_for_sampler, update
from helpers.service_load import settings_of
from transformers import AutoModelForCausalLM

from posttrain.training_service.store import ServiceStore
from posttrain.training_service.worker.engine_process import EngineProcess
from posttrain.training_service.worker.run_tracking import format_registered_name
from rl_core.storage import faults
from rl_core.storage.faults import InjectedFault
from tasks.tracking import Tracking


def test_names_of_base_models_are_names_of_the_registry():
    assert format_registered_name("service", "Qwen/Qwen3-0.6B") == "service-Qwen-Qwen3-0.6B"
    assert len(format_registered_name("service", "x" * 200)) == 100


def register_all(worker):
    """Execute rounds until no path waits for the registry."""
    for _ in range(20):
        while worker.step(wait=0.0):
            pass
        worker._registrar.wait_for_upload(120)
        if worker._store.find_checkpoint_to_register() is None:
            return
    raise AssertionError("it still waits")


@pytest.mark.slow
def test_saved_paths_become_versions_once(tmp_path, base_folder):
    store = ServiceStore(f"sqlite:///{tmp_path}/service.db")
    settings = settings_of(tmp_path, base_folder, registered="all")
    worker = EngineProcess(settings, store)
    for request in (create("r"), loss("r", 1, random_data(1)), update("r", 2), save("r", 3, "a")):
        store.accept_request(request)
    register_all(worker)
    record = store.find_checkpoint("tinker://r/weights/a")
    assert (record.version, record.registration) == ("service-base/1", "done")
    tracking = Tracking(None, tmp_path, "service")
    (version,) = tracking.list_versions("service-base")
    assert version.tags["service.path"] == record.path and version.tags["base_model"] == "base"
    assert version.tags["service.updates"] == "1" and len(version.tags["service.data_digest"]) == 64
    folder = tracking.download_version("service-base", 1, tmp_path / "cache")
    weights = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    base = AutoModelForCausalLM.from_pretrained(base_folder).state_dict()
    assert bits(weights["model.norm.weight"]) == bits(base["model.norm.weight"])  # not trained
    assert bits(weights["model.layers.0.mlp.up_proj.weight"]) != bits(
        base["model.layers.0.mlp.up_proj.weight"]
    )

    for request in (loss("r", 4, random_data(2)), update("r", 5), save_for_sampler("r", 6, "b")):
        store.accept_request(request)
    faults.configure_faults("service.exported:1:raise")
    with pytest.raises(InjectedFault):
        register_all(worker)
    # The error occurs in the upload thread, so the upload is retried later.
    faults.configure_faults("service.registered:1:raise")
    again = EngineProcess(settings, store)
    while again.step(wait=0.0):
        pass
    again.step(wait=0.0)
    again._registrar.wait_for_upload(120)
    assert store.find_checkpoint("tinker://r/sampler_weights/b").registration == "waiting"
    again._registrar._retry_at = 0.0
    register_all(again)
    assert store.find_checkpoint("tinker://r/sampler_weights/b").version == "service-base/2"
    assert len(tracking.list_versions("service-base")) == 2
    store.close()


def test_without_the_setting_nothing_is_registered(tmp_path, base_folder):
    store = ServiceStore(f"sqlite:///{tmp_path}/service.db")
    worker = EngineProcess(settings_of(tmp_path, base_folder), store)
    for request in (create("r"), save("r", 1, "a")):
        store.accept_request(request)
    register_all(worker)
    assert store.find_checkpoint("tinker://r/weights/a").registration == "none"
    assert not (tmp_path / "mlflow").exists() and not (tmp_path / "staging").exists()
    only = EngineProcess(settings_of(tmp_path, base_folder, registered="sampler_weights"), store)
    store.accept_request(save("r", 2, "b"))
    assert only.step(wait=0.0) == 1
    assert store.find_checkpoint("tinker://r/weights/b").registration == "none"
    store.close()
