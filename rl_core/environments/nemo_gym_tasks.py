"""`nemo_gym`: tasks of a NeMo Gym resources server, over HTTP.

    environment: {name: nemo_gym, options: {url: "http://127.0.0.1:8000", path: resources_servers/X/data/train.jsonl}}

The rows of the file are the package's: `responses_create_params` with `input` and `tools`, and what the server's
verifier reads. The policy plays the part of the package's agent:

    simple agent     /seed_session, a POST to /TOOL for each call, and /verify after a reply without a call
    gymnasium agent  /reset, and /step for each reply

Each episode has a session of its own (cookies). Source: NeMo Gym 0.7.0, `responses_api_agents/simple_agent` and
`gymnasium_agent`, `nemo_gym/base_resources_server.py`.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from rl_core.data.files import BadRow, read_rows
from rl_core.data.model_text import strip_thought
from rl_core.environments.environment import (
    HELDOUT_START,
    Environment,
    Episode,
    Step,
    compute_content_digest,
    is_heldout,
)
from rl_core.environments.tools import MAX_CALLS, Tool, Toolset
from rl_core.errors import DataError, EnvironmentFault, SettingsError, ToolMisuse
from rl_core.json_client import JsonConnections, RequestError
from rl_core.types import Message, ToolCall

_LEVEL = "all"
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_AgentKind = Literal["simple", "gymnasium"]


class NemoGymEpisode(Episode):
    """One row of the file, in a session of the server."""

    def __init__(
        self, environment: NemoGym, seed: int, row: Mapping[str, Any], tools: Toolset
    ) -> None:
        super().__init__(seed, _LEVEL)
        self._environment, self._tools, self._task = environment, tools, dict(row)
        self._messages = read_input_messages(row["responses_create_params"])
        self.prompt = self._messages[-1]["content"]
        self.kind = environment.name
        self.hidden = json.dumps(self._task, sort_keys=True, default=str)
        self._session: JsonConnections | None = None
        self._output: list[dict[str, Any]] = []  # items of the response so far
        self._num_replies = 0

    def reset(self) -> list[Message]:
        """Begin a session; return the row's messages. Raises: EnvironmentFault."""
        self._session = self._environment.open_session()
        messages = list(self._messages)
        if self._environment.find_agent_kind() == "gymnasium":
            observation = self._post("/reset", self._task).get("observation")
            if observation:
                messages.append(Message(role="user", content=str(observation)))
        else:
            self._post("/seed_session", self._task)
        if not messages or messages[-1]["role"] == "assistant":
            raise EnvironmentFault("NeMo Gym: the task ends without a message to reply to")
        self.prompt = messages[-1]["content"]
        instructions = self._environment.describe_tools(self._tools)
        if not instructions:
            return messages
        system = [messages.pop(0)["content"]] if messages[0]["role"] == "system" else []
        return [Message(role="system", content="\n\n".join([*system, instructions])), *messages]

    def act(self, text: str) -> Step:
        """Run the calls of a reply, or finish with one without a call."""
        try:
            calls = self._tools.parse_all(text, MAX_CALLS)
        except ToolMisuse as error:
            return Step([Message(role="user", content=f"error: {error}")], is_error=True)
        self._num_replies += 1
        new_items = self._build_items(text, calls)
        self._output += new_items
        if self._environment.find_agent_kind() == "gymnasium":
            return self._step(text, calls, new_items)
        if not calls:
            return self._verify(text)
        messages, failed = [], []
        for number, (call, item) in enumerate(zip(calls, new_items[-len(calls) :], strict=True)):
            output, has_failed = self._call_tool(call)
            failed += [number] * has_failed
            messages.append(Message(role="tool", content=output))
            self._add_call_output(item["call_id"], output)
        info = {"failed_calls": failed} if failed else {}
        return Step(
            messages,
            tool_call=calls[0],
            more_calls=list(calls[1:]),
            is_error=bool(failed),
            info=info,
        )

    def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            self._session.close()

    def _verify(self, text: str) -> Step:
        result = self._post(
            "/verify", {**self._task, "response": self._build_response(self._output)}
        )
        reward = _read_number(result, "reward")
        if result.get("mask_sample"):  # the server: the reward is no measurement of the policy
            reason = result.get("failure_reason") or result.get("failure_kind") or "no reason"
            raise EnvironmentFault(f"NeMo Gym: the server masks the sample: {reason}")
        step = self._end(Step(reward=reward, terminated=True), text)
        components = result.get("reward_components")
        step.info = {"reward_components": components} if isinstance(components, Mapping) else {}
        return step

    def _step(self, text: str, calls: Sequence[ToolCall], items: list[dict[str, Any]]) -> Step:
        result = self._post("/step", {**self._task, "response": self._build_response(items)})
        reward = _read_number(result, "reward")
        info = result.get("info") or {}
        step = Step(
            reward=reward,
            terminated=bool(result.get("terminated")),
            truncated=bool(result.get("truncated")) and not result.get("terminated"),
            tool_call=calls[0] if calls else None,
            more_calls=list(calls[1:]),
            info={name: value for name, value in info.items() if name != "tool_outputs"},
        )
        if step.terminated or step.truncated:
            return self._end(step, text)
        for output in info.get("tool_outputs", ()):
            self._add_call_output(output.get("call_id", ""), str(output.get("output", "")))
            step.messages.append(Message(role="tool", content=str(output.get("output", ""))))
        if result.get("observation"):
            observation = str(result["observation"])
            self._output.append({"role": "user", "content": observation, "type": "message"})
            step.messages.append(Message(role="user", content=observation))
        if not step.messages:
            raise EnvironmentFault(
                "NeMo Gym: /step neither ended the episode nor gave an observation"
            )
        return step

    def _end(self, step: Step, text: str) -> Step:
        step.answer = strip_thought(text).strip()
        step.success = step.reward >= self._environment.success_at
        return step

    def _call_tool(self, call: ToolCall) -> tuple[str, bool]:
        """Call a tool; the server's errors are read by the policy."""
        try:
            result = self._connect().post_json(
                f"/{call.name}", call.arguments, self._environment.timeout_s
            )
        except RequestError as error:
            if not error.status:
                raise EnvironmentFault(f"NeMo Gym: {error}") from error
            return f"error: {error.reason}"[:2000], True
        return (result if isinstance(result, str) else json.dumps(result)), False

    def _post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        try:
            result = self._connect().post_json(path, body, self._environment.timeout_s)
        except RequestError as error:
            raise EnvironmentFault(f"NeMo Gym: {error}") from error
        if result is None:
            return {}
        if not isinstance(result, dict):
            raise EnvironmentFault(f"NeMo Gym: {path} answered {result!r:.200}, not an object")
        return result

    def _connect(self) -> JsonConnections:
        if self._session is None:
            raise EnvironmentFault("NeMo Gym: the episode has no session; reset it first")
        return self._session

    def _build_items(self, text: str, calls: Sequence[ToolCall]) -> list[dict[str, Any]]:
        """Build the items of OpenAI's Responses API for a reply: a message, or calls."""
        if calls:
            return [
                {
                    "type": "function_call",
                    "id": f"fc_{self._num_replies}_{number}",
                    "call_id": f"call_{self._num_replies}_{number}",
                    "name": call.name,
                    "arguments": json.dumps(call.arguments),
                    "status": "completed",
                }
                for number, call in enumerate(calls)
            ]
        content = {"type": "output_text", "text": strip_thought(text).strip(), "annotations": []}
        return [
            {
                "type": "message",
                "id": f"msg_{self._num_replies}",
                "role": "assistant",
                "status": "completed",
                "content": [content],
            }
        ]

    def _add_call_output(self, call_id: str, output: str) -> None:
        self._output.append({"type": "function_call_output", "call_id": call_id, "output": output})

    def _build_response(self, output: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"resp_{self.seed}",
            "created_at": 0.0,
            "model": "policy",
            "object": "response",
            "output": output,
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": self._task["responses_create_params"].get("tools") or [],
        }


