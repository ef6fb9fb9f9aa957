"""A task set with a custom tool for the fake package, and some whose tools cannot run here."""

from types import SimpleNamespace

import verifiers.v1 as vf

__all__ = ["Shop"]


class State:
    asked = 0


class Prices(vf.Toolset):
    state_class = State

    async def setup_task(self, task):
        self.tax = len(task.answer) * 0 + 1

    async def price(self, item: str, count: int = 1):
        self.state.asked += 1
        return {"tea": 3}[item] * count + self.tax

    def register(self, mcp):
        mcp.add_tool(self._with_state(self.price), "price", "Price of some items.")


class Shopper(vf.Task):
    state_class = State

    def toolsets(self, config):
        return [Prices(SimpleNamespace())]

    def hooks(self, kind):
        return {"reward": [self.right], "stop": [self.asked_too_often]}.get(kind, [])

    def asked_too_often(self, trace):
        return trace.state.asked > 3

    async def right(self, trace):
        trace.metrics["asked"] = float(trace.state.asked)
        trace.metrics["calls"] = float(
            sum(len(node.message.tool_calls or ()) for node in trace.nodes if node.sampled)
        )
        return float(trace.last_reply == self.data.answer)


def data(number):
    return SimpleNamespace(
        idx=number,
        name=None,
        system_prompt="shop",
        prompt=f"{number} tea?",
        answer=str(3 * number + 1),
    )


class Shop(vf.Taskset):
    tasks = Shopper

    def load(self):
        return [self.tasks(data(number)) for number in range(20)]


def _needing(**config):
    class Needing(Shopper):
        def toolsets(self, task_config):
            return [Prices(SimpleNamespace(**config))]

    class Set(Shop):
        tasks = Needing

    return Set


class DockerConfig:
    pass


Elsewhere = _needing(url="http://127.0.0.1:1")
Inside = _needing(colocated=True)
Boxed = _needing(runtime=DockerConfig())


class Twice(Shop):
    def toolsets(self, config):
        return [Prices(SimpleNamespace())]
