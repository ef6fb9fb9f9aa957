"""Optional dependencies of environments, checked when the environment is constructed."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

from rl_core.errors import SettingsError


def require_package(package: str, environment: str, user: str | None = None) -> None:
    """Raise SettingsError with install instructions if `package` is missing. Nothing is imported.

    `user`: the part that needs it, where that is not the environment; the extra is named as `environment` is.
    """
    try:
        found = importlib.util.find_spec(package) is not None
    except ValueError:  # a module built by hand has no spec
        found = True
    if not found:
        extra = environment.replace("_", "-")
        who = user or f"name: environment '{environment}'"
        raise SettingsError(
            f"{who} needs the package '{package}', which is not installed; pip install 'posttrain[{extra}]'"
        )


def import_optional_package(package: str, environment: str, user: str | None = None) -> ModuleType:
    """The imported package. Raises: SettingsError as `require` does, and if the import fails."""
    require_package(package, environment, user)
    try:
        return importlib.import_module(package)
    except ImportError as error:
        who = user or f"name: environment '{environment}':"
        raise SettingsError(f"{who} '{package}' cannot be imported: {error}") from error
