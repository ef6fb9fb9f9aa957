"""Former names of settings: every row of the table works in YAML, `--set`, Python and recorded settings."""

import dataclasses
import warnings

import pytest

from posttrain.cli import main as cli
from posttrain.settings_files import load_online_settings
from rl_core.errors import ResumeRefused, SettingsError
from rl_core.settings import (
    KLBandSettings,
    NetworkSettings,
    OnlineUpdateSettings,
    PolicySettings,
    ReferenceSettings,
    Settings,
    setting,
)
from rl_core.settings.deprecated_keys import (
    DEPRECATED_KEYS,
    rename_recorded_keys,
    restore_former_names,
)
from rl_core.training.checkpoints import check_fingerprint
from tasks.config import (
    build_pipeline_model,
    build_settings,
    digest_settings,
    dump_settings,
    load_settings,
)
from tasks.config.problems import ConfigError
from tasks.config.settings import CustomStageSettings, PipelineSettings, StagesSettings
from tasks.pipeline.stage_fingerprint import compare_fingerprints

BLOCK = {"polish": CustomStageSettings(use="polish.py:STAGE")}
# Of each row: a value of the old name, and what the settings then hold under their new names.
ROWS = {
    "OnlineUpdateSettings.kl_target": (0.1, {"update_kl_target": 0.1}),
    "OnlineUpdateSettings.kl_tolerance": (0.02, {"kl_band.width": 0.4}),
    "OnlineUpdateSettings.kl_factor": (1.5, {"kl_band.increase": 1.5, "kl_band.decrease": 1.5}),
    "OnlineUpdateSettings.kl_coef_min": (1e-3, {"kl_band.minimum": 1e-3}),
    "OnlineUpdateSettings.kl_coef_max": (0.5, {"kl_band.maximum": 0.5}),
    "OnlineUpdateSettings.kl_limit": (0.3, {"kl_max": 0.3}),
    "NetworkSettings.kl_target": (0.02, {"desired_kl": 0.02}),
    "NetworkSettings.kl_factor": (2.0, {"learning_rate_factor": 2.0}),
    "ReferenceSettings.own_process_gib": (1.0, {"separate_process_gib": 1.0}),
    "StagesSettings.own": (BLOCK, {"custom": BLOCK}),
}
CLASSES = {
    cls.__name__: cls
    for cls in (OnlineUpdateSettings, NetworkSettings, ReferenceSettings, StagesSettings)
}


def read_value(settings, path):
    for part in path.split("."):
        settings = getattr(settings, part)
    return settings


def test_every_row_is_tested():
    assert {f"{name}.{key.name}" for name, keys in DEPRECATED_KEYS.items() for key in keys} == {
        *ROWS
    }
    for name, keys in DEPRECATED_KEYS.items():  # a name of today is no former one
        fields = {field.name for field in dataclasses.fields(CLASSES[name])}
        assert not fields & {key.name for key in keys}
        assert {new.partition(".")[0] for key in keys for new in key.new_names} <= fields


@pytest.mark.parametrize("row", ROWS)
def test_an_argument_of_python_works_and_warns(row):
    name, _, old = row.partition(".")
    value, expected = ROWS[row]
    first = next(iter(expected))
    with pytest.warns(FutureWarning, match=rf"{name}: {old} is now {first}.*until 0\.3") as caught:
        settings = CLASSES[name](**{old: value})
    assert len(caught) == 1 and caught[0].filename == __file__
    assert {path: read_value(settings, path) for path in expected} == expected
    with pytest.warns(FutureWarning, match=f"{old} is now"):  # and reading it
        assert getattr(settings, old) == value


@pytest.mark.parametrize("row", ROWS)
def test_both_names_are_an_error_that_names_both(row):
    name, _, old = row.partition(".")
    value, expected = ROWS[row]
    new = next(iter(expected))
    block, _, inner = new.partition(".")
    both = {old: value, block: KLBandSettings(**{inner: expected[new]}) if inner else value}
    with pytest.raises(SettingsError, match=rf"^{old}: is the former name of {block}"):
        CLASSES[name](**both)


def test_names_of_today_do_not_warn_and_unknown_ones_are_errors():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        settings = OnlineUpdateSettings(update_kl_target=0.1, kl_max=0.3)
        assert dataclasses.replace(settings, kl_max=0.4).kl_max == 0.4
        PolicySettings(kl_target=0.1)  # the target of the policy's controller
    with pytest.raises(SettingsError, match="did you mean 'kl_max'"):
        OnlineUpdateSettings(kl_mxa=0.1)
    with pytest.raises(AttributeError, match="kl_mxa"):
        settings.kl_mxa  # noqa: B018
    with pytest.raises(AttributeError):
        PolicySettings().kl_limit  # noqa: B018


@dataclasses.dataclass(frozen=True, kw_only=True)
class UserSettings(Settings):
    kl_limit: float = setting(1.0, doc="of the user")


