"""Problems of a configuration by key, and parts of a curriculum."""

from tasks.config import ConfigError, build_settings


def list_problems(**values) -> dict[str, str]:
    """List the problems by dotted key of a pipeline named x with these values."""
    try:
        build_settings({"name": "x", **values}, check_files=False)
    except ConfigError as error:
        return {".".join(map(str, problem.key)): problem.text for problem in error.problems}
    return {}


def list_policy_problems(**policy) -> dict[str, str]:
    problems = list_problems(stages={"sft": {}, "policy": policy})
    assert all(key.startswith("stages.policy.") for key in problems)
    return {key.removeprefix("stages.policy."): text for key, text in problems.items()}


def build_stage(name="a", levels=("easy",), **settings):
    return {"name": name, "levels": dict.fromkeys(levels, 1), **settings}


def build_condition(**settings):
    return {"metric": "success_rate", "window": 2, "threshold": 0.8, **settings}
