"""Journals of runs that have ended: model versions in order, delivered once, to the experiment they belong to."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from rl_core.errors import BackendError
from rl_core.storage import faults
from rl_core.storage.manifest import digest_folder
from tasks.config import build_settings
from tasks.lifecycle.promotion import promote_version
from tasks.tracking import PARENT_PLACEHOLDER, Tracking, VersionByContent, run_tracker
from tasks.tracking import replay as replaying
from tasks.tracking.journal import DeliveryCursor, LineLog, build_events_path
from tasks.tracking.replay import count_undelivered, deliver_journal


@pytest.fixture
def short_waits(monkeypatch):
    """Shorten the wait of a run at its end for an unreachable store."""
    monkeypatch.setattr(run_tracker, "UNREACHABLE_TIMEOUT_SECONDS", 0.2)


def test_models_of_an_unreachable_store_become_versions_in_order(
    tracking, output, models, tmp_path, short_waits
):
    unreachable = Tracking("http://127.0.0.1:9", output, "elsewhere")
    root = output / "late"
    parent = unreachable.start_run("pipeline", root / "runs" / "1")
    shas = {}
    before = None
    # the second one's journal comes first by name
    for stage, folder in (
        ("sft", "z"),
        ("policy", "a"),
    ):
        model = tmp_path / stage
        model.mkdir()
        for path in models["policy"].iterdir():
            (model / path.name).write_bytes(path.read_bytes())
        (model / "stage.txt").write_text(stage)
        shas[stage] = digest_folder(model)
        run = unreachable.start_run(
            stage,
            root / "stages" / folder,
            parent_folder=parent.folder,
            tags={"parent_model_version": before},
        )
        version = run.log_model(
            model,
            "policy",
            "late",
            tags={"model_sha256": shas[stage]},
            parent=before,
            description=f"{stage} from version {PARENT_PLACEHOLDER}",
            timeout_s=0.2,
        )
        assert version is None
        assert not run.close()
        before = VersionByContent("late", shas[stage])
    assert not parent.close()
    assert (
        unreachable.count_undelivered(root).models == 2
        and count_undelivered(root / "runs" / "1").models == 0
    )

    policy = root / "stages" / "a"
    assert deliver_journal(tracking.store, policy) == 0  # it delivers its parents as well
    assert tracking.deliver_all_journals(root) == 0
    first, second = tracking.list_versions("late")
    assert [item.tags["model_sha256"] for item in (first, second)] == [shas["sft"], shas["policy"]]
    assert second.tags["parent_version"] == "1" and "parent_version" not in first.tags
    client = tracking.store.client
    assert client.get_model_version("late", "2").description == "policy from version 1"
    run = client.get_run(DeliveryCursor.load(policy).run_id)
    assert (
        run.data.tags["parent_model_version"] == "models:/late/1" and run.info.status == "FINISHED"
    )
    assert run.data.tags["mlflow.parentRunId"] == DeliveryCursor.load(parent.folder).run_id
    # not the experiment of the delivering Tracking
    assert client.get_experiment(run.info.experiment_id).name == "elsewhere"
    assert DeliveryCursor.load(policy).versions.popitem()[1] == 2
    assert list((policy / ".tracking").rglob("*.safetensors")) == []  # the copy is deleted

    gate = unreachable.start_run("promote", root / "stages" / "p", parent_folder=parent.folder)
    gate.log_alias("champion", VersionByContent("late", shas["sft"]), {"gate.decision": "promoted"})
    gate.log_alias(
        "champion", VersionByContent("late", shas["policy"]), {"gate.decision": "promoted"}
    )
    gate.close()
    tracking.set_champion("late", 1)  # by hand, after both
    assert tracking.deliver_all_journals(root) == 0 and tracking.find_champion("late").version == 1
    client.delete_registered_model_alias("late", "champion")  # a database that lost it
    cursor = DeliveryCursor.load(gate.folder)
    cursor.events_offset = 0
    cursor.save(gate.folder)
    assert tracking.deliver_all_journals(root) == 0
    assert (
        tracking.find_champion("late").version,
        tracking.find_champion("late").tags["gate.decision"],
    ) == (
        2,
        "promoted",
    )

    # a recreated database: everything is sent again in order, the models from their current location
    for folder in (policy, root / "stages" / "z"):
        cursor = DeliveryCursor.load(folder)
        client.delete_run(cursor.run_id)
        cursor.identity = "of the database before"
        cursor.save(folder)
    assert deliver_journal(tracking.store, policy) == 0
    again = DeliveryCursor.load(policy)
    assert again.run_id != run.info.run_id and again.versions.popitem()[1] == 4
    assert [version.tags["model_sha256"] for version in tracking.list_versions("late")] == [
        *shas.values()
    ] * 2


class Sink:
    """Store of runs by id, with the mark of its database."""

    store = "s"

    def __init__(self):
        self.identity, self.runs, self.down = "first", {}, False

    def create_run(self, event, *, retried):
        if self.down:
            raise BackendError("down")
        self.runs[run_id := f"{self.identity}-{len(self.runs)}"] = []
        return run_id, "1"

    def has_run(self, run_id):
        return run_id in self.runs

    has_run_or_deleted = has_run

    def store_metrics(self, run_id, rows):
        self.runs[run_id] += rows

    def store_event(self, run_id, event):
        self.runs[run_id].append(event["op"])


@pytest.fixture
def sink(monkeypatch):
    sink_ = Sink()
    monkeypatch.setattr(replaying, "connect_sink", lambda store, folder: sink_)
    return sink_


def build_store(sink):
    class Store(SimpleNamespace):
        @property
        def identity(self):
            return sink.identity

    store = Store(label="s", is_unreachable=False)
    store.select_experiment = lambda name: store
    return store


def write_finished_journal(folder, **start):
    events = LineLog(build_events_path(folder))
    events.append_record(
        {"op": "start", "key": "k", "name": "n", "time": 0, "experiment": "e", **start}
    )
    events.append_record({"op": "end", "status": "FINISHED", "time": 1})
    events.close()


def test_a_database_that_was_lost_gets_everything_again_and_a_removed_run_does_not(tmp_path, sink):
    store = build_store(sink)
    write_finished_journal(tmp_path)
    assert deliver_journal(store, tmp_path) == 0
    assert sink.runs == {"first-0": ["start", "end"]}
    sink.runs.clear()  # somebody removed it for good
    assert deliver_journal(store, tmp_path) == 0 and sink.runs == {}
    sink.identity = "second"  # mlflow.db was deleted
    assert deliver_journal(store, tmp_path) == 0
    assert deliver_journal(store, tmp_path) == 0
    assert sink.runs == {"second-0": ["start", "end"]}


def test_the_same_database_at_another_address_is_sent_nothing_twice(tmp_path, sink):
    """For example the server of `posttrain up`, after runs that wrote directly to its database."""
    write_finished_journal(tmp_path / "a")
    assert deliver_journal(build_store(sink), tmp_path / "a") == 0
    sink.store = "http://127.0.0.1:5000"
    store = build_store(sink)
    store.label = sink.store
    assert deliver_journal(store, tmp_path / "a") == 0
    assert sink.runs == {"first-0": ["start", "end"]}
    assert DeliveryCursor.load(tmp_path / "a").store == sink.store
    # the run was resumed and killed: only the rest is sent
    events = LineLog(build_events_path(tmp_path / "a"))
    events.append_record({"op": "tags", "tags": {}})
    events.close()
    sink.store = store.label = "sqlite:///x"
    assert deliver_journal(store, tmp_path / "a") == 0
    assert (
        sink.runs == {"first-0": ["start", "end", "tags"]}
        and DeliveryCursor.load(tmp_path / "a").store == sink.store
    )
    sink.store = store.label = "http://a-copy-that-was-made-before"
    sink.runs.clear()
    assert deliver_journal(store, tmp_path / "a") == 0
    assert sink.runs == {"first-0": ["start", "end", "tags"]}


def test_a_journal_of_an_earlier_version_is_not_sent_twice(tmp_path, sink):
    write_finished_journal(tmp_path)
    deliver_journal(build_store(sink), tmp_path)
    path = tmp_path / ".tracking" / "shipped.json"
    state = {
        name: value
        for name, value in json.loads(path.read_text()).items()
        if name not in ("identity", "versions")
    }
    path.write_text(json.dumps(state))
    assert deliver_journal(build_store(sink), tmp_path) == 0 and sink.runs == {
        "first-0": ["start", "end"]
    }
    assert DeliveryCursor.load(tmp_path).identity == "first"


def test_an_unreachable_store_is_asked_once(tmp_path, sink, monkeypatch):
    tracking = Tracking("http://127.0.0.1:9", tmp_path, "e")
    connected = []
    monkeypatch.setattr(
        replaying, "connect_sink", lambda store, folder: connected.append(folder) or sink
    )
    monkeypatch.setattr(replaying, "_is_delivered", lambda *arguments: False)
    sink.down = True
    for name in ("a", "b", "c"):
        write_finished_journal(tmp_path / name)
    assert tracking.deliver_all_journals() == 6 and len(connected) == 1
    assert tracking.count_undelivered().others == 6
    sink.down = False
    assert tracking.deliver_all_journals() == 0 and len(sink.runs) == 3


def build_proof_tags(digest):
    return {"model_sha256": digest, "export.model_sha256": digest}


@pytest.fixture
def by_hand(tracking, output, models):
    """Create settings of a pipeline with two versions from finished runs; return them with the first folder."""
    folders = []
    for stage in ("sft", "policy"):
        run = tracking.start_run(stage, output / "by-hand" / stage, interval_s=0.05)
        run.log_model(
            models["policy"], "policy", "by-hand", tags=build_proof_tags(f"sha of {stage}")
        )
        run.close()
        folders.append(run.folder)
    tracking.set_champion("by-hand", 2)
    settings = build_settings(
        {
            "name": "by-hand",
            "output": str(output),
            "tracking": {"uri": tracking.store.uri, "experiment": "tests"},
            "stages": {"prepare_data": {}},
        },
        check_files=False,
    )
    return settings, folders[0]


def test_a_champion_that_was_chosen_by_hand_is_one_again_in_a_store_that_lost_it(tracking, by_hand):
    settings, journal = by_hand
    assert "is the champion now" in promote_version(settings, 1, "it reads better")
    assert count_undelivered(journal).total == 0  # delivered: nothing is done a second time
    tracking.set_champion("by-hand", 2)
    assert tracking.deliver_journal(journal) == 0 and tracking.find_champion("by-hand").version == 2
    tracking.store.client.delete_registered_model_alias("by-hand", "champion")
    cursor = DeliveryCursor.load(journal)
    cursor.events_offset = 0
    cursor.save(journal)
    assert tracking.deliver_journal(journal) == 0
    champion = tracking.find_champion("by-hand")
    assert (champion.version, champion.tags["gate.reason"]) == (1, "it reads better")


def test_a_choice_by_hand_that_was_killed_before_the_alias_moved_is_completed_at_the_next_delivery(
    tracking, by_hand
):
    settings, journal = by_hand
    faults.configure_faults("hand.tagged:1:raise")
    try:
        with pytest.raises(faults.InjectedFault):
            promote_version(settings, 1)
    finally:
        faults.configure_faults(None)
    assert tracking.find_champion("by-hand").version != 1 and count_undelivered(journal).total == 1
    assert tracking.deliver_journal(journal) == 0 and tracking.find_champion("by-hand").version == 1


def test_a_choice_by_hand_that_was_killed_after_the_alias_is_no_longer_challenger(
    tracking, by_hand
):
    settings, _ = by_hand
    tracking.set_challenger("by-hand", 1)
    faults.configure_faults("alias.moved:1:raise")
    try:
        with pytest.raises((faults.InjectedFault, BackendError)):
            promote_version(settings, 1)
    finally:
        faults.configure_faults(None)
    assert sorted(tracking.list_versions("by-hand")[0].aliases) == ["challenger", "champion"]
    assert "is the champion already" in promote_version(settings, 1)
    assert tracking.list_versions("by-hand")[0].aliases == ("champion",)
