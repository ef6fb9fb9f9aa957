"""Downloads of saved weights: signed URLs, file lists, tar archives."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from rl_core.storage.atomic_files import create_file_once, make_folder, open_owned_file

CHUNK_BYTES = 1 << 20  # bytes read at once


class UrlSigner:
    """Signer with a secret in the service's folder, so that URLs stay valid when the server restarts."""

    def __init__(self, folder: Path) -> None:
        path = folder / "signing-secret"
        make_folder(folder)
        create_file_once(path, secrets.token_hex(32) + "\n", mode=0o600)
        with open(path, opener=open_owned_file) as file:
            self._secret = bytes.fromhex(file.read().strip())

    def sign_subject(self, subject: str, expires: int) -> str:
        """Return the signature of a subject that expires at a time, in seconds since 1970."""
        return hmac.new(self._secret, f"{expires}\n{subject}".encode(), hashlib.sha256).hexdigest()

    def is_valid_signature(self, subject: str, expires: int, signature: str, now: float) -> bool:
        """Return whether the signature was made with this secret and has not expired."""
        return now < expires and hmac.compare_digest(self.sign_subject(subject, expires), signature)


def list_regular_files(folder: Path) -> list[str]:
    """List the relative names of the regular files below a folder, without links."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink()]
    return [path.relative_to(folder).as_posix() for path in paths]


def stream_tar_archive(folder: Path, names: Sequence[str]) -> Iterator[bytes]:
    """Yield the files as a tar archive, in chunks; equal files give equal bytes."""
    for name in names:
        with open(folder / name, opener=open_owned_file, mode="rb") as file:
            info = tarfile.TarInfo(name)
            info.size = file.seek(0, 2)
            file.seek(0)
            yield info.tobuf()
            while chunk := file.read(CHUNK_BYTES):
                yield chunk
            yield bytes(-info.size % tarfile.BLOCKSIZE)
    yield bytes(2 * tarfile.BLOCKSIZE)
