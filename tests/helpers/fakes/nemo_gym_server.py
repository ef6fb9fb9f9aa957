"""Stand-ins of NeMo Gym's resources servers, written from its protocol (version 0.7.0, which needs Python 3.13).

`counter` is the package's example_session_state_mgmt: tools, sessions by cookie, /verify. `dialogue` is its
example_multi_turn_gymnasium: /reset and /step. `start_nemo_gym(kind)` serves one on a free port of this machine.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI, Request, Response

COOKIE = "StatefulCounterResourcesServer___"


def find_session(request: Request, response: Response) -> str:
    """Return the session of a request, from its cookie; a new one otherwise, set as the package's middleware does."""
    session = request.cookies.get(COOKIE) or str(uuid.uuid4())
    response.set_cookie(COOKIE, session, httponly=True, samesite="lax", path="/")
    return session


def build_counter_app() -> FastAPI:
    app, counters = FastAPI(), {}
    app.state.verified = []

    @app.post("/seed_session")
    async def seed_session(request: Request, response: Response) -> dict:
        body = await request.json()
        counters[find_session(request, response)] = body["initial_count"]
        return {}

    @app.post("/increment_counter")
    async def increment_counter(request: Request, response: Response) -> dict:
        body = await request.json()
        if "count" not in body:
            response.status_code = 422
            return {"detail": [{"loc": ["body", "count"], "msg": "Field required"}]}
        session = find_session(request, response)
        counters[session] = counters.get(session, 0) + body["count"]
        return {"success": True}

    @app.post("/get_counter_value")
    async def get_counter_value(request: Request, response: Response) -> dict:
        return {"count": counters.get(find_session(request, response), 0)}

    @app.post("/verify")
    async def verify(request: Request, response: Response) -> dict:
        body = await request.json()
        app.state.verified.append(body)
        counter = counters.get(find_session(request, response))
        result = {**body, "reward": float(counter == body["expected_count"])}
        text = body["response"]["output"][-1].get("content", [{}])[0].get("text", "")
        if text == "mask":
            result |= {"mask_sample": True, "failure_reason": "the judge is away"}
        if text == "nan":
            result["reward"] = None
        return result

    return app


def build_dialogue_app() -> FastAPI:
    app, turns = FastAPI(), {}

    @app.post("/reset")
    async def reset(request: Request, response: Response) -> dict:
        turns[find_session(request, response)] = 0
        return {"observation": "hello", "info": {}}

    @app.post("/step")
    async def step(request: Request, response: Response) -> dict:
        body, session = await request.json(), find_session(request, response)
        turn, metadata = turns[session], body["verifier_metadata"]
        nothing = {"observation": None, "reward": 0.0, "terminated": False, "truncated": False}
        if turn < len(metadata["follow_ups"]):
            turns[session] += 1
            return {**nothing, "observation": metadata["follow_ups"][turn], "info": {"turn": turn}}
        text = body["response"]["output"][0]["content"][0]["text"]
        reward = float(metadata["expected_answer"] in text)
        return {**nothing, "reward": reward, "terminated": True, "info": {}}

    return app


@contextmanager
def serve_app(app: FastAPI) -> Iterator[str]:
    """Serve an app on a free port; yield its address."""
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(10)
