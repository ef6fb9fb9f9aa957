"""A custom reward on rows of data: columns, several weighted components, validation, early stopping.

Rows have a `prompt` and any other columns; a reward function reads them from `trajectory.row`. Use the same function in
a configuration file as `rewards: {own_reward:wanted_letters: 1.0}`.
"""

import rl_core


def wanted_letters(trajectories):
    """Return the share of characters that the row asks for: one number per trajectory."""
    rewards = []
    for trajectory in trajectories:
        text, letters = trajectory.completion, trajectory.row["letters"]
        rewards.append(sum(letter in letters for letter in text) / max(len(text), 1))
    return rewards


class Report:
    """Callback that prints the validation reward and stops training when it reaches the target."""

    def __init__(self, target):
        self.target, self.rewards = target, []

    def on_evaluation(self, event):
        reward = event.metrics["eval/reward_mean"]
        self.rewards.append(reward)
        print(f"after iteration {event.iteration}: validation reward {reward:.2f}")
        if reward >= self.target:
            event.stop("target reached")


def main(output=None, iterations=80):
    rows = [
        {"prompt": "vowels please", "letters": "aeiou"},
        {"prompt": "digits please", "letters": "0123456789"},
    ]
    model_settings = rl_core.ModelSettings(preset="nano", vocab_size=300)
    model = rl_core.create_policy([row["prompt"] for row in rows], model_settings)
    report = Report(target=0.7)
    trainer = rl_core.grpo(
        model=model,
        prompts=rows,
        heldout_prompts=rows * 16,
        reward={wanted_letters: 1.0, "length": 0.05},  # built-in "length" rewards brevity
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
    return report.rewards


if __name__ == "__main__":
    main()
