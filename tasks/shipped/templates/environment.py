"""An environment to start from: name the largest of some digits.

An environment is a family of episodes; (level, seed) determines one of them. Check yours before training:

    posttrain validate FOLDER/config.yaml --import-code

Check that it depends only on level, seed and actions (runs the pipeline several times; shorten it with --set):

    posttrain check resume FOLDER/config.yaml
"""

import random

from rl_core.environments import Demonstration, Environment, Episode, Step, Toolset

DIGITS = {"easy": 3, "hard": 6}  # level -> digits in a question


class LargestEpisode(Episode):
    """One question, one answer."""

    def __init__(self, seed: int, level: str) -> None:
        super().__init__(seed, level)
        rng = random.Random(f"{level}:{seed}")  # depends only on level and seed
        digits = [str(rng.randrange(10)) for _ in range(DIGITS[level])]
        self.kind = "largest"
        self.prompt = "largest of " + " ".join(digits)
        self.target = max(digits)
        self.digits = digits

    def reset(self) -> list:
        """Return the opening messages."""
        return [{"role": "user", "content": self.prompt}]

    def act(self, text: str) -> Step:
        """Judge the policy's answer; the reward is 1 if it is right."""
        answer = text.strip()
        success = answer == self.target
        return Step(reward=float(success), terminated=True, answer=answer, success=success)


class Largest(Environment):
    """The family of questions."""

    name = "largest"
    levels = ("easy", "hard")
    tools = Toolset([])  # the policy has no tools to call
    # Steps only compute. Remove this line if `step` waits for a server or a slow tool.
    blocking = False

    def __init__(self, skill: float = 1.0) -> None:
        """Create the environment.

        Args:
            skill: share of the demonstrator's answers that are right.
        """
        super().__init__()
        self.skill = skill

    def episode(self, seed: int, level: str) -> LargestEpisode:
        """Create an episode."""
        self.check_level(level)
        return LargestEpisode(seed, level)

    def demonstration(self, seed: int, level: str) -> Demonstration:
        """Write out one episode for SFT; leave this method out if you have no demonstrator."""
        episode = self.episode(seed, level)
        rng = random.Random(f"demonstrator:{level}:{seed}")
        answer = episode.target if rng.random() < self.skill else rng.choice(episode.digits)
        messages = [*episode.reset(), {"role": "assistant", "content": answer}]
        return Demonstration(messages, level, episode.kind, seed, success=answer == episode.target)
