"""User code that a stage runs, with its imports, is part of its key; other code is not."""

import dataclasses
import textwrap

import pytest

from rl_core.errors import SettingsError
from rl_core.settings import AnalysisSettings, ExitCondition, PolicySettings
from rl_core.user_code.digest import digest_user_code
from rl_core.user_code.load import find_import_paths
from tasks.config import build_settings
from tasks.pipeline.stage_key import compute_stage_key


@pytest.fixture
def home(tmp_path, monkeypatch):
    """Return a folder on the path, like the one that a command is called from."""
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def write_modules(home, **files):
    """Write modules by name; __ separates folders, so that a__b is a/b.py."""
    for name, text in files.items():
        path = home.joinpath(*name.split("__")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))


def create_package(home, name):
    (home / name).mkdir(parents=True, exist_ok=True)
    (home / name / "__init__.py").touch()


def list_modules(path):
    return set(digest_user_code([path]))


def compute_key(reward="custom_rewards:score", **environment):
    pipeline = build_settings(
        {
            "name": "x",
            "environment": {"name": "pixel_grid"},
            "stages": {"policy": {}},
            "model": {"path": "org/name"},
        },
        check_files=False,
    )
    if environment:
        pipeline = dataclasses.replace(
            pipeline, environment=dataclasses.replace(pipeline.environment, **environment)
        )
    return compute_stage_key(
        "policy", PolicySettings(rewards={"task": 1.0, reward: 0.5}), pipeline, {}
    )


def test_an_edited_reward_is_another_stage(home):
    write_modules(
        home,
        custom_rewards="def score(trajectories): return [1.0 for _ in trajectories]\n",
        unrelated="x = 1\n",
    )
    first = compute_key()
    write_modules(
        home, custom_rewards="def score(trajectories): return [-1.0 for _ in trajectories]\n"
    )
    assert compute_key() != first
    write_modules(
        home,
        custom_rewards="def score(trajectories): return [1.0 for _ in trajectories]\n",
        unrelated="x = 2\n",
    )
    assert compute_key() == first


def test_an_edited_helper_of_a_package_is_another_stage(home):
    create_package(home, "custom_package")
    write_modules(
        home,
        custom_package__score="from .scale import SCALE\ndef score(t): return [SCALE] * len(t)\n",
    )
    write_modules(home, custom_package__scale="SCALE = 1.0\n", custom_package__unused="x = 1\n")
    first = compute_key("custom_package.score:score")
    write_modules(home, custom_package__scale="SCALE = -1.0\n")
    second = compute_key("custom_package.score:score")
    write_modules(home, custom_package__scale="SCALE = 1.0\n", custom_package__unused="x = 2\n")
    assert (second != first, compute_key("custom_package.score:score") == first) == (True, True)
    (home / "custom_package" / "__init__.py").write_text("# Python runs this too\n")
    assert compute_key("custom_package.score:score") != first


def test_relative_imports_of_a_package_s_own_file_start_within_it(home):
    """In custom_outer/custom_inner/__init__.py one dot is custom_outer.custom_inner, two are custom_outer."""
    create_package(home, "custom_outer")
    create_package(home, "custom_outer/custom_inner")
    write_modules(
        home,
        custom_outer__custom_inner__near="x = 1\n",
        custom_outer__far="y = 1\n",
        custom_outer__near="wrong = 1\n",
    )
    everything = {
        "custom_outer",
        "custom_outer.custom_inner",
        "custom_outer.custom_inner.near",
        "custom_outer.far",
    }
    (home / "custom_outer" / "custom_inner" / "__init__.py").write_text(
        "from .near import x\nfrom ..far import y\n"
    )
    assert list_modules("custom_outer.custom_inner:score") == everything
    (home / "custom_outer" / "custom_inner" / "__init__.py").write_text("")
    (home / "custom_outer" / "custom_inner" / "score.py").write_text(
        "from .near import x\nfrom ..far import y\n"
    )
    assert list_modules("custom_outer.custom_inner.score:score") == {
        *everything,
        "custom_outer.custom_inner.score",
    }


@pytest.mark.parametrize(
    ("stage", "settings"),
    [
        ("policy", lambda path: PolicySettings(loss=path)),
        ("policy", lambda path: PolicySettings(advantages=path)),
        ("policy", lambda path: PolicySettings(early_stop=ExitCondition(function=path))),
        ("analyze", lambda path: AnalysisSettings(measures=(path,))),
    ],
)
def test_an_edited_part_or_what_it_imports_is_another_stage(home, monkeypatch, stage, settings):
    monkeypatch.chdir(home)
    pipeline = build_settings({"name": "x", "stages": {"sft": {}}}, check_files=False)
    write_modules(home, custom_part="import custom_part_helper\n", custom_part_helper="LIMIT = 1\n")
    first = compute_stage_key(stage, settings("custom_part.py:part"), pipeline, {})
    write_modules(home, custom_part_helper="LIMIT = 2\n")
    assert compute_stage_key(stage, settings("custom_part.py:part"), pipeline, {}) != first
    write_modules(home, custom_part_helper="LIMIT = 1\n")
    assert compute_stage_key(stage, settings("custom_part.py:part"), pipeline, {}) == first
    with pytest.raises(SettingsError, match="needs the module 'custom_absent'"):
        compute_stage_key(stage, settings("custom_absent:part"), pipeline, {})


