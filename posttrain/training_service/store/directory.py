"""Sessions, training runs, samplers and checkpoints; API keys and the audit.

The store keeps only digests of API keys.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import sqlalchemy as sa

import posttrain.training_service.store.tables as tables
from posttrain.training_service.store.database import StoreDatabase, next_counter_value
from posttrain.training_service.store.records import (
    ApiKey,
    AuditEntry,
    CheckpointRecord,
    Page,
    SamplerRecord,
    SessionRecord,
    TrainingRunRecord,
    replace_unstorable,
)
from rl_core.errors import SettingsError

_sessions = tables.sessions
_runs = tables.runs
_samplers = tables.samplers
_checkpoints = tables.checkpoints
_keys, _audit = tables.keys, tables.audit
Record = TypeVar("Record")
DEFAULT_PROJECT = "default"  # project of sessions that name none
KEY_PREFIX = "tml-"  # the SDK refuses other keys
USED_INTERVAL_SECONDS = 60.0  # smallest interval between two updates of a key's last use


def parse_record(kind: type[Record], row: sa.Row[Any]) -> Record:
    """Convert a row to a record with the same field names."""
    names = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    return kind(**{name: row._mapping[name] for name in names})


class ResourceDirectory:
    """Sessions, training runs, samplers and checkpoints. `owner=None` = of all owners."""

    def __init__(self, database: StoreDatabase, clock: Callable[[], float] = time.time) -> None:
        self._database, self._clock = database, clock

    def _find_record(self, kind: type[Record], query: Any) -> Record | None:
        with self._database.read_transaction() as connection:
            row = connection.execute(query).first()
        return None if row is None else parse_record(kind, row)

    def _list_records(
        self, kind: type[Record], query: Any, limit: int, offset: int
    ) -> Page[Record]:
        with self._database.read_transaction() as connection:
            return _fetch_page(connection, kind, query, limit, offset)

    def _execute_change(self, statement: Any) -> bool:
        with self._database.write_transaction() as connection:
            return bool(connection.execute(statement).rowcount)

    def create_session(
        self, session_id: str, owner: str, facts: Mapping[str, Any]
    ) -> SessionRecord:
        """Create a session."""
        now = self._clock()
        record = SessionRecord(
            session_id=session_id, owner=owner, created=now, touched=now, facts=dict(facts)
        )
        with self._database.write_transaction() as connection:
            connection.execute(_sessions.insert().values(dataclasses.asdict(record)))
        return record

    def find_session(self, session_id: str) -> SessionRecord | None:
        """Return a session, or None."""
        return self._find_record(
            SessionRecord, sa.select(_sessions).where(_sessions.c.session_id == session_id)
        )

    def mark_session_active(self, session_id: str) -> bool:
        """Record a heartbeat. Return False if there is no such session or it is finished."""
        is_open = (_sessions.c.session_id == session_id) & _sessions.c.finished.is_(None)
        return self._execute_change(_sessions.update().where(is_open).values(touched=self._clock()))

    def finish_session(self, session_id: str, facts: Mapping[str, Any] | None = None) -> bool:
        """End a session and merge `facts` into its facts. Return False if it was not open."""
        with self._database.write_transaction() as connection:
            is_open = (_sessions.c.session_id == session_id) & _sessions.c.finished.is_(None)
            row = connection.execute(sa.select(_sessions.c.facts).where(is_open)).first()
            if row is None:
                return False
            values = {"finished": self._clock(), "facts": {**row.facts, **(facts or {})}}
            connection.execute(_sessions.update().where(is_open).values(values))
            return True

    def update_session(self, session_id: str, facts: Mapping[str, Any]) -> bool:
        """Merge facts into those of a session. Return False if there is no such session."""
        with self._database.write_transaction() as connection:
            is_session = _sessions.c.session_id == session_id
            row = connection.execute(sa.select(_sessions.c.facts).where(is_session)).first()
            if row is not None:
                connection.execute(
                    _sessions.update().where(is_session).values(facts={**row.facts, **facts})
                )
            return row is not None

    def list_sessions(
        self, owner: str | None = None, limit: int = 100, offset: int = 0
    ) -> Page[SessionRecord]:
        """List sessions, newest first."""
        query = sa.select(_sessions).order_by(_sessions.c.created.desc(), _sessions.c.session_id)
        return self._list_records(
            SessionRecord, _filter_by_owner(query, _sessions, owner), limit, offset
        )

    def find_run(self, model_id: str) -> TrainingRunRecord | None:
        """Return a training run, or None."""
        return self._find_record(
            TrainingRunRecord, sa.select(_runs).where(_runs.c.model_id == model_id)
        )

    def list_runs(
        self,
        owner: str | None = None,
        limit: int = 100,
        offset: int = 0,
        session_id: str | None = None,
        *,
        project: str | None = None,
        with_published: bool = False,
    ) -> Page[TrainingRunRecord]:
        """List training runs, newest first.

        Args:
            project: project of their sessions. Sessions that name none belong to `DEFAULT_PROJECT`.
            with_published: include runs of other owners that have published weights.
        """
        query = sa.select(_runs).order_by(_runs.c.created.desc(), _runs.c.model_id)
        if not with_published:
            query = _filter_by_owner(query, _runs, owner)
        elif owner is not None:
            query = query.where(
                (_runs.c.owner == owner) | self._build_published_condition(_runs.c.model_id)
            )
        if session_id is not None:
            query = query.where(_runs.c.session_id == session_id)
        if project is not None:
            session_project = sa.func.coalesce(
                _sessions.c.facts["project_id"].as_string(), DEFAULT_PROJECT
            )
            query = query.where(
                sa.exists().where(
                    _sessions.c.session_id == _runs.c.session_id, session_project == project
                )
            )
        return self._list_records(TrainingRunRecord, query, limit, offset)

    def is_published(self, model_id: str) -> bool:
        """Return whether some of the run's saved weights are published."""
        with self._database.read_transaction() as connection:
            return bool(
                connection.scalar(sa.select(self._build_published_condition(sa.literal(model_id))))
            )

    def _build_published_condition(self, model_id: Any) -> Any:
        return sa.exists().where(
            _checkpoints.c.model_id == model_id, _checkpoints.c.public, self._is_unexpired()
        )

    def _is_unexpired(self) -> Any:
        return _checkpoints.c.expires.is_(None) | (_checkpoints.c.expires > self._clock())

    def find_sampler(self, sampler_id: str) -> SamplerRecord | None:
        """Return a sampler, or None."""
        return self._find_record(
            SamplerRecord, sa.select(_samplers).where(_samplers.c.sampler_id == sampler_id)
        )

    def list_samplers(
        self,
        owner: str | None = None,
        limit: int = 100,
        offset: int = 0,
        session_id: str | None = None,
        model_id: str | None = None,
    ) -> Page[SamplerRecord]:
        """List samplers, newest first."""
        query = _filter_by_owner(
            sa.select(_samplers).order_by(_samplers.c.created.desc(), _samplers.c.sampler_id),
            _samplers,
            owner,
        )
        if session_id is not None:
            query = query.where(_samplers.c.session_id == session_id)
        if model_id is not None:
            query = query.where(_samplers.c.model_id == model_id)
        return self._list_records(SamplerRecord, query, limit, offset)

    def next_clone_number(self, sampler_id: str) -> int:
        """Return a number, from 1, that no other copy of the sampler's clients received."""
        with self._database.write_transaction() as connection:
            return next_counter_value(connection, f"clones.{sampler_id}"[:64])

    def delete_sampler(self, sampler_id: str) -> bool:
        """Delete a sampler. Return False if there was none."""
        return self._execute_change(_samplers.delete().where(_samplers.c.sampler_id == sampler_id))

    def list_folder_samplers(self, folder: str) -> list[SamplerRecord]:
        """List samplers that read this folder."""
        with self._database.read_transaction() as connection:
            rows = connection.execute(_samplers.select().where(_samplers.c.folder == folder))
            return [parse_record(SamplerRecord, row) for row in rows]

    def move_sampler(self, sampler_id: str, folder: str) -> bool:
        """Change the folder that a sampler reads. Return False if the sampler no longer exists."""
        is_sampler = _samplers.c.sampler_id == sampler_id
        return self._execute_change(_samplers.update().where(is_sampler).values(folder=folder))

    def list_unused_samplers(
        self, before: float, ended_before: float, exclusive_part: str
    ) -> list[SamplerRecord]:
        """List unused samplers that have no path or read private weights.

        A sampler is unused since `before`, or since `ended_before` if its session is finished.
        Args:
            exclusive_part: part of the path of every folder that belongs to a single sampler.
        """
        ended = sa.exists().where(
            _sessions.c.session_id == _samplers.c.session_id, _sessions.c.finished < ended_before
        )
        last_use = _samplers.c.touched
        query = sa.select(_samplers).where(
            _samplers.c.path.is_(None) | _samplers.c.folder.contains(exclusive_part),
            (last_use < before) | (ended & (last_use < ended_before)),
        )
        with self._database.read_transaction() as connection:
            return [parse_record(SamplerRecord, row) for row in connection.execute(query)]

    def find_checkpoint(self, path: str) -> CheckpointRecord | None:
        """Return saved weights; None if there are none or they have expired."""
        query = sa.select(_checkpoints).where(_checkpoints.c.path == path)
        record = self._find_record(CheckpointRecord, query)
        return None if record is None or _has_expired(record, self._clock()) else record

    def list_checkpoints(
        self,
        owner: str | None = None,
        limit: int = 100,
        offset: int = 0,
        model_id: str | None = None,
    ) -> Page[CheckpointRecord]:
        """List saved weights, newest first."""
        query = sa.select(_checkpoints).order_by(_checkpoints.c.created.desc(), _checkpoints.c.path)
        query = _filter_by_owner(query.where(self._is_unexpired()), _checkpoints, owner)
        if model_id is not None:
            query = query.where(_checkpoints.c.model_id == model_id)
        return self._list_records(CheckpointRecord, query, limit, offset)

    def summarize_storage(
        self, owner: str, project: str | None = None
    ) -> list[tuple[str, int, int]]:
        """Return (project, number of saved weights, their bytes) of an owner, by project."""
        session_project = sa.func.coalesce(
            _sessions.c.facts["project_id"].as_string(), DEFAULT_PROJECT
        ).label("project")
        joined = _checkpoints.outerjoin(
            _runs, _runs.c.model_id == _checkpoints.c.model_id
        ).outerjoin(_sessions, _sessions.c.session_id == _runs.c.session_id)
        query = (
            sa.select(session_project, sa.func.count(), sa.func.sum(_checkpoints.c.bytes))
            .select_from(joined)
            .where(_checkpoints.c.owner == owner, self._is_unexpired())
            .group_by(sa.text("1"))
            .order_by(sa.text("1"))
        )
        if project is not None:
            query = query.where(session_project == project)
        with self._database.read_transaction() as connection:
            return [
                (str(name), int(count), int(size or 0))
                for name, count, size in connection.execute(query)
            ]

    def add_checkpoint_copy(self, run: TrainingRunRecord, record: CheckpointRecord) -> None:
        """Add saved weights whose folder exists, and the run that holds them. Existing rows stay unchanged."""
        with self._database.write_transaction() as connection:
            for table, key, row in ((_runs, "model_id", run), (_checkpoints, "path", record)):
                values = dataclasses.asdict(row)
                query = sa.select(table.c[key]).where(table.c[key] == values[key])
                if connection.execute(query).first() is None:
                    connection.execute(table.insert().values(values))

    def update_checkpoint(self, path: str, **values: Any) -> bool:
        """Change `expires`, `public`, `version`, `registration` or `facts`. Return False if there is no such path."""
        assert values.keys() <= {"expires", "public", "version", "registration", "facts"}, (
            values.keys()
        )
        return self._execute_change(
            _checkpoints.update().where(_checkpoints.c.path == path).values(values)
        )

    def delete_checkpoint(self, path: str) -> bool:
        """Let saved weights expire now; the worker removes their folder. Return False if there is no such path."""
        if self.find_checkpoint(path) is None:
            return False
        return self.update_checkpoint(path, expires=0.0)

    def list_expired_checkpoints(self) -> list[CheckpointRecord]:
        """List saved weights whose folder is to be removed."""
        query = sa.select(_checkpoints).where(_checkpoints.c.expires <= self._clock())
        with self._database.read_transaction() as connection:
            return [parse_record(CheckpointRecord, row) for row in connection.execute(query)]

    def drop_checkpoint(self, path: str) -> bool:
        """Delete the record of expired weights whose folder has been removed."""
        is_expired = (_checkpoints.c.path == path) & (_checkpoints.c.expires <= self._clock())
        return self._execute_change(_checkpoints.delete().where(is_expired))

    def find_checkpoint_to_register(self) -> CheckpointRecord | None:
        """Return the oldest saved weights that wait for a version in the registry."""
        query = sa.select(_checkpoints).where(_checkpoints.c.registration == "waiting")
        return self._find_record(CheckpointRecord, query.order_by(_checkpoints.c.created).limit(1))


