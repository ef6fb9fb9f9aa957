"""Building environments by name, with checked options."""

from pathlib import Path
from typing import Literal

import pytest
from helpers.adapters import hide_package

from rl_core.environments import SHIPPED_ENVIRONMENTS, Environment, Toolset, make_environment
from rl_core.environments.arithmetic import Arithmetic
from rl_core.environments.pixel_grid import PixelGrid
from rl_core.errors import SettingsError

HERE = f"{__name__}:Custom"


class Custom(Environment):
    name = "own"
    levels = ("only",)

    def __init__(
        self,
        data: Path | None = None,
        *,
        size: int,
        rate: float = 0.5,
        fast: bool = False,
        mode: Literal["a", "b"] = "a",
        label: str | None = None,
        names: tuple[str, ...] = (),
        weights: dict[str, float] | None = None,
    ):
        super().__init__(data)
        self.options = dict(
            size=size, rate=rate, fast=fast, mode=mode, label=label, names=names, weights=weights
        )

    @property
    def tools(self):
        return Toolset()

    def episode(self, seed, level):
        pytest.fail("making an environment plays nothing")


class Open(Custom):
    def __init__(self, **anything):
        super().__init__(size=1)
        self.anything = anything


class Unfinished(Environment):
    name = "unfinished"
    levels = ()


def test_shipped_names():
    assert (
        type(make_environment("pixel_grid")) is PixelGrid
        and type(make_environment("arithmetic", {"max_number": 9})) is Arithmetic
    )
    assert make_environment("arithmetic", {"max_number": 9}).max_number == 9
    assert make_environment("pixel_grid", {}, data=Path("somewhere")).data == Path("somewhere")
    builtin = {"pixel_grid", "arithmetic", "reckoning", "maze", "gsm8k", "prompts", "instructions"}
    builtin |= {"kuhn_poker"}
    builtin |= {"agent", "mixture"}
    hubs = {"gymnasium", "reasoning_gym", "verifiers", "textarena", "openenv", "nemo_gym", "harbor"}
    assert set(SHIPPED_ENVIRONMENTS) == builtin | hubs


def test_custom_environment_by_import_path():
    values = dict(
        size=3, rate=1, fast=True, mode="b", label=None, names=["x"], weights={"x": 1, "y": 0.5}
    )
    assert make_environment(HERE, values).options == values
    assert make_environment(f"{__name__}:Open", {"whatever": 1}).anything == {
        "whatever": 1,
        "data": None,
    }


@pytest.mark.parametrize(
    ("name", "options", "part"),
    [
        ("pixel_gird", {}, "did you mean 'pixel_grid'?"),
        ("pixel_grid", {"instruction": True}, "no such option; did you mean 'instructions'?"),
        ("pixel_grid", {"instructions": 1}, "options.instructions: 1 is not True or False"),
        (
            "pixel_grid",
            {"call_format": "xml"},
            "options.call_format: 'xml' is not one of 'line', 'hermes'",
        ),
        ("pixel_grid", {"skill": {"easy": "high"}}, "options.skill"),
        ("pixel_grid", {"data": "x"}, "no such option"),
        ("no_such_package.module:Thing", {}, "cannot be imported"),
        ("rl_core.environments.environment:Nothing", {}, "name: no class 'Nothing' there"),
        ("rl_core.environments.environment:Step", {}, "is not a subclass"),
        ("rl_core.environments.environment:", {}, "name: no class '' there"),
        (":Custom", {}, "cannot be imported"),
        (f"{__name__}:Unfinished", {}, "does not define episode, tools"),
        (HERE, {}, "options.size: environment"),
        (HERE, {"size": True}, "options.size: True is not a whole number"),
        (HERE, {"size": 1.0}, "options.size: 1.0 is not a whole number"),
        (HERE, {"size": 1, "rate": "1e-5"}, "options.rate: '1e-5' is not a number"),
        (HERE, {"size": 1, "label": 3}, "options.label"),
        (HERE, {"size": 1, "names": "x"}, "options.names"),
        (HERE, {"size": 1, "names": [1]}, "options.names"),
        (HERE, {"size": 1, "mode": "c"}, "one of 'a', 'b'"),
        (f"{__name__}:Open", {"data": 1}, "no such option"),
    ],
)
def test_mistakes_are_named(name, options, part):
    with pytest.raises(SettingsError) as caught:
        make_environment(name, options)
    assert part in str(caught.value)


@pytest.mark.parametrize(
    ("name", "options", "extra"),
    [
        ("gymnasium", {"id": "FrozenLake-v1"}, "gymnasium"),
        ("reasoning_gym", {"tasks": ["lcm"]}, "reasoning-gym"),
        ("verifiers", {"taskset": "x"}, "verifiers"),
        ("textarena", {"game": "TicTacToe-v0"}, "textarena"),
    ],
)
def test_a_package_that_is_missing_is_named_with_its_extra(monkeypatch, name, options, extra):
    hide_package(monkeypatch, name)
    with pytest.raises(
        SettingsError, match=rf"not installed; python -m posttrain.install --extras {extra}"
    ):
        make_environment(name, options)