def test_the_environment_s_helpers_count_in_every_stage(home):
    write_modules(
        home, custom_world="import custom_map\nclass World: ...\n", custom_map="SIZE = 3\n"
    )
    first = compute_key("task", name="custom_world:World")
    write_modules(home, custom_map="SIZE = 4\n")
    assert compute_key("task", name="custom_world:World") != first


def test_an_import_path_among_options_counts(home):
    write_modules(home, custom_checker="LIMIT = 1\n")
    options = {"checker": "custom_checker:check", "note": "level:easy", "host": "node:29400"}
    first = compute_key("task", options=options)
    write_modules(home, custom_checker="LIMIT = 2\n")
    assert compute_key("task", options=options) != first


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import helper", {"main", "helper"}),
        ("import pack.deep.leaf", {"main", "pack", "pack.deep", "pack.deep.leaf"}),
        ("from pack import sibling, NAME", {"main", "pack", "pack.sibling"}),
        ("from pack.deep import leaf as l", {"main", "pack", "pack.deep", "pack.deep.leaf"}),
        ("from pack.deep import up", {"main", "pack", "pack.deep", "pack.deep.up", "pack.sibling"}),
        ("from pack import *", {"main", "pack", "pack.sibling"}),
        (
            "import spread.inner",
            {"main", "spread.inner"},
        ),  # a folder without __init__ has no file
        ("def late():\n    import helper", {"main", "helper"}),
        ("from importlib import import_module\nimport_module('helper')", {"main", "helper"}),
        ("import json, torch, rl_core.types\nfrom tasks import stage", {"main"}),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import helper", {"main"}),
        ("try:\n    import not_there\nexcept ImportError:\n    import helper", {"main", "helper"}),
        (
            "from contextlib import suppress\nwith suppress(ImportError):\n    import not_there, helper",
            {"main", "helper"},
        ),
        ("def late():\n    import not_there", {"main"}),
        ("import circle_a", {"main", "circle_a", "circle_b"}),
    ],
)
def test_what_is_followed(home, text, expected):
    create_package(home, "pack")
    create_package(home, "pack/deep")
    (home / "pack" / "__init__.py").write_text("NAME = 1\n__all__ = ['NAME', 'sibling']\n")
    write_modules(
        home,
        helper="x = 1\n",
        pack__sibling="",
        pack__deep__leaf="",
        pack__deep__up="from ..sibling import x\n",
    )
    write_modules(
        home,
        spread__inner="",
        circle_a="import circle_b\n",
        circle_b="from circle_a import x\n",
        main=text,
    )
    assert list_modules("main:score") == expected


def test_the_name_of_the_folder_does_not_matter(tmp_path, monkeypatch):
    digests = []
    for folder in ("one", "two"):
        write_modules(tmp_path / folder, moved_rewards="import json\n")
        with monkeypatch.context() as patched:
            patched.syspath_prepend(str(tmp_path / folder))
            digests.append(digest_user_code(["moved_rewards:score"]))
    assert digests[0] == digests[1] and list(digests[0]) == ["moved_rewards"]


def test_source_is_not_run(home):
    write_modules(home, main="raise SystemExit('run')\n")
    assert list_modules("main:score") == {"main"}


def test_a_module_that_is_not_there_is_an_error(home):
    with pytest.raises(
        SettingsError,
        match=r"'nowhere\.rewards:score' needs the module 'nowhere', which cannot be found",
    ):
        list_modules("nowhere.rewards:score")
    write_modules(home, main="x = 1\nimport not_there.deep\n")
    with pytest.raises(
        SettingsError, match=r"module 'main' \(line 2\) needs the module 'not_there'"
    ):
        list_modules("main:score")
    write_modules(home, main="from ..far import x\n")
    with pytest.raises(
        SettingsError,
        match=r"module 'main' \(line 1\): '\.\.far' is above the top-level package",
    ):
        list_modules("main:score")
    write_modules(home, main="def score(:\n")
    with pytest.raises(SettingsError, match=r"module 'main': .*main\.py is not Python source"):
        list_modules("main:score")


def test_texts_that_read_like_import_paths():
    settings = {
        "rewards": {"a.b:c": 1.0, "task": 1.0},
        "list": ["d:e"],
        "text": "a note: with a space",
        "n": 1,
    }
    assert find_import_paths(settings) == {"a.b:c", "d:e"}
    assert digest_user_code([], ["level:easy"]) == {}


def test_a_function_in_a_file_counts_with_its_imports(home, monkeypatch):
    monkeypatch.chdir(home)
    write_modules(
        home,
        tasks="import custom_helper\n\ndef score(trajectories): ...",
        custom_helper="SCALE = 1",
    )  # a file, not ours
    assert set(digest_user_code(["tasks.py:score", f"{home}/tasks.py:score"])) == {
        "tasks.py",
        f"{home}/tasks.py",
        "custom_helper",
    }
    before = compute_key("tasks.py:score")
    write_modules(home, custom_helper="SCALE = 2")
    assert compute_key("tasks.py:score") != before
    assert find_import_paths({"tools": "tools/mine.py:TOOLS", "path": "data.jsonl"}) == {
        "tools/mine.py:TOOLS"
    }
    with pytest.raises(SettingsError, match=r"'other.py'"):
        digest_user_code(["other.py:score"])
