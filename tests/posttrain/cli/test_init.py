"""`posttrain init`, and shipped configs found by name."""

import subprocess
import sys

import pytest
from helpers import ROOT

from posttrain.cli import main as cli
from rl_core.environments import make_environment
from rl_core.errors import SettingsError
from rl_core.types import Trajectory
from rl_core.user_code.load import import_function
from tasks import shipped
from tasks.config import load_settings


@pytest.fixture
def project(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert cli.main(["init", "first_task"]) == 0
    assert capsys.readouterr().out.endswith("posttrain run first_task/config.yaml\n")
    yield tmp_path / "first_task"
    for name in [name for name in sys.modules if name.startswith("first_task")]:
        del sys.modules[name]


def test_the_config_is_valid_and_names_its_sibling_files(project):
    settings = load_settings("first_task/config.yaml")
    assert (
        settings.name == "first_task"
        and settings.environment.name == "first_task.environment:Largest"
    )
    assert settings.stages.policy.rewards == {"task": 1.0, "first_task.reward:brevity": 0.1}
    assert "@" not in (project / "config.yaml").read_text().replace("@champion", "")


def test_the_commands_can_be_copied_where_a_folder_has_a_space(tmp_path, capsys):
    assert cli.main(["init", str(tmp_path / "my team" / "first_task")]) == 0
    assert f"\ncd '{tmp_path}/my team'\n" in capsys.readouterr().out


def test_the_environment_plays(project):
    environment = make_environment("first_task.environment:Largest", {"skill": 0.6})
    for seed in range(20):
        episode = environment.episode(seed, "hard")
        question = episode.reset()[0]["content"]
        assert episode.target == max(question.removeprefix("largest of ").split())
        assert episode.step(episode.target).reward == 1.0
    right = [environment.demonstration(seed, "hard").success for seed in range(400)]
    assert 0.6 < sum(right) / 400 < 0.78  # 0.6, and what guessing one of six digits adds


def test_the_reward_counts_tokens_beyond_two(project):
    from first_task.reward import brevity

    rows = [
        Trajectory("largest", "easy", "", 0, "", "", num_action_tokens=count) for count in (1, 2, 5)
    ]
    assert brevity(rows) == pytest.approx([0.0, 0.0, -0.3])


def test_nothing_is_overwritten(project, capsys):
    (project / "reward.py").write_text("mine")
    assert cli.main(["init", "first_task"]) == 2
    assert "has config.yaml, environment.py, reward.py already" in capsys.readouterr().err
    assert (project / "reward.py").read_text() == "mine"


@pytest.mark.parametrize("name", ["my-task", "1st", "class"])
def test_a_name_that_python_cannot_import_is_refused(tmp_path, name, capsys):
    assert cli.main(["init", str(tmp_path / name)]) == 2
    assert f"'{name}' cannot be imported" in capsys.readouterr().err
    assert not (tmp_path / name).exists()


def test_a_shipped_config_is_resolved_by_its_name_unless_there_is_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load_settings("test").name == "test"
    (tmp_path / "demo").write_text("name: mine\nstages: {sft: {}}\n")
    assert load_settings("demo").name == "mine"
    with pytest.raises(
        SettingsError,
        match=r"nothing: no such file, and no shipped config; these are shipped: acrobot, agent, cartpole, ",
    ):
        load_settings("nothing")


def test_the_path_that_a_shipped_config_has_in_a_checkout_is_answered_with_its_name(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SettingsError, match="named without folder and suffix: demo; "):
        load_settings("configs/demo.yaml")


def test_every_config_of_the_checkout_ships():
    assert sorted(
        [*shipped.list_config_names(), shipped.ONLINE_CONFIG, shipped.SERVICE_CONFIG]
    ) == sorted(path.stem for path in (ROOT / "configs").glob("*.yaml"))


@pytest.mark.slow
def test_a_wheel_works_without_the_checkout(tmp_path):
    """Build, unpack and use the wheel from an empty folder; dependencies come from this interpreter."""
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(tmp_path),
    ]
    subprocess.run([*build, str(ROOT)], check=True, timeout=300)
    (wheel,) = tmp_path.glob("*.whl")
    site, empty = tmp_path / "site", tmp_path / "empty"
    subprocess.run([sys.executable, "-m", "zipfile", "-e", str(wheel), str(site)], check=True)
    empty.mkdir()
    start = f"import sys; sys.path.insert(0, {str(site)!r}); import flows; assert {str(site)!r} in flows.__file__;"

    def run_posttrain(*arguments):
        code = f"{start} from posttrain.cli.main import main; sys.exit(main({list(arguments)!r}))"
        done = subprocess.run(
            [sys.executable, "-P", "-c", code],
            cwd=empty,
            capture_output=True,
            text=True,
            timeout=280,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    run_posttrain("validate", "demo")
    run_posttrain("init", "first_task")
    run_posttrain("validate", "first_task/config.yaml")
    assert (site / "tasks/shipped/deployments/prefect.yaml").is_file()
    assert (site / "rl_core/cpu/decode_ops.c").is_file()


def test_a_command_that_is_called_within_the_folder_says_where_to_call_it(tmp_path, monkeypatch):
    folder = tmp_path / "second_task"
    folder.mkdir()
    monkeypatch.chdir(folder)
    for load in (
        lambda: import_function("second_task.reward:brevity", "rewards"),
        lambda: make_environment("second_task.environment:Largest", {}),
    ):
        with pytest.raises(SettingsError, match=f"run the command in {tmp_path}$"):
            load()
    with pytest.raises(SettingsError, match="No module named 'third_task'"):
        import_function("third_task.reward:brevity", "rewards")
