"""State of a rollout."""


class State:
    pass


def state_cls(cls):
    return getattr(cls, "state_class", State)
