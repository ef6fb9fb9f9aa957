"""`posttrain online`: a replay has the live worker's numbers; wrong settings and folders are reported in one line."""

import json
import os
import signal
import threading
import time

import pytest
from helpers.online_worker import write_traffic

import rl_core
from posttrain.cli.main import main
from posttrain.online.worker_processes import REPLAY_FILE, learn_from_buffer
from posttrain.settings_files import load_online_settings
from rl_core.errors import SettingsError
from rl_core.online.experience_log import list_segments
from rl_core.online.service_files import AUDIT_FILE, CONTRIBUTION_FILE, METRICS_FILE
from rl_core.settings import ModelSettings

YAML = """
folder: {folder}
model: {{path: model, device: cpu}}
rewards: {{task: 1.0, coherence: 0.1}}
buffer: {{capacity: 16}}
labels: {{min_confidence: 0.6}}
drift: {{watched: []}}
update:
  learning_rate: 1.0e-3
  max_learning_rate: 1.0e-2
  first_update: 4
  update_every: 2
  batch_size: 2
  snapshot_every: 2
  checkpoint_every: 2
  kl_max: 5.0
"""


@pytest.fixture(scope="module")
def recorded_folder(tmp_path_factory):
    """Create a folder with a model, a config and recorded traffic."""
    folder = tmp_path_factory.mktemp("my online ü")
    rl_core.create_policy(
        ["abc xyz"], ModelSettings(preset="nano", vocab_size=300, context=32)
    ).save(folder / "model")
    (folder / "mine.yaml").write_text(YAML.format(folder=folder / "live"))
    write_traffic(folder / "live" / "buffer", range(8))
    return folder


def run_replay(recorded_folder, output, *arguments):
    return main(
        [
            "online",
            "replay",
            str(recorded_folder / "mine.yaml"),
            "--buffer",
            str(recorded_folder / "live"),
            "--output",
            str(output),
            *arguments,
        ]
    )


def test_a_replay_has_the_numbers_of_the_live_worker(recorded_folder, tmp_path, capsys):
    path = recorded_folder / "live" / METRICS_FILE

    def stop_after_four_updates():
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            if path.is_file() and json.loads(path.read_text())["online/updates"] == 4:
                break
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=stop_after_four_updates)
    thread.start()
    messages = []
    assert (
        learn_from_buffer(load_online_settings(recorded_folder / "mine.yaml"), messages.append)
        == signal.SIGTERM
    )
    thread.join()
    assert (
        "learning from" in messages[0]
        and "stopped after update 4; everything is saved" in messages[1]
    )
    assert run_replay(recorded_folder, tmp_path / "replayed") == 0
    replayed = json.loads((tmp_path / "replayed" / REPLAY_FILE).read_text())
    assert f"weights {replayed['weights']}" in capsys.readouterr().out
    live = json.loads((recorded_folder / "live" / METRICS_FILE).read_text())
    assert {name: replayed[name] for name in live if name != "paused"} == {
        n: v for n, v in live.items() if n != "paused"
    }
    for name in ("snapshot-00000002", "snapshot-00000004"):
        manifests = [
            json.loads((folder / "snapshots" / name / "manifest.json").read_text())
            for folder in (recorded_folder / "live", tmp_path / "replayed")
        ]
        assert manifests[0]["files"] == manifests[1]["files"]
    records = [
        [
            {**json.loads(line), "time": 0}
            for line in (folder / CONTRIBUTION_FILE).read_text().splitlines()
        ]
        for folder in (recorded_folder / "live", tmp_path / "replayed")
    ]
    assert records[0] == records[1] and len(records[0]) == 4
    assert len((tmp_path / "replayed" / AUDIT_FILE).read_text().splitlines()) == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "update.kl_max=0.01"], "kl_max"),
        (["--set", "update.kl_mx=1"], "did you mean 'kl_max'"),
        (["--set", "drift.watched=[weather]"], "'weather' is not a signal"),
        (["--set", "model.path=./nowhere"], "model.path: ./nowhere is no folder"),
        (["--set", "model.path=null"], "model.path: set it to the folder"),
        (["--set", "environment={name: chess}"], "chess"),
        (["--buffer", "/tmp"], "contains no segments of a buffer"),
    ],
)
def test_errors_are_one_line(recorded_folder, tmp_path, capsys, arguments, message):
    assert run_replay(recorded_folder, tmp_path / "out", *arguments) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error
    assert not (tmp_path / "out" / "snapshots").exists()


def test_replay_does_not_write_the_live_folder(recorded_folder, capsys):
    before = list_segments(recorded_folder / "live" / "buffer")
    assert run_replay(recorded_folder, recorded_folder / "live") == 2
    assert "is the folder of the live worker" in capsys.readouterr().err
    assert list_segments(recorded_folder / "live" / "buffer") == before


def test_the_shipped_config_loads():
    settings = load_online_settings("online", ["update.batch_size=4"])
    assert settings.update.batch_size == 4 and settings.environment.name == "pixel_grid"
    with pytest.raises(SettingsError, match="is no folder"):
        load_online_settings("online", ["reward_model=../nothing/there"])
