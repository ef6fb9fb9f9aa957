"""Learning service of a server: its folder, orders, alarms, the live snapshot, and the report."""

import dataclasses
import json
import shlex

import pytest
from helpers.killed_service import KilledService
from helpers.serving import TOKEN, make_folder_of_model, running_server

from flows.consolidate import build_consolidation_settings, find_live_snapshot
from posttrain.cli.main import build_parser, main
from posttrain.cli.serve import resolve_serving
from posttrain.monitor.service_views import build_online_tab, find_newest_online_service
from posttrain.online.service_report import read_service_record, write_service_report
from posttrain.serving.chat_server import FeedbackJournal
from posttrain.serving.online_learning import LearningFeedback, OnlineLearningService
from posttrain.serving.served_model import SnapshotSource, SnapshotWatcher
from posttrain.settings_files import load_online_settings
from rl_core.data.records import read_demonstrations
from rl_core.errors import CheckpointError, DataError, SettingsError
from rl_core.inference.serving_requests import FeedbackLabel
from rl_core.models.trainable_weights import collect_trainable_weights
from rl_core.online.experience_log import ExperienceLogReader
from rl_core.online.learning_folder import LearningFolder, build_pipeline_settings, read_events
from rl_core.online.service_files import CONTRIBUTION_FILE, GATE_FILE, METRICS_FILE
from rl_core.settings import (
    EnvironmentSettings,
    LoraSettings,
    ModelSettings,
    OnlineBufferSettings,
    OnlineSettings,
    ServingSettings,
)
from tasks.config import load_settings
from tasks.tracking import ModelVersion

GRID = EnvironmentSettings(name="pixel_grid")
CHAT = OnlineSettings(environment=EnvironmentSettings(name="chat"))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_folder_of_model(tmp_path_factory.mktemp("learning") / "model")


@pytest.fixture
def folder(tmp_path, model):
    facts = {
        "name": "demo",
        "reference": "models:/demo@champion",
        "version": 3,
        "registered": "demo",
    }
    return LearningFolder.open_or_create(tmp_path / "demo" / "online" / "version 3 ü", model, facts)


def build_source(folder, online=CHAT, **model):
    model_settings = ModelSettings(**{"device": "cpu", **model})
    settings = build_pipeline_settings(online, GRID, model_settings, folder.path)
    return settings, SnapshotSource(settings, ServingSettings(context=200, threads=1), 3)


def publish_snapshot(source, version, scale):
    """Publish a snapshot whose weights are those of the model times `scale`."""
    from rl_core.api.policy import load_policy

    policy = load_policy(source.settings.model)
    weights = {
        name: tensor * scale
        for name, tensor in collect_trainable_weights(policy.model, copy=True).items()
    }
    source.snapshots.publish_snapshot(
        version, weights, {"updates": version, "last_record": 7 * version, "last_digest": "ab"}
    )


def test_folder_belongs_to_one_model_and_worker_reads_its_settings(folder, tmp_path, model):
    settings, _ = build_source(folder)
    path = folder.write_settings(settings)
    assert load_online_settings(path) == settings and settings.model.path == str(
        folder.path / "model"
    )
    reopened = LearningFolder.open_or_create(folder.path, model, {})
    assert reopened.facts == folder.facts and reopened.facts["version"] == 3
    with pytest.raises(DataError, match="another model"):
        LearningFolder.open_or_create(folder.path, make_folder_of_model(tmp_path / "other", 1), {})
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(DataError, match=r"empty: is a folder without a config\.json"):
        LearningFolder.open_or_create(tmp_path / "new", empty, {})
    assert not (tmp_path / "new").exists()  # nothing is left of it
    with pytest.raises(SettingsError, match=r"online\.model\.path"):
        build_pipeline_settings(
            OnlineSettings(model=ModelSettings(path="x")), GRID, ModelSettings(), tmp_path
        )
    with pytest.raises(SettingsError, match=r"online\.folder"):
        build_pipeline_settings(OnlineSettings(folder="elsewhere"), GRID, ModelSettings(), tmp_path)


