"""Names and parameters in the form that MLflow accepts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from urllib.parse import parse_qsl

import pytest

from tasks.mlflow_environment import build_default_uri, strip_uri_password
from tasks.tracking.experiment_view import build_shared_views
from tasks.tracking.store import TrackingStore, shorten_error
from tasks.tracking.values import (
    MAX_RESULT_LENGTH,
    MAX_VALUE_LENGTH,
    flatten_settings,
    freeze_environment,
    list_pinned_versions,
    sanitize_store_name,
    shorten_result,
)


@dataclass
class Inner:
    levels: tuple[str, ...] = ("easy", "hard")
    rate: float = 1e-5


def test_nested_settings_become_dotted_texts():
    flat = flatten_settings(
        {
            "seed": 7,
            "policy": Inner(),
            "on": True,
            "path": None,
            "stages": [{"name": "a"}, {"name": "b", "levels": {"easy": 0.5}}],
            "options": {},
            "none_listed": [],
        }
    )
    assert flat == {
        "seed": "7",
        "policy.levels": '["easy", "hard"]',
        "policy.rate": "1e-05",
        "on": "true",
        "path": "null",
        "stages.0.name": "a",
        "stages.1.name": "b",
        "stages.1.levels.easy": "0.5",
        "options": "{}",
        "none_listed": "[]",
    }


def test_values_and_names_are_cut_and_cleaned():
    flat = flatten_settings({"a" * 300: "x" * 7000, "odd key?": Path("p")})
    (cut, odd) = flat.items()
    assert len(cut[0]) == 250 and len(cut[1]) == MAX_VALUE_LENGTH and cut[1].endswith("…")
    assert odd == ("odd key_", "p")


@pytest.mark.parametrize(
    ("name", "clean"),
    [
        ("train/loss", "train/loss"),
        ("pass@4", "pass_4"),
        ("/eval//a", "eval/a"),
        ("../x", "x"),
        ("a/./b", "a/b"),
        ("", "_"),
        ("gain (%)", "gain ___"),
    ],
)
def test_metric_names(name, clean):
    assert sanitize_store_name(name) == clean
    from mlflow.utils.validation import _validate_metric_name

    _validate_metric_name(clean)


def test_the_environment_names_every_distribution():
    text = freeze_environment()
    assert text.startswith("# Python 3.")
    results = {
        f"{distribution.metadata['Name']}=={distribution.version}"
        for distribution in metadata.distributions()
        if distribution.metadata["Name"]
    }
    assert set(text.splitlines()[1:]) == results and any(
        line.startswith("torch==") for line in results
    )


def test_a_distribution_whose_egg_info_is_a_file_is_named(tmp_path, monkeypatch):
    """Debian installs some packages like this; `pip freeze` lists them."""
    (tmp_path / "ufw-0.36.2.egg-info").write_text(
        "Metadata-Version: 1.1\nName: ufw\nVersion: 0.36.2\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert "ufw==0.36.2" in freeze_environment.__wrapped__().splitlines()


def test_pins_leave_local_build_labels_and_absent_packages_out():
    (pin,) = list_pinned_versions("torch", "no-such-distribution")
    assert pin.startswith("torch==") and "+" not in pin


def test_addresses_never_show_passwords():
    assert strip_uri_password("http://me:secret@host:5000/x") == "http://host:5000/x"
    assert strip_uri_password("sqlite:////a/b.db") == "sqlite:////a/b.db"
    assert "secret" not in shorten_error(ValueError("no answer from http://me:secret@host/"))


def test_the_line_of_a_database_error_is_the_error():
    text = (
        "(raised as a result of Query-invoked autoflush; consider using a session.no_autoflush block if this flush is "
        "occurring prematurely)\n(sqlite3.OperationalError) database or disk is full\n[SQL: INSERT INTO runs]"
    )
    assert (
        shorten_error(RuntimeError(text)) == "(sqlite3.OperationalError) database or disk is full"
    )


def test_where_the_store_is(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert (
        TrackingStore(None, tmp_path, "e").uri
        == f"sqlite:///{tmp_path}/mlflow/mlflow.db"
        == build_default_uri(tmp_path)
    )
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://elsewhere:5000")
    assert TrackingStore(None, tmp_path, "e").uri == "http://elsewhere:5000"
    assert TrackingStore("sqlite:////x.db", tmp_path, "e").uri == "sqlite:////x.db"
    assert TrackingStore(None, tmp_path, "e").resolve_link("#/x") == "http://elsewhere:5000/#/x"


def test_the_link_to_a_stages_charts_opens_the_view_of_its_runs(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    store = TrackingStore(None, tmp_path, "e")
    monkeypatch.setattr(TrackingStore, "experiment_id", "3")
    address, _, query = store.build_charts_link("policy").partition("?")
    named = dict(parse_qsl(query))
    assert address == "#/experiments/3/runs" and named["compareRunsMode"] == "CHART"
    view = build_shared_views()[f"mlflow.sharedViewState.{named['viewStateShareKey']}"]
    assert view["searchFilter"] == "tags.stage = 'policy'" and view["orderByAsc"]
    first = view["compareRunSections"][0]
    assert (
        first["name"] == "Success and reward"
        and view["compareRunCharts"][0]["metricSectionId"] == first["uuid"]
    )
    # The page ignores a view where its address names a filter or an order (MLflow 3.17).
    assert not {"searchFilter", "orderByKey", "orderByAsc", "startTime", "lifecycleFilter"} & set(
        named
    )


def test_numbers_stay_numbers():
    assert flatten_settings({"a": math.inf})["a"] == "Infinity"


def test_a_long_result_ends_with_a_whole_clause_or_word():
    assert shorten_result("version 2 promoted") == "version 2 promoted"
    cut = shorten_result("promoted: " + "gain " * 200)
    assert cut.endswith("gain …") and len(cut) <= MAX_RESULT_LENGTH
    assert shorten_result("sft 59%; policy 98%; version 2 waits", 24) == "sft 59%; policy 98%; …"
    assert shorten_result("sft 59%; policy 98%; version 2 waits", 23) == "sft 59%; policy 98%; …"
    # the clause would leave too little
    assert shorten_result("a; policy 98 percent of all", 20) == "a; policy 98 …"
