"""Child process of `verifiers`: loads the task set and scores replies. See `verifiers_tasks`."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import itertools
from typing import Any

__all__ = ["handle", "start"]

_tasks: list[Any] = []


def start(setup: dict[str, Any]) -> None:
    """Import the package and load the task set."""
    _tasks.extend(_load(setup["taskset"], setup["config"], setup["max_tasks"]))


def handle(request: dict[str, Any]) -> Any:
    """One request: {"do": "rows"} or {"do": "score", "index", "messages", "reply"}; None = the task differs."""
    if request["do"] == "rows":
        return [_row(task) for task in _tasks]
    task = _tasks[request["index"]]
    if _row(task)["messages"] != request["messages"]:
        return None
    return asyncio.run(_score(task, request["reply"]))


def _load(name: str, config: dict[str, Any], max_tasks: int) -> list[Any]:
    """First `max_tasks` tasks of an installed task set, or of a class at 'package.module:Class'."""
    from verifiers.v1.utils import loaders

    if ":" in name:
        module, _, attribute = name.partition(":")
        cls = getattr(importlib.import_module(module), attribute)
    else:
        cls = loaders.taskset_class(name)
    generic = loaders.concrete_type(cls, loaders.TasksetConfig, origin=loaders.Taskset) or loaders.TasksetConfig
    taskset = cls(generic.model_validate({**config, **({} if ":" in name else {"id": name})}))
    tasks = list(itertools.islice(taskset, max_tasks))
    if not tasks:
        raise ValueError("the task set has no tasks")
    for part in (taskset, tasks[0]):
        if part.toolsets(part.config):
            raise ValueError("its tasks define their own tools; only single-turn task sets are supported")
    _refuse_runtime(tasks[0])
    return tasks


def _refuse_runtime(task: Any) -> None:
    """Raise for a task that needs a sandbox, without which some of its rewards would silently be omitted."""
    import verifiers.v1 as vf

    if task.NEEDS_CONTAINER:
        raise ValueError("its tasks need a container; only single-turn task sets are supported")
    for name in ("setup", "finalize"):
        if getattr(type(task), name) is not getattr(vf.Task, name):
            raise ValueError(f"its tasks have a {name}(), which needs a runtime; only tasks without one are supported")
    for function in task.hooks("reward"):
        runtime = inspect.signature(function).parameters.get("runtime")
        if runtime is not None and runtime.default is inspect.Parameter.empty:
            raise ValueError(f"its reward '{function.__name__}' needs a runtime; only plain rewards are supported")


def _row(task: Any) -> dict[str, Any]:
    """Messages, kind and target of a task, for the parent process."""
    data = task.data
    if data.prompt is None:
        raise ValueError(f"task {data.idx} has no prompt: its simulated user starts, which needs a multi-turn harness")
    messages = [] if data.system_prompt is None else [{"role": "system", "content": data.system_prompt}]
    if isinstance(data.prompt, str):
        messages.append({"role": "user", "content": data.prompt})
    else:
        messages += [{"role": message.role, "content": _text(message.content, data.idx)} for message in data.prompt]
    answer = getattr(data, "answer", None)
    return {
        "messages": messages,
        "kind": data.name or "",
        "target": answer if isinstance(answer, str) else "",
    }


def _text(content: Any, index: int) -> str:
    if not isinstance(content, str):
        raise ValueError(f"task {index} has a prompt with non-text content")
    return content


async def _score(task: Any, reply: str) -> dict[str, Any]:
    """Rewards and metrics of one reply, from the task's own functions and judges."""
    import verifiers.v1 as vf
    from verifiers.v1.configs.agent import AgentConfig

    prompt = _row(task)["messages"]
    types = {"system": vf.SystemMessage, "user": vf.UserMessage, "assistant": vf.AssistantMessage}
    nodes = [
        vf.MessageNode(parent=index - 1 if index else None, message=types[message["role"]](content=message["content"]))
        for index, message in enumerate(prompt)
    ]
    nodes.append(vf.MessageNode(parent=len(nodes) - 1, message=vf.AssistantMessage(content=reply), sampled=True))
    trace = vf.Trace(
        task=vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash),
        agent=vf.AgentInfo(config=AgentConfig()),  # required field; no agent runs
        nodes=nodes,
    )
    await task.score(trace)
    return {
        "reward": trace.reward,
        "rewards": {name: reward.score for name, reward in trace.rewards.items() if reward is not None},
        "metrics": {name: value for name, value in trace.metrics.items() if value is not None},
    }
