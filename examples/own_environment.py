"""An environment of your own: several turns, a tool, levels, and demonstrations to start from.

The policy is asked for the number in a box. It may look with the tool, or guess. Its teacher looks in only half of the
episodes; supervised fine-tuning copies that, and GRPO then learns that looking pays.
"""

import random

import rl_core


def look(secret):
    """The tool's function: what it returns is shown to the policy."""
    return f"it holds {secret}"


class BoxEpisode(rl_core.Episode):
    """One box: opening messages, then actions until an answer is given."""

    def __init__(self, seed, level, tools, choices):
        super().__init__(seed, level)
        self.target = str(
            random.Random(f"{level}/{seed}").randrange(choices)
        )  # (level, seed) determines the episode
        self.tools = tools.bind(
            self.target
        )  # what the tool's function gets before the call's own arguments
        self.prompt = "what is in the box ?"

    def reset(self):
        return [{"role": "user", "content": self.prompt}]

    def act(self, text):
        try:
            call = self.tools.parse(text)
        except rl_core.ToolMisuse as misuse:  # no such tool, or wrong arguments: the policy is told
            return rl_core.Step([{"role": "tool", "content": str(misuse)}], is_error=True)
        if call is not None:
            observation, is_error = self.tools.run(call)
            return rl_core.Step(
                [{"role": "tool", "content": observation}], tool_call=call, is_error=is_error
            )
        success = text.strip() == self.target
        return rl_core.Step(reward=float(success), terminated=True, answer=text, success=success)


class Box(rl_core.Environment):
    """Boxes with one of three numbers (easy) or of six (hard)."""

    name = "box"
    levels = ("easy", "hard")
    blocking = (
        False  # `act` only computes; leave it out where it waits for a server or a subprocess
    )

    @property
    def tools(self):
        return rl_core.Toolset([rl_core.Tool("look", "Look into the box.", {}, look)])

    def episode(self, seed, level):
        self.check_level(level)
        return BoxEpisode(seed, level, self.tools, 3 if level == "easy" else 6)

    def demonstration(self, seed, level):
        """The teacher: looks half of the time, guesses otherwise."""
        episode, rng = self.episode(seed, level), random.Random(f"teacher/{level}/{seed}")
        messages = episode.reset()
        answer = str(rng.randrange(3 if level == "easy" else 6))
        if rng.random() < 0.5:
            step = episode.step("look")
            messages += [{"role": "assistant", "content": "look"}, *step.messages]
            answer = episode.target
        messages.append({"role": "assistant", "content": answer})
        return rl_core.Demonstration(messages, level, "box", seed, success=answer == episode.target)


def main(output=None, iterations=60):
    environment = Box()
    rows = [
        {
            "messages": environment.demonstration(
                environment.seeds_of("train", level)[number], level
            ).messages
        }
        for number in range(300)
        for level in Box.levels
    ]
    texts = [message["content"] for row in rows for message in row["messages"]]
    model = rl_core.create_policy(
        texts, rl_core.ModelSettings(preset="nano", vocab_size=300, context=64)
    )
    rl_core.sft(
        model, rows, settings=rl_core.SFTSettings(epochs=30, learning_rate=2e-3, batch_size=32)
    ).run()
    sampling = rl_core.SamplingSettings(max_completion_tokens=32, max_turns=3)
    plays = rl_core.EvaluationSettings(episodes=100, sampling=sampling)
    before = rl_core.evaluate(model, environment, settings=plays)
    trainer = rl_core.grpo(
        model=model,
        environment=environment,
        settings=rl_core.PolicySettings(
            iterations=iterations, prompts_per_iteration=32, learning_rate=4e-3, sampling=sampling
        ),
        tracker="terminal",
        output=output,
    )
    trainer.run()
    after = rl_core.evaluate(trainer.policy, environment, settings=plays)
    for name, result in (("after SFT", before), ("after GRPO", after)):
        looked = sum(t.turns[0].tool_call is not None for t in result.trajectories) / len(
            result.trajectories
        )
        low, high = result.interval
        print(
            f"{name}: {result.success_rate:.0%} right [{low:.0%}, {high:.0%}], looked in {looked:.0%}"
        )
    return before.success_rate, after.success_rate


if __name__ == "__main__":
    main()
