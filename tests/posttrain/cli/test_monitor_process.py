"""`posttrain run --monitor`: the page exists as long as the run."""

import importlib.util
import re
import time
import urllib.error
import urllib.request

import pytest

from posttrain.cli import monitor_process
from posttrain.cli.main import build_parser
from posttrain.cli.monitor_process import serve_monitor_page
from rl_core.errors import SettingsError


def test_nothing_is_started_without_the_option(tmp_path, monkeypatch):
    monkeypatch.setattr(monitor_process, "start_child", None)
    with serve_monitor_page(tmp_path / "out", False):
        assert not (tmp_path / "out").exists()
    assert build_parser().parse_args(["run", "demo"]).monitor is False
    assert build_parser().parse_args(["run", "demo", "--monitor"]).monitor is True


def test_missing_gradio_is_reported_before_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with (
        pytest.raises(SettingsError, match=r"python -m posttrain.install --extras monitor"),
        serve_monitor_page(tmp_path, True),
    ):
        raise AssertionError("the run began")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("gradio") is None, reason="needs posttrain[monitor]")
def test_the_page_lives_as_long_as_the_run(tmp_path, capfd):
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    errors = ""
    with serve_monitor_page(tmp_path / "out", True):
        deadline = time.monotonic() + 90
        while not (link := re.search(r"http://127\.0\.0\.1:\d+", errors)):
            assert time.monotonic() < deadline
            time.sleep(0.2)
            errors += capfd.readouterr().err
        with opener.open(link[0], timeout=10) as answer:
            assert answer.status == 200
    with pytest.raises(urllib.error.URLError):
        opener.open(link[0], timeout=5)
