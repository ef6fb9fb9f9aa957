"""`posttrain service`: settings, keys, lists, cancelling."""

import json
from types import SimpleNamespace

import pytest
from helpers import ROOT

from posttrain.cli.main import main
from posttrain.settings_files import load_service_settings
from posttrain.training_service.store import (
    CheckpointRecord,
    NewRequest,
    ServiceStore,
    TrainingRunRecord,
)
from rl_core.errors import SettingsError


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(f"folder: {tmp_path / 'service'}\nengine:\n  bases: {{base: .}}\n")
    return str(path)


def run_service(config, *arguments):
    return main(["service", *arguments, "--config", config])


def test_the_shipped_config_loads():
    settings = load_service_settings("service", ["server.port=9000"])
    assert settings.server.port == 9000 and settings.engine.bases == {
        "Qwen/Qwen3-0.6B": "Qwen/Qwen3-0.6B"
    }
    assert (ROOT / "configs" / "service.yaml").read_text().startswith("# ")


def test_wrong_settings_are_reported_with_their_lines(tmp_path, config):
    path = tmp_path / "wrong.yaml"
    path.write_text("folder: x\nengine:\n  slot: 3\nserver:\n  port: 70000\n  host: 0.0.0.0\n")
    with pytest.raises(SettingsError) as caught:
        load_service_settings(path)
    text = str(caught.value)
    assert "wrong.yaml:3: engine.slot" in text and "wrong.yaml:5: server.port" in text
    with pytest.raises(SettingsError, match="is not loopback"):
        load_service_settings(config, ["server.host=0.0.0.0"])
    with pytest.raises(SettingsError, match=r"engine.bases.base: \./nowhere is no folder"):
        load_service_settings(config, ["engine.bases.base=./nowhere"])


def test_keys_are_created_listed_and_revoked(config, capsys):
    assert run_service(config, "key", "create", "anna", "--limit", "60", "--queue", "8") == 0
    secret = capsys.readouterr().out.splitlines()[0]
    store = ServiceStore(load_service_settings(config).store_url)
    key = store.find_key(secret)
    assert secret.startswith("tml-") and (key.name, key.requests_per_minute, key.queue) == (
        "anna",
        60,
        8,
    )
    assert (
        run_service(config, "key", "create", "anna") == 2
        and "already exists" in capsys.readouterr().err
    )
    assert run_service(config, "key", "list") == 0
    listed = capsys.readouterr().out
    assert "anna" in listed and "60" in listed and secret[4:] not in listed
    assert run_service(config, "key", "revoke", "anna") == 0 and store.find_key(secret) is None
    assert run_service(config, "key", "revoke", "anna") == 2
    assert run_service(config, "audit") == 0
    assert [line.split()[3] for line in capsys.readouterr().out.splitlines()[-2:]] == [
        "key_revoke",
        "key_create",
    ]
    store.record_audit_entry(
        key.key_id, "checkpoint_load", "tinker://\x1b[2J\n2026-01-01 00:00:00  operator  key_create"
    )
    assert (
        run_service(config, "audit", "--number", "1") == 0
    )  # text from clients forges no line and moves no cursor
    assert (
        capsys.readouterr()
        .out.splitlines()[1]
        .split("  ")[3]
        .startswith(r"tinker://\x1b[2J\n2026-01-01")
    )
    store.close()


def test_requests_are_counted_and_cancelled(config, capsys):
    assert run_service(config, "runs") == 0 and "no training runs" in capsys.readouterr().out
    store = ServiceStore(load_service_settings(config).store_url)
    key, _ = store.create_key("anna")
    run = "s:train:0"
    for kind, seq, body in (
        ("create_model", 0, {}),
        ("optim_step", 1, {}),
        ("optim_step", 2, {"x": 1}),
    ):
        taken = store.accept_request(
            NewRequest(
                kind=kind,
                owner=key.key_id,
                session_id="s",
                target=run,
                seq=seq,
                payload=json.dumps(body).encode(),
                content_type="json",
                facts={"base": "tiny"},
            )
        )
    assert run_service(config, "runs") == 0
    row = capsys.readouterr().out.splitlines()[1].split()
    assert row[:4] == [run, "anna", "tiny", "creating"]
    assert run_service(config, "queue") == 0
    assert ["optim_step", "2", "0"] in [
        line.split()[:3] for line in capsys.readouterr().out.splitlines()
    ]
    assert (
        run_service(config, "cancel", taken.request_id) == 0
        and "1 cancelled" in capsys.readouterr().out
    )
    assert run_service(config, "cancel", run) == 0 and "2 cancelled" in capsys.readouterr().out
    assert (
        run_service(config, "cancel", "nothing") == 2
        and "neither a request nor" in capsys.readouterr().err
    )
    assert run_service(config, "logs", "worker") == 0 and "(empty)" in capsys.readouterr().out
    store.close()


def test_a_saved_path_becomes_champion(config, capsys, monkeypatch):
    store = ServiceStore(load_service_settings(config).store_url)
    path = "tinker://r/weights/a"
    values = {
        "model_id": "r",
        "owner": "k",
        "kind": "weights",
        "name": "a",
        "folder": "w",
        "created": 1.0,
    }
    run = TrainingRunRecord(model_id="r", owner="k", session_id="s", created=1.0, touched=1.0)
    store.add_checkpoint_copy(run, CheckpointRecord(path=path, **values))
    moved = []

    class Registry:
        def __init__(self, uri, folder, experiment):
            assert (uri, experiment) == (None, "service")

        def find_champion(self, name):
            return SimpleNamespace(version=moved[-1][1]) if moved else None

        def set_champion(self, name, version):
            moved.append((name, version))

    monkeypatch.setattr("tasks.tracking.Tracking", Registry)
    for registration, hint in (
        ("none", "worker.registered=all"),
        ("waiting", "try again"),
        ("failed", "logs worker"),
    ):
        store.update_checkpoint(path, registration=registration)
        assert run_service(config, "promote", path) == 2
        assert hint in capsys.readouterr().err
    assert run_service(config, "promote", "tinker://r/weights/none") == 2
    assert "no saved weights" in capsys.readouterr().err
    store.update_checkpoint(path, registration="done", version="service-base/7")
    assert run_service(config, "promote", path) == run_service(config, "promote", path) == 0
    shown = capsys.readouterr().out
    assert (
        "service-base/7 is champion of service-base\n" in shown and "(before: version 7)" in shown
    )
    assert moved == [("service-base", 7)] * 2
    assert store.list_audit_entries().items[0].action == "checkpoint_promote"
    store.close()
