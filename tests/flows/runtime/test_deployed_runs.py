"""Settings that a run of a deployment may change."""

from __future__ import annotations

import pytest

from flows import parameters
from flows.parameters import read_settings
from rl_core.errors import SettingsError
from tasks.config import build_settings

DECLARED = {
    "name": "mine",
    "environment": {"name": "arithmetic"},
    "model": {"path": "org/base"},
    "stages": {"prepare_data": {}, "sft": {}, "policy": {"rewards": {"task": 1.0}}},
}


@pytest.fixture
def declares(monkeypatch):
    """Return a function that runs a deployment which declares these parameters, with other parameters."""
    monkeypatch.delenv("POSTTRAIN_RUNS_MAY_CHANGE", raising=False)

    def run(settings, overrides=None, declared=DECLARED, declared_overrides=None):
        monkeypatch.setattr(
            parameters,
            "read_declared_parameters",
            lambda: {"settings": declared, "overrides": declared_overrides},
        )
        return read_settings(settings, overrides)

    return run


@pytest.mark.parametrize(
    "override",
    [
        "seed=7",
        "stages.sft.epochs=2",
        "stages.evaluate={}",
        "run.wait_seconds=9",
        "model.context=64",
        "environment.name=maze",
        "stages.policy.rewards={task: 1.0, length: 0.1}",
    ],
)
def test_how_it_trains_may_be_changed(declares, override):
    assert declares(DECLARED, [override]) != build_settings(DECLARED)


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("model.trust_remote_code=true", "model.trust_remote_code"),
        ("model.path=other/model", "model.path"),
        ("environment.name='os:Env'", "code (os:Env)"),
        ("environment={name: gymnasium, options: {id: 'os:system'}}", "code (os:system)"),
        ("environment={name: gsm8k, options: {path: FILE}}", "environment.options.path"),
        ("stages.policy.rewards={'os:system': 1.0}", "code (os:system)"),
        ("stages.policy.loss=os:system", "code (os:system)"),
        ("stages.policy.advantages=mine.py:f", "code (mine.py:f)"),
        ("stages.policy.early_stop={function: os:system}", "code (os:system)"),
        (
            "stages.policy.curriculum=[{name: a, levels: {easy: 1}, exit_conditions: [{function: os:system}]}]",
            "code (os:s",
        ),
        ("stages={evaluate: {}, analyze: {measures: [os:system]}}", "code (os:system)"),
        ("stages.custom.mine={use: os:system}", "code (os:system)"),
        ("stages.custom.mine={use: os:system}", "code (os:system)"),
        ("stages.prepare_data.demonstrations=FILE", "stages.prepare_data.demonstrations"),
        ("output=/tmp/elsewhere", "output"),
        ("name=other", "name"),
        ("tracking.uri=http://evil.example", "tracking.uri"),
    ],
)
def test_code_files_and_places_may_not(declares, tmp_path, override, key):
    path = tmp_path / "rows.jsonl"
    path.write_text(
        '{"question": "1 + 1?", "answer": "#### 2", "prompt": "a", "completion": "b"}\n' * 9
    )
    with pytest.raises(SettingsError) as caught:
        declares(DECLARED, [override.replace("FILE", str(path))])
    assert str(caught.value).startswith("a run of this deployment may not change ") and key in str(
        caught.value
    )
    assert str(caught.value).endswith(f"POSTTRAIN_RUNS_MAY_CHANGE={key.partition(' ')[0]}")


def test_nothing_is_imported_before_the_refusal(declares, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "of_a_run.py").write_text(
        f"import pathlib\npathlib.Path({str(tmp_path / 'ran')!r}).touch()\n"
    )
    changed = {**DECLARED, "environment": {"name": "of_a_run:Env"}}
    with pytest.raises(SettingsError, match="may not change code"):
        declares(changed)
    assert not (tmp_path / "ran").exists()
    with pytest.raises(SettingsError):
        declares(changed, declared=changed)  # declared, so it is imported: no environment is in it
    assert (tmp_path / "ran").exists()


@pytest.mark.filterwarnings("ignore:.*the old name works:FutureWarning")
def test_former_names_of_settings_are_the_same_settings(declares):
    """Declared under a former name, set by a run under that of today, and the other way round."""
    former, present = (
        {**DECLARED, "stages": {**DECLARED["stages"], name: {}}} for name in ("own", "custom")
    )
    for declared, run in ((former, present), (present, former), (former, former)):
        assert declares(run, declared=declared).stages.custom == {}
    with pytest.raises(SettingsError, match="may not change name;"):
        declares(present, ["name=other"], declared=former)


def test_the_operator_may_allow_more(declares, monkeypatch):
    changes = ["name=other", "model.path=other/model"]
    with pytest.raises(
        SettingsError, match=r"name, model\.path; .*POSTTRAIN_RUNS_MAY_CHANGE=name,model\.path$"
    ):
        declares(DECLARED, changes)
    monkeypatch.setenv("POSTTRAIN_RUNS_MAY_CHANGE", "name, model.path")
    assert declares(DECLARED, changes).name == "other"


def test_declared_overrides_count_and_shipped_configs_are_free(declares):
    moved = declares(DECLARED, ["name=other", "seed=2"], declared_overrides=["name=other"])
    assert (moved.name, moved.seed) == ("other", 2)
    assert declares("test", ["seed=3"]).name == "test"
    with pytest.raises(SettingsError, match="may not change output"):
        declares("test", ["output=/tmp/elsewhere"])
    with pytest.raises(SettingsError, match="can only name a shipped config"):
        declares(DECLARED, declared=None)
    assert declares("test", declared=None).name == "test"


def test_a_file_that_nobody_declared_is_compared(declares, tmp_path):
    path = tmp_path / "theirs.yaml"
    path.write_text(
        "name: theirs\nmodel: {path: org/base, trust_remote_code: true}\nstages: {evaluate: {}}\n"
    )
    with pytest.raises(SettingsError, match=r"may not change name, model\.trust_remote_code"):
        declares(str(path))


def test_a_run_without_a_deployment_is_free():
    assert read_settings(DECLARED, ["model.trust_remote_code=true"]).model.trust_remote_code
