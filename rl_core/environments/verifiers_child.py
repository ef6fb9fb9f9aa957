"""Child process of `verifiers`: loads a task set and its environment, and plays episodes.

One agent is the policy. The replies of the others come from the parent process, too, which asks a model or a function.
Each request runs in a separate process, so no state of an earlier turn remains: an episode is always played from its
start, with all agents' replies so far. Its draws from `random` or numpy are seeded with the task's number.
See `verifiers_tasks`.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import itertools
import json
import random
import runpy
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

_tasks: list[Any] = []
_tasksets: list[Any] = []
_environments: list[Any] = []  # a single one, which plays the tasks
_policy_names: list[str] = []  # a single one: the agent that the policy plays
_SETTLING_ROUNDS = 20  # of the event loop, for agents that are asked at the same time


def start(setup: dict[str, Any]) -> None:
    """Import the package; load the task set and its environment."""
    _tasks.extend(_load_tasks(setup["taskset"], setup["config"], setup["max_tasks"]))
    _environments.append(
        _build_environment(setup["taskset"], setup["environment"], setup["environment_config"])
    )
    _policy_names.append(_choose_policy_agent(setup["agent"], setup["others"]))


def handle(request: dict[str, Any]) -> Any:
    """Answer one request: {"do": "rows"}, {"do": "tools"} or {"do": "play", "index", "replies", "others"}.

    A reply is {"text", "calls": [{"name", "arguments"}, ...], "misuse": why a call could not be read, or ""}; its calls
    are executed before the next reply. `others` has the texts of the other agents' replies, by agent. A play returns
    the messages of the policy so far, and `scores` at its end, or `failed`, the reason why the environment could not
    continue, or `ask`: the agent whose reply is missing, with its messages.
    """
    if request["do"] == "rows":
        return [_build_row(index) for index in range(len(_tasks))]
    if request["do"] == "tools":
        return asyncio.run(_list_tool_schemas())
    return _play_seeded(request["index"], request["replies"], request["others"])


def _load_tasks(name: str, config: dict[str, Any], max_tasks: int) -> list[Any]:
    """Load the first `max_tasks` tasks of an installed task set, or of a class at 'package.module:Class'."""
    from verifiers.v1.utils import loaders

    cls = _import_attribute(name) if ":" in name else loaders.taskset_class(name)
    generic = (
        loaders.concrete_type(cls, loaders.TasksetConfig, origin=loaders.Taskset)
        or loaders.TasksetConfig
    )
    identity = {} if ":" in name else {"id": name}
    taskset = cls(generic.model_validate({**config, **identity}))
    tasks = list(itertools.islice(taskset, max_tasks))
    if not tasks:
        raise ValueError("the task set has no tasks")
    _tasksets.append(taskset)
    servers = [*taskset.toolsets(taskset.config), *tasks[0].toolsets(tasks[0].config)]
    if servers:
        _import_from_toolsets_file("refuse_unsupported_servers")(servers)
    _refuse_runtime_tasks(tasks[0])
    return tasks


def _import_from_toolsets_file(name: str) -> Any:
    """Import a name from the neighbouring file by path, since packages of the project are not imported here."""
    return runpy.run_path(str(Path(__file__).with_name("verifiers_toolsets.py")))[name]


def _import_from_main_file(name: str) -> Any:
    return runpy.run_path(str(Path(__file__).with_name("subprocess_main.py")))[name]


def _import_attribute(path: str) -> Any:
    module, _, attribute = path.partition(":")
    return getattr(importlib.import_module(module), attribute)


def _refuse_runtime_tasks(task: Any) -> None:
    """Refuse a task that needs a sandbox, without which some of its rewards would silently be omitted."""
    if task.NEEDS_CONTAINER:
        raise ValueError("its tasks need a container; only task sets without one are supported")
    for name in ("setup", "finalize"):
        if _has_override(task, name) and _needs_runtime(getattr(task, name)):
            raise ValueError(
                f"its tasks have a {name}(), which needs a runtime; only tasks without one are supported"
            )
    for function in task.hooks("reward"):
        if _needs_runtime(function):
            raise ValueError(
                f"its reward '{function.__name__}' needs a runtime; only plain rewards are supported"
            )
    for function in task.hooks("stop"):
        if set(inspect.signature(function).parameters) - {"task", "trace"}:
            raise ValueError(
                f"its stop '{function.__name__}' takes more than the trace, which is not supported"
            )


def _has_override(task: Any, name: str) -> bool:
    import verifiers.v1 as vf

    return getattr(type(task), name) is not getattr(vf.Task, name)


def _needs_runtime(function: Any) -> bool:
    runtime = inspect.signature(function).parameters.get("runtime")
    return runtime is not None and runtime.default is inspect.Parameter.empty


def _build_environment(taskset: str, name: str, config: dict[str, Any]) -> Any:
    """Build the named environment, else the task set's default, else one that asks for a single reply."""
    import verifiers.v1 as vf
    from verifiers.v1.utils import loaders

    package = "" if ":" in taskset else taskset
    cls = _import_attribute(name) if ":" in name else loaders.environment_class(package, name)
    generic = loaders.concrete_type(cls, vf.EnvConfig, origin=vf.Env) or vf.EnvConfig
    # Skips __init__, which would create the programs and containers of agents.
    environment = cls.__new__(cls)
    environment.config = generic.model_validate(config)
    if not _list_agent_configs(environment.config):
        raise ValueError(f"its environment {cls.__name__} has no agents")
    for hook in ("start", "stop"):
        if getattr(cls, hook) is not getattr(vf.Env, hook):
            raise ValueError(
                f"its environment {cls.__name__} has a {hook}(), for servers that run beside episodes"
            )
    return environment


