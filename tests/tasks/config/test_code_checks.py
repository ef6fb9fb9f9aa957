"""User code that a configuration names: what is imported when, and which problems are reported."""

import pytest

from tasks.config import ConfigError, build_settings, list_code_paths

GOOD = """\
import pathlib
pathlib.Path({ran!r}).touch()

def loss(logprobs_BT, old_logprobs_BT, advantages_BT, loss_mask_BT, *, num_loss_tokens, loss_weights_BT, tau=1.0):
    return (-advantages_BT * (logprobs_BT - old_logprobs_BT) * tau * loss_weights_BT).sum(), {{}}

def advantages(rewards_R, groups_R, lengths_R):
    return rewards_R - rewards_R.mean(), {{}}

def settled(history):
    return 1.0

def measure(trajectory):
    return 1.0
"""


@pytest.fixture
def home(tmp_path, monkeypatch):
    """Create the current folder with a file of valid functions, which leaves a trace when it is run."""
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "mine.py").write_text(GOOD.format(ran=str(tmp_path / "ran")))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def build_values(**changed):
    names = {
        name: f"parts/mine.py:{name}" for name in ("loss", "advantages", "settled", "measure")
    } | changed
    condition = {"function": names["settled"], "window": 2}
    curriculum = [{"name": "a", "levels": {"easy": 1}, "exit_conditions": [condition]}]
    policy = {
        "loss": names["loss"],
        "loss_options": changed.get("options", {}),
        "advantages": names["advantages"],
        "curriculum": curriculum,
        "early_stop": {"function": names["settled"]},
    }
    return {
        "name": "x",
        "stages": {
            "sft": {},
            "policy": policy,
            "evaluate": {},
            "analyze": {"measures": [names["measure"]]},
        },
    }


def list_problems(settings, **options):
    try:
        build_settings(settings, check_files=False, **options)
    except ConfigError as error:
        return {".".join(map(str, problem.key)): problem.text for problem in error.problems}
    return {}


def test_all_of_it_is_named_and_imported_only_where_that_is_asked_for(home):
    settings = build_settings(build_values(), check_files=False, import_code=False)
    assert not (home / "ran").exists()
    assert list_code_paths(settings) == tuple(
        f"parts/mine.py:{name}" for name in ("loss", "advantages", "settled", "measure")
    )
    assert list_problems(build_values()) == {} and (home / "ran").exists()


CONDITION = "stages.policy.curriculum.0.exit_conditions.0.function"


@pytest.mark.parametrize(
    ("changed", "key", "message"),
    [
        ({"loss": "nowhere:loss"}, "stages.policy.loss", "module 'nowhere' cannot be imported"),
        (
            {"loss": "parts/mine.py:los"},
            "stages.policy.loss",
            "no function 'los' there; did you mean 'loss'?",
        ),
        (
            {"loss": "parts/mine.py:advantages"},
            "stages.policy.loss",
            "it is called with (logprobs_BT",
        ),
        ({"options": {"tou": 1}}, "stages.policy.loss", "unexpected keyword argument 'tou'"),
        (
            {"loss": "sapo"},
            "stages.policy.loss",
            "is not an import path; write package.module:name",
        ),
        (
            {"advantages": "parts/mine.py:loss"},
            "stages.policy.advantages",
            "it is called with (rewards_R",
        ),
        ({"settled": "parts/mine.py:advantages"}, CONDITION, "it is called with (history"),
        ({"settled": "parts/mine.py:x y"}, CONDITION, "is not an import path"),
        (
            {"measure": "parts/mine.py:advantages"},
            "stages.analyze.measures.0",
            "called with one trajectory",
        ),
    ],
)
def test_one_message_names_the_key(home, changed, key, message):
    problems = list_problems(build_values(**changed))
    assert message in problems.pop(key)
    assert set(problems) <= {"stages.policy.early_stop.function"}


def test_invalid_import_paths_are_reported_without_importing(home):
    problems = list_problems(build_values(loss="los s", measure=":x"), import_code=False)
    assert set(problems) == {"stages.policy.loss", "stages.analyze.measures.0"}
    assert not (home / "ran").exists()


def test_rewards_may_lie_in_a_folder(home):
    stages = {"sft": {}, "policy": {"rewards": {"parts/mine.py:measure": 1.0}}}
    assert list_problems({"name": "x", "stages": stages}, import_code=False) == {}
