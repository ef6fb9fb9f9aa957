"""Single files that are replaced, created once, appended to or copied: readers always see complete content."""

import os
import threading

import pytest

from rl_core.errors import CheckpointError
from rl_core.storage.append_log import AppendLog
from rl_core.storage.atomic_files import (
    copy_tree,
    create_file_once,
    make_folder,
    parse_temporary_owner,
    replace_file,
    write_text_atomic,
)


def test_threads_that_write_one_file_leave_one_of_their_texts(tmp_path):
    """Check a former bug: threads shared a temporary, so one renamed the half-written file of another."""
    errors, path = [], tmp_path / "run.json"

    def write(letter):
        try:
            for _ in range(40):
                write_text_atomic(path, letter * 20_000)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(letter,)) for letter in "abcd"]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        text = path.read_text() if path.exists() else "a" * 20_000
        assert len(text) == 20_000 and len(set(text)) == 1
    assert errors == [] and os.listdir(tmp_path) == ["run.json"]


def test_an_error_in_the_block_keeps_the_old_text(tmp_path):
    path = tmp_path / "report.html"
    write_text_atomic(path, "old")
    with pytest.raises(KeyError), replace_file(path) as file:
        file.write("new")
        raise KeyError("mine")
    missing = tmp_path / "missing"
    with pytest.raises(FileNotFoundError, match="missing"), replace_file(path) as file:
        file.write(missing.read_text())  # errors about other files keep their names
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["report.html"]


def test_devices_and_pipes_are_not_replaced(tmp_path):
    """Refuse them, because `--out /dev/stdout` as root would otherwise replace the device by a file."""
    os.mkfifo(tmp_path / "pipe")
    with (
        pytest.raises(CheckpointError, match="pipe: is not a regular file"),
        replace_file(tmp_path / "pipe"),
    ):
        raise AssertionError("not opened")
    with pytest.raises(CheckpointError, match="is not a regular file"):
        write_text_atomic(os.devnull, "x")


def test_text_is_written_unchanged(tmp_path):
    with replace_file(tmp_path / "rows.csv", errors="replace") as file:
        file.write("é\r\n\ud800\n")
    assert (tmp_path / "rows.csv").read_bytes() == "é\r\n?\n".encode()


def test_only_the_first_caller_creates_the_file(tmp_path):
    created = []

    def create(text):
        created.append(create_file_once(tmp_path / "password", text, mode=0o600))

    threads = [threading.Thread(target=create, args=(text,)) for text in ("one", "two", "six")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(created) == [False, False, True] and os.listdir(tmp_path) == ["password"]
    assert (tmp_path / "password").read_text() in ("one", "two", "six")
    assert (tmp_path / "password").stat().st_mode & 0o777 == 0o600


def test_appending_cutting_and_copying(tmp_path):
    make_folder(tmp_path / "a" / "b")
    path = tmp_path / "a" / "b" / "lines"
    AppendLog(path).append_lines(b"one\n")
    AppendLog(path, synced=True).append_lines(b"two\n")
    os.truncate(path, 6)
    AppendLog(path).append_lines(b"three\n")
    assert path.read_bytes() == b"one\ntw\nthree\n"
    (tmp_path / "out" / "b").mkdir(parents=True)
    (tmp_path / "out" / "kept").write_text("kept")
    (tmp_path / "out" / "b" / "lines").symlink_to(tmp_path / "elsewhere")
    copy_tree(tmp_path / "a", tmp_path / "out")
    assert (tmp_path / "out" / "b" / "lines").read_bytes() == b"one\ntw\nthree\n" and not (
        tmp_path / "elsewhere"
    ).exists()
    assert (tmp_path / "out" / "kept").read_text() == "kept"


def test_a_folder_that_cannot_be_created(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file: cannot be made: File exists; remove it"):
        make_folder(tmp_path / "file" / "inner")


@pytest.mark.parametrize(
    ("name", "owner"),
    [
        (".tmp-run.json@node-12.example.org-77.3", ("node-12.example.org", 77)),
        (".tmp-a@b@c-5.0", ("c", 5)),
        (".tmp-model-v1@h-8.1-journal", ("h", 8)),
        (".tmp-checkpoint-00000003-4711", (None, 4711)),  # of older versions
        (".tmp-", None),
        ("run.json", None),
        (".tmpfile-3", None),
    ],
)
def test_the_name_of_a_temporary_says_whose_it_is(name, owner):
    assert parse_temporary_owner(name) == owner
