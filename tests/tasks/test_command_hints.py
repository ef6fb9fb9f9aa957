"""Commands in messages: they work in another shell as they are."""

from pathlib import Path

import pytest

from tasks.command_hints import format_output_option, format_posttrain_command


@pytest.mark.parametrize(
    ("output", "command"),
    [
        ("outputs", "posttrain store sync"),
        ("./outputs/", "posttrain store sync"),
        ("elsewhere", "posttrain store sync --output elsewhere"),
        ("my runs", "posttrain store sync --output 'my runs'"),
        ("outputs/demo", "posttrain store sync --output outputs/demo"),
    ],
)
def test_the_folder_is_named_unless_it_is_the_default(tmp_path, monkeypatch, output, command):
    monkeypatch.chdir(tmp_path)
    assert format_posttrain_command("store sync", Path(output)) == command


def test_the_default_folder_of_another_place_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert (
        format_output_option(tmp_path / "outputs") == ""
        and format_output_option(tmp_path / "a/outputs") != ""
    )
