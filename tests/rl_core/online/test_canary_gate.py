"""The running gate: pairs of episodes, decisions, orders, restarts, damaged files."""

import json
import shutil

import pytest
from helpers.online_worker import settings
from helpers.tiny import nano

from rl_core.errors import CorruptError
from rl_core.models.trainable_weights import collect_trainable_weights
from rl_core.online import canary_gate
from rl_core.online.canary_gate import CanaryGate
from rl_core.online.service_files import GATE_FILE, METRICS_FILE, read_gate_state
from rl_core.online.weight_snapshots import WeightSnapshots
from rl_core.settings import OnlineGateSettings


class FakePolicy:
    """A policy whose first weight contains its success in every episode."""

    def __init__(self):
        self.model = nano()

    def backend(self):
        return None

    renderer = None


class FakeEnvironment:
    name, levels, heldout_share, knows_success = "fake", ("easy",), 0.2, True


@pytest.fixture
def evaluations(monkeypatch):
    """Record the evaluated versions in order; success is 1, except for versions in `failing`."""
    evaluations = {"versions": [], "failing": set()}

    def evaluate(environment, backend, renderer, requests, *, policy_version, **options):
        evaluations["versions"].append(policy_version)

        class Episode:
            def __init__(self, key):
                self.key, self.success = (
                    key,
                    0.0 if policy_version in evaluations["failing"] else 1.0,
                )

        return type("Evaluation", (), {"episodes": [Episode((r.level, r.seed)) for r in requests]})

    def requests(environment, levels, count, seed, number):
        return [type("R", (), {"level": "easy", "seed": 1000 * number + i}) for i in range(count)]

    monkeypatch.setattr(canary_gate, "evaluate", evaluate)
    monkeypatch.setattr(canary_gate, "build_canary_requests", requests)
    return evaluations


def publish_version(snapshots, version):
    weights = {
        name: tensor + version
        for name, tensor in collect_trainable_weights(nano(), copy=True).items()
    }
    snapshots.publish_snapshot(version, weights)


def hold_candidate(gate, version):
    """Let the worker hold the candidate that the gate ordered, and return whether the gate opens it."""
    assert not gate.step() and gate.orders[-1]["order"] == {"order": "hold", "version": version}
    assert not gate.step() and gate.gate.version is None  # the gate waits for the worker
    (gate.folder / METRICS_FILE).write_text(json.dumps({"online/held_version": float(version)}))
    return gate.step()


def create_gate(folder, **options):
    gate_settings = settings(
        gate=OnlineGateSettings(
            **{"episodes_per_look": 100, "margin": 0.1, "alpha": 0.05, **options}
        )
    )
    return CanaryGate(
        folder,
        gate_settings,
        FakePolicy(),
        FakeEnvironment(),
        WeightSnapshots(folder / "snapshots"),
    )


@pytest.fixture
def snapshots(tmp_path):
    snapshots = WeightSnapshots(tmp_path / "snapshots")
    for version in (0, 10):
        publish_version(snapshots, version)
    snapshots.set_live_version(0)
    return snapshots


def test_an_equal_candidate_is_promoted_and_ordered(tmp_path, snapshots, evaluations):
    gate = create_gate(tmp_path)
    assert hold_candidate(gate, 10)
    while gate.gate.version is not None:
        gate.step()
    assert evaluations["versions"][:2] == [10, 0]  # live and champion are the same snapshot
    assert gate.decisions[-1]["verdict"] == "promoted" and gate.decisions[-1]["episodes"] >= 60
    assert gate.orders[-1] == {"number": 2, "order": {"order": "live", "version": 10}}
    restarted_gate = create_gate(tmp_path)
    # nothing newer to test
    assert restarted_gate.orders == gate.orders and not restarted_gate.step()
    assert json.loads((tmp_path / GATE_FILE).read_text())["metrics"]["online/gate_promoted"] == 1.0


def test_a_worse_candidate_is_rejected_and_the_error_stays_spent(tmp_path, snapshots, evaluations):
    evaluations["failing"].add(10)
    gate = create_gate(tmp_path)
    hold_candidate(gate, 10)
    while gate.gate.version is not None:
        gate.step()
    assert (
        gate.decisions[-1]["verdict"] == "rejected" and gate.orders[-1]["order"]["order"] == "hold"
    )
    publish_version(snapshots, 20)
    restarted_gate = create_gate(tmp_path)  # a killed gate restores the spent error
    assert (
        hold_candidate(restarted_gate, 20)
        and restarted_gate.gate.candidates == 2
        and restarted_gate.gate.level < gate.gate.settings.alpha / 5
    )


