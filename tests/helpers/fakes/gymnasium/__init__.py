"""The part of gymnasium used by the adapter."""

from typing import ClassVar


class Discrete:
    def __init__(self, n, start=0):
        self.n, self.start = n, start


class Text:
    def contains(self, text):
        return text.isalpha()


class Box:
    pass


class Env:
    pass


class Line(Env):
    """Walk from 0 to the goal; renders in colour. A seed moves the goal."""

    metadata: ClassVar = {"render_modes": ["ansi"]}
    action_space = Discrete(2, start=5)

    def __init__(self, render_mode=None, length=3, reported=None):
        self.render_mode, self.length, self.reported, self.closed = render_mode, length, reported, 0

    def reset(self, *, seed):
        self.place, self.goal, self.seed = 0, self.length + seed % 2, seed
        return self.place, {}

    def step(self, action):
        self.place += {5: -1, 6: 1}[action]
        done = self.place == self.goal
        info = {} if self.reported is None else {"is_success": self.reported}
        return self.place, 1.0 if done else -0.5, done, self.place < -1, info

    def render(self):
        cells = ["."] * self.goal + ["G"]
        cells[max(self.place, 0)] = f"\x1b[41m{cells[max(self.place, 0)]}\x1b[0m"
        return "\n" + "".join(cells) + "\n"

    def close(self):
        self.closed += 1


class Silent(Line):
    metadata: ClassVar = {"render_modes": []}


class Talk(Silent):
    action_space = Text()

    def step(self, action):
        return {"said": action, "at": (1.23456, 7)}, 0.0, action == "bye", False, {}


class Arm(Silent):
    action_space = Box()


class Cliff(Line):
    action_space = Discrete(4)

    def step(self, action):
        return 0, -1.0, action == 1, False, {}


CREATED = []


def make(id, **options):
    classes = {
        "Line-v0": Line,
        "Silent-v0": Silent,
        "Talk-v0": Talk,
        "Arm-v0": Arm,
        "CliffWalking-v1": Cliff,
    }
    if id not in classes:
        raise LookupError(f"no environment {id}")
    CREATED.append(classes[id](**options))
    return CREATED[-1]
