"""Former path of `posttrain.serving.chat_server`; removed in 0.3."""

from __future__ import annotations

import importlib
import warnings
from typing import Any


def __getattr__(name: str) -> Any:
    """Return the name from its new module, with a warning.

    Raises: AttributeError if the new module does not have it either.
    """
    if name.startswith("__"):
        raise AttributeError(name)
    value = getattr(importlib.import_module("posttrain.serving.chat_server"), name)
    warnings.warn(
        f"flows.serving.chat_server.{name} moved to posttrain.serving.chat_server",
        FutureWarning,
        stacklevel=2,
    )
    return value