def _fetch_page(
    connection: sa.Connection, kind: type[Record], query: Any, limit: int, offset: int
) -> Page[Record]:
    count = sa.select(sa.func.count()).select_from(query.order_by(None).subquery())
    total = connection.scalar(count) or 0
    rows = connection.execute(query.limit(limit).offset(offset)).all()
    return Page([parse_record(kind, row) for row in rows], total)


def _filter_by_owner(query: Any, table: sa.Table, owner: str | None) -> Any:
    return query if owner is None else query.where(table.c.owner == owner)


def _has_expired(record: CheckpointRecord, now: float) -> bool:
    return record.expires is not None and record.expires <= now


class AccessControl:
    """API keys and the audit of their owners' actions."""

    def __init__(self, database: StoreDatabase, clock: Callable[[], float] = time.time) -> None:
        self._database, self._clock = database, clock

    def create_key(
        self, name: str, *, requests_per_minute: int | None = None, queue: int | None = None
    ) -> tuple[ApiKey, str]:
        """Create a key; return it with its secret, which is shown only once.

        Raises: SettingsError if the name is taken.
        """
        # The secret has 256 random bits, so its digest cannot be searched and needs no slow hash.
        secret = KEY_PREFIX + secrets.token_urlsafe(32)
        key = ApiKey(
            key_id=f"key-{secrets.token_hex(6)}",
            name=name,
            created=self._clock(),
            requests_per_minute=requests_per_minute,
            queue=queue,
        )
        with self._database.write_transaction() as connection:
            if connection.scalar(sa.select(_keys.c.key_id).where(_keys.c.name == name)) is not None:
                raise SettingsError(
                    f"key '{name}' already exists; revoke it, or choose another name"
                )
            connection.execute(
                _keys.insert().values(**dataclasses.asdict(key), secret_digest=_hash_secret(secret))
            )
        return key, secret

    def find_key(self, secret: str) -> ApiKey | None:
        """Return the key with this secret; None for an unknown or revoked key."""
        query = sa.select(_keys).where(
            _keys.c.secret_digest == _hash_secret(secret), _keys.c.revoked.is_(None)
        )
        with self._database.read_transaction() as connection:
            row = connection.execute(query).first()
        if row is None:
            return None
        key = parse_record(ApiKey, row)
        if self._clock() - (key.used or 0.0) > USED_INTERVAL_SECONDS:
            with self._database.write_transaction() as connection:
                connection.execute(
                    _keys.update().where(_keys.c.key_id == key.key_id).values(used=self._clock())
                )
        return key

    def list_keys(self) -> list[ApiKey]:
        """List all keys, oldest first."""
        with self._database.read_transaction() as connection:
            return [
                parse_record(ApiKey, row)
                for row in connection.execute(sa.select(_keys).order_by(_keys.c.created))
            ]

    def revoke_key(self, name: str) -> bool:
        """Revoke a key by name or id; its name becomes available again. Return False if no such key is in use."""
        with self._database.write_transaction() as connection:
            is_key = ((_keys.c.name == name) | (_keys.c.key_id == name)) & _keys.c.revoked.is_(None)
            row = connection.execute(sa.select(_keys.c.key_id, _keys.c.name).where(is_key)).first()
            if row is None:
                return False
            values = {"revoked": self._clock(), "name": f"{row.name} ({row.key_id})"}
            connection.execute(_keys.update().where(_keys.c.key_id == row.key_id).values(values))
            return True

    def record_audit_entry(self, owner: str, action: str, subject: str, detail: str = "") -> None:
        """Add an entry to the audit."""
        with self._database.write_transaction() as connection:
            connection.execute(
                _audit.insert().values(
                    time=self._clock(),
                    owner=owner,
                    action=action,
                    subject=replace_unstorable(subject),
                    detail=replace_unstorable(detail),
                )
            )

    def list_audit_entries(
        self,
        owner: str | None = None,
        limit: int = 100,
        offset: int = 0,
        *,
        first: float = -math.inf,
        last: float = math.inf,
    ) -> Page[AuditEntry]:
        """List audit entries with `first` <= time < `last`, newest first."""
        query = sa.select(_audit).order_by(_audit.c.place.desc())
        if first > -math.inf or last < math.inf:
            query = query.where(_audit.c.time >= first, _audit.c.time < last)
        if owner is not None:
            query = query.where(_audit.c.owner == owner)
        with self._database.read_transaction() as connection:
            return _fetch_page(connection, AuditEntry, query, limit, offset)


def _hash_secret(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