def _list_agent_configs(config: Any) -> dict[str, Any]:
    """List the agents of an environment's config, by name."""
    import verifiers.v1 as vf

    return {name: value for name, value in config if isinstance(value, vf.AgentConfig)}


def _choose_policy_agent(chosen: str, others: Sequence[str]) -> str:
    """Choose the agent that the policy plays: the chosen one, else the only one that is to be trained.

    Raises: ValueError if that is not clear, or if nobody plays one of the others.
    """
    environment = _environments[0]
    name, names = type(environment).__name__, list(_list_agent_configs(environment.config))
    seats = {agent: SimpleNamespace(name=agent, trainable=True) for agent in names}
    asyncio.run(environment.setup(SimpleNamespace(**seats)))
    trainable = [agent for agent in names if seats[agent].trainable and agent not in others]
    if chosen and chosen not in names:
        raise ValueError(
            f"options.agent: its environment {name} has no agent '{chosen}'; {', '.join(names)}"
        )
    if not chosen and len(trainable) != 1:
        raise ValueError(
            f"its environment {name} has the agents {', '.join(names)}; options.agent names the one that the policy "
            "plays, options.others who plays the others"
        )
    policy = chosen or trainable[0]
    for agent in others:
        if agent not in names or agent == policy:
            problem = (
                "is the policy's" if agent == policy else f"does not exist; {', '.join(names)}"
            )
            raise ValueError(f"options.others: the agent '{agent}' of {name} {problem}")
    missing = [agent for agent in names if agent != policy and agent not in others]
    if missing:
        raise ValueError(
            f"its environment {name} has the agents {', '.join(names)}, and the policy plays {policy}; options.others "
            f"has to say who plays {', '.join(missing)}"
        )
    return policy


def _build_row(index: int) -> dict[str, Any]:
    """Build a row for the parent process: opening, kind and target of a task.

    The opening is [] if it depends on the reply of another agent.
    """
    data = _tasks[index].data
    play = _play_seeded(index, [], {})
    if "failed" in play:
        raise ValueError(f"task {index}: {play['failed']}")
    if "scores" in play:
        raise ValueError(f"task {index}: its episode ends before the agent's first reply")
    answer = getattr(data, "answer", None)
    is_single_reply = type(_environments[0]).__name__ == "SingleAgentEnv"
    return {
        "messages": [] if "ask" in play else play["messages"],
        "kind": data.name or "",
        "target": answer if isinstance(answer, str) else "",
        "hidden": "" if is_single_reply else _serialize_task_content(data),
    }


