"""Model folders that a settings file names."""

import pytest

from posttrain.settings_files import load_online_settings, load_service_settings, resolve_model_path
from rl_core.errors import SettingsError
from rl_core.settings import RewardSettings


def test_the_current_folder_comes_first_then_the_files(tmp_path, monkeypatch):
    current_folder, config_folder = tmp_path / "here", tmp_path / "config"
    (config_folder / "base").mkdir(parents=True)
    current_folder.mkdir()
    monkeypatch.chdir(current_folder)
    assert resolve_model_path("model", "base", config_folder) == str(config_folder / "base")
    (current_folder / "base").mkdir()
    assert resolve_model_path("model", "base", config_folder) == str(current_folder / "base")


def test_a_file_that_is_not_there_names_the_shipped_one_of_its_kind(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for load, name in ((load_service_settings, "service"), (load_online_settings, "online")):
        with pytest.raises(
            SettingsError,
            match=rf"^nothere: no such file, and no shipped config; these are shipped: {name};",
        ):
            load("nothere")
    (tmp_path / "empty.yaml").touch()
    with pytest.raises(SettingsError, match=r"empty\.yaml: is empty; write settings into it"):
        load_service_settings("empty.yaml")


def test_a_hub_name_stays_and_a_path_must_exist(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert resolve_model_path("model", "owner/name", tmp_path) == "owner/name"
    for path in ("./base", "/nowhere/base", "~/base", "a/b/c"):
        with pytest.raises(SettingsError, match=rf"model: {path} is no folder"):
            resolve_model_path("model", path, tmp_path)


def test_canary_episodes_have_the_length_that_suits_the_model(tmp_path):
    """Check the file of `posttrain online gate`; the worker's defaults stay, so its checkpoints are accepted."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"max_position_embeddings": 600}')
    (tmp_path / "online.yaml").write_text("model: {path: model}\n")
    settings = load_online_settings(tmp_path / "online.yaml")
    assert settings.gate.sampling.max_completion_tokens == 300  # half of the context; presets 64
    assert settings.reward_options == RewardSettings()
    explicit = load_online_settings(
        tmp_path / "online.yaml", ["gate.sampling.max_completion_tokens=40"]
    )
    assert explicit.gate.sampling.max_completion_tokens == 40
