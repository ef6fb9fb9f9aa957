"""DogStatsD: datagrams received by a socket, and the file while no agent listens."""

import re
import socket
import sys

import pytest
from helpers.waiting import wait_for

from rl_core.errors import SettingsError
from rl_core.trackers import BackgroundTracker, build_tracker_group, dogstatsd


@pytest.fixture
def agent():
    """Yield a socket that receives the datagrams for an agent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.settimeout(10)
        yield listener


def receive_datagrams(agent, count):
    """Return the next `count` datagrams that are not empty, sorted."""
    datagrams = []
    while len(datagrams) < count:
        if text := agent.recv(4096).decode().strip():
            datagrams.append(text)
    return sorted(datagrams)


def make_tracker(port, folder, **labels):
    pytest.importorskip("datadog")
    return dogstatsd.DogStatsdTracker(f"127.0.0.1:{port}", folder / "dogstatsd.txt", labels)


def test_an_agent_gets_gauges_with_tags_and_base_units(agent, tmp_path):
    tracker = make_tracker(agent.getsockname()[1], tmp_path, stage="policy", pipeline="a, b")
    tracker.log_metrics({"train/loss": 0.5, "train/success_rate_by_level/3": 1.0}, 7)
    tags = "stage:policy,pipeline:a__b"
    assert receive_datagrams(agent, 3) == [
        f"posttrain.run.step:7.0|g|#{tags}",
        f"posttrain.train.loss:0.5|g|#{tags}",
        f"posttrain.train.success_rate_by_level:1.0|g|#{tags},level:3",
    ]
    tracker.log_system({"system/process_memory_megabytes": 2.0}, 1)
    assert receive_datagrams(agent, 1) == [
        f"posttrain.system.process_memory_bytes:2097152.0|g|#{tags}"
    ]
    tracker.close("FINISHED")
    assert not (tmp_path / "dogstatsd.txt").exists()


def test_a_file_stores_the_records_without_an_agent(tmp_path, monkeypatch):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    tracker = make_tracker(port, tmp_path, stage="sft")
    tracker.log_metrics({"train/loss": 0.5}, 1)
    tracker.log_metrics({"train/loss": 0.25}, 2)
    lines = (tmp_path / "dogstatsd.txt").read_text().splitlines()
    assert [re.sub(r"\|T\d{10}$", "", line) for line in lines] == [
        "posttrain.train.loss:0.5|g|#stage:sft",
        "posttrain.run.step:1.0|g|#stage:sft",
        "posttrain.train.loss:0.25|g|#stage:sft",
        "posttrain.run.step:2.0|g|#stage:sft",
    ]
    monkeypatch.setattr(dogstatsd, "AGENT_CHECK_SECONDS", 0.0)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as agent:  # an agent starts and ends
        agent.bind(("127.0.0.1", port))
        agent.settimeout(10)
        tracker.log_metrics({"train/loss": 0.125}, 3)
        assert receive_datagrams(agent, 2)[1].startswith("posttrain.train.loss:0.125|g")
    tracker.log_metrics({"train/loss": 0.0625}, 4)
    assert len(lines) + 2 == len((tmp_path / "dogstatsd.txt").read_text().splitlines())


def test_the_file_size_is_limited(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(dogstatsd, "MAX_FILE_BYTES", 100)
    monkeypatch.setattr(dogstatsd.DogStatsdTracker, "_is_agent_listening", lambda self: False)
    tracker = make_tracker(9, tmp_path)
    for step in range(20):
        tracker.log_metrics({}, step)
    assert (tmp_path / "dogstatsd.txt").stat().st_size < 200
    assert caplog.text.count("the file is full") == 1


def test_tracker_names_and_their_errors(agent, tmp_path, monkeypatch):
    pytest.importorskip("datadog")
    tracker = build_tracker_group(
        f"dogstatsd:127.0.0.1:{agent.getsockname()[1]}", folder=tmp_path
    ).trackers[0]
    assert isinstance(tracker, BackgroundTracker)  # a name lookup may take long
    tracker.log_metrics({"train/loss": 1.0}, 1)
    assert receive_datagrams(agent, 2)[1] == "posttrain.train.loss:1.0|g"
    tracker.close("FINISHED")
    wait_for(lambda: tracker._thread is None)
    with pytest.raises(SettingsError, match="'x' is not a port; write dogstatsd:HOST:PORT"):
        build_tracker_group("dogstatsd:host:x")
    monkeypatch.setenv("DD_AGENT_HOST", "agent.example")
    assert dogstatsd._parse_host_and_port("") == ("agent.example", 8125)
    assert dogstatsd._parse_host_and_port("[::1]:9000") == ("::1", 9000)
    assert dogstatsd._parse_host_and_port("h") == ("h", 8125)
    monkeypatch.setitem(sys.modules, "datadog.dogstatsd", None)
    with pytest.raises(
        SettingsError, match=r"needs the package datadog; install it, or posttrain\[datadog\]"
    ):
        build_tracker_group("dogstatsd")