def test_a_rival_that_changes_ends_the_test_and_a_champion_plays_apart(
    tmp_path, snapshots, evaluations
):
    gate = create_gate(tmp_path, episodes_per_look=5)
    hold_candidate(gate, 10)
    gate.step()
    publish_version(snapshots, 20)
    snapshots.set_live_version(10)
    assert not gate.step() and gate.decisions[-1]["verdict"] == "abandoned"
    (tmp_path / METRICS_FILE).write_text('{"online/held_version": 20.0}')
    assert gate.step() and gate.live_opponent == 10
    assert gate.gate.version == 20 and gate.gate.candidates == 2
    evaluations["versions"].clear()
    gate.step()
    assert evaluations["versions"] == [20, 10, 0]


def test_a_candidate_that_is_worse_than_the_champion_alone_is_rejected(
    tmp_path, snapshots, evaluations
):
    snapshots.set_live_version(10)
    publish_version(snapshots, 20)
    evaluations["failing"] |= {10, 20}  # as bad as the live one, which is worse than the champion
    gate = create_gate(tmp_path)
    hold_candidate(gate, 20)
    while gate.gate.version is not None:
        gate.step()
    decision = gate.decisions[-1]
    assert (decision["verdict"], decision["difference_live"], decision["difference_champion"]) == (
        "rejected",
        0.0,
        -1.0,
    )


def test_a_damaged_candidate_costs_nothing_and_one_damaged_later_is_abandoned(
    tmp_path, snapshots, evaluations
):
    (tmp_path / "snapshots" / "snapshot-00000010" / "weights.safetensors").write_bytes(b"torn")
    gate = create_gate(tmp_path)
    assert not hold_candidate(gate, 10) and gate.gate.candidates == 0 and gate.newest_tested == 10
    publish_version(snapshots, 15)
    gate.step()
    shutil.rmtree(snapshots.build_path(15))
    assert not gate.step() and (gate.newest_tested, gate.gate.candidates) == (15, 0)
    publish_version(snapshots, 20)
    hold_candidate(gate, 20)
    snapshots.build_path(20).joinpath("weights.safetensors").write_bytes(b"torn")
    gate.snapshots = WeightSnapshots(tmp_path / "snapshots", cached=0)
    with pytest.raises(CorruptError):
        gate.snapshots.load_weights(20)
    gate.step()
    assert gate.decisions[-1]["verdict"] == "abandoned" and gate.gate.version is None


def test_nothing_from_before_an_alarm_goes_live_after_it(tmp_path, snapshots, evaluations):
    gate = create_gate(tmp_path, episodes_per_look=5)
    hold_candidate(gate, 10)
    gate.step()
    publish_version(snapshots, 20)
    (tmp_path / METRICS_FILE).write_text(
        '{"paused": "drift: length rises", "online/held_version": 10.0}'
    )
    evaluations["versions"].clear()
    assert not gate.step() and not gate.step() and evaluations["versions"] == []
    assert [decision["verdict"] for decision in gate.decisions] == [
        "abandoned"
    ] and gate.newest_tested == 20
    (tmp_path / METRICS_FILE).write_text('{"paused": "", "online/held_version": 10.0}')
    restarted_gate = create_gate(tmp_path, episodes_per_look=5)
    # nothing newer than the alarm
    assert not restarted_gate.step() and restarted_gate.orders == gate.orders
    publish_version(snapshots, 30)
    assert hold_candidate(restarted_gate, 30)


def test_a_torn_or_foreign_file_is_no_state(tmp_path):
    (tmp_path / GATE_FILE).write_text("[1, 2")
    assert read_gate_state(tmp_path) == {}
    (tmp_path / GATE_FILE).write_text("[1, 2]")
    assert read_gate_state(tmp_path) == {}


@pytest.mark.parametrize(
    "text", ["", '{"gate": {', '{"orders": []}', '{"gate": {"candidates": 3}}']
)
def test_a_damaged_file_does_not_give_the_spent_error_back(tmp_path, snapshots, evaluations, text):
    (tmp_path / GATE_FILE).write_text(text)
    with pytest.raises(CorruptError, match=r"gate\.json: is damaged.*remove the file"):
        create_gate(tmp_path)
