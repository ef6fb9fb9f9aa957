"""API keys, of which the store keeps digests alone, and the audit of acts."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import secrets
import time
from collections.abc import Callable

import sqlalchemy as sa

import flows.service.store.tables as tables
from flows.service.store.directory import as_record
from flows.service.store.records import ApiKey, AuditEntry, Page, storable
from flows.service.store.transactions import Database
from rl_core.errors import SettingsError

__all__ = ["Access"]

_keys, _audit = tables.keys, tables.audit
PREFIX = "tml-"  # the SDK refuses other keys
USED_SECONDS = 60.0  # between two notes that a key is in use


class Access:
    """Keys, and what their owners did."""

    def __init__(self, database: Database, clock: Callable[[], float] = time.time) -> None:
        self._database, self._clock = database, clock

    def create_key(
        self, name: str, *, requests_per_minute: int | None = None, queue: int | None = None
    ) -> tuple[ApiKey, str]:
        """A new key and its secret, which is shown once. Raises: SettingsError for a name that is taken."""
        # 256 random bits: a plain digest cannot be searched, so no slow hash is needed
        secret = PREFIX + secrets.token_urlsafe(32)
        key = ApiKey(
            key_id=f"key-{secrets.token_hex(6)}", name=name, created=self._clock(),
            requests_per_minute=requests_per_minute, queue=queue,
        )  # fmt: skip
        with self._database.writing() as connection:
            if connection.scalar(sa.select(_keys.c.key_id).where(_keys.c.name == name)) is not None:
                raise SettingsError(f"key '{name}': there is one of this name; revoke it, or choose another name")
            connection.execute(_keys.insert().values(**dataclasses.asdict(key), secret_digest=_digest(secret)))
        return key, secret

    def key_of(self, secret: str) -> ApiKey | None:
        """The key with this secret; None for an unknown or revoked one."""
        query = sa.select(_keys).where(_keys.c.secret_digest == _digest(secret), _keys.c.revoked.is_(None))
        with self._database.reading() as connection:
            row = connection.execute(query).first()
        if row is None:
            return None
        key = as_record(ApiKey, row)
        if self._clock() - (key.used or 0.0) > USED_SECONDS:
            with self._database.writing() as connection:
                connection.execute(_keys.update().where(_keys.c.key_id == key.key_id).values(used=self._clock()))
        return key

    def keys(self) -> list[ApiKey]:
        """All keys, the oldest first."""
        with self._database.reading() as connection:
            return [as_record(ApiKey, row) for row in connection.execute(sa.select(_keys).order_by(_keys.c.created))]

    def revoke_key(self, name: str) -> bool:
        """Make a key useless, by name or id; its name is free again. False = there is no such key in use."""
        with self._database.writing() as connection:
            chosen = ((_keys.c.name == name) | (_keys.c.key_id == name)) & _keys.c.revoked.is_(None)
            row = connection.execute(sa.select(_keys.c.key_id, _keys.c.name).where(chosen)).first()
            if row is None:
                return False
            values = {"revoked": self._clock(), "name": f"{row.name} ({row.key_id})"}
            connection.execute(_keys.update().where(_keys.c.key_id == row.key_id).values(values))
            return True

    def note(self, owner: str, action: str, subject: str, detail: str = "") -> None:
        """An entry of the audit."""
        with self._database.writing() as connection:
            connection.execute(
                _audit.insert().values(
                    time=self._clock(), owner=owner, action=action, subject=storable(subject), detail=storable(detail)
                )
            )  # fmt: skip

    def audit(
        self,
        owner: str | None = None,
        limit: int = 100,
        offset: int = 0,
        *,
        first: float = -math.inf,
        last: float = math.inf,
    ) -> Page[AuditEntry]:
        """Entries of the audit, the newest first; of the times from `first` on, before `last`."""
        query = sa.select(_audit).order_by(_audit.c.place.desc())
        if first > -math.inf or last < math.inf:
            query = query.where(_audit.c.time >= first, _audit.c.time < last)
        if owner is not None:
            query = query.where(_audit.c.owner == owner)
        with self._database.reading() as connection:
            total = connection.scalar(sa.select(sa.func.count()).select_from(query.order_by(None).subquery())) or 0
            rows = connection.execute(query.limit(limit).offset(offset)).all()
        return Page([as_record(AuditEntry, row) for row in rows], total)


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
