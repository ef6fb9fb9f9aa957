"""What transformers prints while models load and save: errors and the user's choices alone."""

import logging
import time

import pytest
import torch
import transformers
from helpers.library import small_policy
from transformers.utils import logging as transformers_logging

import rl_core
from rl_core.errors import ModelError
from rl_core.models import quiet_loading
from rl_core.models.quiet_loading import quiet_transformers


@pytest.fixture
def folder(tmp_path):
    return small_policy().save(tmp_path / "model")


@pytest.fixture(autouse=True)
def _transformers_as_imported():
    """Undo what earlier tests of this process set: bars, verbosity."""
    had_bars, verbosity = (
        transformers_logging.is_progress_bar_enabled(),
        transformers_logging.get_verbosity(),
    )
    transformers_logging.enable_progress_bar()
    transformers_logging.set_verbosity_warning()
    yield
    transformers_logging.set_verbosity(verbosity)
    if not had_bars:
        transformers_logging.disable_progress_bar()


@pytest.fixture
def reports(monkeypatch):
    """Collect the records of the logger that transformers reports with."""
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    logger = logging.getLogger("transformers.modeling_utils")
    logger.addHandler(handler)
    yield records
    logger.removeHandler(handler)


def test_saving_and_loading_print_nothing(tmp_path, capfd, reports):
    folder = small_policy().save(tmp_path / "model")
    rl_core.load_policy(folder)
    pairs = [{"prompt": "1", "chosen": "2", "rejected": "3"}] * 4
    rl_core.reward_model(folder, pairs, heldout=0.0, settings={"eval_every": 0, "patience": None})
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")  # before: bars of loading and writing
    assert reports == []  # before: LOAD REPORT of the new head


def test_a_bar_appears_once_the_work_takes_long(capfd, monkeypatch):
    monkeypatch.setattr(quiet_loading, "SHOW_AFTER_SECONDS", 0.2)
    with quiet_transformers():
        for _ in transformers_logging.tqdm(range(4), desc="short", mininterval=0):
            pass
        for _ in transformers_logging.tqdm(range(4), desc="long", mininterval=0):
            time.sleep(0.15)
    err = capfd.readouterr().err
    assert "short" not in err and "long: 100%" in err


def test_a_hook_and_bars_of_the_user_stay_as_they_are():
    opened = []

    def open_bar(factory, arguments, options):
        opened.append(options)
        return factory(*arguments, **options | {"disable": True})

    previous = transformers_logging.set_tqdm_hook(open_bar)
    try:
        with quiet_transformers(), quiet_transformers():
            list(transformers_logging.tqdm(range(2), desc="mine"))
        assert transformers_logging.set_tqdm_hook(previous) is open_bar
    finally:
        transformers_logging.set_tqdm_hook(previous)
    assert opened == [{"desc": "mine"}]  # no delay was added
    transformers_logging.disable_progress_bar()
    try:
        with quiet_transformers():
            pass
        assert not transformers_logging.is_progress_bar_enabled()
    finally:
        transformers_logging.enable_progress_bar()


def test_the_hook_is_gone_after_nested_blocks():
    with quiet_transformers():
        with quiet_transformers():
            pass
        assert transformers_logging.set_tqdm_hook(None) is not None
    assert transformers_logging.set_tqdm_hook(None) is None


def test_the_report_is_shown_when_loading_fails_or_the_user_wants_more(reports):
    logger = logging.getLogger("transformers.modeling_utils")
    with quiet_transformers():
        logger.warning("Model LOAD REPORT from: x")
        logger.warning("another warning")
    assert [record.getMessage() for record in reports] == ["another warning"]
    with pytest.raises(RuntimeError), quiet_transformers():
        logger.warning("Model LOAD REPORT from: y")
        raise RuntimeError("look at the report above")
    assert reports[-1].getMessage() == "Model LOAD REPORT from: y"
    verbosity = transformers_logging.get_verbosity()
    transformers.logging.set_verbosity_info()
    try:
        with quiet_transformers():
            logger.warning("Model LOAD REPORT from: z")
    finally:
        transformers.logging.set_verbosity(verbosity)
    assert reports[-1].getMessage() == "Model LOAD REPORT from: z"


def test_weights_that_stay_unused_are_one_warning(folder, caplog):
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    weights = load_file(path)
    save_file(weights | {"model.extra.weight": torch.zeros(2)}, path, {"format": "pt"})
    (folder / "manifest.json").unlink()
    with caplog.at_level(logging.WARNING, logger="rl_core"):
        rl_core.load_policy(folder)
    (message,) = [record.getMessage() for record in caplog.records]
    assert "1 weights of the files are not part of LlamaForCausalLM" in message
    assert "model.extra.weight" in message


def test_errors_are_not_hidden(folder):
    for name in ("manifest.json", "model.safetensors"):
        (folder / name).unlink()
    with pytest.raises(ModelError, match="safetensors"):
        rl_core.load_policy(folder)