def test_only_classes_of_this_project_have_former_names():
    renamed = type("NetworkSettings", (UserSettings,), {"__module__": "user"})
    assert renamed(kl_limit=2.0).kl_limit == 2.0
    with pytest.raises(SettingsError, match="kl_target: NetworkSettings has no such setting"):
        renamed(kl_target=2.0)


@pytest.fixture
def online_file(tmp_path):
    path = tmp_path / "online.yaml"
    path.write_text(
        "folder: online\nupdate:\n  kl_target: 0.1\n  kl_tolerance: 0.02\n  kl_limit: 0.3\n"
    )
    return path


def test_a_file_with_former_names_is_read_and_each_is_a_line(online_file):
    with pytest.warns(FutureWarning) as caught:
        settings, *_ = as_tuple(load_online_settings(online_file, ["update.kl_factor=1.5"]))
    assert [str(warning.message) for warning in caught] == [
        f"{online_file}:3: update.kl_target is now update.update_kl_target; the old name works until 0.3",
        f"{online_file}:4: update.kl_tolerance is now update.kl_band.width, as a share of "
        "update.update_kl_target; the old name works until 0.3",
        "--set update.kl_factor=1.5: update.kl_factor is now update.kl_band.increase and "
        "update.kl_band.decrease; the old name works until 0.3",
        f"{online_file}:5: update.kl_limit is now update.kl_max; the old name works until 0.3",
    ]
    update = settings.update
    assert (update.update_kl_target, update.kl_max) == (0.1, 0.3)
    assert update.kl_band == KLBandSettings(width=0.2, increase=1.5, decrease=1.5)


@pytest.mark.filterwarnings("ignore:.*the old name works until:FutureWarning")
@pytest.mark.parametrize(
    ("in_the_file", "override", "expected"),
    [
        ("kl_max: 0.3", "kl_limit=0.5", {"kl_max": 0.5}),
        ("kl_limit: 0.3", "kl_max=0.5", {"kl_max": 0.5}),
        ("kl_limit: 0.3", "kl_limit=0.5", {"kl_max": 0.5}),
        (
            "kl_factor: 1.5",
            "kl_band.increase=2",
            {"kl_band.increase": 2.0, "kl_band.decrease": 1.5},
        ),
        (
            "kl_band: {increase: 1.5, width: 0.1}",
            "kl_factor=2",
            {"kl_band.increase": 2.0, "kl_band.decrease": 2.0, "kl_band.width": 0.1},
        ),
        ("kl_band: {width: 0.1}", "kl_tolerance=0.02", {"kl_band.width": 0.4}),
    ],
)
def test_an_override_wins_whichever_names_are_used(tmp_path, in_the_file, override, expected):
    path = tmp_path / "online.yaml"
    path.write_text(f"folder: online\nupdate:\n  {in_the_file}\n")
    settings, *_ = as_tuple(load_online_settings(path, [f"update.{override}"]))
    assert {name: read_value(settings.update, name) for name in expected} == expected


@pytest.mark.filterwarnings("ignore:.*the old name works until:FutureWarning")
def test_a_former_target_alone_keeps_the_former_band():
    """The band was 0.01 on both sides whatever the target was, which digests of checkpoints contain."""
    update = OnlineUpdateSettings(kl_target=0.18)
    assert update.kl_band.width * update.update_kl_target == pytest.approx(0.01)
    assert restore_former_names(OnlineUpdateSettings, dump_settings(update))["kl_tolerance"] == 0.01
    assert OnlineUpdateSettings(update_kl_target=0.1).kl_band == KLBandSettings()
    both = OnlineUpdateSettings(kl_target=0.1, kl_band=KLBandSettings(width=0.3))
    assert both.kl_band.width == 0.3


@pytest.mark.filterwarnings("ignore:.*the old name works until:FutureWarning")
def test_dataclasses_replace_takes_former_names():
    update = OnlineUpdateSettings(kl_band=KLBandSettings(width=0.3, increase=1.5))
    replaced = dataclasses.replace(update, kl_target=0.1, kl_coef_min=1e-3, kl_limit=0.3)
    assert (replaced.update_kl_target, replaced.kl_max) == (0.1, 0.3)
    assert replaced.kl_band == KLBandSettings(width=0.3, increase=1.5, minimum=1e-3)


def test_a_band_has_the_limits_of_its_user():
    with pytest.raises(SettingsError, match=r"kl_band\.width: 1\.0 must be less than 1"):
        PolicySettings(kl_coef=0.1, kl_controller="banded", kl_band=KLBandSettings(width=1.0))
    with pytest.raises(SettingsError, match=r"kl_band\.increase: 1\.0 must be greater than 1"):
        OnlineUpdateSettings(kl_band=KLBandSettings(increase=1.0))


def as_tuple(value):
    return value if isinstance(value, tuple) else (value,)


