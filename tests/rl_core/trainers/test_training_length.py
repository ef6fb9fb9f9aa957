"""Training length: the smaller number of steps of `epochs` and `max_steps` applies, and a sentence says which."""

import pytest

from rl_core.settings import SFTSettings
from rl_core.trainers.supervised_trainer import compute_training_length


@pytest.mark.parametrize(
    ("epochs", "max_steps", "steps", "words"),
    [
        (3.0, None, 30, ""),
        (3.0, 12, 12, "max_steps 12 ends it after 1.2 epochs, not epochs: 3 (30 steps)"),
        (3.0, 30, 30, "epochs: 3 (30 steps) ends it, not max_steps 30"),
        (
            0.55,
            100,
            6,
            "epochs: 0.55 (6 steps) ends it, not max_steps 100",
        ),  # 5.5 steps, rounded up
    ],
)
def test_the_limit_that_binds_is_named(epochs, max_steps, steps, words):
    settings = SFTSettings(epochs=epochs, max_steps=max_steps)
    assert compute_training_length(settings, batches_per_epoch=10) == (steps, words)
