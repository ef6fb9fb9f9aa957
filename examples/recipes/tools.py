"""GRPO over several turns with a tool: the policy learns to look at a hidden image before it answers."""

from pathlib import Path

from sums import FOLDER

import rl_core

SAMPLING = rl_core.SamplingSettings(max_completion_tokens=48, max_turns=4)


def build_demonstrations(environment, count):
    """Return conversations of the environment's teacher, who often errs or does not use the tool."""
    seeds = environment.seeds_of("train", "easy")
    return [
        {"messages": environment.demonstration(seeds[number], "easy").messages}
        for number in range(count)
    ]


def main(output=FOLDER / "tools", demonstrations=4000, epochs=5, iterations=60):
    output = Path(output)
    environment = rl_core.make_environment("pixel_grid")
    rows = build_demonstrations(environment, demonstrations)
    texts = [message["content"] for row in rows for message in row["messages"]]
    policy = rl_core.create_policy(
        texts, rl_core.ModelSettings(preset="tiny", vocab_size=512, context=192)
    )
    settings = rl_core.SFTSettings(epochs=epochs, batch_size=32, learning_rate=3e-3)
    rl_core.sft(policy, rows, settings=settings, output=output / "sft").run()
    evaluation = rl_core.EvaluationSettings(episodes=200, levels=("easy",), sampling=SAMPLING)
    before = rl_core.evaluate(policy, environment, settings=evaluation)
    trainer = rl_core.grpo(
        policy,
        environment=environment,
        settings=rl_core.PolicySettings(
            iterations=iterations,
            prompts_per_iteration=16,
            group_size=8,
            learning_rate=5e-4,
            curriculum=[{"name": "easy", "levels": {"easy": 1.0}}],
            sampling=SAMPLING,
        ),
        output=output / "policy",
    )
    trainer.run()
    trainer.save(output / "model")
    after = rl_core.evaluate(trainer.policy, environment, settings=evaluation)
    print(
        f"held-out episodes solved: {before.success_rate:.1%} before, {after.success_rate:.1%} after"
    )
    return trainer.metrics()


if __name__ == "__main__":
    main()
