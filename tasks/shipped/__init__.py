"""Files that ship with the package: configs, deployments, pinned versions, templates of `posttrain init`.

In a checkout they are the folders at its root; in a wheel they are copies in this package (see setup.py).
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["CHECKOUT", "ONLINE", "SERVICE", "config_names", "find_config", "shipped", "templates"]

_PACKAGE = Path(__file__).resolve().parent
_ROOT = _PACKAGE.parents[1]
SERVICE = "service"  # the config of `posttrain service`
ONLINE = "online"  # the config of `posttrain online`; all others are pipelines
CHECKOUT: Path | None = _ROOT if (_ROOT / "pyproject.toml").is_file() and (_ROOT / "configs").is_dir() else None


def shipped(name: str) -> Path:
    """Path of `configs`, `deployments` or `constraints.txt`."""
    return (CHECKOUT or _PACKAGE) / name


def templates() -> Path:
    """Folder of the files that `posttrain init` copies."""
    return _PACKAGE / "templates"


def config_names() -> list[str]:
    """Names of the shipped configs, as `posttrain run` takes them."""
    return sorted(path.stem for path in shipped("configs").glob("*.yaml") if path.stem not in (SERVICE, ONLINE))


def find_config(path: Path | str) -> Path:
    """The file that a user names: their own file, else the shipped config of that name; unchanged if there is neither.

    Only a bare name (`demo`, without folder or suffix) stands for a shipped config.
    """
    own = Path(path)
    try:
        if own.is_file() or own.name != str(path) or own.suffix:
            return own
        found = shipped("configs") / f"{own.name}.yaml"
        return found if found.is_file() else own
    except OSError:  # a name that is too long
        return own
