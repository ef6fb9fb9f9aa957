"""A model that a command names is looked up before anything starts."""

import pytest

from flows.cli.given_model import check_given_model
from rl_core.errors import SettingsError


def test_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    good = tmp_path / "sft" / "model"
    good.mkdir(parents=True)
    (good / "config.json").write_text("{}")
    check_given_model("sft/model", tmp_path, None)
    for name, said in (
        ("sft", "without a config.json, so it is no model; did you mean sft/model?"),
        ("sft/modle", "did you mean 'model'?"),
        ("sft/model/config.json", "is a file"),
        ("./nowhere", "there is no such folder"),
        ("a/b/c", "there is no such folder"),
    ):
        with pytest.raises(SettingsError) as caught:
            check_given_model(name, tmp_path, None)
        assert said in str(caught.value), name


def test_a_name_of_the_hub_that_cannot_be_asked(tmp_path, monkeypatch):
    import huggingface_hub

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRANSFORMERS_OFFLINE", "1")
    with pytest.raises(SettingsError, match="no copy of a model of that name"):
        check_given_model("nobody/nothing-at-all", tmp_path, None)
    monkeypatch.setenv("TRANSFORMERS_OFFLINE", "0")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)

    def unreachable(*_, **__):
        raise ConnectionError("no network")

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", unreachable)
    with pytest.raises(SettingsError, match=r"does not answer \(ConnectionError\)"):
        check_given_model("nobody/nothing-at-all", tmp_path, None)


def test_looking_for_a_registered_model_makes_no_database(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(SettingsError, match="models:/demo@champion: no model is registered yet"):
        check_given_model("models:/demo@champion", tmp_path, None)
    assert list(tmp_path.iterdir()) == []


def test_a_registered_model_of_another_name(tmp_path):
    with pytest.raises(SettingsError, match="must be models:/NAME@ALIAS"):
        check_given_model("models:/demo", tmp_path, None)
