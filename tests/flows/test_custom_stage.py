"""Custom stage of a user through a whole pipeline: a file with settings and a body, and one name in the config."""

import textwrap
from pathlib import Path

import pytest

from rl_core.errors import DataError
from tasks import stage_registry
from tasks.config import ConfigError, build_settings, dump_settings, load_settings

TWIN_FILE = '''
from dataclasses import dataclass

from rl_core.api.recipes import Recipe
from rl_core.trainers.sft import SFTTrainer
from rl_core.data.training_sequences import TokenRows
from rl_core.settings import SFTSettings, setting
from tasks.stage_registry import CustomStage
from tasks.stages.loading import load_policy
from twin_text import NOTE


@dataclass(frozen=True, kw_only=True)
class TwinSettings(SFTSettings):
    """Settings of the example stage."""

    note: str = setting(NOTE, doc="what the stage says")


def body(context):
    """Train on a few example rows."""
    policy = load_policy(context.inputs["model"], context.pipeline)
    rows = [([5, 6, 7, 8], [False, True, True, True])] * 8
    trainer = SFTTrainer(
        policy.model,
        policy.renderer.pad_id,
        rows,
        rows,
        context.settings,
        context.seed,
        context.process_group,
    )
    recipe = Recipe(trainer, trainer.total_steps)
    outcome = context.train(recipe)
    context.save_model(
        recipe.trainer.optimizer_step, policy.model, policy.tokenizer,
        lambda pipeline: load_policy(context.inputs["model"], pipeline).model,
    )
    return {"note": context.settings.note, "steps": outcome.steps, "metrics": outcome.metrics}


STAGE = CustomStage(body, TwinSettings, takes=("model", "data"), needs=("data",), gives="policy", before="preference")
LAST = CustomStage(lambda context: {"note": str(sorted(context.inputs))}, TwinSettings, takes=("models", "evaluation"))
NO_MODEL = CustomStage(lambda context: {"note": "nothing"}, TwinSettings, gives="policy")
'''


@pytest.fixture
def home(tmp_path, monkeypatch):
    """Prepare a current folder with the file of the stage and a module it imports; restore the registry afterwards."""
    monkeypatch.setattr(stage_registry, "_STAGES", stage_registry._STAGES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "twin.py").write_text(TWIN_FILE)
    (tmp_path / "twin_text.py").write_text('NOTE = "a twin"\n')
    return tmp_path


def build_values(output: Path, **blocks):
    blocks = blocks or {
        "twin": {"use": "twin.py:STAGE", "settings": {"max_steps": 2, "batch_size": 4}}
    }
    return {
        "name": "example",
        "output": str(output),
        "threads": 1,
        "environment": {"name": "arithmetic"},
        "model": {"preset": "nano", "vocab_size": 320, "context": 128},
        "tracking": {"system_metrics_seconds": 0.0, "traces": 0},
        "run": {"timeouts": {"twin": 600}},
        "stages": {
            "prepare_data": {"num_demonstrations": 40, "levels": ["easy"]},
            "sft": {"max_steps": 1, "batch_size": 4},
            "custom": blocks,
            "evaluate": {
                "episodes": 3,
                "levels": ["easy"],
                "sampling": {"max_completion_tokens": 4},
            },
        },
    }


def test_a_custom_stage_in_a_whole_pipeline(home, prefect_api):
    """Run it and check order, profile, lineage, evaluation, figure, cache, `why`, and an edit of its import."""
    from flows.post_training import run_pipeline
    from flows.runtime.pipeline_figure import _list_arrows
    from posttrain.cli.check_profile import shorten_stage
    from posttrain.cli.dry_run import explain_stage
    from tasks.tracking import Tracking

    blocks = {
        "twin": {"use": "twin.py:STAGE", "settings": {"max_steps": 2, "batch_size": 4}},
        "last": {"use": "twin.py:LAST"},
    }
    settings = build_settings(build_values(home / "out", **blocks))
    assert settings.stages.active == ("prepare_data", "sft", "twin", "evaluate", "last")
    assert settings.stages.twin.note == "a twin" and settings.stages.twin.learning_rate > 0
    result = run_pipeline(settings, quiet=True)
    assert list(result.results) == list(settings.stages.active)
    twin = result.results["twin"]
    assert (twin.summary["note"], twin.summary["steps"]) == ("a twin", 2)
    assert {"sft", "twin"} == set(result.results["evaluate"].summary["models"])
    assert result.results["last"].summary["note"] == "['evaluation', 'model.sft', 'model.twin']"
    assert ("sft", "twin") in _list_arrows([row["stage"] for row in result.rows]) and (
        home / "out/example/pipeline.png"
    ).is_file()
    tracking = Tracking(None, home / "out", "example")
    versions = {version.tags["stage"]: version for version in tracking.list_versions("example")}
    assert versions["twin"].tags["parent_version"] == str(versions["sft"].version) == "1"
    run = next(row for row in tracking.list_runs() if row.name == "twin")
    assert run.tags["parent_model_version"] == "models:/example/1"
    assert shorten_stage(settings, "twin", 5).stages.twin.max_steps == 5

    repeated = run_pipeline(settings, quiet=True)
    assert all(stage.cached for stage in repeated.results.values())
    assert "twin: settings and code unchanged" in explain_stage(settings, "twin").format_text()
    (home / "twin_text.py").write_text('NOTE = "a twin"\nOTHER = 1\n')
    assert "twin_text" in explain_stage(settings, "twin").format_text()


