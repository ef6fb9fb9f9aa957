"""API tokens of local servers: one token per folder, sent by clients as `Authorization: Bearer TOKEN`."""

from __future__ import annotations

import hmac
import secrets
from pathlib import Path

from starlette.requests import Request

from rl_core.errors import BackendError
from rl_core.storage.atomic_files import create_file_once, make_folder, open_owned_file


def load_or_create_token(folder: Path) -> str:
    """Load the token of a server's folder. Create it on first use, readable only by its owner.

    Raises: BackendError if the file belongs to another user.
    """
    path = folder / "token"
    make_folder(folder)
    create_file_once(path, f"{secrets.token_urlsafe(32)}\n", mode=0o600)
    try:
        with open(path, opener=open_owned_file) as file:
            return file.read().strip()
    except PermissionError:
        raise BackendError(
            f"{path}: cannot be read: the server was started by another user"
        ) from None


def has_bearer_token(request: Request, token: str) -> bool:
    """Return whether the request carries this token; compared in constant time."""
    scheme, credentials = split_authorization(request)
    return scheme == "bearer" and hmac.compare_digest(credentials.encode(), token.encode())


def split_authorization(request: Request) -> tuple[str, str]:
    """Return the lower-case scheme and the credentials of the Authorization header, "" where absent."""
    scheme, _, credentials = request.headers.get("authorization", "").partition(" ")
    return scheme.lower(), credentials.strip()
