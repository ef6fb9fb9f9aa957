"""Names of TRL and verl: hints in errors, and their files as configurations of ours."""

import dataclasses
import json
import re
from typing import get_args, get_type_hints

import pytest
from helpers import ROOT

from posttrain.cli.convert import TRL_TRAINERS as OFFERED
from posttrain.cli.main import main
from rl_core import DistillationSettings, PolicySettings, RewardModelSettings
from rl_core.errors import SettingsError
from rl_core.settings.distillation import SelfTeacherSettings
from rl_core.settings.framework_aliases import (
    TRAINER_STAGES,
    explain_framework_name,
    find_trl_alias,
    find_verl_alias,
    list_common_names,
    list_common_values,
    list_trl_aliases,
    list_verl_aliases,
)
from rl_core.settings.rewards import JudgeSettings
from tasks.config import ConfigError, build_settings
from tasks.config.convert import TRAINERS, convert_config
from tasks.config.settings import PipelineSettings
from tasks.config.yaml_loader import read_yaml

RECORDED = json.loads((ROOT / "tests/helpers/peers/names.json").read_text())
COMMON = RECORDED["trl"]["common"]
TRL = {
    name: names + COMMON * (name not in ("Model", "DatasetMixture", "Script"))
    for name, names in RECORDED["trl"]["own"].items()
}
VERL = [name for group in RECORDED["verl"].values() if isinstance(group, list) for name in group]


def load_settings(text, tmp_path):
    path = tmp_path / "converted.yaml"
    path.write_text(text)
    values = read_yaml(path).data
    values.setdefault("model", {"path": "org/model"})  # as the result asks to
    return build_settings(values, check_files=False)


def resolve_block(path):
    """Return the settings class (or type) at a dotted path; KeyError if there is none."""
    tree = PipelineSettings
    for part in path.split("."):
        hint = get_type_hints(tree)[part]
        tree = next(
            (kind for kind in (hint, *get_args(hint)) if hasattr(kind, "__dataclass_fields__")),
            hint,
        )
    return tree


def path_exists(path):
    try:
        return resolve_block(path) is not None
    except KeyError:
        return False


@pytest.mark.parametrize(
    ("stage", "name", "hint"),
    [
        ("policy", "vf_coef", "vf_coef is stages.policy.critic.value_coef here"),
        ("network", "vf_coef", "vf_coef is stages.network.value_coef here"),
        ("network", "n_steps", "is stages.network.rollout_steps here"),
        ("sft", "n_steps", "is stages.sft.max_steps here"),
        ("policy", "min_entropy_coefficient", "is stages.policy.entropy_floor here"),
        ("thoughts", "baseline_hidden_size", "is stages.thoughts.baseline_width here"),
        ("policy", "max_beta", "is stages.policy.kl_band.maximum here"),
        ("preference", "max_beta", "is stages.policy.kl_band.maximum here"),
        ("sft", "validation_frequency", "is stages.sft.eval_every here"),
        ("policy", "validation_frequency", "is stages.policy.eval_every here"),
        ("policy", "loop_detection_rate", "no equivalent here: repeated actions are counted by"),
        ("policy", "use_gae", "is stages.policy.algorithm and stages.policy.gae_lambda here"),
        ("network", "use_gae", "is stages.network.advantages here"),
        ("policy", "R_final", "is stages.policy.rewards here"),
        (None, "training", "each stage has its settings of training"),
    ],
)
def test_names_of_other_rl_code_have_hints(stage, name, hint):
    values = {"name": "x", "stages": {"prepare_data": {}, "sft": {}, "policy": {}}}
    if stage is None:
        values[name] = {"epochs": 1}
    else:
        values["stages"][stage] = {name: 1}
    with pytest.raises(ConfigError, match=r"unknown key; ") as caught:
        build_settings(values, check_files=False, import_code=False)
    (problem,) = [problem for problem in caught.value.problems if problem.key[-1] == name]
    assert hint in problem.text and "did you mean" not in problem.text


