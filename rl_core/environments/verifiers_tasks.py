"""`verifiers`: task sets and environments of the verifiers package (version 0.4), with one turn or several.

    user    the task's prompt, or the environment's first message
    policy  a reply, or calls of the task set's tools
    tool    the results
    user    the environment's answer, and so on until it ends; the task's reward functions and judges score it

The package runs in subprocesses with a time limit (timeout = reward 0), since rewards may execute model output. Each
turn is played in a fresh process from the start of the episode, with the replies so far; an environment that then
gives different messages is refused. So are task sets that need containers or remote servers. Of several agents the
policy plays one; models behind URLs or functions play the others, without loss.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rl_core.environments.environment import (
    HELDOUT_START,
    Environment,
    Episode,
    Step,
    compute_content_digest,
    is_heldout,
)
from rl_core.environments.optional_packages import require_package
from rl_core.environments.question_episodes import score_answer
from rl_core.environments.subprocess_host import ChildFailed, ChildPool
from rl_core.environments.tools import MAX_CALLS, Tool, Toolset
from rl_core.errors import (
    BackendError,
    EnvironmentFault,
    SettingsError,
    ToolMisuse,
    suggest_name,
)
from rl_core.json_client import RequestLimits, post_with_retries
from rl_core.settings.base import describe_type, is_valid_value
from rl_core.types import Message, ToolCall
from rl_core.user_code.checks import check_signature
from rl_core.user_code.load import import_function

_SCRIPT = Path(__file__).with_name("verifiers_child.py")
_LEVEL = "all"
MAX_OTHER_REPLIES = 256  # of one other agent in an episode
_PLAYER_OPTIONS: dict[str, Any] = {
    "url": str,
    "model": str,
    "temperature": float,
    "max_tokens": int,
    "api_key": str,
    "timeout_s": float,
}


class VerifiersEpisode(Episode):
    """One task: its opening, and the environment's answer to each reply but the last."""

    def __init__(self, environment: Verifiers, seed: int, index: int, row: dict[str, Any]) -> None:
        super().__init__(seed, _LEVEL)
        self.kind, self.target, self.hidden = row["kind"], row["target"], row["hidden"]
        self._environment, self._index = environment, index
        self._row, self._replies = row, list[dict[str, Any]]()
        self._others: dict[str, list[str]] = {}  # replies of the other agents
        self._messages: list[Message] = []
        if row["messages"]:
            self._set_opening(row["messages"])

    def _set_opening(self, messages: Sequence[Mapping[str, str]]) -> None:
        self._messages = [Message(role=m["role"], content=m["content"]) for m in messages]
        self._opening, self.prompt = len(self._messages), self._messages[-1]["content"]

    def reset(self) -> list[Message]:
        """Return the messages before the first reply; the system message describes the tools.

        Raises: EnvironmentFault if another agent, which opens the conversation, fails.
        """
        if not self._messages:
            messages, others = self._environment.open_conversation(self._index)
            self._others = {name: [*replies] for name, replies in others.items()}
            self._set_opening(messages)
        instructions, opening = self._environment.instructions, self._messages[: self._opening]
        if not instructions:
            return opening
        system = [opening[0]["content"]] if opening[0]["role"] == "system" else []
        return [
            Message(role="system", content="\n\n".join([*system, instructions])),
            *opening[len(system) :],
        ]

    def act(self, text: str) -> Step:
        """Return the environment's answer to a reply, or its scores. Raises: EnvironmentFault if it cannot continue."""
        if not self._messages:  # another agent opens the conversation
            self.reset()
        calls, misuse = list[ToolCall](), ""
        try:
            calls = self._environment.tools.parse_all(text, MAX_CALLS)
        except ToolMisuse as error:
            misuse = str(error)
        call_dicts = [{"name": call.name, "arguments": dict(call.arguments)} for call in calls]
        self._replies.append({"text": text, "calls": call_dicts, "misuse": misuse})
        self._messages.append(Message(role="assistant", content=text))
        play: dict[str, Any] = {}

        def score() -> float:
            play.update(
                self._environment.play_task(
                    self._index, self._messages, self._replies, self._others
                )
            )
            return float(play["scores"]["reward"]) if "scores" in play else 0.0

        step = score_answer(self, text, score, self._environment.success_at)
        if not step.is_error and "scores" not in play:
            new_messages = play["messages"][len(self._messages) :]
            observations = [Message(role=m["role"], content=m["content"]) for m in new_messages]
            self._messages += observations
            failed = play["failed_calls"] if calls else []
            return Step(
                messages=observations,
                tool_call=calls[0] if calls else None,
                more_calls=calls[1:],
                is_error=bool(misuse or failed),
                info={"failed_calls": failed} if failed else {},
            )
        step.info |= play.get("scores", {})
        return step


