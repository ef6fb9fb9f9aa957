"""A small policy, rewards and settings for tests of the Python API."""

import rl_core

TEXTS = ["Say e and nothing else: eeee. 1 + 2 = 3"] * 4


def small_policy(seed=0, **options):
    settings = rl_core.ModelSettings(
        preset="nano", vocab_size=300, context=64, device="cpu", **options
    )
    return rl_core.create_policy(TEXTS, settings, seed=seed)


def settings(**options):
    options = {"sampling": rl_core.SamplingSettings(max_completion_tokens=4), **options}
    return rl_core.PolicySettings(
        **{
            "iterations": 3,
            "prompts_per_iteration": 2,
            "group_size": 3,
            "learning_rate": 1e-2,
            "warmup_steps": 0,
            "checkpoint_every": 1,
            **options,
        }
    )


def length(trajectories):
    """Return the characters of the answer."""
    return [float(len(t.turns[-1].action)) for t in trajectories]


class Echo(rl_core.Environment):
    """Two levels, one turn; right when the answer begins with a letter below 'n'."""

    name = "echo"
    levels = ("low", "high")
    blocking = False

    @property
    def tools(self):
        return rl_core.Toolset([])

    def episode(self, seed, level):
        return EchoEpisode(seed, level)


class EchoEpisode(rl_core.Episode):
    def reset(self):
        return [{"role": "user", "content": f"{self.level} {self.seed % 3}"}]

    def act(self, text):
        success = text[:1] < "n"
        return rl_core.Step(terminated=True, reward=float(success), success=success, answer=text)


def weights(training):
    return [parameter.detach().clone() for parameter in training.model.parameters()]


def have_equal_tensors(a, b):
    return all(bool((x == y).all()) for x, y in zip(a, b, strict=True))
