"""Every example runs offline, within seconds, and learns what it claims."""

import ast
import importlib.util
import json
from pathlib import Path

import pytest

import rl_core

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Run examples in a temporary folder, where they write outputs/."""
    monkeypatch.chdir(tmp_path)


def load_example(name):
    specification = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def read_lines(name):
    return (EXAMPLES / name).read_text().splitlines()


def test_every_example_is_tested():
    tests = Path(__file__).read_text()
    names = {path.stem for path in EXAMPLES.glob("*.py")} | {
        path.name for path in EXAMPLES.glob("*.ipynb")
    }
    assert len(names) == 14
    of_the_service = {"service_grpo", "service_preferences", "service_ppo", "service_client"}
    for name in names - of_the_service:
        assert f'"{name}"' in tests
    of_service = Path(__file__).parents[1] / "posttrain" / "training_service"
    tests = "".join(
        (of_service / f"{name}.py").read_text() for name in ("test_sdk_examples", "test_evaluate")
    )
    for name in of_the_service:
        assert f'"{name}.py"' in tests


def test_the_minimal_loop_learns_and_hides_nothing(capsys):
    source = read_lines("grpo_minimal.py")
    assert len(source) <= 150
    assert not any("rl_core.trainers" in line or "rl_core.training" in line for line in source)
    success = load_example("grpo_minimal").main()
    assert len(success) == 40
    assert sum(success[:5]) / 5 < 0.7 and sum(success[-5:]) / 5 > 0.85
    ratios = [
        float(line.rpartition(" ")[2])
        for line in capsys.readouterr().out.splitlines()
        if "ratio" in line
    ]
    assert ratios == pytest.approx(
        [1.0] * 40, abs=1e-4
    )  # sampler and trainer agree on what was sampled


def test_the_quick_start_is_ten_statements_and_learns():
    module = ast.parse((EXAMPLES / "grpo_quickstart.py").read_text())
    functions = [node for node in module.body if isinstance(node, ast.FunctionDef)]
    assert sum(len(function.body) for function in functions) <= 10
    rewards = load_example("grpo_quickstart").main().metrics()["reward/mean"]
    assert rewards.iloc[-1] > rewards.iloc[0] + 0.3
    assert rl_core.generate("outputs/quickstart", ["owl"])


@pytest.mark.slow
def test_a_custom_environment():
    before, after = load_example("own_environment").main()
    assert after > before + 0.1  # by 0.29 to 0.30 with three seeds


def test_a_custom_reward():
    observed = load_example("own_reward").main()
    assert observed[-1] >= 0.7 and len(observed) < 8  # stopped by its callback


def test_custom_data():
    metrics = load_example("sft_own_data").main()["eval/loss"].dropna()
    assert metrics.iloc[-1] < 0.5 * metrics.iloc[0]
    assert Path("outputs/sft_own_data/metrics.csv").is_file()


def test_a_file_of_prompts():
    evaluated = load_example("prompts_file").main()
    assert evaluated.iloc[-1] > evaluated.iloc[0] + 0.2
    assert Path("outputs/prompts_file/reviews.jsonl").is_file()


def test_tools_of_an_mcp_server():
    pytest.importorskip("mcp", reason="the extra mcp is not installed")
    metrics = load_example("mcp_tools").main()
    assert metrics["tool/calls"].mean() > 0.5  # it has learned to ask the server


@pytest.mark.slow
def test_an_agent_is_trained_unchanged():
    """A few iterations: `tests/benchmarks/agents.py` measures what it learns."""
    source = (EXAMPLES / "train_agent.py").read_text()
    agent = next(
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef) and node.name == "run_agent"
    )
    assert "rl_core" not in ast.unparse(agent)
    metrics = load_example("train_agent").main(iterations=2, epochs=1, count=300)
    assert list(metrics["train/failed_episodes"]) == [0.0, 0.0]
    assert metrics["train/success_rate"].notna().all()


def run_notebook(name):
    """Execute the code cells in order; return the names that they define. The outputs are stripped."""
    notebook = json.loads((EXAMPLES / name).read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in cells)
    names: dict = {}
    for cell in cells:
        exec(compile("".join(cell["source"]), name, "exec"), names)
    return names


def test_the_notebook_of_grpo():
    names = run_notebook("grpo.ipynb")
    rewards = names["metrics"]["reward/mean"]
    assert rewards.iloc[-1] > rewards.iloc[0] + 0.2
    assert [panel.title for panel in names["curves"].panels][:2] == [
        "reward/mean",
        "policy/entropy",
    ]
    assert len(names["samples"]) == 6 and set(names["samples"]["iteration"]) == {25}
    assert names["samples"]["prompt"].nunique() > 1  # the rows are spread over the iteration


def test_the_notebook_of_preferences():
    names = run_notebook("sft_then_dpo.ipynb")
    assert names["polite"] > 0.8  # 0.5 after SFT
    assert names["sft"].metrics()["train/loss"].iloc[-1] < 0.5
