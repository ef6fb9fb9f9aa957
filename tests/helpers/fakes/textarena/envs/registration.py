"""The registry of the stand-in's games."""

from types import SimpleNamespace

import textarena as ta

ENV_REGISTRY = {
    f"{name}{suffix}": SimpleNamespace(make=game)
    for name, game in {
        "GuessTheNumber-v0": ta.GuessTheNumber,
        "Nim-v0": ta.Nim,
        "Riddle-v0": ta.Riddle,
        "Rounds-v0": ta.Rounds,
    }.items()
    for suffix in ("", "-raw", "-train")
}
