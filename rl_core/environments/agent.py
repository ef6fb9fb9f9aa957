"""`agent`: the user's agent plays the episode, and its chat requests are answered by the policy.

    environment: {name: agent, options: {command: "python my_agent.py", tasks: tasks.jsonl, reward: "my_rewards:score"}}
    rl_core.grpo(model, agent=run, prompts=tasks)        def run(task, client): ...

For each episode the command runs in a new folder; OPENAI_BASE_URL and OPENAI_API_KEY name the trainer's recorder
(`rl_core/rollouts/agent_server.py`). The reward is a function of the task, the recorded calls and what the agent left
behind: files, exit code, a score that it printed or posted. docs/agents.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from rl_core.data.files import BadRow, iter_table_rows, read_rows, refuse_unstorable
from rl_core.environments.agent_process import (
    AgentCommand,
    AgentFolder,
    AgentLimitExceeded,
    build_task_variables,
    describe_exit,
)
from rl_core.environments.environment import (
    HELDOUT_START,
    Demonstration,
    Environment,
    Episode,
    Step,
    compute_content_digest,
    is_heldout,
)
from rl_core.environments.prompts import find_split_row, list_row_levels
from rl_core.environments.tools import Toolset
from rl_core.errors import DataError, EnvironmentFault, RewardError, SettingsError, suggest_name
from rl_core.json_client import fetch_json
from rl_core.time_limits import CallTimeout, call_with_timeout, terminate_thread
from rl_core.types import Message
from rl_core.user_code.checks import USER_CODE_ERRORS, check_signature, parse_finite
from rl_core.user_code.load import import_function, is_import_path

_POLL_S = 0.1
_LOG_CHARACTERS = 4000  # of stderr, stored with a failed episode
_TARGET_COLUMNS = ("target", "answer")
_QUESTION_COLUMNS = ("prompt", "question", "task", "instruction")
_DEFAULT_OUTPUT = "outputs"  # of runs, in the current folder
_CALL_TIMEOUT_S = 3600.0  # of one request of `AgentClient`; the limits of the episode apply


class AgentFailed(EnvironmentFault):
    """An agent crashed, hung or asked the policy for nothing; `log` is the end of its stderr."""

    def __init__(self, message: str, log: str = "") -> None:
        super().__init__(message)
        self.log = log[-_LOG_CHARACTERS:]


@dataclass(frozen=True, slots=True)
class AgentCall:
    """One recorded answer of the policy, for reward functions; messages are in OpenAI's format."""

    messages: list[dict[str, Any]]  # of the request
    reply: dict[str, Any]  # the assistant message that was sent back
    finish_reason: str  # stop, length or tool_calls
    conversation: int  # calls that extend each other have the same number, from 1
    num_tokens: int  # sampled


@dataclass(frozen=True, slots=True)
class AgentResult:
    """Outcome of an agent: its exit code, folder, output and score."""

    exit_code: int | None = None  # None = a Python function, or killed after the policy's limits
    # its working folder, until the reward is known; None = a Python function
    folder: Path | None = None
    stdout: str = ""
    stderr: str = ""
    score: Any = None  # that it posted to /v1/reward, else printed as {"reward": ...}
    value: Any = None  # returned by a Python function
    limit: str = ""  # max_turns or max_tokens, if the policy's limits ended the episode


@dataclass(frozen=True, slots=True)
class AgentScore:
    """Reward and success of an episode, and further values for analysis."""

    reward: float
    success: bool | None  # None = unknown
    info: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AgentEndpoint:
    """Address and key of one episode's requests, and functions that watch the episode."""

    base_url: str
    api_key: str
    seed: int  # for random numbers of the agent
    measure_agent_seconds: Callable[[], float]  # without the time in which it waited for the policy
    is_stopped: Callable[[], bool]  # True = end now, without a result
    read_score: Callable[[], Any]  # posted score; None = none
    read_limit: Callable[[], str]  # see `AgentResult.limit`


