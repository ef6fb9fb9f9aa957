"""The learning service beside a server: its folder, orders, alarms, the snapshot that is live, and the report."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from helpers.serving import TOKEN, make_folder_of_model, running_server
from helpers.waiting import free_ports, wait_for

from flows.cli.parser import build_parser
from flows.cli.serve_command import serving_of
from flows.consolidate import live_snapshot, settings_of
from flows.monitor.online_views import newest_service, online
from flows.online.learning_folder import LearningFolder, pipeline_settings, read_events
from flows.online.online_settings import load_online_settings
from flows.online.service_report import read_record, write_report
from flows.serving.feedback_journal import FeedbackJournal
from flows.serving.learning import LearningFeedback, LearningService
from flows.serving.snapshot_source import SnapshotSource, SnapshotWatch
from rl_core.errors import CheckpointError, DataError, SettingsError
from rl_core.inference.served_answers import FeedbackLabel
from rl_core.models.trainable_weights import trainable_weights
from rl_core.online.experience_log import LogReader
from rl_core.online.service_files import CONTRIBUTION, GATE, METRICS
from rl_core.settings import EnvironmentSettings, LoraSettings, ModelSettings, OnlineSettings, ServingSettings
from tasks.config import load
from tasks.tracking import ModelVersion

ROOT = Path(__file__).parents[3]
GRID = EnvironmentSettings(name="pixel_grid")
CHAT = OnlineSettings(environment=EnvironmentSettings(name="chat"))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_folder_of_model(tmp_path_factory.mktemp("learning") / "model")


@pytest.fixture
def folder(tmp_path, model):
    facts = {"name": "demo", "reference": "models:/demo@champion", "version": 3, "registered": "demo"}
    return LearningFolder.open(tmp_path / "demo" / "online" / "version 3 ü", model, facts)


def made(folder, online=CHAT, **model):
    chosen = ModelSettings(**{"device": "cpu", **model})
    settings = pipeline_settings(online, GRID, chosen, folder.path)
    return settings, SnapshotSource(settings, ServingSettings(context=200, threads=1), 3)


def publish(source, version, scale):
    """A snapshot whose weights are those of the model times `scale`."""
    from rl_core.api.policy import load_policy

    policy = load_policy(source.settings.model)
    weights = {name: tensor * scale for name, tensor in trainable_weights(policy.model, copy=True).items()}
    source.snapshots.publish(version, weights, {"updates": version, "last_record": 7 * version, "last_digest": "ab"})


def test_a_folder_is_that_of_one_model_and_its_settings_are_read_by_the_worker(folder, tmp_path, model):
    settings, _ = made(folder)
    path = folder.write_settings(settings)
    assert load_online_settings(path) == settings and settings.model.path == str(folder.path / "model")
    again = LearningFolder.open(folder.path, model, {})
    assert again.facts == folder.facts and again.facts["version"] == 3
    with pytest.raises(DataError, match="another model"):
        LearningFolder.open(folder.path, make_folder_of_model(tmp_path / "other", 1), {})
    with pytest.raises(SettingsError, match=r"online\.model\.path"):
        pipeline_settings(OnlineSettings(model=ModelSettings(path="x")), GRID, ModelSettings(), tmp_path)
    with pytest.raises(SettingsError, match=r"online\.folder"):
        pipeline_settings(OnlineSettings(folder="elsewhere"), GRID, ModelSettings(), tmp_path)


def test_orders_are_handed_over_once_and_alarms_are_told(folder):
    settings, source = made(folder)
    orders = [{"number": n, "order": {"order": "hold", "version": n}} for n in (1, 2)]
    decision = {"number": 1, "version": 9, "verdict": "promoted", "reason": "no worse"}
    for attempt in range(2):  # started anew it hands nothing over again
        with LearningService(folder, settings, source, lambda: None) as service:
            service._hand_orders()
            (folder.path / GATE).write_text(json.dumps({"orders": orders, "decisions": [decision]}))
            service._hand_orders(), service._hand_orders()
            (folder.path / METRICS).write_text(json.dumps({"paused": "drift: length rises"}))
            service._look_at_alarms(), service._look_at_alarms()
            assert folder.orders_taken == 2, attempt
    written = [record.value for record in LogReader(folder.path / "buffer").read()]
    assert written == [entry["order"] for entry in orders]
    told = [(event["kind"], event["text"]) for event in read_events(folder.path)]
    alarm = ("alarm", "drift: length rises")  # told again after the restart: it still stands
    assert told == [("promoted", "snapshot 9: no worse"), alarm, alarm]


@pytest.mark.parametrize("kind", [{}, {"dtype": "bfloat16"}])
def test_the_live_snapshot_is_taken_over_and_a_damaged_one_is_not(folder, tmp_path, kind):
    _, source = made(folder, **kind)
    for version, scale in ((0, 1.0), (10, 0.7), (20, 0.5)):
        publish(source, version, scale)
    source.snapshots.point_to(0)
    told = []
    with running_server(tmp_path / "out", folder.path / "model", begins=False) as running:
        running.server.begin(source.load(0))
        watch = SnapshotWatch(source, running.server.publish, 0, lambda *event: told.append(event))
        before = running.chat(max_tokens=12, temperature=0)
        assert (before["policy_version"], before["model_version"]) == (0, "3+0") and not watch.look()
        source.snapshots.point_to(10)
        assert watch.look() and not watch.look()
        after = running.chat(max_tokens=12, temperature=0)
        assert (after["policy_version"], after["model_version"]) == (10, "3+10")
        assert after["system_fingerprint"] == "version-3+10"
        source.snapshots.point_to(20)
        (source.snapshots.path(20) / "weights.safetensors").write_bytes(b"torn")
        assert not watch.look() and not watch.look()
        assert running.chat(max_tokens=2)["model_version"] == "3+10"
    assert [kind for kind, _ in told] == ["live", "refused"]


def test_a_service_that_learns_adapters_serves_them(folder, tmp_path):
    _, source = made(folder, dataclasses.replace(CHAT, model=ModelSettings(lora=LoraSettings(rank=2))))
    publish(source, 5, 2.0)
    with running_server(tmp_path / "out", folder.path / "model", begins=False) as running:
        running.server.begin(source.load(5))
        assert running.chat(max_tokens=4, temperature=0)["model_version"] == "3+5"


def test_votes_and_labels_reach_the_log(folder, tmp_path):
    settings, source = made(folder)
    with LearningService(folder, settings, source, lambda: None) as service:
        with running_server(tmp_path / "out", folder.path / "model", answers=service.answers) as running:
            journal = FeedbackJournal(tmp_path / "feedback.jsonl")
            running.server.feedback = LearningFeedback(service.answers, journal)
            found = running.chat(vote=True, max_tokens=3, seed=1, user="anna")
            vote = found["vote"]
            assert 3 <= vote["num_ballots"] <= 5 and len(found["choices"]) == 1
            label = {"id": found["id"], "answer": "red"}
            assert running.client.post("/v1/feedback", json=label).status_code == 200  # at once after the answer
            greedy = running.chat(max_tokens=3, temperature=0)
            assert running.client.post("/v1/feedback", json={"id": greedy["id"], "thumb": "up"}).status_code == 200
            for refused in ({"stream": True}, {"n": 2}, {"temperature": 0}, {"logprobs": True}):
                running.chat(status=422, vote=True, **refused)
        records = list(LogReader(folder.path / "buffer").read())
    assert [record.kind for record in records] == ["experience", "label"]
    experience = records[0].experience()
    assert (experience.is_voted, experience.caller) == (True, "anna")
    assert len(experience.rollouts) == vote["num_ballots"] and experience.recorded[0].ids_TK.shape[1] == 16
    assert experience.vote.answer == vote["answer"]
    assert len((tmp_path / "feedback.jsonl").read_text().splitlines()) == 2
    assert service.answers.counts == {"kept": 1, "labels": 1, "greedy": 1}


def test_votes_with_an_environment_play_the_same_episode(tmp_path, model):
    with running_server(tmp_path, model) as running:
        asked = {"messages": [], "environment": {"name": "pixel_grid", "seed": 3}, "max_tokens": 20, "seed": 1}
        found = running.chat(vote=True, **asked)
        assert found["vote"]["num_ballots"] >= 3 and found["choices"][0]["session"]["seed"] == 3
        single = running.chat(**asked)
        assert found["usage"]["completion_tokens"] >= single["usage"]["completion_tokens"]


def write_updates(path):
    rows = [
        {
            "number": number, "time": 1.0, "refused": "kl" if number == 2 else "", "learning_rate": 1e-5,
            "losses": {"rl": 0.1, "kl": 0.1, "total": 0.2}, "gradients": {"norm": 0.5, "clipped": 0.5},
            "kl_control": {"coefficient": 0.01, "target_kl": 0.05, "mean_kl": 0.01 * number}, "is_lower_bound": False,
            "experiences": [
                {
                    "request_id": "<b>r</b>", "policy_version": 0, "importance_weight": 0.5, "advantages": [1.0, -1.0],
                    "label": {"source": "feedback", "kind": "answer", "confidence": 1.0}, "number": 1, "error": 0.5,
                    "rewards": {
                        "components": ["task", "tool_use"],
                        "rollouts": [{"raw": [1, 0], "weighted": [1.0, 0.0], "total": 1.0},
                                     {"raw": [0, 1], "weighted": [0.0, 0.5], "total": 0.5}, None],
                    },
                }
            ],
        }
        for number in (1, 2, 3)
    ]  # fmt: skip
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (path / f"{CONTRIBUTION}.1").write_text(text.splitlines()[0] + "\n")
    (path / CONTRIBUTION).write_text("\n".join(text.splitlines()[1:]) + '\n{"numb')


def test_the_report_and_the_live_page_say_what_was_learned(folder, tmp_path):
    write_updates(folder.path)
    folder.note("alarm", "drift: <script>")
    record = read_record(folder.path)
    assert record.series("kl_control", "mean_kl") == [(1.0, 0.01), (2.0, 0.02), (3.0, 0.03)]
    text = write_report(folder.path).read_text()
    # squared differences within the request: task 2 (0.5)^2, tool_use 2 (0.25)^2, of 0.625
    assert ">80.0%<" in text and ">20.0%<" in text and "&lt;b&gt;r&lt;/b&gt;" in text and "<script" not in text
    assert "kl: 1" in text and text.count("<svg") == 4
    assert newest_service(tmp_path) == folder.path
    blocks = {block["id"]: block for block in online(tmp_path)}
    assert blocks["online-events"]["rows"] and len(blocks["online-charts"]["charts"]) == 4
    assert online(tmp_path / "nothing")[0]["kind"] == "note"
    with pytest.raises(DataError, match="holds no record"):
        read_record(tmp_path)


def test_the_live_snapshot_is_what_is_consolidated(folder, tmp_path):
    _, source = made(folder)
    root = folder.path.parent
    assert "no service" in live_snapshot(root / "nothing", [])
    publish(source, 0, 1.0), publish(source, 10, 0.5)
    source.snapshots.point_to(0)
    assert "nothing that it learned is live" in live_snapshot(root, [])
    source.snapshots.point_to(10)
    found = live_snapshot(root, [])
    assert (found.version, found.tags["online.records"], found.tags["online.parent_version"]) == (10, "0-70", "3")
    registered = ModelVersion("demo", 4, None, None, tags={"online.weights_sha256": found.weights_sha256})
    assert "registered already" in live_snapshot(root, [registered])
    settings = settings_of(load("demo", import_code=False), found)
    assert settings.model.path == "models:/demo/3" and settings.stages.active[-2:] == ("promote", "online_snapshot")
    (source.snapshots.path(10) / "manifest.json").write_text("{")
    with pytest.raises(CheckpointError):
        live_snapshot(root, [])


def test_learning_needs_a_pipeline(tmp_path, model, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = build_parser().parse_args(["serve", "demo", "--learn", "--output", str(tmp_path)])
    found = serving_of(given)
    assert found.learning.root == tmp_path / "demo" / "online" and found.learning.environment.name == "pixel_grid"
    with pytest.raises(SettingsError, match="CONFIG"):
        serving_of(build_parser().parse_args(["serve", str(model), "--learn"]))
    assert FeedbackLabel(thumb="up").thumb == "up" and TOKEN


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_worker_and_server_killed_under_load_lose_nothing(tmp_path, model, request):
    """The real processes: kill -9 of the worker, then of the server; every acknowledged record is learned once."""
    (port,) = free_ports(1)
    config = tmp_path / "learn ü.yaml"
    config.write_text(
        f"name: tiny\noutput: {tmp_path / 'out'}\nenvironment: {{name: pixel_grid}}\n"
        f"model: {{path: {model}, device: cpu}}\n"
        f"serving: {{model: {model}, slots: 8, threads: 1, context: 200}}\nonline:\n  environment: {{name: chat}}\n"
        "  service: {nice: 0, run_gate: false}\n  labels: {min_confidence: 0.1, min_votes: 1}\n"
        "  update: {first_update: 4, update_every: 2, batch_size: 2, checkpoint_every: 3, snapshot_every: 2}\n"
        "stages: {evaluate: {}}\n"
    )
    command = [sys.executable, "-m", "flows.cli.main", "serve", str(config), "--learn", "--port", str(port)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    folder, ids = None, []
    for round_number in range(3):
        with (tmp_path / f"server-{round_number}.log").open("wb") as out:
            child = subprocess.Popen(command, env=environment, stdout=out, stderr=out)
        request.addfinalizer(child.kill)

        def ready():
            try:
                return httpx.get(f"http://127.0.0.1:{port}/readyz").status_code == 200
            except httpx.TransportError:
                return False

        wait_for(ready, "the server", 200)
        token = (tmp_path / "out" / "serving" / "token").read_text().strip()
        client = httpx.Client(
            base_url=f"http://127.0.0.1:{port}", headers={"Authorization": f"Bearer {token}"}, timeout=60
        )
        (folder,) = (tmp_path / "out" / "tiny" / "online").glob("model-*")
        for number in range(12):
            body = {"model": "tiny", "messages": [{"role": "user", "content": f"row {number}"}], "n": 2,
                    "max_tokens": 4}  # fmt: skip
            found = client.post("/v1/chat/completions", json=body)
            assert found.status_code == 200, found.text
            answer = found.json()["id"]
            label = client.post("/v1/feedback", json={"id": answer, "answer": "red"})
            assert label.status_code == 200, label.text  # the record of the answer is on the disk now
            ids.append(answer)
            if number == 6 and round_number < 2:
                wait_for((folder / METRICS).exists, "the worker", 200)
                for worker in Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split():
                    os.kill(int(worker), signal.SIGKILL)
        if round_number < 2:
            child.kill()
            child.wait()
    wanted = len(ids) + len(ids)

    def learned():
        return json.loads((folder / METRICS).read_text())["online/records"] == wanted

    wait_for(learned, "the backlog", 300)
    child.terminate()
    assert child.wait(60) == 0
    kinds = [(record.kind, record.value["request_id"]) for record in LogReader(folder / "buffer").read()]
    assert sorted(request for kind, request in kinds if kind == "experience") == sorted(ids)  # each once
    output = tmp_path / "replayed"
    subprocess.run(
        [sys.executable, "-m", "flows.cli.main", "online", "replay", str(folder / "online.yaml"), "--buffer",
         str(folder / "buffer"), "--output", str(output)], env=environment, check=True, timeout=300,
    )  # fmt: skip
    live = json.loads((folder / METRICS).read_text())
    replayed = json.loads((output / "replay.json").read_text())
    assert live["online/updates"] == replayed["online/updates"] == (wanted - 4) // 2 + 1
    shared = {name for name in live if name.startswith("online/") and "time" not in name}
    assert {name: live[name] for name in shared} == {name: replayed[name] for name in shared}
    assert not list(Path("/dev/shm").glob("posttrain*"))