def _serialize_task_content(data: Any) -> str:
    """Serialize all fields of a task except its number, since a later turn may depend on any of them."""
    fields = data.model_dump(mode="json") if hasattr(data, "model_dump") else vars(data)
    content = {name: value for name, value in fields.items() if name != "idx"}
    return json.dumps(content, sort_keys=True, default=str)


def _play_seeded(
    index: int, replies: Sequence[dict[str, Any]], others: dict[str, list[str]]
) -> dict[str, Any]:
    random.seed(index)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(index)
    return asyncio.run(_play_episode(_tasks[index], replies, others))


async def _play_episode(
    task: Any, replies: Sequence[dict[str, Any]], others: dict[str, list[str]]
) -> dict[str, Any]:
    """Play the episode until a reply is missing, or to its end."""
    environment = _environments[0]
    traces: list[Any] = []  # of finished exchanges
    agents = {}
    for name, config in _list_agent_configs(environment.config).items():
        given = list(replies)
        if name != _policy_names[0]:
            given = [{"text": text, "calls": [], "misuse": ""} for text in others.get(name, ())]
        agents[name] = _Seat(name, config, given, name == _policy_names[0], traces)
    policy = agents[_policy_names[0]]
    running = asyncio.ensure_future(_run_episode(environment, task, agents, traces))
    waiting = {name: seat.waiting_for_reply for name, seat in agents.items()}
    await asyncio.wait({running, *waiting.values()}, return_when=asyncio.FIRST_COMPLETED)
    for _ in range(_SETTLING_ROUNDS):
        await asyncio.sleep(0)
    if not running.done():
        result = {"messages": policy.list_messages(), "failed_calls": policy.list_failed_calls()}
        asked = [name for name, future in waiting.items() if future.done() and name != policy.name]
        if asked:
            result["ask"] = [asked[0], waiting[asked[0]].result()]
        running.cancel()
        with contextlib.suppress(BaseException):
            await running
        return result
    error = running.exception()
    if isinstance(error, _ScoringFailed):
        raise error.__cause__ or error
    if error is not None:
        return {"messages": [], "failed": _import_from_main_file("describe_error")(error)[:500]}
    return {"messages": policy.list_messages(), "scores": _collect_scores(policy.exchange.trace)}


async def _run_episode(
    environment: Any, task: Any, agents: dict[str, _Seat], traces: list[Any]
) -> None:
    import verifiers.v1 as vf

    seats = SimpleNamespace(**agents)
    await environment.setup(seats)
    await environment.run(task, seats)
    if agents[_policy_names[0]].exchange is None:
        raise ValueError("its environment ended without asking the agent for a reply")
    if type(environment).finalize is not vf.Env.finalize:
        await environment.finalize(task, vf.Episode(task=traces[0].task, traces=traces))


def _collect_scores(trace: Any) -> dict[str, Any]:
    return {
        "reward": trace.reward,
        "rewards": {
            name: reward.score for name, reward in trace.rewards.items() if reward is not None
        },
        "metrics": {name: value for name, value in trace.metrics.items() if value is not None},
    }


async def _list_tool_schemas() -> list[dict[str, Any]]:
    """List the schemas of the tools that the policy may call."""
    name = _policy_names[0]
    config = _list_agent_configs(_environments[0].config)[name]
    exchange = _Exchange(_Seat(name, config, [], True, []), _tasks[0])
    await exchange.open()
    return exchange.servers.list_schemas() if exchange.servers is not None else []


class _ScoringFailed(Exception):
    """The task's rewards raised, possibly because of the reply."""


