"""`harbor`: tasks of a Harbor server, solved by one of its agents, whose model is the policy.

    environment:
      name: harbor
      options: {url: "http://127.0.0.1:8787", tasks: [{path: /tasks/hello-world}], agent: terminus-2}

For each episode a job of one trial is submitted; its agent's model is the trainer's recorder (docs/agents.md). The
reward is that of the task's verifier. The server starts the sandboxes; this process only asks it over HTTP.
Source: Harbor 0.26.0, `harbor/server` (POST /jobs/submit, GET /rollouts, GET /rollouts/ID, POST /jobs/ID/cancel).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlencode, urlsplit

from rl_core.environments.agent import Agent, AgentClient, AgentFailed
from rl_core.errors import SettingsError
from rl_core.json_client import RequestError, fetch_json

_KEY_VARIABLE = "HARBOR_MODEL_API_KEY"  # as the server's own relay names it
_TASK_FIELDS = ("path", "name", "ref", "git_url", "git_commit_id", "source")
_END_STATES = ("finished", "cancelled")
_MAX_FAILED_POLLS = 5  # in a row


class Harbor(Agent):
    """Tasks for an agent of a Harbor server."""

    name = "harbor"

    def __init__(
        self,
        tasks: Any,
        *,
        url: str,
        agent: str = "terminus-2",
        agent_options: dict[str, Any] | None = None,
        sandbox_type: str = "docker",
        sandbox_options: dict[str, Any] | None = None,
        job_options: dict[str, Any] | None = None,
        reward_name: str = "",
        api_key: str = "",
        poll_s: float = 1.0,
        heldout: Any = 0.1,
        level: str = "level",
        success_at: float = 1.0,
        timeout_s: float = 1800.0,
        context: int = 16384,
        sampling: Literal["agent", "run"] = "agent",
        tools: Literal["template", "instructions", "read"] = "template",
        data: Path | None = None,
    ) -> None:
        """Read the tasks; nothing is requested yet.

        Args:
            tasks: a file or rows of tasks: {path} as the server sees it, or {name, ref} of its registry; further
                columns are for you.
            url: address of the server (`harbor server`).
            agent: name of one of its agents.
            agent_options: keyword arguments (`kwargs`) of the agent.
            sandbox_type: kind of its environments.
            sandbox_options: further fields of the job's `environment`.
            job_options: further fields of the job, such as timeout_multiplier.
            reward_name: which of the verifier's rewards counts; "" = the only one, or 'reward'.
            api_key: name of the environment variable with the server's key; "" = none.
            poll_s: seconds between requests for the state of a trial.
            heldout: as of `agent`, like level, success_at, context, sampling and tools.
            timeout_s: seconds of a trial, besides those in which it waits for the policy.
        Raises: SettingsError; DataError if there are no tasks.
        """
        if urlsplit(url).scheme not in ("http", "https"):
            raise SettingsError(f"options.url: '{url}' must begin with http:// or https://")
        if not 0 < poll_s < 3600:
            raise SettingsError(f"options.poll_s: {poll_s} must be above 0 and below an hour")
        self._url, self._poll_s, self._key_variable = url.rstrip("/"), poll_s, api_key
        self._agent_name, self._agent_options = agent, agent_options or {}
        self._environment_config = {"type": sandbox_type, **(sandbox_options or {})}
        self._job_options, self._reward_name = job_options or {}, reward_name
        super().__init__(
            self.run_trial,
            tasks,
            heldout=heldout,
            level=level,
            success_at=success_at,
            timeout_s=timeout_s,
            context=context,
            sampling=sampling,
            tools=tools,
            data=data,
        )
        for rows in self._tasks.values():
            for row in rows:
                if bool(row.get("path")) == bool(row.get("name")):
                    raise SettingsError(
                        f"options.tasks: a task needs either a path or a name, not {json.dumps(row, default=str):.120}"
                    )

    @classmethod
    def named_code(cls, options: Mapping[str, Any]) -> tuple[str, ...]:
        """List the import path of a function that returns the tasks."""
        return super().named_code({name: options.get(name) for name in ("tasks", "heldout")})

    def run_trial(self, task: Mapping[str, Any], client: AgentClient) -> dict[str, Any]:
        """Run one trial at the server; return {reward, and the other rewards}. Raises: AgentFailed."""
        key = hashlib.blake2b(client.api_key.encode(), digest_size=16).hexdigest()
        job = self._build_job(task, client)
        submitted = self._request("/jobs/submit", {"config": job}, {"Idempotency-Key": key})
        job_id = str(submitted.get("job_id", ""))
        is_finished = False
        try:
            rollout = self._wait_for_rollout(job_id)
            is_finished = True
        finally:
            if not is_finished:  # an interrupted episode leaves no trial behind
                self._cancel_job(job_id)
        return self._read_reward(rollout)

    def _build_job(self, task: Mapping[str, Any], client: AgentClient) -> dict[str, Any]:
        agent = {
            "name": self._agent_name,
            "model_name": f"openai/{client.model}",
            "base_url": client.base_url,
            "model_api_key_name": _KEY_VARIABLE,
            "env": {_KEY_VARIABLE: client.api_key},
            "kwargs": self._agent_options,
        }
        return {
            "n_attempts": 1,
            "n_concurrent_trials": 1,
            "retry": {"max_retries": 0},
            **self._job_options,
            "environment": self._environment_config,
            "agents": [agent],
            "tasks": [{name: task[name] for name in _TASK_FIELDS if task.get(name)}],
        }

    def _wait_for_rollout(self, job_id: str) -> dict[str, Any]:
        query = urlencode({"job_ids": job_id})
        failures = 0
        while True:
            try:
                listed = self._request(f"/rollouts?{query}")
                failures = 0
            except AgentFailed:
                failures += 1
                if failures == _MAX_FAILED_POLLS:
                    raise
                listed = {}
            items = listed.get("items") or []
            if items and items[0].get("state") in _END_STATES:
                return dict(self._request(f"/rollouts/{items[0]['id']}").get("rollout") or {})
            time.sleep(self._poll_s)

    def _read_reward(self, rollout: Mapping[str, Any]) -> dict[str, Any]:
        rewards = {
            name: value
            for name, value in (rollout.get("rewards") or {}).items()
            if isinstance(value, int | float) and not isinstance(value, bool)
        }
        if not rewards:
            error = ((rollout.get("result") or {}).get("exception_info") or {}).get(
                "exception_message", ""
            )
            kind = rollout.get("error_type") or rollout.get("state") or "no error"
            raise AgentFailed(
                f"the trial has no valid reward ({kind}{': ' * bool(error)}{error})"[:500]
            )
        name = self._reward_name or ("reward" if "reward" in rewards else next(iter(rewards)))
        if name not in rewards or (not self._reward_name and name != "reward" and len(rewards) > 1):
            raise AgentFailed(
                f"options.reward_name: the verifier gave {', '.join(sorted(rewards))}; name the one that counts"
            )
        if not math.isfinite(rewards[name]):
            raise AgentFailed(f"the reward '{name}' is {rewards[name]}")
        others = {f"harbor/{other}": value for other, value in rewards.items()}
        return {"reward": float(rewards[name]), **others}

    def _cancel_job(self, job_id: str) -> None:
        try:
            self._request(f"/jobs/{job_id}/cancel", {"force": True})
        except AgentFailed:
            return  # the reason why the episode was interrupted counts

    def _request(
        self, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        all_headers = dict(headers or {})
        if self._key_variable:
            all_headers["Authorization"] = f"Bearer {os.environ.get(self._key_variable, '')}"
        try:
            answer = fetch_json(self._url + path, body, timeout_s=30.0, headers=all_headers)
        except RequestError as error:
            raise AgentFailed(f"Harbor server: {error}") from error
        if not isinstance(answer, dict):
            raise AgentFailed(f"Harbor server: {path} answered {answer!r:.200}")
        return answer