class Verifiers(Environment):
    """Tasks of one task set, split by prompt; seeds index the tasks of each split."""

    name = "verifiers"
    levels = (_LEVEL,)
    splits_itself = True

    def __init__(
        self,
        data: Path | None = None,
        *,
        taskset: str,
        config: dict[str, Any] | None = None,
        environment: str = "",
        environment_config: dict[str, Any] | None = None,
        max_tasks: int = 1000,
        heldout: float = 0.1,
        success_at: float = 1.0,
        workers: int = 2,
        timeout_s: float = 60.0,
        pass_variables: list[str] | None = None,
        network: bool = False,
        memory_gib: float = 16.0,
        describe_tools: bool = True,
        agent: str = "",
        others: dict[str, Any] | None = None,
    ) -> None:
        """Set the task set, its split and the subprocess limits.

        Args:
            taskset: id of an installed task set, or 'package.module:Class' of a `Taskset`.
            config: fields of the task set's config.
            environment: id of an installed environment, or 'package.module:Class' of an `Env`; "" = the task set's
                default, else one reply per task.
            environment_config: fields of the environment's config.
            max_tasks: number of tasks to load, from the first on.
            heldout: share of tasks, split by prompt, held out from training.
            success_at: minimum total reward of a success.
            workers: maximum number of subprocesses.
            timeout_s: time limit for a turn, including all earlier ones, and its scoring; on timeout it earns 0.
            pass_variables: names of environment variables needed by the rewards, such as a judge's API key.
            network: let the subprocesses use the network (a judge, a data set to download) and write into the cache of
                Hugging Face, which they can always read.
            memory_gib: memory of a subprocess and all its descendants.
            describe_tools: False omits the tools from the system message (with model.native_tools).
            agent: name of the agent that the policy plays; "" = the only one that the environment trains.
            others: agent -> who plays it (`build_player`).
        Raises: SettingsError if the package is missing or an option is out of range.
        """
        super().__init__(data)
        if not 0 < heldout < 1:
            raise SettingsError(f"options.heldout: {heldout} must be between 0 and 1")
        if max_tasks < 2 or workers < 1 or not timeout_s > 0 or not memory_gib > 0:
            raise SettingsError(
                "options: max_tasks must be at least 2, workers at least 1, timeout_s and memory_gib above 0"
            )
        require_package("verifiers", self.name)
        self.success_at, self._heldout = success_at, heldout
        self._taskset, self._network, self._describe_tools = taskset, network, describe_tools
        cache = Path(os.environ.get("HF_HOME") or os.path.expanduser("~/.cache/huggingface"))
        self._players = {
            name: build_player(player, f"options.others.{name}")
            for name, player in (others or {}).items()
        }
        self._openings: dict[int, tuple[list[dict[str, str]], dict[str, list[str]]]] = {}
        self._opening_lock = threading.Lock()
        self._children = ChildPool(
            _SCRIPT,
            setup={
                "agent": agent,
                "others": list(self._players),
                "taskset": taskset,
                "config": config or {},
                "max_tasks": max_tasks,
                "environment": environment,
                "environment_config": environment_config or {},
            },
            count=workers,
            timeout_s=timeout_s,
            memory_gib=memory_gib,
            variables=pass_variables or (),
            values={
                "HF_HOME": str(cache),
                **({} if network else {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}),
            },
            network=network,
            readable=[cache],
            writable=[cache] if network else [],
        )
        # (index in the task set, row) by split.
        self._splits: dict[str, list[tuple[int, dict[str, Any]]]] | None = None
        self._lock = threading.Lock()

    @classmethod
    def named_code(cls, options: Mapping[str, Any]) -> tuple[str, ...]:
        """List the functions that play other agents."""
        others = options.get("others")
        players = others.values() if isinstance(others, Mapping) else ()
        return tuple(player for player in players if isinstance(player, str))

    @functools.cached_property
    def tools(self) -> Toolset:
        """Tools of the task set; the child executes their calls."""
        return Toolset(_build_tool(schema) for schema in self._request_child({"do": "tools"}))

    @functools.cached_property
    def instructions(self) -> str:
        """Description of the tools for the system message; "" without any."""
        has_any = self._describe_tools and self.tools.tools
        return self.tools.instructions("hermes", MAX_CALLS) if has_any else ""

    def seeds(self, split: str) -> range:
        """Return the seeds of all tasks of 'train' or 'heldout'."""
        start = 0 if split == "train" else HELDOUT_START
        return range(start, start + len(self._load_split_rows(split)))

    def seeds_of(self, split: str, level: str) -> Sequence[int]:
        """Return the same as `seeds`, since there is only one level."""
        self.check_level(level)
        return self.seeds(split)

    def episode(self, seed: int, level: str) -> VerifiersEpisode:
        """Return the episode of the task with that seed. Raises: SettingsError if it does not exist."""
        self.check_level(level)
        split, position = (
            ("heldout", seed - HELDOUT_START) if seed >= HELDOUT_START else ("train", seed)
        )
        rows = self._load_split_rows(split)
        if not 0 <= position < len(rows):
            raise SettingsError(
                f"seed {seed}: the {split} set of this task set has {len(rows)} tasks"
            )
        index, row = rows[position]
        return VerifiersEpisode(self, seed, index, row)

    def open_conversation(self, index: int) -> tuple[list[dict[str, str]], dict[str, list[str]]]:
        """Return the opening messages of a task, and the replies of the other agents that they depend on.

        Both are the same for every episode of the task in this process.
        Raises: EnvironmentFault.
        """
        with self._opening_lock:
            if index not in self._openings:
                others: dict[str, list[str]] = {}
                try:
                    play = self.play_task(index, [], [], others)
                except ChildFailed as error:
                    raise EnvironmentFault(
                        f"options.taskset: '{self._taskset}', task {index}: {error}"
                    ) from error
                if "scores" in play or not play["messages"]:
                    raise EnvironmentFault(
                        f"options.taskset: '{self._taskset}', task {index}: its episode ends before the agent's first "
                        "reply"
                    )
                self._openings[index] = play["messages"], others
            return self._openings[index]

    def play_task(
        self,
        index: int,
        messages: Sequence[Message],
        replies: Sequence[dict[str, Any]],
        others: dict[str, list[str]],
    ) -> dict[str, Any]:
        """Play the task at `index` with these replies; return all messages, and {reward, rewards, metrics} at its end.

        Every child loads the task set itself.
        Args:
            messages: the conversation so far, replies included.
            others: replies of the other agents so far; new ones are added.
        Raises: ChildFailed; EnvironmentFault if the environment or another agent failed, or its messages differ from
            the earlier ones.
        """
        request = {"do": "play", "index": index, "replies": list(replies), "others": others}
        play: dict[str, Any] = self._children.request_reply(request)
        while "ask" in play:
            name, asked = play["ask"]
            given = others.setdefault(name, [])
            if len(given) >= MAX_OTHER_REPLIES:
                raise EnvironmentFault(
                    f"options.taskset: '{self._taskset}', task {index}: the agent '{name}' was asked more than "
                    f"{MAX_OTHER_REPLIES} times"
                )
            given.append(self._players[name](asked, index * MAX_OTHER_REPLIES + len(given)))
            play = self._children.request_reply(request)
        if "failed" in play:
            raise EnvironmentFault(
                f"options.taskset: '{self._taskset}', task {index}: {play['failed']}"
            )
        if play["messages"][: len(messages)] != list(messages):
            changed = "task" if len(replies) == 1 else "conversation"
            raise EnvironmentFault(
                f"options.taskset: '{self._taskset}' has a different {changed} {index} each time it is loaded; fix its "
                "order and what it draws, for instance with a seed in options.config"
            )
        return play

    def _load_split_rows(self, split: str) -> list[tuple[int, dict[str, Any]]]:
        with self._lock:
            if self._splits is None:
                self._splits = self._read_splits()
        return self._splits[split]

    def _request_child(self, request: dict[str, Any]) -> Any:
        """Ask a child about the task set. Raises: SettingsError if the task set cannot be used."""
        try:
            return self._children.request_reply(request)
        except ChildFailed as error:
            hint = "" if self._network else "; if it needs the network: options.network: true"
            raise SettingsError(
                f"options.taskset: '{self._taskset}' cannot be used: {error}{hint}"
            ) from error

    def _read_splits(self) -> dict[str, list[tuple[int, dict[str, Any]]]]:
        name, rows = self._taskset, self._request_child({"do": "rows"})
        splits: dict[str, list[tuple[int, dict[str, Any]]]] = {"train": [], "heldout": []}
        for index, row in enumerate(rows):
            digest = compute_content_digest([row["messages"], row["hidden"]])
            split = "heldout" if is_heldout(digest, self._heldout) else "train"
            splits[split].append((index, row))
        for split, split_rows in splits.items():
            if not split_rows:
                raise SettingsError(
                    f"options.heldout: of the {len(rows)} tasks of '{name}' none is left for {split}"
                )
        return splits


