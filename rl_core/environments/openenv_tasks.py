"""`openenv`: environments behind an OpenEnv server, which has Python and packages of its own.

    environment: {name: openenv, options: {url: "http://127.0.0.1:8000"}}
    environment: {name: openenv, options: {command: ".venv-game/bin/uvicorn game.server.app:app --port {port}"}}

    user    the observation of reset(seed)
    policy  an action: text, a call of a tool, or the fields of the action as a call
    user    the observation, and so on until it is done

The server's schema (GET /schema) says what an action is. One text field: the reply is the action. One number or choice:
its last word is. Several fields: they are the arguments of a tool `act`. MCP environments: their tools, and a reply
without a call ends the episode. Source: OpenEnv 0.10, see `openenv_sessions`.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from rl_core.data.model_text import strip_thought
from rl_core.environments.environment import Environment, Episode, Step
from rl_core.environments.openenv_sessions import OpenEnvServer, OpenEnvSession, StepRefused
from rl_core.environments.tools import Tool, Toolset
from rl_core.errors import EnvironmentFault, SettingsError, ToolMisuse, suggest_name
from rl_core.types import Message, ToolCall

_ACT_TOOL = "act"
_HIDDEN_FIELDS = ("done", "reward", "metadata")
_SIMPLE_TYPES = ("string", "integer", "number", "boolean")
_MAX_TEXT = 100_000  # characters of an observation


class OpenEnvEpisode(Episode):
    """One session; its reward is the sum of its observations' rewards."""

    def __init__(self, environment: OpenEnv, seed: int, level: str) -> None:
        super().__init__(seed, level)
        self._environment = environment
        self._session = environment.open_session(seed, level)
        self._pending_reward = 0.0  # of the reset, given with the first step
        self._total, self._num_steps = 0.0, 0

    def reset(self) -> list[Message]:
        """Return the system message, if any, and the first observation."""
        environment = self._environment
        answer = self._session.begin()
        if answer.get("done"):
            raise EnvironmentFault("OpenEnv server: the episode is done before the first action")
        self._pending_reward = _read_reward(answer)
        self.prompt = environment.render_observation(answer)
        system = environment.system_message
        messages = [Message(role="system", content=system)] if system else []
        return [*messages, Message(role="user", content=self.prompt)]

    def act(self, text: str) -> Step:
        """Execute an action; one that the server refuses is misuse."""
        environment = self._environment
        try:
            action, call = environment.parse_action(text)
        except ToolMisuse as error:
            return self._refuse(str(error))
        if action is None:  # a reply without a call
            return self._end(Step(reward=self._take_reward(0.0)), text)
        try:
            answer = self._session.step(action)
        except StepRefused as error:
            if error.code != "VALIDATION_ERROR" and not environment.forgives_errors:
                raise EnvironmentFault(
                    f"OpenEnv server: the environment failed on an action: {error}; if its actions may be illegal: "
                    "options.on_error: misuse"
                ) from error
            return self._refuse(str(error), call)
        return self._observe(answer, call, text)

    def close(self) -> None:
        """Close the session."""
        self._session.close()

    def _observe(self, answer: Mapping[str, Any], call: ToolCall | None, text: str) -> Step:
        environment, observation = self._environment, answer["observation"]
        self._num_steps += 1
        metadata = answer.get("metadata") or observation.get("metadata") or {}
        step = Step(
            reward=self._take_reward(_read_reward(answer)),
            tool_call=call,
            is_error=bool(observation.get("error")) and call is not None,
            info=dict(metadata),
        )
        if answer.get("done"):
            said = [
                place[name]
                for place in (observation, metadata)
                for name in ("success", "is_success")
                if isinstance(place.get(name), bool)
            ]
            return self._end(step, text, said[0] if said else None)
        if environment.max_steps is not None and self._num_steps >= environment.max_steps:
            step.truncated, step.success = True, False
            return step
        content = environment.render_observation(answer)
        step.messages = [Message(role="tool" if call is not None else "user", content=content)]
        return step

    def _take_reward(self, reward: float) -> float:
        """Return a step's reward, the reset's included; add it to the total."""
        reward, self._pending_reward = reward + self._pending_reward, 0.0
        self._total += reward
        return reward

    def _end(self, step: Step, text: str, success: bool | None = None) -> Step:
        step.terminated, step.answer = True, strip_thought(text).strip()
        is_enough = self._total >= self._environment.success_at
        step.success = is_enough if success is None else success
        return step

    def _refuse(self, problem: str, call: ToolCall | None = None) -> Step:
        role = "tool" if call is not None else "user"
        return Step(
            [Message(role=role, content=f"error: {problem}")], tool_call=call, is_error=True
        )