def test_orders_are_forwarded_once_and_alarms_recorded(folder):
    settings, source = build_source(folder)
    orders = [{"number": n, "order": {"order": "hold", "version": n}} for n in (1, 2)]
    decision = {"number": 1, "version": 9, "verdict": "promoted", "reason": "no worse"}
    for attempt in range(2):  # after a restart nothing is forwarded again
        with OnlineLearningService(folder, settings, source, lambda: None) as service:
            service._forward_orders()
            (folder.path / GATE_FILE).write_text(
                json.dumps({"orders": orders, "decisions": [decision]})
            )
            service._forward_orders(), service._forward_orders()
            (folder.path / METRICS_FILE).write_text(json.dumps({"paused": "drift: length rises"}))
            service._check_alarms(), service._check_alarms()
            service._check_log_capacity()
            assert folder.forwarded_orders == {"gate.json": 2, "operator.json": 0}, attempt
    forwarded = [
        record.value for record in ExperienceLogReader(folder.path / "buffer").read_records()
    ]
    assert forwarded == [entry["order"] for entry in orders]
    events = [(event["kind"], event["text"]) for event in read_events(folder.path)]
    name = shlex.quote(str(folder.path))  # it has a space
    text = f"drift: length rises; `posttrain online resume {name}` resumes learning"
    alarm = ("alarm", text)  # recorded again after the restart: still active
    assert events == [("promoted", "snapshot 9: no worse"), alarm, alarm]


def test_operator_resumes_learning_after_an_alarm(folder, capsys, tmp_path):
    settings, source = build_source(folder)
    resume = ["online", "resume", str(folder.path)]
    assert main(resume) == 0 and "not paused" in capsys.readouterr().out
    with OnlineLearningService(folder, settings, source, lambda: None) as service:
        for number in (1, 2):
            (folder.path / METRICS_FILE).write_text(json.dumps({"paused": "drift: length rises"}))
            assert main(resume) == 0 and "drift: length rises" in capsys.readouterr().out
            service._forward_orders(), service._forward_orders()
            assert folder.forwarded_orders == {"gate.json": 0, "operator.json": number}
    assert [
        record.value for record in ExperienceLogReader(folder.path / "buffer").read_records()
    ] == [{"order": "resume"}] * 2
    assert (
        main(["online", "resume", str(tmp_path)]) == 2
        and "holds no service" in capsys.readouterr().err
    )


def test_orders_of_a_recreated_file_are_forwarded(folder):
    settings, source = build_source(folder)
    with OnlineLearningService(folder, settings, source, lambda: None) as service:
        for numbers in (
            (1, 2, 3),
            (1,),
            (1, 2),
        ):  # the gate's file is removed after the third order
            orders = [{"number": n, "order": {"order": "hold", "version": 10 * n}} for n in numbers]
            (folder.path / GATE_FILE).write_text(json.dumps({"orders": orders}))
            service._forward_orders()
            assert folder.forwarded_orders["gate.json"] == numbers[-1]
    forwarded = [
        record.value["version"]
        for record in ExperienceLogReader(folder.path / "buffer").read_records()
    ]
    assert forwarded == [10, 20, 30, 10, 20]


def test_full_log_is_reported_once(folder):
    small = dataclasses.replace(CHAT, buffer=OnlineBufferSettings(max_bytes=4096))
    settings, source = build_source(folder, small)
    with OnlineLearningService(folder, settings, source, lambda: None) as service:
        service._check_log_capacity()
        assert read_events(folder.path) == []
        service.answers.counts["full"] += 1
        service._check_log_capacity(), service._check_log_capacity()
    (event,) = read_events(folder.path)
    assert (
        event["kind"] == "full"
        and "4,096 bytes" in event["text"]
        and "keep_segments=false" in event["text"]
    )