@pytest.mark.parametrize(
    ("stage", "name", "value", "hint"),
    [
        ("policy", "algorithm", "drgrpo", "did you mean 'dr_grpo'?"),
        ("policy", "algorithm", "MaxRL", "did you mean 'maxrl'?"),
        ("policy", "algorithm", "GiGPO", "write grpo, with turn_credit: {}"),
        ("policy", "importance", "v-trace", "did you mean 'vtrace'?"),
        ("policy", "loss_aggregation", "token-mean", "did you mean 'token_mean'?"),  # or null
        ("policy", "schedule", "adaptive", "learning_rate_control: {}"),
        ("distill", "divergence", "jsd", "write gold, with beta: 0.5"),
        ("reward_model", "loss", "prm", "loss: process"),
        ("policy", "algorithm", "qwertz", ""),
    ],
)
def test_wrong_values_get_the_nearest_choice_or_that_of_a_known_name(stage, name, value, hint):
    values = {"name": "x", "stages": {"prepare_data": {}, "sft": {}, stage: {name: value}}}
    with pytest.raises(ConfigError) as caught:
        build_settings(values, check_files=False, import_code=False)
    (problem,) = [problem for problem in caught.value.problems if problem.key[-1] == name]
    assert problem.text.endswith(hint or "]"), problem.text
    classes = {"policy": PolicySettings, "distill": DistillationSettings}
    with pytest.raises(SettingsError, match=re.escape(hint)):
        classes.get(stage, RewardModelSettings)(**{name: value})


def test_common_values_are_wrong_values_of_settings_that_exist():
    rows = list_common_values()
    assert [list(row.values()) for row in rows] == sorted(list(row.values()) for row in rows)
    stages = (PolicySettings, DistillationSettings, RewardModelSettings)
    blocks = (*stages, SelfTeacherSettings, JudgeSettings)
    for row in rows:
        fields = [
            cls.__dataclass_fields__[row["setting"]]
            for cls in blocks
            if row["setting"] in cls.__dataclass_fields__
        ]
        assert fields and not any(f"'{row['value']}'" in str(field.type) for field in fields), row


@pytest.mark.parametrize(
    ("values", "key", "wrong"),
    [
        ({"turn_credit": {"mode": "mean_norm"}}, "mode", "verl's"),
        (
            {
                "rewards": {"process": 1.0},
                "reward_options": {"process": {"function": "a.py:b", "model": "x"}},
            },
            "model",
            "verl's",
        ),
        ({"rollouts": {"free_cache_engine": True}}, "free_cache_engine", "known:"),
    ],
)
def test_a_key_of_another_block_of_verl_explains_nothing(values, key, wrong):
    values = {"name": "x", "stages": {"prepare_data": {}, "sft": {}, "policy": values}}
    with pytest.raises(ConfigError) as caught:
        build_settings(values, check_files=False, import_code=False)
    (problem,) = [problem for problem in caught.value.problems if problem.key[-1] == key]
    assert wrong not in problem.text, problem.text


def test_common_names_name_settings_that_exist():
    for row in list_common_names():
        stages = row["stages"].split() or [""]
        for stage in stages:
            assert not explain_framework_name(row["name"], stage).startswith(("TRL", "verl"))
            for path in filter(None, row["settings"].split(", ")):
                resolve_block(path.replace("STAGE", f"stages.{stage}"))


@pytest.mark.parametrize(
    ("name", "stage", "path"),
    [
        ("cliprange", "policy", "stages.policy.clip_eps"),
        ("num_ppo_epochs", "policy", "stages.policy.epochs"),
        ("num_mini_batches", "policy", "stages.policy.minibatches"),
        ("init_kl_coef", "policy", "stages.policy.kl_coef"),
        ("total_episodes", "policy", "stages.policy.iterations"),
        ("reward_model_path", "policy", "stages.policy.rewards"),
        ("sft_model_path", "policy", "model.path"),
        ("max_seq_length", "sft", "stages.prepare_data.max_tokens"),
        ("rpo_alpha", "preference", "stages.preference.sft_coef"),
        ("reference_free", "preference", "stages.preference.loss"),
        ("r", "sft", "model.lora.rank"),
        ("r", None, "model.lora.rank"),
    ],
)
def test_names_of_peft_and_of_older_trl_name_the_setting(name, stage, path):
    assert f"{name} is {path} " in explain_framework_name(name, stage)


