"""Routes of the files of saved weights: signed addresses, which work without an API key for a while."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from flows.service.http.callers import Server, server_of
from flows.service.http.checkpoint_routes import ONE_CHECKPOINT, own_checkpoint
from flows.service.http.refusals import Refused
from flows.service.http.session_routes import iso
from flows.service.http.signed_files import files_within, tar_of
from flows.service.wire.tinker_paths import parse_path

__all__ = ["FILE_ROUTES"]

ARCHIVE = "archive.tar"  # in place of a file's name: all of them


def _signed(request: Request, server: Server, subject: str, expires: int) -> str:
    signature = server.signer.sign(subject, expires)
    return f"{str(request.base_url).rstrip('/')}/api/v1/files/{expires}/{signature}/{subject}"


async def _urls(request: Request) -> Response:
    """An address for each file of exported weights."""
    server, caller, found = await own_checkpoint(request)
    if found.kind != "external_weights":
        raise Refused(422, f"{found.path} is for this service; save_weights_external makes files for other programs")
    expires = math.ceil(server.store.now() + server.settings.server.url_seconds)
    place = found.path.removeprefix("tinker://")
    names = await asyncio.to_thread(files_within, server.folder / found.folder)
    urls = {name: _signed(request, server, f"{place}/{name}", expires) for name in names}
    await server.note(caller, "checkpoint_read", found.path)
    return JSONResponse({"urls": urls, "expires": iso(expires)})


async def _archive(request: Request) -> Response:
    """One address of all files of saved weights, as a tar; clients before 0.36 ask for it."""
    server, caller, found = await own_checkpoint(request)
    expires = math.ceil(server.store.now() + server.settings.server.url_seconds)
    subject = f"{found.path.removeprefix('tinker://')}/{ARCHIVE}"
    await server.note(caller, "checkpoint_read", found.path)
    return JSONResponse({"url": _signed(request, server, subject, expires), "expires": iso(expires)})


async def _file(request: Request) -> Response:
    server, parts = server_of(request), request.path_params
    subject = parts["subject"]
    if not server.signer.is_valid(subject, parts["expires"], parts["signature"], server.store.now()):
        raise Refused(403, "the address is not signed by this service, or has expired; ask for a new one")
    model_id, kind, name, file = subject.split("/", 3)
    path = parse_path(f"tinker://{model_id}/{kind}/{name}")
    found = await server.ask(server.store.checkpoint, str(path))
    if found is None:
        raise Refused(404, f"there are no saved weights {path}")
    folder: Path = server.folder / found.folder
    names = await asyncio.to_thread(files_within, folder)
    if file == ARCHIVE:
        return StreamingResponse(tar_of(folder, names), media_type="application/x-tar")
    if file not in names:
        raise Refused(404, f"{path} has no file {file[:200]!r}")
    return FileResponse(folder / file)


FILE_ROUTES = [
    Route(f"{ONE_CHECKPOINT}/external_weights_urls", _urls, methods=["GET"]),
    Route(f"{ONE_CHECKPOINT}/archive", _archive, methods=["GET"]),
    Route("/files/{expires:int}/{signature}/{subject:path}", _file, methods=["GET"]),
]
