"""Access to the Prefect servers that are started here: a password, own origins, loopback hosts.

`python -m flows.runtime.prefect_access server start ...` is Prefect's command with the check of hosts and origins in
front of the server, which Prefect has not; `create_app` is the same for the embedded server of a run.
"""

from __future__ import annotations

import base64
import os
import secrets
import sys
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from flows.runtime.quick_imports import freeze_imports, without_collection
from rl_core.errors import BackendError
from rl_core.storage.own_files import own_file
from rl_core.storage.single_files import create_once, make_folder
from tasks.shipped import CHECKOUT

__all__ = [
    "CLIENT", "ORIGINS", "SERVER", "OnlyFromHere", "auth_file", "basic", "create_app", "loopback_origins", "main",
    "new_password", "own_path", "password", "server_environment",
]  # fmt: skip

SERVER, CLIENT = "PREFECT_SERVER_API_AUTH_STRING", "PREFECT_API_AUTH_STRING"  # Prefect's variables
ORIGINS = "PREFECT_SERVER_CORS_ALLOWED_ORIGINS"
_LOOPBACK = ("127.0.0.1", "localhost", "::1")

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


def auth_file(output: Path) -> Path:
    """File of the password of an output folder's Prefect servers; readable by its owner alone."""
    return output / "prefect" / "password"


def new_password() -> str:
    """A new password in the form that Prefect takes, user:secret."""
    return f"posttrain:{secrets.token_urlsafe(24)}"


def password(output: Path) -> str:
    """Password of the output folder's Prefect servers: the user's own (PREFECT_SERVER_API_AUTH_STRING), else one kept
    in `auth_file`, made when it is first asked for.

    Raises: BackendError where the file is another user's.
    """
    if given := os.environ.get(SERVER):
        return given
    path = auth_file(output)
    make_folder(path.parent)
    try:
        if not (found := _read(path)):
            path.unlink(missing_ok=True)  # an empty one, which a crash of an older version left: no password at all
            create_once(path, new_password() + "\n", mode=0o600)
            found = _read(path)
        return found
    except PermissionError:
        raise BackendError(
            f"{path}: cannot be read: the servers were started by somebody else; ask for its content and set "
            f"{CLIENT} and PREFECT_API_URL, or use an output folder of your own"
        ) from None


def _read(path: Path) -> str:
    try:
        with open(path, opener=own_file) as file:
            return file.read().strip()
    except FileNotFoundError:
        return ""


def basic(auth: str) -> dict[str, str]:
    """Header of requests with a password; {} without one."""
    return {"Authorization": "Basic " + base64.b64encode(auth.encode()).decode()} if auth else {}


def loopback_origins(port: int) -> str:
    """Origins of a page served on this port, with commas between."""
    return ",".join(f"http://{name}:{port}" for name in ("127.0.0.1", "localhost", "[::1]"))


def server_environment(output: Path, port: int) -> dict[str, str]:
    """Variables of a Prefect server of the output folder: its password, its origins, the place of this module."""
    return {SERVER: password(output), ORIGINS: loopback_origins(port), "PYTHONPATH": own_path(os.environ)}


def own_path(environment: Mapping[str, str]) -> str:
    """PYTHONPATH with the checkout before it, where this project is imported from one."""
    path = [str(CHECKOUT or ""), *environment.get("PYTHONPATH", "").split(os.pathsep)]
    return os.pathsep.join(dict.fromkeys(filter(None, path)))


class OnlyFromHere:
    """ASGI middleware that answers 403 to requests under another name than loopback, and to those of other pages.

    Another name in `Host` is DNS rebinding; an `Origin` that is not this server's is another page of the browser,
    one of another local server included. Programs send no `Origin`.
    """

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] not in ("http", "websocket") or _is_from_here(scope["headers"]):
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1008})
        else:
            head = [(b"content-type", b"text/plain"), (b"x-content-type-options", b"nosniff")]
            await send({"type": "http.response.start", "status": 403, "headers": head})
            await send({"type": "http.response.body", "body": b"refused: not from this machine's own page\n"})


def _is_from_here(headers: list[tuple[bytes, bytes]]) -> bool:
    hosts = [value.decode("latin-1") for name, value in headers if name == b"host"]
    origins = [value.decode("latin-1") for name, value in headers if name == b"origin"]
    if len(hosts) != 1:
        return False
    port = _loopback_port(f"http://{hosts[0]}")
    return port is not None and all(_loopback_port(origin) == port for origin in origins)


def _loopback_port(url: str) -> int | None:
    """Port of an http address on loopback; None for any other text."""
    try:
        parts = urlsplit(url)
        is_here = parts.scheme == "http" and parts.hostname in _LOOPBACK and "@" not in parts.netloc
        return (parts.port or 80) if is_here and not parts.path else None
    except ValueError:
        return None


def create_app() -> OnlyFromHere:
    """Prefect's server as its embedded server makes it, behind the check."""
    with without_collection(of_command=True):
        from prefect.server.api.server import create_app as prefect_app

        app = prefect_app()
        freeze_imports()
    return OnlyFromHere(app)


def main() -> None:
    """Prefect's command line, with every server that it runs behind the check."""
    import uvicorn
    from prefect.cli import app

    run = uvicorn.run

    def checked(app: Any, **options: Any) -> None:
        run(OnlyFromHere(app), **options)

    uvicorn.run = checked
    sys.argv[0] = "prefect"
    app()


if __name__ == "__main__":
    main()
