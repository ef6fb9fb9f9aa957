"""Models named by a command: looked up before anything starts, and their display names."""

import pytest
import yaml

from posttrain.cli import run_setup
from posttrain.cli.main import main
from posttrain.cli.model_references import refuse_missing_model, resolve_model_references
from rl_core.errors import DataError, SettingsError
from tasks.config import build_settings
from tasks.tracking import ModelRegistry, Tracking


@pytest.fixture
def registered(tmp_path, monkeypatch):
    """Create an output folder with one version of `demo`, the champion."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    tracking = Tracking(None, tmp_path)
    client = tracking.store.client
    client.create_registered_model("demo")
    client.create_model_version("demo", str(tmp_path))
    client.set_registered_model_alias("demo", "champion", "1")
    return tmp_path


def test_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    good = tmp_path / "sft" / "model"
    good.mkdir(parents=True)
    (good / "config.json").write_text("{}")
    refuse_missing_model("sft/model", tmp_path, None)
    for name, message in (
        ("sft", "without a config.json, so it is no model; did you mean sft/model?"),
        ("sft/modle", "did you mean 'model'?"),
        ("sft/model/config.json", "is a file"),
        ("./nowhere", "there is no such folder"),
        ("a/b/c", "there is no such folder"),
    ):
        with pytest.raises(SettingsError) as caught:
            refuse_missing_model(name, tmp_path, None)
        assert message in str(caught.value), name


def test_a_name_of_the_hub_that_cannot_be_asked(tmp_path, monkeypatch):
    import huggingface_hub

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRANSFORMERS_OFFLINE", "1")
    with pytest.raises(SettingsError, match="no copy of a model of that name"):
        refuse_missing_model("nobody/nothing-at-all", tmp_path, None)
    monkeypatch.setenv("TRANSFORMERS_OFFLINE", "0")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)

    def unreachable(*_, **__):
        raise ConnectionError("no network")

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", unreachable)
    with pytest.raises(SettingsError, match=r"does not answer \(ConnectionError\)"):
        refuse_missing_model("nobody/nothing-at-all", tmp_path, None)


def test_looking_for_a_registered_model_makes_no_database(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(SettingsError, match="models:/demo@champion: no model is registered yet"):
        refuse_missing_model("models:/demo@champion", tmp_path, None)
    assert list(tmp_path.iterdir()) == []


def test_a_registered_model_of_another_name(tmp_path):
    with pytest.raises(SettingsError, match="must be models:/NAME@ALIAS"):
        refuse_missing_model("models:/demo", tmp_path, None)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("models:/deno@champion", "no registered model 'deno' in sqlite:.*; did you mean 'demo'"),
        (
            "models:/demo@champon",
            "'demo' has no version with alias 'champon'; did you mean 'champion'",
        ),
        ("models:/demo/7", "registered model 'demo' has no version 7; versions: 1"),
        ("models:/deno/latest", "no registered model 'deno'"),
    ],
)
def test_unregistered_models_are_refused_without_mlflow_with_its_messages(
    registered, monkeypatch, name, message
):
    tracking = Tracking(None, registered)
    with pytest.raises(SettingsError, match=message) as by_store:
        tracking.registry.find_version(name)
    monkeypatch.setattr(ModelRegistry, "find_version", lambda *_: pytest.fail("seconds of imports"))
    with pytest.raises(SettingsError) as by_database:
        refuse_missing_model(name, registered, None)
    assert str(by_database.value) == str(by_store.value)


def test_registered_models_are_accepted(registered):
    for name in (
        "models:/demo@champion",
        "models:/demo/1",
        "models:/demo/01",
        "models:/demo/latest",
    ):
        assert refuse_missing_model(name, registered, None) is None
    for name in ("models:/demo@nobody", "models:/demo/9", "models:/other/1"):
        with pytest.raises(SettingsError, match=r"demo|other"):
            refuse_missing_model(name, registered, None)


def test_a_store_of_another_shape_is_left_to_mlflow(tmp_path, monkeypatch):
    (tmp_path / "mlflow").mkdir()
    (tmp_path / "mlflow" / "mlflow.db").write_bytes(b"no database")
    names = []
    monkeypatch.setattr(ModelRegistry, "find_version", lambda _, name: names.append(name))
    refuse_missing_model("models:/demo@champion", tmp_path, None)
    assert names == ["models:/demo@champion"]


MINE = (
    "name: mine\nenvironment: {name: arithmetic}\nmodel: {path: nobody/nothing-at-all}\nstages:\n  prepare_data: {}\n"
    "  sft: {}\n  evaluate: {}\n"
)
COMMANDS = {
    "run": ["run"],
    "stage": ["run", "--only", "sft"],
    "sweep": ["sweep", "--seeds", "2"],
    "profile": ["check", "profile"],
    "resume": ["check", "resume"],
    "plan": ["check", "plan"],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_missing_base_model_is_refused_before_anything_starts(
    tmp_path, monkeypatch, capsys, name
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for step in ("configure_prefect", "print_banner_and_start_prefect"):
        monkeypatch.setattr(run_setup, step, lambda *_, **__: pytest.fail("a run was started"))
    monkeypatch.setattr("subprocess.Popen", lambda *_, **__: pytest.fail("a process was started"))
    (tmp_path / "mine.yaml").write_text(MINE)
    assert main([*COMMANDS[name], "mine.yaml"]) == 2
    errors = capsys.readouterr().err
    assert errors.startswith(
        "posttrain: model.path: nobody/nothing-at-all: there is no such folder, and no copy of"
    )
    assert errors.count("\n") == 1 and sorted(path.name for path in tmp_path.iterdir()) == [
        "mine.yaml"
    ]


def test_a_base_model_is_not_checked_once_a_stage_has_trained_from_it(tmp_path, monkeypatch):
    checked = []
    monkeypatch.setattr(
        run_setup, "refuse_unknown_models", lambda settings, *names: checked.extend(names)
    )
    settings = build_settings(
        {**yaml.safe_load(MINE), "output": str(tmp_path)}, check_files=False, import_code=False
    )
    (tmp_path / "mine" / "stages").mkdir(parents=True)
    for finished, expected in (
        (["prepare_data"], ["nobody/nothing-at-all"]),
        (["prepare_data", "sft"], []),
    ):
        monkeypatch.setattr(
            "tasks.pipeline.changed_conditions.list_finished_stages",
            lambda *_, finished=finished: finished,
        )
        checked.clear()
        run_setup.refuse_unknown_base_model(settings)
        assert checked == expected, finished


def create_model(path):
    path.mkdir(parents=True)
    (path / "config.json").touch()
    return path


def test_stages_and_folders_name_their_models(tmp_path):
    first = create_model(tmp_path / "sft" / "0123456789abcdef" / "model")
    second = create_model(tmp_path / "policy" / "fedcba9876543210" / "model")
    third = create_model(tmp_path / "mine")
    models = resolve_model_references([str(first), str(second.parent), str(third), str(third)])
    assert models == {
        "sft": str(first),
        "policy": str(second),
        "mine": str(third),
        "mine'": str(third),
    }


def test_the_model_of_an_epoch_is_named_after_its_stage(tmp_path):
    path = create_model(tmp_path / "sft" / "0123456789abcdef" / "epochs" / "12")
    assert resolve_model_references([str(path)]) == {"sft-epoch-12": str(path)}
    assert resolve_model_references(
        [str(create_model(tmp_path / "custom" / "epochs" / "3"))]
    ).keys() == {"3"}


def test_registered_models_and_hub_names():
    models = resolve_model_references(
        ["models:/demo@champion", "models:/demo/3", "models:/maze/3", "Qwen/Qwen2.5-0.5B"]
    )
    assert models == {
        "demo@champion": "models:/demo@champion",
        "demo-v3": "models:/demo/3",
        "maze-v3": "models:/maze/3",
        "Qwen2.5-0.5B": "Qwen/Qwen2.5-0.5B",
    }


def test_trajectory_files_are_no_models(tmp_path):
    (tmp_path / "a.jsonl").touch()
    assert (
        resolve_model_references([str(tmp_path), str(tmp_path / "a.jsonl"), "nowhere/none.jsonl"])
        == {}
    )


def test_models_and_files_together_are_refused(tmp_path):
    (tmp_path / "a.jsonl").touch()
    with pytest.raises(DataError, match=r"a\.jsonl: holds no model .*give models alone"):
        resolve_model_references([str(create_model(tmp_path / "m")), str(tmp_path / "a.jsonl")])
