"""Shipped configs by their bare names, and a user's files, which take precedence."""

from pathlib import Path

from tasks.shipped import find_config, list_config_names, shipped


def test_a_bare_name_is_the_shipped_config_unless_there_is_a_file_of_that_name(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert "demo" in list_config_names()
    assert find_config("demo") == shipped("configs") / "demo.yaml" and find_config("demo").is_file()
    Path("demo").write_text("name: mine\n")
    assert find_config("demo") == Path("demo")  # the user's file


def test_other_names_stay_as_they_are(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("demo.yaml", "folder/demo", "no_such_config"):
        assert find_config(name) == Path(name)
    Path("folder").mkdir()
    assert find_config(Path("folder")) == Path("folder")