@pytest.mark.parametrize("trainer", ["grpo", "rloo", "distillation"])
def test_a_config_without_a_model_keeps_its_lengths(trainer, tmp_path):
    """Trainers get the model as an argument: the context of our default preset says nothing about it."""
    for values, length in (({}, 512), ({"max_completion_length": 2048}, 2048)):
        text = convert_config({"num_generations": 8, **values}, "plain.yaml", trainer)
        (tmp_path / "x.yaml").write_text(text)
        written = read_yaml(tmp_path / "x.yaml").data
        (stage,) = written["stages"].values()
        assert stage["sampling"]["max_completion_tokens"] == length and "model" not in written
        assert "#   model.path: the file names no model; set a folder or a hub name" in text
        assert "leaves no room" not in text
    text = convert_config({"num_generations": 8, "model_name_or_path": "org/m"}, "x.yaml", trainer)
    assert "names no model" not in text


def test_every_recorded_name_has_an_entry():
    assert (
        len(TRL["GRPO"]) == 191
        and len(TRL["SFT"]) == 135
        and len(TRL["DPO"]) == 139
        and len(TRL["Reward"]) == 125
    )
    missing = [
        (trainer, name)
        for trainer, names in TRL.items()
        for name in names
        if find_trl_alias(name, trainer) is None
    ]
    assert (
        missing == []
        and [name for name in VERL if find_verl_alias(name) is None] == []
        and len(VERL) == 357
    )


def test_every_entry_names_settings_that_exist_or_says_why_there_are_none():
    assert [
        row.names
        for row in (*list_trl_aliases(), *list_verl_aliases())
        if len(row.difference) < 4 or not row.names
    ] == []
    wrong = []
    for row in (*list_trl_aliases(), *list_verl_aliases()):
        stages = {TRAINER_STAGES.get(trainer, "preference") for trainer in row.trainers} or {"sft"}
        for path in (path for stage in stages for path in row.resolve_paths(stage)):
            if not path_exists(path):
                wrong.append(path)
    # A round of distillation is sampled as a policy's, but it has no critic, KL or entropy terms: none is named
    assert wrong == []


def test_names_have_a_meaning_per_stage():
    assert "stages.policy.kl_coef" in explain_framework_name("beta", "policy")
    assert explain_framework_name("num_generations", "policy").startswith(
        "TRL's num_generations is stages.policy.group_size here"
    )
    assert "a number of parts here" in explain_framework_name("ppo_mini_batch_size", "policy")
    assert "stages.policy.clip_eps here" in explain_framework_name(
        "epsilon", "sft"
    )  # written in the wrong stage
    assert "stages.policy.epochs" in explain_framework_name("num_iterations", "policy")
    assert "stages.policy.iterations" in explain_framework_name("max_steps", "policy")
    assert (
        "no equivalent" in explain_framework_name("ignore_bias_buffers", "sft")
        and explain_framework_name("clip_epsilon", "policy") == ""
    )
    for stage, long_rows in (
        ("sft", "long_rows: cut"),
        ("preference", "long_rows: cut"),
        ("reward_model", "long_rows: drop"),
    ):
        hint = explain_framework_name("max_length", stage)
        assert "stages.prepare_data.max_tokens" in hint and long_rows in hint, hint


