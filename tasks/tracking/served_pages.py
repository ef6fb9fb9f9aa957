"""Addresses at which `posttrain ui` serves the pages of an output folder, for links to them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Literal

import psutil

from rl_core.storage.single_files import make_folder, write_text_unsynced

__all__ = ["note_page", "served_page"]

Page = Literal["mlflow", "prefect"]


def note_page(output: Path, page: Page, url: str) -> None:
    """Note that this process serves a page, as long as it lives."""
    path = _place(output, page)
    make_folder(path.parent)
    own = psutil.Process()
    write_text_unsynced(path, json.dumps({"url": url, "pid": own.pid, "created": own.create_time()}))


def served_page(output: Path, page: Page) -> str:
    """Address of a page whose process lives; "" = nobody serves it."""
    try:
        noted = json.loads(_place(output, page).read_text())
        if psutil.Process(int(noted["pid"])).create_time() == noted["created"]:
            return str(noted["url"])
    except (OSError, ValueError, KeyError, TypeError, psutil.Error):
        pass
    return ""


def _place(output: Path, page: Page) -> Path:
    return Path(os.path.abspath(output)) / page / "page.json"