def test_settings_survive_storing_and_may_be_overridden(home):
    (home / "example.yaml").write_text(
        textwrap.dedent("""\
        name: example
        stages:
          prepare_data: {}
          custom:
            twin: {use: "twin.py:STAGE", settings: {note: mine}}
        """)
    )
    settings = load_settings(home / "example.yaml", ["stages.custom.twin.settings.max_steps=3"])
    assert (settings.stages.twin.note, settings.stages.twin.max_steps) == ("mine", 3)
    assert settings.stages.custom["twin"].settings["batch_size"] == settings.stages.twin.batch_size
    restored = build_settings(dump_settings(settings))
    assert restored == settings and restored.stages.twin == settings.stages.twin
    assert load_settings(home / "example.yaml", ["stages.custom.twin=null"]).stages.active == (
        "prepare_data",
    )
    without = settings.stages.replace_stages({"twin": None, "prepare_data": None})
    assert (without.custom, without.prepare_data) == ({}, None)


@pytest.mark.parametrize(
    ("name", "block", "key", "message"),
    [
        ("twin", {"use": "nowhere.py:STAGE"}, "use", "no such file"),
        (
            "twin",
            {"use": "twin.py:body"},
            "use",
            "is a function, expected a tasks.stage_registry.CustomStage",
        ),
        ("twin", {}, "use", "there is no installed stage 'twin'"),
        ("sft", {"use": "twin.py:STAGE"}, "use", "'sft' is registered already"),
        ("Twin 2", {"use": "twin.py:STAGE"}, "use", "cannot be named 'Twin 2'"),
        (
            "twin",
            {"use": "twin.py:STAGE", "settings": {"max_step": 3}},
            "settings.max_step",
            "did you mean 'max_s",
        ),
        (
            "twin",
            {"use": "twin.py:STAGE", "settings": {"max_steps": "x"}},
            "settings.max_steps",
            "a whole number",
        ),
        ("twin", {"use": "twin.py STAGE"}, "use", "twin.py STAGE"),
    ],
)
def test_one_message_names_the_error(home, name, block, key, message):
    with pytest.raises(ConfigError) as caught:
        build_settings(build_values(home / "out", **{name: block}) | {"run": {}}, check_files=False)
    messages = {".".join(map(str, problem.key)): problem.text for problem in caught.value.problems}
    assert message in messages.pop(f"stages.custom.{name}.{key}")
    assert messages == {}


def test_nothing_is_imported_unless_requested(home):
    (home / "twin.py").write_text("raise RuntimeError('imported')\n")
    settings = build_settings(build_values(home / "out"), check_files=False, import_code=False)
    assert settings.stages.active == (
        "prepare_data",
        "sft",
        "evaluate",
        "twin",
    )  # its position is defined in its code
    with pytest.raises(ConfigError, match="RuntimeError: imported"):
        build_settings(build_values(home / "out"), check_files=False)
    only = build_values(home / "out")
    del only["stages"]["sft"]
    assert (
        "evaluate" in build_settings(only, check_files=False, import_code=False).stages.active
    )  # it may train a policy
    with pytest.raises(
        ConfigError, match=r"run\.timeouts\.twon: no such stage; did you mean 'twin'"
    ):
        build_settings(
            build_values(home / "out") | {"run": {"timeouts": {"twon": 1}}},
            check_files=False,
            import_code=False,
        )


def test_a_policy_without_a_model_is_an_error(home):
    from types import SimpleNamespace

    from rl_core.distributed import SINGLE_PROCESS
    from tasks.stages.custom_stage import run_custom_body

    build_settings(build_values(home / "out", twin={"use": "twin.py:NO_MODEL"}), check_files=False)
    context = SimpleNamespace(name="twin", folder=home, process_group=SINGLE_PROCESS)
    with pytest.raises(
        DataError, match="stage 'twin' declares that it gives a policy, but wrote no model"
    ):
        run_custom_body(context)


def test_an_installed_stage_needs_no_path(home, monkeypatch):
    from importlib.metadata import EntryPoint

    from tasks.config import user_code

    point = EntryPoint("twin", "twin:STAGE", "posttrain.stages")
    monkeypatch.setattr(
        user_code,
        "entry_points",
        lambda group, name="twin": [point] if (group, name) == (point.group, "twin") else [],
    )
    settings = build_settings(
        build_values(home / "out", twin={"settings": {"max_steps": 1}}), check_files=False
    )
    assert settings.stages.twin.max_steps == 1
    assert stage_registry.find_stage("twin").task == "twin:STAGE"


def test_a_retraining_skips_it_if_its_data_is_unchanged(home):
    from types import SimpleNamespace

    from tasks.lifecycle.retraining import _list_skippable_stages

    text = TWIN_FILE.replace(
        'before="preference"', 'before="preference", learns_from="demonstrations"'
    )
    (home / "twin.py").write_text(text)
    config = build_values(home / "out")
    config["stages"]["policy"] = {}
    settings = build_settings(config, check_files=False)
    assert _list_skippable_stages(settings, SimpleNamespace(sources=())) == ("sft", "twin")
    assert _list_skippable_stages(settings, SimpleNamespace(sources=("demonstrations",))) == ()
    remaining = settings.stages.replace_stages(dict.fromkeys(("sft", "twin")))
    assert remaining.active == ("prepare_data", "policy", "evaluate")
