"""Files that ship with the package: configs, deployments, pinned versions, templates of `posttrain init`.

In a checkout they are the folders at its root; in a wheel they are copies in this package (see setup.py).
"""

from __future__ import annotations

from pathlib import Path

__all__ = [
    "CHECKOUT",
    "ONLINE_CONFIG",
    "SERVICE_CONFIG",
    "list_config_names",
    "find_config",
    "shipped",
    "locate_templates",
]

_PACKAGE = Path(__file__).resolve().parent
_PROJECT_ROOT = _PACKAGE.parents[1]
SERVICE_CONFIG = "service"  # the config of `posttrain service`
ONLINE_CONFIG = "online"  # the config of `posttrain online`; all others are pipelines
CHECKOUT: Path | None = (
    _PROJECT_ROOT
    if (_PROJECT_ROOT / "pyproject.toml").is_file() and (_PROJECT_ROOT / "configs").is_dir()
    else None
)


def shipped(name: str) -> Path:
    """Return the path of `configs`, `deployments` or `constraints.txt`."""
    return (CHECKOUT or _PACKAGE) / name


def locate_templates() -> Path:
    """Return the folder of the files that `posttrain init` copies."""
    return _PACKAGE / "templates"


def list_config_names() -> list[str]:
    """List the names of the shipped configs, as `posttrain run` accepts them."""
    return sorted(
        path.stem
        for path in shipped("configs").glob("*.yaml")
        if path.stem not in (SERVICE_CONFIG, ONLINE_CONFIG)
    )


def find_config(path: Path | str) -> Path:
    """Find the file that a user names: their file, else the shipped config of that name; unchanged if there is neither.

    Only a bare name (`demo`, without folder or suffix) refers to a shipped config.
    """
    user_path = Path(path)
    try:
        if user_path.is_file() or user_path.name != str(path) or user_path.suffix:
            return user_path
        shipped_path = shipped("configs") / f"{user_path.name}.yaml"
        return shipped_path if shipped_path.is_file() else user_path
    except OSError:  # the name is too long
        return user_path