@pytest.mark.parametrize(
    ("stage", "trainer"),
    [("policy", "GRPO"), ("sft", "SFT"), ("preference", "DPO"), ("reward_model", "Reward")],
)
def test_a_framework_s_name_as_a_key_is_explained_by_the_table(stage, trainer):
    """Covers each name that ours does not have. Regression: `beta` in policy got the suggestion 'betas'."""
    fields = {name for name in resolve_block(f"stages.{stage}").__dataclass_fields__}
    names = [name for name in TRL[trainer] if name not in fields]
    messages = {}
    for start in range(0, len(names), 20):  # the reader stops after thirty problems
        with pytest.raises(ConfigError) as error:
            build_settings(
                {"name": "x", "stages": {stage: dict.fromkeys(names[start : start + 20], 1)}},
                check_files=False,
            )
        messages |= {
            problem.key[-1]: problem.text
            for problem in error.value.problems
            if problem.key[-1] in names
        }
    assert set(messages) == set(names)
    for name, text in messages.items():
        row = find_trl_alias(name, trainer)
        assert row.difference in text or "it belongs to stages." in text, (name, text)


@pytest.mark.parametrize(
    ("trainer", "values", "expected"),
    [
        ("SFT", {"max_length": 256}, (256, "cut")),
        ("SFT", {"max_length": 256, "truncation_mode": "keep_start"}, (256, "cut")),
        ("Reward", {"max_length": 256}, (256, "drop")),
        ("SFT", {"max_length": None}, (None, "refuse")),
        ("DPO", {"max_length": 256, "truncation_mode": "keep_end"}, (None, "refuse")),
    ],
)
def test_long_rows_as_trl_takes_them(tmp_path, trainer, values, expected):
    """Regression: `max_length` had no equivalent, although settings of the data stage cut or drop rows."""
    values = {"model_name_or_path": "m", "dataset_name": "rows.jsonl", **values}
    data = load_settings(
        convert_config(values, "trl.yaml", trainer.lower()), tmp_path
    ).stages.prepare_data
    assert (data.max_tokens, data.long_rows) == expected


def test_blocks_of_verl_are_answered_leaf_by_leaf():
    block = {"actor": {"clip_ratio": 0.2, "ppo_epochs": 1}, "rollout": {"n": 4}}
    with pytest.raises(ConfigError) as error:
        build_settings(
            {
                "name": "x",
                "stages": {"evaluate": {}},
                "actor_rollout_ref": block,
                "algorithm": {"lam": 1.0},
            }
        )
    text = str(error.value)
    for words in (
        "stages.policy.clip_eps",
        "stages.policy.epochs",
        "stages.policy.group_size",
        "stages.policy.gae_lambda",
    ):
        assert words in text
    assert "posttrain convert" in text


def test_the_library_says_it_too():
    with pytest.raises(SettingsError, match="TRL's num_generations is group_size here"):
        PolicySettings(num_generations=4)
    with pytest.raises(SettingsError, match=r"did you mean 'learning_rate'\?"):
        PolicySettings(learing_rate=0.1)


def test_trl_grpo_becomes_a_configuration(tmp_path):
    text = convert_config(
        {
            "learning_rate": 1e-5,
            "num_generations": 4,
            "per_device_train_batch_size": 8,
            "steps_per_generation": 4,
            "gradient_accumulation_steps": 2,
            "max_completion_length": 100,
            "beta": 0.04,
            "epsilon": 0.1,
            "loss_type": "grpo",
            "model_name_or_path": "org/model",
            "max_steps": 10,
            "warmup_steps": 0.2,
            "use_vllm": True,
            "top_p": 0.9,
            "num_iterations": 2,
            "odd": 1,
        },
        "my run.yaml",
    )
    policy = load_settings(text, tmp_path).stages.policy
    # 8 completions x 4 steps per generation = 32 = 8 prompts x 4; 2 of the 4 steps make one optimizer step
    assert (policy.prompts_per_iteration, policy.group_size, policy.minibatches, policy.epochs) == (
        8,
        4,
        2,
        2,
    )
    assert policy.iterations == 3  # 10 optimizer steps, 4 in each round
    assert (policy.kl_coef, policy.clip_eps, policy.algorithm, policy.aggregation) == (
        0.04,
        0.1,
        "grpo",
        "sequence_mean",
    )
    assert (policy.schedule, policy.min_lr_ratio, policy.warmup_steps, policy.betas) == (
        "linear",
        0,
        2,
        (0.9, 0.999),
    )
    left = text.partition("# Not taken over:")[2]
    assert (
        "use_vllm: true" in left
        and "top_p: 0.9" in left
        and "odd: 1" in left
        and "epsilon" not in left
    )


