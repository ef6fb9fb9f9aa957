"""Stand-ins for optional packages, shared by the tests of adapters."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

FAKES = Path(__file__).parent / "fakes"


@contextmanager
def fakes(package: str) -> Iterator[None]:
    """Replace `package` by the fake one, here and in child processes."""

    def take_out() -> dict[str, ModuleType]:
        return {
            name: sys.modules.pop(name)
            for name in list(sys.modules)
            if name.partition(".")[0] == package
        }

    real = take_out()
    sys.path.insert(0, str(FAKES))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(str(FAKES))
        take_out()
        sys.modules.update(real)


def stand_in(package: str) -> Callable[[], Iterator[None]]:
    """Return a fixture during which `package` is the fake one."""

    @pytest.fixture(name="fake")
    def fixture() -> Iterator[None]:
        with fakes(package):
            yield

    return fixture


def hide_package(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    """Make `package` appear to be missing."""
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == package else real(name, *rest),
    )
