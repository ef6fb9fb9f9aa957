"""The part of verifiers 0.4 used by the adapter, in plain dataclasses."""

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
class AssistantMessage:
    content: str
    role: str = "assistant"


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
    nodes: list
    rewards: dict = field(default_factory=dict)
    metrics: dict = field(default_factory=dict)

    @property
    def last_reply(self):
        return self.nodes[-1].message.content

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
        return [self.right] if kind == "reward" else []

    async def score(self, trace):
        trace.rewards["right"] = SimpleNamespace(score=await self.right(trace))
        trace.rewards["skipped"] = None
        trace.metrics["length"] = float(len(trace.last_reply))


class Taskset:
    def __init__(self, config):
        self.config = config

    def toolsets(self, config):
        return []

    def __iter__(self):
        return iter(self.load())
