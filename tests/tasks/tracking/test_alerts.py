"""Alerts: when they are sent, and that the automation takes the event to the webhook."""

import fnmatch
import math
import re
from pathlib import Path

import prefect.events
import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from posttrain.operations.automations import read_automations
from rl_core.errors import SettingsError
from tasks.config.settings import TrackingSettings
from tasks.tracking import extra_trackers
from tasks.tracking.extra_trackers import AlertTracker, MetricAlert

ROOT = Path(__file__).parents[3]


def test_each_crossing_is_sent_once():
    sent = []
    tracker = AlertTracker(
        {"policy/ref_kl": "> 0.5", "train/success_rate": "<.1"}, "demo", "policy", sent.append
    )
    for step, kl in enumerate([0.5, 0.6, 0.7, math.nan, 0.4, 0.8, math.inf]):
        tracker.log_metrics({"policy/ref_kl": kl, "train/loss": 9.0}, step)
    tracker.log_metrics({"train/success_rate": 0.05, "reward/alarm": 1.0}, 7)
    assert [(alert.metric, alert.value, alert.step) for alert in sent[:2]] == [
        ("policy/ref_kl", 0.6, 1),
        ("policy/ref_kl", 0.8, 5),
    ]
    assert {alert.metric for alert in sent[2:]} == {"train/success_rate", "reward/alarm"} and len(
        sent
    ) == 4
    texts = {alert.metric: alert.text for alert in sent}
    assert texts["policy/ref_kl"] == "demo / policy: policy/ref_kl is 0.8, > 0.5, at step 5"
    assert texts["reward/alarm"].endswith(
        "> 0, at step 7 (the reward rises while success falls: it may be hacked)"
    )


def test_conditions_are_checked_with_the_settings():
    assert TrackingSettings(alerts={"a": ">1e-3", "b": "< -.5"}).alerts["a"] == ">1e-3"
    for wrong in ("0.5", "> x", "", "=> 3"):
        with pytest.raises(
            SettingsError, match=r"alerts\.policy/ref_kl: .* is not a condition; write '> 0\.5'"
        ):
            TrackingSettings(alerts={"policy/ref_kl": wrong})


def test_an_event_is_emitted_where_a_server_is_named(monkeypatch, caplog):
    emitted = []
    monkeypatch.setattr(prefect.events, "emit_event", lambda **event: emitted.append(event))
    alert = MetricAlert("demo", "policy", "reward/alarm", 1.0, "> 0", 3)
    with temporary_settings({PREFECT_API_URL: None}):
        extra_trackers.send_alert(alert)
    assert emitted == [] and caplog.text.count(f"alert: {alert.text}") == 1
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}):
        extra_trackers.send_alert(alert)
    (event,) = emitted
    (automation,) = [
        item
        for item in read_automations(ROOT / "deployments/automations.yaml")
        if "alert" in item["name"]
    ]
    assert automation["trigger"]["expect"] == [event["event"]]
    pattern = automation["trigger"]["match"]["prefect.resource.id"]
    assert fnmatch.fnmatch(event["resource"]["prefect.resource.id"], pattern)
    used = set(re.findall(r"event\.payload\.(\w+)", automation["actions"][0]["payload"]))
    assert used == {"text", "metric", "value", "step"} and used <= event["payload"].keys()
