"""Demonstrations held out from SFT: no question of theirs is demonstrated in training, and none is evaluated on."""

import json
from types import SimpleNamespace

from rl_core.environments.arithmetic import Arithmetic
from rl_core.rollouts.heldout_episodes import draw_heldout_requests
from rl_core.settings import DataSettings, EvaluationSettings
from tasks.stages import prepare_data

QUIET = SimpleNamespace(progress=lambda *_: None, log_dataset=lambda *_: None)


def split(tmp_path, environment, **settings):
    pipeline = SimpleNamespace(
        stages=SimpleNamespace(sft=object()), model=SimpleNamespace(native_tools=False)
    )
    context = SimpleNamespace(
        settings=DataSettings(**settings),
        pipeline=pipeline,
        tracker=QUIET,
        pipeline_run=SimpleNamespace(parent=QUIET),
        folder=tmp_path,
        seed=0,
    )
    table = prepare_data._load_demonstrations(context, environment, {})
    prepare_data._split_and_write(
        context, "demonstrations", table.rows, prepare_data._extract_demonstration_prompt, {}
    )
    return [
        [
            json.loads(line)
            for line in (tmp_path / f"demonstrations_{part}.jsonl").read_text().splitlines()
        ]
        for part in ("train", "heldout")
    ]


def collect_questions(rows):
    return {row["messages"][0]["content"] for row in rows}


def test_no_question_is_demonstrated_on_both_sides(tmp_path):
    """Regression: demonstrations were split by seed, although several seeds may ask the same."""
    environment = Arithmetic()
    train, heldout = split(tmp_path, environment, num_demonstrations=1500, levels=("easy",))
    assert len(train) + len(heldout) == 1500 and len(collect_questions(heldout)) > 40
    assert not collect_questions(train) & collect_questions(heldout)
    asked = draw_heldout_requests(environment, EvaluationSettings(episodes=60, levels=("easy",)), 0)
    evaluated = {environment.episode(request.seed, "easy").prompt for request in asked}
    assert not evaluated & (collect_questions(train) | collect_questions(heldout))


def test_a_file_is_split_by_what_it_asks(tmp_path):
    """Regression: rows with a level and a seed were split by these, although two seeds may ask the same."""
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"{seed % 7} ?"},
                {"role": "assistant", "content": "a"},
            ],
            "level": "easy",
            "seed": seed,
        }
        for seed in range(70)
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    train, heldout = split(tmp_path, Arithmetic(), demonstrations=str(path), heldout_fraction=0.3)
    assert (len(train), len(heldout)) == (50, 20) and not collect_questions(
        train
    ) & collect_questions(heldout)
    for row in rows:
        row["messages"][0]["content"] = "look"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    train, heldout = split(tmp_path, Arithmetic(), demonstrations=str(path), heldout_fraction=0.3)
    assert (len(train), len(heldout)) == (49, 21)  # all begin alike: by seed
