"""`posttrain online`: a replay has the live worker's numbers; wrong settings and folders are told in one line."""

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
  kl_limit: 5.0
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a model, a config and recorded traffic."""
    folder = tmp_path_factory.mktemp("my online ü")
    rl_core.create_policy(
        ["abc xyz"], ModelSettings(preset="nano", vocab_size=300, context=32)
    ).save(folder / "model")
    (folder / "mine.yaml").write_text(YAML.format(folder=folder / "live"))
    write_traffic(folder / "live" / "buffer", range(8))
    return folder


def replay(place, output, *more):
    return main(
        [
            "online",
            "replay",
            str(place / "mine.yaml"),
            "--buffer",
            str(place / "live"),
            "--output",
            str(output),
            *more,
        ]
    )


def test_a_replay_has_the_numbers_of_the_live_worker(place, tmp_path, capsys):
    path = place / "live" / METRICS_FILE

    def stop():
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            if path.is_file() and json.loads(path.read_text())["online/updates"] == 4:
                break
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=stop)
    thread.start()
    said = []
    assert (
        learn_from_buffer(load_online_settings(place / "mine.yaml"), said.append) == signal.SIGTERM
    )
    thread.join()
    assert "learning from" in said[0] and "stopped after update 4; everything is saved" in said[1]
    assert replay(place, tmp_path / "again") == 0
    found = json.loads((tmp_path / "again" / REPLAY_FILE).read_text())
    assert f"weights {found['weights']}" in capsys.readouterr().out
    shown = json.loads((place / "live" / METRICS_FILE).read_text())
    assert {name: found[name] for name in shown if name != "paused"} == {
        n: v for n, v in shown.items() if n != "paused"
    }
    for name in ("snapshot-00000002", "snapshot-00000004"):
        manifests = [
            json.loads((one / "snapshots" / name / "manifest.json").read_text())
            for one in (place / "live", tmp_path / "again")
        ]
        assert manifests[0]["files"] == manifests[1]["files"]
    records = [
        [
            {**json.loads(line), "time": 0}
            for line in (one / CONTRIBUTION_FILE).read_text().splitlines()
        ]
        for one in (place / "live", tmp_path / "again")
    ]
    assert records[0] == records[1] and len(records[0]) == 4
    assert len((tmp_path / "again" / AUDIT_FILE).read_text().splitlines()) == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "update.kl_limit=0.01"], "kl_limit"),
        (["--set", "update.kl_limt=1"], "did you mean 'kl_limit'"),
        (["--set", "drift.watched=[weather]"], "'weather' is no signal"),
        (["--set", "model.path=./nowhere"], "model.path: ./nowhere is no folder"),
        (["--set", "model.path=null"], "model.path: name the folder"),
        (["--set", "environment={name: chess}"], "chess"),
        (["--buffer", "/tmp"], "contains no segments of a buffer"),
    ],
)
def test_what_cannot_work_is_told_in_one_line(place, tmp_path, capsys, arguments, message):
    assert replay(place, tmp_path / "out", *arguments) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error
    assert not (tmp_path / "out" / "snapshots").exists()


def test_the_live_folder_is_not_written_by_a_replay(place, capsys):
    before = list_segments(place / "live" / "buffer")
    assert replay(place, place / "live") == 2
    assert "is the folder of the live worker" in capsys.readouterr().err
    assert list_segments(place / "live" / "buffer") == before


def test_the_shipped_config_loads():
    settings = load_online_settings("online", ["update.batch_size=4"])
    assert settings.update.batch_size == 4 and settings.environment.name == "pixel_grid"
    with pytest.raises(SettingsError, match="is no folder"):
        load_online_settings("online", ["reward_model=../nothing/there"])
