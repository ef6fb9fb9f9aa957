"""Every file in configs/ loads and starts with a description."""

import pytest
from helpers import ROOT

from tasks.config import from_dict, load, resolve

CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


def test_there_are_some():
    assert {"demo", "dpo", "gsm8k", "preferences", "test"} <= {path.stem for path in CONFIGS}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_config_loads(path):
    settings = load(path, check_files=False)  # the project carries no data
    assert settings.name == path.stem
    assert settings.stages.active
    assert path.read_text().startswith("# ")
    assert from_dict(resolve(settings), check_files=False) == settings


def test_demo_has_the_whole_pipeline_and_a_curriculum():
    settings = load(CONFIGS[[path.stem for path in CONFIGS].index("demo")])
    assert len(settings.stages.active) == 7
    assert settings.model.path is None  # no download
    curriculum = settings.stages.policy.curriculum
    assert len([stage for stage in curriculum if stage.exit_conditions]) >= 2
    assert all(condition.metric == "success_rate" for stage in curriculum for condition in stage.exit_conditions)
