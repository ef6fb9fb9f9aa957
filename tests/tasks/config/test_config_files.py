"""Files, folders and devices that a configuration names."""

import json
import os
from pathlib import Path

import pytest

from tasks.config import ConfigError, build_settings, dump_settings, load_settings


@pytest.fixture
def home(tmp_path, monkeypatch):
    """Create a current folder, and next to it the folder of the config."""
    (tmp_path / "work").mkdir()
    (tmp_path / "configs").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path


def write_config(home: Path, text: str) -> Path:
    path = home / "configs" / "config.yaml"
    path.write_text("name: x\n" + text)
    return path


def data(home: Path, path: str) -> str:
    return f"stages: {{prepare_data: {{demonstrations: {path}}}, sft: {{}}}}\n"


def read_problem(path: Path, *overrides: str) -> tuple[str, str]:
    with pytest.raises(ConfigError) as caught:
        load_settings(path, overrides)
    (problem,) = caught.value.problems
    return ".".join(map(str, problem.key)), problem.text


def test_current_folder_first_then_the_config_s(home):
    for place in ("work", "configs"):
        (home / place / "rows.jsonl").write_text("{}\n")
    path = write_config(home, data(home, "rows.jsonl"))
    assert load_settings(path).stages.prepare_data.demonstrations == str(
        home / "work" / "rows.jsonl"
    )
    (home / "work" / "rows.jsonl").unlink()
    assert load_settings(path).stages.prepare_data.demonstrations == str(
        home / "configs" / "rows.jsonl"
    )
    (home / "configs" / "rows.jsonl").unlink()
    key, text = read_problem(path)
    assert key == "stages.prepare_data.demonstrations"
    assert f"looked at {home / 'work' / 'rows.jsonl'} and {home / 'configs' / 'rows.jsonl'}" in text


def test_absolute_and_parent_paths(home):
    (home / "rows.jsonl").write_text("{}\n")
    assert load_settings(
        write_config(home, data(home, home / "rows.jsonl"))
    ).stages.prepare_data.demonstrations == str(home / "rows.jsonl")
    assert load_settings(
        write_config(home, data(home, "../rows.jsonl"))
    ).stages.prepare_data.demonstrations == str(home / "rows.jsonl")


def test_resolved_paths_stay_when_the_folder_changes(home, monkeypatch):
    (home / "work" / "rows.jsonl").write_text("{}\n")
    settings = load_settings(write_config(home, data(home, "rows.jsonl")))
    monkeypatch.chdir(home)
    assert build_settings(dump_settings(settings)) == settings


def test_a_folder_of_data_files_stands_for_all_of_them(home):
    (home / "work" / "folder").mkdir()
    (home / "work" / "folder" / "a.jsonl").write_text("{}\n")
    path = load_settings(
        write_config(home, data(home, "folder"))
    ).stages.prepare_data.demonstrations
    assert path == str(home / "work" / "folder")


def test_data_file_that_is_none(home):
    (home / "work" / "folder").mkdir()
    (home / "work" / "empty.jsonl").touch()
    assert (
        "is a folder without data files"
        in read_problem(write_config(home, data(home, "folder")))[1]
    )
    assert "is empty" in read_problem(write_config(home, data(home, "empty.jsonl")))[1]
    assert "is not a file" in read_problem(write_config(home, data(home, "x" * 5000)))[1]


def test_missing_gsm8k_file_says_where_to_get_it(home):
    text = "environment: {name: gsm8k, options: {path: gsm8k_train.jsonl}}\nstages: {prepare_data: {}, sft: {}}\n"
    key, message = read_problem(write_config(home, text))
    assert key == "environment.options.path"
    assert "openai/grade-school-math" in message and "question, answer" in message
    assert "--set environment.options.path=FILE" in message
    assert load_settings(write_config(home, text), check_files=False).environment.options == {
        "path": "gsm8k_train.jsonl"
    }
    (home / "configs" / "gsm8k_train.jsonl").write_text("{}\n")
    assert load_settings(write_config(home, text)).environment.options == {
        "path": str(home / "configs" / "gsm8k_train.jsonl")
    }


def test_missing_preferences_say_what_to_write(home):
    text = "stages: {prepare_data: {preferences: pairs.jsonl}, reward_model: {}}\n"
    key, message = read_problem(write_config(home, text))
    assert key == "stages.prepare_data.preferences" and "prompt, chosen, rejected" in message
    assert "--set stages.prepare_data.preferences=FILE" in message


# Models


def model(path: str) -> str:
    return f"model: {{path: {path!r}}}\nstages: {{evaluate: {{}}}}\n"


