"""Files of saved weights: signatures of their addresses, lists, archives."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from rl_core.storage.atomic_files import create_file_once, make_folder, open_owned_file

CHUNK_BYTES = 1 << 20  # bytes that are read at once


class UrlSigner:
    """Signatures by a secret of the service's folder, so that addresses outlive the server."""

    def __init__(self, folder: Path) -> None:
        path = folder / "signing-secret"
        make_folder(folder)
        create_file_once(path, secrets.token_hex(32) + "\n", mode=0o600)
        with open(path, opener=open_owned_file) as file:
            self._secret = bytes.fromhex(file.read().strip())

    def sign_subject(self, subject: str, expires: int) -> str:
        """Signature of a subject up to a time, seconds since 1970."""
        return hmac.new(self._secret, f"{expires}\n{subject}".encode(), hashlib.sha256).hexdigest()

    def is_valid_signature(self, subject: str, expires: int, signature: str, now: float) -> bool:
        """True = signed here, and not over."""
        return now < expires and hmac.compare_digest(self.sign_subject(subject, expires), signature)


def list_regular_files(folder: Path) -> list[str]:
    """Relative names of the plain files below a folder; links are left out."""
    found = [path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink()]
    return [path.relative_to(folder).as_posix() for path in found]


def stream_tar_archive(folder: Path, names: Sequence[str]) -> Iterator[bytes]:
    """The files as a tar, piece by piece; equal files give equal bytes."""
    for name in names:
        with open(folder / name, opener=open_owned_file, mode="rb") as file:
            info = tarfile.TarInfo(name)
            info.size = file.seek(0, 2)
            file.seek(0)
            yield info.tobuf()
            while part := file.read(CHUNK_BYTES):
                yield part
            yield bytes(-info.size % tarfile.BLOCKSIZE)
    yield bytes(2 * tarfile.BLOCKSIZE)
