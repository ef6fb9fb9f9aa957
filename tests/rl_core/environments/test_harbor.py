"""`harbor`: trials of a Harbor server whose agents ask the policy, against a stand-in of its protocol (0.26)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fastapi import FastAPI
from helpers.agents import build_policy, play, split_contexts
from helpers.fakes.harbor_server import build_harbor_app
from helpers.fakes.nemo_gym_server import serve_app

from rl_core.environments import make_environment
from rl_core.environments.agent import AgentClient
from rl_core.environments.harbor_trials import Harbor
from rl_core.errors import EnvironmentFault, SettingsError


@pytest.fixture(scope="module")
def app() -> FastAPI:
    return build_harbor_app()


@pytest.fixture(scope="module")
def url(app: FastAPI) -> Iterator[str]:
    with serve_app(app) as address:
        yield address


def build(url: str, *names: str, **options: object) -> Harbor:
    tasks = [{"path": f"/tasks/{name}"} for name in names]
    defaults = {"url": url, "tasks": tasks, "heldout": 0, "poll_s": 0.05, "timeout_s": 20.0}
    environment = make_environment("harbor", {**defaults, "context": 200, **options})
    assert isinstance(environment, Harbor)
    return environment


def test_a_trial_trains_what_its_agent_sampled(app: FastAPI, url: str) -> None:
    environment = build(
        url,
        "hello",
        agent="terminus-2",
        agent_options={"temperature": 0.7},
        sandbox_options={"override_cpus": 1},
        job_options={"timeout_multiplier": 2.0},
        success_at=1000.0,
    )
    policy = build_policy()
    rollouts = play(environment, policy, group_size=2)
    assert len(rollouts) == 2
    for rollout in rollouts:
        trajectory = rollout.trajectory
        # the reward of the stand-in is the number of words of the second reply
        assert trajectory.reward == len(trajectory.turns[1].action.split())
        assert trajectory.success is False and len(trajectory.turns) == 2
        assert trajectory.info["harbor/reward"] == trajectory.reward
        assert len(split_contexts(rollout)) == 1  # the second request extends the first
        assert sum(rollout.loss_mask) == trajectory.num_action_tokens > 0
    assert rollouts[0].completion_ids != rollouts[1].completion_ids
    again = play(environment, policy, group_size=2)
    assert [r.completion_ids for r in again] == [r.completion_ids for r in rollouts]
    config = next(iter(app.state.jobs.values()))["config"]
    assert config["environment"] == {"type": "docker", "override_cpus": 1}
    assert config["timeout_multiplier"] == 2.0 and config["retry"] == {"max_retries": 0}
    assert config["tasks"] == [{"path": "/tasks/hello"}]
    (agent,) = config["agents"]
    assert (agent["name"], agent["model_name"]) == ("terminus-2", "openai/policy")
    assert agent["kwargs"] == {"temperature": 0.7}


@pytest.mark.slow
def test_trials_without_a_reward_are_failed_episodes(app: FastAPI, url: str) -> None:
    failed: list = []
    rollouts = play(build(url, "error", "free"), build_policy(), failed=failed)
    assert not rollouts and len(failed) == 2
    errors = sorted(episode.error for episode in failed)
    assert "VerifierTimeoutError: the verifier did not end within 600 s" in errors[0]
    assert "no valid reward (finished)" in errors[1]


@pytest.mark.slow
def test_one_of_several_rewards_is_chosen(url: str) -> None:
    failed: list = []
    play(build(url, "two"), build_policy(), failed=failed)
    assert "the verifier gave style, tests; name the one that counts" in failed[0].error
    (rollout,) = play(build(url, "two", reward_name="style"), build_policy())
    assert rollout.trajectory.reward == 0.5
    assert rollout.trajectory.info["harbor/tests"] == 1


def test_a_trial_that_hangs_is_cancelled(app: FastAPI, url: str) -> None:
    failed: list = []
    play(build(url, "slow", timeout_s=0.6), build_policy(), failed=failed)
    assert "has not ended within 0.6 s of computing time" in failed[0].error
    job = next(
        j for j in app.state.jobs.values() if j["config"]["tasks"][0]["path"] == "/tasks/slow"
    )
    assert job["cancelled"]


def test_a_server_with_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    client = AgentClient("http://127.0.0.1:1/v1", "sk-x")
    with serve_app(build_harbor_app("secret")) as address:
        task = {"path": "/tasks/free"}
        with pytest.raises(EnvironmentFault, match="401"):
            build(address, "free").run_trial(task, client)
        monkeypatch.setenv("HARBOR_KEY", "secret")
        environment = build(address, "slow", api_key="HARBOR_KEY")
        job = environment._build_job({"path": "/tasks/slow"}, client)
        assert environment._request("/jobs/submit", {"config": job})
    with pytest.raises(EnvironmentFault, match="Harbor server"):
        environment.run_trial(task, client)


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"url": "x"}, "options.url"),
        ({"poll_s": 0.0}, "options.poll_s"),
        ({"tasks": [{"prompt": "x"}]}, "a task needs either a path or a name"),
        ({"tasks": [{"path": "x", "name": "y"}]}, "a task needs either a path or a name"),
        ({"timeout_s": 0.0}, "timeout_s"),
    ],
)
def test_options_are_checked(options: dict, part: str) -> None:
    with pytest.raises(SettingsError) as caught:
        build("http://x", "hello", **options) if "url" not in options else make_environment(
            "harbor", {"tasks": [{"path": "x"}], **options}
        )
    assert part in str(caught.value)