def test_model_folder_becomes_absolute(home):
    (home / "work" / "policy").mkdir()
    assert "contains no config.json" in read_problem(write_config(home, model("policy")))[1]
    (home / "work" / "policy" / "config.json").write_text("{}")
    assert load_settings(write_config(home, model("policy"))).model.path == str(
        home / "work" / "policy"
    )


def test_a_folder_next_to_the_model_gets_a_suggestion(home):
    folder = home / "work" / "sft/0123/model"
    folder.mkdir(parents=True)
    assert "did you mean" not in read_problem(write_config(home, model("sft/0123")))[1]
    (folder / "config.json").write_text("{}")
    assert read_problem(write_config(home, model("sft/0123")))[1].endswith(
        f"so it is not a model folder; did you mean {folder}?"
    )


def test_an_adapter_without_its_base_points_to_the_merged_model(home):
    folder = home / "work" / "sft/0123/model"
    adapter = folder / "adapter"
    adapter.mkdir(parents=True)
    values = {"peft_type": "LORA", "r": 2, "base_model_name_or_path": str(home / "base")}
    (adapter / "adapter_config.json").write_text(json.dumps(values))
    path = "sft/0123/model/adapter"
    assert "adapter_model.safetensors" in read_problem(write_config(home, model(path)))[1]
    (adapter / "adapter_model.safetensors").write_bytes(b"")
    problem = read_problem(write_config(home, model(path)))[1]
    assert "there is no such folder" in problem and "start from" not in problem
    (folder / "config.json").write_text("{}")
    assert f"or start from {folder}, the model" in read_problem(write_config(home, model(path)))[1]
    (home / "base").mkdir()
    assert load_settings(write_config(home, model(path))).model.path == str(adapter)


@pytest.mark.parametrize(
    "path", ["gpt2", "org/model-1.5B", "models:/demo@champion", "models:/demo/3"]
)
def test_hub_names_and_registered_models_stay(home, path):
    assert load_settings(write_config(home, model(path))).model.path == path


@pytest.mark.parametrize(
    "path", ["./policy", "a/b/c", "/no/such/folder", "~/no-such-folder", "a b", ""]
)
def test_neither_folder_nor_name(home, path):
    key, text = read_problem(write_config(home, model(path)))
    assert key == "model.path"
    if path:
        assert "is neither a model folder (looked at " in text and "nor a hub name" in text


@pytest.mark.parametrize("path", ["models:/demo", "models:demo@champion", "models:/@champion"])
def test_malformed_registered_model(home, path):
    assert "write models:/NAME@ALIAS" in read_problem(write_config(home, model(path)))[1]


def test_model_file_instead_of_its_folder(home):
    (home / "work" / "model.safetensors").write_text("x")
    assert (
        "give the folder that contains config.json"
        in read_problem(write_config(home, model("model.safetensors")))[1]
    )


def test_context_of_the_folder_limits_completions(home):
    folder = home / "work" / "policy"
    folder.mkdir()
    (folder / "config.json").write_text('{"max_position_embeddings": 64}')
    path = write_config(home, model("policy"))
    assert (
        load_settings(path).stages.evaluate.sampling.max_completion_tokens == 32
    )  # the default leaves room
    key, text = read_problem(path, "stages.evaluate.sampling.max_completion_tokens=64")
    assert key == "stages.evaluate.sampling.max_completion_tokens" and "64 leaves no room" in text


def test_context_of_frequencies_that_follow_the_length(home):
    folder = home / "work" / "policy"
    folder.mkdir()
    longrope = {"type": "longrope", "short_factor": [1.0] * 2, "long_factor": [2.0] * 2}
    shape = {
        "model_type": "phi3",
        "hidden_size": 16,
        "num_attention_heads": 4,
        "pad_token_id": 0,
        "vocab_size": 9,
    }
    lengths = {"max_position_embeddings": 256, "original_max_position_embeddings": 64}
    (folder / "config.json").write_text(json.dumps({**shape, **lengths, "rope_scaling": longrope}))
    path = write_config(home, model("policy"))
    assert (
        load_settings(path).stages.evaluate.sampling.max_completion_tokens == 32
    )  # half of 64, not of 256
    assert (
        load_settings(
            path, ["model.rope_context=128"]
        ).stages.evaluate.sampling.max_completion_tokens
        == 64
    )
    key, text = read_problem(path, "model.rope_context=512")
    assert key == "model.rope_context" and text.startswith(
        "512, but the model is made for sequences of up to 256"
    )
    (folder / "config.json").write_text('{"max_position_embeddings": 64}')
    key, text = read_problem(path, "model.rope_context=32")
    assert key == "model.rope_context" and "do not depend on the length; remove this key" in text