class NemoGym(Environment):
    """Rows of a file of NeMo Gym, split by content; seeds index the rows of each split."""

    name = "nemo_gym"
    levels = (_LEVEL,)
    splits_itself = True

    def __init__(
        self,
        data: Path | None = None,
        *,
        url: str,
        path: str,
        heldout: float = 0.1,
        agent: Literal["auto", "simple", "gymnasium"] = "auto",
        success_at: float = 1.0,
        timeout_s: float = 60.0,
        describe_tools: bool = True,
    ) -> None:
        """Read the rows; nothing is requested yet.

        Args:
            url: address of a running resources server.
            path: JSONL file of its rows.
            heldout: share of the rows, split by content, held out from training.
            agent: the package's agent that the policy replaces; auto = by the server's routes.
            success_at: least reward of a success, of the last step.
            timeout_s: time limit of a request.
            describe_tools: False omits the tools from the system message (with model.native_tools).
        Raises: SettingsError; DataError for a row that is none of NeMo Gym.
        """
        super().__init__(data)
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise SettingsError(f"options.url: '{url}' must begin with http:// or https://")
        if not 0 < heldout < 1:
            raise SettingsError(f"options.heldout: {heldout} must be between 0 and 1")
        if not 0 < timeout_s < 1e6:
            raise SettingsError(
                f"options.timeout_s: {timeout_s} must be a number of seconds above 0"
            )
        self._url, self.timeout_s, self.success_at = url.rstrip("/"), timeout_s, success_at
        self._describe_tools = describe_tools
        self._agent_kind: _AgentKind | None = None if agent == "auto" else agent
        self._lock = threading.Lock()
        self._rows = _read_splits(Path(path).expanduser(), heldout)
        schemas = {
            json.dumps(row["responses_create_params"].get("tools") or [], sort_keys=True)
            for rows in self._rows.values()
            for row in rows
        }
        self._tools = {text: _build_toolset(json.loads(text)) for text in schemas}

    @property
    def tools(self) -> Toolset:
        """Tools of all rows; none if rows differ in them, which are then described row by row."""
        return next(iter(self._tools.values())) if len(self._tools) == 1 else Toolset()

    def seeds(self, split: str) -> range:
        """Return one seed per row."""
        start = 0 if split == "train" else HELDOUT_START
        return range(start, start + len(self._rows[split]))

    def episode(self, seed: int, level: str) -> NemoGymEpisode:
        """Return the episode of a row. Raises: SettingsError if it does not exist."""
        self.check_level(level)
        split, index = (
            ("heldout", seed - HELDOUT_START) if seed >= HELDOUT_START else ("train", seed)
        )
        if not 0 <= index < len(self._rows[split]):
            raise SettingsError(f"seed {seed}: there are {len(self._rows[split])} {split} rows")
        row = self._rows[split][index]
        tools = json.dumps(row["responses_create_params"].get("tools") or [], sort_keys=True)
        return NemoGymEpisode(self, seed, row, self._tools[tools])

    def open_session(self) -> JsonConnections:
        """Return connections with cookies of their own."""
        return JsonConnections(self._url, stores_cookies=True)

    def describe_tools(self, tools: Toolset) -> str:
        """Describe a row's tools for the system message; "" without any, or if the template does."""
        is_described = self._describe_tools or len(self._tools) > 1
        return tools.instructions("hermes", MAX_CALLS) if tools.tools and is_described else ""

    def find_agent_kind(self) -> _AgentKind:
        """Return which agent the server is made for, by its routes. Raises: EnvironmentFault."""
        with self._lock:
            if self._agent_kind is None:
                try:
                    schema = JsonConnections(self._url).get_json("/openapi.json", self.timeout_s)
                except RequestError as error:
                    raise EnvironmentFault(f"NeMo Gym: {error}") from error
                routes = schema.get("paths", {}) if isinstance(schema, dict) else {}
                if "/step" in routes:
                    self._agent_kind = "gymnasium"
                elif "/verify" in routes:
                    self._agent_kind = "simple"
                else:
                    raise EnvironmentFault(
                        f"NeMo Gym: {self._url} has neither /verify nor /step, so it is no resources server; "
                        f"its routes: {', '.join(sorted(routes)) or '(none)'}"
                    )
            return self._agent_kind


