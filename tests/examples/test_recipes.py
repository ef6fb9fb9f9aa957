"""Recipes of docs/recipes.md: their short forms learn, and the page shows the recorded figures."""

import importlib
import json
import sys
from pathlib import Path

import pytest
from benchmarks import recipes

NAMES = ("sums", "sft_lora", "grpo_reward", "dpo", "rlhf", "tools")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with a base model of one epoch, where the recipes write outputs/."""
    folder = tmp_path_factory.mktemp("recipes")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(str(recipes.FOLDER))
        importlib.import_module("sums").make_base_model(epochs=2)
        yield folder
    for name in NAMES:
        sys.modules.pop(name, None)


@pytest.fixture(autouse=True)
def elsewhere(folder, monkeypatch):
    monkeypatch.chdir(folder)


def load_recipe(name):
    return importlib.import_module(name)


def test_the_base_model_is_made_once():
    sums = load_recipe("sums")
    weights = sums.FOLDER / "base" / "model.safetensors"
    before = weights.stat().st_mtime_ns
    assert sums.make_base_model() == sums.FOLDER / "base"
    assert weights.stat().st_mtime_ns == before
    assert {"prompt": "3 + 4 = ?", "answer": "7"} in sums.list_sums()
    assert len(sums.list_sums()) == 64


def test_sft_with_lora_lowers_the_heldout_loss():
    metrics = load_recipe("sft_lora").main(epochs=12)
    losses = metrics["eval/loss"].dropna()
    assert len(losses) == 3 and losses.iloc[-1] < losses.iloc[0]
    assert (Path("outputs/recipes/sft_lora/model") / "adapter" / "adapter_config.json").is_file()


def test_grpo_scores_by_the_column():
    recipe = load_recipe("grpo_reward")
    assert 0 <= recipe.main(iterations=2)["reward/mean"].iloc[-1] <= 1

    class Sampled:
        completion = " 7 "

    assert recipe.correct([Sampled, Sampled], ["7", "8"]) == [1.0, 0.0]


def test_dpo_widens_the_margin():
    recipe = load_recipe("dpo")
    pairs = recipe.build_pairs(1)
    assert len(pairs) == 64 and all(row["chosen"] != row["rejected"] for row in pairs)
    margins = recipe.main(epochs=2)["eval/margin"].dropna()
    assert margins.iloc[-1] > 0


@pytest.mark.slow
def test_rlhf_trains_a_reward_model_and_asks_it():
    of_rewards, of_policy = load_recipe("rlhf").main(epochs=3, iterations=2)
    assert of_rewards["eval/accuracy"].dropna().iloc[-1] > 0.5
    assert of_policy["reward/learned/score"].notna().all() and len(of_policy) == 2
    assert "value/explained_variance" in of_policy


def test_the_policy_of_the_tools_recipe_calls_them():
    metrics = load_recipe("tools").main(demonstrations=200, epochs=6, iterations=1)
    assert metrics["tool/calls"].iloc[-1] > 0.2


def test_the_page_shows_the_recorded_figures():
    results = json.loads(recipes.RESULTS.read_text())
    assert set(results) == set(NAMES)
    page = recipes.PAGE.read_text()
    assert page == recipes.render_page(page, results), "python tests/benchmarks/recipes.py write"
    assert "| right answers in training (`reward/mean`) |" in page
    with pytest.raises(SystemExit, match="no marker <!-- measured: other -->"):
        recipes.render_page(page, {"other": results["dpo"]})
