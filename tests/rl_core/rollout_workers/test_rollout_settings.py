"""Settings of rollout workers: one-line refusals, and which of them belong to a stage's key."""

import pytest

from rl_core.errors import SettingsError
from rl_core.settings import LaunchSettings, PolicySettings, RolloutServerSettings, RolloutSettings
from tasks.config import build_settings
from tasks.pipeline.stage_key import collect_stage_key


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"count": 2}, "count: 2 applies to workers, but there are none in_process"),
        (
            {"max_staleness": 1},
            "max_staleness: 1 needs rollouts that run during updates; set workers: ray",
        ),
        ({"address": "127.0.0.1:6379"}, "address: '127.0.0.1:6379' applies to workers"),
        (
            {"workers": "ray", "address": "head"},
            "address: 'head' must be host:port of a Ray cluster's head, or auto",
        ),
        (
            {"replay_schedule": "schedule.jsonl"},
            "replay_schedule: belongs to a run with max_staleness above 0",
        ),
        (
            {"workers": "server", "address": "gpu-1:80000"},
            "address: 'gpu-1:80000' must be host:port of an inference server",
        ),
    ],
)
def test_settings_of_workers_need_workers(options, message):
    with pytest.raises(SettingsError, match=message):
        RolloutSettings(**options)


MANAGED = RolloutServerSettings(start=True, python="python")
STALE = RolloutSettings(workers="ray", max_staleness=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"rollouts": STALE},
            "max_staleness: 2 trains on rollouts of older weights; set importance",
        ),
        ({"rollouts": STALE, "algorithm": "ppo"}, r"max_staleness: 2 with a critic \(ppo\)"),
        (
            {
                "rollouts": RolloutSettings(workers="ray"),
                "launch": LaunchSettings(kind="torchrun", processes=2),
            },
            "rollouts.workers: ray serves a single trainer process",
        ),
    ],
)
def test_what_cannot_learn_is_refused(options, message):
    with pytest.raises(SettingsError, match=message):
        PolicySettings(**options)


def test_a_critic_takes_stale_rollouts_with_v_trace():
    settings = PolicySettings(rollouts=STALE, algorithm="ppo", importance="vtrace")
    assert settings.value_function is not None and settings.rollouts.max_staleness == 2


def test_the_key_depends_on_what_determines_numbers():
    pipeline = build_settings(
        {"name": "x", "stages": {"sft": {}, "prepare_data": {}}}, check_files=False
    )

    def compute_key(**options):
        return collect_stage_key(
            "policy",
            PolicySettings(importance="token", rollouts=RolloutSettings(**options)),
            pipeline,
            {},
        ).key

    independent_keys = {
        compute_key(independent=True),
        compute_key(workers="ray"),
        compute_key(workers="ray", count=3),
        compute_key(workers="ray", address="auto"),
    }
    assert len(independent_keys) == 1
    stale_keys = [
        compute_key(workers="ray", max_staleness=1),
        compute_key(workers="ray", max_staleness=1, partial="drop"),
    ]
    assert len({compute_key(), *independent_keys, *stale_keys}) == 4
    assert compute_key(workers="ray", max_staleness=1, count=3) == stale_keys[0]
    served_key = compute_key(workers="server", address="a:1")
    assert compute_key(workers="server", server=MANAGED) == served_key  # who starts it is no number
    changed = RolloutServerSettings(start=True, python="python", arguments=("--quantization=fp8",))
    assert compute_key(workers="server", server=changed) != served_key


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"workers": "server"},
            "address: workers: server needs host:port .* or server: {start: true",
        ),
        (
            {"workers": "server", "server": RolloutServerSettings(start=True)},
            "server.python: start needs the Python of vLLM's environment",
        ),
        (
            {"workers": "server", "address": "a:1", "server": MANAGED},
            "address: 'a:1' is that of a running server, but server.start starts one",
        ),
        ({"workers": "server", "count": 2, "server": MANAGED}, "count: 2 servers"),
        (
            {
                "workers": "server",
                "address": "a:1",
                "server": RolloutServerSettings(arguments=("--x",)),
            },
            "server.arguments: apply to a server that is started with server.python",
        ),
        ({"workers": "server", "address": "auto"}, "must be host:port of an inference server"),
        ({"workers": "server", "address": "a:65536"}, "must be host:port of an inference server"),
        ({"workers": "server", "address": "a:0"}, "must be host:port of an inference server"),
        ({"workers": "server", "address": "a:1", "count": 2}, "count: 2 servers"),
        (
            {"workers": "server", "address": "a:1", "independent": True},
            "independent: applies to the built-in engine",
        ),
        (
            {"workers": "server", "address": "a:1", "max_staleness": 1},
            "max_staleness: 1 needs workers that play during",
        ),
        (
            {"server": RolloutServerSettings(sleeps=True)},
            "server: applies to an inference server, but workers is in_process",
        ),
    ],
)
def test_settings_of_a_server(options, message):
    with pytest.raises(SettingsError, match=message):
        RolloutSettings(**options)


@pytest.mark.parametrize(
    ("address", "url"),
    [
        ("127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("https://gpu-1:443/", "https://gpu-1:443"),
        ("[::1]:8000", "http://[::1]:8000"),
        ("httpd-3:8000", "http://httpd-3:8000"),  # a host, no scheme
    ],
)
def test_the_url_of_an_inference_server(address, url):
    assert RolloutSettings(workers="server", address=address).base_url == url