def read_input_messages(parameters: Mapping[str, Any]) -> list[Message]:
    """Read the messages of `responses_create_params`: its instructions and its input, a text or messages.

    Raises: DataError for an item that is no message of text.
    """
    messages = []
    if parameters.get("instructions"):
        messages.append(Message(role="system", content=str(parameters["instructions"])))
    items = parameters.get("input")
    if isinstance(items, str):
        return [*messages, Message(role="user", content=items)]
    if not isinstance(items, list) or not items:
        raise DataError("responses_create_params.input is neither a text nor a list of messages")
    for item in items:
        role = _ROLES.get(item.get("role", "")) if isinstance(item, Mapping) else None
        if role is None:
            raise DataError(
                f"responses_create_params.input has an item that is no message: {item!r:.120}"
            )
        content = item.get("content")
        if isinstance(content, list):
            texts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
            is_text = all(isinstance(text, str) for text in texts)
            content = "".join(map(str, texts)) if is_text else None
        if not isinstance(content, str):
            raise DataError(
                f"responses_create_params.input has content other than text: {item!r:.120}"
            )
        messages.append(Message(role=role, content=content))
    return messages


def _read_splits(path: Path, heldout: float) -> dict[str, list[dict[str, Any]]]:
    """Read the rows and split them by content. Raises: SettingsError, DataError."""
    if not path.is_file():
        raise SettingsError(f"options.path: no such file: {path.absolute()}")
    splits: dict[str, list[dict[str, Any]]] = {"train": [], "heldout": []}
    for number, row in read_rows(path, None):
        if isinstance(row, BadRow):
            raise DataError(f"{path}:{number}: {row}")
        parameters = row.get("responses_create_params")
        try:
            if not isinstance(parameters, dict):
                raise DataError("the row has no responses_create_params, so it is none of NeMo Gym")
            read_input_messages(parameters)
            _build_toolset(parameters.get("tools") or [])
        except (DataError, SettingsError) as error:
            raise DataError(f"{path}:{number}: {error}") from error
        split = "heldout" if is_heldout(compute_content_digest(row), heldout) else "train"
        splits[split].append(row)
    for split, rows in splits.items():
        if not rows:
            raise SettingsError(
                f"options.heldout: {heldout} leaves no row of {path} for {split}; give more rows or another share"
            )
    return splits


def _build_toolset(schemas: Sequence[Mapping[str, Any]]) -> Toolset:
    """Build a row's tools, for descriptions and for reading calls. Raises: DataError."""
    tools = []
    for schema in schemas:
        if (
            not isinstance(schema, Mapping)
            or schema.get("type") != "function"
            or not schema.get("name")
        ):
            raise DataError(
                f"responses_create_params.tools has an entry that is no function: {schema!r:.120}"
            )
        parameters = schema.get("parameters") or {}
        properties, required = parameters.get("properties", {}), parameters.get("required", ())
        tools.append(
            Tool(
                schema["name"],
                schema.get("description") or schema["name"],
                properties,
                _refuse_local_call,
                optional=tuple(name for name in properties if name not in required),
            )
        )
    return Toolset(tools)


def _read_number(result: Mapping[str, Any], name: str) -> float:
    value = result.get(name, 0.0)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise EnvironmentFault(f"NeMo Gym: {name} is {value!r:.80}, not a number")
    return float(value)


def _refuse_local_call(*_: Any, **__: Any) -> str:
    raise EnvironmentFault("tools of a NeMo Gym task are called by its server")
