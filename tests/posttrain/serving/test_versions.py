"""Names of models, versions that appear while the server runs, and `serve` as one of the servers of `posttrain up`."""

import argparse
import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.serving import make_folder_of_model, running_server

from posttrain.cli.main import build_parser
from posttrain.cli.serve import resolve_serving
from posttrain.cli.up import _resolve_served_pipeline
from posttrain.operations.connection import format_links
from posttrain.operations.database import DatabaseAddresses
from posttrain.operations.managed_service import ManagedService
from posttrain.operations.processes import ProcessId
from posttrain.operations.services import build_service_specs
from posttrain.operations.state import ServerOptions, SupervisorState
from posttrain.serving.chat_routes import _filter_current_version
from posttrain.serving.served_model import ModelSource, NoChampion
from posttrain.serving.server_process import ModelWatcher
from posttrain.web.tokens import load_or_create_token
from rl_core.errors import SettingsError
from rl_core.settings import ModelSettings
from tasks.tracking import ModelVersion


class FakeRegistry:
    """Registry behind a model name."""

    def __init__(self, monkeypatch):
        self.versions, self.newest = {}, 0
        monkeypatch.setattr(ModelSource, "find_version", lambda source: self.find_newest())
        monkeypatch.setattr(
            ModelSource, "resolve_folder", lambda source, version: self.versions[version.version]
        )

    def find_newest(self):
        if not self.newest:
            raise NoChampion("nothing is promoted yet")
        return ModelVersion("demo", self.newest, None, None)


def test_new_champion_is_served_and_first_one_awaited(tmp_path, model_folder, monkeypatch):
    registry = FakeRegistry(monkeypatch)
    with running_server(tmp_path, model_folder, begins=False) as server:
        source = ModelSource("models:/demo@champion", tmp_path)
        watcher = ModelWatcher(server.server, source, server.settings, ModelSettings(device="cpu"))
        assert not watcher.check_for_model()
        refused = server.client.post(
            "/v1/chat/completions", json={"model": "small", "messages": []}
        )
        assert (
            refused.status_code == 503
            and "nothing is promoted yet" in refused.json()["error"]["message"]
        )
        registry.versions[1], registry.newest = model_folder, 1
        assert watcher.check_for_model() and not watcher.check_for_model()
        assert server.chat(max_tokens=3)["policy_version"] == 1
        registry.versions[2], registry.newest = make_folder_of_model(tmp_path / "second", 1), 2
        assert watcher.check_for_model()
        assert server.chat(max_tokens=3)["policy_version"] == 2
        other = make_folder_of_model(
            tmp_path / "other", texts=["quite another alphabet of words"] * 40
        )
        registry.versions[3], registry.newest = other, 3
        assert not watcher.check_for_model() and not watcher.check_for_model()
        assert server.chat(max_tokens=3)["policy_version"] == 2


def parse_arguments(*arguments) -> argparse.Namespace:
    return build_parser().parse_args(["serve", *map(str, arguments)])


def test_what_a_command_serves(tmp_path, model_folder, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = resolve_serving(
        parse_arguments(
            "demo", "--set", "serving.slots=3", "--port", 9001, "--output", tmp_path / "out"
        )
    )
    assert (config.name, config.source.reference) == ("demo", "models:/demo@champion")
    assert (config.settings.slots, config.settings.port, config.environment.name) == (
        3,
        9001,
        "pixel_grid",
    )
    assert (
        config.folder == tmp_path / "out" / "serving"
        and config.base_url == "http://127.0.0.1:9001/v1"
    )
    folder_config = resolve_serving(
        parse_arguments(model_folder, "--set", "model.dtype=bfloat16", "--name", "mine")
    )
    assert (
        folder_config.name,
        folder_config.model.dtype,
        folder_config.source.resolve_folder(None),
    ) == (
        "mine",
        "bfloat16",
        Path(model_folder),
    )
    stage = tmp_path / "0123"
    stage.mkdir()
    (stage / "model").symlink_to(model_folder)
    assert resolve_serving(parse_arguments(stage)).source.resolve_folder(None) == stage / "model"
    assert resolve_serving(parse_arguments("models:/my name/3")).name == "my name"
    assert resolve_serving(parse_arguments("Qwen/Qwen3-0.6B")).source.reference == "Qwen/Qwen3-0.6B"
    for bad_arguments in (
        ("nowhere",),
        ("/no/such/folder",),
        (model_folder, "--set", "serving.slots=0"),
        (model_folder, "--set", "serving.slot=1"),
        (model_folder, "--set", "stages.policy.lr=1"),
        (model_folder, "--set", "serving.host=0.0.0.0"),
    ):
        with pytest.raises((SettingsError, ValueError)):
            resolve_serving(parse_arguments(*bad_arguments))


def test_token_is_created_once_and_private(tmp_path):
    token = load_or_create_token(tmp_path / "serving")
    assert load_or_create_token(tmp_path / "serving") == token and len(token) > 30
    assert (tmp_path / "serving" / "token").stat().st_mode & 0o077 == 0


def test_up_serves_a_pipeline_that_says_so(tmp_path):
    config = tmp_path / "mine.yaml"
    demo = (Path(__file__).parents[3] / "configs" / "demo.yaml").read_text()
    config.write_text(demo)
    arguments = build_parser().parse_args(["up", "--serve", str(config)])
    with pytest.raises(SettingsError, match=re.escape("serving: {}")):
        _resolve_served_pipeline(arguments)
    config.write_text(demo + "\nserving: {port: 9002}\n")
    assert _resolve_served_pipeline(arguments) == {
        "serve": str(config),
        "serve_port": 9002,
        "learn": 0,
    }
    config.write_text(demo + "\nserving: {port: 9002}\nonline: {}\n")
    assert _resolve_served_pipeline(arguments)["learn"] == 1
    specs = build_service_specs(
        tmp_path, ServerOptions(serve=str(config), serve_port=9002), DatabaseAddresses()
    )
    assert [spec.name for spec in specs] == ["mlflow", "prefect", "worker", "serve"]
    assert (
        specs[-1].port == 9002
        and specs[-1].required_service == "mlflow"
        and "--wait" in specs[-1].command
    )
    state = SupervisorState(
        ProcessId.from_pid(os.getpid()),
        ServerOptions(),
        services=[ManagedService(specs[-1], tmp_path / "log").state],
    )
    assert format_links(state, tmp_path).splitlines()[0] == (
        f"serve    http://127.0.0.1:9002/v1    (API key in {tmp_path / 'serving' / 'token'})"
    )
    assert "serve" not in [
        spec.name for spec in build_service_specs(tmp_path, ServerOptions(), DatabaseAddresses())
    ]


def test_vote_counts_samples_of_current_version():
    """After a rollback the current version is a smaller number than that of the first samples."""
    requests = [SimpleNamespace(policy_version=version) for version in (16, 16, 8, 8, 8)]
    assert _filter_current_version(requests) == requests[2:]
    rising = [SimpleNamespace(policy_version=version) for version in (8, 16)]
    assert _filter_current_version(rising) == rising[1:]