def test_verl_becomes_a_configuration(tmp_path):
    values = {
        "data": {"train_batch_size": 64, "max_response_length": 99, "train_files": "a.parquet"},
        "actor_rollout_ref": {
            "model": {"path": "org/model"},
            "actor": {
                "optim": {"lr": 3e-6},
                "ppo_mini_batch_size": 16,
                "use_kl_loss": True,
                "kl_loss_coef": 0.002,
                "kl_loss_type": "mse",
                "clip_ratio_high": 0.3,
                "_target_": "x.Y",
            },
            "rollout": {"n": 5, "response_length": "${data.max_response_length}", "top_k": -1},
        },
        "algorithm": {"adv_estimator": "grpo"},
    }
    text = convert_config(values, "v.yaml")
    policy = load_settings(text, tmp_path).stages.policy
    assert (
        policy.algorithm,
        policy.prompts_per_iteration,
        policy.group_size,
        policy.minibatches,
    ) == ("grpo", 64, 5, 4)
    assert (policy.kl_coef, policy.kl_in, policy.kl_estimator) == (0.002, "loss", "k2")
    assert policy.clip == (0.2, 0.3) and policy.dual_clip == 3 and policy.learning_rate == 3e-6
    assert policy.sampling.max_completion_tokens == 99
    assert (
        'options: {"path": "a.parquet", ' in text and "_target_" not in text and "top_k" not in text
    )


@pytest.mark.parametrize("trainer", TRAINERS)
def test_any_value_of_any_name_gives_text_that_names_it(trainer, tmp_path):
    """Nonsense values: each name is in the result, converted or in a comment, and the output validates."""
    class_name = next(name for name in TRL if name.lower() == trainer)
    names = [*TRL[class_name], *TRL["Model"]]
    text = convert_config(dict.fromkeys(names, 3), "x.yaml", trainer)
    allowed = {"eval_strategy", "save_strategy", "lora_task_type"}
    assert [name for name in names if name not in text and name not in allowed] == []


def test_refused_values_go_into_the_comments_with_the_reason(tmp_path):
    text = convert_config(
        {"epsilon": 1.5, "num_generations": 4, "model_name_or_path": "org/m"}, "x.yaml"
    )
    assert "less than 1" in text and "clip_eps:" not in text.partition("# Not")[0]
    assert load_settings(text, tmp_path).stages.policy.clip_eps is None


def test_command_and_its_refusals(tmp_path, capsys):
    path = tmp_path / "sft.json"
    path.write_text(
        json.dumps({"packing": True, "dataset_name": "rows.jsonl", "model_name_or_path": "org/m"})
    )
    assert main(["convert", str(path)]) == 0
    out = capsys.readouterr().out
    assert "packing: true  # packing" in out and "demonstrations: rows.jsonl" in out
    path.write_text('{"learning_rate": 0.1}')
    assert main(["convert", str(path)]) == 2 and "--trainer grpo|" in capsys.readouterr().err
    path.write_text('{"what": 0.1}')
    assert main(["convert", str(path)]) == 2 and "no setting of TRL" in capsys.readouterr().err
    assert OFFERED == TRAINERS