@dataclass(frozen=True, slots=True)
class AgentClient:
    """Access to the policy for an agent that is a Python function.

    Pass `base_url` and `api_key` to any OpenAI client, or use `chat`.
    """

    base_url: str
    api_key: str
    model: str = "policy"
    seed: int = 0  # for random numbers of the agent

    def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> dict[str, Any]:
        """Return the policy's message in reply to these; options are OpenAI's (tools, temperature, ...).

        Raises: BackendError.
        """
        message: dict[str, Any] = self.complete(messages, **options)["choices"][0]["message"]
        return message

    def complete(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> dict[str, Any]:
        """Return the whole response to a chat request; see `chat`."""
        body = {"model": self.model, "messages": list(messages), **options}
        reply: dict[str, Any] = fetch_json(
            f"{self.base_url}/chat/completions",
            body,
            timeout_s=_CALL_TIMEOUT_S,
            headers={"Authorization": f"Bearer {self.api_key}"},
        )
        return reply

    async def chat_async(
        self, messages: Sequence[Mapping[str, Any]], **options: Any
    ) -> dict[str, Any]:
        """Return the same as `chat`, without blocking the event loop."""
        return await asyncio.to_thread(lambda: self.chat(messages, **options))


class AgentEpisode(Episode):
    """One task. The agent plays it; it cannot be stepped."""

    def __init__(self, seed: int, level: str, task: Mapping[str, Any]) -> None:
        super().__init__(seed, level)
        self.row = dict(task)
        self.kind = str(task.get("kind", ""))
        self.target = next((str(task[n]) for n in _TARGET_COLUMNS if task.get(n) is not None), "")
        texts = (task.get(name) for name in _QUESTION_COLUMNS)
        encoded = json.dumps(self.row, ensure_ascii=False, sort_keys=True, default=str)
        self.prompt = next((text for text in texts if isinstance(text, str) and text), encoded)
        self.hidden = encoded

    def reset(self) -> list[Message]:
        """Return the task as a message; the agent writes other ones."""
        return [Message(role="user", content=self.prompt)]

    def act(self, text: str) -> Step:
        """Refuse: the agent asks the policy, not the other way round."""
        raise EnvironmentFault(
            "environment 'agent' is played by its agent; it cannot be stepped from outside (docs/agents.md)"
        )


class Agent(Environment):
    """Tasks for the user's agent; seeds index the tasks of each split."""

    name = "agent"
    splits_itself = True

    def __init__(
        self,
        command: Any,
        tasks: Any,
        *,
        reward: Any = None,
        heldout: Any = 0.1,
        level: str = "level",
        success_at: float = 1.0,
        timeout_s: float = 60.0,
        memory_gib: float = 4.0,
        context: int = 4096,
        sampling: Literal["agent", "run"] = "agent",
        tools: Literal["template", "instructions", "read"] = "template",
        crash: Literal["fail", "score"] = "fail",
        private: list[str] | None = None,
        demonstrations: str | None = None,
        sandbox: bool = True,
        readable: list[str] | None = None,
        pass_variables: list[str] | None = None,
        requires_reward: bool = True,
        data: Path | None = None,
    ) -> None:
        """Read the tasks and check command and reward; nothing is run.

        Args:
            command: command line, started once for each episode; or a function, or its import path, that is called
                with (task, client), sync or async.
            tasks: JSONL, JSON array, Parquet or CSV file, one task a row; rows in memory; or the import path of a
                function that returns them.
            reward: function of (task, calls, result), or its import path, that returns a number or {"reward": number,
                "success": bool, ...}; sync or async. None = the agent posts, prints or returns the same.
            heldout: share of distinct tasks to hold out, a file of held-out tasks, or rows.
            level: column of the level of difficulty.
            success_at: least reward of a success, unless the reward says which episodes succeed.
            timeout_s: seconds on the clock that an agent may use in an episode, besides those in which it waits for the
                policy; also the time limit of the reward. Agents at once share the processors.
            memory_gib: memory of an agent's processes together.
            context: most tokens of a prompt and its answer; more than the model's are never used.
            sampling: agent = temperature, top_p, top_k and min_p of a request apply; run = the run's sampling applies.
            tools: how tools of a request are shown to the model, as in `serving.tools`.
            crash: fail = an agent that ends with an exit code other than 0 (or raises) is a failed episode, left out
                and counted; score = its reward is computed.
            private: columns that only the reward gets, such as the right answer. A confined agent cannot read the files
                of tasks and `outputs` then, unless `readable` names them.
            demonstrations: column of messages to imitate, as the agent would send them; only for SFT.
            sandbox: confine the command's files to its folder (docs/reliability.md); the network stays.
            readable: files and folders that a confined agent may read besides Python and the current folder.
            pass_variables: names of environment variables that are passed on to the command.
            requires_reward: False = an episode without a reward earns 0 and knows no success, for rewards that are
                functions of trajectories.
        Raises: SettingsError; DataError if there are no tasks.
        """
        super().__init__(data)
        if not timeout_s > 0 or not memory_gib > 0 or context < 2:
            raise SettingsError(
                "options: timeout_s and memory_gib must be above 0, context at least 2"
            )
        self.context, self.sampling_source, self.tool_style = context, sampling, tools
        self._success_at, self._timeout_s = success_at, timeout_s
        self._scores_crashes = crash == "score"
        self.knows_success = self._requires_reward = requires_reward
        self._demonstrations, self._private = demonstrations, frozenset(private or ())
        self._function: Callable[..., Any] | None = None
        self._command: AgentCommand | None = None
        if isinstance(command, str) and not is_import_path(command):
            self._command = AgentCommand(
                command,
                memory_gib=memory_gib,
                sandbox=sandbox,
                readable=readable or (),
                variables=pass_variables or (),
                hidden=_list_private_paths(tasks, heldout) if private else [],
            )
        else:
            self._function = _load_function(command, "options.command", "(task, client)", 2)
        self._reward: Callable[..., Any] | None = None
        self.reward_name = ""
        if reward is not None:
            self._reward = _load_function(reward, "options.reward", "(task, calls, result)", 3)
            self.reward_name = _name_function(reward)
        self._tasks = _split_tasks(tasks, heldout)
        self._index_tasks(level)

    def _index_tasks(self, level: str) -> None:
        """Set columns, levels and seeds of the tasks. Raises: SettingsError for an option that names no column."""
        all_tasks = [task for split in self._tasks.values() for task in split]
        columns = dict.fromkeys(name for task in all_tasks for name in task)
        self.columns = tuple(columns)
        named = {"private": self._private, "demonstrations": {self._demonstrations}}
        for option, names in named.items():
            for name in names - {None}:
                if name not in columns:
                    raise SettingsError(
                        f"options.{option}: no task has a column '{name}'; {suggest_name(str(name), self.columns)}"
                    )
        self.levels = list_row_levels([task.get(level) for task in all_tasks], level)
        self._seeds: dict[tuple[str, str], list[int]] = {
            (split, name): [] for split in self._tasks for name in self.levels
        }
        for split, rows in self._tasks.items():
            for seed, task in zip(self.seeds(split), rows, strict=True):
                name = self.levels[0] if len(self.levels) == 1 else str(task[level])
                self._seeds[split, name].append(seed)

    @classmethod
    def named_code(cls, options: Mapping[str, Any]) -> tuple[str, ...]:
        """List the import paths of agent, tasks and reward."""
        values = [options.get(name) for name in ("command", "tasks", "heldout", "reward")]
        return tuple(v for v in values if isinstance(v, str) and is_import_path(v))

    @property
    def digest(self) -> str:
        """Digest of all tasks."""
        return compute_content_digest([self._tasks["train"], self._tasks["heldout"]])

    @property
    def tools(self) -> Toolset:
        """Return no tools: those of an agent are its requests'."""
        return Toolset()

    def seeds(self, split: str) -> range:
        """Return one seed per task."""
        start = 0 if split == "train" else HELDOUT_START
        return range(start, start + len(self._tasks[split]))

    def seeds_of(self, split: str, level: str) -> Sequence[int]:
        """Return the seeds of the tasks of one level."""
        self.check_level(level)
        return self._seeds[split, level]

    def episode(self, seed: int, level: str) -> AgentEpisode:
        """Return the episode of the seed's task. Raises: SettingsError if it does not exist."""
        self.check_level(level)
        task = dict(self._find_task(seed))
        if self._demonstrations is not None:
            task.pop(self._demonstrations, None)
        return AgentEpisode(seed, level, task)

    def demonstration(self, seed: int, level: str) -> Demonstration | None:
        """Return the task's messages in the column of demonstrations. Raises: DataError for a task without them."""
        if self._demonstrations is None:
            return None
        messages = self._find_task(seed).get(self._demonstrations)
        is_list = isinstance(messages, list) and all(isinstance(m, Mapping) for m in messages)
        if not messages or not is_list or messages[-1].get("role") != "assistant":
            raise DataError(
                f"options.demonstrations: the column '{self._demonstrations}' of task {seed} holds no messages that "
                "end with the assistant's"
            )
        kind = str(self._find_task(seed).get("kind", ""))
        return Demonstration(list(messages), level, kind, seed, True)

    @contextlib.contextmanager
    def run_agent(self, episode: AgentEpisode, endpoint: AgentEndpoint) -> Iterator[AgentResult]:
        """Run the agent on a task and yield what it left behind; its folder is removed afterwards.

        Raises: AgentFailed.
        """
        task = {name: value for name, value in episode.row.items() if name not in self._private}
        if self._command is None:
            yield self._call_function(task, endpoint)
            return
        folder = AgentFolder(task)
        try:
            yield self._run_command(self._command, folder, task, endpoint)
        finally:
            folder.remove()

    def score_episode(
        self, episode: AgentEpisode, calls: Sequence[AgentCall], result: AgentResult
    ) -> AgentScore:
        """Compute the reward of an episode.

        Raises: RewardError if the reward function fails; AgentFailed if nothing gives a reward.
        """
        if self._reward is not None:
            value = self._call_reward(dict(episode.row), list(calls), result)
            return self._read_score(value, f"reward '{self.reward_name}'")
        value = result.value if result.value is not None else result.score
        if value is None:
            if result.limit or not self._requires_reward:
                return AgentScore(0.0, False if self._requires_reward else None)
            raise AgentFailed(
                'it has no reward: set options.reward, or let the agent post {"reward": number} to '
                "$OPENAI_BASE_URL/reward, print it as its last line, or return it",
                result.stderr,
            )
        return self._read_score(value, "the agent")

    def _find_task(self, seed: int) -> Mapping[str, Any]:
        return find_split_row(self._tasks, seed, "tasks")

    def _run_command(
        self,
        command: AgentCommand,
        folder: AgentFolder,
        task: Mapping[str, Any],
        endpoint: AgentEndpoint,
    ) -> AgentResult:
        variables = {
            **build_task_variables(task),
            "OPENAI_BASE_URL": endpoint.base_url,
            "OPENAI_API_BASE": endpoint.base_url,
            "OPENAI_API_KEY": endpoint.api_key,
            "OPENAI_MODEL": "policy",
            "AGENT_SEED": str(endpoint.seed),
        }
        code, problem = None, ""
        try:
            code = command.run_once(folder, variables, lambda: self._find_exceeded_limit(endpoint))
        except AgentLimitExceeded as error:
            problem = str(error)
        except OSError as error:
            raise AgentFailed(f"the agent cannot be started: {error}") from error
        stdout, stderr = folder.read_output(folder.stdout), folder.read_output(folder.stderr)
        limit = endpoint.read_limit()
        if not problem and code and not self._scores_crashes:
            problem = f"the agent ended with {describe_exit(code)}{_quote_last_line(stderr)}"
        if problem and not limit:
            raise AgentFailed(problem, stderr)
        score = endpoint.read_score()
        if score is None:
            score = _find_printed_score(stdout)
        return AgentResult(code, folder.work, stdout, stderr, score, None, limit)

    def _call_function(self, task: dict[str, Any], endpoint: AgentEndpoint) -> AgentResult:
        """Call the agent on a separate thread, as Python cannot kill one that hangs."""
        assert self._function is not None
        function, outcome = self._function, list[tuple[Any, BaseException | None]]()
        client = AgentClient(endpoint.base_url, endpoint.api_key, seed=endpoint.seed)

        def work() -> None:
            try:
                outcome.append((_call_maybe_async(function, task, client), None))
            except BaseException as error:  # an agent must not end the run by SystemExit
                outcome.append((None, error))

        thread = threading.Thread(target=work, daemon=True, name="agent")
        thread.start()
        problem = ""
        while thread.is_alive() and not problem:
            thread.join(_POLL_S)
            problem = self._find_exceeded_limit(endpoint) if thread.is_alive() else ""
        if problem:
            terminate_thread(thread)
        value, error = outcome[0] if outcome and not problem else (None, None)
        limit = endpoint.read_limit()
        if error is not None and not self._scores_crashes:
            problem = f"the agent raised {type(error).__name__}: {error}"
        if problem and not limit:
            raise AgentFailed(problem) from error
        return AgentResult(score=endpoint.read_score(), value=value, limit=limit)

    def _find_exceeded_limit(self, endpoint: AgentEndpoint) -> str:
        if endpoint.is_stopped():
            return "the run is stopping"
        if endpoint.measure_agent_seconds() > self._timeout_s:
            return (
                f"the agent has not ended within {self._timeout_s:g} s of computing time (options.timeout_s), in which "
                "no request of it waited for the policy; agents at once share the processors "
                "(sampling.max_concurrent_steps)"
            )
        return ""

    def _call_reward(
        self, task: dict[str, Any], calls: list[AgentCall], result: AgentResult
    ) -> Any:
        assert self._reward is not None
        label = f"reward '{self.reward_name}'"
        try:
            return call_with_timeout(
                self._timeout_s, label, _call_maybe_async, self._reward, task, calls, result
            )
        except CallTimeout as error:
            raise RewardError(str(error)) from error
        # a reward must not end the run; CancelledError is no Exception
        except USER_CODE_ERRORS as error:
            raise RewardError(f"{label}: {type(error).__name__}: {error}") from error

    def _read_score(self, value: Any, source: str) -> AgentScore:
        """Read a number, or {"reward": number, "success": bool} with further values. Raises: RewardError."""
        info: dict[str, Any] = {}
        success = None
        if isinstance(value, Mapping):
            info = {str(k): v for k, v in value.items() if k not in ("reward", "success")}
            success, value = value.get("success"), value.get("reward")
        reward = None if value is None or isinstance(value, str) else parse_finite(value)
        if reward is None:
            raise RewardError(
                f"{source} gave {value!r:.100} as the reward; a finite number is needed, or {{'reward': number}}"
            )
        if success is not None and not _is_truth_value(success):
            raise RewardError(
                f"{source} gave {success!r:.100} as the success; true or false is needed"
            )
        is_success = reward >= self._success_at if success is None else bool(success)
        return AgentScore(reward, is_success if self._requires_reward else None, info)


def _load_function(
    source: Any, key: str, arguments: str, num_positional: int
) -> Callable[..., Any]:
    if not isinstance(source, str) and not callable(source):
        raise SettingsError(f"{key}: {source!r:.80} is neither a function nor text")
    name = _name_function(source)
    function = import_function(name, key, None if isinstance(source, str) else source)
    check_signature(function, f"{key}: '{name}'", arguments, num_positional)
    return function


def _name_function(source: Any) -> str:
    return source if isinstance(source, str) else getattr(source, "__qualname__", repr(source))


def _call_maybe_async(function: Callable[..., Any], *arguments: Any) -> Any:
    value = function(*arguments)
    if not inspect.isawaitable(value):
        return value

    async def wait_for_value() -> Any:
        return await value

    return asyncio.run(wait_for_value())


def _is_truth_value(value: Any) -> bool:
    is_number = isinstance(value, int | float) and value in (0, 1)
    return is_number or isinstance(value, np.bool_)


def _find_printed_score(stdout: str) -> Any:
    """Return the last line of an output if it is a JSON object with a reward; None otherwise."""
    lines = stdout.strip().splitlines()
    if not lines or not lines[-1].lstrip().startswith("{"):
        return None
    try:
        value = json.loads(lines[-1])
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) and "reward" in value else None


