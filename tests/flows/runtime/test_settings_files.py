"""Folders of models that a settings file names."""

import pytest

from flows.runtime.settings_files import model_place
from rl_core.errors import SettingsError


def test_the_current_folder_comes_first_then_the_files(tmp_path, monkeypatch):
    here, beside = tmp_path / "here", tmp_path / "beside"
    (beside / "base").mkdir(parents=True)
    here.mkdir()
    monkeypatch.chdir(here)
    assert model_place("model", "base", beside) == str(beside / "base")
    (here / "base").mkdir()
    assert model_place("model", "base", beside) == str(here / "base")


def test_a_name_of_the_hub_stays_and_a_path_must_be_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert model_place("model", "owner/name", tmp_path) == "owner/name"
    for place in ("./base", "/nowhere/base", "~/base", "a/b/c"):
        with pytest.raises(SettingsError, match=rf"model: {place} is no folder"):
            model_place("model", place, tmp_path)