# Output and device


def test_output_folder_is_not_created(home):
    load_settings(write_config(home, "stages: {sft: {}}\n"))
    assert not (home / "work" / "outputs").exists()


def test_output_is_a_file(home):
    (home / "work" / "outputs").touch()
    path = write_config(home, "stages: {sft: {}}\n")
    assert read_problem(path) == ("output", f"{home / 'work' / 'outputs'} is a file; give a folder")
    assert "is a file" in read_problem(path, "output=outputs/deeper")[1]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_output_cannot_be_written(home):
    (home / "work").chmod(0o500)
    assert "is not writable" in read_problem(write_config(home, "stages: {sft: {}}\n"))[1]


@pytest.mark.parametrize("part", ["x", "mlflow", "prefect"])
def test_what_lies_in_the_output_folder_cannot_be_written(home, monkeypatch, part):
    """Folders in it were created by another user's run."""
    closed = home / "work" / "outputs" / part
    closed.mkdir(parents=True)
    monkeypatch.setattr(os, "access", lambda path, mode: path != closed)
    path = write_config(home, "stages: {sft: {}}\n")
    assert read_problem(path) == ("output", f"{closed} is not writable; give another folder")
    assert load_settings(path, ["output=elsewhere"])


def test_gpu_that_is_not_there(home, monkeypatch):
    import torch

    path = write_config(home, "model: {device: cuda}\nstages: {sft: {}}\n")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert read_problem(path) == (
        "model.device",
        "cuda, but torch sees no GPU here; use auto or cpu",
    )
    assert load_settings(path, check_files=False).model.device == "cuda"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert load_settings(path).model.device == "cuda"


def test_few_bits_without_a_gpu_are_refused_where_something_trains_here(home, monkeypatch):
    import torch

    text = "model: {path: org/name, lora: {quantize: nf4}}\nstages: {prepare_data: {}, sft: {}}\n"
    path = write_config(home, text)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    key, message = read_problem(path)
    assert key == "model.lora.quantize"
    assert message.startswith(
        "nf4 needs a CUDA device, and the model is to be on cpu; set quantize to none"
    )
    assert read_problem(path, "model.device=cuda")[0] == "model.device", "one problem, not two"
    assert load_settings(path, check_servers=False).model.lora.quantize == "nf4", (
        "to plan it, or to look at its runs"
    )
    assert load_settings(path, ["stages.sft=null", "stages.evaluate={}"]), (
        "merged models are played as they are"
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *package: None)
    assert "needs the package bitsandbytes" in read_problem(path)[1]


def test_missing_files_and_wrong_settings_are_reported_together(home):
    text = "stages: {prepare_data: {demonstrations: no.jsonl}, sft: {epochs: -1}, policy: {group_size: 1}}\n"
    with pytest.raises(ConfigError) as caught:
        load_settings(write_config(home, text), ["output=/dev/null"])
    assert [".".join(map(str, problem.key)) for problem in caught.value.problems] == [
        "stages.policy.group_size",
        "stages.prepare_data.demonstrations",
        "stages.sft.epochs",
        "output",
    ]


def test_a_custom_chat_template_is_looked_up_next_to_the_config(home):
    (home / "configs" / "custom.jinja").write_text("x")
    model = "{path: org/model, chat_template: custom.jinja, chat_template_date: 2025-01-02}"
    text = f"model: {model}\nstages: {{evaluate: {{}}}}\n"
    model = load_settings(write_config(home, text)).model
    assert model.chat_template == str(home / "configs" / "custom.jinja")
    assert model.chat_template_date == "2025-01-02", "without quotes as well"
    (home / "configs" / "custom.jinja").unlink()
    key, text = read_problem(write_config(home, text))
    assert key == "model.chat_template" and "is not a file (looked at" in text


def test_a_model_in_a_folder_that_exists_is_no_hub_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out" / "demo").mkdir(parents=True)
    path = tmp_path / "config.yaml"
    path.write_text("name: x\nmodel: {path: out/nothing}\nstages: {policy: {}}\n")
    with pytest.raises(ConfigError, match=r":2: model.path: .*/out has no 'nothing'; give a model"):
        load_settings(path)
    (tmp_path / "out" / "downloaded").mkdir()
    (tmp_path / "out" / "downloaded" / "config.json").write_text("{}")
    assert load_settings(path).model.path == "out/nothing"  # a folder named as an organisation
    path.write_text("name: x\nmodel: {path: org/nothing}\nstages: {policy: {}}\n")
    assert load_settings(path).model.path == "org/nothing"
