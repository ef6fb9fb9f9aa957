"""The part of verifiers 0.4 used by the adapter, in plain dataclasses."""

import inspect
from dataclasses import dataclass, field
from types import SimpleNamespace


class TasksetConfig:
    def __init__(self, **values):
        self.id, self.count = values.pop("id", ""), values.pop("count", 20)
        if values:
            raise ValueError(f"extra inputs are not permitted: {sorted(values)}")

    @classmethod
    def model_validate(cls, values):
        return cls(**values)


@dataclass
class SystemMessage:
    content: str
    role: str = "system"


@dataclass
class UserMessage:
    content: str
    role: str = "user"


@dataclass
class ToolCall:
    id: str
    name: str
    arguments: str


@dataclass
class AssistantMessage:
    content: str
    role: str = "assistant"
    tool_calls: list | None = None


@dataclass
class ToolMessage:
    tool_call_id: str
    content: str
    name: str | None = None
    role: str = "tool"


@dataclass
class MessageNode:
    message: object
    parent: int | None = None
    sampled: bool = False


@dataclass
class TraceTask:
    type: str
    data: object
    key: str
    hash: str


@dataclass
class AgentInfo:
    config: object


@dataclass
class Trace:
    task: TraceTask
    agent: AgentInfo
    state: object = None
    nodes: list = field(default_factory=list)
    rewards: dict = field(default_factory=dict)
    metrics: dict = field(default_factory=dict)
    stop_condition: str | None = None

    @property
    def num_turns(self):
        return sum(node.sampled for node in self.nodes)

    @property
    def last_reply(self):
        return next((node.message.content for node in reversed(self.nodes) if node.sampled), "")

    def stop(self, condition):
        self.stop_condition = self.stop_condition or condition

    def record_reward(self, name, value, weight=1.0):
        self.rewards[name] = SimpleNamespace(score=value * weight)

    @property
    def reward(self):
        return sum(reward.score for reward in self.rewards.values() if reward is not None)


class Task:
    NEEDS_CONTAINER = False
    key = hash = "k"

    def __init__(self, data):
        self.data, self.config = data, None

    async def setup(self, trace, runtime):
        pass

    async def finalize(self, trace, runtime):
        pass

    def toolsets(self, config):
        return []

    def hooks(self, kind):
        return (
            [self.right] if kind == "reward" else []
        )  # others are in `metrics` and `stops` of subclasses

    async def right(self, trace):
        return 0.0

    async def score(self, trace):
        trace.rewards["right"] = SimpleNamespace(score=await self.right(trace))
        trace.rewards["skipped"] = None
        trace.metrics["length"] = float(len(trace.last_reply))


class Toolset:
    """A server of tools; calls see the state that `_pull_state` gives."""

    server_name = "shop"

    def __init__(self, config):
        self.config, self._state_cls, self.state = config, self.state_class, None

    async def setup(self):
        pass

    def _with_state(self, function):
        async def call(**arguments):
            self.state = await self._pull_state()
            result = await function(**arguments)
            await self._push_state(b"")
            return result

        call.__signature__ = inspect.signature(function)
        return call


class Taskset:
    def __init__(self, config):
        self.config = config

    def toolsets(self, config):
        return []

    def __iter__(self):
        return iter(self.load())


@dataclass
class AgentConfig:
    max_turns: int | None = None


@dataclass
class Segment:
    messages: list
    terminated: bool = False

    @property
    def last_reply(self):
        return self.messages[-1].content.strip() if self.messages else ""


@dataclass
class Episode:
    task: TraceTask
    traces: list


class EnvConfig:
    """Seats are the class's AgentConfigs; other fields are its other attributes."""

    def __init__(self, **values):
        names = [
            name
            for name in dir(type(self))
            if name[0] != "_" and not callable(getattr(type(self), name))
        ]
        self.fields = {name: values.pop(name, getattr(type(self), name)) for name in names}
        self.__dict__.update(self.fields)
        if values:
            raise ValueError(f"extra inputs are not permitted: {sorted(values)}")

    def __iter__(self):
        return iter(self.fields.items())

    @classmethod
    def model_validate(cls, values):
        return cls(**values)


class Env:
    config_class = EnvConfig

    def __init__(self, config):
        raise RuntimeError("makes containers")

    async def setup(self, agents):
        pass

    async def finalize(self, task, episode):
        pass

    async def start(self):
        pass

    async def stop(self):
        pass


class SingleConfig(EnvConfig):
    agent = AgentConfig()


class SingleAgentEnv(Env):
    config_class = SingleConfig

    async def run(self, task, agents):
        await agents.agent.run(task)
