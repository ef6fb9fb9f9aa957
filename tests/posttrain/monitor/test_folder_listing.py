"""Listings of folders: what is kept, and what is seen at once."""

import os
import shutil

from posttrain.monitor import reader
from posttrain.monitor.reader import FolderListingCache


def names(listing, path):
    return [found.name for found in listing.list_subfolders(path)]


def test_a_listing_is_kept_until_an_entry_comes_or_goes(tmp_path, monkeypatch):
    for name in ("b", "a", ".hidden"):
        (tmp_path / name).mkdir()
    (tmp_path / "file").write_text("")
    os.utime(tmp_path, (1000, 1000))  # long ago
    listing, looks = FolderListingCache(), []
    scan = os.scandir
    monkeypatch.setattr(reader.os, "scandir", lambda path: looks.append(path) or scan(path))
    assert names(listing, tmp_path) == names(listing, tmp_path) == ["a", "b"] and len(looks) == 1
    (tmp_path / "c").mkdir()
    assert names(listing, tmp_path) == ["a", "b", "c"] and len(looks) == 2
    (tmp_path / "a").rmdir()
    assert names(listing, tmp_path) == ["b", "c"]


def test_a_folder_that_has_just_changed_is_listed_again(tmp_path):
    listing = FolderListingCache()
    assert names(listing, tmp_path) == []
    at = os.stat(tmp_path).st_mtime_ns
    (tmp_path / "a").mkdir()
    os.utime(tmp_path, ns=(at, at))  # the clock of the file system has not moved on
    assert names(listing, tmp_path) == ["a"]


def test_a_folder_that_is_gone_has_none(tmp_path):
    listing, folder = FolderListingCache(), tmp_path / "out"
    (folder / "a").mkdir(parents=True)
    os.utime(folder, (1000, 1000))
    assert names(listing, folder) == ["a"]
    shutil.rmtree(folder)
    assert names(listing, folder) == []


def test_a_link_to_nowhere_hides_no_other_folder(tmp_path):
    (tmp_path / "a").mkdir()
    for name, target in (("itself", "itself"), ("nothing", "none"), ("b", "a")):
        (tmp_path / name).symlink_to(target)
    assert names(FolderListingCache(), tmp_path) == ["a", "b"]