class _Seat:
    """An agent as the package's `Agent`: `run(task)`, or `interaction(task)` turn by turn."""

    def __init__(
        self,
        name: str,
        config: Any,
        replies: Sequence[dict[str, Any]],
        is_policy: bool,
        traces: list[Any],
    ) -> None:
        self.name, self.config, self.trainable, self.is_policy = name, config, True, is_policy
        self.exchange: Any = None  # the newest one
        # Its result is the messages that the missing reply answers.
        self.waiting_for_reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._replies, self._traces = list(replies), traces

    async def run(self, task: Any, **options: Any) -> Any:
        if task.data.prompt is None:
            raise ValueError(
                "it has no prompt, and its environment sends no message before the agent's reply"
            )
        async with self.interaction(task, **options) as exchange:
            await exchange.turn()
        return exchange.trace

    @contextlib.asynccontextmanager
    async def interaction(self, task: Any, **options: Any) -> AsyncIterator[_Exchange]:
        if self.exchange is not None and self.is_policy:
            raise ValueError(
                "its environment uses the agent twice in an episode, which is not supported"
            )
        for name in ("runtime", "collect_artifacts"):
            if options.get(name):
                raise ValueError(
                    f"its environment runs an agent with {name}, which needs a container"
                )
        exchange = self.exchange = _Exchange(self, task)
        if _has_override(task, "setup"):
            await _call_hook(task.setup, task, exchange.trace)
        await exchange.open()
        yield exchange
        await exchange.close()
        self._traces.append(exchange.trace)

    def provision(self, task: Any = None) -> Any:
        raise ValueError("its environment asks for an agent's container, which is not supported")

    def list_messages(self) -> list[dict[str, str]]:
        return [] if self.exchange is None else self.exchange.list_messages()

    def list_failed_calls(self) -> list[int]:
        return [] if self.exchange is None else self.exchange.failed

    async def take_reply(self, exchange: _Exchange) -> dict[str, Any]:
        if not self._replies:
            if not self.waiting_for_reply.done():
                self.waiting_for_reply.set_result(exchange.list_messages())
            await asyncio.Event().wait()  # forever: this process ends
        return self._replies.pop(0)


async def _call_hook(function: Any, task: Any, trace: Any) -> Any:
    """Call a hook with the arguments that it names, and return its result."""
    available = {"task": task.data, "trace": trace, "runtime": None}
    parameters = inspect.signature(function).parameters
    arguments = {name: available[name] for name in parameters if name in available}
    result = function(**arguments)
    return await result if inspect.isawaitable(result) else result


