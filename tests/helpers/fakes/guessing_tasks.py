"""Task sets of several turns for the fake package, with their environment: guess a number below ten."""

import os
import random
from types import SimpleNamespace

import verifiers.v1 as vf

__all__ = ["Guessing", "GuessingEnv"]


class State:
    guesses = 0


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
