"""GRPO with a custom reward: the base model learns to give the right answer, from rewards alone."""

from pathlib import Path

from sums import FOLDER, list_sums, make_base_model, measure_success, write_rows

import rl_core


def correct(trajectories, answer):
    """Return 1 for the right number, else 0; `answer` is the column of the data file."""
    return [float(t.completion.strip() == a) for t, a in zip(trajectories, answer, strict=True)]


def main(output=FOLDER / "grpo_reward", iterations=60):
    base = make_base_model()
    prompts = write_rows(Path(output) / "questions.jsonl", list_sums())
    trainer = rl_core.grpo(
        str(base),
        prompts=prompts,
        reward=correct,
        settings=rl_core.PolicySettings(
            iterations=iterations,
            prompts_per_iteration=16,
            group_size=8,
            learning_rate=3e-4,
            sampling=rl_core.SamplingSettings(max_completion_tokens=8),
        ),
        output=output,
    )
    trainer.run()
    trainer.save(Path(output) / "model")
    before, after = measure_success(base), measure_success(trainer.policy)
    print(f"right answers: {before:.1%} before, {after:.1%} after")
    return trainer.metrics()


if __name__ == "__main__":
    main()
