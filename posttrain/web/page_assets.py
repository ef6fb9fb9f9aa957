"""Static files of web pages: JavaScript, CSS and HTML beside the modules that serve them."""

from __future__ import annotations

import functools
import importlib.resources


@functools.cache
def load_page_asset(package: str, name: str) -> str:
    """Load a text file of a package, once per process."""
    return importlib.resources.files(package).joinpath(name).read_text(encoding="utf-8")