class _Exchange:
    """The package's `Interaction`: each turn is the environment's message and the agent's reply."""

    def __init__(self, agent: _Seat, task: Any) -> None:
        import verifiers.v1 as vf
        from verifiers.v1.state import state_cls

        self._agent, self._task, self._is_over = agent, task, False
        self.servers: Any = None  # of its tools
        self.failed: list[int] = []  # indices of the last reply's failed calls
        trace_task = vf.TraceTask(
            type=type(task).__name__, data=task.data, key=task.key, hash=task.hash
        )
        self.trace = vf.Trace(
            task=trace_task, agent=vf.AgentInfo(config=agent.config), state=state_cls(type(task))()
        )
        self.trace.agent.name, self.trace.agent.trainable = agent.name, agent.trainable
        if task.data.system_prompt is not None:
            self._add_message(vf.SystemMessage(content=task.data.system_prompt))
        prompt = task.data.prompt
        for message in [prompt] if isinstance(prompt, str) else prompt or []:
            self._add_message(
                vf.UserMessage(content=message) if isinstance(message, str) else message
            )

    async def turn(self, message: Any = None) -> Any:
        """Return the reply to a message (text or list) or to the task's prompt; `terminated` once a stop applies."""
        import verifiers.v1 as vf

        if (message is None) != (self.trace.num_turns == 0 and self._task.data.prompt is not None):
            raise ValueError(
                "only the first turn of a task with a prompt may, and must, have no message"
            )
        if self._is_over or await self._should_stop():
            self._is_over = True
            return vf.Segment(messages=[], terminated=True)
        for part in [message] if isinstance(message, str) else message or []:
            self._add_message(
                vf.UserMessage(content=part) if isinstance(part, str) else _convert_message(part)
            )
        messages = []
        while True:
            reply = await self._agent.take_reply(self)
            messages.append(self._add_policy_message(reply["text"], reply["calls"]))
            if not reply["calls"] and not reply["misuse"]:
                return vf.Segment(messages=messages)
            messages += await self._run_calls(reply)
            if await self._should_stop():
                self._is_over = True
                return vf.Segment(messages=messages, terminated=True)

    async def open(self) -> None:
        """Start the tools of the task and of its task set, if any."""
        task_servers, taskset = self._task.toolsets(self._task.config), _tasksets[0]
        servers = [*taskset.toolsets(taskset.config), *task_servers]
        if servers and not self._agent.is_policy:
            servers = []  # the other agents only talk
        if servers:
            self.servers = _import_from_toolsets_file("ToolServers")(servers, self.trace)
            await self.servers.open(self._task, task_servers)

    def _add_policy_message(self, text: str, calls: Sequence[dict[str, Any]]) -> Any:
        """Add the policy's message, with its calls in the package's form."""
        import verifiers.v1 as vf

        turn = self.trace.num_turns + 1
        tool_calls = [
            vf.ToolCall(
                id=f"call_{turn}_{number}",
                name=call["name"],
                arguments=json.dumps(call["arguments"]),
            )
            for number, call in enumerate(calls)
        ]
        answer = vf.AssistantMessage(
            content=text, **({"tool_calls": tool_calls} if tool_calls else {})
        )
        self._add_message(answer, sampled=True)
        return answer

    async def _run_calls(self, reply: dict[str, Any]) -> list[Any]:
        """Run a reply's calls one after the other and return their messages, or the error for an unreadable call."""
        import verifiers.v1 as vf

        turn, self.failed = self.trace.num_turns, []
        if reply["misuse"]:
            messages = [
                vf.ToolMessage(tool_call_id=f"call_{turn}_0", content=f"error: {reply['misuse']}")
            ]
        else:
            messages = []
            for number, call in enumerate(reply["calls"]):
                text, has_failed = await self.servers.call_tool(call["name"], call["arguments"])
                self.failed += [number] * has_failed
                messages.append(
                    vf.ToolMessage(
                        tool_call_id=f"call_{turn}_{number}", content=text, name=call["name"]
                    )
                )
        for message in messages:
            self._add_message(message)
        return messages

    async def _should_stop(self) -> bool:
        max_turns = getattr(self._agent.config, "max_turns", None)
        if max_turns is not None and self.trace.num_turns >= max_turns:
            self.trace.stop("max_turns")
            return True
        for function in self._task.hooks("stop") if self.trace.num_turns else ():
            if await _call_hook(function, self._task, self.trace):
                self.trace.stop(function.__name__)
                return True
        return False

    async def close(self) -> None:
        """Finish the exchange: run the task's `finalize` and rewards."""
        self.trace.stop("user_closed")
        if _has_override(self._task, "finalize"):
            await _call_hook(self._task.finalize, self._task, self.trace)
        try:
            await self._task.score(self.trace)
        except Exception as error:
            raise _ScoringFailed from error
        self.trace.is_completed = self.trace.ok = True

    def list_messages(self) -> list[dict[str, str]]:
        """List the messages so far."""
        return [
            {"role": node.message.role, "content": _require_text(node.message.content)}
            for node in self.trace.nodes
        ]

    def _add_message(self, message: Any, sampled: bool = False) -> None:
        import verifiers.v1 as vf

        last = len(self.trace.nodes) - 1
        self.trace.nodes.append(
            vf.MessageNode(parent=last if last >= 0 else None, message=message, sampled=sampled)
        )


def _convert_message(message: Any) -> Any:
    """Convert a plain object to a message of the package; messages of the package pass unchanged."""
    if not isinstance(message, dict):
        return message
    import verifiers.v1 as vf

    types = {
        "system": vf.SystemMessage,
        "user": vf.UserMessage,
        "assistant": vf.AssistantMessage,
    }
    if message.get("role") not in types:
        raise ValueError(
            f"its environment sends a message as '{message.get('role')}', which is not supported"
        )
    return types[message["role"]](content=message["content"])


def _require_text(content: Any) -> str:
    if not isinstance(content, str):
        raise ValueError("a message has content other than text, which is not supported")
    return content
