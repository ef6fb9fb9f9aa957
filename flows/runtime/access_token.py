"""The token of a local server's folder."""

from __future__ import annotations

import secrets
from pathlib import Path

from rl_core.errors import BackendError
from rl_core.storage.own_files import own_file
from rl_core.storage.single_files import create_once, make_folder

__all__ = ["token_of"]


def token_of(folder: Path) -> str:
    """The token of a server's folder, made when it is first asked for; readable by its owner alone.

    Raises: BackendError where the file is another user's.
    """
    path = folder / "token"
    make_folder(folder)
    create_once(path, f"{secrets.token_urlsafe(32)}\n", mode=0o600)
    try:
        with open(path, opener=own_file) as file:
            return file.read().strip()
    except PermissionError:
        raise BackendError(f"{path}: cannot be read: the server was started by somebody else") from None
