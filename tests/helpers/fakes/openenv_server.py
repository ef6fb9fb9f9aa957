"""A stand-in for a server of OpenEnv 0.10: `python openenv_server.py PORT KIND [MAX_SESSIONS]`.

It speaks the protocol of `openenv.core.env_server.http_server` as observed with version 0.10.0: /health, /schema and
the messages of /ws. KIND is guess (text actions), move (actions of two fields), tools (MCP tools) or drift (results
that do not depend on the seed alone).
"""

from __future__ import annotations

import itertools
import json
import random
import sys

import uvicorn
from fastapi import FastAPI, WebSocket, WebSocketDisconnect
from pydantic import BaseModel, ConfigDict, ValidationError


class GuessAction(BaseModel):
    model_config = ConfigDict(extra="forbid")
    metadata: dict = {}
    message: str


class MoveAction(BaseModel):
    """Move by two numbers."""

    model_config = ConfigDict(extra="forbid")
    metadata: dict = {}
    dx: int
    dy: int = 0


class CallToolAction(BaseModel):
    model_config = ConfigDict(extra="forbid")
    metadata: dict = {}
    type: str = "call_tool"
    tool_name: str
    arguments: dict = {}


ACTIONS = {"guess": GuessAction, "drift": GuessAction, "move": MoveAction, "tools": CallToolAction}
INTEGER = {"type": "integer"}
TOOLS = [
    {
        "name": "add",
        "description": "Add two numbers.",
        "inputSchema": {
            "type": "object",
            "properties": {"a": INTEGER, "b": {"default": 1, **INTEGER}},
            "required": ["a"],
        },
    }
]
_draws = itertools.count()


class Game:
    """One environment instance."""

    def __init__(self, kind: str) -> None:
        self.kind, self.number, self.tries = kind, None, 0

    def reset(self, seed=None, high=9, **_) -> dict:
        self.number = random.Random(seed).randint(0, int(high))
        self.tries = 0
        if self.kind == "tools":
            metadata = {"message": f"add {seed} and 1"}
            return {"observation": {"metadata": metadata}, "reward": 0.0, "done": False}
        text = f"Game {seed}: guess a number from 0 to {high}."
        return self.observe(text, None, high < 0)

    def observe(self, text: str, reward: float | None, done: bool, **metadata) -> dict:
        answer = {
            "observation": {"metadata": metadata, "text": text, "tries": self.tries},
            "reward": reward,
            "done": done,
        }
        return {**answer, "metadata": metadata} if metadata else answer

    def step(self, action) -> dict:
        self.tries += 1
        if self.kind == "move":
            return self.observe(f"at {action.dx} {action.dy}", float(action.dx), self.tries == 2)
        if self.kind == "tools":
            return self.call(action)
        if action.message == "crash":
            raise RuntimeError("the game broke")
        if action.message == "nan":
            return self.observe("odd", "much", False)
        if self.kind == "drift":
            return self.observe(f"draw {next(_draws)}", 0.0, False)
        if action.message == str(self.number):
            return self.observe("right", 1.0, True, number=self.number)
        if action.message == "give up":
            return self.observe("over", 0.5, True, success=True)
        return self.observe("wrong", -0.25, False)

    def call(self, action) -> dict:
        result, error = None, None
        if action.tool_name != "add":
            message = f"Unknown tool: '{action.tool_name}'"
            error = {"error_type": "tool_not_found", "message": message}
        elif action.arguments["a"] < 0:
            message = "Error calling tool 'add': a is negative"
            error = {"error_type": "execution_error", "message": message}
        else:
            total = action.arguments["a"] + action.arguments.get("b", 1)
            content = [{"type": "text", "text": str(total), "annotations": None}]
            result = {"content": content, "data": total, "is_error": False}
        observation = {
            "metadata": {},
            "tool_name": action.tool_name,
            "result": result,
            "error": error,
        }
        return {"observation": observation, "reward": None, "done": False}


def build_app(kind: str, max_sessions: int) -> FastAPI:
    app, sessions = FastAPI(), set()

    @app.get("/health")
    def health() -> dict:
        return {"status": "healthy"}

    @app.get("/schema")
    def schema() -> dict:
        return {"action": ACTIONS[kind].model_json_schema(), "observation": {}, "state": {}}

    @app.websocket("/ws")
    async def serve(socket: WebSocket) -> None:
        await socket.accept()
        if len(sessions) >= max_sessions:
            counts = {"active_sessions": len(sessions), "max_sessions": max_sessions}
            message = f"Server at capacity: {len(sessions)}/{max_sessions} sessions active."
            data = {"message": message, "code": "CAPACITY_REACHED", **counts}
            await socket.send_text(json.dumps({"type": "error", "data": data}))
            await socket.close()
            return
        game = Game(kind)
        sessions.add(game)
        try:
            while True:
                await socket.send_text(json.dumps(answer(game, await socket.receive_json())))
        except WebSocketDisconnect:
            pass
        finally:
            sessions.discard(game)

    return app


def answer(game: Game, message: dict) -> dict:
    kind, data = message["type"], message.get("data", {})
    try:
        if kind == "reset":
            return {"type": "observation", "data": game.reset(**data)}
        if kind == "step":
            action = ACTIONS[game.kind].model_validate(data)
            return {"type": "observation", "data": game.step(action)}
        if kind == "state":
            return {"type": "state", "data": {"episode_id": None, "step_count": game.tries}}
        if kind == "mcp" and data["method"] == "tools/list":
            result = {"jsonrpc": "2.0", "id": data["id"], "result": {"tools": TOOLS}}
            return {"type": "mcp", "data": result}
    except ValidationError as error:
        errors = [{"loc": list(e["loc"]), "msg": e["msg"]} for e in error.errors()]
        data = {"message": "Invalid message", "code": "VALIDATION_ERROR", "errors": errors}
        return {"type": "error", "data": data}
    except Exception as error:
        return {"type": "error", "data": {"message": str(error), "code": "EXECUTION_ERROR"}}
    return {"type": "error", "data": {"message": "Unknown message type", "code": "UNKNOWN_TYPE"}}


if __name__ == "__main__":
    port, kind, *rest = sys.argv[1:]
    if kind == "broken":
        sys.exit("ModuleNotFoundError: no game here")
    app = build_app(kind, int(rest[0]) if rest else 64)
    uvicorn.run(app, host="127.0.0.1", port=int(port), log_level="warning")