def test_recorded_names_are_those_of_an_installed_trl():
    """Compare with TRL itself, in an environment that has it."""
    trl = pytest.importorskip("trl")
    if trl.__version__ != RECORDED["trl"]["version"]:
        pytest.skip("another version of TRL")
    for name, names in TRL.items():
        cls = trl.ScriptArguments if name == "Script" else getattr(trl, f"{name}Config", None)
        assert cls is None or {field.name for field in dataclasses.fields(cls)} == set(names), name


def test_options_of_adapters_are_converted(tmp_path):
    values = {
        "model_name_or_path": "org/m",
        "use_peft": True,
        "lora_target_modules": "all-linear",
        "use_rslora": True,
        "use_dora": True,
        "lora_modules_to_save": ["norm"],
        "load_in_4bit": True,
        "num_generations": 4,
    }
    lora = load_settings(convert_config(values, "x.yaml"), tmp_path).model.lora
    assert (lora.target_modules, lora.rank_stabilized, lora.dora) == ("all-linear", True, True)
    assert (lora.modules_to_save, lora.quantize) == (("norm",), "nf4")


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"report_to": "wandb"}, ("wandb",)),
        ({"report_to": ["wandb", "tensorboard"]}, ("tensorboard", "wandb")),
        ({"report_to": "none"}, ()),
        ({"report_to": "trackio"}, None),  # no sink of ours: left to the reader
        ({"trainer": {"logger": ["console", "wandb"]}}, ("wandb",)),
        ({"trainer": {"logger": ["console", "mlflow"]}}, ()),
    ],
)
def test_destinations_of_metrics_become_sinks(values, expected, tmp_path, monkeypatch):
    monkeypatch.setattr("tasks.config.cross_checks.check_sink_installed", lambda sink: None)
    rest = (
        {"actor_rollout_ref": {"rollout": {"n": 4}}}
        if "trainer" in values
        else {"num_generations": 4}
    )
    text = convert_config({**values, **rest}, "peer.yaml")
    assert load_settings(text, tmp_path).tracking.sinks == (expected or ())
    assert ("tracking.sinks" in text.partition("# Not taken over")[2]) == (expected is None)


def test_names_are_looked_up_by_a_part(capsys):
    assert main(["convert", "--names", "Gradient_Checkpointing"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [
        "TRL gradient_checkpointing -> stages.<stage>.activation_checkpointing: same; off by default here, on in TRL",
        "TRL gradient_checkpointing_kwargs -> no equivalent: checkpointing is always per layer",
    ]
    assert [line.split()[:2] for line in lines[2:]] == [
        ["verl", "actor_rollout_ref.model.enable_gradient_checkpointing"]
    ]
    assert main(["convert", "--names"]) == 0
    assert "TRL epsilon (GRPO, RLOO) -> stages.<stage>.clip_eps\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--names", "nosuchname"], "no name of TRL or verl contains 'nosuchname'"),
        ([], "name a FILE, or look names up with --names PART"),
        (["grpo.yaml", "--names", "beta"], "name a FILE, or look names up with --names PART"),
    ],
)
def test_convert_needs_a_file_or_a_name_that_exists(arguments, message, capsys):
    assert main(["convert", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_local_file_of_prompts_becomes_the_environment(tmp_path):
    values = {"model_name_or_path": "m", "num_generations": 8, "dataset_name": "questions.jsonl"}
    text = convert_config(values, "grpo.yaml")
    settings = load_settings(text, tmp_path)
    assert settings.environment.name == "prompts"
    assert settings.environment.options == {"path": "questions.jsonl"}
    assert "#   rewards: the framework takes reward functions in Python" in text
    text = convert_config({**values, "dataset_name": "org/name"}, "grpo.yaml")
    assert "#   environment: the file names no local file of prompts" in text
    verl = {"data": {"train_files": ["~/train.parquet"], "prompt_key": "question"}}
    settings = load_settings(convert_config(verl, "ppo.yaml"), tmp_path)
    assert settings.environment.options == {
        "path": "~/train.parquet",
        "prompt": "question",
        "target": "reward_model.ground_truth",
    }
