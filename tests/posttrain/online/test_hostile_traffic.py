"""Hostile clients and a failing disk at a server that learns: their input is not learned from, and it keeps serving."""

import contextlib
import resource
import signal
import socket

import pytest
from helpers.serving import make_folder_of_model, running_server

from posttrain.cli.main import main
from posttrain.serving.chat_server import ChatServer, FeedbackJournal
from posttrain.serving.online_learning import (
    LearningFeedback,
    OnlineLearner,
    OnlineLearningPlan,
    OnlineLearningService,
)
from posttrain.serving.served_model import ModelSource, SnapshotSource
from rl_core.api.policy import load_policy
from rl_core.errors import CheckpointError
from rl_core.models.trainable_weights import collect_trainable_weights
from rl_core.online.experience_log import ExperienceLogReader, list_segments
from rl_core.online.experience_writer import ExperienceWriter
from rl_core.settings import EnvironmentSettings, ModelSettings, OnlineSettings, ServingSettings

CHAT = OnlineSettings(environment=EnvironmentSettings(name="chat"))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_folder_of_model(tmp_path_factory.mktemp("hostile") / "model")


@contextlib.contextmanager
def run_learning_server(folder, model, **settings):
    """Run a server that writes answers and labels into a buffer."""
    with (
        ExperienceWriter(folder / "buffer", CHAT) as answers,
        running_server(folder / "out", model, answers=answers, **settings) as server,
    ):
        server.server.feedback = LearningFeedback(
            answers, FeedbackJournal(folder / "feedback.jsonl")
        )
        yield server


