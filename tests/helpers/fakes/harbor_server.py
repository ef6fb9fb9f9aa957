"""A stand-in of Harbor's server (`harbor server`), written from the protocol of version 0.26.0.

It takes jobs of one trial and runs its agent, two chat requests, in a thread; no sandbox is started. The task decides
the result: `error` fails, `slow` never ends, `two` gives two rewards, `free` none; else the reward is the number of
words of the second reply.
"""

from __future__ import annotations

import json
import threading
import urllib.request
import uuid

from fastapi import FastAPI, Header, HTTPException

API_VERSION = "2026-10-30"


def ask_model(agent: dict, messages: list[dict]) -> str:
    body = {"model": agent["model_name"].removeprefix("openai/"), "messages": messages}
    request = urllib.request.Request(
        agent["base_url"] + "/chat/completions", json.dumps({**body, "max_tokens": 8}).encode()
    )
    key = agent["env"][agent["model_api_key_name"]]
    request.add_header("Authorization", f"Bearer {key}")
    with urllib.request.urlopen(request) as response:
        return json.load(response)["choices"][0]["message"]["content"]


def build_harbor_app(key: str = "") -> FastAPI:
    app = FastAPI()
    jobs: dict[str, dict] = {}
    app.state.jobs = jobs

    def check_key(authorization: str | None) -> None:
        if key and authorization != f"Bearer {key}":
            raise HTTPException(401, "A valid bearer token is required.")

    def run_trial(job: dict) -> None:
        rollout, agent = job["rollout"], job["config"]["agents"][0]
        task = job["config"]["tasks"][0]
        name = (task.get("path") or task["name"]).rpartition("/")[2]
        rollout |= {"state": "running", "phase": "agent_execution"}
        if name == "slow":
            return
        messages = [{"role": "user", "content": f"solve {name}"}]
        messages.append({"role": "assistant", "content": ask_model(agent, messages)})
        messages.append({"role": "user", "content": "check it"})
        words = len(ask_model(agent, messages).split())
        rewards = {"error": None, "free": None, "two": {"tests": 1, "style": 0.5}}
        rollout |= {"state": "finished", "phase": None}
        rollout["rewards"] = rewards.get(name, {"reward": words})
        if name == "error":
            rollout["error_type"] = "VerifierTimeoutError"
            message = "the verifier did not end within 600 s"
            rollout["result"] = {"exception_info": {"exception_message": message}}

    @app.post("/jobs/submit")
    def submit(body: dict, authorization: str | None = Header(None)) -> dict:
        check_key(authorization)
        config = body["config"]
        if len(config["agents"]) != 1 or len(config["tasks"]) != 1:
            raise HTTPException(400, "one trial is expected")
        rollout = {"id": str(uuid.uuid4()), "state": "queued", "rewards": None, "error_type": None}
        job = {"id": str(uuid.uuid4()), "config": config, "rollout": rollout, "cancelled": False}
        jobs[job["id"]] = job
        threading.Thread(target=run_trial, args=(job,), daemon=True).start()
        return {"job_id": job["id"]}

    @app.get("/rollouts")
    def list_rollouts(job_ids: str, authorization: str | None = Header(None)) -> dict:
        check_key(authorization)
        rollout = jobs[job_ids]["rollout"]
        summary = {name: value for name, value in rollout.items() if name != "result"}
        return {"items": [summary], "total": 1, "next_page_token": ""}

    @app.get("/rollouts/{rollout_id}")
    def get_rollout(rollout_id: str) -> dict:
        rollouts = [job["rollout"] for job in jobs.values()]
        return {"rollout": next(rollout for rollout in rollouts if rollout["id"] == rollout_id)}

    @app.post("/jobs/{job_id}/cancel")
    def cancel(job_id: str, body: dict) -> dict:
        jobs[job_id]["cancelled"] = body["force"]
        return {"job": {"id": job_id}}

    return app
