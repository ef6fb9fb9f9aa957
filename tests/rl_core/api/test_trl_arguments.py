"""Names of TRL in a script: each error says what it is here."""

from __future__ import annotations

import pytest

import rl_core
from rl_core.api import trl_arguments
from rl_core.errors import suggest_name


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("GRPOTrainer", r"a class of TRL; here it is rl_core\.grpo\(model, \.\.\.\)"),
        ("SFTConfig", r"a class of TRL; here it is rl_core\.SFTSettings"),
        ("KTOConfig", r"here it is rl_core\.PreferenceSettings\(loss='kto'\)"),
        ("GRPO", "has no attribute 'GRPO'; did you mean 'grpo'"),
        ("Trainerr", "did you mean 'Trainer'"),
    ],
)
def test_classes_of_trl_are_explained(name, advice):
    with pytest.raises(AttributeError, match=advice):
        getattr(rl_core, name)


def test_every_named_function_and_setting_exists():
    for function, settings in trl_arguments._FUNCTIONS.values():
        assert callable(getattr(rl_core, function))
        assert eval(settings, vars(rl_core) | {settings.partition("(")[0]: _find_class(settings)})


def _find_class(settings):
    return getattr(rl_core, settings.partition("(")[0])


@pytest.mark.parametrize(
    ("function", "argument", "message"),
    [
        (
            "grpo",
            "reward_funcs",
            r"grpo\(\): 'reward_funcs' is an argument of TRL; here it is reward: a",
        ),
        ("grpo", "train_dataset", "here it is prompts: rows"),
        ("sft", "train_dataset", "here it is data: rows"),
        ("sft", "eval_dataset", "here it is heldout: rows"),
        ("grpo", "eval_dataset", "here it is heldout_prompts: rows"),
        ("dpo", "args", r"here it is settings, as in settings=\{'learning_rate': 1e-5\}"),
        (
            "reward_model",
            "peft_config",
            r"model=rl_core\.ModelSettings\(path=\.\.\., lora=\{'rank': 16\}\)",
        ),
        (
            "grpo",
            "num_generations",
            r"grpo\(\): 'num_generations' is no argument.*: TRL's num_generations is group_size here",
        ),
        ("sft", "learning_rate", r"a setting: pass settings=\{'learning_rate': \.\.\.\}"),
        ("dpo", "beta", r"a setting: pass settings=\{'beta': \.\.\.\}"),
        ("distill", "gradient_checkpointing", "is activation_checkpointing here"),
        ("ppo", "outptu", "there is no argument 'outptu'; did you mean 'output'"),
    ],
)
def test_arguments_of_trl_are_explained(function, argument, message):
    with pytest.raises(TypeError, match=message):
        getattr(rl_core, function)("model", **{argument: None})


def test_attributes_and_arguments_of_trl_trainers_are_explained():
    trainer = rl_core.sft(
        rl_core.create_policy(["one", "two"]),
        [{"prompt": "one", "completion": "two"}],
        heldout=0,
        settings={"epochs": 1},
    )
    with pytest.raises(AttributeError, match=r"'save_model' is a name of TRL; here it is save\(fo"):
        trainer.save_model("folder")
    with pytest.raises(AttributeError, match=r"here it is metrics\(\)"):
        _ = trainer.state
    with pytest.raises(AttributeError, match=r"has no attribute 'nothing'$"):
        _ = trainer.nothing
    with pytest.raises(TypeError, match=r"train\(\): 'resume_from_checkpoint' .* resumes it"):
        trainer.train(resume_from_checkpoint=True)
    with pytest.raises(TypeError, match="there is no argument 'frehs'; did you mean 'fresh'"):
        trainer.run(frehs=True)
    assert not hasattr(trainer, "__nothing__")


def test_known_names_are_listed_once():
    assert suggest_name("zzz", ["mixture", "agent", "mixture"]) == "known: agent, mixture"
