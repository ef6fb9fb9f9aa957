"""A small world and a vector of them with the interface of gymnasium's `VectorEnv`, where gymnasium need not be there.

The walker stands at an integer, moves by -1 or +1 (discrete) or by its clipped action (continuous), and earns where
it stands. Reaching `goal` terminates, `limit` steps truncate. A seed decides where it starts.
"""

import numpy as np


class Discrete:
    def __init__(self, n, start=0):
        self.n, self.start = n, start


class Box:
    def __init__(self, low, high, shape, dtype=np.float32):
        self.low, self.high = np.full(shape, low, dtype), np.full(shape, high, dtype)
        self.shape, self.dtype = shape, np.dtype(dtype)


class Tuple:
    pass


class Walker:
    """One walker; `start` of the action space is 0, or 5."""

    def __init__(
        self, goal=4, limit=6, *, continuous=False, action_start=0, fails_at=None, drifts=False
    ):
        self.goal, self.limit, self.continuous = goal, limit, continuous
        self.fails_at, self.drifts = fails_at, drifts
        self.observation_space = Box(-np.inf, np.inf, (2,))
        self.action_space = Box(-1.0, 1.0, (1,)) if continuous else Discrete(2, action_start)
        self.calls = 0
        self.taken = []

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self.draw = np.random.default_rng(seed)
        self.place, self.time = float(self.draw.integers(0, 3)), 0
        if self.drifts:  # something that no seed decides
            self.place += self.calls
        return self._seen(), {}

    def step(self, action):
        self.calls += 1
        self.taken.append(np.array(action))
        if self.fails_at is not None and self.calls >= self.fails_at:
            raise ValueError("the floor gave way")
        move = (
            float(action[0])
            if self.continuous
            else 2.0 * (int(action) - self.action_space.start) - 1
        )
        self.place, self.time = self.place + move + 0.1 * self.draw.random(), self.time + 1
        terminated = self.place >= self.goal
        return self._seen(), self.place, terminated, self.time >= self.limit and not terminated, {}

    def _seen(self):
        return np.array([self.place, self.time], np.float32)

    def close(self):
        self.closed = True


class WalkerVector:
    """Walkers side by side, reset as gymnasium's three autoreset modes say."""

    def __init__(self, walkers, mode="Disabled"):
        self.walkers, self.mode = walkers, mode
        self.num_envs = len(walkers)
        self.metadata = {"autoreset_mode": mode}
        self.single_observation_space, self.single_action_space = (
            walkers[0].observation_space,
            walkers[0].action_space,
        )
        self.ended = [False] * len(walkers)
        self.seen = [None] * len(walkers)

    def reset(self, *, seed=None, options=None):
        mask = (options or {}).get("reset_mask", np.ones(self.num_envs, bool))
        for i, walker in enumerate(self.walkers):
            if mask[i]:
                self.seen[i], _ = walker.reset(seed=seed[i] if isinstance(seed, list) else seed + i)
                self.ended[i] = False
        return np.stack(self.seen), {}

    def step(self, actions):
        rewards, terminated, truncated = (
            np.zeros(self.num_envs),
            [False] * self.num_envs,
            [False] * self.num_envs,
        )
        infos = {}
        for i, walker in enumerate(self.walkers):
            if self.ended[i]:
                assert self.mode == "NextStep", "an ended episode was stepped"
                self.seen[i], _ = walker.reset()
                self.ended[i] = False
                continue
            self.seen[i], rewards[i], terminated[i], truncated[i], _ = walker.step(actions[i])
            if terminated[i] or truncated[i]:
                if self.mode == "SameStep":
                    infos.setdefault("final_obs", np.full(self.num_envs, None, object))[i] = (
                        self.seen[i]
                    )
                    self.seen[i], _ = walker.reset()
                else:
                    self.ended[i] = True
        return np.stack(self.seen), rewards, np.array(terminated), np.array(truncated), infos

    def close(self):
        for walker in self.walkers:
            walker.close()


def walkers(count, mode="Disabled", **options):
    """Make a vector of walkers."""
    return WalkerVector([Walker(**options) for _ in range(count)], mode)