def test_problems_of_former_names_have_their_lines(online_file):
    online_file.write_text(
        "update:\n  kl_limit: wide\n  kl_tolerance: 0.01\n  kl_band: {width: 1}\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_online_settings(online_file)
    lines = str(caught.value).splitlines()
    assert any(
        line.startswith(
            f"{online_file}:3: update.kl_tolerance: is the former name of kl_band.width"
        )
        for line in lines
    )
    online_file.write_text("update:\n  batch_size: 8\n  kl_limit: wide\n")
    with pytest.warns(FutureWarning), pytest.raises(ConfigError) as caught:
        load_online_settings(online_file)
    assert f"{online_file}:3: update.kl_max: found 'wide' (text)" in str(caught.value)


def test_stages_of_a_pipeline_under_their_former_name(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(
        "name: t\nmodel: {preset: nano}\nenvironment: {name: arithmetic}\nstages:\n  sft: {}\n"
        "  own:\n    polish: {use: polish.py:STAGE}\n"
    )
    with pytest.warns(FutureWarning, match=r"config\.yaml:6: stages\.own is now stages\.custom;"):
        settings = load_settings(path, ["stages.own.polish.settings.x=3"], import_code=False)
    assert (
        settings.stages.custom["polish"].settings == {"x": 3}
        and settings.stages.active[-1] == "polish"
    )
    plain = dump_settings(settings)
    plain["stages"]["own"] = plain["stages"].pop("custom")  # as recorded by an earlier version
    with pytest.warns(FutureWarning, match=r"settings: stages\.own is now"):
        assert build_settings(plain, import_code=False) == settings
    with pytest.warns(FutureWarning, match=r"StagesSettings: own is now custom"):
        form = build_pipeline_model().model_validate(plain)  # parameters of a deployment
    assert build_settings(form, import_code=False) == settings
    with pytest.warns(FutureWarning, match=r"config\.yaml:6: stages\.own is now stages\.custom;"):
        assert settings == load_settings(
            path, ["stages.custom.polish.settings.x=3"], import_code=False
        )
    path.write_text(path.read_text() + "  custom:\n    other: {use: other.py:STAGE}\n")
    with pytest.raises(ConfigError, match=r"stages\.own: is the former name of custom"):
        load_settings(path, import_code=False)


def test_the_command_line_prints_a_line(tmp_path, capsys, monkeypatch):
    path = tmp_path / "config.yaml"
    path.write_text(
        "name: t\nstages:\n  network: {environment: CartPole-v1, kl_target: 0.01, schedule: constant, "
        "warmup_steps: 0}\n"
    )
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        cli.main(["validate", str(path)])
    lines = [line for line in capsys.readouterr().err.splitlines() if "kl_target" in line]
    assert lines == [
        f"posttrain: warning: {path}:3: stages.network.kl_target is now stages.network.desired_kl; "
        "the old name works until 0.3"
    ]


def test_recorded_settings_compare_under_their_names_of_today():
    recorded = {"settings.kl_target": 1, "settings.kl_factor": 2, "settings.epochs": 3}
    current = {"settings.desired_kl": 1, "settings.learning_rate_factor": 2, "settings.epochs": 3}
    assert rename_recorded_keys(recorded, current) == current
    policy = {"settings.kl_target": 1}
    assert rename_recorded_keys(policy, policy) == policy
    saved = {"settings": {"kl_target": 0.01, "kl_factor": 1.5}}
    present = {"settings": {"desired_kl": 0.01, "learning_rate_factor": 1.5}}
    assert check_fingerprint(saved, present) == []
    with pytest.raises(
        ResumeRefused, match=r"settings\.desired_kl: 0\.01 in the checkpoint, 0\.02"
    ):
        check_fingerprint(saved, {"settings": {**present["settings"], "desired_kl": 0.02}})
    stage = {"stage": "network"}
    assert compare_fingerprints({**stage, **saved}, {**stage, **present}) == []


def test_digests_are_those_of_former_names():
    update = dataclasses.asdict(OnlineUpdateSettings(clip_eps=0.1))
    named = restore_former_names(OnlineUpdateSettings, update)
    former = {"kl_target": 0.05, "kl_tolerance": 0.01, "kl_factor": 1.2, "kl_limit": 0.2}
    former |= {"kl_coef_min": 1e-4, "kl_coef_max": 1.0}
    names = {"update_kl_target", "kl_band", "kl_max"}
    assert named == {name: value for name, value in update.items() if name not in names} | former
    with pytest.warns(FutureWarning):
        other = OnlineUpdateSettings(kl_target=0.07, kl_tolerance=0.013, kl_factor=1.3)
    named = restore_former_names(OnlineUpdateSettings, dataclasses.asdict(other))
    assert (named["kl_tolerance"], named["kl_factor"]) == (0.013, 1.3)


def test_the_digest_of_a_pipeline_is_that_of_its_former_names():
    stages = StagesSettings(network=NetworkSettings(), custom={"mine": None})
    settings = PipelineSettings(name="t", stages=stages)
    plain = dump_settings(settings)
    network = plain["stages"]["network"]
    network["kl_target"], network["kl_factor"] = network.pop("desired_kl"), 1.5
    assert network.pop("learning_rate_factor") == 1.5
    plain["stages"]["own"] = plain["stages"].pop("custom")
    assert (
        digest_settings(settings)
        == digest_settings(plain)
        != digest_settings(dump_settings(settings))
    )
