"""A reward of your own on rows of data: columns, several parts with weights, validation, an early stop.

Rows have a `prompt` and any other columns; a reward function reads them from `trajectory.row`. The same function works
in a configuration file, as `rewards: {own_reward:wanted_letters: 1.0}`.
"""

import rl_core


def wanted_letters(trajectories):
    """Share of the characters that the row asks for: a list of numbers, one for each trajectory."""
    rewards = []
    for trajectory in trajectories:
        text = trajectory.completion
        rewards.append(
            sum(letter in trajectory.row["letters"] for letter in text) / max(len(text), 1)
        )
    return rewards


class Report:
    """A callback: says how validation goes, and stops when it is good enough."""

    def __init__(self, enough):
        self.enough, self.seen = enough, []

    def on_evaluation(self, event):
        self.seen.append(event.metrics["eval/reward_mean"])
        print(f"after iteration {event.iteration}: validation reward {self.seen[-1]:.2f}")
        if self.seen[-1] >= self.enough:
            event.stop("good enough")


def main(output=None, iterations=80):
    rows = [
        {"prompt": "vowels please", "letters": "aeiou"},
        {"prompt": "digits please", "letters": "0123456789"},
    ]
    model = rl_core.create_policy(
        [row["prompt"] for row in rows], rl_core.ModelSettings(preset="nano", vocab_size=300)
    )
    report = Report(enough=0.7)
    trainer = rl_core.grpo(
        model=model,
        prompts=rows,
        heldout_prompts=rows * 16,
        reward={
            wanted_letters: 1.0,
            "length": 0.05,
        },  # "length" ships with the library: it rewards brevity
        settings=rl_core.PolicySettings(
            iterations=iterations,
            prompts_per_iteration=4,
            group_size=16,
            learning_rate=6e-3,
            eval_every=10,
            sampling=rl_core.SamplingSettings(max_completion_tokens=8),
        ),
        callbacks=[report],
        output=output,
    )
    outcome = trainer.run()
    print(f"stopped: {outcome.stop_reason}, after {outcome.iterations} iterations")
    return report.seen


if __name__ == "__main__":
    main()
