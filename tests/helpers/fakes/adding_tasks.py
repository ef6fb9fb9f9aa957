"""A task set for the fake package, with tasks that cannot be played in other classes."""

import os
from types import SimpleNamespace

import verifiers.v1 as vf

__all__ = ["Adding"]


class Adder(vf.Task):
    async def right(self, trace):
        reply = trace.last_reply
        if reply == "hang":
            while True:
                pass
        if reply == "boom":
            raise RuntimeError("boom")
        if reply == "variable":
            return float("SECRET_TOKEN" in os.environ) + 2.0 * float("JUDGE_KEY" in os.environ)
        parents = [node.parent for node in trace.nodes]
        roles = [node.message.role for node in trace.nodes]
        assert parents == [None, 0, 1] and roles[1:] == ["user", "assistant"], (parents, roles)
        return float(reply == self.data.answer)


def data(number, **values):
    fields = dict(
        idx=number, name=None, system_prompt="add", prompt=f"{number}+1?", answer=str(number + 1)
    )
    return SimpleNamespace(**{**fields, **values})


class Adding(vf.Taskset):
    def load(self):
        return [Adder(data(number)) for number in range(self.config.count)]


class Talking(Adding):
    def load(self):
        hello = vf.UserMessage("hello")
        return [
            Adder(data(n, system_prompt=None, prompt=[hello, vf.UserMessage(f"{n}+1?")]))
            for n in range(20)
        ]


class Repeating(Adding):
    def load(self):
        return [Adder(data(3)) for _ in range(20)]


class Shuffled(Adding):
    def load(self):
        tasks = super().load()
        first = int.from_bytes(os.urandom(4), "little") % len(
            tasks
        )  # process numbers begin at 1 in each child
        return tasks[first:] + tasks[:first]


class Boxed(Adder):
    NEEDS_CONTAINER = True


class Prepared(Adder):
    async def setup(self, trace, runtime):
        pass


class Running(Adder):
    async def right(self, trace, runtime):
        return 1.0


class OfContainers(Adding):
    def load(self):
        return [Boxed(data(1))]


class OfSetups(Adding):
    def load(self):
        return [Prepared(data(1))]


class OfRuntimes(Adding):
    def load(self):
        return [Running(data(1))]


class OfUsers(Adding):
    def load(self):
        return [Adder(data(1, prompt=None))]


class Empty(Adding):
    def load(self):
        return []
