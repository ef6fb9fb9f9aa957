"""Display names of models named on the command line."""

import pytest

from posttrain.cli.model_references import resolve_model_references
from rl_core.errors import DataError


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
