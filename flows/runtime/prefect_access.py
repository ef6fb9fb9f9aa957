"""Access control of the Prefect servers started here: a password, allowed origins, loopback hosts.

`python -m flows.runtime.prefect_access server start ...` is Prefect's command with a check of hosts and origins, which
Prefect lacks, in front of the server. `create_app` does the same for the embedded server of a run.
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

from flows.runtime.import_setup import freeze_imported_objects, pause_garbage_collection
from rl_core.errors import BackendError
from rl_core.storage.atomic_files import create_file_once, make_folder, open_owned_file
from tasks.shipped import CHECKOUT

SERVER_AUTH_VARIABLE = "PREFECT_SERVER_API_AUTH_STRING"
CLIENT_AUTH_VARIABLE = "PREFECT_API_AUTH_STRING"
ORIGINS_VARIABLE = "PREFECT_SERVER_CORS_ALLOWED_ORIGINS"
# Which of Prefect's two user interfaces the address / shows; links such as /runs/flow-run/ID lead to the first one.
NEW_UI_VARIABLE = "PREFECT_SERVER_UI_V2_ENABLED"
# What links to Prefect's pages open: runs by their names. The page at / counts runs and advertises the other interface.
PREFECT_FIRST_PAGE = "/runs"
PROMOTION_VARIABLE = "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT"
_LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


def locate_password_file(output: Path) -> Path:
    """Return the password file of an output folder's Prefect servers; only its owner may read it."""
    return output / "prefect" / "password"


def generate_password() -> str:
    """Generate a password in the form that Prefect expects, user:secret."""
    return f"posttrain:{secrets.token_urlsafe(24)}"


def load_or_create_password(output: Path) -> str:
    """Return the password of the output folder's Prefect servers.

    It is the user's (PREFECT_SERVER_API_AUTH_STRING), else the one in `locate_password_file`, created at the first
    call.
    Raises: BackendError if the file belongs to another user.
    """
    configured = os.environ.get(SERVER_AUTH_VARIABLE)
    if configured:
        return configured
    path = locate_password_file(output)
    make_folder(path.parent)
    try:
        password = _read_password_file(path)
        if not password:
            path.unlink(missing_ok=True)  # older versions could leave an empty file after a crash
            create_file_once(path, generate_password() + "\n", mode=0o600)
            password = _read_password_file(path)
        return password
    except PermissionError:
        raise BackendError(
            f"{path}: cannot be read: another user started the servers; ask for its content and set "
            f"{CLIENT_AUTH_VARIABLE} and PREFECT_API_URL, or use another output folder"
        ) from None


def _read_password_file(path: Path) -> str:
    try:
        with open(path, opener=open_owned_file) as file:
            return file.read().strip()
    except FileNotFoundError:
        return ""


def build_basic_auth_header(auth: str) -> dict[str, str]:
    """Return the header of requests with a password; {} without one."""
    return {"Authorization": "Basic " + base64.b64encode(auth.encode()).decode()} if auth else {}


def format_loopback_origins(port: int) -> str:
    """Return the origins of a page served on this port, separated by commas."""
    return ",".join(f"http://{name}:{port}" for name in ("127.0.0.1", "localhost", "[::1]"))


def build_server_environment(output: Path, port: int) -> dict[str, str]:
    """Return variables of a Prefect server of the output folder: password, origins, location of this module.

    The address / shows the pages to which links and documents refer, unless the user chooses Prefect's new ones. They
    advertise Prefect Cloud until a browser has logged in once.
    """
    return {
        NEW_UI_VARIABLE: os.environ.get(NEW_UI_VARIABLE, "false"),
        PROMOTION_VARIABLE: os.environ.get(PROMOTION_VARIABLE, "false"),
        SERVER_AUTH_VARIABLE: load_or_create_password(output),
        ORIGINS_VARIABLE: format_loopback_origins(port),
        "PYTHONPATH": build_python_path(os.environ),
    }


def build_python_path(environment: Mapping[str, str]) -> str:
    """Return PYTHONPATH with the checkout in front, if this project is imported from one."""
    path = [str(CHECKOUT or ""), *environment.get("PYTHONPATH", "").split(os.pathsep)]
    return os.pathsep.join(dict.fromkeys(filter(None, path)))


class LoopbackOnlyMiddleware:
    """ASGI middleware that answers 403 to requests for another host than loopback, and to those of other pages.

    Another name in `Host` is DNS rebinding; a foreign `Origin` is another page of the browser, possibly one of another
    local server. Programs send no `Origin`.
    """

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        """Forward a request, or refuse it."""
        if scope["type"] not in ("http", "websocket") or _is_same_loopback_origin(scope["headers"]):
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1008})
        else:
            head = [(b"content-type", b"text/plain"), (b"x-content-type-options", b"nosniff")]
            await send({"type": "http.response.start", "status": 403, "headers": head})
            await send(
                {
                    "type": "http.response.body",
                    "body": b"refused: not from this machine's own page\n",
                }
            )


def _is_same_loopback_origin(headers: list[tuple[bytes, bytes]]) -> bool:
    hosts = [value.decode("latin-1") for name, value in headers if name == b"host"]
    origins = [value.decode("latin-1") for name, value in headers if name == b"origin"]
    if len(hosts) != 1:
        return False
    port = _parse_loopback_port(f"http://{hosts[0]}")
    return port is not None and all(_parse_loopback_port(origin) == port for origin in origins)


def _parse_loopback_port(url: str) -> int | None:
    """Return the port of an http address on loopback; None for any other text."""
    try:
        parts = urlsplit(url)
        is_loopback = (
            parts.scheme == "http" and parts.hostname in _LOOPBACK_HOSTS and "@" not in parts.netloc
        )
        return (parts.port or 80) if is_loopback and not parts.path else None
    except ValueError:
        return None


def create_app() -> LoopbackOnlyMiddleware:
    """Create Prefect's embedded server application behind the check."""
    with pause_garbage_collection(is_command=True):
        from prefect.server.api.server import create_app as prefect_app

        app = prefect_app()
        freeze_imported_objects()
    return LoopbackOnlyMiddleware(app)


def main() -> None:
    """Run Prefect's command line with every server behind the check."""
    import uvicorn
    from prefect.cli import app

    run = uvicorn.run

    def run_checked(app: Any, **options: Any) -> None:
        run(LoopbackOnlyMiddleware(app), **options)

    uvicorn.run = run_checked
    sys.argv[0] = "prefect"
    app()


if __name__ == "__main__":
    main()
