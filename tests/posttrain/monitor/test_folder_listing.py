"""Listings of folders: what is cached, and when a folder is listed again."""

import os
import shutil

from posttrain.monitor import reader
from posttrain.monitor.reader import FolderListingCache


def list_names(listing, path):
    return [folder.name for folder in listing.list_subfolders(path)]


def test_listing_is_cached_until_an_entry_is_added_or_removed(tmp_path, monkeypatch):
    for name in ("b", "a", ".hidden"):
        (tmp_path / name).mkdir()
    (tmp_path / "file").write_text("")
    os.utime(tmp_path, (1000, 1000))  # long ago
    listing, scans = FolderListingCache(), []
    scan = os.scandir
    monkeypatch.setattr(reader.os, "scandir", lambda path: scans.append(path) or scan(path))
    assert (
        list_names(listing, tmp_path) == list_names(listing, tmp_path) == ["a", "b"]
        and len(scans) == 1
    )
    (tmp_path / "c").mkdir()
    assert list_names(listing, tmp_path) == ["a", "b", "c"] and len(scans) == 2
    (tmp_path / "a").rmdir()
    assert list_names(listing, tmp_path) == ["b", "c"]


def test_a_folder_that_has_just_changed_is_listed_again(tmp_path):
    listing = FolderListingCache()
    assert list_names(listing, tmp_path) == []
    changed_ns = os.stat(tmp_path).st_mtime_ns
    (tmp_path / "a").mkdir()
    os.utime(tmp_path, ns=(changed_ns, changed_ns))  # the clock of the file system has not advanced
    assert list_names(listing, tmp_path) == ["a"]


def test_deleted_folder_has_no_entries(tmp_path):
    listing, folder = FolderListingCache(), tmp_path / "out"
    (folder / "a").mkdir(parents=True)
    os.utime(folder, (1000, 1000))
    assert list_names(listing, folder) == ["a"]
    shutil.rmtree(folder)
    assert list_names(listing, folder) == []


def test_broken_links_are_skipped(tmp_path):
    (tmp_path / "a").mkdir()
    for name, target in (("itself", "itself"), ("nothing", "none"), ("b", "a")):
        (tmp_path / name).symlink_to(target)
    assert list_names(FolderListingCache(), tmp_path) == ["a", "b"]
