"""A file of questions and a reward function: the shortest way from a data set to GRPO.

Every column of a row reaches the reward function by its name. The same in a configuration file, where only the reward
is Python:

    environment: {name: prompts, options: {path: reviews.jsonl, heldout: 0.2}}
    stages: {policy: {rewards: {"prompts_file.py:sign": 1.0}}}
"""

import json
from pathlib import Path

import rl_core


def sign(trajectories, answer):
    """Return the share of each completion's characters that are the right sign; `answer` is the column of that name."""
    pairs = zip(trajectories, answer, strict=True)
    return [t.completion.count(right) / max(len(t.completion), 1) for t, right in pairs]


def write_rows(path):
    """Write a file like yours: {"prompt": ..., "answer": ...} and any other columns."""
    adjectives_by_sign = {
        "+": ("great", "lovely", "fine", "superb"),
        "-": ("dull", "awful", "poor", "weak"),
    }
    things = ("film", "book", "song", "play", "dish")
    rows = [
        {"prompt": f"{adjective} {thing}", "answer": answer}
        for answer, adjectives in adjectives_by_sign.items()
        for adjective in adjectives
        for thing in things
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main(output="outputs/prompts_file", iterations=60):
    output = Path(output)
    output.mkdir(parents=True, exist_ok=True)
    path = output / "reviews.jsonl"
    write_rows(path)
    environment = rl_core.make_environment("prompts", {"path": str(path), "heldout": 0.2})
    model_settings = rl_core.ModelSettings(preset="nano", vocab_size=300)
    model = rl_core.create_policy(["great film + dull book -"], model_settings)
    trainer = rl_core.grpo(  # to train on all rows, pass `prompts=path` instead of an environment
        model=model,
        environment=environment,
        reward=sign,
        settings=rl_core.PolicySettings(
            iterations=iterations,
            prompts_per_iteration=8,
            group_size=8,
            learning_rate=6e-3,
            eval_every=20,
            sampling=rl_core.SamplingSettings(max_completion_tokens=6),
        ),
    )
    trainer.run()
    trainer.save(output / "model")
    rewards = trainer.metrics()["eval/reward_mean"].dropna()
    print(f"reward on held-out questions: {rewards.iloc[0]:.2f} -> {rewards.iloc[-1]:.2f}")
    return rewards


if __name__ == "__main__":
    main()
