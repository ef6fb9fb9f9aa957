"""Optional dependencies of environments, checked when the environment is constructed."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

from rl_core.errors import SettingsError


def require_package(package: str, environment: str, user: str | None = None) -> None:
    """Raise SettingsError with install instructions if `package` is missing, without importing anything.

    Args:
        environment: names the extra to install.
        user: the part that needs the package, if it is not the environment.
    """
    try:
        is_installed = importlib.util.find_spec(package) is not None
    except ValueError:  # a module built by hand has no spec
        is_installed = True
    if not is_installed:
        extra = environment.replace("_", "-")
        subject = user or f"name: environment '{environment}'"
        raise SettingsError(
            f"{subject} needs the package '{package}', which is not installed; python -m posttrain.install --extras "
            f"{extra}"
        )


def import_optional_package(package: str, environment: str, user: str | None = None) -> ModuleType:
    """Import a package. Raises: SettingsError as `require_package` does, and if the import fails."""
    require_package(package, environment, user)
    try:
        return importlib.import_module(package)
    except ImportError as error:
        subject = user or f"name: environment '{environment}':"
        raise SettingsError(f"{subject} '{package}' cannot be imported: {error}") from error
