"""`import rl_core`: lazy, complete, without the pipeline's packages."""

import importlib
import subprocess
import sys

import pytest

import rl_core


def run_fresh(program):
    """Return the output of a fresh interpreter."""
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout


def test_the_import_alone_loads_neither_torch_nor_transformers_nor_pandas():
    loaded = run_fresh("import sys, rl_core; dir(rl_core); print(*sys.modules)").split()
    assert "rl_core" in loaded
    assert {name.split(".")[0] for name in loaded} & {
        "torch",
        "transformers",
        "pandas",
        "numpy",
        "mlflow",
    } == set()


def test_every_public_name_is_there_and_listed():
    for name in rl_core.__all__:
        assert getattr(rl_core, name) is not None
    assert set(rl_core.__all__) <= set(dir(rl_core))
    assert set(rl_core._EXPORTS) == set(rl_core.__all__)
    assert (
        rl_core.make_environment is importlib.import_module("rl_core.environments").make_environment
    )
    with pytest.raises(AttributeError, match="did you mean 'grpo'"):
        rl_core.grop  # noqa: B018


def test_every_error_and_settings_class_is_public():
    errors, settings = (importlib.import_module(f"rl_core.{n}") for n in ("errors", "settings"))
    error_classes = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and value.__module__ == errors.__name__
    }
    settings_classes = {
        name for name in settings.__all__ if name[0].isupper() and not name.isupper()
    }
    assert error_classes <= set(rl_core.__all__)
    assert settings_classes - {"Algorithm"} <= set(rl_core.__all__)


BLOCKED = """
import sys
for name in ("mlflow", "prefect", "pydantic", "sqlalchemy", "fastapi", "psutil", "matplotlib"):
    sys.modules[name] = None
import rl_core
for name in rl_core.__all__:
    getattr(rl_core, name)
model = rl_core.ModelSettings(preset="nano", vocab_size=300, context=32, device="cpu")
policy = rl_core.create_policy(["a b c"], model)
trainer = rl_core.grpo(
    policy, prompts=["a"], reward=lambda trajectories: [float(n) for n, _ in enumerate(trajectories)],
    settings=rl_core.PolicySettings(
        iterations=1, prompts_per_iteration=1, group_size=2, sampling=rl_core.SamplingSettings(max_completion_tokens=2)
    ),
)
print(trainer.run().iterations)
"""


@pytest.mark.slow
def test_training_does_not_need_the_pipeline():
    assert run_fresh(BLOCKED).split()[-1] == "1"
