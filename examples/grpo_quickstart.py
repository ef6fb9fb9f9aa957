"""GRPO in ten lines: prompts, a reward function, any model. Runs in seconds on a CPU, without a download."""

import rl_core


def vowels(trajectories):
    return [sum(map("aeiou".count, t.completion)) / (len(t.completion) or 1) for t in trajectories]


def main(output="outputs/quickstart"):
    prompts = ["Say something with many vowels.", "How does an owl call?", "What does a baby say?"]
    model = rl_core.create_policy(prompts)  # small and untrained; or name a folder or hub model
    sampling = rl_core.SamplingSettings(max_completion_tokens=16)
    settings = rl_core.PolicySettings(
        iterations=30, learning_rate=3e-3, prompts_per_iteration=3, sampling=sampling
    )
    trainer = rl_core.grpo(
        model, prompts=prompts, reward=vowels, settings=settings, tracker="terminal"
    )
    trainer.run()
    trainer.save(output)
    return trainer


if __name__ == "__main__":
    main()
