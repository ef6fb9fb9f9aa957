"""Options of `posttrain evaluate`: with a configuration, with suites, and with both."""

import argparse
import json

import pytest
from helpers import ROOT
from helpers.adapters import fakes
from helpers.gguf_models import build_model

from posttrain.cli.evaluate import _resolve_settings, add_arguments
from rl_core.errors import SettingsError
from tasks.config.problems import ConfigError


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluate") / "model"
    written, tokenizer = build_model()
    written.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(autouse=True)
def _stand_ins():
    with fakes("lm_eval"):
        yield


def resolve(*words):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return _resolve_settings(parser.parse_args(words))


def test_suites_need_no_configuration(model, tmp_path):
    words = [model, "--suite", "lm-eval:gsm8k,arc_easy", "--suite", "lm-eval:piqa"]
    settings = resolve(*words, "--limit", "7", "--include-path", str(tmp_path), "-o", str(tmp_path))
    suites = settings.stages.suites
    assert suites.tasks == ("lm-eval:gsm8k,arc_easy", "lm-eval:piqa")
    assert (suites.limit, suites.include_path) == (7, str(tmp_path))
    assert (settings.model.path, settings.output) == (model, str(tmp_path))
    assert settings.stages.active == ("suites",)
    changed = resolve(*words, "--set", "stages.suites.slots=3", "--set", "model.device=cpu")
    assert changed.stages.suites.slots == 3 and changed.stages.suites.tasks == suites.tasks


def test_suites_of_the_command_line_replace_those_of_a_configuration(model, tmp_path):
    config = tmp_path / "c.yaml"
    values = {
        "name": "c",
        "environment": {"name": "arithmetic"},
        "stages": {"sft": {}, "suites": {"tasks": ["lm-eval:a"], "num_fewshot": 2}},
    }
    config.write_text(json.dumps(values))
    own = resolve(str(config), model)
    assert own.stages.suites.tasks == ("lm-eval:a",)
    other = resolve(str(config), model, "--suite", "lm-eval:b")
    assert (other.stages.suites.tasks, other.stages.suites.num_fewshot) == (("lm-eval:b",), 2)
    assert resolve(str(ROOT / "configs/test.yaml"), model).stages.suites is None


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        ((), SettingsError, "posttrain evaluate CONFIG MODEL; or --suite lm-eval:TASK"),
        (("--limit", "3"), SettingsError, "belong to --suite"),
        (("--suite", "gsm8k"), ConfigError, "stages.suites.tasks: 'gsm8k' names no evaluator"),
        (("--suite", "lm-eval:a", "--limit", "0"), ConfigError, "stages.suites.limit"),
        (("--suite", "inspect:none.py@t"), ConfigError, "the file none.py does not exist"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(model, words, error, message):
    with pytest.raises(error, match=message.replace("MODEL", ".*")):
        resolve(model, *words)