@pytest.mark.parametrize("kind", [{}, {"dtype": "bfloat16"}])
def test_live_snapshot_is_published_and_a_damaged_one_rejected(folder, tmp_path, kind):
    _, source = build_source(folder, **kind)
    for version, scale in ((0, 1.0), (10, 0.7), (20, 0.5)):
        publish_snapshot(source, version, scale)
    source.snapshots.set_live_version(0)
    events = []
    with running_server(tmp_path / "out", folder.path / "model", begins=False) as server:
        server.server.start_serving(source.load_snapshot(0))
        watcher = SnapshotWatcher(
            source, server.server.publish_model, 0, lambda *event: events.append(event)
        )
        first_answer = server.chat(max_tokens=12, temperature=0)
        assert (first_answer["policy_version"], first_answer["model_version"]) == (
            0,
            "3+0",
        ) and not watcher.check_live_snapshot()
        source.snapshots.set_live_version(10)
        assert watcher.check_live_snapshot() and not watcher.check_live_snapshot()
        second_answer = server.chat(max_tokens=12, temperature=0)
        assert (second_answer["policy_version"], second_answer["model_version"]) == (10, "3+10")
        assert second_answer["system_fingerprint"] == "version-3+10"
        source.snapshots.set_live_version(20)
        (source.snapshots.build_path(20) / "weights.safetensors").write_bytes(b"torn")
        assert not watcher.check_live_snapshot() and not watcher.check_live_snapshot()
        assert server.chat(max_tokens=2)["model_version"] == "3+10"
    assert [kind for kind, _ in events] == ["live", "refused"]


def test_a_service_that_learns_adapters_serves_them(folder, tmp_path):
    _, source = build_source(
        folder, dataclasses.replace(CHAT, model=ModelSettings(lora=LoraSettings(rank=2)))
    )
    publish_snapshot(source, 5, 2.0)
    with running_server(tmp_path / "out", folder.path / "model", begins=False) as server:
        server.server.start_serving(source.load_snapshot(5))
        assert server.chat(max_tokens=4, temperature=0)["model_version"] == "3+5"


def test_votes_and_labels_reach_the_log(folder, tmp_path):
    settings, source = build_source(folder)
    with OnlineLearningService(folder, settings, source, lambda: None) as service:
        with running_server(
            tmp_path / "out", folder.path / "model", answers=service.answers
        ) as server:
            journal = FeedbackJournal(tmp_path / "feedback.jsonl")
            server.server.feedback = LearningFeedback(service.answers, journal)
            answer = server.chat(vote=True, max_tokens=3, seed=1, user="anna")
            vote = answer["vote"]
            assert 3 <= vote["num_ballots"] <= 5 and len(answer["choices"]) == 1
            label = {"id": answer["id"], "answer": "red"}
            assert (
                server.client.post("/v1/feedback", json=label).status_code == 200
            )  # immediately after the answer
            greedy = server.chat(max_tokens=3, temperature=0)
            assert (
                server.client.post(
                    "/v1/feedback", json={"id": greedy["id"], "thumb": "up"}
                ).status_code
                == 200
            )
            for refused in ({"stream": True}, {"n": 2}, {"temperature": 0}, {"logprobs": True}):
                server.chat(status=422, vote=True, **refused)
        records = list(ExperienceLogReader(folder.path / "buffer").read_records())
    assert [record.kind for record in records] == ["experience", "label"]
    experience = records[0].parse_experience()
    assert (experience.is_voted, experience.caller) == (True, "anna")
    assert (
        len(experience.rollouts) == vote["num_ballots"]
        and experience.recorded[0].ids_TK.shape[1] == 16
    )
    assert experience.vote.answer == vote["answer"]
    assert len((tmp_path / "feedback.jsonl").read_text().splitlines()) == 2
    assert service.answers.counts == {"kept": 1, "labels": 1, "greedy": 1}