def build_player(player: Any, key: str) -> Callable[[list[dict[str, str]], int], str]:
    """Build the function that plays another agent: (messages, seed) -> its text.

    Args:
        player: {url, model, temperature (0), max_tokens (512), api_key (name of an environment variable), timeout_s
            (60)} of an OpenAI-compatible server, or the import path of a function of (messages, seed).
    Raises: SettingsError for anything but a server or the import path of a function.
    """
    if isinstance(player, str):
        function = import_function(player, key)
        check_signature(function, f"{key}: '{player}'", "(messages, seed)", 2)
        return functools.partial(_call_player, function, player)
    if not isinstance(player, Mapping) or not player.get("url") or not player.get("model"):
        raise SettingsError(
            f"{key}: {player!r:.80} must be {{url: ADDRESS, model: NAME}} or the import path of a function"
        )
    for name, value in player.items():
        if name not in _PLAYER_OPTIONS:
            raise SettingsError(
                f"{key}.{name}: no such option; {suggest_name(name, _PLAYER_OPTIONS)}"
            )
        if not is_valid_value(value, _PLAYER_OPTIONS[name]):
            kind = describe_type(_PLAYER_OPTIONS[name])
            raise SettingsError(f"{key}.{name}: {value!r} is not {kind}")
    return functools.partial(_ask_model, dict(player), key)


