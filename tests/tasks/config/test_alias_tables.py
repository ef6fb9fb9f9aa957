"""The tables of TRL's and verl's names: complete columns, sorted rows, no duplicates."""

import csv

import pytest
from helpers import ROOT

from rl_core.settings.framework_aliases import TRAINER_STAGES

COLUMNS = {
    "trl": ["names", "trainers", "settings", "copied", "difference"],
    "verl": ["names", "settings", "copied", "difference"],
}


def read_table(framework):
    path = ROOT / f"rl_core/settings/{framework}_aliases.csv"
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.reader(file))


@pytest.mark.parametrize("framework", COLUMNS)
def test_columns_are_complete(framework):
    header, *rows = read_table(framework)
    assert header == COLUMNS[framework] and len(rows) > 100
    for row in rows:
        values = dict(zip(header, row, strict=True))
        assert values["names"] and values["difference"], row
        assert values["copied"] in ("yes", "no"), row
        assert values["copied"] == "no" or "," not in values["settings"], (
            "one value has one setting"
        )
        assert all(cell == " ".join(cell.split()) for cell in row), f"{row}: white space"
        # CPO and GKD are trainers of TRL without a stage here
        known_trainers = {*TRAINER_STAGES, "CPO", "GKD"}
        assert set(values.get("trainers", "").split()) <= known_trainers, row


@pytest.mark.parametrize("framework", COLUMNS)
def test_rows_are_sorted(framework):
    _, *rows = read_table(framework)
    assert rows == sorted(rows)


@pytest.mark.parametrize("framework", COLUMNS)
def test_no_name_has_two_rows(framework):
    header, *rows = read_table(framework)
    keys = []
    for row in rows:
        values = dict(zip(header, row, strict=True))
        trainers = values.get("trainers", "").split() or [""]
        keys += [(name, trainer) for name in values["names"].split() for trainer in trainers]
    assert [key for key in set(keys) if keys.count(key) > 1] == []