def _quote_last_line(stderr: str) -> str:
    lines = stderr.strip().splitlines()
    return f": {lines[-1][:300]}" if lines else ""


def _list_private_paths(tasks: Any, heldout: Any) -> list[str]:
    """List what holds private columns: the files of tasks, and the default output folder with its episodes."""
    files = [value for value in (tasks, heldout) if isinstance(value, str | Path)]
    return [*(os.path.expanduser(file) for file in files), _DEFAULT_OUTPUT]


def _split_tasks(tasks: Any, heldout: Any) -> dict[str, list[dict[str, Any]]]:
    """Read the tasks and hold some out. Raises: SettingsError, DataError."""
    rows = _read_tasks(tasks, "options.tasks")
    if not isinstance(heldout, int | float) or isinstance(heldout, bool):
        return {"train": rows, "heldout": _read_tasks(heldout, "options.heldout")}
    if not 0 <= heldout < 1:
        raise SettingsError(
            f"options.heldout: {heldout} must be a share from 0 to below 1, or a file"
        )
    if not heldout:
        return {"train": rows, "heldout": []}
    digests = [compute_content_digest(row) for row in rows]
    distinct = sorted(set(digests))
    if len(distinct) < 2:
        raise SettingsError(
            f"options.heldout: {len(distinct)} different tasks cannot be split into a training and a held-out set; "
            "give more tasks, or heldout: 0"
        )
    chosen = {digest for digest in distinct if is_heldout(digest, heldout)} or {distinct[0]}
    if len(chosen) == len(distinct):
        chosen.discard(distinct[-1])
    splits: dict[str, list[dict[str, Any]]] = {"train": [], "heldout": []}
    for digest, row in zip(digests, rows, strict=True):
        splits["heldout" if digest in chosen else "train"].append(row)
    return splits


def _read_tasks(source: Any, key: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    if isinstance(source, str) and is_import_path(source):
        source = import_function(source, key)()
    if isinstance(source, str | Path):
        path = Path(source).expanduser()
        if not path.is_file():
            raise SettingsError(f"{key}: no such file: {path.absolute()}")
        for number, row in read_rows(path, None):
            if isinstance(row, BadRow):
                raise DataError(f"{path}:{number}: {row}")
            rows.append(row)
    else:
        for index, row in enumerate(iter_table_rows(source)):
            task = {"prompt": row} if isinstance(row, str) else row
            if not isinstance(task, Mapping):
                raise DataError(f"{key}: row {index} is a {type(row).__name__}, not an object")
            row = {str(name): value for name, value in task.items()}
            try:
                refuse_unstorable(row, "", numbers=False)
            except BadRow as error:
                raise DataError(f"{key}: row {index}: {error}") from None
            rows.append(row)
    if not rows:
        raise DataError(f"{key}: there is no task")
    return rows