class OpenEnv(Environment):
    """Episodes of one server; a seed is passed to `reset`."""

    name = "openenv"

    def __init__(
        self,
        data: Path | None = None,
        *,
        url: str = "",
        command: str = "",
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        reset: dict[str, Any] | None = None,
        levels: dict[str, dict[str, Any]] | None = None,
        action: str | None = None,
        fields: list[str] | None = None,
        instructions: str = "",
        success_at: float = 1.0,
        max_steps: int | None = None,
        on_error: Literal["fail", "misuse"] = "fail",
        max_sessions: int | None = None,
        timeout_s: float = 60.0,
        start_timeout_s: float = 120.0,
        describe_tools: bool = True,
    ) -> None:
        """Set the server and how its actions and observations read; nothing is started or requested yet.

        Args:
            url: address of a running server.
            command: command line that starts one, with {port} in it; its Python may be that of another environment.
                It is started at the first use, on a free port of this machine, and ends with this process.
            cwd: working folder of the command; default: the current one.
            env: environment variables of the command, besides PATH and the like.
            reset: further parameters of the reset.
            levels: level -> further parameters of the reset; default: one level, 'default'.
            action: field of the action that the reply fills; default: by the server's schema.
            fields: fields of the observation to show; default: all but done, reward, metadata and empty ones.
            instructions: system message.
            success_at: least sum of rewards of a success, unless the last observation says `success`.
            max_steps: truncation after this many actions.
            on_error: action on which the environment raises: fail = the episode failed, left out and counted; misuse =
                the policy reads the error and continues.
            max_sessions: most episodes at the server at a time; default: as many as it admits. Further ones are
                replayed when their turn comes.
            timeout_s: time limit of a request, and for a session to become free.
            start_timeout_s: time limit of the server's start.
            describe_tools: False omits the tools from the system message (with model.native_tools).
        Raises: SettingsError for options that contradict each other or are out of range.
        """
        super().__init__(data)
        if max_steps is not None and max_steps < 1:
            raise SettingsError(f"options.max_steps: {max_steps} must be at least 1")
        self._by_level = levels or {"default": {}}
        for place, values in (("reset", reset or {}), *self._by_level.items()):
            if "seed" in values:
                raise SettingsError(f"options: '{place}' sets the seed, which the episodes set")
        self.levels = tuple(self._by_level)
        self._reset, self._fields = reset or {}, fields
        self._action_field, self._instructions = action, instructions
        self._describe_tools = describe_tools
        self.success_at, self.max_steps = success_at, max_steps
        self.forgives_errors = on_error == "misuse"
        self._server = OpenEnvServer(
            url,
            command,
            cwd=cwd,
            variables=env or {},
            max_sessions=max_sessions,
            timeout_s=timeout_s,
            start_timeout_s=start_timeout_s,
        )

    def episode(self, seed: int, level: str) -> OpenEnvEpisode:
        """Return the episode of a seed, which is passed to `reset`."""
        self.check_level(level)
        return OpenEnvEpisode(self, seed, level)

    def content(self, seed: int, level: str) -> Any:
        """Return the first observation; what later ones depend on is unknown."""
        episode = self.episode(seed, level)
        try:
            return [[message["role"], message["content"]] for message in episode.reset()]
        finally:
            episode.close()

    def open_session(self, seed: int, level: str) -> OpenEnvSession:
        """Return a session of the server that begins with this seed."""
        return self._server.open_session({**self._reset, **self._by_level[level], "seed": seed})

    @functools.cached_property
    def tools(self) -> Toolset:
        """Tools of an MCP environment, or `act` for actions of several fields. Raises: EnvironmentFault."""
        if self._is_mcp:
            return Toolset(_build_tool(schema) for schema in self._server.list_tools())
        if self._text_field is not None:
            return Toolset()
        description = self._schema.get("description") or "Execute an action."
        parameters = {
            "type": "object",
            "properties": self._properties,
            "required": self._schema.get("required", []),
            "$defs": self._schema.get("$defs", {}),
        }
        return Toolset(
            [_build_tool({"name": _ACT_TOOL, "description": description, "parameters": parameters})]
        )

    @functools.cached_property
    def system_message(self) -> str:
        """System message: the instructions, and a description of the tools."""
        has_any = self._describe_tools and self.tools.tools
        parts = [self._instructions, self.tools.instructions("hermes") if has_any else ""]
        return "\n\n".join(part for part in parts if part)

    def parse_action(self, text: str) -> tuple[dict[str, Any] | None, ToolCall | None]:
        """Return the action of a reply, and its call if it made one; (None, None) = a reply that ends the episode.

        Raises: ToolMisuse for a reply that is no action.
        """
        field = self._text_field
        if field is not None:
            return {field: _convert_reply(text, field, self._properties[field])}, None
        call = self.tools.parse(text)
        if call is None:
            if self._is_mcp:
                return None, None
            raise ToolMisuse(f"write a call of the tool {_ACT_TOOL}")
        if not self._is_mcp:
            return dict(call.arguments), call
        arguments = {"tool_name": call.name, "arguments": dict(call.arguments)}
        return {"type": "call_tool", **arguments}, call

    def render_observation(self, answer: Mapping[str, Any]) -> str:
        """Render an observation: one text as it is, several fields as lines 'name: value'."""
        observation = answer["observation"]
        if self._is_mcp and "tool_name" in observation:
            return _render_tool_result(observation)[:_MAX_TEXT]
        if self._fields is not None:
            for name in self._fields:
                if name not in observation:
                    raise EnvironmentFault(
                        f"options.fields: the observation has no field '{name}'; {suggest_name(name, observation)}"
                    )
            shown = {name: observation[name] for name in self._fields}
        else:
            shown = {
                name: value
                for name, value in observation.items()
                if name not in _HIDDEN_FIELDS and value not in (None, "", [], {})
            }
        if not shown:
            shown = dict(answer.get("metadata") or observation.get("metadata") or {})
        if len(shown) == 1:
            return _render_value(next(iter(shown.values())))[:_MAX_TEXT]
        lines = [f"{name}: {_render_value(value)}" for name, value in shown.items()]
        return "\n".join(lines)[:_MAX_TEXT]

    @functools.cached_property
    def _schema(self) -> dict[str, Any]:
        """JSON schema of an action. Raises: EnvironmentFault."""
        schema = self._server.fetch("/schema")
        action = schema.get("action") if isinstance(schema, dict) else None
        if not isinstance(action, dict):
            raise EnvironmentFault(f"OpenEnv server: /schema has no action: {schema!r:.200}")
        return action

    @functools.cached_property
    def _properties(self) -> dict[str, Any]:
        definitions = self._schema.get("$defs", {})
        return {
            name: {**value, "$defs": definitions} if definitions else value
            for name, value in self._schema.get("properties", {}).items()
            if name != "metadata"
        }

    @functools.cached_property
    def _is_mcp(self) -> bool:
        """True = actions are calls of MCP tools."""
        if self._action_field is not None:
            return False
        names = set(self._properties)
        return not names or {"tool_name", "arguments"} <= names

    @functools.cached_property
    def _text_field(self) -> str | None:
        """Field that the reply fills. Raises: SettingsError for a field that does not exist."""
        if self._is_mcp:
            return None
        chosen, properties = self._action_field, self._properties
        if chosen is not None:
            if chosen not in properties:
                raise SettingsError(
                    f"options.action: the server's action has no field '{chosen}'; {suggest_name(chosen, properties)}"
                )
            return chosen
        required = [name for name in self._schema.get("required", ()) if name in properties]
        name = required[0] if len(required) == 1 else next(iter(properties))
        kind = _find_simple_type(properties[name])
        # A text beside optional fields is the action; a number beside them may not be all of it.
        return name if kind and (len(properties) == 1 or (kind == "string" and required)) else None


