"""Training data of a model, and data added since, with handmade files."""

import json

import pytest

from rl_core.errors import DataError
from rl_core.storage.manifest import digest_file
from tasks.config import build_settings
from tasks.lifecycle.data_lineage import (
    DataChange,
    find_new_data,
    format_record_tags,
    inspect_data_sources,
    parse_record_tags,
)


def build_test_settings(demonstrations=None, preferences=None, **options):
    data = {
        name: str(path)
        for name, path in (("demonstrations", demonstrations), ("preferences", preferences))
        if path
    }
    environment = {"name": "gsm8k", "options": options} if options else {}
    values = {"name": "x", "stages": {"prepare_data": data, "sft": {}}, "environment": environment}
    return build_settings(values, check_files=False)


def format_rows(start, end):
    return "".join(
        json.dumps({"prompt": f"p{n}", "completion": "c"}) + "\n" for n in range(start, end)
    )


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text(format_rows(0, 3))
    return path


def test_the_record_names_digest_size_and_rows_of_every_file(file):
    records = inspect_data_sources(build_test_settings(file))
    assert list(records) == ["demonstrations"]
    result = records["demonstrations"].files["mine.jsonl"]
    assert (result.sha256, result.size, result.rows) == (digest_file(file), file.stat().st_size, 3)
    assert inspect_data_sources(build_test_settings()) == {}


def test_appended_rows_are_counted_and_an_unchanged_file_is_nothing_new(file):
    before = inspect_data_sources(build_test_settings(file))
    assert find_new_data(before, inspect_data_sources(build_test_settings(file))).changes == ()
    with file.open("a") as stream:
        stream.write(format_rows(3, 5))
    new = find_new_data(before, inspect_data_sources(build_test_settings(file)))
    assert new.changes == (DataChange("demonstrations", "mine.jsonl", "appended", 2),)
    assert new.rows == 2 and new.sources == {"demonstrations"}
    assert str(new) == "demonstrations: mine.jsonl: 2 rows appended"


def test_blank_lines_at_the_end_are_nothing_new(file):
    before = inspect_data_sources(build_test_settings(file))
    with file.open("a") as stream:
        stream.write("\n \n")
    assert find_new_data(before, inspect_data_sources(build_test_settings(file))).changes == ()


def test_a_changed_first_row_makes_all_rows_new(file):
    before = inspect_data_sources(build_test_settings(file))
    file.write_text(file.read_text().replace("p0", "q0") + format_rows(3, 4))
    (change,) = find_new_data(before, inspect_data_sources(build_test_settings(file))).changes
    assert change == DataChange("demonstrations", "mine.jsonl", "rewritten", 4)


def test_a_file_under_another_name_is_known_by_its_content(file):
    before = inspect_data_sources(build_test_settings(file))
    other = file.rename(file.with_name("other.jsonl"))
    assert (
        str(find_new_data(before, inspect_data_sources(build_test_settings(other))))
        == "nothing new"
    )
    with other.open("a") as stream:
        stream.write(format_rows(3, 4))
    assert (
        find_new_data(before, inspect_data_sources(build_test_settings(other))).changes[0].kind
        == "appended"
    )


def test_new_and_missing_files_of_a_folder(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    for name, start in (("a", 0), ("b", 10)):
        (folder / f"{name}.jsonl").write_text(format_rows(start, start + 2))
    (folder / "b.jsonl").rename(tmp_path / "b.jsonl")
    before = inspect_data_sources(build_test_settings(folder))
    (tmp_path / "b.jsonl").rename(folder / "b.jsonl")
    # next to the only file so far
    new = find_new_data(before, inspect_data_sources(build_test_settings(folder)))
    assert (
        new.changes == (DataChange("demonstrations", "b.jsonl", "new file", 2),)
        and new.missing_files == ()
    )
    before = inspect_data_sources(build_test_settings(folder))
    (folder / "a.jsonl").unlink()
    (folder / "c.jsonl").write_text(format_rows(20, 25))
    new = find_new_data(before, inspect_data_sources(build_test_settings(folder)))
    assert new.changes == (DataChange("demonstrations", "c.jsonl", "new file", 5),)
    assert new.missing_files == ("demonstrations: a.jsonl",)


def test_each_setting_that_names_a_file_is_a_source(file, tmp_path):
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text("{}\n")
    questions = tmp_path / "questions.jsonl"
    questions.write_text("{}\n{}\n")
    records = inspect_data_sources(build_test_settings(file, pairs, path=str(questions)))
    assert {name: next(iter(record.files.values())).rows for name, record in records.items()} == {
        "demonstrations": 3,
        "preferences": 1,
        "environment": 2,
    }
    without = inspect_data_sources(build_test_settings(file))
    assert find_new_data(without, records).sources == {"preferences", "environment"}


def test_parquet_rows_are_counted(tmp_path):
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "mine.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["a", "b", "c", "d"]}), path)
    assert (
        inspect_data_sources(build_test_settings(path))["demonstrations"].files["mine.parquet"].rows
        == 4
    )


def test_without_a_record_everything_is_new(file):
    assert find_new_data(None, inspect_data_sources(build_test_settings(file))).rows == 3


def test_tags_hold_the_record_however_long_it_is(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    for number in range(80):
        (folder / f"part-{number:04d}.jsonl").write_text(format_rows(number, number + 1))
    records = inspect_data_sources(build_test_settings(folder))
    tags = format_record_tags(records)
    assert tags["data.sources"] == "demonstrations"
    assert len(tags) > 2 and max(map(len, tags.values())) <= 4000
    assert parse_record_tags(tags) == records
    assert (
        parse_record_tags({"data.sources": "none"})
        == {}
        == parse_record_tags(format_record_tags({}))
    )
    assert parse_record_tags({}) is None
    assert parse_record_tags({**tags, "data.demonstrations": "broken"}) is None


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(DataError, match=r"missing\.jsonl: cannot be read"):
        inspect_data_sources(build_test_settings(tmp_path / "missing.jsonl"))