def test_served_conversation_is_exported_as_the_model_read_it(folder, tmp_path, capsys):
    settings, source = build_source(folder)
    parts = [{"type": "text", "text": "ü"}]
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "red"},
        {"role": "user", "content": "row 2?"},
    ]
    with (
        OnlineLearningService(folder, settings, source, lambda: None) as service,
        running_server(tmp_path / "out", folder.path / "model", answers=service.answers) as server,
    ):
        server.server.feedback = LearningFeedback(
            service.answers, FeedbackJournal(tmp_path / "feedback.jsonl")
        )
        for seed in range(4):
            answer = server.chat(messages=messages, max_tokens=40, stop=list("aeiorn"), seed=seed)
            label = {"id": answer["id"], "thumb": "up"}
            assert server.client.post("/v1/feedback", json=label).status_code == 200
        renderer = server.server.model.renderer
    path = folder.write_settings(settings)
    assert main(["online", "export", str(path), "--output", str(tmp_path / "right.jsonl")]) == 0
    rows = read_demonstrations(tmp_path / "right.jsonl").rows
    assert rows and f"{len(rows)} conversations" in capsys.readouterr().out
    experiences = {
        r.value["request_id"]: r.parse_experience()
        for r in ExperienceLogReader(folder.path / "buffer").read_records()
        if r.kind == "experience"
    }
    for row, exported in zip(
        rows, map(json.loads, (tmp_path / "right.jsonl").read_text().splitlines()), strict=True
    ):
        rollout = experiences[exported["request_id"]].rollouts[0]
        assert renderer.encode_history_prompt(row["messages"][:-1]) == rollout.prompt_ids
        assert row["messages"][-1]["content"] == rollout.trajectory.answer


def test_votes_with_an_environment_play_the_same_episode(tmp_path, model):
    with running_server(tmp_path, model) as server:
        request = {
            "messages": [],
            "environment": {"name": "pixel_grid", "seed": 3},
            "max_tokens": 20,
            "seed": 1,
        }
        voted = server.chat(vote=True, **request)
        assert voted["vote"]["num_ballots"] >= 3 and voted["choices"][0]["session"]["seed"] == 3
        single = server.chat(**request)
        assert voted["usage"]["completion_tokens"] >= single["usage"]["completion_tokens"]