def _find_simple_type(schema: Mapping[str, Any]) -> str | None:
    """Return the type of a text, number, truth value or choice; None for other schemas."""
    if isinstance(schema.get("enum"), list):
        return "choice"
    kind = schema.get("type")
    return kind if kind in _SIMPLE_TYPES else None


def _convert_reply(text: str, name: str, schema: Mapping[str, Any]) -> Any:
    """Convert a reply to the value of a field. Raises: ToolMisuse."""
    visible = strip_thought(text).strip()
    kind = _find_simple_type(schema)
    if kind not in ("integer", "number", "boolean", "choice"):
        return visible
    word = visible.split()[-1].strip("`'\".,") if visible else ""
    if kind == "choice":
        for choice in schema["enum"]:
            if str(choice).lower() in (word.lower(), visible.lower()):
                return choice
        raise ToolMisuse(f"write one of: {', '.join(map(str, schema['enum']))}")
    if kind == "boolean":
        if word.lower() not in ("true", "false"):
            raise ToolMisuse("end with true or false")
        return word.lower() == "true"
    try:
        number = int(word) if kind == "integer" else float(word)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ToolMisuse(
            f"end with the {name}, {'an integer' if kind == 'integer' else 'a number'}"
        )
    return number


def _read_reward(answer: Mapping[str, Any]) -> float:
    value = answer.get("reward")
    if value is None:
        return 0.0
    if not isinstance(value, bool | int | float) or not math.isfinite(value):
        raise EnvironmentFault(f"OpenEnv server: the reward is {value!r:.80}, not a number")
    return float(value)