@contextlib.contextmanager
def limit_file_size(size):
    """Limit the files of this process to so many bytes, as a full disk would."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)


def test_invalid_bodies_and_labels_do_not_reach_the_buffer(tmp_path, model):
    with run_learning_server(tmp_path, model, max_body_bytes=2**20) as server:
        answer_id = server.chat(max_tokens=3, seed=1)["id"]
        unknown_id = f"chatcmpl-{'0' * 40}"
        huge = b'{"id": "' + answer_id.encode() + b'", "answer": "' + b"x" * 10 * 2**20 + b'"}'
        for body, status, part in (
            (huge, 413, "bytes"),
            (b'{"id": "\xff\xfe"}', 422, "UTF-8"),
            (b'{"id": ', 422, "JSON"),
            (b'{"id": "%s", "answer": "\\ud800"}' % answer_id.encode(), 422, "hex escape"),
            (b'{"id": "%s", "score": 1e999}' % answer_id.encode(), 422, "finite"),
            (b'{"id": "%s", "answer": "  "}' % answer_id.encode(), 422, "needs a text"),
            (b'{"id": "%s", "score": 7}' % answer_id.encode(), 422, "from -1 to 1"),
            (b'{"id": "%s", "thumb": "up"}' % unknown_id.encode(), 404, "gave no answer"),
            (b'{"id": "%s", "thumb": "up", "choice": 7}' % answer_id.encode(), 422, "1 choices"),
        ):
            response = server.client.post("/v1/feedback", content=body)
            error = response.json()["error"]
            assert (response.status_code, set(error)) == (
                status,
                {"message", "type", "param", "code"},
            ), body[:60]
            assert part in error["message"], error
        chat = server.client.post(
            "/v1/chat/completions", content=b'{"model": "' + b"x" * 10 * 2**20
        )
        assert chat.status_code == 413
        assert (
            server.client.post("/v1/feedback", json={"id": answer_id, "answer": "red"}).status_code
            == 200
        )
    assert [record.kind for record in ExperienceLogReader(tmp_path / "buffer").read_records()] == [
        "experience",
        "label",
    ]


def test_full_disk_loses_records_but_no_answer(tmp_path, model):
    with run_learning_server(tmp_path, model) as server:
        recorded_id = server.chat(max_tokens=3, seed=1)["id"]
        server.server.wait_until_recorded()
        ((_, segment),) = list_segments(tmp_path / "buffer")
        with limit_file_size(segment.stat().st_size + 10):
            unrecorded_id = server.chat(max_tokens=3, seed=2)["id"]
            response = server.client.post("/v1/feedback", json={"id": recorded_id, "answer": "red"})
            assert response.status_code == 503 and response.headers["retry-after"] == "5"
            assert (
                response.headers["x-should-retry"] == "true"
                and "segment-" in response.json()["error"]["message"]
            )
        assert server.server.answers.counts == {"kept": 1, "disk": 1}
        for answer_id in (
            recorded_id,
            unrecorded_id,
        ):  # the label of an unrecorded answer is in the journal only
            assert (
                server.client.post(
                    "/v1/feedback", json={"id": answer_id, "answer": "red"}
                ).status_code
                == 200
            )
    records = list(ExperienceLogReader(tmp_path / "buffer").read_records())
    assert [(r.kind, r.value["request_id"]) for r in records] == [
        ("experience", recorded_id),
        ("label", recorded_id),
    ]
    assert len((tmp_path / "feedback.jsonl").read_text().splitlines()) == 2


def test_damaged_live_snapshot_falls_back_to_the_initial_model(tmp_path, model, monkeypatch):
    monkeypatch.setattr(
        OnlineLearningService, "start_processes", lambda self, server: None
    )  # starts no processes
    root = tmp_path / "online"
    plan = OnlineLearningPlan(CHAT, root, EnvironmentSettings(name="pixel_grid"), "tiny", {})
    serving = ServingSettings(context=200, threads=1)

    def start_learning():
        server = ChatServer(serving, "tiny", tmp_path / "out", "token")
        learner = OnlineLearner(
            plan,
            ModelSource(str(model), tmp_path / "out"),
            serving,
            ModelSettings(device="cpu"),
            "tiny",
        )
        try:
            learner.start_learning(server)
            return server.model.version, learner.service.source
        finally:
            learner.stop_learning()
            server.close()

    version, source = start_learning()
    assert version == 0
    weights = {
        name: tensor * 0.5
        for name, tensor in collect_trainable_weights(load_policy(model).model, copy=True).items()
    }
    source.snapshots.publish_snapshot(8, weights, {"updates": 8})
    source.snapshots.set_live_version(8)
    assert start_learning()[0] == 8
    (source.snapshots.build_path(8) / "weights.safetensors").write_bytes(b"torn")
    assert start_learning()[0] == 0


def test_learning_starts_once_the_model_can_be_read(tmp_path, model, monkeypatch):
    monkeypatch.setattr(OnlineLearningService, "start_processes", lambda self, server: None)
    plan = OnlineLearningPlan(
        CHAT, tmp_path / "online", EnvironmentSettings(name="pixel_grid"), "tiny", {}
    )
    serving = ServingSettings(context=200, threads=1)
    server = ChatServer(serving, "tiny", tmp_path / "out", "token")
    learner = OnlineLearner(
        plan,
        ModelSource(str(model), tmp_path / "out"),
        serving,
        ModelSettings(device="cpu"),
        "tiny",
    )
    load_snapshot, failures = SnapshotSource.load_snapshot, [CheckpointError("the disk is away")]

    def fail_once(source, version):
        if failures:
            raise failures.pop()
        return load_snapshot(source, version)

    monkeypatch.setattr(SnapshotSource, "load_snapshot", fail_once)
    try:
        with pytest.raises(CheckpointError, match="disk is away"):
            learner.start_learning(server)
        assert learner.service is None and server.model is None
        learner.start_learning(server)  # the folder was released
        assert learner.service is not None and server.model.version == 0
    finally:
        learner.stop_learning()
        server.close()


def test_taken_port_is_one_line_with_the_next_step(tmp_path, model, capsys):
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        assert main(["serve", str(model), "--port", str(port), "--output", str(tmp_path)]) == 2
    error = capsys.readouterr().err.strip()
    assert len(error.splitlines()) == 1 and f"port {port}" in error and "--port N" in error
