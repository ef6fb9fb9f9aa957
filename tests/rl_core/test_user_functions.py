"""Code that a user names: loading, checks of signatures and results, and digests of functions."""

import functools
import math

import pytest

from rl_core.environments import make_environment
from rl_core.environments.environment import Environment
from rl_core.errors import SettingsError
from rl_core.storage.manifest import digest_bytes
from rl_core.user_code.checks import check_signature, parse_finite
from rl_core.user_code.digest import digest_function
from rl_core.user_code.load import import_function, import_object, import_subclass, is_import_path

MINE = """\
from rl_core.environments.arithmetic import Arithmetic

number = 3

class World(Arithmetic):
    pass

def score(trajectories):
    return [1.0]
"""


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """Enter a folder with a file of the user's code."""
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_functions_and_classes_come_from_files_and_modules():
    assert import_function("parts/mine.py:score", "loss")([]) == [1.0]
    assert import_function("math:sqrt", "loss") is math.sqrt
    world = import_subclass("parts/mine.py:World", "name", Environment, "Environment")
    assert world is import_object("parts/mine.py:World", "name")  # the file runs once


def test_an_environment_may_be_a_class_in_a_file():
    environment = make_environment("parts/mine.py:World", {"max_number": 9})
    assert type(environment).__name__ == "World" and environment.max_number == 9


@pytest.mark.parametrize(
    ("load", "message"),
    [
        (lambda: import_function("score", "loss"), "loss: 'score' is not an import path; write "),
        (
            lambda: import_function("parts/mine.py:scor", "loss"),
            "loss: no function 'scor' there; did you mean 'score'?",
        ),
        (
            lambda: import_function("parts/mine.py:number", "loss"),
            "loss: 'parts/mine.py:number' is a int, expected a function",
        ),
        (lambda: import_function("mine", "loss", 3), "loss: 'mine' is a int, expected a function"),
        (
            lambda: import_subclass("parts/mine.py:Word", "name", Environment, "Environment"),
            "name: no class 'Word' there; did you mean 'World'?",
        ),
        (
            lambda: import_subclass("parts/mine.py:score", "name", Environment, "a.Environment"),
            "name: 'parts/mine.py:score' is not a subclass of a.Environment",
        ),
        (lambda: import_object("parts/your.py:score", "use"), "use: no such file: "),
        (
            lambda: import_object("nowhere:score", "use"),
            "use: module 'nowhere' cannot be imported (ModuleNotFoundError: ",
        ),
    ],
)
def test_one_message_names_setting_and_problem(load, message):
    with pytest.raises(SettingsError) as caught:
        load()
    assert str(caught.value).startswith(message)


def test_forms_of_import_paths():
    assert all(map(is_import_path, ("a.b:c", "parts/mine.py:score", "../x.py:Größe")))
    assert not any(map(is_import_path, ("score", ":score", "a.b:", "a-b:c", "x.py:two words")))


def test_signatures_are_checked_without_a_call():
    def loss(logprobs, mask, *, scale):
        raise AssertionError

    check_signature(loss, "loss: 'mine'", "(logprobs, mask, ...options)", 2, {"scale": 1})
    check_signature(max, "loss: 'max'", "(logprobs)", 1)  # written in C, shows no parameters
    message = (
        r"^loss: 'mine' takes \(logprobs, mask, \*, scale\) \(missing a required .*argument: 'scale'\); "
        r"it is called with \(logprobs, mask, \.\.\.options\)$"
    )
    with pytest.raises(SettingsError, match=message):
        check_signature(loss, "loss: 'mine'", "(logprobs, mask, ...options)", 2, {"key": 1})


@pytest.mark.parametrize(
    ("value", "number"),
    [(True, 1.0), ("2.5", 2.5), (float("inf"), None), ("x", None), (None, None), (10**400, None)],
)
def test_numbers_are_finite(value, number):
    assert parse_finite(value) == number


def scaled(values, scale=1):
    return [scale * value for value in values]


def test_a_functions_digest_covers_its_source_and_bound_arguments():
    source = "def scaled(values, scale=1):\n    return [scale * value for value in values]\n"
    assert digest_function(scaled) == digest_bytes(source.encode())
    assert digest_function(scaled, 16) == digest_bytes(source.encode())[:16]
    bound = functools.partial(functools.partial(scaled, scale=2), [1])
    assert digest_function(bound) == digest_bytes(f"{source} ([1],) [('scale', 2)]".encode())
    assert digest_function(max, 2) == "max"  # a name is never cut