def _render_value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _render_tool_result(observation: Mapping[str, Any]) -> str:
    """Render the result of an MCP tool: its texts, else its data; an error as 'error: ...'."""
    error = observation.get("error")
    if error:
        return f"error: {error.get('message', error) if isinstance(error, Mapping) else error}"
    result = observation.get("result")
    if not isinstance(result, Mapping) or "content" not in result:
        return _render_value(result)
    texts = [
        str(part["text"]) if isinstance(part, Mapping) and "text" in part else _render_value(part)
        for part in result["content"] or ()
    ]
    text = "\n".join(texts) if texts else _render_value(result.get("structured_content"))
    return f"error: {text}" if result.get("is_error") else text


def _build_tool(schema: Mapping[str, Any]) -> Tool:
    """Build a tool of the server, for descriptions and for reading calls."""
    parameters = schema["parameters"]
    definitions = {key: parameters[key] for key in ("$defs", "definitions") if parameters.get(key)}
    properties = {
        name: {**value, **definitions} for name, value in parameters.get("properties", {}).items()
    }
    required = parameters.get("required", ())
    return Tool(
        schema["name"],
        schema["description"] or schema["name"],
        properties,
        _refuse_local_call,
        optional=tuple(name for name in properties if name not in required),
    )


def _refuse_local_call(*_: Any, **__: Any) -> str:
    raise EnvironmentFault("tools of an OpenEnv environment are called by its server")