def _call_player(
    function: Callable[..., Any], name: str, messages: list[dict[str, str]], seed: int
) -> str:
    try:
        text = function(messages, seed)
    except Exception as error:
        raise EnvironmentFault(f"'{name}': {type(error).__name__}: {error}") from error
    if not isinstance(text, str):
        raise EnvironmentFault(f"'{name}' returned {text!r:.80}, not a text")
    return text


def _ask_model(
    player: Mapping[str, Any], key: str, messages: list[dict[str, str]], seed: int
) -> str:
    """Ask a model for the reply of another agent. Raises: EnvironmentFault."""
    variable = player.get("api_key", "")
    headers = {"Authorization": f"Bearer {os.environ.get(variable, '')}"} if variable else {}
    base = str(player["url"]).rstrip("/").removesuffix("/v1")
    body = {
        "model": player["model"],
        "messages": messages,
        "temperature": player.get("temperature", 0.0),
        "max_tokens": player.get("max_tokens", 512),
        "seed": seed,
    }
    limits = RequestLimits(float(player.get("timeout_s", 60.0)), retries=2, retry_delay_s=1.0)
    try:
        return post_with_retries(
            f"{base}/v1/chat/completions",
            body,
            limits,
            parse_response=_read_chat_text,
            headers=headers,
        )
    except BackendError as error:
        raise EnvironmentFault(f"{key}: {error}") from error


def _read_chat_text(response: Any) -> str:
    text = response["choices"][0]["message"]["content"]
    if not isinstance(text, str):
        raise ValueError("the server answered without a text")
    return text


def _build_tool(schema: dict[str, Any]) -> Tool:
    """Build a tool of the task set, for descriptions and for reading calls."""
    properties = schema["parameters"].get("properties", {})
    required = schema["parameters"].get("required", ())
    optional = tuple(name for name in properties if name not in required)
    return Tool(
        schema["name"],
        schema["description"] or schema["name"],
        properties,
        _refuse_local_call,
        None,
        2000,
        optional,
    )


def _refuse_local_call(*_: Any, **__: Any) -> str:
    raise EnvironmentFault("tools of a verifiers task set are called by its child process")
