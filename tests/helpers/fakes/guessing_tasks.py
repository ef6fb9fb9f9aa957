"""Task sets of several turns for the fake package, with their environment: guess a number below ten."""

import asyncio
import os
import random
from types import SimpleNamespace

import verifiers.v1 as vf

__all__ = ["Guessing", "GuessingEnv"]


class State:
    guesses = 0


async def explode():
    raise ArithmeticError("a judge divides by zero")


class Guesser(vf.Task):
    state_class = State

    def hooks(self, kind):
        return {"reward": [self.right], "stop": [self.gave_up]}.get(kind, [])

    async def setup(self, trace):
        trace.state.guesses = 10

    async def finalize(self, trace):
        trace.metrics["finalized"] = 1.0

    def gave_up(self, trace):
        return trace.last_reply == "I give up"

    async def right(self, trace):
        if trace.last_reply == "bad reward":
            raise RuntimeError("boom")
        if trace.last_reply == "bad group":
            async with asyncio.TaskGroup() as group:
                group.create_task(explode())
        return float(trace.last_reply == self.data.answer)


class Config(vf.EnvConfig):
    player = vf.AgentConfig(max_turns=4)
    polite = False


class GuessingEnv(vf.Env):
    config_class = Config

    async def setup(self, agents):
        assert agents.player.trainable

    async def run(self, task, agents):
        lucky = random.randint(0, 10**9)  # from the number of the task
        async with agents.player.interaction(task) as exchange:
            segment = await exchange.turn()
            while not segment.terminated and segment.last_reply != task.data.answer:
                if segment.last_reply == "bad environment":
                    raise KeyError("broken")
                if segment.last_reply == "chance":
                    exchange.trace.metrics["drawn"] = float(os.urandom(2)[0])
                    segment = await exchange.turn(f"{lucky} {os.urandom(8).hex()}")
                    continue
                word = "smaller" if segment.last_reply > task.data.answer else "greater"
                word = f"please {word}" if self.config.polite else word
                segment = await exchange.turn(
                    [{"role": "user", "content": word}] if self.config.polite else word
                )
        exchange.trace.record_reward("game", 1.0 if exchange.trace.num_turns < 3 else 0.5)
        exchange.trace.metrics["left"] = float(
            exchange.trace.state.guesses - exchange.trace.num_turns
        )

    async def finalize(self, task, episode):
        (trace,) = episode.traces
        trace.metrics["stopped"] = float(trace.stop_condition != "user_closed")


def data(number, **values):
    fields = dict(
        idx=number,
        name=None,
        system_prompt="guess",
        prompt="a number below ten?",
        answer=str(number % 10),
    )
    return SimpleNamespace(**{**fields, "id": number, **values})


class Guessing(vf.Taskset):
    def load(self):
        return [Guesser(data(number)) for number in range(self.config.count)]


class Unprompted(vf.Taskset):
    def load(self):
        return [Guesser(data(number, prompt=None)) for number in range(self.config.count)]


class Asking(GuessingEnv):
    """Says what its task does not."""

    async def run(self, task, agents):
        async with agents.player.interaction(task) as exchange:
            await exchange.turn(f"is it {task.data.answer}?")


class Two(vf.EnvConfig):
    one = vf.AgentConfig()
    two = vf.AgentConfig()


class Meeting(GuessingEnv):
    config_class = Two

    async def setup(self, agents):
        pass


class Pair(vf.EnvConfig):
    player = vf.AgentConfig(max_turns=4)
    friend = vf.AgentConfig(max_turns=2)


class Conversing(vf.Env):
    """A friend opens the conversation and answers twice; the player is scored. As `user-sim` of the package."""

    config_class = Pair

    async def setup(self, agents):
        agents.friend.trainable = False

    async def run(self, task, agents):
        friend_task = vf.Task(SimpleNamespace(prompt=None, system_prompt="open", idx=0, id=0))
        friend_task.config = None
        own = type(task)(SimpleNamespace(**{**vars(task.data), "prompt": None}))
        async with (
            agents.friend.interaction(friend_task) as friend,
            agents.player.interaction(own) as player,
        ):
            said = await friend.turn("hello")
            while not said.terminated:
                answer = await player.turn(said.last_reply)
                if answer.terminated:
                    break
                said = await friend.turn(answer.last_reply)

    async def finalize(self, task, episode):
        names = [trace.agent.name for trace in episode.traces]
        by_name = dict(zip(names, episode.traces, strict=True))
        assert not by_name["friend"].agent.trainable and by_name["friend"].ok
        by_name["player"].metrics["friend_turns"] = float(by_name["friend"].num_turns)


class Grouped(GuessingEnv):
    """Fails within a task group, whose message hides the reason."""

    async def run(self, task, agents):
        async def fail(text):
            await agents.player.run(task)
            raise LookupError(text)

        async with asyncio.TaskGroup() as group:
            group.create_task(fail("no such card"))


class Served(GuessingEnv):
    async def start(self):
        pass


class Repeated(GuessingEnv):
    async def run(self, task, agents):
        await agents.player.run(task)
        await agents.player.run(task)


class Silent(GuessingEnv):
    async def run(self, task, agents):
        pass