def write_updates(path):
    rows = [
        {
            "number": number,
            "time": 1.0,
            "refused": "kl" if number == 2 else "",
            "learning_rate": 1e-5,
            "losses": {"rl": 0.1, "kl": 0.1, "total": 0.2},
            "gradients": {"norm": 0.5, "clipped": 0.5},
            "kl_control": {"coefficient": 0.01, "target_kl": 0.05, "mean_kl": 0.01 * number},
            "is_lower_bound": False,
            "experiences": [
                {
                    "request_id": "<b>r</b>",
                    "policy_version": 0,
                    "importance_weight": 0.5,
                    "advantages": [1.0, -1.0],
                    "label": {"source": "feedback", "kind": "answer", "confidence": 1.0},
                    "number": 1,
                    "error": 0.5,
                    "rewards": {
                        "components": ["task", "tool_use"],
                        "rollouts": [
                            {"raw": [1, 0], "weighted": [1.0, 0.0], "total": 1.0},
                            {"raw": [0, 1], "weighted": [0.0, 0.5], "total": 0.5},
                            None,
                        ],
                    },
                }
            ],
        }
        for number in (1, 2, 3)
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (path / f"{CONTRIBUTION_FILE}.1").write_text(text.splitlines()[0] + "\n")
    (path / CONTRIBUTION_FILE).write_text("\n".join(text.splitlines()[1:]) + '\n{"numb')


def test_report_and_live_page(folder, tmp_path):
    write_updates(folder.path)
    folder.append_event("alarm", "drift: <script>")
    record = read_service_record(folder.path)
    assert record.extract_series("kl_control", "mean_kl") == [(1.0, 0.01), (2.0, 0.02), (3.0, 0.03)]
    text = write_service_report(folder.path).read_text()
    # Squared differences within the request: task 2 (0.5)^2, tool_use 2 (0.25)^2, of 0.625
    assert (
        ">80.0%<" in text
        and ">20.0%<" in text
        and "&lt;b&gt;r&lt;/b&gt;" in text
        and "<script" not in text
    )
    assert "kl: 1" in text and text.count("<svg") == 5
    assert find_newest_online_service(tmp_path) == folder.path
    blocks = {block["id"]: block for block in build_online_tab(tmp_path)}
    assert blocks["online-events"]["rows"] and len(blocks["online-charts"]["charts"]) == 4
    assert [line["y"] for line in blocks["online-charts"]["charts"][0]["lines"]] == [
        [0.01, 0.02, 0.03],
        [0.05] * 3,
    ]
    tiles = {item["label"]: item for item in blocks["online"]["items"]}
    assert (tiles["mean KL"]["value"], tiles["mean KL"]["sub"]) == (
        "0.030",
        "target 0.050",
    )  # of the last update that has it
    fixed = {"number": 4, "kl_control": {"coefficient": 0.01, "mean_kl": 0.04}, "experiences": []}
    with open(folder.path / CONTRIBUTION_FILE, "a") as file:
        file.write("\n" + json.dumps(fixed) + "\n")
    items = build_online_tab(tmp_path)[0]["items"]
    (tile,) = (item for item in items if item["label"] == "mean KL")
    assert (tile["value"], tile["sub"]) == ("0.040", "coefficient is fixed")
    assert read_service_record(folder.path).find_kl_target() is None
    assert build_online_tab(tmp_path / "nothing")[0]["kind"] == "note"
    with pytest.raises(DataError, match="contains no record"):
        read_service_record(tmp_path)


def test_live_snapshot_is_consolidated(folder, tmp_path):
    _, source = build_source(folder)
    root = folder.path.parent
    assert "no service" in find_live_snapshot(root / "nothing", [])
    publish_snapshot(source, 0, 1.0), publish_snapshot(source, 10, 0.5)
    source.snapshots.set_live_version(0)
    assert "no snapshot is live yet" in find_live_snapshot(root, [])
    source.snapshots.set_live_version(10)
    snapshot = find_live_snapshot(root, [])
    assert (
        snapshot.version,
        snapshot.tags["online.records"],
        snapshot.tags["online.parent_version"],
    ) == (
        10,
        "0-70",
        "3",
    )
    registered = ModelVersion(
        "demo", 4, None, None, tags={"online.weights_sha256": snapshot.weights_sha256}
    )
    assert "registered already" in find_live_snapshot(root, [registered])
    superseded = dataclasses.replace(
        registered, tags={**registered.tags, "approval.state": "superseded"}
    )
    assert find_live_snapshot(root, [superseded]) == snapshot  # it was never decided on
    settings = build_consolidation_settings(load_settings("demo", import_code=False), snapshot)
    assert settings.model.path == "models:/demo/3" and settings.stages.active[-2:] == (
        "promote",
        "online_snapshot",
    )
    (source.snapshots.build_path(10) / "manifest.json").write_text("{")
    with pytest.raises(CheckpointError):
        find_live_snapshot(root, [])


def test_learning_needs_a_pipeline(tmp_path, model, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = build_parser().parse_args(["serve", "demo", "--learn", "--output", str(tmp_path)])
    config = resolve_serving(arguments)
    assert (
        config.learning.root == tmp_path / "demo" / "online"
        and config.learning.environment.name == "pixel_grid"
    )
    with pytest.raises(SettingsError, match="CONFIG"):
        resolve_serving(build_parser().parse_args(["serve", str(model), "--learn"]))
    assert FeedbackLabel(thumb="up").thumb == "up" and TOKEN


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_killed_at_random_moments_under_load_it_loses_nothing(tmp_path):
    """Kill server, worker and standby at random moments; tests/benchmarks/online_faults.py does it 200 times."""
    service = KilledService(tmp_path, seed=1)
    service.run(8)
    verdict = service.verdict()
    assert (
        sum(verdict["kills"].values()) >= 8
        and verdict["acknowledged"] > 30
        and verdict["versions"] > 1
    ), verdict
    zeros = (
        "lost",
        "kept_twice",
        "mixed",
        "other_answers",
        "other_weights",
        "left_processes",
        "left_segments",
    )
    assert [verdict[name] for name in zeros] == [0] * len(zeros), verdict
