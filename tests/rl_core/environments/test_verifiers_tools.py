"""verifiers task sets with tools: calls of the policy are made in the child, and the rewards see them."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.adapters import stand_in

from rl_core.environments import make_environment
from rl_core.errors import SettingsError
from rl_core.types import ToolCall

fake = stand_in("verifiers")


def call(**arguments):
    text = ", ".join(f'"{name}": {value!r}'.replace("'", '"') for name, value in arguments.items())
    return f'<tool_call>{{"name": "shop_price", "arguments": {{{text}}}}}</tool_call>'


def shop(name="Shop", **options):
    return make_environment(
        "verifiers", {"taskset": f"shop_tasks:{name}", "heldout": 0.2, "workers": 1, **options}
    )


def test_calls_results_and_rewards(fake: None) -> None:
    environment = shop()
    assert list(environment.tools.tools) == ["shop_price"]
    episode = environment.episode(environment.seeds("train")[0], "all")
    system, question = episode.reset()
    assert (
        system["role"] == "system"
        and system["content"].startswith("shop\n\n")
        and "shop_price" in system["content"]
    )
    assert question["role"] == "user"

    step = episode.step(call(item="tea", count=4) + call(item="tea"))
    assert step.messages == [{"role": "tool", "content": "13"}, {"role": "tool", "content": "4"}]
    assert (
        step.tool_call == ToolCall("shop_price", {"item": "tea", "count": 4})
        and len(step.more_calls) == 1
    )
    assert (step.reward, step.terminated, step.is_error) == (0.0, False, False)

    step = episode.step(call(count=2))  # `item` is missing: the tool is not called
    assert step.is_error and step.messages[0]["content"].startswith(
        "error: shop_price takes the arguments"
    )
    step = episode.step(call(item="car"))
    assert step.is_error and step.info == {"failed_calls": [0]}
    assert step.messages == [{"role": "tool", "content": "Error: KeyError: 'car'"}]

    step = episode.step(episode.target)
    assert (step.reward, step.terminated, step.success) == (1.0, True, True)
    # three of them reached the tool, whose state is the rollout's; three were calls that could be read
    assert (step.info["metrics"]["asked"], step.info["metrics"]["calls"]) == (3.0, 3.0)


def test_a_stop_that_a_call_brings_about_ends_the_episode(fake: None) -> None:
    environment = shop()
    episode = environment.episode(environment.seeds("train")[0], "all")
    step = episode.step(call(item="tea") * 4)
    assert step.terminated and step.reward == 0.0 and step.info["metrics"]["asked"] == 4.0


def test_the_description_can_be_left_to_the_model_s_template(fake: None) -> None:
    environment = shop(describe_tools=False)
    episode = environment.episode(environment.seeds("train")[0], "all")
    assert next(message["content"] for message in episode.reset()) == "shop"


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("Elsewhere", "its toolset Prices is served at a URL"),
        ("Inside", "its toolset Prices is to run inside the agent's runtime"),
        ("Boxed", "its toolset Prices needs the runtime DockerConfig"),
        ("Twice", "its toolsets have two tools 'shop_price'"),
    ],
)
def test_what_cannot_run_here_is_refused(fake: None, name: str, part: str) -> None:
    with pytest.raises(SettingsError) as caught:
        shop(name).seeds("train")
    assert part in str(caught.value)


REAL = '''
import verifiers.v1 as vf
__all__ = ["Shop"]

class ReportedState(vf.State):
    asked: int = 0

class PriceConfig(vf.ToolsetConfig):
    tax: int = 1

class Prices(vf.Toolset[PriceConfig, ReportedState]):
    @vf.tool
    def price(self, item: str, count: int = 1) -> str:
        """Price of some items."""
        self.state.asked += 1
        return str({"tea": 3}[item] * count + self.config.tax)

class Settings(vf.TaskConfig):
    prices: PriceConfig = PriceConfig()

class Data(vf.TaskData):
    answer: str

class Shopper(vf.Task[Data, ReportedState, Settings]):
    @classmethod
    def toolsets(cls, config):
        return [Prices(config.prices)]

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.strip() == self.data.answer)

    @vf.metric
    async def asked(self, trace: vf.Trace) -> float:
        return float(trace.state.asked)

class Config(vf.TasksetConfig):
    task: Settings = Settings()

class Shop(vf.Taskset[Shopper, Config]):
    def load(self):
        for n in range(2, 22):
            yield Shopper(Data(idx=n, prompt=f"{n} tea?", answer=str(3 * n + 1)), self.config.task)
'''


def test_with_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("verifiers.v1")
    (tmp_path / "real_shop.py").write_text(REAL)
    monkeypatch.syspath_prepend(str(tmp_path))
    environment = make_environment(
        "verifiers", {"taskset": "real_shop:Shop", "heldout": 0.2, "workers": 1}
    )
    episode = environment.episode(environment.seeds("train")[0], "all")
    wanted = call(item="tea", count=4).replace("shop_price", "prices_price")
    assert episode.step(wanted).messages == [{"role": "tool", "content": "13"}]
    failed = episode.step(wanted.replace("tea", "car"))
    assert failed.is_error and "car" in failed.messages[0]["content"]
    step = episode.step(episode.target)
    assert (step.reward, step.info["metrics"]["asked"]) == (1.0, 2.0)
