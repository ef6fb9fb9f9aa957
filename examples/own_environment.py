"""A custom environment: several turns, a tool, levels, and demonstrations to start from.

The policy is asked for the number in a box. It may look with the tool, or guess. Its teacher looks in only half of the
episodes; supervised fine-tuning copies that, and GRPO then learns that looking pays.
"""

import random

import rl_core


def look(secret):
    """Return what the tool shows to the policy."""
    return f"it holds {secret}"


class BoxEpisode(rl_core.Episode):
    """One box: opening messages, then actions until the policy answers."""

    def __init__(self, seed, level, tools, choices):
        super().__init__(seed, level)
        # (level, seed) determines the episode.
        self.target = str(random.Random(f"{level}/{seed}").randrange(choices))
        # The tool's function gets this argument before those of the call.
        self.tools = tools.bind(self.target)
        self.prompt = "what is in the box ?"

    def reset(self):
        return [{"role": "user", "content": self.prompt}]

    def act(self, text):
        try:
            call = self.tools.parse(text)
        except rl_core.ToolMisuse as misuse:  # no such tool, or wrong arguments: tell the policy
            return rl_core.Step([{"role": "tool", "content": str(misuse)}], is_error=True)
        if call is not None:
            observation, is_error = self.tools.run(call)
            messages = [{"role": "tool", "content": observation}]
            return rl_core.Step(messages, tool_call=call, is_error=is_error)
        success = text.strip() == self.target
        return rl_core.Step(reward=float(success), terminated=True, answer=text, success=success)


class Box(rl_core.Environment):
    """Boxes with one of three numbers (easy) or of six (hard)."""

    name = "box"
    levels = ("easy", "hard")
    blocking = False  # `act` only computes; omit this if it waits for a server or a subprocess

    @property
    def tools(self):
        return rl_core.Toolset([rl_core.Tool("look", "Look into the box.", {}, look)])

    def episode(self, seed, level):
        self.check_level(level)
        return BoxEpisode(seed, level, self.tools, 3 if level == "easy" else 6)

    def demonstration(self, seed, level):
        """Return a demonstration of the teacher, who looks half of the time and guesses otherwise."""
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
    rows = []
    for number in range(300):
        for level in Box.levels:
            seed = environment.seeds_of("train", level)[number]
            rows.append({"messages": environment.demonstration(seed, level).messages})
    texts = [message["content"] for row in rows for message in row["messages"]]
    model_settings = rl_core.ModelSettings(preset="nano", vocab_size=300, context=64)
    model = rl_core.create_policy(texts, model_settings)
    sft_settings = rl_core.SFTSettings(epochs=30, learning_rate=2e-3, batch_size=32)
    rl_core.sft(model, rows, settings=sft_settings).run()
    sampling = rl_core.SamplingSettings(max_completion_tokens=32, max_turns=3)
    evaluation = rl_core.EvaluationSettings(episodes=100, sampling=sampling)
    before = rl_core.evaluate(model, environment, settings=evaluation)
    settings = rl_core.PolicySettings(
        iterations=iterations, prompts_per_iteration=32, learning_rate=2e-3, sampling=sampling
    )
    trainer = rl_core.grpo(
        model, environment=environment, settings=settings, tracker="terminal", output=output
    )
    trainer.run()
    after = rl_core.evaluate(trainer.policy, environment, settings=evaluation)
    for name, result in (("after SFT", before), ("after GRPO", after)):
        num_looks = sum(t.turns[0].tool_call is not None for t in result.trajectories)
        share = num_looks / len(result.trajectories)
        low, high = result.interval
        success = f"{result.success_rate:.0%} right [{low:.0%}, {high:.0%}]"
        print(f"{name}: {success}, looked in {share:.0%}")
    return before.success_rate, after.success_rate


if __name__ == "__main__":
    main()
